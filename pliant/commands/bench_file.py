"""Times a saved model, an ONNX file or a language model, for `pliant bench`.

Of an ONNX file, ONNX Runtime is timed in turns with Pliant if it is installed, with as
many threads. Inputs are random, as `pliant run` makes them. Of a language model it is
tokens a second, of prompts of several lengths and of what follows them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import pliant
from pliant.commands.models import LANGUAGE, ONNX, ModelSource
from pliant.commands.run import inputs_of
from pliant.compare.tables import Report, console, small_mebibytes
from pliant.errors import MemoryLimitError, OptionError, ShapeError

ROUNDS = 15
LEAST_SECONDS = 0.01  # that one timing repeats a call for
PROMPTS, DECODED = (16, 128, 512), 16  # tokens of a language model
# Of dims that nobody gave: those of text first, then those of images.
SIZES: tuple[tuple[int, ...], ...] = ((16, 64, 256), (32, 64, 128), (224, 320, 640))
BATCH = 8

Runs = dict[str, Callable[[], object]]


def run(args: argparse.Namespace, given: Sequence[ModelSource]) -> int:
    others = (args.peers, args.shape, args.kernels, args.output, args.keep)
    if len(given) > 1 or any(others) or args.prepare:
        raise OptionError(
            f"{given[0].name} is timed alone: with --dims, --threads and --rounds"
        )
    (only,) = given
    results: list[dict[str, Any]] = []
    for threads in args.threads or [None]:
        if only.kind == LANGUAGE:
            results += _language(args, only.name, threads)
            continue
        model = only.opened(threads)
        for dims in args.dims or list(_chosen(model)):
            results.append(_measured(args, only, model, dims))
    if args.json:
        print(json.dumps({"model": only.name, "results": results}, indent=1))
    else:
        _table(only.name, results).show(console())
    return 0


def _chosen(model: pliant.CompiledModel) -> Iterator[dict[str, int]]:
    """Dims that the model takes: growing sizes of one input, then several inputs."""
    if not model.dims:
        yield {}
        return
    first, *rest = model.dims
    if not rest:
        yield from ({first: size} for size in (1, BATCH, 8 * BATCH))
        return
    for sizes in SIZES:
        tried = [
            {first: 1, **dict.fromkeys(rest, sizes[0])},
            {first: 1, **dict.fromkeys(rest, sizes[1])},
            {first: 1, **dict.fromkeys(rest, sizes[2])},
            {first: BATCH, **dict.fromkeys(rest, sizes[1])},
        ]
        found = [dims for dims in tried if _takes(model, dims)]
        if found:
            yield from found
            return
    raise OptionError(
        f"found no sizes of {', '.join(model.dims)} that the model takes: give --dims"
    )


def _takes(model: pliant.CompiledModel, dims: Mapping[str, int]) -> bool:
    try:
        model.memory_plan(**dims)
    except (ShapeError, MemoryLimitError):
        return False
    return True


def _table(name: str, results: Sequence[Mapping[str, Any]]) -> Report:
    engines = list(dict.fromkeys(e for found in results for e in found["ms"]))
    rates = list(dict.fromkeys(k for r in results for k in r.get("rates", {})))
    columns = ["dims", "threads", *(f"{engine} ms" for engine in engines), *rates]
    peers = [engine for engine in engines if engine != "pliant"]
    lines = []
    for found in results:
        sizes = ", ".join(f"{dim}={size}" for dim, size in found["dims"].items())
        ms = found["ms"]
        cells = [sizes or "fixed sizes", str(found["threads"])]
        cells += [f"{ms[engine]:.3f}" for engine in engines]
        cells += [f"{found['rates'][rate]:.1f}" for rate in rates]
        cells += [f"{ms[peer] / ms['pliant']:.2f}" for peer in peers]
        lines.append((*cells, small_mebibytes(found["peak_bytes"])))
    columns += [f"x {peer}" for peer in peers]
    return Report(name, (*columns, "peak MiB"), tuple(lines))


def _measured(
    args: argparse.Namespace, given: ModelSource, model: pliant.CompiledModel, dims: Any
) -> dict[str, Any]:
    inputs = inputs_of(model, {}, dims, seed=0)
    threads = model.stats()["threads"]
    runs: Runs = {"pliant": lambda: model(*inputs)}
    if given.kind == ONNX:
        runs |= _peer(given.name, threads, model, inputs)
    counts = {engine: _repeats(run) for engine, run in runs.items()}
    times: dict[str, list[float]] = {engine: [] for engine in runs}
    for _ in range(args.rounds or ROUNDS):
        for engine, call in runs.items():
            times[engine].append(_seconds(call, counts[engine]))
    return {
        "dims": dims,
        "threads": threads,
        "ms": {engine: 1e3 * median(each) for engine, each in times.items()},
        "peak_bytes": model.stats()["last_peak_bytes"],
    }


def _language(
    args: argparse.Namespace, path: str, threads: int | None
) -> Iterator[dict[str, Any]]:
    """A prompt, and some tokens behind it; several rounds of both."""
    lm = pliant.load_gguf(path, threads=threads)
    for dims in args.dims or [{"batch": 1, "new": length} for length in PROMPTS]:
        if set(dims) != {"batch", "new"}:
            raise OptionError("of a language model, --dims are batch and new")
        ids = np.zeros((dims["batch"], dims["new"]), np.int64)
        prompts, tokens = [], []
        for _ in range(1 + (args.rounds or ROUNDS)):  # the first one plans
            lm.reset()
            prompts.append(_seconds(partial(lm.forward, ids), 1))
            tokens.append(_seconds(partial(lm.forward, ids[:, :1]), DECODED))
        prompt, token = median(prompts[1:]), median(tokens[1:])
        plan = lm.memory_plan(**dims, past=0)
        yield {
            "dims": dims,
            "threads": lm.stats()["threads"],
            "ms": {"pliant": 1e3 * prompt},
            "rates": {
                "prompt tokens/s": ids.size / prompt,
                "decoded tokens/s": len(ids) / token,
            },
            "peak_bytes": plan.peak_bytes,
            "grown_bytes": plan.grown_bytes,
        }


def _peer(
    path: str, threads: int, model: pliant.CompiledModel, inputs: list[Any]
) -> Runs:
    try:
        import onnxruntime
    except ImportError:
        return {}
    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(path, how, ["CPUExecutionProvider"])
    except Exception as problem:  # it reads other versions of the format
        reason = " ".join(str(problem).split())
        print(f"left out: ONNX Runtime refuses {path}: {reason}", file=sys.stderr)
        return {}
    names = [slot.name for slot in model.arguments]
    feed = dict(zip(names, inputs, strict=True))
    return {"onnxruntime": lambda: session.run(None, feed)}


def _repeats(run: Callable[[], object]) -> int:
    """Calls in one timing; the first call, which plans, is not timed."""
    run()
    return max(1, int(LEAST_SECONDS / max(_seconds(run, 1), 1e-7)))


def _seconds(run: Callable[[], object], count: int) -> float:
    started = perf_counter()
    for _ in range(count):
        run()
    return (perf_counter() - started) / count
