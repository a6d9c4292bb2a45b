"""Derivatives that are a matter of convention: at zeros and ties, as in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_oracle import eager

import pliant

# Whole numbers: rows of zeros, equal elements, elements at their bounds.
ROWS = torch.tensor(
    [[0, 0, 0, 0], [1, 1, 1, 1], [0, -2, 2, 0], [3, -3, 0, 1], [2, 2, -2, -1]]
).float()
OTHERS = torch.tensor([[0, 1, 1, -1], [2, 0, -2, 2]]).float()
TWICE = torch.tensor([1, 3, 1])

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: x.norm(dim=-1),
    "norm of order 3": lambda x: x.norm(3, dim=-1),
    "median": lambda x: x.median() * x,
    "median without NaN": lambda x: (x / x).nanmedian() * x + (x * x).nanmedian(),
    "norm of order 0.5": lambda x: x.norm(0.5, dim=-1),
    "largest norm": lambda x: torch.linalg.vector_norm(x, torch.inf, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1) * torch.arange(4.0),
    "std": lambda x: x.std(-1),
    "std_mean": lambda x: torch.std_mean(x, -1, correction=0)[0],
    "cosine": lambda x: F.cosine_similarity(x[:, None], OTHERS, -1),
    "cdist": lambda x: torch.cdist(x, x),
    "cdist of order 3": lambda x: torch.cdist(x, OTHERS, 3.0),
    "cdist of order 0.5": lambda x: torch.cdist(x, OTHERS, 0.5),
    "largest cdist": lambda x: torch.cdist(x, OTHERS, torch.inf),
    "pdist": lambda x: F.pdist(torch.cat((x, OTHERS))),
    "atan2": lambda x: torch.atan2(x, x.flip(-1)),
    "hypot": lambda x: torch.hypot(x, x.flip(-1)),
    "fmod": lambda x: torch.fmod(x, 2.0) * torch.arange(4.0),
    "fmod by a tensor": lambda x: torch.fmod(x + 3, x.flip(-1) - 4),
    "clamp": lambda x: torch.clamp(x, x.flip(-1), x.flip(-1) + 1) * x,
    "clamp between equal bounds": lambda x: torch.clamp(x * 2, x, x) * x,
    "clamp_min": lambda x: torch.clamp_min(x * x, x) * torch.arange(4.0),
    "clamp_max": lambda x: torch.clamp_max(x * x, x) * torch.arange(4.0),
    "index_fill": lambda x: x.index_fill(1, TWICE, x.mean()) * torch.arange(4.0),
    "amax of places": lambda x: x.scatter_reduce(
        1, torch.zeros_like(x).long(), x.flip(-1), "amax"
    ),
    "amin of rows": lambda x: x.T.index_reduce(0, TWICE, x.T[:3] * 2, "amin"),
    "max of rows": lambda x: x.max(1).values * x.max(1, keepdim=True).values,
    "min of columns": lambda x: (x * x).min(0).values,
    "adaptive pool": lambda x: F.adaptive_max_pool1d(x[None], 3) * torch.arange(3.0),
    "adaptive pool of images": lambda x: F.adaptive_max_pool2d(x[None], (1, 2)),
    "logarithms of attention": lambda x: (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *[x[None, None].expand(1, 1, -1, -1)] * 3
        )[1].sum()
        * x
    ),
    "nextafter": lambda x: torch.nextafter(x, x.abs()) * torch.arange(4.0),
    "without a derivative": lambda x: x * torch.special.bessel_j0(x),
    "kl_div of a trained target": lambda x: F.kl_div(x, x.abs(), reduction="none"),
    "border": lambda x: F.grid_sample(
        x[None, None], x[None, :, :, None].expand(1, -1, 4, 2), "bilinear", "border"
    ),
    "reflected corners": lambda x: F.grid_sample(
        x[None, None],
        x[None, :, :, None].expand(1, -1, 4, 2) / 2,
        "bilinear",
        "reflection",
        True,
    ),
}


class Shifted(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.zeros(4)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x + self.weight)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_torch(name: str) -> None:
    model = Shifted(FUNCTIONS[name])
    step = pliant.compile_training(
        model, torch.sum, pliant.SGD(0.1), ((ROWS,), ()), (({0: "n"},), ()), threads=1
    )
    for x in (*ROWS[:, None], ROWS, ROWS[1:4]):
        _, ours = step.gradients((x,), ())
        _, theirs = eager(model, torch.sum, ((x,), ()))
        torch.testing.assert_close(
            ours["weight"], theirs["weight"], rtol=1e-5, atol=1e-5, equal_nan=True
        )
