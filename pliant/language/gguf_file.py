"""Reads a GGUF file: what the model is, its weights, its tokens.

The `gguf` package maps the file and knows its formats. Weights whose blocks the graph
decodes (`blocks.py`) stay in their bits; the others become f32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pliant.errors import ModelError
from pliant.language.blocks import FORMATS, Weight, from_blocks, from_numbers

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decoder of the llama family looks like."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int  # tokens it was trained for
    eps: float
    rope_base: float
    rope_size: int  # elements of a head that are turned


@dataclass(frozen=True, slots=True)
class GgufModel:
    shape: Shape
    weights: Mapping[str, Weight]
    fields: Mapping[str, Any]  # of the file's header, `tokenizer.*` among them


def read_gguf(path: str | os.PathLike[str]) -> GgufModel:
    """ModelError if the file is damaged, or no model that is known here."""
    try:
        import gguf
    except ImportError:
        raise ModelError(
            "reading a GGUF file needs the package gguf: pip install 'pliant[llm]'"
        ) from None
    if not Path(path).is_file():
        raise ModelError(f"there is no file {path}")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise ModelError(f"{path} is no GGUF file that can be read: {error}") from None
    shape = _shape(path, fields)
    weights: dict[str, Weight] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name.lower()
        if kind in FORMATS and len(tensor.shape) == 2:
            weights[tensor.name] = from_blocks(tensor.name, kind, tensor.data)
        else:
            try:
                numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise ModelError(
                    f"{path}: the weight {tensor.name} has the format {kind}, "
                    "which is not known"
                ) from None
            weights[tensor.name] = from_numbers(tensor.name, numbers)
    if shape.family == "llama":  # q and k are stored for turning neighbours
        _unpermute(weights, shape)
    return GgufModel(shape, weights, fields)


def _shape(path: object, fields: Mapping[str, Any]) -> Shape:
    family = fields.get("general.architecture")
    if family not in FAMILIES:
        raise ModelError(
            f"{path} holds a model of the family {family!r}; known are "
            f"{', '.join(FAMILIES)}"
        )
    missing = object()

    def get(name: str, default: Any = missing) -> Any:
        value = fields.get(f"{family}.{name}", default)
        if value is missing:
            raise ModelError(f"{path} does not say {family}.{name}")
        return value

    scaling = get("rope.scaling.type", "none")
    if scaling not in ("none", None):
        raise ModelError(f"{path}: rope scaling of type {scaling!r} is not supported")
    if get("expert_count", 0):
        raise ModelError(f"{path}: a mixture of experts is not supported")
    heads, width = int(get("attention.head_count")), int(get("embedding_length"))
    size = int(get("attention.key_length", width // heads))
    return Shape(
        family,
        int(get("block_count")),
        width,
        heads,
        int(get("attention.head_count_kv", heads)),
        size,
        len(fields["tokenizer.ggml.tokens"]),
        int(get("context_length")),
        float(get("attention.layer_norm_rms_epsilon")),
        float(get("rope.freq_base", 10000.0)),
        int(get("rope.dimension_count", size)),
    )


def _unpermute(weights: dict[str, Weight], shape: Shape) -> None:
    """Rows of a head in the order (first halves, second halves) of each pair."""
    half = shape.rope_size // 2
    turned = np.arange(shape.rope_size).reshape(half, 2).T.reshape(-1)
    order = np.concatenate([turned, np.arange(shape.rope_size, shape.head_size)])
    for layer in range(shape.layers):
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads)):
            rows = (np.arange(heads)[:, None] * shape.head_size + order).reshape(-1)
            name = f"blk.{layer}.attn_{part}.weight"
            weights[name] = weights[name].permuted(rows)
