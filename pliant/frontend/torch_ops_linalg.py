"""aten ops that factorize matrices and solve with them (ir/ops_linalg.py).

Leading dims are one batch in the IR. An op raises what eager raises: those whose info
the model does not see get their message here, and where torch composes an op of one
with info and a check of it (`_linalg_check_errors`), the first raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_context import TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_pick import diagonal
from pliant.frontend.torch_ops_shape import pad, swap_axes, triangle
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, le, maximum, minimum

aten = torch.ops.aten

_lower, _upper = triangle("le"), triangle("ge")

_SINGULAR = "The solver failed because the input matrix is singular."
_ILL = (
    "The algorithm failed to converge because the input matrix is ill-conditioned, has "
    "too many repeated values or contained non-finite values (error code: {value})."
)
# What eager says, by the name of the function.
MESSAGES = {
    "linalg.cholesky": "The factorization could not be completed because the input is "
    "not positive-definite (the leading minor of order {value} is not "
    "positive-definite).",
    "linalg.inv": "The diagonal element {value} is zero, the inversion could not be "
    "completed because the input matrix is singular.",
    "linalg.solve": _SINGULAR,
    "linalg.lu_factor": "U[{value},{value}] is zero and using it on lu_solve would "
    "result in a division by zero.",
    "linalg.ldl_factor": "D[{value},{value}] is zero and using it on ldl_solve would "
    "result in a division by zero.",
    "linalg.svd": _ILL,
    "linalg.eigh": _ILL,
    "linalg.eig": _ILL,
}


def message(name: str) -> str:
    name = name.removeprefix("torch.").removesuffix("_ex")
    return f"{name}: {MESSAGES.get(name, _SINGULAR)}"


def checked(cx: TorchContext, check: bool, name: str, which: int) -> str:
    """The message of an op whose result of this number is info, if it is to raise."""
    if check:
        return message(name)
    assert cx.node is not None
    for user in cx.node.users:
        for reader in user.users if user.args[1:] == (which,) else ():
            if reader.target is aten._linalg_check_errors.default:
                return message(str(reader.args[1]))
    return ""


# --- batches -----------------------------------------------------------------------


def flat(cx: TorchContext, x: Value, trailing: int = 2) -> Value:
    """Leading dims as one."""
    lead = cx.count(x, range(x.type.rank - trailing))
    return cx.reshape(x, (lead, *x.shape[x.type.rank - trailing :]))


def shaped(cx: TorchContext, x: Value, lead: Sequence[Expr]) -> Value:
    """The batch as leading dims again."""
    return cx.reshape(x, (*lead, *x.shape[1:]))


def mT(cx: TorchContext, x: Value) -> Value:
    return cx.transpose(x, swap_axes(x.type.rank, -1, -2))


def together(
    cx: TorchContext, *parts: tuple[Value, int]
) -> tuple[list[Value], Sequence[Expr]]:
    """Values with so many trailing dims, their leading dims broadcast and made one."""
    shapes = [x.shape[: x.type.rank - trailing] for x, trailing in parts]
    lead = cx.b.broadcast_shapes(*shapes)
    out = []
    for x, trailing in parts:
        own = x.shape[x.type.rank - trailing :]
        out.append(flat(cx, cx.broadcast_to(x, (*lead, *own)), trailing))
    return out, lead


def identity(cx: TorchContext, shape: Sequence[Expr], dtype: DType) -> Value:
    rows, columns = shape
    row = cx.iota((rows, 1), 0, DType.I64)
    column = cx.iota((1, columns), 1, DType.I64)
    return cx.cast(cx.arith("eq", row, column), dtype)


# --- Cholesky ----------------------------------------------------------------------


def _cholesky(cx: TorchContext, x: Value, upper: bool, error: str) -> list[Value]:
    lead = x.shape[:-2]
    found = cx.b.emit_multi("cholesky", flat(cx, x), upper=upper, error=error)
    return [shaped(cx, each, lead) for each in found]


def cholesky_ex(
    cx: TorchContext, x: Value, upper: bool = False, check_errors: bool = False
) -> list[Value]:
    error = checked(cx, check_errors, "linalg.cholesky", 1)
    return _cholesky(cx, x, upper, error)


def cholesky(cx: TorchContext, x: Value, upper: bool = False) -> Value:
    return _cholesky(cx, x, upper, message("linalg.cholesky"))[0]


def cholesky_solve(cx: TorchContext, b: Value, x: Value, upper: bool = False) -> Value:
    (b, x), lead = together(cx, (b, 2), (x, 2))
    for transposed in (True, False) if upper else (False, True):
        b = _triangular(cx, x, b, upper, transposed, False)
    return shaped(cx, b, lead)


def cholesky_inverse(cx: TorchContext, x: Value, upper: bool = False) -> Value:
    return cholesky_solve(cx, identity(cx, x.shape[-2:], x.dtype), x, upper)


def _triangular(
    cx: TorchContext, a: Value, b: Value, upper: bool, transposed: bool, unit: bool
) -> Value:
    return cx.b.emit(
        "triangular_solve", a, b, upper=upper, transposed=transposed, unit=unit
    )


def solve_triangular(
    cx: TorchContext,
    a: Value,
    b: Value,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Value:
    (a, b), lead = together(cx, (a, 2), (b, 2))
    if left:
        return shaped(cx, _triangular(cx, a, b, upper, False, unitriangular), lead)
    # x a = b is a' x' = b'.
    found = _triangular(cx, a, mT(cx, b), upper, True, unitriangular)
    return shaped(cx, mT(cx, found), lead)


def triangular_solve(
    cx: TorchContext,
    b: Value,
    a: Value,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> list[Value]:
    (a, b), lead = together(cx, (a, 2), (b, 2))
    found = _triangular(cx, a, b, upper, transpose, unitriangular)
    return [shaped(cx, found, lead), shaped(cx, a, lead)]


# --- LU ----------------------------------------------------------------------------


def lu_factor(cx: TorchContext, x: Value, error: str = "") -> list[Value]:
    """LU, pivots, info"""
    lead = x.shape[:-2]
    found = cx.b.emit_multi("lu", flat(cx, x), error=error)
    return [shaped(cx, each, lead) for each in found]


def _want_pivots(cx: TorchContext, pivot: bool) -> None:
    if not pivot:
        cx.unsupported("LU without pivots, which eager has on CUDA alone")


def lu_factor_ex(
    cx: TorchContext, x: Value, pivot: bool = True, check_errors: bool = False
) -> list[Value]:
    _want_pivots(cx, pivot)
    return lu_factor(cx, x, checked(cx, check_errors, "linalg.lu_factor", 2))


def lu_factored(cx: TorchContext, x: Value, pivot: bool = True) -> list[Value]:
    _want_pivots(cx, pivot)
    return lu_factor(cx, x, message("linalg.lu_factor"))[:2]


def _permutation(cx: TorchContext, pivots: Value, rows: Expr, dtype: DType) -> Value:
    """P with A = P L U: row order[i] of it has its 1 in column i."""
    order = cx.b.emit("row_order", flat(cx, pivots, 1), rows=rows)
    row = cx.iota((1, rows, 1), 1, DType.I64)
    column = cx.reshape(order, (order.shape[0], 1, rows))
    is_one = cx.cast(cx.arith("eq", row, column), dtype)
    return shaped(cx, is_one, pivots.shape[:-1])


def lu_unpack(
    cx: TorchContext,
    lu: Value,
    pivots: Value,
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> list[Value]:
    m, n = lu.shape[-2:]
    k, rank = cx.simplify(minimum(m, n)), lu.type.rank
    none = cx.full(0, (0,), lu.dtype)
    order = _permutation(cx, pivots, m, lu.dtype) if unpack_pivots else none
    if not unpack_data:
        return [order, none, none]
    below = _lower(cx, cx.slice(lu, rank - 1, 0, k), -1)
    low = cx.add(below, identity(cx, (m, k), lu.dtype))
    return [order, low, _upper(cx, cx.slice(lu, rank - 2, 0, k))]


def lu(cx: TorchContext, x: Value, pivot: bool = True) -> list[Value]:
    _want_pivots(cx, pivot)
    found, pivots, _ = lu_factor(cx, x)
    return lu_unpack(cx, found, pivots)


def lu_solve(
    cx: TorchContext,
    lu: Value,
    pivots: Value,
    b: Value,
    left: bool = True,
    adjoint: bool = False,
) -> Value:
    if not left:
        return mT(cx, lu_solve(cx, lu, pivots, mT(cx, b), adjoint=not adjoint))
    (lu, pivots, b), lead = together(cx, (lu, 2), (pivots, 1), (b, 2))
    found = cx.b.emit("lu_solve", lu, pivots, b, transposed=adjoint)
    return shaped(cx, found, lead)


def solved(
    cx: TorchContext, a: Value, b: Value, left: bool, error: str, rank: int
) -> list[Value]:
    """result, LU, pivots, info; `rank` is that of the result."""
    found, pivots, info = lu_factor(cx, a, error)
    if rank >= a.type.rank and b.type.rank == a.type.rank - 1:
        # With the sizes of vectors, eager would take them for those.
        pairs = zip(b.shape, a.shape[:-1], strict=True)
        apart = sum(((x - y) * (x - y) for x, y in pairs), as_expr(0))
        cx.require(le(1, apart), "solve of a matrix, not of a vector for each matrix")
    if rank == a.type.rank - 1:  # a vector for each matrix
        column = cx.reshape(b, (*b.shape, 1))
        x = lu_solve(cx, found, pivots, column)
        return [cx.reshape(x, x.shape[:-1]), found, pivots, info]
    return [lu_solve(cx, found, pivots, b, left), found, pivots, info]


def solve_with_lu(
    cx: TorchContext, a: Value, b: Value, left: bool = True, check_errors: bool = False
) -> list[Value]:
    error = checked(cx, check_errors, "linalg.solve", 3)
    return solved(cx, a, b, left, error, cx.val[0].dim())


def solve_ex(
    cx: TorchContext, a: Value, b: Value, left: bool = True, check_errors: bool = False
) -> list[Value]:
    error = checked(cx, check_errors, "linalg.solve", 1)
    found = solved(cx, a, b, left, error, cx.val[0].dim())
    return [found[0], found[3]]


def solve(cx: TorchContext, a: Value, b: Value, left: bool = True) -> Value:
    return solved(cx, a, b, left, message("linalg.solve"), cx.val.dim())[0]


def inverted(cx: TorchContext, a: Value, error: str) -> list[Value]:
    found, pivots, info = lu_factor(cx, a, error)
    b = identity(cx, a.shape[-2:], a.dtype)
    return [lu_solve(cx, found, pivots, b), info]


def inv_ex(cx: TorchContext, a: Value, check_errors: bool = False) -> list[Value]:
    return inverted(cx, a, checked(cx, check_errors, "linalg.inv", 1))


def inv(cx: TorchContext, a: Value) -> Value:
    return inverted(cx, a, message("linalg.inv"))[0]


def _parity(cx: TorchContext, pivots: Value, dtype: DType) -> Value:
    """1, or -1 if the pivots exchange rows an odd number of times."""
    axis = pivots.type.rank - 1
    own = cx.add(cx.iota((pivots.shape[-1],), 0, DType.I32), 1)
    moved = cx.cast(cx.arith("ne", pivots, own), DType.I64)
    odd = cx.arith("mod", cx.reduce("sum", moved, (axis,)), 2)
    return cx.cast(cx.sub(1, cx.mul(odd, 2)), dtype)


def det(cx: TorchContext, a: Value) -> list[Value]:
    found, pivots, _ = lu_factor(cx, a)
    product = cx.reduce("prod", diagonal(cx, found, 0, -2, -1), (a.type.rank - 2,))
    return [cx.mul(product, _parity(cx, pivots, a.dtype)), found, pivots]


def slogdet(cx: TorchContext, a: Value) -> list[Value]:
    found, pivots, _ = lu_factor(cx, a)
    along, axis = diagonal(cx, found, 0, -2, -1), a.type.rank - 2
    sign = cx.reduce("prod", cx.unary("sign", along), (axis,))
    sign = cx.mul(sign, _parity(cx, pivots, a.dtype))
    logs = cx.unary("log", cx.unary("abs", along))
    return [sign, cx.reduce("sum", logs, (axis,)), found, pivots]


# --- QR ----------------------------------------------------------------------------


def geqrf(cx: TorchContext, a: Value) -> list[Value]:
    found = cx.b.emit_multi("qr", flat(cx, a))
    return [shaped(cx, each, a.shape[:-2]) for each in found]


def householder_product(cx: TorchContext, a: Value, tau: Value) -> Value:
    q = cx.b.emit("householder", flat(cx, a), flat(cx, tau, 1))
    return shaped(cx, q, a.shape[:-2])


def qr(cx: TorchContext, a: Value, mode: str = "reduced") -> list[Value]:
    m, n = a.shape[-2:]
    k, rank = cx.simplify(minimum(m, n)), a.type.rank
    found, tau = geqrf(cx, a)
    rows = m if mode == "complete" else k
    r = _upper(cx, cx.slice(found, rank - 2, 0, rows))
    if mode == "r":
        return [cx.full(0, (0,), a.dtype), r]
    if mode == "complete":  # as many columns as rows
        more = cx.simplify(maximum(m - n, 0))
        reflectors = cx.slice(pad(cx, found, [0, more]), rank - 1, 0, m)
    else:
        reflectors = cx.slice(found, rank - 1, 0, k)
    return [householder_product(cx, reflectors, tau), r]


def ormqr(
    cx: TorchContext,
    a: Value,
    tau: Value,
    c: Value,
    left: bool = True,
    transpose: bool = False,
) -> Value:
    # As many reflectors as tau has.
    a = cx.slice(a, a.type.rank - 1, 0, tau.shape[-1])
    parts = flat(cx, a), flat(cx, tau, 1), flat(cx, c)
    found = cx.b.emit("householder_multiply", *parts, left=left, transposed=transpose)
    return shaped(cx, found, c.shape[:-2])


# --- others ------------------------------------------------------------------------


def ldl_factor_ex(
    cx: TorchContext, a: Value, hermitian: bool = False, check_errors: bool = False
) -> list[Value]:
    error = checked(cx, check_errors, "linalg.ldl_factor", 2)
    found = cx.b.emit_multi("ldl", flat(cx, a), error=error)
    return [shaped(cx, each, a.shape[:-2]) for each in found]


def ldl_factor(cx: TorchContext, a: Value, hermitian: bool = False) -> list[Value]:
    return ldl_factor_ex(cx, a, hermitian, True)[:2]


def ldl_solve(
    cx: TorchContext, ld: Value, pivots: Value, b: Value, hermitian: bool = False
) -> Value:
    (ld, pivots, b), lead = together(cx, (ld, 2), (pivots, 1), (b, 2))
    return shaped(cx, cx.b.emit("ldl_solve", ld, pivots, b), lead)


def matrix_exp(cx: TorchContext, a: Value) -> Value:
    return shaped(cx, cx.b.emit("matrix_exp", flat(cx, a)), a.shape[:-2])


def check_errors(cx: TorchContext, info: Value, name: str, **_: Any) -> None:
    """The op that gives `info` raises."""


LINALG: dict[Any, Translate] = {
    aten.cholesky.default: cholesky,
    aten.linalg_cholesky.default: cholesky,
    aten.linalg_cholesky_ex.default: cholesky_ex,
    aten.cholesky_solve.default: cholesky_solve,
    aten.cholesky_inverse.default: cholesky_inverse,
    aten.linalg_solve_triangular.default: solve_triangular,
    aten.triangular_solve.default: triangular_solve,
    aten.linalg_lu_factor_ex.default: lu_factor_ex,
    aten.linalg_lu_factor.default: lu_factored,
    aten.linalg_lu.default: lu,
    aten.lu_unpack.default: lu_unpack,
    aten.linalg_lu_solve.default: lu_solve,
    aten._linalg_solve_ex.default: solve_with_lu,
    aten.linalg_solve_ex.default: solve_ex,
    aten.linalg_solve.default: solve,
    aten.linalg_inv_ex.default: inv_ex,
    aten.linalg_inv.default: inv,
    aten.inverse.default: inv,
    aten._linalg_det.default: det,
    aten._linalg_slogdet.default: slogdet,
    aten.geqrf.default: geqrf,
    aten.linalg_householder_product.default: householder_product,
    aten.orgqr.default: householder_product,
    aten.ormqr.default: ormqr,
    aten.linalg_qr.default: qr,
    aten.linalg_ldl_factor_ex.default: ldl_factor_ex,
    aten.linalg_ldl_factor.default: ldl_factor,
    aten.linalg_ldl_solve.default: ldl_solve,
    aten.linalg_matrix_exp.default: matrix_exp,
    aten._linalg_check_errors.default: check_errors,
}
