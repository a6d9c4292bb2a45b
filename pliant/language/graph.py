"""The graph of a decoder of the llama family, from its weights.

    main(ids i64[batch, new], lengths i64[batch],
         keys, values f32[batch, heads, capacity, size] of each layer, past, kept)
      -> logits f32[batch, kept, vocabulary]; keys and values are written in place

A row of the batch has `lengths` tokens of its own in the caches, at most `past`. Its
new ones are written behind them, at `lengths + 0, 1, ..`, which are also their
positions, and a token sees the keys up to its own position. So one program serves a
prompt, the rest of it, one token or several, for rows that are equally long or not.
`kept` is for how many of the last positions logits are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pliant.errors import ModelError
from pliant.frontend.contract import Imported
from pliant.frontend.ir_module import plain_signature
from pliant.frontend.structure import LEAF, unflattener
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Graph, Module, Value
from pliant.ir.types import DType, tensor
from pliant.language.blocks import Weight
from pliant.language.gguf_file import Shape
from pliant.sym import Guard, ge, le, product, sym

F32, I64 = DType.F32, DType.I64
BATCH, NEW, PAST, KEPT, CAPACITY = (
    sym(name) for name in ("batch", "new", "past", "kept", "capacity")
)


def decoder(shape: Shape, weights: Mapping[str, Weight]) -> Imported:
    """The program, which writes its caches."""
    made = _Decoder(shape, weights)
    graph = made.build()
    module = Module({"main": graph}, constants=dict(made.b.constants))
    signature = plain_signature(graph)
    caches = range(2, 2 + 2 * shape.layers)
    written = replace(
        signature,
        results=signature.results[:1],
        unflatten_results=unflattener(LEAF),
        positional=False,
        plain=False,
        stores=tuple((graph.params[k].name, k - 1) for k in caches),
        written=tuple(caches),
        stored=None,
    )
    return Imported(module, written)


@dataclass(slots=True)
class _Places:
    """Where the new tokens are."""

    cos: Value  # (batch, 1, new, rope_size / 2)
    sin: Value
    rows: Value  # (batch * kv_heads * new), of (batch * kv_heads * capacity)
    seen: Value  # (batch, 1, new, past + new): whether a token reads a key


class _Decoder:
    def __init__(self, shape: Shape, weights: Mapping[str, Weight]) -> None:
        self.shape, self.weights = shape, weights
        self.b = Builder()
        facts = self.b.facts
        for guard in _SIZES:
            facts = facts.assume(guard.cond)
        self.b.facts = facts

    def build(self) -> Graph:
        b, shape = self.b, self.shape
        ids = b.param("ids", tensor(I64, BATCH, NEW))
        lengths = b.param("lengths", tensor(I64, BATCH))
        cache = tensor(F32, BATCH, shape.kv_heads, CAPACITY, shape.head_size)
        caches = [
            (b.param(f"keys{n}", cache), b.param(f"values{n}", cache))
            for n in range(shape.layers)
        ]
        x = self.weight("token_embd.weight").picked(b, ids)
        places = self.places(lengths)
        written: list[Value] = []
        for layer, memory in enumerate(caches):
            with b.at(f"layer {layer}"):
                y, *new = self.attention(layer, x, memory, places)
                written += new
                x = b.binary("add", x, y)
                x = b.binary("add", x, self.gated(layer, x))
        x = b.slice_axis(x, 1, NEW - KEPT, KEPT)
        x = self.norm(x, "output_norm.weight")
        tied = "output.weight" not in self.weights
        logits = self.linear(x, "token_embd" if tied else "output")
        graph = b.finish("main", [logits, *written], ("past", "kept"))
        return graph.replace(constraints=(*graph.constraints, *_SIZES))

    def weight(self, name: str) -> Weight:
        if name not in self.weights:
            raise ModelError(f"the file has no weight {name}")
        return self.weights[name]

    def linear(self, x: Value, name: str) -> Value:
        w = self.weight(f"{name}.weight")
        if x.shape[-1] != w.columns:
            raise ModelError(
                f"the weight {name} has {w.columns} columns, not {x.shape[-1]}"
            )
        bias = self.weights.get(f"{name}.bias")
        return w.product(self.b, x, None if bias is None else bias.vector(self.b))

    def norm(self, x: Value, name: str) -> Value:
        scale = self.weight(name).vector(self.b)
        return self.b.emit("rms_norm", x, scale, axes=1, eps=self.shape.eps, affine="w")

    def places(self, lengths: Value) -> _Places:
        b = self.b
        held = b.in_range(
            lengths, PAST + 1, wraps=False, of="the length of a row", axis=0
        )
        grid = (BATCH, NEW)
        own = b.binary("add", b.broadcast(held, grid, (0,)), b.iota(grid, 1))
        cos, sin = self.turns(own)
        whole = (BATCH, 1, NEW, PAST + NEW)
        seen = b.binary("le", b.iota(whole, 3), b.broadcast(own, whole, (0, 2)))
        rows = (BATCH, self.shape.kv_heads, NEW)
        head = b.binary(
            "add",
            b.binary("mul", b.iota(rows, 0), b.scalar(self.shape.kv_heads, I64)),
            b.iota(rows, 1),
        )
        first = b.binary("mul", head, b.dim_value(CAPACITY))
        at = b.binary("add", first, b.broadcast(own, rows, (0, 2)))
        return _Places(cos, sin, b.reshape(at, (product(rows),)), seen)

    def turns(self, places: Value) -> tuple[Value, Value]:
        """Cosine and sine of the angles of these positions (batch, new)."""
        b, size = self.b, self.shape.rope_size
        steps = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        pace = (1.0 / np.float32(self.shape.rope_base) ** steps).astype(np.float32)
        if "rope_freqs.weight" in self.weights:
            (factors,) = self.weights["rope_freqs.weight"].parts["numbers"]
            pace = pace / factors
        at = b.reshape(b.cast(places, F32), (BATCH, 1, NEW, 1))
        paces = b.constant(Constant("rope_paces", tensor(F32, size // 2), pace))
        angles = b.binary("mul", at, paces)
        return b.unary("cos", angles), b.unary("sin", angles)

    def heads(self, layer: int, x: Value, part: str, count: int) -> Value:
        """(batch, heads, new, size)."""
        b, size = self.b, self.shape.head_size
        y = self.linear(x, f"blk.{layer}.attn_{part}")
        y = b.reshape(y, (BATCH, NEW, count, size))
        if f"blk.{layer}.attn_{part}_norm.weight" in self.weights:
            y = self.norm(y, f"blk.{layer}.attn_{part}_norm.weight")
        return b.transpose(y, (0, 2, 1, 3))

    def turned(self, x: Value, places: _Places) -> Value:
        """Pairs (i, i + size/2) of each head, turned by their position's angle."""
        b, size = self.b, self.shape.rope_size
        first = b.slice_axis(x, 3, 0, size // 2)
        second = b.slice_axis(x, 3, size // 2, size // 2)
        c, s = places.cos, places.sin
        real = b.binary("sub", b.binary("mul", first, c), b.binary("mul", second, s))
        more = b.binary("add", b.binary("mul", second, c), b.binary("mul", first, s))
        parts = [real, more]
        if size != self.shape.head_size:
            parts.append(b.slice_axis(x, 3, size, self.shape.head_size - size))
        return b.concat(parts, 3)

    def attention(
        self, layer: int, x: Value, memory: tuple[Value, Value], places: _Places
    ) -> tuple[Value, Value, Value]:
        b, shape = self.b, self.shape
        x = self.norm(x, f"blk.{layer}.attn_norm.weight")
        q = self.turned(self.heads(layer, x, "q", shape.heads), places)
        k = self.turned(self.heads(layer, x, "k", shape.kv_heads), places)
        v = self.heads(layer, x, "v", shape.kv_heads)
        keys, values = (
            self.placed(old, new, places)
            for old, new in zip(memory, (k, v), strict=True)
        )
        y = b.emit(
            "attention",
            q,
            b.slice_axis(keys, 2, 0, PAST + NEW),
            b.slice_axis(values, 2, 0, PAST + NEW),
            places.seen,
            scale=shape.head_size**-0.5,
            masked=True,
            causal=True,
            first=PAST,
        )
        width = shape.heads * shape.head_size
        y = b.reshape(b.transpose(y, (0, 2, 1, 3)), (BATCH, NEW, width))
        return self.linear(y, f"blk.{layer}.attn_output"), keys, values

    def placed(self, memory: Value, new: Value, places: _Places) -> Value:
        """The cache with the rows of new tokens."""
        b, size = self.b, self.shape.head_size
        old = b.reshape(memory, (product(memory.shape[:-1]), size))
        rows = b.reshape(new, (product(new.shape[:-1]), size))
        written = b.emit("scatter_rows", old, places.rows, rows)
        return b.reshape(written, memory.shape)

    def gated(self, layer: int, x: Value) -> Value:
        b = self.b
        x = self.norm(x, f"blk.{layer}.ffn_norm.weight")
        gate = b.emit("silu", self.linear(x, f"blk.{layer}.ffn_gate"))
        up = self.linear(x, f"blk.{layer}.ffn_up")
        return self.linear(b.binary("mul", gate, up), f"blk.{layer}.ffn_down")


_SIZES = (
    Guard(ge(PAST, 0), (PAST, " tokens of past"), "the model"),
    Guard(
        le(PAST + NEW, CAPACITY),
        (PAST + NEW, " tokens, and caches with room for ", CAPACITY),
        "the model",
    ),
    Guard(ge(KEPT, 0), (KEPT, " positions with logits"), "the model"),
    Guard(
        le(KEPT, NEW),
        (KEPT, " positions with logits, of ", NEW, " that are new"),
        "the model",
    ),
)
