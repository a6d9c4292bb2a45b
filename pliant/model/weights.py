"""A compiled model's weights: a copy of its own, updated when the module's change.

Compiled code reads constants that were packed, folded or copied from a module's
parameters and buffers. Each constant's `Origin` says how to compute it from those. When
a call finds that the module's tensors have changed, the constants are computed again
and replace the old ones; docs/weights.md states the rule.

    Places     where an owner keeps tensors: entries of a module's dicts
    _Leaf      a tensor that constants are made of, and the places that hold it
    _Following what is watched, and the leaves, as of one moment
    FollowingWeights  the arrays that calls read now

The module is held by a weak reference, and its tensors only as long as it lives.
Besides the tensors that constants are made of, all others of the same submodules are
watched: some functions of torch write a tensor without increasing its version (the
statistics of a batch norm), but increase that of another (its number of batches).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from pliant.errors import WeightError
from pliant.frontend.torch_tensors import (
    after_optimizer_steps,
    as_real,
    dtype_of,
    is_dense,
    is_tensor,
    tensor_tables,
    to_numpy,
)
from pliant.ir.graph import Constant, Origin, ordered_origins
from pliant.ir.types import TensorType
from pliant.machine import pages
from pliant.model.arrays import Weights
from pliant.runtime.binding import RuntimeModel
from pliant.runtime.caller import Watch, watching_torch

Entry = tuple[dict[str, Any], str, Any]  # a dict, a key, and what is there


# ---- where tensors are kept


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """An entry of one of a module's dicts, or of an exported program's."""

    path: tuple[str, ...]  # of submodules
    table: str  # the attribute that is the dict
    key: str

    @property
    def name(self) -> str:
        return ".".join((*self.path, self.key))

    def entries(self, owner: Any) -> Iterator[Entry]:
        """The entries on the path from the owner to the tensor; its own is last."""
        for name in self.path:
            modules = owner._modules
            owner = modules.get(name)
            if owner is None:
                return
            yield modules, name, owner
        table = getattr(owner, self.table)
        if self.key in table:
            yield table, self.key, table[self.key]

    def tensor(self, owner: Any) -> Any:
        """What is there now; None if nothing is."""
        *way, last = (None, *self.entries(owner))
        return last[2] if last is not None and len(way) > len(self.path) else None


def places_of(owner: Any) -> Iterator[tuple[WeightPlace, Any]]:
    """Every tensor that an nn.Module or an ExportedProgram has by a name."""
    for path, table, found in tensor_tables(owner):
        for key, value in found.items():
            if is_tensor(value):
                yield WeightPlace(path, table, key), value


def _memory(tensor: Any) -> tuple[object, ...] | None:
    """A key that identifies a tensor's memory; None if it has none."""
    try:
        where = tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return None
    layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (where, *layout) if where else None


# ---- what is followed


@dataclass(frozen=True, slots=True)
class _Leaf:
    origin: Origin
    type: TensorType
    places: tuple[WeightPlace, ...]  # several if the module ties them


def _leaves(owner: Any, given: Sequence[Constant]) -> list[_Leaf]:
    """Of the constants given, those that are tensors of the owner's."""
    places: dict[object, list[WeightPlace]] = {}
    for place, tensor in places_of(owner):
        where = _memory(tensor)
        if where is not None:
            places.setdefault(where, []).append(place)
    found: list[_Leaf] = []
    for constant in given:
        where = None if constant.keep is None else _memory(constant.keep)
        if where in places:
            kept = tuple(places[where])
            found.append(_Leaf(constant.origin, constant.type, kept))
    return found


class _Following:
    """The leaves' tensors, and a watch on them that was set before they are read."""

    def __init__(
        self, owner: Any, leaves: Sequence[_Leaf], apart: frozenset[WeightPlace]
    ) -> None:
        """What is `apart` is not watched: calls themselves change it."""
        self.leaves = tuple(leaves)
        self.tensors = [[found_at(p, owner) for p in leaf.places] for leaf in leaves]
        # By identity: two dicts that are equal are still two.
        tables: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        beside: dict[tuple[tuple[str, ...], str], None] = {}
        for leaf in leaves:
            for place in leaf.places:
                for found, key, value in place.entries(owner):
                    tables.setdefault(id(found), (found, {}))[1][key] = value
                if place.table != "__dict__":
                    beside.update(dict.fromkeys((place.path, t) for t in _COUNTED))
        for path, table in beside:
            for found, key, value in _tensors_of(owner, path, table):
                if WeightPlace(path, table, key) in apart:
                    continue
                tables.setdefault(id(found), (found, {}))[1].setdefault(key, value)
        listed = list(tables.values())
        kept = (value for _, wanted in listed for value in wanted.values())
        tensors = {id(value): value for value in kept if is_tensor(value)}
        self.ids = frozenset(tensors)
        # Memory that is held is not given to another tensor: an address that has not
        # changed says that the memory has not.
        self.held = [value.detach() for value in tensors.values()]
        framework, all_of_them = watching_torch(), list(tensors.values())
        self.watch: Any = (
            Watch(framework, listed, all_of_them)
            if framework
            else _PlainWatch(listed, all_of_them)
        )

    def read(self) -> dict[Origin, np.ndarray]:
        """The leaves' data, checked; they may share memory with the tensors."""
        return {
            leaf.origin: _data(leaf, tensors)
            for leaf, tensors in zip(self.leaves, self.tensors, strict=True)
        }


_COUNTED = ("_parameters", "_buffers")


def _tensors_of(owner: Any, path: Sequence[str], table: str) -> Iterator[Entry]:
    for name in path:
        owner = owner._modules[name]
    found = getattr(owner, table, None) or {}
    yield from ((found, k, value) for k, value in found.items() if is_tensor(value))


class _PlainWatch:
    """`Watch` in Python, for a torch whose tensors C code cannot read."""

    def __init__(
        self,
        tables: Sequence[tuple[dict[str, Any], dict[str, Any]]],
        tensors: Sequence[Any],
    ) -> None:
        self.entries = [(d, k, v) for d, wanted in tables for k, v in wanted.items()]
        self.stamps = [(tensor, _stamp(tensor)) for tensor in tensors]
        self.marked = False

    def changed(self) -> bool:
        return (
            self.marked
            or any(found.get(key) is not value for found, key, value in self.entries)
            or any(_stamp(tensor) != stamp for tensor, stamp in self.stamps)
        )

    def mark(self) -> None:
        self.marked = True


def _stamp(tensor: Any) -> object:
    return _memory(tensor), None if tensor.is_inference() else tensor._version


# ---- tensors as data


def found_at(place: WeightPlace, owner: Any) -> Any:
    tensor = place.tensor(owner)
    if tensor is None:
        raise WeightError(
            f"the module has no '{place.name}' any more, which this model was compiled "
            "with: compile the module as it is now",
            name=place.name,
        )
    return tensor


def _data(leaf: _Leaf, tensors: Sequence[Any]) -> np.ndarray:
    tensors = [as_real(tensor) for tensor in tensors]
    for place, tensor in zip(leaf.places, tensors, strict=True):
        check_type(place, leaf.type, tensor)
    first, *others = tensors
    for place, tensor in zip(leaf.places[1:], others, strict=True):
        if _memory(tensor) != _memory(first) and not tensor.equal(first):
            raise WeightError(
                f"'{leaf.places[0].name}' and '{place.name}' were one tensor when the "
                "model was compiled, and now have different values: tie them again, "
                "or compile the module as it is now",
                name=place.name,
            )
    return to_numpy(first)


def check_type(place: WeightPlace, wanted: TensorType, tensor: Any) -> None:
    dtype = dtype_of(tensor.dtype)
    shape = tuple(tensor.shape)
    expected = tuple(d.value for d in wanted.shape)
    dense = is_dense(tensor)
    if dtype is wanted.dtype and shape == expected and dense:
        return
    where = "" if dense else f" ({tensor.layout}, {tensor.device})"
    got = f"{dtype or tensor.dtype}{list(shape)}{where}"
    raise WeightError(
        f"weight '{place.name}' was {wanted} when the model was compiled, and is {got} "
        "now: change it back, or compile the module as it is now",
        name=place.name,
        expected=str(wanted),
        got=got,
    )


# ---- the weights


class FollowingWeights(Weights):
    """Weights that follow the tensors of their owner, as long as it lives."""

    def __init__(
        self,
        constants: Sequence[Constant],
        given: Mapping[str, Constant],
        owner: Any,
        apart: frozenset[WeightPlace] = frozenset(),
    ) -> None:
        """Tensors that are `apart` are read where they are: buffers that calls change
        (model/buffers.py), parameters that a step trains."""
        self.apart = apart
        self._lock = Lock()
        self._origins = tuple(c.origin for c in constants)
        self._order = ordered_origins(self._origins)
        used = [c for c in given.values() if c.origin in set(self._order)]
        self._owner: Callable[[], Any] = lambda: None
        self._following: _Following | None = None
        self._fixed: dict[Origin, np.ndarray] = {}
        leaves = [] if owner is None else _leaves(owner, used)
        if leaves:
            self._following = _Following(owner, leaves, apart)
            self._owner = weakref.ref(owner, _when_gone(self))
            self._varying = self._depending({leaf.origin for leaf in leaves})
            self._fixed = self._beside(used)
            _note_fused_steps(self)
        super().__init__([_own(c) for c in constants])

    def serve(
        self,
        runtime: RuntimeModel,
        blocks: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]],
    ) -> None:
        super().serve(runtime, blocks)
        if self._following is not None:
            runtime.follow(self._following.watch, _renewing(self))

    def refresh(self, *, always: bool = False) -> None:
        """Makes the arrays again if the owner's tensors have changed, or always."""
        with self._lock:
            # Held to the end: `_when_gone` comes after all that is set here.
            owner, following = self._owner(), self._following
            if owner is None or following is None:
                return
            if not always and not following.watch.changed():
                return
            fresh = _Following(owner, following.leaves, self.apart)
            self.arrays = self._made(fresh.read())
            self._runtime.set_weights(self._blocks(self.arrays))
            self._following = fresh
            self._runtime.follow(fresh.watch, _renewing(self))

    @property
    def owner(self) -> Any:
        """Whose tensors are followed; None if there is none, or it is gone."""
        return self._owner()

    @property
    def is_following(self) -> bool:
        return self._following is not None

    def stop(self) -> None:
        """Keeps the arrays as they are, and frees all that they were computed from."""
        self._following, self._owner = None, lambda: None
        self._fixed = {}
        runtime: RuntimeModel | None = getattr(self, "_runtime", None)
        if runtime is not None:
            runtime.follow(None, None)

    def note(self, tensors: Sequence[Any]) -> None:
        """These tensors were changed without being counted."""
        following = self._following
        if following is not None and any(id(t) in following.ids for t in tensors):
            following.watch.mark()

    # ---- making

    def _depending(self, leaves: set[Origin]) -> frozenset[Origin]:
        varying = set(leaves)
        for origin in self._order:
            if any(source in varying for source in origin.sources):
                varying.add(origin)
        return frozenset(varying)

    def _beside(self, given: Sequence[Constant]) -> dict[Origin, np.ndarray]:
        """Data of constants that do not change, but are made into some that do."""
        wanted = {
            source
            for origin in self._order
            if origin in self._varying
            for source in origin.sources
            if source not in self._varying
        }
        needed = set(ordered_origins(tuple(wanted)))
        return {c.origin: _own(c) for c in given if c.origin in needed}

    def _made(self, data: dict[Origin, np.ndarray]) -> list[np.ndarray]:
        leaves = set(data)
        known = {**self._fixed, **data}
        with pages.copying():
            for origin in self._order:
                missing = any(source not in known for source in origin.sources)
                if origin.make is None or missing:
                    continue  # given, or made of what does not change
                known[origin] = origin.make(*(known[s] for s in origin.sources))
            return [
                old
                if origin not in self._varying
                else pages.copied(known[origin])
                if origin in leaves
                else known[origin]
                for origin, old in zip(self._origins, self.arrays, strict=True)
            ]


def _own(constant: Constant) -> np.ndarray:
    """The data in memory that nobody else writes."""
    return constant.data if constant.keep is None else pages.copied(constant.data)


def _renewing(weights: FollowingWeights) -> Callable[[], None]:
    """`refresh`, without keeping the weights alive: they keep the runtime."""
    known = weakref.ref(weights)

    def renew() -> None:
        found = known()
        if found is not None:
            found.refresh()

    return renew


def _when_gone(weights: FollowingWeights) -> Callable[[Any], None]:
    known = weakref.ref(weights)

    def gone(_: Any) -> None:
        found = known()
        if found is not None:
            found.stop()

    return gone


# ---- optimizers that do not count what they write

_watching: weakref.WeakSet[FollowingWeights] = weakref.WeakSet()
_hooked = False


def _note_fused_steps(weights: FollowingWeights) -> None:
    """Hooks torch's fused optimizers, which write parameters without counting it."""
    global _hooked
    _watching.add(weights)
    if not _hooked:
        after_optimizer_steps(_after_step)
        _hooked = True


def _after_step(optimizer: Any, *_: Any) -> None:
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    if groups:
        note_changed([p for group in groups for p in group["params"]])


def note_changed(tensors: Sequence[Any]) -> None:
    """Tells all models that these tensors were changed without being counted."""
    for weights in list(_watching):
        weights.note(tensors)
