"""Tensors that grow in place from call to call: caches of keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from pliant.errors import OptionError


class Growing:
    """Rows of a tensor along one axis, in memory that has room for more.

        cache = pliant.Growing(torch.zeros(1, 8, 0, 64), axis=2, capacity=4096)
        m = pliant.compile(net, (x, cache), shapes)    # returns torch.cat([cache, new])
        y, cache = m(x, cache)

    A model that returns the concat of an input and new rows writes only the new rows.
    What it returns in that place is the same object, which has them from then on.
    `tensor` is a view of the rows that are there.
    """

    def __init__(self, rows: Any, axis: int, capacity: int | None = None) -> None:
        rank = len(rows.shape)
        if not -rank <= axis < rank:
            raise OptionError(f"axis {axis} is outside rank {rank}")
        self.axis = axis % rank
        self._length = int(rows.shape[self.axis])
        self._memory: Any = _memory(rows, self.axis, self._length, capacity)

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        """Fewer rows than before: the others are forgotten, and their room reused."""
        if not 0 <= length <= self.capacity:
            raise OptionError(f"a length is from 0 to {self.capacity}, not {length}")
        self._length = length

    @property
    def capacity(self) -> int:
        return int(self._memory.shape[self.axis])

    @property
    def nbytes(self) -> int:
        """Of all the memory, with the room for more rows."""
        return int(self._memory.nbytes)

    @property
    def memory(self) -> Any:
        """The tensor or array with all rows that there is room for."""
        return self._memory

    @property
    def tensor(self) -> Any:
        """The rows that are there: a view, which later calls do not change."""
        return self._memory[_first(self.axis, self._length)]

    def reserve(self, capacity: int) -> None:
        """Makes room for that many rows, in new memory if there is less now."""
        if capacity > self.capacity:
            self._memory = _memory(self.tensor, self.axis, self._length, capacity)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.tensor.shape))
        return f"Growing({shape}, axis={self.axis}, capacity={self.capacity})"


def _first(axis: int, length: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(0, length))


def _memory(rows: Any, axis: int, length: int, capacity: int | None) -> Any:
    """Row-major memory with room, and these rows at its start."""
    room = length if capacity is None else capacity
    if room < length:
        raise OptionError(f"{length} rows do not fit into a capacity of {room}")
    shape = [*rows.shape]
    shape[axis] = room
    if isinstance(rows, np.ndarray):
        memory: Any = np.zeros(shape, rows.dtype)
    else:
        rows = rows.detach()
        memory = rows.new_zeros(shape)
    memory[_first(axis, length)] = rows
    return memory
