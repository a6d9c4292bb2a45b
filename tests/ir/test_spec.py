"""The verifier: accepts what is legal, and names the culprit where a rule is broken."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from pliant.errors import InternalError
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Graph, Module, Op, Value
from pliant.ir.loops import Const, Fma, LoopFunc, Read, Store, buffer
from pliant.ir.loops import Role as R
from pliant.ir.parse import parse_loop, parse_module
from pliant.ir.spec import Stage, verify, verify_loop
from pliant.ir.types import DType, tensor
from pliant.sym import sym

LOOPS = """
loop @row(threads0, n; in %x: f32[n, 8], out %y: f32[n, 8], work %w: f32[threads0, 8]) {
  for i = 0 to n parallel grain n + 1 {
    accumulator $s: f32 = sum
    alloc register %r: f32[2, 8]
    for u = 0 to 2 unroll {
      for v = 0 to 8 vector {
        %r[u, v] = 1.0:f32
      }
    }
    for j = 0 to 8 vector {
      accumulate $s, %x[i, j] where lt(index(j), 4:i64)
    }
    let k = cast($s, i64)
    local $t: f32 = fma($s, %r[1, 3], 2.0:f32)
    if gt($t, 0.0:f32) {
      %w[worker, 0] = $t
    } else {
      check true:bool else 1
    }
    switch k {
      case 0 {
        call @leaf(n; %x[i, 0], %w[worker, 0])
      }
    }
    for j = 0 to 8 vector {
      %y[i, j] = select(logical_not(false:bool), %w[worker, 0], exp($t))
    }
  }
}
loop @leaf(n; in %x: f32[8], out %y: f32[1]) {
  for i = 0 to 1 {
    %y[i] = %x[i]
  }
}
"""

GRAPH = """
graph @main(%x: f32[n, 2*m], %y: f32[m, k], %c: bool[]) sizes (s) {
  constraint n == m + s at "here"
  constraint n <= 8
  %w: f32[3] = constant() {name = "w"}
  %t: f32[2*m, n] = transpose(%x) {perm = (1, 0)}
  %r: f32[2*m, s + m] = neg(%t)
  %z: i64[u0, 2] = nonzero(%x)
  %f: f32[u1, k] = match_cast(%y) {shape = [u1, k]}
  %g: f32[u1, k] = if(%c, %f)
    region @then(%a: f32[u1, k]) {
      %b: f32[u1, k] = exp(%a)
      return %b
    }
    region @else(%a: f32[u1, k]) {
      return %a
    }
  %o: f32[u0, 2] = cast(%z) {dtype = f32}
  %d: f32[] = full() {value = 0.0, dtype = f32, shape = ()}
  %l: f32[u2, k] = while(%g)
    region @cond(%a: f32[v, k]) {
      %e: bool[] = full() {value = false, dtype = bool, shape = ()}
      return %e
    }
    region @body(%a: f32[v, k]) {
      %e: f32[2*v, k] = concat(%a, %a) {axis = 0}
      return %e
    }
  %p: f32[n] = call(%x) {callee = "first", sizes = ()}
  return %r, %o, %l, %p
}
graph @first(%x: f32[p, q]) {
  %y: f32[p] = reduce(%x) {op = "sum", axes = (1), keepdims = false}
  return %y
}
constant @w: f32[3] dense [1.0, 2.0, 3.0]
"""

LOWERED = """
graph @main(%x: f32[n, 8]) {
  %a: f32[n, 8] = alloc() {bytes = <32*n>, shape = [n, 8], dtype = f32}
  %s: f32[n, 8] = alloc() {bytes = <32*n>, shape = [n, 8], dtype = f32}
  %v: f32[n, 4] strides [8, 1] = view(%a) {offset = <16>}
  call_loop(%x, %s) {callee = "row", sizes = [threads, n]}
  %r: f32[n, 8] = call_loop(%s) {callee = "row", sizes = [threads, n]}
  %q: f32[2] = call_library(%x) {callee = "blas", sizes = []}
  return %r, %v, %q
}
library @blas symbol "blas"
"""


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


def rejects(text: str, stage: Stage, *messages: str) -> None:
    with pytest.raises(InternalError) as caught:
        verify(parse_module(text), stage)
    for message in messages:
        assert message in str(caught.value)


def test_accepts() -> None:
    verify(parse_module(GRAPH), Stage.IMPORTED)
    verify(parse_module(GRAPH), Stage.DECOMPOSED)
    verify(parse_module(LOWERED + LOOPS), Stage.LOWERED)


def test_accepts_what_the_builder_builds() -> None:
    b = Builder()
    x = b.param("x", tensor(DType.F32, sym("n"), sym("m")))
    y = b.param("y", tensor(DType.F32, sym("k"), sym("p")))
    z = b.matmul(x, y)  # m == k becomes a constraint
    w = b.reduce("sum", b.binary("add", z, b.scalar(1.0, DType.F32)), (0,))
    graph = b.finish("main", [w])
    assert graph.constraints
    verify(Module({"main": graph}), Stage.IMPORTED)
    with pytest.raises(InternalError, match=r"matmul: needs m == k: neither proved"):
        verify(Module({"main": graph.replace(constraints=())}), Stage.IMPORTED)


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        # types
        ("%t: f32[2*m, n]", "%t: f32[2*m, n + 1]", ["%t is f32[2*m, n + 1]", "> %t"]),
        ("%t: f32[2*m, n]", "%t: f64[2*m, n]", ["should be f32[2*m, n]"]),
        ("s + m] = neg", "s + m + 1] = neg", ["is not proved"]),
        ("perm = (1, 0)", "perm = (1, 1)", ["is no permutation"]),
        # symbols
        ("shape = ()}\n  %l", "shape = [zz]}\n  %l", ["symbol zz of attribute shape"]),
        ("%z: i64[u0, 2]", "%z: i64[2*u0, 2]", ["must be a symbol of its own"]),
        ("shape = [u1, k]", "shape = [2*u1, k]", ["symbol u1 of attribute shape"]),
        ("constraint n <= 8", "constraint zz <= 8", ["symbol zz of constraint"]),
        ("%y: f32[m, k]", "%y: f32[m, k*j]", ["cannot solve"]),
        ("constraint n <= 8", "constraint n < s", ["contradict"]),
        ("@first(%x: f32[p, q])", "@first(%x: f32[p, q]) sizes (r)", ["1 sizes"]),
        ("sizes (s)", "sizes (s, s)", ["sizes (s, s) repeat"]),
        # attributes, operands, ops
        ("{dtype = f32}\n  %d", "{}\n  %d", ["cast needs the attribute dtype"]),
        ("{dtype = f32}\n  %d", "{dtype = 1}\n  %d", ["must be dtype"]),
        ("axes = (1)", "axes = (1), more = 1", ["no attribute more"]),
        ("keepdims = false", "keepdims = 0", ["keepdims"]),
        ("neg(%t)", "neg(%t, %t)", ["takes 1..1 operands, not 2"]),
        ("neg(%t)", "nag(%t)", ["nag: there is no such op"]),
        # callees
        ('name = "w"', 'name = "v"', ["there is no constant @v"]),
        ("%w: f32[3]", "%w: f32[4]", ["constant @w is f32[3]"]),
        ('callee = "first"', 'callee = "last"', ["there is no graph @last"]),
        ("call(%x)", "call(%y)", ["result %p is f32[n], should be f32[m]"]),
        # regions
        ("@else(%a: f32[u1, k])", "@else(%a: f32[k, u1])", ["region else takes"]),
        ("return %b", "return %b, %b", ["same number of results"]),
        ("%e: bool[] = full() {value = false", "%e: bool[] = frob() {value = false",
         ["region @cond"]),
    ],
)  # fmt: skip
def test_rejects_graphs(old: str, new: str, messages: list[str]) -> None:
    rejects(replaced(GRAPH, old, new), Stage.IMPORTED, *messages)


@pytest.mark.parametrize(
    ("op", "stage"),
    [
        ('%r: f32[n] = softmax(%x) {axis = 0}', Stage.DECOMPOSED),
        ("%r: f32[n] = exp(%x)", Stage.FUSED),
        ("%r: f32[n] = alloc() {bytes = <4*n>, shape = [n], dtype = f32}", Stage.FUSED),
        ("%r: f32[n] = full() {value = 0.0, dtype = f32, shape = [n]}", Stage.LOWERED),
        ('%r: f32[n] = fusion(%x) {kind = "map"}\n region @r(%a: f32[n]) {\n'
         "return %a\n}", Stage.LOWERED),
        ('%r: f32[n] = fusion(%x) {kind = "map"}\n region @r(%a: f32[n]) {\n'
         "return %a\n}", Stage.DECOMPOSED),
    ],
)  # fmt: skip
def test_rejects_ops_of_other_stages(op: str, stage: Stage) -> None:
    text = f"graph @main(%x: f32[n]) {{\n{op}\nreturn %r\n}}"
    rejects(text, stage, f"is not an op of the {stage.value} stage", "> %r")


def test_fused() -> None:
    text = """graph @main(%x: f32[n]) {
      %v: f32[n, 1] = reshape(%x) {shape = [n, 1]}
      %r: f32[n] = fusion(%v) {kind = "map"}
        region @r(%a: f32[n, 1]) {
          %b: f32[n] = reshape(%a) {shape = [n]}
          %c: f32[n] = exp(%b)
          return %c
        }
      return %r
    }"""
    verify(parse_module(text), Stage.FUSED)
    inside = replaced(text, "exp(%b)", "relu(%b)")
    rejects(inside, Stage.FUSED, "region @r: relu: is not an op of a fusion")


def graph_of(*ops: Op, results: tuple[Value, ...], params: tuple[Value, ...]) -> Module:
    return Module({"main": Graph("main", params, ops, results)})


def test_rejects_ssa_breaches() -> None:
    type = tensor(DType.F32, sym("n"))
    x, y, z = (Value(name, type) for name in "xyz")
    first = Op("exp", (x,), (), (y,))
    cases = {
        "operand %y is not defined": (Op("neg", (y,), (), (z,)), first),
        "%y is defined a second time": (first, Op("neg", (y,), (), (y,))),
        "the name %y is given a second": (
            first,
            Op("neg", (y,), (), (Value("y", type),)),
        ),
    }
    for message, ops in cases.items():
        with pytest.raises(InternalError, match=re.escape(message)):
            module = graph_of(*ops, params=(x,), results=())
            verify(module, Stage.IMPORTED)
    with pytest.raises(InternalError, match="returns %z, which it does not define"):
        verify(graph_of(first, params=(x,), results=(z,)), Stage.IMPORTED)
    inner = Value("inner", type)
    region = Graph("r", (inner,), (Op("exp", (x,), (), (z,)),), (z,))
    fusion = Op("fusion", (x,), (("kind", "map"),), (Value("o", type),), (region,))
    with pytest.raises(InternalError, match="%x is defined outside this body"):
        verify(graph_of(fusion, params=(x,), results=()), Stage.FUSED)
    with pytest.raises(InternalError, match="filed under the name @other"):
        verify(Module({"other": Graph("main", (), (), ())}), Stage.IMPORTED)


def test_errors_show_neighbours_only() -> None:
    type = tensor(DType.F32, sym("n"))
    values = [Value(f"v{i}", type) for i in range(21)]
    ops = [Op("exp", (a,), (), (b,)) for a, b in pairwise(values)]
    ops[10] = Op("frobnicate", (values[10],), (), (values[11],))
    with pytest.raises(InternalError) as caught:
        verify(graph_of(*ops, params=(values[0],), results=()), Stage.IMPORTED)
    text = str(caught.value)
    assert "  > %v11: f32[n] = frobnicate(%v10)" in text
    assert "%v6:" in text and "%v16:" in text
    assert "%v5:" not in text and "%v17:" not in text


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ('callee = "blas"', 'callee = "mkl"', ["there is no library @mkl"]),
        ('{callee = "row", sizes', '{callee = "raw", sizes', ["there is no loop @raw"]),
        ("sizes = [threads, n]", "sizes = [n]", ["@row takes 2 sizes"]),
        ("call_loop(%x, %s)", "call_loop(%x)", ["given nothing for %y"]),
        ("call_loop(%x, %s)", "call_loop(%x, %s, %s, %s)", ["no buffer for %s"]),
        ("call_loop(%s)", "call_loop(%q1)", ["%q1 is i64[n, 8]"]),
        ("sizes = [threads, n]", "sizes = [threads, n + 1]", ["more than %x"]),
        ("sizes = [threads, n]", "sizes = [thread, n]", ["symbol thread of attribute"]),
    ],
)
def test_rejects_calls(old: str, new: str, messages: list[str]) -> None:
    text = replaced(LOWERED, old, new)
    if "%q1" in text:
        extra = (
            "  %q1: i64[n, 8] = alloc() {bytes = <64*n>, shape = [n, 8], dtype = i64}"
        )
        text = replaced(text, "  %r: f32[n, 8] =", f"{extra}\n  %r: f32[n, 8] =")
    rejects(text + LOOPS, Stage.LOWERED, *messages)


def test_rejects_other_strides_than_the_buffer_has() -> None:
    view = "  %t: f32[n, 8] strides [1, n] = view(%x) {offset = <0>}\n"
    text = replaced(LOWERED, "  call_loop(%x, %s)", f"{view}  call_loop(%t, %s)")
    rejects(text + LOOPS, Stage.LOWERED, "has the strides", "%t")


def test_rejects_strides_before_lowering() -> None:
    text = "graph @main(%x: f32[n, 2] strides [4, 1]) {\n return %x\n}"
    rejects(text, Stage.FUSED, "has strides before lowering")


def test_rejects_wrong_constants() -> None:
    data = np.zeros(4, np.float64)
    constant = Constant("c", tensor(DType.F32, 4), data)
    with pytest.raises(InternalError, match=r"constant @c: f32\[4\] holds float64"):
        verify(Module({}, constants={"c": constant}), Stage.IMPORTED)


# ---- loop functions


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # scope
        ("%w[worker, 0] = $t", "%w[worker, zz] = $t", "zz in store of %w"),
        ("for j = 0 to 8 vector", "for j = 0 to zz vector", "zz in the bounds"),
        ("for j = 0 to 8 vector", "for i = 0 to 8 vector", "the name i is taken"),
        ("for u = 0", "for worker = 0", "the name worker is taken"),
        ("grain n + 1", "grain i", "i in the grain is not in scope"),
        ("let k =", "let n =", "the name n is taken"),
        ("let k", "local $s: f32 = 1.0:f32 let k", "the name $s is taken"),
        ("gt($t, 0.0", "gt($tt:f32, 0.0", "$tt is not in scope"),
        ("let k", "alloc register %x: f32[1] let k", "the name %x is taken"),
        ("switch k", "switch kk", "kk in the selector"),
        # ranks and roles
        ("%y[i, j] =", "%y[i] =", "store of %y has 1 indices, its rank is 2"),
        ("%x[i, j] where", "%x[i, j, 0] where", "load of %x has 3 indices"),
        ("%y[i, j] =", "%x[i, j] =", "%x is an input"),
        ("alloc register %r: f32[2, 8]", "alloc register %r: f32[n, 8]", "no static"),
        ("alloc register %r", "alloc work %r", "%r is work, not register"),
        ("%r[1, 3]", "%r[1, i]", "i is no variable of an unrolled or vector loop"),
        ("unroll", "", "u is no variable of an unrolled"),
        ("for u = 0 to 2 unroll", "for u = 0 to n unroll", "no constant bounds"),
        # types
        ("fma($s, ", "fma(1:i64, ", "operands of fma(1:i64, %r[1, 3], 2.0:f32) are"),
        ("gt($t, 0.0:f32)", "gt($t, 0:i64)", "are f32 and i64"),
        ("%w[worker, 0] = $t", "%w[worker, 0] = 1:i64", "%w is f32, the value is i64"),
        ("local $t: f32", "local $t: f64", "$t is f64, the value is f32"),
        ("let k = cast($s, i64)", "let k = $s", "k is f32, not i64"),
        ("if gt($t, 0.0:f32)", "if $t", "the condition is f32, not bool"),
        ("check true:bool", "check 1:i64", "the condition is i64, not bool"),
        ("where lt(index(j), 4:i64)", "where 1:i64", "predicate of a load is i64"),
        ("logical_not(false:bool)", "2.0:f32", "the condition of a select is f32"),
        ("exp($t))", "1:i64)", "are f32 and i64"),
        ("exp($t))", "logical_not($t))", "must be bool"),
        ("exp($t))", "frob($t))", "there is no elementwise op frob"),
        ("exp($t))", "add($t))", "add does not take 1 operands"),
        ("exp($t))", "cast(neg(cast($t, f16)), f32))", "computes in f16"),
        ("4:i64)", "4.5:i64)", "4.5 is no literal of i64"),
        ("= sum", "= mean", "no reduction is called mean"),
        ("accumulator $s: f32", "accumulator $s: bf16", "storage only"),
        ("accumulate $s, %x[i, j]", "accumulate $q, %x[i, j]", "$q is no accumulator"),
        ("accumulate $s,", "accumulate $s, 1:i64 accumulate $s,", "value is i64"),
        ("accumulate $s,", "accumulate $s, $s accumulate $s,", "inside the vector"),
        # workers and parallel loops
        ("%y[i, j] = select", "%y[worker, j] = select", "used in store of %y"),
        ("let k = cast($s, i64)", "let k = index(worker)", "worker is used"),
        ("for j = 0 to 8 vector", "for j = 0 to 8 parallel", "is inside another"),
        ("for i = 0 to 1 {", "for i = 0 to 1 parallel {", "@leaf has a parallel loop"),
        # calls
        ("call @leaf(n;", "call @leaf(;", "@leaf takes 1 sizes, 2 buffers"),
        ("call @leaf", "call @loaf", "there is no loop @loaf"),
        ("%x[i, 0], %w[worker, 0])", "%x[i], %w[worker, 0])", "argument of %x has 1"),
        ("%x[i, 0], %w[worker, 0])", "%w[worker, 0], %x[i, 0])", "writes to %x"),
        ("%x[i, 0], %w[worker, 0])", "%r[0, 0], %w[worker, 0])", "no address"),
        ("in %x: f32[8]", "in %x: f64[8]", "%x of @leaf is f64"),
        ("%y[i] = %x[i]", "call @row(n, n; %x[i], %y[i], %y[i])", "back"),
        ("case 0 {", "case 0 {} case 0 {", "cases [0, 0] repeat"),
    ],
)  # fmt: skip
def test_rejects_loops(old: str, new: str, message: str) -> None:
    rejects(replaced(LOOPS, old, new), Stage.LOWERED, message, "# <-- here")


def test_rejects_what_crosses_a_parallel_loop() -> None:
    text = """loop @f(n; in %x: f32[n], out %y: f32[n]) {
      accumulator $s: f32 = sum
      alloc register %r: f32[1]
      for i = 0 to n parallel {
        STATEMENT
      }
    }"""
    for statement, message in (
        ("accumulate $s, %x[i]", "$s is accumulated across a parallel loop"),
        ("%r[0] = %x[i]", "registers %r are outside the parallel loop"),
    ):
        with pytest.raises(InternalError, match=re.escape(message)):
            verify_loop(parse_loop(text.replace("STATEMENT", statement)))


def test_rejects_a_buffer_that_changed() -> None:
    old = buffer("y", DType.F32, (sym("n"),), R.OUT)
    new = buffer("y", DType.F32, (sym("n"), 2), R.OUT)
    store = Store(new, (sym("n") * 0, sym("n") * 0), Const(1.0, DType.F32))
    with pytest.raises(InternalError, match="%y is not as it was declared"):
        verify_loop(LoopFunc("f", ("n",), (old,), store))
    register = buffer("r", DType.F32, (1,), R.REGISTER)
    with pytest.raises(InternalError, match="register %r cannot be a parameter"):
        verify_loop(LoopFunc("f", (), (register,), store))


def test_shared_values_are_checked_once() -> None:
    value: Fma | Const = Const(1.0, DType.F32)
    for _ in range(60):
        value = Fma(value, value, value)
    out = buffer("y", DType.F32, (), R.OUT)
    verify_loop(LoopFunc("f", (), (out,), Store(out, (), value)))
    wrong = Read("t", DType.F32)
    with pytest.raises(InternalError, match=r"\$t is not in scope"):
        verify_loop(LoopFunc("f", (), (out,), Store(out, (), wrong)))


def test_what_was_legal_is_checked_again_among_other_functions() -> None:
    outer = parse_loop("""loop @outer(n; in %x: f32[n], out %y: f32[n]) {
      call @middle(n; %x[0], %y[0])
    }""")
    middle = parse_loop("""loop @middle(n; in %x: f32[n], out %y: f32[n]) {
      call @leaf(n; %x[0], %y[0])
    }""")
    leaf = parse_loop("""loop @leaf(n; in %x: f32[n], out %y: f32[n]) {
      for i = 0 to n {
        %y[i] = %x[i]
      }
    }""")
    back = parse_loop("""loop @leaf(n; in %x: f32[n], out %y: f32[n]) {
      call @outer(n; %x[0], %y[0])
    }""")
    wrong = parse_loop("""loop @middle(n; in %x: f64[n], out %y: f32[n]) {
      for i = 0 to n {
        %y[i] = 0.0:f32
      }
    }""")
    legal = {"outer": outer, "middle": middle, "leaf": leaf}
    for _ in range(2):
        verify_loop(outer, Module({}, legal))
        with pytest.raises(InternalError, match="@middle calls @outer back"):
            verify_loop(outer, Module({}, {**legal, "leaf": back}))
        with pytest.raises(InternalError, match="%x of @middle is f64"):
            verify_loop(outer, Module({}, {**legal, "middle": wrong}))
        with pytest.raises(InternalError, match="there is no loop @middle"):
            verify_loop(outer, Module({}, {"outer": outer}))
