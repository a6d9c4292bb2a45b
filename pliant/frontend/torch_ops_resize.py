"""aten ops that resize images: nearest, linear and cubic, by sizes or by factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from pliant.frontend.torch_dims import decimal
from pliant.frontend.torch_ops_context import Real, Size, TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.ir.graph import Value
from pliant.sym import Expr, as_expr, floordiv, le, mod, ne

aten = torch.ops.aten


def scaled_size(cx: TorchContext, dim: Expr, scale: float | Real) -> Expr:
    """floor(dim * scale), of floats as torch computes it."""
    if isinstance(scale, Real):
        if scale.ratio is None:
            cx.unsupported("a resize factor that depends on sizes")
        num, den = scale.ratio
        return cx.simplify(floordiv(dim * num, den))
    if dim.is_const:
        return as_expr(math.floor(float(dim.value) * scale))
    near = decimal(scale, below=True)
    if near is None:
        near = Fraction(scale).limit_denominator(1 << 20)
        if float(near) != scale:
            cx.unsupported(f"a resize factor of {scale}: give one with fewer digits")
        whole = mod(dim * near.numerator, near.denominator)
        why = f"sizes that are whole times {scale} may be rounded down: give size="
        cx.require(ne(whole, 0), why)
    return cx.simplify(floordiv(dim * near.numerator, near.denominator))


def _resized(
    cx: TorchContext,
    x: Value,
    mode: str,
    rank: int,
    sizes: Sequence[Size] | None,
    factors: Sequence[Any] | None,
    align_corners: bool,
) -> Value:
    lead = x.type.rank - rank
    if sizes is None:
        assert factors is not None
        pairs = zip(x.shape[lead:], factors, strict=True)
        sizes = [scaled_size(cx, dim, factor) for dim, factor in pairs]
    for size in (*x.shape[lead:], *sizes):
        cx.require(le(1, size), "a resize needs elements")
    scales: tuple[float | None, ...] = ()
    if factors is not None and any(f is not None for f in factors):
        scales = tuple(
            None if f is None or isinstance(f, Real) else float(f) for f in factors
        )
    return cx.b.emit(
        "resize",
        x,
        shape=tuple(as_expr(s) for s in sizes),
        mode=mode,
        align_corners=align_corners,
        scales=scales,
    )


def resize(mode: str, rank: int) -> Translate:
    """(x, sizes, [align_corners], factor per dim)"""
    corners = mode in ("linear", "cubic")

    def translate(
        cx: TorchContext, x: Value, sizes: Sequence[Size], *rest: Any
    ) -> Value:
        align = bool(rest[0]) if corners and rest else False
        factors = rest[1:] if corners else rest
        padded = [*factors, *[None] * (rank - len(factors))]
        return _resized(cx, x, mode, rank, sizes, padded, align)

    return translate


def resize_vec(mode: str, rank: int) -> Translate:
    """(x, sizes or None, [align_corners], factors or None)"""
    corners = mode in ("linear", "cubic")

    def translate(cx: TorchContext, x: Value, sizes: Any, *rest: Any) -> Value:
        align = bool(rest[0]) if corners else False
        factors = rest[1] if corners else rest[0]
        return _resized(cx, x, mode, rank, sizes, factors, align)

    return translate


RESIZE: dict[Any, Translate] = {
    aten.upsample_nearest1d.default: resize("nearest", 1),
    aten.upsample_nearest2d.default: resize("nearest", 2),
    aten.upsample_nearest3d.default: resize("nearest", 3),
    aten._upsample_nearest_exact1d.default: resize("nearest_exact", 1),
    aten._upsample_nearest_exact2d.default: resize("nearest_exact", 2),
    aten.upsample_linear1d.default: resize("linear", 1),
    aten.upsample_bilinear2d.default: resize("linear", 2),
    aten.upsample_trilinear3d.default: resize("linear", 3),
    aten.upsample_bicubic2d.default: resize("cubic", 2),
    aten.upsample_nearest1d.vec: resize_vec("nearest", 1),
    aten.upsample_nearest2d.vec: resize_vec("nearest", 2),
    aten.upsample_nearest3d.vec: resize_vec("nearest", 3),
    aten._upsample_nearest_exact1d.vec: resize_vec("nearest_exact", 1),
    aten._upsample_nearest_exact2d.vec: resize_vec("nearest_exact", 2),
    aten.upsample_linear1d.vec: resize_vec("linear", 1),
    aten.upsample_bilinear2d.vec: resize_vec("linear", 2),
    aten.upsample_trilinear3d.vec: resize_vec("linear", 3),
    aten.upsample_bicubic2d.vec: resize_vec("cubic", 2),
}
