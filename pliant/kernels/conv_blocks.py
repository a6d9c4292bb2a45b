"""How the result of a convolution is cut into blocks that fit L2 and the buffers.

A block is `_rows` x `_columns` outputs, numbered q = row*pitch + column in its patch
(`conv_patch.py`). Buffers hold `positions` of them, a number known at compile time, and
`patch_elements` of the input, so for every size of the image

    (rows - 1)*pitch + columns <= positions    computed by the wide kernel, in tiles
    rows*columns               <= positions    pixels of the deep kernel
    channels*channel + a tile  <= patch_elements

Rows are limited by rows*pitch <= positions. The first two inequalities follow if pitch
>= columns, and columns <= positions holds for a single row of any pitch.
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.ir.loops import Buffer, Index, Let, Stmt
from pliant.ir.types import DType
from pliant.kernels.conv_micro import ConvTile
from pliant.kernels.conv_patch import Patch, Slide
from pliant.machine.target import Target
from pliant.sym import Expr, as_expr, ceildiv, floordiv, maximum, minimum, product, sym

POSITIONS = 512  # positions of a block: their results for a tile of channels stay in L1


class Blocks:
    """How the result is cut: sizes as expressions, and the Lets that name them."""

    def __init__(
        self,
        dtype: DType,
        channels: Expr,  # input channels of a group
        slides: Sequence[Slide],
        tile: ConvTile,
        target: Target,
        flat: bool,  # a single long row, without taps
    ) -> None:
        *outer, self.rows, self.columns = slides
        self.outer = tuple(outer)
        self.tile, self.flat, self.channels = tile, flat, channels
        few = min(tile.rows, tile.width)
        # A multiple of the tile's columns; more of them where tiles are low.
        self.positions = tile.columns * (
            max(POSITIONS, 4096 // few) // tile.columns or 1
        )
        planes = product(s.window for s in outer)
        self.planes = planes * self.rows.phases * self.columns.phases
        # The patch shares L2 with a panel of weights. Without taps there is no halo, so
        # small patches cost nothing, and more of a small patch stays in L1.
        self.budget = target.l2 // (8 if flat else 4) // dtype.bytes
        # Neighbouring rows may share their padding only if it is complete on both sides
        # and no wider than the window reaches, so that pitch >= columns.
        self.shared = as_expr(0)
        across = self.columns
        if across.stride == 1 and not self.flat:
            high = across.out + across.reach - across.extent - across.low
            self.shared = maximum(minimum(across.low, high, across.reach), 0)
        widest = self.positions if self.flat else self.positions // 4
        # If even one such row is too large for L2, blocks are narrower.
        row = maximum(self.channels * self.planes * (1 + self.rows.reach), 1)
        room = floordiv(self.budget, row * tile.columns) * tile.columns
        self.widest = minimum(widest, maximum(room, tile.columns))

    def lets(self) -> list[Stmt]:
        rows, columns, tile = self.rows, self.columns, self.tile
        across = maximum(ceildiv(columns.out, self.widest), 1)
        width = ceildiv(columns.out, across)
        if self.flat:
            width = tile.columns * ceildiv(width, tile.columns)
        one = floordiv(1, sym("_wide"))  # 1 if a block is as wide as the image
        pitch = sym("_width") + columns.reach - self.shared * one
        line = self.channels * self.planes * sym("_pitch")
        fit = floordiv(self.budget, maximum(line, 1)) - rows.reach
        tall = minimum(floordiv(self.positions, sym("_pitch")), fit)
        height = ceildiv(rows.out, maximum(ceildiv(rows.out, maximum(tall, 1)), 1))
        plane = (sym("_height") + rows.reach - 1) * sym("_pitch")
        plane = plane + sym("_width") + columns.reach
        # An odd number of cache lines, so that channels spread over all cache sets.
        channel = ceildiv(self.planes * sym("_plane"), 32) * 32 + 16
        named = (
            ("_wide", across),
            ("_width", maximum(width, 1)),
            ("_pitch", pitch),
            ("_height", maximum(height, 1)),
            ("_plane", plane),
            ("_channel", channel),
            # Computed again: after rounding up, the last blocks could be empty.
            ("_down", ceildiv(rows.out, sym("_height"))),
            ("_across", ceildiv(columns.out, sym("_width"))),
        )
        return [Let(name, Index(value)) for name, value in named]

    def patch_elements(self) -> Expr:
        """An upper bound on a patch: the whole input, or what the block sizes allow."""
        rows, columns = self.rows, self.columns
        line = self.channels * self.planes
        slack = self.channels * (self.planes * self.shared + 48) + self.tile.columns
        least = line * (1 + rows.reach) * (self.widest + columns.reach)
        width = columns.out + columns.reach + (self.tile.columns if self.flat else 0)
        whole = line * (rows.out + rows.reach) * width
        return minimum(maximum(self.budget, least), whole) + slack

    def patch(self, storage: Buffer) -> Patch:
        sizes = sym("_pitch"), sym("_plane"), sym("_channel")
        return Patch(storage, self.outer, self.rows, self.columns, *sizes)
