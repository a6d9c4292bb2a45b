"""The report of a compiled model: one HTML file that needs no network.

    ReportContent      what it shows, as plain values
    page        the file's text

What moves in the page (sliders, the limit, what is under the pointer) is in `page.js`;
every drawing is by `drawing.py`, once for each size that a slider can have.
"""

from __future__ import annotations

import difflib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pliant.report.drawing import (
    Bar,
    Chart,
    Mark,
    NamedLine,
    PlotLine,
    Series,
    Text,
    picture,
    svg,
)
from pliant.report.timeline import HeldValue, Timeline

MIB = 1 << 20
ROW, LEFT, MOST_NODES = 18, 150, 400  # of the graph
MOST_LINES = 600  # of one stage's changes

Dims = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LimitedPlan:
    """What a call does inside a limit."""

    limit: int
    peak: int
    chunks: tuple[str, ...]
    recomputed: int
    spilled: int
    seconds: float  # predicted


@dataclass(frozen=True, slots=True)
class SizeReport:
    """One size of a dim, the others as they are."""

    size: int
    peak: int
    least: int  # the smallest limit that the call fits in
    seconds: float  # predicted, without a limit
    plans: tuple[LimitedPlan, ...]
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class KernelReport:
    """All calls of one kernel in one call of the model."""

    name: str
    loc: str
    calls: int
    flops: int
    bytes: int
    least_seconds: float  # by the machine's peak and its memory
    seconds: float | None = None  # measured


@dataclass(frozen=True, slots=True)
class ReportContent:
    name: str
    facts: Mapping[str, str]  # what stands at the top
    formula: str
    dims: Dims
    given: int | None  # the memory limit
    sizes: Mapping[str, Sequence[SizeReport]]  # of each dim
    kernels: Sequence[KernelReport]
    guards: Sequence[tuple[str, str]]  # a condition, and where it comes from
    steps: Sequence[tuple[str, str]]  # kernel and line, in the order of the calls
    edges: Sequence[tuple[int, int]]  # from a step that writes to one that reads
    stages: Sequence[tuple[str, str]] = field(default=())  # name and module
    assumed: bool = False  # the machine's rates, which nobody has measured


def page(report: ReportContent) -> str:
    here = Path(__file__).parent
    sections = (
        ("Memory over time", _memory(report)),
        ("Peak over each dim", _peaks(report)),
        ("Kernels", _kernels(report)),
        ("Guards and assumptions", _guards(report)),
        ("Stages", _stages(report)),
        ("Graph", _graph(report)),
    )
    body = "".join(f"<h2>{title}</h2>{text}" for title, text in sections)
    title = html.escape(report.name)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{(here / 'page.css').read_text()}</style>"
        f"<h1>{title}</h1>{_facts(report)}{body}<div id=tip hidden></div>"
        f"<script>const report = {_json(_data(report))};\n"
        f"{(here / 'page.js').read_text()}</script></html>\n"
    )


def _json(data: object) -> str:
    return json.dumps(data).replace("</", "<\\/")


def _data(report: ReportContent) -> dict[str, object]:
    """What the script needs: the values of each frame, and the plans of each size."""
    sizes = {
        dim: [
            {
                "size": at.size,
                "peak": at.peak,
                "least": at.least,
                "seconds": at.seconds,
                "plans": [asdict(plan) for plan in at.plans],
                "values": [
                    [*_words(p.value), p.first, p.last] for p in at.timeline.placed
                ],
            }
            for at in every
        ]
        for dim, every in report.sizes.items()
    }
    return {"dims": dict(report.dims), "limit": report.given, "sizes": sizes}


def _words(value: HeldValue) -> tuple[str | int, ...]:
    return value.name, value.type, value.bytes, value.kernel, value.loc


def _facts(report: ReportContent) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
        for name, text in report.facts.items()
    )
    formula = html.escape(report.formula)
    return (
        f"<table class=facts>{rows}</table>"
        f"<details><summary>the whole formula</summary><pre>{formula}</pre></details>"
    )


# --- memory ---------------------------------------------------------------------


def memory_chart(at: Timeline, title: str, limit: int | None = None) -> Chart:
    """Each value at its place in the arena while it is live; results above."""
    blocks = tuple(
        Bar(
            p.first,
            p.last + 1,
            p.offset / MIB,
            (p.offset + p.value.bytes) / MIB,
            number,
            p.value.name,
        )
        for number, p in enumerate(at.placed)
    )
    levels = [NamedLine(f"peak {at.peak_bytes / MIB:.3f} MiB", at.peak_bytes / MIB)]
    if limit is not None:
        levels.append(NamedLine(f"limit {limit / MIB:.3f} MiB", limit / MIB, "#8250df"))
    return Chart(title, "step", "MiB", (), blocks=blocks, levels=tuple(levels))


def _memory(report: ReportContent) -> str:
    parts: list[str] = []
    for dim, every in report.sizes.items():
        first = _nearest(every, report.dims[dim])
        frames = []
        for k, at in enumerate(every):
            chart = memory_chart(at.timeline, f"live values at {_at(report, dim, at)}")
            hidden = "" if k == first else " hidden"
            frames.append(f"<div class=frame data-k={k}{hidden}>{svg(chart)}</div>")
        parts.append(
            f'<section class=memory data-dim="{dim}"><label>{dim} = '
            f"<output>{every[first].size}</output> <input type=range min=0 "
            f'max={len(every) - 1} value={first} class=size data-dim="{dim}">'
            f"</label>{''.join(frames)}</section>"
        )
    return "".join(parts) + "<p class=note>Point at a value to see what it is.</p>"


def _nearest(every: Sequence[SizeReport], size: int) -> int:
    return min(range(len(every)), key=lambda k: abs(every[k].size - size))


def _at(report: ReportContent, dim: str, at: SizeReport) -> str:
    dims = {**report.dims, dim: at.size}
    return ", ".join(f"{name}={size}" for name, size in dims.items())


def _peaks(report: ReportContent) -> str:
    parts: list[str] = []
    for dim, every in report.sizes.items():
        peaks = tuple((at.size, at.peak / MIB) for at in every)
        least = tuple((at.size, at.least / MIB) for at in every)
        series = (
            Series("peak without a limit", peaks),
            Series("least limit that fits", least),
        )
        others = {name: size for name, size in report.dims.items() if name != dim}
        told = ", ".join(f"{name}={size}" for name, size in others.items())
        title = f"peak over {dim}" + (f" at {told}" if told else "")
        parts.append(
            f'<section class=peak data-dim="{dim}">'
            f"{svg(Chart(title, dim, 'MiB', series))}<p class=plan></p></section>"
        )
    note = "Drag the line: what a call does inside that limit, at the sliders' sizes."
    return f"{''.join(parts)}<p class=note>{note}</p>"


# --- tables ---------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{cells}</tr>{lines}</table>"


def _kernels(report: ReportContent) -> str:
    measured = any(kernel.seconds is not None for kernel in report.kernels)
    head = ["kernel", "calls", "MFLOP", "MB", "limit ms"]
    head += ["ms", "of all", "of the limit", "line"] if measured else ["line"]
    total = sum(kernel.seconds or 0.0 for kernel in report.kernels)
    rows = []
    for kernel in report.kernels:
        row = [
            kernel.name,
            str(kernel.calls),
            f"{kernel.flops / 1e6:.3f}",
            f"{kernel.bytes / 1e6:.3f}",
            f"{kernel.least_seconds * 1e3:.4f}",
        ]
        if kernel.seconds is not None:
            share = kernel.seconds / max(total, 1e-9)
            speed = kernel.least_seconds / max(kernel.seconds, 1e-9)
            row.append(f"{kernel.seconds * 1e3:.4f}")
            row += [f"{100 * share:.0f}%", f"{100 * speed:.0f}%"]
        elif measured:
            row += ["", "", ""]
        rows.append([*row, kernel.loc])
    note = (
        "The limit is the time that the machine needs for this arithmetic, or to read "
        "and write these bytes from memory, whichever is longer; 100% is as fast as "
        "that. What is small stays in caches, and may be faster than memory."
        if measured
        else "Not measured: compile with Instruments(profile=True) and give inputs."
    )
    if report.assumed:
        note += (
            " The machine's speed is assumed; `pliant doctor --measure` measures it."
        )
    return f"{_table(head, rows)}<p class=note>{note}</p>"


def _guards(report: ReportContent) -> str:
    if not report.guards:
        return "<p>None: every size is accepted.</p>"
    return _table(["must hold", "because of"], report.guards)


# --- stages ---------------------------------------------------------------------


def _stages(report: ReportContent) -> str:
    if not report.stages:
        return "<p>Not kept: compile with Instruments(keep_ir=True).</p>"
    parts: list[str] = []
    before = ""
    for name, after in report.stages:
        changes = list(_changes(before, after)) if before else []
        what = f"{len(after.splitlines())} lines"
        if before:
            most = "more than " if len(changes) > MOST_LINES else ""
            count = min(len(changes), MOST_LINES)
            what += f", {most}{count} changed" if changes else ", unchanged"
        body = "".join(changes) if before else html.escape(after)
        inside = f"<pre class=diff>{body}</pre>" if body else ""
        whole = (
            f"<details><summary>all of it</summary><pre>{html.escape(after)}</pre>"
            "</details>"
            if changes
            else ""
        )
        kind = "stage" if changes or not before else "stage same"
        parts.append(
            f'<details class="{kind}"><summary>{html.escape(name)} '
            f"<small>{what}</small></summary>{inside}{whole}</details>"
        )
        before = after
    return "".join(parts)


def _changes(before: str, after: str) -> Iterator[str]:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), lineterm="", n=1
    )
    for number, line in enumerate(lines, -2):
        if number >= MOST_LINES:
            yield "...\n"
            return
        if number < 0:
            continue  # the names of the files, which are none
        kind = {"+": "new", "-": "old"}.get(line[:1], "same")
        yield f"<span class={kind}>{html.escape(line)}\n</span>"


# --- graph ----------------------------------------------------------------------


def _graph(report: ReportContent) -> str:
    steps = report.steps[:MOST_NODES]
    left = len(report.steps) - len(steps)
    more = f"<p class=note>and {left} calls more</p>" if left else ""
    height = ROW * (len(steps) + 1)
    return picture(_arcs(report, len(steps)), 760, height) + more


def _arcs(report: ReportContent, count: int) -> Iterator[Mark]:
    """The calls from top to bottom; each result reaches its readers by a line."""
    for number, (source, target) in enumerate(sorted(set(report.edges))):
        if target >= count:
            continue
        depth = LEFT - 12 - min(6 * (target - source), LEFT - 20)
        points = (
            (LEFT - 6, _row(source)),
            (depth, _row(source) + 3),
            (depth, _row(target) - 3),
            (LEFT - 6, _row(target)),
        )
        yield PlotLine(points, GREYS[number % len(GREYS)], 1)
    for k, (kernel, loc) in enumerate(report.steps[:count]):
        yield Text(LEFT, _row(k), f"{k}  {kernel}", bold=True)
        yield Text(LEFT + 260, _row(k), loc)


GREYS = ("#57606a", "#8c959f", "#1f6feb", "#6e7781")


def _row(k: int) -> float:
    return ROW * (k + 1)
