"""Buffers of a module that a compiled model changes.

They are the module's own tensors, read and written where they are: a call looks them up
in the module, and torch's count of their changes is increased. docs/weights.md states
the rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.errors import WeightError
from pliant.frontend.signature import Held, Signature
from pliant.frontend.torch_tensors import as_real, to_numpy, without_data
from pliant.model.buffers import BoundBuffers, Buffers, is_in_place
from pliant.model.weights import WeightPlace, check_type, found_at, places_of
from pliant.runtime.caller import Caller, Watch, watching_torch


@dataclass(frozen=True, slots=True)
class _Buffer:
    held: Held
    places: tuple[WeightPlace, ...]  # several if the module has it by several names

    def find(self, owner: Any) -> Any:
        """The tensor as it is now; WeightError if it does not fit any more."""
        first, *others = self.places
        tensor = found_at(first, owner)
        for place in others:
            if found_at(place, owner) is not tensor:
                raise WeightError(
                    f"'{first.name}' and '{place.name}' were one buffer when the model "
                    "was compiled, and are not any more: tie them again, or compile "
                    "the module as it is now",
                    name=place.name,
                )
        check_type(first, self.held.slot.type, as_real(tensor))
        return tensor


class ModuleBuffers(Buffers):
    """Buffers of a module.

    The module is held by a weak reference: once it is gone, the model goes on with the
    tensors that it used last.
    """

    def __init__(self, signatures: Sequence[Signature], owner: Any) -> None:
        super().__init__()
        self._owner: Any = weakref.ref(owner, _when_gone(self))
        self._attached: weakref.WeakKeyDictionary[Caller, Any] = (
            weakref.WeakKeyDictionary()
        )
        kept: dict[str, tuple[Any, list[WeightPlace]]] = {}
        ids: dict[int, list[WeightPlace]] = {}
        for place, tensor in places_of(owner):
            ids.setdefault(id(tensor), []).append(place)
            kept[place.name] = tensor, ids[id(tensor)]
        found = {held.name: held for s in signatures for held in s.held}
        self._buffers = {
            name: _Buffer(held, tuple(kept[name][1])) for name, held in found.items()
        }
        self._tensors = {name: kept[name][0] for name in found}

    def without_data(self, held: Held) -> Any:
        return without_data(held.slot.type)

    def arrays(self) -> dict[str, np.ndarray]:
        """The buffers as they are now, as arrays that share their memory."""
        names = list(self._buffers)
        found = self.tensors([self._buffers[name].held for name in names])
        pairs = zip(names, found, strict=True)
        return {name: to_numpy(as_real(tensor)) for name, tensor in pairs}

    def attach(
        self,
        model: Caller,
        runtime: Caller,
        rebuild: Callable[[Any], Any] | None,
        bound: BoundBuffers,
    ) -> None:
        """Lets C code run the calls of a model, as long as the buffers stay in place.

        For the buffers of a call that has run, while the lock is held.
        """
        known = self._attached.get(model)
        if known is not None and not known.changed():
            return
        framework = watching_torch()
        if not framework or not _stay(bound):
            return
        tables: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        owner = self._owner()
        places = () if owner is None else self.places
        for place in places:
            for found, key, value in place.entries(owner):
                tables.setdefault(id(found), (found, {}))[1][key] = value
        watch = Watch(framework, list(tables.values()), [])
        self._attached[model] = watch
        written = bytes(k in bound.written for k in range(len(bound.tensors)))
        turns = self.lock.acquire, self.lock.release
        model._delegate(runtime, rebuild, (*turns, watch, bound.tensors, written))

    def detach(self) -> None:
        """Later calls look for the buffers again."""
        for model in list(self._attached):
            model._delegate(None, None)
        self._attached.clear()

    @property
    def places(self) -> frozenset[WeightPlace]:
        return frozenset(p for b in self._buffers.values() for p in b.places)

    @property
    def is_following(self) -> bool:
        return self._owner() is not None

    def tensors(self, held: Sequence[Held]) -> list[Any]:
        """The tensors of a program's buffers as they are now."""
        owner = self._owner()
        if owner is not None:
            for h in held:
                self._tensors[h.name] = self._buffers[h.name].find(owner)
        return [self._tensors[h.name] for h in held]

    def freeze(self) -> None:
        """Goes on with copies of the buffers: the module's stay as they are."""
        if self.is_following:
            names = list(self._buffers.values())
            found = self.tensors([buffer.held for buffer in names])
            for buffer, tensor in zip(names, found, strict=True):
                self._tensors[buffer.held.name] = tensor.detach().clone()
            self._owner = lambda: None
            self.detach()


def _when_gone(buffers: ModuleBuffers) -> Callable[[Any], None]:
    """Parts of the module that a watch has in sight are let go."""
    this = weakref.ref(buffers)

    def gone(_: Any) -> None:
        found = this()
        if found is not None:
            found.detach()

    return gone


def _stay(bound: BoundBuffers) -> bool:
    """Whether compiled code reads and writes the module's tensors themselves."""
    return all(
        is_in_place(tensor) and not tensor.is_complex() and not tensor.is_inference()
        for tensor in bound.tensors
    )
