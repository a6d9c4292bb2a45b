"""The experiments of the papers that Pliant follows, as far as one CPU goes.

    python -m bench.papers bladedisc disc relax ftuner    (or `all`)

Each is a module with `MINUTES`, its usual duration, and `run`, which returns its
results. docs/papers.md says what is the same as in the paper and what differs.
`--minutes` makes an experiment shorter or longer; a shorter one leaves something out
and is only printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.compare.tables import Report
from pliant.compare.timing import ROUNDS


@dataclass(frozen=True, slots=True)
class Run:
    """The settings of a run; `share` is the fraction of the usual time."""

    threads: int
    share: float

    @property
    def rounds(self) -> int:
        return max(2, round(ROUNDS * self.share))

    def some(self, values: Sequence[int], usual: int) -> list[int]:
        """As many of the values as there is time for, evenly spread, the last kept."""
        count = min(len(values), max(2, round(usual * self.share)))
        last = len(values) - 1
        places = {round(k * last / (count - 1)) for k in range(count)}
        return [values[k] for k in sorted(places)]


@dataclass(frozen=True, slots=True)
class PaperResult:
    """The results of an experiment; 0 rounds if nothing was timed."""

    content: Mapping[str, Any]
    tables: Sequence[Report]
    rounds: int
    notes: Sequence[str] = field(default=())
