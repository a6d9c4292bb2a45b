"""Convolutions in machine code against torch, at every size up to a few tiles."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from machines import MACHINE, TARGETS, machine
from programs import interpretable
from torch import Tensor, nn

import pliant
from pliant.ir.interp import run_graph
from pliant.ir.types import DType
from pliant.kernels.conv_micro import conv_tile
from pliant.sym import as_expr

# Output channels of a whole panel, which is what the deep kernel takes.
PANEL = conv_tile(DType.F32, as_expr(1 << 10), MACHINE).columns


class Conv(nn.Module):
    """A convolution, its bias and a relu."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


def compiled(
    model: nn.Module, example: Tensor, target: str = "machine"
) -> pliant.CompiledModel:
    names = ("batch", None, "height", "width", "depth")
    dynamic = {k: names[k] for k in range(example.dim()) if k != 1}
    return pliant.compile(
        model.eval().requires_grad_(False),
        (example,),
        (dynamic,),
        target=machine(target),
        threads=2,
        options=pliant.Options(layout=False),
    )


def agree(model: nn.Module, made: pliant.CompiledModel, x: Tensor) -> None:
    shape = tuple(x.shape)
    torch.testing.assert_close(
        made(x), model(x), rtol=5e-5, atol=5e-5, msg=lambda m: f"{shape}: {m}"
    )


def smallest(conv: Any) -> int:
    """The least spatial size with a result."""
    spans = zip(conv.kernel_size, conv.dilation, conv.padding, strict=True)
    return max(1, *(d * (k - 1) + 1 - 2 * p for k, d, p in spans))


SHAPES = {
    "plain": {"kernel_size": 3},
    "same": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "uneven": {"kernel_size": (3, 2), "stride": (1, 3), "padding": (2, 0)},
    "pointwise": {"kernel_size": 1},
    "pointwise strided": {"kernel_size": 1, "stride": 2},
    "pointwise padded": {"kernel_size": 1, "padding": 1},
    "patches": {"kernel_size": 4, "stride": 4},
    "groups": {"kernel_size": 3, "groups": 2, "padding": 1},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1},
    "depthwise strided": {"kernel_size": 3, "groups": 4, "stride": 2, "bias": False},
    "wide window": {"kernel_size": (1, 37), "padding": (0, 18)},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SHAPES)
def test_conv2d(name: str, target: str) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, **SHAPES[name])
    model = Conv(conv)
    made = compiled(model, torch.randn(2, 4, 11, 12), target)
    least = smallest(conv)
    several = (1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 40)
    some = several if target == "machine" else several[::4]
    sizes = [s for s in some if s >= least]
    for height, width in itertools.product(sizes, sizes):
        agree(model, made, torch.randn(1, 4, height, width))
    for batch in (0, 1, 3):
        agree(model, made, torch.randn(batch, 4, 9, 10))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": 5, "stride": 2, "padding": 2},
        {"kernel_size": 3, "dilation": 3, "padding": 3},
        {"kernel_size": 41, "padding": 20, "groups": 3},
        {"kernel_size": 1, "bias": False},
        {"kernel_size": 10, "stride": 5},
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()),
)
def test_conv1d(options: dict[str, Any], target: str) -> None:
    torch.manual_seed(0)
    model = Conv(nn.Conv1d(3, 9, **options))
    made = compiled(model, torch.randn(2, 3, 45), target)
    for length in range(max(1, smallest(model.conv)), 41):
        agree(model, made, torch.randn(1, 3, length))
    for batch, length in itertools.product((0, 1, 3), (33, 100)):
        agree(model, made, torch.randn(batch, 3, length))


@pytest.mark.parametrize("seed", range(8))
def test_random_conv(seed: int) -> None:
    """Options drawn together, on a different target each."""
    source = random.Random(seed)
    target = TARGETS[seed % len(TARGETS)]
    groups = source.choice((1, 1, 2, 3))
    torch.manual_seed(seed)
    conv = nn.Conv2d(
        groups * source.choice((1, 2, 5)),
        groups * source.choice((1, 3, 7, 17)),
        (source.randint(1, 4), source.randint(1, 4)),
        stride=(source.randint(1, 3), source.randint(1, 3)),
        padding=(source.randint(0, 2), source.randint(0, 2)),
        dilation=(source.randint(1, 2), source.randint(1, 3)),
        groups=groups,
        bias=source.random() < 0.7,
    )
    model, channels = Conv(conv), conv.in_channels
    made = compiled(model, torch.randn(2, channels, 13, 14), target)
    least = smallest(conv)
    for _ in range(25):
        batch = source.choice((1, 1, 2, 3))
        height, width = source.randint(least, 40), source.randint(least, 40)
        agree(model, made, torch.randn(batch, channels, height, width))


def test_conv3d() -> None:
    torch.manual_seed(0)
    model = Conv(nn.Conv3d(2, 3, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 0)))
    made = compiled(model, torch.randn(2, 2, 5, 7, 6))
    for size in itertools.product((1, 4), (3, 8), (1, 9)):
        agree(model, made, torch.randn(2, 2, *size))


class Epilogue(nn.Module):
    """Batch norm, shortcut and activation after a convolution, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 20, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(20)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor, shortcut: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(self.conv(x))
        return F.silu(y + shortcut), y, y.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("target", TARGETS)
def test_epilogue(target: str) -> None:
    torch.manual_seed(0)
    model = Epilogue().eval().requires_grad_(False)

    def inputs(batch: int, height: int, width: int) -> tuple[Tensor, Tensor]:
        shape = (height, width)
        return torch.randn(batch, 3, *shape), torch.randn(batch, 20, *shape)

    dims = {0: "batch", 2: "height", 3: "width"}
    made = pliant.compile(
        model, inputs(2, 5, 6), (dims, dims), target=machine(target), threads=2
    )
    for shape in itertools.product((0, 1, 3), (1, 5, 16), (1, 7, 33)):
        given = inputs(*shape)
        for got, want in zip(made(*given), model(*given), strict=True):
            torch.testing.assert_close(got, want, rtol=5e-5, atol=5e-5)


def test_strided_image() -> None:
    """An image whose pixels are in another order, cut out of a larger one, flipped."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.window, self.point = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 5, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            image = x.permute(0, 3, 1, 2)
            cut = image[:, :, 1:, ::2]
            return (
                self.window(image),
                self.point(image),
                self.window(cut),
                self.point(cut),
                self.window(image.flip(2, 3)),
                self.point(image.flip(3)),
            )

    torch.manual_seed(0)
    model = Views().eval().requires_grad_(False)
    dims = {0: "batch", 1: "height", 2: "width"}
    made = pliant.compile(model, (torch.randn(2, 8, 9, 3),), (dims,), threads=2)
    for shape in itertools.product((0, 1, 3), (4, 5, 16), (6, 7, 33)):
        x = torch.randn(*shape, 3)
        for got, want in zip(made(x), model(x), strict=True):
            torch.testing.assert_close(got, want, rtol=5e-5, atol=5e-5)


def test_weight_as_an_input() -> None:
    class Applied(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return F.conv2d(x, w, padding=1), F.conv2d(x, w.flip(2, 3))

    dims = ({0: "batch", 2: "height", 3: "width"}, {0: "out"})
    example = (torch.randn(2, 3, 6, 7), torch.randn(5, 3, 3, 3))
    made = pliant.compile(Applied(), example, dims, threads=2)
    for batch, out in itertools.product((1, 3), (1, 17, 130)):
        given = (torch.randn(batch, 3, 5, 9), torch.randn(out, 3, 3, 3))
        for got, want in zip(made(*given), Applied()(*given), strict=True):
            torch.testing.assert_close(got, want, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize(
    "layer, size, deep",
    [
        (nn.Conv2d(40, PANEL, 3, padding=1), 3, True),
        (nn.Conv2d(40, PANEL, 3, padding=1, stride=2, dilation=2), 9, True),
        (nn.Conv2d(100, PANEL, 1), 3, True),
        (nn.Conv2d(1, PANEL, 1, padding=1), 20, False),
        (nn.Conv2d(5, PANEL, 1), 8, False),
        (nn.Conv2d(4, 4, 3, groups=4, padding=1), 6, False),
        (nn.ConvTranspose2d(100, PANEL, 3, stride=2), 3, True),
        (nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1), 5, False),
    ],
    ids=str,
)
def test_interpreted(layer: nn.Module, size: int, deep: bool) -> None:
    """Every access in bounds, no races, and by the kernel that is meant to run."""
    torch.manual_seed(0)
    channels = layer.in_channels
    made = compiled(layer, torch.randn(2, channels, 11, 12))
    lowered = interpretable(made)
    loops = {
        name: func
        for name, func in lowered.loops.items()
        if not name.startswith(("conv_f32_", "pointwise_f32_"))
        or name.endswith("_deep") == deep
    }
    x = torch.randn(2, channels, size, size + 1)
    given = [x.numpy()]
    for workers in (1, 2):
        (got,) = run_graph(
            lowered.replace(loops=loops), given, workers=workers, check_races=True
        )
        torch.testing.assert_close(
            torch.from_numpy(got), layer(x), rtol=1e-5, atol=1e-5
        )
