"""Micro-kernels of convolutions: register tiles over a patch and packed weights.

A patch is a piece of the input with its padding written out, so that tap t of output
position q is the element q + taps[t] of each channel's plane (`conv_patch.py`). Weights
are packed (panels, channels, taps, width). Two kernels read these two layouts:

    wide    lanes are positions:  acc[o, q..] += w[c, t, o] * patch[c, taps[t] + q..]
    deep    lanes are channels:   acc[i, o..] += w[c, t, o..] * patch[c, taps[t] + at_i]

The wide kernel stores in the layout of the result, but also computes the gaps between
rows of the patch and the tail of its last vector. The deep kernel computes only what is
needed, but its store is transposed. Small images with many channels use the deep one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.ir.loops import (
    Alloc,
    Block,
    For,
    Kind,
    Let,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.micro import multiply_add, zero
from pliant.machine.target import Target
from pliant.sym import Expr, as_expr, sym


@dataclass(frozen=True, slots=True)
class ConvTile:
    """Register tiles: `rows` x `columns` results (wide), or columns by rows (deep).

    `width` is how many output channels a panel of packed weights holds.
    """

    rows: int
    columns: int
    width: int
    pixels: int  # height of a deep tile


def conv_tile(dtype: DType, channels: Expr, target: Target) -> ConvTile:
    """The tile for this many output channels of a group.

    As for products (tiles.py), V vectors and h rows of accumulators, V vectors of the
    patch and a broadcast weight fit in the registers. V = 2 gives the tallest tile.
    With few channels there are not enough rows to fill it, so it grows wider until it
    has the eight accumulators that hide the FMA latency. A single row needs no register
    for the patch, since each of its vectors is used once. A deep tile leaves a register
    for each of its broadcasts, which LLVM tends to load ahead of the products.
    """
    lanes = target.vector_bytes // dtype.bytes
    few = channels.value if channels.is_const else target.registers
    if few == 1:
        vectors = 8
    elif few * 4 + 5 <= target.registers:
        vectors = 4
    else:
        vectors = 2
    rows = max(1, (target.registers - vectors - 1) // vectors)
    columns = vectors * lanes
    pixels = (target.registers - vectors) // (vectors + 1)
    return ConvTile(rows, columns, min(few, columns), pixels)


def wide_name(dtype: DType, height: int, tile: ConvTile, taps: bool) -> str:
    kind = "conv" if taps else "pointwise"
    return f"{kind}_{dtype}_{height}x{tile.columns}"


def deep_name(dtype: DType, height: int, tile: ConvTile, taps: bool) -> str:
    return wide_name(dtype, height, tile, taps) + "_deep"


def wide_heights(outputs: Expr, tile: ConvTile) -> list[int]:
    """The heights that panels of this many output channels are cut into."""
    if not outputs.is_const:
        return list(range(1, min(tile.rows, tile.width) + 1))
    found: set[int] = set()
    for rows in {min(tile.width, outputs.value), outputs.value % tile.width} - {0}:
        tiles = -(-rows // tile.rows)
        found |= {rows // tiles, -(-rows // tiles)}
    return sorted(found)


def _over(height: int, columns: int, body: Stmt) -> Stmt:
    inner = For("_j", as_expr(0), as_expr(columns), body, Kind.VECTOR)
    return For("_i", as_expr(0), as_expr(height), inner, Kind.UNROLL)


def _depth(step: Stmt, taps: bool) -> Stmt:
    """Runs the step for every channel and tap; `_tap` is the tap's patch offset."""
    if not taps:
        return For("_c", as_expr(0), sym("channels"), step)
    table = buffer("taps", DType.I64, (sym("count"),), Role.IN)
    offset = Let("_tap", Load(table, (sym("_t"),)))
    inner = For("_t", as_expr(0), sym("count"), Block((offset, step)))
    return For("_c", as_expr(0), sym("channels"), inner)


def wide_kernel(dtype: DType, height: int, tile: ConvTile, taps: bool) -> LoopFunc:
    """`height` output channels at `columns` positions, over all channels and taps."""
    channels, count = sym("channels"), sym("count") if taps else as_expr(1)
    plane, first, row = sym("plane"), sym("first"), sym("row")
    width = sym("width")
    strides = (count * width, width, 1)
    w = buffer("w", dtype, (channels, count, height), Role.IN, strides)
    # The last tile of a block reads into the next plane; those results are not used.
    beyond = plane + tile.columns
    patch = buffer("patch", dtype, (channels, beyond), Role.IN, (plane, 1))
    table = buffer("taps", DType.I64, (count,), Role.IN)
    out = buffer("out", dtype, (height, tile.columns), Role.OUT, (row, 1))
    acc = buffer("acc", dtype, (height, tile.columns), Role.REGISTER)
    i, j, c = sym("_i"), sym("_j"), sym("_c")
    t, tap = (sym("_t"), sym("_tap")) if taps else (as_expr(0), as_expr(0))
    held: LoopValue = Load(acc, (i, j))
    at = first + tap + j
    step = multiply_add(Load(w, (c, t, i)), Load(patch, (c, at)), held, dtype)
    body = Block(
        (
            Alloc(acc),
            _over(height, tile.columns, Store(acc, (i, j), zero(dtype))),
            _depth(_over(height, tile.columns, Store(acc, (i, j), step)), taps),
            _over(height, tile.columns, Store(out, (i, j), held)),
        )
    )
    name = wide_name(dtype, height, tile, taps)
    sizes = ("channels", "plane", "width", "first", "row")
    if not taps:
        return LoopFunc(name, sizes, (w, patch, out), body)
    return LoopFunc(name, ("count", *sizes), (w, patch, table, out), body)


def deep_kernel(dtype: DType, height: int, tile: ConvTile, taps: bool) -> LoopFunc:
    """`height` positions, given by a table, for all output channels of a panel."""
    channels, count = sym("channels"), sym("count") if taps else as_expr(1)
    w = buffer("w", dtype, (channels, count, tile.width), Role.IN)
    patch = buffer("patch", dtype, (channels, sym("plane")), Role.IN)
    table = buffer("taps", DType.I64, (count,), Role.IN)
    where = buffer("at", DType.I64, (height,), Role.IN)
    out = buffer("out", dtype, (height, tile.width), Role.OUT)
    acc = buffer("acc", dtype, (height, tile.width), Role.REGISTER)
    i, j, c = sym("_i"), sym("_j"), sym("_c")
    t, tap = (sym("_t"), sym("_tap")) if taps else (as_expr(0), as_expr(0))
    places = [Let(f"_at{k}", Load(where, (as_expr(k),))) for k in range(height)]

    def row(k: int) -> Stmt:
        at = (as_expr(k), j)
        x = Load(patch, (c, tap + sym(f"_at{k}")))
        value = multiply_add(x, Load(w, (c, t, j)), Load(acc, at), dtype)
        store = Store(acc, at, value)
        return For("_j", as_expr(0), as_expr(tile.width), store, Kind.VECTOR)

    body = Block(
        (
            *places,
            Alloc(acc),
            _over(height, tile.width, Store(acc, (i, j), zero(dtype))),
            _depth(Block(tuple(row(k) for k in range(height))), taps),
            _over(height, tile.width, Store(out, (i, j), Load(acc, (i, j)))),
        )
    )
    name = deep_name(dtype, height, tile, taps)
    sizes = ("channels", "plane")
    if not taps:
        return LoopFunc(name, sizes, (w, patch, where, out), body)
    return LoopFunc(name, ("count", *sizes), (w, patch, table, where, out), body)
