"""Runs a model: on arrays from files, or on random ones of given sizes.

A file.pliant runs as it is; any other model is compiled first. --input takes .npy, .npz
or .safetensors: `name=x.npy` is one input, a file of several has them by their names.
With --dims, inputs that are not given are random: floats from a normal distribution,
integers 0 or 1; those of a file.py are like its example. Results go to the file of
--output (.npz, .safetensors, or .npy of a single one), or are only described.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import pliant
from pliant.commands.models import (
    LANGUAGE,
    SAVED,
    ModelSource,
    add_dynamic,
    add_model,
    inputs_at,
    source,
)
from pliant.errors import OptionError
from pliant.frontend.signature import FixedSlot, SizeSlot, Slot
from pliant.ir.types import NUMPY

SUFFIXES = (".npz", ".npy", ".safetensors")
REFUSED = {LANGUAGE: "a language model takes text: `pliant chat` talks with it"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        *("--input", "-i"),
        metavar="[NAME=]FILE",
        action="append",
        default=[],
        help="arrays: .npy, .npz or .safetensors",
    )
    parser.add_argument(
        "--dims",
        metavar="DIMS",
        type=dims_of,
        default={},
        help="sizes of random inputs, such as batch=2,seq=8",
    )
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="as --input")
    parser.add_argument("--memory-limit", metavar="BYTES", help="such as 500MiB")
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="the model must be signed with it"
    )
    parser.add_argument("--threads", type=int, help="default: every core")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs")
    add_dynamic(parser)


def dims_of(text: str) -> dict[str, int]:
    """NAME=SIZE,.. of a command line."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, sign, size = part.strip().partition("=")
        if not (name and sign and size.isdecimal()):
            raise argparse.ArgumentTypeError(f"'{part}' is not NAME=SIZE")
        found[name] = int(size)
    return found


def run(args: argparse.Namespace) -> int:
    if args.output is not None and args.output.suffix not in SUFFIXES:
        raise OptionError(f"results go to {', '.join(SUFFIXES)}, not to {args.output}")
    started = perf_counter()
    given = source(args.model, args.dynamic, REFUSED)
    model = given.opened(args.threads, args.memory_limit, args.key)
    loaded = perf_counter()
    inputs = _inputs(args, given, model)
    began = perf_counter()
    results = dict(leaves(model(*inputs), "result"))
    ended = perf_counter()
    if args.output is not None:
        _write(args.output, results)
    content = {
        "load_seconds": loaded - started,
        "run_seconds": ended - began,
        "peak_bytes": model.stats()["last_peak_bytes"],
        "results": {
            name: {"dtype": str(array.dtype), "shape": list(array.shape)}
            for name, array in results.items()
        },
    }
    if args.json:
        print(json.dumps(content, indent=1))
        return 0
    how = "loaded" if given.kind == SAVED else "compiled"
    print(f"{how} in {1e3 * (loaded - started):.1f} ms, ", end="")
    print(f"ran in {1e3 * (ended - began):.1f} ms, peak {content['peak_bytes']} bytes")
    for name, array in results.items():
        print(f"  {name:24} {array.dtype} {list(array.shape)}")
    return 0


def _inputs(
    args: argparse.Namespace, given: ModelSource, model: pliant.CompiledModel
) -> list[Any]:
    if not given.is_case or args.input:
        return inputs_of(model, _read(args.input), args.dims, args.seed)
    return inputs_at(given.case(), args.dims)


def _read(given: list[str]) -> dict[str, np.ndarray]:
    """The arrays of all files, by name; one without a name is the next input."""
    found: dict[str, np.ndarray] = {}
    for text in given:
        name, sign, file = text.rpartition("=")
        path = Path(file)
        try:
            if path.suffix == ".npz":
                with np.load(path) as arrays:
                    found |= {key: arrays[key] for key in arrays}
            elif path.suffix == ".safetensors":
                from safetensors.numpy import load_file

                found |= load_file(path)
            elif path.suffix == ".npy":
                found[name if sign else f"#{len(found)}"] = np.load(path)
            else:
                raise OptionError(f"{path} is neither .npy, .npz nor .safetensors")
        except (OSError, ValueError) as error:
            raise OptionError(f"cannot read {path}: {error}") from None
    return found


def _write(path: Path, results: Mapping[str, np.ndarray]) -> None:
    try:
        if path.suffix == ".npz":
            np.savez(path, allow_pickle=False, **results)
        elif path.suffix == ".safetensors":
            from safetensors.numpy import save_file

            save_file({k: np.ascontiguousarray(v) for k, v in results.items()}, path)
        elif len(results) == 1:
            (array,) = results.values()
            np.save(path, array, allow_pickle=False)
        else:
            raise OptionError(f"{path} holds one array, and there are {len(results)}")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error}") from None


def inputs_of(
    model: pliant.CompiledModel,
    given: Mapping[str, np.ndarray],
    dims: Mapping[str, int],
    seed: int,
) -> list[Any]:
    """One value for each argument of the model."""
    slots = model.arguments
    unnamed = iter([array for name, array in given.items() if name.startswith("#")])
    known = {name: array for name, array in given.items() if not name.startswith("#")}
    unknown = sorted(known.keys() - {slot.name for slot in slots})
    if unknown:
        names = ", ".join(slot.name for slot in slots)
        raise OptionError(f"no input {', '.join(unknown)}: the model takes {names}")
    random = np.random.default_rng(seed)
    values: list[Any] = []
    for slot in slots:
        if slot.name in known:
            values.append(known[slot.name])
        else:
            array = next(unnamed, None)
            values.append(_random(slot, dims, random) if array is None else array)
    return values


def _random(slot: Slot, dims: Mapping[str, int], random: np.random.Generator) -> Any:
    if isinstance(slot, FixedSlot):
        return slot.value
    wanted = sorted({name for dim in slot.dims for name in dim.symbols()})
    missing = [name for name in wanted if name not in dims]
    if missing:
        raise OptionError(
            f"input '{slot.name}' is not given, and of --dims {', '.join(missing)} is "
            "missing to make a random one"
        )
    shape = [dim.evaluate(dims) for dim in slot.dims]
    if isinstance(slot, SizeSlot):
        return shape[0]
    if slot.type.dtype.is_float:
        return random.standard_normal(shape).astype(NUMPY[slot.type.dtype])
    return random.integers(0, 2, shape).astype(NUMPY[slot.type.dtype])


def leaves(value: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, str(key) if name == "result" else f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from leaves(item, f"{name}.{number}")
    elif value is not None:
        yield name, np.asarray(value)
