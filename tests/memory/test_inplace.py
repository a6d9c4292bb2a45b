"""In place: only what is proved, and with the same bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.context import Context
from pliant.ir.graph import Module
from pliant.ir.interp import run_graph
from pliant.ir.interp_loops import run_loop
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_graph
from pliant.machine.target import host
from pliant.memory.inplace import inplace, merged
from pliant.memory.inplace_proof import may_share
from pliant.memory.liveness import liveness
from pliant.memory.order_graph import permuted
from pliant.options import Options

SIZES = (0, 1, 3, 7, 33)
CX = Context(Options(), host())


def loop(body: str, extra: str = "") -> str:
    return f"""loop @f(n, m; in %x: f32[n*m], out %y: f32[n*m]{extra}) {{
{body}
}}
"""


# Bodies that read each element before it is written, whatever the sizes.
SAFE = {
    "map": """
      for i = 0 to n parallel do
        for j = 0 to m vector do %y[m*i + j] = exp(%x[m*i + j]) end
      end""",
    "flat": """
      for p = 0 to ceildiv(n*m, 16) parallel do
        for i = 16*p to min(n*m, 16*p + 16) vector do %y[i] = neg(%x[i]) end
      end""",
    "digits": """
      for p = 0 to n*m parallel {
        let j = index(p % max(m, 1))
        let i = index(p//max(m, 1))
        %y[m*i + j] = neg(%x[m*i + j])
      }""",
    "row": """
      for i = 0 to n parallel {
        accumulator $s: f32 = sum
        for j = 0 to m vector do accumulate $s, %x[m*i + j] end
        for k = 0 to m vector do %y[m*i + k] = sub(%x[m*i + k], $s) end
      }""",
    "row in runs": """
      for i = 0 to n parallel {
        accumulator $total: f64 = sum
        for r = 0 to ceildiv(m, 4) {
          accumulator $run: f32 = sum
          for j = 4*r to min(m, 4*r + 4) vector do accumulate $run, %x[m*i + j] end
          accumulate $total, cast($run, f64)
        }
        for k = 0 to m vector do
          %y[m*i + k] = sub(%x[m*i + k], cast($total, f32))
        end
      }""",
    "row kept in the result": """
      for i = 0 to n parallel {
        accumulator $s: f32 = sum
        for j = 0 to m vector {
          local $e: f32 = exp(%x[m*i + j])
          %y[m*i + j] = $e
          accumulate $s, $e
        }
        for k = 0 to m vector do %y[m*i + k] = div(%y[m*i + k], $s) end
      }""",
    "two loops": """
      for i = 0 to n parallel do
        for j = 0 to m vector do prefetch %x[n*m - 1 - m*i - j] end
      end
      for k = 0 to n*m vector do %y[k] = neg(%x[k]) end""",
    "blocks of columns": """
      for p = 0 to ceildiv(m, 4) parallel do
        for j = 4*p to min(4*p + 4, m) vector do
          for i = 0 to n do %y[m*i + j] = neg(%x[m*i + j]) end
        end
      end""",
    "variants": """
      dispatch {
        variant "even" when 2 divides m do
          for i = 0 to n parallel do
            for j = 0 to 2*(m//2) vector do %y[m*i + j] = neg(%x[m*i + j]) end
          end
        end
        variant "any" do
          for i = 0 to n*m vector do %y[i] = neg(%x[i]) end
        end
      }""",
}
# Bodies that do not, at some size.
UNSAFE = {
    "backwards": "for i = 0 to n*m vector do %y[i] = %x[n*m - 1 - i] end",
    "neighbour": "for i = 0 to n*m vector do %y[i] = %x[max(i - 1, 0)] end",
    "shifted": """
      for i = 1 to n*m vector do %y[i] = %x[i - 1] end""",
    "row of another": """
      for i = 0 to n parallel do
        for j = 0 to m vector do %y[m*i + j] = %x[j] end
      end""",
    "transposed": """
      for i = 0 to n parallel do
        for j = 0 to m vector do %y[n*j + i] = %x[m*i + j] end
      end""",
    "read after the row was written": """
      for i = 0 to n parallel {
        for j = 0 to m vector do %y[m*i + j] = neg(%x[m*i + j]) end
        accumulator $s: f32 = sum
        for k = 0 to m vector do accumulate $s, %x[m*i + k] end
        for l = 0 to m vector do %y[m*i + l] = $s end
      }""",
    "runs beyond the row": """
      for i = 0 to n parallel {
        accumulator $s: f32 = sum
        for r = 0 to ceildiv(m, 4) do
          for j = 4*r to min(n*m - m*i, 4*r + 4) vector do
            accumulate $s, %x[m*i + j]
          end
        end
        for k = 0 to m vector do %y[m*i + k] = sub(%x[m*i + k], $s) end
      }""",
    "written again and again": """
      for r = 0 to 2 do
        for i = 0 to n*m vector do %y[i] = neg(%x[i]) end
      end""",
    "rows that overlap": """
      for i = 0 to n parallel do
        for j = 0 to min(m, n*m - i) vector do %y[i + j] = neg(%x[i + j]) end
      end""",
    "blocks that overlap": """
      for p = 0 to ceildiv(m, 4) parallel do
        for j = 4*p to min(4*p + 5, m) vector do
          for i = 0 to n do %y[m*i + j] = neg(%x[m*i + j]) end
        end
      end""",
    "chosen by data": """
      for i = 0 to n*m {
        let k = cast(%x[i], i64)
        %y[i] = %x[min(max(k, 0), n*m - 1)]
      }""",
}


@pytest.mark.parametrize("name", SAFE)
def test_proved(name: str) -> None:
    module = parse_module(loop(SAFE[name]))
    func = module.loops["f"]
    assert may_share(func, func.buffers[0], func.buffers[1])
    over = merged(func, 0, 1)
    joint = module.replace(loops={over.name: over})
    verify(joint, Stage.LOWERED)
    for n, m in itertools.product(SIZES, SIZES):
        x = np.random.default_rng(n).standard_normal(n * m).astype(np.float32)
        y = np.zeros_like(x)
        run_loop(func, module, [n, m], [x, y])
        run_loop(over, joint, [n, m], [x], workers=3, check_races=True)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", UNSAFE)
def test_not_proved(name: str) -> None:
    func = parse_module(loop(UNSAFE[name])).loops["f"]
    assert not may_share(func, func.buffers[0], func.buffers[1])


def test_rounds() -> None:
    """Each round reads what the one before has written."""
    rounds = "while lt(%t[0], 3:i64) { for i = 0 to n*m do %y[i] = exp(%x[i]) end }"
    func = parse_module(loop(rounds, ", in %t: i64[1]")).loops["f"]
    assert not may_share(func, func.buffers[0], func.buffers[1])


def test_passed_on() -> None:
    """What another function does with its buffers is not looked into."""
    text = loop("call @g(n*m; %x[0], %y[0])") + (
        "loop @g(k; in %a: f32[k], out %b: f32[k]) {\n"
        "  for i = 0 to k vector do %b[i] = neg(%a[i]) end\n}\n"
    )
    func = parse_module(text).loops["f"]
    assert not may_share(func, func.buffers[0], func.buffers[1])


# ---- graphs

LOOPS = """
loop @neg(n; in %p: f32[n], out %q: f32[n]) {
  for i = 0 to n vector do %q[i] = neg(%p[i]) end
}
loop @add(n; in %p: f32[n], in %r: f32[n], out %q: f32[n]) {
  for i = 0 to n vector do %q[i] = add(%p[i], %r[i]) end
}
"""
F32 = "{bytes = <4*n>, shape = [n], dtype = f32}"
CHAIN = f"""graph @main(%x: f32[n]) {{
  %a: f32[n] = alloc() {F32}
  call_loop(%x, %a) {{callee = "neg", sizes = [n]}}
  %b: f32[n] = alloc() {F32}
  call_loop(%a, %b) {{callee = "neg", sizes = [n]}}
  %c: f32[n] = alloc() {F32}
  call_loop(%a, %b, %c) {{callee = "add", sizes = [n]}}
  %v: f32[1, n] = view(%c) {{offset = <0>}}
  %d: f32[n] = alloc() {F32}
  call_loop(%v, %c, %d) {{callee = "add", sizes = [n]}}
  %e: f32[n] = alloc() {F32}
  call_loop(%d, %e) {{callee = "neg", sizes = [n]}}
  %r: f32[n] = alloc() {F32}
  call_loop(%x, %e, %r) {{callee = "add", sizes = [n]}}
  return %r
}}
"""
# %x is the caller's, %a is read again after %b, %c is read twice; %d and %e are in the
# memory of the result.
AFTER = f"""graph @main(%x: f32[n]) {{
  %a: f32[n] = alloc() {F32}
  call_loop(%x, %a) {{callee = "neg", sizes = [n]}}
  %b: f32[n] = alloc() {F32}
  call_loop(%a, %b) {{callee = "neg", sizes = [n]}}
  %c: f32[n] = view(%a) {{offset = <0>}}
  call_loop(%b, %a) {{callee = "add_over_0_2", sizes = [n]}}
  %v: f32[1, n] = view(%c) {{offset = <0>}}
  %d: f32[n] = alloc() {F32}
  call_loop(%v, %c, %d) {{callee = "add", sizes = [n]}}
  %e: f32[n] = view(%d) {{offset = <0>}}
  call_loop(%d) {{callee = "neg_over_0_1", sizes = [n]}}
  %r: f32[n] = view(%d) {{offset = <0>}}
  call_loop(%x, %e) {{callee = "add_over_1_2", sizes = [n]}}
  return %r
}}
"""


def check_same(before: Module, after: Module) -> None:
    verify(after, Stage.LOWERED)
    for n in (0, 1, 7, 97):
        x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        wanted, made = (run_graph(m, [x.copy()]) for m in (before, after))
        for want, got in zip(wanted, made, strict=True):
            np.testing.assert_array_equal(want, got)


def test_a_chain() -> None:
    module = parse_module(CHAIN + LOOPS)
    verify(module, Stage.LOWERED)
    result = inplace(module, CX)
    assert print_graph(result.main) == AFTER
    check_same(module, result)


def test_functions_without_calls_go() -> None:
    short = f"""graph @main(%x: f32[n]) {{
      %a: f32[n] = alloc() {F32}
      call_loop(%x, %x, %a) {{callee = "add", sizes = [n]}}
      %b: f32[n] = alloc() {F32}
      call_loop(%a, %b) {{callee = "neg", sizes = [n]}}
      %c: f32[n] = alloc() {F32}
      call_loop(%b, %x, %c) {{callee = "add", sizes = [n]}}
      return %c
    }}
    """
    module = parse_module(short + LOOPS)
    assert set(inplace(module, CX).loops) == {
        "add",
        "neg_over_0_1",
        "add_over_0_2",
    }


def test_results_apart() -> None:
    """What is returned itself is not written over, and no two results share memory."""
    text = f"""graph @main(%x: f32[n]) {{
      %a: f32[n] = alloc() {F32}
      call_loop(%x, %a) {{callee = "neg", sizes = [n]}}
      %b: f32[n] = alloc() {F32}
      call_loop(%a, %b) {{callee = "neg", sizes = [n]}}
      %c: f32[n] = alloc() {F32}
      call_loop(%a, %x, %c) {{callee = "add", sizes = [n]}}
      %d: f32[n] = alloc() {F32}
      call_loop(%b, %x, %d) {{callee = "add", sizes = [n]}}
      return %b, %c, %d
    }}
    """
    module = parse_module(text + LOOPS)
    result = inplace(module, CX)
    memory = liveness(result.main)
    assert len(set(memory.outputs)) == 3
    assert not memory.buffers  # %a is in the memory of %c
    check_same(module, result)


def test_larger_memory_is_not_taken_over() -> None:
    """Live bytes may never grow, so the sizes must be equal."""
    text = CHAIN.replace(
        f"%d: f32[n] = alloc() {F32}",
        "%d: f32[n] = alloc() {bytes = <8*n>, shape = [n], dtype = f32}",
    )
    result = inplace(parse_module(text + LOOPS), CX)
    assert "neg_over_0_1" not in result.loops


def test_dies_in_every_order() -> None:
    """%a is read by two calls: which is last depends on the order."""
    text = f"""graph @main(%x: f32[n]) {{
      %a: f32[n] = alloc() {F32}
      call_loop(%x, %a) {{callee = "neg", sizes = [n]}}
      %b: f32[n] = alloc() {F32}
      call_loop(%a, %b) {{callee = "neg", sizes = [n]}}
      %c: f32[n] = alloc() {F32}
      call_loop(%a, %c) {{callee = "neg", sizes = [n]}}
      %d: f32[n] = alloc() {F32}
      call_loop(%b, %c, %d) {{callee = "add", sizes = [n]}}
      %e: f32[n] = alloc() {F32}
      call_loop(%d, %x, %e) {{callee = "add", sizes = [n]}}
      return %e
    }}
    """
    module = parse_module(text + LOOPS)
    turned = (0, 2, 1, 3, 4)
    one = inplace(module, CX)
    assert "neg_over_0_1" in one.loops
    both = inplace(module.replace(orders=(turned,)), CX)
    assert set(both.loops) == {"neg", "add_over_0_2"}
    for result in (one, both, both.with_main(permuted(both.main, turned))):
        check_same(module, result)


# ---- models


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 24)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.second(self.first(x).cumsum(0).softmax(-1)))
        out: Tensor = (y.flip(0) + y).softmax(0).cumsum(1) + x
        return out


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits(threads: int) -> None:
    torch.manual_seed(0)
    model = Rows()
    shapes = ({0: "rows"},)
    over, apart = (
        pliant.compile(
            model,
            (torch.randn(5, 24),),
            shapes,
            threads=threads,
            options=Options(inplace=on),
        )
        for on in (True, False)
    )
    written = [name for name in over.program.lowered.loops if "_over_" in name]
    assert written
    for rows in (0, 1, 7, 64, 1009):
        x = torch.randn(rows, 24)
        assert torch.equal(over(x), apart(x))
        assert over.memory_plan(x).peak_bytes <= apart.memory_plan(x).peak_bytes
