"""Attention, rotary embeddings, and what surrounds them, as exporters write them.

The ops of the default domain and those of com.microsoft differ in layout and in what
their inputs mean; all of them become the IR's `attention`, whose mask is additive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.frontend.onnx_values import Entry
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, floordiv

I64 = DType.I64


def heads(cx: OnnxContext, x: Value, count: int) -> Value:
    """(B, S, H*D) -> (B, H, S, D)"""
    batch, length, width = x.shape
    size = cx.simplify(floordiv(width, count))
    return cx.transpose(cx.reshape(x, (batch, length, count, size)), (0, 2, 1, 3))


def joined(cx: OnnxContext, x: Value) -> Value:
    """(B, H, S, D) -> (B, S, H*D)"""
    batch, count, length, size = x.shape
    return cx.reshape(cx.transpose(x, (0, 2, 1, 3)), (batch, length, count * size))


@dataclass(frozen=True, slots=True)
class Scores:
    """What is added to scores, or None, and whether later columns are hidden."""

    mask: Value | None = None
    causal: bool = False

    def plus(self, cx: OnnxContext, more: Value) -> Scores:
        held = more if self.mask is None else cx.join("add", self.mask, more)
        return Scores(held, self.causal)


def attend(
    cx: OnnxContext, q: Value, k: Value, v: Value, scores: Scores, scale: float | None
) -> Value:
    """q (B, Hq, S, D), k and v (B, Hk, T, D) -> (B, Hq, S, D)"""
    shape = (*q.shape[:3], k.shape[2])
    operands = [q, k, v]
    masked = scores.mask is not None
    if scores.mask is not None:
        mask = cx.cast(scores.mask, q.dtype)
        operands.append(cx.expand_to(mask, shape))
    return cx.b.emit(
        "attention", *operands, scale=scale, causal=scores.causal, masked=masked
    )


def hidden(cx: OnnxContext, keep: Value, dtype: DType) -> Value:
    """0 where a position is kept, -inf where it is not."""
    return cx.select(
        keep, cx.full(0.0, keep.shape, dtype), cx.full(-math.inf, keep.shape, dtype)
    )


def causal_from(cx: OnnxContext, rows: Expr, columns: Expr, past: Value) -> Value:
    """(B, 1, S, T): column t is seen from row s if t <= s + past of the batch."""
    batch = past.shape[0]
    shape = (batch, as_expr(1), rows, columns)
    row = cx.iota(shape, 2, I64)
    column = cx.iota(shape, 3, I64)
    start = cx.broadcast_to(cx.reshape(past, (batch, 1, 1, 1)), shape)
    return cx.arith("le", column, cx.add(row, start))


# ---- rotary embeddings


def rotated(
    cx: OnnxContext, x: Value, cos: Value, sin: Value, size: int, interleaved: bool
) -> Value:
    """x (B, H, S, D) turned by angles (B|1, S, size/2) in its first `size` elements."""
    *lead, width = x.shape
    rest = None
    last = x.type.rank - 1
    part = x
    if as_expr(size) != width:
        part = cx.slice(x, last, 0, size)
        rest = cx.slice(x, last, size, width - size)
    half = size // 2
    angles = [cx.reshape(a, (a.shape[0], 1, a.shape[1], half)) for a in (cos, sin)]
    shape = (*lead, as_expr(half))
    if interleaved:
        pairs = cx.reshape(part, (*lead, half, 2))
        first, second = (
            cx.reshape(cx.slice(pairs, last + 1, i, 1), shape) for i in (0, 1)
        )
    else:
        first, second = (cx.slice(part, last, i * half, half) for i in (0, 1))
    c, s = (cx.cast(cx.expand_to(a, shape), x.dtype) for a in angles)
    real = cx.sub(cx.mul(first, c), cx.mul(second, s))
    imaginary = cx.add(cx.mul(second, c), cx.mul(first, s))
    if interleaved:
        wide = [cx.reshape(v, (*shape, 1)) for v in (real, imaginary)]
        made = cx.reshape(cx.concat(wide, last + 1), (*lead, size))
    else:
        made = cx.concat([real, imaginary], last)
    return made if rest is None else cx.concat([made, rest], last)


def angles_at(cx: OnnxContext, cache: Value, positions: Value) -> Value:
    """Rows of a table (positions, size/2) at positions (B, S)."""
    index = cx.wrap_index(positions, cache.shape[0], 0)
    return cx.b.emit("index", cache, index)


def rotary(cx: OnnxContext, n: Node) -> Value:
    """com.microsoft: (x, positions, cos, sin); positions are one number or (B, S)."""
    x, positions = n.tensor(0), n.tensor(1)
    cos, sin = n.tensor(2), n.tensor(3)
    size = n.attr("rotary_embedding_dim", 0)
    count = n.attr("num_heads", 0)
    flat = x.type.rank == 3
    if flat:
        if not count:
            width = cx.constant_int(cos.shape[1] * 2, "the size of a head")
            count = cx.constant_int(floordiv(x.shape[2], width), "the number of heads")
        x = heads(cx, x, count)
    elif n.domain == "com.microsoft" and n.attr("is_packed_batching", 0):
        cx.unsupported("packed batches")
    batch, length = x.shape[0], x.shape[2]
    if positions.type.rank == 1:
        first = cx.reshape(cx.cast(positions, I64), (1, 1))
        positions = cx.add(cx.iota((batch, length), 1, I64), first)
    size = size or cx.constant_int(cos.shape[1] * 2, "the size of a rotation")
    cos, sin = (angles_at(cx, table, positions) for table in (cos, sin))
    made = rotated(cx, x, cos, sin, size, bool(n.attr("interleaved", 0)))
    return joined(cx, made) if flat else made


# ---- com.microsoft


def _past(cx: OnnxContext, n: Node, i: int, fresh: Value) -> tuple[Value, Value]:
    """(past and fresh rows, the past's length as a vector of the batch)"""
    batch = fresh.shape[0]
    old = n.maybe(i)
    if old is None:
        return fresh, cx.full(0, (batch,), I64)
    length = cx.tensor(old.shape[2], I64)
    return cx.concat([old, fresh], 2), cx.broadcast_to(length, (batch,))


def _padding(cx: OnnxContext, mask: Value, columns: Expr, dtype: DType) -> Value:
    """A mask of keys (B, T), (B, S, T), (B, 1, S, T) or of lengths (B)."""
    if mask.type.rank == 1:
        batch = mask.shape[0]
        place = cx.iota((batch, 1, 1, columns), 3, I64)
        length = cx.reshape(cx.cast(mask, I64), (batch, 1, 1, 1))
        return hidden(cx, cx.arith("lt", place, length), dtype)
    keep = cx.to_bool(mask)
    if mask.type.rank == 2:
        keep = cx.reshape(keep, (keep.shape[0], 1, 1, keep.shape[1]))
    elif mask.type.rank == 3:
        keep = cx.reshape(keep, (keep.shape[0], 1, keep.shape[1], keep.shape[2]))
    return hidden(cx, keep, dtype)


def _masked(
    cx: OnnxContext, n: Node, mask: int, query: Value, key: Value, past: Value
) -> Scores:
    """What is added to scores: padding, input 5, and what comes later."""
    scores = Scores()
    padding, extra = n.maybe(mask), n.maybe(5)
    if padding is not None:
        scores = scores.plus(cx, _padding(cx, padding, key.shape[2], query.dtype))
    if extra is not None:
        scores = scores.plus(cx, extra)
    if n.attr("unidirectional", 0):
        keep = causal_from(cx, query.shape[2], key.shape[2], past)
        scores = scores.plus(cx, hidden(cx, keep, query.dtype))
    return scores


def _unpacked(cx: OnnxContext, x: Value, count: int) -> list[Value]:
    """(B, S, H, count, D) as tensors (B, S, H, D)"""
    shape = (*x.shape[:3], x.shape[4])
    return [cx.reshape(cx.slice(x, 3, k, 1), shape) for k in range(count)]


def multi_head(cx: OnnxContext, n: Node) -> tuple[Entry | None, ...]:
    """(query, key, value, bias, padding mask, attention bias, past key, past value)"""
    count = n.attrs["num_heads"]
    q = n.tensor(0)
    bias = n.maybe(3)
    if q.type.rank == 5:  # (B, S, H, 3, D)
        parts = _unpacked(cx, q, 3)
        query, key, value = (cx.transpose(p, (0, 2, 1, 3)) for p in parts)
    else:
        key_in = n.tensor(1)
        if key_in.type.rank == 5:
            flat = [
                cx.reshape(p, (*p.shape[:2], p.shape[2] * p.shape[3]))
                for p in _unpacked(cx, key_in, 2)
            ]
            rows = [q, *flat]
        else:
            rows = [q, key_in, n.tensor(2)]
        if bias is not None:
            start = as_expr(0)
            for k, row in enumerate(rows):
                if row.type.rank == 3:
                    own = cx.slice(bias, 0, start, row.shape[2])
                    start = start + row.shape[2]
                    rows[k] = cx.add(row, own)
        query, key, value = (
            heads(cx, r, count) if r.type.rank == 3 else r for r in rows
        )
    key, _ = _past(cx, n, 6, key)
    value, past = _past(cx, n, 7, value)
    scores = _masked(cx, n, 4, query, key, past)
    scale = n.attr("scale", 0.0) or None
    out = joined(cx, attend(cx, query, key, value, scores, scale))
    return out, key, value


def attention(cx: OnnxContext, n: Node) -> tuple[Entry | None, ...]:
    """com.microsoft: one weight for query, key and value."""
    x, weight, bias = n.tensor(0), n.tensor(1), n.maybe(2)
    count = n.attrs["num_heads"]
    made = cx.b.matmul(x, weight)
    made = made if bias is None else cx.add(made, bias)
    sizes = n.attrs.get("qkv_hidden_sizes")
    if not sizes:
        third = cx.simplify(floordiv(made.shape[2], 3))
        widths = [third] * 3
    else:
        widths = [as_expr(s) for s in sizes]
    start, parts = as_expr(0), []
    for width in widths:
        parts.append(heads(cx, cx.slice(made, 2, start, width), count))
        start = start + width
    query, key, value = parts
    present: Value | None = None
    past = cx.full(0, (x.shape[0],), I64)
    if n.has(4):
        old = n.tensor(4)  # (2, B, H, T, D)
        olds = [cx.reshape(cx.slice(old, 0, k, 1), old.shape[1:]) for k in (0, 1)]
        past = cx.broadcast_to(cx.tensor(old.shape[3], I64), (x.shape[0],))
        key, value = (
            cx.concat([a, b], 2) for a, b in zip(olds, (key, value), strict=True)
        )
    if 1 in n.used:
        present = cx.concat([cx.reshape(v, (1, *v.shape)) for v in (key, value)], 0)
    scores = _masked(cx, n, 3, query, key, past)
    scale = n.attr("scale", 0.0) or None
    return joined(cx, attend(cx, query, key, value, scores, scale)), present


def group_query(cx: OnnxContext, n: Node) -> tuple[Entry | None, ...]:
    """(query, key, value, past key, past value, lengths - 1, total, cos, sin)

    The caches that come in hold rows up to each batch's own length; the new rows are
    written behind them.
    """
    count, groups = n.attrs["num_heads"], n.attrs["kv_num_heads"]
    q = n.tensor(0)
    if n.has(1):
        parts = [q, n.tensor(1), n.tensor(2)]
    else:
        size = cx.simplify(floordiv(q.shape[2], count + 2 * groups))
        widths = [size * count, size * groups, size * groups]
        starts = [as_expr(0), size * count, size * (count + groups)]
        parts = [cx.slice(q, 2, s, w) for s, w in zip(starts, widths, strict=True)]
    query = heads(cx, parts[0], count)
    key, value = (heads(cx, p, groups) for p in parts[1:])
    batch, length = query.shape[0], query.shape[2]
    ends = cx.cast(n.tensor(5), I64)
    ends = cx.add(cx.reshape(ends, (batch,)), 1)  # rows that are valid, new ones too
    past = cx.sub(ends, cx.tensor(length, I64))
    if n.attr("do_rotary", 0):
        cos, sin = n.tensor(7), n.tensor(8)
        place = cx.add(cx.iota((batch, length), 1, I64), cx.reshape(past, (batch, 1)))
        if n.has(9):
            place = cx.cast(n.tensor(9), I64)
        width = cx.constant_int(cos.shape[1] * 2, "the size of a rotation")
        cos, sin = (angles_at(cx, table, place) for table in (cos, sin))
        twisted = bool(n.attr("rotary_interleaved", 0))
        query, key = (rotated(cx, v, cos, sin, width, twisted) for v in (query, key))
    if n.attr("softcap", 0.0) > 0:
        cx.unsupported("a soft cap")
    keys, values = key, value
    if n.has(3):
        keys, values = (
            _appended(cx, n.tensor(i), new, past) for i, new in ((3, key), (4, value))
        )
    keep = causal_from(cx, length, keys.shape[2], past)
    window = n.attr("local_window_size", -1)
    if window > 0:  # the last columns that a row sees, its own among them
        before = causal_from(cx, length, keys.shape[2], cx.sub(past, window))
        keep = cx.b.binary("logical_and", keep, cx.unary("logical_not", before))
    scores = Scores().plus(cx, hidden(cx, keep, query.dtype))
    scale = n.attr("scale", 0.0) or None
    out = attend(cx, query, keys, values, scores, scale)
    return joined(cx, out), keys, values


def _appended(cx: OnnxContext, old: Value, new: Value, past: Value) -> Value:
    """The past's rows, then new ones; each batch's begin at its own length."""
    whole = cx.concat([old, cx.full(0, new.shape, new.dtype)], 2)
    shape = new.shape
    place = cx.iota(shape, 2, I64)
    start = cx.reshape(past, (past.shape[0], 1, 1, 1))
    place = cx.add(place, cx.broadcast_to(start, shape))
    place = cx.in_range(place, whole.shape[2], 2)
    parts = [place if i == 2 else cx.iota(shape, i, I64) for i in range(4)]
    flat = cx.reshape(cx.b.flat_place(parts, whole.shape), (new.type.numel,))
    rows = cx.reshape(new, (new.type.numel, 1))
    table = cx.reshape(whole, (whole.type.numel, 1))
    return cx.reshape(cx.b.emit("scatter_rows", table, flat, rows), whole.shape)


# ---- the default domain


def plain_attention(cx: OnnxContext, n: Node) -> tuple[Entry | None, ...] | None:
    """(q, k, v, mask, past key, past value, lengths); None where its body must do."""
    if 3 in n.used or n.attr("softcap", 0.0):
        return None
    if n.attr("left_window_size", -1) >= 0 or n.attr("right_window_size", -1) >= 0:
        return None
    q, k, v = (n.tensor(i) for i in range(3))
    flat = q.type.rank == 3
    if flat:
        count, groups = n.attrs["q_num_heads"], n.attrs["kv_num_heads"]
        q, k, v = heads(cx, q, count), heads(cx, k, groups), heads(cx, v, groups)
    batch = q.shape[0]
    k, _ = _past(cx, n, 4, k)
    v, past = _past(cx, n, 5, v)
    lengths = n.maybe(6)
    rows, columns = q.shape[2], k.shape[2]
    scores = Scores()
    if lengths is not None:
        lengths = cx.reshape(cx.cast(lengths, I64), (batch,))
        place = cx.iota((batch, 1, 1, columns), 3, I64)
        keep = cx.arith("lt", place, cx.reshape(lengths, (batch, 1, 1, 1)))
        scores = scores.plus(cx, hidden(cx, keep, q.dtype))
        past = cx.sub(lengths, cx.tensor(rows, I64))
    mask = n.maybe(3)
    if mask is not None:
        if mask.dtype is DType.BOOL:
            mask = hidden(cx, mask, q.dtype)
        scores = scores.plus(cx, _widened(cx, mask, columns))
    if n.attr("is_causal", 0):
        keep = causal_from(cx, rows, columns, past)
        scores = scores.plus(cx, hidden(cx, keep, q.dtype))
    made = attend(cx, q, k, v, scores, n.attrs.get("scale"))
    return joined(cx, made) if flat else made, k, v


def _widened(cx: OnnxContext, mask: Value, columns: Expr) -> Value:
    """A mask of fewer columns hides those behind it."""
    last = mask.type.rank - 1
    have = mask.shape[last]
    if have == 1 or cx.b.same(have, columns) or cx.hint(have) == cx.hint(columns):
        return mask
    none = [as_expr(0)] * mask.type.rank
    more = list(none)
    more[last] = cx.simplify(columns - have)
    return cx.b.emit("pad", mask, low=tuple(none), high=tuple(more), value=-math.inf)


ATTENTION: Table = {
    ("Attention", 23): plain_attention,
    ("com.microsoft::RotaryEmbedding", 1): rotary,
    ("com.microsoft::MultiHeadAttention", 1): multi_head,
    ("com.microsoft::Attention", 1): attention,
    ("com.microsoft::GroupQueryAttention", 1): group_query,
}
