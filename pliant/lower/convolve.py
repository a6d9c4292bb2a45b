"""Convolutions: their operands, and the epilogue on each finished box.

A transposed convolution is a set of plain convolutions of stride 1, one for each
residue of the output position modulo the stride: output s*j + r depends only on the
taps w with w*d = r modulo s, and on inputs that advance by one with j.

    conv_transpose, window 4, stride 2:    even outputs: taps 2, 0    odd: taps 3, 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product as combinations
from math import gcd, prod
from typing import TypeAlias

import numpy as np

from pliant.ir.access import flatten, reshape_index
from pliant.ir.graph import Op, Value
from pliant.ir.groups import domain_index
from pliant.ir.loop_walk import substitute
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
    as_dtype,
    buffer,
)
from pliant.ir.packed import Packed
from pliant.ir.types import TensorType
from pliant.kernels.conv import (
    Convolution,
    ResultAt,
    Source,
    conv,
    pack,
    packed_shape,
)
from pliant.kernels.conv_micro import ConvTile, conv_tile
from pliant.kernels.conv_patch import Slide
from pliant.lower.contract import function_of, scratch_of
from pliant.lower.domain import Axis, merge, with_axes
from pliant.lower.evaluate import Evaluator
from pliant.lower.nest import block
from pliant.lower.step import Argument, Fusion, KernelStep, Temporary
from pliant.sym import (
    Expr,
    as_expr,
    ceildiv,
    floordiv,
    maximum,
    mod,
    product,
    sym,
)


@dataclass(frozen=True, slots=True)
class SpreadWindows:
    """Where position j of a convolution goes along one axis of the result."""

    step: int = 1
    first: int = 0

    def __call__(self, position: Expr) -> Expr:
        return position * self.step + self.first


class BoxEpilogue:
    """The epilogue: what follows a convolution in its region, on one box."""

    def __init__(self, fusion: Fusion, root: Op) -> None:
        region = fusion.region
        self.root, self.facts = root, fusion.facts
        self.number_check = fusion.number_check
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

    def write(
        self, box: ResultAt, spread: Sequence[SpreadWindows] | None
    ) -> list[Stmt]:
        """Loops over the box that store every result of the region.

        Without a spread, columns are positions in the whole plane.
        """
        shape = self.root.result.shape
        m, r, j = sym("_m"), sym("_r"), sym("_j")
        spatial = [f"_d{k}" for k in range(2, len(shape))]
        by_row = spatial[:-1] if spread is not None else []
        by_column = [name for name in spatial if name not in by_row]
        scopes = (("_m", "_d1"), ("_r", *by_row), ("_j", *by_column))
        inner, middle, outer, root = self._values(box, scopes)
        if spread is None:
            axes = [Axis(n, d) for n, d in zip(spatial, shape[2:], strict=True)]
            inner = _at_position(axes, box.column + j, inner)
        else:
            positions = [*box.outer, box.row + r, box.column + j][-len(spatial) :]
            at = {
                name: place(position)
                for name, place, position in zip(
                    spatial, spread, positions, strict=True
                )
            }
            inner = [substitute(s, at) for s in inner]
            middle = [substitute(s, at) for s in middle]
        vector = For("_j", as_expr(0), box.columns, block(inner), Kind.VECTOR)
        rows = For("_r", as_expr(0), box.rows, block([*middle, vector]))
        channel = Let("_d1", Index(box.channel + m))
        body = block([channel, *outer, rows])
        return [*root, For("_m", as_expr(0), box.channels, body)]

    def _values(
        self, box: ResultAt, scopes: Sequence[Sequence[str]]
    ) -> tuple[list[Stmt], list[Stmt], list[Stmt], list[Stmt]]:
        """The statements that compute and store the results, innermost scope first."""
        shape = self.root.result.shape
        index = domain_index(shape)
        named = [Axis(f"_d{k}", d) for k, d in enumerate(shape) if k > 0]
        space = with_axes(self.facts, [a for a in named if a.var in index])
        index = (box.image, *index[1:])

        def leaf(
            value: Value, at: tuple[Expr, ...], where: LoopValue | None
        ) -> LoopValue | None:
            if value in self.inputs:
                return Load(self.inputs[value], (flatten(at, value.shape),), where)
            if value is self.root.result:
                return box.element(sym("_m"), sym("_r"), sym("_j"))
            return None

        evaluator = Evaluator(self.producers, leaf, space, self.number_check)
        for scope in scopes:
            evaluator.push(scope)
        for value, target in self.outputs.items():
            at = reshape_index(index, shape, value.shape, space)
            result = as_dtype(evaluator.value(value, at), value.dtype)
            evaluator.emit(Store(target, (flatten(at, value.shape),), result))
        inner, middle, outer = evaluator.pop(), evaluator.pop(), evaluator.pop()
        return inner, middle, outer, evaluator.scopes[0].body


def _at_position(axes: Sequence[Axis], at: Expr, body: Sequence[Stmt]) -> list[Stmt]:
    """The body with its axes' variables computed from a position in the plane."""
    left, (whole,) = merge(axes, [Block(tuple(body))])
    lets: list[Stmt] = []
    for axis in reversed(left[1:]):
        safe = axis.extent if axis.extent.is_const else maximum(axis.extent, 1)
        lets.append(Let(axis.name, Index(mod(at, safe))))
        at = floordiv(at, safe)
    if not lets:
        return [substitute(whole, {left[0].name: at})]
    return [*lets, Let(left[0].name, Index(at)), whole]


PartOfWeights: TypeAlias = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class ConvPart:
    """One plain convolution: where its results go, and its part of the weights.

    `weights` maps the model's tensor to (groups * outputs, channels, window..), and
    `source` gives the index of one such element in the model's tensor.
    """

    name: str
    spec: Convolution
    spread: tuple[SpreadWindows, ...]
    key: tuple[object, ...]  # distinguishes the parts of one tensor
    weights: PartOfWeights
    source: Source


class _ConvLowering:
    def __init__(self, fusion: Fusion, root: Op) -> None:
        self.epilogue = BoxEpilogue(fusion, root)
        x, self.w = root.operands
        self.image, self.weight = fusion.views[x], fusion.views[self.w]
        self.constant = fusion.constants.get(self.w)
        self.target = fusion.target

    def steps(self, part: ConvPart) -> list[KernelStep]:
        spec, plain = part.spec, all(s == SpreadWindows() for s in part.spread)
        flat = plain and spec.pointwise
        spread = None if flat else part.spread
        kernel = conv(
            spec, self.target, lambda box: self.epilogue.write(box, spread), flat
        )
        packed, steps = self.packed(part)
        buffers: list[tuple[Buffer, Argument]] = [
            (kernel.x, self.image),
            (kernel.w, packed),
            *((buf, v) for v, buf in self.epilogue.inputs.items()),
            *((buf, v) for v, buf in self.epilogue.outputs.items()),
            *((buf, scratch_of(buf)) for buf in kernel.work),
        ]
        func = function_of(part.name, kernel.body, [buf for buf, _ in buffers])
        step = KernelStep(func, tuple(arg for _, arg in buffers), kernel.helpers)
        return [*steps, step]

    def packed(self, part: ConvPart) -> tuple[Argument, list[KernelStep]]:
        """Packed weights: a constant, or the result of a step before the kernel."""
        spec, constant, view = part.spec, self.constant, self.weight
        tile = conv_tile(spec.dtype, spec.outputs, self.target)
        if constant is not None and constant.type.numel == product(view.shape):
            key = ("conv", spec.groups, part.key, tile)
            shape = tuple(d.value for d in view.shape)
            make = partial(_packed, shape, spec.groups, part.weights, tile)
            return Packed(key, constant, "packed", constant.type.dtype, make), []
        temporary = Temporary(TensorType(spec.dtype, packed_shape(spec, tile)))
        w = buffer("w", spec.dtype, view.shape, Role.IN)
        func = pack(f"{part.name}_pack", spec, tile, w, part.source)
        sized = function_of(func.name, func.body, func.buffers)
        return temporary, [KernelStep(sized, (view, temporary))]


def _packed(
    shape: tuple[int, ...],
    groups: int,
    part: PartOfWeights,
    tile: ConvTile,
    data: np.ndarray,
) -> np.ndarray:
    """(groups * outputs, channels, window..) as the panels of `packed_shape`."""
    plain = part(data.reshape(shape))
    rows, depth = plain.shape[0] // groups, prod(plain.shape[1:])
    weights = plain.reshape(groups, rows, depth)
    panels = -(-rows // tile.width)
    packed = np.zeros((groups, panels, depth, tile.width), weights.dtype)
    for panel in range(panels):
        some = weights[:, panel * tile.width : (panel + 1) * tile.width]
        packed[:, panel, :, : some.shape[1]] = some.transpose(0, 2, 1)
    return packed


def lower_conv(fusion: Fusion) -> list[KernelStep]:
    name, root = fusion.name, fusion.root("conv")
    lowering = _ConvLowering(fusion, root)
    x, w = root.operands
    groups, outputs = root.int_attr("groups"), root.result.shape[1]
    parts = zip(
        x.shape[2:],
        root.result.shape[2:],
        w.shape[2:],
        root.ints_attr("stride"),
        root.ints_attr("dilation"),
        (as_expr(p) for p in root.ints_attr("low")),
        strict=True,
    )
    spec = Convolution(
        root.result.dtype,
        x.shape[0],
        w.shape[1],
        floordiv(outputs, groups),
        groups,
        tuple(Slide(*part) for part in parts),
        lowering.image.strides,
    )
    plain = (SpreadWindows(),) * len(spec.slides)

    def source(
        group: Expr, row: Expr, channel: Expr, taps: tuple[Expr, ...]
    ) -> tuple[Expr, ...]:
        return (group * spec.outputs + row, channel, *taps)

    return lowering.steps(ConvPart(name, spec, plain, (), _whole, source))


def _whole(data: np.ndarray) -> np.ndarray:
    return data


# ---- transposed


@dataclass(frozen=True, slots=True)
class _Residue:
    """The outputs of one axis at `spread`, as a convolution of stride 1.

    Its tap m is the model's tap phase + period * (count - 1 - m).
    """

    slide: Slide
    spread: SpreadWindows
    phase: int
    period: int
    count: int

    def tap(self, m: Expr) -> Expr:
        return self.phase + self.period * (self.count - 1 - m)

    @property
    def taps(self) -> list[int]:
        return [self.phase + self.period * k for k in reversed(range(self.count))]


def _residues(
    extent: Expr, out: Expr, window: int, stride: int, dilation: int, low: int
) -> list[_Residue]:
    """One for each residue of (output position + low) modulo the stride."""
    common = gcd(stride, dilation)
    period = stride // common
    phases = {phase * dilation % stride: phase for phase in range(period)}
    found = []
    for residue in range(stride):
        begin = -((residue - low) // stride)  # the least j with s*j + residue >= low
        outputs = ceildiv(out + low - residue, stride) - begin
        phase = phases.get(residue, window)
        count = max(0, -((phase - window) // period))
        # It reads input j - shift; the last tap of the convolution has the least shift.
        shift = phase * dilation // stride if count else 0
        step = dilation // common
        reach = max(count - 1, 0) * step
        pad = as_expr(reach + shift - begin)
        slide = Slide(extent, outputs, as_expr(count), 1, step, pad)
        spread = SpreadWindows(stride, begin * stride + residue - low)
        found.append(_Residue(slide, spread, phase, period, count))
    return found


def lower_conv_transpose(fusion: Fusion) -> list[KernelStep]:
    name, root = fusion.name, fusion.root("conv_transpose")
    lowering = _ConvLowering(fusion, root)
    x, w = root.operands
    groups, outputs = root.int_attr("groups"), w.shape[1]
    channels = floordiv(x.shape[1], groups)
    axes = [
        _residues(extent, out, fusion.facts.canonical(window).value, *numbers)
        for extent, out, window, *numbers in zip(
            x.shape[2:],
            root.result.shape[2:],
            w.shape[2:],
            root.ints_attr("stride"),
            root.ints_attr("dilation"),
            root.ints_attr("low"),
            strict=True,
        )
    ]
    steps: list[KernelStep] = []
    for number, chosen in enumerate(combinations(*axes)):
        spec = Convolution(
            root.result.dtype,
            x.shape[0],
            channels,
            outputs,
            groups,
            tuple(residue.slide for residue in chosen),
            lowering.image.strides,
        )
        part = _part(f"{name}_{number}", spec, chosen)
        steps += lowering.steps(part)
    return steps


def _part(name: str, spec: Convolution, chosen: tuple[_Residue, ...]) -> ConvPart:
    def source(
        group: Expr, row: Expr, channel: Expr, taps: tuple[Expr, ...]
    ) -> tuple[Expr, ...]:
        moved = (residue.tap(m) for residue, m in zip(chosen, taps, strict=True))
        return (group * spec.channels + channel, row, *moved)

    key = tuple((r.phase, r.count) for r in chosen)
    weights = partial(_taken, spec.groups, tuple(tuple(r.taps) for r in chosen))
    return ConvPart(name, spec, tuple(r.spread for r in chosen), key, weights, source)


def _taken(groups: int, taps: Sequence[Sequence[int]], data: np.ndarray) -> np.ndarray:
    """(groups * channels, outputs, window..) with some of the taps, rows first."""
    grouped = data.reshape(groups, data.shape[0] // groups, *data.shape[1:])
    some = np.swapaxes(grouped, 1, 2)  # (groups, outputs, channels, window..)
    for axis, chosen in enumerate(taps):
        some = np.take(some, chosen, axis=3 + axis)
    return some.reshape(groups * some.shape[1], *some.shape[2:])
