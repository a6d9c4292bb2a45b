"""Register and cache tiles, derived from the target.

A micro-kernel holds MR x NR results in registers. With V vectors per row of the tile,
each step of K loads V vectors of B, broadcasts MR elements of A and does MR*V FMAs:

    registers: MR*V accumulators + V of B + 1 broadcast <= registers
    latency:   MR*V >= latency * ports (4 * 2 = 8 on the cores we know)
    loads:     (MR + V) per MR*V FMAs, two loads and two FMAs a cycle

V = 2 keeps the loads well below the FMAs and leaves the tallest tile: 6 x 16 floats
with 16 registers of 8 (12 + 2 + 1 = 15), 14 x 32 with 32 registers of 16
(28 + 2 + 1 = 31). Heights 1..MR are all generated, so rows are cut evenly: 7 rows are
one tile of 7, 15 are 8 + 7, and no row is computed that is not wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.ir.types import DType
from pliant.target import Target

VECTORS = 2


@dataclass(frozen=True, slots=True)
class Tile:
    MR: int
    NR: int
    rows: int  # rows of a cache block: their part of A stays in L2 over all panels


def gemm_tile(dtype: DType, target: Target) -> Tile:
    nr = VECTORS * target.vector_bytes // dtype.bytes
    mr = (target.registers - VECTORS - 1) // VECTORS
    return Tile(mr, nr, 24 * mr)
