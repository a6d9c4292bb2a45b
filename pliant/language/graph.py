"""The graph of a decoder of the llama family, from its weights.

    main(ids i64[batch, new],
         past_k, past_v f32[batch, heads, past, size] of each layer, kept)
      -> logits f32[batch, kept, vocabulary], new_k, new_v of each layer

The caches grow (frontend/growing.py); `kept` is for how many of the last positions
logits are computed. Position, mask and length follow from the sizes, so that one
program serves a prompt, the rest of it, one token or several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pliant.errors import ModelError
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Graph, Module, Value
from pliant.ir.types import DType, tensor
from pliant.language.blocks import Weight
from pliant.language.gguf_file import Shape
from pliant.sym import Guard, ge, le, sym

F32, I64 = DType.F32, DType.I64
BATCH, NEW, PAST, KEPT = (sym(name) for name in ("batch", "new", "past", "kept"))


def decoder(shape: Shape, weights: Mapping[str, Weight]) -> Module:
    """The module, before its caches grow."""
    made = _Decoder(shape, weights)
    graph = made.build()
    return Module({"main": graph}, constants=dict(made.b.constants))


@dataclass(slots=True)
class _Angles:
    cos: Value  # (new, rope_size / 2)
    sin: Value


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
        cache = tensor(F32, BATCH, shape.kv_heads, PAST, shape.head_size)
        caches = [
            (b.param(f"past_k{n}", cache), b.param(f"past_v{n}", cache))
            for n in range(shape.layers)
        ]
        x = self.weight("token_embd.weight").picked(b, ids)
        angles = self.angles()
        grown: list[Value] = []
        for layer, past in enumerate(caches):
            with b.at(f"layer {layer}"):
                y, *rows = self.attention(layer, x, past, angles)
                grown += rows
                x = b.binary("add", x, y)
                x = b.binary("add", x, self.gated(layer, x))
        x = b.slice_axis(x, 1, NEW - KEPT, KEPT)
        x = self.norm(x, "output_norm.weight")
        tied = "output.weight" not in self.weights
        logits = self.linear(x, "token_embd" if tied else "output")
        graph = b.finish("main", [logits, *grown], ("kept",))
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
        operands = [x, w.value(self.b)]
        if f"{name}.bias" in self.weights:
            operands.append(self.weights[f"{name}.bias"].vector(self.b))
        return self.b.emit("linear", *operands)

    def norm(self, x: Value, name: str) -> Value:
        scale = self.weight(name).vector(self.b)
        return self.b.emit("rms_norm", x, scale, axes=1, eps=self.shape.eps, affine="w")

    def angles(self) -> _Angles:
        b, size = self.b, self.shape.rope_size
        steps = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        pace = (1.0 / np.float32(self.shape.rope_base) ** steps).astype(np.float32)
        if "rope_freqs.weight" in self.weights:
            (factors,) = self.weights["rope_freqs.weight"].parts["numbers"]
            pace = pace / factors
        rows = b.iota((NEW, size // 2), 0)
        places = b.cast(b.binary("add", rows, b.dim_value(PAST)), F32)
        paces = b.constant(Constant("rope_paces", tensor(F32, size // 2), pace))
        angles = b.binary("mul", places, paces)
        return _Angles(b.unary("cos", angles), b.unary("sin", angles))

    def heads(self, layer: int, x: Value, part: str, count: int) -> Value:
        """(batch, heads, new, size)."""
        b, size = self.b, self.shape.head_size
        y = self.linear(x, f"blk.{layer}.attn_{part}")
        y = b.reshape(y, (BATCH, NEW, count, size))
        if f"blk.{layer}.attn_{part}_norm.weight" in self.weights:
            y = self.norm(y, f"blk.{layer}.attn_{part}_norm.weight")
        return b.transpose(y, (0, 2, 1, 3))

    def turned(self, x: Value, angles: _Angles) -> Value:
        """Pairs (i, i + size/2) of each head, turned by their position's angle."""
        b, size = self.b, self.shape.rope_size
        first = b.slice_axis(x, 3, 0, size // 2)
        second = b.slice_axis(x, 3, size // 2, size // 2)
        c, s = angles.cos, angles.sin
        real = b.binary("sub", b.binary("mul", first, c), b.binary("mul", second, s))
        more = b.binary("add", b.binary("mul", second, c), b.binary("mul", first, s))
        parts = [real, more]
        if size != self.shape.head_size:
            parts.append(b.slice_axis(x, 3, size, self.shape.head_size - size))
        return b.concat(parts, 3)

    def attention(
        self, layer: int, x: Value, past: tuple[Value, Value], angles: _Angles
    ) -> tuple[Value, Value, Value]:
        b, shape = self.b, self.shape
        x = self.norm(x, f"blk.{layer}.attn_norm.weight")
        q = self.turned(self.heads(layer, x, "q", shape.heads), angles)
        k = self.turned(self.heads(layer, x, "k", shape.kv_heads), angles)
        v = self.heads(layer, x, "v", shape.kv_heads)
        keys, values = b.concat([past[0], k], 2), b.concat([past[1], v], 2)
        y = b.emit(
            "attention",
            *(q, keys, values),
            scale=shape.head_size**-0.5,
            causal=True,
            first=PAST,
        )
        width = shape.heads * shape.head_size
        y = b.reshape(b.transpose(y, (0, 2, 1, 3)), (BATCH, NEW, width))
        return self.linear(y, f"blk.{layer}.attn_output"), keys, values

    def gated(self, layer: int, x: Value) -> Value:
        b = self.b
        x = self.norm(x, f"blk.{layer}.ffn_norm.weight")
        gate = b.emit("silu", self.linear(x, f"blk.{layer}.ffn_gate"))
        up = self.linear(x, f"blk.{layer}.ffn_up")
        return self.linear(b.binary("mul", gate, up), f"blk.{layer}.ffn_down")


_SIZES = (
    Guard(ge(PAST, 0), (PAST, " tokens of past"), "the model"),
    Guard(ge(KEPT, 0), (KEPT, " positions with logits"), "the model"),
    Guard(
        le(KEPT, NEW),
        (KEPT, " positions with logits, of ", NEW, " that are new"),
        "the model",
    ),
)
