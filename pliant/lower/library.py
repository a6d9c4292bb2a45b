"""Ops that a C function of pliant/library/ computes: which, with which arguments.

    %y, %p = sort(%x) {axis = 1, descending = false}
    ->
    call_library(%x, %y, %p, %work) {callee = "sort", sizes = [1, 0, batch, n, 1]}
    library @sort symbol "plt_sort" (in, out, out, work)

To add one: a row in ir/ops_library.py, the function, and a row here. `sizes` are the
integers that the function is called with, `work` the bytes of its workspace for each
worker, and for how many at most (a region has no more workers than units).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pliant.ir.graph import Graph, Library, Op
from pliant.ir.loops import Role
from pliant.ir.types import DType, TensorType
from pliant.lower.rows import THREADS
from pliant.lower.step import Argument, LibraryStep, Temporary
from pliant.sym import Expr, as_expr, maximum, minimum, product, sym

# enum plt_dtype (library.h)
CODES = {dtype: as_expr(number) for number, dtype in enumerate(DType)}


@dataclass(frozen=True, slots=True)
class Work:
    """Workspace: bytes of one worker, and the units that workers share."""

    bytes: Expr
    units: Expr


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """A C function and its arguments for an op."""

    symbol: str
    sizes: Callable[[Op], tuple[Expr, ...]]
    work: Callable[[Op], Work] | None = None


def _around(op: Op) -> tuple[Expr, Expr, Expr]:
    """(outer, n, inner) of the first operand and the op's axis."""
    shape, axis = op.operands[0].shape, op.int_attr("axis")
    return product(shape[:axis]), shape[axis], product(shape[axis + 1 :])


def _flag(op: Op, name: str) -> Expr:
    return as_expr(int(op.bool_attr(name)))


def _code(op: Op) -> Expr:
    return CODES[op.operands[0].dtype]


def _sort_work(op: Op) -> Work:
    outer, n, inner = _around(op)
    # Rows of items twice; of narrow ones, the memory of whole places serves once.
    narrow = 8 if inner == as_expr(1) else 16
    each = 32 if op.operands[0].dtype.bytes == 8 else narrow
    return Work(each * n, outer * inner)


def _top_work(op: Op) -> Work:
    outer, n, inner = _around(op)
    most = minimum(n, 4 * op.dim_attr("k") + 256)
    each = 16 if op.operands[0].dtype.bytes == 8 else 8
    return Work(2 * each * most, outer * inner)


def _search_sizes(op: Op) -> tuple[Expr, ...]:
    rows, values = (v.shape for v in op.operands)
    return _code(op), _flag(op, "right"), rows[0], rows[1], values[1]


def _scatter_sizes(op: Op) -> tuple[Expr, ...]:
    x, places, _ = op.operands
    rows, columns = x.shape
    return columns * x.dtype.bytes, rows, places.shape[0]


def _locate_sizes(op: Op) -> tuple[Expr, ...]:
    shape = op.operands[0].shape
    return as_expr(len(shape)), product(shape[:-1]), shape[-1]


KERNELS: dict[str, LibraryKernel] = {
    "locate": LibraryKernel("plt_locate", _locate_sizes),
    "scatter_rows": LibraryKernel("plt_scatter_rows", _scatter_sizes),
    "sort": LibraryKernel(
        "plt_sort",
        lambda op: (_code(op), _flag(op, "descending"), *_around(op)),
        _sort_work,
    ),
    "top": LibraryKernel(
        "plt_top",
        lambda op: (
            *(_code(op), _flag(op, "largest"), *_around(op)),
            op.dim_attr("k"),
        ),
        _top_work,
    ),
    "search": LibraryKernel("plt_search", _search_sizes),
    "running_extreme": LibraryKernel(
        "plt_running_extreme",
        lambda op: (_code(op), _flag(op, "least"), *_around(op)),
    ),
    "running_logsumexp": LibraryKernel(
        "plt_running_logsumexp", lambda op: (_code(op), *_around(op))
    ),
}


def lower_library(region: Graph) -> LibraryStep:
    (op,) = region.ops
    kernel = KERNELS[op.name]
    arguments: list[Argument] = [*op.operands, *op.results]
    roles = [Role.IN] * len(op.operands) + [Role.OUT] * len(op.results)
    if kernel.work is not None:
        work = kernel.work(op)
        workers = minimum(sym(THREADS), maximum(work.units, 1))
        shape = (workers, work.bytes)
        arguments.append(Temporary(TensorType(DType.U8, shape)))
        roles.append(Role.WORK)
    library = Library(op.name, kernel.symbol, tuple(roles))
    return LibraryStep(library.name, tuple(arguments), kernel.sizes(op), library)
