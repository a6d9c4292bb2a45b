"""The kernels of ir/ops_linalg.py: functions of pliant/library/linalg.c."""

from __future__ import annotations

from collections.abc import Callable

from pliant.ir.graph import Op
from pliant.lower.library_kernel import LibraryKernel, Workspace, code, flag
from pliant.sym import Expr, ceildiv, maximum, minimum

BLOCK, REFLECTORS = 32, 65 * 64  # linalg.c


Room = Callable[[Op, Expr, Expr], Expr]  # of an op on matrices of (m, n)


def _work(
    elements: Room, integers: Callable[[Expr, Expr], Expr] | None = None
) -> Callable[[Op], Workspace]:
    """Workspace of so many elements and 32-bit integers for a matrix."""

    def work(op: Op) -> Workspace:
        batch, m, n = op.operands[0].shape
        size = elements(op, m, n) * op.operands[0].dtype.bytes
        if integers is not None:
            size = size + 4 * integers(m, n)
        return Workspace(64 * ceildiv(size, 64), batch)

    return work


def _flags(*names: str) -> Callable[[Op], tuple[Expr, ...]]:
    return lambda op: (code(op), *(flag(op, name) for name in names))


def _square(*flags: str) -> Callable[[Op], tuple[Expr, ...]]:
    """(dtype, flags.., batch, n)"""
    return lambda op: (*_flags(*flags)(op), *op.operands[0].shape[:2])


def _rectangular(*flags: str) -> Callable[[Op], tuple[Expr, ...]]:
    """(dtype, flags.., batch, m, n)"""
    return lambda op: (*_flags(*flags)(op), *op.operands[0].shape)


def _with_right(*flags: str) -> Callable[[Op], tuple[Expr, ...]]:
    """(dtype, flags.., batch, n, k) of a matrix and a right-hand side"""
    return lambda op: (*_flags(*flags)(op), *op.operands[-1].shape)


def _order_sizes(op: Op) -> tuple[Expr, ...]:
    batch, k = op.operands[0].shape
    return batch, op.dim_attr("rows"), k


def _reflector_sizes(op: Op) -> tuple[Expr, ...]:
    return code(op), *op.operands[0].shape, op.operands[1].shape[1]


def _multiply_sizes(op: Op) -> tuple[Expr, ...]:
    flags = _flags("left", "transposed")(op)
    return *flags, *op.operands[2].shape, op.operands[1].shape[1]


def _multiply_work(op: Op) -> Workspace:
    batch, m, n = op.operands[2].shape
    side = maximum(n if op.bool_attr("left") else m, 1)
    size = (BLOCK * side + REFLECTORS) * op.operands[0].dtype.bytes
    return Workspace(64 * ceildiv(size, 64), batch)


def _svd_room(m: Expr, n: Expr, vectors: int) -> Expr:
    most, least = maximum(m, n), minimum(m, n)
    square = 4 * vectors * least * least
    return m * n + square + 10 * least + 2 * BLOCK * (most + least) + BLOCK


def _eig_work(op: Op, m: Expr, n: Expr) -> Expr:
    return 2 * n * n + (6 + BLOCK) * n + 1


def _ldl_solve_work(op: Op, m: Expr, n: Expr) -> Expr:
    return n * n + n * op.operands[2].shape[2]


_PIVOTS = "pivots: {value} is not the number of a row"

LINALG_KERNELS: dict[str, LibraryKernel] = {
    "cholesky": LibraryKernel("plt_cholesky", _square("upper"), checks=1),
    "lu": LibraryKernel(
        "plt_lu", _rectangular(), _work(lambda op, m, n: m * n), checks=1
    ),
    "row_order": LibraryKernel("plt_row_order", _order_sizes, checks=0, error=_PIVOTS),
    "lu_solve": LibraryKernel(
        "plt_lu_solve", _with_right("transposed"), checks=1, error=_PIVOTS
    ),
    "triangular_solve": LibraryKernel(
        "plt_triangular_solve", _with_right("upper", "transposed", "unit")
    ),
    "qr": LibraryKernel(
        "plt_qr", _rectangular(), _work(lambda op, m, n: BLOCK * maximum(n, 1))
    ),
    "householder": LibraryKernel(
        "plt_householder",
        _reflector_sizes,
        _work(lambda op, m, n: BLOCK * maximum(n, 1)),
    ),
    "householder_multiply": LibraryKernel(
        "plt_householder_multiply", _multiply_sizes, _multiply_work
    ),
    "svd": LibraryKernel(
        "plt_svd",
        _rectangular("full"),
        _work(lambda op, m, n: _svd_room(m, n, 1), lambda m, n: 8 * minimum(m, n)),
        checks=1,
    ),
    "singular_values": LibraryKernel(
        "plt_singular_values",
        _rectangular(),
        _work(lambda op, m, n: _svd_room(m, n, 0), lambda m, n: 8 * minimum(m, n)),
        checks=1,
    ),
    "eigh": LibraryKernel(
        "plt_eigh",
        _square("upper"),
        _work(lambda op, m, n: 1 + (6 + BLOCK) * n + 2 * n * n, lambda m, n: 3 + 5 * n),
        checks=1,
    ),
    "eigvalsh": LibraryKernel(
        "plt_eigvalsh",
        _square("upper"),
        _work(lambda op, m, n: 1 + (2 + BLOCK) * n + n * n, lambda m, n: 3 + 5 * n),
        checks=1,
    ),
    "eig": LibraryKernel("plt_eig", _square(), _work(_eig_work), checks=1),
    "ldl": LibraryKernel(
        "plt_ldl",
        _square(),
        _work(lambda op, m, n: 2 * BLOCK * maximum(n, 1)),
        checks=1,
    ),
    "ldl_solve": LibraryKernel("plt_ldl_solve", _with_right(), _work(_ldl_solve_work)),
    "matrix_exp": LibraryKernel(
        "plt_matrix_exp",
        _square(),
        _work(lambda op, m, n: 5 * n * n, lambda m, n: n),
    ),
}

# Whose kernels call LAPACK.
NEED_LAPACK = frozenset(
    kernel.symbol for name, kernel in LINALG_KERNELS.items() if name != "row_order"
)
