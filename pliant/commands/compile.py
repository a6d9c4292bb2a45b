"""Compiles a model and writes it to a file, which `pliant run` and `pliant.load` take.

--dynamic names the dims of an ONNX model that may vary: "ids:0=batch,1=seq". Without
it, they are those that the file has names for. Other models name their own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pliant
from pliant.commands.models import (
    LANGUAGE,
    SAVED,
    add_dynamic,
    add_model,
    key_of,
    source,
)

REFUSED = {
    SAVED: "is compiled already: `pliant run` and `pliant.load` take it",
    LANGUAGE: "a language model is not saved; `pliant chat` and `pliant.load_gguf` "
    "compile it when they start",
}
LONG = 400  # letters of a formula


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", required=True)
    add_dynamic(parser)
    parser.add_argument("--memory-limit", metavar="BYTES", help="such as 500MiB")
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="signs the file with what is in FILE"
    )
    parser.add_argument(
        "--target",
        metavar="NAME",
        action="append",
        default=[],
        help="machine to compile for (default: this one); several go into one file",
    )


def run(args: argparse.Namespace) -> int:
    from pliant.machine import target

    names = args.target or [None]
    targets = [None if name is None else target.named(name) for name in names]
    limit = args.memory_limit
    given = source(args.model, args.dynamic, REFUSED)
    key = None if args.key is None else key_of(args.key)
    models = [given.compiled(target=chosen, memory_limit=limit) for chosen in targets]
    digest = models[0].save(args.output, variants=models[1:])
    if key is not None:
        pliant.sign(args.output, key)
    content: dict[str, Any] = {
        "file": str(args.output),
        "bytes": args.output.stat().st_size,
        "weight_bytes": models[0].weight_bytes,
        "dims": models[0].dims,
        "peak": models[0].peak_summary,
        "peak_formula": models[0].peak_formula,
        "digest": digest,
    }
    if args.json:
        print(json.dumps(content, indent=1))
    else:
        for name, value in content.items():
            if name == "peak_formula" and len(value) > LONG:
                value = "long: --json prints it"
            shown = ", ".join(value) if isinstance(value, tuple) else value
            print(f"{name.replace('_', ' '):13} {shown}")
    return 0
