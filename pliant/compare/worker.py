"""One model with one thread count, measured in this process.

    python -m pliant.compare.worker < job.json

Prints lines "progress <text>", then one "result <json>" or "failed <text>".
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TextIO

import torch

import pliant
from pliant.cases import Case, Shape, few, load
from pliant.compare.accuracy import Reference, allowed, error
from pliant.compare.engines import (
    ENGINES,
    OURS,
    Engine,
    NotAvailable,
    Setup,
    export_onnx,
)
from pliant.compare.results import LOAD
from pliant.compare.timing import Spread, interleaved, ratios
from pliant.errors import OptionError
from pliant.machine.target import host
from pliant.report.profile import totals

Say = Callable[[str], None]
PROFILED_CALLS = 9
BRIEF = 300  # letters of an error that are shown


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is asked for."""

    model: str
    threads: int
    engines: tuple[str, ...]
    shapes: tuple[Shape, ...]  # none: the model's own
    few_shapes: bool  # of the model's own, the first, the middle and the largest
    rounds: int
    kernels: bool  # where our time goes, instead of times against peers
    folder: str  # for files that workers of the same model share
    kept: bool = False  # the folder outlives the run, with what engines compiled
    only_prepare: bool = False  # fill the folder and time nothing

    @staticmethod
    def read(text: str) -> Job:
        given = json.loads(text)
        given["engines"] = tuple(given["engines"])
        given["shapes"] = tuple(tuple(shape) for shape in given["shapes"])
        return Job(**given)

    def case_and_shapes(self) -> tuple[Case, list[Shape]]:
        case = load(self.model)
        shapes = list(self.shapes or case.shapes)
        if any(len(shape) != len(case.dims) for shape in shapes):
            raise OptionError(f"a shape of {case.name} is ({', '.join(case.dims)})")
        if case.guessed and not self.shapes:
            shapes = [s for s in shapes if takes(case, s)] or [case.example]
        if not self.shapes and (self.few_shapes or self.kernels):
            shapes = few(shapes) if self.few_shapes else [largest(case, shapes)]
        return case, shapes


def takes(case: Case, shape: Shape) -> bool:
    """Whether the model runs at a shape: a table of positions may be too short."""
    if shape == case.example:
        return True  # and if not, its own error is what counts
    try:
        with torch.inference_mode():
            case.model(*case.at(shape))
    except Exception:  # whatever a model's own code raises
        return False
    return True


def largest(case: Case, shapes: list[Shape]) -> Shape:
    """By the elements of the inputs."""
    return max(shapes, key=lambda shape: sum(x.numel() for x in case.at(shape)))


@dataclass(slots=True)
class Candidate:
    """An engine and what is known of it so far."""

    name: str
    engine: Engine | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def fail(self, status: str, reason: str) -> None:
        self.engine = None
        self.about |= {"status": status, "reason": reason}


# ---- against peers


def measure(job: Job, say: Say) -> dict[str, Any]:
    """Prepares the engines, checks them at every shape, and times those that pass."""
    case, shapes = job.case_and_shapes()
    inputs = {shape: case.at(shape) for shape in shapes}
    folder = Path(job.folder)
    setup = Setup(case, job.threads, folder)
    candidates: list[Candidate] = []
    for name in job.engines:
        say(f"preparing {ENGINES[name].title}")
        candidate = prepare(name, setup)
        candidates.append(candidate)
        if candidate.engine is not None:
            visit(candidate, shapes, inputs)
        if job.kept:
            remember(candidate, job)
    rows = []
    if not job.only_prepare:
        errors = check(case, candidates, inputs, say)
        for shape in shapes:
            say(f"timing {shape}")
            given = inputs[shape]
            rows.append(row(shape, candidates, given, errors[shape], job.rounds))
    result: dict[str, Any] = {
        "model": job.model,
        "threads": job.threads,
        "dims": case.dims,
        "about": case.about(),
        "engines": {c.name: c.about for c in candidates},
        "rows": rows,
    }
    ours = next((c.engine for c in candidates if c.name == OURS), None)
    if ours is not None and ours.model is not None:
        stats = ours.model.stats()
        kept = ("kernels", "kernel_calls", "weight_bytes", "stage_seconds", "compiles")
        result["pliant"] = {key: stats[key] for key in kept}
    return result


def prepare(name: str, setup: Setup) -> Candidate:
    candidate = Candidate(name)
    kind, export = ENGINES[name], 0.0
    try:
        if kind.from_onnx:
            export = export_onnx(setup)
        started = perf_counter()
        engine = kind.prepare(setup)
        seconds = perf_counter() - started
    except NotAvailable as missing:
        candidate.fail("not available", str(missing))
        return candidate
    except Exception as problem:  # another engine may fail in any way: it is reported
        candidate.fail("failed", brief(problem))
        return candidate
    if engine.model is not None:
        export = engine.model.stats()["stage_seconds"].get("export", 0.0)
        seconds -= export
    candidate.engine = engine
    candidate.about = {
        "status": "ok",
        "reason": "",
        "compile_seconds": seconds,
        "export_seconds": export,  # torch.export for us, ONNX for others; separate
    }
    return candidate


def visit(
    candidate: Candidate,
    shapes: list[Shape],
    inputs: dict[Shape, tuple[torch.Tensor, ...]],
) -> None:
    """The first call at every shape, before any other engine runs.

    An engine that compiles again for a shape does it here, and it counts as compiling.
    """
    assert candidate.engine is not None
    bind = candidate.engine.bind
    started = perf_counter()
    again = 0.0
    try:
        for shape in shapes:
            call = bind(inputs[shape])
            call()
            second = perf_counter()
            call()
            again += 2 * (perf_counter() - second)
    except Exception as problem:
        candidate.fail("failed", brief(problem))
        return
    if ENGINES[candidate.name].compiles_per_shape:
        spent = max(perf_counter() - started - again, 0.0)
        candidate.about["compile_seconds"] += spent


def remember(candidate: Candidate, job: Job) -> None:
    """The first compile seconds of an engine that keeps its cache in the folder.

    They are left out if other programs ran at that time.
    """
    if candidate.engine is None or not ENGINES[candidate.name].compiles_per_shape:
        return
    path = Path(job.folder) / f"{candidate.name}_{job.threads}t_seconds"
    if not path.exists():
        answer = {"seconds": candidate.about["compile_seconds"], "load": LOAD}
        path.write_text(json.dumps(answer))
    first = json.loads(path.read_text())
    # A benchmark's own workers before this one make a load of up to all cores.
    alone = first["load"] <= host().cores + 1
    candidate.about["compile_seconds"] = first["seconds"] if alone else None


def check(
    case: Case,
    candidates: list[Candidate],
    inputs: dict[Shape, tuple[torch.Tensor, ...]],
    say: Say,
) -> dict[Shape, dict[str, float]]:
    """Every engine's error at every shape; one that is wrong somewhere is left out."""
    reference = Reference(case.model)
    eager = ENGINES["eager"].prepare(Setup(case, 1, Path()))
    found: dict[Shape, dict[str, float]] = {}
    for shape, given in inputs.items():
        say(f"checking {shape}")
        exact = reference(given)
        theirs = error(eager.tensors(eager.bind(given)()), exact)
        found[shape] = {}
        for candidate in candidates:
            if candidate.engine is None:
                continue
            result = candidate.engine.tensors(candidate.engine.bind(given)())
            got = error(result, exact)
            found[shape][candidate.name] = got
            limit = allowed(exact, theirs, candidate.name == OURS)
            if not got <= limit:
                reason = f"error {got:.3g} at {shape}, allowed {limit:.3g}"
                candidate.fail("wrong", reason)
    return found


def row(
    shape: Shape,
    candidates: list[Candidate],
    given: tuple[torch.Tensor, ...],
    errors: dict[str, float],
    rounds: int,
) -> dict[str, Any]:
    """Times at one shape, and our ratio to every peer and to the best of them."""
    calls = {c.name: c.engine.bind(given) for c in candidates if c.engine is not None}
    result = {"shape": shape, **compared(interleaved(calls, rounds))}
    for name, found in result["engines"].items():
        found["error"] = errors[name]
    ours = next((c.engine for c in candidates if c.name == OURS), None)
    if ours is not None and ours.model is not None:
        result["peak_bytes"] = ours.model.memory_plan(*given).peak_bytes
    return result


def compared(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """From seconds by engine and round: the times, and a peer's time over ours.

    The best peer is the one against which that ratio is least.
    """
    found: dict[str, Any] = {}
    for name, times in samples.items():
        found[name] = {"ms": asdict(Spread.of(times).scaled(1e3))}
        if name != OURS and OURS in samples:
            found[name]["speedup"] = asdict(ratios(times, samples[OURS]))
    result: dict[str, Any] = {
        "engines": found,
        "rounds": min(map(len, samples.values()), default=0),
    }
    peers = [name for name in found if "speedup" in found[name]]
    if peers:
        best = min(peers, key=lambda name: found[name]["speedup"]["median"])
        result |= {"best_peer": best, "best": found[best]["speedup"]}
    return result


# ---- where our time goes


def measure_kernels(job: Job, say: Say) -> dict[str, Any]:
    """The kernels of a call at every shape, each with its median time of several."""
    case, shapes = job.case_and_shapes()
    say("compiling")
    instruments = pliant.Instruments(profile=True)
    model = case.compile(threads=job.threads, instruments=instruments)
    found = []
    for shape in shapes:
        say(f"profiling {shape}")
        given = case.at(shape)
        model(*given)
        calls = [model.profile(*given) for _ in range(PROFILED_CALLS)]
        typical = [
            replace(same[0], seconds=median(time.seconds for time in same))
            for same in zip(*calls, strict=True)
        ]
        found.append(
            {
                "shape": shape,
                "seconds": sum(time.seconds for time in typical),
                "kernels": [asdict(total) for total in totals(typical)],
            }
        )
    return {
        "model": job.model,
        "threads": job.threads,
        "dims": case.dims,
        "calls": found,
    }


def brief(problem: BaseException) -> str:
    """The original error on one line, its type first."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text}"[:BRIEF]


def main() -> int:
    # What libraries print goes to the log, standard output is for the parent alone.
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(text: str, kind: str = "progress") -> None:
        print(kind, text, file=answers, flush=True)

    job = Job.read(sys.stdin.read())
    torch.set_num_threads(job.threads)
    try:
        result = measure_kernels(job, say) if job.kernels else measure(job, say)
    except Exception as problem:
        traceback.print_exc()
        say(brief(problem), "failed")
        return 1
    say(json.dumps(result), "result")
    return 0


if __name__ == "__main__":
    sys.exit(main())
