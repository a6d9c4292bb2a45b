"""Products with coded weights: their panels, and the call of their kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from pliant.errors import InternalError
from pliant.ir.graph import Value
from pliant.ir.loops import Buffer, Stmt
from pliant.ir.packed import Packed
from pliant.ir.types import DType
from pliant.kernels.coded import WeightCode, coded_product, pack_codes, pack_scales
from pliant.kernels.product import TileAt
from pliant.kernels.tiles import gemm_tile
from pliant.lower.contract import function_of, known_now, scratch_of
from pliant.lower.epilogue import TileEpilogue
from pliant.lower.step import Argument, Fusion, KernelStep, TileAxes
from pliant.sym import product


def lower_coded(fusion: Fusion) -> list[KernelStep]:
    root, target = fusion.root("coded_matmul"), fusion.target
    epilogue = TileEpilogue.of(fusion, root)
    x, codes, scale, *least = root.operands
    n, k = (d.value for d in codes.shape)
    code = WeightCode(
        n,
        k,
        root.int_attr("bits"),
        root.int_attr("low"),
        root.float_attr("zero"),
        codes.dtype,
        k // scale.shape[1].value,
        scale.dtype,
        bool(least),
    )
    width = gemm_tile(DType.F32, target).NR
    rank = root.result.type.rank
    axes = TileAxes((), tuple(range(rank - 1)), (rank - 1,))

    def write(at: TileAt) -> list[Stmt]:
        return epilogue.write(at, axes)

    made = coded_product(code, product(x.shape[:-1]), target, write)

    def packed(value: Value, make: Callable[[np.ndarray], np.ndarray]) -> Packed:
        view = fusion.views[value]
        constant = known_now(fusion.constants.get(value), view)
        if constant is None or not view.is_contiguous():
            raise InternalError("lower", f"{value} of a coded product is no constant")
        start, count = view.offset.value, value.type.numel.value
        held = DType.U8 if value is codes and code.bits == 4 else value.dtype
        return Packed(
            ("coded", code, width, start),
            constant,
            "coded",
            held,
            partial(_packed_part, make, slice(start, start + count)),
        )

    pack_rows = partial(pack_codes, code=code, width=width)
    pack_factors = partial(pack_scales, code=code, width=width)
    arguments: list[Argument] = [packed(codes, pack_rows)]
    arguments += [packed(part, pack_factors) for part in (scale, *least)]
    buffers: list[tuple[Buffer, Argument]] = [(made.a, fusion.views[x])]
    buffers += zip(made.weight, arguments, strict=True)
    buffers += [(buf, v) for v, buf in epilogue.inputs.items()]
    buffers += [(buf, v) for v, buf in epilogue.outputs.items()]
    buffers += [(buf, scratch_of(buf)) for buf in made.work]
    func = function_of(fusion.name, made.body, [buf for buf, _ in buffers])
    return [KernelStep(func, tuple(a for _, a in buffers), made.helpers)]


def _packed_part(
    make: Callable[[np.ndarray], np.ndarray], part: slice, data: np.ndarray
) -> np.ndarray:
    return make(data.reshape(-1)[part])
