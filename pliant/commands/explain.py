"""Tells what became of a model: symbols, guards, kernels, memory.

The model is compiled. Of a file.pliant it is what was known when it was saved.
"""

from __future__ import annotations

import argparse
import json

from pliant.commands.models import add_dynamic, add_model, source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--threads", type=int, help="default: every core")
    add_dynamic(parser)
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
    model = source(args.model, args.dynamic).opened(args.threads)
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
