"""A thread that generates for all clients of a server.

    worker = Worker(batch)
    job = worker.start(request, pieces)      # in an event loop
    async for part in job.parts(): ..        # text as it comes; the last has `finish`
    job.leave()                              # the client has gone: its place is free
    worker.stop()

The thread owns the batch. It takes what clients ask for between two steps, and gives
them what the steps have made.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import perf_counter

from pliant.language.batch import Batch, Request
from pliant.language.pieces import TextPieces


class BusyError(Exception):
    """The server takes no more requests now."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """What is new for a client. The first says only that the request waits."""

    text: str = ""
    finish: str | None = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class ClientJob:
    """A request and its client."""

    request: Request
    pieces: TextPieces
    worker: Worker
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[TextPart]
    began: float = field(default_factory=perf_counter)
    last: float | None = None  # when its last token was made

    async def accepted(self) -> None:
        """Waits until the request has its place in the order; raises if it has none."""
        part = await self.queue.get()
        if part.error is not None:
            raise part.error

    async def parts(self) -> AsyncIterator[TextPart]:
        while True:
            part = await self.queue.get()
            yield part
            if part.finish is not None:
                return

    def leave(self) -> None:
        self.worker.leave(self)

    def give(self, part: TextPart) -> None:
        """To the client's loop, if that still runs."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, part)


@dataclass(frozen=True, slots=True)
class TokenWatch:
    """Who is told of times: seconds to a first token, and between two."""

    first: Callable[[float], object]
    next: Callable[[float], object]


class Worker:
    """See the file's head."""

    def __init__(
        self, batch: Batch, watch: TokenWatch | None = None, most_waiting: int = 1000
    ) -> None:
        self.batch, self.watch, self.most_waiting = batch, watch, most_waiting
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[Request, ClientJob] = {}
        self._stopping = False
        self.broken: str | None = None  # why nothing is generated any more
        self._thread = threading.Thread(target=self._run, name="pliant-serve")
        self._thread.daemon = True
        self._thread.start()

    # ---- for the event loop

    def start(self, request: Request, pieces: TextPieces) -> ClientJob:
        if self._stopping or self.broken:
            raise BusyError(self.broken or "the server stops")
        waiting = self._inbox.qsize() + len(self.batch.waiting)
        if waiting >= self.most_waiting:
            raise BusyError(f"{waiting} requests are waiting")
        loop = asyncio.get_running_loop()
        job = ClientJob(request, pieces, self, loop, asyncio.Queue())
        self._inbox.put(lambda: self._submit(job))
        return job

    def leave(self, job: ClientJob) -> None:
        if job.request.finish is None:
            self._inbox.put(lambda: self._cancel(job))

    def stop(self) -> None:
        """Ends what is not finished, and the thread."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join()

    # ---- in the thread

    def _run(self) -> None:
        try:
            busy = False
            while self._take_all(busy):
                busy = self.batch.step()
                self._give()
        except Exception as error:  # a bug: no client is left to wait for ever
            self.broken = f"{type(error).__name__}: {error}"
        while not self._inbox.empty():
            do = self._inbox.get()
            if do is not None:
                do()
        for request, job in self._jobs.items():
            if request.finish is None:
                request.finish = "failed" if self.broken else "cancelled"
            job.give(TextPart(finish=request.finish, error=self._problem()))
        self._jobs.clear()

    def _problem(self) -> Exception | None:
        return None if self.broken is None else RuntimeError(self.broken)

    def _take_all(self, busy: bool) -> bool:
        """Does what clients ask for; waits for it if there is nothing else to do."""
        while not (busy and self._inbox.empty()):
            do = self._inbox.get()
            if do is None:
                return False
            do()
            busy = True
        return True

    def _submit(self, job: ClientJob) -> None:
        try:
            self.batch.submit(job.request)
        except Exception as error:
            job.request.finish = "refused"
            job.give(TextPart(finish="refused", error=error))
            return
        self._jobs[job.request] = job
        job.give(TextPart())

    def _cancel(self, job: ClientJob) -> None:
        self.batch.cancel(job.request)

    def _give(self) -> None:
        """To each client what is new for it."""
        for job in list(self._jobs.values()):
            request, text = job.request, ""
            for token in request.taken():
                self._note(job)
                if not job.pieces.ended:
                    text += job.pieces.push(token)
            if job.pieces.ended:
                self.batch.cancel(request)  # nothing if it has ended by itself
            finish = request.finish
            if finish is not None:
                text += job.pieces.rest()
                finish = "stop" if job.pieces.ended else finish
                del self._jobs[request]
            if text or finish is not None:
                job.give(TextPart(text, finish, request.error))

    def _note(self, job: ClientJob) -> None:
        now = perf_counter()
        if self.watch is not None:
            if job.last is None:
                self.watch.first(now - job.began)
            else:
                self.watch.next(now - job.last)
        job.last = now
