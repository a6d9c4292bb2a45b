"""Random sizes of matrix products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LARGEST = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    m: int
    n: int
    k: int

    @property
    def work(self) -> int:
        """Multiply-adds."""
        return self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


def random_shapes(count: int, seed: int, most_work: int | None = None) -> list[Shape]:
    """Log-uniform in 1..LARGEST for each size, up to `most_work`."""
    source = np.random.default_rng(seed)
    found: list[Shape] = []
    while len(found) < count:
        sizes = np.exp(source.uniform(0, np.log(LARGEST + 1), 3)).astype(int)
        shape = Shape(*(int(min(size, LARGEST)) for size in sizes))
        if most_work is None or shape.work <= most_work:
            found.append(shape)
    return found
