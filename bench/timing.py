"""What the scripts here share: pliant.benchmark, and where results are kept."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pliant.benchmark.accuracy import eager, error, scale
from pliant.benchmark.models import (
    Case,
    Shape,
    default_zoo,
    expand,
    few,
    load,
    load_zoo,
)
from pliant.benchmark.tables import (
    Report,
    console,
    dims_text,
    machine,
    machine_line,
    mebibytes,
)
from pliant.benchmark.timing import Spread, geomean, interleaved, ratios, settle

__all__ = [
    "RESULTS",
    "Case",
    "Report",
    "Shape",
    "Spread",
    "add_model_arguments",
    "cases",
    "console",
    "default_zoo",
    "dims_text",
    "eager",
    "error",
    "few",
    "geomean",
    "interleaved",
    "load_zoo",
    "machine",
    "machine_line",
    "mebibytes",
    "ratios",
    "scale",
    "settle",
    "store",
]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def store(name: str, content: Mapping[str, Any]) -> Path:
    """Writes a result as JSON: a line for each row, numbers to four digits."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    parts = (f" {json.dumps(key)}: {_lines(value)}" for key, value in content.items())
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    return path


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(_short(value))
    rows = ",\n  ".join(json.dumps(_short(row)) for row in value)
    return f"[\n  {rows}\n ]"


def _short(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.4g}")
        case Mapping():
            return {key: _short(held) for key, held in value.items()}
        case list() | tuple():
            return [_short(held) for held in value]
    return value


def add_model_arguments(parser: argparse.ArgumentParser, *default: str) -> None:
    """MODEL.., --zoo and --shape, as `pliant bench` takes them."""
    parser.add_argument("models", nargs="*", default=list(default), metavar="MODEL")
    parser.add_argument("--zoo", type=Path, default=default_zoo())
    parser.add_argument("--shape", type=_dims, action="append", help="such as 1x32")


def _dims(text: str) -> Shape:
    return tuple(int(part) for part in text.split("x"))


def cases(arguments: argparse.Namespace) -> dict[str, Case]:
    """The models asked for, by name."""
    names = expand(arguments.models, arguments.zoo)
    return {name: load(name, arguments.zoo) for name in names}
