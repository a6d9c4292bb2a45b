"""BladeDISC++: fine-tuning on changing lengths inside a memory limit.

A llama of 4 layers takes the same steps in several ways (bench/finetune.py), one step
of each by turns, those of ours inside a limit below what the longest sequence takes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

from bench.finetune import (
    LONGEST,
    OURS,
    SHORTEST,
    WAYS,
    Server,
    bucket,
    lengths,
)
from bench.papers import PaperResult, Run
from pliant.compare.tables import Report, mebibytes
from pliant.compare.timing import back_and_forth, ratios

MINUTES = 8.0
PERCENT = 55  # of the peak at the longest sequence: the limit of the timed steps
PERCENTS = (100, 80, 60, PERCENT)
NOT_TIMED = ("both off",)
SWITCHES = (OURS, "order off", "remat off", "both off")
EXACT = (SHORTEST, 700, 1500, LONGEST)
WARM = 200  # tokens of the step that compiles
SEED = 0

Steps = dict[str, list[dict[str, Any]]]


def run(given: Run) -> PaperResult:
    drawn = lengths(given.rounds, SEED)
    servers = {way: Server(way, given.threads) for way in WAYS}
    try:
        warm(servers, drawn)
        whole = servers[OURS].step(LONGEST, None, kind="plan")["peak"]
        limit = whole * PERCENT // 100
        steps = timed(servers, drawn, limit)
        longest = max(drawn)
        peaks = {
            way: server.step(longest, limit, kind="memory")
            for way, server in servers.items()
            if way not in NOT_TIMED
        }
        fits = longest_that_fit(servers, whole)
        few = EXACT if given.share >= 1 else EXACT[:1]
        exact = [exact_peaks(servers, length) for length in few]
    finally:
        for server in servers.values():
            server.close()
    content = {
        "limit": limit,
        "lengths": drawn,
        "ways": steps,
        "peaks": peaks,
        "fits": fits,
        "exact": exact,
    }
    tables = [
        ways_table(steps, peaks, limit, longest, given.threads),
        fits_table(fits, whole),
        exact_table(exact),
    ]
    return PaperResult(content, tables, given.rounds, [note(drawn)])


def warm(servers: Mapping[str, Server], drawn: list[int]) -> None:
    """Compiles everything: one step in each bucket where buckets are compiled."""
    for way, server in servers.items():
        print(f"  {way}: compiling", file=sys.stderr)
        buckets = sorted({bucket(length) for length in drawn})
        for length in buckets if way == "buckets" else [WARM]:
            server.step(length, None)


def timed(servers: Mapping[str, Server], drawn: list[int], limit: int) -> Steps:
    found: Steps = {way: [] for way in servers if way not in NOT_TIMED}
    orders = back_and_forth(list(found), len(drawn))
    for k, (length, order) in enumerate(zip(drawn, orders, strict=True)):
        for way in order:
            result = servers[way].step(length, limit, seed=k)
            told = result.get("seconds", "refused")
            print(f"  {length} tokens, {way}: {told}", file=sys.stderr)
            found[way].append({"length": length, **result})
    return found


def longest_that_fit(
    servers: Mapping[str, Server], whole: int
) -> dict[str, dict[str, int]]:
    """By limit and switch: the longest sequence that has a plan, by bisection."""
    found: dict[str, dict[str, int]] = {}
    for percent in PERCENTS:
        limit = whole * percent // 100
        found[str(percent)] = {
            way: _longest(servers[way], limit, SHORTEST, LONGEST) for way in SWITCHES
        }
    return found


def _longest(server: Server, limit: int, low: int, high: int) -> int:
    """Bisection: what fits at a length fits at shorter ones. 0 if none fits."""

    def fits(length: int) -> bool:
        return "peak" in server.step(length, limit, kind="plan")

    if fits(high):
        return high
    if not fits(low):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def exact_peaks(servers: Mapping[str, Server], length: int) -> dict[str, int]:
    """Planned peaks without a limit: compiled for this length, and for all."""
    told = {way: servers[way].step(length, None, kind="plan") for way in SWITCHES[:2]}
    exact = servers["buckets"].step(length, None, kind="exact")
    return {
        "length": length,
        "exact": exact["peak"],
        **{way: plan["peak"] for way, plan in told.items()},
    }


# ---- reports


def ways_table(
    steps: Steps,
    peaks: Mapping[str, Mapping[str, Any]],
    limit: int,
    longest: int,
    threads: int,
) -> Report:
    lines = [way_line(way, steps, peaks[way]) for way in steps]
    name = (
        f"llama, 4 layers, random weights, batch 1, {len(steps[OURS])} lengths from "
        f"{SHORTEST} to {LONGEST}, {threads} threads; limit {mebibytes(limit)} MiB, "
        f"{PERCENT}% of the peak at {LONGEST}"
    )
    columns = (
        *("way", "tokens/s", "time / pliant's", "steps refused"),
        *("steps with recomputing", "steps with filing"),
        *(f"resident peak MiB at {longest}", "compiles", "compile s", "last loss"),
    )
    return Report(name, columns, tuple(lines))


def way_line(way: str, steps: Steps, peak: Mapping[str, Any]) -> tuple[str, ...]:
    done = [step for step in steps[way] if "seconds" in step]
    seconds = sum(step["seconds"] for step in done)
    last = steps[way][-1]
    return (
        way if WAYS[way].limited else f"{way} (no limit)",
        f"{sum(s['length'] for s in done) / seconds:.0f}" if done else "–",
        over_ours(way, steps),
        f"{len(steps[way]) - len(done)} of {len(steps[way])}",
        str(sum(bool(s.get("recomputed")) for s in done)),
        str(sum(bool(s.get("spilled")) for s in done)),
        mebibytes(peak["bytes"]) if "bytes" in peak else "refused",
        str(last["compiles"]),
        f"{last['compile_seconds']:.1f}",
        f"{done[-1]['loss']:.3f}" if done else "–",
    )


def over_ours(way: str, steps: Steps) -> str:
    """The time over ours, for steps that both ran."""
    pairs = [
        (theirs["seconds"], ours["seconds"])
        for theirs, ours in zip(steps[way], steps[OURS], strict=True)
        if "seconds" in theirs and "seconds" in ours
    ]
    if not pairs:
        return "–"
    return ratios([a for a, _ in pairs], [b for _, b in pairs]).text()


def fits_table(fits: Mapping[str, Mapping[str, int]], whole: int) -> Report:
    lines = []
    for percent, found in fits.items():
        limit = mebibytes(whole * int(percent) // 100)
        cells = (str(found[way]) if found[way] else "none" for way in SWITCHES)
        lines.append((f"{percent}%: {limit} MiB", *cells))
    name = f"The longest sequence that fits, from {SHORTEST} to {LONGEST} (planned)"
    return Report(name, ("limit", *SWITCHES), tuple(lines))


def exact_table(rows: list[dict[str, int]]) -> Report:
    lines = [
        (
            str(row["length"]),
            mebibytes(row["exact"]),
            *(
                f"{mebibytes(row[way])} ({row[way] / row['exact']:.3f})"
                for way in SWITCHES[:2]
            ),
        )
        for row in rows
    ]
    name = "Planned peak MiB without a limit (over that of the exact length)"
    columns = ("tokens", "compiled for this length", "compiled once", "order off")
    return Report(name, columns, tuple(lines))


def note(drawn: list[int]) -> str:
    return (
        f"{sum(drawn)} tokens in {len(drawn)} steps, the median has "
        f"{median(drawn):.0f}. A time over ours is taken within a step and only where "
        "both ran; the rounds of the stamp are these steps. eager and checkpoint have "
        "no limit: their peak is what they took."
    )
