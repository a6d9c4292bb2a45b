"""Fourier transforms, spectra of frames, and the weights of a mel scale.

A complex tensor of ONNX has its real and imaginary parts as the last axis.
"""

from __future__ import annotations

import math

import numpy as np

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_tensors import element_of
from pliant.frontend.onnx_values import Known
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, floordiv, le, maximum

I64 = DType.I64


def _fitted(cx: OnnxContext, x: Value, axis: int, size: Expr) -> Value:
    """The axis cut or filled with zeros to this size."""
    have = x.shape[axis]
    if cx.b.same(have, size):
        return x
    none = [as_expr(0)] * x.type.rank
    high = list(none)
    high[axis] = cx.simplify(maximum(size - have, 0))
    if high[axis] != 0:
        x = cx.b.emit("pad", x, low=tuple(none), high=tuple(high), value=0.0)
    return cx.slice(x, axis, 0, size)


def _parts(cx: OnnxContext, x: Value) -> tuple[Value, Value | None]:
    """(real part, imaginary part or None), without the last axis"""
    last = x.type.rank - 1
    count = cx.constant_int(x.shape[last], "the number of parts of a complex number")
    real = cx.reshape(cx.slice(x, last, 0, 1), x.shape[:last])
    if count == 1:
        return real, None
    return real, cx.reshape(cx.slice(x, last, 1, 1), x.shape[:last])


def _pair(cx: OnnxContext, real: Value, imaginary: Value) -> Value:
    parts = [cx.reshape(v, (*v.shape, 1)) for v in (real, imaginary)]
    return cx.concat(parts, real.type.rank)


def dft(cx: OnnxContext, n: Node) -> Value:
    x = n.tensor(0)
    if n.version >= 20:
        axis = n.axis(n.integer(2, "axis") if n.has(2) else -2)
    else:
        axis = n.axis(n.attr("axis", 1))
    inverse, onesided = bool(n.attr("inverse", 0)), bool(n.attr("onesided", 0))
    wide = cx.cast(x, x.dtype.compute)
    size = wide.shape[axis]
    if inverse and onesided:
        size = 2 * (size - 1)
    if n.has(1):
        size = as_expr(n.sizes(1, "the length of a transform")[0])
    cx.require(le(1, size), "a transform needs elements")
    real, imaginary = _parts(cx, wide)
    if inverse and onesided:
        bins = cx.simplify(floordiv(size, 2) + 1)
        if imaginary is None:
            imaginary = cx.full(0.0, real.shape, real.dtype)
        parts = [_fitted(cx, v, axis, bins) for v in (real, imaginary)]
        made = cx.b.emit("irfft", *parts, axis=axis, n=size, norm="count")
        return cx.cast(cx.reshape(made, (*made.shape, 1)), x.dtype)
    real = _fitted(cx, real, axis, size)
    if imaginary is None and onesided:
        return cx.cast(
            _pair(cx, *cx.b.emit_multi("rfft", real, axis=axis, norm="none")), x.dtype
        )
    if imaginary is None:
        imaginary = cx.full(0.0, real.shape, real.dtype)
    else:
        imaginary = _fitted(cx, imaginary, axis, size)
    norm = "count" if inverse else "none"
    found = cx.b.emit_multi(
        "fft", real, imaginary, axis=axis, inverse=inverse, norm=norm
    )
    made = _pair(cx, *found)
    if onesided:
        made = cx.slice(made, axis, 0, cx.simplify(floordiv(size, 2) + 1))
    return cx.cast(made, x.dtype)


def stft(cx: OnnxContext, n: Node) -> Value:
    """(signal (B, L, 1|2), step, window, frame length) -> (B, frames, bins, 2)"""
    x = n.tensor(0)
    if x.type.rank == 2:
        x = cx.reshape(x, (*x.shape, 1))
    step = n.integer(1, "the step between frames")
    if step < 1:
        cx.unsupported(f"a step between frames of {step}")
    window = n.maybe(2)
    if n.has(3):
        length = as_expr(n.sizes(3, "the length of a frame")[0])
    else:
        assert window is not None
        length = window.shape[0]
    size = x.shape[1]
    cx.require(le(length, size), "a signal as long as a frame")
    frames = cx.simplify(floordiv(size - length, step) + 1)
    shape = (frames, length)
    place = cx.add(cx.mul(cx.iota(shape, 0, I64), step), cx.iota(shape, 1, I64))
    place = cx.in_range(place, size, 1)

    def framed(part: Value) -> Value:
        rows = cx.b.emit("index", cx.transpose(part, (1, 0)), place)
        made = cx.transpose(rows, (2, 0, 1))  # (B, frames, length)
        return made if window is None else cx.mul(made, _fitted(cx, window, 0, length))

    real, imaginary = _parts(cx, x)
    onesided = bool(n.attr("onesided", 1))
    first = framed(real)
    if imaginary is None and onesided:
        return _pair(cx, *cx.b.emit_multi("rfft", first, axis=2, norm="none"))
    second = (
        cx.full(0.0, first.shape, first.dtype)
        if imaginary is None
        else framed(imaginary)
    )
    found = cx.b.emit_multi("fft", first, second, axis=2, inverse=False, norm="none")
    made = _pair(cx, *found)
    if onesided:
        made = cx.slice(made, 2, 0, cx.simplify(floordiv(length, 2) + 1))
    return made


def mel_weights(cx: OnnxContext, n: Node) -> Known:
    """Triangles on the mel scale, from numbers that are known."""
    bins, length, rate = (n.integer(i, "a number of the mel scale") for i in range(3))
    low, high = (n.floats(i, "a frequency")[0] for i in (3, 4))
    element = element_of(n.attr("output_datatype", 1), n.op)
    if not (0 < bins <= 2**12 and 0 <= length <= 2**20 and rate > 0):
        cx.unsupported(f"a mel scale of {bins} bins, length {length} and rate {rate}")

    def mel(hertz: float) -> float:
        return 2595 * math.log1p(hertz / 700) / math.log(10)

    step = (mel(high) - mel(low)) / (bins + 2)
    points = np.arange(bins + 2) * step + mel(low)
    points = 700 * np.expm1(points / 2595 * math.log(10))
    places = (((length + 1) * points) // rate).astype(int)
    out = np.zeros((length // 2 + 1, bins))
    for i, (left, middle, right) in enumerate(
        zip(places[:-2], places[1:-1], places[2:], strict=True)
    ):
        if middle == left:
            out[middle, i] = 1
        else:
            rising = np.arange(left, middle + 1)
            out[left : middle + 1, i] = (rising - left) / (middle - left)
        if right > middle:
            falling = np.arange(middle, right)
            out[middle:right, i] = (right - falling) / (right - middle)
    return Known(out.astype(element.numpy), element)


SIGNAL: Table = {
    ("DFT", 17): dft,
    ("STFT", 17): stft,
    ("MelWeightMatrix", 17): mel_weights,
}
