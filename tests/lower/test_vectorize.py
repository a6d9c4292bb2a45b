"""How loops run: what the pass says, that it is legal, and what illegal plans are told.

Text in, text out. That code which follows a plan computes the same is the business of
tests/codegen, where every loop goes through the pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.errors import InternalError
from pliant.ir.interp_loops import run_loop
from pliant.ir.interp_memory import LoopFault
from pliant.ir.loop_walk import rewrite, statements
from pliant.ir.loops import For, Kind, LoopFunc, Rest, Vectors
from pliant.ir.parse import ParseError, parse_loop
from pliant.ir.spec_loops import verify_loop
from pliant.ir.text import print_loop
from pliant.lower.vectorize import vectorize
from pliant.machine.target import avx2, avx512, baseline

SUM = """loop @sum(n; in %x: f32[n], out %y: f32[1]) {
  accumulator $s: f32 = sum
  for i = 0 to n vector {
    accumulate $s, %x[i]
  }
  %y[0] = $s
}
"""


def heads(func: LoopFunc) -> list[str]:
    """The first lines of its loops."""
    lines = map(str.strip, print_loop(func).splitlines())
    return [line.rsplit(" ", 1)[0] for line in lines if line.startswith("for ")]


def planned(text: str, lanes: int = 16) -> list[str]:
    func = parse_loop(text)
    verify_loop(func)
    to = {16: avx512, 8: avx2, 4: baseline}[lanes]()
    made = vectorize(func, to)
    verify_loop(made)
    assert parse_loop(print_loop(made)) == made
    assert vectorize(made, to) == made
    assert vectorize(func, to) is made
    return heads(made)


def mapped(loop: str, value: str = "%x[i]", dtype: str = "f32") -> str:
    body = f"{loop} {{ %y[i] = {value} }}"
    return f"loop @f(n; in %x: {dtype}[2*n], out %y: {dtype}[2*n]) do {body} end"


@pytest.mark.parametrize(
    ("lanes", "plan"),
    [(16, "lanes 16 masked"), (8, "lanes 8 masked"), (4, "lanes 4 scalar")],
)
def test_a_map_has_no_copies(lanes: int, plan: str) -> None:
    assert planned(mapped("for i = 0 to n vector"), lanes) == [
        f"for i = 0 to n vector {plan}"
    ]


def test_avx2_masks_no_bytes() -> None:
    text = mapped("for i = 0 to n vector", dtype="u8")
    assert planned(text, 8) == ["for i = 0 to n vector lanes 8 scalar"]
    assert planned(text, 16) == ["for i = 0 to n vector lanes 16 masked"]


def test_accumulators_have_copies_while_the_body_is_short() -> None:
    assert planned(SUM) == ["for i = 0 to n vector lanes 16 masked copies 4"]
    medium = SUM.replace("%x[i]\n", "mul(exp(%x[i]), 2.0:f32)\n")
    assert planned(medium) == ["for i = 0 to n vector lanes 16 masked copies 2"]
    heavy = SUM.replace("%x[i]\n", "exp(sin(tanh(%x[i])))\n")
    assert planned(heavy) == ["for i = 0 to n vector lanes 16 masked"]


def test_what_is_plainly_a_multiple_has_no_rest() -> None:
    assert planned(mapped("for i = 0 to 32*(n//32) vector")) == [
        "for i = 0 to 32*(n//32) vector lanes 16 whole"
    ]
    whole = SUM.replace("0 to n", "0 to 64*(n//64)")
    assert planned(whole)[0].endswith("lanes 16 whole copies 4")
    # Of vectors, but not of turns.
    half = SUM.replace("0 to n", "0 to 16*(n//16)")
    assert planned(half)[0].endswith("lanes 16 masked copies 4")


def test_few_iterations_are_written_out() -> None:
    def plan(end: str) -> str:
        (head,) = planned(mapped(f"for i = 0 to {end} vector"))
        return head

    assert plan("127") == "for i = 0 to 127 vector lanes 16 halved"
    assert plan("129") == "for i = 0 to 129 vector lanes 16 masked"
    assert plan("min(32, n)").endswith("vector lanes 16 masked most 32")
    # Not in whole vectors: no register holds the rest.
    assert plan("min(33, n)").endswith("vector lanes 16 masked")


def test_bounds_are_known_once_unrolled_loops_are_written_out() -> None:
    text = """loop @f(n; in %x: f32[64], out %y: f32[64]) do
      for u = 0 to 4 unroll {
        let first = index(8*u)
        for one = u to u + 1 do
          for i = first + one - u to 30 vector { %y[i] = %x[i] }
        end
      }
    end"""
    assert planned(text)[2] == "for i = first + one - u to 30 vector lanes 16 halved"
    # A loop that is not unrolled leaves its variable open.
    loose = planned(
        text.replace(" unroll", "").replace("for u = 0 to 4", "for u = 0 to n")
    )
    assert loose[2].endswith("vector lanes 16 masked")


def test_a_column_reduction_is_jammed() -> None:
    text = """loop @f(n; in %x: f32[8, n], out %y: f32[n]) do
      for i = 0 to n vector {
        accumulator $s: f32 = sum
        for r = 0 to 8 { accumulate $s, %x[r, i] }
        %y[i] = $s
      }
    end"""
    assert planned(text) == [
        "for i = 0 to n vector lanes 16 masked jam 4",
        "for r = 0 to 8",
    ]


def test_what_cannot_run_by_lanes_has_no_plan() -> None:
    nested = """loop @f(n; in %x: f32[n, n], out %y: f32[n, n]) do
      for i = 0 to n vector { for j = 0 to n vector { %y[i, j] = %x[i, j] } }
    end"""
    assert planned(nested) == [
        "for i = 0 to n vector",
        "for j = 0 to n vector lanes 16 masked",
    ]
    assert planned(mapped("for i = 0 to n vector").replace("%y[i]", "%y[0]")) == [
        "for i = 0 to n vector"
    ]
    ragged = """loop @f(n; in %x: f32[n, n], out %y: f32[n]) do
      for i = 0 to n vector { for j = 0 to i { %y[i] = %x[i, j] } }
    end"""
    assert planned(ragged)[0] == "for i = 0 to n vector"


TURNED = """loop @f(n; in %x: f32[32, n], out %y: f32[n, 32]) do
  for d = 0 to n { for j = 0 to 32 vector { %y[d, j] = %x[j, d] } }
end"""


def test_rows_that_become_columns_are_exchanged_in_squares() -> None:
    assert planned(TURNED) == [
        "for d = 0 to n exchange lanes 16 scalar",
        "for j = 0 to 32 vector lanes 16 halved",
    ]
    # Already along the lanes; not in whole squares; elements of two bytes.
    plain = TURNED.replace("%x[j, d]", "%x[d, j]").replace("f32[32, n]", "f32[n, 32]")
    assert planned(plain)[0] == "for d = 0 to n"
    assert planned(TURNED.replace("0 to 32", "0 to 24"))[0] == "for d = 0 to n"
    assert planned(TURNED.replace("f32", "f16"))[0] == "for d = 0 to n"


def test_parallel_loops_stay() -> None:
    text = mapped("for i = 0 to n parallel grain 7")
    assert planned(text) == ["for i = 0 to n parallel grain 7"]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(24), nn.Linear(24, 19)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x)).softmax(-1).transpose(0, 1).contiguous()


def test_without_lanes_a_model_gives_the_same() -> None:
    torch.manual_seed(3)
    model, example = Small().eval(), torch.randn(5, 24)
    plain = pliant.compile(
        model, (example,), ({0: "rows"},), options=pliant.Options(vectors=False)
    )
    lanes = pliant.compile(model, (example,), ({0: "rows"},))
    for compiled, has in ((plain, False), (lanes, True)):
        loops = compiled.program.lowered.loops.values()
        assert any("lanes" in line for f in loops for line in heads(f)) == has
        for rows in (0, 1, 7, 64):
            x = torch.randn(rows, 24)
            torch.testing.assert_close(compiled(x), model(x))


# ---- what is not legal

PLANS = [
    ("for i = 0 to n lanes 4 masked", "a serial loop has no lanes"),
    ("for i = 0 to n exchange", "no lanes to exchange"),
    ("for i = 0 to n exchange lanes 4 scalar", "of a vector loop that copies"),
    ("for i = 0 to n vector lanes 6 masked", "not a power of two"),
    ("for i = 0 to n vector lanes 1 masked", "not a power of two"),
    ("for i = 0 to n vector lanes 4 whole", "not plainly whole turns"),
    ("for i = 0 to 4*n vector lanes 4 whole copies 2", "not plainly whole turns"),
    ("for i = 0 to n vector lanes 4 halved", "bounds of i are not constant"),
    ("for i = 0 to 8 vector lanes 4 halved copies 2", "has no turns"),
    ("for i = 0 to 8 vector lanes 4 halved most 8", "written out, no other"),
    ("for i = 0 to n vector lanes 4 masked copies 0", "at least one copy"),
    ("for i = n to n vector lanes 4 masked most 8", "cannot be written out"),
    ("for i = 0 to n vector lanes 4 masked most 6", "cannot be written out"),
    ("for i = 0 to n vector lanes 4 scalar most 8", "is masked"),
]


@pytest.mark.parametrize(("loop", "problem"), PLANS, ids=[loop for loop, _ in PLANS])
def test_illegal_plans(loop: str, problem: str) -> None:
    with pytest.raises(InternalError, match=problem):
        verify_loop(parse_loop(mapped(loop)))


def test_lanes_need_a_body_that_has_them() -> None:
    text = mapped("for i = 0 to n vector lanes 4 masked").replace("%y[i]", "%y[0]")
    with pytest.raises(InternalError, match="cannot run side by side"):
        verify_loop(parse_loop(text))
    jam = SUM.replace("vector", "vector lanes 4 masked jam 2")
    with pytest.raises(InternalError, match="add to one accumulator"):
        verify_loop(parse_loop(jam))


def test_a_plan_that_does_not_parse() -> None:
    with pytest.raises(ParseError, match="whole, masked, scalar, halved"):
        parse_loop(mapped("for i = 0 to n vector lanes 4 ragged"))


def test_the_interpreter_holds_a_plan_to_its_promise() -> None:
    """The last word on what a plan means: iterations as they are, or a fault."""
    func = vectorize(parse_loop(mapped("for i = 0 to min(n, 32) vector")), avx512())
    x = np.arange(80, dtype=np.float32)
    for size in (0, 1, 17, 40):
        y = np.zeros(80, np.float32)
        run_loop(func, None, (size,), [x, y])
        assert np.array_equal(y[: min(size, 32)], x[: min(size, 32)])
        assert not y[min(size, 32) :].any()

    def told(vectors: Vectors, size: int) -> None:
        def plan(s: Any) -> Any:
            return replace(s, vectors=vectors) if isinstance(s, For) else s

        wrong = replace(func, body=rewrite(func.body, plan))
        run_loop(wrong, None, (size,), [x, np.zeros(80, np.float32)])

    told(Vectors(4, Rest.MASKED, most=8), 8)
    with pytest.raises(LoopFault, match="9 iterations of i"):
        told(Vectors(4, Rest.MASKED, most=8), 9)
    told(Vectors(4, Rest.WHOLE, copies=2), 16)
    with pytest.raises(LoopFault, match="12 iterations of i"):
        told(Vectors(4, Rest.WHOLE, copies=2), 12)


def test_a_machine_of_other_lanes_has_another_plan() -> None:
    func = parse_loop(SUM)
    plans = {
        loop.vectors
        for to in (avx512(), avx2(), baseline())
        for loop in statements(vectorize(func, to).body)
        if isinstance(loop, For) and loop.kind is Kind.VECTOR
    }
    assert {plan.lanes for plan in plans if plan is not None} == {16, 8, 4}
