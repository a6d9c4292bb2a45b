"""The experiments of the papers that Pliant follows, as far as one CPU goes.

    python -m bench.papers bladedisc disc relax ftuner    (or `all`)

Each is a module with `MINUTES`, what it takes, and `run`, which gives what it found;
docs/papers.md says what is the same as in the paper and what differs. `--minutes` makes
an experiment shorter or longer; one that is shorter than usual leaves something out and
is only printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.compare.tables import Report
from pliant.compare.timing import ROUNDS


@dataclass(frozen=True, slots=True)
class Run:
    """What an experiment is run with; `share` of its usual time."""

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
    """What an experiment found: 0 rounds where nothing was timed."""

    content: Mapping[str, Any]
    tables: Sequence[Report]
    rounds: int
    notes: Sequence[str] = field(default=())
