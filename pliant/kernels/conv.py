"""Convolutions as matrix products, with no unfolded copy of the input in memory.

    out (N, O, pixels) = W (O/g, C/g * window) x patches (C/g * window, pixels)

Each unit is one panel of NR output pixels of one image and group. Its patches are
gathered into scratch (window * C/g, NR), which stays in L2 while every row block of the
weights goes over it with the micro-kernels of `gemm.py`. Padding is a predicate of the
gather. A 1x1 convolution of stride 1 reads its pixels in place of gathering them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.ir.loops import (
    WORKER,
    Binary,
    Block,
    Buffer,
    For,
    Index,
    Kind,
    Let,
    Load,
    LoopValue,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.gemm import (
    THREADS,
    UNIT_WORK,
    Epilogue,
    TileAt,
    row_tiles,
    unflatten_unit,
)
from pliant.kernels.tiles import gemm_tile
from pliant.sym import (
    Expr,
    as_expr,
    ceildiv,
    floordiv,
    maximum,
    minimum,
    mod,
    product,
    sym,
)
from pliant.target import Target


@dataclass(frozen=True, slots=True)
class Convolution:
    dtype: DType
    x_shape: tuple[Expr, ...]  # (N, C, spatial..)
    w_shape: tuple[Expr, ...]  # (O, C/groups, window..)
    out_shape: tuple[Expr, ...]
    x_strides: tuple[Expr, ...]
    stride: tuple[int, ...]
    low: tuple[Expr, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def pointwise(self) -> bool:
        """Every output pixel is made of the input pixel in its place."""
        return (
            all(d == as_expr(1) for d in self.w_shape[2:])
            and all(s == 1 for s in self.stride)
            and all(p == as_expr(0) for p in self.low)
            and self.x_shape[2:] == self.out_shape[2:]
            and all(
                self.x_strides[k] == self.x_strides[k + 1] * self.x_shape[k + 1]
                for k in range(2, len(self.x_shape) - 1)
            )
        )


def conv(
    spec: Convolution, target: Target, epilogue: Epilogue
) -> tuple[Stmt, tuple[Buffer, Buffer, Buffer, Buffer]]:
    """The convolution as a statement; buffers: x, weights, panel, scratch."""
    tile = gemm_tile(spec.dtype, target)
    pixels = product(spec.out_shape[2:])
    x = buffer("x", spec.dtype, spec.x_shape, Role.IN, spec.x_strides)
    if spec.pointwise:
        # Pixels of a plane follow one another: their flat position will do.
        flat = (*spec.x_strides[:2], spec.x_strides[-1])
        x = buffer("x", spec.dtype, (*spec.x_shape[:2], pixels), Role.IN, flat)
    channels, window = spec.w_shape[1], spec.w_shape[2:]
    depth = channels * product(window)
    rows_all = floordiv(spec.w_shape[0], spec.groups)
    w = buffer("w", spec.dtype, (spec.groups, rows_all, depth), Role.IN)
    panel = buffer("panel", spec.dtype, (THREADS, depth, tile.NR), Role.WORK)
    scratch = buffer("scratch", spec.dtype, (THREADS, tile.rows, tile.NR), Role.WORK)
    panels = ceildiv(pixels, tile.NR)
    lets, (image, group, at) = unflatten_unit(
        sym("_u"), (spec.x_shape[0], as_expr(spec.groups), panels)
    )
    column = at * tile.NR
    columns = minimum(tile.NR, pixels - column)
    gather = _gather(spec, x, panel, image, group, column, pixels, tile.NR)
    blocks = ceildiv(rows_all, tile.rows)
    block, rows = sym("_block"), sym("_rows")
    first = block * tile.rows
    tiles = row_tiles(
        (spec.dtype, tile),
        rows,
        (depth, depth),
        lambda start: (w, (group, first + start, as_expr(0))),
        (panel, (sym(WORKER), as_expr(0), as_expr(0))),
        scratch,
    )
    done = TileAt((image,), group * rows_all + first, column, rows, columns, scratch)
    block_loop = For(
        "_block",
        as_expr(0),
        blocks,
        Block(
            (
                Let("_rows", Index(minimum(tile.rows, rows_all - first))),
                *tiles,
                *epilogue(done),
            )
        ),
    )
    units = spec.x_shape[0] * spec.groups * panels
    work = maximum(rows_all * depth * tile.NR, 1)
    body = For(
        "_u",
        as_expr(0),
        units,
        Block((*lets, gather, block_loop)),
        Kind.PARALLEL,
        grain=maximum(1, floordiv(UNIT_WORK, work)),
    )
    return body, (x, w, panel, scratch)


def _gather(
    spec: Convolution,
    x: Buffer,
    panel: Buffer,
    image: Expr,
    group: Expr,
    column: Expr,
    pixels: Expr,
    nr: int,
) -> Stmt:
    """Fills the panel: [c, window.., j] is the patch element of pixel column + j."""
    channels, window = spec.w_shape[1], spec.w_shape[2:]
    spatial = len(window)
    j, c = sym("_j"), sym("_c")
    channel = group * channels + c
    lets: list[Stmt] = []
    inside: LoopValue = Binary("lt", Index(column + j), Index(pixels))
    if spec.pointwise:
        value = Load(x, (image, channel, column + j), inside)
        store = Store(panel, (sym(WORKER), c, j), value)
        inner = For("_j", as_expr(0), as_expr(nr), store, Kind.VECTOR)
        return For("_c", as_expr(0), channels, inner)
    position = column + j
    for k in reversed(range(1, spatial)):
        extent = maximum(spec.out_shape[2 + k], 1)
        lets.append(Let(f"_o{k}", Index(mod(position, extent))))
        position = floordiv(position, extent)
    lets.append(Let("_o0", Index(position)))
    at: list[Expr] = []
    offset = c
    for k in range(spatial):
        step = sym(f"_w{k}") * spec.dilation[k]
        at.append(sym(f"_o{k}") * spec.stride[k] + step - spec.low[k])
        offset = offset * window[k] + sym(f"_w{k}")
    for k in range(spatial):
        low = Binary("ge", Index(at[k]), Index(as_expr(0)))
        high = Binary("lt", Index(at[k]), Index(spec.x_shape[2 + k]))
        inside = Binary("logical_and", inside, Binary("logical_and", low, high))
    value = Load(x, (image, channel, *at), inside)
    stmt: Stmt = Store(panel, (sym(WORKER), offset, j), value)
    for k in reversed(range(spatial)):
        stmt = For(f"_w{k}", as_expr(0), window[k], stmt)
    stmt = For("_c", as_expr(0), channels, stmt)
    return For("_j", as_expr(0), as_expr(nr), Block((*lets, stmt)), Kind.VECTOR)
