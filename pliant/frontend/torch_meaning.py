"""Refuses torch tensors that mean more than the bytes in their memory.

A compiled model reads bytes. A tensor may mean something else: inside `vmap` it stands
for a batch of others, inside `torch.func.grad` for a point of differentiation; it may
carry a tangent, belong to a class that redefines every operation, or be lazily negated.
Only lazy negation can be resolved. The other meanings would be lost silently, so such
tensors are refused.
"""

from __future__ import annotations

import sys
from typing import Any

from pliant.errors import DTypeError
from pliant.frontend.signature import SizeSlot, TensorSlot
from pliant.runtime.caller import has_tangent, storage_lacks


def check_meaning(slot: TensorSlot | SizeSlot, value: Any) -> bool:
    """Raises if a tensor's meaning would be lost; True if only its gradient will be."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise _refused(
            slot,
            "is part of a transform of torch.func (grad, vmap, jvp, ..), which a "
            "compiled model cannot be part of: call the model outside, or transform "
            "the torch module",
        )
    if _redefines(torch, type(value)):
        raise _refused(
            slot,
            f"is a {type(value).__name__}, a class with operations of its own, which a "
            "compiled model would not use: pass x.as_subclass(torch.Tensor) if its "
            "memory is what is meant",
        )
    if has_tangent(value):
        raise _refused(
            slot,
            "carries a tangent of forward-mode differentiation, and a compiled model "
            "gives none: pass the primal alone, or differentiate the torch module",
        )
    lacks = storage_lacks(value)
    if lacks:
        raise _refused(
            slot,
            f"has sizes {tuple(value.shape)} that reach {lacks} bytes beyond its "
            f"storage of {value.untyped_storage().nbytes()}: the storage was resized",
        )
    return bool(value.requires_grad and torch.is_grad_enabled())


def plain_tensor(value: Any) -> Any:
    """The same values outside autograd, none of them lazily negated or conjugated."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if type(value) is not torch.Tensor:
        value = value.as_subclass(torch.Tensor)
    return value.detach().resolve_conj().resolve_neg()


def _redefines(torch: Any, kind: type) -> bool:
    """Whether a class gives torch's operations another meaning."""
    if kind in (torch.Tensor, torch.nn.Parameter):
        return False
    known = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    function = getattr(kind, "__torch_function__", None)
    dispatch = getattr(kind, "__torch_dispatch__", None)
    plain = (None, torch.Tensor.__torch_dispatch__)
    redefined = not any(_same(function, k) for k in known)
    return redefined or not any(_same(dispatch, p) for p in plain)


def _same(method: Any, other: Any) -> bool:
    """Whether two are one function, bound to whichever class."""
    inner, outer = (getattr(m, "__func__", m) for m in (method, other))
    return inner is outer


def _refused(slot: TensorSlot | SizeSlot, why: str) -> DTypeError:
    return DTypeError(f"input '{slot.name}' {why}", input=slot.name, got=why)
