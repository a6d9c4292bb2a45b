"""Liveness: what is in the arena from when to when, and the formula of the peak."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.ir.parse import parse_graph
from pliant.memory.liveness import ALIGN, Memory, largest, liveness, peak_terms
from pliant.sym import Facts, as_expr, ceildiv, ge, sym

N = sym("n")
CHAIN = """graph @main(%x: f32[n]) {
  %a: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%x, %a) {callee = "f", sizes = [n]}
  %b: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%a, %b) {callee = "f", sizes = [n]}
  %v: f32[1, n] = view(%b) {offset = <0>}
  %c: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%v, %c) {callee = "g", sizes = [n]}
  %unused: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  %d: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%c, %d) {callee = "f", sizes = [n]}
  %e: f32[1, n] = view(%d) {offset = <0>}
  return %e
}
"""


def chain() -> Memory:
    return liveness(parse_graph(CHAIN))


def test_spans() -> None:
    spans = {b.value.name: (b.first, b.last) for b in chain().buffers}
    assert spans == {"a": (1, 3), "b": (3, 6), "c": (6, 9)}


def test_a_view_keeps_its_base_alive() -> None:
    memory = chain()
    bases = {view.name: base.name for view, base in memory.bases.items()}
    assert bases == {"v": "b", "e": "d"}
    assert [v.name for v in memory.outputs] == ["d"]


def test_peak() -> None:
    """Two of the chain, each on lines of its own, and the result at once."""
    (peak,) = peak_terms(chain(), Facts())
    assert peak == 4 * N + 2 * ALIGN * ceildiv(N, 16)


def test_largest() -> None:
    facts = Facts().assume(ge(N, 2))
    m = sym("m")
    assert largest([4 * N, 8 * N, 4 * N], facts) == [8 * N]
    assert largest([N, m], facts) == [N, m]
    assert largest([as_expr(1), N], facts) == [N]


def test_no_proof_is_tried_of_what_sizes_refute() -> None:
    refused = mock.Mock(side_effect=AssertionError)
    with mock.patch.object(Facts, "prove", refused):
        assert largest([N, sym("m")], Facts()) == [N, sym("m")]


class Chain(nn.Module):
    """Products of different widths, a branch kept for the end, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 40), nn.Linear(40, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.up(x).softmax(-1)
        y = self.down(kept).cumsum(1)
        return self.up(y) + kept, y.sum(1)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_plan_is_what_a_call_takes(threads: int) -> None:
    torch.manual_seed(0)
    model = Chain().eval().requires_grad_(False)
    dims = ({0: "b", 1: "s"},)
    compiled = pliant.compile(model, (torch.randn(2, 5, 8),), dims, threads=threads)
    for b, s in itertools.product((0, 1, 3), (0, 1, 7, 50)):
        x = torch.randn(b, s, 8)
        got, want = compiled(x), model(x)
        for have, expected in zip(got, want, strict=True):
            torch.testing.assert_close(have, expected, rtol=2e-5, atol=2e-5)
        plan = compiled.memory_plan(b=b, s=s)
        assert plan.peak_bytes == compiled.stats()["last_peak_bytes"]
        assert plan.output_bytes == sum(t.nbytes for t in want)
        assert plan.peak_bytes >= plan.output_bytes
