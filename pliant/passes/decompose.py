"""Composite ops -> primitive ops.

    %1 = softmax(%0) {axis = 1}
    ->
    %1 = reduce(%0) {op = max, axes = (1), keepdims = true}
    %2 = broadcast(%1) ..      %3 = sub(%0, %2)      %4 = exp(%3)
    %5 = reduce(%4) {op = sum, ..}   %6 = broadcast(%5) ..   %7 = div(%4, %6)

Half types are storage: a composite computes in f32 and rounds once, at its end. A
contraction keeps its operands' type, because it accumulates in f32 by itself.

`attention` stays, for its kernel; ir/attention.py has its meaning in primitives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pliant.context import Context
from pliant.ir.attention import (
    spell_out_attention,
    spell_out_attention_backward,
    spell_out_attention_lse,
)
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Op, Value
from pliant.ir.ops import einsum_labels
from pliant.ir.rewrite import RuleSet, rewrite
from pliant.ir.shapes_composite import keeps_size
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, floordiv, maximum, minimum, product

Decomposition = Callable[[Builder, Op], Value]


def _up(b: Builder, x: Value) -> Value:
    return b.cast(x, x.dtype.compute)


def _scalar(b: Builder, like: Value, number: float) -> Value:
    return b.scalar(number, like.dtype)


def _plus(b: Builder, x: Value, number: float) -> Value:
    return b.binary("add", x, _scalar(b, x, number))


def _times(b: Builder, x: Value, number: float) -> Value:
    return b.binary("mul", x, _scalar(b, x, number))


# ---- linear, activations, softmax


def linear(b: Builder, op: Op) -> Value:
    x, w, *bias = op.operands
    out = b.matmul(x, b.swap(w, 0, 1))
    return b.binary("add", out, bias[0]) if bias else out


def relu(b: Builder, op: Op) -> Value:
    """x < 0 ? 0 : x keeps NaN and -0.0, as torch does; `maximum` may lose the sign."""
    (x,) = op.operands
    zero = _scalar(b, x, 0)
    return b.select(b.binary("lt", x, zero), zero, x)


def silu(b: Builder, op: Op) -> Value:
    x = _up(b, op.operands[0])
    below = _plus(b, b.unary("exp", b.unary("neg", x)), 1.0)
    return b.cast(b.binary("div", x, below), op.result.dtype)


def gelu(b: Builder, op: Op) -> Value:
    x = _up(b, op.operands[0])
    if op.str_attr("approximate") == "tanh":
        cube = b.binary("mul", b.binary("mul", x, x), x)
        inner = b.binary("add", x, _times(b, cube, 0.044715))
        bell = b.unary("tanh", _times(b, inner, math.sqrt(2 / math.pi)))
    else:
        bell = b.unary("erf", _times(b, x, math.sqrt(0.5)))
    out = b.binary("mul", _times(b, x, 0.5), _plus(b, bell, 1.0))
    return b.cast(out, op.result.dtype)


def _shifted(b: Builder, x: Value, axis: int) -> Value:
    """x minus its maximum along the axis."""
    return b.binary("sub", x, b.reduce("max", x, [axis], keepdims=True))


def softmax(b: Builder, op: Op) -> Value:
    axis = op.int_attr("axis")
    e = b.unary("exp", _shifted(b, _up(b, op.operands[0]), axis))
    out = b.binary("div", e, b.reduce("sum", e, [axis], keepdims=True))
    return b.cast(out, op.result.dtype)


def log_softmax(b: Builder, op: Op) -> Value:
    axis = op.int_attr("axis")
    x = _shifted(b, _up(b, op.operands[0]), axis)
    total = b.reduce("sum", b.unary("exp", x), [axis], keepdims=True)
    out = b.binary("sub", x, b.unary("log", total))
    return b.cast(out, op.result.dtype)


# ---- normalisation


def _scale_shift(b: Builder, x: Value, affine: Sequence[Value]) -> Value:
    """x * w + b for those of w and b that are present; they align at the last dim."""
    for name, weight in zip(("mul", "add"), affine, strict=False):
        x = b.binary(name, x, b.cast(weight, x.dtype))
    return x


def _standardised(b: Builder, x: Value, axes: Sequence[int], eps: float) -> Value:
    """Zero mean and unit variance over the axes."""
    centred = b.binary("sub", x, b.mean(x, axes, keepdims=True))
    variance = b.mean(b.binary("mul", centred, centred), axes, keepdims=True)
    return b.binary("mul", centred, b.unary("rsqrt", _plus(b, variance, eps)))


def layer_norm(b: Builder, op: Op) -> Value:
    x, *affine = op.operands
    axes = range(x.type.rank - op.int_attr("axes"), x.type.rank)
    out = _standardised(b, _up(b, x), axes, op.float_attr("eps"))
    return b.cast(_scale_shift(b, out, affine), op.result.dtype)


def rms_norm(b: Builder, op: Op) -> Value:
    x, *affine = op.operands
    axes = range(x.type.rank - op.int_attr("axes"), x.type.rank)
    wide = _up(b, x)
    square = b.mean(b.binary("mul", wide, wide), axes, keepdims=True)
    scale = b.unary("rsqrt", _plus(b, square, op.float_attr("eps")))
    out = _scale_shift(b, b.binary("mul", wide, scale), affine)
    return b.cast(out, op.result.dtype)


def group_norm(b: Builder, op: Op) -> Value:
    x, *affine = op.operands
    groups, (batch, channels) = op.int_attr("groups"), x.shape[:2]
    each = floordiv(channels, groups)
    grouped = b.reshape(_up(b, x), (batch, groups, each, product(x.shape[2:])))
    out = _standardised(b, grouped, (2, 3), op.float_attr("eps"))
    weights = [b.reshape(w, (groups, each, 1)) for w in affine]
    out = b.reshape(_scale_shift(b, out, weights), x.shape)
    return b.cast(out, op.result.dtype)


def batch_norm(b: Builder, op: Op) -> Value:
    """Folds statistics and weights on the small tensors: x * scale + shift."""
    x = _up(b, op.operands[0])
    mean, variance, *affine = (b.cast(v, x.dtype) for v in op.operands[1:])
    scale = b.unary("rsqrt", _plus(b, variance, op.float_attr("eps")))
    if affine:
        scale = b.binary("mul", affine[0], scale)
    drop = b.binary("mul", mean, scale)
    if len(affine) == 2:
        shift = b.binary("sub", affine[1], drop)
    else:
        shift = b.unary("neg", drop)
    out = b.emit("mul", x, b.broadcast(scale, x.shape, (1,)))
    out = b.emit("add", out, b.broadcast(shift, x.shape, (1,)))
    return b.cast(out, op.result.dtype)


# ---- resize


def _ratio(b: Builder, top: Expr, bottom: Expr, dtype: DType) -> Value:
    """top / bottom, rounded in `dtype` as torch computes it at run time."""
    if top.is_const and bottom.is_const and bottom != 0:
        a, c = b.scalar(top.value, dtype), b.scalar(bottom.value, dtype)
    else:
        a, c = b.dim_value(top, dtype), b.dim_value(bottom, dtype)
    return b.binary("div", a, c)


def _apart(size: Expr, other: Expr) -> Expr:
    """0 if two sizes are the same, else 1."""
    return minimum(maximum(size - other, other - size), 1)


def _is_whole(scale: float | None) -> bool:
    """Whether a scale is an integer, so that the ratio of the sizes is exact."""
    return scale is not None and scale.is_integer() and scale > 1


def _exactly(b: Builder, at: Value, size: Expr, new: Expr, times: int) -> Value:
    """`at`, or place / times where the new size is that multiple of the old one."""
    apart = b.dim_value(_apart(new, times * size))
    place = _times(b, b.iota((new,), 0, at.dtype), 1 / times)
    return b.select(b.binary("eq", apart, b.scalar(0, apart.dtype)), place, at)


def _source(
    b: Builder, size: Expr, new: Expr, op: Op, scale: float | None, dtype: DType
) -> Value:
    """For each new position, the fractional position it comes from.  # (new,)

    The arithmetic is torch's (aten/src/ATen/native/UpSample.h), in the same type.
    """
    mode, align = op.str_attr("mode"), op.bool_attr("align_corners")
    align = align and mode in ("linear", "cubic")
    if align:
        # With one new position the ratio does not matter: it only multiplies index 0.
        step = _ratio(b, size - 1, maximum(new - 1, 1), dtype)
    elif scale is not None:
        step = b.scalar(1.0 / scale, dtype)
    else:
        step = _ratio(b, size, new, dtype)
    place = b.iota((new,), 0, dtype)
    if align or mode == "nearest":
        at = b.binary("mul", place, step)
    else:
        at = b.binary("mul", _plus(b, place, 0.5), step)
    if not align and mode in ("linear", "cubic"):
        at = _plus(b, at, -0.5)
    if not align and mode == "linear":
        at = b.binary("maximum", at, _scalar(b, at, 0.0))
    # These ratios come from the sizes, even if the model states another scale.
    if scale is not None and keeps_size(op) and not _is_whole(scale):
        at = _exactly(b, at, size, new, 1)
        at = _exactly(b, at, size, new, 2) if mode == "nearest" else at
    return at


def _clamp(b: Builder, index: Value, size: Expr) -> Value:
    low = b.binary("maximum", index, b.scalar(0, index.dtype))
    return b.binary("minimum", low, b.dim_value(size - 1, index.dtype))


def _gather(b: Builder, x: Value, axis: int, index: Value) -> Value:
    """x at the index (1-D) along one axis."""
    front = [axis, *(i for i in range(x.type.rank) if i != axis)]
    back = [*range(1, axis + 1), 0, *range(axis + 1, x.type.rank)]
    return b.transpose(b.emit("index", b.transpose(x, front), index), back)


def _cubic_weights(b: Builder, t: Value) -> list[Value]:
    """Weights of the four neighbours of a point at fraction t; A = -0.75."""
    a = -0.75

    def near(x: Value) -> Value:  # ((a + 2)*x - (a + 3))*x*x + 1
        inner = _plus(b, _times(b, x, a + 2), -(a + 3))
        return _plus(b, b.binary("mul", b.binary("mul", inner, x), x), 1.0)

    def far(x: Value) -> Value:  # ((a*x - 5*a)*x + 8*a)*x - 4*a
        inner = b.binary("mul", _plus(b, _times(b, x, a), -5 * a), x)
        return _plus(b, b.binary("mul", _plus(b, inner, 8 * a), x), -4 * a)

    rest = b.binary("sub", _scalar(b, t, 1.0), t)
    return [far(_plus(b, t, 1.0)), near(t), near(rest), far(_plus(b, rest, 1.0))]


def _resize_axis(
    b: Builder, x: Value, axis: int, new: Expr, op: Op, scale: float | None
) -> Value:
    size, mode = x.shape[axis], op.str_attr("mode")
    if keeps_size(op) and b.same(size, new):
        if mode == "linear":  # weights of 1 and 0: what is infinite becomes NaN
            return b.emit("add", x, _times(b, x, 0.0))
        return x
    dtype = x.dtype.compute if x.dtype.is_float else DType.F32
    at = _source(b, size, new, op, scale, dtype)
    floor = b.unary("floor", at)
    left = b.cast(floor, DType.I64)
    if mode.startswith("nearest"):
        return _gather(b, x, axis, _clamp(b, left, size))
    left = b.binary("minimum", left, b.dim_value(size - 1))
    t = b.binary("sub", at, b.cast(left, at.dtype))
    t = b.binary("maximum", t, _scalar(b, t, 0.0))
    t = b.binary("minimum", t, _scalar(b, t, 1.0))  # (new,)
    if mode == "linear":
        steps = [0, 1]
        weights = [b.binary("sub", _scalar(b, t, 1.0), t), t]
    else:
        steps = [-1, 0, 1, 2]
        weights = _cubic_weights(b, t)
    total: Value | None = None
    # Along an axis that is only copied no neighbour is read: an infinite neighbour
    # times its weight of 0 would be NaN.
    apart = as_expr(1)
    if keeps_size(op) and not _is_whole(scale):
        apart = _apart(size, new)
    for step, weight in zip(steps, weights, strict=True):
        beside = b.dim_value(apart * step)
        index = _clamp(b, b.binary("add", left, beside), size)
        part = _gather(b, x, axis, index)
        part = b.emit("mul", part, b.broadcast(weight, part.shape, (axis,)))
        total = part if total is None else b.emit("add", total, part)
    assert total is not None
    return total


def resize(b: Builder, op: Op) -> Value:
    """Axis by axis, the last first: each element sums in torch's order."""
    (x,), shape, scales = op.operands, op.dims_attr("shape"), op.attr("scales")
    assert isinstance(scales, tuple)
    first = x.type.rank - len(shape)
    out = x if op.str_attr("mode").startswith("nearest") else _up(b, x)
    for i in reversed(range(len(shape))):
        scale = scales[i] if scales else None
        assert scale is None or isinstance(scale, float)
        out = _resize_axis(b, out, first + i, shape[i], op, scale)
    return b.cast(out, x.dtype)


# ---- einsum


def _diagonal(b: Builder, x: Value, labels: str) -> tuple[Value, str]:
    """Repeated labels -> one: x[i, i, ..]."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            rest = [k for k in range(len(labels)) if k not in (i, j)]
            size = b.require_equal(x.shape[i], x.shape[j], f"label '{label}'")
            place = b.iota((size,))
            x = b.emit("index", b.transpose(x, [i, j, *rest]), place, place)
            labels = label + "".join(labels[k] for k in rest)
    return x, labels


def _keep(b: Builder, x: Value, labels: str, wanted: str) -> tuple[Value, str]:
    """Sums over the labels that are no longer needed."""
    lone = [i for i, label in enumerate(labels) if label not in wanted]
    kept = "".join(label for label in labels if label in wanted)
    return b.reduce("sum", x, lone) if lone else x, kept


def _arranged(
    b: Builder, x: Value, labels: str, batch: str, groups: Sequence[str]
) -> Value:
    """x as (batch dims.., one dim for each group of labels)."""
    x = b.transpose(x, [labels.index(c) for c in batch + "".join(groups)])
    dims = list(x.shape[: len(batch)])
    rest = list(x.shape[len(batch) :])
    for group in groups:
        dims.append(product(rest[: len(group)]))
        del rest[: len(group)]
    return b.reshape(x, dims)


def _contract(
    b: Builder, x: Value, xs: str, y: Value, ys: str, wanted: str
) -> tuple[Value, str]:
    """Contracts two operands into one."""
    x, xs = _keep(b, x, xs, wanted + ys)
    y, ys = _keep(b, y, ys, wanted + xs)
    batch = "".join(c for c in xs if c in ys and c in wanted)
    inner = "".join(c for c in xs if c in ys and c not in wanted)
    left = "".join(c for c in xs if c not in ys)
    right = "".join(c for c in ys if c not in xs)
    size = {
        **dict(zip(ys, y.shape, strict=True)),
        **dict(zip(xs, x.shape, strict=True)),
    }
    labels = batch + left + right
    a = _arranged(b, x, xs, batch, (left, inner))
    c = _arranged(b, y, ys, batch, (inner, right))
    out = b.matmul(a, c) if inner else b.binary("mul", a, c)
    return b.reshape(out, [size[label] for label in labels]), labels


def einsum(b: Builder, op: Op) -> Value:
    """Left to right, two operands at a time, each pair one matmul."""
    ranks = [v.type.rank for v in op.operands]
    inputs, output = einsum_labels(op.str_attr("equation"), ranks)
    one = as_expr(1)
    size: dict[str, Expr] = {}
    for labels, value in zip(inputs, op.operands, strict=True):
        for label, dim in zip(labels, value.shape, strict=True):
            if size.get(label, one) == 1:
                size[label] = dim
    terms: list[tuple[Value, str]] = []
    for labels, value in zip(inputs, op.operands, strict=True):
        # A dim of 1 for a longer label is constant along it and is dropped.
        pairs = zip(labels, value.shape, strict=True)
        kept = [(c, d) for c, d in pairs if not (d == 1 and size[c] != 1)]
        value = b.reshape(value, [d for _, d in kept])
        terms.append(_diagonal(b, value, "".join(c for c, _ in kept)))
    (x, xs), *rest = terms
    for i, (y, ys) in enumerate(rest):
        later = "".join(labels for _, labels in rest[i + 1 :])
        x, xs = _contract(b, x, xs, y, ys, output + later)
    x, xs = _keep(b, x, xs, output)
    return b.transpose(x, [xs.index(c) for c in output])


# ---- random numbers

# SplitMix64 (Steele, Lea, Flood 2014): a counter times the golden ratio, then mixed.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _word(b: Builder, bits: int) -> Value:
    """64 bits as an i64, which wraps."""
    return b.scalar(bits - 2**64 if bits >= 2**63 else bits, DType.I64)


def _shifted_right(b: Builder, x: Value, count: int) -> Value:
    """A logical shift: zeros come in from the left."""
    moved = b.binary("shift_right", x, _word(b, count))
    return b.binary("bitwise_and", moved, _word(b, 2 ** (64 - count) - 1))


def _mixed(b: Builder, x: Value) -> Value:
    for count, factor in ((30, _FIRST), (27, _SECOND)):
        x = b.binary("bitwise_xor", x, _shifted_right(b, x, count))
        x = b.binary("mul", x, _word(b, factor))
    return b.binary("bitwise_xor", x, _shifted_right(b, x, 31))


def random(b: Builder, op: Op) -> Value:
    """Element i of op n: mix(mix(seed + n * golden) + (i + 1) * golden), 24 bits of it.

    No state passes from one element to the next, so the numbers do not depend on the
    order, on the number of threads, or on whether they are recomputed.
    """
    (seed,), shape = op.operands, op.dims_attr("shape")
    own = _word(b, op.int_attr("number") * _GOLDEN % 2**64)
    stream = _mixed(b, b.emit("add", b.cast(seed, DType.I64), own))
    place = b.reshape(b.iota((product(shape),), 0), shape)
    place = b.binary("mul", b.binary("add", place, _word(b, 1)), _word(b, _GOLDEN))
    bits = _shifted_right(b, _mixed(b, b.binary("add", place, stream)), 40)
    return _times(b, b.cast(bits, DType.F32), 2.0**-24)


# ---- positions


def argreduce(b: Builder, op: Op) -> Value:
    """The first position of the extreme value; of the first NaN, if there is one.

    Two plain reductions, so it fuses, vectorises and splits as they do. Without NaN,
    some element equals the extreme; with NaN, the extreme is NaN and equals no element.
    """
    (x,) = op.operands
    x = b.cast(x, DType.U8) if x.dtype is DType.BOOL else _up(b, x)
    axis = op.int_attr("axis")
    best = b.reduce(op.str_attr("op"), x, [axis], keepdims=True)
    hit = b.binary("eq", x, best)
    if x.dtype.is_float:
        hit = b.binary("logical_or", hit, b.unary("isnan", x))
    place = b.iota(x.shape, axis)
    place = b.select(hit, place, b.full_like(place, 2**63 - 1))
    return b.reduce("min", place, [axis], keepdims=op.bool_attr("keepdims"))


# ---- the pass

DECOMPOSITIONS: dict[str, Decomposition] = {
    "linear": linear,
    "softmax": softmax,
    "log_softmax": log_softmax,
    "relu": relu,
    "silu": silu,
    "gelu": gelu,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "resize": resize,
    "einsum": einsum,
    "argreduce": argreduce,
    "random": random,
}
_RULES: RuleSet = {name: (rule,) for name, rule in DECOMPOSITIONS.items()}
_ATTENTION: RuleSet = {
    "attention": (spell_out_attention,),
    "attention_lse": (spell_out_attention_lse,),
    "attention_backward": (spell_out_attention_backward,),
}


def decompose(graph: Graph, cx: Context | None = None) -> Graph:
    """Every composite op in primitive ops; attention only if its kernel is off."""
    if cx is not None and not cx.options.attention:
        return rewrite(graph, {**_RULES, **_ATTENTION})
    return rewrite(graph, _RULES)
