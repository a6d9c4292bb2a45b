"""The results of `bench.gemm` as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.shapes import Shape
from pliant.compare.tables import Report
from pliant.compare.timing import Spread, geomean, geomean_spread

LARGE = 256  # a shape with every dim at least this is compared with the FMA peak
LOW = 0.85  # a ratio below this counts as low
WORST = 10


@dataclass(frozen=True, slots=True)
class GemmRow:
    """One shape, measured. `called` is the ratio of Python calls, for small shapes."""

    mode: str
    threads: int
    shape: Shape
    seconds: float
    peer: str  # the name of the fastest peer
    best: Spread  # the fastest peer's time divided by ours
    called: float | None
    peers: Mapping[str, float]
    executed: float  # multiply-adds executed divided by those needed

    @property
    def ratio(self) -> float:
        return self.best.median

    @property
    def flops(self) -> float:
        return 2 * self.shape.work / self.seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """The rates per second that the machine reaches with that many threads."""

    threads: int
    flops: float
    read_bytes: float


@dataclass(frozen=True, slots=True)
class Vector:
    """A product of m rows with a weight beyond the caches: bytes read per second."""

    threads: int
    m: int
    n: int
    k: int
    read_bytes: float
    peer_bytes: float
    limit_bytes: float  # reached by a loop that only reads, measured in turns with ours


Group = tuple[str, int]


def tables(
    rows: Sequence[GemmRow], limits: Sequence[Limits], vectors: Sequence[Vector]
) -> list[Report]:
    groups: dict[Group, list[GemmRow]] = {}
    for row in rows:
        groups.setdefault((row.mode, row.threads), []).append(row)
    peaks = {x.threads: x for x in limits}
    found = [summary(groups), against_peak(groups, peaks)]
    if vectors:
        found.append(against_bandwidth(vectors))
    return [*found, *(worst(name, group) for name, group in groups.items())]


def title(group: Group) -> str:
    mode, threads = group
    return f"{mode}, {threads} thread{'s' if threads > 1 else ''}"


def mean(ratios: Sequence[float]) -> str:
    return f"{geomean(ratios):.2f}" if ratios else "-"


def executed(rows: Sequence[GemmRow]) -> float:
    """Over all shapes together, weighted by work."""
    done = sum(r.executed * r.shape.work for r in rows)
    return done / sum(r.shape.work for r in rows)


def summary(groups: Mapping[Group, Sequence[GemmRow]]) -> Report:
    lines = []
    for name, rows in groups.items():
        ratios = [r.ratio for r in rows]
        low = sum(ratio < LOW for ratio in ratios) / len(ratios)
        lines.append(
            (
                title(name),
                geomean_spread([r.best for r in rows]).text(),
                f"{min(ratios):.2f}",
                f"{low:.1%}",
                mean([r.ratio for r in rows if r.called is None]),
                mean([r.ratio for r in rows if r.called is not None]),
                mean([r.called for r in rows if r.called is not None]),
                f"{executed(rows):.3f}",
            )
        )
    return Report(
        "Matrix products against the fastest peer",
        (
            *("", "geomean", "worst", f"below {LOW}"),
            *("API, 2^18 on", "kernel, below 2^18", "the same called"),
            "executed / useful",
        ),
        tuple(lines),
    )


def against_peak(
    groups: Mapping[Group, Sequence[GemmRow]], peaks: Mapping[int, Limits]
) -> Report:
    lines = []
    for name, rows in groups.items():
        peak = peaks[name[1]].flops
        sizes = [r for r in rows if min(r.shape.m, r.shape.n, r.shape.k) >= LARGE]
        shares = [r.flops / peak for r in sizes]
        told = (f"{min(shares):.0%}", f"{median(shares):.0%}") if shares else ("-", "-")
        lines.append((title(name), str(len(sizes)), f"{peak * 1e-9:.0f}", *told))
    return Report(
        f"Share of the FMA peak where M, N, K >= {LARGE}",
        ("", "shapes", "peak GFLOP/s", "least", "median"),
        tuple(lines),
    )


def against_bandwidth(vectors: Sequence[Vector]) -> Report:
    lines = []
    for v in vectors:
        rates = (v.limit_bytes, v.read_bytes, v.peer_bytes)
        lines.append(
            (
                f"{v.m} x {v.n} x {v.k}",
                str(v.threads),
                *(f"{rate * 1e-9:.1f}" for rate in rates),
                f"{v.read_bytes / v.limit_bytes:.0%}",
            )
        )
    return Report(
        "A weight beyond cache: GB/s of it read",
        ("M x N x K", "threads", "limit", "pliant", "F.linear", "share of limit"),
        tuple(lines),
    )


def worst(name: Group, rows: Sequence[GemmRow]) -> Report:
    lines = [
        (
            str(r.shape),
            r.best.text(),
            f"{r.seconds * 1e6:.2f}",
            f"{r.peers[r.peer] * 1e6:.2f}",
            r.peer,
            "kernel" if r.called is not None else "API",
        )
        for r in sorted(rows, key=lambda r: r.ratio)[:WORST]
    ]
    columns = ("M x N x K", "ratio", "pliant µs", "peer µs", "peer", "timed")
    return Report(f"Worst of {title(name)}", columns, tuple(lines))
