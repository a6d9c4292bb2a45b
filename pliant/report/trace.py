"""One call as a trace for Perfetto or chrome://tracing: kernels, and live bytes.

The runtime takes the time of a kernel as a whole, whichever threads run it, so there is
one row; the number of threads is with each kernel. The counter is what the call holds
while the kernel runs, by the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pliant.report.profile import KernelTime
from pliant.report.timeline import Timeline


def trace_events(
    times: Sequence[KernelTime],
    memory: Timeline,
    dims: Mapping[str, int],
    threads: int,
) -> dict[str, Any]:
    """The JSON object of a trace file; its times are microseconds from the first."""
    ordered = sorted(times, key=lambda time: time.started)
    begun = ordered[0].started if ordered else 0.0
    sizes = ", ".join(f"{name}={size}" for name, size in dims.items())
    title = f"pliant call at {sizes}" if sizes else "pliant call"
    events: list[dict[str, Any]] = [
        _event("M", "process_name", args={"name": title}),
        _event("M", "thread_name", args={"name": f"kernels, {threads} threads"}),
    ]
    # Where steps are repeated, the plan has more of them than there are times.
    known = len(memory.moments) == len(ordered)
    for number, time in enumerate(ordered):
        at = (time.started - begun) * 1e6
        told = {"line": time.loc, "flops": time.flops, "bytes": time.bytes}
        told["threads"] = threads
        length = time.seconds * 1e6
        events.append(_event("X", time.name, ts=at, dur=length, args=told))
        if known:
            live = memory.moments[number].live_bytes
            events.append(_event("C", "live bytes", ts=at, args={"bytes": live}))
    if ordered and known:
        end = (ordered[-1].started - begun + ordered[-1].seconds) * 1e6
        events.append(_event("C", "live bytes", ts=end, args={"bytes": 0}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": kind, "pid": 1, "tid": 1, "name": name, **more}
