"""How loops run on a machine: number of lanes, copies, unrolling.

    for i = 0 to n vector { accumulate $sum, %x[i] }
    ->
    for i = 0 to n vector lanes 16 masked copies 4 { accumulate $sum, %x[i] }

The last pass over a loop function. For every VECTOR loop it decides how many iterations
run as lanes of a vector, how many such vectors one iteration of the main loop has, and
how the tail runs. A nest that copies rows to columns is marked to be transposed in
registers. A VECTOR loop that cannot be vectorized stays as it is and runs like a SERIAL
one. A PARALLEL loop whose parts cannot run on other threads becomes SERIAL; the meaning
is the same. The code generator follows these decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pliant.context import Context
from pliant.ir.access import linear_coefficient
from pliant.ir.graph import Module
from pliant.ir.identity import PerObject
from pliant.ir.loop_known import KnownSizes
from pliant.ir.loop_lanes import copy_in, is_multiple, outer_accumulators, runs_by_lanes
from pliant.ir.loop_walk import (
    Node,
    accesses,
    accumulated,
    children,
    free_symbols,
    rebuild,
    statements,
    values,
)
from pliant.ir.loops import (
    Alloc,
    Binary,
    Block,
    For,
    Kind,
    Let,
    LoopFunc,
    LoopValue,
    Rest,
    Role,
    Stmt,
    Unary,
    Vectors,
    address,
    most,
)
from pliant.ir.opdef import Cost
from pliant.ir.ops_elementwise import SCALARS
from pliant.machine.target import Target
from pliant.sym import ONE

# A vector loop with a constant number of vectors up to this is fully unrolled.
MOST_WRITTEN_OUT = 8

# The weight of an op that takes many instructions, in simple ops.
HEAVY_WEIGHT = 12


# ---- properties of a loop's body


def _weight(loop: For) -> int:
    """Of the distinct values: a text does not say which equal ones are one object."""
    found = set(values(loop.body))
    return sum(HEAVY_WEIGHT if _is_heavy(v) else 1 for v in found)


def _is_heavy(value: LoopValue) -> bool:
    return isinstance(value, Unary | Binary) and SCALARS[value.op].cost >= Cost.EXPANDED


def _jam(loop: For) -> int:
    """How many vectors each op of the body computes at once.

    If there is a serial loop inside, several vectors go through it together: that gives
    independent chains, and uses whole cache lines of every row. What they need must fit
    into registers while innermost loops run; what is outside of those runs seldom.
    """
    loops = [s for s in statements(loop.body) if isinstance(s, For)]
    inner = [s for s in loops if not _has_loop(s)]
    if not inner or outer_accumulators(loop) or sum(map(_weight, inner)) > 24:
        return 1
    chains = {name for one in inner for name in accumulated(one)}
    return 4 if len(chains) <= 2 else 2


def _has_loop(loop: For) -> bool:
    return any(isinstance(s, For) for s in statements(loop.body))


def _copies(loop: For) -> int:
    """How many copies of the body one iteration of the main loop has.

    Copies hide the latency of an accumulator's chain of dependent additions (4 cycles
    each, two can start per cycle). The chain is the limit only if the rest of the body
    is short.
    """
    if not outer_accumulators(loop) or _has_loop(loop):
        return 1
    weight = _weight(loop)
    return 4 if weight <= 8 else 2 if weight <= 24 else 1


def _has_masks(target: Target, loop: For) -> bool:
    """Whether the target can mask every access of a loop."""
    sizes = {buf.dtype.bytes for buf, _ in accesses(loop.body)}
    return target.masks(min(sizes, default=4))


def _room(loop: For, lanes: int) -> int | None:
    """The largest possible trip count, if it is small enough to unroll.

    The bound is the size of a register buffer that the loop indexes, or the loop's end.
    """
    rooms = [
        dim.value
        for buf, index in accesses(loop.body)
        if buf.role is Role.REGISTER
        for dim, at in zip(buf.shape, index, strict=True)
        if loop.var in at.symbols()
    ]
    bound = most(loop.end)
    if bound is not None and not loop.end.is_const:
        rooms.append(bound)
    if not rooms or loop.step != 1:
        return None
    room = min(rooms)
    fits = room % lanes == 0
    return room if fits and room <= MOST_WRITTEN_OUT * lanes else None


def _exchanges(loop: For, target: Target) -> bool:
    """Whether a loop copies rows to columns and can be transposed in registers.

    Vectors along the columns would be gathers, one element at a time.
    """
    copy = copy_in(loop)
    if copy is None or loop.step != 1:
        return False
    across, store, load = copy.across, copy.store, copy.load
    size = across.end - across.begin
    if across.kind is not Kind.VECTOR or across.step != 1 or not size.is_const:
        return False
    if not across.begin.is_const or size.value % target.lanes or not size.value:
        return False
    if store.buffer.dtype.bytes not in (4, 8) or store.buffer.name == load.buffer.name:
        return False
    source = address(load.buffer, load.index)
    result = address(store.buffer, store.index)
    exchanges = (
        linear_coefficient(source, loop.var) == ONE
        and linear_coefficient(source, across.var) not in (None, ONE)
        and linear_coefficient(result, across.var) == ONE
        and linear_coefficient(result, loop.var) is not None
    )
    if not exchanges or load.where is None:
        return exchanges
    masks = target.masks(store.buffer.dtype.bytes)
    return masks and loop.var not in free_symbols(load.where)


# ---- the pass


@dataclass(frozen=True, slots=True)
class _Scope:
    """What encloses a statement."""

    known: KnownSizes = field(default_factory=KnownSizes)
    in_parallel: bool = False
    in_vector: bool = False  # inside a loop that is vectorized

    def inside(self, loop: For) -> _Scope:
        return _Scope(
            self.known.inside(loop),
            self.in_parallel or loop.kind is Kind.PARALLEL,
            self.in_vector or loop.runs_by_lanes,
        )


@dataclass(frozen=True, slots=True)
class _LoopPlanner:
    target: Target

    def stmt(self, stmt: Stmt, scope: _Scope) -> Stmt:
        if isinstance(stmt, For):
            return self.loop(stmt, scope)
        new: list[Node] = []
        for child in children(stmt):
            new.append(self.stmt(child, scope) if isinstance(child, Stmt) else child)
            if isinstance(stmt, Block) and isinstance(child, Let):
                scope = replace(scope, known=scope.known.behind(child))
        return rebuild(stmt, new)

    def loop(self, loop: For, scope: _Scope) -> For:
        made = self.decided(loop, scope)
        return rebuild(made, [self.stmt(loop.body, scope.inside(made))])

    def decided(self, loop: For, scope: _Scope) -> For:
        """The loop annotated with how it runs; its body is unchanged."""
        match loop.kind:
            case Kind.VECTOR if not scope.in_vector and runs_by_lanes(loop):
                return replace(loop, vectors=self.vectors(loop, scope.known))
            case Kind.SERIAL if not scope.in_vector and _exchanges(loop, self.target):
                squares = Vectors(self.target.lanes, Rest.SCALAR)
                return replace(loop, kind=Kind.EXCHANGE, vectors=squares)
            case Kind.PARALLEL if not scope.in_parallel and _can_be_handed_over(loop):
                return loop
            case Kind.PARALLEL:
                return replace(loop, kind=Kind.SERIAL)
            case _:
                return loop

    def vectors(self, loop: For, known: KnownSizes) -> Vectors:
        lanes = self.target.lanes
        trips = known.most_trips(loop)
        if trips is not None and trips <= MOST_WRITTEN_OUT * lanes:
            return Vectors(lanes, Rest.HALVED)
        room = _room(loop, lanes)
        if known.has(loop.begin) and room is not None:
            return Vectors(lanes, Rest.MASKED, most=room)
        plan = Vectors(lanes, Rest.WHOLE, _copies(loop), _jam(loop))
        if is_multiple(loop, plan.together):
            return plan
        masks = _has_masks(self.target, loop)
        return replace(plan, rest=Rest.MASKED if masks else Rest.SCALAR)


def _can_be_handed_over(loop: For) -> bool:
    """Whether another thread can run a part: everything the body uses is passed on."""
    if outer_accumulators(loop):
        return False
    own = {s.buffer.name for s in statements(loop.body) if isinstance(s, Alloc)}
    return all(
        buf.role is not Role.REGISTER or buf.name in own
        for buf, _ in accesses(loop.body)
    )


# By function and machine; None: unchanged.
_Made = dict[object, LoopFunc | None]
_made: PerObject[LoopFunc, _Made] = PerObject(lambda _: {})


def vectorize(func: LoopFunc, target: Target) -> LoopFunc:
    """The function with decisions for all its loops; memoized per machine.

    Micro-kernels are shared by models, and facts about a function are stored with the
    object.
    """
    known, key = _made(func), (target.lanes, target.features)
    if key not in known:
        body = _LoopPlanner(target).stmt(func.body, _Scope())
        known[key] = None if body is func.body else replace(func, body=body)
    return known[key] or func


def plan_loops(module: Module, cx: Context) -> Module:
    """A lowered module whose loop functions say how their loops run on the target."""
    loops = {name: vectorize(func, cx.target) for name, func in module.loops.items()}
    if all(loops[name] is func for name, func in module.loops.items()):
        return module
    return module.replace(loops=loops)


def vectorized(funcs: Iterable[LoopFunc], target: Target) -> list[LoopFunc]:
    """Functions that are ready to be emitted for a machine."""
    return [vectorize(func, target) for func in funcs]
