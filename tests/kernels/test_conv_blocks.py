"""Blocks of convolutions fit their buffers, at every size and on every target.

The buffers of a block have a length known at compile time, and how much is put into
them depends on the image. Blocks once were too large where rows are padded wider than
their window reaches: results of two rows had one position. That is wrong only where an
image fills a block to the last positions, for a Conv2d(4, 6, 1, padding=1) at one size
in eighty, at other ones on each target, and random sizes below 40 did not meet them.
So block sizes are checked here for all images up to a few blocks, and machine code runs
on those that leave the least room, in buffers that end where memory does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from guarded import GuardedProgram, Side
from machines import TARGETS, machine, with_caches
from many_sizes import Array, evaluated

from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module
from pliant.ir.loops import Index, Let
from pliant.ir.types import DType, tensor
from pliant.kernels.conv_blocks import Blocks
from pliant.kernels.conv_micro import conv_tile
from pliant.kernels.conv_patch import Slide
from pliant.machine.target import Target, avx2, avx512, baseline, neon
from pliant.sym import as_expr, floordiv, sym


@dataclass(frozen=True)
class Layer:
    """A convolution in two dims; pairs are of rows and columns."""

    channels: int
    outputs: int
    window: tuple[int, int]
    padding: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)

    def spans(self) -> list[int]:
        steps = zip(self.dilation, self.window, strict=True)
        return [d * (k - 1) + 1 for d, k in steps]

    def least(self) -> list[int]:
        """The least image that has a result."""
        pads = zip(self.spans(), self.padding, strict=True)
        return [max(1, span - 2 * pad) for span, pad in pads]

    def slides(self) -> list[Slide]:
        found = []
        for k, extent in enumerate((sym("h"), sym("w"))):
            left = extent + 2 * self.padding[k] - self.spans()[k]
            moves = self.stride[k], self.dilation[k], as_expr(self.padding[k])
            out = floordiv(left, self.stride[k]) + 1
            found.append(Slide(extent, out, as_expr(self.window[k]), *moves))
        return found


@dataclass(frozen=True)
class Room:
    """What the blocks of some images need, and what there is for it."""

    pairs: tuple[tuple[str, Array, Array], ...]

    def used(self) -> Array:
        """The part of the buffers that is used, of the fullest."""
        return np.max([need / there for _, need, there in self.pairs], axis=0)


def room(
    layer: Layer, target: Target, heights: Array, widths: Array, dtype: DType
) -> Room:
    tile = conv_tile(dtype, as_expr(layer.outputs), target)
    channels, slides = as_expr(layer.channels), layer.slides()
    blocks = Blocks(dtype, channels, slides, tile, target, flat=False)
    known: dict[str, Array] = {"h": heights, "w": widths}
    for let in blocks.lets():
        assert isinstance(let, Let) and isinstance(let.value, Index)
        known[let.name] = evaluated(let.value.dim, known)
    out = [evaluated(slide.out, known) for slide in slides]
    rows = np.minimum(known["_height"], out[0])
    columns = np.minimum(known["_width"], out[1])
    count = (rows - 1) * known["_pitch"] + columns
    positions = np.full_like(heights, blocks.positions)
    patch = layer.channels * known["_channel"] + tile.columns
    return Room(
        (
            ("tiles", -(-count // tile.columns) * tile.columns, positions),
            ("pixels", rows * columns, positions),
            ("positions", count, positions),
            ("patch", patch, evaluated(blocks.patch_elements(), known)),
        )
    )


WINDOWS: dict[tuple[int, int], list[tuple[int, int]]] = {
    (1, 1): [(0, 1), (1, 1), (2, 3), (0, 20)],
    (3, 1): [(0, 0), (1, 1), (2, 5)],
    (3, 2): [(1, 0), (0, 1), (1, 2), (0, 9)],
    (3, 3): [(0, 0), (1, 1), (1, 2), (3, 4)],
    (1, 7): [(0, 3), (1, 7)],
}
MOVES = [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 1), (2, 3)), ((1, 2), (1, 1))]
OF_CHANNELS = [(1, 1), (3, 2), (4, 6), (24, 33), (700, 300)]


def layers() -> Iterator[Layer]:
    for window, paddings in WINDOWS.items():
        for padding, moves, few in product(paddings, MOVES, OF_CHANNELS):
            yield Layer(*few, window, padding, *moves)


@pytest.mark.parametrize("made", [avx512, avx2, baseline, neon])
@pytest.mark.parametrize("second", [128, 512, 2048])
def test_blocks_fit_their_buffers(made: Any, second: int) -> None:
    target = with_caches(made(), 32, second, 32 << 10)
    few = [*range(1, 71), 127, 128, 129, 255, 256, 257, 511, 512, 513, 2049]
    for layer in layers():
        grid = np.meshgrid(few, few, indexing="ij")
        high, wide = layer.least()
        kept = (grid[0] >= high) & (grid[1] >= wide)
        heights, widths = grid[0][kept], grid[1][kept]
        for name, need, there in room(layer, target, heights, widths, DType.F32).pairs:
            worst = int(np.argmax(need - there))
            assert need[worst] <= there[worst], (
                f"{layer} at {heights[worst]} x {widths[worst]}: {need[worst]} "
                f"{name} where there is room for {there[worst]}"
            )


# Padded wider than the window reaches, as wide, and less; deep and wide kernels.
BUILT = [
    Layer(4, 6, (1, 1), (1, 1)),
    Layer(1, 1, (1, 1), (0, 2)),
    Layer(3, 2, (3, 1), (1, 1)),
    Layer(5, 8, (3, 2), (1, 2), (2, 1)),
    Layer(2, 7, (2, 2), (1, 3), (1, 1), (2, 2)),
    Layer(4, 4, (3, 3), (1, 1)),
    Layer(3, 33, (1, 3), (0, 0)),
    Layer(40, 32, (3, 3), (1, 2)),
]


def fullest(layer: Layer, target: Target, count: int) -> list[tuple[int, int]]:
    """Images whose blocks leave the least room in their buffers, and few pixels."""
    grid = np.meshgrid(np.arange(1, 61), np.arange(1, 61), indexing="ij")
    high, wide = layer.least()
    kept = (grid[0] >= high) & (grid[1] >= wide)
    heights, widths = grid[0][kept], grid[1][kept]
    pairs = room(layer, target, heights, widths, DType.F32).pairs
    need, there = next(pair[1:] for pair in pairs if pair[0] == "positions")
    order = np.lexsort((heights * widths, -need / there))[:count]
    return [(int(heights[k]), int(widths[k])) for k in order]


def module(weights: list[Array]) -> Module:
    """Every layer beside the others, each with an input and dims of its own."""
    b, results = Builder(), []
    for number, (layer, weight) in enumerate(zip(BUILT, weights, strict=True)):
        dims = [sym(f"{name}{number}") for name in "nhw"]
        kind = tensor(DType.F32, dims[0], layer.channels, *dims[1:])
        held = Constant(f"weight{number}", tensor(DType.F32, *weight.shape), weight)
        pads = {"low": layer.padding, "high": layer.padding}
        moves = {"stride": layer.stride, "dilation": layer.dilation}
        x = b.param(f"x{number}", kind)
        results.append(b.emit("conv", x, b.constant(held), groups=1, **pads, **moves))
    graph = b.finish("main", results)
    return Module({"main": graph}, constants=dict(b.constants))


@pytest.mark.parametrize("target", TARGETS)
def test_images_that_fill_their_blocks(target: str) -> None:
    source = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return source.standard_normal(shape).astype(np.float32)

    weights = [normal(v.outputs, v.channels, *v.window) for v in BUILT]
    program = GuardedProgram(module(weights), machine(target))
    chosen = [fullest(layer, machine(target), 6) for layer in BUILT]
    for number, sizes in enumerate(zip(*chosen, strict=True)):
        images = [
            normal(1 + number % 2, layer.channels, *size)
            for layer, size in zip(BUILT, sizes, strict=True)
        ]
        results = program(images, (Side.END, Side.START)[number % 2])
        for layer, x, w, got in zip(BUILT, images, weights, results, strict=True):
            given = torch.from_numpy(x).double(), torch.from_numpy(w).double()
            moves = layer.stride, layer.padding, layer.dilation
            want = F.conv2d(*given, None, *moves)
            # What rounding every product and sum of so many terms can come to.
            terms = 2.0**-24 * (layer.channels * np.prod(layer.window) + 2)
            bound = terms * F.conv2d(given[0].abs(), given[1].abs(), None, *moves)
            error = (torch.from_numpy(got) - want).abs()
            assert (error <= bound).all(), f"{layer} at {x.shape}"
