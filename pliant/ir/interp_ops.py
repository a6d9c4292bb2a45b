"""What tensor ops mean, in NumPy, each as plain as its description in ir/ops.py.

A function takes the operands and, by name, the attributes; a dim is the number it has
in this run. Operands come in the type arithmetic happens in; the caller rounds the
result. The rows of ir/ops.py name these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from pliant.errors import DivisionError, IndexRangeError, InternalError, ShapeError
from pliant.ir.graph import Op
from pliant.ir.interp_memory import Array
from pliant.ir.interp_numbers import literal, start_of
from pliant.ir.ops_elementwise import erf
from pliant.ir.reductions import identity
from pliant.ir.shapes_composite import keeps_size
from pliant.ir.types import NUMPY, DType

Ints = tuple[int, ...]

# ---- create


def full(value: bool | int | float, dtype: DType, shape: Ints) -> Array:
    return np.full(shape, literal(value, dtype))


def iota(axis: int, dtype: DType, shape: Ints) -> Array:
    steps = np.arange(shape[axis]).reshape([-1] + [1] * (len(shape) - axis - 1))
    return np.broadcast_to(steps, shape)


def dim_value(value: int, dtype: DType) -> Array:
    return np.asarray(value)


# ---- move


def broadcast(x: Array, shape: Ints, axes: Ints) -> Array:
    aligned = [1] * len(shape)
    for i, axis in enumerate(axes):
        aligned[axis] = x.shape[i]
    return np.broadcast_to(x.reshape(aligned), shape)


def reshape(x: Array, shape: Ints) -> Array:
    return x.reshape(shape)


def transpose(x: Array, perm: Ints) -> Array:
    return np.transpose(x, perm)


def slice_(x: Array, starts: Ints, shape: Ints, steps: Ints) -> Array:
    parts = []
    for dim, start, size, step in zip(x.shape, starts, shape, steps, strict=True):
        last = start + (size - 1) * step
        if start < 0 or size < 0 or (size > 0 and last >= dim):
            raise ShapeError(f"slice: {start} to {last} is outside a dim of {dim}")
        parts.append(slice(start, start + size * step, step))
    found: Array = x[tuple(parts)]
    return found


def flip(x: Array, axes: Ints) -> Array:
    return np.flip(x, axes)


def concat(*parts: Array, axis: int) -> Array:
    return np.concatenate(parts, axis)


def pad(x: Array, low: Ints, high: Ints, value: bool | int | float) -> Array:
    pads = list(zip(low, high, strict=True))
    number = np.asarray(value).astype(x.dtype)
    return np.pad(x, pads, constant_values=number) if pads else x


def _check_range(index: Array, low: int, size: int, what: str, axis: int) -> None:
    bad = index[(index < low) | (index >= size)]
    if bad.size and axis < 0:
        ends = "0" if size == 1 else f"0 to {size - 1}"
        raise ShapeError(f"{what} is {bad.flat[0]}, must be {ends}")
    if bad.size:
        raise IndexRangeError(
            f"{what}: index {bad.flat[0]} is outside axis {axis} of size {size}"
        )


def index(x: Array, *indices: Array) -> Array:
    for axis, places in enumerate(indices):
        _check_range(places, 0, x.shape[axis], "index", axis)
    found: Array = x[tuple(indices)]
    return found


def divisor(y: Array, of: str) -> Array:
    if not np.all(y):
        raise DivisionError(f"{of}: division of an integer by 0")
    return y


def take_along(x: Array, places: Array, axis: int) -> Array:
    _check_range(places, 0, x.shape[axis], "take_along", axis)
    front = [slice(size) for size in places.shape]
    front[axis] = slice(None)
    return np.take_along_axis(x[tuple(front)], places.astype(np.int64), axis)


def in_range(places: Array, size: int, wraps: bool, of: str, axis: int) -> Array:
    wide = places.astype(np.int64)
    _check_range(wide, -size if wraps else 0, size, of, axis)
    return np.where(wide < 0, wide + size, wide).astype(places.dtype)


# ---- reduce


def reduce(x: Array, op: str, axes: Ints, keepdims: bool) -> Array:
    match op:
        case "sum":
            return np.asarray(np.sum(x, axes, x.dtype, keepdims=keepdims))
        case "prod":
            return np.asarray(np.prod(x, axes, x.dtype, keepdims=keepdims))
        case "any":
            return np.asarray(np.any(x, axes, keepdims=keepdims))
        case "all":
            return np.asarray(np.all(x, axes, keepdims=keepdims))
        case "max":
            return extreme(np.max, "max", x, axes, keepdims)
        case "min":
            return extreme(np.min, "min", x, axes, keepdims)
    raise InternalError("interpreter", f"no reduction is called {op}")


def _dtype_of(x: Array) -> DType:
    return next(d for d, kind in NUMPY.items() if kind == x.dtype)


def extreme(
    function: Callable[..., Any], name: str, x: Array, axes: Ints, keepdims: bool
) -> Array:
    start = start_of(name, _dtype_of(x))
    return np.asarray(function(x, axes, keepdims=keepdims, initial=start))


def argreduce(x: Array, op: str, axis: int, keepdims: bool) -> Array:
    function = np.argmax if op == "max" else np.argmin
    return np.asarray(function(x, axis, keepdims=keepdims))


def cumulate(x: Array, op: str, axis: int) -> Array:
    function = np.cumsum if op == "sum" else np.cumprod
    wide = np.float64 if x.dtype == np.float32 else x.dtype
    return function(x, axis, wide).astype(x.dtype)


_AT = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def scatter(places: Array, updates: Array, op: str, rows: int) -> Array:
    _check_range(places, 0, rows, "scatter", 0)
    start = identity(op, _dtype_of(updates))
    out: Array = np.full((rows, updates.shape[1]), start, updates.dtype)
    _AT[op].at(out, places.astype(np.int64), updates)
    return out


def pool(
    x: Array,
    op: str,
    window: Ints,
    stride: Ints,
    low: Ints,
    high: Ints,
    dilation: Ints,
    include_pad: bool,
) -> Array:
    lead = x.ndim - len(window)
    axes = tuple(range(-len(window), 0))
    where = (window, stride, low, high, dilation, lead)
    if op == "max":
        start = start_of("max", _dtype_of(x))
        return np.asarray(np.max(_windows(x, *where, start), axes, initial=start))
    total = np.sum(_windows(x, *where, 0), axes, x.dtype)
    if include_pad:
        return np.asarray(total / math.prod(window)).astype(x.dtype)
    real = _windows(np.ones_like(x), *where, 0)
    return np.asarray(total / np.sum(real, axes, x.dtype))


# ---- contract


def matmul(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu" and a.dtype.itemsize == 1:
        a, b = a.astype(np.int32), b.astype(np.int32)
    return np.asarray(np.matmul(a, b))


def coded_matmul(
    x: Array,
    q: Array,
    scale: Array,
    least: Array | None = None,
    *,
    zero: float,
    **_: int,
) -> Array:
    """The numbers of each group of K, then an ordinary product."""
    shape = (*scale.shape, q.shape[1] // max(scale.shape[1], 1))
    numbers = q.reshape(shape).astype(np.float32) + np.float32(zero)
    numbers = numbers * scale.astype(np.float32)[..., None]
    if least is not None:
        numbers = numbers + least.astype(np.float32)[..., None]
    made: Array = x @ numbers.reshape(q.shape).T
    return made


def grouped_matmul(a: Array, b: Array, ends: Array) -> Array:
    """Row ranges that end where `ends` says, each with its own matrix."""
    out: Array = np.zeros((a.shape[0], b.shape[2]), a.dtype)
    first = 0
    for matrix, last in zip(b, ends.tolist(), strict=True):
        if not first <= last <= len(a):
            raise IndexRangeError(f"grouped_mm: offset {last} of {len(a)} rows")
        out[first:last] = a[first:last] @ matrix
        first = last
    return out


def _windows(
    x: Array,
    window: Sequence[int],
    stride: Ints,
    low: Ints,
    high: Ints,
    dilation: Ints,
    lead: int,
    padding: Any,
) -> Array:
    """Every position of a sliding window: (lead.., out.., window..)."""
    pads = [(0, 0)] * lead + list(zip(low, high, strict=True))
    x = np.pad(x, pads, constant_values=padding)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, window, strict=True)]
    axes = tuple(range(lead, x.ndim))
    view = np.lib.stride_tricks.sliding_window_view(x, spans, axes)
    steps = [slice(None, None, s) for s in stride]
    inner = [slice(None, None, d) for d in dilation]
    found: Array = view[tuple([slice(None)] * lead + steps + inner)]
    return found


def conv(
    x: Array,
    w: Array,
    stride: Ints,
    low: Ints,
    high: Ints,
    dilation: Ints,
    groups: int,
) -> Array:
    spatial = x.ndim - 2
    windows = _windows(x, w.shape[2:], stride, low, high, dilation, 2, 0)
    out, kernel = list(range(3, 3 + spatial)), list(range(10, 10 + spatial))
    parts = windows.reshape(
        (x.shape[0], groups, x.shape[1] // groups, *windows.shape[2:])
    )
    weights = w.reshape((groups, w.shape[0] // groups, *w.shape[1:]))
    # labels: 0 batch, 1 group, 2 channel in the group, 20 output in the group
    found = np.einsum(
        parts,
        [0, 1, 2, *out, *kernel],
        weights,
        [1, 20, 2, *kernel],
        [0, 1, 20, *out],
        optimize=x.size > 0,
    )
    return np.asarray(
        found.reshape((x.shape[0], w.shape[0], *windows.shape[2 : 2 + spatial]))
    )


def conv_last(
    x: Array, w: Array, stride: Ints, low: Ints, high: Ints, dilation: Ints
) -> Array:
    first = np.moveaxis(x, -1, 1)
    windows = _windows(first, w.shape[2:], stride, low, high, dilation, 2, 0)
    spatial = x.ndim - 2
    out, kernel = list(range(3, 3 + spatial)), list(range(10, 10 + spatial))
    # labels: 0 batch, 1 input channel, 2 output channel
    found = np.einsum(
        windows,
        [0, 1, *out, *kernel],
        w,
        [2, 1, *kernel],
        [0, *out, 2],
        optimize=x.size > 0,
    )
    return np.asarray(found)


def conv_transpose(
    x: Array,
    w: Array,
    stride: Ints,
    low: Ints,
    high: Ints,
    dilation: Ints,
    groups: int,
    extra: Ints,
) -> Array:
    spatial = x.shape[2:]
    reach = [
        (d - 1) * s + e * (k - 1) + 1 + more
        for d, s, e, k, more in zip(
            spatial, stride, dilation, w.shape[2:], extra, strict=True
        )
    ]
    outputs = w.shape[1] * groups
    whole = np.zeros((x.shape[0], outputs, *(max(r, 0) for r in reach)), x.dtype)
    parts = x.reshape((x.shape[0], groups, x.shape[1] // groups, *spatial))
    weights = w.reshape((groups, w.shape[0] // groups, *w.shape[1:]))
    for tap in product(*map(range, w.shape[2:])):
        where: Any = (..., *tap)
        share = np.einsum("ngc...,gco->ngo...", parts, weights[where])
        places = [
            slice(t * e, t * e + max(d - 1, -1) * s + 1, s)
            for t, e, d, s in zip(tap, dilation, spatial, stride, strict=True)
        ]
        if 0 not in spatial:
            whole[(slice(None), slice(None), *places)] += share.reshape(
                (x.shape[0], outputs, *spatial)
            )
    crop = [slice(a, r - b) for a, b, r in zip(low, high, reach, strict=True)]
    found: Array = whole[(slice(None), slice(None), *crop)]
    return found


# ---- composite


def random(seed: Array, number: int, shape: Ints) -> Array:
    """SplitMix64: see passes/decompose.py."""
    golden = 0x9E3779B97F4A7C15

    def mixed(x: Array) -> Array:
        for count, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(count))) * np.uint64(factor)
        return np.asarray(x ^ (x >> np.uint64(31)))

    start = (int(seed) + number * golden) % 2**64
    stream = mixed(np.asarray([start], np.uint64))
    places = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * np.uint64(golden)
    bits = mixed(places + stream) >> np.uint64(40)
    return (bits.astype(np.float32) * np.float32(2.0**-24)).reshape(shape)


def linear(x: Array, w: Array, *bias: Array) -> Array:
    return np.asarray(np.matmul(x, w.T) + (bias[0] if bias else 0)).astype(x.dtype)


def softmax(x: Array, axis: int) -> Array:
    exp = np.exp(x - extreme(np.max, "max", x, (axis,), True))
    return np.asarray(exp / np.sum(exp, axis, keepdims=True))


def log_softmax(x: Array, axis: int) -> Array:
    moved = x - extreme(np.max, "max", x, (axis,), True)
    return np.asarray(moved - np.log(np.sum(np.exp(moved), axis, keepdims=True)))


def relu(x: Array) -> Array:
    return np.maximum(x, np.zeros_like(x))


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return np.asarray(0.5 * x * (1 + np.tanh(inner)))
    bell: Array = erf(x * np.asarray(math.sqrt(0.5), x.dtype))
    return np.asarray(0.5 * x * (1 + bell))


def _normalised(x: Array, axes: Ints, eps: float) -> Array:
    count = math.prod(x.shape[a] for a in axes)
    mean = np.sum(x, axes, keepdims=True) / np.asarray(count, x.dtype)
    centred = x - mean
    var = np.sum(centred * centred, axes, keepdims=True) / np.asarray(count, x.dtype)
    return np.asarray(centred / np.sqrt(var + np.asarray(eps, x.dtype)))


def _scaled(x: Array, weights: Sequence[Array]) -> Array:
    """x * w + b, of as many as there are."""
    if weights:
        x = x * weights[0]
    return x + weights[1] if len(weights) > 1 else x


def layer_norm(x: Array, *weights: Array, axes: int, eps: float, affine: str) -> Array:
    last = tuple(range(x.ndim - axes, x.ndim))
    return _scaled(_normalised(x, last, eps), weights)


def rms_norm(x: Array, *weights: Array, axes: int, eps: float, affine: str) -> Array:
    last = tuple(range(x.ndim - axes, x.ndim))
    count = np.asarray(math.prod(x.shape[a] for a in last), x.dtype)
    mean = np.sum(x * x, last, keepdims=True) / count
    return _scaled(x / np.sqrt(mean + np.asarray(eps, x.dtype)), weights)


def _per_channel(w: Array, rank: int) -> Array:
    return w.reshape((-1,) + (1,) * (rank - 2))


def group_norm(
    x: Array, *weights: Array, groups: int, eps: float, affine: str
) -> Array:
    parts = x.reshape(
        (x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))
    )
    normal = _normalised(parts, (2, 3), eps).reshape(x.shape)
    return _scaled(normal, [_per_channel(w, x.ndim) for w in weights])


def batch_norm(
    x: Array, mean: Array, var: Array, *weights: Array, eps: float, affine: str
) -> Array:
    mean, var = _per_channel(mean, x.ndim), _per_channel(var, x.ndim)
    normal = (x - mean) / np.sqrt(var + np.asarray(eps, x.dtype))
    return _scaled(normal, [_per_channel(w, x.ndim) for w in weights])


def einsum(*operands: Array, equation: str) -> Array:
    return np.asarray(np.einsum(equation, *operands))


def extent(x: Array, most: int, of: str) -> Array:
    _check_range(x, 0, most + 1, of, -1)
    return np.zeros(int(x), np.bool_)


def nonzero(x: Array) -> Array:
    return np.argwhere(x)


# ---- resize


def resized(op: Op, shape: tuple[int, ...], x: Array, precise: bool) -> Array:
    """`resize`, with positions and weights in f32, or in f64 if precise."""
    scales = op.attr("scales")
    assert isinstance(scales, tuple)
    for i, size in enumerate(shape):
        axis = x.ndim - len(shape) + i
        factor = scales[i] if scales else None
        assert factor is None or isinstance(factor, float)
        if keeps_size(op) and size == x.shape[axis]:
            continue
        weights = _resampling(op, x.shape[axis], size, factor, precise)
        if weights.dtype == np.int64:  # nearest: positions, exact for every type
            x = np.take(x, weights, axis)
        else:
            moved = np.moveaxis(x, axis, -1)
            x = np.moveaxis(np.matmul(moved, weights.T.astype(x.dtype)), -1, axis)
    return x


def _resampling(
    op: Op, size: int, out: int, factor: float | None, precise: bool
) -> Array:
    """Positions (nearest), or the weight of each input for each output."""
    real: Any = np.float64 if precise else np.float32
    mode, aligned = op.str_attr("mode"), op.bool_attr("align_corners")
    place: Any = np.arange(out).astype(real)
    scale = real(1 / factor) if factor else real(size) / real(max(out, 1))
    if mode.startswith("nearest"):
        shift = real(0.5) if mode == "nearest_exact" else real(0)
        if keeps_size(op) and out == 2 * size:
            scale = real(0.5)
        found = np.floor((place + shift) * scale).astype(np.int64)
        return np.asarray(np.minimum(found, size - 1))
    if aligned:
        at = place * (real(size - 1) / real(out - 1) if out > 1 else real(0))
    else:
        at = (place + real(0.5)) * scale - real(0.5)
        at = np.maximum(at, real(0)) if mode == "linear" else at
    first = np.floor(at)
    part = at - first
    if mode == "linear":
        taps = {0: 1 - part, 1: part}
    else:
        taps = {
            -1: _cubic_far(part + 1),
            0: _cubic_near(part),
            1: _cubic_near(1 - part),
            2: _cubic_far(2 - part),
        }
    weights = np.zeros((out, size), real)
    for offset, share in taps.items():
        column = np.clip(first.astype(np.int64) + offset, 0, size - 1)
        np.add.at(weights, (np.arange(out), column), share)
    return weights


def _cubic_near(t: Any) -> Any:
    """Cubic convolution for distances up to 1, with torch's coefficient -0.75."""
    return (1.25 * t - 2.25) * t * t + 1


def _cubic_far(t: Any) -> Any:
    """Cubic convolution for distances from 1 to 2."""
    return ((-0.75 * t + 3.75) * t - 6) * t + 3
