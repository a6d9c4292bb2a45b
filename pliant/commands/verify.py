"""Compares a compiled model with the one that it was made of, at random sizes.

A file.pliant is compared as it is; any other model is compiled first. The reference of
--against is a file.onnx, which ONNX Runtime runs if it is installed and the `onnx`
package's evaluator if not, or a file.py, file.py:function, file.pt2 or a model of the
zoo, which torch runs: once as it is, and once in double precision.

Each dim is 1, an odd number, a power of two or beside one. Sizes that the model's own
guards refuse are drawn again. Against torch, the error may be twice that of torch
itself and 1e-5; against ONNX, --tolerance times the largest number of a result.
Exit status 1 says that some result was wrong.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import pliant
from pliant.commands.models import (
    LANGUAGE,
    ONNX,
    SAVED,
    ModelSource,
    add_dynamic,
    add_model,
    source,
)
from pliant.commands.run import inputs_of, leaves
from pliant.errors import OptionError, ShapeError
from pliant.progress import task

if TYPE_CHECKING:
    from pliant.cases import Case

REFUSED = {LANGUAGE: "a language model has no reference here to compare with"}
SIZES = (1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64, 65, 97, 128)
TRIES = 20  # draws for each case that is wanted
SHOWN = 10  # wrong cases that are listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--against", metavar="REFERENCE", required=True)
    parser.add_argument(
        "--random-shapes", type=int, default=20, metavar="COUNT", help="default 20"
    )
    parser.add_argument(
        "--largest", type=int, default=65, help="size of a dim (default 65)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, help="default: every core")
    parser.add_argument("--memory-limit", metavar="BYTES", help="such as 500MiB")
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="the model must be signed with it"
    )
    add_dynamic(parser)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One comparison: the largest error, and that which is allowed."""

    dims: Mapping[str, int]
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed


class ReferenceModel(Protocol):
    @property
    def dims(self) -> Sequence[str]:
        """That inputs are made from."""
        ...

    def compare(self, model: pliant.CompiledModel, sizes: Sequence[int]) -> Outcome:
        """ShapeError if the model refuses these sizes."""
        ...


def run(args: argparse.Namespace) -> int:
    if args.random_shapes < 1 or args.largest < 1:
        raise OptionError("--random-shapes and --largest must be at least 1")
    given = source(args.model, args.dynamic, REFUSED)
    against = source(
        args.against, refused=REFUSED | {SAVED: "give what it was made of"}
    )
    model = given.opened(args.threads, args.memory_limit, args.key)
    reference = _reference(args, against, model)
    outcomes: list[Outcome] = []
    refused = 0
    with task(f"verifying {args.model}") as say:
        for found in _outcomes(args, model, reference):
            if found is None:
                refused += 1
            else:
                outcomes.append(found)
                say(f"verifying {args.model}: {len(outcomes)} sizes")
    if not outcomes:
        raise OptionError(
            f"the model refused all of {refused} draws of {', '.join(reference.dims)}: "
            "its sizes depend on one another; give it as file.py:function, whose dims "
            "are free"
        )
    return _told(args, outcomes, refused)


def _told(args: argparse.Namespace, outcomes: Sequence[Outcome], refused: int) -> int:
    wrong = [outcome for outcome in outcomes if not outcome.right]
    worst = max(outcomes, key=lambda outcome: outcome.error / (outcome.allowed or 1.0))
    if args.json:
        content = {
            "sizes": len(outcomes),
            "refused": refused,
            "wrong": [_shown(outcome) for outcome in wrong],
            "worst": _shown(worst),
        }
        print(json.dumps(content, indent=1))
        return int(bool(wrong))
    print(f"{len(outcomes)} sizes, {len(wrong)} wrong, {refused} refused by the model")
    for outcome in wrong[:SHOWN] or [worst]:
        word = "right" if outcome.right else "wrong"
        dims = ", ".join(f"{name}={size}" for name, size in outcome.dims.items())
        print(f"  {word} at {dims}: error {outcome.error:.3g}", end="")
        print(f", allowed {outcome.allowed:.3g}")
    return int(bool(wrong))


def _shown(outcome: Outcome) -> dict[str, Any]:
    error = outcome.error if np.isfinite(outcome.error) else None
    return {"dims": dict(outcome.dims), "error": error, "allowed": outcome.allowed}


def _outcomes(
    args: argparse.Namespace, model: pliant.CompiledModel, reference: ReferenceModel
) -> Iterator[Outcome | None]:
    """As many as are wanted; None for sizes that the model refuses."""
    random = np.random.default_rng(args.seed)
    choices = [size for size in SIZES if size <= args.largest]
    wanted = args.random_shapes if reference.dims else 1
    for _ in range(TRIES * wanted):
        sizes = [int(random.choice(choices)) for _ in reference.dims]
        try:
            yield reference.compare(model, sizes)
        except ShapeError:
            yield None
            continue
        wanted -= 1
        if not wanted:
            return


def _reference(
    args: argparse.Namespace, against: ModelSource, model: pliant.CompiledModel
) -> ReferenceModel:
    if against.kind == ONNX:
        return _OnnxReference(against.name, model, args.tolerance, args.seed)
    return _TorchReference(against.case())


class _TorchReference:
    def __init__(self, case: Case) -> None:
        from pliant.compare import accuracy

        self.case, self.accuracy = case, accuracy
        self.dims = self.case.dims
        self.exact = accuracy.Reference(self.case.model)

    def compare(self, model: pliant.CompiledModel, sizes: Sequence[int]) -> Outcome:
        accuracy, inputs = self.accuracy, self.case.at(tuple(sizes))
        got = model(*inputs)
        exact = self.exact(inputs)
        plain = accuracy.eager(self.case.model, inputs)
        off = accuracy.error(plain, exact)
        return Outcome(
            dict(zip(self.dims, sizes, strict=True)),
            accuracy.error(got, exact),
            accuracy.allowed(exact, off, ours=True),
        )


class _OnnxReference:
    def __init__(
        self, path: str, model: pliant.CompiledModel, tolerance: float, seed: int
    ) -> None:
        self.run, takes = _onnx_runner(path)
        names = [slot.name for slot in model.arguments]
        if sorted(takes) != sorted(names):
            raise OptionError(
                f"{path} takes {', '.join(takes)}, and the model takes "
                f"{', '.join(names)}: it was not made of that file"
            )
        self.model, self.tolerance, self.seed = model, tolerance, seed
        slots = (dim for slot in model.arguments for dim in getattr(slot, "dims", ()))
        self.dims = tuple(dict.fromkeys(s for dim in slots for s in dim.symbols()))

    def compare(self, model: pliant.CompiledModel, sizes: Sequence[int]) -> Outcome:
        dims = dict(zip(self.dims, sizes, strict=True))
        inputs = inputs_of(model, {}, dims, self.seed + sum(sizes))
        got = [array for _, array in leaves(model(*inputs), "result")]
        names = (slot.name for slot in model.arguments)
        wanted = self.run(dict(zip(names, inputs, strict=True)))
        if len(got) != len(wanted):
            return Outcome(dims, np.inf, 0.0)
        pairs = list(zip(got, wanted, strict=True))
        error = max((_difference(ours, theirs) for ours, theirs in pairs), default=0.0)
        largest = max((_largest(theirs) for _, theirs in pairs), default=1.0)
        return Outcome(dims, error, self.tolerance * max(largest, 1.0))


def _onnx_runner(path: str) -> tuple[Any, list[str]]:
    """The results of named inputs, by another engine; and the names of these inputs."""
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(path)
        return lambda inputs: evaluator.run(None, inputs), list(evaluator.input_names)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda inputs: session.run(None, inputs), names


def _difference(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest; infinite where shapes, types, NaNs or infinities differ."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    if got.dtype.kind not in "fc":
        return 0.0 if np.array_equal(got, wanted) else float("inf")
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        apart = np.abs(got.astype(np.complex128) - wanted.astype(np.complex128))
    found = float(np.where(same, 0.0, apart).max(initial=0.0))
    return found if np.isfinite(found) else float("inf")


def _largest(array: np.ndarray) -> float:
    if array.dtype.kind not in "fc":
        return 1.0
    wide = np.abs(array[np.isfinite(array)].astype(np.complex128))
    return float(wide.max(initial=0.0))
