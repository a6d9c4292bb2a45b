"""Index maps against NumPy: symbolic indices, evaluated at every position."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from pliant.ir.access import (
    Index,
    Space,
    divide,
    flatten,
    linear_coefficient,
    numel,
    pull,
    reshape_index,
    segments,
    unflatten,
)
from pliant.ir.build import Builder
from pliant.ir.graph import Op
from pliant.ir.types import DType, tensor
from pliant.sym import Expr, Facts, as_expr, eq, floordiv, le, mod, sym

A, B, C = sym("a"), sym("b"), sym("c")
ENVS = [
    {"a": 1, "b": 1, "c": 1},
    {"a": 2, "b": 3, "c": 5},
    {"a": 4, "b": 1, "c": 3},
    {"a": 3, "b": 7, "c": 2},
]


def exprs(shape: Sequence[int | Expr]) -> tuple[Expr, ...]:
    return tuple(map(as_expr, shape))


def sizes(shape: Sequence[Expr], env: dict[str, int]) -> tuple[int, ...]:
    return tuple(d.evaluate(env) for d in shape)


def variables(shape: Sequence[Expr]) -> Index:
    return tuple(sym(f"i{k}") for k in range(len(shape)))


def space_of(shape: Sequence[Expr], facts: Facts | None = None) -> Space:
    return Space(facts or Facts(), {f"i{k}": d for k, d in enumerate(shape)})


def positions(
    shape: Sequence[Expr], env: dict[str, int]
) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    for index in itertools.product(*(range(d) for d in sizes(shape, env))):
        yield index, env | {f"i{k}": i for k, i in enumerate(index)}


def reshapes(
    here: tuple[Expr, ...], there: tuple[Expr, ...], facts: Facts | None = None
) -> Index:
    """Checks a reshape's index at every position of every environment."""
    index = reshape_index(variables(here), here, there, space_of(here, facts))
    assert len(index) == len(there)
    for env in ENVS:
        if facts is not None and not holds(facts, env):
            continue
        count = math.prod(sizes(here, env))
        assert count == math.prod(sizes(there, env))
        flat = np.arange(count).reshape(sizes(there, env))
        want = np.arange(count).reshape(sizes(here, env))
        for at, known in positions(here, env):
            got = tuple(i.evaluate(known) for i in index)
            assert flat[got] == want[at], (here, there, index, known)
            assert all(0 <= i < d for i, d in zip(got, flat.shape, strict=True))
    return index


def holds(facts: Facts, env: dict[str, int]) -> bool:
    return all(facts.canonical(d).evaluate(env) == env[str(d)] for d in (A, B, C))


def factorisations(number: int, rng: random.Random) -> tuple[int, ...]:
    """Random dims of that product, with axes of one element here and there."""
    dims: list[int] = []
    while number > 1:
        factor = rng.choice([f for f in range(2, number + 1) if number % f == 0])
        dims.append(factor)
        number //= factor
    for _ in range(rng.choice((0, 0, 1, 2))):
        dims.insert(rng.randint(0, len(dims)), 1)
    return tuple(dims)


@pytest.mark.parametrize("seed", range(60))
def test_constant_reshapes(seed: int) -> None:
    rng = random.Random(seed)
    number = rng.choice((1, 2, 6, 12, 24, 30, 36))
    here, there = factorisations(number, rng), factorisations(number, rng)
    reshapes(exprs(here), exprs(there))


@pytest.mark.parametrize("seed", range(60))
def test_symbolic_reshapes(seed: int) -> None:
    """The same factors in order, cut into other axes."""
    rng = random.Random(seed)
    factors = [as_expr(f) for f in (A, B, C, 2, 3, 4, 1)]
    row = [rng.choice(factors) for _ in range(rng.randint(1, 5))]

    def cut() -> tuple[Expr, ...]:
        dims: list[Expr] = []
        for factor in row:
            if dims and rng.random() < 0.5:
                dims[-1] = dims[-1] * factor
            else:
                dims.append(factor)
        if rng.random() < 0.3:
            dims.insert(rng.randint(0, len(dims)), as_expr(1))
        return tuple(dims)

    reshapes(cut(), cut())


def test_reshapes_that_cost_nothing() -> None:
    """Splitting and merging give sums of products, no division."""
    i, j, k = (sym(f"i{n}") for n in range(3))
    assert reshapes(exprs((A, 12, 64)), exprs((A, 768))) == (i, 64 * j + k)
    assert reshapes(exprs((A, B, C)), exprs((A * B, C))) == (i * B + j, k)
    split = reshapes(exprs((A, 768)), exprs((A, 12, 64)))
    assert split == (i, floordiv(j, 64), mod(j, 64))
    # What was merged comes apart again.
    space = space_of(exprs((A, B, C)))
    merged = reshape_index((i, j, k), exprs((A, B, C)), exprs((A * B * C,)), space)
    assert reshape_index(merged, exprs((A * B * C,)), exprs((A, B, C)), space) == (
        i,
        j,
        k,
    )


def test_reshape_by_a_proved_equality() -> None:
    """(a, b) and (b, a) are one shape if a == b."""
    facts = Facts().assume(eq(A, B))
    index = reshape_index(variables((A, B)), (A, B), (B, A), space_of((A, B), facts))
    assert index == variables((A, B))


def test_transposing_reshape() -> None:
    reshapes((A, B), (B, A))
    reshapes((A, as_expr(6)), (as_expr(6), A))
    reshapes((2 * A, as_expr(3)), (as_expr(3), 2 * A))
    reshapes((A * B, C), (C, A * B))


def test_segments() -> None:
    def runs(a: Sequence[int | Expr], b: Sequence[int | Expr]) -> list[tuple[int, int]]:
        found = segments(exprs(a), exprs(b), Facts())
        assert [r for x, _ in found for r in x] == list(range(len(a)))
        assert [r for _, y in found for r in y] == list(range(len(b)))
        return [(len(x), len(y)) for x, y in found]

    assert runs((A, B, 12, 64), (A, B, 768)) == [(1, 1), (1, 1), (2, 1)]
    assert runs((A, B), (B, A)) == [(2, 2)]
    assert runs((A, B), (A * B,)) == [(2, 1)]
    assert runs((A, 1, B), (A, B)) == [(1, 1), (2, 1)]
    assert runs((A, B), (A, 1, B)) == [(1, 1), (1, 2)]
    assert runs((), ()) == []
    assert runs((1, 1), ()) == [(2, 0)]
    assert runs((0, 3), (3, 0)) == [(1, 2), (1, 0)]
    assert runs((2, 0, 5), (0,)) == [(2, 1), (1, 0)]


@pytest.mark.parametrize("seed", range(40))
def test_segments_are_of_one_size(seed: int) -> None:
    rng = random.Random(seed)
    number = rng.choice((1, 6, 24, 36))
    here, there = factorisations(number, rng), factorisations(number, rng)
    for left, right in segments(exprs(here), exprs(there), Facts()):
        assert math.prod(here[k] for k in left) == math.prod(there[k] for k in right)


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 5), (7,), (2, 1, 3, 1)])
def test_unflatten(shape: tuple[int, ...]) -> None:
    position, dims = sym("i0"), exprs(shape)
    space = Space(Facts(), {"i0": as_expr(math.prod(shape))})
    index = unflatten(position, dims, space)
    for flat in range(math.prod(shape)):
        got = tuple(i.evaluate({"i0": flat}) for i in index)
        assert got == np.unravel_index(flat, shape)
    assert unflatten(as_expr(0), (), space) == ()
    back = flatten(variables(dims), dims)
    for at, known in positions(dims, {}):
        assert back.evaluate(known) == np.ravel_multi_index(at, shape)


def test_divide() -> None:
    """Exact wherever it is cut: whole * by + rest, 0 <= rest < by."""
    i, j = sym("i0"), sym("i1")
    cases: list[tuple[Expr, Expr]] = [
        (i * B + j, B),
        (i * 6 + j, as_expr(3)),
        (i * 2 + 1, as_expr(2)),
        (i * B * 2 + j * 2, 2 * B),
        (i + 5, as_expr(4)),
        (i * C + j, C),
        (i - 3, as_expr(2)),
        (A * B - 1 - i, A),
        (i * j, as_expr(3)),
    ]
    for e, by in cases:
        whole, rest = divide(e, by, space_of((A, B)))
        for env in ENVS:
            for _, known in positions((A, B), env):
                value, size = e.evaluate(known), by.evaluate(known)
                got = whole.evaluate(known), rest.evaluate(known)
                assert got == divmod(value, size), (e, by, known)


def test_at_least() -> None:
    """An answer is right at every position; no answer is always allowed."""
    i, j = sym("i0"), sym("i1")
    space = space_of((A, B))
    edges = [i, j, i - j, A - i, A - 1 - i, B * i + j, A * B - 1 - B * i - j, i * j]
    edges += [i - A, j + 2, 3 - i, B - i, i - 1, mod(i, 3), -mod(i, 3), floordiv(j, 2)]
    for e, low in itertools.product(edges, (as_expr(0), as_expr(1), as_expr(-1), j)):
        answer = space.at_least(e, low)
        for env in ENVS:
            for _, known in positions((A, B), env):
                true = e.evaluate(known) >= low.evaluate(known)
                assert answer is None or answer is true, (e, low, known)
    assert space.at_least(A - 1 - i, as_expr(0)) is True
    assert space.at_least(A * B - 1 - B * i - j, as_expr(0)) is True
    assert space.at_least(i - A, as_expr(0)) is False


def test_linear_coefficient() -> None:
    i = sym("i0")
    assert linear_coefficient(B * i + 3, "i0") == B
    assert linear_coefficient(as_expr(5), "i0") == as_expr(0)
    assert linear_coefficient(i * i, "i0") is None
    assert linear_coefficient(floordiv(i, 2), "i0") is None
    assert linear_coefficient(mod(i, 2), "i0") is None
    assert linear_coefficient(i * (i - 1), "i0") is None  # 0 at both 0 and 1


def test_numel() -> None:
    facts = Facts().assume(eq(A, B))
    assert numel((A, C), facts) == numel((C, B), facts)
    assert numel((), facts) == as_expr(1)


def moves(b: Builder) -> Iterator[Op]:
    x = b.param("x", tensor(DType.F32, A, B, 6))
    one = b.param("one", tensor(DType.F32, 1, B))
    yield from ops(b, b.transpose(x, (2, 0, 1)))
    yield from ops(b, b.reshape(x, (A * B, 2, 3)))
    yield from ops(b, b.reshape(x, (A, 6 * B)))
    yield from ops(b, b.reshape(x, (B, A, 6)))
    yield from ops(b, b.slice_axis(x, 2, 1, 2, 2))
    yield from ops(b, b.slice_axis(x, 0, A - 1, 1))
    yield from ops(b, b.emit("flip", x, axes=(0, 2)))
    yield from ops(b, b.broadcast(one, (A, C, B), (0, 2)))
    yield from ops(b, b.broadcast(one, (1, C, B), (0, 2)))


def ops(b: Builder, _: object) -> Iterator[Op]:
    yield b.ops[-1]


def test_pull() -> None:
    for op in moves(Builder()):
        (x,), shape = op.operands, op.result.shape
        index = pull(op, variables(shape), space_of(shape))
        for env in ENVS:
            data = np.arange(math.prod(sizes(x.shape, env))).reshape(
                sizes(x.shape, env)
            )
            want = moved(op, data, sizes(shape, env), env)
            for at, known in positions(shape, env):
                got = tuple(i.evaluate(known) for i in index)
                assert data[got] == want[at], (op.name, index, known)


def moved(
    op: Op, x: np.ndarray, shape: tuple[int, ...], env: dict[str, int]
) -> np.ndarray:
    match op.name:
        case "transpose":
            return x.transpose(op.ints_attr("perm"))
        case "reshape":
            return x.reshape(shape)
        case "flip":
            return np.flip(x, op.ints_attr("axes"))
        case "broadcast":
            lifted = [1] * len(shape)
            for size, axis in zip(x.shape, op.ints_attr("axes"), strict=True):
                lifted[axis] = size
            return np.broadcast_to(x.reshape(lifted), shape)
        case _:
            starts = sizes(op.dims_attr("starts"), env)
            cuts = zip(starts, shape, op.ints_attr("steps"), strict=True)
            return x[tuple(slice(s, s + n * step, step) for s, n, step in cuts)]


def test_a_row_less_one() -> None:
    """The rows of (batch, n - 1) as one axis, and back: no quotient is left."""
    n, outer, inner = sym("n"), sym("i"), sym("j")
    space = Space(Facts().assume(le(1, n)), {"i": sym("batch"), "j": n - 1})
    assert divide(outer * n - outer + inner, n - 1, space) == (outer, inner)


def test_an_axis_without_elements() -> None:
    space = Space(Facts(), {})
    assert divide(A, as_expr(0), space) == (0, 0)
    assert unflatten(A, exprs((B, 0, 3)), space)[1:] == (0, mod(A, 3))
