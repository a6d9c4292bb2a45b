"""What the report of a model shows (`report/page.py`), asked of the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pliant.errors import MemoryLimitError, OptionError, ShapeError
from pliant.machine import target
from pliant.measure.probes import known
from pliant.measure.rates import rates
from pliant.model.parts import ModelPart
from pliant.report.card import Card
from pliant.report.page import KernelReport, LimitedPlan, ReportContent, SizeReport
from pliant.report.profile import KernelTime
from pliant.runtime.description import READS, WRITES

if TYPE_CHECKING:
    from pliant.model.compiled import CompiledModel
    from pliant.model.planning import MemoryPlan

_FRACTIONS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of a given size
_LIMITS = 6  # between the least that fits and the peak


def report_of(
    model: CompiledModel,
    parts: Sequence[ModelPart],
    name: str,
    dims: Mapping[str, int],
    limit: int | None,
    measured: Sequence[KernelTime] | None,
) -> ReportContent:
    if not model.dims and dims:
        raise OptionError("this model has no dims: every size is fixed")
    stats = model.stats()
    plan = model.memory_plan(**dims)
    shown = {dim: list(_sizes(model, dims, dim)) for dim in dims}
    facts = {
        "at": ", ".join(f"{dim}={size}" for dim, size in dims.items()) or "fixed sizes",
        "peak of a call": f"{_size(plan.peak_bytes)}; {model.peak_summary}",
        "weights": f"{_size(plan.weight_bytes)}, not in the peak",
        "threads": str(stats["threads"]),
        "kernels": f"{stats['kernels']} functions, {stats['kernel_calls']} calls",
        "compiled in": f"{stats['compile_seconds']:.2f} s",
    }
    return ReportContent(
        name,
        facts,
        model.peak_formula,
        dims,
        limit,
        shown,
        kernels_of(parts, dims, stats["threads"], measured),
        _guards(parts),
        *_graph(parts),
        model.stage_texts,
        known(target.host()) is None,
    )


def _size(count: int) -> str:
    return f"{count / 2**20:.3f} MiB ({count} bytes)"


def card_of(model: CompiledModel) -> Card:
    """What a notebook shows, with every dim at SHOWN or what the model takes of it."""
    stats = model.stats()
    dims = _typical(model)
    facts = {
        "dims": ", ".join(model.dims) or "none: every size is fixed",
        "peak": model.peak_summary,
        "limit": "none"
        if model.memory_limit is None
        else f"{model.memory_limit} bytes",
        "weights": f"{model.weight_bytes / 2**20:.3f} MiB",
        "kernels": f"{stats['kernels']}, {stats['threads']} threads",
        "compiled in": f"{stats['compile_seconds']:.2f} s",
        "calls": str(stats["calls"]),
    }
    if dims is None:
        return Card({}, model.peak_summary, facts, {})
    plan = model.memory_plan(memory_limit=_FREE, **dims)
    at = ", ".join(f"{n}={k}" for n, k in dims.items())
    where = f" at {at}" if at else ""
    facts["predicted time"] = f"{plan.predicted_seconds * 1e3:.3f} ms{where}"
    peaks = {dim: list(_peaks(model, dims, dim)) for dim in dims}
    return Card(dims, model.peak_summary, facts, peaks)


def _typical(model: CompiledModel) -> dict[str, int] | None:
    """Sizes to show: the largest equal ones that the model takes; None if there are
    none."""
    for size in (128, 64, 32, 16, 8, 4, 2, 1):
        dims = {**dict.fromkeys(model.dims, size), **dict.fromkeys(model.dims[:1], 1)}
        if len(model.dims) == 1:
            dims = {model.dims[0]: size}
        with suppress(ShapeError, MemoryLimitError):
            model.memory_plan(memory_limit=_FREE, **dims)
            return dims
    return None


def _peaks(
    model: CompiledModel, dims: Mapping[str, int], dim: str
) -> Iterator[tuple[int, int]]:
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        with suppress(ShapeError, MemoryLimitError):
            plan = model.memory_plan(memory_limit=_FREE, **{**dims, dim: size})
            yield size, plan.peak_bytes


# --- memory ---------------------------------------------------------------------


def _sizes(
    model: CompiledModel, dims: Mapping[str, int], dim: str
) -> Iterator[SizeReport]:
    """The dim at some sizes around the given one; those that are refused are not."""
    for size in sorted({max(round(dims[dim] * f), 1) for f in _FRACTIONS}):
        at = {**dims, dim: size}
        try:
            plan = model.memory_plan(memory_limit=_FREE, **at)
        except (ShapeError, MemoryLimitError):
            continue
        least = _least(model, at, plan.peak_bytes)
        yield SizeReport(
            size,
            plan.peak_bytes,
            least,
            plan.predicted_seconds,
            tuple(_limited(model, at, least, plan.peak_bytes)),
            model.memory_timeline(memory_limit=_FREE, **at),
        )


_FREE = 2**62  # no call needs more: the plan without a limit, whatever the model's is


def _least(model: CompiledModel, at: Mapping[str, int], peak: int) -> int:
    """The smallest limit that fits, as a refusal says."""
    low = 1
    while low < peak:
        try:
            model.memory_plan(memory_limit=low, **at)
        except MemoryLimitError as refused:
            if refused.least <= low:
                return peak
            low = refused.least
        else:
            break
    return min(low, peak)


def _limited(
    model: CompiledModel, at: Mapping[str, int], least: int, peak: int
) -> Iterator[LimitedPlan]:
    for k in range(_LIMITS if least < peak else 0):
        limit = least + (peak - least) * k // _LIMITS
        try:
            plan = model.memory_plan(memory_limit=limit, **at)
        except MemoryLimitError:
            continue
        yield _told(limit, plan)


def _told(limit: int, plan: MemoryPlan) -> LimitedPlan:
    chunks: Any = plan.knobs.get("chunks", ())
    evicted: Any = plan.knobs.get("rematerialised", ())
    actions = [item.action for item in evicted]
    return LimitedPlan(
        limit,
        plan.peak_bytes,
        tuple(f"{c.rows} of {c.total} rows along {c.dim} ({c.loc})" for c in chunks),
        actions.count("recompute"),
        actions.count("spill"),
        plan.predicted_seconds,
    )


# --- kernels --------------------------------------------------------------------


def kernels_of(
    parts: Sequence[ModelPart],
    dims: Mapping[str, int],
    threads: int,
    measured: Sequence[KernelTime] | None,
) -> list[KernelReport]:
    """Those that take longest first."""
    limits = rates(target.host())
    calls = _planned(parts, dims, threads) if measured is None else measured
    found: dict[tuple[str, str], list[KernelTime]] = {}
    for call in calls:
        found.setdefault((call.name, call.loc), []).append(call)
    made = []
    for (name, loc), every in found.items():
        flops, size = sum(c.flops for c in every), sum(c.bytes for c in every)
        least = max(flops / (limits.flops * threads), size / limits.bytes)
        seconds = None if measured is None else sum(c.seconds for c in every)
        made.append(KernelReport(name, loc, len(every), flops, size, least, seconds))
    return sorted(
        made, key=lambda k: -(k.least_seconds if k.seconds is None else k.seconds)
    )


def _planned(
    parts: Sequence[ModelPart], dims: Mapping[str, int], threads: int
) -> Iterator[KernelTime]:
    """The work of the kernels of a call without a limit, with no times."""
    for part in parts:
        spec, env = part.runtime.spec, {**dims, "threads": threads}
        for number in spec.orders[0].steps:
            step, text = spec.steps[number], part.image.steps[number]
            flops = part.image.table[step.flops_index].evaluate(env)
            size = part.image.table[step.bytes_index].evaluate(env)
            yield KernelTime(text.kernel, text.loc, 0.0, flops, size)


# --- guards, graph --------------------------------------------------------------


def _guards(parts: Sequence[ModelPart]) -> list[tuple[str, str]]:
    every = (guard for part in parts for guard in part.image.rules.guards)
    return list(dict.fromkeys((str(guard.cond), guard.origin) for guard in every))


def _graph(
    parts: Sequence[ModelPart],
) -> tuple[list[tuple[str, str]], list[tuple[int, int]]]:
    """The calls in their order, and which reads what another has written."""
    steps: list[tuple[str, str]] = []
    edges: list[tuple[int, int]] = []
    for part in parts:
        spec, writer = part.runtime.spec, dict[int, int]()
        for number in spec.orders[0].steps:
            here, text = len(steps), part.image.steps[number]
            steps.append((text.kernel, text.loc))
            for touched, how in spec.steps[number].touches:
                if how & READS and touched in writer:
                    edges.append((writer[touched], here))
            for touched, how in spec.steps[number].touches:
                if how & WRITES:
                    writer[touched] = here
    return steps, edges
