"""Which kernels may write over what they read, and where parameters end up."""

from __future__ import annotations

import pytest

from pliant.context import Context, Training
from pliant.ir.loops import LoopFunc, Role
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.machine.target import host
from pliant.memory.update import update, with_inout
from pliant.memory.update_proof import is_pointwise
from pliant.options import Options

HEAD = "loop @f(n; in %p: f32[n], in %g: f32[n], out %o: f32[n]) do\n"
BODIES: dict[str, tuple[str, bool]] = {
    "the same element": (
        "  for i = 0 to n vector {\n"
        "    local $v: f32 = %p[i]\n"
        "    %o[i] = sub($v, %g[i])\n"
        "  }\n",
        True,
    ),
    "within the store": (
        "  for i = 0 to n parallel grain 1 {\n    %o[i] = sub(%p[i], %g[i])\n  }\n",
        True,
    ),
    "another element": (
        "  for i = 0 to n - 1 {\n    %o[i] = sub(%p[i + 1], %g[i])\n  }\n",
        False,
    ),
    "read again behind the store": (
        "  for i = 0 to n {\n"
        "    %o[i] = sub(%p[i], %g[i])\n"
        "    local $v: f32 = %p[i]\n"
        "    %o[i] = add($v, 1.0:f32)\n"
        "  }\n",
        False,
    ),
    "all read for each": (
        "  for i = 0 to n {\n"
        "    accumulator $a: f32 = sum\n"
        "    for j = 0 to n {\n"
        "      accumulate $a, %p[j]\n"
        "    }\n"
        "    %o[i] = $a\n"
        "  }\n",
        False,
    ),
    "again each round": (
        "  while lt(%g[0], 1.0:f32) {\n"
        "    for i = 0 to n {\n"
        "      %o[i] = sub(%p[i], %g[i])\n"
        "    }\n"
        "  }\n",
        False,
    ),
    "cleared first": (
        "  for k = 0 to 1 {\n"
        "    for i = 0 to n {\n"
        "      %o[i] = 0.0:f32\n"
        "    }\n"
        "    for i = 0 to n {\n"
        "      %o[i] = sub(%p[i], %g[i])\n"
        "    }\n"
        "  }\n",
        False,
    ),
}


def function(body: str) -> LoopFunc:
    return parse_module(HEAD + body + "end\n").loops["f"]


@pytest.mark.parametrize("name", BODIES)
def test_pointwise(name: str) -> None:
    body, may = BODIES[name]
    func = function(body)
    assert is_pointwise(func, "p", "o", {"f": func}) is may


def test_the_function_is_told() -> None:
    func = function(BODIES["the same element"][0])
    functions = {"f": func}
    made = with_inout(func, frozenset({"o"}), functions)
    assert [b.role for b in made.buffers] == [Role.IN, Role.IN, Role.INOUT]
    assert functions[made.name] is made and made.name != "f"
    assert with_inout(func, frozenset({"o"}), functions) is made


MODULE = (
    """graph @main(%p: f32[n], %g: f32[n]) {
  %loss: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  %new: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}
  call_loop(%p, %g, %new) {callee = "f", sizes = [n]}
  call_loop(%p, %g, %loss) {callee = "f", sizes = [n]}
  return %loss, %new
}

"""
    + HEAD
    + BODIES["the same element"][0]
    + "end\n"
)


def context(**options: bool) -> Context:
    """Of a step whose second result is the new value of `p`."""
    training = Training(("p",), lambda b, params, gradients: gradients, ("p",))
    return Context(Options(**options), host(), training)


@pytest.mark.parametrize("on", [True, False])
def test_written_behind_all_readers(on: bool) -> None:
    module = parse_module(MODULE)
    out = update(module, context(update=on))
    verify(out, Stage.LOWERED)
    calls = [op for op in out.main.ops if op.name == "call_loop"]
    names = [[v.name for v in op.operands] for op in calls]
    if on:
        assert names == [["p", "g", "loss"], ["p", "g", "new"]]
        (view,) = (op for op in out.main.ops if op.name == "view")
        assert view.result.name == "new" and view.operands[0].name == "p"
    else:
        assert names[:2] == [["p", "g", "new"], ["p", "g", "loss"]]
        assert names[2] == ["new", "p"]
        assert calls[2].str_attr("computes") in out.graphs
    assert [v.name for v in out.main.results] == ["loss"]


def test_a_reader_that_needs_the_new_value_forces_a_copy() -> None:
    text = MODULE.replace("call_loop(%p, %g, %loss)", "call_loop(%p, %new, %loss)")
    module = parse_module(text)
    out = update(module, context())
    calls = [op for op in out.main.ops if op.name == "call_loop"]
    assert [v.name for v in calls[-1].operands] == ["new", "p"]


def test_a_reader_of_the_new_value_alone_reads_it_where_it_is_stored() -> None:
    text = MODULE.replace("call_loop(%p, %g, %loss)", "call_loop(%new, %g, %loss)")
    out = update(parse_module(text), context())
    verify(out, Stage.LOWERED)
    calls = [op for op in out.main.ops if op.name == "call_loop"]
    names = [[v.name for v in op.operands] for op in calls]
    assert names == [["p", "g", "new"], ["new", "g", "loss"]]
    assert [op.result.name for op in out.main.ops if op.name == "view"] == ["new"]
