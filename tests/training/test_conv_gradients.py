"""Gradients of convolutions and pools against torch's autograd, at awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_oracle import Batch, check_gradients, follow

import pliant

IMAGES = (({0: "batch", 2: "height", 3: "width"},), ())
SIGNALS = (({0: "batch", 2: "length"},), ())


def squares(out: Tensor) -> Tensor:
    """A loss whose gradient differs from element to element."""
    return out.square().mean()


def batch(*shape: int) -> Batch:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator),), ()


class Around(nn.Module):
    """A trained scale for each channel before an op: its input's gradient counts."""

    def __init__(self, channels: int, rank: int, op: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, channels))
        self.op, self.ones = op, (1,) * rank

    def forward(self, x: Tensor) -> Any:
        return self.op(x * self.scale.view(-1, *self.ones))


def check_images(op: Any, channels: int, sizes: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(0)
    first, *others = (batch(n, channels, h, w) for n, h, w in sizes)
    check_gradients(Around(channels, 2, op), squares, first, IMAGES, others)


def check_signals(op: Any, channels: int, sizes: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    first, *others = (batch(n, channels, length) for n, length in sizes)
    check_gradients(Around(channels, 1, op), squares, first, SIGNALS, others)


# ---- convolutions

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "same": {"kernel_size": 3, "padding": 1},
    "wide padding": {"kernel_size": 2, "padding": 3},
    "pixel": {"kernel_size": 1},
    "strided pixel": {"kernel_size": 1, "stride": 2},
    "stride 2": {"kernel_size": 3, "stride": 2, "padding": 1},
    "stride 3": {"kernel_size": 2, "stride": 3, "padding": 1},
    "dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "dilated stride": {"kernel_size": 3, "dilation": 2, "stride": 2, "padding": 2},
    "groups": {"kernel_size": 3, "groups": 2, "padding": 1},
    "strided groups": {"kernel_size": 3, "groups": 2, "stride": 2, "padding": 1},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1},
    "patches": {"kernel_size": 4, "stride": 4},
    "grouped patches": {"kernel_size": 2, "stride": 2, "groups": 2},
    "uneven": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (0, 1)},
    "named padding": {"kernel_size": (4, 3), "padding": "same"},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str) -> None:
    op = nn.Conv2d(4, 8, **CONVOLUTIONS[name])
    sizes = [(2, 9, 8), (1, 5, 5), (3, 7, 13), (1, 17, 6)]
    check_images(op, 4, sizes)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 3])
def test_convolution_of_signals(stride: int, groups: int) -> None:
    op = nn.Conv1d(3, 6, 3, stride, 1, groups=groups, bias=groups == 1)
    check_signals(op, 3, [(2, 9), (1, 1), (1, 2), (5, 13), (3, 64)])


def test_convolution_of_volumes() -> None:
    torch.manual_seed(0)
    shapes = (({0: "n", 2: "d", 3: "h", 4: "w"},), ())
    model = nn.Sequential(nn.Conv3d(2, 3, 1), nn.Conv3d(3, 2, 2, 2, 1))
    batches = [batch(1, 2, 3, 1, 2), batch(2, 2, 1, 1, 1)]
    check_gradients(model, squares, batch(2, 2, 4, 5, 3), shapes, batches)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        turned = self.weight.transpose(0, 1).flip(2, 3)
        return F.conv2d(x * self.scale, turned, padding=2)


def test_a_weight_that_is_turned_twice() -> None:
    """On the way back it is the weight again, but what is in memory is turned once."""
    torch.manual_seed(0)
    first, *others = (
        batch(n, 4, h, w) for n, h, w in ((3, 7, 6), (1, 1, 1), (2, 5, 11))
    )
    check_gradients(Turned(), squares, first, IMAGES, others)


def test_one_pixel() -> None:
    """Dims of 1, of which only padding fills the window."""
    op = nn.Conv2d(1, 1, 3, padding=1)
    check_images(op, 1, [(2, 5, 4), (1, 1, 1), (1, 1, 7), (2, 3, 1)])


TRANSPOSED: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "stride 2": {"kernel_size": 4, "stride": 2, "padding": 1},
    "extra": {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    "groups": {"kernel_size": 3, "stride": 2, "groups": 2},
    "dilated": {"kernel_size": 2, "stride": 2, "dilation": 3, "output_padding": 2},
    "patches": {"kernel_size": 2, "stride": 2},
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution(name: str) -> None:
    op = nn.ConvTranspose2d(4, 6, **TRANSPOSED[name])
    check_images(op, 4, [(2, 4, 5), (1, 2, 3), (3, 7, 2)])


def test_half() -> None:
    """bf16 stays near what torch computes in bf16, products summed in f32."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2, 2)
    ).bfloat16()
    images = torch.randn(2, 3, 9, 11).bfloat16()
    example: Batch = ((images,), ())
    step = pliant.compile_training(
        model, squares, pliant.SGD(0.1), example, IMAGES, threads=2
    )
    _, ours = step.gradients(*example)
    model.zero_grad()
    squares(model(images)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(ours[name], parameter.grad, rtol=0.05, atol=0.005)


# ---- pools

POOLS: dict[str, nn.Module] = {
    "max": nn.MaxPool2d(2),
    "max overlapping": nn.MaxPool2d(3, 2, 1),
    "max dilated": nn.MaxPool2d(2, 1, 1, dilation=2),
    "max uneven": nn.MaxPool2d((1, 3), (2, 2), (0, 1)),
    "max rounded up": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "mean": nn.AvgPool2d(2),
    "mean overlapping": nn.AvgPool2d(3, 2, 1),
    "mean dense": nn.AvgPool2d(3, 1, 1),
    "mean of what is there": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "mean rounded up": nn.AvgPool2d(2, 2, ceil_mode=True),
    "mean uneven": nn.AvgPool2d((1, 3), (1, 2)),
    "global": nn.AdaptiveAvgPool2d(1),
    "adaptive mean": nn.AdaptiveAvgPool2d(2),
}


@pytest.mark.parametrize("name", POOLS)
def test_pool(name: str) -> None:
    check_images(POOLS[name], 3, [(2, 9, 8), (1, 5, 5), (3, 7, 13), (1, 4, 17)])


def test_pool_of_signals() -> None:
    check_signals(nn.AvgPool1d(3, 2, 1), 3, [(2, 9), (1, 1), (1, 2), (5, 13)])


@pytest.mark.parametrize("level", [0.0, -torch.inf])
def test_the_first_of_equals_wins(level: float) -> None:
    """The whole gradient goes to one element, even where none is above the padding."""

    class Plane(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plane = nn.Parameter(torch.full((1, 2, 7, 5), level))

        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(self.plane, 3, 2, 1) * x

    model, x = Plane(), torch.arange(1.0, 73.0).view(3, 2, 4, 3)
    example: Batch = ((x,), ())
    step = pliant.compile_training(
        model, torch.sum, pliant.SGD(0.1), example, (({0: "n"},), ()), threads=2
    )
    _, ours = step.gradients(*example)
    model(x).sum().backward()
    assert model.plane.grad is not None
    torch.testing.assert_close(ours["plane"], model.plane.grad)


# ---- whole models


class Residual(nn.Module):
    """As a block of a resnet: frozen statistics, a shortcut that halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.norms
        y = b(self.second(F.relu(a(self.first(x)))))
        return F.relu(y + c(self.short(x)))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = [nn.MaxPool2d(3, 2, 1), Residual(8, 8, 1), Residual(8, 12, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)]
    return nn.Sequential(*stem, *blocks, *head)


PICTURES = (({0: "batch", 2: "height", 3: "width"},), ({0: "batch"},))


def labelled(n: int, height: int, width: int) -> Batch:
    (x,), _ = batch(n, 3, height, width)
    return (x,), (torch.arange(n) % 5,)


def test_resnet() -> None:
    torch.manual_seed(0)
    model = resnet().eval()
    batches = [labelled(1, 23, 17), labelled(3, 32, 40)]
    example = labelled(2, 24, 20)
    check_gradients(model, F.cross_entropy, example, PICTURES, batches)


def test_resnet_steps() -> None:
    torch.manual_seed(0)
    batches = [labelled(2, 24, 20), labelled(1, 23, 17), labelled(3, 31, 40)]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.05, momentum=0.9)

    follow(resnet().train(), F.cross_entropy, sgd, PICTURES, batches)


class ViT(nn.Module):
    """Patches of 4 pixels as tokens, a class token, one block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.block = nn.TransformerEncoderLayer(
            width, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.first.expand(x.shape[0], -1, -1), tokens), 1)
        return self.head(self.block(tokens)[:, 0])


@pytest.mark.slow
def test_vit() -> None:
    torch.manual_seed(0)
    batches = [labelled(1, 8, 4), labelled(3, 21, 30)]
    example = labelled(2, 12, 16)
    check_gradients(ViT(), F.cross_entropy, example, PICTURES, batches)
