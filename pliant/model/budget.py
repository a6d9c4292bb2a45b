"""A budget for the memory of all calls of a process.

`memory_limit` applies to one call; the threads of a server make several at once. The
runtime (`runtime/budget.c`) counts the memory of all calls of all models, and makes a
call that does not fit wait for others to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from pliant.errors import OptionError
from pliant.model.arguments import parse_bytes, shown
from pliant.runtime import binding
from pliant.runtime.description import NO_LIMIT

_LONGEST = 1e9  # seconds; more is as long as it takes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The budget, and what is held of it now."""

    limit: int | None  # bytes; None: no budget
    wait: bool | float  # True: as long as it takes; False: not at all; or seconds
    running_bytes: int  # of calls that run: arenas, results, copies of inputs
    idle_bytes: int  # of arenas kept between calls; given back when others need them
    waiting_calls: int

    @property
    def in_use(self) -> int:
        return self.running_bytes + self.idle_bytes


def set_memory_budget(limit: int | str | None, wait: bool | float = True) -> None:
    """Caps what all calls of this process hold together: bytes, "512MiB", or None.

    Counted are arenas, in use and idle, results while their call runs, and copies of
    inputs; not weights and compiled code. A call whose plan does not fit at the moment
    waits for others to end, in the order the calls came: as long as it takes, or for
    `wait` seconds, or not at all (`wait=False`). Then it fails with `MemoryLimitError`.
    The budget is also a limit on each call, as `memory_limit` is.
    """
    bytes_ = parse_bytes(limit)
    binding.set_budget(NO_LIMIT if bytes_ is None else bytes_, _nanoseconds(wait))


def memory_budget() -> MemoryBudget:
    """The budget that is set, and what calls and idle arenas hold of it."""
    info = binding.read_budget()
    return MemoryBudget(
        None if info.limit < 0 else info.limit,
        info.wait_ns / 1e9 if info.wait_ns > 0 else info.wait_ns < 0,
        info.running,
        info.idle,
        info.waiting,
    )


def _nanoseconds(wait: object) -> int:
    if isinstance(wait, bool):
        return -1 if wait else 0
    if isinstance(wait, Real) and (seconds := float(wait)) >= 0:
        return int(seconds * 1e9) if seconds < _LONGEST else -1
    raise OptionError(
        f"wait must be True, False or seconds from 0 on, not {shown(wait)}"
    )
