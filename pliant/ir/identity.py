"""Memoizes functions of an object by its identity, as long as the object lives.

For immutable objects that are expensive to compare and to hash, such as loop functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import ref

K = TypeVar("K")
V = TypeVar("V")


class PerObject(Generic[K, V]):
    """A function of an object that is called once for each."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._kept: dict[int, tuple[ref[K], V]] = {}

    def __call__(self, key: K) -> V:
        number = id(key)
        found = self._kept.get(number)
        if found is None:
            forget = ref(key, lambda _: self._kept.pop(number, None))
            found = self._kept[number] = forget, self._make(key)
        return found[1]
