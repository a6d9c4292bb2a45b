"""Random models of every op against eager: a minute of `make fuzz`, always the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from catalogue import ENTRIES, LEFT_OUT
from judge import Shake, judge, references
from random_models import Input, Line, Model, model

import pliant
from pliant.frontend.torch_ops import TABLE

SEEDS = range(0, 120, 6)  # the first of each test; it does six


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_overload_is_in_the_catalogue() -> None:
    table = {str(overload) for overload in TABLE}
    listed = {entry.overload for entry in ENTRIES if not entry.text}
    assert table - listed == set(LEFT_OUT)
    assert listed - table == set()


def test_every_entry_fits_somewhere() -> None:
    """No entry is one that eager always refuses."""
    left = {entry.overload for entry in ENTRIES if not entry.text}
    for seed in range(8):
        for overload in sorted(left):
            left -= {line.overload for line in model(seed, overload).lines}
    assert not left


@pytest.mark.parametrize("start", SEEDS)
def test_as_eager(start: int) -> None:
    for seed in range(start, start + 6):
        made = model(seed)
        found = judge(made, threads=1 + seed % 2)
        assert not found.bad, f"seed {seed}: {found}\n{made.script()}"


def test_the_trace_says_the_type_of_nothing() -> None:
    """Eager's mask of no elements is of floats, any other one of booleans."""
    dropout = "aten.native_dropout.default"
    kept = Line("v0", f"{dropout}(x0, 0.3, False)[1]", dropout)
    chosen = Line("v1", "torch.where(v0, x0, 0.5).sum()", "aten.where.ScalarOther")
    given = Input("x0", ("n",), torch.float32)
    lines, sizes = (kept, chosen), ((1, 4, 1), (1, 0, 1), (1, 9, 1))
    found = judge(Model(0, (given,), lines, (), ("v0", "v1"), sizes))
    assert found.kind == "fine", found


def test_statistics_of_halves_have_their_type() -> None:
    norm = "aten._native_batch_norm_legit_no_training.default"
    w = "self.w0"
    code = f"{norm}(x0, {w}, {w}, {w}, {w}.abs(), 0.1, 1e-3)"
    lines = tuple(Line(f"v{k}", f"{code}[{k}]", norm) for k in range(3))
    given = (Input("x0", ("b", 6, "n"), torch.float16),)
    weights, sizes = ((w, (6,), torch.float16),), ((3, 4, 1), (0, 2, 1))
    found = judge(Model(0, given, lines, weights, ("v0", "v1", "v2"), sizes))
    assert found.kind == "fine", found


def test_every_op_has_a_reference_in_f64() -> None:
    """Without one, what eager makes of halves counts as exact."""
    for overload in sorted({entry.overload for entry in ENTRIES if not entry.text}):
        made = model(1, overload)
        assert not made.lines or references(made, made.sizes[0], count=0), made.body()


def test_each_of_several_results_is_rounded() -> None:
    """The second one of an op too: it is shaken, and so are the two that it gives."""
    x = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)
    kept = x.clone()
    first, (second, places) = Shake(0)((x, [x, torch.arange(3)]))
    assert (first != kept).all() and (second != kept).all()
    assert torch.equal(places, torch.arange(3)) and torch.equal(x, kept)
    found = Shake(0)(x.max(0))
    assert found.values != 5.0 and found.indices == 2


class Grid(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        grid, _ = torch.meshgrid(x, y, indexing="ij")
        grid[:1].zero_()
        return grid + x[:, None]


class Changed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone().unsqueeze(0).squeeze_(0)


class Windows(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unfold(0, 3, 1).sum()


class Pooled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool1d(x, 2)


class Reflected(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x[None], (2, 1), "reflect")


class Kept(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        kept = torch.native_dropout(y, 0.3, False)[1]
        y.add_(1)
        return [kept, y]


def test_what_the_hunt_found_is_refused() -> None:
    x, y = torch.randn(5), torch.randn(4)
    with pytest.raises(pliant.UnsupportedOpError, match="what meshgrid gave views of"):
        pliant.compile(Grid(), (x, y), ({0: "n"}, {0: "m"}), threads=1)
    with pytest.raises(pliant.UnsupportedOpError, match="what native_dropout gave"):
        pliant.compile(Kept(), (x,), ({0: "n"},), threads=1)
    with pytest.raises(pliant.UnsupportedOpError, match="call squeeze"):
        pliant.compile(Changed(), (x,), ({0: "n"},), threads=1)
    cases = (
        (Windows(), x, x[:2], "a window must fit"),
        (Reflected(), x, x[:2], "reflect padding reads its axis"),
        (Pooled(), torch.randn(2, 5)[None], torch.randn(1, 2, 0), "needs elements"),
    )
    for net, example, other, match in cases:
        axis = example.dim() - 1 if isinstance(net, Pooled) else 0
        compiled = pliant.compile(net, (example,), ({axis: "n"},), threads=1)
        torch.testing.assert_close(compiled(example), net(example))
        with pytest.raises(pliant.ShapeError, match=match):
            compiled(other)


class Between(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.lerp(x, y, w) for w in (0.3, 0.8, 1.0)]


def test_lerp_from_the_nearer_end() -> None:
    infinite = float("inf")
    x, y = torch.tensor([0.1, infinite, 1e8]), torch.tensor([infinite, 2.0, 0.5])
    compiled = pliant.compile(Between(), (x, y), ({0: "n"}, {0: "n"}), threads=1)
    for got, want in zip(compiled(x, y), Between()(x, y), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


class Normed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (4,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_small_halves_are_normed(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 4) * 0.02).to(dtype)
    compiled = pliant.compile(Normed(), (x,), ({0: "n"},), threads=1)
    torch.testing.assert_close(compiled(x), Normed()(x))


def _perturbed(amount: float) -> Callable[..., Callable[..., list[torch.Tensor]]]:
    """A compiler whose models give a wrong number: of the first result, the largest
    element is off by `amount` of itself; of integers, by 1."""

    def compile(module: torch.nn.Module, *_: object, **__: object) -> Any:
        def run(*args: torch.Tensor) -> list[torch.Tensor]:
            first, *rest = module(*args)
            first = first.clone()
            if first.numel():
                flat = first.view(-1)
                if first.dtype == torch.bool:
                    flat[0] = ~flat[0]
                elif first.is_floating_point():
                    flat[flat.abs().nan_to_num(0, 0, 0).argmax()] *= 1 + amount
                else:
                    flat[0] += 1
            return [first, *rest]

        return run

    return compile


IMAGE = Input("x0", (1, 2, "n", 5), torch.float32)
ROW = Input("x0", ("n", 7), torch.float32)
POSITIONS = Input("x1", (1, 3, 4, 2), torch.float32)
WRONG = {
    "exp": ((ROW,), "aten.exp.default(x0)"),
    "product": ((ROW,), "aten.mm.default(x0, aten.t.default(x0))"),
    "softmax": ((ROW,), "aten._softmax.default(x0, 1, False)"),
    "largest": ((ROW,), "aten.max.dim(x0, 1)[0]"),
    "place": ((ROW,), "aten.argmax.default(x0, 1)"),
    "compared": ((ROW,), "aten.gt.Scalar(x0, 0.5)"),
    "resized": (
        (IMAGE,),
        "aten.upsample_bilinear2d.default(x0, [9, 11], False, None, None)",
    ),
    "sampled": (
        (IMAGE, POSITIONS),
        "aten.grid_sampler_2d.default(x0, x1, 0, 0, False)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_judge_finds_a_wrong_number(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, code = WRONG[name]
    line = Line("v0", code, code.partition("(")[0])
    made = Model(0, inputs, (line,), (), ("v0",), ((1, 4, 1), (1, 9, 1)))
    assert judge(made).kind == "fine"
    for amount in (1e-4, -1e-2):
        monkeypatch.setattr(pliant, "compile", _perturbed(amount))
        assert judge(made, limits=False).kind == "wrong"


def test_the_judge_finds_wrong_numbers_of_random_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all but those with an ill-conditioned, infinite or empty first result."""
    monkeypatch.setattr(pliant, "compile", _perturbed(0.1))
    found = [judge(model(seed), limits=False).kind for seed in range(60)]
    assert found.count("wrong") >= 0.8 * len(found), found
