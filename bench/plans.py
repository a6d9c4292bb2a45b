"""How good the choice of a plan is: `python -m bench.plans`, `make bench-plans`.

A compiled product takes its plan as arguments, so one artifact runs every plan that its
scratch allows (bench/plan_set.py). For random shapes, log-uniform in 1..4096, all of
them are run in machine code on memory that is there, their results compared with
NumPy's, and the slower ones left out round by round until a few are timed in turns with
the plan that `kernels/choose.py` picks. Half of those turns say which is the best, the
other half by how much: a plan that was lucky once is not lucky twice.

Two modes: `packed`, B a constant in panels (few columns: in rows along K), and
`dynamic`, B as it lies. Writes bench/results/plans.json and plans.md; a run over fewer
shapes is only printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter, time_ns

import numpy as np

from bench.plan_code import Artifact, PlanOperands, artifacts
from bench.plan_set import CandidatePlan, Set, picked
from bench.script import save, show, tell
from bench.shapes import Shape, random_shapes
from pliant.compare.tables import Report, console
from pliant.compare.timing import ROUNDS, Pace, Turn, by_turns, geomean, turn

SHAPES = 300
MOST_WORK = 1 << 31  # multiply-adds
PACE = Pace(seconds=0.0005, most_calls=20_000, pause=False)
FINALISTS = 4
FINAL_ROUNDS = 2 * ROUNDS
FEWEST_TRIED = 24
NOTABLE = 0.9  # picks below this share of the best plan's speed are listed
UNIT = 2.0**-24


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One shape: the pick, the best plan, and the pick's share of the best's speed."""

    mode: str
    threads: int
    shape: Shape
    tried: int
    pick: CandidatePlan
    best: CandidatePlan
    pick_seconds: float
    best_seconds: float
    share: float


# ---- one shape


def check(shape: Shape, plan: CandidatePlan, x: PlanOperands) -> None:
    """Checks a result to within twice the rounding error of a sum of K products."""
    terms = shape.k * UNIT
    sizes = np.linalg.norm(x.a, axis=1)[:, None] * np.linalg.norm(x.b, axis=0)
    if not (np.abs(x.c - x.want) <= 2 * terms / (1 - terms) * sizes + UNIT).all():
        raise SystemExit(f"wrong result: {shape}, {plan}")


def knockout(
    turns: Mapping[CandidatePlan, Turn], keep: CandidatePlan
) -> list[CandidatePlan]:
    """The fastest few, and `keep`; each round drops half of the plans."""
    best = {plan: seconds for plan, (seconds,) in by_turns(turns, 1).items()}
    while len(best) > FINALISTS:
        again = by_turns({plan: turns[plan] for plan in best}, 1)
        best = {plan: min(seconds, *again[plan]) for plan, seconds in best.items()}
        ranked = sorted(best, key=lambda plan: best[plan])
        best = {p: best[p] for p in ranked[: max(FINALISTS, len(ranked) // 2)]}
    return list(dict.fromkeys([keep, *best]))


def measure(
    mode: str, artifact: Artifact, shape: Shape, threads: int, seconds: float
) -> PlanRow:
    x = artifact.operands(shape.m, shape.n, shape.k, threads)
    pick = picked(artifact.choice(shape.m, shape.n, shape.k, threads))
    pool = Set(
        *(shape.m, shape.n, shape.k, threads),
        constant=mode == "packed",
        tile=artifact.tile,
    )
    others = sorted({*pool.plans()} - {pick})
    np.random.default_rng(shape.work).shuffle(others)
    turns: dict[CandidatePlan, Turn] = {}
    started = perf_counter()
    for plan in (pick, *others):
        late = perf_counter() - started > seconds
        if late and len(turns) >= FEWEST_TRIED:
            break
        call = artifact.call(x, plan)
        x.c.fill(np.nan)
        call(1)
        check(shape, plan, x)
        turns[plan] = turn(call, PACE, warm_up=0)
    left = {plan: turns[plan] for plan in knockout(turns, pick)}
    samples = by_turns(left, FINAL_ROUNDS)
    best = min(samples, key=lambda plan: median(samples[plan][::2]))
    pick_seconds, best_seconds = (median(samples[plan][1::2]) for plan in (pick, best))
    times = (pick_seconds, best_seconds, min(best_seconds / pick_seconds, 1.0))
    return PlanRow(mode, threads, shape, len(turns), pick, best, *times)


def sweep(
    shapes: Sequence[Shape], modes: Sequence[str], threads: int, seconds: float
) -> Iterator[PlanRow]:
    made = artifacts()
    for shape in shapes:
        for mode in modes:
            yield measure(mode, made[mode], shape, threads, seconds)


# ---- reports


def summary(rows: Sequence[PlanRow]) -> Report:
    lines = []
    for mode in dict.fromkeys(row.mode for row in rows):
        shares = [row.share for row in rows if row.mode == mode]
        tried = [row.tried for row in rows if row.mode == mode]
        lines.append(
            (
                mode,
                str(len(shares)),
                f"{median(tried):.0f}",
                f"{geomean(shares):.3f}",
                f"{min(shares):.2f}",
                f"{sum(share < NOTABLE for share in shares) / len(shares):.1%}",
            )
        )
    columns = ("", "shapes", "plans each", "geomean", "worst", f"below {NOTABLE}")
    title = f"The picked plan's speed, of the best plan's, threads: {rows[0].threads}"
    return Report(title, columns, tuple(lines))


def misses(rows: Sequence[PlanRow]) -> Report:
    """Shapes where the choice could be better, the worst first."""
    lines = [
        (
            f"{row.mode} {row.shape}",
            f"{row.share:.2f}",
            *(f"{1e6 * s:.1f}" for s in (row.pick_seconds, row.best_seconds)),
            str(row.pick),
            str(row.best),
        )
        for row in sorted(rows, key=lambda row: row.share)
        if row.share < NOTABLE
    ]
    columns = ("M x N x K", "share", "pick µs", "best µs", "pick", "best")
    return Report(f"Picks below {NOTABLE} of the best", columns, tuple(lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.plans", description=__doc__)
    parser.add_argument("--shapes", type=int, default=SHAPES)
    parser.add_argument("--seed", type=int, help="default: the clock")
    parser.add_argument("--modes", nargs="+", default=["packed", "dynamic"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="to try plans in")
    arguments = parser.parse_args()
    seed = time_ns() % 2**32 if arguments.seed is None else arguments.seed
    tell(arguments.shapes / 100, f"{arguments.shapes} shapes")
    started = perf_counter()
    shapes = random_shapes(arguments.shapes, seed, MOST_WORK)
    rows: list[PlanRow] = []
    for row in sweep(shapes, arguments.modes, arguments.threads, arguments.seconds):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"\r{len(rows)} {row.shape}\033[K", end="", file=sys.stderr)
    terminal = console()
    reports = [summary(rows), misses(rows)]
    show(reports)
    took = f"{len(shapes)} shapes, seed {seed}, {perf_counter() - started:.0f} s"
    terminal.print(took, highlight=False)
    content = {"seed": seed, "rows": [asdict(r) for r in rows]}
    if len(shapes) >= SHAPES:
        save("plans", content, reports, ROUNDS, [took])
    return 0


if __name__ == "__main__":
    sys.exit(main())
