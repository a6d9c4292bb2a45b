"""Times of several engines by turns.

The engines take turns within every round, so that a change in the machine's speed hits
all of them alike, and ratios are taken within a round before their median. Each turn
starts with a pause: the idle threads of the engine before (torch's OpenMP, the pools of
ONNX Runtime and OpenVINO) spin for a while after their last work, some for tens of
milliseconds, and would hold the cores that the next engine needs. A short call is then
run once untimed, to have its data in cache and its own threads awake, and repeated
until the turn is long enough to time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time, sleep

PAUSE_SECONDS = 0.005
MOST_PAUSES = 100
TURN_SECONDS = 0.005
LONG_SECONDS = 0.05  # such a call needs no untimed one before it
MOST_CALLS_A_TURN = 1000
ROUNDS = 15  # of everything that is stored


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the interval that holds the true one with 95 percent.

    The interval goes from one sample to another: whatever the distribution, each sample
    is as likely below the true median as above it, so the number below is binomial.
    Of 15 samples it is the fourth to the twelfth. Fewer than six have no such interval:
    then it is the least and the largest.
    """

    median: float
    low: float
    high: float

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        ranked = sorted(samples)
        outside = _outside(len(ranked))
        return Spread(median(ranked), ranked[outside], ranked[-1 - outside])

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def text(self) -> str:
        """To about three digits of the median."""
        digits = 3 if self.median < 1 else 2 if self.median < 100 else 1
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f} ({low} to {high})"


def _outside(count: int) -> int:
    """Samples on either side that a 95 percent interval of the median leaves out."""
    below, outside = 1, 0  # in units of 2**-count: of at most `outside` samples
    while below * 40 <= 2**count:
        outside += 1
        below += math.comb(count, outside)
    return max(outside - 1, 0)


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    rounds: int = ROUNDS,
    warm_up: int = 2,
) -> dict[str, list[float]]:
    """Seconds per call of every engine, one sample per round."""
    counts = {name: _calls_a_turn(call, warm_up) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for number in range(rounds):
        # going back and forth gives every engine every neighbour
        for name in order if number % 2 == 0 else reversed(order):
            samples[name].append(_turn(calls[name], counts[name]))
    return samples


def _calls_a_turn(call: Callable[[], object], warm_up: int) -> int:
    """How often a turn calls; 0 for a call so long that it needs no warming up."""
    once = math.inf
    for _ in range(max(warm_up, 1) + 1):
        started = perf_counter()
        call()
        once = max(perf_counter() - started, 1e-9)
        if once > LONG_SECONDS:
            return 0
    return min(MOST_CALLS_A_TURN, max(1, round(TURN_SECONDS / once)))


def settle() -> None:
    """Waits until no thread of this process computes any more, but not for ever."""
    for _ in range(MOST_PAUSES):
        before = process_time()
        sleep(PAUSE_SECONDS)
        if process_time() - before < PAUSE_SECONDS / 4:
            return


def _turn(call: Callable[[], object], count: int) -> float:
    settle()
    if count:
        call()
    started = perf_counter()
    for _ in range(max(count, 1)):
        call()
    return (perf_counter() - started) / max(count, 1)


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """above / below within each round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def geomean(values: Sequence[float]) -> float:
    """Of nothing it is not a number."""
    if not values:
        return math.nan
    return math.exp(sum(math.log(v) for v in values) / len(values))


def geomean_spread(found: Sequence[Spread]) -> Spread:
    """Of medians that were measured apart from each other, with its own interval.

    The errors of their logarithms are taken as independent, each with the width that
    its interval tells, so the width of the mean's is the root of the sum of squares.
    """
    middle = geomean([each.median for each in found])
    widths = (math.log(each.high / each.low) for each in found)
    half = math.sqrt(sum(width**2 for width in widths)) / (2 * max(len(found), 1))
    return Spread(middle, middle / math.exp(half), middle * math.exp(half))
