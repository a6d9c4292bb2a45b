"""Writes what there is to know of a model into one HTML file, which needs no network.

The report has the memory of a call over time, the peak over each dim with a limit that
can be dragged, the kernels with their times, guards, the stages, and the graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pliant
from pliant.commands.models import (
    LANGUAGE,
    SAVED,
    add_dynamic,
    add_model,
    inputs_at,
    language_dims,
    source,
)
from pliant.commands.run import dims_of, inputs_of
from pliant.errors import OptionError
from pliant.machine import target
from pliant.measure.probes import measured
from pliant.progress import task

if TYPE_CHECKING:
    from pliant.report.page import ReportContent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_dynamic(parser)
    parser.add_argument(
        *("--dims", "-d"), type=dims_of, help="such as batch=1,seq=512", metavar="DIMS"
    )
    parser.add_argument("--memory-limit", metavar="BYTES", help="such as 500MiB")
    parser.add_argument("--output", "-o", type=Path, default=Path("report.html"))
    parser.add_argument("--threads", type=int, help="default: every core")


def run(args: argparse.Namespace) -> int:
    from pliant.report.page import page

    found = _content(args)
    args.output.write_text(page(found))
    if args.json:
        told = {"output": str(args.output), "dims": dict(found.dims)}
        print(json.dumps(told, indent=1))
    else:
        print(f"written: {args.output}")
    return 0


def _content(args: argparse.Namespace) -> ReportContent:
    """With the times of kernels and the stages, if it is compiled for this."""
    given, limit, name = source(args.model, args.dynamic), args.memory_limit, args.model
    watch = pliant.Instruments(profile=True, keep_ir=True)
    with task("measuring the machine"):
        measured(target.host())  # once: the limits of kernels
    if given.kind == LANGUAGE:
        dims = language_dims(args.dims)
        return given.opened(args.threads).report_data((), limit, dims, name)
    if given.kind == SAVED:
        model = given.opened(args.threads)
        return model.report_data((), limit, _dims(args, model.dims), name)
    if given.is_case:
        case = given.case()
        inputs = inputs_at(case, args.dims)
        model = given.compiled(case, threads=args.threads, instruments=watch)
    else:
        model = given.compiled(threads=args.threads, instruments=watch)
        inputs = inputs_of(model, {}, _dims(args, model.dims), seed=0)
    model(*inputs)  # the times are those of a second call
    return model.report_data(tuple(inputs), limit, {}, name)


def _dims(args: argparse.Namespace, names: Sequence[str]) -> dict[str, int]:
    if args.dims is None and names:
        raise OptionError(f"--dims is needed, with {', '.join(names)}")
    return args.dims or {}
