"""Loops, emitted as `lower/vectorize.py` decided.

A VECTOR loop runs `vectors.lanes` iterations as lanes, whatever the element types:

    for i in 0 .. n & -together step together     the main loop
    the tail                                      once, under a mask; or a scalar loop

A loop with a constant trip count of at most 1 is just its body.
"""

from __future__ import annotations

from collections.abc import Iterable

from pliant.codegen.llvm_dims import LaneIndex
from pliant.codegen.llvm_parallel import Parallel
from pliant.codegen.llvm_types import I32, I64, LLValue, Number, constant, iota, splat
from pliant.codegen.sizes import NO_WRAP, as_value
from pliant.codegen.transpose import exchange
from pliant.ir.loop_lanes import Copy, copy_in
from pliant.ir.loops import For, Kind, Rest, Vectors

# An unrolled loop adds to this many partial accumulators in turn.
PARTIALS = 4
# Adjacent squares that are unrolled; for more there is a loop over them.
SQUARES = 4


class Loops(Parallel):
    """Emits loops."""

    def for_(self, loop: For) -> None:
        begin, end = self.dims.evaluate(loop.begin), self.dims.evaluate(loop.end)
        known = isinstance(begin, int) and isinstance(end, int)
        if known and (loop.kind is Kind.UNROLL or end <= begin + loop.step):
            self.unrolled(loop, range(begin, end, loop.step))
            return
        match loop.kind, loop.vectors:
            case Kind.VECTOR, Vectors() as vectors:
                self.vector_loop(loop, vectors, begin, end)
            case Kind.EXCHANGE, Vectors() as vectors:
                self.exchange_loop(loop, vectors, begin, end)
            case Kind.PARALLEL, _:
                self.parallel_loop(loop, begin, end)
            case _:
                self.serial_loop(loop, begin, end)

    def unrolled(self, loop: For, numbers: Iterable[int]) -> None:
        for number in numbers:
            with self.region():
                self.dims.bind(loop.var, number)
                self.stmt(loop.body)

    def serial_loop(self, loop: For, begin: Number, end: Number) -> None:
        signed = not self.dims.is_nonnegative(loop.begin)
        with self.loop(as_value(begin), as_value(end), loop.step, loop.var) as counter:
            self.dims.bind(loop.var, counter, signed=signed)
            self.stmt(loop.body)

    # ---- vectors

    def vector_loop(
        self, loop: For, vectors: Vectors, begin: Number, end: Number
    ) -> None:
        if vectors.rest is Rest.HALVED:
            self.written_out(loop, vectors, begin, end)
            return
        if vectors.most is not None:
            self.written_out_masked(loop, vectors, begin, end)
            return
        lanes, trips = vectors.lanes, self.trips(loop, begin, end)
        whole = trips
        if vectors.rest is not Rest.WHOLE:
            whole = self.b.and_(trips, constant(I64, -vectors.together))
        zero = constant(I64, 0)
        with self.loop(zero, whole, vectors.together, loop.var) as at:
            base = self.first_lane(loop, begin, at)
            for copy in range(vectors.copies):
                self.copy = copy
                var = LaneIndex(base, loop.step, copy * lanes * loop.step)
                self.lanes_body(loop, var, lanes * vectors.jam)
            self.copy = 0
        if vectors.rest is Rest.MASKED:
            self.masked_rest(loop, vectors, begin, whole, trips)
        elif vectors.rest is Rest.SCALAR:
            self.scalar_rest(loop, vectors, begin, whole, trips)

    def lanes_body(
        self,
        loop: For,
        var: LaneIndex | Number,
        lanes: int,
        mask: LLValue | None = None,
    ) -> None:
        """The loop's body for one vector of iterations."""
        with self.region():
            self.dims.lanes = lanes
            signed = not self.dims.is_nonnegative(loop.begin)
            self.dims.bind(loop.var, var, signed=signed)
            self.mask = mask
            self.stmt(loop.body)

    def left_mask(self, left: LLValue, lanes: int) -> LLValue:
        """The mask of the lanes below a count."""
        b, most = self.b, constant(I64, lanes)
        few = b.select(b.icmp_signed("<", left, most), left, most)
        count = splat(b, b.trunc(few, I32), lanes)
        return b.icmp_signed("<", iota(I32, lanes), count)

    def masked_rest(
        self,
        loop: For,
        vectors: Vectors,
        begin: Number,
        whole: LLValue,
        trips: LLValue,
    ) -> None:
        lanes = vectors.lanes

        def rest(at: LLValue) -> None:
            mask = self.left_mask(self.b.sub(trips, at, flags=NO_WRAP), lanes)
            base = self.first_lane(loop, begin, at)
            self.lanes_body(loop, LaneIndex(base, loop.step), lanes, mask)

        if vectors.together == lanes:
            with self.when(self.b.icmp_signed("<", whole, trips)):
                rest(whole)
            return
        with self.loop(whole, trips, lanes, f"{loop.var}.rest") as at:
            rest(at)

    def scalar_rest(
        self,
        loop: For,
        vectors: Vectors,
        begin: Number,
        whole: LLValue,
        trips: LLValue,
    ) -> None:
        lanes = vectors.lanes
        if vectors.together > lanes:
            full = self.b.and_(trips, constant(I64, -lanes))
            with self.loop(whole, full, lanes, f"{loop.var}.vector") as at:
                base = self.first_lane(loop, begin, at)
                self.lanes_body(loop, LaneIndex(base, loop.step), lanes)
            whole = full
        with self.loop(whole, trips, 1, f"{loop.var}.rest") as at:
            self.lanes_body(loop, self.first_lane(loop, begin, at), 1)

    def written_out(
        self, loop: For, vectors: Vectors, begin: Number, end: Number
    ) -> None:
        """A constant trip count: whole vectors, then ever smaller powers of two."""
        assert isinstance(begin, int) and isinstance(end, int), loop.var
        at, lanes, number = begin, vectors.lanes, 0
        trips = len(range(begin, end, loop.step))
        while trips > 0:
            while lanes > trips:
                lanes //= 2
            self.copy = number % PARTIALS
            var = LaneIndex(at, loop.step) if lanes > 1 else at
            self.lanes_body(loop, var, lanes)
            at, trips, number = at + lanes * loop.step, trips - lanes, number + 1
        self.copy = 0

    def written_out_masked(
        self, loop: For, vectors: Vectors, begin: Number, end: Number
    ) -> None:
        """A run-time end: every possible vector, under a mask."""
        assert isinstance(begin, int) and vectors.most is not None, loop.var
        lanes, trips = vectors.lanes, self.trips(loop, begin, end)
        for first in range(0, vectors.most, lanes):
            left = self.b.sub(trips, constant(I64, first), flags=NO_WRAP)
            var = LaneIndex(begin + first * loop.step, loop.step)
            self.copy = first // lanes % PARTIALS
            with self.when(self.b.icmp_signed(">", left, constant(I64, 0))):
                self.lanes_body(loop, var, lanes, self.left_mask(left, lanes))
        self.copy = 0

    # ---- squares

    def exchange_loop(
        self, loop: For, vectors: Vectors, begin: Number, end: Number
    ) -> None:
        """Transposes whole squares; the remaining rows run as ordinary loops."""
        copy = copy_in(loop)
        assert copy is not None, loop.var
        b, lanes, first = self.b, vectors.lanes, as_value(begin)
        span = self.trips(loop, begin, end)
        whole = b.add(first, b.and_(span, constant(I64, -lanes)), flags=NO_WRAP)
        low, high = copy.across.begin.value, copy.across.end.value
        with self.loop(first, whole, lanes, loop.var) as base:
            if high - low <= SQUARES * lanes:
                for column in range(low, high, lanes):
                    self.square(loop, copy, lanes, base, constant(I64, column))
            else:
                ends = constant(I64, low), constant(I64, high)
                with self.loop(*ends, lanes, copy.across.var) as column:
                    self.square(loop, copy, lanes, base, column)
        with self.loop(whole, as_value(end), 1, f"{loop.var}.rest") as at:
            self.dims.bind(loop.var, at)
            self.stmt(loop.body)

    def square(
        self, loop: For, copy: Copy, lanes: int, base: LLValue, column: LLValue
    ) -> None:
        rows = []
        for r in range(lanes):
            with self.region():
                self.dims.lanes = lanes
                self.dims.bind(loop.var, LaneIndex(base, 1))
                across = self.b.add(column, constant(I64, r), flags=NO_WRAP)
                self.dims.bind(copy.across.var, across)
                rows.append(self.value(copy.store.value))
        buffer, index = copy.store.buffer, copy.store.index
        for r, value in enumerate(exchange(self.b, rows)):
            with self.region():
                self.dims.lanes = lanes
                at = self.b.add(base, constant(I64, r), flags=NO_WRAP)
                self.dims.bind(loop.var, at)
                self.dims.bind(copy.across.var, LaneIndex(column, 1))
                self.memory.store(buffer, index, value, None)
