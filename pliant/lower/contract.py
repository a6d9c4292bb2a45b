"""Matrix products: their operands, and the call of their kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pliant.ir.access import flatten
from pliant.ir.graph import Constant, Op
from pliant.ir.loop_walk import size_symbols
from pliant.ir.loops import (
    Binary,
    Buffer,
    Call,
    If,
    Index,
    LoopFunc,
    Stmt,
)
from pliant.ir.packed import Packed, PackedWeight, Within
from pliant.ir.types import NARROW, TensorType, contiguous_strides
from pliant.ir.views import View, row_stride
from pliant.kernels.choose import Choice, Plan, choose, choose_strips
from pliant.kernels.gemm import Gemm, call_planned, gemm
from pliant.kernels.mix import ProductPlan
from pliant.kernels.packing import pack_constant
from pliant.kernels.product import (
    Address,
    Around,
    Cuts,
    Direct,
    Product,
    Prologue,
    RowsAt,
    TileAt,
)
from pliant.kernels.strips import has_strips
from pliant.kernels.tiles import Tile, gemm_tile
from pliant.lower.epilogue import TileEpilogue
from pliant.lower.quantized import Corrections, narrowed
from pliant.lower.step import (
    Argument,
    Fusion,
    KernelStep,
    Scratch,
    Strided,
    Temporary,
    TileAxes,
)
from pliant.machine import pages
from pliant.machine.target import Target
from pliant.sym import Expr, as_expr, product, sym

IDLE = 5  # at most one cache line in this many may hold no column of a panel


def lower_matmul(fusion: Fusion) -> list[KernelStep]:
    root, target, cuts = fusion.root("matmul"), fusion.target, cuts_of(fusion)
    epilogue = TileEpilogue.of(fusion, root)
    left, right = (fusion.views.get(v) for v in root.operands)
    assert right is not None
    constant = known_now(fusion.constants.get(root.operands[1]), right)
    if root.operands[0].dtype in NARROW:
        assert left is not None
        given = _words(fusion.name, root, left, right, constant, target)
    else:
        strips = cuts.strips and epilogue.is_plain
        given = _numbers(root, left, right, constant, target, strips)
    return product_steps(fusion.name, given, epilogue, target, cuts)


def cuts_of(fusion: Fusion) -> Cuts:
    options = fusion.options
    return Cuts(options.strips and options.patching, options.patching)


def product_steps(
    name: str,
    given: Given,
    epilogue: TileEpilogue,
    target: Target,
    cuts: Cuts,
) -> list[KernelStep]:
    """The product, by strips of rows if possible, and the steps after it."""
    axes, corrections = given.axes, given.corrections
    alone = epilogue.is_plain and corrections is None
    spec = replace(given.spec, alone=alone)
    tile = gemm_tile(spec.dtype, target)
    plan = plan_of(spec, tile)

    def write(at: TileAt) -> list[Stmt]:
        placed = axes.placed(at.batch)
        at = at if corrections is None else corrections.tile(at)
        return epilogue.write(at, placed)

    def compute(at: RowsAt) -> list[Stmt]:
        return epilogue.left(at, axes.placed(at.batch))

    def plain(batch: tuple[Expr, ...], row: Expr, column: Expr) -> Address:
        (out,) = epilogue.outputs.values()
        return out, (flatten((*batch, row, column), (*spec.batch, spec.m, spec.n)),)

    prologue: Prologue | None = compute if epilogue.computes_left else None
    direct: Direct | None = None
    if given.gathered is not None:
        prologue, direct = given.gathered.prologue, given.gathered.direct
    around = Around(write, plain if alone else None, prologue, direct)
    made = gemm(spec, plan, target, around, cuts)
    buffers: list[tuple[Buffer, Argument]] = []
    if made.a is not None:
        assert given.left is not None
        buffers.append((made.a, given.left))
    if given.gathered is not None:
        buffers.append((given.gathered.buffer, given.gathered.argument))
    if made.packed is not None:
        assert given.panels is not None
        panels = given.panels
        buffers.append((made.packed, panels(tile) if callable(panels) else panels))
    if made.rows is not None:
        rows_of_b = Temporary(TensorType(spec.dtype, made.rows.shape))
        buffers.append((made.rows, rows_of_b))
    if made.b is not None:
        buffers.append((made.b, given.right))
    if corrections is not None:
        buffers.append((corrections.buffer, corrections.argument))
    buffers += [(buf, v) for v, buf in epilogue.inputs.items()]
    buffers += [(buf, v) for v, buf in epilogue.outputs.items()]
    buffers += [(buf, scratch_of(buf)) for buf in made.work]
    cut = None
    if made.strips is not None:
        cut = choose_strips(spec.m, spec.n, spec.k, tile, choice_of(spec))
    product_plan = ProductPlan(spec, plan, tile, cut)
    body, planned = _planned(name, product_plan, made, [buf for buf, _ in buffers])
    func = function_of(name, body, [buf for buf, _ in buffers])
    arguments = tuple(arg for _, arg in buffers)
    helpers = made.helpers
    if given.gathered is not None:
        helpers += given.gathered.kernels
    product_step = KernelStep(func, arguments, helpers, None, planned, product_plan)
    return [*given.steps, product_step]


@dataclass(frozen=True, slots=True)
class Gathered:
    """A left operand whose rows are gathered from other memory as they are copied."""

    prologue: Prologue
    buffer: Buffer
    argument: Argument
    kernels: tuple[LoopFunc, ...]  # that the prologue calls
    direct: Direct | None = None  # rows that are read in place


@dataclass(frozen=True, slots=True)
class Given:
    """A product with the operands that its kernel gets."""

    spec: Product
    axes: TileAxes
    left: Argument | None  # None: computed by the kernel
    right: Argument  # B in place
    # The panels of a packed B.
    panels: Callable[[Tile], Packed] | Temporary | None = None
    steps: tuple[KernelStep, ...] = ()  # the calls that make the operands
    corrections: Corrections | None = None
    gathered: Gathered | None = None


def _numbers(
    root: Op,
    left: View | None,
    right: View,
    constant: Constant | None,
    target: Target,
    strips: bool,
) -> Given:
    spec, axes = product_of(root, left, right)
    if constant is None or spec.b_batch:
        return Given(spec, axes, left, right)
    rows = _constant_rows(spec, constant, right, target)
    if rows is not None:  # lanes along K read B in place
        spec = replace(spec, b_strides=(as_expr(1), spec.k))
        return Given(spec, axes, left, rows)
    if strips and has_strips(spec, True, target):
        tight = _tight_rows(spec, constant, right, target)
        if tight is not None:
            spec = replace(spec, b_strides=(as_expr(tight[1]), as_expr(1)))
            return Given(spec, axes, left, tight[0])
    spec = replace(spec, b_strides=None)
    panels = partial(packed_weight, constant, right)
    return Given(spec, axes, left, right, panels)


def _words(
    name: str,
    root: Op,
    left: View,
    right: View,
    constant: Constant | None,
    target: Target,
) -> Given:
    """A product of 8-bit integers, several of which form a word."""
    weight = None
    if constant is not None and all(d == as_expr(1) for d in right.shape[:-2]):
        weight = (constant, partial(matrix_of, right))
    narrow = narrowed(name, root, (left, right), weight, target)
    spec, axes = product_of(root, narrow.left, narrow.right)
    spec = replace(spec, k=narrow.right.shape[-2], parts=narrow.form.parts)
    corrections = narrow.corrections(spec)
    panels = None if spec.b_batch else narrow.panels
    if panels is not None:
        spec = replace(spec, b_strides=None)
    operands = (narrow.left, narrow.right)
    return Given(spec, axes, *operands, panels, narrow.steps, corrections)


def _planned(
    name: str, what: ProductPlan, made: Gemm, buffers: Sequence[Buffer]
) -> tuple[Stmt, LoopFunc | None]:
    """The kernel's body, and the function that it calls with its plan."""
    if made.planned is None:
        assert made.dots is not None
        return made.dots, None
    func = function_of(f"{name}_planned", made.planned, buffers)
    origins = tuple((b, tuple(as_expr(0) for _ in b.shape)) for b in buffers)

    def call(arguments: dict[str, Expr]) -> Stmt:
        sizes = tuple(arguments.get(s, sym(s)) for s in func.sizes)
        return Call(func.name, sizes, origins)

    strips = None
    if made.strips is not None and what.strips is not None:
        strips = (made.strips, what.strips)
    body = call_planned(what.spec, what.plan, what.tile, strips, call)
    if made.dots is not None:
        wanted = Binary("gt", Index(what.plan.dot), Index(as_expr(0)))
        body = If(wanted, made.dots, body)
    return body, func


def known_now(constant: Constant | None, view: View) -> Constant | None:
    """The constant, if the elements read are known at compile time."""
    parts = (view.offset, *view.shape, *view.strides)
    return constant if all(part.is_const for part in parts) else None


def product_of(
    root: Op, left: Strided | None, right: Strided
) -> tuple[Product, TileAxes]:
    """Sizes and layouts, and how the tiles map to the result.

    If the left operand is not in memory, its rows are taken as contiguous.
    """
    *batch, m, n = root.result.shape
    k = root.operands[0].shape[-1]
    b_batch = tuple(root.operands[1].shape[:-2])
    dtype = root.result.dtype
    shared = all(dim == as_expr(1) for dim in b_batch)
    stride = k if left is None else row_stride(left.shape, left.strides)
    if shared and stride is not None:
        # There is one B for the whole batch, so the batch is just more rows.
        axes = TileAxes((), tuple(range(len(batch) + 1)), (len(batch) + 1,))
        rows, strides = product((*batch, m)), right.strides[-2:]
        step = as_expr(1) if left is None else left.strides[-1]
        spec = Product(dtype, (), rows, n, k, (stride, step), (), strides)
    else:
        axes = TileAxes(
            tuple((i, as_expr(0)) for i in range(len(batch))),
            (len(batch),),
            (len(batch) + 1,),
        )
        outer = tuple(batch)
        if left is None:
            layout = contiguous_strides((*outer, m, k))
        else:
            layout = _broadcast_strides(left, batch)
        spec = Product(dtype, outer, m, n, k, layout, b_batch, right.strides)
    stored = root.operands[1].dtype if dtype.is_float else None
    return replace(spec, computed=left is None, stored=stored), axes


def choice_of(spec: Product) -> Choice:
    """The properties of a product besides its sizes."""
    one = as_expr(1)
    steps = spec.a_strides[-1] != one
    along_k = not steps and spec.dtype.is_float and not spec.computed
    if spec.b_strides is None:
        return Choice(True, False, False, False, steps, spec.computed, spec.alone)
    by_rows, by_columns = spec.b_strides[-2] == one, spec.b_strides[-1] == one
    same = spec.b_dtype is spec.dtype
    along_k = along_k and same
    rows_in_k, adjacent = along_k and by_rows, by_columns and same
    lies = (adjacent, rows_in_k, along_k, steps)
    column = spec.b_strides[-2] == spec.n and by_columns
    return Choice(False, *lies, spec.computed, spec.alone, column)


def plan_of(spec: Product, tile: Tile) -> Plan:
    outer = product(spec.batch)
    return choose(spec.m, spec.n, spec.k, outer, tile, choice_of(spec))


def _constant_rows(
    spec: Product, constant: Constant, view: View, target: Target
) -> Packed | None:
    """A constant B of few columns as rows along K."""
    tile = gemm_tile(spec.dtype, target)
    held = replace(spec, b_strides=(as_expr(1), spec.k))
    if plan_of(held, tile).dot != as_expr(1):
        return None
    layout = (view.offset, view.strides[-2:], view.shape[-2:])
    return Packed(
        ("rows", layout),
        constant,
        "rows",
        constant.type.dtype,
        partial(_rows_of, view),
    )


def _rows_of(view: View, data: np.ndarray) -> np.ndarray:
    return pages.copied(matrix_of(view, data).T)


def _tight_rows(
    spec: Product, constant: Constant, view: View, target: Target
) -> tuple[Packed, int] | None:
    """A constant B stored row by row in whole vectors, and its columns per row.

    Only if its panels would leave many cache lines unused, if it stays in cache, and
    if strips of rows compute the product: they read it in place.
    """
    tile = gemm_tile(spec.dtype, target)
    k, n = (size.value for size in view.shape[-2:])
    row, panels = (-(-n // part) * part for part in (tile.lanes, tile.NR))
    if row * IDLE >= panels * (IDLE - 1) or panels * k * tile.bytes > tile.near:
        return None

    layout = (view.offset, view.strides[-2:], view.shape[-2:])
    key = ("tight", layout, tile)
    make = partial(_padded_rows, view, row)
    return Packed(key, constant, "tight", constant.type.dtype, make), row


def _padded_rows(view: View, row: int, data: np.ndarray) -> np.ndarray:
    matrix = matrix_of(view, data)
    k, n = matrix.shape
    rows = pages.zeros((k, row), data.dtype)
    rows[:, :n] = matrix
    return rows


def _broadcast_strides(view: Strided, batch: Sequence[Expr]) -> tuple[Expr, ...]:
    """Strides over the result's batch; a batch axis the operand lacks has none."""
    leading = tuple(
        as_expr(0) if dim == as_expr(1) and dim != want else stride
        for dim, want, stride in zip(view.shape, batch, view.strides, strict=False)
    )
    return (*leading, *view.strides[-2:])


def packed_weight(constant: Constant, view: View, tile: Tile) -> Packed:
    """The panels of a constant right operand.

    Some columns of a weight are in its own panels, if they begin with one.
    """
    layout = (view.offset, view.strides[-2:], view.shape[-2:])
    return Packed(
        ("gemm", layout, tile),
        constant,
        "packed",
        constant.type.dtype,
        partial(_panels_of, view, tile),
        _panels_within(constant, view, tile),
    )


def _panels_of(view: View, tile: Tile, data: np.ndarray) -> np.ndarray:
    return pack_constant(matrix_of(view, data), tile)


def _panels_within(constant: Constant, view: View, tile: Tile) -> Within | None:
    """Where the panels of some columns are in those of a whole matrix."""
    shape = _matrix_shape(constant)
    if shape is None or not view.offset.is_const:
        return None
    rows, columns = shape
    k, n = view.shape[-2:]
    one = as_expr(1)
    if columns == as_expr(0):
        return None
    if view.strides[-2:] == (columns, one) and k == rows:
        total, first, rest = columns, view.offset.value, 0
    elif view.strides[-2:] == (one, columns) and k == columns:
        total = rows
        first, rest = divmod(view.offset.value, columns.value)
    else:
        return None
    end = first + n.value
    if n == total or rest or first % tile.NR or end > total.value:
        return None
    if end % tile.NR and end < total.value:  # behind the last column are zeros
        return None
    every = replace(view, shape=(*view.shape[:-2], k, total), offset=as_expr(0))
    whole = packed_weight(constant, every, tile)
    panels = (-(-n.value // tile.NR), k.value, tile.NR)
    return Within(whole, first * k.value, panels)


def _matrix_shape(constant: Constant) -> tuple[Expr, Expr] | None:
    """The last two dims, if any others are 1."""
    *lead, rows, columns = (as_expr(1), as_expr(1), *constant.type.shape)
    matrix = constant.type.rank >= 2 and all(d == as_expr(1) for d in lead)
    return (rows, columns) if matrix else None


def whole_weight(constant: Constant, view: View, tile: Tile) -> PackedWeight | None:
    """The panels, if they hold every element of a 2-d weight."""
    if constant.type.rank != 2 or view.offset != as_expr(0):
        return None
    rows, columns = constant.type.shape
    by_columns = (columns, as_expr(1)), (rows, columns)
    by_rows = (as_expr(1), columns), (columns, rows)
    have = (view.strides[-2:], view.shape[-2:])
    if have not in (by_columns, by_rows):
        return None
    axis = 0 if have == by_rows else 1
    return PackedWeight(packed_weight(constant, view, tile), axis, tile.NR)


def matrix_of(view: View, data: np.ndarray) -> np.ndarray:
    """The (K, N) matrix that a view of this constant's data is."""
    data = data.reshape(-1)
    item = data.itemsize
    k, n = (d.value for d in view.shape[-2:])
    strides = tuple(s.value * item for s in view.strides[-2:])
    return np.lib.stride_tricks.as_strided(data[view.offset.value :], (k, n), strides)


def scratch_of(buf: Buffer) -> Scratch:
    return Scratch(TensorType(buf.dtype, buf.shape[1:]))


def function_of(name: str, body: Stmt, buffers: Sequence[Buffer]) -> LoopFunc:
    return LoopFunc(name, size_symbols(body, buffers), tuple(buffers), body)
