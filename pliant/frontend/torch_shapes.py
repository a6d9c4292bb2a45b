"""Shapes of ops that torch itself infers from concrete sizes alone.

    with symbolic_shapes():
        torch.export.export(...)

Traced by torch, a recurrent layer is run step by step, and `max_pool1d` reads the
length of its rows as a number: either fixes the length. While it lasts, each such op
has a function that computes the types of its results, and keeps sizes as symbols.
`associative_scan` halves its rows until one is left, as often as the example has it: it
is a `scan` instead.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

aten = torch.ops.aten
# By its name: the package has a function of the same one.
scans = vars(importlib.import_module("torch._higher_order_ops.associative_scan"))


def _result(xs: Tensor, state: Tensor, bidirectional: bool) -> Tensor:
    features = state.shape[-1] * (2 if bidirectional else 1)
    return xs.new_empty((*xs.shape[:-1], features))


def _lstm_shapes(
    xs: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, cell = hx
    out = _result(xs, hidden, others[4])
    return out, torch.empty_like(hidden), torch.empty_like(cell)


def _state_shapes(
    xs: Tensor, hx: Tensor, params: Sequence[Tensor], *others: Any
) -> tuple[Tensor, Tensor]:
    return _result(xs, hx, others[4]), torch.empty_like(hx)


def _pooled(x: Tensor, *args: Any) -> Tensor:
    """The op that gives places as well has a rule for symbolic sizes."""
    out: Tensor = aten.max_pool1d_with_indices.default(x, *args)[0]
    return out


_SHAPES: dict[Any, Callable[..., Any]] = {
    aten.lstm.input: _lstm_shapes,
    aten.gru.input: _state_shapes,
    aten.rnn_tanh.input: _state_shapes,
    aten.rnn_relu.input: _state_shapes,
    aten.max_pool1d.default: _pooled,
}


def _by_steps(
    operator: Any, leaves: Sequence[Tensor], dim: int = 0, additional_inputs: Any = ()
) -> list[Tensor]:
    """`generic_associative_scan`, one row after the other."""
    mapped = inspect.getclosurevars(operator.keywords["combine_fn"])
    combine = partial(operator, combine_fn=mapped.nonlocals["func"])  # without vmap

    def step(before: list[Tensor], row: list[Tensor]) -> tuple[Any, Any]:
        after = combine(*before, *row)
        return list(after), [value.clone() for value in after]

    # A scan has at least one round: the last one combines what is not used.
    first = [leaf[0].clone() for leaf in leaves]
    rows = [torch.cat((leaf[1:], leaf[:1])) for leaf in leaves]
    _, others = scan(step, first, rows)
    pairs = zip(leaves, others, strict=True)
    return [torch.cat((leaf[:1], rest[:-1])) for leaf, rest in pairs]


_IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def symbolic_shapes() -> Iterator[None]:
    """While it lasts, torch infers these shapes without concrete sizes.

    torch.nn keeps the weights of recurrent layers in a list too: torch.export warns.
    """
    kept = {op: dict(op.py_kernels) for op in _SHAPES}
    halving = scans["generic_associative_scan"]
    try:
        scans["generic_associative_scan"] = _by_steps
        for op, shapes in _SHAPES.items():
            for key in (_IMPLICIT, *op.py_kernels):
                op.py_kernels[key] = shapes
            op._dispatch_cache.clear()
        with warnings.catch_warnings():
            held = r"The tensor attributes? .*_flat_weights"
            warnings.filterwarnings("ignore", held, UserWarning)
            yield
    finally:
        scans["generic_associative_scan"] = halving
        for op, kernels in kept.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
