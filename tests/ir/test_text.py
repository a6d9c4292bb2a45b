"""The text form: what is printed parses back to the same module, exactly."""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from pliant.ir import loops
from pliant.ir.dumps import read_module, write_module
from pliant.ir.graph import Constant, Graph, Module, Op
from pliant.ir.loop_walk import statements
from pliant.ir.loops import LoopFunc
from pliant.ir.parse import ParseError, parse_graph, parse_loop, parse_module
from pliant.ir.text import print_graph, print_loop, print_module
from pliant.ir.types import DType, tensor

GRAPHS = """\
graph @main(%ids: i64[batch, seq], %mask: bool[batch, seq], %s: f32[]) \
sizes (k, `a b`) {
  constraint seq <= 512 says ("at most 512, is ", <seq>) at "bert.py:12"
  constraint batch != 0
  constraint k < 9 says [k] at "x"
  constraint 4 divides seq
  constraint seq == -(k//2) + min(2*batch, 3*k + 1) says ("plain")
  %0: f32[16, 768] = constant() {name = "emb"}
  %1: f32[batch, seq, 768] = index(%0, %ids) loc "bert.py:93"
  %full: f32[] = full() {value = -inf, dtype = f32, shape = ()}
  %2: i64[u0, 2] = nonzero(%mask)
  %3: f32[batch, seq, 768] = fusion(%1) {kind = "loop"} loc "a \\"quoted\\" place"
    region @body(%x: f32[batch, seq, 768]) {
      %y: f32[batch, seq, 768] = fusion(%x) {kind = "inner"}
        region @inner(%x: f32[batch, seq, 768]) sizes (q) {
          constraint q <= seq
          return %x
        }
      return %y
    }
  %c: bool[] = full() {value = true, dtype = bool, shape = ()}
  %a: f32[batch, seq, 768], %"layers/0": f32[batch, `q r`] = if(%c, %1)
    region @then(%p: f32[batch, seq, 768]) {
      return %p, %p
    }
    region @else(%p: f32[batch, seq, 768]) {
      return %p, %p
    }
  %v: f32[seq, 4] strides [4*ceildiv(seq, 4), 1] = view(%a) {offset = <64*seq>}
  nothing()
  return %3, %v
}

graph @empty() {
  return
}

inside @while_0.test @map_0(%x: f32[n], %y: f32[n]) {
  %z: f32[n] = add(%x, %y) loc "a.py:3"
  return %z
}

inside @while_0.test @map_1(%x: f32[n]) {
  return %x
}

inside @"odd name" @most(%x: f32[4*n], %x_1: f32[n]) {
  return
}

library @gemm symbol "cblas_sgemm"
constant @emb: f32[16, 768] data sha256:e7f4da099901a163
constant @scalar: f64[] dense [0.1]
constant @flags: bool[3] dense [true, false, true]
constant @none: f32[0] dense []
constant @half: bf16[2] dense [16256, 65535]
constant @nan: f32[2] bytes "0100c07f0000803f"
constant @inf: f32[2, 1] dense [inf, -0.0]
"""

LOOP = """\
loop @k0(n, m; in %x: f32[n, m], out %y: bf16[n, m] strides [2*m, 1], \
work %w: f32[4, m], inout %z: i64[], in %"odd name": bool[n]) {
  for i = 0 to n parallel grain 4096//m + 1 {
    alloc register %r: f32[2, 8]
    accumulator $s: f32 = sum
    for j = 0 to m step 8 vector do
      accumulate $s, mul(%x[i, j], 0.5:f32)
    end
    for u = 0 to 2 unroll {
      %r[u, 0] = fma($s, -1e-05:f32, nan:f32)
    }
    let k = index(i*m + 1)
    local $t: f32 = select(lt(%x[i, 0], inf:f32), %r[0, 0], exp($s))
    %w[worker, 0] = $t
    %y[i, m - 1] = cast($t, bf16)
    if %"odd name"[i] do
      if logical_not(true:bool) {}
    end else {
      %z[] = add(%z[], index(k))
    }
    switch n % 4 {
      case 0 {
        check le(%z[], 7:i64) else 3
      }
      case -1 {
        {
          call @k1(n, 2*m; %x[i, 0], %y[0, 0])
        }
      }
    }
    dispatch {
      variant "no tail" when 16 divides m, n <= 4*m {
        %w[0, 0] = 0.5:f32
      }
      variant "any" do
        %w[0, 0] = 0.25:f32
      end
    }
    prefetch %x[i, k]
    %w[0, 1] = %x[i, k] where lt(index(k), index(m))
    %w[0, 2] = $undeclared:f32
    check true:bool else 4
  }
  while eq(%x[0, 0], 0.0:f32) {
    %w[0, 0] = 0.5:f32
  }
  library "plt_top" computes top {axis = 1, k = <2*m>, largest = true} \
(1, n, m - 1; %x, %"odd name", %w)
  library "plt_none" computes none {} (; )
}
"""


def same(a: object, b: object) -> bool:
    """Structural identity: values by position, floats by their bits."""
    values: dict[int, object] = {}

    def walk(a: object, b: object) -> bool:
        if type(a) is not type(b):
            return False
        if id(a) in values:
            return values[id(a)] is b
        match a, b:
            case float(), float():
                return (math.isnan(a) and math.isnan(b)) or a.hex() == b.hex()
            case (tuple(), tuple()):
                return len(a) == len(b) and all(map(walk, a, b))
            case dict(), dict():
                return list(a) == list(b) and all(map(walk, a.values(), b.values()))
            case np.ndarray(), np.ndarray():
                kinds = (a.dtype, a.shape) == (b.dtype, b.shape)
                return kinds and a.tobytes() == b.tobytes()
        if dataclasses.is_dataclass(a):
            names = [f.name for f in dataclasses.fields(a)]
            if not all(walk(getattr(a, n), getattr(b, n)) for n in names):
                return False
            values[id(a)] = b
            return True
        return a is b or a == b

    return walk(a, b)


def given() -> dict[str, Constant]:
    data = np.arange(16 * 768, dtype=np.float32).reshape(16, 768)
    return {"emb": Constant("emb", tensor(DType.F32, 16, 768), data)}


def test_module_round_trip() -> None:
    module = parse_module(GRAPHS, given())
    text = print_module(module)
    assert text == GRAPHS
    again = parse_module(text, given())
    assert same(module.graphs, again.graphs)
    assert same(module.inside, again.inside)
    assert [len(graphs) for graphs in module.inside.values()] == [2, 1]
    assert same(module.libraries, again.libraries)
    assert same(module.constants, again.constants)


def test_loop_round_trip() -> None:
    func = parse_loop(LOOP)
    assert print_loop(func) == LOOP
    assert same(parse_loop(LOOP.replace("\n", "  # comment\n")), func)
    kinds = {type(s).__name__ for s in statements(func.body)}
    assert kinds == {t.__name__ for t in loops.Stmt.__args__}


def test_bare_bodies_are_kept() -> None:
    inner = loops.If(
        loops.Const(True, DType.BOOL),
        loops.If(loops.Const(False, DType.BOOL), loops.Block(())),
        loops.Block((loops.Block(()),)),
    )
    func = LoopFunc("f", (), (), inner)
    assert parse_loop(print_loop(func)) == func


@pytest.mark.parametrize(
    "attr",
    [
        True,
        False,
        None,
        0,
        -7,
        1 << 70,
        0.1,
        -0.0,
        1e-300,
        5e-324,
        math.inf,
        -math.inf,
        math.nan,
        'quotes " \\ and\nlines é',
        "",
        *DType,
        tensor(DType.F32, 3).shape[0],
        (),
        ((),),
        (1, 2.0, True, None, "x", DType.I8),
        ((1, (2,)), ("a", (None, False))),
        tensor(DType.F32, 1, 2).shape,
        (tensor(DType.F32, 1).shape[0], 1),
    ],
    ids=repr,
)
def test_attributes(attr: object) -> None:
    op = Op("some", (), (("first", attr), ("second", attr)))
    graph = Graph("g", (), (op,), ())
    text = print_graph(graph)
    again = parse_graph(text)
    assert same(again.ops[0].attrs, op.attrs)
    assert print_graph(again) == text


def test_small_nan_constants_keep_their_bits() -> None:
    data = np.array(struct.unpack("2I", struct.pack("2I", 0x7FC00001, 1)), np.uint32)
    constant = Constant("c", tensor(DType.F32, 2), data.view(np.float32))
    module = Module({}, constants={"c": constant})
    again = parse_module(print_module(module)).constants["c"]
    assert again.data.view(np.uint32).tolist() == [0x7FC00001, 1]


def test_large_data_is_sampled() -> None:
    data = np.zeros(1 << 20, np.float32)
    constants = {"w": Constant("w", tensor(DType.F32, 1 << 20), data)}
    text = print_module(Module({}, constants=constants))
    assert " data sample:" in text
    assert parse_module(text, constants).constants["w"] is constants["w"]


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("grap @x", 1, 1, "expected 'graph', 'inside', 'chunks'"),
        ("graph @g(%x: f32[n) {", 1, 19, "expected ',' or ']'"),
        ("graph @g(%x: f33[n]) {", 1, 14, "expected an element type"),
        ("graph @g() {\n  return %y\n}", 2, 10, "%y is not defined here"),
        ("graph @g() {\n  %a: f32[] = f(\n", 3, 1, "expected a value"),
        ("graph @g() {\n  f() {k = ?}", 2, 12, "expected a number, string"),
        ("graph @g(%a: f32[], %a: f32[]) {", 1, 21, "%a is defined twice"),
        ("graph @g(%a: f32[n +]) {", 1, 21, "expected a dimension"),
        ("graph @g() {\n  constraint n > 1", 2, 16, "expected '=='"),
        ("loop @f(;) {\n  frob\n}", 2, 3, "expected a statement"),
        ("loop @f(;) {\n  %x[0] = 1:f32\n}", 2, 3, "buffer %x is not defined"),
        ("loop @f(;) {\n  check $x else 1\n}", 2, 9, "$x is not defined"),
        ("loop @f(n; in %x: f32[n]) {\n for i = 0 to n step 1.5", 2, 22, "integer"),
        ("constant @c: f32[3] dense [1.0]", 1, 10, "@c has 1 elements, not 3"),
        ("constant @c: f32[30] data sha256:0", 1, 10, "is not given"),
        ("constant @c: f32[n] dense []", 1, 10, "symbolic shape"),
        ('library @a symbol "x"\nlibrary @a symbol "y"', 2, 1, "defined twice"),
    ],
)
def test_errors_tell_where(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_module(text)
    assert message in str(caught.value)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_other_data_is_refused() -> None:
    data = np.zeros((16, 768), np.float32)
    other = {"emb": Constant("emb", tensor(DType.F32, 16, 768), data)}
    with pytest.raises(ParseError, match="other data"):
        parse_module(GRAPHS, other)


def test_equal_bytes_of_other_types_are_read_back(tmp_path: Path) -> None:
    """A dump stores equal bytes once; each constant has them in its own type."""
    graph = parse_module("graph @main(%x: f32[n]) { return %x }").main
    types = (
        tensor(DType.F32, 64, 32),
        tensor(DType.F32, 8, 64, 4),
        tensor(DType.I32, 2048),
        tensor(DType.BF16, 4096),
    )
    kinds = (np.float32, np.float32, np.int32, np.uint16)
    constants = {
        f"c{k}": Constant(
            f"c{k}", type_, np.zeros([d.value for d in type_.shape], kind)
        )
        for k, (type_, kind) in enumerate(zip(types, kinds, strict=True))
    }
    module = Module(graphs={"main": graph}, constants=constants)
    path = tmp_path / "module.ir"
    write_module(path, module)
    assert len(list((tmp_path / "weights").iterdir())) == 1
    back = read_module(path)
    for name, constant in constants.items():
        found = back.constants[name]
        assert found.type == constant.type and found.data.dtype == constant.data.dtype
        np.testing.assert_array_equal(found.data, constant.data)
