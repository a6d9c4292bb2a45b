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


FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "hann_window": lambda x: x * torch.hann_window(x.shape[0])[:, None],
    "logspace": lambda x: torch.logspace(0, 1, x.shape[0] + 1).sum() + x,
    "gcd": lambda x: x * math.gcd(x.shape[0], 6),
    "int": lambda x: x * int(x.shape[0]),
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
