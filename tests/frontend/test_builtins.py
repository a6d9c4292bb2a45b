"""Functions of Python and torch that want numbers are given sizes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from guarded_runs import Call
from torch import Tensor

import pliant

F = torch.nn.functional
SIZES = (0, 1, 2, 3, 5, 17, 64)


def compiled(function: Callable[[Tensor], Tensor]) -> pliant.CompiledModel:
    return pliant.compile(Call(function), (torch.randn(4, 3),), ({0: "n"},), threads=1)


WITH_SIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "len": lambda x: x * len(x) + len([1, 2]),
    "len_of_a_part": lambda x: x[: len(x) // 2] + len(x[0:0]),
    "sqrt": lambda x: x / math.sqrt(x.shape[0] + 1),
    "log": lambda x: x * math.log(x.shape[0] + 1) + math.log(3.0),
    "log_to_a_base": lambda x: x * math.log(x.shape[0] + 1, 3),
    "log2": lambda x: x * math.log2(x.shape[0] + 3),
    "log10": lambda x: x * math.log10(2 * x.shape[0] + 3),
    "divmod": lambda x: x * divmod(x.shape[0], 3)[1] + divmod(x.shape[0] + 7, 3)[0],
    "shifts": lambda x: x * (x.shape[0] >> 1) + (x.shape[0] << 2),
    "linspace": lambda x: x + torch.linspace(-1, 2, x.shape[0])[:, None],
    "linspace_of_f64": lambda x: torch.linspace(
        0.5, 7, len(x) * 2 + 1, dtype=torch.float64
    ),
    "arange_by_a_half": lambda x: torch.arange(-0.5, x.shape[0], 0.5),
    "arange_down": lambda x: torch.arange(x.shape[0], -0.25, -1.5, dtype=x.dtype),
    "arange_to_a_float": lambda x: torch.arange(-x.shape[0], 1.5) + x.sum(),
    "as_tensor": lambda x: (
        x + torch.as_tensor([[x.shape[0], 3, 2 * len(x)]] * 2).sum(0)
    ),
    "as_tensor_of_a_type": lambda x: torch.as_tensor((len(x), 1), dtype=torch.float32),
    "as_tensor_of_numbers": lambda x: x + torch.as_tensor([1, 2, 3]),
    "isinstance": lambda x: x * 2 if isinstance(x.shape[0], int) else x,
    "isinstance_of_two": lambda x: x * 2 if isinstance(x.numel(), (str, int)) else x,
    "isinstance_of_a_quotient": lambda x: (
        x * 2 if isinstance(x.shape[0] / 2, float) else x
    ),
    "isinstance_of_another": lambda x: x * 2 if isinstance(x.shape[0], str) else x,
    "one_hot": lambda x: F.one_hot(torch.arange(3), x.shape[0] + 3) + x.sum(),
}


@pytest.mark.parametrize("name", WITH_SIZES)
def test_sizes_stay_sizes(name: str) -> None:
    function = WITH_SIZES[name]
    model = compiled(function)
    for n in SIZES:
        x = torch.randn(n, 3)
        torch.testing.assert_close(model(x), function(x))


def test_what_an_op_asked_decides_nothing_behind_it() -> None:
    """Traced with one chunk, einsum asks whether there is one: the slice stays."""

    def chunks(x: Tensor) -> Tensor:
        n = x.shape[0]
        parts = F.pad(x, (0, 0, 0, -n % 8)).reshape(-1, 8, 1, x.shape[1])
        scores = torch.einsum("clhn,cshn->clsh", parts, parts)
        states = scores.sum((1, 2, 3))[:, None]
        return torch.cat([torch.zeros_like(states[:1]), states])

    model = compiled(chunks)
    for n in (1, 4, 8, 9, 17, 64):
        x = torch.randn(n, 3)
        torch.testing.assert_close(model(x), chunks(x))


def test_a_class_beyond_the_last_is_refused() -> None:
    class Classes(torch.nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            return F.one_hot(i, x.shape[0])

    example = (torch.randn(4), torch.tensor([0, 3]))
    model = pliant.compile(Classes(), example, ({0: "n"}, None), threads=1)
    assert torch.equal(
        model(torch.randn(6), torch.tensor([5, 2])).argmax(1), _ints(5, 2)
    )
    for wrong in (-1, 6):
        with pytest.raises(pliant.IndexRangeError):
            model(torch.randn(6), _ints(0, wrong))


def _ints(*values: int) -> Tensor:
    return torch.tensor(values)


def test_where_python_raises_the_call_is_refused() -> None:
    model = compiled(lambda x: x * math.log(x.shape[0]))
    x = torch.randn(5, 3)
    torch.testing.assert_close(model(x), x * math.log(5))
    with pytest.raises(pliant.ShapeError, match="math domain"):
        model(torch.randn(0, 3))
    model = compiled(lambda x: x * math.sqrt(x.shape[0] - 3))
    torch.testing.assert_close(model(x), x * math.sqrt(2))
    with pytest.raises(pliant.ShapeError, match="math domain"):
        model(torch.randn(2, 3))


# ---- int and float, which are types as well


def whole_numbers(x: Tensor) -> Tensor:
    height, width = int(x.shape[0]), int(x.shape[1])
    return x * height + width + int("3") + int(2.5)


def real_numbers(x: Tensor) -> Tensor:
    ends = [(n, float(n)) for n in x.shape]
    rows, columns = (torch.arange(-0.5, n)[1:] / end for n, end in ends)
    return x + rows[:, None] * columns * float("2")


def real_of_a_ratio(x: Tensor) -> Tensor:
    return x * float((x.shape[0] + 1) / 4)


def of_numbers_that_vary(x: Tensor) -> Tensor:
    half, negative = int(x.shape[0] / 2), int(-x.shape[0] / 2)
    return x[:half] + negative + int(x.shape[0] * 0.5)


def in_a_comprehension(x: Tensor) -> Tensor:
    sizes = tuple(int(n) for n in x.shape)
    return x.new_ones([int(n) + 1 for n in sizes])


def in_a_function_inside(x: Tensor) -> Tensor:
    def larger(n: int) -> int:
        return int(n) + 1

    return x.new_ones(larger(x.shape[0]), larger(x.shape[1]))


def as_types(x: Tensor) -> Tensor:
    n = int(x.shape[0])
    kinds = {int: 2.0, float: 3.0}
    return x.to(float) * n if isinstance(n, int) else x * kinds[float]


NUMBERS = [
    *(whole_numbers, real_numbers, real_of_a_ratio, of_numbers_that_vary),
    *(in_a_comprehension, in_a_function_inside, as_types),
]


@pytest.mark.parametrize("function", NUMBERS, ids=lambda f: f.__name__)
def test_sizes_that_are_made_numbers_stay_sizes(
    function: Callable[[Tensor], Tensor],
) -> None:
    model = compiled(function)
    for n in SIZES:
        x = torch.randn(n, 3)
        torch.testing.assert_close(model(x), function(x))


def key(x: Tensor) -> Tensor:
    return x * {4: 2, 5: 3}[int(x.shape[0])]


def of_another_name(x: Tensor) -> Tensor:
    int = {4: 2, 5: 3}.__getitem__
    return x * int(x.shape[0])


@pytest.mark.parametrize("function", [key, of_another_name], ids=lambda f: f.__name__)
def test_what_has_to_be_a_number_is_one(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(pliant.PliantError, match=r"test_builtins\.py:\d+\)"):
        compiled(function)


def test_a_root_is_no_size() -> None:
    """A float that is no ratio of sizes: where it is rounded, the size is fixed."""

    def root(x: Tensor) -> Tensor:
        return x * int(x.shape[0] ** 0.5)

    model = compiled(root)
    x = torch.randn(4, 3)
    assert torch.equal(model(x), x * 2)
    with pytest.raises(pliant.ShapeError, match=r"test_builtins\.py:\d+\)"):
        model(torch.randn(9, 3))


FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "hann_window": lambda x: x * torch.hann_window(x.shape[0])[:, None],
    "logspace": lambda x: torch.logspace(0, 1, x.shape[0] + 1).sum() + x,
    "gcd": lambda x: x * math.gcd(x.shape[0], 6),
    "int_in_a_lambda": lambda x: x * int(x.shape[0]),
    "bit_length": lambda x: x * x.shape[0].bit_length(),
}


@pytest.mark.parametrize("name", FIXED)
def test_what_fixes_a_size_is_named(name: str) -> None:
    line = FIXED[name].__code__.co_firstlineno
    with pytest.raises(pliant.ShapeError, match=rf"test_builtins\.py:{line}\)"):
        compiled(FIXED[name])


def test_what_cannot_be_traced_is_named() -> None:
    def looked_up(x: Tensor) -> Tensor:
        return x * {4: 2}.get(x.shape[0], 3)

    line = looked_up.__code__.co_firstlineno + 1
    with pytest.raises(pliant.PliantError, match=rf"test_builtins\.py:{line}\)"):
        compiled(looked_up)


@pytest.mark.parametrize("text", [str, repr, "{}".format, lambda n: f"{n}"])
def test_the_text_of_a_size_is_warned_of(text: Callable[[int], str]) -> None:
    with pytest.warns(pliant.SizeTextWarning, match="a text of a size") as found:
        compiled(lambda x: x * len(text(x.shape[0])))
    assert found[0].filename == __file__


def test_texts_of_torch_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pliant.SizeTextWarning)
        compiled(lambda x: x.reshape(-1, 3).relu())
