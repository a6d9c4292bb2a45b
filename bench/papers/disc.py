"""DISC: kernels and speed with and without shape constraints, and the host flow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pliant
import zoo
from bench import costs, static
from bench.papers import PaperResult, Run
from bench.script import check
from pliant.cases import Case, Shape, few
from pliant.compare.accuracy import eager
from pliant.compare.tables import Report, dims_text
from pliant.compare.timing import Spread, geomean_spread, interleaved, ratios

MINUTES = 2.5
MODELS = ("tinybert", "bert", "llama", "evoformer")
STATIC = ("tinybert", "bert")
ON, EAGER = "pliant", "eager"
OPTIONS = {
    ON: pliant.Options(),
    "constraints off": pliant.Options(constraints=False),
    "fusion off": pliant.Options(fuse=False),
}


class Counted(TorchDispatchMode):
    """Counts the ops of eager that compute something, so not views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        returns = func._schema.returns
        self.count += not any(
            r.alias_info and not r.alias_info.is_write for r in returns
        )
        return func(*args, **(kwargs or {}))


def run(given: Run) -> PaperResult:
    names = MODELS if given.share >= 1 else MODELS[:1]
    rows: list[dict[str, Any]] = []
    flows: list[dict[str, Any]] = []
    fixed: list[dict[str, Any]] = []
    for name in names:
        case = zoo.build(name)
        shapes = few(case.shapes) if given.share >= 1 else [case.shapes[0]]
        print(f"  {name}", file=sys.stderr)
        rows.append(variants(case, shapes, given))
        flows += host_flows(case, shapes[:2], given)
        if name in STATIC and given.share >= 1:
            fixed += static.measure(case, given.threads, shapes, given.rounds)
    call = costs.call_cost(given.rounds)
    torch.set_num_threads(given.threads)
    content = {"rows": rows, "flows": flows, "static": fixed, "call": call}
    tables = [variants_table(rows, given.threads), flow_table(flows, given.threads)]
    tables.append(costs.call_table(call))
    if fixed:
        tables.append(static.report(fixed, given.threads))
    return PaperResult(content, tables, given.rounds)


def variants(case: Case, shapes: list[Shape], given: Run) -> dict[str, Any]:
    """Kernels, and the time of every variant divided by ours."""
    models = {
        name: case.compile(threads=given.threads, options=options)
        for name, options in OPTIONS.items()
    }
    kernels = {name: m.stats()["kernel_calls"] for name, m in models.items()}
    kernels[EAGER] = ops_of_eager(case)
    found: dict[str, Any] = {}
    for shape in shapes:
        inputs = case.at(shape)
        wanted = eager(case.model, inputs)
        for name, model in models.items():
            check(f"{case.name} {shape}, {name}", model(*inputs), wanted)
        calls: dict[str, Callable[[], Any]] = {
            name: partial(model, *inputs) for name, model in models.items()
        }
        calls[EAGER] = partial(eager, case.model, inputs)
        samples = interleaved(calls, given.rounds)
        found[dims_text(shape)] = {
            "ms": median(samples[ON]) * 1e3,
            "over": {
                name: asdict(ratios(samples[name], samples[ON]))
                for name in calls
                if name != ON
            },
        }
    return {"model": case.name, "kernels": kernels, "shapes": found}


def ops_of_eager(case: Case) -> int:
    inputs = case.at(case.example)
    with torch.no_grad(), Counted() as counted:
        case.model(*inputs)
    return int(counted.count)


def host_flows(case: Case, shapes: list[Shape], given: Run) -> list[dict[str, Any]]:
    """The time of a call, and how much of it is outside of kernels."""
    instruments = pliant.Instruments(profile=True)
    model = case.compile(threads=given.threads, instruments=instruments)
    found = []
    for shape in shapes:
        inputs = case.at(shape)
        model(*inputs)
        inside, whole = [], []
        for _ in range(given.rounds):
            started = perf_counter()
            model(*inputs)
            whole.append(perf_counter() - started)
            inside.append(sum(kernel.seconds for kernel in model.profile(*inputs)))
        found.append(
            {
                "model": case.name,
                "shape": shape,
                "calls": model.stats()["kernel_calls"],
                "call_us": median(whole) * 1e6,
                "kernels_us": median(inside) * 1e6,
            }
        )
    return found


# ---- reports


def variants_table(rows: list[dict[str, Any]], threads: int) -> Report:
    others = [name for name in (*OPTIONS, EAGER) if name != ON]
    lines = []
    for row in rows:
        counts = " / ".join(str(row["kernels"][n]) for n in (*OPTIONS, EAGER))
        for shape, found in row["shapes"].items():
            over = (Spread(**found["over"][name]).text() for name in others)
            where = f"{row['model']} {shape}"
            lines.append((where, counts, f"{found['ms']:.2f}", *over))
    cells = [found for row in rows for found in row["shapes"].values()]
    means = (
        geomean_spread([Spread(**cell["over"][name]) for cell in cells]).text()
        for name in others
    )
    lines.append(("geomean", "", "", *means))
    columns = (
        *("model", f"kernels: {' / '.join((*OPTIONS, EAGER))}", "pliant ms"),
        *(f"{name} / pliant" for name in others),
    )
    name = f"Kernels and times with and without constraints, {threads} threads"
    return Report(name, columns, tuple(lines))


def flow_table(flows: list[dict[str, Any]], threads: int) -> Report:
    lines = []
    for flow in flows:
        rest = max(flow["call_us"] - flow["kernels_us"], 0.0)
        lines.append(
            (
                f"{flow['model']} {dims_text(flow['shape'])}",
                str(flow["calls"]),
                f"{flow['call_us']:.0f}",
                f"{rest:.1f}",
                f"{100 * rest / flow['call_us']:.1f}%",
            )
        )
    columns = ("model", "kernel calls", "call µs", "outside kernels µs", "share")
    name = f"Host flow: guards, sizes, plan, dispatch, results, {threads} threads"
    return Report(name, columns, tuple(lines))
