"""Random programs with nested regions and sizes of data, made from a seed.

    program = made(seed)            # @main(%x: f32[n, m], %y: f32[n], %z: f32[])
    arrays = inputs(seed, n, m)

Branches, whiles, loops and scans are inside one another, with sorts, sums, gathers and
sizes of data at every level. All numbers are whole and small, so that every order of
additions gives the same, and a branch never depends on rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Module, Value
from pliant.ir.types import DType, TensorType
from pliant.sym import Expr, Guard, le, minimum, sym

Array = np.ndarray[Any, Any]

F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL
LARGEST = 9.0  # numbers are cut to this
DEEPEST = 2
ROW = 2**32 - 1  # elements of a row that is sorted
N, M = sym("n"), sym("m")
SHAPES: tuple[tuple[Expr, ...], ...] = ((), (N,), (N, M))


class _Maker:
    """Adds ops to a graph or to a region; `values` are what they may read."""

    def __init__(
        self, b: Builder, rng: random.Random, values: Sequence[Value], depth: int
    ) -> None:
        self.b, self.rng, self.depth = b, rng, depth
        self.values = list(values)
        self.loose: list[Value] = []  # values of sizes of data, that main may return

    # ---- pieces

    def pick(self, rank: int | None = None) -> Value:
        """A value of floats, mostly one of the last made."""
        fits = [v for v in self.values if v.dtype is F32]
        fits = [v for v in fits if rank is None or v.type.rank == rank]
        return self.rng.choice(fits[-6:])

    def cut(self, x: Value) -> Value:
        ends = (self.b.full(s * LARGEST, F32, x.shape) for s in (1, -1))
        high, low = ends
        return self.b.binary("maximum", self.b.binary("minimum", x, high), low)

    def keep(self, x: Value) -> Value:
        self.values.append(x)
        return x

    def positive(self, x: Value) -> Value:
        return self.b.binary("gt", x, self.b.full(0.0, F32, x.shape))

    def total(self, x: Value) -> Value:
        return self.cut(self.b.reduce("sum", x, tuple(range(x.type.rank)), False))

    def as_shape(self, x: Value, shape: Sequence[Expr]) -> Value:
        """Something made of x that has another shape."""
        if tuple(x.shape) == tuple(shape):
            return x
        return self.b.broadcast_to(self.total(x), tuple(shape))

    # ---- ops

    def unary(self) -> Value:
        return self.b.unary(self.rng.choice(("neg", "abs")), self.pick())

    def binary(self) -> Value:
        x = self.pick()
        y = self.as_shape(self.pick(), x.shape)
        op = self.rng.choice(("add", "sub", "mul", "maximum", "minimum"))
        return self.cut(self.b.binary(op, x, y))

    def reduced(self) -> Value:
        x = self.pick()
        if x.type.rank == 0:
            return self.cut(self.b.binary("add", x, x))
        axis = self.rng.randrange(x.type.rank)
        found = self.b.reduce("sum", x, (axis,), False)
        known = tuple(found.shape) in SHAPES or found.type.rank == 0
        return self.cut(found) if known else self.total(found)

    def running(self) -> Value:
        x = self.pick(1)
        return self.cut(self.b.emit("cumulate", x, op="sum", axis=0))

    def sort(self) -> Value:
        x = self.pick(self.rng.choice((1, 2)))
        axis = self.rng.randrange(x.type.rank)
        values, places = self.b.emit_multi(
            "sort", x, axis=axis, descending=self.rng.random() < 0.5
        )
        if self.rng.random() < 0.5:
            return values
        return self.cut(self.b.cast(places, F32))

    def top(self) -> Value:
        x = self.pick(1)
        k = minimum(x.shape[0], self.rng.choice((1, 3)))
        values, _ = self.b.emit_multi("top", x, axis=0, k=k, largest=True)
        return self.total(values)

    def product(self) -> Value:
        x = self.pick(2)
        square = self.b.emit("matmul", x, self.b.transpose(x, (1, 0)))
        return self.cut(self.b.reduce("sum", square, (1,), False))

    # ---- sizes of data

    def found(self) -> Value:
        """The elements that are positive, and something made of them."""
        x = self.pick(1)
        places = self.b.emit("nonzero", self.positive(x))
        count = places.shape[0]
        flat = self.b.reshape(places, (count,))
        return self.of_size(self.b.emit("index", x, flat))

    def first(self) -> Value:
        """As many elements as are positive, from the front."""
        x = self.pick(1)
        ones = self.b.cast(self.positive(x), I64)
        number = self.b.reduce("sum", ones, (0,), False)
        size = self.b.emit("extent", number, most=x.shape[0]).shape[0]
        return self.of_size(self.b.slice_axis(x, 0, 0, size))

    def of_size(self, x: Value) -> Value:
        """What becomes of a value whose size data decide: in the end, a number."""
        inner = _Maker(self.b, self.rng, [*self.values, x], self.depth)
        plain = [inner.unary, inner.running, inner.sort]
        if self.can_nest():
            plain += [inner.branch, inner.while_, inner.loop]
        for _ in range(self.rng.randrange(3)):
            made = self.rng.choice(plain)()
            if made.shape == x.shape:
                inner.keep(made)
        if self.depth == 0:
            self.loose.append(inner.values[-1])
        return self.total(inner.values[-1])

    # ---- regions

    def inside(
        self,
        given: Sequence[Value],
        make: Callable[[_Maker, list[Value]], list[Value]],
        name: str,
    ) -> Graph:
        child = self.b.child()
        params = [child.param("given", v.type) for v in given]
        made = make(_Maker(child, self.rng, params, self.depth + 1), params)
        return child.finish(name, made)

    def steps(self, like: Sequence[Value]) -> list[Value]:
        """A few ops, and a value for each of these types."""
        for _ in range(self.rng.randint(1, 2)):
            self.step()
        rng, b = self.rng, self.b
        out: list[Value] = []
        for value in like:
            x = self.as_shape(rng.choice(self.floats()[-4:]), value.shape)
            out.append(b.unary("neg", x) if rng.random() < 0.3 else self.cut(x))
        return out

    def can_nest(self) -> bool:
        """Whether a region may begin here: it reads a value of each rank."""
        ranks = {v.type.rank for v in self.floats()[-6:]}
        return ranks == {0, 1, 2} and self.depth < DEEPEST

    def floats(self) -> list[Value]:
        return [v for v in self.values if v.dtype is F32]

    def operands(self) -> list[Value]:
        """One value of each shape, for a region to read."""
        return [self.pick(rank) for rank in range(3)]

    def branch(self) -> Value:
        given = self.operands()
        like = [self.rng.choice(given)]
        test = self.positive(self.total(self.pick()))
        then, other = (
            self.inside(given, lambda m, _: m.steps(like), name)
            for name in ("then", "else")
        )
        (made,) = self.b.emit_multi("if", test, *given, regions=(then, other))
        return made

    def while_(self) -> Value:
        given = self.operands()
        most = self.rng.randrange(4)

        def test(m: _Maker, params: list[Value]) -> list[Value]:
            early = m.b.binary("lt", m.total(params[2]), m.b.full(LARGEST, F32))
            more = m.b.binary("lt", params[0], m.b.full(most, I64))
            return [m.b.binary("logical_and", early, more)]

        def body(m: _Maker, params: list[Value]) -> list[Value]:
            count, *others = params
            after = m.steps(others)
            after[-1] = others[-1] if self.rng.random() < 0.5 else after[-1]
            return [m.b.binary("add", count, m.b.full(1, I64)), *after]

        start = self.b.full(0, I64)
        carried = [start, *given]
        regions = [
            self.inside(carried, test, "test"),
            self.inside(carried, body, "body"),
        ]
        made = self.b.emit_multi("while", *carried, regions=regions)
        return made[1 + self.rng.randrange(len(given))]

    def loop(self) -> Value:
        given = self.operands()
        ones = self.b.cast(self.positive(self.pick(1)), I64)
        count = self.b.reduce("sum", ones, (0,), False)
        count = self.b.binary("minimum", count, self.b.full(self.rng.randrange(4), I64))

        def body(m: _Maker, params: list[Value]) -> list[Value]:
            number, *others = params
            m.keep(m.b.cast(number, F32))
            return m.steps(others)

        region = self.inside([count, *given], body, "body")
        made = self.b.emit_multi("loop", count, *given, regions=(region,))
        return self.rng.choice(made)

    def scan(self) -> Value:
        """Over the rows of a tensor (n, m): carried (n,), each row (m,)."""
        carried, rows = self.pick(1), self.pick(2)
        whole = self.pick(2)

        def body(m: _Maker, params: list[Value]) -> list[Value]:
            state, kept, row = params
            after, out = m.steps([state, row])
            return [after, kept, out]

        child = self.b.child()
        types = (carried.type, whole.type, rows.type.with_shape(rows.shape[1:]))
        params = [child.param("given", type) for type in types]
        made = body(_Maker(child, self.rng, params, self.depth + 1), params)
        region = child.finish("body", made)
        last, _, stacked = self.b.emit_multi(
            "scan",
            *(carried, whole, rows),
            regions=(region,),
            rounds=rows.shape[0],
            scanned=1,
            reverse=self.rng.random() < 0.5,
        )
        return self.rng.choice((last, stacked))

    # ---- one step

    def step(self) -> None:
        plain = [self.unary, self.binary, self.reduced]
        vector = [v for v in self.floats() if v.type.rank == 1]
        matrix = [v for v in self.floats() if v.type.rank == 2]
        if vector:
            plain += [self.running, self.top, self.found, self.first]
        if vector and matrix:
            plain += [self.sort, self.product]
        if self.can_nest() and self.rng.random() < 0.5:
            regions = (self.branch, self.while_, self.loop, self.scan)
            self.keep(self.rng.choice(regions)())
        else:
            self.keep(self.rng.choice(plain)())


def made(seed: int) -> Module:
    """A program of one graph."""
    rng, b = random.Random(seed), Builder()
    for dim in (N, M):
        b.guards.append(Guard(le(dim, ROW), (), ""))
        b.facts = b.facts.assume(le(dim, ROW))
    params = [
        b.param("x", TensorType(F32, (N, M))),
        b.param("y", TensorType(F32, (N,))),
        b.param("z", TensorType(F32, ())),
    ]
    maker = _Maker(b, rng, params, 0)
    for _ in range(rng.randint(3, 6)):
        maker.step()
    results = dict.fromkeys([*maker.floats()[3:][-3:], *maker.loose[-2:]])
    return Module({"main": b.finish("main", results)}, constants=b.constants)


def inputs(seed: int, n: int, m: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    shapes: tuple[tuple[int, ...], ...] = ((n, m), (n,), ())
    return [rng.integers(-4, 5, shape).astype(np.float32) for shape in shapes]
