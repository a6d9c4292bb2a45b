"""What is in the file of a saved model, for `pliant inspect`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pliant
from pliant.artifact.container import CODE, WEIGHT, open_container
from pliant.artifact.read import read_plan, tensor_bytes
from pliant.errors import OptionError
from pliant.frontend.signature import FixedSlot


def run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        raise OptionError("--plot compiles variants of a model: give its source")
    content = _content(Path(args.model))
    if args.memory is not None:
        model = pliant.load(args.model, threads=args.threads)
        plan = model.memory_plan(memory_limit=args.memory_limit, **args.memory)
        content["memory"] = {
            "dims": dict(plan.dims),
            "peak_bytes": plan.peak_bytes,
            "arena_bytes": plan.arena_bytes,
            "output_bytes": plan.output_bytes,
            "lower_bound": plan.lower_bound,
        }
    if args.json:
        print(json.dumps(content, indent=1))
    else:
        _print(content, "")
    return 0


def _content(path: Path) -> dict[str, Any]:
    """Without running any code of the file."""
    file = open_container(path)
    model = read_plan(file)
    sizes = tensor_bytes(file)
    first = model.variants[0].programs[0]
    signature = first.signature
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "digest": file.digest,
        "written_by": f"pliant {model.version}",
        "weight_bytes": _sum(sizes, WEIGHT),
        "code_bytes": _sum(sizes, CODE),
        "memory_limit": model.memory_limit,
        "dims": list(first.image.parts[-1].symbols),
        "inputs": {
            slot.name: f"fixed: {slot.value!r}"
            if isinstance(slot, FixedSlot)
            else str(getattr(slot, "type", "int"))
            for slot in signature.arguments
        },
        "results": str(signature.call.nesting.results),
        "buffers": [name for name, _ in model.buffers],
        "targets": {
            variant.target: {
                "architecture": variant.architecture,
                "features": " ".join(variant.features),
                "programs": len(variant.programs),
                "kernels": sum(
                    part.kernels for p in variant.programs for part in p.image.parts
                ),
            }
            for variant in model.variants
        },
    }


def _sum(sizes: Mapping[str, int], kind: str) -> int:
    return sum(size for name, size in sizes.items() if name.startswith(kind))


def _print(content: Mapping[str, Any], indent: str) -> None:
    for name, value in content.items():
        label = f"{indent}{name.replace('_', ' ') if not indent else name}"
        if isinstance(value, Mapping):
            print(label)
            _print(value, indent + "  ")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            print(f"{label:16} {'none' if text in (None, '') else text}")
