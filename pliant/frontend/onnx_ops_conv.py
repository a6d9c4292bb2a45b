"""Convolutions, transposed and deformable ones, and columns to images."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as every

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_ops_move import padded
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, ceildiv, floordiv, maximum, product

LONGEST = 256  # places of a causal window, each of which is a product of its own


@dataclass(frozen=True, slots=True)
class Sliding:
    """A window that slides over spatial dims; padding may depend on sizes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    low: tuple[Expr, ...]
    high: tuple[Expr, ...]
    dilation: tuple[int, ...]

    @property
    def spans(self) -> tuple[int, ...]:
        pairs = zip(self.size, self.dilation, strict=True)
        return tuple(gap * (size - 1) + 1 for size, gap in pairs)

    @property
    def is_constant(self) -> bool:
        return all(e.is_const and e.value >= 0 for e in (*self.low, *self.high))


def sliding(cx: OnnxContext, n: Node, size: list[int], dims: list[Expr]) -> Sliding:
    """The window of a node over these spatial dims."""
    rank = len(dims)
    stride = tuple(n.attrs.get("strides") or [1] * rank)
    dilation = tuple(n.attrs.get("dilations") or [1] * rank)
    pads = n.attrs.get("pads") or [0] * (2 * rank)
    if len(stride) != rank or len(dilation) != rank or len(pads) != 2 * rank:
        cx.unsupported("strides, dilations or pads of another rank than the kernel's")
    low, high = ([as_expr(p) for p in half] for half in (pads[:rank], pads[rank:]))
    mode = n.attr("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        for i, dim in enumerate(dims):
            span = dilation[i] * (size[i] - 1) + 1
            total = (ceildiv(dim, stride[i]) - 1) * stride[i] + span - dim
            total = cx.simplify(maximum(total, 0))
            less = cx.simplify(floordiv(total, 2))
            rest = cx.simplify(total - less)
            low[i], high[i] = (less, rest) if mode == "SAME_UPPER" else (rest, less)
    elif mode == "VALID":
        low, high = [as_expr(0)] * rank, [as_expr(0)] * rank
    return Sliding(tuple(size), stride, tuple(low), tuple(high), dilation)


def explicit(
    cx: OnnxContext, x: Value, w: Sliding, value: float = 0.0
) -> tuple[Value, Sliding]:
    """x padded where the op's own padding must be constant."""
    if w.is_constant:
        return x, w
    lead = [as_expr(0)] * (x.type.rank - len(w.size))
    x = padded(cx, x, [*lead, *w.low], [*lead, *w.high], "constant", value)
    none = tuple(as_expr(0) for _ in w.size)
    return x, Sliding(w.size, w.stride, none, none, w.dilation)


def kernel_size(cx: OnnxContext, n: Node, weight: Value) -> list[int]:
    if "kernel_shape" in n.attrs:
        size = [int(k) for k in n.attrs["kernel_shape"]]
        for dim, k in zip(weight.shape[2:], size, strict=True):
            cx.b.require_equal(dim, k, "the size of the kernel")
        return size
    return [cx.constant_int(d, "the size of a kernel") for d in weight.shape[2:]]


def fixed_kernel(cx: OnnxContext, weight: Value, size: list[int]) -> Value:
    """The weight with constant spatial dims."""
    shape = (*weight.shape[:2], *map(as_expr, size))
    return cx.reshape(weight, shape)


def convolve(
    cx: OnnxContext, x: Value, weight: Value, w: Sliding, groups: int
) -> Value:
    x, w = explicit(cx, x, w)
    return cx.b.emit(
        "conv",
        x,
        weight,
        stride=w.stride,
        low=tuple(e.value for e in w.low),
        high=tuple(e.value for e in w.high),
        dilation=w.dilation,
        groups=groups,
    )


def conv(cx: OnnxContext, n: Node) -> Value:
    x, weight = n.tensor(0), n.tensor(1)
    size = kernel_size(cx, n, weight)
    weight = fixed_kernel(cx, weight, size)
    w = sliding(cx, n, size, list(x.shape[2:]))
    made = convolve(cx, x, weight, w, n.attr("group", 1))
    return biased(cx, made, n.maybe(2))


def biased(cx: OnnxContext, made: Value, bias: Value | None) -> Value:
    if bias is None:
        return made
    ones = [as_expr(1)] * (made.type.rank - 2)
    return cx.add(made, cx.reshape(bias, (*bias.shape, *ones)))


def conv_transpose(cx: OnnxContext, n: Node) -> Value:
    x, weight = n.tensor(0), n.tensor(1)
    size = kernel_size(cx, n, weight)
    weight = fixed_kernel(cx, weight, size)
    rank = len(size)
    stride = tuple(n.attrs.get("strides") or [1] * rank)
    dilation = tuple(n.attrs.get("dilations") or [1] * rank)
    extra = tuple(n.attrs.get("output_padding") or [0] * rank)
    spans = [d * (k - 1) + 1 for k, d in zip(size, dilation, strict=True)]
    pads = n.attrs.get("pads") or [0] * (2 * rank)
    low, high = ([as_expr(p) for p in half] for half in (pads[:rank], pads[rank:]))
    mode, wanted = n.attr("auto_pad", "NOTSET"), n.attrs.get("output_shape")
    if wanted is not None or mode.startswith("SAME"):
        for i in range(rank):
            dim = x.shape[2 + i]
            whole = (dim - 1) * stride[i] + extra[i] + spans[i]
            out = as_expr(wanted[-rank:][i]) if wanted is not None else dim * stride[i]
            total = cx.simplify(whole - out)
            half = cx.simplify(floordiv(total, 2))
            rest = cx.simplify(total - half)
            low[i], high[i] = (half, rest) if mode == "SAME_UPPER" else (rest, half)
    given = [*low, *high]
    inside = all(
        e.is_const and 0 <= e.value < spans[k % rank] for k, e in enumerate(given)
    )
    none = (0,) * rank
    made = cx.b.emit(
        "conv_transpose",
        x,
        weight,
        stride=stride,
        low=tuple(e.value for e in low) if inside else none,
        high=tuple(e.value for e in high) if inside else none,
        dilation=dilation,
        groups=n.attr("group", 1),
        extra=extra,
    )
    if not inside:
        lead = [as_expr(0)] * 2
        cut = [*lead, *(-e for e in low)], [*lead, *(-e for e in high)]
        made = padded(cx, made, *cut, "constant", 0.0)
    return biased(cx, made, n.maybe(2))


# ---- causal convolution of each channel


def causal_conv(cx: OnnxContext, n: Node) -> tuple[Value, Value]:
    """The window behind each place of (B, C, L), and the last of what it has seen.

    One product for each place of the window: the channels may be of any number.
    """
    x, weight, bias, past = n.tensor(0), n.tensor(1), n.maybe(2), n.maybe(3)
    for given in (x, weight, *([past] if past is not None else [])):
        if given.type.rank != 3:
            cx.unsupported(f"an input of rank {given.type.rank} and not 3")
    batch, channels, length = x.shape
    size = cx.constant_int(weight.shape[2], "the size of a kernel")
    if not 1 <= size <= LONGEST:
        cx.unsupported(f"a kernel of {size} places, not 1 to {LONGEST}")
    cx.b.require_equal(weight.shape[0], channels, "channels of the kernel")
    cx.b.require_equal(weight.shape[1], 1, "the kernel is of one channel each")
    before = (batch, channels, as_expr(size - 1))
    if past is None:
        past = cx.full(0.0, before, x.dtype)
    for have, want in zip(past.shape, before, strict=True):
        cx.b.require_equal(want, have, "the state of a causal convolution")
    seen = cx.concat([cx.reshape(past, before), x], 2)
    wide = DType.F64 if x.dtype is DType.F64 else DType.F32
    made: Value | None = None
    for place in range(size):
        tap = cx.reshape(cx.slice(weight, 2, place, 1), (channels, 1))
        part = cx.cast(cx.slice(seen, 2, place, length), wide)
        term = cx.mul(part, cx.cast(tap, wide))
        made = term if made is None else cx.add(made, term)
    assert made is not None
    if bias is not None:
        made = cx.add(made, cx.reshape(cx.cast(bias, wide), (channels, 1)))
    kind = n.attr("activation", "none")
    if kind in ("silu", "swish"):
        made = cx.b.emit("silu", made)
    elif kind != "none":
        cx.unsupported(f"the activation {kind}")
    return cx.cast(made, x.dtype), cx.slice(seen, 2, length, size - 1)


# ---- columns to images


def col2im(cx: OnnxContext, n: Node) -> Value:
    """The sum of blocks at their places in the image."""
    x = n.tensor(0)
    image = n.ints(1, "the image's shape")
    block = n.ints(2, "the block's shape")
    rank = len(image)
    w = sliding(cx, n, block, [as_expr(d) for d in image])
    batch = x.shape[0]
    area = product([as_expr(k) for k in block])
    channels = cx.simplify(floordiv(x.shape[1], area))
    counts = [
        (image[i] + w.low[i].value + w.high[i].value - w.spans[i]) // w.stride[i] + 1
        for i in range(rank)
    ]
    whole = [image[i] + w.low[i].value + w.high[i].value for i in range(rank)]
    parts = cx.reshape(x, (batch, channels, *block, *counts))
    made: Value | None = None
    for tap in every(*map(range, block)):
        part = parts
        for axis, k in enumerate(tap):
            part = cx.slice(part, 2 + axis, k, 1)
        part = cx.reshape(part, (batch, channels, *counts))
        for i in range(rank):
            part = _spread(
                cx, part, 2 + i, w.stride[i], tap[i] * w.dilation[i], whole[i]
            )
        made = part if made is None else cx.add(made, part)
    assert made is not None
    for i in range(rank):
        made = cx.slice(made, 2 + i, w.low[i].value, image[i])
    return made


def _spread(
    cx: OnnxContext, x: Value, axis: int, stride: int, start: int, size: int
) -> Value:
    """Element i at start + i*stride of an axis, zeros between."""
    rank = x.type.rank
    zero = [as_expr(0)] * (rank + 1)
    count = x.shape[axis]
    shape = (*x.shape[:axis], count, as_expr(1), *x.shape[axis + 1 :])
    high = list(zero)
    high[axis + 1] = as_expr(stride - 1)
    fill = 0.0 if x.dtype.is_float else 0
    wide = cx.reshape(x, shape)
    if stride > 1:
        wide = cx.b.emit("pad", wide, low=tuple(zero), high=tuple(high), value=fill)
    joined = (*x.shape[:axis], count * stride, *x.shape[axis + 1 :])
    flat = cx.reshape(wide, joined)
    length = (count - 1) * stride + 1
    flat = cx.slice(flat, axis, 0, length)
    low, behind = [as_expr(0)] * rank, [as_expr(0)] * rank
    low[axis] = as_expr(start)
    behind[axis] = cx.simplify(size - start - length)
    return cx.b.emit("pad", flat, low=tuple(low), high=tuple(behind), value=fill)


# ---- deformable convolution


def deform_conv(cx: OnnxContext, n: Node) -> Value:
    """Samples at offset places, as a matrix product with the weight."""
    x, weight, offset = n.tensor(0), n.tensor(1), n.tensor(2)
    bias, mask = n.maybe(3), n.maybe(4)
    if x.type.rank != 4:
        cx.unsupported("a deformable convolution of other than two dims")
    size = kernel_size(cx, n, weight)
    w = sliding(cx, n, size, list(x.shape[2:]))
    low = [cx.constant_int(e, "padding") for e in w.low]
    batch, channels, height, width = x.shape
    out_h, out_w = offset.shape[2:]
    taps = size[0] * size[1]
    fields = n.attr("offset_group", 1)
    groups = n.attr("group", 1)
    grid = (batch, as_expr(fields), as_expr(size[0]), as_expr(size[1]), out_h, out_w)
    moves = cx.reshape(offset, (*grid[:4], as_expr(2), out_h, out_w))
    places = []
    for axis in range(2):
        own = cx.reshape(cx.slice(moves, 4, axis, 1), grid)
        tap = cx.mul(cx.iota(grid, 2 + axis, DType.I64), w.dilation[axis])
        at = cx.mul(cx.iota(grid, 4 + axis, DType.I64), w.stride[axis])
        base = cx.cast(cx.sub(cx.add(tap, at), low[axis]), x.dtype)
        places.append(cx.add(base, own))
    each = cx.simplify(floordiv(channels, fields))
    area = taps * out_h * out_w
    planes = cx.reshape(x, (batch * fields, each, height * width))
    flat = [cx.reshape(p, (batch * fields, area)) for p in places]
    found = bilinear(cx, planes, flat, (height, width))  # (B*F, C/F, area)
    if mask is not None:
        factor = cx.reshape(mask, (batch * fields, as_expr(1), area))
        found = cx.mul(found, factor)
    rows = cx.reshape(
        found, (batch, groups, floordiv(channels, groups), as_expr(taps), out_h * out_w)
    )
    inner = cx.simplify(floordiv(channels, groups)) * taps
    rows = cx.reshape(rows, (batch, groups, inner, out_h * out_w))
    filters = weight.shape[0]
    kernel = cx.reshape(weight, (1, groups, floordiv(filters, groups), inner))
    made = cx.b.matmul(cx.broadcast_to(kernel, (batch, *kernel.shape[1:])), rows)
    return biased(cx, cx.reshape(made, (batch, filters, out_h, out_w)), bias)


def bilinear(
    cx: OnnxContext, planes: Value, places: list[Value], dims: tuple[Expr, Expr]
) -> Value:
    """planes (B, C, H*W) at places (B, N) each, zeros outside -> (B, C, N)"""
    y, x = places
    bottom, left = cx.unary("floor", y), cx.unary("floor", x)
    made: Value | None = None
    for step_y, step_x in every((0.0, 1.0), (0.0, 1.0)):
        row, column = cx.add(bottom, step_y), cx.add(left, step_x)
        weight_y = cx.sub(1.0, cx.unary("abs", cx.sub(y, row)))
        weight_x = cx.sub(1.0, cx.unary("abs", cx.sub(x, column)))
        found = at_pixels(cx, planes, row, column, dims)
        share = cx.mul(weight_y, weight_x)
        part = cx.mul(found, cx.reshape(share, (share.shape[0], 1, share.shape[1])))
        made = part if made is None else cx.add(made, part)
    assert made is not None
    return made


def at_pixels(
    cx: OnnxContext, planes: Value, row: Value, column: Value, dims: tuple[Expr, Expr]
) -> Value:
    """planes (B, C, H*W) at whole places (B, N), zeros outside -> (B, C, N)"""
    height, width = dims
    inside: Value | None = None
    clamped = []
    for place, size in ((row, height), (column, width)):
        last = cx.tensor(size - 1, place.dtype)
        fits = cx.b.binary(
            "logical_and", cx.arith("ge", place, 0.0), cx.arith("le", place, last)
        )
        inside = fits if inside is None else cx.b.binary("logical_and", inside, fits)
        safe = cx.arith("maximum", cx.arith("minimum", place, last), 0.0)
        clamped.append(cx.cast(safe, DType.I64))
    flat = cx.add(cx.mul(clamped[0], cx.tensor(width, DType.I64)), clamped[1])
    cx.nonnegative.add(flat)
    batch, channels = planes.shape[:2]
    index = cx.reshape(flat, (batch, 1, flat.shape[1]))
    wide = cx.broadcast_to(index, (batch, channels, flat.shape[1]))
    found = cx.b.emit("take_along", planes, wide, axis=2)
    assert inside is not None
    mask = cx.reshape(inside, (batch, 1, flat.shape[1]))
    return cx.select(mask, found, 0.0)


CONVOLUTIONS: Table = {
    ("Conv", 1): conv,
    ("ConvTranspose", 1): conv_transpose,
    ("CausalConvWithState", 27): causal_conv,
    ("Col2Im", 18): col2im,
    ("DeformConv", 19): deform_conv,
}
