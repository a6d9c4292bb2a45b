"""Training on sequences of changing length: the ways, each in a process of its own.

The 4-layer llama of the zoo, next-token loss, AdamW. `bench.papers bladedisc` drives
these processes, one step of each by turns:

    eager           torch
    checkpoint      torch, recomputing each layer in the backward pass
    buckets         ours, compiled for each power of two alone, sequences padded to it
    pliant          ours, compiled once
    recompute only  the same where files are slow: nothing is spilled to one
    order off, remat off, both off    the same without that optimisation

A step is timed as it comes. What it holds at its highest moment is measured apart, for
all ways alike: the resident set above what was resident before the step, after all
memory that is kept between steps was given back. Tokens are counted without padding.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

import pliant
import zoo
from bench.resident import high_water

SHORTEST, LONGEST = 100, 3000
IGNORED = -100  # the label of padding
OURS = "pliant"
PLANNED = ("plan", "exact")  # kinds of job that do not run a step


@dataclass(frozen=True, slots=True)
class Way:
    """A method of `Trainer`, what the compiler may do, and the environment."""

    method: str
    options: pliant.Options | None = None
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def limited(self) -> bool:
        """Whether it accepts a memory limit."""
        return self.options is not None


SLOW_FILES = (("PLIANT_SPILL_MBS", "1"),)
WAYS = {
    "eager": Way("eager"),
    "checkpoint": Way("checkpoint"),
    "buckets": Way("buckets", pliant.Options()),
    OURS: Way("dynamic", pliant.Options()),
    "recompute only": Way("dynamic", pliant.Options(), SLOW_FILES),
    "order off": Way("dynamic", pliant.Options(order=False)),
    "remat off": Way("dynamic", pliant.Options(remat=False)),
    "both off": Way("dynamic", pliant.Options(order=False, remat=False)),
}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


def lengths(count: int, seed: int) -> list[int]:
    """From SHORTEST to LONGEST, one from each of `count` equal parts, shuffled."""
    rng = random.Random(seed)
    part = (LONGEST - SHORTEST) / count
    drawn = [round(SHORTEST + part * (k + rng.random())) for k in range(count)]
    rng.shuffle(drawn)
    return drawn


def bucket(length: int) -> int:
    """The power of two that holds a sequence; the last bucket is the longest one."""
    return min(1 << (length - 1).bit_length(), LONGEST)


# ---- in the process of one way


class Trainer:
    """A model, its optimizer and a step over token ids; `seconds` compiled so far."""

    def __init__(self, way: Way, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.way, self.threads, self.seconds = way, threads, 0.0
        self.model: Any = zoo.build("llama").model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.compiled: dict[int, Any] = {}
        self.last: Any = None  # the compiled step that ran last
        self.limit: int | None = None
        self.step: Callable[[torch.Tensor], Any] = getattr(self, way.method)

    def eager(self, ids: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.model(ids), ids)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def checkpoint(self, ids: torch.Tensor) -> torch.Tensor:
        self.model.model.gradient_checkpointing_enable()
        return self.eager(ids)

    def buckets(self, ids: torch.Tensor) -> Any:
        size = bucket(ids.shape[1])
        padding = size - ids.shape[1]
        labels = torch.nn.functional.pad(ids, (0, padding), value=IGNORED)
        padded = torch.nn.functional.pad(ids, (0, padding))
        if size not in self.compiled:
            self.compiled[size] = self.compile(((padded,), (labels,)), None)
        return self.run(self.compiled[size], padded, labels)

    def dynamic(self, ids: torch.Tensor) -> Any:
        if not self.compiled:
            dims = {0: "batch", 1: "seq"}
            self.compiled[0] = self.compile(((ids,), (ids,)), ((dims,), (dims,)))
        return self.run(self.compiled[0], ids, ids)

    def run(self, step: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.set_limit(step)
        self.last = step
        return step((ids,), (labels,))

    def set_limit(self, step: Any) -> None:
        """The limit of this job, or none, in place of that of an earlier one."""
        if step.memory_limit != self.limit:
            step.memory_limit = self.limit

    def compile(self, example: Any, dynamic_shapes: Any) -> Any:
        started = perf_counter()
        step = pliant.compile_training(
            self.model,
            loss_of,
            self.optimizer,
            example,
            dynamic_shapes,
            threads=self.threads,
            options=self.way.options,
        )
        self.seconds += perf_counter() - started
        return step

    def planned(self, ids: torch.Tensor, exact: bool) -> dict[str, int]:
        """The peak of a step over these ids, or the least it could have.

        With `exact` it is compiled for this one length.
        """
        step = self.compile(((ids,), (ids,)), None) if exact else self.compiled[0]
        self.set_limit(step)
        try:
            plan = step.memory_plan((ids,), (ids,))
        except pliant.MemoryLimitError as refusal:
            return {"least": refusal.least}
        return {"peak": plan.peak_bytes}

    def trim(self) -> None:
        for step in self.compiled.values():
            step.trim()
        gc.collect()


def serve(name: str, threads: int) -> None:
    """Answers each line, a job, with the measurements of its step."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # so that library output does not mix with answers
    trainer = Trainer(WAYS[name], threads)
    vocabulary = trainer.model.model.config.vocab_size
    for line in sys.stdin:
        job = json.loads(line)
        generator = torch.Generator().manual_seed(job["seed"])
        shape = (job["batch"], job["length"])
        ids = torch.randint(0, vocabulary, shape, generator=generator)
        trainer.limit = job["limit"] if trainer.way.limited else None
        if job["kind"] in PLANNED:
            found: Any = trainer.planned(ids, job["kind"] == "exact")
        else:
            found = answered(trainer, ids, job["kind"] == "memory")
        print(json.dumps(found), file=answers, flush=True)


def answered(trainer: Trainer, ids: torch.Tensor, memory: bool) -> dict[str, Any]:
    """One step: its seconds, or with `memory` its bytes; or that it does not fit."""
    compiling = trainer.seconds
    kept: list[Any] = []
    found: dict[str, Any] = {}
    started = perf_counter()
    try:
        if memory:
            trainer.trim()
            found["bytes"] = high_water(lambda: kept.append(trainer.step(ids)))
        else:
            kept.append(trainer.step(ids))
            spent = perf_counter() - started - (trainer.seconds - compiling)
            found["seconds"] = spent
        found["loss"] = float(kept[0])
    except pliant.MemoryLimitError as refusal:
        found["least"] = refusal.least
    if trainer.last is not None and kept:
        stats = trainer.last.stats()
        found["recomputed"] = stats["recomputed_calls"]
        found["spilled"] = stats["spilled_bytes"]
    found["compile_seconds"] = trainer.seconds
    found["compiles"] = len(trainer.compiled)
    return found


# ---- in the process that drives them


class Server:
    """A process that trains one way."""

    def __init__(self, way: str, threads: int) -> None:
        command = [sys.executable, "-m", "bench.finetune", "--serve", way]
        command += ["--threads", str(threads)]
        self.way = way
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **dict(WAYS[way].environment)},
        )

    def step(
        self,
        length: int,
        limit: int | None,
        *,
        seed: int = 0,
        batch: int = 1,
        kind: str = "step",
    ) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        job: dict[str, Any] = {"length": length, "limit": limit, "seed": seed}
        job |= {"batch": batch, "kind": kind}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker of '{self.way}' ended without a word")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.finetune", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", choices=list(WAYS), required=True)
    arguments = parser.parse_args()
    serve(arguments.serve, arguments.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
