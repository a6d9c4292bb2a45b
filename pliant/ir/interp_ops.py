"""The NumPy definitions of tensor ops, each as plain as its description in ir/ops.py.

PURE needs the operands and attributes alone, SIZED also the values of the symbols.
Operands come in the type arithmetic happens in; the caller rounds the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from pliant.errors import DivisionError, IndexRangeError, InternalError, ShapeError
from pliant.ir.graph import Op
from pliant.ir.interp_memory import Array
from pliant.ir.interp_numbers import UNARY, identity
from pliant.ir.shapes_composite import keeps_size
from pliant.ir.types import NUMPY, DType
from pliant.sym import Expr


def sizes_of(dims: Sequence[Expr], env: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dim.evaluate(env) for dim in dims)


# ---- ops of operands and attributes alone


def _transpose(op: Op, x: Array) -> Array:
    return np.transpose(x, op.ints_attr("perm"))


def _flip(op: Op, x: Array) -> Array:
    return np.flip(x, op.ints_attr("axes"))


def _concat(op: Op, *parts: Array) -> Array:
    return np.concatenate(parts, op.int_attr("axis"))


def _select(op: Op, cond: Array, x: Array, y: Array) -> Array:
    return np.where(cond, x, y)


def _in_range(op: Op, index: Array, size: int, axis: int) -> None:
    bad = index[(index < 0) | (index >= size)]
    if bad.size:
        at = f" at {op.loc}" if op.loc else ""
        raise IndexRangeError(
            f"{op.name}{at}: index {bad.flat[0]} is outside axis {axis} of size {size}"
        )


def _index(op: Op, x: Array, *indices: Array) -> Array:
    for axis, index in enumerate(indices):
        _in_range(op, index, x.shape[axis], axis)
    found: Array = x[tuple(indices)]
    return found


def _divisor(op: Op, y: Array) -> Array:
    if not np.all(y):
        at = f" ({op.loc})" if op.loc else ""
        raise DivisionError(f"{op.str_attr('of')}: division of an integer by 0{at}")
    return y


def _take_along(op: Op, x: Array, index: Array) -> Array:
    axis = op.int_attr("axis")
    _in_range(op, index, x.shape[axis], axis)
    front = [slice(size) for size in index.shape]
    front[axis] = slice(None)
    return np.take_along_axis(x[tuple(front)], index.astype(np.int64), axis)


def _reduce(op: Op, x: Array) -> Array:
    axes, keepdims = op.ints_attr("axes"), op.bool_attr("keepdims")
    match op.str_attr("op"):
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
    raise InternalError("interpreter", f"no reduction is called {op.attr('op')}")


def _dtype_of(x: Array) -> DType:
    return next(d for d, kind in NUMPY.items() if kind == x.dtype)


def extreme(
    function: Callable[..., Any],
    name: str,
    x: Array,
    axes: tuple[int, ...],
    keepdims: bool,
) -> Array:
    start = identity(name, _dtype_of(x))
    return np.asarray(function(x, axes, keepdims=keepdims, initial=start))


def _argreduce(op: Op, x: Array) -> Array:
    function = np.argmax if op.str_attr("op") == "max" else np.argmin
    found = function(x, op.int_attr("axis"), keepdims=op.bool_attr("keepdims"))
    return np.asarray(found)


def _cumulate(op: Op, x: Array) -> Array:
    function = np.cumsum if op.str_attr("op") == "sum" else np.cumprod
    return function(x, op.int_attr("axis"), x.dtype)


def _matmul(op: Op, a: Array, b: Array) -> Array:
    if op.result.dtype is DType.I32:
        a, b = a.astype(np.int32), b.astype(np.int32)
    return np.asarray(np.matmul(a, b))


def _windows(x: Array, window: Sequence[int], op: Op, lead: int, padding: Any) -> Array:
    """Every position of a sliding window: (lead.., out.., window..)."""
    low, high = op.ints_attr("low"), op.ints_attr("high")
    pads = [(0, 0)] * lead + list(zip(low, high, strict=True))
    x = np.pad(x, pads, constant_values=padding)
    dilation = op.ints_attr("dilation")
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, window, strict=True)]
    axes = tuple(range(lead, x.ndim))
    view = np.lib.stride_tricks.sliding_window_view(x, spans, axes)
    steps = [slice(None, None, s) for s in op.ints_attr("stride")]
    inner = [slice(None, None, d) for d in dilation]
    found: Array = view[tuple([slice(None)] * lead + steps + inner)]
    return found


def _conv(op: Op, x: Array, w: Array) -> Array:
    groups, spatial = op.int_attr("groups"), x.ndim - 2
    windows = _windows(x, w.shape[2:], op, 2, 0)
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


def _conv_last(op: Op, x: Array, w: Array) -> Array:
    windows = _windows(np.moveaxis(x, -1, 1), w.shape[2:], op, 2, 0)
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


def _conv_transpose(op: Op, x: Array, w: Array) -> Array:
    groups, spatial = op.int_attr("groups"), x.shape[2:]
    names = ("stride", "dilation", "low", "high", "extra")
    stride, dilation, low, high, extra = (op.ints_attr(name) for name in names)
    reach = [
        (d - 1) * s + e * (k - 1) + 1 + more
        for d, s, e, k, more in zip(
            spatial, stride, dilation, w.shape[2:], extra, strict=True
        )
    ]
    outputs = w.shape[1] * groups
    full = np.zeros((x.shape[0], outputs, *(max(r, 0) for r in reach)), x.dtype)
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
            full[(slice(None), slice(None), *places)] += share.reshape(
                (x.shape[0], outputs, *spatial)
            )
    crop = [slice(a, r - b) for a, b, r in zip(low, high, reach, strict=True)]
    found: Array = full[(slice(None), slice(None), *crop)]
    return found


def _pool(op: Op, x: Array) -> Array:
    window = op.ints_attr("window")
    lead = x.ndim - len(window)
    axes = tuple(range(-len(window), 0))
    if op.str_attr("op") == "max":
        start = identity("max", _dtype_of(x))
        windows = _windows(x, window, op, lead, start)
        return np.asarray(np.max(windows, axes, initial=start))
    total = np.sum(_windows(x, window, op, lead, 0), axes, x.dtype)
    if op.bool_attr("include_pad"):
        return np.asarray(total / math.prod(window)).astype(x.dtype)
    real = _windows(np.ones_like(x), window, op, lead, 0)
    return np.asarray(total / np.sum(real, axes, x.dtype))


def _linear(op: Op, x: Array, w: Array, *bias: Array) -> Array:
    return np.asarray(np.matmul(x, w.T) + (bias[0] if bias else 0)).astype(x.dtype)


def _softmax(op: Op, x: Array) -> Array:
    axis = (op.int_attr("axis"),)
    exp = np.exp(x - extreme(np.max, "max", x, axis, True))
    return np.asarray(exp / np.sum(exp, axis, keepdims=True))


def _log_softmax(op: Op, x: Array) -> Array:
    axis = (op.int_attr("axis"),)
    moved = x - extreme(np.max, "max", x, axis, True)
    return np.asarray(moved - np.log(np.sum(np.exp(moved), axis, keepdims=True)))


def _relu(op: Op, x: Array) -> Array:
    return np.maximum(x, np.zeros_like(x))


def _silu(op: Op, x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def _gelu(op: Op, x: Array) -> Array:
    if op.str_attr("approximate") == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return np.asarray(0.5 * x * (1 + np.tanh(inner)))
    erf: Array = UNARY["erf"](x * np.asarray(math.sqrt(0.5), x.dtype))
    return np.asarray(0.5 * x * (1 + erf))


def _normalised(x: Array, axes: tuple[int, ...], eps: float) -> Array:
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


def _layer_norm(op: Op, x: Array, *weights: Array) -> Array:
    axes = tuple(range(x.ndim - op.int_attr("axes"), x.ndim))
    return _scaled(_normalised(x, axes, op.float_attr("eps")), weights)


def _rms_norm(op: Op, x: Array, *weights: Array) -> Array:
    axes = tuple(range(x.ndim - op.int_attr("axes"), x.ndim))
    count = np.asarray(math.prod(x.shape[a] for a in axes), x.dtype)
    mean = np.sum(x * x, axes, keepdims=True) / count
    return _scaled(
        x / np.sqrt(mean + np.asarray(op.float_attr("eps"), x.dtype)), weights
    )


def _per_channel(w: Array, rank: int) -> Array:
    return w.reshape((-1,) + (1,) * (rank - 2))


def _group_norm(op: Op, x: Array, *weights: Array) -> Array:
    groups = op.int_attr("groups")
    parts = x.reshape(
        (x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))
    )
    normal = _normalised(parts, (2, 3), op.float_attr("eps")).reshape(x.shape)
    return _scaled(normal, [_per_channel(w, x.ndim) for w in weights])


def _batch_norm(op: Op, x: Array, mean: Array, var: Array, *weights: Array) -> Array:
    mean, var = _per_channel(mean, x.ndim), _per_channel(var, x.ndim)
    normal = (x - mean) / np.sqrt(var + np.asarray(op.float_attr("eps"), x.dtype))
    return _scaled(normal, [_per_channel(w, x.ndim) for w in weights])


def _einsum(op: Op, *operands: Array) -> Array:
    return np.asarray(np.einsum(op.str_attr("equation"), *operands))


PURE: dict[str, Callable[..., Array]] = {
    "stop_gradient": lambda op, x: x,
    "select": _select,
    "transpose": _transpose,
    "flip": _flip,
    "concat": _concat,
    "index": _index,
    "divisor": _divisor,
    "take_along": _take_along,
    "reduce": _reduce,
    "argreduce": _argreduce,
    "cumulate": _cumulate,
    "matmul": _matmul,
    "conv": _conv,
    "conv_last": _conv_last,
    "conv_transpose": _conv_transpose,
    "pool": _pool,
    "linear": _linear,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "relu": _relu,
    "silu": _silu,
    "gelu": _gelu,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "einsum": _einsum,
}


# ---- ops that need the symbols


def _iota(op: Op, env: dict[str, int]) -> Array:
    shape = sizes_of(op.dims_attr("shape"), env)
    axis = op.int_attr("axis")
    steps = np.arange(shape[axis]).reshape([-1] + [1] * (len(shape) - axis - 1))
    return np.broadcast_to(steps, shape)


def _dim_value(op: Op, env: dict[str, int]) -> Array:
    return np.asarray(op.dim_attr("value").evaluate(env))


def _broadcast(op: Op, env: dict[str, int], x: Array) -> Array:
    shape = sizes_of(op.dims_attr("shape"), env)
    aligned = [1] * len(shape)
    for i, axis in enumerate(op.ints_attr("axes")):
        aligned[axis] = x.shape[i]
    return np.broadcast_to(x.reshape(aligned), shape)


def _reshape(op: Op, env: dict[str, int], x: Array) -> Array:
    return x.reshape(sizes_of(op.dims_attr("shape"), env))


def _slice(op: Op, env: dict[str, int], x: Array) -> Array:
    starts = sizes_of(op.dims_attr("starts"), env)
    shape = sizes_of(op.dims_attr("shape"), env)
    parts = []
    for dim, start, size, step in zip(
        x.shape, starts, shape, op.ints_attr("steps"), strict=True
    ):
        last = start + (size - 1) * step
        if start < 0 or size < 0 or (size > 0 and last >= dim):
            raise ShapeError(f"slice: {start} to {last} is outside a dim of {dim}")
        parts.append(slice(start, start + size * step, step))
    found: Array = x[tuple(parts)]
    return found


def _pad(op: Op, env: dict[str, int], x: Array) -> Array:
    low, high = sizes_of(op.dims_attr("low"), env), sizes_of(op.dims_attr("high"), env)
    value = op.attr("value")
    assert isinstance(value, bool | int | float)
    pads = list(zip(low, high, strict=True))
    number = np.asarray(value).astype(x.dtype)
    return np.pad(x, pads, constant_values=number) if pads else x


def _checked(op: Op, env: dict[str, int], index: Array) -> Array:
    size = op.dim_attr("size").evaluate(env)
    wraps = op.bool_attr("wraps")
    wide = index.astype(np.int64)
    bad = wide[(wide < (-size if wraps else 0)) | (wide >= size)]
    if bad.size:
        at = f" ({op.loc})" if op.loc else ""
        raise IndexRangeError(
            f"{op.str_attr('of')}: index {bad.flat[0]} is outside axis "
            f"{op.int_attr('axis')} of size {size}{at}"
        )
    return np.where(wide < 0, wide + size, wide).astype(index.dtype)


def _scatter_add(op: Op, env: dict[str, int], index: Array, rows: Array) -> Array:
    count = op.dim_attr("rows").evaluate(env)
    _in_range(op, index, count, 0)
    out: Array = np.zeros((count, rows.shape[1]), rows.dtype)
    np.add.at(out, index.astype(np.int64), rows)
    return out


def _random(op: Op, env: dict[str, int], seed: Array) -> Array:
    """SplitMix64: see passes/decompose.py."""
    golden = 0x9E3779B97F4A7C15

    def mixed(x: Array) -> Array:
        for count, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(count))) * np.uint64(factor)
        return np.asarray(x ^ (x >> np.uint64(31)))

    shape = sizes_of(op.dims_attr("shape"), env)
    start = (int(seed) + op.int_attr("number") * golden) % 2**64
    stream = mixed(np.asarray([start], np.uint64))
    places = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * np.uint64(golden)
    bits = mixed(places + stream) >> np.uint64(40)
    return (bits.astype(np.float32) * np.float32(2.0**-24)).reshape(shape)


SIZED: dict[str, Callable[..., Array]] = {
    "random": _random,
    "scatter_add": _scatter_add,
    "in_range": _checked,
    "iota": _iota,
    "dim_value": _dim_value,
    "broadcast": _broadcast,
    "stretch": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "pad": _pad,
}


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
