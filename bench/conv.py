"""Convolution layers against torch eager (oneDNN): `python -m bench.conv`.

Layers of resnet50, mobilenet and a U-Net, each with its bias and activation, compiled
once with batch, height and width dynamic and timed by turns with eager. A ratio above 1
is in Pliant's favour. Writes bench/results/conv.json and bench/results/conv.md; a run
over chosen layers is only printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant
from bench.script import against_eager, parts_by_threads, save, tell
from pliant.compare.accuracy import error
from pliant.compare.tables import Report
from pliant.compare.timing import ROUNDS, Spread, geomean_spread

TOLERANCE = 1e-3
MINUTES = 7  # for one thread and for two
Shape = tuple[int, int, int]  # batch, height, width


@dataclass(frozen=True, slots=True)
class Layer:
    """A module over images of `channels`, and the shapes to time it at."""

    make: Callable[[], nn.Module]
    channels: int
    shapes: tuple[Shape, ...]
    example: Shape = field(default=(2, 20, 24))


class Activated(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x))


class Resize(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, **self.options)


def conv(inputs: int, outputs: int, window: int, **options: Any) -> Callable[[], Any]:
    options.setdefault("padding", window // 2)
    return lambda: Activated(nn.Conv2d(inputs, outputs, window, **options))


def depthwise(channels: int, window: int, **options: Any) -> Callable[[], Any]:
    return conv(channels, channels, window, groups=channels, **options)


def around(side: int, wide: Shape | None = None) -> tuple[Shape, ...]:
    """One image, four, and one that is not square."""
    odd = wide or (1, side + side // 2 + 1, 2 * side + 3)
    return ((1, side, side), (4, side, side), odd)


LAYERS: dict[str, Layer] = {
    "resnet 7x7/2 3-64": Layer(conv(3, 64, 7, stride=2), 3, around(224)),
    "resnet 1x1 64-64": Layer(conv(64, 64, 1), 64, around(56)),
    "resnet 3x3 64-64": Layer(conv(64, 64, 3), 64, around(56)),
    "resnet 1x1 64-256": Layer(conv(64, 256, 1), 64, around(56)),
    "resnet 1x1 256-64": Layer(conv(256, 64, 1), 256, around(56)),
    "resnet 3x3/2 128-128": Layer(conv(128, 128, 3, stride=2), 128, around(56)),
    "resnet 1x1/2 256-512": Layer(conv(256, 512, 1, stride=2), 256, around(56)),
    "resnet 3x3 128-128": Layer(conv(128, 128, 3), 128, around(28)),
    "resnet 1x1 512-128": Layer(conv(512, 128, 1), 512, around(28)),
    "resnet 3x3 256-256": Layer(conv(256, 256, 3), 256, around(14)),
    "resnet 1x1 256-1024": Layer(conv(256, 1024, 1), 256, around(14)),
    "resnet 3x3 512-512": Layer(conv(512, 512, 3), 512, around(7)),
    "resnet 1x1 512-2048": Layer(conv(512, 2048, 1), 512, around(7)),
    "resnet 3x3 512-512, tiny": Layer(conv(512, 512, 3), 512, ((1, 2, 2), (2, 3, 3))),
    "mobilenet 3x3/2 3-32": Layer(conv(3, 32, 3, stride=2), 3, around(224)),
    "mobilenet dw 3x3 32": Layer(depthwise(32, 3), 32, around(112)),
    "mobilenet dw 3x3/2 96": Layer(depthwise(96, 3, stride=2), 96, around(112)),
    "mobilenet dw 3x3 384": Layer(depthwise(384, 3), 384, around(14)),
    "mobilenet dw 5x5 240": Layer(depthwise(240, 5), 240, around(14)),
    "mobilenet dw 5x5/2 72": Layer(depthwise(72, 5, stride=2), 72, around(56)),
    "mobilenet dw 3x3 960": Layer(depthwise(960, 3), 960, around(7)),
    "mobilenet 1x1 32-16": Layer(conv(32, 16, 1), 32, around(112)),
    "mobilenet 1x1 96-24": Layer(conv(96, 24, 1), 96, around(56)),
    "mobilenet 1x1 384-64": Layer(conv(384, 64, 1), 384, around(14)),
    "resnext 3x3 128, 32 groups": Layer(conv(128, 128, 3, groups=32), 128, around(56)),
    "dilated 3x3 64-64": Layer(conv(64, 64, 3, dilation=2, padding=2), 64, around(28)),
    "unet 3x3 4-128": Layer(conv(4, 128, 3), 4, around(32)),
    "unet 3x3 64-64": Layer(conv(64, 64, 3), 64, around(64)),
    "unet 3x3 128-128": Layer(conv(128, 128, 3), 128, around(32)),
    "unet 3x3 256-128": Layer(conv(256, 128, 3), 256, around(32)),
    "unet 3x3 256-256": Layer(conv(256, 256, 3), 256, around(16)),
    "unet 3x3 128-4": Layer(conv(128, 4, 3), 128, around(32)),
    "unet up 2x2/2 128-64": Layer(
        lambda: Activated(nn.ConvTranspose2d(128, 64, 2, 2)), 128, around(32)
    ),
    "decoder up 4x4/2 64-32": Layer(
        lambda: Activated(nn.ConvTranspose2d(64, 32, 4, 2, 1)), 64, around(32)
    ),
    "max pool 3x3/2": Layer(lambda: nn.MaxPool2d(3, 2, 1), 64, around(112)),
    "max pool 2x2/2": Layer(lambda: nn.MaxPool2d(2), 64, around(64)),
    "mean pool 3x3": Layer(lambda: nn.AvgPool2d(3, 1, 1), 64, around(56)),
    "mean pool to 1x1": Layer(lambda: nn.AdaptiveAvgPool2d(1), 512, around(7)),
    "resize x2 nearest": Layer(lambda: Resize(scale_factor=2.0), 64, around(32)),
    "resize x2 bilinear": Layer(
        lambda: Resize(scale_factor=2.0, mode="bilinear"), 64, around(32)
    ),
}


def measure(name: str, threads: int, rounds: int) -> list[dict[str, Any]]:
    layer = LAYERS[name]
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    module = layer.make().eval().requires_grad_(False)
    batch, height, width = layer.example
    dims = {0: "batch", 2: "height", 3: "width"}
    example = torch.randn(batch, layer.channels, height, width)
    model = pliant.compile(module, (example,), (dims,), threads=threads)
    rows: list[dict[str, Any]] = []
    for batch, height, width in layer.shapes:
        x = torch.randn(batch, layer.channels, height, width)
        if (found := error(model(x), module(x))) > TOLERANCE:
            raise SystemExit(f"{name}, {(batch, height, width)}: error {found:.3g}")
        row: dict[str, Any] = {"layer": name, "shape": [batch, height, width]}
        row |= against_eager(model, module, (x,), rounds)
        row["gflops"] = _flops(module, x) / row["pliant_us"]["median"] / 1e3
        rows.append(row)
    return rows


def _flops(module: nn.Module, x: Tensor) -> float:
    """The flops of the convolution; 0 if there is none."""
    inner: Any = getattr(module, "inner", None)
    if inner is None:
        return 0.0
    pixels = x if isinstance(inner, nn.ConvTranspose2d) else inner(x)[:, :1]
    return float(2 * inner.weight.numel() * pixels[:, :1].numel())


def report(kept: list[dict[str, Any]], threads: int) -> Report:
    columns = ("layer", "(N, H, W)", "µs", "eager µs", "eager / ours", "GFLOP/s")
    lines = [
        (
            row["layer"],
            "x".join(map(str, row["shape"])),
            f"{row['pliant_us']['median']:.0f}",
            f"{row['eager_us']['median']:.0f}",
            Spread(**row["ratio"]).text(),
            f"{row['gflops']:.0f}",
        )
        for row in kept
    ]
    found = [Spread(**row["ratio"]) for row in kept]
    least = min(found, key=lambda each: each.median)
    lines.append(("geomean", "", "", "", geomean_spread(found).text(), ""))
    lines.append(("worst", "", "", "", least.text(), ""))
    title = f"Convolution layers, {threads} thread(s)"
    return Report(title, columns, tuple(lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.conv", description=__doc__)
    parser.add_argument("layers", nargs="*", help="parts of names; none means all")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    wanted = arguments.layers
    names = [n for n in LAYERS if not wanted or any(w in n for w in wanted)]
    tell(MINUTES, f"{len(LAYERS)} layers")
    content, tables = parts_by_threads(
        arguments.threads or [1, 2],
        names,
        partial(measure, rounds=arguments.rounds),
        report,
    )
    if not wanted:
        save("conv", content, tables, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
