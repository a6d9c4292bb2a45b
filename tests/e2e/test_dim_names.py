"""Any name of a dim does, also those that generated code uses itself."""

import pytest
import torch
from torch import Tensor, nn

import pliant


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pytest.mark.parametrize("name", ["d", "u", "x", "call", "size"])
def test_dim_names(name: str) -> None:
    example = torch.randn(3, 5), torch.randn(3, 5)
    dims = {0: name, 1: "n"}
    model = pliant.compile(Sum(), example, (dims, dims))
    x, y = torch.randn(4, 7), torch.randn(4, 7)
    assert torch.equal(model(x, y), x + y)
    with pytest.raises(pliant.ShapeError):
        model(x, y[:3])
