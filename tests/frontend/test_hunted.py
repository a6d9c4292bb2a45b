"""Small models that random ones of tests/fuzz found wrong, refused or failing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module

aten = torch.ops.aten
NAN, INF = math.nan, math.inf


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def compiled(
    function: Callable[..., Any], *example: Tensor, dims: Any
) -> Callable[..., Any]:
    return pliant.compile(Apply(function), example, dims, threads=1)


def as_eager(
    function: Callable[..., Any], ours: Callable[..., Any], *args: Tensor
) -> None:
    """The same results, and the same done to the arguments."""
    mine = [a.clone() for a in args]
    want, got = function(*args), ours(*mine)
    if isinstance(want, Tensor):
        want, got = [want], [got]
    for have, wanted in zip((*got, *mine), (*want, *args), strict=True):
        torch.testing.assert_close(have, wanted, equal_nan=True)


# --- division of integers -------------------------------------------------------

DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floor_divide": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "fmod": torch.fmod,
    "div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "div.floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
@pytest.mark.parametrize("name", DIVISIONS)
def test_division_by_zero(name: str, dtype: torch.dtype) -> None:
    function = DIVISIONS[name]
    x, y = torch.arange(1, 9).to(dtype), torch.arange(2, 10).to(dtype)
    ours = compiled(function, x, y, dims=({0: "n"}, {0: "n"}))
    as_eager(function, ours, x, y)
    as_eager(function, ours, x[:0], y[:0])
    for place in (0, 7):
        other = y.clone()
        other[place] = 0
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            function(x, other)
        what = name.partition(".")[0]
        with pytest.raises(pliant.DivisionError, match=f"^{what}: division .* by 0"):
            ours(x, other)
    as_eager(function, ours, x, y)  # a failed call leaves nothing behind


def test_division_where_nothing_is_divided() -> None:
    """A zero among the divisors of no numbers is no error, as in eager."""
    function = DIVISIONS["floor_divide"]
    x, y = torch.ones(2, 3, dtype=torch.int64), torch.arange(1, 4)
    ours = compiled(function, x, y, dims=({0: "n"}, {}))
    as_eager(function, ours, x[:0], y - 1)
    with pytest.raises(pliant.DivisionError):
        ours(x, y - 1)


def test_division_by_a_size_or_a_number() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [x // 3, x % -2, x // x.shape[0], torch.remainder(5, x)]

    x = torch.arange(1, 6)
    ours = compiled(function, x, dims=({0: "n"},))
    as_eager(function, ours, x)
    as_eager(function, ours, x[:0])
    with pytest.raises(ZeroDivisionError):
        ours(x - 1)


def test_floats_divide_by_zero() -> None:
    function = DIVISIONS["floor_divide"]
    x, y = torch.tensor([1.0, -1.0, 0.0]), torch.zeros(3)
    as_eager(function, compiled(function, x, y, dims=({0: "n"}, {0: "n"})), x, y)


def test_divisor_is_interpreted() -> None:
    module = parse_module(
        """
graph @main(%y: i64[n]) {
  %z: i64[n] = divisor(%y) {of = "div"}
  return %z
}
"""
    )
    (found,) = run_graph(module, [torch.tensor([2, -1]).numpy()])
    assert found.tolist() == [2, -1]
    with pytest.raises(pliant.DivisionError, match="div: division of an integer by 0"):
        run_graph(module, [torch.tensor([2, 0]).numpy()])


# --- nothing to reduce, nothing to infer a size from ------------------------------


@pytest.mark.parametrize("order", [INF, -INF, -1.0])
def test_norms_of_nothing(order: float) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, order, 0)

    x = torch.randn(4, 3)
    ours = compiled(function, x, dims=({0: "n", 1: "m"},))
    as_eager(function, ours, x)
    as_eager(function, ours, x[:, :0])
    with pytest.raises(RuntimeError):
        function(x[:0])
    with pytest.raises(pliant.ShapeError, match="of no elements at dim 0"):
        ours(x[:0])


def test_a_size_to_infer_beside_none() -> None:
    def function(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1) * 2

    x = torch.randn(4, 3, 2)
    ours = compiled(function, x, dims=({0: "n", 1: "m"},))
    as_eager(function, ours, x[:, :0])
    with pytest.raises(RuntimeError):
        function(x[:0])
    with pytest.raises(pliant.ShapeError, match="a -1 beside a size of 0"):
        ours(x[:0])


def test_cross_entropy_of_no_classes() -> None:
    def function(x: Tensor) -> Tensor:
        return F.cross_entropy(x, x.softmax(1))

    x = torch.randn(2, 5)
    ours = compiled(function, x, dims=({0: "n", 1: "m"},))
    for rows in (0, 1, 2):
        for columns in (0, 1, 5):
            as_eager(function, ours, x[:rows, :columns])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.conv1d(x, torch.ones(5, 4, 3), padding=2),
        lambda x: F.conv_transpose1d(x, torch.ones(4, 5, 3)),
        lambda x: F.max_pool2d(x[..., None], (3, 1), 1, (1, 0)),
        lambda x: F.avg_pool1d(x, 3, 1, 1),
    ],
)
def test_windows_of_nothing(function: Callable[[Tensor], Tensor]) -> None:
    """As eager: a padded axis of nothing is refused, a batch of nothing may not be."""
    ours = compiled(function, torch.randn(2, 4, 5), dims=({0: "b", 2: "n"},))
    for b, n in ((2, 5), (0, 5), (2, 0), (0, 0), (1, 1)):
        x = torch.randn(b, 4, n)
        try:
            function(x)
        except (RuntimeError, IndexError):
            with pytest.raises(pliant.ShapeError, match="needs elements"):
                ours(x)
        else:
            as_eager(function, ours, x)


@pytest.mark.parametrize(
    "function", [lambda x, i: x[:, i], lambda x, i: x.index_select(1, i)]
)
def test_indices_into_nothing(function: Callable[..., Tensor]) -> None:
    x, i = torch.randn(3, 3), torch.zeros(2, dtype=torch.int64)
    ours = compiled(function, x, i, dims=({0: "n", 1: "n"}, {0: "m"}))
    as_eager(function, ours, x, i)
    as_eager(function, ours, x[:0, :0], i[:0])
    with pytest.raises((IndexError, RuntimeError)):
        function(x[:0, :0], i)
    with pytest.raises(pliant.ShapeError, match="an axis of no elements"):
        ours(x[:0, :0], i)


def test_instance_norm_of_no_batch() -> None:
    def function(x: Tensor) -> Tensor:
        return F.instance_norm(x, weight=torch.ones(4), bias=torch.ones(4))

    x = torch.randn(2, 4, 5)
    ours = compiled(function, x, dims=({0: "b", 2: "n"},))
    as_eager(function, ours, x)
    with pytest.raises(IndexError):
        function(x[:0])
    with pytest.raises(pliant.ShapeError, match="need a batch"):
        ours(x[:0])


def test_a_value_that_one_size_flattens() -> None:
    def function(x: Tensor) -> Tensor:
        half = torch.split(x, (x.shape[0] + 1) // 2)[1].clone()
        half[1:] = half[:-1].clone()
        return half

    # torch takes a value of one element for a number: a trace at 4 holds for 4 and 5.
    x = torch.randn(4)
    ours = compiled(function, x, dims=({0: "n"},))
    as_eager(function, ours, x)
    as_eager(function, ours, torch.randn(5))
    for n in (2, 3, 6, 7):
        with pytest.raises(pliant.ShapeError, match="number of elements"):
            ours(torch.randn(n))


# --- slices of one element --------------------------------------------------------

SLICES: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda x: x[:1],
    "two": lambda x: x[:2] * 2,
    "last": lambda x: x[-1:],
    "beside": lambda x: x[:1] + x,
    "joined": lambda x: torch.cat([x, x[:1]]),
    "read": lambda x: x[:1] + x[:1].shape[0],
    "made": lambda x: torch.ones(x[:1].shape[0], 2),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_of_few_rows(name: str) -> None:
    function, x = SLICES[name], torch.randn(5, 3)
    ours = compiled(function, x, dims=({0: "n"},))
    for rows in (5, 2, 1, 0):
        as_eager(function, ours, x[:rows])


def test_a_question_asked_twice() -> None:
    """Both dims of n are dropped at 1, by a program of its own."""

    def function(x: Tensor) -> Tensor:
        return x.squeeze() * 2

    x = torch.randn(6, 5, 5)
    ours = compiled(function, x, dims=({1: "n", 2: "n"},))
    for n in (5, 1, 2, 0):
        as_eager(function, ours, x[:, :n, :n])


def test_mask_of_one_key() -> None:
    def function(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, q[:1, :1, :, :1], scale=0.4)

    q = torch.randn(2, 4, 5, 3)
    ours = compiled(function, q, dims=({0: "b", 2: "n", 3: "m"},))
    for b, n, m in ((2, 5, 3), (1, 1, 1), (3, 7, 2)):
        as_eager(function, ours, torch.randn(b, 4, n, m))


# --- results that nothing reads ---------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_only_the_sums_of_attention(causal: bool) -> None:
    def function(q: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, causal)[1]

    q = torch.randn(2, 4, 5, 8)
    ours = compiled(function, q, dims=({0: "b", 2: "n"},))
    as_eager(function, ours, q)
    as_eager(function, ours, q[:1, :, :1])


def test_a_size_of_data_alone() -> None:
    """Nothing but the number of elements that a mask keeps."""

    def sized(x: Tensor, mask: Tensor) -> Tensor:
        return torch.ones(torch.masked_select(x, mask).shape[0])

    def changed(x: Tensor, mask: Tensor) -> Tensor:
        picked = torch.masked_select(x, mask)
        picked.narrow(0, 0, 1).zero_()
        return torch.full_like(picked, 2)

    x = torch.randn(4)
    ours = compiled(sized, x, x > 0, dims=({0: "n"}, {0: "n"}))
    for n in (0, 1, 4, 31):
        x = torch.randn(n)
        as_eager(sized, ours, x, x > 0)
    x = torch.randn(4)
    ours = compiled(changed, x, x == x, dims=({0: "n"}, {0: "n"}))
    for n in (1, 4, 31):
        x = torch.randn(n)
        as_eager(changed, ours, x, x == x)
        with pytest.raises(pliant.ShapeError, match="u0 must be at least 1, got 0"):
            ours(x, x != x)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grids_of_no_number(rank: int, padding: str) -> None:
    """Positions that are NaN or infinite are where eager has them."""

    def sampled(x: Tensor, grid: Tensor) -> Tensor:
        how = {"padding_mode": padding, "align_corners": False}
        smooth = torch.nn.functional.grid_sample(x, grid, **how)
        near = torch.nn.functional.grid_sample(x, grid, mode="nearest", **how)
        return torch.cat([smooth, near], 1)

    x = torch.randn(1, 2, *[3] * rank)
    places = torch.tensor([math.nan, math.inf, -math.inf, 0.3, -2.0, 5.0])
    grid = torch.stack([places] * rank, -1).reshape(1, *[1] * (rank - 1), 6, rank)
    ours = compiled(sampled, x, grid, dims=None)
    torch.testing.assert_close(ours(x, grid), sampled(x, grid), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grids_of_halves(dtype: torch.dtype) -> None:
    """Places between many elements are not rounded to what a half can tell apart."""
    x, grid = torch.randn(1, 2, 3, 300), torch.rand(1, 1, 200, 2) * 2 - 1
    x, grid = x.to(dtype), grid.to(dtype)
    ours = compiled(F.grid_sample, x, grid, dims=None)
    true = F.grid_sample(x.double(), grid.double())
    torch.testing.assert_close(ours(x, grid).double(), true, rtol=1e-2, atol=1e-2)


# --- copies that are views at some sizes ------------------------------------------


def changed_input(x: Tensor) -> Tensor:
    flat = x.mT.reshape(x.shape[0], -1)
    flat[:, 0].mul_(2)
    return flat


def changed_copy(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    flat = y.mT.reshape(x.shape[0], -1)
    flat[:, 0].mul_(2)
    return flat, y


def changed_source(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    kept = y.mT.contiguous()
    y.mul_(2)
    return kept, y


def changed_dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    kept = F.dropout(y, 0.5, training=False)
    kept[0].mul_(2)
    return kept, y


def changed_alone(x: Tensor) -> Tensor:
    flat = (x + 1).mT.reshape(x.shape[0], -1)
    flat[:, 0].mul_(2)
    return flat


@pytest.mark.parametrize(
    "function", [changed_copy, changed_source, changed_alone, changed_dropout]
)
def test_a_view_of_one_column(function: Callable[..., Any]) -> None:
    ours = compiled(function, torch.randn(3, 4, 5), dims=({0: "b", 2: "n"},))
    for b, n in ((3, 5), (1, 5), (3, 1), (1, 1)):
        as_eager(function, ours, torch.randn(b, 4, n))


def test_an_input_that_one_size_would_change() -> None:
    ours = compiled(changed_input, torch.randn(3, 4, 5), dims=({0: "b", 2: "n"},))
    for shape in ((1, 4, 5), (3, 4, 1), (1, 4, 1), (2, 4, 2)):
        as_eager(changed_input, ours, torch.randn(shape))


# --- numbers ----------------------------------------------------------------------


def test_lerp_by_a_number_in_f64() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(x, y, 0.8)

    x, y = (torch.randn(5, dtype=torch.float64) for _ in range(2))
    ours = compiled(function, x, y, dims=({0: "n"}, {0: "n"}))
    torch.testing.assert_close(ours(x, y), function(x, y), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_small_results_of_erfc(dtype: torch.dtype) -> None:
    ends = torch.tensor([INF, -INF, NAN, -0.0, 0.46875, 4.0, 1e-30, 28.0])
    x = torch.cat([torch.linspace(-6, 28, 4001), ends]).to(dtype)
    got = compiled(torch.erfc, x, dims=({0: "n"},))(x).double()
    want = torch.erfc(x.double())
    eps = torch.finfo(dtype).eps
    least = torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(got, want, rtol=8 * eps, atol=least, equal_nan=True)


RESIZES = (
    ("linear", (1.25,)),
    ("bilinear", (1.25, 1.25)),
    ("bilinear", (1.3, 2.0)),
    ("bicubic", (1.25, 1.25)),
    ("trilinear", (1.25, 1.3, 2.0)),
    ("nearest", (1.25,)),
    ("nearest", (1.25, 2.3)),
    ("nearest", (1.25, 1.25, 2.3)),
    ("nearest-exact", (1.33, 2.3)),
)


@pytest.mark.parametrize(("mode", "scale"), RESIZES)
def test_scales_that_keep_a_size(mode: str, scale: tuple[float, ...]) -> None:
    """floor(3 * 1.25) is 3, and torch copies such an axis in some modes."""

    def function(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=scale, mode=mode)

    rank = len(scale)
    names = {2 + axis: "nmk"[axis] for axis in range(rank)}
    ours = compiled(function, torch.randn(2, 3, *[8] * rank), dims=(names,))
    for n in (1, 2, 3, 4, 7):
        for m in (1, 3, 6):
            as_eager(function, ours, torch.randn(2, 3, *(n, m, m)[:rank]))
    static = torch.randn(2, 3, *[3] * rank)
    as_eager(function, compiled(function, static, dims=None), static)


@pytest.mark.parametrize("dims", [None, ({0: "b", 3: "m"},)], ids=["all", "some"])
def test_infinities_along_an_axis_that_stays(dims: Any) -> None:
    """Its weights are 1 and 0, and infinity times 0 is NaN, known sizes or not."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        one = F.interpolate(x, scale_factor=(1.0, 2.0), mode="bilinear")
        return one, F.interpolate(x, scale_factor=(1.0, 1.0), mode="bilinear")

    x = torch.randn(2, 3, 5, 4)
    x[:, :, 2, 1], x[1, 1] = INF, -INF
    as_eager(function, compiled(function, x, dims=dims), x)


def test_an_axis_that_stays_reads_no_neighbour() -> None:
    def function(x: Tensor) -> Tensor:
        size = (2 * x.shape[2], 3)
        return F.interpolate(x, size, mode="bilinear", align_corners=True)

    ours = compiled(function, torch.randn(1, 2, 5, 4), dims=({2: "n", 3: "m"},))
    x = torch.randn(1, 2, 7, 3)
    x[0, 0, 4, 2] = INF
    as_eager(function, ours, x)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_a_resize_to_nothing_is_refused(mode: str) -> None:
    def function(x: Tensor, like: Tensor) -> Tensor:
        return F.interpolate(x, size=(like.shape[0], 5), mode=mode)

    x = torch.randn(2, 3, 4, 5)
    ours = compiled(function, x, torch.randn(3), dims=({0: "b", 2: "n"}, {0: "k"}))
    as_eager(function, ours, x[:0], torch.randn(1))
    for nothing in ((x, torch.randn(0)), (x[:, :, :0], torch.randn(2))):
        with pytest.raises(RuntimeError, match="greater than 0"):
            function(*nothing)
        with pytest.raises(pliant.ShapeError, match="a resize needs elements"):
            ours(*nothing)


def test_a_number_scales_before_factors_and_divisors_do() -> None:
    """What overflows or vanishes without it does not, and what does with it does."""

    def function(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.addcdiv(x, a, b, value=0.3),
            torch.addcmul(x, a, 1 / b, value=0.3),
            torch.addcdiv(x, a, b, value=1e30),
            torch.addcmul(x.double(), a, b, value=1e30),
        )

    a = torch.tensor([0.5, -3e38, 1e-30, 0.25, 2.0])
    b = torch.tensor([1e-39, 0.5, 1e20, 3e38, 2.0])
    ours = compiled(function, torch.zeros(5), a, b, dims=({0: "n"},) * 3)
    as_eager(function, ours, torch.zeros(5), a, b)
    as_eager(function, ours, torch.ones(1), a[:1], b[:1])


def test_a_copy_of_repeated_rows_is_a_view_at_one() -> None:
    """Rows with a stride of 0, flattened: with one column that is the input itself."""

    def changed(x: Tensor) -> Tensor:
        wide = x[0].expand(x.shape)
        wide.flatten()[:2].fill_(1)
        return x * 2

    m = compiled(changed, torch.randn(4, 3), dims=({0: "n", 1: "m"},))
    for n, columns in ((4, 3), (2, 2), (7, 5)):
        x = torch.randn(n, columns)
        y = x.clone()
        assert torch.equal(m(x), changed(y)) and torch.equal(x, y)
    for n, columns in ((5, 1), (1, 5)):
        with pytest.raises(pliant.ShapeError, match="is a copy in the trace"):
            m(torch.randn(n, columns))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
@pytest.mark.parametrize("op", [torch.any, torch.all])
def test_truth_of_no_axes(op: Any, dtype: torch.dtype, keepdim: bool) -> None:
    """Other reductions take no axes for all of them."""

    def function(x: Tensor) -> Tensor:
        return op(x, dim=(), keepdim=keepdim)

    x = torch.tensor([[0, 1, 2], [3, 0, 1]]).to(dtype)
    ours = compiled(function, x, dims=({0: "n"},))
    as_eager(function, ours, x)
    as_eager(function, ours, x[:0])


def test_logsumexp_of_no_axes() -> None:
    x = torch.randn(2, 3)
    kept = lambda x: torch.logsumexp(x, (), keepdim=True)  # noqa: E731
    as_eager(kept, compiled(kept, x, dims=({0: "n"},)), x)
    with pytest.raises(pliant.UnsupportedOpError, match="of no axes"):
        compiled(lambda x: torch.logsumexp(x, ()), x, dims=({0: "n"},))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 1 / F.pad(x, (1, 1), value=-0.0),
        lambda x: 1 / F.pad(x, (1, 1), value=0.0),
        lambda x: 1 / torch.nan_to_num(x, nan=-0.0),
    ],
)
def test_the_sign_of_a_zero_that_fills(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([[1.0, NAN, 2.0]])
    as_eager(function, compiled(function, x, dims=({0: "n"},)), x)


@pytest.mark.parametrize("given", [(0.0, -0.0), (-0.0, 0.0)], ids=str)
def test_a_fixed_zero_has_its_sign(given: tuple[float, float]) -> None:
    def function(x: Tensor, by: float) -> Tensor:
        return x / by

    x = torch.randn(4)
    ours = pliant.compile(Apply(function), (x, given[0]), ({0: "n"}, None), threads=1)
    torch.testing.assert_close(ours(x, given[0]), function(x, given[0]))
    with pytest.raises(
        pliant.ShapeError, match=f"was fixed to {given[0]} .*{given[1]}"
    ):
        ours(x, given[1])


def test_a_fixed_nan_is_any_nan() -> None:
    x = torch.randn(4)
    ours = pliant.compile(
        Apply(lambda x, by: x * by), (x, NAN), ({0: "n"}, None), threads=1
    )
    assert ours(x, float("nan")).isnan().all()


@pytest.mark.parametrize("nothing", [(), {}, [], ((), [])], ids=str)
def test_results_of_nothing(nothing: Any) -> None:
    ours = compiled(lambda x: nothing, torch.randn(4), dims=({0: "n"},))
    assert ours(torch.randn(5)) == nothing
