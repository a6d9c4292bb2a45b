"""Fourier transforms in native code and in the interpreter, against eager and f64.

Arenas end at guard pages and start as NaN. Lengths are smooth, prime and large, even
and odd; rows are fewer and more than the kernel has lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_oracle
from guarded_runs import Call, hostile  # noqa: F401  (a fixture)
from torch import fft

import pliant

DIMS = ({0: "b", 1: "n"},)
SHAPES = ((3, 8), (1, 1), (2, 2), (17, 7), (5, 67), (1, 134), (2, 1009), (33, 60))


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=dtype)


def near(got: Any, want: Any, units: int = 40) -> None:
    got, want = ((x,) if torch.is_tensor(x) else tuple(x) for x in (got, want))
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        if not b.is_floating_point() and not b.is_complex():
            assert torch.equal(a, b)
        elif b.numel():
            unit = torch.finfo(a.dtype).eps
            assert (a - b).abs().max() <= units * unit * b.abs().max().clamp(min=1)


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def check(
    function: Callable[..., Any],
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    dims: Any = DIMS,
    units: int = 40,
) -> None:
    """As eager is in f64, with eager's types."""
    for dtype in dtypes:
        example = normal(*shapes[0], dtype=dtype)
        model = Call(function)
        compiled = pliant.compile(model, (example,), (dims,), threads=2)
        imported = torch_oracle.imported_from(model, (example,), (dims,))
        for shape in shapes:
            x = normal(*shape, dtype=dtype)
            eager, exact = model(x), model(wide(x))
            got = compiled(x)
            assert [y.dtype for y in got] == [y.dtype for y in eager]
            near(got, exact, units)
            near(torch_oracle.run(imported, (x,)), exact, units)


REALS, COMPLEX = (torch.float32, torch.float64), (torch.complex64, torch.complex128)


def test_complex_transforms() -> None:
    def model(x: torch.Tensor) -> Any:
        whole = fft.fft(x), fft.ifft(x), fft.fft(x, dim=0, norm="ortho")
        cut = fft.fft(x, n=5), fft.ifft(x, n=11, dim=0, norm="forward")
        return (*whole, *cut, fft.fftn(x), fft.ifft2(x, norm="ortho"))

    check(model, COMPLEX)


def test_transforms_of_real_numbers() -> None:
    def model(x: torch.Tensor) -> Any:
        halves = fft.rfft(x), fft.rfft(x, dim=0, norm="forward"), fft.rfft(x, n=6)
        others = fft.ihfft(x), fft.ihfftn(x), fft.fft(x), fft.fftn(x).real
        return (*halves, *others, fft.rfftn(x), fft.rfft2(x, s=(4, 9), norm="ortho"))

    check(model, REALS)


def test_transforms_to_real_numbers() -> None:
    def model(x: torch.Tensor) -> Any:
        back = fft.irfft(x), fft.irfft(x, n=9), fft.hfft(x, norm="ortho")
        return (*back, fft.irfftn(x, s=(4, 8)), fft.hfft2(x), fft.irfft(x, n=6, dim=0))

    shapes = tuple(shape for shape in SHAPES if shape != (1, 1))
    check(model, COMPLEX, shapes)


def test_an_axis_in_the_middle() -> None:
    shapes = ((2, 8, 3), (1, 13, 1), (2, 6, 40), (3, 71, 17))
    dims = ({0: "b", 1: "n", 2: "c"},)
    check(lambda x: (fft.rfft(x, dim=1), fft.fft(x, dim=1)), REALS, shapes, dims)


def test_a_round_trip_of_long_rows() -> None:
    m = pliant.compile(
        Call(lambda x: (fft.rfft(x), fft.irfft(fft.rfft(x), n=x.shape[1]))),
        (normal(2, 8, dtype=torch.float32),),
        (DIMS,),
    )
    for n in (4096, 65_537, 99_999, 1 << 17):
        x = normal(1, n, dtype=torch.float32)
        spectrum, back = m(x)
        near(spectrum, fft.rfft(x.double()))
        near(back, x.double())


def test_a_row_does_not_see_another() -> None:
    x = normal(20, 24, dtype=torch.float32)
    m = pliant.compile(Call(fft.rfft), (x,), (DIMS,))
    alone = m(x)
    x[3, 5], x[7] = float("nan"), 1e30
    mixed = m(x)
    others = [i for i in range(20) if i not in (3, 7)]
    assert torch.equal(mixed[others], alone[others])
    assert torch.view_as_real(mixed[3]).isnan().all()


def test_of_no_elements_there_is_no_transform() -> None:
    m = pliant.compile(Call(fft.fft), (normal(2, 3, dtype=torch.float32),), (DIMS,))
    assert m(torch.zeros(0, 5)).shape == (0, 5)
    with pytest.raises(pliant.ShapeError, match="needs elements"):
        m(torch.zeros(2, 0))


def test_shifts_and_frequencies() -> None:
    def model(x: torch.Tensor) -> Any:
        moved = fft.fftshift(x), fft.ifftshift(x, dim=0), fft.fftshift(fft.fft(x))
        return (*moved, fft.fftfreq(9, 0.5), fft.rfftfreq(8))

    check(model, (torch.float32,), ((3, 8), (2, 7), (4, 1)))


def test_short_time_transforms() -> None:
    window = torch.hann_window(16, dtype=torch.float64)

    def model(x: torch.Tensor) -> Any:
        shape = window.to(x.dtype)
        found = torch.stft(x, 16, 5, window=shape, return_complex=True)
        plain = torch.stft(
            x, 16, win_length=10, center=False, normalized=True, return_complex=True
        )
        both = torch.stft(x, 12, 3, onesided=False, return_complex=True)
        back = torch.istft(found, 16, 5, window=shape)
        return found.abs(), plain, both, back

    check(model, REALS, ((3, 80), (2, 33), (1, 17)))


def test_the_plan_holds_workspace_and_tables() -> None:
    m = pliant.compile(
        Call(lambda x: fft.rfft(x).real),
        (normal(2, 8, dtype=torch.float32),),
        (DIMS,),
        threads=2,
    )
    for shape in ((1, 64), (40, 67), (3, 1009), (1, 50_000)):
        sizes = {"b": shape[0], "n": shape[1]}
        m(normal(*shape, dtype=torch.float32))
        assert m.stats()["last_peak_bytes"] == m.memory_plan(**sizes).peak_bytes
