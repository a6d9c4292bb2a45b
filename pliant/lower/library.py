"""Ops that a C function of pliant/library/ computes: which, with which arguments.

    %y, %p = sort(%x) {axis = 1, descending = false}
    ->
    call_library(%x, %y, %p, %work) {callee = "sort", sizes = [1, 0, batch, n, 1]}
    library @sort symbol "plt_sort" (in, out, out, work)

To add one: a row in ir/ops_library.py, the function, and a row here (those of linear
algebra are in library_linalg.py, those of Fourier transforms in library_fft.py).
`sizes` are the integers that the function is called with, `work` the bytes of its
workspace for each worker, and for how many at most (a region has no more workers than
units).
"""

from __future__ import annotations

from pliant.ir.graph import DataCheck, Graph, Library, Op
from pliant.ir.loops import Role
from pliant.ir.ops_library import LEVELS, window_levels
from pliant.ir.types import DType, TensorType
from pliant.lower.library_fft import FFT_KERNELS
from pliant.lower.library_kernel import LibraryKernel, Workspace, code, flag
from pliant.lower.library_linalg import LINALG_KERNELS
from pliant.lower.rows import THREADS
from pliant.lower.step import Argument, LibraryStep, NumberCheck, Temporary
from pliant.sym import Expr, as_expr, maximum, minimum, product, sym


def _around(op: Op) -> tuple[Expr, Expr, Expr]:
    """(outer, n, inner) of the first operand and the op's axis."""
    shape, axis = op.operands[0].shape, op.int_attr("axis")
    return product(shape[:axis]), shape[axis], product(shape[axis + 1 :])


def _sort_work(op: Op) -> Workspace:
    outer, n, inner = _around(op)
    # Rows of items twice; of narrow ones, the memory of whole places serves once.
    narrow = 8 if inner == as_expr(1) else 16
    each = 32 if op.operands[0].dtype.bytes == 8 else narrow
    return Workspace(each * n, outer * inner)


def _top_work(op: Op) -> Workspace:
    outer, n, inner = _around(op)
    most = minimum(n, 4 * op.dim_attr("k") + 256)
    each = 16 if op.operands[0].dtype.bytes == 8 else 8
    return Workspace(2 * each * most, outer * inner)


def _search_sizes(op: Op) -> tuple[Expr, ...]:
    rows, values = (v.shape for v in op.operands)
    return code(op), flag(op, "right"), rows[0], rows[1], values[1]


def _scatter_sizes(op: Op) -> tuple[Expr, ...]:
    x, places, _ = op.operands
    *outer, rows, columns = x.shape
    return columns * x.dtype.bytes, product(outer), rows, places.shape[0]


def _overwrite_sizes(op: Op) -> tuple[Expr, ...]:
    x, new = op.operands
    levels = window_levels(x.shape, new.shape, op.dims_attr("starts"))
    one, zero = as_expr(1), as_expr(0)
    levels = [(one, one, zero)] * (LEVELS - len(levels)) + levels
    sizes, widths, starts = zip(*levels, strict=True)
    return (as_expr(x.dtype.bytes), *sizes, *widths, *starts)


def _locate_sizes(op: Op) -> tuple[Expr, ...]:
    shape = op.operands[0].shape
    return as_expr(len(shape)), product(shape[:-1]), shape[-1]


def _sample_sizes(op: Op) -> tuple[Expr, ...]:
    return (code(op), *op.operands[0].shape, op.operands[1].shape[1])


KERNELS: dict[str, LibraryKernel] = {
    "locate": LibraryKernel("plt_locate", _locate_sizes),
    "overwrite": LibraryKernel("plt_overwrite", _overwrite_sizes),
    "sample": LibraryKernel("plt_sample", _sample_sizes),
    "scatter_rows": LibraryKernel("plt_scatter_rows", _scatter_sizes),
    "sort": LibraryKernel(
        "plt_sort",
        lambda op: (code(op), flag(op, "descending"), *_around(op)),
        _sort_work,
    ),
    "top": LibraryKernel(
        "plt_top",
        lambda op: (
            *(code(op), flag(op, "largest"), *_around(op)),
            op.dim_attr("k"),
        ),
        _top_work,
    ),
    "search": LibraryKernel("plt_search", _search_sizes),
    "running_extreme": LibraryKernel(
        "plt_running_extreme",
        lambda op: (code(op), flag(op, "least"), *_around(op)),
    ),
    "running_logsumexp": LibraryKernel(
        "plt_running_logsumexp", lambda op: (code(op), *_around(op))
    ),
    **LINALG_KERNELS,
    **FFT_KERNELS,
}


def lower_library(region: Graph, number_check: NumberCheck) -> LibraryStep:
    (op,) = region.ops
    kernel = KERNELS[op.name]
    sizes = kernel.sizes(op)
    if kernel.checks is not None:
        message, number = kernel.message(op), 0
        if message:
            number = number_check(DataCheck.at("matrix", message, op.loc))
        at = kernel.checks
        sizes = (*sizes[:at], as_expr(number), *sizes[at:])
    arguments: list[Argument] = [*op.operands, *op.results]
    roles = [Role.IN] * len(op.operands) + [Role.OUT] * len(op.results)
    if kernel.work is not None:
        work = kernel.work(op)
        workers = minimum(sym(THREADS), maximum(work.units, 1))
        shape = (workers, work.bytes)
        arguments.append(Temporary(TensorType(DType.U8, shape)))
        roles.append(Role.WORK)
        if work.shared is not None:
            arguments.append(Temporary(TensorType(DType.U8, (work.shared,))))
            roles.append(Role.WORK)
    library = Library(op.name, kernel.symbol, tuple(roles))
    return LibraryStep(library.name, tuple(arguments), sizes, library)
