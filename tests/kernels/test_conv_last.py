"""Convolutions with channels last in machine code against torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant
from pliant.ir.interp import run_graph
from pliant.target import named, runs_here

TARGETS = ["host", "avx2", "baseline"]


def first(x: Tensor) -> Tensor:
    """(N, spatial.., C) as torch has it."""
    return x.movedim(-1, 1)


class Last(nn.Module):
    """A convolution of images with channels last, and a relu."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(first(x))).movedim(1, -1)


def compiled(
    model: nn.Module, example: Tensor, target: str = "host"
) -> pliant.CompiledModel:
    if not runs_here(named(target)):
        pytest.skip(f"this machine does not run {target}")
    names = ("batch", "height", "width", "depth")
    dynamic = {k: names[k] for k in range(example.dim() - 1)}
    model.eval().requires_grad_(False)
    return pliant.compile(
        model, (example,), (dynamic,), target=named(target), threads=2
    )


def kinds(made: pliant.CompiledModel) -> set[str]:
    fusions = (op for op in made._program.fused.main.ops if op.name == "fusion")
    return {op.str_attr("kind") for op in fusions}


def agree(model: nn.Module, made: pliant.CompiledModel, x: Tensor) -> None:
    shape = tuple(x.shape)
    torch.testing.assert_close(
        made(x), model(x), rtol=5e-5, atol=5e-5, msg=lambda m: f"{shape}: {m}"
    )


def smallest(conv: Any) -> int:
    """The least spatial size with a result."""
    spans = zip(conv.kernel_size, conv.dilation, conv.padding, strict=True)
    return max(1, *(d * (k - 1) + 1 - 2 * p for k, d, p in spans))


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "same": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "uneven": {"kernel_size": (3, 2), "stride": (1, 3), "padding": (2, 0)},
    "apart": {"kernel_size": (2, 3), "stride": (3, 2), "dilation": (2, 3)},
    "pointwise strided": {"kernel_size": 1, "stride": 2},
    "pointwise padded": {"kernel_size": 1, "padding": 1},
    "patches": {"kernel_size": 4, "stride": 4},
    "wide window": {"kernel_size": (1, 37), "padding": (0, 18)},
    "mostly padding": {"kernel_size": 7, "padding": 3, "stride": 2},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SHAPES)
def test_conv2d(name: str, target: str) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 9, **SHAPES[name])
    model = Last(conv)
    made = compiled(model, torch.randn(2, 11, 12, 3), target)
    assert kinds(made) == {"conv_last"}
    least = smallest(conv)
    sizes = [s for s in (1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 40) if s >= least]
    for height, width in itertools.product(sizes, sizes):
        agree(model, made, torch.randn(1, height, width, 3))
    for batch in (0, 1, 3):
        agree(model, made, torch.randn(batch, 9, 10, 3))


def test_pointwise_is_a_product() -> None:
    torch.manual_seed(0)
    model = Last(nn.Conv2d(5, 40, 1))
    made = compiled(model, torch.randn(2, 11, 12, 5))
    assert kinds(made) == {"matmul"}
    for shape in itertools.product((0, 1, 3), (1, 7), (1, 33)):
        agree(model, made, torch.randn(*shape, 5))


@pytest.mark.parametrize(
    "inputs, outputs, window",
    [(1, 1, 1), (1, 33, 3), (150, 70, 3), (64, 31, 3), (513, 8, 2)],
)
def test_blocks_and_passes(inputs: int, outputs: int, window: int) -> None:
    """More rows than a block has, more steps than a pass, channels beyond a panel."""
    torch.manual_seed(0)
    model = Last(nn.Conv2d(inputs, outputs, window, padding=1, stride=(1, 2)))
    made = compiled(model, torch.randn(2, 11, 12, inputs))
    for shape in ((1, 1, 1), (1, 3, 41), (2, 23, 17), (1, 40, 31)):
        agree(model, made, torch.randn(*shape, inputs))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": 5, "stride": 2, "padding": 2},
        {"kernel_size": 3, "dilation": 3, "padding": 3},
        {"kernel_size": 10, "stride": 5, "bias": False},
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()),
)
def test_conv1d(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Last(nn.Conv1d(3, 9, **options))
    made = compiled(model, torch.randn(2, 45, 3))
    assert kinds(made) == {"conv_last"}
    for length in range(smallest(model.conv), 41):
        agree(model, made, torch.randn(1, length, 3))
    for batch, length in itertools.product((0, 1, 3), (33, 100)):
        agree(model, made, torch.randn(batch, length, 3))


def test_conv3d() -> None:
    torch.manual_seed(0)
    model = Last(nn.Conv3d(2, 3, (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 1)))
    made = compiled(model, torch.randn(2, 5, 7, 6, 2))
    assert kinds(made) == {"conv_last"}
    for size in itertools.product((1, 4), (3, 8), (1, 9)):
        agree(model, made, torch.randn(2, *size, 2))


def test_weight_as_an_input() -> None:
    class Applied(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return F.conv2d(first(x), w, padding=1).movedim(1, -1)

    dims = ({0: "batch", 1: "height", 2: "width"}, {0: "out"})
    example = (torch.randn(2, 6, 7, 3), torch.randn(5, 3, 3, 3))
    made = pliant.compile(Applied(), example, dims, threads=2)
    assert kinds(made) == {"conv_last"}
    for batch, out in itertools.product((1, 3), (1, 17, 130)):
        given = (torch.randn(batch, 5, 9, 3), torch.randn(out, 3, 3, 3))
        torch.testing.assert_close(
            made(*given), Applied()(*given), rtol=5e-5, atol=5e-5
        )


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(40, 9, 3, padding=1),
        nn.Conv2d(300, 5, 2, stride=2, padding=1),
        nn.Conv2d(2, 17, (2, 3), dilation=(1, 2), padding=2),
    ],
    ids=str,
)
def test_interpreted(layer: nn.Conv2d) -> None:
    """Every access in bounds, no races."""
    torch.manual_seed(0)
    model = Last(layer)
    made = compiled(model, torch.randn(2, 11, 12, layer.in_channels), "avx2")
    x = torch.randn(2, 5, 6, layer.in_channels)
    for workers in (1, 2):
        (got,) = run_graph(
            made._program.lowered, [x.numpy()], workers=workers, check_races=True
        )
        torch.testing.assert_close(
            torch.from_numpy(got), model(x), rtol=1e-5, atol=1e-5
        )
