"""Convolutions with channels last in machine code against torch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from guarded import GuardedProgram, Side
from machines import MACHINE, TARGETS, machine
from programs import interpretable
from torch import Tensor, nn

import pliant
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module
from pliant.ir.interp import run_graph
from pliant.ir.types import DType, tensor
from pliant.kernels.conv_last import Windows
from pliant.kernels.conv_patch import Slide
from pliant.sym import as_expr, sym


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
    model: nn.Module, example: Tensor, target: str = "machine"
) -> pliant.CompiledModel:
    names = ("batch", "height", "width", "depth")
    dynamic = {k: names[k] for k in range(example.dim() - 1)}
    model.eval().requires_grad_(False)
    return pliant.compile(
        model, (example,), (dynamic,), target=machine(target), threads=2
    )


def kinds(made: pliant.CompiledModel) -> set[str]:
    fusions = (op for op in made.program.fused.main.ops if op.name == "fusion")
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
    "dilated rows": {"kernel_size": 3, "dilation": (2, 1), "padding": (2, 1)},
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


DIRECT = (
    "plain",
    "same",
    "strided",
    "dilated rows",
    "uneven",
    "patches",
    "mostly padding",
)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", DIRECT)
def test_windows_where_they_lie(name: str, target: str) -> None:
    """Whole panels of weights, and image rows of several tiles."""
    torch.manual_seed(0)
    conv = nn.Conv2d(5, 32, **SHAPES[name])
    model = Last(conv)
    made = compiled(model, torch.randn(2, 11, 12, 5), target)
    assert any(name.endswith("_taps") for name in made.program.lowered.loops)
    for shape in ((1, 9, 160), (2, 21, 47), (3, 16, 33), (1, 40, 64), (2, 7, 15)):
        agree(model, made, torch.randn(*shape, 5))


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 3), (1, 0)])
def test_nothing_beside_the_image_is_read(
    stride: int, padding: int, side: Side
) -> None:
    b, window, sizes = Builder(), 3, [sym(name) for name in ("n", "h", "w")]
    weight = np.random.default_rng(0).standard_normal((32, 5, window, window))
    weight = weight.astype(np.float32)
    x = b.param("x", tensor(DType.F32, *sizes, 5))
    kind = tensor(DType.F32, *weight.shape)
    image = b.transpose(x, (0, 3, 1, 2))
    twice = {
        "stride": (stride,) * 2,
        "low": (padding,) * 2,
        "high": (padding,) * 2,
        "dilation": (1, 1),
    }
    constant = b.constant(Constant("weight", kind, weight))
    y = b.emit("conv", image, constant, groups=1, **twice)
    result = b.transpose(y, (0, 2, 3, 1))
    module = Module({"main": b.finish("main", [result])}, constants=dict(b.constants))
    program = GuardedProgram(module, MACHINE)
    for shape in ((1, 7, 61), (2, 12, 33), (1, 3, 200)):
        image = np.random.default_rng(shape).standard_normal((*shape, 5))
        image = image.astype(np.float32)
        (got,) = program([image], side)
        want = F.conv2d(
            first(torch.from_numpy(image)),
            torch.from_numpy(weight),
            None,
            stride,
            padding,
        ).movedim(1, -1)
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("name", DIRECT)
def test_inside_is_all_windows_inside(name: str) -> None:
    conv = nn.Conv2d(1, 1, **SHAPES[name])
    for height, width in ((9, 17), (11, 40)):
        out = conv(torch.zeros(1, 1, height, width)).shape[2:]
        slides = tuple(
            Slide(*map(as_expr, (extent, o, k)), s, d, as_expr(p))
            for extent, o, k, s, d, p in zip(
                (height, width),
                out,
                conv.kernel_size,
                conv.stride,
                conv.dilation,
                conv.padding,
                strict=True,
            )
        )
        x_strides = tuple(map(as_expr, (height * width, width, 1, 1)))
        windows = Windows(DType.F32, as_expr(2), as_expr(1), slides, x_strides)
        direct = windows.direct(windows.input())
        assert direct is not None
        # A pixel is whole if nothing but ones is under its window.
        ones = torch.ones(1, 1, height, width)
        window = torch.ones(1, 1, *conv.kernel_size)
        options = (conv.stride, conv.padding, conv.dilation)
        covered = F.conv2d(ones, window, None, *options).flatten().repeat(2)
        whole = covered == window.sum()
        for rows, row in itertools.product((1, 3, 14), range(len(whole) - 14)):
            last = row + rows - 1
            same_row = row // out[1] == last // out[1]
            want = same_row and bool(whole[row : last + 1].all())
            assert direct.inside(as_expr(row), as_expr(rows)) == as_expr(int(want))


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
    made = compiled(model, torch.randn(2, 11, 12, layer.in_channels))
    x = torch.randn(2, 5, 6, layer.in_channels)
    for workers in (1, 2):
        (got,) = run_graph(
            interpretable(made), [x.numpy()], workers=workers, check_races=True
        )
        torch.testing.assert_close(
            torch.from_numpy(got), model(x), rtol=1e-5, atol=1e-5
        )
