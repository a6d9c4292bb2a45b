"""Sizes that a model puts into tensors and reads back stay sizes in torch's trace.

    k = torch.div(x.shape[1], 8, rounding_mode="trunc")     # a tensor
    x.view(-1, k, 8)                                        # its item()

For torch the number that `item()` reads is one of the data, about which it can decide
nothing: it refuses the view above. While this lasts, a tensor of one integer that is
computed from sizes keeps that integer as torch's own expression of sizes. What the
program computes is read from its ops as ever (torch_numbers.py).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten


def _quotient(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """Both ways of rounding give the same if neither is negative."""
    if rounding_mode is None or not (
        statically_known_true(x >= 0) and statically_known_true(y > 0)
    ):
        return None
    return x // y


def _sum(x: Any, y: Any, *, alpha: int = 1) -> Any:
    return x + y * alpha


def _difference(x: Any, y: Any, *, alpha: int = 1) -> Any:
    return x - y * alpha


def _from(x: Any, y: Any, alpha: int = 1) -> Any:
    return y - x * alpha


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


_RULES: dict[Any, Callable[..., Any]] = {
    aten.scalar_tensor.default: _same,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _same,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _difference,
    aten.rsub.Scalar: _from,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor_mode: _quotient,
    aten.floor_divide.default: partial(_quotient, rounding_mode="floor"),
}

_dispatch = FakeTensorMode.dispatch


def _number(operand: Any) -> Any:
    """The size that an operand is; None if it is none, or not known."""
    if isinstance(operand, FakeTensor):
        return operand.item_memo if operand.dim() == 0 else None
    whole = isinstance(operand, int | torch.SymInt) and not isinstance(operand, bool)
    return operand if whole else None


def _dispatched(
    self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    out = _dispatch(self, func, types, args, kwargs)
    rule = _RULES.get(func)
    if rule is None or not isinstance(out, FakeTensor) or out.dim():
        return out
    numbers = [_number(operand) for operand in args]
    if out.dtype is not torch.int64 or out.item_memo is not None:
        return out
    if any(n is None for n in numbers) or all(isinstance(n, int) for n in numbers):
        return out
    named = {k: v for k, v in (kwargs or {}).items() if k in ("rounding_mode", "alpha")}
    found = rule(*numbers, **named)
    if isinstance(found, torch.SymInt):
        out.item_memo = found
    return out


@contextlib.contextmanager
def sizes_in_tensors() -> Iterator[None]:
    with mock.patch.object(FakeTensorMode, "dispatch", _dispatched):
        yield
