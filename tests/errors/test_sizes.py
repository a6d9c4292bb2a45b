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


def test_a_size_of_0_is_no_advice(volume: Any) -> None:
    assert volume.memory_plan(n=0, memory_limit=1).peak_bytes <= 1
    for n in (1, 2, 1 << 10):
        with pytest.raises(pliant.MemoryLimitError) as caught:
            volume.memory_plan(n=n, memory_limit=1)
        assert not caught.value.largest
        assert "use" not in str(caught.value)


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


# ---- integers of the caller


class Padded(nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return torch.cat([x, x.new_zeros(n)])


class Cut(nn.Module):
    """The zeros are not part of the result, but eager refuses to make them."""

    def forward(self, x: Tensor, n: int) -> Tensor:
        return torch.cat([x, x.new_zeros(n)]).narrow(0, 0, 2)


class Head(nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x[:n] * 1.0


class Added(nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x + abs(n) + max(n, 0) - n


class Asked(nn.Module):
    """torch.export answers this by itself: it takes no integer for a negative one."""

    def forward(self, x: Tensor, n: int) -> Tensor:
        return x * 2 if n > -3 else x * 3


class Squared(nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x.long() + n * n


@pytest.mark.parametrize("kind", [Padded, Cut, Head, Added, Asked, Squared])
def test_integers_are_not_negative(kind: type[nn.Module]) -> None:
    """Eager's answer, or a refusal that names the input."""
    x = torch.arange(6.0)
    for bound in (Dim.DYNAMIC, Dim("n", max=1 << 40)):
        m = pliant.compile(kind(), (x, 4), ({0: "r"}, bound), threads=1)
        for n in (3, 5, 6):
            torch.testing.assert_close(m(x, n), kind()(x, n))
        for n in (-1, -2, -(1 << 40), -(1 << 63) + 1):
            with pytest.raises(pliant.ShapeError) as caught:
                m(x, n)
            assert f"={n}" in str(caught.value)
            assert "'n' must not be negative" in str(caught.value)
            with pytest.raises(pliant.ShapeError):
                m.memory_plan(x, n)
        for n in (1 << 63, -(1 << 63), 1 << 70):
            with pytest.raises(pliant.PliantError):
                m(x, n)
            with pytest.raises(pliant.PliantError):
                m.memory_plan(x, n)


def test_numbers_made_of_integers() -> None:
    """n*n is a number of the model, no size: exact, or refused."""
    x = torch.arange(3.0)
    m = pliant.compile(Squared(), (x, 4), ({0: "r"}, Dim.DYNAMIC), threads=1)
    assert m(x, 1 << 31).tolist() == [(1 << 62) + k for k in range(3)]
    with pytest.raises(pliant.ShapeError, match=str(1 << 64)):
        m(x, 1 << 32)


def test_differences_of_sizes() -> None:
    class Rest(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            more = x.new_zeros(x.shape[0] - y.shape[0])
            return torch.cat([x, more]).cumsum(0)

    def given(a: int, b: int) -> tuple[Tensor, Tensor]:
        return torch.arange(float(a)), torch.ones(b)

    m = pliant.compile(Rest(), given(6, 4), ({0: "a"}, {0: "b"}), threads=1)
    for a, b in ((6, 4), (5, 5), (7, 0)):
        torch.testing.assert_close(m(*given(a, b)), Rest()(*given(a, b)))
    with pytest.raises(pliant.ShapeError, match="negative"):
        m(*given(4, 6))
    with pytest.raises(pliant.ShapeError, match="negative"):
        m.memory_plan(a=4, b=6)


def test_divisors() -> None:
    class Share(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + x.shape[0] // y.shape[0] + x.shape[0] % y.shape[0]

    x = torch.arange(7.0)
    m = pliant.compile(Share(), (x, torch.ones(3)), ({0: "a"}, {0: "b"}), threads=1)
    torch.testing.assert_close(m(x, torch.ones(4)), Share()(x, torch.ones(4)))
    for call in (lambda: m(x, torch.ones(0)), lambda: m.memory_plan(a=7, b=0)):
        with pytest.raises(pliant.ShapeError, match="divisor"):
            call()


NEGATIVE = """
    import torch, pliant
    from torch import nn
    from torch.export import Dim
    from test_sizes import Padded

    class Folded(Padded):
        def forward(self, x, n):
            return super().forward(x, n).cumsum(0).flip(0).cumsum(0)[:2]

    x = torch.ones(1_000_000)
    for kind in (Padded, Folded):
        shapes = ({0: "r"}, Dim.DYNAMIC)
        m = pliant.compile(kind(), (torch.ones(6), 4), shapes, threads=1)
        for n in (-2, -999_990, -2_000_000):
            try:
                m(x, n)
            except pliant.ShapeError:
                continue
            raise SystemExit(f"{n} was taken for a size")
        torch.testing.assert_close(m(x[:9], 3), kind()(x[:9], 3))
    y = [torch.ones(100) for _ in range(100)]
    del y
    print("alive")
"""


def test_negative_calls() -> None:
    assert "alive" in in_a_process(NEGATIVE)


def test_torch_compile_takes_negative_numbers() -> None:
    """torch asks for no guard of a number that is only added."""

    def moved(x: Tensor, n: int) -> Tensor:
        return x * 2 + n

    torch._dynamo.reset()
    compiled = torch.compile(moved, backend="pliant", dynamic=True)
    x = torch.arange(5.0)
    for n in (7, 4, -3, -(1 << 40), 0):
        torch.testing.assert_close(compiled(x, n), moved(x, n))
