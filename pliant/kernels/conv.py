"""Convolutions on micro-kernels, with no unfolded copy of the input in memory.

    out (N, O, pixels) = W (O/g, C/g * window) x patches (C/g * window, pixels)

The result is cut into blocks of rows and columns. For a block, the input under its
windows is copied into a patch (`conv_patch.py`) that stays in L2 while every panel of
the weights goes over it with the micro-kernels of `conv_micro.py`:

    for unit in (split of O, image, block, groups)  parallel
      patch = input under the block
      for panel of weights in the split
        deep:  for tile of pixels:   scratch[pixels, panel] = deep kernel
        wide:  for tile of channels: for vectors of positions: scratch = wide kernel
        epilogue: scratch -> results

The sizes decide per call whether deep or wide runs: whichever computes less in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    Switch,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.choose import THREADS, grain_of
from pliant.kernels.conv_blocks import Blocks
from pliant.kernels.conv_micro import (
    ConvTile,
    conv_tile,
    deep_kernel,
    deep_name,
    wide_heights,
    wide_kernel,
    wide_name,
)
from pliant.kernels.conv_patch import PatchPlace, Slide, fill
from pliant.kernels.packing import unflatten_unit
from pliant.machine.target import Target
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

# Groups of a few channels share a unit up to this many multiply-adds.
GROUP_WORK = 1 << 16
# The extra cost of a transposed store over a plain one, in multiply-adds per result.
TRANSPOSED = 12
# Relative time of a step of the deep and of the wide kernel, measured on AVX-512. With
# taps, vectors of the wide kernel are not aligned to cache lines. Without taps, the
# deep kernel uses each line of the patch only once.
PACE_OF_TAPS, PACE_OF_POINTS = (14, 15), (15, 14)


@dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution: sizes, how its window moves, the layout of its input."""

    dtype: DType
    images: Expr
    channels: Expr  # input channels of a group
    outputs: Expr  # output channels of a group
    groups: int
    slides: tuple[Slide, ...]  # one per spatial axis
    x_strides: tuple[Expr, ...]  # (N, C, spatial..)

    @property
    def taps(self) -> Expr:
        return product(slide.window for slide in self.slides)

    @property
    def depth(self) -> Expr:
        return self.channels * self.taps

    @property
    def pointwise(self) -> bool:
        """Every output pixel depends on the input pixel at the same place only."""
        spatial = self.x_strides[2:]
        return all(
            slide.window == as_expr(1)
            and slide.stride == 1
            and slide.low == as_expr(0)
            and slide.extent == slide.out
            for slide in self.slides
        ) and all(
            outer == inner * slide.extent
            for outer, inner, slide in zip(
                spatial, spatial[1:], self.slides[1:], strict=False
            )
        )

    def in_rows(self, flat: bool) -> Convolution:
        """The same with at least two spatial axes; flat: all pixels in one long row."""
        one = Slide(as_expr(1), as_expr(1), as_expr(1))
        lead, last = self.x_strides[:2], self.x_strides[-1]
        if flat:
            pixels = product(slide.out for slide in self.slides)
            slides = (one, Slide(pixels, pixels, as_expr(1)))
        elif len(self.slides) == 1:
            slides = (one, *self.slides)
        else:
            return self
        return replace(self, slides=slides, x_strides=(*lead, as_expr(0), last))

    def input(self) -> Buffer:
        extents = (slide.extent for slide in self.slides)
        shape = (self.images, self.channels * self.groups, *extents)
        return buffer("x", self.dtype, shape, Role.IN, self.x_strides)


@dataclass(frozen=True, slots=True)
class ResultAt:
    """A box of the output whose results are ready in scratch."""

    image: Expr
    channel: Expr  # the first, and how many
    channels: Expr
    outer: tuple[Expr, ...]
    row: Expr
    rows: Expr
    column: Expr
    columns: Expr
    element: Callable[[Expr, Expr, Expr], LoopValue]  # result at (channel, row, column)


# Writes the results of one box.
Epilogue = Callable[[ResultAt], list[Stmt]]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The convolution as a statement, its buffers, and the micro-kernels it calls."""

    body: Stmt
    x: Buffer
    w: Buffer
    work: tuple[Buffer, ...]
    helpers: tuple[LoopFunc, ...]


def packed_shape(spec: Convolution, tile: ConvTile) -> tuple[Expr, ...]:
    """Weights as the kernels read them: (groups, panels, channels * taps, width)."""
    panels = ceildiv(spec.outputs, tile.width)
    return (as_expr(spec.groups), panels, spec.depth, as_expr(tile.width))


# The index of the weight of (group, output, channel, tap..) in the model's tensor.
Source = Callable[[Expr, Expr, Expr, tuple[Expr, ...]], tuple[Expr, ...]]


def pack(
    name: str, spec: Convolution, tile: ConvTile, w: Buffer, source: Source
) -> LoopFunc:
    """Packs weights that are not constant into panels."""
    shape = packed_shape(spec, tile)
    packed = buffer("packed", spec.dtype, shape, Role.OUT)
    lets, (group, panel) = unflatten_unit(sym("_u"), shape[:2])
    c, j = sym("_c"), sym("_j")
    taps = tuple(sym(f"_w{k}") for k in range(len(spec.slides)))
    row, k = panel * tile.width + j, c
    for tap, slide in zip(taps, spec.slides, strict=True):
        k = k * slide.window + tap
    inside = Binary("lt", Index(row), Index(spec.outputs))
    value = Load(w, source(group, row, c, taps), inside)
    body: Stmt = For(
        "_j",
        as_expr(0),
        as_expr(tile.width),
        Store(packed, (group, panel, k, j), value),
        Kind.VECTOR,
    )
    for number, slide in reversed(list(enumerate(spec.slides))):
        body = For(f"_w{number}", as_expr(0), slide.window, body)
    body = Block((*lets, For("_c", as_expr(0), spec.channels, body)))
    grain = maximum(1, floordiv(1 << 14, maximum(spec.depth * tile.width, 1)))
    units = product(shape[:2])
    loop = For("_u", as_expr(0), units, body, Kind.PARALLEL, grain=grain)
    return LoopFunc(name, (), (w, packed), loop)


class _Conv:
    def __init__(
        self, spec: Convolution, target: Target, epilogue: Epilogue, flat: bool
    ) -> None:
        self.spec, self.epilogue = spec, epilogue
        self.tile = tile = conv_tile(spec.dtype, spec.outputs, target)
        self.blocks = blocks = Blocks(
            spec.dtype, spec.channels, spec.slides, tile, target, flat
        )
        self.x = spec.input()
        shape = packed_shape(spec, tile)
        self.w = buffer("w", spec.dtype, shape, Role.IN)
        self.panels = shape[1]
        storage = (THREADS, blocks.patch_elements())
        self.patch = blocks.patch(buffer("patch", spec.dtype, storage, Role.WORK))
        self.taps = spec.taps
        self.has_taps = self.taps != as_expr(1)
        few = min(tile.rows, tile.width)
        self.deep = tile.width == tile.columns
        elements = few * blocks.positions
        if self.deep:
            elements = max(elements, blocks.positions * tile.width)
        self.scratch = buffer("scratch", spec.dtype, (THREADS, elements), Role.WORK)
        self.table = buffer("taps", DType.I64, (THREADS, self.taps), Role.WORK)
        pixels = (THREADS, blocks.positions)
        self.where = buffer("at", DType.I64, pixels, Role.WORK)
        transposed = (THREADS, tile.width, blocks.positions)
        self.transposed = buffer("transposed", spec.dtype, transposed, Role.WORK)

    def kernel(self) -> Kernel:
        work = [self.patch.buffer, self.scratch]
        tile, dtype = self.tile, self.spec.dtype
        heights = wide_heights(self.spec.outputs, tile)
        helpers = [wide_kernel(dtype, h, tile, self.has_taps) for h in heights]
        if self.has_taps:
            work.append(self.table)
        if self.deep:
            work += (self.where, self.transposed)
            helpers += [
                deep_kernel(dtype, h, tile, self.has_taps)
                for h in range(1, tile.pixels + 1)
            ]
        return Kernel(self.body(), self.x, self.w, tuple(work), tuple(helpers))

    # ---- units

    def body(self) -> Stmt:
        spec, blocks = self.spec, self.blocks
        outer = tuple(s.out for s in blocks.outer)
        down, across = sym("_down"), sym("_across")
        spatial = product((spec.images, *outer, down, across))
        pixels = sym("_height") * sym("_width")
        one = maximum(self.spec.outputs * self.spec.depth * pixels, 1)
        together = minimum(spec.groups, floordiv(GROUP_WORK, one) + 1)
        bundles = ceildiv(spec.groups, sym("_together"))
        # With too few blocks to keep every thread busy, output channels are split too.
        wanted = ceildiv(4 * (THREADS - 1), maximum(spatial * bundles, 1))
        splits = maximum(minimum(self.panels, wanted), 1)
        lets: list[Stmt] = [
            *blocks.lets(),
            Let("_together", Index(as_expr(1) if spec.groups == 1 else together)),
            Let("_per", Index(ceildiv(self.panels, splits))),
            Let("_splits", Index(ceildiv(self.panels, sym("_per")))),
        ]
        extents = (sym("_splits"), spec.images, *outer, down, across, bundles)
        units = product(extents)
        inside = self.unit(extents)
        work = floordiv(one * sym("_together"), maximum(sym("_splits"), 1))
        grain = grain_of(work)
        loop = For("_u", as_expr(0), units, inside, Kind.PARALLEL, grain=grain)
        return Block((*lets, loop))

    def unit(self, extents: Sequence[Expr]) -> Stmt:
        spec, blocks = self.spec, self.blocks
        lets, (split, image, *outer, down, across, bundle) = unflatten_unit(
            sym("_u"), extents
        )
        row, column = down * sym("_height"), across * sym("_width")
        group = sym("_group")
        place = PatchPlace(
            image,
            group * blocks.channels,
            tuple(outer),
            row,
            column,
            sym("_rows"),
            sym("_columns"),
        )
        rows = minimum(sym("_height"), blocks.rows.out - row)
        columns = minimum(sym("_width"), blocks.columns.out - column)
        first = bundle * sym("_together")
        count = (sym("_rows") - 1) * sym("_pitch") + sym("_columns")
        begin = split * sym("_per")
        panel_loop = For(
            "_panel",
            begin,
            minimum(begin + sym("_per"), self.panels),
            self.panel(place, group),
        )
        per_group = Block(
            (
                fill(self.patch, self.x, blocks.channels, place, self.tile.columns),
                panel_loop,
            )
        )
        return Block(
            (
                *lets,
                Let("_rows", Index(rows)),
                Let("_columns", Index(columns)),
                Let("_count", Index(count)),
                *([self.patch.fill_taps(self.table)] if self.has_taps else []),
                *([self.pixel_table()] if self.deep else []),
                For(
                    "_group",
                    first,
                    minimum(first + sym("_together"), spec.groups),
                    per_group,
                ),
            )
        )

    def is_deep(self) -> LoopValue:
        """Whether the deep kernel has less to compute on this block."""
        spec, tile = self.spec, self.tile
        pixels = sym("_rows") * sym("_columns")
        positions = ceildiv(sym("_count"), tile.columns) * tile.columns
        deep_cost = pixels * (spec.depth + TRANSPOSED) * self.panels * tile.width
        wide_cost = positions * spec.depth * spec.outputs
        deep, wide = PACE_OF_TAPS if self.has_taps else PACE_OF_POINTS
        return Binary("lt", Index(deep_cost * deep), Index(wide_cost * wide))

    def pixel_table(self) -> Stmt:
        """The position of every pixel of the block, for the deep kernel."""
        r, j = sym("_r"), sym("_j")
        at = (sym(WORKER), r * sym("_columns") + j)
        store = Store(self.where, at, Index(r * sym("_pitch") + j))
        inner = For("_j", as_expr(0), sym("_columns"), store, Kind.VECTOR)
        return If(self.is_deep(), For("_r", as_expr(0), sym("_rows"), inner))

    # ---- one panel of weights over the patch

    def panel(self, place: PatchPlace, group: Expr) -> Stmt:
        width = self.tile.width
        channel = sym("_panel") * width
        outputs = minimum(width, self.spec.outputs - channel)
        base = group * self.spec.outputs + channel
        wide = self.wide(place, base)
        body: Stmt = Block(tuple(wide))
        if self.deep:
            deep = Block(tuple(self.deep_tiles(place, base)))
            body = If(self.is_deep(), deep, body)
        return Block((Let("_outputs", Index(outputs)), body))

    def wide(self, place: PatchPlace, base: Expr) -> list[Stmt]:
        tile, pitch = self.tile, as_expr(self.blocks.positions)
        start, height = sym("_start"), sym("_tile")
        vectors, q = ceildiv(sym("_count"), tile.columns), sym("_q") * tile.columns
        worker, nothing = sym(WORKER), as_expr(0)
        w = (self.w, (sym("_group"), sym("_panel"), nothing, start))
        patch = (self.patch.buffer, (worker, nothing))
        out = (self.scratch, (worker, q))
        sizes, given = self._arguments(w, patch, out, (as_expr(tile.width), q, pitch))
        cases = tuple(
            (
                h,
                For(
                    "_q",
                    nothing,
                    vectors,
                    Call(
                        wide_name(self.spec.dtype, h, tile, self.has_taps), sizes, given
                    ),
                ),
            )
            for h in wide_heights(self.spec.outputs, tile)
        )
        ready = ResultAt(
            place.image,
            base + start,
            height,
            place.outer,
            place.row,
            place.rows,
            place.column,
            place.columns,
            lambda m, r, j: Load(
                self.scratch, (worker, m * pitch + r * sym("_pitch") + j)
            ),
        )
        body = [Switch(height, cases), *self.epilogue(ready)]
        return _even_tiles(sym("_outputs"), tile.rows, body)

    def deep_tiles(self, place: PatchPlace, base: Expr) -> list[Stmt]:
        tile, worker, nothing = self.tile, sym(WORKER), as_expr(0)
        start, height = sym("_start"), sym("_tile")
        w = (self.w, (sym("_group"), sym("_panel"), nothing, nothing))
        patch = (self.patch.buffer, (worker, nothing))
        where = (self.where, (worker, start))
        out = (self.scratch, (worker, start * tile.width))
        sizes, given = self._arguments(w, patch, out, (), where)
        cases = tuple(
            (h, Call(deep_name(self.spec.dtype, h, tile, self.has_taps), sizes, given))
            for h in range(1, tile.pixels + 1)
        )
        pixels = sym("_rows") * sym("_columns")
        tiles = _even_tiles(pixels, tile.pixels, [Switch(height, cases)])
        ready = ResultAt(
            place.image,
            base,
            sym("_outputs"),
            place.outer,
            place.row,
            place.rows,
            place.column,
            place.columns,
            lambda m, r, j: Load(self.transposed, (worker, m, r * sym("_columns") + j)),
        )
        return [*tiles, self.transpose(pixels), *self.epilogue(ready)]

    def transpose(self, pixels: Expr) -> Stmt:
        """Transposes a row per pixel to a row per channel, in whole vectors.

        Reading past the last pixel stays in scratch; those values are not used.
        """
        m, j, lanes = sym("_m"), sym("_j"), self.tile.columns // 2
        pixel = sym("_p") * lanes + j
        value = Load(self.scratch, (sym(WORKER), pixel * self.tile.width + m))
        store = Store(self.transposed, (sym(WORKER), m, pixel), value)
        square = For("_j", as_expr(0), as_expr(lanes), store, Kind.VECTOR)
        columns = For("_m", as_expr(0), as_expr(self.tile.width), square)
        return For("_p", as_expr(0), ceildiv(pixels, lanes), columns)

    def _arguments(
        self,
        w: tuple[Buffer, tuple[Expr, ...]],
        patch: tuple[Buffer, tuple[Expr, ...]],
        out: tuple[Buffer, tuple[Expr, ...]],
        sizes: tuple[Expr, ...],
        *more: tuple[Buffer, tuple[Expr, ...]],
    ) -> tuple[tuple[Expr, ...], tuple[tuple[Buffer, tuple[Expr, ...]], ...]]:
        """Sizes and buffers of a micro-kernel, with or without a table of taps."""
        channels, plane = self.blocks.channels, sym("_channel")
        if not self.has_taps:
            return (channels, plane, *sizes), (w, patch, *more, out)
        table = (self.table, (sym(WORKER), as_expr(0)))
        return (self.taps, channels, plane, *sizes), (w, patch, table, *more, out)


def _even_tiles(rows: Expr, most: int, body: Sequence[Stmt]) -> list[Stmt]:
    """Runs the body for tiles of `rows`: as few as possible, of even height.

    `_start` is a tile's first row, `_tile` its height.
    """
    t, tiles = sym("_t"), maximum(sym("_tiles"), 1)
    first = t * floordiv(rows, tiles) + minimum(t, mod(rows, tiles))
    inside = (
        Let("_start", Index(first)),
        Let("_tile", Index(floordiv(rows + tiles - 1 - t, tiles))),
        *body,
    )
    return [
        Let("_tiles", Index(ceildiv(rows, most))),
        For("_t", as_expr(0), sym("_tiles"), Block(inside)),
    ]


def conv(
    spec: Convolution, target: Target, epilogue: Epilogue, flat: bool = False
) -> Kernel:
    """Flat: the epilogue's columns are positions in the whole plane."""
    return _Conv(spec.in_rows(flat), target, epilogue, flat).kernel()
