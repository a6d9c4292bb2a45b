"""Times a saved model or an ONNX file at given dims, for `pliant bench`.

Of an ONNX file, ONNX Runtime is timed in turns with Pliant if it is installed, with as
many threads. Inputs are random, as `pliant run` makes them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import pliant
from pliant.commands.models import ONNX, opened
from pliant.commands.run import inputs_of
from pliant.errors import OptionError

ROUNDS = 15
LEAST_SECONDS = 0.01  # that one timing repeats a call for

Runs = dict[str, Callable[[], object]]


def run(args: argparse.Namespace) -> int:
    others = (args.peers, args.shape, args.kernels, args.output, args.keep)
    if len(args.models) > 1 or any(others) or args.prepare:
        raise OptionError(
            "a saved model or an ONNX file is timed alone: with --dims, --threads and "
            "--rounds"
        )
    (name,) = args.models
    results: list[dict[str, Any]] = []
    for threads in args.threads or [None]:
        model = opened(name, threads=threads)
        for dims in args.dims or [{}]:
            results.append(_measured(args, name, model, dims))
    if args.json:
        print(json.dumps({"model": name, "results": results}, indent=1))
        return 0
    for found in results:
        sizes = ", ".join(f"{dim}={size}" for dim, size in found["dims"].items())
        count = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"
        times = ", ".join(f"{e} {ms:.3f} ms" for e, ms in found["ms"].items())
        print(f"{sizes or 'fixed sizes'}, {count}: {times}, ", end="")
        print(f"peak {found['peak_bytes']} bytes")
    return 0


def _measured(
    args: argparse.Namespace, name: str, model: pliant.CompiledModel, dims: Any
) -> dict[str, Any]:
    inputs = inputs_of(model, {}, dims, seed=0)
    threads = model.stats()["threads"]
    runs: Runs = {"pliant": lambda: model(*inputs)}
    if name.endswith(ONNX):
        runs |= _peer(name, threads, model, inputs)
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


def _peer(
    path: str, threads: int, model: pliant.CompiledModel, inputs: list[Any]
) -> Runs:
    try:
        import onnxruntime
    except ImportError:
        return {}
    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, how, ["CPUExecutionProvider"])
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
