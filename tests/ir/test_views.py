"""Strided views: what they say of memory is what NumPy reads there."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Module, Value
from pliant.ir.interp import run_graph
from pliant.ir.types import DType, tensor
from pliant.ir.views import View, resolve
from pliant.sym import Facts, as_expr, sym

A, B = sym("a"), sym("b")
ENVS = [{"a": 1, "b": 1}, {"a": 3, "b": 4}, {"a": 2, "b": 5}]


def view_of(b: Builder, value: Value) -> View | None:
    return resolve(value, b.finish("main", [value]).producers(), Facts())


def reads(view: View, base: np.ndarray, env: dict[str, int]) -> np.ndarray:
    """The viewed elements, each at its address."""
    shape = [d.evaluate(env) for d in view.shape]
    strides = [s.evaluate(env) for s in view.strides]
    offset, flat = view.offset.evaluate(env), base.reshape(-1)
    out = np.empty(shape, base.dtype)
    for index in itertools.product(*map(range, shape)):
        at = offset + sum(i * s for i, s in zip(index, strides, strict=True))
        assert 0 <= at < flat.size
        out[index] = flat[at]
    return out


def check(b: Builder, value: Value) -> View | None:
    view = view_of(b, value)
    if view is None:
        return None
    graph: Graph = b.finish("main", [value])
    for env in ENVS:
        shapes = [[d.evaluate(env) for d in p.shape] for p in graph.params]
        inputs = [np.arange(math.prod(s), dtype=np.float32).reshape(s) for s in shapes]
        (want,) = run_graph(Module({"main": graph}), inputs)
        base = inputs[graph.params.index(view.base)]
        np.testing.assert_array_equal(reads(view, base, env), want)
        if view.is_contiguous():
            np.testing.assert_array_equal(
                want.reshape(-1), base.reshape(-1)[: want.size]
            )
    return view


def start() -> tuple[Builder, Value]:
    b = Builder()
    return b, b.param("x", tensor(DType.F32, A, B, 6))


def test_a_value_is_its_own_view() -> None:
    b, x = start()
    view = check(b, x)
    assert view is not None and view.base is x and view.is_contiguous()


def test_each_move() -> None:
    b, x = start()
    moved = [
        b.transpose(x, (2, 0, 1)),
        b.slice_axis(x, 2, 1, 2, 2),
        b.slice_axis(x, 0, A - 1, 1),
        b.emit("flip", x, axes=(0, 2)),
        b.broadcast(x, (4, A, B, 6), (1, 2, 3)),
        b.reshape(x, (A * B, 2, 3)),
        b.reshape(x, (A, 6 * B)),
        b.unsqueeze(x, 1),
    ]
    for value in moved:
        assert check(b, value) is not None


def test_projection_to_heads() -> None:
    """(b, s, 3 * heads * head) cut, split and turned: strides only."""
    b = Builder()
    x = b.param("x", tensor(DType.F32, A, B, 24))
    split = b.reshape(x, (A, B, 3, 2, 4))
    turned = b.transpose(split, (2, 0, 3, 1, 4))
    key = b.reshape(b.slice_axis(turned, 0, 1, 1), (A, 2, B, 4))
    view = check(b, key)
    assert view is not None
    assert view.offset == as_expr(8)
    assert view.strides == (24 * B, as_expr(4), as_expr(24), as_expr(1))


def test_what_needs_a_copy() -> None:
    b, x = start()
    turned = b.transpose(x, (1, 0, 2))
    assert check(b, b.reshape(turned, (A * B, 6))) is None
    assert check(b, b.reshape(turned, (B, 6 * A))) is None
    assert check(b, b.reshape(turned, (B, A, 2, 3))) is not None
    cut = b.slice_axis(x, 2, 0, 5)
    assert check(b, b.reshape(cut, (A, 5 * B))) is None
    spread = b.broadcast(b.slice_axis(x, 2, 0, 1), (A, B, 6), (0, 1, 2))
    assert check(b, b.reshape(spread, (A, 6 * B))) is None


def test_contiguous() -> None:
    b, x = start()
    assert check(b, b.reshape(x, (A, B, 2, 3))).is_contiguous()
    assert check(b, b.slice_axis(x, 0, 0, 1)).is_contiguous()
    shifted = check(b, b.slice_axis(x, 0, A - 1, 1))
    assert shifted is not None and not shifted.is_contiguous()
    turned = check(b, b.transpose(x, (1, 0, 2)))
    assert turned is not None and not turned.is_contiguous()
    b = Builder()
    flat = b.param("y", tensor(DType.F32, 1, B, 6))
    assert check(b, b.transpose(flat, (1, 0, 2))).is_contiguous()


@pytest.mark.parametrize("seed", range(40))
def test_random_chains(seed: int) -> None:
    rng = random.Random(seed)
    b, value = start()
    for _ in range(rng.randint(1, 5)):
        rank = value.type.rank
        axis = rng.randrange(rank)
        match rng.randrange(6):
            case 0:
                perm = list(range(rank))
                rng.shuffle(perm)
                value = b.transpose(value, perm)
            case 1:
                value = b.emit("flip", value, axes=(axis,))
            case 2:
                size = value.shape[axis]
                if size.is_const and size.value > 2:
                    value = b.slice_axis(value, axis, 1, size.value // 2, 2)
            case 3:
                value = b.unsqueeze(value, axis)
            case 4:
                axes = [k for k in range(rank + 1) if k != axis]
                shape = [*value.shape[:axis], 2, *value.shape[axis:]]
                value = b.broadcast(value, shape, axes)
            case _:
                if axis + 1 < rank:
                    joined = value.shape[axis] * value.shape[axis + 1]
                    shape = [*value.shape[:axis], joined, *value.shape[axis + 2 :]]
                    value = b.reshape(value, shape)
    check(b, value)
