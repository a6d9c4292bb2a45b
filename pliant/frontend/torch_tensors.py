"""Access to torch's tensors, modules and optimizers outside tracing.

This file can be imported without torch; then nothing is a tensor. torch_meaning.py
checks what a tensor means beyond its bytes, runtime/caller.py reads and creates tensors
in a call, and the other torch_* files import models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pliant.errors import PliantError
from pliant.frontend.signature import TORCH_NAMES
from pliant.ir.types import DTYPES, DType, TensorType


def need_torch(what: str) -> None:
    """PliantError if torch cannot be imported."""
    try:
        import torch  # noqa: F401  (only whether it is there)
    except ImportError as error:
        raise PliantError(f"{what} needs torch: pip install 'pliant[torch]'") from error


# ---- element types

_OURS = {f"torch.{its}": DTYPES[ours] for its, ours in TORCH_NAMES.items()}
_THEIRS = {ours: its for its, ours in _OURS.items()}


def dtype_of(its: Any) -> DType | None:
    """The DType of a torch.dtype; None if there is none."""
    return _OURS.get(str(its))


def torch_dtype(ours: DType) -> Any:
    import torch

    return getattr(torch, _THEIRS[ours].removeprefix("torch."))


# ---- tensors as data


def is_tensor(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_dense(tensor: Any) -> bool:
    """Whether its elements are in this machine's memory, at strides."""
    return str(tensor.layout) == "torch.strided" and tensor.device.type == "cpu"


def to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """The tensor's memory as an array; bf16 as its bits."""
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if flat.dtype is torch.bfloat16:
        bits: np.ndarray[Any, Any] = flat.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: np.ndarray[Any, Any] = flat.numpy()
    return array


def as_real(tensor: Any) -> Any:
    """A complex tensor as real numbers with a last axis of 2; others as they are."""
    import torch

    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.detach().resolve_conj())


def without_data(kind: TensorType) -> Any:
    """A tensor of constant shape on the meta device."""
    import torch

    shape = [dim.value for dim in kind.shape]
    return torch.empty(shape, dtype=torch_dtype(kind.dtype), device="meta")


# ---- where tensors are kept

_OF_MODULES = ("_parameters", "_buffers", "__dict__")
_OF_PROGRAMS = ("_state_dict", "_constants")


def tensor_tables(
    owner: Any,
) -> Iterator[tuple[tuple[str, ...], str, Mapping[str, Any]]]:
    """The dicts in which an nn.Module or an ExportedProgram has tensors.

    Each with the path of its submodule, and the attribute that it is there.
    """
    import torch

    if isinstance(owner, torch.nn.Module):
        for path, module in owner.named_modules(remove_duplicate=False):
            parts = tuple(path.split(".")) if path else ()
            for table in _OF_MODULES:
                yield parts, table, getattr(module, table)
    else:
        for table in _OF_PROGRAMS:
            yield (), table, getattr(owner, table)


def after_optimizer_steps(call: Callable[..., None]) -> None:
    """Calls this after each step of any optimizer of torch's, with the optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(call)
