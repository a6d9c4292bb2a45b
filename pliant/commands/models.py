"""What a command takes as a model, compiled: a saved one, or one to compile."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import pliant
from pliant.errors import OptionError
from pliant.progress import task

SAVED, ONNX = ".pliant", ".onnx"

Dynamic = tuple[str, dict[int, str | int]]


def add_dynamic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dynamic",
        metavar="INPUT:AXIS=NAME,..",
        type=_dynamic,
        action="append",
        default=[],
        help="dims of an input that may vary; for every such input once",
    )


def _dynamic(text: str) -> Dynamic:
    name, sign, dims = text.rpartition(":")
    found: dict[int, str | int] = {}
    for part in dims.split(","):
        axis, equals, size = part.partition("=")
        if not (sign and name and axis.isdecimal() and equals and size):
            raise argparse.ArgumentTypeError(f"'{text}' is not INPUT:AXIS=NAME,..")
        found[int(axis)] = int(size) if size.isdecimal() else size
    return name, found


def compiled(
    name: str, dynamic: list[Dynamic] | None = None, **how: Any
) -> pliant.CompiledModel:
    """Compiles a model; `how` are arguments of `pliant.compile`."""
    with task(f"compiling {name}"):
        if name.endswith(ONNX):
            shapes: Mapping[str, Any] | None = dict(dynamic or ()) or None
            return pliant.compile(name, dynamic_shapes=shapes, **how)
        if dynamic:
            raise OptionError(
                "--dynamic is for ONNX models; this one names its own dims"
            )
        from pliant.cases import load

        return load(name).compile(**how)


def opened(
    name: str,
    *,
    threads: int | None = None,
    memory_limit: str | None = None,
    dynamic: list[Dynamic] | None = None,
) -> pliant.CompiledModel:
    """A saved model, loaded, or any other, compiled."""
    if not name.endswith(SAVED):
        how = {"threads": threads, "memory_limit": memory_limit}
        return compiled(name, dynamic, **how)
    if dynamic:
        raise OptionError("--dynamic is for ONNX models; this one is compiled already")
    return pliant.load(name, threads=threads, memory_limit=memory_limit)
