"""Whether a compiled random ONNX model gives what ONNX Runtime gives, at all its sizes.

Integers and truths must be equal. A float may differ by a few of the rounding errors of
the largest float that the model computes, and by a few times what it moves if the
inputs are off by one rounding error: three runs of ONNX Runtime tell how much that is.
Where these runs do not agree what is infinite or no number, nothing is said.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from judge import Verdict
from onnx_random import Array, Model, Sizes, run

import pliant
from pliant.errors import InternalError, ShapeError, UnsupportedOpError

SHAKES = 3
UNIT = 2.0**-23
FLOOR = 64.0  # units of the largest float; sums of some thousand terms


def judge_onnx(model: Model) -> Verdict:
    if not model.nodes:
        return Verdict("fine", "no node fits")
    proto = model.proto()
    try:
        compiled = pliant.compile(proto)
    except (UnsupportedOpError, ShapeError) as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except InternalError as error:
        return Verdict("internal", str(error)[:2000])
    except Exception as error:
        return Verdict("internal", f"{type(error).__name__}: {error}"[:2000])
    for sizes in model.sizes:
        found = _at(model, proto, compiled, sizes)
        if found.kind != "fine":
            return found
    return Verdict("fine")


def _at(model: Model, proto: onnx.ModelProto, compiled: Any, sizes: Sizes) -> Verdict:
    given = model.arguments(sizes)
    try:
        answer = compiled(*given)
    except InternalError as error:
        return Verdict("internal", str(error)[:2000])
    except pliant.PliantError as error:
        return Verdict("unlike", f"at {sizes}: {type(error).__name__}: {error}")
    found = answer if len(model.outputs) > 1 else (answer,)
    every = [o for n in proto.graph.node for o in n.output if o not in model.outputs]
    names = [v.name for v in model.inputs]
    whole = model.proto(every)
    values = run(whole, dict(zip(names, given, strict=True)))
    wanted = values[: len(model.outputs)]
    rng = np.random.default_rng(model.seed)
    shaken = [
        run(proto, dict(zip(names, (_shaken(rng, x) for x in given), strict=True)))
        for _ in range(SHAKES)
    ]
    largest = max((_largest(v) for v in values), default=0.0)
    for name, ours, theirs, *moved in zip(
        model.outputs, found, wanted, *shaken, strict=True
    ):
        problem = _differs(ours, theirs, moved, largest)
        if problem:
            return Verdict("wrong", f"{name} at {sizes}: {problem}")
    return Verdict("fine")


def _shaken(rng: np.random.Generator, x: Array) -> Array:
    if x.dtype.kind != "f":
        return x
    return (x * (1 + UNIT * rng.choice((-1, 1), x.shape))).astype(x.dtype)


def _largest(x: Array) -> float:
    if x.dtype.kind != "f" or not x.size:
        return 0.0
    return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))


def _differs(ours: Array, theirs: Array, moved: list[Array], largest: float) -> str:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype}{ours.shape} for {theirs.dtype}{theirs.shape}"
    if theirs.dtype.kind != "f":
        if np.array_equal(ours, theirs):
            return ""
        same = all(m.shape == theirs.shape for m in moved)
        if same and all((m == theirs)[ours != theirs].all() for m in moved):
            return f"{int((ours != theirs).sum())} of {theirs.size} differ"
        return ""  # rounding decides
    if any(m.shape != theirs.shape for m in moved):
        return ""
    with np.errstate(all="ignore"):
        shift = np.max([np.abs(m - theirs) for m in moved], axis=0)
        apart = np.abs(ours.astype(np.float64) - theirs)
        bound = FLOOR * UNIT * largest + 16 * shift
        stable = np.isfinite(shift) | (np.isinf(theirs) & (moved == theirs).all(axis=0))
        stable |= np.isnan(theirs) & np.isnan(moved).all(axis=0)
        alike = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        bad = stable & ~alike & ~(apart <= bound)
    if not bad.any():
        return ""
    at = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return f"{ours[at]} for {theirs[at]} at {tuple(map(int, at))}, {bad.sum()} elements"
