"""Reverse mode: graphs it makes, and their numbers against differences in fp64."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.context import Context
from pliant.errors import UnsupportedOpError
from pliant.ir.graph import Graph, Module
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_graph
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_graph
from pliant.machine.target import host
from pliant.options import Options
from pliant.passes.canonicalize import canonicalize
from pliant.passes.gradient import gradient
from pliant.passes.recompute import forward_values, recompute

CX = Context(Options(), host())


def differentiated(text: str, *wrt: str) -> Graph:
    graph = parse_graph(text)
    params = {v.name: v for v in graph.params}
    made = canonicalize(gradient(graph, [params[name] for name in wrt], CX), CX)
    verify(Module({"main": made}), Stage.DECOMPOSED)
    return made


LINEAR = """graph @main(%x: f64[n, 3], %w: f64[2, 3]) {
  %t: f64[3, 2] = transpose(%w) {perm = (1, 0)}
  %y: f64[n, 2] = matmul(%x, %t)
  %l: f64[] = reduce(%y) {op = "sum", axes = (0, 1), keepdims = false}
  return %l
}
"""


def test_a_weight_has_its_gradient_in_its_own_layout() -> None:
    """dW = g.T x: no transposed copy behind it."""
    out = print_graph(differentiated(LINEAR, "w"))
    assert "%matmul: f64[2, 3] = matmul(%full_3, %x)\n  return %l, %matmul" in out
    assert out.count("transpose(") == 1


# (text, parameters); every op of the second half of the table at once, in f64.
GRAPHS: dict[str, str] = {
    "linear": LINEAR,
    "norm": """graph @main(%x: f64[n, 5], %w: f64[5]) {
  %q: f64[n, 5] = mul(%x, %x)
  %s: f64[n, 1] = reduce(%q) {op = "sum", axes = (1), keepdims = true}
  %r: f64[n, 1] = rsqrt(%s)
  %b: f64[n, 5] = broadcast(%r) {shape = [n, 5], axes = (0, 1)}
  %y: f64[n, 5] = mul(%x, %b)
  %v: f64[n, 5] = broadcast(%w) {shape = [n, 5], axes = (1)}
  %z: f64[n, 5] = mul(%y, %v)
  %t: f64[n, 5] = tanh(%z)
  %l: f64[] = reduce(%t) {op = "sum", axes = (0, 1), keepdims = false}
  return %l
}
""",
    "softmax": """graph @main(%x: f64[n, 4], %w: f64[n, 4]) {
  %a: f64[n, 4] = mul(%x, %w)
  %m: f64[n, 1] = reduce(%a) {op = "max", axes = (1), keepdims = true}
  %b: f64[n, 4] = broadcast(%m) {shape = [n, 4], axes = (0, 1)}
  %d: f64[n, 4] = sub(%a, %b)
  %e: f64[n, 4] = exp(%d)
  %s: f64[n, 1] = reduce(%e) {op = "sum", axes = (1), keepdims = true}
  %c: f64[n, 4] = broadcast(%s) {shape = [n, 4], axes = (0, 1)}
  %y: f64[n, 4] = div(%e, %c)
  %z: f64[n, 4] = mul(%y, %x)
  %l: f64[] = reduce(%z) {op = "sum", axes = (0, 1), keepdims = false}
  return %l
}
""",
    "moved": """graph @main(%x: f64[n, 6], %w: f64[n, 6]) {
  %a: f64[n, 6] = mul(%x, %w)
  %b: f64[n, 2] = slice(%a) {starts = [0, 1], shape = [n, 2], steps = (1, 2)}
  %c: f64[n, 2] = slice(%a) {starts = [0, 4], shape = [n, 2], steps = (1, 1)}
  %d: f64[n, 4] = concat(%b, %c) {axis = 1}
  %e: f64[n, 4] = flip(%d) {axes = (1)}
  %f: f64[n, 7] = pad(%e) {low = [0, 1], high = [0, 2], value = 1.5}
  %g: f64[n, 7] = mul(%f, %f)
  %h: f64[n, 7] = cumulate(%g) {op = "sum", axis = 1}
  %i: f64[7, n] = transpose(%h) {perm = (1, 0)}
  %j: f64[7] = reduce(%i) {op = "sum", axes = (1), keepdims = false}
  %k: f64[7] = mul(%j, %j)
  %l: f64[] = reduce(%k) {op = "sum", axes = (0), keepdims = false}
  return %l
}
""",
    "batches": """graph @main(%x: f64[n, 2, 3], %w: f64[1, 3, 4]) {
  %y: f64[n, 2, 4] = matmul(%x, %w)
  %z: f64[n, 2, 4] = sigmoid(%y)
  %l: f64[] = reduce(%z) {op = "sum", axes = (0, 1, 2), keepdims = false}
  return %l
}
""",
    "strided": """graph @main(%x: f64[n, 2, 6], %w: f64[2, 1, 3]) {
  %y: f64[n, 2, 3] = conv(%x, %w) {stride = (2), low = (0), high = (1), """
    """dilation = (1), groups = 2}
  %z: f64[n, 2, 3] = tanh(%y)
  %l: f64[] = reduce(%z) {op = "sum", axes = (0, 1, 2), keepdims = false}
  return %l
}
""",
    "transposed": """graph @main(%x: f64[n, 2, 3], %w: f64[2, 1, 2]) {
  %y: f64[n, 2, 8] = conv_transpose(%x, %w) {stride = (3), low = (1), high = (0), """
    """dilation = (1), groups = 2, extra = (1)}
  %z: f64[n, 2, 8] = tanh(%y)
  %l: f64[] = reduce(%z) {op = "sum", axes = (0, 1, 2), keepdims = false}
  return %l
}
""",
    "pools": """graph @main(%x: f64[n, 5], %w: f64[n, 5]) {
  %a: f64[n, 5] = mul(%x, %w)
  %b: f64[n, 3] = pool(%a) {op = "max", window = (3), stride = (2), low = (1), """
    """high = (1), dilation = (1), include_pad = true}
  %c: f64[n, 3] = pool(%a) {op = "mean", window = (2), stride = (2), low = (0), """
    """high = (1), dilation = (1), include_pad = false}
  %d: f64[n, 3] = mul(%b, %c)
  %l: f64[] = reduce(%d) {op = "sum", axes = (0, 1), keepdims = false}
  return %l
}
""",
}


def numbers(graph: Graph, n: int) -> list[np.ndarray]:
    random = np.random.default_rng(n)
    shapes = [[d.evaluate({"n": n}) for d in v.shape] for v in graph.params]
    return [random.normal(size=shape) for shape in shapes]


@pytest.mark.parametrize("n", [0, 1, 3, 7])
@pytest.mark.parametrize("name", GRAPHS)
def test_against_differences(name: str, n: int) -> None:
    text = GRAPHS[name]
    plain, made = parse_graph(text), differentiated(text, "x", "w")
    given, env = numbers(plain, n), {"n": n}
    loss, *grads = run_graph(Module({"main": made}), given, env=env)
    step = 1e-6
    for which, grad in enumerate(grads):
        assert grad.shape == given[which].shape
        for at in np.ndindex(grad.shape):
            ends = []
            for sign in (1, -1):
                moved = [x.copy() for x in given]
                moved[which][at] += sign * step
                ends.append(run_graph(Module({"main": plain}), moved, env=env)[0])
            slope = (ends[0] - ends[1]) / (2 * step)
            np.testing.assert_allclose(grad[at], slope, rtol=1e-5, atol=1e-5)
    (again,) = run_graph(Module({"main": plain}), given, env=env)
    assert loss == again


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("name", GRAPHS)
def test_recomputing_changes_no_bit(name: str, n: int) -> None:
    made = differentiated(GRAPHS[name], "x", "w")
    again = recompute(made, CX)
    verify(Module({"main": again}), Stage.DECOMPOSED)
    given = numbers(made, n)
    before = run_graph(Module({"main": made}), given, env={"n": n})
    after = run_graph(Module({"main": again}), given, env={"n": n})
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_kept() -> None:
    """Of x * rsqrt(sum x*x) * w: x and a number for each row, no product of them."""
    graph = recompute(differentiated(GRAPHS["norm"], "x", "w"), CX)
    ahead = forward_values(graph)
    kept = {
        v.name
        for op in graph.ops
        if not any(r in ahead for r in op.results)
        for v in op.operands
        if v in ahead
    }
    assert kept <= {"x", "w", "v", "s", "r"}, kept  # v is a view of w


def test_softmax_shift_is_no_path() -> None:
    out = print_graph(differentiated(GRAPHS["softmax"], "x"))
    assert "eq(" not in out  # which element the maximum was does not matter


def test_stop_gradient() -> None:
    made = differentiated(
        """graph @main(%w: f64[n]) {
  %s: f64[n] = stop_gradient(%w)
  %y: f64[n] = mul(%w, %s)
  %l: f64[] = reduce(%y) {op = "sum", axes = (0), keepdims = false}
  return %l
}
""",
        "w",
    )
    assert "stop_gradient" not in print_graph(made)
    w = np.array([1.0, -2.0, 3.0])
    _, grad = run_graph(Module({"main": made}), [w], env={"n": 3})
    np.testing.assert_array_equal(grad, w)


def test_ops_without_a_rule() -> None:
    with pytest.raises(UnsupportedOpError, match="while"):
        differentiated(
            """graph @main(%w: f64[n]) {
  %y: f64[n] = while(%w)
    region @test(%a: f64[n]) {
      %m: f64[] = reduce(%a) {op = "max", axes = (0), keepdims = false}
      %c: bool[] = isnan(%m)
      return %c
    }
    region @body(%a: f64[n]) {
      %b: f64[n] = neg(%a)
      return %b
    }
  %l: f64[] = reduce(%y) {op = "sum", axes = (0), keepdims = false}
  return %l
}
""",
            "w",
        )


def test_attention_from_a_row_has_no_rule() -> None:
    with pytest.raises(UnsupportedOpError, match="needs all rows, not those from p on"):
        differentiated(
            """graph @main(%q: f64[1, n, 4], %k: f64[1, m, 4], %p: f64[p]) {
  %y: f64[1, n, 4] = attention(%q, %k, %k) {scale = none, causal = true,
    masked = false, swapped = false, nan_rows = false, first = <p>}
  %l: f64[] = reduce(%y) {op = "sum", axes = (0, 1, 2), keepdims = false}
  return %l
}
""",
            "q",
        )


def test_products_at_computed_places_have_no_rule() -> None:
    """A quotient by the factor would be wrong where it is 0."""
    with pytest.raises(UnsupportedOpError, match="scatter"):
        differentiated(
            """graph @main(%i: i64[m], %w: f64[m, c]) {
  %y: f64[n, c] = scatter(%i, %w) {op = "prod", rows = <n>}
  %l: f64[] = reduce(%y) {op = "sum", axes = (0, 1), keepdims = false}
  return %l
}
""",
            "w",
        )


SCATTER = """graph @main(%i: i64[m], %w: f64[m, c], %v: f64[n, c]) {
  %y: f64[n, c] = scatter(%i, %w) {op = "sum", rows = <n>}
  %p: f64[n, c] = mul(%y, %v)
  %l: f64[] = reduce(%p) {op = "sum", axes = (0, 1), keepdims = false}
  return %l
}
"""


@pytest.mark.parametrize("m, n, c", [(0, 3, 2), (1, 1, 1), (7, 3, 5), (131, 17, 3)])
def test_scatter_add(m: int, n: int, c: int) -> None:
    """Every row that was added gets the gradient of where it went."""
    made = differentiated(SCATTER, "w")
    random = np.random.default_rng(m)
    i, v = random.integers(0, n, m), random.normal(size=(n, c))
    env = {"m": m, "n": n, "c": c}
    given = [i, random.normal(size=(m, c)), v]
    _, grad = run_graph(Module({"main": made}), given, env=env)
    np.testing.assert_array_equal(grad, v[i])


STRETCH = """graph @main(%x: f64[a, b], %y: f64[m, n]) {
  %s: f64[m, n] = stretch(%x) {shape = [m, n], axes = (0, 1)}
  %p: f64[m, n] = mul(%s, %y)
  %l: f64[] = reduce(%p) {op = "sum", axes = (0, 1), keepdims = false}
  return %l
}
"""


@pytest.mark.parametrize("wide", [(3, 4), (1, 5), (1, 1), (0, 3), (7, 0)])
@pytest.mark.parametrize("single", [(), (0,), (1,), (0, 1)])
def test_stretch(wide: tuple[int, int], single: tuple[int, ...]) -> None:
    """Summed over what the call repeats, and only that."""
    made = differentiated(STRETCH, "x")
    own = tuple(1 if k in single else size for k, size in enumerate(wide))
    env = dict(zip("abmn", (*own, *wide), strict=True))
    y = np.random.default_rng(0).normal(size=wide)
    _, grad = run_graph(Module({"main": made}), [np.ones(own), y], env=env)
    want = y.sum(single, keepdims=True) if single else y
    np.testing.assert_allclose(grad, want, rtol=1e-12)


GROUPED = """graph @main(%a: f64[s, 3], %b: f64[2, 3, 4], %ends: i64[2]) {
  %y: f64[s, 4] = grouped_matmul(%a, %b, %ends)
  %q: f64[s, 4] = mul(%y, %y)
  %l: f64[] = reduce(%q) {op = "sum", axes = (0, 1), keepdims = false}
  return %l
}
"""


def test_groups_of_rows_against_differences() -> None:
    """Each matrix sees the rows of its group alone; rows behind all groups, none."""
    forward = Module({"main": parse_graph(GROUPED)})
    both = Module({"main": differentiated(GROUPED, "a", "b")})
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((6, 3)), rng.standard_normal((2, 3, 4))]
    ends = np.array([2, 5])
    _, *found = run_graph(both, [*given, ends])
    for which, gradient_of in enumerate(found):
        for at in np.ndindex(gradient_of.shape):
            ways = []
            for step in (1e-6, -1e-6):
                moved = [array.copy() for array in given]
                moved[which][at] += step
                ways.append(run_graph(forward, [*moved, ends])[0])
            assert abs((ways[0] - ways[1]) / 2e-6 - gradient_of[at]) < 1e-6
