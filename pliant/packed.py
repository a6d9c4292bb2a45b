"""Modules with weights in few bits: `pliant.quantize`.

    small = pliant.quantize(model, "int4", group=32)    # the model stays as it is
    m = pliant.compile(small, example, shapes)

    int8    q * scale            q in -127..127
    int4    q * scale + least    q in 0..15, two in a byte: those of the first half of
                                 a group are the low nibbles

with a scale for each group of a row. Linear layers and embeddings are replaced by
layers that hold the packed numbers as buffers and decode them by ordinary ops, which a
compiled model does inside its products (passes/coded.py). In torch itself they decode
the whole matrix for every call: such a module is made to be compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pliant.errors import OptionError

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def quantize(model: AnyModule, kind: str, group: int | None = 32) -> AnyModule:
    """The model with the weights of linear layers and embeddings in 8 or 4 bits.

    `kind` is "int8" or "int4", `group` the numbers of a row that share a scale; None:
    all of them. A layer whose rows are no whole number of groups, or of an odd size,
    stays as it is, and so does all that is no nn.Linear or nn.Embedding, or has hooks
    or a `forward` of its own. What stays is shared with `model`; weights that layers
    share are packed once, and shared.
    """
    if kind not in _PACKED:
        raise OptionError(f"a kind is {' or '.join(_PACKED)}, not {kind!r}")
    if group is not None and (group < 2 or group % 2):
        raise OptionError(f"a group is an even number from 2 on, not {group}")
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, memo)
    packed: dict[int, PackedNumbers] = {}
    found: dict[nn.Module, nn.Module] = {}

    def numbers(weight: Tensor) -> PackedNumbers:
        if id(weight) not in packed:
            packed[id(weight)] = _PACKED[kind](weight.detach(), group)
        return packed[id(weight)]

    for layer in made.modules():
        make: Callable[[PackedNumbers, Any], nn.Module]
        given: Any = layer
        if not _is_plain(layer):
            continue
        if type(layer) is nn.Linear:
            make = PackedLinear
        elif type(layer) is nn.Embedding and layer.max_norm is None:
            make = PackedEmbedding
        else:
            continue
        columns = layer.weight.shape[1]
        if columns % (group or 2) == 0 and columns:
            found[layer] = make(numbers(layer.weight), given).train(layer.training)
    if made in found:
        return found[made]  # type: ignore[return-value]  # it stands for the layer
    for parent in list(made.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in found:
                setattr(parent, name, found[child])
    return made


def _is_plain(layer: nn.Module) -> bool:
    """Whether it does what its class does: what hooks do would be lost."""
    own = vars(layer)
    return "forward" not in own and not any(
        value for name, value in own.items() if name.endswith("_hooks")
    )


class PackedNumbers(nn.Module):
    """A matrix (rows, columns) in few bits."""

    codes: Tensor  # (rows, groups, bytes)
    scale: Tensor  # (rows, groups, 1)

    def __init__(self, weight: Tensor, group: int | None) -> None:
        super().__init__()
        if not weight.dtype.is_floating_point or not bool(weight.isfinite().all()):
            raise OptionError("only finite floats can be quantised")
        self.dtype, self.shape = weight.dtype, weight.shape
        rows = weight.float().reshape(len(weight), -1, group or weight.shape[1])
        self._pack(rows)
        if not all(bool(part.isfinite().all()) for part in self.buffers()):
            raise OptionError("a weight, or the range of a group, is too large for f32")

    def _pack(self, rows: Tensor) -> None:
        raise NotImplementedError

    def _decoded(self, parts: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def whole(self) -> Tensor:
        """The numbers."""
        return self._decoded(list(self.buffers())).reshape(self.shape).to(self.dtype)

    def picked(self, index: Tensor) -> Tensor:
        """Those of some rows."""
        parts = [
            nn.functional.embedding(index, part.flatten(1)).reshape(
                *index.shape, *part.shape[1:]
            )
            for part in self.buffers()
        ]
        made = self._decoded(parts).reshape(*index.shape, self.shape[1])
        return made.to(self.dtype)


class _Int8(PackedNumbers):
    def _pack(self, rows: Tensor) -> None:
        scale = _stored(rows.abs().amax(-1, keepdim=True) / 127)
        codes = _divided(rows, scale).round().clamp(-127, 127)
        self.register_buffer("codes", codes.to(torch.int8))
        self.register_buffer("scale", scale)

    def _decoded(self, parts: list[Tensor]) -> Tensor:
        codes, scale = parts
        return codes.float() * scale.float()


class _Int4(PackedNumbers):
    def _pack(self, rows: Tensor) -> None:
        least, most = rows.aminmax(dim=-1, keepdim=True)
        least = _stored(least)
        scale = _stored((most - least.float()).clamp(min=0) / 15)
        codes = _divided(rows - least.float(), scale).round().clamp(0, 15)
        low, high = codes.to(torch.uint8).chunk(2, -1)
        self.register_buffer("codes", low | high << 4)
        self.register_buffer("scale", scale)
        self.register_buffer("least", least)

    def _decoded(self, parts: list[Tensor]) -> Tensor:
        packed, scale, least = parts
        codes = torch.cat([packed & 15, packed >> 4], -1)
        return codes.float() * scale.float() + least.float()


_PACKED: dict[str, type[PackedNumbers]] = {"int8": _Int8, "int4": _Int4}


def _stored(part: Tensor) -> Tensor:
    """In f16 if that keeps eleven bits of every number, or else in f32."""
    size = part.abs()
    keeps = (size < 2.0**15) & ((size >= 2.0**-14) | (size == 0))
    return part.half() if bool(keeps.all()) else part


def _divided(rows: Tensor, scale: Tensor) -> Tensor:
    wide = scale.float()
    return rows / torch.where(wide == 0, 1.0, wide)


class PackedLinear(nn.Module):
    """nn.Linear with packed numbers."""

    def __init__(self, numbers: PackedNumbers, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.numbers, self.bias = numbers, layer.bias

    @property
    def weight(self) -> Tensor:
        """Decoded, for code that asks for it."""
        return self.numbers.whole()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.numbers.whole(), self.bias)


class PackedEmbedding(nn.Module):
    """nn.Embedding with packed numbers: only rows that are looked up are decoded."""

    def __init__(self, numbers: PackedNumbers, layer: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings = layer.num_embeddings
        self.embedding_dim, self.padding_idx = layer.embedding_dim, layer.padding_idx
        self.numbers = numbers

    @property
    def weight(self) -> Tensor:
        """Decoded, for code that asks for it."""
        return self.numbers.whole()

    def forward(self, index: Tensor) -> Tensor:
        return self.numbers.picked(index)
