"""Attention, with dropout inside it."""

from __future__ import annotations

import functools
from typing import Any

from pliant.frontend.torch_ops_context import Real, TorchContext
from pliant.frontend.torch_ops_random import dropout
from pliant.ir.attention import spell_out_trained_attention
from pliant.ir.graph import Op, Value
from pliant.ir.types import TensorType
from pliant.sym import ZERO


def attention(
    cx: TorchContext,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Real | None = None,
    enable_gqa: bool = False,
) -> Value:
    if isinstance(scale, Real):  # computed from a dynamic size
        q, scale = cx.arith("mul", q, scale), 1.0
    flat = q.type.rank == 2
    if flat:
        q, k, v = (cx.reshape(t, (1, *t.shape)) for t in (q, k, v))
    # Batch dims broadcast; heads do too, unless groups of them share keys.
    lead = -3 if enable_gqa else -2
    q, k, v = cx.unit_dims(q), cx.unit_dims(k), cx.unit_dims(v)
    batch = cx.b.broadcast_shapes(*(t.shape[:lead] for t in (q, k, v)))
    q, k, v = (cx.broadcast_to(t, (*batch, *t.shape[lead:])) for t in (q, k, v))
    operands: tuple[Value, ...] = (q, k, v)
    if attn_mask is not None:
        scores = (*batch, *q.shape[lead:-1], k.shape[-2])
        operands = (q, k, v, cx.unit_dims(attn_mask, scores))
    attrs: dict[str, Any] = {
        "scale": None if scale is None else float(scale),
        "causal": is_causal,
        "masked": attn_mask is not None,
    }
    if dropout_p:
        # The kernel has no dropout inside.
        kind = TensorType(q.dtype, (*q.shape[:-1], v.shape[-1]))
        given = (*attrs.items(), ("swapped", False), ("first", ZERO))
        op = Op("attention", operands, given, (Value("out", kind),))
        drop = functools.partial(dropout, cx, p=dropout_p, train=True)
        out = spell_out_trained_attention(cx.b, op, drop)
    else:
        out = cx.b.emit("attention", *operands, **attrs)
    return cx.reshape(out, out.shape[1:]) if flat else out
