"""Random numbers of training: their statistics, their seed, their gradient."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import GPT, TOKENS, token_batch, token_loss
from torch import Tensor, nn
from training_oracle import eager

import pliant
from pliant.context import Context
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.machine.target import host
from pliant.options import Options
from pliant.passes.decompose import decompose

TEXT = """
graph @main(%seed: i64[], %x: f32[n, m]) {
  %y: f32[n, m] = random(%seed) {number = 3, shape = [n, m]}
  return %y
}
"""


def test_numbers_are_the_same_everywhere() -> None:
    """Interpreted, decomposed, in machine code; on one thread or two."""
    module = parse_module(TEXT)
    spelled = module.with_main(decompose(module.main, Context(Options(), host())))
    one, two = (pliant.compile(module, threads=n) for n in (1, 2))
    for shape in ((0, 3), (1, 1), (7, 13), (200, 301)):
        x = np.zeros(shape, np.float32)
        for seed in (0, 5, -(2**63), 2**63 - 1):
            given = [np.asarray(seed, np.int64), x]
            want = run_graph(module, given)[0]
            np.testing.assert_array_equal(run_graph(spelled, given)[0], want)
            np.testing.assert_array_equal(one(*given), want)
            np.testing.assert_array_equal(two(*given), want)


def test_numbers_look_random() -> None:
    module = pliant.compile(parse_module(TEXT))
    x = np.zeros((500, 400), np.float32)
    first, other = (module(np.asarray(s, np.int64), x) for s in (1, 2))
    for values in (first, other):
        assert values.min() >= 0 and values.max() < 1
        counts, _ = np.histogram(values, 50, (0, 1))
        expected = values.size / 50  # chi-square of 49 degrees: 5 deviations
        assert ((counts - expected) ** 2 / expected).sum() < 49 + 5 * 98**0.5
    for a, b in (
        (first, other),
        (first[:, 1:], first[:, :-1]),
        (first[1:], first[:-1]),
    ):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.012


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40, 50))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.3, self.training)


def test_the_gradient_has_the_mask() -> None:
    step = pliant.compile_training(
        Dropped(), torch.sum, pliant.SGD(0.1), ((torch.ones(40, 50),), ())
    )
    torch.manual_seed(7)
    loss, grads = step.gradients((torch.ones(40, 50),), ())
    mask = grads["weight"]
    kept = mask != 0
    torch.testing.assert_close(mask[kept], torch.full_like(mask[kept], 1 / 0.7))
    torch.testing.assert_close(loss, mask.sum())
    assert 0.62 < float(kept.float().mean()) < 0.78
    torch.manual_seed(7)
    assert torch.equal(step.gradients((torch.ones(40, 50),), ())[1]["weight"], mask)
    _, other = step.gradients((torch.ones(40, 50),), ())
    assert not torch.equal(other["weight"], mask)


CHANCES = """
graph @main(%seed: i64[], %x: f32[a, b, c, d]) {
  %y: f32[a, b, c, d] = random(%seed) {number = 1, shape = [a, b, c, d]}
  return %y
}
"""


class Attention(nn.Module):
    """Of two heads of 4; keys are masked from `visible` on."""

    def __init__(self, p: float, causal: bool) -> None:
        super().__init__()
        self.p, self.causal = p, causal
        self.kept: Tensor | None = None  # known from elsewhere
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        batch, size, _ = x.shape
        parts = self.project(x).view(batch, size, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        mask = None if self.causal else visible[:, None, None]
        if self.kept is None:
            out = F.scaled_dot_product_attention(
                q, k, v, mask, self.p, is_causal=self.causal
            )
        else:
            seen = torch.ones(size, size, dtype=torch.bool).tril()
            seen = seen if self.causal else mask
            scores = (q @ k.mT / 2).masked_fill(~seen, -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0.0)
            out = (weights * self.kept / (1 - self.p)) @ v
        return out.square().sum((1, 3)) @ torch.arange(size).cos().to(out)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_drops_its_weights(causal: bool) -> None:
    """With the mask known, gradients are torch's."""
    torch.manual_seed(0)

    def batch(b: int, n: int) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
        visible = torch.arange(n) < torch.arange(b)[:, None] * 3  # nothing in the first
        return (torch.randn(b, n, 8), visible), ()

    model = Attention(0.3, causal)
    shapes = (({0: "b", 1: "n"}, {0: "b", 1: "n"}), ())
    step = pliant.compile_training(
        model, torch.sum, pliant.SGD(0.1), batch(2, 5), shapes, threads=2
    )
    chances = parse_module(CHANCES)
    exact = copy.deepcopy(model).double()
    for b, n in ((1, 1), (2, 5), (3, 37)):
        (x, visible), _ = batch(b, n)
        loss, ours = step.gradients((x, visible), ())
        seed = step._state.seed.numpy()
        (drawn,) = run_graph(chances, [seed, np.zeros((b, 2, n, n), np.float32)])
        kept = torch.from_numpy(np.asarray(drawn) >= np.float32(0.3))
        exact.kept = kept.double()
        want, truth = eager(exact, torch.sum, ((x.double(), visible), ()))
        torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
        largest = max(float(g.abs().max()) for g in truth.values())
        for name, g in truth.items():
            torch.testing.assert_close(
                ours[name].double(), g, rtol=1e-5, atol=2e-6 * largest
            )
    assert 0.62 < float(kept.float().mean()) < 0.78


def test_attention_as_torch_on_average() -> None:
    """Mean and variance of what comes out, over many seeds."""
    torch.manual_seed(0)
    given = ((torch.randn(1, 9, 8), torch.ones(1, 9, dtype=torch.bool)), ())
    model = Attention(0.4, False)
    step = pliant.compile_training(model, torch.sum, pliant.SGD(0.1), given)
    ours = torch.stack([step.gradients(*given)[0] for _ in range(2000)])
    with torch.no_grad():
        theirs = torch.stack([model(*given[0]).sum() for _ in range(2000)])
    error = float(theirs.std()) * (2 / 2000) ** 0.5
    assert abs(float(ours.mean() - theirs.mean())) < 5 * error
    assert 0.8 < float(ours.std() / theirs.std()) < 1.25


KINDS = {
    "channels": lambda x: F.dropout2d(x, 0.25),
    "alpha": lambda x: F.alpha_dropout(x, 0.25),
    "nothing": lambda x: F.dropout(x, 0.0),
    "everything": lambda x: F.dropout(x, 1.0),
}


class Kind(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return KINDS[self.name](x * self.weight)


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds(name: str) -> None:
    """What comes out takes torch's two values of each input, as often."""
    torch.manual_seed(0)
    x = torch.full((50, 40, 3, 2), 2.0)
    kept: list[Tensor] = []

    def loss(y: Tensor, picks: Tensor) -> Tensor:
        return (y * picks).sum()

    step = pliant.compile_training(
        Kind(name), loss, pliant.SGD(0.1), ((x,), (torch.ones_like(x),))
    )
    theirs = KINDS[name](x)
    for first in (0, 1, 3):
        picks = torch.zeros_like(x)
        picks.view(50, 40, 6)[:, :, first] = 1
        torch.manual_seed(5)
        found, _ = step.gradients((x,), (picks,))
        kept.append(found)
    want = float(theirs[:, :, 0, 0].sum())
    spread = float(theirs.std()) * (2 * 2000) ** 0.5
    for found in kept:
        assert abs(float(found) - want) <= 5 * spread + 1e-3
    if name == "channels":
        assert kept[0] == kept[1] == kept[2]


def test_a_seed_determines_the_run() -> None:
    ends = []
    for threads in (1, 2):
        torch.manual_seed(0)
        model = GPT(1, dropout=0.2)
        step = pliant.compile_training(
            model,
            token_loss,
            pliant.SGD(0.1),
            token_batch(2, 5),
            TOKENS,
            threads=threads,
        )
        torch.manual_seed(3)
        losses = [float(step(*token_batch(2, 5 + k % 3))) for k in range(4)]
        ends.append(losses)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


def test_evaluation_has_none() -> None:
    model = Dropped().eval()
    step = pliant.compile_training(
        model, torch.sum, pliant.SGD(0.1), ((torch.ones(40, 50),), ())
    )
    _, grads = step.gradients((torch.ones(40, 50),), ())
    assert torch.equal(grads["weight"], torch.ones(40, 50))
