"""Ops that order, select, search and count, in native code against eager.

Arenas end at guard pages and start as NaN. Rows have ties, NaN, infinities and both
zeros; sizes are 0, 1, around where the algorithms change, and large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_oracle
from guarded_runs import Call, hostile  # noqa: F401  (a fixture)

import pliant

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)


def compiled(
    function: Callable[..., Any], *example: torch.Tensor, threads: int = 2
) -> pliant.CompiledModel:
    names = ("a", "b", "c", "d")
    dims = tuple(
        {i: f"{names[k]}{i}" for i in range(x.ndim)} for k, x in enumerate(example)
    )
    return pliant.compile(Call(function), example, (dims,), threads=threads)


def hard(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Elements with ties; of floats also NaN, infinities and both zeros."""
    torch.manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape) > 0
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        few = torch.randint(max(info.min, -5), 6, shape)
        ends = torch.tensor([info.min, info.max])[torch.randint(2, shape)]
        return torch.where(torch.rand(shape) < 0.8, few, ends).to(dtype)
    x = torch.randn(shape)
    few = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1.0])
    picked = few[torch.randint(len(few), shape)]
    return torch.where(torch.rand(shape) < 0.4, picked, x).to(dtype)


def plain(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Elements as integers, so that zeros and NaNs are told apart; any NaN is one."""
    if not x.is_floating_point():
        return x
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(kind)


def exact(got: Any, want: Any) -> None:
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for a, b in pairs:
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(bits(a), bits(b))


LENGTHS = (0, 1, 2, 13, 159, 160, 383, 384, 1009, 9001)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sort_keeps_equals_in_order(dtype: torch.dtype) -> None:
    def model(x: torch.Tensor) -> Any:
        ways = [(dim, turned) for dim in (-1, 0) for turned in (False, True)]
        sorts = [torch.sort(x, dim=d, stable=True, descending=t) for d, t in ways]
        return tuple(part for pair in sorts for part in pair)

    m = compiled(model, hard(dtype, 3, 5))
    for n in LENGTHS:
        for shape in ((3, n), (n, 3)):
            x = hard(dtype, *shape, seed=n)
            exact(m(x), model(x))
    assert m(hard(dtype, 0, 4))[0].shape == (0, 4)


@pytest.mark.parametrize("dtype", (torch.float32, torch.int64), ids=str)
def test_sort_of_long_rows(dtype: torch.dtype) -> None:
    m = compiled(lambda x: x.sort(stable=True), hard(dtype, 7))
    x = hard(dtype, 200_003)
    for given in (
        x,
        x.sort().values,
        x.sort(descending=True).values,
        x[:1].repeat(999),
    ):
        exact(m(given), given.sort(stable=True))


def chosen(x: torch.Tensor, k: int, dim: int, largest: bool) -> Any:
    """Of equals the first, which torch leaves open."""
    values, places = x.sort(dim=dim, stable=True, descending=largest)
    return values.narrow(dim, 0, k), places.narrow(dim, 0, k)


@pytest.mark.parametrize("dtype", (*FLOATS, *INTEGERS), ids=str)
def test_topk(dtype: torch.dtype) -> None:
    ways = [(k, dim, up) for k in (0, 1, 7, 150) for dim, up in ((0, True), (1, False))]

    def model(x: torch.Tensor) -> Any:
        return tuple(part for way in ways for part in torch.topk(x, *way))

    m = compiled(model, hard(dtype, 157, 163))
    for shape in ((150, 150), (151, 157), (4001, 151), (153, 1307)):
        x = hard(dtype, *shape, seed=shape[0])
        got = m(x)
        exact(got, tuple(part for way in ways for part in chosen(x, *way)))
        for ours, eager in zip(got[::2], model(x)[::2], strict=True):
            assert torch.equal(ours.nan_to_num(), eager.nan_to_num())
    rising = torch.arange(30_000).to(dtype).expand(150, -1)
    exact(m(rising), tuple(part for way in ways for part in chosen(rising, *way)))


def test_topk_of_more_than_there_are() -> None:
    m = compiled(lambda x: torch.topk(x, 4).values, plain(2, 9))
    assert m(plain(3, 4)).shape == (3, 4)
    with pytest.raises(pliant.ShapeError, match=r"selected index k out of range"):
        m(plain(3, 3))


def test_symbolic_k() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.topk(x, x.shape[1] // 2 + 1).values

    m = compiled(model, plain(2, 9))
    for n in (1, 2, 30, 999):
        exact(m(plain(3, n)), model(plain(3, n)))


def test_numbers_are_rows_of_one() -> None:
    def model(x: torch.Tensor) -> Any:
        s = x.amax()
        parts = [*s.sort(), *s.topk(1), *s.cummax(0), *s.median(0), *s.mode(0)]
        return *parts, s.msort() if s.ndim else s, s.quantile(0.5)

    m = compiled(model, plain(3))
    exact(m(plain(5)), model(plain(5)))


def _places_are_of(x: torch.Tensor, got: Any, dim: int) -> None:
    values, places = got
    taken = x.gather(dim, places.unsqueeze(dim)).squeeze(dim)
    exact(values, taken)  # the very zero


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64, torch.uint8), ids=str)
def test_single_elements_of_sorted_rows(dtype: torch.dtype) -> None:
    """Values are eager's; places only have to hold those values."""

    def model(x: torch.Tensor) -> Any:
        mode = x.nan_to_num().mode(1)  # eager's does not know NaN
        parts = [*x.kthvalue(3, 1), *x.median(1), *x.nanmedian(1), *mode]
        keep = x.kthvalue(2, 0, keepdim=True).values, x.median(0, True).values
        return *parts, *keep, x.median(), x.nanmedian()

    m = compiled(model, hard(dtype, 5, 6))
    for shape in ((2, 3), (5, 31), (300, 3), (4, 1000)):
        x = hard(dtype, *shape, seed=shape[1])
        got, want = m(x), model(x)
        for k in range(0, 8, 2):
            assert torch.equal(got[k].nan_to_num(), want[k].nan_to_num())
            _places_are_of(x if k < 6 else x.nan_to_num(), got[k : k + 2], 1)
        for a, b in zip(got[8:], want[8:], strict=True):
            assert a.shape == b.shape
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_median_of_nothing() -> None:
    m = compiled(lambda x: (x.median(), x.nanmedian()), plain(3))
    nan = float("nan")
    for x in ([], [2.0], [3.0, 1.0], [nan, 1.0, 0.0], [nan], [float("inf"), nan, 1.0]):
        given = torch.tensor(x)
        exact(m(given), (given.median(), given.nanmedian()))
    rows = compiled(lambda x: x.median(1).values, plain(3, 4))
    with pytest.raises(pliant.ShapeError, match="median of no elements"):
        rows(plain(3, 0))


def test_mode_is_the_least_of_the_most_frequent() -> None:
    m = compiled(lambda x: x.mode(-1), plain(3, 4))
    for n in (1, 2, 15):
        x = torch.randint(4, (50, n)).float()
        exact(m(x), tuple(x.mode(-1)))


@pytest.mark.parametrize(
    "between", ["linear", "lower", "higher", "nearest", "midpoint"]
)
def test_quantiles(between: str) -> None:
    q = torch.tensor([0.0, 0.21, 0.5, 0.8, 1.0])

    def model(x: torch.Tensor) -> Any:
        more = {"interpolation": between}
        return (
            x.quantile(0.3, 1, **more),
            x.quantile(q.to(x), 0, True, **more),
            x.nanquantile(0.7, 0, True, **more),
            x.nanquantile(q.to(x), **more),
            x.quantile(0.25, keepdim=True, **more),
        )

    m = compiled(model, plain(4, 5))
    for shape in ((1, 1), (7, 11), (200, 3)):
        x = plain(*shape)
        torch_oracle.same(m(x), model(x), tolerance=1e-6)
        x[0, 0] = float("nan")
        torch_oracle.same(m(x), model(x), tolerance=1e-6)


def test_quantiles_of_nothing_are_refused() -> None:
    """Also where only other axes are empty, as eager does."""
    m = compiled(lambda x: x.nanquantile(0.3, 1, True), plain(4, 5))
    for shape in ((0, 5), (4, 0), (0, 0)):
        with pytest.raises(pliant.ShapeError, match="must be non-empty"):
            m(plain(*shape))


@pytest.mark.parametrize("dtype", (*FLOATS, *INTEGERS), ids=str)
def test_running_extremes(dtype: torch.dtype) -> None:
    def model(x: torch.Tensor) -> Any:
        return *x.cummax(1), *x.cummin(1), *x.cummax(0), *x.cummin(-3)

    m = compiled(model, hard(dtype, 3, 4, 5))
    for shape in ((0, 3, 2), (2, 0, 3), (1, 1, 1), (3, 200, 1), (5, 6, 131)):
        x = hard(dtype, *shape, seed=shape[1])
        exact(m(x), model(x))


def test_running_logsumexp() -> None:
    def model(x: torch.Tensor) -> Any:
        return x.logcumsumexp(1), x.logcumsumexp(0), x.half().logcumsumexp(1)

    m = compiled(model, plain(3, 4))
    inf = float("inf")
    ends = torch.tensor([[-inf, -inf, 1.0, inf, 2.0, inf], [0.0, -inf, 99.0, 0, 1, 2]])
    spoilt = torch.tensor([[1.0, float("nan"), 2.0, inf]])
    for x in (plain(3, 0), plain(1, 1), plain(30, 70) * 30, ends, spoilt):
        torch_oracle.same(m(x), model(x), tolerance=1e-6)


@pytest.mark.parametrize("dtype", (*FLOATS, *INTEGERS), ids=str)
def test_search(dtype: torch.dtype) -> None:
    def model(rows: torch.Tensor, values: torch.Tensor) -> Any:
        return (
            torch.searchsorted(rows, values),
            torch.searchsorted(rows, values, right=True),
            torch.searchsorted(rows, values, out_int32=True, side="right"),
            torch.searchsorted(rows[0], values),
            torch.bucketize(values, rows[0]),
            torch.bucketize(values, rows[0], right=True),
        )

    m = compiled(model, hard(dtype, 3, 4).sort().values, hard(dtype, 3, 5))
    for n, count in ((1, 1), (2, 9), (100, 33), (5000, 1000)):
        rows, values = hard(dtype, 3, n).sort().values, hard(dtype, 3, count, seed=1)
        exact(m(rows, values), model(rows, values))


def test_search_by_a_sorter() -> None:
    def model(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(rows, values, sorter=rows.argsort(-1))

    m = compiled(model, plain(3, 4), plain(3, 5))
    rows, values = plain(2, 77), plain(2, 9, seed=1)
    exact(m(rows, values), model(rows, values))


@pytest.mark.parametrize("dtype", (*FLOATS[:2], *INTEGERS), ids=str)
def test_isin(dtype: torch.dtype) -> None:
    def model(x: torch.Tensor, among: torch.Tensor) -> Any:
        return torch.isin(x, among), torch.isin(x, among, invert=True), torch.isin(x, 1)

    m = compiled(model, hard(dtype, 3, 4), hard(dtype, 5))
    nothing = hard(dtype, 3, 9), torch.full((2,), float("nan")).to(dtype)
    exact(m(*nothing), model(*nothing))
    for shape, count in (((2, 3), 0), ((0, 3), 4), ((50, 7), 1), ((30, 30), 40)):
        x, among = hard(dtype, *shape), hard(dtype, count, seed=1)
        exact(m(x, among), model(x, among))


def test_histograms() -> None:
    def model(x: torch.Tensor) -> Any:
        return (
            torch.histc(x, 7, -1, 2),
            torch.histc(x, 5),
            torch.histc(x.double(), 3, 0, 3),
        )

    m = compiled(model, plain(3, 4))
    whole = torch.randint(-2, 4, (20, 5)).float()
    for x in (plain(1, 3), plain(90, 50), whole, torch.zeros(2, 2)):
        torch_oracle.same(m(x), model(x), tolerance=1e-6)
    none = compiled(lambda x: torch.histc(x, 4), plain(3))
    assert torch.equal(none(plain(0)), torch.zeros(4))
    nan = torch.tensor([float("nan"), 0.5, float("inf"), 2.0, 0.0])
    bounded = compiled(lambda x: torch.histc(x, 2, 0, 2), plain(3))
    assert torch.equal(bounded(nan), torch.histc(nan, 2, 0, 2))


def test_threads_do_not_change_results() -> None:
    def model(x: torch.Tensor) -> Any:
        return *x.sort(-1), *x.topk(5, 0), *x.cummin(1), x.logcumsumexp(0)

    one, three = (compiled(model, plain(9, 9), threads=n) for n in (1, 3))
    for shape in ((200, 300), (5, 9000)):
        exact(three(plain(*shape)), one(plain(*shape)))


def test_the_plan_counts_the_workspace() -> None:
    m = compiled(lambda x: x.sort(-1).values, plain(3, 5), threads=2)
    planned = m.memory_plan(a0=4, a1=1000)
    rows = 4 * 4000 + 8 * 4000  # values and places
    assert planned.peak_bytes >= rows + 2 * 8 * 1000
    m(plain(4, 1000))
    assert m.stats()["last_peak_bytes"] == planned.peak_bytes
