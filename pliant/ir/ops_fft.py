"""Discrete Fourier transforms along an axis: rows, shape rules, meanings.

Such an op is one of those whose kernels are C functions (ir/ops_library.py). Complex
numbers are two tensors, their real and imaginary parts, of f32 or f64.

    fft (re, im) {axis, inverse, norm} -> re, im
    rfft (x) {axis, norm} -> re, im            the first n//2 + 1 of a real sequence
    irfft (re, im) {axis, n, norm} -> x        back to n elements; the parts of a
                                               spectrum that a real sequence has as 0
                                               are not read

`norm` says what the result is divided by: nothing, the root of n, or n ("none", "root",
"count").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pliant.ir.infer import Attrs, InferContext, Types
from pliant.ir.opdef import AttrSpec, OpDef, Trait
from pliant.ir.types import DType, TensorType
from pliant.sym import Expr, floordiv, le

Array = np.ndarray[Any, Any]

NORMS = ("none", "root", "count")


def _checked(cx: InferContext, types: Types, attrs: Attrs) -> tuple[TensorType, int]:
    x, axis = types[0], cx.axis(attrs.integer("axis"), types[0])
    cx.same_dtype(types)
    cx.same_shape(types, "real and imaginary parts")
    if x.dtype not in (DType.F32, DType.F64):
        cx.fail_dtype(f"takes f32 or f64, not {x.dtype}")
    return x, axis


def _resized(x: TensorType, axis: int, size: Expr) -> TensorType:
    return x.with_shape((*x.shape[:axis], size, *x.shape[axis + 1 :]))


_NO_POINTS = "a Fourier transform needs elements"


def _fft(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, axis = _checked(cx, types, attrs)
    cx.require(le(1, x.shape[axis]), _NO_POINTS)
    return x, x


def _rfft(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, axis = _checked(cx, types, attrs)
    cx.require(le(1, x.shape[axis]), _NO_POINTS)
    half = _resized(x, axis, floordiv(x.shape[axis], 2) + 1)
    return half, half


def _irfft(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, axis = _checked(cx, types, attrs)
    n = attrs.dim("n")
    cx.require(le(1, n), _NO_POINTS)
    cx.require_equal(x.shape[axis], floordiv(n, 2) + 1, "half of a spectrum")
    return (_resized(x, axis, n),)


# ---- meanings

_WORDS: dict[str, Any] = {"none": "backward", "root": "ortho", "count": "forward"}
_BACK: dict[str, Any] = {"none": "forward", "root": "ortho", "count": "backward"}


def _pair(z: Array, like: Array) -> tuple[Array, Array]:
    return z.real.astype(like.dtype), z.imag.astype(like.dtype)


def _complex(re: Array, im: Array) -> Array:
    out: Array = re.astype(np.complex128)
    out.imag = im
    return out


def transformed(
    re: Array, im: Array, axis: int, inverse: bool, norm: str
) -> tuple[Array, Array]:
    if not re.size:
        return re, im
    z = _complex(re, im)
    if inverse:
        return _pair(np.fft.ifft(z, axis=axis, norm=_BACK[norm]), re)
    return _pair(np.fft.fft(z, axis=axis, norm=_WORDS[norm]), re)


def real_transformed(x: Array, axis: int, norm: str) -> tuple[Array, Array]:
    shape = list(x.shape)
    shape[axis] = shape[axis] // 2 + 1
    if not x.size:
        return np.zeros(shape, x.dtype), np.zeros(shape, x.dtype)
    wide = x.astype(np.float64)
    return _pair(np.fft.rfft(wide, axis=axis, norm=_WORDS[norm]), x)


def real_restored(re: Array, im: Array, axis: int, n: int, norm: str) -> Array:
    shape = list(re.shape)
    shape[axis] = n
    if not re.size:
        return np.zeros(shape, re.dtype)
    z = _complex(re, im)
    back = np.fft.irfft(z, n, axis=axis, norm=_BACK[norm])
    return back.astype(re.dtype)


# ---- rows


def _row(name: str, arity: int, rule: Any, meaning: Any, *attrs: AttrSpec) -> OpDef:
    kinds = frozenset({Trait.REDUCE, Trait.LIBRARY, Trait.PURE})
    axis, norm = AttrSpec("axis", "int"), AttrSpec("norm", "str", "none", NORMS)
    given = (axis, *attrs, norm)
    return OpDef(name, (arity, arity), given, rule, kinds, cost=64, meaning=meaning)


FFT_OPS: tuple[OpDef, ...] = (
    _row("fft", 2, _fft, transformed, AttrSpec("inverse", "bool")),
    _row("rfft", 1, _rfft, real_transformed),
    _row("irfft", 2, _irfft, real_restored, AttrSpec("n", "dim")),
)
