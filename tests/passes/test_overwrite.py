"""Buffers of which a part is changed: the write, and what must not become one."""

from __future__ import annotations

import numpy as np

from pliant.context import Context
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.machine.target import host
from pliant.options import Options
from pliant.passes.overwrite import overwrite

MODULE = """graph @main(%x: f32[2, n], %c: f32[2, 9]) sizes (p) {
  constraint n + p <= 9 says ("it fits") at "here"
  %a: f32[2, p] = slice(%c) {starts = [0, 0], shape = [2, p], steps = (1, 1)}
  %b: f32[2, -n - p + 9] = slice(%c) {starts = [0, n + p], shape = [2, -n - p + 9], steps = (1, 1)}
  %new: f32[2, 9] = concat(%a, %x, %b) {axis = 1}
  return %new
}
"""  # noqa: E501


def passed(text: str) -> tuple[list[str], bool]:
    """The ops after the pass, and whether they compute the same as before."""
    module = parse_module(text)
    cx = Context(Options(), host(), stores=(("c", 0),))
    out = module.with_main(overwrite(module.main, cx))
    verify(out, Stage.DECOMPOSED)
    same = True
    for n, p in ((0, 0), (1, 8), (3, 2), (9, 0), (0, 9)):
        x = np.random.default_rng(n).random((2, n)).astype(np.float32)
        c = np.arange(18, dtype=np.float32).reshape(2, 9)
        both = [run_graph(m, [x, c], env={"p": p})[0] for m in (module, out)]
        same &= np.array_equal(*both)
    return [op.name for op in out.main.ops], same


def test_a_window() -> None:
    names, same = passed(MODULE)
    assert "overwrite" in names and same


def test_other_elements_of_the_buffer_are_written() -> None:
    """The part behind the window is not what was there."""
    last = "starts = [0, n + p]"
    names, same = passed(MODULE.replace(last, "starts = [0, 0]"))
    assert names.count("overwrite") == 2 and same


def test_another_buffer_stays_a_concat() -> None:
    text = MODULE.replace("slice(%c)", "slice(%d)")
    text = text.replace("  %a: f32", "  %d: f32[2, 9] = neg(%c)\n  %a: f32")
    names, same = passed(text)
    assert "overwrite" not in names and same
