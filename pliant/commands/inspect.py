"""Tells the memory of a call without running it: its peak, and what is live then.

Of a file.pliant, it tells what is in the file, and with --memory the peak of a call. Of
a file.gguf, dims are batch, past (tokens that are there already) and new.

With --plot, live bytes over the run and the peak over a dim are drawn, with and without
each optimisation of memory. An .html file shows the run at several sizes of the dim; a
.png file needs pillow (pip install 'pliant[plot]').
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pliant
from pliant.commands import inspect_file
from pliant.commands.models import (
    LANGUAGE,
    SAVED,
    ModelSource,
    add_dynamic,
    add_model,
    language_dims,
    source,
)
from pliant.commands.run import dims_of
from pliant.errors import MemoryLimitError, OptionError, PliantError, ShapeError
from pliant.progress import task

if TYPE_CHECKING:
    from pliant.cases import Case
    from pliant.model.compiled import CompiledModel
    from pliant.model.planning import MemoryPlan
    from pliant.report.drawing import NamedLine, Series
    from pliant.report.timeline import Timeline

MIB = 1 << 20
SHOWN = 20  # values that are listed
SIZES = 16  # of the dim that a plot goes over


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_dynamic(parser)
    parser.add_argument(
        *("--memory", "--dims", "-d"),
        metavar="DIMS",
        type=dims_of,
        help="the call's dims, such as batch=1,seq=4096; not needed for a saved model",
    )
    parser.add_argument("--memory-limit", metavar="BYTES", help="such as 500MiB")
    parser.add_argument("--plot", type=_picture, metavar="FILE", help=".png or .html")
    parser.add_argument(
        "--over",
        metavar="DIM",
        help="the dim that a plot goes over (default: the last)",
    )
    parser.add_argument("--threads", type=int, help="default: every core")


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".html"):
        raise argparse.ArgumentTypeError(f"'{text}' is neither .png nor .html")
    return path


@dataclass(frozen=True, slots=True)
class InspectedModel:
    """The model with some optimisation left out, inside a limit or not."""

    name: str
    given: ModelSource
    case: Case | None  # knows the dims by names of its own, and how to make inputs
    model: CompiledModel
    limit: int | None = None

    def plan(self, dims: dict[str, int]) -> MemoryPlan:
        return self.model.memory_plan(memory_limit=self.limit, **self.symbols(dims))

    def timeline(self, dims: dict[str, int]) -> Timeline:
        symbols = self.symbols(dims)
        return self.model.memory_timeline(memory_limit=self.limit, **symbols)

    def symbols(self, dims: dict[str, int]) -> dict[str, int]:
        """The dims by the names of the code; the case may call them otherwise."""
        if set(dims) == set(self.model.dims):
            return dims
        if self.given.kind == LANGUAGE:
            return language_dims(dims)
        if self.case is None or set(dims) != set(self.case.dims):
            names = ", ".join((self.case and self.case.dims) or self.model.dims)
            raise OptionError(f"--memory needs every dim of the model: {names}")
        import torch

        sizes = [dims[name] for name in self.case.dims]
        try:
            with torch.device("meta"):  # only shapes count
                inputs = self.case.inputs(*sizes)
        except (RuntimeError, NotImplementedError):  # they are made from data
            inputs = self.case.inputs(*sizes)
        return dict(self.model.memory_plan(*inputs).dims)

    def names(self) -> dict[str, str]:
        """The case's names of the symbols, found by varying one dim at a time."""
        if self.case is None or set(self.case.dims) <= set(self.model.dims):
            return {}
        example = dict(zip(self.case.dims, self.case.example, strict=True))
        moved = [{**example, dim: size + 1} for dim, size in example.items()]
        try:
            seen = [self.symbols(dims) for dims in moved]
        except PliantError:  # beyond what the model takes
            return {}
        dim_of = {tuple(sizes[dim] for sizes in moved): dim for dim in example}
        found = {s: dim_of.get(tuple(sizes[s] for sizes in seen)) for s in seen[0]}
        return {symbol: dim for symbol, dim in found.items() if dim is not None}


def _renamed(text: str, names: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)


def run(args: argparse.Namespace) -> int:
    given = source(args.model, args.dynamic)
    if given.kind == SAVED:
        return inspect_file.run(args)
    if args.memory is None:
        raise OptionError("--memory is needed, such as --memory batch=1,seq=4096")
    from pliant.model.arguments import parse_bytes

    limit = parse_bytes(args.memory_limit)
    name, case = args.model, given.case() if given.is_case else None
    model = given.compiled(case, threads=args.threads)
    whole = InspectedModel("all optimisations", given, case, model, limit)
    plan, held = whole.plan(args.memory), whole.timeline(args.memory)
    if args.plot is not None:
        over = args.over or list(args.memory)[-1]
        if over not in args.memory:
            names = ", ".join(args.memory)
            raise OptionError(f"the model has no dim '{over}', its dims are {names}")
        draw(args.plot, variants(whole, args.threads), args.memory, over)
    if args.json:
        print(json.dumps(_content(name, args.memory, whole, plan, held), indent=1))
    else:
        print("\n".join(_lines(name, args.memory, whole, plan, held)))
        if args.plot is not None:
            print(f"\ndrawn: {args.plot}")
    return 0


# --- as text --------------------------------------------------------------------


def _size(count: float) -> str:
    return f"{count / MIB:.3f} MiB" if count >= MIB / 100 else f"{count:.0f} bytes"


def _at(dims: Any) -> str:
    return ", ".join(f"{name}={size}" for name, size in dims.items())


def _lines(
    name: str,
    dims: dict[str, int],
    shown: InspectedModel,
    plan: MemoryPlan,
    held: Timeline,
) -> list[str]:
    made: Any = plan.knobs.get("rematerialised", ())
    lines = [
        f"{name} at {_at(dims)}",
        f"  peak         {_size(plan.peak_bytes)} ({plan.peak_bytes} bytes)",
        f"  of it        {_size(plan.arena_bytes)} in the arena, "
        f"{_size(plan.output_bytes)} of results",
        f"  lower bound  {_size(plan.lower_bound)} (what is live at once)",
        f"  weights      {_size(plan.weight_bytes)}, not in the peak",
    ]
    if shown.limit is not None:
        actions = [item.action for item in made]
        lines.append(
            f"  limit        {_size(shown.limit)}: {actions.count('recompute')} values "
            f"computed again, {actions.count('spill')} spilled"
        )
        free = replace(shown, limit=None).plan(dims)
        saved = free.peak_bytes - plan.peak_bytes
        lines.append(
            f"  saved        {_size(saved)} of {_size(free.peak_bytes)}, "
            f"of which {_size(free.output_bytes)} are results"
        )
        chunks: Any = plan.knobs.get("chunks", ())
        lines += [
            f"  in chunks    {part.chunks} of up to {part.rows} of {part.total} rows "
            f"along {part.dim}, {part.loc}"
            for part in chunks
        ]
    known = shown.names()
    formula = _renamed(shown.model.peak_formula, known)
    if len(formula) > 400:
        formula = f"{_renamed(shown.model.peak_summary, known)} (whole: --json)"
    else:
        formula += f": {_renamed(shown.model.peak_summary, known)}"
    others = [
        f"{symbol} = {size}"
        for symbol, size in plan.dims.items()
        if symbol not in dims and symbol not in known and symbol in formula
    ]
    where = f"   with {', '.join(others)}" if others else ""
    lines.append(f"  formula      {formula}{where}")
    if held.moments:
        moment = held.moments[held.peak_step]
        place = f"{held.peak_step + 1} of {len(held.moments)}"
        lines.append(
            f"\nlive at the peak, in step {place}: {moment.kernel} ({moment.loc})"
        )
    rows = [("bytes", "share", "value", "type", "kernel", "line")]
    total = max(sum(item.bytes for item in held.held), 1)
    for item in held.held[:SHOWN]:
        share = f"{100 * item.bytes / total:.1f}%"
        kind = _renamed(item.type, known)
        rows.append((str(item.bytes), share, item.name, kind, item.kernel, item.loc))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if k < 2 else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    if len(held.held) > SHOWN:
        rest = held.held[SHOWN:]
        size = _size(sum(item.bytes for item in rest))
        lines.append(f"  and {len(rest)} more, {size}")
    for item in made:
        lines.append(
            f"  {item.action}: {item.value}, {_size(item.bytes)}, between steps "
            f"{item.steps[0]} and {item.steps[1]} ({item.loc})"
        )
    return lines


def _content(
    name: str,
    dims: dict[str, int],
    shown: InspectedModel,
    plan: MemoryPlan,
    held: Timeline,
) -> dict[str, Any]:
    made: Any = plan.knobs.get("rematerialised", ())
    chunks: Any = plan.knobs.get("chunks", ())
    return {
        "model": name,
        "dims": dims,
        "symbols": dict(plan.dims),
        "memory_limit": shown.limit,
        "peak_bytes": plan.peak_bytes,
        "arena_bytes": plan.arena_bytes,
        "output_bytes": plan.output_bytes,
        "weight_bytes": plan.weight_bytes,
        "lower_bound": plan.lower_bound,
        "peak_formula": shown.model.peak_formula,
        "chunks": [asdict(item) for item in chunks],
        "rematerialised": [asdict(item) for item in made],
        "peak_step": held.peak_step,
        "live": [asdict(item) for item in held.held],
        "timeline": [asdict(moment) for moment in held.moments],
    }


# --- drawn ----------------------------------------------------------------------


def variants(whole: InspectedModel, threads: int | None) -> list[InspectedModel]:
    """The model as it is, and without each optimisation of memory."""
    out = [whole]
    switches = [
        switch
        for switch in ("order", "inplace", "remat")
        if switch in pliant.Options.__dataclass_fields__
    ]
    for switch in switches:
        if switch == "remat":  # does something only to keep a limit
            if whole.limit is not None:
                out.append(replace(whole, name="without remat (no limit)", limit=None))
            continue
        options = pliant.Options(**{switch: False})
        with task(f"compiling without {switch}"):
            how = {"threads": threads, "options": options}
            model = whole.given.compiled(whole.case, **how)
        out.append(replace(whole, name=f"without {switch}", model=model))
    return out


def draw(
    path: Path, shown: Sequence[InspectedModel], dims: dict[str, int], over: str
) -> None:
    """Writes the picture: the run at these dims, and the peak over one of them."""
    from pliant.report import drawing

    largest = max(2 * dims[over], SIZES)
    tried = sorted({dims[over], *(largest * k // SIZES for k in range(1, SIZES + 1))})
    sizes = [size for size in tried if _takes(shown[0], {**dims, over: size})]
    peaks = _peaks(shown, dims, over, sizes)
    if path.suffix == ".png":
        path.write_bytes(drawing.png([_over_run(shown, dims), peaks]))
        return
    frames = []
    for size in sizes:
        chart = _over_run(shown, {**dims, over: size})
        hidden = "" if size == dims[over] else " hidden"
        frames.append(f'<div class="frame"{hidden}>{drawing.svg(chart)}</div>')
    path.write_text(
        PAGE.format(
            over=over,
            last=len(sizes) - 1,
            first=sizes.index(dims[over]),
            sizes=json.dumps(sizes),
            given=dims[over],
            frames="\n".join(frames),
            peaks=drawing.svg(peaks),
        )
    )


def _takes(variant: InspectedModel, dims: dict[str, int]) -> bool:
    """Whether the model accepts these dims: a table of positions may be too short."""
    try:
        variant.model.memory_plan(**variant.symbols(dims))
    except ShapeError:
        return False
    return True


def _over_run(shown: Sequence[InspectedModel], dims: dict[str, int]) -> Any:
    from pliant.report.drawing import Chart, Series

    series = []
    for variant in shown:
        try:
            moments = variant.timeline(dims).moments
        except MemoryLimitError:
            series.append(Series(f"{variant.name}: no plan fits the limit", ()))
            continue
        ends = [*moments, *moments[-1:]]
        points = tuple((k, m.live_bytes / MIB) for k, m in enumerate(ends))
        series.append(Series(variant.name, points, steps=True))
    title = f"live bytes over the run at {_at(dims)}"
    levels = (*_peak_level(series), *_limit_level(shown[0].limit))
    return Chart(title, "step", "MiB", tuple(series), levels=levels)


def _peak_level(series: Sequence[Series]) -> Iterator[NamedLine]:
    """That of the first curve: the model as it is."""
    from pliant.report.drawing import NamedLine

    peak = max((y for _, y in series[0].points if y is not None), default=None)
    if peak is not None:
        yield NamedLine(f"peak {peak:.3f} MiB", peak, "#1f6feb")


def _limit_level(limit: int | None) -> Iterator[NamedLine]:
    from pliant.report.drawing import NamedLine

    if limit is not None:
        yield NamedLine(f"limit {limit / MIB:.3f} MiB", limit / MIB)


def _peaks(
    shown: Sequence[InspectedModel],
    dims: dict[str, int],
    over: str,
    sizes: Sequence[int],
) -> Any:
    from pliant.report.drawing import Chart, Series

    series = []
    for variant in shown:
        points: list[tuple[float, float | None]] = []
        for size in sizes:
            try:
                peak = variant.plan({**dims, over: size}).peak_bytes / MIB
            except MemoryLimitError:
                points.append((size, None))
            else:
                points.append((size, peak))
        series.append(Series(variant.name, tuple(points)))
    others = _at({name: size for name, size in dims.items() if name != over})
    title = f"peak over {over}" + (f" at {others}" if others else "")
    levels = tuple(_limit_level(shown[0].limit))
    return Chart(title, over, "MiB", tuple(series), levels=levels)


PAGE = """<!doctype html>
<meta charset="utf-8">
<title>memory of a call</title>
<style>body {{ font: 14px sans-serif; margin: 2em; max-width: 800px }}</style>
<label>{over} = <output id="size">{given}</output>
<input id="slider" type="range" min="0" max="{last}" value="{first}"
 style="width: 500px"></label>
{frames}
{peaks}
<script>
const sizes = {sizes}, frames = document.querySelectorAll(".frame");
document.getElementById("slider").oninput = event => {{
  const k = Number(event.target.value);
  document.getElementById("size").textContent = sizes[k];
  frames.forEach((frame, i) => {{ frame.hidden = i !== k; }});
}};
</script>
"""
