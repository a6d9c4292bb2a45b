"""Times several engines in turns.

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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time, sleep
from typing import TypeVar

PAUSE_SECONDS = 0.005
MOST_PAUSES = 100
LONG_SECONDS = 0.05  # such a call needs no untimed one before it
ROUNDS = 15  # of everything that is stored

Name = TypeVar("Name", bound=Hashable)
Timed = Callable[[int], float]  # makes that many calls, gives the seconds they took
Turn = Callable[[], float]  # gives the seconds of one call


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a turn is, how often it calls at most, and whether it has a pause."""

    seconds: float = 0.005
    most_calls: int = 1000
    pause: bool = True


USUAL = Pace()


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
    calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Seconds per call of every engine, one sample per round."""
    return by_turns({name: turn(called(call)) for name, call in calls.items()}, rounds)


def medians(
    calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS
) -> dict[str, float]:
    """Seconds per call of every engine, by turns."""
    return {name: median(times) for name, times in interleaved(calls, rounds).items()}


def by_turns(
    turns: Mapping[Name, Turn],
    rounds: int,
    enough: Callable[[Mapping[Name, Sequence[float]]], bool] = lambda samples: False,
) -> dict[Name, list[float]]:
    """What each turn gave in each round, until that is enough."""
    samples: dict[Name, list[float]] = {name: [] for name in turns}
    for order in back_and_forth(list(turns), rounds):
        if enough(samples):
            break
        for name in order:
            samples[name].append(turns[name]())
    return samples


def back_and_forth(names: Sequence[Name], rounds: int) -> Iterator[Sequence[Name]]:
    """The order of each round, such that each has every neighbour."""
    for number in range(rounds):
        yield names if number % 2 == 0 else names[::-1]


def called(call: Callable[[], object]) -> Timed:
    """A Python call, repeated in Python."""

    def run(count: int) -> float:
        started = perf_counter()
        for _ in range(count):
            call()
        return perf_counter() - started

    return run


def turn(call: Timed, pace: Pace = USUAL, warm_up: int = 2) -> Turn:
    """As many calls as a turn takes, which is found here, behind some that warm up."""
    once = 0.0
    for _ in range(warm_up + 1):
        once = max(call(1), 1e-9)
        if once > LONG_SECONDS:
            break
    count = min(pace.most_calls, max(1, round(pace.seconds / once)))

    def run() -> float:
        if pace.pause:
            _settle()
            if once <= LONG_SECONDS:
                call(1)
        return call(count) / count

    return run


def _settle() -> None:
    """Waits until no thread of this process computes any more, but not for ever."""
    for _ in range(MOST_PAUSES):
        before = process_time()
        sleep(PAUSE_SECONDS)
        if process_time() - before < PAUSE_SECONDS / 4:
            return


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """above / below within each round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def geomean(values: Sequence[float]) -> float:
    """The geometric mean; NaN for no values."""
    if not values:
        return math.nan
    return math.exp(sum(math.log(v) for v in values) / len(values))


def geomean_spread(found: Sequence[Spread]) -> Spread:
    """The geometric mean of medians that were measured separately, with its interval.

    The errors of their logarithms are taken as independent, each with the width that
    its interval tells, so the width of the mean's is the root of the sum of squares.
    """
    middle = geomean([each.median for each in found])
    widths = (math.log(each.high / each.low) for each in found)
    half = math.sqrt(sum(width**2 for width in widths)) / (2 * max(len(found), 1))
    return Spread(middle, middle / math.exp(half), middle * math.exp(half))
