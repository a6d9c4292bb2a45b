"""Scales and shifts by constants: what goes into the weights, and what must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant

DIMS = {0: "batch", 2: "height", 3: "width"}


def normalised(norm: nn.Module) -> nn.Module:
    for name in ("weight", "bias", "running_mean"):
        getattr(norm, name).data.normal_()
    norm.running_var.uniform_(0.2, 3.0)
    return norm


def compiled(
    model: nn.Module, channels: int = 4, **options: bool
) -> pliant.CompiledModel:
    model.eval().requires_grad_(False)
    example = (torch.randn(2, 4, 9, 11),)
    chosen = pliant.Options(**options)
    return pliant.compile(model, example, (DIMS,), threads=2, options=chosen)


def scales(made: pliant.CompiledModel) -> int:
    """Multiplications left at run time."""
    regions = (op.regions[0] for op in made.program.fused.main.ops if op.regions)
    return sum(op.name == "mul" for region in regions for op in region.ops)


def agree(model: nn.Module, made: pliant.CompiledModel) -> None:
    """At most twice eager's error against fp64, and 1e-5."""
    for shape in ((0, 5, 5), (1, 3, 3), (3, 7, 13), (2, 17, 4)):
        x = torch.randn(shape[0], 4, *shape[1:])
        eager, wanted = model(x), model.double()(x.double())
        model.float()
        got = made(x)
        assert got.shape == wanted.shape
        if got.numel():
            allowed = 2 * (eager - wanted).abs().max() + 1e-5
            assert (got - wanted).abs().max() <= allowed, shape


class Scaled(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


ABSORBED: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1), normalised(nn.BatchNorm2d(6)), nn.ReLU()
    ),
    "no bias, groups": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2, bias=False), normalised(nn.BatchNorm2d(6))
    ),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4, padding=1), normalised(nn.BatchNorm2d(4))
    ),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, 2), normalised(nn.BatchNorm2d(6))
    ),
    "twice": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 1),
        normalised(nn.BatchNorm2d(6)),
        normalised(nn.BatchNorm2d(6)),
        nn.Conv2d(6, 3, 3, padding=1),
        normalised(nn.BatchNorm2d(3)),
    ),
    "linear": lambda: nn.Sequential(
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 6),
        normalised(nn.BatchNorm1d(6)),
    ),
    "number": lambda: Scaled(
        lambda self, x: (self.conv(x) - 3.0) * 0.5 + 1.0, conv=nn.Conv2d(4, 6, 3)
    ),
    "before": lambda: nn.Sequential(
        normalised(nn.BatchNorm2d(4)), nn.Conv2d(4, 6, 3, stride=2)
    ),
    "scale before padding": lambda: Scaled(
        lambda self, x: self.conv(x * 0.25), conv=nn.Conv2d(4, 6, 3, padding=1)
    ),
}


@pytest.mark.parametrize("name", ABSORBED)
def test_absorbed(name: str) -> None:
    torch.manual_seed(0)
    model = ABSORBED[name]()
    made = compiled(model)
    assert scales(made) == 0
    agree(model, made)


KEPT: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    # The convolution's own result is read as well.
    "read twice": (
        1,
        lambda: Scaled(
            lambda self, x: self.norm(y := self.conv(x)) + F.relu(y),
            conv=nn.Conv2d(4, 6, 3),
            norm=normalised(nn.BatchNorm2d(6)),
        ),
    ),
    # One weight, two scales.
    "shared weights": (
        2,
        lambda: Scaled(
            lambda self, x: self.conv(x) * 0.5 + self.conv(x + 1) * 0.25,
            conv=nn.Conv2d(4, 6, 3),
        ),
    ),
    # The padding would not be shifted.
    "shift before padding": (
        1,
        lambda: nn.Sequential(
            normalised(nn.BatchNorm2d(4)), nn.Conv2d(4, 6, 3, padding=1)
        ),
    ),
    # A scale for each column, not for each channel.
    "another axis": (
        1,
        lambda: Scaled(
            lambda self, x: (
                self.conv(F.adaptive_avg_pool2d(x, 6))
                * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
            ),
            conv=nn.Conv2d(4, 5, 1),
        ),
    ),
    "across an activation": (
        1,
        lambda: Scaled(
            lambda self, x: F.relu(self.conv(x)) * 0.5, conv=nn.Conv2d(4, 6, 3)
        ),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    torch.manual_seed(0)
    left, make = KEPT[name]
    model = make()
    made = compiled(model)
    assert scales(made) >= left
    agree(model, made)


def test_off() -> None:
    torch.manual_seed(0)
    model = ABSORBED["batch norm"]()
    made = compiled(model, fold=False)
    assert scales(made) > 0
    agree(model, made)
