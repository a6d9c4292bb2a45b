"""The rates that the planner weighs: arithmetic, memory, and the spill file."""

from __future__ import annotations

from dataclasses import dataclass

from pliant import knobs
from pliant.machine.rates import ASSUMED_BYTES, ASSUMED_FLOPS
from pliant.machine.target import Target
from pliant.measure.probes import known


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second."""

    flops: float  # floating-point operations of one thread
    bytes: float  # bytes read from memory
    spill_bytes: float  # bytes to or from the spill file


def rates(target: Target) -> Rates:
    """The rates of a target, as far as `pliant doctor` has measured them."""
    spill = knobs.SPILL_MBS.get() * 1e6
    found = known(target)
    if found is None:
        return Rates(ASSUMED_FLOPS, ASSUMED_BYTES, spill)
    return Rates(found.fma_gflops_1 * 1e9, found.read_gbs_all * 1e9, spill)
