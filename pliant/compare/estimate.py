"""Estimates how long a measurement will take, before it starts.

The time is cells (model x threads x shape) x engines x rounds. For a cell that was
measured before, the stored time of a call is used; for others, the mean over the zoo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pliant.compare.engines import ENGINES
from pliant.compare.report import stored_result
from pliant.compare.worker import Job

CALL_SECONDS = 0.1  # of one engine at one shape, the mean over the zoo
TURN_SECONDS = 0.02  # pause and repetitions of short calls
SHAPES, FEW_SHAPES = 8, 3  # of a model that brings its own
START_SECONDS = 15.0  # of a worker: imports, the model, checks against fp64
# To prepare an engine: export, compile, first calls.
PREPARE_SECONDS = {"pliant": 6.0, "onnxruntime": 5.0, "openvino": 3.0}
COMPILE_SECONDS = 65.0  # of an engine that compiles for each shape


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of all jobs together; seconds."""

    cells: int
    rounds: int
    engines: int
    prepare: float
    timing: float

    def text(self) -> str:
        minutes = (self.prepare + self.timing) / 60
        return (
            f"{self.cells} cells (model x threads x shape), {self.rounds} rounds of "
            f"{self.engines} engines: about {minutes:.0f} minutes, "
            f"{self.prepare / 60:.0f} of them to prepare"
        )


def estimate(jobs: Sequence[Job], stored: Path | None) -> Estimate:
    """`stored` is the folder of earlier results."""
    cells, prepare, timing = 0, 0.0, 0.0
    for job in jobs:
        prepare += START_SECONDS + sum(_preparing(name, job) for name in job.engines)
        calls = _calls(job, stored)
        cells += len(calls)
        turns = len(job.engines) * TURN_SECONDS
        timing += job.rounds * sum(seconds + turns for seconds in calls)
    first = jobs[0]
    if first.only_prepare:
        timing = 0.0
    return Estimate(cells, first.rounds, len(first.engines), prepare, timing)


def _preparing(name: str, job: Job) -> float:
    if not ENGINES[name].compiles_per_shape:
        return PREPARE_SECONDS.get(name, 0.0)
    known = (Path(job.folder) / f"{name}_{job.threads}t_seconds").exists()
    return COMPILE_SECONDS / 5 if known else COMPILE_SECONDS


def _calls(job: Job, stored: Path | None) -> list[float]:
    """Seconds of one call of every engine, for each shape."""
    earlier = None if stored is None else stored_result(stored, job.model, job.threads)
    assumed = CALL_SECONDS * len(job.engines)
    if job.shapes or earlier is None:
        count = len(job.shapes) or (FEW_SHAPES if job.few_shapes else SHAPES)
        return [assumed] * count
    rows = earlier["rows"][:FEW_SHAPES] if job.few_shapes else earlier["rows"]
    return [
        sum(
            row["engines"].get(name, {}).get("ms", {}).get("median", 0.0) / 1e3
            for name in job.engines
        )
        for row in rows
    ]
