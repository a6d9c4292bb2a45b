"""Traces of ops that give a view or a copy, as the strides of their operand have it.

While it traces, torch takes two strides to be equal only if they are at every size, and
copies where eager gives a view at the sizes of the example. Here the example's sizes
decide, as in eager: results have eager's strides and memory. At which other sizes they
have, torch_layout.py finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental import proxy_tensor

# They copy what a view cannot step through, and what is not contiguous.
RESHAPES = frozenset(["reshape", "reshape_as", "flatten"])
ROWS = frozenset(["contiguous", "ravel"])
_RECORDS: CodeType = proxy_tensor.proxy_call.__code__


def name_of(target: torch._ops.OpOverload) -> str:
    """aten.add.Tensor -> add"""
    return str(target._schema.name).rpartition("::")[2]


@contextmanager
def contiguous_is_an_op() -> Iterator[None]:
    """A trace has `contiguous` even of what is contiguous at the sizes of the example.

    torch leaves it out before anything records it.
    """

    def contiguous(x: Any, *, memory_format: Any = torch.contiguous_format) -> Any:
        return torch.ops.aten.contiguous.default(x, memory_format=memory_format)

    with mock.patch.object(torch.Tensor, "contiguous", contiguous):
        yield


def answer_at_example(frame: FrameType | None, asked: torch.SymBool) -> bool | None:
    """The answer at the sizes of the example, to an op that views or copies by it."""
    hints, expr = asked.node.shape_env.backed_var_to_val, asked.node.expr
    if not expr.free_symbols or not expr.free_symbols <= hints.keys():
        return None
    while frame is not None and frame.f_code is not _RECORDS:
        if frame.f_code is torch._ops.OpOverload.__call__.__code__:
            name = name_of(frame.f_locals["self"])
            if name in RESHAPES or name in ROWS:
                return bool(expr.xreplace(hints))
        frame = frame.f_back
    return None
