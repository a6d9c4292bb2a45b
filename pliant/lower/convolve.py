"""Convolutions: their operands, and what follows them on each finished box."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pliant.ir.access import flatten, reshape_index
from pliant.ir.graph import Constant, Graph, Op, Value
from pliant.ir.loops import (
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
from pliant.ir.types import TensorType
from pliant.kernels.conv import Convolution, ResultAt, conv, pack, packed_shape
from pliant.kernels.conv_micro import ConvTile, conv_tile
from pliant.lower.contract import Operands, function_of, scratch_of
from pliant.lower.domain import Axis, merge, with_axes
from pliant.lower.evaluate import Evaluator, as_dtype
from pliant.lower.nest import block
from pliant.lower.rebuild import map_stmt
from pliant.lower.step import Argument, NumberCheck, Packed, Step, Temporary
from pliant.passes.groups import domain_index
from pliant.sym import Expr, Facts, as_expr, floordiv, maximum, mod, product, sym
from pliant.target import Target


class BoxEpilogue:
    """What follows a convolution inside its region, on one box of the result."""

    def __init__(
        self, region: Graph, root: Op, facts: Facts, number_check: NumberCheck
    ) -> None:
        self.root, self.facts, self.number_check = root, facts, number_check
        self.producers = region.producers()
        read = {v for op in region.ops if op is not root for v in op.operands}
        others = [v for v in region.params if v not in root.operands or v in read]
        self.inputs = {
            v: buffer(f"in_{k}", v.dtype, (v.type.numel,), Role.IN)
            for k, v in enumerate(others)
        }
        self.outputs = {
            v: buffer(f"out_{k}", v.dtype, (v.type.numel,), Role.OUT)
            for k, v in enumerate(dict.fromkeys(region.results))
        }

    def write(self, box: ResultAt, flat: bool) -> list[Stmt]:
        """Loops over the box that store every result of the region.

        `flat`: columns are positions in a whole plane, rows and all.
        """
        shape = self.root.result.shape
        index = list(domain_index(shape))
        axes = [
            Axis(f"_d{k}", shape[k])
            for k in range(1, len(shape))
            if index[k] != as_expr(0)
        ]
        space = with_axes(self.facts, axes)
        index[0] = box.image
        m, r, j = sym("_m"), sym("_r"), sym("_j")

        def leaf(
            value: Value, at: tuple[Expr, ...], where: LoopValue | None
        ) -> LoopValue | None:
            if value in self.inputs:
                return Load(self.inputs[value], (flatten(at, value.shape),), where)
            if value is self.root.result:
                return box.element(m, r, j)
            return None

        evaluator = Evaluator(self.producers, leaf, space, self.number_check)
        names = [[f"_d{k}"] for k in range(1, len(shape))]
        if flat or len(shape) == 3:
            scopes = [
                ["_m", *names[0]],
                ["_r"],
                ["_j", *(n for a in names[1:] for n in a)],
            ]
        else:
            lead = [n for a in names[1:-1] for n in a]
            scopes = [["_m", *names[0]], ["_r", *lead], ["_j", *names[-1]]]
        for scope in scopes:
            evaluator.push(scope)
        for value, target in self.outputs.items():
            at = reshape_index(tuple(index), shape, value.shape, space)
            result = as_dtype(evaluator.value(value, at), value.dtype)
            evaluator.emit(Store(target, (flatten(at, value.shape),), result))
        inner, middle, outer = evaluator.pop(), evaluator.pop(), evaluator.pop()
        root = evaluator.scopes[0].body
        if flat:
            inner = _at_position(axes[-len(shape) + 2 :], box.column + j, inner, shape)
        else:
            outer_at = dict(
                zip(
                    (f"_d{k}" for k in range(2, len(shape) - 2)),
                    box.outer,
                    strict=False,
                )
            )
            if len(shape) > 3:
                outer_at[f"_d{len(shape) - 2}"] = box.row + r
            middle = [_placed(s, outer_at) for s in middle]
            here = {**outer_at, f"_d{len(shape) - 1}": box.column + j}
            inner = [_placed(s, here) for s in inner]
        vector = For("_j", as_expr(0), box.columns, block(inner), Kind.VECTOR)
        rows = For("_r", as_expr(0), box.rows, block([*middle, vector]))
        channel = Let("_d1", Index(box.channel + m))
        return [
            *root,
            For("_m", as_expr(0), box.channels, block([channel, *outer, rows])),
        ]


def _placed(stmt: Stmt, at: dict[str, Expr]) -> Stmt:
    return map_stmt(stmt, lambda e: e.substitute(at))


def _at_position(
    axes: Sequence[Axis], at: Expr, body: Sequence[Stmt], shape: Sequence[Expr]
) -> list[Stmt]:
    """The body with its spatial axes' variables given by a position in the plane."""
    spatial = [axis for axis in axes if axis.name != "_d1"]
    left, merged = merge(spatial, [Block(tuple(body))])
    (whole,) = merged
    lets: list[Stmt] = []
    for axis in reversed(left[1:]):
        safe = axis.extent if axis.extent.is_const else maximum(axis.extent, 1)
        lets.append(Let(axis.name, Index(mod(at, safe))))
        at = floordiv(at, safe)
    if len(left) == 1:
        return [_placed(whole, {left[0].name: at})]
    if left:
        lets.append(Let(left[0].name, Index(at)))
    return [*lets, whole]


def lower_conv(
    region: Graph,
    name: str,
    operands: Operands,
    facts: Facts,
    target: Target,
    number_check: NumberCheck,
) -> list[Step]:
    (root,) = (op for op in region.ops if op.name == "conv")
    epilogue = BoxEpilogue(region, root, facts, number_check)
    x, w = root.operands
    image = operands.views[x]
    spec = Convolution(
        root.result.dtype,
        x.shape,
        w.shape,
        root.result.shape,
        image.strides,
        root.ints_attr("stride"),
        tuple(as_expr(p) for p in root.ints_attr("low")),
        tuple(as_expr(p) for p in root.ints_attr("high")),
        root.ints_attr("dilation"),
        root.int_attr("groups"),
    )
    kernel = conv(spec, target, lambda box: epilogue.write(box, spec.pointwise))
    packed, steps = _weights(spec, w, name, operands, target)
    buffers: list[tuple[Buffer, Argument]] = [
        (kernel.x, image),
        (kernel.w, packed),
        *((buf, v) for v, buf in epilogue.inputs.items()),
        *((buf, v) for v, buf in epilogue.outputs.items()),
        *((buf, scratch_of(buf)) for buf in kernel.work),
    ]
    func = function_of(name, kernel.body, [buf for buf, _ in buffers])
    step = Step(func, tuple(arg for _, arg in buffers), kernel.helpers)
    return [*steps, step]


def _weights(
    spec: Convolution, w: Value, name: str, operands: Operands, target: Target
) -> tuple[Argument, list[Step]]:
    """The packed weights: a constant, or what a step before the kernel packs."""
    view, constant = operands.views[w], operands.constants.get(w)
    rows = floordiv(spec.w_shape[0], spec.groups)
    tile = conv_tile(spec.dtype, rows, target)
    if constant is not None and constant.type.numel == view_elements(view.shape):
        key = ("conv", constant.name, spec.groups, tile)
        return Packed(key, lambda: _packed(constant, spec, tile)), []
    shape = packed_shape(spec.groups, rows, product(spec.w_shape[1:]), tile)
    temporary = Temporary(TensorType(spec.dtype, shape))
    func = pack(f"{name}_pack", spec, tile)
    sized = function_of(func.name, func.body, func.buffers)
    return temporary, [Step(sized, (view, temporary))]


def view_elements(shape: Sequence[Expr]) -> Expr:
    return product(shape)


def _packed(constant: Constant, spec: Convolution, tile: ConvTile) -> Constant:
    """(O, channels, window..) as (groups, panels, channels * taps, width)."""
    groups = spec.groups
    weights = constant.data.reshape(groups, -1, _depth(spec))
    rows = weights.shape[1]
    panels = -(-rows // tile.width)
    packed = np.zeros((groups, panels, _depth(spec), tile.width), weights.dtype)
    for panel in range(panels):
        part = weights[:, panel * tile.width : (panel + 1) * tile.width]
        packed[:, panel, :, : part.shape[1]] = part.transpose(0, 2, 1)
    kind = TensorType(constant.type.dtype, tuple(as_expr(d) for d in packed.shape))
    return Constant(f"{constant.name}.packed", kind, packed)


def _depth(spec: Convolution) -> int:
    return product(spec.w_shape[1:]).value
