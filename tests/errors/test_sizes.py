"""Sizes that no memory holds: exact numbers or a typed error, and never a crash."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import pliant

MOST = 1 << 56


class Volume(nn.Module):
    """An intermediate of n**4 elements, a result of n."""

    def forward(self, x: Tensor) -> Tensor:
        a = x[:, None, None, None] * x[None, :, None, None] * x[None, None, :, None]
        return (a * x).cumsum(0).flip(0).cumsum(1).sum((0, 1, 2))


class Counted(nn.Module):
    """An intermediate of as many elements as the caller says."""

    def forward(self, x: Tensor, n: int) -> Tensor:
        a = torch.arange(n, dtype=torch.float32)
        return a.cumsum(0).flip(0).cumsum(0).sum() + x.sum()


class Outer(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x[:, None, None] * y


@pytest.fixture(scope="module")
def volume() -> Any:
    return pliant.compile(Volume(), (torch.ones(3),), ({0: "n"},), threads=1)


@pytest.fixture(scope="module")
def counted() -> Any:
    shapes = (None, Dim.DYNAMIC)
    return pliant.compile(Counted(), (torch.ones(3), 5), shapes, threads=1)


@pytest.mark.parametrize("n", [1 << 10, (1 << 13) - 1])
def test_plans_are_exact(volume: Any, n: int) -> None:
    plan = volume.memory_plan(n=n)
    lines = -(-4 * n**4 // 64)
    assert plan.peak_bytes == 2 * 64 * lines + 4 * n
    assert plan.output_bytes == 4 * n


@pytest.mark.parametrize("n", [1 << 15, 1 << 16, (1 << 16) + 1, 1 << 17, (1 << 63) - 1])
def test_plans_that_nothing_holds(volume: Any, n: int) -> None:
    for limit in (None, "1MiB", (1 << 63) - 1):
        with pytest.raises(pliant.ShapeError) as caught:
            volume.memory_plan(n=n, memory_limit=limit)
        for part in (f"n={n}", "f32[n, n, n, n]", str(4 * n**4), "smaller"):
            assert part in str(caught.value)


def test_counts_of_the_caller(counted: Any) -> None:
    (name,) = counted.dims
    assert counted.memory_plan(**{name: 1 << 40}).peak_bytes > 8 << 40
    for n in (1 << 55, 1 << 61, 1 << 62, (1 << 62) + 16, (1 << 63) - 1):
        with pytest.raises(pliant.ShapeError, match="too large"):
            counted.memory_plan(**{name: n})
        with pytest.raises(pliant.ShapeError, match="too large"):
            counted.memory_plan(torch.ones(3), n)


def test_a_limit_is_told_what_fits(counted: Any) -> None:
    (name,) = counted.dims
    with pytest.raises(pliant.MemoryLimitError) as caught:
        counted.memory_plan(**{name: 1 << 40}, memory_limit="1MiB")
    most = caught.value.largest[name]
    fits = counted.memory_plan(**{name: most}, memory_limit="1MiB")
    assert fits.peak_bytes <= 1 << 20 < 8 * (most + 32)


def test_empty_values_with_huge_strides() -> None:
    """Nothing is in them, but kernels compute with their strides."""
    shapes: Any = ({0: "n"}, {0: "m", 1: "k"})
    m = pliant.compile(Outer(), (torch.ones(2), torch.ones(3, 5)), shapes, threads=1)
    assert m.memory_plan(n=0, m=1 << 40, k=8).peak_bytes == 0
    right = Outer()(torch.ones(0), torch.ones(4, 3))
    assert m(torch.ones(0), torch.ones(4, 3)).shape == right.shape
    for n, rows, k in ((0, 1 << 62, 8), (1 << 40, 0, 1 << 40), (1 << 30, 1 << 30, 0)):
        with pytest.raises(pliant.ShapeError, match="too large"):
            m.memory_plan(n=n, m=rows, k=k)
    with pytest.raises(pliant.ShapeError, match="too large"):
        m.memory_plan(
            torch.empty(0, device="meta"), torch.empty(1 << 55, 8, device="meta")
        )
    with pytest.raises(pliant.ShapeError, match="too large"):
        m(torch.ones(0), torch.ones(1 << 57, 0))


def test_guards_of_huge_sizes() -> None:
    """y has n*n elements: at n = 2**32 that is 2**64, which wraps to 0."""

    class Square(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return y.reshape(x.shape[0], x.shape[0]) + x

    n = Dim("n")
    example = (torch.ones(3), torch.ones(9))
    m = pliant.compile(Square(), example, ({0: n}, {0: Dim.DYNAMIC}), threads=1)
    meta = [torch.empty(size, device="meta") for size in (1 << 32, 0)]
    with pytest.raises(pliant.ShapeError):
        m.memory_plan(*meta)
    torch.testing.assert_close(m(*example), Square()(*example))


CALLS = """
    import torch, pliant
    from torch import nn
    from torch.export import Dim
    from test_sizes import Counted, Volume

    def refused(call):
        try:
            call()
        except pliant.ShapeError as error:
            assert "too large" in str(error), error
        else:
            raise SystemExit("was not refused")

    counted = pliant.compile(
        Counted(), (torch.ones(3), 5), (None, Dim.DYNAMIC), threads=1
    )
    for limit in (None, "1MiB"):
        counted.memory_limit = limit
        for n in (1 << 62, (1 << 62) + 16, 1 << 61):
            refused(lambda: counted(torch.ones(3), n))
    volume = pliant.compile(Volume(), (torch.ones(3),), ({0: "n"},), threads=1)
    refused(lambda: volume(torch.ones(1 << 16)))
    x = torch.rand(4)
    torch.testing.assert_close(volume(x), Volume()(x))
    print("alive")
"""


def in_a_process(code: str) -> str:
    """What a script prints that may end its process."""
    folder = __file__.rpartition("/")[0]
    start = f"import sys; sys.path.insert(0, {folder!r})\n"
    ran = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_calls() -> None:
    assert "alive" in in_a_process(CALLS)
