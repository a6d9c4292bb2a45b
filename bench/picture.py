"""Memory of a call over its length, as the README shows it: `python -m bench.picture`.

Resident memory above the start, measured as in bench.memory: a process for each engine
and length. Writes bench/results/picture.json and docs/memory_over_length.svg; --draw
draws what is stored. Needs no idle machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from bench.memory import run
from bench.script import RESULTS, ROOT
from pliant.compare.engines import ENGINES, OURS
from pliant.compare.results import stamp
from pliant.report.drawing import Chart, Series, svg

MODEL, BATCH, LENGTHS = "minilm", 8, (128, 256, 384, 512)
SHOWN = (OURS, "onnxruntime", "eager")
STORED, PICTURE = RESULTS / "picture.json", ROOT / "docs" / "memory_over_length.svg"


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {engine: {} for engine in SHOWN}
    with tempfile.TemporaryDirectory() as folder:
        for engine in SHOWN:
            for length in LENGTHS:
                print(f"  {engine} {length}", file=sys.stderr)
                job = {"model": MODEL, "engine": engine, "folder": folder}
                found[engine][length] = run({**job, "shape": (BATCH, length)})
    return found


def chart(found: dict[str, Any]) -> Chart:
    """The engines that were there."""
    series: list[Series] = []
    for engine, rows in found.items():
        points = tuple(
            (int(length), row["bytes"] / 2**20)
            for length, row in rows.items()
            if "bytes" in row
        )
        if points:
            series.append(Series(ENGINES[engine].title, points))
    if all("plan" in row for row in found[OURS].values()):
        planned = tuple((int(k), r["plan"] / 2**20) for k, r in found[OURS].items())
        series.append(Series("what pliant said before the call", planned))
    title = f"Memory of one call: {MODEL}, {BATCH} texts, by their length"
    return Chart(title, "tokens", "MiB", tuple(series), height=300, ends=True)


def main() -> None:
    if "--draw" not in sys.argv:
        content = {"stamp": stamp(0), "engines": measure()}
        STORED.write_text(json.dumps(content, indent=1) + "\n")
    stored = json.loads(STORED.read_text())
    drawn = svg(chart(stored["engines"]))
    paper = '><rect width="100%" height="100%" fill="white"/>'
    PICTURE.write_text(drawn.replace(">", paper, 1) + "\n")  # readable on a dark page
    print(f"written: {PICTURE}")


if __name__ == "__main__":
    main()
