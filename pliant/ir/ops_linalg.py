"""Factorizations and solutions of matrices: rows, and shape rules.

Such an op is one of those whose kernels are C functions (ir/ops_library.py); the
functions call LAPACK. Operands are batches of matrices, (batch, rows, columns), of f32
or f64. What they mean in NumPy is in interp_linalg.py.

    cholesky (a) {upper, error} -> factor, info
    lu (a) {error} -> lu, pivots, info           pivots count from 1, as LAPACK's do
    row_order (pivots) {rows} -> order           row i of P' A is row order[i] of A
    lu_solve (lu, pivots, b) {transposed} -> x
    triangular_solve (a, b) {upper, transposed, unit} -> x
    qr (a) -> qr, tau                            R, and reflectors below it
    householder (qr, tau) -> q                   as many columns as qr has
    householder_multiply (qr, tau, c) {left, transposed} -> q c, or c q
    svd (a) {full, error} -> u, s, vh
    singular_values (a) {error} -> s
    eigh (a) {upper, error} -> values, vectors   of one triangle
    eigvalsh (a) {upper, error} -> values
    eig (a) {error} -> values, vectors           as pairs: a last axis of 2
    ldl (a) {error} -> ld, pivots, info          of the lower triangle
    ldl_solve (ld, pivots, b) -> x
    matrix_exp (a) -> x

`info` is 0 for a matrix that could be factorized, else the number that LAPACK gives.
If `error` is not empty, it is the message of the MatrixError that is raised then.
"""

from __future__ import annotations

from typing import Any

from pliant.ir import interp_linalg as numpy_ops
from pliant.ir.infer import Attrs, InferContext, Types
from pliant.ir.opdef import AttrSpec, OpDef, Trait
from pliant.ir.types import DType, TensorType
from pliant.sym import Expr, as_expr, le, minimum

MOST = 2**26  # rows or columns: LAPACK has integers of 32 bits, and so for workspace
MOST_SQUARED = 2**14  # where workspace holds a few matrices


def _matrix(cx: InferContext, x: TensorType, most: int = MOST) -> tuple[Expr, ...]:
    cx.require_rank(x, 3, "a batch of matrices")
    if x.dtype not in (DType.F32, DType.F64):
        cx.fail_dtype(f"takes f32 or f64, not {x.dtype}")
    for dim in x.shape[1:]:
        cx.require(le(dim, most), "a matrix is too large for LAPACK")
    return x.shape


def _square(cx: InferContext, x: TensorType, most: int = MOST) -> tuple[Expr, Expr]:
    batch, m, n = _matrix(cx, x, most)
    return batch, cx.require_equal(m, n, "a matrix must be square")


def _integers(cx: InferContext, x: TensorType, *shape: Expr) -> None:
    if x.dtype is not DType.I32:
        cx.fail_dtype(f"pivots are i32, not {x.dtype}")
    cx.require_rank(x, len(shape), "pivots")
    for have, want in zip(x.shape, shape, strict=True):
        cx.require_equal(have, want, "pivots of each matrix")


def _beside(cx: InferContext, x: TensorType, batch: Expr, rows: Expr) -> Expr:
    """The columns of a right-hand side."""
    have, m, n = _matrix(cx, x)
    cx.require_equal(have, batch, "as many right-hand sides as matrices")
    cx.require_equal(m, rows, "a right-hand side has the rows of its matrix")
    return n


def _int32(*shape: Expr) -> TensorType:
    return TensorType(DType.I32, shape)


def _cholesky(cx: InferContext, types: Types, _: Attrs) -> Types:
    batch, _n = _square(cx, types[0])
    return types[0], _int32(batch)


def _lu(cx: InferContext, types: Types, _: Attrs) -> Types:
    batch, m, n = _matrix(cx, types[0])
    return types[0], _int32(batch, minimum(m, n)), _int32(batch)


def _row_order(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    cx.require_rank(types[0], 2, "pivots")
    batch, k = types[0].shape
    _integers(cx, types[0], batch, k)
    rows = attrs.dim("rows")
    cx.require(le(k, rows), "no more pivots than rows")
    return (TensorType(DType.I64, (batch, rows)),)


def _lu_solve(cx: InferContext, types: Types, _: Attrs) -> Types:
    lu, pivots, b = types
    cx.same_dtype((lu, b))
    batch, n = _square(cx, lu)
    _integers(cx, pivots, batch, n)
    _beside(cx, b, batch, n)
    return (b,)


def _ldl_solve(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    return _lu_solve(cx, types, attrs)


def _triangular(cx: InferContext, types: Types, _: Attrs) -> Types:
    a, b = types
    cx.same_dtype(types)
    _beside(cx, b, *_square(cx, a))
    return (b,)


def _qr(cx: InferContext, types: Types, _: Attrs) -> Types:
    batch, m, n = _matrix(cx, types[0])
    return types[0], TensorType(types[0].dtype, (batch, minimum(m, n)))


def _reflectors(cx: InferContext, qr: TensorType, tau: TensorType) -> tuple[Expr, ...]:
    cx.same_dtype((qr, tau))
    batch, m, n = _matrix(cx, qr)
    cx.require_rank(tau, 2, "tau")
    cx.require_equal(batch, tau.shape[0], "as many tau as matrices")
    cx.require(le(tau.shape[1], n), "no more reflectors than columns")
    cx.require(le(n, m), "no more columns than rows")
    return batch, m, n


def _householder(cx: InferContext, types: Types, _: Attrs) -> Types:
    _reflectors(cx, *types)
    return (types[0],)


def _householder_multiply(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    qr, tau, c = types
    cx.same_dtype((qr, c))
    batch, order, k = _reflectors(cx, qr, tau)
    cx.require_equal(k, tau.shape[1], "a reflector for each column")
    have, m, n = _matrix(cx, c)
    cx.require_equal(have, batch, "as many factors as matrices")
    side = m if attrs.flag("left") else n
    cx.require_equal(side, order, "a factor has the size of Q")
    return (c,)


def _svd(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    batch, m, n = _matrix(cx, types[0], MOST_SQUARED)
    k, dtype = minimum(m, n), types[0].dtype
    left, right = (m, n) if attrs.flag("full") else (k, k)
    shapes = (batch, m, left), (batch, k), (batch, right, n)
    return tuple(TensorType(dtype, shape) for shape in shapes)


def _singular_values(cx: InferContext, types: Types, _: Attrs) -> Types:
    batch, m, n = _matrix(cx, types[0], MOST_SQUARED)
    return (TensorType(types[0].dtype, (batch, minimum(m, n))),)


def _eigh(cx: InferContext, types: Types, _: Attrs) -> Types:
    batch, n = _square(cx, types[0], MOST_SQUARED)
    return TensorType(types[0].dtype, (batch, n)), types[0]


def _eigvalsh(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    return _eigh(cx, types, attrs)[:1]


def _eig(cx: InferContext, types: Types, _: Attrs) -> Types:
    batch, n = _square(cx, types[0], MOST_SQUARED)
    dtype, pair = types[0].dtype, as_expr(2)
    values = TensorType(dtype, (batch, n, pair))
    return values, TensorType(dtype, (batch, n, n, pair))


def _ldl(cx: InferContext, types: Types, _: Attrs) -> Types:
    batch, n = _square(cx, types[0])
    return types[0], _int32(batch, n), _int32(batch)


def _matrix_exp(cx: InferContext, types: Types, _: Attrs) -> Types:
    _square(cx, types[0], MOST_SQUARED)
    return types


# ---- rows


def _row(name: str, arity: int, rule: Any, meaning: Any, *attrs: AttrSpec) -> OpDef:
    kinds = frozenset({Trait.REDUCE, Trait.LIBRARY, Trait.PURE})
    return OpDef(name, (arity, arity), attrs, rule, kinds, cost=64, meaning=meaning)


def _flag(name: str) -> AttrSpec:
    return AttrSpec(name, "bool")


_ERROR = AttrSpec("error", "str", "")
_UPPER, _TRANSPOSED = _flag("upper"), _flag("transposed")

LINALG_OPS: tuple[OpDef, ...] = (
    _row("cholesky", 1, _cholesky, numpy_ops.cholesky, _UPPER, _ERROR),
    _row("lu", 1, _lu, numpy_ops.lu, _ERROR),
    _row("row_order", 1, _row_order, numpy_ops.row_order, AttrSpec("rows", "dim")),
    _row("lu_solve", 3, _lu_solve, numpy_ops.lu_solve, _TRANSPOSED),
    _row(
        "triangular_solve",
        2,
        _triangular,
        numpy_ops.triangular_solve,
        *(_UPPER, _TRANSPOSED, _flag("unit")),
    ),
    _row("qr", 1, _qr, numpy_ops.qr),
    _row("householder", 2, _householder, numpy_ops.householder),
    _row(
        "householder_multiply",
        3,
        _householder_multiply,
        numpy_ops.householder_multiply,
        *(_flag("left"), _TRANSPOSED),
    ),
    _row("svd", 1, _svd, numpy_ops.svd, _flag("full"), _ERROR),
    _row("singular_values", 1, _singular_values, numpy_ops.singular_values, _ERROR),
    _row("eigh", 1, _eigh, numpy_ops.eigh, _UPPER, _ERROR),
    _row("eigvalsh", 1, _eigvalsh, numpy_ops.eigvalsh, _UPPER, _ERROR),
    _row("eig", 1, _eig, numpy_ops.eig, _ERROR),
    _row("ldl", 1, _ldl, numpy_ops.ldl, _ERROR),
    _row("ldl_solve", 3, _ldl_solve, numpy_ops.ldl_solve),
    _row("matrix_exp", 1, _matrix_exp, numpy_ops.matrix_exp),
)
