"""Orders of calls with a small peak, for sizes that are numbers.

A block is a set of calls, what must come before what, and the buffers that each call
touches. A buffer is live from the first call that touches it to the last. The peak of
an order is the largest sum of live bytes during a call.

`search` goes through sets of finished calls by the peak on the way to them, then by
the bytes live in them. A set with no more live bytes than the one it started from is a
valley: what it took to get there can come first in some best order, because live bytes
are submodular in the set (mem(S | T) + mem(S & T) <= mem(S) + mem(T)), so the search
forgets everything else and goes on from the valley. It runs in both directions of
time, under a limit on the sets looked at; beyond it a beam takes over.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Sizes = Sequence[int]  # of the buffers
Order = tuple[int, ...]  # of the calls

_STATES = 1500  # sets that an exact search may visit between two valleys
_BEAM = 8  # partial orders that the beam keeps


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Calls, numbered as in the original order, and the buffers they touch.

    `entering` buffers are live before the first call, `leaving` ones after the last.
    """

    before: tuple[int, ...]  # of each call: the calls that it waits for, as bits
    touches: tuple[tuple[int, ...], ...]  # of each call: buffers
    entering: tuple[bool, ...]  # of each buffer
    leaving: tuple[bool, ...]

    @property
    def calls(self) -> int:
        return len(self.before)

    def touchers(self) -> list[int]:
        """Of each buffer, the calls that touch it, as bits."""
        found = [0] * len(self.entering)
        for call, buffers in enumerate(self.touches):
            for b in buffers:
                found[b] |= 1 << call
        return found

    def reversed(self) -> CallBlock:
        """The same with time running backwards; live bytes are the same."""
        after = [0] * self.calls
        for call, waits in enumerate(self.before):
            for earlier in bits(waits):
                after[earlier] |= 1 << call
        return CallBlock(tuple(after), self.touches, self.leaving, self.entering)

    def ancestors(self) -> list[int]:
        """Of each call, all that come before it in every order, as bits."""
        found: list[int] = []
        for waits in self.before:  # the original order is one of those allowed
            total = waits
            for earlier in bits(waits):
                total |= found[earlier]
            found.append(total)
        return found


def bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


# ---- evaluation, for many assignments of sizes at once


def live_rows(block: CallBlock, order: Sequence[int]) -> Ints:
    """Row k, column b: whether buffer b is live during the k-th call of an order."""
    place = np.empty(block.calls, np.int64)
    place[list(order)] = np.arange(block.calls)
    count = len(block.entering)
    first, last = np.full(count, block.calls), np.full(count, -1)
    for call, buffers in enumerate(block.touches):
        for b in buffers:
            first[b], last[b] = min(first[b], place[call]), max(last[b], place[call])
    first[np.asarray(block.entering, bool)] = 0
    last[np.asarray(block.leaving, bool)] = block.calls - 1
    steps = np.arange(block.calls)[:, None]
    return ((first <= steps) & (steps <= last)).astype(np.int64)


def unavoidable_rows(block: CallBlock) -> Ints:
    """Row k, column b: whether buffer b is live during call k in every order."""
    count, buffers = block.calls, len(block.entering)
    earlier = np.eye(count, dtype=np.float32)  # f32: products of it are fast
    for call, mask in enumerate(block.ancestors()):
        earlier[call, list(bits(mask))] = 1
    touched = np.zeros((count, buffers), np.float32)
    for call, used in enumerate(block.touches):
        touched[call, list(used)] = 1
    begun = (earlier @ touched > 0) | np.asarray(block.entering, bool)
    unfinished = (earlier.T @ touched > 0) | np.asarray(block.leaving, bool)
    rows: Ints = (begun & unfinished).astype(np.int64)
    return rows


def peaks(rows: Ints, sizes: Ints) -> Ints:
    """The largest row sum, for each column of `sizes` (buffers x assignments)."""
    if not rows.size:
        return np.zeros(sizes.shape[1], np.int64)
    most: Ints = (rows @ sizes).max(axis=0)
    return most


# ---- search


@dataclass(frozen=True, slots=True)
class FoundOrder:
    """An order and its peak; `best` says that no order has a smaller one.

    `steps` is the work it took: how many calls were put behind others.
    """

    order: Order
    peak: int
    best: bool
    steps: int = 0


def search(
    block: CallBlock, sizes: Sizes, start: Order, least: int, work: int = _STATES
) -> FoundOrder:
    """The best order found, `start` if none is better; none has less than `least`."""
    column = np.asarray(sizes, np.int64)[:, None]
    peak = int(peaks(live_rows(block, start), column)[0])
    found = FoundOrder(start, peak, peak <= least)
    backward = block.reversed()
    for forwards in (True, False):
        if found.best:
            return found
        walk = _OrderWalk(block if forwards else backward, sizes)
        order, proved = walk.run(least, found.peak, work)
        steps = found.steps + walk.steps
        found = replace(found, steps=steps)
        if order is None:
            if proved:
                return replace(found, best=True)
            continue
        order = order if forwards else order[::-1]
        peak = int(peaks(live_rows(block, order), column)[0])
        if peak < found.peak:
            found = FoundOrder(order, peak, proved or peak <= least, steps)
    return found


@dataclass(slots=True)
class _State:
    """A set of finished calls, and how it was reached."""

    done: int
    ready: dict[int, tuple[int, int]]  # call: the bytes that it takes, and frees
    live: int
    peak: int
    path: tuple[int, object] | None  # the last call, and the path before it


class _OrderWalk:
    """Goes through sets of finished calls of one block."""

    def __init__(self, block: CallBlock, sizes: Sizes) -> None:
        self.block, self.sizes, self.steps = block, sizes, 0
        touchers = block.touchers()
        self.touched = [
            [
                (sizes[b], touchers[b], block.entering[b], block.leaving[b])
                for b in buffers
                if sizes[b]
            ]
            for buffers in block.touches
        ]
        self.all = (1 << block.calls) - 1
        self.after: list[list[int]] = [[] for _ in range(block.calls)]
        for call, waits in enumerate(block.before):
            for earlier in bits(waits):
                self.after[earlier].append(call)

    def run(self, least: int, ceiling: int, work: int) -> tuple[Order | None, bool]:
        """An order with a peak below `ceiling`, and whether the answer is exact.

        Peaks below `least` count as `least`: every order reaches that.
        """
        held = zip(self.sizes, self.block.entering, strict=True)
        first = [k for k, waits in enumerate(self.block.before) if not waits]
        ready = {k: self._bytes(0, k) for k in first}
        state = _State(0, ready, sum(s for s, here in held if here), least, None)
        exact = True
        while state.done != self.all:
            valley, complete = self._valley(state, ceiling, work)
            exact &= complete
            if valley is None and not complete:
                valley = self._beam(state, ceiling)
            if valley is None:
                return None, exact
            state = valley
        return _calls(state), exact

    def _valley(
        self, root: _State, ceiling: int, work: int
    ) -> tuple[_State | None, bool]:
        """The end or a valley, by the lowest way, if one is below the ceiling.

        And whether that is exact: not if the work ran out.
        """
        lowest = {root.done: root.peak}
        # A set's own state is made when its turn comes: most sets' never does.
        heap: list[tuple[int, int, int, _State, int | None]]
        heap = [(root.peak, root.live, 0, root, None)]
        pushed = 0
        while heap:
            _, _, _, state, last = heapq.heappop(heap)
            if last is not None:
                state = self._step(state, last)
            if state.done == self.all:
                return state, True
            if state.live <= root.live and state.done != root.done:
                return self._deepest(root, state, work)
            if pushed > work:
                return None, False
            self.steps += len(state.ready)
            for call, (taken, freed) in state.ready.items():
                done, during = state.done | 1 << call, state.live + taken
                peak = during if during > state.peak else state.peak
                if peak >= lowest.get(done, ceiling):
                    continue
                lowest[done] = peak
                pushed += 1
                heapq.heappush(heap, (peak, during - freed, pushed, state, call))
        return None, True

    def _deepest(self, root: _State, end: _State, work: int) -> tuple[_State, bool]:
        """The least live of all sets on the ways from `root` to a valley `end`.

        What makes it safe to go there first is that nothing on the way is lower.
        """
        inside = end.done & ~root.done
        if inside.bit_count() == 1:
            return end, True
        best, seen, pending = end, {root.done}, [root]
        while pending:
            state = pending.pop()
            for call, (taken, _) in state.ready.items():
                if not inside >> call & 1 or state.done | 1 << call in seen:
                    continue
                self.steps += 1
                if state.live + taken > end.peak:
                    continue
                step = self._step(state, call)
                seen.add(step.done)
                pending.append(step)
                if (step.live, step.done.bit_count()) < (
                    best.live,
                    best.done.bit_count(),
                ):
                    best = step
            if len(seen) > work:
                return best, False
        return best, True

    def _beam(self, root: _State, ceiling: int) -> _State | None:
        """The end or a valley, keeping only a few sets of every number of calls."""
        kept = [root]
        while kept:
            steps: list[tuple[int, int, int, int]] = []
            for k, state in enumerate(kept):
                steps += self._branches(state, k, ceiling)
            steps.sort()
            found: dict[int, _State] = {}
            for _, _, k, call in steps:
                done = kept[k].done | 1 << call
                if done not in found:
                    self.steps += 1
                    found[done] = state = self._step(kept[k], call)
                    if state.done == self.all or state.live <= root.live:
                        return state
                    if len(found) == _BEAM:
                        break
            kept = list(found.values())
        return None

    def _branches(
        self, state: _State, number: int, ceiling: int
    ) -> list[tuple[int, int, int, int]]:
        """Calls that may be next: the peak with each, what it leaves, number, call.

        Those that reach the ceiling are left out. A call that frees as much as it
        takes, within the peak, may as well be next.
        """
        found = []
        live, peak = state.live, state.peak
        for call, (taken, freed) in state.ready.items():
            during = live + taken
            if during >= ceiling:
                continue
            if during > peak:
                found.append((during, during - freed, number, call))
            elif taken <= freed:
                return [(peak, during - freed, number, call)]
            else:
                found.append((peak, during - freed, number, call))
        return found

    def _bytes(self, done: int, call: int) -> tuple[int, int]:
        """What a call takes that comes after those done, and what it frees."""
        left = ~(done | 1 << call)
        taken = freed = 0
        for size, touchers, entering, leaving in self.touched[call]:
            if not (entering or touchers & done):
                taken += size
            if not (leaving or touchers & left):
                freed += size
        return taken, freed

    def _concerned(self, state: _State, call: int, done: int) -> Iterator[int]:
        """The calls that take or free something else once `call` is done."""
        found = 0
        for _, touchers, entering, leaving in self.touched[call]:
            if not (entering or touchers & state.done):
                found |= touchers
            if not leaving:
                left = touchers & ~done
                if not left & (left - 1):  # the last one frees it
                    found |= left
        return bits(found)

    def _step(self, state: _State, call: int) -> _State:
        taken, freed = state.ready[call]
        done = state.done | 1 << call
        ready = state.ready.copy()
        del ready[call]
        before = self.block.before
        for k in self._concerned(state, call, done):
            if k in ready:
                ready[k] = self._bytes(done, k)
        for k in self.after[call]:
            if not before[k] & ~done:
                ready[k] = self._bytes(done, k)
        during = state.live + taken
        peak = max(state.peak, during)
        return _State(done, ready, during - freed, peak, (call, state.path))


def _calls(state: _State) -> Order:
    found: list[int] = []
    path = state.path
    while path is not None:
        call, path = path  # type: ignore[assignment]  # pairs, nested
        found.append(call)
    return tuple(reversed(found))
