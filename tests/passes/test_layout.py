# ruff: noqa: E501  (operators of the graph, one to a line)
"""Channels last between convolutions: the graphs, and that results stay the same."""

from __future__ import annotations

from textwrap import dedent

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant
from pliant.context import Context
from pliant.ir.graph import Module
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.machine.target import avx512
from pliant.options import Options
from pliant.passes.canonicalize import canonicalize
from pliant.passes.layout import layout

CONTEXT = Context(Options(), avx512())
SIZES = ((0, 5, 5), (1, 3, 3), (2, 7, 4), (3, 4, 11))


def changed(text: str) -> tuple[Module, Module]:
    """The module, and the same with channels last where that pays."""
    module = parse_module(dedent(text))
    after = module.with_main(canonicalize(layout(module.main, CONTEXT)))
    verify(after, Stage.DECOMPOSED)
    return module, after


def names(module: Module) -> list[str]:
    return [op.name for op in module.main.ops]


def same(before: Module, after: Module) -> None:
    """Both mean the same at sizes none, one, odd and prime.

    In fp64, where the order of a sum is no matter: sums of a thousand products that
    nearly cancel differ in fp32 by more than their own size.
    """
    source = np.random.default_rng(0)
    wide = [
        parse_module(print_module(m).replace("f32", "f64")) for m in (before, after)
    ]
    for size in SIZES:
        known = dict(zip(("n", "h", "w"), size, strict=True))
        given = [
            source.standard_normal([d.evaluate(known) for d in v.shape])
            for v in before.main.params
        ]
        results = (run_graph(module, given) for module in wide)
        for want, got in zip(*results, strict=True):
            largest = np.abs(want).max(initial=0)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * largest)


WINDOW = "stride = (1, 1), low = (1, 1), high = (1, 1), dilation = (1, 1)"


def test_text() -> None:
    before, after = changed(f"""
        graph @main(%x: f32[n, 160, h, w], %w: f32[160, 160, 3, 3], %p: f32[64, 160, 1, 1]) {{
          %y: f32[n, 160, h, w] = conv(%x, %w) {{{WINDOW}, groups = 1}}
          %z: f32[n, 160, h, w] = conv(%y, %w) {{{WINDOW}, groups = 1}}
          %a: f32[n, 160, h, w] = add(%z, %y)
          %o: f32[n, 64, h, w] = conv(%a, %p) {{stride = (1, 1), low = (0, 0), high = (0, 0), dilation = (1, 1), groups = 1}}
          return %o
        }}
        """)
    wanted = f"""
        graph @main(%x: f32[n, 160, h, w], %w: f32[160, 160, 3, 3], %p: f32[64, 160, 1, 1]) {{
          %transpose: f32[n, h, w, 160] = transpose(%x) {{perm = (0, 2, 3, 1)}}
          %conv_last: f32[n, h, w, 160] = conv_last(%transpose, %w) {{{WINDOW}}}
          %conv_last_1: f32[n, h, w, 160] = conv_last(%conv_last, %w) {{{WINDOW}}}
          %add: f32[n, h, w, 160] = add(%conv_last_1, %conv_last)
          %reshape: f32[1, 1, 64, 160] = reshape(%p) {{shape = [1, 1, 64, 160]}}
          %transpose_1: f32[1, 1, 160, 64] = transpose(%reshape) {{perm = (0, 1, 3, 2)}}
          %matmul: f32[n, h, w, 64] = matmul(%add, %transpose_1)
          %transpose_2: f32[n, 64, h, w] = transpose(%matmul) {{perm = (0, 3, 1, 2)}}
          return %transpose_2
        }}
        """
    assert print_module(after).strip() == dedent(wanted).strip()
    same(before, after)


BODIES = {
    "bias": """
        %b: f32[n, 160, h, w] = broadcast(%v) {shape = [n, 160, h, w], axes = (1)}
        %o: f32[n, 160, h, w] = add(%y, %b)""",
    "full and iota": """
        %f: f32[n, 160, h, w] = full() {value = 2.0, dtype = f32, shape = [n, 160, h, w]}
        %i: f32[n, 160, h, w] = iota() {axis = 1, dtype = f32, shape = [n, 160, h, w]}
        %m: f32[n, 160, h, w] = mul(%y, %f)
        %o: f32[n, 160, h, w] = add(%m, %i)""",
    "images and channels": """
        %s: f32[n, 160] = reduce(%y) {op = "sum", axes = (2, 3), keepdims = false}
        %b: f32[n, 160, h, w] = broadcast(%s) {shape = [n, 160, h, w], axes = (0, 1)}
        %o: f32[n, 160, h, w] = sub(%y, %b)""",
    "rows": """
        %s: f32[n, 1, h, 1] = reduce(%y) {op = "max", axes = (1, 3), keepdims = true}
        %b: f32[n, 160, h, w] = broadcast(%s) {shape = [n, 160, h, w], axes = (0, 1, 2, 3)}
        %o: f32[n, 160, h, w] = sub(%y, %b)""",
    "groups of channels": """
        %g: f32[n, 8, 20, h*w] = reshape(%y) {shape = [n, 8, 20, h*w]}
        %s: f32[n, 8, 1, 1] = reduce(%g) {op = "sum", axes = (2, 3), keepdims = true}
        %b: f32[n, 8, 20, h*w] = broadcast(%s) {shape = [n, 8, 20, h*w], axes = (0, 1, 2, 3)}
        %d: f32[n, 8, 20, h*w] = sub(%g, %b)
        %o: f32[n, 160, h, w] = reshape(%d) {shape = [n, 160, h, w]}""",
    "channels beside": """
        %c: f32[n, 320, h, w] = concat(%y, %y) {axis = 1}
        %o: f32[n, 160, h, w] = slice(%c) {starts = [0, 1, 0, 0], shape = [n, 160, h, w], steps = (1, 2, 1, 1)}""",
    "padding and a pool": """
        %p: f32[n, 160, h + 1, w + 2] = pad(%y) {low = [0, 0, 1, 0], high = [0, 0, 0, 2], value = 1.0}
        %o: f32[n, 160, h, w] = pool(%p) {op = "max", window = (2, 3), stride = (1, 1), low = (0, 0), high = (0, 0), dilation = (1, 1), include_pad = true}""",
    "picked rows": """
        %t: f32[h, n, 160, w] = transpose(%y) {perm = (2, 0, 1, 3)}
        %i: i64[h] = iota() {axis = 0, dtype = i64, shape = [h]}
        %p: f32[h, n, 160, w] = index(%t, %i)
        %o: f32[n, 160, h, w] = transpose(%p) {perm = (1, 2, 0, 3)}""",
}


@pytest.mark.parametrize("name", BODIES)
def test_between(name: str) -> None:
    """Nothing between two convolutions is moved back."""
    before, after = changed(f"""
        graph @main(%x: f32[n, 160, h, w], %w: f32[160, 160, 3, 3], %v: f32[160]) {{
          %y: f32[n, 160, h, w] = conv(%x, %w) {{{WINDOW}, groups = 1}}
          {BODIES[name]}
          %z: f32[n, 160, h, w] = conv(%o, %w) {{{WINDOW}, groups = 1}}
          return %z
        }}
        """)
    assert names(after).count("conv_last") == 2
    moves = 4 if name == "picked rows" else 2
    assert names(after).count("transpose") == moves
    same(before, after)


def test_own_order_where_it_is_needed() -> None:
    """A result, an op without a rule, a reshape that mixes channels and pixels."""
    before, after = changed(f"""
        graph @main(%x: f32[n, 160, h, w], %w: f32[160, 160, 3, 3]) {{
          %y: f32[n, 160, h, w] = conv(%x, %w) {{{WINDOW}, groups = 1}}
          %z: f32[n, 160, h, w] = conv(%y, %w) {{{WINDOW}, groups = 1}}
          %c: f32[n, 160, h, w] = cumulate(%z) {{op = "sum", axis = 1}}
          %f: f32[n, 160*h, w] = reshape(%z) {{shape = [n, 160*h, w]}}
          %q: f32[n, 160, h, w] = conv(%z, %w) {{{WINDOW}, groups = 1}}
          %r: f32[n, 160, h, w] = conv(%q, %w) {{{WINDOW}, groups = 1}}
          return %c, %f, %y, %r
        }}
        """)
    assert names(after).count("conv_last") == 4
    same(before, after)


def test_only_where_it_pays() -> None:
    """A window of a few channels is not worth a move; a deep one is."""
    for channels, kind in ((8, "conv"), (256, "conv_last")):
        shape = f"f32[n, {channels}, h, w]"
        _, after = changed(f"""
            graph @main(%x: {shape}, %w: f32[{channels}, {channels}, 3, 3]) {{
              %y: {shape} = conv(%x, %w) {{{WINDOW}, groups = 1}}
              return %y
            }}
            """)
        assert kind in names(after)


class Block(nn.Module):
    """What residual networks are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3)
        self.wide = nn.Conv2d(64, 192, 3, padding=1, bias=False)
        self.point = nn.Conv2d(192, 64, 1)
        self.norm, self.groups = nn.BatchNorm2d(192), nn.GroupNorm(8, 64)
        self.norm.running_mean.normal_()
        self.down, self.skip = nn.Conv2d(64, 32, 3, 2, 1), nn.Conv2d(64, 32, 1, 2)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        y = F.silu(self.groups(x + self.point(F.relu(self.norm(self.wide(x))))))
        z = F.relu(self.down(y) + self.skip(y))
        larger = F.interpolate(z, scale_factor=2.0)
        return self.depthwise(z), z.mean((2, 3)), torch.cat((larger, larger), 1)


def test_off_switch() -> None:
    torch.manual_seed(0)
    model = Block().eval().requires_grad_(False)
    dims = {0: "batch", 2: "height", 3: "width"}
    example = (torch.randn(2, 3, 40, 36),)
    on, off = (
        pliant.compile(model, example, (dims,), options=Options(layout=layout))
        for layout in (True, False)
    )

    def kinds(made: pliant.CompiledModel) -> set[str]:
        return {
            op.str_attr("kind")
            for op in made.program.fused.main.ops
            if op.name == "fusion"
        }

    assert "conv_last" in kinds(on) and "conv_last" not in kinds(off)
    for shape in ((0, 9, 9), (1, 1, 1), (2, 7, 13), (1, 64, 5), (3, 33, 40)):
        x = torch.randn(shape[0], 3, *shape[1:])
        for a, b, want in zip(on(x), off(x), model(x), strict=True):
            torch.testing.assert_close(a, want, rtol=5e-5, atol=5e-5)
            torch.testing.assert_close(b, want, rtol=5e-5, atol=5e-5)
