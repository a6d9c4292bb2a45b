"""Training on sequences of changing length: `python -m bench.finetune`.

The 4-layer llama of the zoo, next-token loss, AdamW, lengths drawn log-uniformly from
100 to 3000. Four ways, each in a process of its own, one step of each by turns:

    eager       torch
    checkpoint  torch, recomputing each layer in the backward pass
    buckets     ours, compiled for each power of two alone, sequences padded to it
    pliant      ours, compiled once

Peak is the resident set at the highest moment of a step above what is held between
steps (parameters, optimizer state); ours keep their arena between steps, so for them it
is what the step allocated, which is planned and checked to the byte. Tokens are counted
without padding. Writes bench/results/finetune.json and finetune.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import pliant
from bench.timing import (
    RESULTS,
    Report,
    console,
    default_zoo,
    load_zoo,
    machine,
    machine_line,
    mebibytes,
    store,
)
from pliant.benchmark.memory import high_water

WAYS = ("eager", "checkpoint", "buckets", "pliant")
SHORTEST, LONGEST = 100, 3000
IGNORED = -100  # the label of padding
Step = Callable[[torch.Tensor], Any]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


def lengths(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    low, high = math.log(SHORTEST), math.log(LONGEST)
    return [round(math.exp(rng.uniform(low, high))) for _ in range(count)]


def bucket(length: int) -> int:
    """The power of two that holds a sequence; the last bucket is the longest one."""
    return min(1 << (length - 1).bit_length(), LONGEST)


# ---- the four ways


class Trainer:
    """A model, its optimizer and a step over token ids; `seconds` compiled so far."""

    def __init__(self, way: str, zoo: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.threads, self.seconds = threads, 0.0
        self.model = load_zoo(zoo).llama().model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.compiled: dict[int, Any] = {}
        self.last: Any = None  # the compiled step that ran last
        self.step: Step = getattr(self, way)

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
        self.last = self.compiled[size]
        return self.last((padded,), (labels,))

    def pliant(self, ids: torch.Tensor) -> Any:
        if not self.compiled:
            dims = {0: "batch", 1: "seq"}
            self.compiled[0] = self.compile(((ids,), (ids,)), ((dims,), (dims,)))
        self.last = self.compiled[0]
        return self.last((ids,), (ids,))

    def compile(self, example: Any, dynamic_shapes: Any) -> Any:
        started = perf_counter()
        step = pliant.compile_training(
            self.model,
            loss_of,
            self.optimizer,
            example,
            dynamic_shapes,
            threads=self.threads,
        )
        self.seconds += perf_counter() - started
        return step


def serve(way: str, zoo: Path, threads: int) -> None:
    """Answers each line of token counts with the step's seconds, bytes and loss."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print
    trainer = Trainer(way, zoo, threads)
    vocabulary = trainer.model.model.config.vocab_size
    for line in sys.stdin:
        job = json.loads(line)
        generator = torch.Generator().manual_seed(job["seed"])
        shape = (job["batch"], job["length"])
        ids = torch.randint(0, vocabulary, shape, generator=generator)
        compiling = trainer.seconds
        kept: list[Any] = []

        def call(ids: torch.Tensor = ids, kept: list[Any] = kept) -> None:
            kept.append(trainer.step(ids))

        started = perf_counter()
        most = high_water(call)
        if trainer.last is not None:  # its arena was resident before the step
            most = trainer.last.stats()["last_peak_bytes"]
        spent = perf_counter() - started - (trainer.seconds - compiling)
        found = {
            "seconds": spent,
            "bytes": most,
            "loss": float(kept[0]),
            "compile_seconds": trainer.seconds,
            "compiles": len(trainer.compiled),
        }
        print(json.dumps(found), file=answers, flush=True)


# ---- by turns


class Server:
    """A process that trains one way."""

    def __init__(self, way: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "bench.finetune", "--serve", way]
        command += ["--threads", str(arguments.threads), "--zoo", str(arguments.zoo)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self, job: dict[str, int]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended without a word")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Every way takes the same steps; those that warm up are left out."""
    servers = {way: Server(way, arguments) for way in arguments.ways}
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in servers}
    drawn = lengths(arguments.steps, arguments.seed)
    warm = sorted({bucket(length) for length in drawn})
    try:
        for k, length in enumerate((*warm, *drawn)):
            job = {"length": length, "batch": arguments.batch, "seed": k}
            for way, server in servers.items():
                result = server.step(job)
                print(f"  {length} tokens, {way}: {result}", file=sys.stderr)
                if k >= len(warm):
                    found[way].append({"length": length, **result})
    finally:
        for server in servers.values():
            server.close()
    return found


def report(found: dict[str, list[dict[str, Any]]], batch: int, threads: int) -> Report:
    pace = {
        way: batch * sum(s["length"] for s in steps) / sum(s["seconds"] for s in steps)
        for way, steps in found.items()
    }
    lines = []
    for way, steps in found.items():
        last = steps[-1]
        lines.append(
            (
                way,
                f"{pace[way]:.0f}",
                f"{pace['pliant'] / pace[way]:.2f}" if "pliant" in pace else "",
                mebibytes(max(s["bytes"] for s in steps)),
                str(last["compiles"]),
                f"{last['compile_seconds']:.1f}",
                f"{last['loss']:.3f}",
            )
        )
    name = f"4-layer llama, batch {batch}, 100 to 3000 tokens, {threads} threads"
    head = ("way", "tokens/s", "pliant is x", "peak MiB", "compiles", "compile s")
    return Report(name, (*head, "last loss"), tuple(lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.finetune", description=__doc__)
    parser.add_argument("--zoo", type=Path, default=default_zoo())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.zoo, arguments.threads)
        return 0
    found = measure(arguments)
    table, told = report(found, arguments.batch, arguments.threads), machine()
    table.show(console())
    if set(arguments.ways) == set(WAYS):
        store("finetune.json", {"machine": told, "ways": found})
        text = f"{table.markdown()}\n{machine_line(told)}\n"
        (RESULTS / "finetune.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
