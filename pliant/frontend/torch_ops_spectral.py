"""aten ops of singular values and eigenvalues (ir/ops_linalg.py)."""

from __future__ import annotations

from typing import Any

import torch

from pliant.frontend.torch_ops_complex import Complex, from_pairs
from pliant.frontend.torch_ops_context import Operand, TorchContext, used
from pliant.frontend.torch_ops_linalg import flat, message, mT, shaped
from pliant.frontend.torch_ops_math import Translate
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import maximum

aten = torch.ops.aten


def svd(
    cx: TorchContext,
    a: Value,
    full_matrices: bool = False,
    compute_uv: bool = True,
    driver: str | None = None,
) -> list[Value | None]:
    lead, error = a.shape[:-2], message("linalg.svd")
    if compute_uv and (used(cx, 0) or used(cx, 2)):
        found = cx.b.emit_multi("svd", flat(cx, a), full=full_matrices, error=error)
        return [shaped(cx, each, lead) for each in found]
    s = cx.b.emit("singular_values", flat(cx, a), error=error)
    none = None if compute_uv else cx.full(0, (0,), a.dtype)
    return [none, shaped(cx, s, lead), none]


def eigh(
    cx: TorchContext, a: Value, UPLO: str = "L", compute_v: bool = True
) -> list[Value | None]:
    lead = a.shape[:-2]
    upper, error = UPLO.upper() == "U", message("linalg.eigh")
    if compute_v and used(cx, 1):
        found = cx.b.emit_multi("eigh", flat(cx, a), upper=upper, error=error)
        return [shaped(cx, each, lead) for each in found]
    values = cx.b.emit("eigvalsh", flat(cx, a), upper=upper, error=error)
    return [shaped(cx, values, lead), None if compute_v else cx.full(0, (0,), a.dtype)]


def pinv(
    cx: TorchContext,
    a: Value,
    atol: Operand | None = None,
    rtol: Operand | None = None,
    hermitian: bool = False,
) -> Value:
    """Singular values up to atol, or rtol times the largest, count as 0."""
    lead, error = a.shape[:-2], message("linalg.svd")
    if hermitian:
        error = message("linalg.eigh")
        s, v = cx.b.emit_multi("eigh", flat(cx, a), upper=False, error=error)
        u, vh = v, mT(cx, v)
    else:
        u, s, vh = cx.b.emit_multi("svd", flat(cx, a), full=False, error=error)
    u, s, vh = (shaped(cx, each, lead) for each in (u, s, vh))
    size, axis = cx.unary("abs", s) if hermitian else s, s.type.rank - 1
    most = cx.reduce("max", size, (axis,), True)
    absolute, relative = _tolerances(cx, a, atol, rtol)
    least = cx.arith("maximum", absolute, cx.mul(relative, most))
    inverse = cx.select(cx.arith("gt", size, least), cx.unary("reciprocal", s), 0.0)
    inverse = cx.cast(inverse, a.dtype)
    scaled = cx.mul(mT(cx, vh), cx.reshape(inverse, (*lead, 1, s.shape[-1])))
    return cx.b.matmul(scaled, mT(cx, u))


def matrix_rank(
    cx: TorchContext,
    a: Value,
    atol: Operand | None = None,
    rtol: Operand | None = None,
    hermitian: bool = False,
) -> Value:
    lead = a.shape[:-2]
    if hermitian:
        error = message("linalg.eigh")
        values = cx.b.emit("eigvalsh", flat(cx, a), upper=False, error=error)
        s = cx.unary("abs", values)
    else:
        s = cx.b.emit("singular_values", flat(cx, a), error=message("linalg.svd"))
    s, axis = shaped(cx, s, lead), len(lead)
    absolute, relative = _tolerances(cx, a, atol, rtol)
    most = cx.reduce("max", s, (axis,), True)
    above = cx.arith("gt", s, cx.arith("maximum", absolute, cx.mul(relative, most)))
    return cx.reduce("sum", cx.cast(above, DType.I64), (axis,))


def _tolerances(
    cx: TorchContext, a: Value, atol: Operand | None, rtol: Operand | None
) -> tuple[Value, Value]:
    """As f64, with a last dim of 1 if they have any; rtol is 0 beside a given atol."""
    eps = 2.0**-23 if a.dtype is DType.F32 else 2.0**-52
    largest = cx.tensor(maximum(*a.shape[-2:]), DType.F64)
    default = cx.mul(cx.tensor(eps, DType.F64), largest)
    given = cx.tensor(0.0, DType.F64) if atol is None else _widened(cx, atol)
    if rtol is not None:
        relative = _widened(cx, rtol)
    elif atol is not None:
        relative = cx.select(cx.arith("gt", given, 0.0), 0.0, default)
    else:
        relative = default
    return cx.cast(given, a.dtype), cx.cast(relative, a.dtype)


def _widened(cx: TorchContext, x: Operand) -> Value:
    wide = cx.tensor(x, DType.F64)
    return cx.reshape(wide, (*wide.shape, 1)) if wide.type.rank else wide


def matrix_rank_above(
    cx: TorchContext, a: Value, tol: Operand, hermitian: bool = False
) -> Value:
    return matrix_rank(cx, a, tol, 0.0, hermitian)


def eig(cx: TorchContext, a: Value) -> list[Complex]:
    if isinstance(a, Complex):
        cx.unsupported("eigenvalues of complex matrices")
    found = cx.b.emit_multi("eig", flat(cx, a), error=message("linalg.eig"))
    return [from_pairs(cx, shaped(cx, each, a.shape[:-2])) for each in found]


def eigvals(cx: TorchContext, a: Value) -> Complex:
    return eig(cx, a)[0]


EIGENVALUES: dict[Any, Translate] = {
    aten.linalg_eig.default: eig,
    aten.linalg_eigvals.default: eigvals,
    aten._linalg_eigvals.default: eigvals,
}

SPECTRAL: dict[Any, Translate] = {
    aten._linalg_svd.default: svd,
    aten._linalg_eigh.default: eigh,
    aten.linalg_pinv.atol_rtol_tensor: pinv,
    aten.linalg_pinv.atol_rtol_float: pinv,
    aten.linalg_matrix_rank.atol_rtol_tensor: matrix_rank,
    aten.linalg_matrix_rank.atol_rtol_float: matrix_rank,
    aten.linalg_matrix_rank.default: matrix_rank_above,
    aten.linalg_matrix_rank.tol_tensor: matrix_rank_above,
}
