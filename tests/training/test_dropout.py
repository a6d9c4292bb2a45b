"""Random numbers of training: their statistics, their seed, their gradient."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from small_models import GPT, TOKENS, token_batch, token_loss
from torch import Tensor, nn

import pliant
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.options import Options
from pliant.passes.context import Context
from pliant.passes.decompose import decompose
from pliant.target import host

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
