"""What compiling takes, cold: `python -m bench.compile_time [MODEL..]`, 8 minutes.

CPU seconds of a fresh process with an empty cache: those inside torch.export (all the
traces that a model needs), and those after it, for all its programs. The package has
its bytecode, as an installed one does. Models are the zoo's, BERT with 12, 24 and 48
layers, and architectures of the scorecards that took longest ("timm/..",
"diffusers/.."; `make coverage-models` installs what they need). CPU seconds count both
cores, so the wall clock shows fewer. Writes bench/results/compile_time.json and .md.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import pliant
import zoo
from bench.coverage import architectures
from bench.coverage.architecture import Plain
from bench.script import save, show, tell
from pliant.compare.tables import Report

GROWTH = ("bert@12", "bert@24", "bert@48")
VISION = (
    *("timm/mvitv2_tiny", "timm/hrnet_w18_small", "timm/inception_v3"),
    *("timm/edgenext_xx_small", "timm/efficientnet_b0"),
    *("timm/swin_tiny_patch4_window7_224", "diffusers/UNet2DConditionModel"),
)
MODELS = (*zoo.MODELS, *GROWTH, *VISION)


def cpu_seconds() -> float:
    """Of this process and of the children that it waited for."""
    return sum(os.times()[:4])


def compiled(name: str) -> Callable[[], Any]:
    """What compiles a model: one of the zoo, also name@layers, or of a scorecard."""
    if "/" not in name:
        model, _, layers = name.partition("@")
        case = zoo.build(model, **({"layers": int(layers)} if layers else {}))
        return case.compile
    entry = architectures.entries()[name]
    plain = Plain(entry.build().eval(), entry.names, entry.fixed).eval()
    example = entry.inputs(*entry.sizes[0])
    return lambda: pliant.compile(plain, example, {"inputs": entry.dims})


def seconds_of(name: str) -> dict[str, float]:
    """Compiles a model here: seconds of the CPU and of the clock."""
    spent = {"export": 0.0}
    export = torch.export.export

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = cpu_seconds()
        try:
            return export(*args, **kwargs)
        finally:
            spent["export"] += cpu_seconds() - started

    compile = compiled(name)
    started, clock = cpu_seconds(), time.perf_counter()
    with mock.patch.object(torch.export, "export", timed), torch.no_grad():
        model = compile()
    spent["after"] = cpu_seconds() - started - spent["export"]
    spent["clock"] = time.perf_counter() - clock
    spent["programs"] = len(model.programs())
    spent["kernels"] = model.stats()["kernels"]
    return spent


def measured(name: str) -> dict[str, Any]:
    """The same in a fresh process with an empty cache; or why there is no number."""
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.run(
            [sys.executable, "-m", "bench.compile_time", "--here", name],
            env={**os.environ, "PLIANT_CACHE": folder, "PYTHONDONTWRITEBYTECODE": ""},
            capture_output=True,
            text=True,
        )
    if child.returncode:
        return {"failed": (child.stderr.splitlines() or ["no message"])[-1][:100]}
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in found:
        return name, found["failed"], *[""] * 4
    seconds = (f"{found[key]:.1f}" for key in ("export", "after", "clock"))
    return name, *seconds, str(found["programs"]), str(found["kernels"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.compile_time", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=MODELS)
    parser.add_argument("--here", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here is not None:
        print(json.dumps(seconds_of(arguments.here)))
        return 0
    tell(len(arguments.models) / 3, "compiling")
    compileall.compile_dir(Path(pliant.__file__).parent, quiet=1)
    found = {}
    for name in arguments.models:
        found[name] = measured(name)
        print("  ", *row(name, found[name]), file=sys.stderr, flush=True)
    table = Report(
        "Seconds to compile in a fresh process with an empty cache",
        (
            *("model", "CPU: torch.export", "CPU: after it", "clock"),
            *("programs", "loop functions"),
        ),
        tuple(row(name, seconds) for name, seconds in found.items()),
    )
    show([table])
    if tuple(arguments.models) == MODELS:
        save("compile_time", {"models": found}, [table], 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
