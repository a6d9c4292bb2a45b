"""Starts a worker per model and thread count, and gathers what they found.

Workers are separate programs, one after the other: thread pools, allocators and caches
of one measurement never touch the next. (Not multiprocessing: a child of it would not
share torch's threads, runtime/binding.py.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pliant
from pliant.compare.worker import Job

LOG_LINES = 15  # of a failed worker's log that are worth telling
Say = Callable[[str], None]


class WorkerFailed(Exception):
    """A worker ended without a result."""


def run_job(job: Job, say: Say) -> dict[str, Any]:
    """One measurement in a process of its own."""
    folder = Path(job.folder)
    with tempfile.TemporaryDirectory(dir=folder) as own, _log(folder) as log:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(job.threads),
            "TVM_NUM_THREADS": str(job.threads),
            "TVM_BIND_THREADS": "0",  # or it pins our main thread to a core
            # We compile from cold every time; torch too, unless its cache is kept.
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder if job.kept else own) / "torch"),
            "PLIANT_CACHE": str(Path(own) / "pliant"),
            "PYTHONPATH": os.pathsep.join(_paths()),
        }
        worker = subprocess.Popen(
            [sys.executable, "-m", "pliant.compare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
        )
        try:
            result = _follow(worker, job, say)
        finally:
            worker.kill()
            worker.wait()
        if result is None:
            log.seek(0)
            lines = log.read().splitlines()[-LOG_LINES:]
            raise WorkerFailed("\n".join(lines) or "the worker ended without a word")
        return result


def _follow(worker: Any, job: Job, say: Say) -> dict[str, Any] | None:
    worker.stdin.write(json.dumps(asdict(job)))
    worker.stdin.close()
    for line in worker.stdout:
        kind, _, text = line.rstrip("\n").partition(" ")
        if kind == "progress":
            say(f"{job.model}, {job.threads} thread(s): {text}")
        elif kind == "failed":
            raise WorkerFailed(text)
        elif kind == "result":
            result: dict[str, Any] = json.loads(text)
            return result
    return None


def _paths() -> list[str]:
    """Where the worker finds this package, and what the user put on the path."""
    here = str(Path(pliant.__file__).parents[1])
    given = os.environ.get("PYTHONPATH")
    return [here, given] if given else [here]


@contextmanager
def _log(folder: Path) -> Iterator[Any]:
    with tempfile.TemporaryFile("w+", dir=folder) as log:
        yield log


def run_jobs(
    jobs: Sequence[Job], say: Say, keep: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """All measurements; one that failed has only "error". Each is kept at once."""
    results = []
    for job in jobs:
        try:
            result = run_job(job, say)
        except WorkerFailed as failure:
            result = {
                "model": job.model,
                "threads": job.threads,
                "error": str(failure),
            }
        keep(result)
        results.append(result)
    return results
