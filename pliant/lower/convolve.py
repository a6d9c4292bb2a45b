"""Convolutions: their operands, and the epilogue on their tiles."""

from __future__ import annotations

from pliant.ir.graph import Graph
from pliant.ir.loops import Buffer, Stmt
from pliant.kernels.conv import Convolution, conv
from pliant.kernels.gemm import TileAt, micro_kernels
from pliant.lower.contract import Operands, TileEpilogue, function_of, scratch_of
from pliant.lower.step import Argument, NumberCheck, Step, TileAxes
from pliant.sym import Facts, as_expr
from pliant.target import Target


def lower_conv(
    region: Graph,
    name: str,
    operands: Operands,
    facts: Facts,
    target: Target,
    number_check: NumberCheck,
) -> list[Step]:
    (root,) = (op for op in region.ops if op.name == "conv")
    epilogue = TileEpilogue(region, root, facts, number_check)
    x, w = root.operands
    image, weight = operands.views[x], operands.views[w]
    spec = Convolution(
        root.result.dtype,
        x.shape,
        w.shape,
        root.result.shape,
        image.strides,
        root.ints_attr("stride"),
        tuple(as_expr(p) for p in root.ints_attr("low")),
        root.ints_attr("dilation"),
        root.int_attr("groups"),
    )
    spatial = tuple(range(2, len(x.shape)))

    def write(at: TileAt) -> list[Stmt]:
        return epilogue.write(at, TileAxes(((0, at.batch[0]),), (1,), spatial))

    body, (x_buffer, w_buffer, panel, scratch) = conv(spec, target, write)
    buffers: list[tuple[Buffer, Argument]] = [
        (x_buffer, image),
        (w_buffer, weight),
        *((buf, v) for v, buf in epilogue.inputs.items()),
        *((buf, v) for v, buf in epilogue.outputs.items()),
        (panel, scratch_of(panel)),
        (scratch, scratch_of(scratch)),
    ]
    func = function_of(name, body, [buf for buf, _ in buffers])
    helpers = tuple(micro_kernels(spec.dtype, target))
    return [Step(func, tuple(arg for _, arg in buffers), helpers)]
