"""Every element type, against eager; and what floats do at their edges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_oracle import assert_close, check, same
from machines import TARGETS, machine
from torch import nn
from torch.nn import functional as F

import pliant

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIZES = [0, 1, 7, 31, 257]


class Fn(nn.Module):
    """A function as a module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: torch.Tensor) -> Any:
        return self.call(*args)


def compiled_fn(
    call: Callable[..., Any], *example: torch.Tensor, target: str = "machine"
) -> Any:
    """Compiles with the first axis of every input dynamic, under one name."""
    shapes = (tuple({0: "n"} if x.dim() else None for x in example),)
    return pliant.compile(Fn(call), example, shapes, target=machine(target))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 50), None
        self.down = nn.Linear(50, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden).softmax(-1)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 4, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


NETS: dict[str, tuple[type[nn.Module], Callable[[int], tuple[int, ...]]]] = {
    "dense": (Dense, lambda n: (n, 24)),
    "convolution": (Convolution, lambda n: (min(n, 8), 3, 13, 9)),
    "attention": (Attention, lambda n: (min(n, 3), n, 32)),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).rpartition(".")[2])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("target", TARGETS)
def test_float_net(target: str, name: str, dtype: torch.dtype) -> None:
    make, shape = NETS[name]
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False).to(dtype)
    exact = copy.deepcopy(model).double()
    dims = {0: "b", 1: "n"} if name == "attention" else {0: "n"}
    example = torch.randn(shape(5)).to(dtype)
    compiled = pliant.compile(model, (example,), (dims,), target=machine(target))
    for n in SIZES:
        check(compiled, model, (torch.randn(shape(n)).to(dtype),), exact)


def integers(dtype: torch.dtype, n: int, zero: bool = True) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(n, 5) > 0.5
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    low, high = max(low, -(2**40)), min(high, 2**40)
    x = torch.randint(low, high + 1, (n, 5), dtype=torch.int64)
    x = torch.where(torch.rand(n, 5) > 0.5, x, x % 7 - (3 if low else 0)).to(dtype)
    return x if zero else torch.where(x == 0, torch.ones_like(x), x)


def arithmetic(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + y, x - y, x * y, x + 3, -x, torch.minimum(x, y), x.clamp(1, 9), x.abs()


def division(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        torch.div(x, y, rounding_mode="floor"),
        torch.div(x, y, rounding_mode="trunc"),
        torch.remainder(x, y),
        torch.fmod(x, y),
        x // 3,
        x % 3,
        x / y,
    )


def comparison(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    chosen = torch.where(x < y, x, y)
    return x < y, x <= y, x == y, x != y, x > 2, (x >= y) & (y > 1), chosen


def reduction(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sum(), x.sum(0), x.sum(1), x.cumsum(0), x.cumsum(1), x.any(0), x.all()


def extremum(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.amax(1), x.amin(1), x.argmax(1), x.argmin(1), y.max(1).values


def bitwise(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x & y, x | y, x ^ y, ~x


def logic(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        torch.logical_and(x, y),
        torch.logical_or(x, y),
        torch.logical_not(x),
        torch.logical_xor(x, y),
        x.to(torch.float32),
        x.to(torch.int64),
        x.to(torch.bool),
    )


GROUPS = [arithmetic, division, comparison, reduction, extremum, bitwise, logic]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
OF_NUMBERS = {arithmetic, division, extremum}  # eager has no such thing for bool


@pytest.mark.parametrize(
    ("group", "dtype"),
    [
        pytest.param(group, dtype, id=f"{group.__name__}-{dtype}")
        for group in GROUPS
        for dtype in INTEGERS
        if dtype is not torch.bool or group not in OF_NUMBERS
    ],
)
def test_integers(group: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    example = integers(dtype, 3), integers(dtype, 3, zero=False)
    compiled = compiled_fn(group, *example)
    for n in (0, 1, 7, 31, 4099):
        inputs = integers(dtype, n), integers(dtype, n, zero=False)
        check(compiled, group, inputs, group)


def test_smallest_integer_over_minus_one() -> None:
    """The one signed division that overflows: a result, whatever it is, no trap."""
    for dtype in (torch.int32, torch.int64):
        x = torch.full((3, 5), torch.iinfo(dtype).min, dtype=dtype)
        y = torch.full((3, 5), -1, dtype=dtype)
        compiled = compiled_fn(
            lambda a, b: (torch.div(a, b, rounding_mode="floor"), a % b), x, y
        )
        quotient, rest = compiled(x, y)
        assert quotient.shape == rest.shape == x.shape
        assert not rest.any()


def test_integer_division_by_zero() -> None:
    """Eager raises here; a typed error or a value are fine, the process lives."""
    for dtype in (torch.int8, torch.int32, torch.int64):
        x, y = torch.ones(3, 5, dtype=dtype), torch.zeros(3, 5, dtype=dtype)
        compiled = compiled_fn(
            lambda a, b: (torch.div(a, b, rounding_mode="floor"), a % b), x, y + 1
        )
        try:
            compiled(x, y)
        except pliant.PliantError as error:
            assert not isinstance(error, pliant.InternalError)
        assert torch.equal(compiled(x, y + 1)[0], x)


# ---- floats at their edges

INF, NAN = float("inf"), float("nan")
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, 3.4e38, -88.8, 89.0])


def edges(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.meshgrid(EDGES.to(dtype), EDGES.to(dtype), indexing="ij")
    return x.contiguous(), y.contiguous()


ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "mul_zero": lambda x, y: x * 0.0 + y,
    "add_zero": lambda x, y: (x + 0.0) * y,
    "div": lambda x, y: x / y,
    "reciprocal": lambda x, y: 1.0 / x,
    "neg": lambda x, y: -x,
    "zero_minus": lambda x, y: 0.0 - x,
    "abs": lambda x, y: x.abs(),
    "relu": lambda x, y: x.relu(),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda x, y: x.clamp(-1.0, 1.0),
    "where": lambda x, y: torch.where(x > y, x, y),
    "exp": lambda x, y: x.exp(),
    "log": lambda x, y: x.log(),
    "log1p": lambda x, y: x.log1p(),
    "expm1": lambda x, y: x.expm1(),
    "sqrt": lambda x, y: x.sqrt(),
    "rsqrt": lambda x, y: x.rsqrt(),
    "tanh": lambda x, y: x.tanh(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "silu": lambda x, y: F.silu(x),
    "gelu": lambda x, y: F.gelu(x),
    "erf": lambda x, y: x.erf(),
    "sin": lambda x, y: x.sin(),
    "floor": lambda x, y: x.floor(),
    "round": lambda x, y: x.round(),
    "sign": lambda x, y: x.sign(),
    "pow": lambda x, y: x**2,
    "self_minus": lambda x, y: x - x + y,
    "self_over": lambda x, y: x / x,
    "chain": lambda x, y: ((x + y) * 2.0 - y).relu().exp() - 1.0,
}


def check_edges(name: str, got: torch.Tensor) -> None:
    """The results of an operator on `edges`, against eager."""
    x, y = edges(torch.float32)
    call = ELEMENTWISE[name]
    eager, exact = call(x, y), call(x.double(), y.double()).float()
    fits = same(got, eager) | same(got, exact)
    odd = ~(got.isfinite() & eager.isfinite())
    assert fits[odd].all(), (x[odd & ~fits], y[odd & ~fits], got[odd & ~fits])
    torch.testing.assert_close(got[~odd], eager[~odd], rtol=1e-6, atol=1e-6)
    # The sign of zero is that of eager in fp64, which runs torch's own formulas. Some
    # in fp32 are oneDNN's, whose gelu(-0.0) is 0.0 or -0.0 by what the machine has.
    zero = eager == 0
    assert torch.equal(got[zero].signbit(), exact[zero].signbit()), name


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_edges(name: str) -> None:
    compiled = compiled_fn(ELEMENTWISE[name], torch.ones(3, 11), torch.ones(3, 11))
    check_edges(name, compiled(*edges(torch.float32)))


@pytest.mark.parametrize("target", TARGETS[1:])
def test_edges_with_shorter_vectors(target: str) -> None:
    """All operators in one model."""

    def every(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(call(x, y) for call in ELEMENTWISE.values())

    example = torch.ones(3, 11), torch.ones(3, 11)
    compiled = compiled_fn(every, *example, target=target)
    for name, got in zip(ELEMENTWISE, compiled(*edges(torch.float32)), strict=True):
        check_edges(name, got)


COMPARE = {
    "comparisons": lambda x, y: (x < y, x <= y, x == y, x != y, x > y, x >= y),
    "kinds": lambda x, y: (x.isnan(), x.isinf(), x.isfinite(), x == x),
    "truth": lambda x, y: (torch.logical_not(x), torch.logical_and(x, y), x.bool()),
    "ifs": lambda x, y: (torch.where(x == x, x, 0.0), x.nan_to_num(0.0, 1.0, -1.0)),
}


@pytest.mark.parametrize("name", COMPARE)
def test_edges_compared(name: str) -> None:
    call = COMPARE[name]
    x, y = edges(torch.float32)
    compiled = compiled_fn(call, torch.ones(3, 11), torch.ones(3, 11))
    check(compiled, call, (x, y), call)


def rows(n: int) -> torch.Tensor:
    """Rows that are ordinary, all -inf, part -inf, with NaN, with +inf, constant."""
    x = torch.randn(6, n)
    x[1] = -INF
    x[2, : n // 2] = -INF
    x[3, n // 2] = NAN
    x[4, n - 1] = INF
    x[5] = 3.0
    return x


ROWS: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "max": lambda x: x.max(),
    "max_values": lambda x: x.max(-1).values,
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "any": lambda x: x.isnan().any(-1),
    "layer_norm": lambda x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-5),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    call = ROWS[name]
    shapes = (({1: "n"},),)
    compiled = pliant.compile(Fn(call), (torch.randn(6, 5),), shapes)
    torch.manual_seed(0)
    for n in (2, 3, 7, 16, 31, 257):
        check(compiled, call, (rows(n),), call)


WHOLE: dict[str, Callable[..., torch.Tensor]] = {
    "twice the sum": lambda x: x.sum() * 2,
    "maximum as integer": lambda x: x.nan_to_num().amax().long(),
    "any as integer": lambda x: (x > 0).any().long(),
    "all as byte": lambda x: (x > 0).all().to(torch.uint8),
    "norm": lambda x: x / x.square().sum().sqrt(),
    "mean": lambda x: x.mean().exp() + 1,
    "variance": lambda x: (x - x.mean()).square().mean(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole(name: str) -> None:
    """A reduction over every axis, and more work on its one number."""
    call = WHOLE[name]
    compiled = compiled_fn(call, torch.randn(3, 5))
    torch.manual_seed(0)
    for n in (1, 7, 257):
        check(compiled, call, (torch.randn(n, 5),), call)


def test_a_sum_as_double() -> None:
    """The sum is one of floats, and is judged as such."""
    compiled = compiled_fn(lambda x: x.sum().double(), torch.randn(3, 5))
    torch.manual_seed(0)
    for n in (1, 7, 257):
        x = torch.randn(n, 5)
        got = compiled(x)
        assert got.dtype is torch.float64 and got == got.float()
        assert_close(got.float(), x.sum(), x.double().sum())


@pytest.mark.parametrize("masked", ["some", "all"])
def test_attention_mask_of_minus_infinity(masked: str) -> None:
    def call(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    shapes = (({0: "b", 2: "n"}, {0: "b", 2: "n", 3: "n"}),)
    torch.manual_seed(0)
    compiled = pliant.compile(
        Fn(call), (torch.randn(2, 3, 5, 8), torch.zeros(2, 1, 5, 5)), shapes
    )
    for n in (2, 7, 33):
        q, mask = torch.randn(2, 3, n, 8), torch.zeros(2, 1, n, n)
        mask[0, 0, :, n // 2 :] = -INF
        if masked == "all":
            mask[1, 0, 0] = -INF
        check(compiled, call, (q, mask), call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [False, True])
def test_half_products(dtype: torch.dtype, turned: bool) -> None:
    """Both operands known at the call; weights that stay half as long as they live."""

    class Product(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ (b.t() if turned else b)

    example = (torch.ones(2, 3).to(dtype), torch.ones(4 if turned else 3, 3).to(dtype))
    dims = ({0: "m", 1: "k"}, {0: "n", 1: "k"} if turned else {0: "k", 1: "n"})
    if not turned:
        example = (example[0], torch.ones(3, 4).to(dtype))
    model = pliant.compile(Product(), example, dims)
    for m, n, k in [(0, 3, 2), (1, 1, 1), (3, 70, 90), (50, 33, 1500), (20, 7, 0)]:
        a = torch.randn(m, k).to(dtype)
        b = torch.randn((n, k) if turned else (k, n)).to(dtype)
        exact = a.double() @ (b.double().t() if turned else b.double())
        assert model(a, b).dtype is dtype
        rounded = exact.to(dtype).double()
        slack = 2 * (rounded - exact).abs() + 1e-2 * exact.abs().clamp(min=1e-3)
        assert ((model(a, b).double() - exact).abs() <= slack).all(), (m, n, k)

    linear = torch.nn.Linear(320, 640, bias=False).to(dtype)
    compiled = pliant.compile(linear, (torch.ones(2, 320).to(dtype),), ({0: "m"},))
    assert compiled.memory_plan(m=1).weight_bytes == 320 * 640 * 2


def test_bf16_beside_a_function_of_it() -> None:
    """A choice between a bf16 and bits that took its sign."""
    functions = (torch.expm1, torch.sin, torch.tan, torch.erf, torch.tanh, torch.sinh)

    class Chosen(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            out = [torch.where(x > 0, x, f(x)) for f in functions]
            return [*out, torch.remainder(x, y), torch.nn.functional.elu(x)]

    y = torch.tensor(-0.25).bfloat16()
    example = torch.randn(5).bfloat16()
    model = pliant.compile(Chosen(), (example, y), ({0: "n"}, {}), threads=1)
    for n in (1, 5, 67):
        x = torch.randn(n).bfloat16()
        for got, want in zip(model(x, y), Chosen()(x, y), strict=True):
            torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


def test_kernels_that_differ_in_the_sign_of_a_zero_are_two() -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        minus = torch.where(x > 1, x, -0.0)
        total = torch.cumsum(minus, 0)  # a kernel between the two
        return minus, torch.where(total > 1, total, 0.0)

    x = torch.tensor([-1.0, 2.0, -0.0, 0.0])
    for got, want in zip(compiled_fn(call, x)(x), call(x), strict=True):
        assert torch.equal(torch.signbit(got), torch.signbit(want))


# What torch makes of a number beside half floats: it is rounded to their type, but for
# factors and divisors.
NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "eq": lambda x: x == 0.7,
    "gt": lambda x: x > 0.7,
    "add": lambda x: x + 0.7,
    "rsub": lambda x: 0.7 - x,
    "mul": lambda x: x * 0.7,
    "div": lambda x: x / 0.7,
    "remainder": lambda x: torch.remainder(x, 0.7),
    "floor": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "base": lambda x: 0.7**x,
    "full": lambda x: torch.full_like(x, 0.7) + x,
    "pad": lambda x: F.pad(x, (1, 1), value=0.7) - 0.7,
    "hardshrink": lambda x: F.hardshrink(x, 0.7),
    "softshrink": lambda x: F.softshrink(x, 0.7),
    "threshold": lambda x: F.threshold(x, 0.7, -1.0),
    "factor": lambda x: x * torch.tensor(0.7),
    "scalar": lambda x: torch.hypot(x, torch.tensor(0.7)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beside_half_floats(name: str, dtype: torch.dtype) -> None:
    halves = [-1.4, 1.4, -0.7, 0.7, 2.1, -2.1, 5.0, 0.35, 0.0701, 0.93, 0.0]
    x, call = torch.tensor(halves, dtype=dtype), NUMBERS[name]
    got, want = compiled_fn(call, x)(x), call(x)
    assert torch.equal(got, want), (got, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_remainder_has_the_sign_of_its_zero(dtype: torch.dtype) -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.fmod(x, 0.5), torch.remainder(x, 0.5), torch.remainder(x, -0.5)

    x = torch.tensor([-0.0, 0.0, -1.5, 1.5, -0.2, 0.2], dtype=dtype)
    for got, want in zip(compiled_fn(call, x)(x), call(x), strict=True):
        assert torch.equal(got, want)
        assert torch.equal(torch.signbit(got), torch.signbit(want))
