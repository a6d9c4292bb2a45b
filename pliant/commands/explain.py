"""Tells what became of a model: symbols, guards, kernels, memory.

The model is compiled. Of a file.pliant it is what was known when it was saved.
"""

from __future__ import annotations

import argparse
import json

from pliant.commands.models import add_dynamic, add_model, source
from pliant.commands.run import dims_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--threads", type=int, help="default: every core")
    add_dynamic(parser)
    parser.add_argument(
        *("--dims", "-d"),
        metavar="DIMS",
        type=dims_of,
        action="append",
        default=[],
        help="tells how matrix products are cut there, such as batch=1,seq=7",
    )


def run(args: argparse.Namespace) -> int:
    model = source(args.model, args.dynamic).opened(args.threads)
    text = model.explain(**{n: k for dims in args.dims for n, k in dims.items()})
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
