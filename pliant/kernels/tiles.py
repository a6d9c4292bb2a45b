"""Register and cache tiles, derived from the target.

A micro-kernel holds MR x NR results in registers. With V vectors per row of the tile,
each step of K loads V vectors of B, broadcasts MR elements of A and does MR*V FMAs:

    registers: MR*V accumulators + V of B + 1 broadcast <= registers
    latency:   MR*V >= latency * ports (4 * 2 = 8 on the cores we know)
    loads:     (MR + V) per MR*V FMAs, two loads and two FMAs a cycle

V = 2 keeps the loads well below the FMAs and leaves the tallest tile: 6 x 16 floats
with 16 registers of 8 (12 + 2 + 1 = 15), 14 x 32 with 32 registers of 16
(28 + 2 + 1 = 31). Heights 1..MR are all generated, so rows are cut evenly: 7 rows are
one tile of 7, 15 are 8 + 7, and no row is computed that is not wanted. Half of the
heights exist with one vector per row, for the last columns. A tile with fewer than 8
accumulators has several of each, so that the latency of an addition does not bind.

Caches: either the rows of a block stay in L2 over all panels of B (half of L2), or
a group of panels stays there over all rows: a quarter of it, since what is read next
comes in meanwhile. Partial sums of passes that wait for an epilogue take a fifth.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.ir.types import DType
from pliant.machine.target import Target

VECTORS = 2
LATENCY = 8  # FMAs in flight before the first is done: 4 cycles, 2 ports
DEEPEST = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    MR: int
    NR: int
    lanes: int  # elements of a vector; NR is VECTORS of them
    bytes: int  # of an element
    depth: int  # steps of K in one pass
    deep_rows: int  # rows of a block that are copied, or whose partial sums are kept
    cells: int  # rows of NR elements that packed panels have room for
    near: int  # bytes of a block's rows that stay in cache over all panels

    @property
    def low(self) -> int:
        """The height of tiles that write a few rows along their whole length."""
        return max(self.MR // 3, 1)

    @property
    def keeping(self) -> int:
        """The least height of tiles that pack a panel while they read it."""
        return 3 * self.MR // 4

    @property
    def tall(self) -> range:
        """Heights of the tiles that many rows are cut into."""
        return range(max(self.MR - 1, 1), self.MR + 1)

    @property
    def few(self) -> int:
        """Rows that leave registers for several panels."""
        return self.MR // 2

    @property
    def broad(self) -> int:
        """The height of tiles with half as many columns more as a panel has."""
        return max(2 * self.MR // 3, 1)

    def tallest(self, vectors: int) -> int:
        """The most rows of a tile so wide: of one vector, two lower ones do as well."""
        return self.MR if vectors == VECTORS else max(self.MR // 2, 1)

    def chains(self, height: int, vectors: int) -> int:
        """How many accumulators each result of a small tile has."""
        count = 1
        while count < 4 and height * vectors * count < LATENCY:
            count *= 2
        return count


def gemm_tile(dtype: DType, target: Target) -> Tile:
    lanes = target.vector_bytes // dtype.bytes
    mr = (target.registers - VECTORS - 1) // VECTORS
    deep_rows = 12 * mr
    fits = target.l2 // 3 // (deep_rows * dtype.bytes)
    depth = max(256, min(DEEPEST, fits // lanes * lanes))
    nr, near = VECTORS * lanes, target.l2 // 2
    # However small the cache, there is room for a panel of a whole pass.
    cells = max(depth, near // 2 // (nr * dtype.bytes))
    return Tile(mr, nr, lanes, dtype.bytes, depth, deep_rows, cells, near)
