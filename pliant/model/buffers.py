"""Buffers that a compiled model changes: caches, counters, statistics.

A call looks them up, and compiled code writes over them where they are, after all that
may fail (memory/update.py). They are a module's own tensors (module_buffers.py), or
arrays of the model, if it was loaded from a file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np

from pliant.errors import DTypeError
from pliant.frontend.signature import Held, Signature
from pliant.frontend.torch_tensors import as_real
from pliant.runtime.caller import Caller


class Buffers:
    """The buffers that the programs of one model read and write, by their names.

    Calls of the model take turns (`lock`).
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.bound: BoundBuffers | None = None  # of the call that is running

    def tensors(self, held: Sequence[Held]) -> list[Any]:
        """The tensors or arrays of a program's buffers as they are now."""
        raise NotImplementedError

    def without_data(self, held: Held) -> Any:
        """Something of the buffer's shape, to plan with."""
        raise NotImplementedError

    def extend(self, signature: Signature) -> Signature:
        """The signature of a program whose buffers are arguments, which it finds."""
        slots = tuple(held.slot for held in signature.held)
        shapes = [self.without_data(held) for held in signature.held]

        def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
            given = signature.flatten_arguments(args, kwargs)
            if self.bound is None:  # a plan is asked for, not a call
                return [*given, *shapes]
            return [*given, *_alike(given, self.bound.given)]

        return replace(
            signature,
            arguments=(*signature.arguments, *slots),
            flatten_arguments=flatten,
            positional=False,
            direct_but_held=signature.is_direct,
        )

    def bind(self, signature: Signature) -> BoundBuffers:
        """The buffers of a program for a call; the lock is held meanwhile."""
        tensors = self.tensors(signature.held)
        names = {name for name, _ in signature.stores}
        written = (k for k, h in enumerate(signature.held) if h.slot.name in names)
        given = tuple(map(_writable, tensors))
        return BoundBuffers(tuple(tensors), given, tuple(written))

    def attach(
        self,
        model: Caller,
        runtime: Caller,
        rebuild: Callable[[Any], Any] | None,
        bound: BoundBuffers,
    ) -> None:
        """Lets C code run the calls of a model, if it can find the buffers."""

    @property
    def is_following(self) -> bool:
        return False

    def freeze(self) -> None:
        """Goes on with copies of buffers that are somebody else's."""


class StoredBuffers(Buffers):
    """Buffers that are the model's own: it was loaded from a file."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.arrays = dict(arrays)

    def tensors(self, held: Sequence[Held]) -> list[Any]:
        return [self.arrays[h.name] for h in held]

    def without_data(self, held: Held) -> Any:
        return self.arrays[held.name]


@dataclass(frozen=True, slots=True)
class BoundBuffers:
    """The buffers of one call: the module's tensors, and what compiled code is given.

    What it cannot write where it is, such as a transposed tensor, is a copy here.
    """

    tensors: tuple[Any, ...]
    given: tuple[Any, ...]
    written: tuple[int, ...]  # the numbers of those that the call changes

    def check(self, signature: Signature, flat: Sequence[Any]) -> None:
        """No argument may share memory with a buffer that is written."""
        blocks = [memory_block(value) for value in flat]
        for number in self.written:
            where = memory_block(self.tensors[number])
            for slot in (k for k, block in enumerate(blocks) if overlap(block, where)):
                name = signature.slots[slot].name
                raise DTypeError(
                    f"input '{name}' shares memory with the buffer "
                    f"'{signature.held[number].name}', which the model writes: pass a "
                    "copy of it",
                    input=name,
                    expected="memory of its own",
                    got=f"that of '{signature.held[number].name}'",
                )

    def commit(self) -> None:
        """After the call: copies are written back, and torch is told."""
        for k in self.written:
            commit(self.tensors[k], self.given[k])


def commit(target: Any, given: Any) -> None:
    """Tells of a tensor or an array that compiled code has written; copies it back.

    What the code was given is its memory, or a copy.
    """
    if isinstance(target, np.ndarray):
        if given is not target:
            target[...] = given
        return
    import torch
    from torch.autograd.graph import increment_version

    kept = target.is_inference()
    if not is_in_place(target):
        new = torch.view_as_complex(given) if target.is_complex() else given
        with torch.no_grad(), torch.inference_mode(kept):
            target.detach().copy_(new)
    elif kept:
        from pliant.model.weights import note_changed

        note_changed([target])
    else:
        increment_version([target])


def writable(value: Any) -> Any:
    """An argument that compiled code can write, or a copy of it."""
    if isinstance(value, np.ndarray):
        plain = value.flags.c_contiguous and value.flags.aligned
        return value if plain and value.flags.writeable else value.copy()
    if not hasattr(value, "is_contiguous") or is_in_place(value):
        return value
    return _writable(value)


def is_in_place(tensor: Any) -> bool:
    """Whether compiled code can write a tensor where it is."""
    return bool(
        tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        and tensor.data_ptr() % max(tensor.element_size(), 1) == 0
    )


def _writable(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return tensor
    if is_in_place(tensor):
        return as_real(tensor.detach())
    return as_real(tensor.detach().resolve_conj().resolve_neg().clone().contiguous())


def _alike(given: Sequence[Any], buffers: Sequence[Any]) -> list[Any]:
    """Buffers as what arguments are: arrays, or torch's tensors of the same memory."""
    arrays = [isinstance(value, np.ndarray | np.generic) for value in given]
    if arrays and all(arrays):
        return [_as_array(buffer) for buffer in buffers]
    torch: Any = sys.modules.get("torch")
    if torch is None or not any(isinstance(x, torch.Tensor) for x in given):
        return list(buffers)
    return [
        torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
        for buffer in buffers
    ]


def _as_array(buffer: Any) -> Any:
    """The same memory as a NumPy array; bf16 stays torch's."""
    if isinstance(buffer, np.ndarray) or str(buffer.dtype) == "torch.bfloat16":
        return buffer
    return buffer.numpy()


def memory_block(value: Any) -> tuple[int, int] | None:
    """The memory that a tensor is a part of, from and to; None if there is none."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        first, last = np.lib.array_utils.byte_bounds(value)
        return (first, last) if value.size else None
    if not hasattr(value, "untyped_storage"):
        return None
    storage = value.untyped_storage()
    first = storage.data_ptr()
    return (first, first + storage.nbytes()) if first else None


def overlap(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return (
        one is not None
        and other is not None
        and one[0] < other[1]
        and other[0] < one[1]
    )


def strides_of(value: Any) -> list[int]:
    """The strides of an array or a tensor, in elements."""
    if isinstance(value, np.ndarray):
        return [by // value.itemsize for by in value.strides]
    return list(value.stride())


def may_repeat(value: Any) -> bool:
    """Whether two elements may be one place in memory: strides that are not beyond all
    that the smaller ones reach."""
    if not hasattr(value, "shape") or 0 in value.shape:
        return False
    axes = zip(strides_of(value), value.shape, strict=True)
    reach = 0
    for stride, size in sorted((abs(by), n) for by, n in axes if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
