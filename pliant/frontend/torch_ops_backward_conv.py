"""Backwards of convolutions and pools."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from pliant.frontend.torch_ops_context import Context, used
from pliant.frontend.torch_ops_nn import max_pool
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr


def convolution_backward(
    cx: Context,
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> list[Any]:
    """Gradients of input, weight and bias, those that are asked for."""
    if transposed:
        cx.unsupported("the backward of a transposed convolution")
    rank, groups = weight.type.rank - 2, cx.constant_int(groups, "groups")
    steps = cx.ints(stride, rank, "stride")
    pads = cx.ints(padding, rank, "padding")
    spread = cx.ints(dilation, rank, "dilation")
    grads: list[Any] = [None, None, None]
    if output_mask[0]:
        grads[0] = _of_input(cx, grad, x, weight, steps, pads, spread, groups)
    if output_mask[1]:
        grads[1] = _of_weight(cx, grad, x, weight, steps, pads, spread, groups)
    if output_mask[2]:
        axes = [i for i in range(grad.type.rank) if i != 1]
        total = cx.reduce("sum", cx.cast(grad, grad.dtype.compute), axes)
        grads[2] = cx.cast(total, grad.dtype)
    return grads


def _of_input(
    cx: Context,
    grad: Value,
    x: Value,
    weight: Value,
    steps: Sequence[int],
    pads: Sequence[int],
    spread: Sequence[int],
    groups: int,
) -> Value:
    """A transposed convolution; what no window reached behind its end is 0."""
    out = cx.b.emit(
        "conv_transpose",
        grad,
        weight,
        stride=tuple(steps),
        low=tuple(pads),
        high=(0,) * len(steps),
        dilation=tuple(spread),
        groups=groups,
        extra=tuple(step - 1 for step in steps),
    )
    for axis, size in enumerate(x.shape[2:], 2):
        out = cx.slice(out, axis, 0, size)
    return out


def _of_weight(
    cx: Context,
    grad: Value,
    x: Value,
    weight: Value,
    steps: Sequence[int],
    pads: Sequence[int],
    spread: Sequence[int],
    groups: int,
) -> Value:
    """For each tap of the kernel a product of `grad` and the inputs that it saw."""
    batch, outputs, *places = grad.shape
    inputs = weight.shape[1]
    kernel = [cx.constant_int(k, "kernel size") for k in weight.shape[2:]]
    widths = (as_expr(0), as_expr(0), *map(as_expr, pads))
    if any(pads):
        x = cx.b.emit("pad", x, low=widths, high=widths, value=0)
    each = outputs // groups
    rest = as_expr(1)
    for place in places:
        rest = rest * place
    left = cx.reshape(grad, (batch, groups, each, rest))
    left = cx.transpose(left, (1, 2, 0, 3))
    left = cx.reshape(left, (groups, each, batch * rest))
    taps = []
    for tap in itertools.product(*map(range, kernel)):
        seen = x
        for axis, (k, step, gap) in enumerate(zip(tap, steps, spread, strict=True), 2):
            seen = cx.slice(seen, axis, k * gap, places[axis - 2], step)
        right = cx.reshape(seen, (batch, groups, inputs, rest))
        right = cx.transpose(right, (1, 0, 3, 2))
        right = cx.reshape(right, (groups, batch * rest, inputs))
        taps.append(cx.reshape(cx.b.matmul(left, right), (outputs, inputs, 1)))
    return cx.reshape(cx.concat(taps, 2), weight.shape)


# --- max pools that know what they picked ---------------------------------------


def max_pool_kept(
    cx: Context,
    x: Value,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> list[Any]:
    """(out, the place in its plane of each element of it)"""
    options = (kernel_size, stride, padding, dilation, ceil_mode)
    out = max_pool(2)(cx, x, *options)
    if not used(cx, 1):
        return [out, None]
    window = cx.ints(kernel_size, 2, "kernel size")
    given = isinstance(stride, int | Expr) or bool(stride)
    steps = cx.ints(stride, 2, "stride") if given else window
    pads = cx.ints(padding, 2, "padding")
    spread = cx.ints(dilation, 2, "dilation")
    lead, (height, width) = x.type.rank - 2, x.shape[-2:]
    shape = out.shape
    # The last windows of a rounded-up pool reach behind the padding.
    tail = [p + (s - 1 if ceil_mode else 0) for p, s in zip(pads, steps, strict=True)]
    low = (*[as_expr(0)] * lead, *map(as_expr, pads))
    high = (*[as_expr(0)] * lead, *map(as_expr, tail))
    padded = x
    if any(pads) or any(tail):
        padded = cx.b.emit("pad", x, low=low, high=high, value=-math.inf)
    best: Value | None = None
    where = cx.full(0, shape, DType.I64)
    for tap in itertools.product(*map(range, window)):
        part, at = padded, cx.tensor(0, DType.I64)
        for i, (k, step, gap) in enumerate(zip(tap, steps, spread, strict=True)):
            axis = lead + i
            part = cx.slice(part, axis, k * gap, shape[axis], step)
            place = cx.iota(shape, axis, DType.I64)
            place = cx.add(cx.mul(place, step), k * gap - pads[i])
            at = cx.add(cx.mul(at, width if i else height), place)
        if best is None:
            best, where = part, at
            continue
        larger = cx.arith("gt", part, best)
        taken = cx.b.binary("logical_or", larger, cx.b.unary("isnan", part))
        best = cx.b.select(taken, part, best)
        where = cx.b.select(taken, at, where)
    return [out, where]


def max_pool_backward(
    cx: Context,
    grad: Value,
    x: Value,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Value,
) -> Value:
    """Each gradient added up at the element that was picked."""
    *lead, height, width = x.shape
    planes = as_expr(1)
    for size in lead:
        planes = planes * size
    seen = grad.shape[-2] * grad.shape[-1]
    flat = cx.reshape(indices, (planes, seen))
    plane = cx.iota((planes, seen), 0, DType.I64)
    places = cx.add(flat, cx.mul(plane, height * width))
    rows = cx.reshape(grad, (planes * seen, 1))
    sums = cx.b.emit(
        "scatter_add",
        cx.reshape(places, (planes * seen,)),
        cx.cast(rows, grad.dtype.compute),
        rows=planes * height * width,
    )
    return cx.reshape(cx.cast(sums, grad.dtype), x.shape)
