"""Graph IR: tensor SSA with symbolic shapes, and the Module that holds everything.

    module   = graph* loop* library* constant* check* order* knob*
    graph    = name, params: value*, op*, results: value*
    op       = name, operands: value*, attrs, results: value*, region graphs*, loc
    value    = name, tensor type (or a size: an integer bound to a symbol)

A region is a graph whose params match the op's operands (it captures no value; the
symbols of the enclosing function are visible in it). A symbol is introduced by a
graph's params, by `match_cast`, or by a data-dependent op's result type.

A lowered call may name a graph function of its module that says what it computes; such
a graph sees the symbols of `main`, as a region does.

Every node is immutable; a pass builds a new graph and keeps what did not change.
Values and ops compare by identity: each is one definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pliant.ir.types import DType, TensorType
from pliant.sym import ZERO, Expr, Guard

if TYPE_CHECKING:
    from pliant.ir.loops import LoopFunc, Role

# What an attribute may hold; which op takes which is declared in ir/ops.py.
Attr = bool | int | float | str | DType | Expr | tuple["Attr", ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One SSA definition."""

    name: str
    type: TensorType

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation; its meaning is the OpDef of that name in ir/ops.py."""

    name: str
    operands: tuple[Value, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    results: tuple[Value, ...] = ()
    regions: tuple[Graph, ...] = ()
    loc: str = field(default="", compare=False)

    def attr(self, name: str) -> Attr:
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(f"op {self.name} has no attribute {name}")

    # Typed readers: an attribute's kind is part of its op's definition.
    def int_attr(self, name: str) -> int:
        value = self.attr(name)
        assert isinstance(value, int)
        return value

    def ints_attr(self, name: str) -> tuple[int, ...]:
        value = self.attr(name)
        assert isinstance(value, tuple)
        return tuple(v for v in value if isinstance(v, int))

    def dims_attr(self, name: str) -> tuple[Expr, ...]:
        value = self.attr(name)
        assert isinstance(value, tuple)
        return tuple(v for v in value if isinstance(v, Expr))

    def dim_attr(self, name: str) -> Expr:
        value = self.attr(name)
        assert isinstance(value, Expr)
        return value

    def str_attr(self, name: str) -> str:
        value = self.attr(name)
        assert isinstance(value, str)
        return value

    def strs_attr(self, name: str) -> tuple[str, ...]:
        value = self.attr(name)
        assert isinstance(value, tuple)
        return tuple(v for v in value if isinstance(v, str))

    def float_attr(self, name: str) -> float:
        value = self.attr(name)
        assert isinstance(value, (int, float))
        return float(value)

    def bool_attr(self, name: str) -> bool:
        value = self.attr(name)
        assert isinstance(value, bool)
        return value

    def dtype_attr(self, name: str) -> DType:
        value = self.attr(name)
        assert isinstance(value, DType)
        return value

    @property
    def sums(self) -> tuple[str, ...]:
        """By which reduction a chunk combines each result; rows are not combined."""
        for name, _ in self.attrs:
            if name == "sums":
                return self.strs_attr(name)
        return ("",) * len(self.results)

    @property
    def result(self) -> Value:
        (value,) = self.results
        return value

    def replace(self, **changes: Any) -> Op:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A graph function, or the region of an op."""

    name: str
    params: tuple[Value, ...]
    ops: tuple[Op, ...]
    results: tuple[Value, ...]
    sizes: tuple[str, ...] = ()  # symbols bound by integer arguments, after params
    constraints: tuple[Guard, ...] = ()  # what must hold for the symbols, and why

    def producers(self) -> dict[Value, Op]:
        return {value: op for op in self.ops for value in op.results}

    def users(self) -> dict[Value, list[Op]]:
        """Ops that read each value; a graph result is not a user."""
        table: dict[Value, list[Op]] = {}
        for op in self.ops:
            for value in dict.fromkeys(op.operands):
                table.setdefault(value, []).append(op)
        return table

    def replace(self, **changes: Any) -> Graph:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """How data is computed: by `make` from the sources' data, or given from outside.

    It holds no data itself, so that weights can be computed again from new values
    without keeping the old ones.
    """

    sources: tuple[Origin, ...] = ()
    make: Callable[..., np.ndarray] | None = None  # None: given


def ordered_origins(ends: Sequence[Origin]) -> list[Origin]:
    """All origins that these depend on, sources first."""
    found: dict[Origin, None] = {}
    stack = [(origin, False) for origin in reversed(ends)]
    while stack:
        origin, entered = stack.pop()
        if entered:
            found[origin] = None
        elif origin not in found:
            stack.append((origin, True))
            stack.extend((source, False) for source in origin.sources)
    return list(found)


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A weight or literal, held once; `data` may share memory with its source.

    `data` is a contiguous array in row-major order; bf16 is held as its uint16 bits.
    `keep` keeps the owner of shared memory alive.
    """

    name: str
    type: TensorType
    data: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
    keep: object = None
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True, slots=True)
class Library:
    """An external function called destination-passing: (inputs..., outputs...).

    Its result types are given at the call, as for a loop function. `roles` says what it
    does to each argument; such a function depends on its arguments alone, and fails by
    a check of the module if at all. Of one without roles nothing is known.
    """

    name: str
    symbol: str
    roles: tuple[Role, ...] | None = None


class KernelPlan(Protocol):
    """How a kernel tiles its work at the sizes of a call, for people to read."""

    def sizes(self) -> Mapping[str, Expr]:
        """The sizes that the kernel decides by, over the dims of the model."""
        ...

    def describe(self, dims: Mapping[str, int], threads: int) -> str:
        """What it does at these dims."""
        ...


@dataclass(frozen=True, slots=True)
class DataCheck:
    """A requirement of kernels on the data they read, and the error if it fails."""

    kind: str  # which error it is, see errors.DATA_ERRORS
    message: str  # "{value}" stands for what the check tells

    @classmethod
    def at(cls, kind: str, message: str, loc: str) -> DataCheck:
        return cls(kind, f"{message} ({loc})" if loc else message)


@dataclass(frozen=True, slots=True)
class Knob:
    """A number that the plan of a call chooses: the rows of a chunk.

    They are a multiple of `multiple`, or all rows if there are fewer.
    """

    extent: Expr  # all rows
    multiple: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLoop:
    """A loop function that computes a part of the model in chunks of rows."""

    op: Op  # what it computes: the op `chunk`
    # Buffers of an operand and of a result that may share memory: a round has read its
    # rows of the one before it writes the same rows of the other.
    aligned: frozenset[tuple[str, str]] = frozenset()
    kernels: tuple[Graph, ...] = ()  # what the calls of a round compute
    copied: Expr = ZERO  # bytes moved by copies of rows, in all rounds


def chunk_rows(region: Graph, extent: Expr) -> dict[str, Expr]:
    """The sizes of a chunk's region that are numbers of rows, and the rows in all.

    The second of them is for values without the last row.
    """
    names = (region.sizes[0], *region.sizes[2:])
    return dict(zip(names, (extent, extent - 1), strict=False))


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """Graph functions, loop functions and library functions, side by side.

    A lowered module also says what a failed run-time check means (`check` statement
    number k is about `checks[k - 1]`), and in which other orders the calls of `main`
    may run (positions of its calls; all are legal, which needs least memory depends on
    the sizes). `inside` says what the kernels compute that a loop function of control
    flow calls, by the name of their region. `plans` explain loop functions, one for
    each product that a function is for; they have no text form.

    Graphs called `main.1`, `main.2`, .. are other versions of `main`: they compute the
    same in less memory, in chunks of rows. How many rows a chunk has is a size that
    they take, a knob. `chunks` tells of the loop functions that do so; `left_out` says
    which chunks no version has, and why.
    """

    graphs: Mapping[str, Graph]
    loops: Mapping[str, LoopFunc] = field(default_factory=dict)
    libraries: Mapping[str, Library] = field(default_factory=dict)
    constants: Mapping[str, Constant] = field(default_factory=dict)
    checks: tuple[DataCheck, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()
    plans: Mapping[str, tuple[KernelPlan, ...]] = field(default_factory=dict)
    inside: Mapping[str, tuple[Graph, ...]] = field(default_factory=dict)
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    chunks: Mapping[str, ChunkLoop] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def main(self) -> Graph:
        return self.graphs["main"]

    @property
    def versions(self) -> tuple[Graph, ...]:
        """The other versions of `main`."""
        named = (self.graphs.get(f"main.{k}") for k in range(1, len(self.graphs)))
        return tuple(graph for graph in named if graph is not None)

    def replace(self, **changes: Any) -> Module:
        return replace(self, **changes)

    def with_main(self, graph: Graph) -> Module:
        return self.replace(graphs={**self.graphs, "main": graph})


def walk(graph: Graph) -> Iterable[Op]:
    """Every op of a graph, regions included, definitions before uses."""
    for op in graph.ops:
        yield op
        for region in op.regions:
            yield from walk(region)


def values_behind(ops: Sequence[Op], wanted: Iterable[Value]) -> set[Value]:
    """Some values, and all that they are computed from."""
    found = set(wanted)
    for op in reversed(ops):
        if not found.isdisjoint(op.results):
            found.update(op.operands)
    return found


def ops_behind(ops: Sequence[Op], wanted: Iterable[Value]) -> tuple[Op, ...]:
    """The ops that some values are computed by."""
    found = values_behind(ops, wanted)
    return tuple(op for op in ops if not found.isdisjoint(op.results))


def live(graph: Graph) -> Graph:
    """The graph without ops that nothing reads."""
    return graph.replace(ops=ops_behind(graph.ops, graph.results))


def substitute(op: Op, mapping: Mapping[Value, Value]) -> Op:
    """The op with its operands renamed; the same object when none is."""
    operands = tuple(mapping.get(v, v) for v in op.operands)
    if all(new is old for new, old in zip(operands, op.operands, strict=True)):
        return op
    return op.replace(operands=operands)


def copied(region: Graph) -> Graph:
    """A copy of a region with new values, for another place."""
    new = {v: Value(v.name, v.type) for v in region.params}
    ops: list[Op] = []
    for op in region.ops:
        results = tuple(Value(v.name, v.type) for v in op.results)
        operands = tuple(new[v] for v in op.operands)
        regions = tuple(map(copied, op.regions))
        ops.append(op.replace(operands=operands, results=results, regions=regions))
        new.update(zip(op.results, results, strict=True))
    return region.replace(
        params=tuple(new[v] for v in region.params),
        ops=tuple(ops),
        results=tuple(new[v] for v in region.results),
    )


class Names:
    """Hands out value names that are unique in one function."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._next: dict[str, int] = {}
        self._taken = set(taken)

    def fresh(self, hint: str) -> str:
        name = hint
        while name in self._taken:
            self._next[hint] = self._next.get(hint, 0) + 1
            name = f"{hint}_{self._next[hint]}"
        self._taken.add(name)
        return name


def names_of(graph: Graph) -> Sequence[str]:
    taken = [v.name for v in graph.params]
    taken += [v.name for op in walk(graph) for v in op.results]
    return taken
