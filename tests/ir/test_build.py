"""The builder's helpers: broadcasting, matmul, names, constants."""

import numpy as np
import pytest

from pliant.errors import ShapeError
from pliant.ir.build import Builder, facts_of
from pliant.ir.graph import Constant
from pliant.ir.types import DType, tensor
from pliant.sym import eq, sym

F = DType.F32
n, m, k = sym("n"), sym("m"), sym("k")


def shape_of(value):
    return str(list(value.shape))


def test_broadcast_follows_numpy_and_guards_the_rest():
    b = Builder()
    assert str(b.broadcast_shapes((n, 1), (8,), ())) == "(n, 8)"
    assert not b.guards
    assert str(b.broadcast_shapes((n,), (m,))) == "(n,)"
    assert [str(g.cond) for g in b.guards] == ["n == m"]
    with pytest.raises(ShapeError, match="3 == 4"):
        b.broadcast_shapes((3,), (4,))


def test_size_zero_broadcasts_like_any_other():
    b = Builder()
    assert str(b.broadcast_shapes((0, 1), (1, 5))) == "(0, 5)"


def test_binary_and_select_broadcast():
    b = Builder()
    x, y = b.param("x", tensor(F, n, 1, 8)), b.param("y", tensor(F, m, 1))
    assert shape_of(b.binary("add", x, y)) == "[n, m, 8]"
    cond = b.param("c", tensor(DType.BOOL, 8))
    assert shape_of(b.select(cond, x, b.scalar(0, F))) == "[n, 1, 8]"


@pytest.mark.parametrize(
    ("left", "right", "want"),
    [
        ((k,), (k,), "[]"),
        ((k,), (k, n), "[n]"),
        ((m, k), (k,), "[m]"),
        ((m, k), (k, n), "[m, n]"),
        ((2, m, k), (k, n), "[2, m, n]"),
        ((k,), (5, k, n), "[5, n]"),
        ((5, m, k), (k,), "[5, m]"),
        ((7, 1, m, k), (3, k, n), "[7, 3, m, n]"),
    ],
)
def test_matmul_takes_ranks_as_torch_does(left, right, want):
    b = Builder()
    x, y = b.param("x", tensor(F, *left)), b.param("y", tensor(F, *right))
    assert shape_of(b.matmul(x, y)) == want
    assert not b.guards


def test_helpers_that_change_nothing_emit_nothing():
    b = Builder()
    x = b.param("x", tensor(F, n, 8))
    for same in (
        b.cast(x, F),
        b.reshape(x, (n, 8)),
        b.transpose(x, (0, 1)),
        b.broadcast_to(x, (n, 8)),
        b.slice_axis(x, 0, 0, n),
        b.concat([x], 0),
        b.reduce("sum", x, ()),
    ):
        assert same is x
    assert not b.ops


def test_axes_count_from_either_end():
    b = Builder()
    x = b.param("x", tensor(F, n, 8, m))
    assert shape_of(b.reduce("sum", x, [-1, 0])) == "[8]"
    assert shape_of(b.reduce("sum", x)) == "[]"
    assert shape_of(b.unsqueeze(x, -1)) == "[n, 8, m, 1]"
    assert shape_of(b.squeeze(b.unsqueeze(x, 1), 1)) == "[n, 8, m]"
    assert shape_of(b.swap(x, -1, 0)) == "[m, 8, n]"
    assert shape_of(b.slice_axis(x, 1, 1, 3, 2)) == "[n, 3, m]"
    assert shape_of(b.mean(x, [1], keepdims=True)) == "[n, 1, m]"


def test_names_and_locations():
    b = Builder()
    x = b.param("x", tensor(F, n))
    with b.at("model.py:7"):
        y = b.unary("exp", b.unary("exp", x))
    z = b.unary("exp", y, loc="here")
    assert [v.name for op in b.ops for v in op.results] == ["exp", "exp_1", "exp_2"]
    assert [op.loc for op in b.ops] == ["model.py:7", "model.py:7", "here"]
    assert b.finish("main", [z]).results == (z,)


def test_a_constant_is_loaded_once():
    b = Builder()
    weight = Constant("w", tensor(F, 2), np.zeros(2, np.float32))
    assert b.constant(weight) is b.constant(weight)
    assert b.constants == {"w": weight}
    assert len(b.ops) == 1


def test_constraints_of_a_graph_are_facts():
    b = Builder()
    x, y = b.param("x", tensor(F, n)), b.param("y", tensor(F, m))
    graph = b.finish("main", [b.binary("add", x, y)])
    assert len(graph.constraints) == 1
    assert facts_of(graph).prove(eq(n, m)) is True


def test_fresh_symbols_avoid_those_in_use():
    b = Builder()
    x = b.param("x", tensor(DType.BOOL, sym("u0")))
    assert str(b.emit("nonzero", x).shape[0]) == "u1"
    inner = Builder.within(b.finish("main", []))
    assert str(inner.fresh_symbol("u")) == "u2"
