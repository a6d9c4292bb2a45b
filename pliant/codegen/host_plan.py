"""The host flow as data: inputs read, sizes computed, calls in order.

It is made before any code. The runtime reads it, and equal plans have equal code, so
that code is found by the plan's text (`codegen/units.py`) without emitting it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.codegen.host_checks import size_checks
from pliant.ir.calls import computed
from pliant.ir.graph import Module, Op, Value
from pliant.ir.work import Work, call_work
from pliant.memory.liveness import Memory
from pliant.memory.versions import Layout
from pliant.sym import Binding, Expr, Guard, Solution, sym
from pliant.sym.rules import SizeCheck

THREADS = "threads"


@dataclass(slots=True)
class Table:
    """Integer expressions evaluated once per shape; each has a slot."""

    slots: dict[Expr, int] = field(default_factory=dict)
    entries: list[Expr] = field(default_factory=list)

    def slot(self, e: Expr) -> int:
        if e not in self.slots:
            self.slots[e] = len(self.entries)
            self.entries.append(e)
        return self.slots[e]

    def run(self, dims: tuple[Expr, ...]) -> int:
        """Consecutive slots for the dims of a result."""
        first = len(self.entries)
        self.entries.extend(dims)
        return first


class BufferOrigin(enum.Enum):
    """The table of a call that holds a buffer's address, or its offset."""

    INPUT = "input"
    OUTPUT = "output"
    WEIGHT = "weight"
    ARENA = "arena"


@dataclass(frozen=True, slots=True)
class TableSlot:
    """A size: an entry of the table."""

    number: int

    def __str__(self) -> str:
        return f"[{self.number}]"


Size = int | TableSlot


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where a buffer starts; a view is shifted by `shifts` bytes."""

    origin: BufferOrigin
    number: int
    shifts: tuple[Size, ...] = ()

    def __str__(self) -> str:
        return " + ".join(
            (f"{self.origin.value} {self.number}", *map(str, self.shifts))
        )


@dataclass(frozen=True, slots=True)
class HostCall:
    """A kernel, or the symbol of a library function, and its arguments."""

    callee: str
    sizes: tuple[Size, ...]
    buffers: tuple[BufferPlace, ...]
    is_library: bool = False

    def __str__(self) -> str:
        kind = "library" if self.is_library else "loop"
        sizes, buffers = (", ".join(map(str, x)) for x in (self.sizes, self.buffers))
        return f"{kind} {self.callee}({sizes}; {buffers})"


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Everything that the host functions do."""

    shapes: tuple[tuple[str, int], ...]  # the inputs: name, number of dims
    bindings: tuple[Binding, ...]  # a symbol each, read from the inputs
    knobs: tuple[str, ...]  # symbols that a plan chooses
    knob_slots: tuple[int, ...]  # table slot of each knob's extent
    guards: tuple[Guard, ...]
    table: Table
    checks: tuple[SizeCheck, ...]
    buffer_slots: tuple[int, ...]  # table slot of each arena buffer's bytes
    output_slots: tuple[int, ...]  # first table slot of each result's dims
    output_ranks: tuple[int, ...]
    work_slots: tuple[tuple[int, int], ...]  # slots of each call's flops and bytes
    # Slots below this are sizes; the others are work estimates, which may overflow.
    n_exact: int
    constants: tuple[str, ...]  # number of a weight -> constant name
    calls: tuple[HostCall, ...]
    # The numbers of the calls of `main` and of its other versions, in their order.
    sequences: tuple[tuple[int, ...], ...]
    stamps: int | None  # words of the block of times after the weights, if profiled

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(b.symbol for b in self.bindings)

    @property
    def own_calls(self) -> tuple[HostCall, ...]:
        """The calls of `main`, which are numbered before those of other versions."""
        return self.calls[: len(self.sequences[0])]

    @property
    def other_calls(self) -> tuple[HostCall, ...]:
        return self.calls[len(self.sequences[0]) :]

    def text(self) -> str:
        """Equal texts have equal code."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for name, rank in self.shapes:
            yield f"input {rank} {name}"
        for b in self.bindings:
            yield f"symbol {b.symbol} = {b.value} of {b.source}.{b.axis}"
        for name in self.knobs:
            yield f"knob {name}"
        for guard in self.guards:
            yield f"guard {guard.cond}"
        for k, e in enumerate(self.table.entries):
            yield f"{'size' if k < self.n_exact else 'amount'} {e}"
        yield from map(str, self.checks)
        for call in self.calls:
            yield str(call)
        own = len(self.own_calls)
        yield f"own {own} weights {len(self.constants)} stamps {self.stamps}"


def plan_host(
    module: Module,
    layout: Layout,
    solution: Solution,
    guards: tuple[Guard, ...],
    shapes: Sequence[tuple[str, tuple[Expr, ...]]],
    input_numbers: Mapping[Value, int],
    *,
    weigh: bool = False,
    profile: bool = False,
) -> HostPlan:
    """The plan of a lowered module; `shapes` are the inputs' names and symbolic dims.

    With `weigh`, the table has the estimated work of the calls, for the planner.
    """
    graph = module.main
    bindings = tuple(solution.bindings)
    table = Table()
    for name in (*(b.symbol for b in bindings), THREADS):
        table.slot(sym(name))
    buffer_slots = tuple(map(table.slot, layout.bytes))
    output_slots = tuple(table.run(v.shape) for v in graph.results)
    knob_slots = tuple(table.slot(knob.extent) for knob in module.knobs.values())
    constants = _constants(module)
    calls: dict[tuple[HostCall, int], int] = {}
    works: list[Work] = []
    sequences: list[tuple[int, ...]] = []
    for version, memory, numbers in layout.versions:
        alone = module.with_main(version)
        found = list(_calls(alone, memory, numbers, constants, table, input_numbers))
        # A version may make one call several times: each is a step.
        made = [(call, found[:k].count(call)) for k, call in enumerate(found)]
        for step, work in zip(made, call_work(alone) if weigh else made, strict=True):
            if step not in calls:
                calls[step] = len(calls)
                works += [work] if isinstance(work, Work) else []
        sequences.append(tuple(calls[step] for step in made))
    n_exact = len(table.entries)
    inner = (g for graphs in module.inside.values() for g in graphs)
    work_slots = tuple((table.slot(w.flops), table.slot(w.bytes)) for w in works)
    return HostPlan(
        shapes=tuple((name, len(dims)) for name, dims in shapes),
        bindings=bindings,
        knobs=tuple(module.knobs),
        knob_slots=knob_slots,
        guards=guards,
        table=table,
        checks=size_checks((*computed(module), *inner, graph)),
        buffer_slots=buffer_slots,
        output_slots=output_slots,
        output_ranks=tuple(v.type.rank for v in graph.results),
        work_slots=work_slots,
        n_exact=n_exact,
        constants=tuple(constants),
        calls=tuple(call for call, _ in calls),
        sequences=tuple(sequences),
        stamps=2 * len(calls) if profile else None,
    )


def _constants(module: Module) -> dict[str, int]:
    """The number of each weight, by the name of its constant."""
    names = (
        op.str_attr("name")
        for graph in (module.main, *module.versions)
        for op in graph.ops
        if op.name == "constant"
    )
    return {name: k for k, name in enumerate(dict.fromkeys(names))}


def _calls(
    module: Module,
    memory: Memory,
    numbers: Mapping[Value, int],
    constants: Mapping[str, int],
    table: Table,
    input_numbers: Mapping[Value, int],
) -> Iterator[HostCall]:
    """The calls of `main`; `numbers` are those of its buffers in the arena."""
    graph, libraries = module.main, module.libraries
    results = {v: k for k, v in enumerate(memory.outputs)}
    places = {
        v: BufferPlace(BufferOrigin.INPUT, input_numbers[v]) for v in graph.params
    }

    def size(e: Expr) -> Size:
        return e.value if e.is_const else TableSlot(table.slot(e))

    def call(op: Op, callee: str, is_library: bool) -> HostCall:
        sizes = tuple(map(size, op.dims_attr("sizes")))
        buffers = tuple(places[v] for v in op.operands)
        return HostCall(callee, sizes, buffers, is_library)

    for op in graph.ops:
        match op.name:
            case "constant":
                number = constants[op.str_attr("name")]
                places[op.result] = BufferPlace(BufferOrigin.WEIGHT, number)
            case "alloc" if op.result in results:
                places[op.result] = BufferPlace(BufferOrigin.OUTPUT, results[op.result])
            case "alloc" if op.result in numbers:
                places[op.result] = BufferPlace(BufferOrigin.ARENA, numbers[op.result])
            case "alloc":
                pass  # nothing reads or writes it
            case "view":
                base = places[op.operands[0]]
                shift = size(op.dim_attr("offset"))
                shifts = base.shifts if shift == 0 else (*base.shifts, shift)
                places[op.result] = BufferPlace(base.origin, base.number, shifts)
            case "call_loop":
                yield call(op, op.str_attr("callee"), False)
            case "call_library":
                yield call(op, libraries[op.str_attr("callee")].symbol, True)
            case name:
                raise NotImplementedError(f"host flow of op {name}")
