"""Convolutions with channels last: products of gathered rows and packed weights."""

from __future__ import annotations

from functools import partial

import numpy as np

from pliant.ir.graph import Op
from pliant.ir.loops import Role, Stmt, buffer
from pliant.ir.packed import Packed
from pliant.ir.types import TensorType
from pliant.ir.views import View
from pliant.kernels.conv_last import Windows, pack_weights, packed_weights
from pliant.kernels.conv_patch import Slide
from pliant.kernels.product import Cuts, Product, RowsAt
from pliant.kernels.tiles import Tile, gemm_tile
from pliant.lower.contract import (
    Gathered,
    Given,
    function_of,
    known_now,
    product_steps,
)
from pliant.lower.epilogue import TileEpilogue
from pliant.lower.step import Fusion, KernelStep, Temporary, TileAxes
from pliant.sym import as_expr, maximum, product

FEW_PANELS = 4  # up to this many panels of weights, windows are read in place


def lower_conv_last(fusion: Fusion) -> list[KernelStep]:
    name, target, root = fusion.name, fusion.target, fusion.root("conv_last")
    epilogue = TileEpilogue.of(fusion, root)
    x, w = root.operands
    image, weight = fusion.views[x], fusion.views[w]
    windows = _windows(root, image)
    source = windows.input()

    def prologue(at: RowsAt) -> list[Stmt]:
        return [windows.gather(source, at)]

    depth, outputs = windows.depth, root.result.shape[-1]
    spec = Product(
        root.result.dtype,
        (),
        windows.rows,
        outputs,
        depth,
        (maximum(depth, 2), as_expr(1)),  # as if rows were contiguous
        (),
        None,
        computed=True,
    )
    rank = root.result.type.rank
    axes = TileAxes((), tuple(range(rank - 1)), (rank - 1,))
    tile = gemm_tile(spec.dtype, target)
    # Copied rows are read faster, so with many panels the copy pays for itself.
    few = outputs.is_const and outputs.value <= FEW_PANELS * tile.NR
    whole = depth.is_const and depth.value <= tile.depth
    in_place = fusion.options.direct and few and whole
    direct = windows.direct(source) if in_place else None
    gathered = Gathered(prologue, source, image, (windows.gathering,), direct)
    constant = known_now(fusion.constants.get(w), weight)
    if constant is not None and constant.type.numel == product(weight.shape):

        def panels(tile: Tile) -> Packed:
            key = ("conv_last", weight.shape, tile)
            make = partial(_packed, weight, tile)
            return Packed(key, constant, "packed", constant.type.dtype, make)

        given = Given(spec, axes, None, weight, panels, gathered=gathered)
        return product_steps(name, given, epilogue, target, Cuts(strips=False))
    shape = (outputs, windows.channels, product(w.shape[2:]))
    func = pack_weights(f"{name}_pack", buffer("w", w.dtype, shape, Role.IN), tile)
    made = Temporary(TensorType(w.dtype, func.buffers[1].shape))
    pack = KernelStep(function_of(func.name, func.body, func.buffers), (weight, made))
    given = Given(spec, axes, None, weight, made, (pack,), gathered=gathered)
    return product_steps(name, given, epilogue, target, Cuts(strips=False))


def _windows(root: Op, image: View) -> Windows:
    x, w = root.operands
    slides = zip(
        x.shape[1:-1],
        root.result.shape[1:-1],
        w.shape[2:],
        root.ints_attr("stride"),
        root.ints_attr("dilation"),
        (as_expr(p) for p in root.ints_attr("low")),
        strict=True,
    )
    return Windows(
        root.result.dtype,
        x.shape[0],
        x.shape[-1],
        tuple(Slide(*slide) for slide in slides),
        image.strides,
    )


def _packed(view: View, tile: Tile, data: np.ndarray) -> np.ndarray:
    return packed_weights(data.reshape(tuple(d.value for d in view.shape)), tile)
