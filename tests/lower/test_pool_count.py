"""The divisor of a mean over windows with gaps: the taps that are in the input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import pliant
from pliant.ir.build import Builder
from pliant.ir.graph import Module
from pliant.ir.types import DType, tensor


@pytest.mark.parametrize("include_pad", [False, True])
@pytest.mark.parametrize(("low", "high", "dilation"), [(0, 2, 2), (3, 1, 2), (4, 4, 3)])
def test_mean_of_spread_windows(
    low: int, high: int, dilation: int, include_pad: bool
) -> None:
    size, stride, shape = 3, 2, (1, 1, 11, 13)
    b = Builder()
    x = b.param("x", tensor(DType.F32, *shape))
    window = {
        "window": (size, size),
        "stride": (stride, stride),
        "low": (low, low),
        "high": (high, high),
        "dilation": (dilation, dilation),
    }
    y = b.emit("pool", x, op="mean", include_pad=include_pad, **window)
    compiled = pliant.compile(Module({"main": b.finish("main", [y])}, constants={}))
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = compiled(data)[0, 0]
    for place in np.ndindex(found.shape):
        total, count = 0.0, 0
        for tap in itertools.product(range(size), repeat=2):
            at = [
                p * stride - low + t * dilation for p, t in zip(place, tap, strict=True)
            ]
            inside = all(0 <= a < n for a, n in zip(at, shape[2:], strict=True))
            total += float(data[0, 0, at[0], at[1]]) if inside else 0.0
            count += inside or include_pad
        np.testing.assert_allclose(found[place], total / count, rtol=1e-5, atol=1e-6)
