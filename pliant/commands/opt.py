"""Runs stages of the compiler on a module in text form, and prints what they make.

FILE is the text of a module: written by hand, or a dump of PLIANT_DUMP, edited or not
(the weights of a dump are found beside it); `-` reads it from the standard input.

    pliant opt model.ir -p canonicalize,decompose,fuse
    pliant opt dump/17_fuse.ir -p lower,order --dims n=5
    pliant opt --list

The module is verified before the first stage and after each. With --dims it is also
interpreted, before and after each stage, on random inputs of those sizes; results that
differ are an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pliant import knobs
from pliant.context import Context, Training
from pliant.errors import OptionError, PliantError
from pliant.ir.dumps import read_module
from pliant.ir.graph import Graph, Module, walk
from pliant.ir.interp import run_graph
from pliant.ir.ops import ATTENTIONS, Trait, has_trait
from pliant.ir.parse import ParseError
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.ir.types import NUMPY, DType
from pliant.machine import target
from pliant.options import SWITCHES, Options
from pliant.passes.bind import Bound, results_of
from pliant.pipeline import STAGES, Pass

# Results of a module before and after a stage differ by the order of additions only.
TOLERANCES = {DType.F64: 1e-9, DType.F32: 1e-3, DType.F16: 3e-2, DType.BF16: 1e-1}
LEVELS = tuple(Stage)  # each allows what those before it do not


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path)
    parser.add_argument(
        *("-p", "--passes"),
        metavar="NAME,...",
        default="",
        help="stages to run, in this order; none: only verify",
    )
    parser.add_argument(
        "--dims",
        metavar="NAME=SIZE,...",
        default="",
        help="interpret before and after at these sizes",
    )
    parser.add_argument("--target", help="a class of machine, or a file; default: host")
    parser.add_argument(
        "--off", metavar="NAME,...", default="", help="switches of Options to turn off"
    )
    parser.add_argument(
        "--train",
        metavar="PARAM,...",
        default="",
        help="for the stages of training: parameters to differentiate by",
    )
    parser.add_argument(
        "--update",
        metavar="PARAM,...",
        default="",
        help="parameters whose new values the results behind the first are",
    )
    parser.add_argument("--list", action="store_true", help="list the stages")


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args.json)
    if args.file is None:
        raise OptionError("give a FILE with a module, '-' for the standard input")
    stages = [_stage(name) for name in _names(args.passes)]
    module = _read(args.file)
    cx = _context(args)
    sample = Sample(module.main, _dims(args.dims)) if args.dims else None
    for number, after in enumerate(optimised(module, stages, cx)):
        if sample is not None:
            sample.check("input" if number == 0 else stages[number - 1].name, after)
        module = after
    text = print_module(module)
    if args.json:
        answer = {
            "passes": [stage.name for stage in stages],
            "interpreted": sample is not None,
            "text": text,
        }
        print(json.dumps(answer, indent=1))
    else:
        print(text, end="")
    return 0


def optimised(module: Module, stages: Sequence[Pass], cx: Context) -> list[Module]:
    """The module as given and after each stage, every one of them verified."""
    level = level_of(module)
    verify(module, level)
    made = [module]
    for stage in stages:
        module = stage.run(module, cx)
        level = max(level, stage.legal, key=LEVELS.index)
        verify(module, level)
        made.append(module)
    return made


def level_of(module: Module) -> Stage:
    """The stage whose rules a module is written by."""
    ops = list(walk(module.main))
    if any(op.name in ("alloc", "view") for op in ops):
        return Stage.LOWERED
    if any(op.name == "fusion" for op in ops):
        return Stage.FUSED
    composite = (has_trait(op, Trait.COMPOSITE) for op in ops)
    names = (op.name in ATTENTIONS for op in ops)
    pairs = zip(composite, names, strict=True)
    whole = any(found and not attends for found, attends in pairs)
    return Stage.IMPORTED if whole else Stage.DECOMPOSED


# ---- arguments


def _list(as_json: bool) -> int:
    if as_json:
        rows = [
            {
                "name": stage.name,
                "what_for": stage.what_for,
                "legal": stage.legal.value,
                "only": stage.only.value if stage.only else None,
                "needs": stage.needs,
                "reads": stage.reads,
            }
            for stage in STAGES
        ]
        print(json.dumps(rows, indent=1))
        return 0
    for stage in STAGES:
        switches = ", ".join((*stage.needs, *stage.reads))
        print(f"{stage.line():76} {switches}".rstrip())
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _stage(name: str) -> Pass:
    for stage in STAGES:
        if stage.name == name:
            return stage
    known = ", ".join(stage.name for stage in STAGES)
    raise OptionError(f"there is no stage '{name}'; the stages are {known}")


def _read(path: Path) -> Module:
    try:
        if str(path) == "-":
            return read_module(Path("module.ir"), sys.stdin.read())
        return read_module(path)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from None
    except (ParseError, UnicodeDecodeError) as error:
        raise PliantError(f"{path} is not a module: {error}") from None


def _dims(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in _names(text):
        name, sign, size = part.partition("=")
        if not (name and sign and size.isdecimal()):
            raise OptionError(f"'{part}' is not NAME=SIZE")
        found[name] = int(size)
    return found


def _context(args: argparse.Namespace) -> Context:
    off = _names(args.off)
    unknown = [name for name in off if name not in SWITCHES]
    if unknown:
        raise OptionError(
            f"there is no switch {', '.join(unknown)}; they are {', '.join(SWITCHES)}"
        )
    trained, updates = _names(args.train), _names(args.update)
    training = None
    if trained or updates:
        training = Training(
            tuple(trained), lambda b, params, gradients: gradients, tuple(updates)
        )
    chosen = target.named(args.target or knobs.TARGET.get())
    return Context(Options(**dict.fromkeys(off, False)), chosen, training)


# ---- interpreting


@dataclass(slots=True)
class Sample:
    """Inputs of known sizes, and the results that every stage must keep."""

    main: Graph
    dims: dict[str, int]
    wanted: list[Any] | None = None
    bound: Bound | None = None  # what the results are if some have sizes of data

    def inputs(self) -> list[Any]:
        numbers = np.random.default_rng(0)
        made: list[Any] = []
        for value in self.main.params:
            missing = [s for d in value.shape for s in d.symbols()]
            missing = [name for name in missing if name not in self.dims]
            if missing:
                raise OptionError(f"--dims gives no size for {', '.join(missing)}")
            shape = [d.evaluate(self.dims) for d in value.shape]
            drawn: Any
            if value.dtype.is_float:
                drawn = numbers.standard_normal(shape)
            else:  # small enough to be indices
                drawn = numbers.integers(0, 2, shape)
            kind = np.float32 if value.dtype is DType.BF16 else NUMPY[value.dtype]
            made.append(np.asarray(drawn).astype(kind))
        return made

    def check(self, stage: str, module: Module) -> None:
        """The results of a module, which must be those before it."""
        if stage == "bind":
            self.bound = results_of(self.main, module.main)
        self._compare(stage, module, "main", {})
        for version in module.versions:
            for rows in (1, 2, max(self.dims.values(), default=1)):
                knobs = dict.fromkeys(module.knobs, max(rows, 1))
                self._compare(stage, module, version.name, knobs)

    def _compare(
        self, stage: str, module: Module, graph: str, knobs: dict[str, int]
    ) -> None:
        env = {**self.dims, **knobs, "threads": 2}
        found = run_graph(module, self.inputs(), graph, env, workers=2)
        if self.bound is not None:
            found = self.bound.cut(found, self.dims)
        if self.wanted is None or len(found) != len(self.wanted):
            self.wanted = found  # a stage of training gives other results
            return
        for number, (a, b) in enumerate(zip(found, self.wanted, strict=True)):
            tolerance = TOLERANCES.get(module.main.results[number].dtype, 0.0)
            same = a.shape == b.shape and np.allclose(
                a, b, rtol=tolerance, atol=tolerance, equal_nan=True
            )
            if not same:
                raise PliantError(
                    f"result {number} of {graph} is another after {stage}, at "
                    + ", ".join(f"{k}={v}" for k, v in (self.dims | knobs).items())
                )
