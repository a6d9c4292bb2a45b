"""The memory that a call holds at every step, as the planner sees it, in a table.

A buffer holds memory from the first step that touches it to the last, in the order that
the plan chose. A buffer that shares another's memory adds nothing. A buffer that is
evicted between two uses (recomputed or spilled) holds nothing there. Results belong to
the caller and are allocated from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pliant.image.parts import BufferText, ResultText, StepText
from pliant.runtime.description import ALIGN, WRITES, Eviction, OrderSpec, StepSpec


@dataclass(frozen=True, slots=True)
class HeldValue:
    """A value in memory: its bytes in the arena, and what computes it where."""

    name: str
    type: str
    bytes: int
    kernel: str
    loc: str


@dataclass(frozen=True, slots=True)
class Moment:
    """A step: what runs, for which line of the model, and all bytes held meanwhile."""

    kernel: str
    loc: str
    live_bytes: int


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """A value from its first step to its last one, at its place in the arena.

    A value that is evicted in between has several. Results are above the arena.
    """

    value: HeldValue
    first: int
    last: int
    offset: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes over a call; what is live at the peak, the largest first."""

    moments: tuple[Moment, ...]
    peak_step: int
    held: tuple[HeldValue, ...]
    placed: tuple[PlacedValue, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are live at once, without gaps in the arena."""
        return max((m.live_bytes for m in self.moments), default=0)


def timeline(
    steps: Sequence[tuple[StepSpec, StepText]],
    buffers: Sequence[tuple[BufferText, int]],
    results: Sequence[tuple[ResultText, int]],
    order: OrderSpec,
    evictions: Sequence[Eviction] = (),
    offsets: Sequence[int] = (),
) -> Timeline:
    """Live bytes at each step of a call, from values with their exact bytes."""
    place = {step: k for k, step in enumerate(order.steps)}
    roots = order.roots or tuple(range(len(buffers)))
    live = [sum(size for _, size in results)] * len(place)
    holds: list[list[int]] = [[] for _ in place]
    pieces: list[tuple[int, int, int]] = []  # the buffer, its first and last step
    for number, (first, last) in _spans(steps, place, roots).items():
        gaps = [
            (place[e.after], place[e.before])
            for e in evictions
            if roots[e.buffer] == number
        ]
        ends = [first, *(end for gap in sorted(gaps) for end in gap), last]
        pieces += [(number, a, b) for a, b in zip(ends[::2], ends[1::2], strict=True)]
        for k in range(first, last + 1):
            if not any(after < k < before for after, before in gaps):
                live[k] += _rounded(buffers[number][1])
                holds[k].append(number)
    peak = max(range(len(live)), key=live.__getitem__, default=0)
    calls = [steps[step] for step in order.steps]
    moments = tuple(
        Moment(text.kernel, text.loc, n)
        for (_, text), n in zip(calls, live, strict=True)
    )
    held = [_held(calls, *buffers[n], n) for n in (holds[peak] if live else ())]
    held += [_held(calls, value, size, value.pinned) for value, size in results]
    held.sort(key=lambda item: -item.bytes)
    values = {n: _held(calls, *buffers[n], n) for n in {p[0] for p in pieces}}
    placed = _placed(pieces, values, offsets if not evictions else ())
    top = max((p.offset + _rounded(p.value.bytes) for p in placed), default=0)
    for value, size in results:
        shown = _held(calls, value, size, value.pinned)
        placed.append(PlacedValue(shown, 0, max(len(moments) - 1, 0), top))
        top += size
    return Timeline(moments, peak, tuple(held), tuple(placed))


def _placed(
    pieces: Sequence[tuple[int, int, int]],
    values: Mapping[int, HeldValue],
    offsets: Sequence[int],
) -> list[PlacedValue]:
    """Each piece where the plan puts it; where evictions move it, at the lowest place
    that is free."""
    made: list[PlacedValue] = []
    for number, first, last in pieces:
        value = values[number]
        if offsets:
            made.append(PlacedValue(value, first, last, offsets[number]))
            continue
        beside = [p for p in made if p.first <= last and p.last >= first]
        made.append(PlacedValue(value, first, last, _free(beside, value.bytes)))
    return made


def _free(beside: Sequence[PlacedValue], size: int) -> int:
    offset = 0
    for other in sorted(beside, key=lambda p: p.offset):
        if other.offset - offset >= _rounded(size):
            break
        offset = max(offset, other.offset + _rounded(other.value.bytes))
    return offset


def joined(parts: Sequence[Timeline]) -> Timeline:
    """One timeline of parts that run one after the other."""
    if len(parts) == 1:
        return parts[0]
    top = max(parts, key=lambda part: part.peak_bytes)
    before = sum(len(p.moments) for p in parts[: list(parts).index(top)])
    moments = tuple(moment for part in parts for moment in part.moments)
    placed: list[PlacedValue] = []
    start = 0
    for part in parts:
        placed += [
            replace(p, first=p.first + start, last=p.last + start) for p in part.placed
        ]
        start += len(part.moments)
    return Timeline(moments, before + top.peak_step, top.held, tuple(placed))


def _rounded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _spans(
    steps: Sequence[tuple[StepSpec, StepText]],
    place: Mapping[int, int],
    roots: Sequence[int],
) -> dict[int, tuple[int, int]]:
    """First and last place in the order at which each buffer's memory is used."""
    found: dict[int, tuple[int, int]] = {}
    for number, at in place.items():
        for touched, _ in steps[number][0].touches:
            if touched >= len(roots):
                continue
            root = roots[touched]
            first, last = found.get(root, (at, at))
            found[root] = (min(first, at), max(last, at))
    return found


def _held(
    calls: Sequence[tuple[StepSpec, StepText]],
    value: BufferText | ResultText,
    size: int,
    number: int | None,
) -> HeldValue:
    """The value, with the first call that writes it."""
    for step, text in calls:
        if any(touched == number and how & WRITES for touched, how in step.touches):
            return HeldValue(value.name, value.type, size, text.kernel, text.loc)
    return HeldValue(value.name, value.type, size, "", "")
