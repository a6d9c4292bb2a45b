"""Runs entries in worker processes that may crash or hang.

    run("opinfo", names, kept)   ->   {name: {"kind": .., "text": .., "seconds": ..}}

A worker (`python -m bench.coverage.pool opinfo`) reads a name per line and answers with
a line of JSON. One that ends or takes too long is replaced, and its entry is counted as
a crash or a hang. A card that sets FORKED has each entry in a child of the worker,
which has only imported the libraries: no entry meets what another left behind. Answers
are kept in a file as they come, so that a run that was interrupted goes on where it
was.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import IO, Any

Found = dict[str, Any]
PER_PROCESS = 100  # entries, unless the card says: what torch keeps of traces adds up


def run(
    card: str, names: list[str], kept: Path, processes: int, limit: float
) -> dict[str, Found]:
    found = _read(kept)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        if name not in found:
            waiting.put(name)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("a") as out:
        lock = threading.Lock()
        threads = [
            threading.Thread(
                target=_serve, args=(card, waiting, limit, found, out, lock, len(names))
            )
            for _ in range(processes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {name: found[name] for name in names if name in found}


def _read(kept: Path) -> dict[str, Found]:
    if not kept.exists():
        return {}
    rows = [json.loads(line) for line in kept.read_text().splitlines() if line]
    return {row.pop("name"): row for row in rows}


def _serve(
    card: str,
    waiting: queue.SimpleQueue[str],
    limit: float,
    found: dict[str, Found],
    out: IO[str],
    lock: threading.Lock,
    total: int,
) -> None:
    worker: _Worker | None = None
    module = importlib.import_module(f"bench.coverage.{card}")
    most = getattr(module, "PER_PROCESS", PER_PROCESS)
    while True:
        try:
            name = waiting.get_nowait()
        except queue.Empty:
            break
        worker = worker or _Worker(card)
        started = time.perf_counter()
        answer = worker.ask(name, limit)
        if answer["kind"] in ("crash", "hang") or worker.asked >= most:
            worker.close()
            worker = None
        answer["seconds"] = round(time.perf_counter() - started, 2)
        with lock:
            found[name] = answer
            print(json.dumps({"name": name, **answer}), file=out, flush=True)
            shown = f"{len(found)}/{total} {answer['kind']:13} {name}"
            print(f"{shown}  {answer['text'][:150]}", file=sys.stderr, flush=True)
    if worker is not None:
        worker.close()


class _Worker:
    def __init__(self, card: str) -> None:
        self.asked = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.coverage.pool", card],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # it is ended together with its children
        )
        self.ready(600.0)

    def ready(self, limit: float) -> str:
        """The next line; nothing if it takes longer, or the process has ended."""
        stream = self.process.stdout
        assert stream is not None
        if not select.select([stream], [], [], limit)[0]:
            return ""
        return stream.readline()

    def ask(self, name: str, limit: float) -> Found:
        self.asked += 1
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        line = self.ready(limit)
        if line:
            found: Found = json.loads(line)
            return found
        code = self.process.poll()
        if code is None:
            try:
                code = self.process.wait(1)
            except subprocess.TimeoutExpired:
                return {"kind": "hang", "text": f"longer than {limit:.0f} s"}
        return {"kind": "crash", "text": f"the process ended with {code}"}

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def work(card: str) -> None:
    """The loop of a worker. What libraries print goes elsewhere."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    module = importlib.import_module(f"bench.coverage.{card}")
    module.names()
    if hasattr(module, "prepare"):
        module.prepare()
    print("ready", file=answers, flush=True)
    answered = _in_child if getattr(module, "FORKED", False) else _answer
    for line in sys.stdin:
        print(json.dumps(answered(module, line.strip())), file=answers, flush=True)


def _answer(module: ModuleType, name: str) -> Found:
    try:
        verdict = module.evaluate(name)
    except Exception as error:  # of the harness, or of a model that cannot be built
        text = f"{type(error).__name__}: {str(error)[:300]}"
        return {"kind": "eager_cannot", "text": text}
    return {"kind": verdict.kind, "text": verdict.text}


def _in_child(module: ModuleType, name: str) -> Found:
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(sink, "w") as out:
            out.write(json.dumps(_answer(module, name)))
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as stream:
        text = stream.read()
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    cpu = round(used.ru_utime + used.ru_stime, 1)
    ended: Found = {"kind": "crash", "text": f"the process ended with {code}"}
    limit = getattr(module, "SECONDS", math.inf)
    if code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu >= limit:
        ended = {"kind": "hang", "text": f"longer than {limit:.0f} s of the processor"}
    found: Found = ended if code or not text else json.loads(text)
    return {**found, "cpu": cpu}


if __name__ == "__main__":
    work(sys.argv[1])
