"""Writes what there is to know of a model into one HTML file, which needs no network.

MODEL is file.py:function (a function that returns an object with `model`, `inputs`,
`dynamic_shapes`, `dims` and `example`), a program.pt2 that torch.export.save wrote, a
saved model (.pliant), or in a checkout the name of a model of the zoo.

The report has the memory of a call over time, the peak over each dim with a limit that
can be dragged, the kernels with their times, guards, the stages, and the graph.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pliant
from pliant.commands.run import dims_of
from pliant.errors import OptionError
from pliant.progress import task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        *("--dims", "-d"), type=dims_of, help="such as batch=1,seq=512", metavar="DIMS"
    )
    parser.add_argument("--memory-limit", metavar="BYTES", help="such as 500MiB")
    parser.add_argument("--output", "-o", type=Path, default=Path("report.html"))
    parser.add_argument("--threads", type=int, help="default: every core")


def run(args: argparse.Namespace) -> int:
    from pliant.report.page import page

    if args.model.endswith(".pliant"):
        model = pliant.load(args.model, threads=args.threads)
        if args.dims is None:
            raise OptionError(f"--dims is needed, with {', '.join(model.dims)}")
        found = model.report_data((), args.memory_limit, args.dims, args.model)
    else:
        from pliant.cases import load

        case = load(args.model)
        watch = pliant.Instruments(profile=True, keep_ir=True)
        with task(f"compiling {args.model}"):
            model = case.compile(threads=args.threads, instruments=watch)
        given = args.dims or dict(zip(case.dims, case.example, strict=True))
        if set(given) != set(case.dims):
            raise OptionError(f"--dims needs every dim of the model: {case.dims}")
        inputs = case.at(tuple(given[name] for name in case.dims))
        model(*inputs)  # the times are those of a second call
        found = model.report_data(inputs, args.memory_limit, {}, args.model)
    args.output.write_text(page(found))
    if args.json:
        told = {"output": str(args.output), "dims": dict(found.dims)}
        print(json.dumps(told, indent=1))
    else:
        print(f"written: {args.output}")
    return 0
