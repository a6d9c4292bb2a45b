"""Where the time of a call goes, kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pliant.program import Program


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel call of one call of the model."""

    name: str  # of the kernel function
    loc: str  # where the model asks for it
    seconds: float
    flops: int  # two per multiply-add; 0 where there is no contraction
    bytes: int  # read and written at least once


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All calls of one kernel function."""

    name: str
    calls: int
    seconds: float
    flops: int
    bytes: int


def kernel_times(
    program: Program, stamps: Sequence[int], dims: Mapping[str, int]
) -> list[KernelTime]:
    """The records of one call; `stamps` are the clock before and after each kernel.

    A step of a version that was not used has no times.
    """
    times: list[KernelTime] = []
    # The work of chunks is that of the whole, and little more if their rows are many.
    whole = {name: knob.extent for name, knob in program.lowered.knobs.items()}
    rows = {name: max(extent.evaluate(dims), 1) for name, extent in whole.items()}
    dims = {**dims, **rows}
    for number, step in enumerate(program.footprint.steps.steps):
        if not stamps[2 * number]:
            continue
        started, ended = stamps[2 * number], stamps[2 * number + 1]
        times.append(
            KernelTime(
                step.call.str_attr("callee"),
                step.call.loc,
                (ended - started) * 1e-9,
                step.work.flops.evaluate(dims),
                step.work.bytes.evaluate(dims),
            )
        )
    return times


def totals(times: Sequence[KernelTime]) -> list[KernelTotal]:
    """By kernel function, the one that takes longest first."""
    found: dict[str, KernelTotal] = {}
    for time in times:
        before = found.get(time.name, KernelTotal(time.name, 0, 0.0, 0, 0))
        found[time.name] = KernelTotal(
            time.name,
            before.calls + 1,
            before.seconds + time.seconds,
            before.flops + time.flops,
            before.bytes + time.bytes,
        )
    return sorted(found.values(), key=lambda total: -total.seconds)
