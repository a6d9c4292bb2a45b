"""Linear algebra of complex matrices, by real ones of twice the size.

    a + ib   ->   | a  -b |     for each element: these matrices add and multiply as
                  | b   a |     the complex ones, and of a vector each element is (a, b)

Pivots 2k - 1 and 2k are of row k, so a matrix that is singular makes the real one so.
"""

from __future__ import annotations

from typing import Any

import torch

from pliant.frontend.torch_ops_complex import Complex, Number, as_complex, partwise
from pliant.frontend.torch_ops_context import TorchContext
from pliant.frontend.torch_ops_linalg import (
    checked,
    inverted,
    matrix_exp,
    mT,
    solved,
)
from pliant.frontend.torch_ops_math import Translate
from pliant.ir.graph import Value
from pliant.sym import Expr, as_expr, le

aten = torch.ops.aten

_SINGULAR = "linalg: the complex matrix is singular."


def _pairs(cx: TorchContext, x: Complex, axis: int) -> Value:
    """The parts next to each other along an axis of twice the size."""
    split = [*x.shape[: axis + 1], as_expr(1), *x.shape[axis + 1 :]]
    both = cx.concat([cx.reshape(part, split) for part in (x.re, x.im)], axis + 1)
    dims = (*x.shape[:axis], cx.simplify(x.shape[axis] * 2), *x.shape[axis + 1 :])
    return cx.reshape(both, dims)


def _doubled(cx: TorchContext, a: Complex) -> Value:
    turned = Complex(cx.unary("neg", a.im), a.re)
    columns = [_pairs(cx, each, a.rank - 2) for each in (a, turned)]
    return _pairs(cx, Complex(*columns), a.rank - 1)


def _halves(cx: TorchContext, x: Value, axis: int, n: Expr) -> Complex:
    """What is at even places of an axis, and at odd ones."""
    split = cx.reshape(x, (*x.shape[:axis], n, 2, *x.shape[axis + 1 :]))
    dims = (*x.shape[:axis], n, *x.shape[axis + 1 :])
    parts = [cx.reshape(cx.slice(split, axis + 1, k, 1), dims) for k in range(2)]
    return Complex(*parts)


def _undoubled(cx: TorchContext, found: Value, n: Expr) -> Complex:
    """Of the first column of each small matrix."""
    rank = found.type.rank
    return _halves(cx, _halves(cx, found, rank - 1, n).re, rank - 2, n)


def inv(cx: TorchContext, a: Complex) -> Complex:
    found = inverted(cx, _doubled(cx, a), _SINGULAR)[0]
    return _undoubled(cx, found, a.shape[-1])


def inv_ex(cx: TorchContext, a: Complex, check_errors: bool = False) -> list[Any]:
    error = _SINGULAR if checked(cx, check_errors, "linalg.inv", 1) else ""
    found, info = inverted(cx, _doubled(cx, a), error)
    inverse = _undoubled(cx, found, a.shape[-1])
    return [inverse, cx.arith("floordiv", cx.add(info, 1), 2)]


def exponential(cx: TorchContext, a: Complex) -> Complex:
    return _undoubled(cx, matrix_exp(cx, _doubled(cx, a)), a.shape[-1])


def solve(cx: TorchContext, a: Number, b: Number, left: bool = True) -> Complex:
    matrix, right = (as_complex(cx, x, cx.out_dtype) for x in (a, b))
    if not left:  # x A = b, turned over
        turned = partwise(mT)
        found = _solution(cx, turned(cx, matrix), turned(cx, right), cx.val.dim())
        over: Complex = turned(cx, found)
        return over
    return _solution(cx, matrix, right, cx.val.dim())


def _solution(cx: TorchContext, a: Complex, b: Complex, rank: int) -> Complex:
    """Of vectors if the result has a dim less than the matrices, else of matrices."""
    vectors = rank == a.rank - 1
    if not vectors and b.rank == a.rank - 1:
        # With the sizes of vectors, eager would take them for those.
        pairs = zip(b.shape, a.shape[:-1], strict=True)
        apart = sum(((x - y) * (x - y) for x, y in pairs), as_expr(0))
        cx.require(le(1, apart), "solve of a matrix, not of a vector for each matrix")
        b = Complex(*(cx.reshape(p, (1, *b.shape)) for p in (b.re, b.im)))
    last = 1 if vectors else 2
    right = _pairs(cx, b, b.rank - last)
    found = solved(cx, _doubled(cx, a), right, True, _SINGULAR, rank)[0]
    return _halves(cx, found, found.type.rank - last, a.shape[-1])


COMPLEX_LINALG: dict[Any, Translate] = {
    aten.linalg_inv.default: inv,
    aten.inverse.default: inv,
    aten.linalg_inv_ex.default: inv_ex,
    aten.linalg_solve.default: solve,
    aten.linalg_matrix_exp.default: exponential,
}
