"""Images between their elements: `sample` against the interpreter, eager, autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_sort_ops import Call
from torch import Tensor, nn

import pliant
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module

TEXT = """
graph @main(%x: {t}[n, c, h, w], %i: i32[n, p], %j: i32[n, p], %s: {t}[n, p],
            %t: {t}[n, p]) {{
  constraint h <= 2147483646
  constraint w <= 2147483646
  %y: {t}[n, c, p] = sample(%x, %i, %j, %s, %t)
  return %y
}}
"""
# images, channels, rows, columns, points
SIZES = (
    *((1, 1, 1, 1, 1), (2, 3, 5, 7, 11), (1, 2, 1, 9, 6), (2, 1, 8, 1, 4)),
    *((0, 3, 4, 4, 5), (2, 0, 4, 4, 5), (2, 3, 4, 4, 0), (2, 5, 31, 17, 300)),
    (1, 3, 2, 2, 129),
)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_against_the_interpreter(dtype: str, threads: int) -> None:
    module = parse_module(TEXT.format(t=dtype))
    m = pliant.compile(module, threads=threads)
    rng, kind = np.random.default_rng(0), np.float32 if dtype == "f32" else np.float64
    for n, c, h, w, p in SIZES:
        x = rng.standard_normal((n, c, h, w)).astype(kind)
        x.flat[::7] = np.inf
        rows, columns = (
            rng.integers(-2, size + 1, (n, p)).astype(np.int32) for size in (h, w)
        )
        down, across = rng.random((2, n, p)).astype(kind)
        down.flat[::5] = np.nan
        given = [x, rows, columns, down, across]
        with np.errstate(invalid="ignore"):
            want = run_graph(module, given)[0]
        np.testing.assert_allclose(np.asarray(m(*given)), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [False, True])
def test_grids(padding: str, corners: bool) -> None:
    def sampled(x: Tensor, grid: Tensor) -> Tensor:
        how = {"padding_mode": padding, "align_corners": corners}
        return F.grid_sample(x, grid, **how)

    example = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 2)
    dims = {0: "n", 1: "c", 2: "h", 3: "w"}, {0: "n", 1: "a", 2: "b"}
    m = pliant.compile(Call(sampled), example, (dims,))
    for n, c, h, w, p in SIZES:
        x, grid = torch.randn(n, c, h, w), torch.randn(n, 2, p, 2) * 1.5
        grid.view(-1)[::9] = torch.tensor(float("inf"))
        torch.testing.assert_close(m(x, grid), sampled(x, grid), equal_nan=True)


class Warped(nn.Module):
    """A trained image at trained places."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.randn(1, 3, 6, 7))
        self.shift = nn.Parameter(torch.randn(2) / 10)

    def forward(self, grid: Tensor) -> Tensor:
        image = self.image.expand(grid.shape[0], -1, -1, -1)
        found = F.grid_sample(image, grid + self.shift, align_corners=False)
        return found * found


def test_gradients() -> None:
    torch.manual_seed(0)
    model = Warped()

    def batch(n: int) -> tuple[tuple[Tensor], tuple[()]]:
        return (torch.rand(n, 5, 4, 2) * 2.4 - 1.2,), ()

    step = pliant.compile_training(
        model, torch.sum, pliant.SGD(0.1), batch(3), (({0: "n"},), ())
    )
    for n in (1, 2, 7):
        inputs, targets = batch(n)
        _, ours = step.gradients(inputs, targets)
        theirs = torch.autograd.grad(model(*inputs).sum(), list(model.parameters()))
        for name, gradient in zip(("image", "shift"), theirs, strict=True):
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-4)
