"""Times models against torch eager, torch.compile, ONNX Runtime, OpenVINO and TVM.

MODEL is file.py:function (a function that returns an object with `model`, `inputs`,
`dynamic_shapes`, `dims` and `example`), a program.pt2 that torch.export.save wrote, the
name of a model of the zoo (--zoo), or `zoo` for all of them.

Every model and thread count is measured in a process of its own, where the engines take
turns. Results are checked against fp64 before anything is timed; an engine that fails,
is wrong or is not installed is reported and left out. Needs an otherwise idle machine.

With --kernels only pliant runs, and the table says where its time goes: GFLOP/s and
GB/s of each kernel against what the machine was measured to reach. Small tensors stay
in cache, so their GB/s may exceed that of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pliant.commands.progress import progress
from pliant.errors import OptionError

if TYPE_CHECKING:
    from pliant.benchmark.worker import Job

NAME = "bench"
HELP = "times models against other engines"
SECONDS, QUICK_SECONDS = 3.0, 0.5  # of timing per shape
BUSY = 0.5  # load from which times are not to be trusted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--zoo", type=Path, help="file with models by name")
    parser.add_argument(
        "--peers",
        type=lambda text: [part for part in text.split(",") if part],
        help="such as eager,onnxruntime (default: all; '' for none)",
    )
    parser.add_argument(
        "--threads", type=_positive, nargs="+", help="default: 1 and every core"
    )
    parser.add_argument(
        "--shape", type=_shape, action="append", help="dims such as 1x32; repeatable"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"of timing per shape (default {SECONDS:g})"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="three shapes, short times, no memory, no engine that compiles for long",
    )
    parser.add_argument(
        "--kernels", action="store_true", help="where pliant's time goes, by kernel"
    )
    parser.add_argument("--output", type=Path, help="folder for JSON and Markdown")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def run(args: argparse.Namespace) -> int:
    from pliant.benchmark.report import failed, store_result, write_tables
    from pliant.benchmark.run import run_jobs
    from pliant.benchmark.tables import machine

    load = os.getloadavg()[0]
    about = {**machine(), "load": f"load {load:.1f} before the run"}
    if load > BUSY:
        text = f"the machine is busy (load {load:.1f}): do not trust these times"
        print(text, file=sys.stderr)
    keeps = args.output is not None and not args.kernels

    def keep(result: dict[str, Any]) -> None:
        if keeps:
            store_result(args.output, result, about)

    with tempfile.TemporaryDirectory() as folder, progress("starting") as say:
        results = run_jobs(_jobs(args, Path(folder)), say, keep)
    if keeps:
        write_tables(args.output)
    if args.kernels:
        _show_kernels(results, about, args.json)
    else:
        _show(results, about, args.json)
    return 1 if failed(results) else 0


def _jobs(args: argparse.Namespace, folder: Path) -> list[Job]:
    from pliant import target
    from pliant.benchmark.models import default_zoo, expand
    from pliant.benchmark.worker import Job

    zoo = args.zoo or default_zoo()
    if args.zoo is not None and not args.zoo.is_file():
        raise OptionError(f"no such file: {args.zoo}")
    jobs = []
    threads = args.threads or [1, target.host().cores]
    for number, name in enumerate(expand(args.models, zoo)):
        shared = folder / str(number)
        shared.mkdir()
        for count in dict.fromkeys(threads):
            job = Job(
                model=name,
                zoo=None if zoo is None else str(zoo),
                threads=count,
                engines=_engines(args.peers, args.quick),
                shapes=tuple(args.shape or ()),
                few_shapes=args.quick,
                seconds=args.seconds or (QUICK_SECONDS if args.quick else SECONDS),
                memory=not args.quick,
                kernels=args.kernels,
                folder=str(shared),
            )
            jobs.append(job)
    return jobs


def _engines(peers: list[str] | None, quick: bool) -> tuple[str, ...]:
    from pliant.benchmark.engines import ENGINES, OURS, PEERS

    if peers is None:
        chosen = [n for n in PEERS if not (quick and ENGINES[n].compiles_per_shape)]
        return (OURS, *chosen)
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise OptionError(f"no peer '{unknown[0]}'; there are {', '.join(PEERS)}")
    return (OURS, *peers)


def _show(results: list[dict[str, Any]], about: dict[str, str], as_json: bool) -> None:
    from pliant.benchmark import report
    from pliant.benchmark.tables import console, machine_line

    if as_json:
        content = {
            "machine": about,
            "results": results,
            "summary": report.summary(results),
        }
        print(json.dumps(content, indent=1))
        return
    out = console()
    for result in results:
        if result.get("rows"):
            report.model_table(result).show(out)
    report.compile_table(results).show(out)
    if any(result.get("memory_shape") for result in results):
        report.memory_table(results).show(out)
    if report.summary(results)["geomean"]:
        report.summary_table(results).show(out)
        report.slow_table(results).show(out)
    for line in report.left_out(results):
        out.print(line, markup=False, highlight=False)
    out.print(machine_line(about), markup=False, highlight=False)


def _show_kernels(
    results: list[dict[str, Any]], about: dict[str, str], as_json: bool
) -> None:
    from pliant.benchmark.roofline import limits, roofline_tables
    from pliant.benchmark.tables import console, machine_line

    measured = limits()
    if as_json:
        content = {"machine": about, "limits": measured, "results": results}
        print(json.dumps(content, indent=1))
        return
    out = console()
    for result in results:
        for table in roofline_tables(result, measured):
            table.show(out)
    for result in results:
        if "error" in result:
            out.print(f"{result['model']}: {result['error']}", markup=False)
    out.print(machine_line(about), markup=False, highlight=False)
