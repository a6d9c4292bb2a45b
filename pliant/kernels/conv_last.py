"""Convolutions with channels last: a matrix product whose rows are gathered.

    out (pixels, O) = windows (pixels, window * C) x W (window * C, O)

The product's kernel (`gemm.py`) computes the rows of its left operand when it copies a
block of them side by side; here it calls a kernel that gathers them from the input
under the windows. Its sizes are parameters, so that all convolutions whose windows move
alike share it. With channels last the taps along the last spatial axis are contiguous
in memory, so a row consists of one run for each tap of the other axes:

    for image row in block
      for tap of the outer axes
        pixels whose run begins or ends outside the image: zeros, run, zeros
        pixels inside: run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pliant.ir.loops import (
    WORKER,
    Binary,
    Block,
    Buffer,
    Call,
    For,
    If,
    Index,
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
from pliant.kernels.choose import exceeds
from pliant.kernels.conv_patch import Slide
from pliant.kernels.micro import zero
from pliant.kernels.packing import PACK_WORK, pack_constant, unflatten_unit
from pliant.kernels.product import Address, Direct, RowsAt
from pliant.kernels.tiles import Tile
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


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a convolution over (N, spatial.., C), as rows of a matrix."""

    dtype: DType
    images: Expr
    channels: Expr
    slides: tuple[Slide, ...]  # one per spatial axis
    x_strides: tuple[Expr, ...]  # (N, spatial.., C): pixels of a row side by side

    @property
    def rows(self) -> Expr:
        return product((self.images, *(slide.out for slide in self.slides)))

    @property
    def depth(self) -> Expr:
        return product(slide.window for slide in self.slides) * self.channels

    @property
    def joined(self) -> Expr:
        """How many taps of the last axis form one run."""
        last = self.slides[-1]
        return last.window if last.dilation == 1 else as_expr(1)

    def input(self) -> Buffer:
        """The input; a row of pixels with their channels is one axis."""
        *outer, last = (slide.extent for slide in self.slides)
        shape = (self.images, *outer, last * self.channels)
        strides = (*self.x_strides[:-2], as_expr(1))
        return buffer("x", self.dtype, shape, Role.IN, strides)

    def gather(self, x: Buffer, at: RowsAt) -> Stmt:
        """Copies some steps of K of some rows from the input."""
        sizes = (
            *(at.row, at.rows, at.step, at.steps, at.copy.strides[-2]),
            *(self.images, self.channels, *x.strides[:-1]),
        )
        for slide in self.slides:
            sizes += (slide.extent, slide.out, slide.window)
            sizes += (slide.low,) if _is_size(slide.low) else ()
        start, none = (x, tuple(as_expr(0) for _ in x.shape)), as_expr(0)
        copy = (at.copy, (sym(WORKER), at.first, none))
        return Call(self.gathering.name, sizes, (start, copy))

    @property
    def gathering(self) -> LoopFunc:
        """The kernel that gathers rows, of all windows that move in the same way."""
        moves = (
            (s.stride, s.dilation, None if _is_size(s.low) else s.low)
            for s in self.slides
        )
        return _gathering(self.dtype, tuple(moves))

    def direct(self, x: Buffer) -> Direct | None:
        """Windows that can be read in place: neighbours in an image row.

        Each tap of the first axis is one run. None if there are other taps.
        """
        if len(self.slides) != 2 or self.joined != self.slides[-1].window:
            return None
        run = self.joined * self.channels
        if not run.is_const or run.value == 0:
            return None
        down, across = self.slides
        width, height = maximum(across.out, 1), maximum(down.out, 1)

        def at(row: Expr) -> tuple[Expr, Expr, Expr]:
            line = floordiv(row, width)
            return floordiv(line, height), mod(line, height), row - line * width

        def inside(row: Expr, rows: Expr) -> Expr:
            _, y, first = at(row)
            last = first + rows - 1
            tests = [exceeds(last + 1, across.out)]
            tests += [_outside(y, y, down), _outside(first, last, across)]
            return 1 - maximum(*tests)

        def place(row: Expr, tap: Expr) -> Address:
            image, y, first = at(row)
            line = y * down.stride + tap * down.dilation - down.low
            column = (first * across.stride - across.low) * self.channels
            return x, (image, line, column)

        row, tap = across.stride * self.channels, down.dilation * x.strides[1]
        return Direct(down.window, run.value, row, tap, inside, place)

    def rows_loop(self, x: Buffer, at: RowsAt) -> Stmt:
        """Loops over the image rows of some rows."""
        last, y = self.slides[-1], sym("_y")
        width = maximum(last.out, 1)
        outer = (self.images, *(slide.out for slide in self.slides[:-1]))
        lets, place = unflatten_unit(y, outer, "_y")
        first = y * width - at.row
        row = Block(
            (
                *lets,
                Let("_from", Index(maximum(-first, 0))),
                Let("_to", Index(minimum(width, at.rows - first))),
                self._taps(x, at, place, first),
            )
        )
        begin, end = at.row, at.row + at.rows
        return For("_y", floordiv(begin, width), ceildiv(end, width), row)

    def _taps(self, x: Buffer, at: RowsAt, place: Sequence[Expr], first: Expr) -> Stmt:
        """Copies every run of the pixels `_from` to `_to` of an image row."""
        *outer, last = self.slides
        loops = [(f"_w{k}", slide.window) for k, slide in enumerate(outer)]
        image, *position = place
        index, inside, number = [image], [], as_expr(0)
        for (name, window), slide, here in zip(loops, outer, position, strict=True):
            source = here * slide.stride + sym(name) * slide.dilation - slide.low
            index.append(source)
            inside += _bounds(source, slide.extent)
            number = number * window + sym(name)
        tap, joined = as_expr(0), self.joined
        if joined != last.window:
            loops.append(("_wx", last.window))
            tap = sym("_wx")
            number = number * last.window + tap
        run = joined * self.channels
        # The step of K at which the run begins, and the part of the run that is wanted.
        begin, steps = sym("_k0"), at.step + at.steps
        column = sym("_x") * last.stride + tap * last.dilation - last.low
        shift = tap * last.dilation - last.low
        high = floordiv(last.extent - joined - shift, last.stride) + 1
        run_at = _ColumnRun(
            x, at.copy, tuple(index), column * self.channels, begin - at.step
        )
        pixels = run_at.pixels(
            last.extent * self.channels,
            ceildiv(-shift, last.stride),
            high,
            first + sym("_x"),
        )
        if inside:
            whole = inside[0]
            for test in inside[1:]:
                whole = Binary("logical_and", whole, test)
            pixels = If(whole, pixels, run_at.nothing(first + sym("_x")))
        body: Stmt = Block(
            (
                Let("_k0", Index(number * run)),
                Let("_r0", Index(maximum(at.step - begin, 0))),
                Let("_r1", Index(maximum(minimum(run, steps - begin), sym("_r0")))),
                pixels,
            )
        )
        # With many taps, most belong to other passes over K.
        windows = [window for _, window in loops]
        lets, taps = unflatten_unit(sym("_w"), windows, "_wt")
        named = (Let(n, Index(t)) for (n, _), t in zip(loops, taps, strict=True))
        most = maximum(run, 1)
        ends = floordiv(at.step, most), minimum(ceildiv(steps, most), product(windows))
        return For("_w", *ends, Block((*lets, *named, body)))


def _is_size(low: Expr) -> bool:
    """Whether padding can be a parameter of a function: these are not negative."""
    return low.is_const and low.value >= 0


# How windows move along each axis: stride, dilation, and padding if it is negative.
Moves = tuple[tuple[int, int, Expr | None], ...]


@lru_cache(maxsize=256)
def _gathering(dtype: DType, moves: Moves) -> LoopFunc:
    """Gathers rows of windows; only how they move is known, sizes are parameters."""
    names = ["row", "rows", "step", "steps", "copy_row", "images", "channels"]
    strides = [f"x_stride{k}" for k in range(len(moves))]
    names += strides
    slides: list[Slide] = []
    for k, (stride, dilation, low) in enumerate(moves):
        sizes = [f"extent{k}", f"out{k}", f"window{k}"]
        padding = sym(f"low{k}") if low is None else low
        extent, out, window = (sym(name) for name in sizes)
        slides.append(Slide(extent, out, window, stride, dilation, padding))
        names += sizes if low is not None else [*sizes, f"low{k}"]
    channels = sym("channels")
    x_strides = (*(sym(name) for name in strides), channels, as_expr(1))
    windows = Windows(dtype, sym("images"), channels, tuple(slides), x_strides)
    row, rows, step, steps = (sym(name) for name in names[:4])
    copy = buffer("copy", dtype, (rows, steps), Role.OUT, (sym("copy_row"), 1))
    x = windows.input()
    body = windows.rows_loop(x, RowsAt((), row, step, rows, steps, copy))
    ways = "_".join(
        f"{stride}x{dilation}{'' if low is None else f'x{low}'}".replace("-", "m")
        for stride, dilation, low in moves
    )
    return LoopFunc(f"gather_{dtype}_{ways}", tuple(names), (x, copy), body)


@dataclass(frozen=True, slots=True)
class _ColumnRun:
    """Elements `_r0` to `_r1` of a run, for the pixels `_from` to `_to` of a row."""

    x: Buffer
    copy: Buffer
    index: tuple[Expr, ...]  # index of the input row
    source: Expr  # where the run of pixel `_x` begins in that row
    step: Expr  # where it begins in a row of the copy

    def pixels(self, extent: Expr, low: Expr, high: Expr, row: Expr) -> Stmt:
        """Copies the runs; those of pixels `low` to `high` are all inside the row."""
        begin, end = sym("_from"), sym("_to")
        r, r0, r1 = sym("_r"), sym("_r0"), sym("_r1")
        value = Load(self.x, (*self.index, self.source + r))
        clipped = Block(
            (
                Let("_low", Index(minimum(maximum(-self.source, r0), r1))),
                Let("_high", Index(maximum(minimum(extent - self.source, r1), r0))),
                self._store(row, r0, sym("_low"), zero(self.x.dtype)),
                self._store(row, sym("_low"), sym("_high"), value),
                self._store(
                    row, maximum(sym("_high"), sym("_low")), r1, zero(self.x.dtype)
                ),
            )
        )
        whole = self._store(row, r0, r1, value)
        return Block(
            (
                Let("_in", Index(minimum(maximum(low, begin), end))),
                Let("_out", Index(maximum(minimum(high, end), sym("_in")))),
                For("_x", begin, sym("_in"), clipped),
                For("_x", sym("_in"), sym("_out"), whole),
                For("_x", sym("_out"), end, clipped),
            )
        )

    def nothing(self, row: Expr) -> Stmt:
        """Zeros: the row is outside the image."""
        fill = self._store(row, sym("_r0"), sym("_r1"), zero(self.x.dtype))
        return For("_x", sym("_from"), sym("_to"), fill)

    def _store(self, row: Expr, begin: Expr, end: Expr, value: LoopValue) -> Stmt:
        store = Store(self.copy, (row, self.step + sym("_r")), value)
        return For("_r", begin, end, store, Kind.VECTOR)


def _outside(first: Expr, last: Expr, slide: Slide) -> Expr:
    """1 if some window from the first to the last position leaves the image."""
    before = exceeds(slide.low, first * slide.stride)
    reach = last * slide.stride - slide.low + (slide.window - 1) * slide.dilation
    return maximum(before, exceeds(reach + 1, slide.extent))


def _bounds(at: Expr, extent: Expr) -> list[LoopValue]:
    return [
        Binary("ge", Index(at), Index(as_expr(0))),
        Binary("lt", Index(at), Index(extent)),
    ]


def packed_weights(weights: np.ndarray, tile: Tile) -> np.ndarray:
    """(O, C, window..) as the panels of a product, in the order of the windows."""
    outputs, channels = weights.shape[:2]
    last = np.moveaxis(weights.reshape(outputs, channels, -1), 0, -1)  # (C, taps, O)
    matrix = last.swapaxes(0, 1).reshape(-1, outputs)
    return pack_constant(matrix, tile)


def pack_weights(name: str, w: Buffer, tile: Tile) -> LoopFunc:
    """The same for weights that are not constant: (O, C, taps) to (P, K, NR)."""
    outputs, channels, taps = w.shape
    panels = ceildiv(outputs, tile.NR)
    shape = (panels, taps * channels, as_expr(tile.NR))
    packed = buffer("packed", w.dtype, shape, Role.OUT)
    panel, t, c, j = sym("_u"), sym("_t"), sym("_c"), sym("_j")
    row = panel * tile.NR + j
    inside = Binary("lt", Index(row), Index(outputs))
    value = Load(w, (row, c, t), inside)
    store = Store(packed, (panel, t * channels + c, j), value)
    body: Stmt = For("_j", as_expr(0), as_expr(tile.NR), store, Kind.VECTOR)
    body = For("_t", as_expr(0), taps, For("_c", as_expr(0), channels, body))
    grain = maximum(1, floordiv(PACK_WORK, maximum(shape[1] * tile.NR, 1)))
    loop = For("_u", as_expr(0), panels, body, Kind.PARALLEL, grain=grain)
    return LoopFunc(name, (), (w, packed), loop)
