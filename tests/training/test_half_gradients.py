"""Gradients that choose among half floats: they go where eager's go.

The way back computes values again that the way there had in registers. The elements
that a gradient reaches are compared, which is exact: x and the factor are rounded alike
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from machines import TARGETS, machine
from torch import Tensor, nn

import pliant

CLOSE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax of all": lambda x: x.amax(),
    "amin of all": lambda x: x.amin(),
    "amax of rows": lambda x: x.amax(-1),
    "amin of columns": lambda x: x.amin(0),
    "max of rows": lambda x: x.max(-1).values,
    "min of columns": lambda x: x.min(0).values,
    "median": lambda x: x.median(),
    "median of rows": lambda x: x.median(-1).values,
    "kthvalue": lambda x: x.kthvalue(5, -1).values,
    "topk": lambda x: x.topk(3, -1).values,
    "cummax": lambda x: x.cummax(-1).values,
    "largest norm": lambda x: torch.linalg.vector_norm(x, torch.inf, dim=-1),
    "max pool": lambda x: F.max_pool1d(x[None], 3, 2),
    "adaptive pool": lambda x: F.adaptive_max_pool1d(x[None], 7),
    "minimum": lambda x: torch.minimum(x, x.amax(-1, keepdim=True) * 0.5),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp to its mean": lambda x: x.clamp_min(x.mean(-1, keepdim=True)),
    "relu": F.relu,
    "leaky relu": F.leaky_relu,
    "elu": F.elu,
    "hardtanh": F.hardtanh,
    "hardshrink": F.hardshrink,
    "abs": lambda x: x.abs(),
    "where": lambda x: torch.where(x == x.amax(-1, keepdim=True), x * 2, x * 0),
    "where in f32": lambda x: torch.where(x.float() > 0.5, x * x, -x),
    "max of a function": lambda x: (torch.exp(x * 0.25) * x).amax(0),
}


class Scaled(nn.Module):
    """A function of x by 1 + factor: the factor's gradient has x's elements."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        super().__init__()
        self.function = function
        self.factor = nn.Parameter(torch.linspace(-0.2, 0.2, x.numel()).to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor.reshape(x.shape)
        return self.function(x * (1 + factor) * x + factor)


def loss(found: Tensor) -> Tensor:
    return found.float().sum()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "dtype", list(CLOSE), ids=lambda dtype: str(dtype).rpartition(".")[2]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_reach_the_same_elements(
    name: str, dtype: torch.dtype, target: str
) -> None:
    x = torch.randn(13, 67, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = Scaled(FUNCTIONS[name], x)
    step = pliant.compile_training(
        model, loss, pliant.SGD(0.1), ((x,), ()), None, target=machine(target)
    )
    _, found = step.gradients((x,), ())
    loss(model(x)).backward()
    got, want = found["factor"], model.factor.grad
    assert want is not None and got.dtype is dtype
    assert torch.equal(got != 0, want != 0), ((got != 0).sum(), (want != 0).sum())
    close = CLOSE[dtype] * float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=CLOSE[dtype], atol=close)
