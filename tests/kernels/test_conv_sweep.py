"""Random convolutions, plain and transposed, in machine code against torch in fp64.

Each case compiles a few layers as one model, every input with dims of its own, and runs
them at several sizes. The error must be at most twice that of torch in fp32, and 1e-5.
Sizes that leave little room in the buffers of a block are in test_conv_blocks.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from machines import TARGETS, machine, with_caches
from torch import Tensor, nn

import pliant
from pliant.machine.target import Target

LAYERS = 10  # of one model
KINDS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}


class Layers(nn.Module):
    """Layers side by side, one input each; some with an activation behind."""

    def __init__(self, layers: list[nn.Module], activated: list[bool]) -> None:
        super().__init__()
        self.layers, self.activated = nn.ModuleList(layers), activated

    def forward(self, *images: Tensor) -> tuple[Tensor, ...]:
        results = [layer(x) for layer, x in zip(self.layers, images, strict=True)]
        flags = zip(results, self.activated, strict=True)
        return tuple(F.silu(y) if active else y for y, active in flags)


def random_layer(source: random.Random) -> nn.Module:
    rank = source.choice((1, 2, 2, 2, 2, 3))
    transposed = source.random() < 0.25
    groups = source.choice((1, 1, 1, 2, 3, 8))
    inputs = source.choice((1, 2, 3, 5, 17) if groups < 8 else (1, 1, 4))
    outputs = source.choice((1, 2, 4, 7, 16, 33, 40, 64) if groups < 8 else (1, 1, 2))

    def each(*choices: int) -> tuple[int, ...]:
        return tuple(source.choice(choices) for _ in range(rank))

    window = each(1, 2, 3, 3, 5) if rank < 3 else each(1, 2, 3)
    if rank == 1 and source.random() < 0.2:
        window = (source.randint(6, 41),)
    stride, dilation = each(1, 1, 2, 3), each(1, 1, 1, 2, 3)
    # Often wider than the window reaches: some results are made of padding alone.
    padding = tuple(source.randint(0, min(k, 20) + 2) for k in window)
    options: dict[str, Any] = {"stride": stride, "dilation": dilation}
    if source.random() < 0.15:
        window, options = (1,) * rank, {}
        padding = (0,) * rank
    if transposed:
        steps = zip(options.get("stride", (1,) * rank), strict=True)
        options["output_padding"] = tuple(source.randrange(s) for (s,) in steps)
    return KINDS[rank, transposed](
        groups * inputs,
        groups * outputs,
        window,
        padding=padding,
        groups=groups,
        bias=source.random() < 0.7,
        **options,
    )


def image(layer: Any, batch: int, source: random.Random | None = None) -> Tensor:
    """An input with at least one output pixel, of random sizes if there is a source."""
    sizes = []
    transposed = isinstance(
        layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
    )
    most = 72 if len(layer.kernel_size) < 3 else 9
    for axis, window in enumerate(layer.kernel_size):
        span = layer.dilation[axis] * (window - 1) + 1
        twice = 2 * layer.padding[axis]
        if transposed:
            short = twice + 1 - span - layer.output_padding[axis]
            least = max(1, 1 - (-short // layer.stride[axis]))
        else:
            least = max(1, span - twice)
        few = (least, least + 1)
        far = least + 7 + axis
        sizes.append(
            source.choice((*few, source.randint(least, most + least)))
            if source
            else far
        )
    return torch.randn(batch, layer.in_channels, *sizes)


def check(seed: int, target: Target) -> None:
    source = random.Random(seed)
    torch.manual_seed(seed)
    layers = [random_layer(source) for _ in range(LAYERS)]
    activated = [source.random() < 0.5 for _ in layers]
    model = Layers(layers, activated).eval().requires_grad_(False)
    example = tuple(image(layer, 2) for layer in layers)
    dims = tuple(
        {k: f"n{number}_{k}" for k in range(x.dim()) if k != 1}
        for number, x in enumerate(example)
    )
    made = pliant.compile(model, example, (dims,), target=target, threads=2)
    exact = Layers(layers, activated).double()
    try:
        for batch in (0, 1, source.choice((2, 3))):
            given = tuple(image(layer, batch, source) for layer in layers)
            wanted = exact.double()(*(x.double() for x in given))
            eager = exact.float()(*given)
            for layer, x, got, want, other in zip(
                layers, given, made(*given), wanted, eager, strict=True
            ):
                about = f"{layer} at {tuple(x.shape)}"
                assert got.shape == want.shape, about
                if got.numel() == 0:
                    continue
                error = (got - want).abs().max().item()
                allowed = 2 * (other - want).abs().max().item() + 1e-5
                assert error <= allowed, f"{about}: {error:.3g} > {allowed:.3g}"
    finally:
        exact.float()


@pytest.mark.parametrize("seed", range(5))
def test_on_this_machine(seed: int) -> None:
    check(seed, machine())


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("seed", range(100, 102))
def test_with_shorter_vectors(seed: int, target: str) -> None:
    check(seed, machine(target))


@pytest.mark.parametrize("target", TARGETS)
def test_with_small_caches(target: str) -> None:
    """Blocks of a few rows, or of a part of one."""
    check(150, with_caches(machine(target), 8, 32, 256))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(200, 240))
def test_many(seed: int, target: str) -> None:
    small = with_caches(machine(target), 8, 32, 256)
    check(seed, small if seed % 4 == 0 else machine(target))
