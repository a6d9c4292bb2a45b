"""aten ops of Fourier transforms (ir/ops_fft.py), short-time ones among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_complex import Complex, as_complex, conjugate, to_pairs
from pliant.frontend.torch_ops_context import Size, TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_pick import unfold
from pliant.frontend.torch_ops_shape import pad
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, eq, floordiv, le, maximum

aten = torch.ops.aten

Tensor = Value | Complex

# What a result is divided by, by the name of the norm: forward, and back.
_FORWARD = {None: "none", "backward": "none", "ortho": "root", "forward": "count"}
_INVERSE = {None: "count", "backward": "count", "ortho": "root", "forward": "none"}
_MODES = ("none", "root", "count")  # of _fft_c2c and the like, by number


def _norms(inverse: bool) -> dict[str | None, str]:
    return _INVERSE if inverse else _FORWARD


# --- one axis ----------------------------------------------------------------------


def _c2c(cx: TorchContext, x: Complex, axis: int, inverse: bool, norm: str) -> Complex:
    attrs: dict[str, Any] = {"axis": axis, "inverse": inverse, "norm": norm}
    return Complex(*cx.b.emit_multi("fft", x.re, x.im, **attrs))


def _r2c(cx: TorchContext, x: Value, axis: int, norm: str) -> Complex:
    return Complex(*cx.b.emit_multi("rfft", x, axis=axis, norm=norm))


def _c2r(cx: TorchContext, x: Complex, axis: int, n: Expr, norm: str) -> Value:
    return cx.b.emit("irfft", x.re, x.im, axis=axis, n=n, norm=norm)


def _floats(cx: TorchContext, x: Tensor) -> Tensor:
    """In the element type of the result."""
    dtype = cx.out_dtype
    return as_complex(cx, x, dtype) if isinstance(x, Complex) else cx.cast(x, dtype)


def _rank(x: Tensor) -> int:
    return x.rank if isinstance(x, Complex) else x.type.rank


def _resized(cx: TorchContext, x: Tensor, axis: int, size: Size | None) -> Tensor:
    """Cut to a size, or padded with zeros."""
    if size is None or size == -1:
        return x
    if isinstance(x, Complex):
        parts = [_resized(cx, part, axis, size) for part in (x.re, x.im)]
        return Complex(*parts)  # type: ignore[arg-type]  # real parts
    wanted, have = cx.simplify(size), x.shape[axis]
    if cx.proves(eq(wanted, have)):
        return x
    if not cx.proves(le(wanted, have)):
        behind = cx.simplify(maximum(wanted - have, 0))
        pads: list[Size] = [*[0, 0] * (x.type.rank - 1 - axis), 0, behind]
        x = pad(cx, x, pads)
    return cx.slice(x, axis, 0, wanted)


def _last_size(x: Tensor, axis: int, n: Size | None) -> Expr:
    """Elements of a real sequence whose half spectrum is given."""
    return 2 * (x.shape[axis] - 1) if n is None or n == -1 else as_expr(n)


def one_axis(kind: str) -> Translate:
    """fft, ifft, rfft, irfft, hfft, ihfft along one axis."""

    def translate(
        cx: TorchContext,
        x: Tensor,
        n: Size | None = None,
        dim: int = -1,
        norm: str | None = None,
    ) -> Tensor:
        sizes = None if n is None else [n]
        made: Value = several_axes(kind)(cx, x, sizes, [dim], norm)
        return made

    return translate


def several_axes(kind: str, default: Sequence[int] | None = None) -> Translate:
    def translate(
        cx: TorchContext,
        x: Tensor,
        s: Sequence[Size] | None = None,
        dim: Sequence[int] | int | None = None,
        norm: str | None = None,
    ) -> Tensor:
        rank = _rank(x)
        if isinstance(dim, int):
            dim = [dim]
        if dim is None:
            dim = default
        if dim is None:
            dim = range(rank if s is None else len(s))
            dim = [rank - len(dim) + k for k in dim]
        axes = [cx.axis(d, rank) for d in dim]
        sizes: list[Size | None] = [None] * len(axes) if s is None else list(s)
        found: Tensor = _TRANSFORMS[kind](cx, _floats(cx, x), axes, sizes, norm)
        return found

    return translate


def _complex_transform(inverse: bool) -> Any:
    def run(cx: TorchContext, x: Tensor, axes: Any, sizes: Any, norm: Any) -> Tensor:
        for axis, size in zip(axes, sizes, strict=True):
            x = _resized(cx, x, axis, size)
        out = as_complex(cx, x, cx.out_dtype)
        for axis in axes:
            out = _c2c(cx, out, axis, inverse, _norms(inverse)[norm])
        return out

    return run


def _from_real(inverse: bool) -> Any:
    """rfft, and its conjugate ihfft."""

    def run(cx: TorchContext, x: Tensor, axes: Any, sizes: Any, norm: Any) -> Tensor:
        if isinstance(x, Complex):
            cx.unsupported("a transform of real numbers, given complex ones")
        word = _norms(inverse)[norm]
        for axis, size in zip(axes, sizes, strict=True):
            x = _resized(cx, x, axis, size)
        assert isinstance(x, Value)
        out = _r2c(cx, x, axes[-1], word)
        if inverse:
            out = conjugate(cx, out)
        for axis in axes[:-1]:
            out = _c2c(cx, out, axis, inverse, word)
        return out

    return run


def _to_real(inverse: bool) -> Any:
    """irfft; hfft is that of the conjugate."""

    def run(cx: TorchContext, x: Tensor, axes: Any, sizes: Any, norm: Any) -> Tensor:
        word, last = _norms(inverse)[norm], axes[-1]
        n = cx.simplify(_last_size(x, last, sizes[-1]))
        cx.require(le(1, n), "Invalid number of data points specified")
        halves = [*sizes[:-1], floordiv(n, 2) + 1]
        for axis, size in zip(axes, halves, strict=True):
            x = _resized(cx, x, axis, size)
        out = as_complex(cx, x, cx.out_dtype)
        for axis in axes[:-1]:
            out = _c2c(cx, out, axis, inverse, word)
        if not inverse:
            out = conjugate(cx, out)
        return _c2r(cx, out, last, n, word)

    return run


_TRANSFORMS = {
    "fft": _complex_transform(False),
    "ifft": _complex_transform(True),
    "rfft": _from_real(False),
    "ihfft": _from_real(True),
    "irfft": _to_real(True),
    "hfft": _to_real(False),
}


# --- as torch's own compositions call them -----------------------------------------


def fft_c2c(
    cx: TorchContext, x: Complex, dim: Sequence[int], normalization: int, forward: bool
) -> Complex:
    for axis in (cx.axis(int(d), x.rank) for d in dim):
        x = _c2c(cx, x, axis, not forward, _MODES[normalization])
    return x


def fft_r2c(
    cx: TorchContext, x: Value, dim: Sequence[int], normalization: int, onesided: bool
) -> Complex:
    *others, last = (cx.axis(d, x.type.rank) for d in dim)
    if not onesided:
        return fft_c2c(cx, as_complex(cx, x, x.dtype), dim, normalization, True)
    out = _r2c(cx, x, last, _MODES[normalization])
    return fft_c2c(cx, out, others, normalization, True)


def fft_c2r(
    cx: TorchContext, x: Complex, dim: Sequence[int], normalization: int, size: Size
) -> Value:
    *others, last = (cx.axis(d, x.rank) for d in dim)
    out = fft_c2c(cx, x, others, normalization, False)
    half = _resized(cx, out, last, floordiv(as_expr(size), 2) + 1)
    assert isinstance(half, Complex)
    return _c2r(cx, half, last, as_expr(size), _MODES[normalization])


def frequencies(half: bool) -> Translate:
    """The frequencies of a spectrum's elements, d between those of the sequence."""

    def translate(cx: TorchContext, n: Size, d: float = 1.0, **_: Any) -> Value:
        size = as_expr(n)
        count = floordiv(size, 2) + 1 if half else size
        place = cx.iota((count,), 0, DType.I64)
        if not half:
            behind = cx.arith("gt", place, floordiv(size - 1, 2))
            place = cx.select(behind, cx.sub(place, size), place)
        whole = cx.mul(cx.tensor(size, DType.F64), cx.tensor(d, DType.F64))
        wide = cx.div(cx.cast(place, DType.F64), whole)
        return cx.cast(wide, cx.out_dtype)

    return translate


# --- short-time transforms ---------------------------------------------------------


def _window(cx: TorchContext, window: Value | None, n: int, length: int) -> Value:
    """A window of `length` in the middle of n; of ones, if none is given."""
    if window is None:
        window = cx.full(1.0, (length,), cx.out_dtype)
    cx.b.require_equal(window.shape[0], length, "the window has win_length elements")
    left = (n - length) // 2
    return window if n == length else pad(cx, window, [left, n - length - left])


def stft(
    cx: TorchContext,
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Value | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    if isinstance(x, Complex) or isinstance(window, Complex) or align_to_window:
        cx.unsupported("stft of complex numbers, or aligned to its window")
    single = x.type.rank == 1
    rows = cx.reshape(x, (1, *x.shape)) if single else x
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    frames = unfold(cx, rows, 1, n_fft, hop)  # (batch, frames, n_fft)
    frames = cx.mul(frames, _window(cx, window, n_fft, width))
    norm = "root" if normalized else "none"
    if onesided is False:
        found = _c2c(cx, as_complex(cx, frames, frames.dtype), 2, False, norm)
    else:
        found = _r2c(cx, frames, 2, norm)
    parts = [cx.transpose(part, [0, 2, 1]) for part in (found.re, found.im)]
    if single:
        parts = [cx.reshape(part, part.shape[1:]) for part in parts]
    out = Complex(*parts)
    return out if return_complex else to_pairs(cx, out)


def stft_centered(
    cx: TorchContext,
    x: Value,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Value | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    *rest: Any,
    **more: Any,
) -> Tensor:
    if center:
        side = n_fft // 2
        x = pad(cx, x, [side, side], pad_mode)
    return stft(cx, x, n_fft, hop_length, win_length, window, *rest, **more)


def istft(
    cx: TorchContext,
    x: Complex,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Value | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Size | None = None,
    return_complex: bool = False,
) -> Value:
    """Frames are added up where they overlap, and divided by the windows' squares."""
    if return_complex or isinstance(window, Complex):
        cx.unsupported("istft to complex numbers")
    single = x.rank == 2
    transposed = [
        cx.transpose(cx.reshape(p, (1, *p.shape)) if single else p, [0, 2, 1])
        for p in (x.re, x.im)
    ]
    half, hop = n_fft // 2 + 1, hop_length or n_fft // 4
    spectrum = Complex(*(cx.slice(part, 2, 0, half) for part in transposed))
    frames = _c2r(cx, spectrum, 2, as_expr(n_fft), "root" if normalized else "count")
    shape = _window(cx, window, n_fft, win_length or n_fft)
    count = frames.shape[1]
    whole = cx.simplify(n_fft + hop * (count - 1))
    squares = cx.broadcast_to(cx.mul(shape, shape), (1, count, n_fft))
    total = _overlapped(cx, cx.mul(frames, shape), hop, whole)
    weight = _overlapped(cx, squares, hop, whole)
    start = n_fft // 2 if center else 0
    if length is not None:
        size = cx.simplify(length)
    else:
        size = cx.simplify(whole - 2 * start if center else whole)
    cx.require(le(0, size), "istft of too few frames")
    parts = [
        _resized(cx, cx.slice(p, 1, start, whole - start), 1, size)
        for p in (total, weight)
    ]
    out = cx.div(*parts)  # type: ignore[arg-type]  # real parts
    if length is not None:  # behind the frames there is nothing
        inside = cx.arith("lt", cx.iota((size,), 0, DType.I64), whole - start)
        out = cx.cast(cx.select(inside, out, 0.0), out.dtype)
    return cx.reshape(out, (size,)) if single else out


def _overlapped(cx: TorchContext, frames: Value, hop: int, whole: Expr) -> Value:
    """(batch, frames, n) -> (batch, whole): the sum of frames at multiples of hop."""
    batch, count, n = frames.shape
    first = cx.mul(cx.iota((count, 1), 0, DType.I64), hop)
    place = cx.add(first, cx.iota((1, n), 1, DType.I64))
    rows = cx.reshape(cx.transpose(frames, [1, 2, 0]), (count * n, batch))
    where = cx.reshape(place, (count * n,))
    return cx.transpose(cx.b.emit("scatter", where, rows, op="sum", rows=whole), [1, 0])


FFT: dict[Any, Translate] = {
    aten._fft_c2c.default: fft_c2c,
    aten._fft_r2c.default: fft_r2c,
    aten._fft_c2r.default: fft_c2r,
    aten.fft_fftfreq.default: frequencies(False),
    aten.fft_rfftfreq.default: frequencies(True),
    aten.stft.default: stft,
    aten.stft.center: stft_centered,
    aten.istft.default: istft,
    **{
        getattr(aten, f"fft_{kind}").default: one_axis(kind)
        for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    },
    **{
        getattr(aten, f"fft_{kind}n").default: several_axes(kind)
        for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    },
    **{
        getattr(aten, f"fft_{kind}2").default: several_axes(kind, (-2, -1))
        for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    },
}
