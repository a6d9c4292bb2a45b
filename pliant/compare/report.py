"""Turns the workers' results into tables and one summary."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pliant.compare.engines import ENGINES, OURS, PEERS
from pliant.compare.results import write_json, write_page
from pliant.compare.tables import Report, dims_text, small_mebibytes
from pliant.compare.timing import Spread, geomean, geomean_spread

Result = Mapping[str, Any]
SLOW = 0.95  # of the best peer's speed: anything below is listed
NONE = "–"
MODELS = "models"  # folder of the results by model


def title(name: str) -> str:
    return ENGINES[name].title


def threads_text(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"


def timed(result: Result) -> list[str]:
    """The engines that have times, in the order of the table of engines."""
    rows = result.get("rows", [])
    return [name for name in ENGINES if rows and name in rows[0]["engines"]]


def speedups(results: Sequence[Result], peer: str) -> list[float]:
    """Our speed over a peer's, at every model, thread count and shape it ran."""
    return [
        row["engines"][peer]["speedup"]["median"]
        for result in results
        for row in result.get("rows", [])
        if "speedup" in row["engines"].get(peer, {})
    ]


def best_speedups(rows: Sequence[Result]) -> list[Spread]:
    """At every shape, our speed over that of the fastest peer."""
    return [Spread(**row["best"]) for row in rows if "best" in row]


# ---- one model


def model_table(result: Result) -> Report:
    """Times per shape: median and its interval, and our ratios to the peers."""
    engines = timed(result)
    peers = [name for name in engines if name != OURS] if OURS in engines else []
    columns = [f"({', '.join(result['dims'])})", *(f"{title(n)} ms" for n in engines)]
    columns += [f"x {title(n)}" for n in peers] + (["x best"] if peers else [])
    columns += ["peak MiB"] if OURS in engines else []
    lines = []
    for row in result["rows"]:
        cells = [dims_text(row["shape"])]
        cells += [_time(row["engines"].get(n, {}).get("ms")) for n in engines]
        cells += [_ratio(row["engines"].get(n, {}).get("speedup")) for n in peers]
        if peers:
            cells.append(_time(row.get("best")))
        if OURS in engines:
            peak = row.get("peak_bytes")
            cells.append(NONE if peak is None else small_mebibytes(peak))
        lines.append(tuple(cells))
    means = ["geomean"]
    for name in engines:
        found = [row["engines"][name]["ms"]["median"] for row in result["rows"]]
        means.append(f"{geomean(found):.2f}")
    means += [f"{geomean(speedups([result], name)):.2f}" for name in peers]
    if peers:
        means.append(geomean_spread(best_speedups(result["rows"])).text())
    means += [""] if OURS in engines else []
    name = f"{result['model']}, {threads_text(result['threads'])}"
    return Report(f"{name}: {result['about']}", tuple(columns), (*lines, tuple(means)))


def _time(found: Mapping[str, float] | None) -> str:
    return NONE if found is None else Spread(**found).text()


def _ratio(found: Mapping[str, float] | None) -> str:
    return NONE if found is None else f"{found['median']:.2f}"


# ---- all models


def engine_names(results: Sequence[Result]) -> list[str]:
    asked = {name for result in results for name in result.get("engines", {})}
    return [name for name in ENGINES if name in asked]


def compile_table(results: Sequence[Result]) -> Report:
    """Seconds to the first result at every shape, exports apart."""
    names = engine_names(results)
    columns = ("model", "threads", *map(title, names), "torch.export", "ONNX export")
    lines = []
    for result in results:
        about = result.get("engines", {})
        found = [about.get(n, {}).get("compile_seconds") for n in names]
        found += [about.get(OURS, {}).get("export_seconds"), _onnx_seconds(about)]
        where = (result["model"], str(result["threads"]))
        lines.append((*where, *map(_seconds, found)))
    return Report("Seconds to compile", columns, tuple(lines))


def models_table(results: Sequence[Result]) -> Report:
    """What the names stand for."""
    texts = {result["model"]: result["about"] for result in results}
    return Report("Models", ("model", "what it is"), tuple(texts.items()))


def _onnx_seconds(engines: Mapping[str, Any]) -> float | None:
    """The export is made once, for all that start from it."""
    for name, about in engines.items():
        if ENGINES[name].from_onnx and about.get("export_seconds") is not None:
            return float(about["export_seconds"])
    return None


def _seconds(found: float | None) -> str:
    return NONE if found is None else f"{found:.1f}"


def summary_table(results: Sequence[Result]) -> Report:
    """Geomean of our speed over each peer's, per model and over everything.

    "x best" takes at every shape the peer that comes closest there.
    """
    peers = [n for n in PEERS if speedups(results, n)]
    columns = ("model", "threads", *(f"x {title(n)}" for n in peers), "x best", "worst")
    lines = []
    for result in (r for r in results if r.get("rows")):
        lines.append(
            (result["model"], str(result["threads"]), *_means([result], peers))
        )
    lines.append(("all", "", *_means(results, peers)))
    name = "Our speed over each peer's: geomean over the shapes"
    return Report(name, columns, tuple(lines))


def _means(results: Sequence[Result], peers: Sequence[str]) -> list[str]:
    best = [x for r in results for x in best_speedups(r.get("rows", []))]
    means = [geomean(speedups(results, n)) for n in peers]
    cells = [NONE if math.isnan(x) else f"{x:.2f}" for x in means]
    worst = min(best, key=lambda x: x.median, default=None)
    return [
        *cells,
        geomean_spread(best).text() if best else NONE,
        NONE if worst is None else worst.text(),
    ]


def slow_rows(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Every (model, threads, shape) where the best peer is faster by more than 5%."""
    for result in results:
        for row in result.get("rows", []):
            if "best" in row and row["best"]["median"] < SLOW:
                yield {
                    "model": result["model"],
                    "threads": result["threads"],
                    "shape": row["shape"],
                    "best_peer": row["best_peer"],
                    "speedup": row["best"]["median"],
                }


def slow_table(results: Sequence[Result]) -> Report:
    found = sorted(slow_rows(results), key=lambda row: float(row["speedup"]))
    return Report(
        f"Below {SLOW} of the best peer: {len(found)}",
        ("model", "threads", "shape", "best peer", "x best"),
        tuple(
            (
                row["model"],
                str(row["threads"]),
                dims_text(row["shape"]),
                title(row["best_peer"]),
                f"{row['speedup']:.2f}",
            )
            for row in found
        ),
    )


def left_out(results: Sequence[Result]) -> Iterator[str]:
    """What has no times, and why."""
    for result in results:
        where = f"{result['model']}, {threads_text(result['threads'])}"
        if "error" in result:
            yield f"{where}: failed: {result['error']}"
        for name, about in result.get("engines", {}).items():
            if about["status"] != "ok":
                yield f"{where}: {title(name)} {about['status']}: {about['reason']}"


def left_out_note(results: Sequence[Result]) -> str:
    """The same as a list, with what is the same everywhere stated once."""
    reasons: dict[str, list[str]] = {}
    for line in left_out(results):
        where, _, reason = line.partition(": ")
        reasons.setdefault(reason, []).append(where)
    lines = []
    for reason, places in reasons.items():
        every = len(places) == len(results)
        lines.append(f"- {'everywhere' if every else '; '.join(places)}: {reason}")
    return "\n".join(lines)


def failed(results: Sequence[Result]) -> bool:
    """Whether a model could not be measured, or our own result was not right."""
    return any(
        "error" in result
        or result.get("engines", {}).get(OURS, {}).get("status", "ok") != "ok"
        for result in results
    )


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The numbers of the last tables, for programs."""
    rows = [row for result in results for row in result.get("rows", [])]
    peers = [n for n in PEERS if speedups(results, n)]
    best = [found.median for found in best_speedups(rows)]
    return {
        "geomean": {name: geomean(speedups(results, name)) for name in peers},
        "geomean_best": geomean(best) if best else None,
        "worst_best": min(best, default=None),
        "slow": list(slow_rows(results)),
        "left_out": list(left_out(results)),
    }


# ---- files


def result_path(folder: Path, model: str, threads: int) -> Path:
    stem = Path(model.replace(":", "_")).name
    return folder / MODELS / f"{stem}_{threads}t.json"


def stored_result(folder: Path, model: str, threads: int) -> Result | None:
    path = result_path(folder, model, threads)
    if not path.exists():
        return None
    found: Result = json.loads(path.read_text())
    return found


def store_result(folder: Path, result: Result, about: Mapping[str, Any]) -> None:
    """One file per model and thread count; a failed run leaves no older one behind."""
    path = result_path(folder, result["model"], result["threads"])
    if "error" in result:
        path.unlink(missing_ok=True)
        return
    write_json(path, about, result)


def write_tables(folder: Path) -> None:
    """models.md and summary.md, from every stored result."""
    stored = [json.loads(path.read_text()) for path in folder.glob(f"{MODELS}/*.json")]
    stored.sort(key=lambda r: (r["model"], r["threads"]))
    stamps = [result["stamp"] for result in stored]
    notes = [note] if (note := left_out_note(stored)) else []
    short = [summary_table(stored), slow_table(stored), models_table(stored)]
    head = (
        "x: a peer's time over pliant's within each round, median of the rounds; above "
        '1 pliant is faster. "x best" takes at each shape the peer for which that is '
        "least. In brackets: the 95% interval of the median (docs/measuring.md)."
    )
    write_page(
        folder / "summary.md", stamps, [*short, compile_table(stored)], [head, *notes]
    )
    tables = [model_table(result) for result in stored if result["rows"]]
    head = f"Milliseconds per call. {head} Every engine was checked against fp64 first."
    write_page(folder / "models.md", stamps, tables, [head, *notes])
