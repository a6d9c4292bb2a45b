"""Where the time of a call goes, kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pliant.image.parts import PartImage


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel call of one call of the model."""

    name: str  # of the kernel function
    loc: str  # where the model asks for it
    seconds: float
    flops: int  # two per multiply-add; 0 where there is no contraction
    bytes: int  # read and written at least once
    started: float = 0.0  # seconds of the clock that the times are taken by


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All calls of one kernel function."""

    name: str
    calls: int
    seconds: float
    flops: int
    bytes: int


def kernel_times(
    part: PartImage, stamps: Sequence[int], dims: Mapping[str, int]
) -> list[KernelTime]:
    """The records of one call; `stamps` are the clock before and after each kernel.

    A step of a version that was not used has no times.
    """
    times: list[KernelTime] = []
    # The work of chunks is that of the whole, and little more if their rows are many.
    whole = (part.table[knob.extent_index] for knob in part.spec.knobs)
    rows = {
        name: max(extent.evaluate(dims), 1)
        for name, extent in zip(part.knobs, whole, strict=True)
    }
    dims = {**dims, **rows}
    for number, (step, text) in enumerate(
        zip(part.spec.steps, part.steps, strict=True)
    ):
        if not stamps[2 * number]:
            continue
        started, ended = stamps[2 * number], stamps[2 * number + 1]
        times.append(
            KernelTime(
                text.kernel,
                text.loc,
                (ended - started) * 1e-9,
                part.table[step.flops_index].evaluate(dims),
                part.table[step.bytes_index].evaluate(dims),
                started * 1e-9,
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
