"""Keys and values of the rows of a batch, each row with a length of its own.

    caches = RowCaches(shape, places=4, capacity=256)
    caches.rows(0, 3)            # views of the first three places, for a call
    caches.lengths[:3]           # how many tokens each of them has
    caches.move(3, 1)            # the row of place 3 is that of place 1 from now on
    caches.resize(8, 512)        # room for more rows, or longer ones

A row is a place of every array, so the first rows of a batch, and any single one, are
views. A row that ends leaves nothing behind: what it wrote is zero again, so that no
number of a request, NaN among them, can reach another one.
"""

from __future__ import annotations

import numpy as np

from pliant.errors import OptionError
from pliant.language.gguf_file import Shape


def token_bytes(shape: Shape) -> int:
    """What the keys and values of one token take, in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_size * 4


class RowCaches:
    """See the file's head."""

    def __init__(self, shape: Shape, places: int, capacity: int) -> None:
        self.shape = shape
        self._memory = [
            np.zeros((places, shape.kv_heads, capacity, shape.head_size), np.float32)
            for _ in range(2 * shape.layers)
        ]
        self.lengths = np.zeros(places, np.int64)

    @property
    def places(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """The tokens that a row has room for."""
        return self._memory[0].shape[2]

    @property
    def nbytes(self) -> int:
        return self.places * self.capacity * token_bytes(self.shape)

    @property
    def array_bytes(self) -> int:
        """Of one array, which `resize` holds beside its new memory."""
        return self._memory[0].nbytes

    def bytes_to_resize(self, places: int, capacity: int) -> int:
        """The most that `resize` holds: all of one memory, an array of the other."""
        new = places * capacity * token_bytes(self.shape)
        arrays = 2 * self.shape.layers
        return max(new + self.nbytes // arrays, self.nbytes + new // arrays)

    def rows(self, first: int, count: int) -> list[np.ndarray]:
        """The memory of some places: keys and values of each layer."""
        return [memory[first : first + count] for memory in self._memory]

    def clear(self, place: int) -> None:
        """The row ends."""
        length = int(self.lengths[place])
        for memory in self._memory:
            memory[place, :, :length] = 0
        self.lengths[place] = 0

    def move(self, source: int, target: int) -> None:
        """A row goes to a place whose own row has ended."""
        if source == target:
            return
        length = int(self.lengths[source])
        for memory in self._memory:
            memory[target, :, :length] = memory[source, :, :length]
        self.lengths[target] = length
        self.clear(source)

    def resize(self, places: int, capacity: int) -> None:
        """Other memory with this room, an array after the other."""
        kept = min(places, self.places)
        longest = int(self.lengths.max(initial=0))
        if self.lengths[kept:].any() or longest > capacity:
            raise OptionError(
                f"rows of {longest} tokens do not fit into {places} places with room "
                f"for {capacity} each"
            )
        for k, old in enumerate(self._memory):
            _, heads, _, size = old.shape
            new = np.zeros((places, heads, capacity, size), np.float32)
            new[:kept, :, :longest] = old[:kept, :, :longest]
            self._memory[k] = new
            del old
        lengths = np.zeros(places, np.int64)
        lengths[:kept] = self.lengths[:kept]
        self.lengths = lengths
