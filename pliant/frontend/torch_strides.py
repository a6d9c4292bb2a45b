"""What the model's Python code asks of strides, while it is traced.

    x * 2 if x[:, :2].is_contiguous() else x * 3   # an assumption: m > 2 and n != 1
    x * 2 if x.is_contiguous() else x * 3          # x has the strides of the example

torch answers `is_contiguous` for all sizes at once, and says no where the sizes decide.
While this lasts, the sizes of the example decide, as in eager, and the comparisons that
the answer needs are conditions of the model's code like any other.

What depends on the strides of an input holds for those of the trace alone. So an input
that the tensor was computed from is marked, and calls must pass it in that layout
(`Signature.layouts`). Results of matrix products, lookups and copies have a layout of
their own. Where a function inside `torch.cond` or a loop asks, all inputs are marked.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

ASKED = "pliant_strides_asked"  # in the `meta` of an input's node

# Results that are row-major whatever their operands are.
_ROW_MAJOR = frozenset(
    ["contiguous", "ravel", "embedding", "linear", "mm", "addmm", "bmm", "baddbmm"]
)
# The axes from the outermost in memory to the innermost.
_ORDERS = {torch.channels_last: (0, 2, 3, 1), torch.channels_last_3d: (0, 2, 3, 4, 1)}

_is_contiguous: Callable[..., bool] = torch._C.TensorBase.is_contiguous
_stride: Callable[..., Any] = torch._C.TensorBase.stride


@contextlib.contextmanager
def asked_of_strides(
    asking: Callable[[FrameType | None], FrameType | None],
    note_inside: Callable[[], None],
) -> Iterator[None]:
    """`asking` gives the innermost frame of the model's code; None inside of an op.

    What torch's own code asks decides the layout of results, and no value. Functions
    inside `torch.cond` and loops ask Dynamo: that is told to `note_inside`.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    def inside(name: str) -> Any:
        answer = getattr(TensorVariable, name)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            note_inside()
            return answer(self, *args, **kwargs)

        return mock.patch.object(TensorVariable, name, noted)

    def is_asked(x: Tensor, frame: FrameType) -> bool:
        return isinstance(x, FakeTensor) and asking(frame) is frame

    def is_contiguous(self: Tensor, *args: Any, **kwargs: Any) -> bool:
        if not is_asked(self, sys._getframe(1)):
            return _is_contiguous(self, *args, **kwargs)
        _mark(self)
        return _in_rows(self, *args, **kwargs)

    def stride(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_asked(self, sys._getframe(1)):
            _mark(self)
        return _stride(self, *args, **kwargs)

    with (
        mock.patch.object(Tensor, "is_contiguous", is_contiguous),
        mock.patch.object(Tensor, "stride", stride),
        inside("method_is_contiguous"),
        inside("method_stride"),
    ):
        yield


def _mark(x: Tensor) -> None:
    """Marks the inputs that the layout of a tensor may depend on."""
    mode = proxy_tensor.get_proxy_mode()
    tracker = getattr(getattr(mode, "tracer", None), "tensor_tracker", {})
    known = tracker.get(x)
    if known is not None:
        need_strides(known.proxy.node)


def need_all_strides(graph: Graph) -> None:
    """Calls must pass every tensor in the layout of the trace."""
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta[ASKED] = True


def need_strides(of: Node) -> None:
    """Calls must pass what the layout of this node depends on as in the trace."""
    pending = [of]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            node.meta[ASKED] = True
        for operand in () if _has_own_layout(node) else node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)


def _has_own_layout(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name.rpartition("::")[2]
    return name in _ROW_MAJOR and node.kwargs.get("memory_format") not in _ORDERS


def _in_rows(x: Tensor, memory_format: Any = torch.contiguous_format) -> bool:
    """As torch defines it: strides of axes with a single element do not count."""
    order = _ORDERS.get(memory_format, tuple(range(x.dim())))
    if len(order) != x.dim():
        return False
    empty_is = memory_format == torch.contiguous_format
    below: Any = 1
    for axis in reversed(order):
        size, step = x.shape[axis], _stride(x, axis)
        if not statically_known_true(step == below):
            if empty_is and math.prod(x.shape) == 0:
                return True
            if size != 1 and step != below:
                return False
            if size == 1:
                continue
        below = below * size
    return True
