"""Rows that are generated together, and begin and end each at its own time.

    batch = Batch(lm, memory_limit="2GiB")
    request = Request(lm.tokens.encode("Once"), most=20, sampler=TokenSampler())
    batch.submit(request)               # MemoryLimitError: it would not fit alone
    while batch.step():                 # as long as there is work
        print(request.taken())          # tokens since the last look
    request.finish                      # "stop", "length", "cancelled", "failed"

A step reads a part of one prompt, then computes one token of every row that has read
its prompt. Rows are the first places of the caches (`caches.py`): the row in the last
place moves to that of a row which ends, and the prompt that is being read is behind
them, so that both calls of a step see views.

    place   0 .. rows-1      rows                         one call, one token each
            rows             the prompt that is read      one call, batch 1
    waiting in order

The next request that waits is admitted if everything with it fits the limit: weights,
caches with room for the whole of each request, and the planned peak of the largest
calls that they can lead to. So no row is stopped for lack of memory later. The limit
of each call is what weights and caches leave of it, which the runtime checks before
the call starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pliant.errors import MemoryLimitError, OptionError, ShapeError
from pliant.language.caches import RowCaches, token_bytes
from pliant.language.sampling import TokenSampler
from pliant.model.arguments import parse_bytes

if TYPE_CHECKING:
    from pliant.language.model import LanguageModel

CHUNK = 256  # tokens of a prompt that are read at once
GRAIN = 256  # tokens: rows have a multiple of it as their room where memory allows


@dataclass(slots=True, eq=False)
class Request:
    """Tokens to be continued. What is below `sampler` is the batch's to change."""

    prompt: Sequence[int]
    most: int
    sampler: TokenSampler
    ends: frozenset[int] = frozenset()  # tokens behind which nothing follows
    made: list[int] = field(default_factory=list)
    finish: str | None = None
    error: Exception | None = None  # why it failed
    _seen: int = 0

    @property
    def room(self) -> int:
        """The tokens that its row may come to have in the caches.

        The last one that is made is not read again.
        """
        return len(self.prompt) + max(self.most - 1, 0)

    def taken(self) -> list[int]:
        """The tokens since the last look."""
        new = self.made[self._seen :]
        self._seen = len(self.made)
        return new


@dataclass(frozen=True, slots=True)
class Room:
    """What the caches are to have room for, and what all of it takes."""

    places: int
    capacity: int
    caches: int  # bytes, while they are resized if they are
    least: int  # what one call needs beside weights and caches


@dataclass(slots=True)
class Counts:
    admitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    made_tokens: int = 0
    steps: int = 0
    peak_bytes: int = 0  # the most that weights, caches and a call have taken


class Batch:
    """See the file's head. One thread uses it, but `check` may be called from any."""

    def __init__(
        self,
        lm: LanguageModel,
        *,
        memory_limit: int | str | None = None,
        most_rows: int = 64,
        context: int | None = None,
    ) -> None:
        """`memory_limit` is for weights, caches and calls together.

        Without one, each call has the model's own. `context` is the most tokens of a
        row; by default, those that the model was trained for.
        """
        if most_rows < 1:
            raise OptionError(f"a batch has at least one row, not {most_rows}")
        self.lm, self.most_rows = lm, most_rows
        self.context = lm.shape.context if context is None else context
        self.limit = parse_bytes(memory_limit)
        self.weights = lm.memory_plan(batch=1, past=0, new=1, memory_limit=None)
        self.counts = Counts()
        self.caches = RowCaches(lm.shape, 0, 0)
        self.rows: list[Request] = []  # by place
        self.reading: Request | None = None
        self.waiting: deque[Request] = deque()
        self._fits_next = True  # nothing says that the next one cannot be admitted
        self.call_bytes = 0  # the planned peak of the calls of those that are admitted
        self._check_alone(1)

    # ---- requests

    def check(self, request: Request) -> None:
        """Raises if a request could never run."""
        if not request.prompt:
            raise ShapeError("a prompt has at least one token", expected=1, got=0)
        total = len(request.prompt) + request.most
        if total > self.context:
            raise ShapeError(
                f"{len(request.prompt)} tokens of prompt and {request.most} new ones "
                f"are {total}, and a row has at most {self.context}",
                expected=self.context,
                got=total,
            )
        self._check_alone(request.room)

    def submit(self, request: Request) -> None:
        """Puts a request behind those that wait."""
        try:
            self.check(request)
        except (MemoryLimitError, ShapeError):
            self.counts.refused += 1
            raise
        if request.most < 1:
            request.finish = "length"
            self.counts.finished += 1
        else:
            self._fits_next |= not self.waiting
            self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request, wherever it is; its place is free at once."""
        if request.finish is None:
            if request in self.waiting:
                self.waiting.remove(request)
            self._end(request, "cancelled")

    def step(self) -> bool:
        """Goes on with what there is; whether there is more to do."""
        self._admit()
        if self.reading is not None:
            self._read(self.reading)
        if self.rows:
            self._decode()
        self.counts.steps += 1
        return bool(self.rows or self.reading or self.waiting)

    def run(self) -> None:
        """Steps until there is nothing to do."""
        while self.step():
            pass

    # ---- memory

    @property
    def held_bytes(self) -> int:
        """Weights, caches, and the planned peak of the largest call to come."""
        return self.weights.weight_bytes + self.caches.nbytes + self.call_bytes

    def _check_alone(self, room: int) -> None:
        if self.limit is None:  # its calls are checked when they are made
            return
        found, limit = self._room(1, room, 0), self.limit
        if self._fits(found):
            return
        own, weights = self.lm.model.memory_limit, self.weights.weight_bytes
        if own is not None and found.least > own:
            raise MemoryLimitError(
                f"the calls of a request of {room} tokens need {found.least} bytes; "
                f"the memory limit of the model itself is {own}",
                limit=own,
                least=found.least,
            )
        least = weights + found.caches + found.least
        raise MemoryLimitError(
            f"a request of {room} tokens needs {least} bytes by itself: weights "
            f"{weights}, caches {found.caches}, calls {found.least}; the memory limit "
            f"is {limit}",
            limit=limit,
            least=least,
        )

    def _call_limit(self, left: int) -> int:
        """Of what is left for calls, what the model's own limit allows."""
        own = self.lm.model.memory_limit
        return max(left if own is None else min(left, own), 0)

    def _fits(self, room: Room) -> bool:
        own = self.lm.model.memory_limit
        if own is not None and room.least > own:
            return False
        if self.limit is None:
            return True
        return self.weights.weight_bytes + room.caches + room.least <= self.limit

    def _room(self, places: int, capacity: int, now: int) -> Room:
        """For rows in so many places; `now` is what caches hold while they move.

        The largest calls: with most rows, with most that is new, and with most past
        or none, since work that is split among threads needs memory for its parts.
        """
        caches = places * capacity * token_bytes(self.lm.shape) + now
        budget = None
        if self.limit is not None:
            left = self.limit - self.weights.weight_bytes - caches
            budget = self._call_limit(left)
        calls = {
            (batch, new, past)
            for batch, new in ((places, 1), (1, 1), (1, min(CHUNK, capacity)))
            for past in (0, capacity - new)
        }
        least = 0
        for batch, new, past in calls:
            sizes = {"batch": batch, "new": new, "past": past, "capacity": capacity}
            try:
                plan = self.lm.memory_plan(**sizes, memory_limit=budget)
                least = max(least, plan.peak_bytes)
            except MemoryLimitError as error:
                least = max(least, error.least)
        return Room(places, capacity, caches, least)

    def _admit(self) -> None:
        """The next that waits begins to be read, if all that runs fits with it."""
        rows = len(self.rows)
        if self.reading or not self.waiting or rows == self.most_rows:
            return
        if not self._fits_next:  # plans take time, and nothing has changed
            return
        caches, next_ = self.caches, self.waiting[0]
        need = max(r.room for r in (*self.rows, next_))
        longer = -(-need // GRAIN) * GRAIN
        doubled = min(max(2 * caches.places, rows + 1), self.most_rows)
        sizes = [(doubled, longer), (rows + 1, longer), (rows + 1, need)]
        if caches.places > rows and caches.capacity >= need:
            sizes.insert(0, (caches.places, caches.capacity))
        for places, capacity in sizes:
            same = (places, capacity) == (caches.places, caches.capacity)
            now = 0 if same else caches.array_bytes
            if not same and not self._can_resize(places, capacity):
                continue
            room = self._room(places, capacity, now)
            if self._fits(room) or (self.limit is None and not rows):
                if not same:
                    caches.resize(places, capacity)
                self.call_bytes = room.least
                self.reading = self.waiting.popleft()
                self.counts.admitted += 1
                return
        self._fits_next = not self.rows
        if not self.rows:  # `check` has found it to fit alone, in memory of its own
            self.caches = RowCaches(self.lm.shape, 0, 0)

    def _can_resize(self, places: int, capacity: int) -> bool:
        """Whether there is memory to move the rows: larger caches may become small."""
        moved = self.caches.bytes_to_resize(places, capacity)
        return self.limit is None or self.weights.weight_bytes + moved <= self.limit

    # ---- calls

    def _run(self, ids: np.ndarray, first: int) -> np.ndarray:
        model = self.lm.model
        own = model.memory_limit
        if self.limit is not None:
            left = self.limit - self.weights.weight_bytes - self.caches.nbytes
            model.memory_limit = self._call_limit(left)
        try:
            logits = self.lm.run(ids, self.caches, first, 1)
        finally:
            model.memory_limit = own
        call = int(self.lm.model.stats()["last_peak_bytes"])
        used = self.weights.weight_bytes + self.caches.nbytes + call
        self.counts.peak_bytes = max(self.counts.peak_bytes, used)
        return logits

    def _read(self, request: Request) -> None:
        """The next part of a prompt; behind its end, a row with a first token."""
        place = len(self.rows)
        start = int(self.caches.lengths[place])
        part = request.prompt[start : start + CHUNK]
        try:
            logits = self._run(np.array([part], np.int64), place)
        except Exception as error:
            self._end(request, "failed", error)
            return
        self.counts.prompt_tokens += len(part)
        if start + len(part) == len(request.prompt):
            self.rows.append(request)
            self.reading = None
            self._take(request, logits[0, -1])

    def _decode(self) -> None:
        rows = list(self.rows)
        ids = np.array([[r.made[-1]] for r in rows], np.int64)
        try:
            logits = self._run(ids, 0)
        except Exception as error:  # it is the same call for all of them
            for request in rows:
                self._end(request, "failed", error)
            return
        for request, row in zip(rows, logits[:, -1], strict=True):
            self._take(request, row)

    def _take(self, request: Request, logits: np.ndarray) -> None:
        try:
            token = request.sampler.pick(logits)
        except Exception as error:  # logits of NaN: the other rows go on
            self._end(request, "failed", error)
            return
        self.counts.made_tokens += 1
        if token in request.ends:
            self._end(request, "stop")
            return
        request.made.append(token)
        if len(request.made) >= request.most:
            self._end(request, "length")

    def _end(
        self, request: Request, finish: str, error: Exception | None = None
    ) -> None:
        request.finish, request.error = finish, error
        self._fits_next = True
        counts, last = self.counts, len(self.rows) - 1
        counts.finished += finish in ("stop", "length")
        counts.cancelled += finish == "cancelled"
        counts.failed += finish == "failed"
        if request is self.reading:
            self.reading = None
            self.caches.clear(last + 1)
        elif request in self.rows:
            place = self.rows.index(request)
            self.caches.clear(place)
            self.caches.move(last, place)
            self.rows[place] = self.rows[last]
            self.rows.pop()
            if self.reading is not None:
                self.caches.move(last + 1, last)
