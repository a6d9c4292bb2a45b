"""Packed sequences, while torch.export traces a model.

    packed = pack_padded_sequence(x, lengths)
    out, state = self.lstm(packed)
    out, lengths = pad_packed_sequence(out)

torch packs the rows of all sequences into one tensor, whose sizes are the data's, and
its recurrent layers loop over them in Python's sense. Here the rows stay where they
are: a layer runs over all steps, and a sequence that has ended keeps its state. So a
packed sequence may only go from `pack_padded_sequence` through LSTM, GRU and RNN to
`pad_packed_sequence`; its parts do not exist, and asking for them is an error.

Models have imported these two functions by name, so it is their code that is replaced
while a trace lasts, and that of the layers' `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

_LIBRARY = torch.library.Library("pliant", "DEF")
_LIBRARY.define(
    "recurrent(str kind, Tensor xs, Tensor lengths, Tensor[] hx, Tensor[] params, "
    "bool has_biases, int num_layers, float dropout, bool train, bool bidirectional) "
    "-> Tensor[]"
)
# The lengths, which are from 1 to the steps that there are.
_LIBRARY.define("lengths(Tensor lengths, SymInt steps, bool sorted) -> Tensor")
RECURRENT = torch.ops.pliant.recurrent.default
CHECKED = torch.ops.pliant.lengths.default


def _same(lengths: Tensor, steps: Any, sorted: bool) -> Tensor:
    return torch.empty_like(lengths)


def _shapes(
    kind: str, xs: Tensor, lengths: Tensor, hx: Sequence[Tensor], *others: Any
) -> list[Tensor]:
    directions = 2 if others[-1] else 1
    out = xs.new_empty((*xs.shape[:-1], hx[0].shape[-1] * directions))
    return [out, *(torch.empty_like(state) for state in hx)]


for _name, _shape in (("lengths", _same), ("recurrent", _shapes)):
    torch.library.register_fake(f"pliant::{_name}", _shape, lib=_LIBRARY)


class _Padded(rnn.PackedSequence):
    """Sequences (T, B, ..) side by side, and how long each is."""

    xs: Tensor
    lengths: Tensor

    @staticmethod
    def of(xs: Tensor, lengths: Tensor) -> _Padded:
        made = tuple.__new__(_Padded, (None,) * 4)
        made.xs, made.lengths = xs, lengths
        return made

    def _missing(self, *_: object) -> Any:
        raise NotImplementedError(
            "the parts of a packed sequence: a compiled model passes it only to LSTM, "
            "GRU, RNN and pad_packed_sequence"
        )

    data = batch_sizes = sorted_indices = unsorted_indices = property(
        _missing
    )  # of a tuple
    __iter__ = __getitem__ = __len__ = to = _missing  # type: ignore[assignment]


def _live(lengths: Tensor, steps: Any) -> Tensor:
    """(steps, B): whether a sequence has not ended."""
    return torch.arange(steps)[:, None] < lengths[None]


def _pack(
    input: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool
) -> _Padded:
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    xs = input.transpose(0, 1) if batch_first else input
    lengths = CHECKED(lengths, xs.shape[0], enforce_sorted)
    return _Padded.of(xs, lengths)


def _pad(
    sequence: _Padded, batch_first: bool, padding_value: float, total_length: Any
) -> tuple[Tensor, Tensor]:
    xs, lengths = sequence.xs, sequence.lengths
    steps = xs.shape[0]
    if total_length is None:
        longest = lengths.max().item()
        torch._check(longest >= 1)
        torch._check(longest <= steps)
        xs = xs[:longest]
    elif not torch.fx.experimental.symbolic_shapes.statically_known_true(
        total_length == steps
    ):
        lengths = CHECKED(lengths, total_length, False)
        around = [0, 0] * (xs.dim() - 1)
        xs = nn.functional.pad(xs, [*around, 0, total_length - steps])
    live = _live(lengths, xs.shape[0])
    xs = torch.where(
        live.reshape(*live.shape, *[1] * (xs.dim() - 2)), xs, padding_value
    )
    return xs.transpose(0, 1) if batch_first else xs, lengths


def _run(layer: nn.RNNBase, packed: _Padded, hx: Any) -> tuple[_Padded, Any]:
    kind = layer.mode.lower()
    xs, directions = packed.xs, 2 if layer.bidirectional else 1
    if hx is None:
        sizes = [layer.proj_size or layer.hidden_size]
        sizes += [layer.hidden_size] if kind == "lstm" else []
        count = layer.num_layers * directions
        states = [xs.new_zeros((count, xs.shape[1], size)) for size in sizes]
    else:
        states = list(hx) if kind == "lstm" else [hx]
    how = (layer.bias, layer.num_layers, layer.dropout, layer.training)
    weights = list(layer._flat_weights)
    out, *after = RECURRENT(
        kind, xs, packed.lengths, states, weights, *how, layer.bidirectional
    )
    state = tuple(after) if kind == "lstm" else after[0]
    return _Padded.of(out, packed.lengths), state


# ---- replaced functions


def _copy(function: Any) -> Any:
    made = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# Their names are looked up where the functions are that have this code.
def _pack_here(input, lengths, batch_first=False, enforce_sorted=True):  # type: ignore[no-untyped-def]
    return _pliant_pack(input, lengths, batch_first, enforce_sorted)  # type: ignore[name-defined]  # noqa: F821


def _pad_here(sequence, batch_first=False, padding_value=0.0, total_length=None):  # type: ignore[no-untyped-def]
    return _pliant_pad(sequence, batch_first, padding_value, total_length)  # type: ignore[name-defined]  # noqa: F821


def _forward_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        if isinstance(input, _Padded):
            return _run(self, input, hx)
        return forward(self, input, hx)

    return run


@contextmanager
def packed_sequences() -> Iterator[None]:
    """While it lasts, models that are traced may pack sequences."""
    pack, pad = rnn.pack_padded_sequence, rnn.pad_packed_sequence
    old_pack, old_pad = _copy(pack), _copy(pad)

    def packed(input: Tensor, *others: Any) -> Any:
        tracing = torch.compiler.is_exporting()
        return (_pack if tracing else old_pack)(input, *others)

    def padded(sequence: Any, *others: Any) -> Any:
        is_ours = isinstance(sequence, _Padded)
        return (_pad if is_ours else old_pad)(sequence, *others)

    layers: tuple[type[nn.RNNBase], ...] = (nn.LSTM, nn.GRU, nn.RNN)
    kept = [layer.forward for layer in layers]
    names: dict[str, Any] = vars(rnn)
    names["_pliant_pack"], names["_pliant_pad"] = packed, padded
    try:
        pack.__code__, pad.__code__ = _pack_here.__code__, _pad_here.__code__
        for layer in layers:
            layer.forward = _forward_of(layer.forward)
        yield
    finally:
        pack.__code__, pad.__code__ = old_pack.__code__, old_pad.__code__
        for layer, forward in zip(layers, kept, strict=True):
            layer.forward = forward
        del names["_pliant_pack"], names["_pliant_pad"]
