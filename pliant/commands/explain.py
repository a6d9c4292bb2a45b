"""Compiles a model and tells what became of it: symbols, guards, kernels, memory.

MODEL is file.py:function (a function that returns an object with `model`, `inputs`,
`dynamic_shapes`, `dims` and `example`), a program.pt2 that torch.export.save wrote, or
in a checkout the name of a model of the zoo.
"""

from __future__ import annotations

import argparse
import json

from pliant.progress import task

NAME = "explain"
HELP = "what a model is compiled to"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--threads", type=int, help="default: every core")
    parser.add_argument(
        *("--dim", "-d"),
        metavar="NAME=SIZE",
        type=_dim,
        action="append",
        default=[],
        help="tells how matrix products are cut at that size; for every dim once",
    )


def _dim(text: str) -> tuple[str, int]:
    name, sign, size = text.partition("=")
    if not (name and sign and size.isdecimal()):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=SIZE")
    return name, int(size)


def run(args: argparse.Namespace) -> int:
    from pliant.cases import load

    with task(f"compiling {args.model}"):
        model = load(args.model).compile(threads=args.threads)
    text = model.explain(**dict(args.dim))
    if not args.json:
        print(text)
        return 0
    stats = model.stats()
    content = {
        "model": args.model,
        "dims": model.dims,
        "peak_formula": model.peak_formula,
        "weight_bytes": model.weight_bytes,
        "kernels": stats["kernels"],
        "kernel_calls": stats["kernel_calls"],
        "threads": stats["threads"],
        "stage_seconds": stats["stage_seconds"],
        "text": text,
    }
    print(json.dumps(content, indent=1))
    return 0
