"""What a translation of an aten op works with: a `Translation`, and torch's node.

Beside tensors, sizes and floats (translate.py), operands are the Python objects of the
exported graph.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pliant.frontend.operands import HALF, Operand, Real, Size
from pliant.frontend.torch_tensors import dtype_of
from pliant.frontend.translate import Translation, Unsupported, as_index
from pliant.ir.build import Builder
from pliant.ir.graph import Value
from pliant.ir.types import DType

__all__ = [
    "HALF",
    "Operand",
    "Real",
    "Size",
    "TorchContext",
    "Unsupported",
    "as_index",
    "short_name",
    "used",
]


class ChangedTensors(Protocol):
    """The tensors of the model that ops may change."""

    def read(self, node: torch.fx.Node) -> Any: ...

    def store(self, node: torch.fx.Node, new: Value) -> None: ...

    def sibling(self, node: torch.fx.Node, name: str) -> Value: ...


class TorchContext(Translation):
    """The state of one import of torch's, and the node that is translated now."""

    def __init__(self, builder: Builder, training: bool = False) -> None:
        super().__init__(builder, training)
        self._node: torch.fx.Node | None = None
        self.state: ChangedTensors | None = None

    @property
    def node(self) -> torch.fx.Node | None:
        return self._node

    @node.setter
    def node(self, node: torch.fx.Node | None) -> None:
        self._node = node
        self.op_name = "" if node is None else short_name(node.target)

    @property
    def val(self) -> Any:
        """What the trace has as the node's result: tensors without data, numbers."""
        assert self.node is not None
        return self.node.meta.get("val")

    @property
    def out_dtype(self) -> DType:
        return self.dtype(self.val.dtype)

    # --- derivatives that are torch's own, in training ------------------------------

    def detached(self, x: Value) -> Value:
        """A value that no gradient goes through."""
        if not self.training or not x.dtype.is_float:
            return x
        return self.keep_sign(x, self.b.emit("stop_gradient", x))

    def flat_at_zero(self, x: Value) -> Value:
        """A value that no gradient goes through where it is 0.

        The derivative of a root is infinite there, and torch's norms have the
        derivative 0 at 0.
        """
        if not self.training:
            return x
        return self.select(self.arith("ne", x, 0.0), x, self.detached(x))

    def with_slopes(self, y: Value, *slopes: tuple[Value, Operand]) -> Value:
        """y, with the derivative by each x that is given beside it, and no other."""
        if not self.training or not y.dtype.is_float:
            return y
        y = self.detached(y)
        for x, slope in slopes:
            parts = [
                self.broadcast_to(self.tensor(v, y.dtype), y.shape) for v in (x, slope)
            ]
            y = self.b.emit("slope", y, *parts)
        return y

    def dtype(self, its: torch.dtype) -> DType:
        """Of complex numbers, that of their parts."""
        ours = dtype_of(its.to_real() if its.is_complex else its)
        if ours is None:
            self.unsupported(f"element type {its} is not supported")
        return ours


def short_name(target: Any) -> str:
    """aten.add.Tensor -> add"""
    return str(getattr(target, "__name__", target)).split(".")[0]


def used(cx: TorchContext, which: int) -> bool:
    """Whether anything reads this result of the op."""
    assert cx.node is not None
    return any(user.args[1] == which and user.users for user in cx.node.users)
