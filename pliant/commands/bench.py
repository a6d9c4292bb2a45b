"""Times models against torch eager, torch.compile, ONNX Runtime, OpenVINO and TVM.

Without --shape or --dims, sizes are chosen: multiples of the example's, first longer
inputs and then several of them, up to the largest that the model takes. A file.onnx is
timed against ONNX Runtime, a file.pliant and a file.gguf alone; none of them needs
torch. `zoo` stands for every model of the zoo.

"peak MiB" is what one call of ours allocates, results included and weights not: the
memory plan, which the call keeps to the byte.

Every model and thread count is measured in a process of its own, where the engines take
turns. Results are checked against fp64 before anything is timed; an engine that fails,
is wrong or is not installed is reported and left out. Needs an otherwise idle machine,
and says how long it will take.

torch.compile takes minutes for some models. With --keep its cache and the ONNX files
outlive the run; `--keep FOLDER --prepare` fills the folder and times nothing, which
needs no idle machine. Compile seconds are then those of the run that filled it, if that
had the machine to itself.

With --kernels only pliant runs, and the table says where its time goes: GFLOP/s and
GB/s of each kernel against what the machine was measured to reach. Small tensors stay
in cache, so their GB/s may exceed that of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pliant.commands import bench_file
from pliant.commands.models import LANGUAGE, MODELS, ONNX, SAVED, source
from pliant.commands.run import dims_of
from pliant.errors import OptionError
from pliant.frontend.torch_tensors import need_torch
from pliant.progress import task

if TYPE_CHECKING:
    from pliant.compare.worker import Job

QUICK_ROUNDS = 5
BUSY = 0.5  # system load above which measured times are not reliable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.epilog = MODELS
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
        "--dims",
        type=dims_of,
        action="append",
        metavar="DIMS",
        help="the same by name, such as batch=1,seq=32; repeatable",
    )
    parser.add_argument(
        "--rounds", type=_positive, help="of timing per shape (default 15)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="three shapes, few rounds, no engine that compiles for long",
    )
    parser.add_argument(
        "--kernels", action="store_true", help="where pliant's time goes, by kernel"
    )
    parser.add_argument("--output", type=Path, help="folder for JSON and Markdown")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep what engines compile here"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="fill the folder of --keep, time nothing"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def run(args: argparse.Namespace) -> int:
    given = [source(name) for name in args.models]
    if any(model.kind in (SAVED, ONNX, LANGUAGE) for model in given):
        return bench_file.run(args, given)
    need_torch("timing a torch model")
    from pliant.compare.estimate import estimate
    from pliant.compare.report import failed, store_result, write_tables
    from pliant.compare.results import stamp
    from pliant.compare.run import run_jobs

    if args.prepare and args.keep is None:
        raise OptionError("--prepare fills the folder of --keep: give one")
    keeps = args.output is not None and not args.kernels and not args.prepare
    with tempfile.TemporaryDirectory() as folder:
        jobs = _jobs(args, args.keep or Path(folder))
        about = stamp(jobs[0].rounds)
        if about["load"] > BUSY and not args.prepare:
            text = (
                f"the machine is busy (load {about['load']}): do not trust these times"
            )
            print(text, file=sys.stderr)
        if not args.kernels:
            print(estimate(jobs, args.output).text(), file=sys.stderr, flush=True)

        def keep(result: dict[str, Any]) -> None:
            if keeps:
                store_result(args.output, result, about)

        with task("starting") as say:
            results = run_jobs(jobs, say, keep)
    if keeps:
        write_tables(args.output)
    if args.kernels:
        _show_kernels(results, about, args.json)
    else:
        _show(results, about, args.json)
    return 1 if failed(results) else 0


def _jobs(args: argparse.Namespace, folder: Path) -> list[Job]:
    from pliant.cases import expand
    from pliant.compare.timing import ROUNDS
    from pliant.compare.worker import Job
    from pliant.machine import target

    jobs = []
    threads = args.threads or [1, target.host().cores]
    for name in expand(args.models):
        shared = folder / _folder_name(name)
        shared.mkdir(parents=True, exist_ok=True)
        shapes = tuple(args.shape or ()) + _by_name(name, args.dims or [])
        for count in dict.fromkeys(threads):
            job = Job(
                model=name,
                threads=count,
                engines=_engines(args.peers, args.quick),
                shapes=shapes,
                few_shapes=args.quick,
                rounds=args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS),
                kernels=args.kernels,
                folder=str(shared),
                kept=args.keep is not None,
                only_prepare=args.prepare,
            )
            jobs.append(job)
    return jobs


def _by_name(model: str, given: list[dict[str, int]]) -> tuple[tuple[int, ...], ...]:
    """Shapes of --dims, in the order of the model's own."""
    if not given:
        return ()
    from pliant.cases import load

    names = load(model).dims
    if any(set(dims) != set(names) for dims in given):
        raise OptionError(f"--dims needs every dim: {', '.join(names) or 'none'}")
    return tuple(tuple(dims[name] for name in names) for dims in given)


def _folder_name(model: str) -> str:
    """Of what is made from a model: another for another source or torch."""
    import torch

    from pliant.cases import sources

    content = b"".join(path.read_bytes() for path in sources(model))
    key = hashlib.sha256(content + torch.__version__.encode()).hexdigest()
    return f"{Path(model.rpartition(':')[2]).stem}-{key[:12]}"


def _engines(peers: list[str] | None, quick: bool) -> tuple[str, ...]:
    from pliant.compare.engines import ENGINES, OURS, PEERS

    if peers is None:
        chosen = [n for n in PEERS if not (quick and ENGINES[n].compiles_per_shape)]
        return (OURS, *chosen)
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise OptionError(f"no peer '{unknown[0]}'; there are {', '.join(PEERS)}")
    return (OURS, *peers)


def _show(results: list[dict[str, Any]], about: dict[str, Any], as_json: bool) -> None:
    from pliant.compare import report
    from pliant.compare.results import stamp_line
    from pliant.compare.tables import console

    if as_json:
        content = {
            "stamp": about,
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
    if report.summary(results)["geomean"]:
        report.summary_table(results).show(out)
        report.slow_table(results).show(out)
    for line in report.left_out(results):
        out.print(line, markup=False, highlight=False)
    out.print(stamp_line(about), markup=False, highlight=False)


def _show_kernels(
    results: list[dict[str, Any]], about: dict[str, Any], as_json: bool
) -> None:
    from pliant.compare.results import stamp_line
    from pliant.compare.roofline import limits, roofline_tables
    from pliant.compare.tables import console

    measured = limits()
    if as_json:
        content = {"stamp": about, "limits": measured, "results": results}
        print(json.dumps(content, indent=1))
        return
    out = console()
    for result in results:
        for table in roofline_tables(result, measured):
            table.show(out)
    for result in results:
        if "error" in result:
            out.print(f"{result['model']}: {result['error']}", markup=False)
    out.print(stamp_line(about), markup=False, highlight=False)
