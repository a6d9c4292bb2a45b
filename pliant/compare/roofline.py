"""The rate of each kernel against the measured peak of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pliant.compare.report import threads_text
from pliant.compare.tables import Report, dims_text
from pliant.machine import target
from pliant.measure.probes import measured

LIMITS = ("fma_gflops_1", "fma_gflops_all", "read_gbs_1", "read_gbs_all")


def limits() -> dict[str, float]:
    """Peak GFLOP/s and read GB/s of this machine: one thread, and all."""
    found = measured(target.host())
    return {name: float(getattr(found, name)) for name in LIMITS}


def limit_for(machine: Mapping[str, float], name: str, threads: int) -> float:
    """Between one core and all of them the limit is taken to grow evenly."""
    one, every = machine[f"{name}_1"], machine[f"{name}_all"]
    cores = max(target.host().cores, 1)
    if cores == 1 or threads >= cores:
        return every if threads > 1 else one
    return one + (every - one) * (threads - 1) / (cores - 1)


def roofline_tables(
    result: Mapping[str, Any], machine: Mapping[str, float]
) -> list[Report]:
    """One table per call; `machine` has the limits."""
    threads = result["threads"]
    peak = limit_for(machine, "fma_gflops", threads)
    bandwidth = limit_for(machine, "read_gbs", threads)
    return [
        _table(result, call, peak, bandwidth, threads)
        for call in result.get("calls", [])
    ]


def _table(
    result: Mapping[str, Any],
    call: Mapping[str, Any],
    peak: float,
    bandwidth: float,
    threads: int,
) -> Report:
    rows = []
    whole = call["seconds"] or 1e-9
    for kernel in call["kernels"]:
        seconds = max(kernel["seconds"], 1e-9)
        compute, traffic = kernel["flops"] * 1e-9, kernel["bytes"] * 1e-9
        # the least time that either limit allows
        least = max(compute / peak, traffic / bandwidth)
        rows.append(
            (
                kernel["name"],
                str(kernel["calls"]),
                f"{seconds * 1e6:.1f}",
                f"{100 * seconds / whole:.1f}",
                f"{compute / seconds:.1f}" if compute else "",
                f"{100 * compute / seconds / peak:.0f}" if compute else "",
                f"{traffic / seconds:.1f}",
                f"{100 * traffic / seconds / bandwidth:.0f}",
                "compute" if compute / peak > traffic / bandwidth else "memory",
                f"{100 * least / seconds:.0f}",
            )
        )
    return Report(
        f"{result['model']} at {dims_text(call['shape'])}, {threads_text(threads)}: "
        f"{whole * 1e3:.2f} ms in kernels; "
        f"limits {peak:.0f} GFLOP/s, {bandwidth:.0f} GB/s",
        (
            *("kernel", "calls", "µs", "% of time", "GFLOP/s", "% of peak"),
            *("GB/s", "% of bandwidth", "limited by", "% of limit"),
        ),
        tuple(rows),
    )
