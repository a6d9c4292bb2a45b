"""What rematerialization needs to know: each call's operands and work.

To stay within a memory limit, a value that is not needed for a while may be dropped,
and later recomputed (by the calls that made it) or read back from a file. Which values
is decided per call of the model, from its sizes (runtime/remat.c). This file provides
the facts for that. For the lowered graph

    call_loop(%x, %a) {callee = "f", ...}      step 0: reads x, writes a
    call_loop(%a, %y) {callee = "g", ...}      step 1: reads a, writes y

they are what each step reads and writes, how much work it is, and whether it may run
twice. Kernels are functions of what they read, so they may, with two exceptions: one
that writes an input of the model (a parameter's update), and a library's function about
which nothing is known. The runtime makes sure that an operand still holds its
value.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.ir.calls import calls_in, roles_of
from pliant.ir.graph import Graph, Module, Op, Value
from pliant.ir.loops import Role
from pliant.ir.work import Work, call_work
from pliant.memory.liveness import Memory


@dataclass(frozen=True, slots=True)
class Touch:
    """An operand of a step: an arena buffer, or a pinned value."""

    object: int  # index of the arena buffer; pinned values are numbered after them
    reads: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A call of the lowered graph, as the planner sees it."""

    call: Op
    touches: tuple[Touch, ...]
    repeatable: bool
    work: Work


@dataclass(frozen=True, slots=True)
class Steps:
    """The calls in order. Pinned: results, and inputs that a call writes."""

    steps: tuple[Step, ...]
    pinned: tuple[Value, ...]


def steps(module: Module, memory: Memory) -> Steps:
    """The steps of a lowered module."""
    graph = module.main
    calls, works = calls_in(graph), call_work(module)
    operands = [_operands(op, module, memory) for op in calls]
    numbers = {b.value: k for k, b in enumerate(memory.buffers)}
    written = {
        v for touched in operands for v, (_, writes) in touched.items() if writes
    }
    pinned = [v for v in _bases(graph, memory) if v in written and v not in numbers]
    numbers |= {v: len(memory.buffers) + k for k, v in enumerate(pinned)}
    params = set(graph.params)
    made: list[Step] = []
    for op, touched, work in zip(calls, operands, works, strict=True):
        touches = tuple(
            Touch(numbers[v], *flags) for v, flags in touched.items() if v in numbers
        )
        updates = any(w and v in params for v, (_, w) in touched.items())
        repeatable = roles_of(op, module) is not None and not updates
        made.append(Step(op, touches, repeatable, work))
    return Steps(tuple(made), tuple(pinned))


def _bases(graph: Graph, memory: Memory) -> list[Value]:
    """Every value that is not a view, in order of definition."""
    results = [v for op in graph.ops for v in op.results]
    return [v for v in (*graph.params, *results) if v not in memory.bases]


def _operands(op: Op, module: Module, memory: Memory) -> dict[Value, tuple[bool, bool]]:
    """What a call reads and writes, views resolved."""
    # Unknown: each operand may be either.
    roles = roles_of(op, module) or [Role.INOUT] * len(op.operands)
    found: dict[Value, tuple[bool, bool]] = {}
    for value, role in zip(op.operands, roles, strict=True):
        base = memory.bases.get(value, value)
        reads, writes = found.get(base, (False, False))
        reads = reads or role in (Role.IN, Role.INOUT)
        found[base] = (reads, writes or role is not Role.IN)
    return found
