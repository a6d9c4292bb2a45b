"""What a model answers, as JSON: the same of a compiled model and of a loaded one.

This file runs where neither torch nor LLVM can be imported: as a script, it loads files
and prints what their models answer.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCKED = ("torch", "llvmlite", "tvm_ffi", "onnx", "safetensors")


@dataclass(frozen=True)
class Questions:
    """What is asked of a model; arrays are by the names of a file of arrays."""

    calls: list[list[Any]]  # arguments by position: names of arrays, or ints
    dims: list[dict[str, int]]
    limits: list[float]  # shares of the peak at the first dims
    bad: list[list[Any]]  # arguments of calls that are refused


def shown(value: Any) -> Any:
    """A result: structure, and every array by its type, shape and bytes."""
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return [str(value.dtype), list(value.shape), digest]
    if hasattr(value, "_fields"):
        return {name: shown(getattr(value, name)) for name in value._fields}
    if isinstance(value, dict):
        return {str(key): shown(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(shown, value)]
    return repr(value)


def tried(run: Any) -> Any:
    try:
        return run()
    except Exception as error:
        return [type(error).__name__, str(error)]


def observed(model: Any, asked: Questions, arrays: dict[str, np.ndarray]) -> Any:
    def call(items: list[Any]) -> Any:
        return shown(model(*(arrays[x] if isinstance(x, str) else x for x in items)))

    def plan(limit: int | None, dims: dict[str, int]) -> Any:
        return asdict(model.memory_plan(memory_limit=limit, **dims))

    def told(limit: int | None, dims: dict[str, int]) -> Any:
        return asdict(model.memory_timeline(memory_limit=limit, **dims))

    found: dict[str, Any] = {
        "dims": model.dims,
        "formula": model.peak_formula,
        "explain": model.explain(),
        "weight_bytes": model.weight_bytes,
        "calls": [tried(lambda items=items: call(items)) for items in asked.calls],
        "bad": [tried(lambda items=items: call(items)) for items in asked.bad],
    }
    peak = model.memory_plan(**asked.dims[0]).peak_bytes
    limits = [int(share * peak) for share in asked.limits]
    pairs = [(limit, dims) for limit in (None, *limits) for dims in asked.dims]
    found["plans"] = [tried(lambda p=p: plan(*p)) for p in pairs]
    found["timelines"] = [tried(lambda p=p: told(*p)) for p in pairs]
    found["limited"] = []
    for limit in limits:
        model.memory_limit = limit
        found["limited"] += [tried(lambda i=items: call(i)) for items in asked.calls]
    model.memory_limit = None
    model.trim()
    stats = model.stats()
    numbers = ("calls", "failures", "plans", "kernels", "kernel_calls", "arena_bytes")
    numbers += ("last_peak_bytes", "recomputed_calls", "spilled_bytes", "last_sizes")
    found["stats"] = {name: stats[name] for name in numbers}
    return json.loads(json.dumps(found, default=str))


def main(folder: Path) -> None:
    for name in BLOCKED:
        sys.modules[name] = None  # type: ignore[assignment]
    import pliant

    made = {}
    for path in sorted(folder.glob("*.pliant")):
        asked = Questions(**json.loads(path.with_suffix(".json").read_text()))
        arrays = dict(np.load(path.with_suffix(".npz")))
        made[path.stem] = observed(pliant.load(path, threads=2), asked, arrays)
    print(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
