"""Windows of pools that a model computes from sizes stay sizes in torch's trace.

    F.max_pool1d(x, x.shape[2])                         # the whole row
    F.interpolate(x, scale_factor=0.6, mode="area")     # a pool to floor(0.6 * n)

torch's pools take their windows as numbers, and adaptive_avg_pool1d its new size: a
size that is passed there is fixed to that of the example. While this lasts, such a call
is made by a pool that does take sizes, with the same result and the same checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

Written = Callable[..., Tensor | None]  # None: torch's own call


def _each(value: Any, rank: int) -> list[Any]:
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * rank if len(values) == 1 else values


def _is_all(x: Tensor, rank: int, window: Any, padding: Any) -> bool:
    """Whether the one window is all of the last axes."""
    sizes = x.shape[-rank:]
    pairs = zip(_each(window, rank), sizes, strict=True)
    padded = any(p != 0 for p in _each(padding, rank))
    if padded or not all(statically_known_true(k == n) for k, n in pairs):
        return False
    return all(n != 0 for n in sizes)  # torch refuses a window of nothing


def _mean_row(input: Tensor, output_size: Any) -> Tensor:
    """As torch defines it, by a pool of two axes."""
    (size,) = _each(output_size, 1)
    return F.adaptive_avg_pool2d(input.unsqueeze(-2), (1, size)).squeeze(-2)


def _largest_in_row(input: Tensor, output_size: int) -> Tensor:
    rows = input.unsqueeze(-2)
    largest: Tensor = F.adaptive_max_pool2d(rows, (1, output_size))
    return largest.squeeze(-2)


def _average(rank: int, pool: Callable[[Tensor, int], Tensor]) -> Written:
    def written(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor | None:
        whole = _is_all(input, rank, kernel_size, padding)
        return pool(input, 1) if whole and divisor_override is None else None

    return written


def _maximum(rank: int, pool: Callable[[Tensor, int], Tensor]) -> Written:
    def written(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor | None:
        near = all(d == 1 for d in _each(dilation, rank)) and not return_indices
        whole = near and _is_all(input, rank, kernel_size, padding)
        return pool(input, 1) if whole else None

    return written


_WRITTEN: Mapping[str, Written] = {
    "adaptive_avg_pool1d": _mean_row,
    "avg_pool1d": _average(1, _mean_row),
    "avg_pool2d": _average(2, F.adaptive_avg_pool2d),
    "avg_pool3d": _average(3, F.adaptive_avg_pool3d),
    "max_pool1d": _maximum(1, _largest_in_row),
    "max_pool2d": _maximum(2, F.adaptive_max_pool2d),
    "max_pool3d": _maximum(3, F.adaptive_max_pool3d),
}


def _is_symbolic(value: Any) -> bool:
    return any(isinstance(v, SymInt) for v in _each(value, 1))


def _wrapped(function: Callable[..., Any], written: Written) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(map(_is_symbolic, (*args[1:], *kwargs.values()))):
            out = written(*args, **kwargs)
            if out is not None:
                return out
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def symbolic_windows() -> Iterator[None]:
    """Pools whose windows are sizes are made by pools that take sizes.

    By name, since functions of torch.nn.functional that use them find them so.
    """
    with contextlib.ExitStack() as stack:
        for name, written in _WRITTEN.items():
            for module in (torch, F):
                function = getattr(module, name, None)
                if function is not None:
                    new = _wrapped(function, written)
                    stack.enter_context(mock.patch.object(module, name, new))
        yield
