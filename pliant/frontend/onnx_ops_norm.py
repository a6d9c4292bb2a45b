"""Normalizations and dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_create import uniform
from pliant.frontend.onnx_values import Entry
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, floordiv


def per_channel(cx: OnnxContext, vector: Value, rank: int) -> Value:
    """(C) as (C, 1, ..), to go with (N, C, ..)."""
    ones = [as_expr(1)] * (rank - 2)
    return cx.reshape(vector, (*vector.shape, *ones))


def batch_norm(cx: OnnxContext, n: Node) -> tuple[Value, ...]:
    x = n.tensor(0)
    weight, bias, mean, var = (n.tensor(i) for i in range(1, 5))
    eps = n.attr("epsilon", 1e-5)
    training = bool(n.attr("training_mode", 0))
    if n.version < 14:
        training = len(n.used) > 1
    if not training:
        parts = [
            v if v.dtype is x.dtype else cx.cast(v, x.dtype)
            for v in (mean, var, weight, bias)
        ]
        if x.type.rank < 2:
            cx.unsupported("a batch norm without channels")
        return (cx.b.emit("batch_norm", x, *parts, eps=eps, affine="wb"),)
    axes = [i for i in range(x.type.rank) if i != 1]
    own = cx.mean(cx.cast(x, x.dtype.compute), axes)
    gap = cx.sub(cx.cast(x, own.dtype), per_channel(cx, own, x.type.rank))
    spread = cx.mean(cx.mul(gap, gap), axes)
    scale = cx.unary("rsqrt", cx.add(spread, eps))
    made = cx.mul(gap, per_channel(cx, cx.mul(scale, weight), x.type.rank))
    made = cx.add(made, per_channel(cx, bias, x.type.rank))
    keep = n.attr("momentum", 0.9)
    means = cx.add(cx.mul(mean, keep), cx.mul(cx.cast(own, mean.dtype), 1 - keep))
    variances = cx.add(cx.mul(var, keep), cx.mul(cx.cast(spread, var.dtype), 1 - keep))
    return cx.cast(made, x.dtype), means, variances


def instance_norm(cx: OnnxContext, n: Node) -> Value:
    x, weight, bias = n.tensor(0), n.tensor(1), n.tensor(2)
    whole = _in_groups(cx, x)
    if whole is not None:
        groups = x.shape[1]
        each = cx.simplify(floordiv(whole.shape[1], groups))
        rows = (
            cx.broadcast_to(cx.reshape(v, (groups, 1)), (groups, each))
            for v in (weight, bias)
        )
        parts = [cx.reshape(cx.cast(v, x.dtype), (groups * each,)) for v in rows]
        made = cx.b.emit(
            "group_norm",
            whole,
            *parts,
            groups=groups.value,
            eps=n.attr("epsilon", 1e-5),
            affine="wb",
        )
        return cx.reshape(made, x.shape)
    axes = list(range(2, x.type.rank))
    made = standardized(cx, x, axes, n.attr("epsilon", 1e-5))
    made = cx.mul(made, per_channel(cx, cx.cast(weight, made.dtype), x.type.rank))
    made = cx.add(made, per_channel(cx, cx.cast(bias, made.dtype), x.type.rank))
    return cx.cast(made, x.dtype)


def _in_groups(cx: OnnxContext, x: Value) -> Value | None:
    """The (N, groups * each, ..) that x is, with its channels in groups.

    torch's exporter writes a norm of groups as (N, groups, rest), normed and restored.
    """
    made = next((op for op in reversed(cx.b.ops) if x in op.results), None)
    if made is None or made.name != "reshape" or x.type.rank != 3:
        return None
    (whole,) = made.operands
    if whole.type.rank < 3 or not cx.b.same(whole.shape[0], x.shape[0]):
        return None
    groups, channels = x.shape[1], whole.shape[1]
    if not groups.is_const or not channels.is_const or groups.value < 1:
        return None
    return None if channels.value % groups.value else whole


def standardized(cx: OnnxContext, x: Value, axes: Sequence[int], eps: float) -> Value:
    """(x - mean) / sqrt(var + eps), in the type of arithmetic."""
    wide = cx.cast(x, x.dtype.compute)
    gap = cx.sub(wide, cx.mean(wide, axes, True))
    var = cx.mean(cx.mul(gap, gap), axes, True)
    return cx.mul(gap, cx.unary("rsqrt", cx.add(var, eps)))


def layer_norm(cx: OnnxContext, n: Node) -> tuple[Value | None, ...]:
    x, weight, bias = n.tensor(0), n.maybe(1), n.maybe(2)
    axis = n.axis(n.attr("axis", -1))
    return normalized(cx, x, weight, bias, axis, n.attr("epsilon", 1e-5), n.used)


def normalized(
    cx: OnnxContext,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    axis: int,
    eps: float,
    used: frozenset[int],
) -> tuple[Value | None, ...]:
    """Y, mean, 1/deviation over the dims from `axis` on."""
    rank = x.type.rank
    tail = x.shape[axis:]
    if used <= {0} and weight is not None and _fits(cx, weight, tail):
        weight = cx.reshape(weight, tail)
        affine, parts = "w", [weight]
        if bias is not None and _fits(cx, bias, tail):
            affine, parts = "wb", [weight, cx.reshape(bias, tail)]
        if bias is None or affine == "wb":
            made = cx.b.emit(
                "layer_norm", x, *parts, axes=rank - axis, eps=eps, affine=affine
            )
            return made, None, None
    axes = list(range(axis, rank))
    wide = cx.cast(x, x.dtype.compute)
    mean = cx.mean(wide, axes, True)
    gap = cx.sub(wide, mean)
    var = cx.mean(cx.mul(gap, gap), axes, True)
    scale = cx.unary("rsqrt", cx.add(var, eps))
    made = cx.cast(cx.mul(gap, scale), x.dtype)
    if weight is not None:
        made = cx.mul(made, cx.expand_to(weight, x.shape))
    if bias is not None:
        made = cx.add(made, cx.expand_to(bias, x.shape))
    return made, mean, scale


def _fits(cx: OnnxContext, vector: Value, tail: Sequence[Expr]) -> bool:
    """Whether a vector is of the normalized shape; ones in front do not matter."""
    shape = list(vector.shape)
    while len(shape) > len(tail) and shape[0] == 1:
        shape.pop(0)
    return len(shape) == len(tail) and all(map(cx.b.same, shape, tail))


def rms_norm(cx: OnnxContext, n: Node) -> Value:
    x, weight = n.tensor(0), n.maybe(1)
    axis = n.axis(n.attr("axis", -1))
    return rms_normalized(cx, x, weight, axis, n.attr("epsilon", 1e-5))


def rms_normalized(
    cx: OnnxContext, x: Value, weight: Value | None, axis: int, eps: float
) -> Value:
    rank, tail = x.type.rank, x.shape[axis:]
    if weight is not None and weight.dtype is x.dtype and _fits(cx, weight, tail):
        weight = cx.reshape(weight, tail)
        return cx.b.emit("rms_norm", x, weight, axes=rank - axis, eps=eps, affine="w")
    wide = cx.cast(x, x.dtype.compute)
    square = cx.mean(cx.mul(wide, wide), list(range(axis, rank)), True)
    made = cx.mul(wide, cx.unary("rsqrt", cx.add(square, eps)))
    made = cx.cast(made, x.dtype if weight is None else weight.dtype)
    if weight is not None:
        made = cx.mul(made, cx.expand_to(weight, x.shape))
    return made


def group_norm(cx: OnnxContext, n: Node) -> Value:
    x, weight, bias = n.tensor(0), n.tensor(1), n.tensor(2)
    groups, eps = n.attrs["num_groups"], n.attr("epsilon", 1e-5)
    if n.version < 21:  # a weight for each group
        each = cx.simplify(floordiv(x.shape[1], groups))
        weight, bias = (
            cx.reshape(
                cx.broadcast_to(cx.reshape(v, (groups, 1)), (as_expr(groups), each)),
                (x.shape[1],),
            )
            for v in (weight, bias)
        )
    return cx.b.emit("group_norm", x, weight, bias, groups=groups, eps=eps, affine="wb")


def lrn(cx: OnnxContext, n: Node) -> Value:
    """x / (bias + alpha/size * sum of squares of channels around) ** beta"""
    x, size = n.tensor(0), n.attrs["size"]
    alpha, beta, bias = n.attr("alpha", 1e-4), n.attr("beta", 0.75), n.attr("bias", 1.0)
    low, high = (size - 1) // 2, size - 1 - (size - 1) // 2
    if x.shape[1].is_const:  # there is nothing behind the channels
        most = max(x.shape[1].value - 1, 0)
        low, high = min(low, most), min(high, most)
    zero = [as_expr(0)] * x.type.rank
    before, behind = list(zero), list(zero)
    before[1], behind[1] = as_expr(low), as_expr(high)
    square = cx.b.emit(
        "pad", cx.mul(x, x), low=tuple(before), high=tuple(behind), value=0.0
    )
    total = cx.slice(square, 1, 0, x.shape[1])
    for k in range(1, low + high + 1):
        total = cx.add(total, cx.slice(square, 1, k, x.shape[1]))
    base = cx.add(cx.mul(total, alpha / size), bias)
    return cx.div(x, cx.arith("pow", base, beta))


def lp_normalization(cx: OnnxContext, n: Node) -> Value:
    """A row of zeros stays one."""
    x, axis, p = n.tensor(0), n.axis(n.attr("axis", -1)), n.attr("p", 2)
    if p == 1:
        size = cx.reduce("sum", cx.unary("abs", x), (axis,), True)
    else:
        size = cx.unary("sqrt", cx.reduce("sum", cx.mul(x, x), (axis,), True))
    none = cx.arith("eq", size, 0.0)
    made = cx.div(x, cx.select(none, 1.0, size))
    return cx.select(cx.expand_to(none, x.shape), 0.0, made)


def mean_variance(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    axes = [n.axis(a) for a in n.attr("axes", [0, 2, 3])]
    wide = cx.cast(x, x.dtype.compute)
    gap = cx.sub(wide, cx.mean(wide, axes, True))
    deviation = cx.unary("sqrt", cx.mean(cx.mul(gap, gap), axes, True))
    return cx.cast(cx.div(gap, cx.add(deviation, 1e-9)), x.dtype)


def dropout(cx: OnnxContext, n: Node) -> tuple[Entry, ...]:
    """Off unless `training_mode` says so."""
    x = n.tensor(0)
    mask_type = DType.BOOL if n.version >= 10 else x.dtype
    ratio = n.number(1) if n.has(1) else n.attr("ratio", 0.5)
    training = False
    if n.version >= 12 and n.has(2):
        training = bool(n.needed(2, "whether dropout is on").reshape(-1)[0])
    if not training or ratio == 0:
        return x, cx.full(1, x.shape, mask_type)
    share = ratio if ratio is not None else cx.reshape(n.tensor(1), ())
    draw = uniform(cx, list(x.shape), DType.F32)
    limit = share if not isinstance(share, Value) else cx.cast(share, DType.F32)
    kept = cx.arith("ge", draw, limit)
    scale = (
        cx.div(1.0, cx.sub(1.0, limit))
        if isinstance(limit, Value)
        else (1.0 / (1.0 - limit) if limit < 1 else math.inf)
    )
    scaled = cx.mul(x, cx.cast(scale, x.dtype) if isinstance(scale, Value) else scale)
    return cx.select(kept, scaled, cx.full(0, x.shape, x.dtype)), cx.cast(
        kept, mask_type
    )


NORMS: Table = {
    ("BatchNormalization", 1): batch_norm,
    ("InstanceNormalization", 1): instance_norm,
    ("LayerNormalization", 1): layer_norm,
    ("RMSNormalization", 23): rms_norm,
    ("GroupNormalization", 18): group_norm,
    ("LRN", 1): lrn,
    ("LpNormalization", 1): lp_normalization,
    ("MeanVarianceNormalization", 9): mean_variance,
    ("Dropout", 1): dropout,
}
