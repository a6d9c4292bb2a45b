"""What a legal module is at each stage, and the verifier that holds passes to it.

IMPORTED    ops of the source model; every condition a shape rule needs is proved, or
            stated by a constraint of the graph
DECOMPOSED  no composite op but attention
FUSED       a function holds fusions, ops that create or view, and control; a fusion's
            region holds decomposed ops
LOWERED     alloc, view, call_loop, call_library, constant, control; what a call says it
            computes is a graph of decomposed ops, over the symbols of `main`

At every stage: each value is defined once, before its uses, in the body that uses it;
operands, attributes and result types are what the op table says; every symbol is
introduced (by a param's shape, a size, or a data-dependent result) before it is used.
Loop functions are checked whenever the module has some; their rules are in
ir/spec_loops.py. A violation is a bug in Pliant: an InternalError that shows the op and
its neighbours.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import numpy as np

from pliant.errors import InternalError, PliantError
from pliant.ir.access import is_one
from pliant.ir.calls import calls_in, computed
from pliant.ir.graph import Attr, Constant, Graph, Module, Op, Value
from pliant.ir.infer import InferContext, bare
from pliant.ir.loops import Buffer, LoopFunc, Role
from pliant.ir.ops import ATTENTIONS, CALLS, OPS, VIEWS, Trait, infer
from pliant.ir.spec_loops import NEIGHBOURS, verify_loop
from pliant.ir.text import print_op
from pliant.ir.types import NUMPY, DType, TensorType, contiguous_strides
from pliant.sym import Expr, Facts, eq, le, solve, sym

__all__ = [
    "HOST_SYMBOLS",
    "Stage",
    "allowed",
    "around",
    "bare",
    "destinations",
    "exprs_of",
    "symbols_in",
    "verify",
    "verify_loop",
]

HOST_SYMBOLS = frozenset({"threads"})  # every function knows them
_FRESH = "?"  # names of symbols that a shape rule makes up, while it is checked


class Stage(enum.Enum):
    IMPORTED = "imported"
    DECOMPOSED = "decomposed"
    FUSED = "fused"
    LOWERED = "lowered"


@dataclass(slots=True)
class Verified:
    """What was found legal in a compilation. Ops and graphs do not change."""

    # Ops whose result types were inferred, and the facts from which.
    types: dict[Op, Facts] = field(default_factory=dict)
    # The symbols of attributes and of result types, of ops whose attributes are legal.
    symbols: dict[Op, tuple[frozenset[str], frozenset[str]]] = field(
        default_factory=dict
    )
    # Graphs, and all else that their legality depended on.
    graphs: dict[Graph, tuple[object, ...]] = field(default_factory=dict)

    def once(
        self, graph: Graph, given: tuple[object, ...], check: Callable[[], None]
    ) -> None:
        """Checks a graph, if that was not done with the same objects around it."""
        known = self.graphs.get(graph, ())
        same = len(known) == len(given)
        if not same or any(a is not b for a, b in zip(known, given, strict=True)):
            check()
            self.graphs[graph] = given


def verify(module: Module, stage: Stage, verified: Verified | None = None) -> None:
    """Raises InternalError if the module is not legal at the stage.

    `verified` carries what was found on to the next stage of the same compilation.
    """
    verified = Verified() if verified is None else verified
    tables = (module.graphs, module.loops, module.libraries, module.constants)
    for table in tables:
        for key, item in table.items():
            if key != item.name:
                problem = f"@{item.name} is filed under the name @{key}"
                raise InternalError(f"verify {stage.value}", problem)
    for constant in module.constants.values():
        _verify_constant(constant, stage)
    purposes = {
        graph.name: version
        for version in (*module.versions, module.graphs.get("main"))
        if version is not None
        for graph in computed(module, version)
    }
    functions = [g for g in module.graphs.values() if g.name not in purposes]
    for graph in functions:
        checker = _GraphChecker(module, graph, stage, verified)
        verified.once(graph, (stage, *tables[1:], *functions), checker.function)
    for name, main in purposes.items():
        graph = module.graphs[name]
        checker = _GraphChecker(module, graph, stage, verified)
        given = (stage, module.constants, main.sizes, main.params, main.constraints)
        verified.once(graph, given, partial(checker.purpose, main))
    for order in module.orders:
        calls = calls_in(module.main)
        if sorted(order) != list(range(len(calls))):
            problem = f"order {order} is no order of the {len(calls)} calls of @main"
            raise InternalError(f"verify {stage.value}", problem)
    for func in module.loops.values():
        verify_loop(func, module)


def _verify_constant(constant: Constant, stage: Stage) -> None:
    wanted = NUMPY[constant.type.dtype]
    if constant.type.dtype is DType.BF16:
        wanted = np.dtype(np.uint16)
    shape = tuple(d.value if d.is_const else -1 for d in constant.type.shape)
    data = constant.data
    if data.dtype != wanted or data.shape != shape or not data.flags.c_contiguous:
        raise InternalError(
            f"verify {stage.value}",
            f"constant @{constant.name}: {constant.type} holds {data.dtype} of shape "
            f"{data.shape}, contiguous: {data.flags.c_contiguous}",
        )


# ---- which ops a stage has


def allowed(op: str, stage: Stage, fused: bool) -> bool:
    """Whether an op may stand in a function, or (fused) in a fusion's region."""
    traits = OPS[op].traits
    if op in CALLS:  # side by side with tensor ops
        return True
    composite = Trait.COMPOSITE in traits and op not in ATTENTIONS
    control = Trait.CONTROL in traits
    if fused:
        return not (composite or control or Trait.LOWERED in traits)
    match stage:
        case Stage.IMPORTED:
            return op != "fusion" and Trait.LOWERED not in traits
        case Stage.DECOMPOSED:
            return not composite and op != "fusion" and Trait.LOWERED not in traits
        case Stage.FUSED:
            contract = Trait.CONTRACT in traits or op in ATTENTIONS
            return control or contract or Trait.CREATE in traits or op in VIEWS
        case Stage.LOWERED:
            plain = Trait.LOWERED in traits or op == "constant"
            return plain or (control and op != "fusion")


# How many leading operands of an op its regions do not see.
_NOT_PASSED = {"if": 1, "loop": 1, **{op: n + 3 for op, n in ATTENTIONS.items()}}
# Ops whose result dims, where they are symbols of their own, introduce them.
_INTRODUCES = frozenset({"match_cast", "nonzero", "extent", "if", "loop", "while"})


def exprs_of(attr: Attr) -> Iterator[Expr]:
    if isinstance(attr, Expr):
        yield attr
    elif isinstance(attr, tuple):
        for item in attr:
            yield from exprs_of(item)


def symbols_in(type: TensorType) -> list[str]:
    dims = (*type.shape, *(type.strides or ()))
    return [name for dim in dims for name in dim.symbols()]


class _Breach(Exception):
    """A broken rule; caught where its op is known."""


class _GraphChecker:
    """One graph function; `body` is the graph or region that is being checked."""

    def __init__(
        self, module: Module, graph: Graph, stage: Stage, verified: Verified
    ) -> None:
        self.module, self.graph, self.stage = module, graph, stage
        self.typed, self.symbols = verified.types, verified.symbols
        self.defined: set[Value] = set()
        self.calls: set[object] = set()  # calls of loop functions that are legal
        self.fresh = 0
        self.is_purpose = False

    def function(self) -> None:
        graph = self.graph
        symbols = set(graph.sizes) | HOST_SYMBOLS
        try:
            if len(set(graph.sizes)) != len(graph.sizes):
                raise _Breach(f"sizes ({', '.join(graph.sizes)}) repeat")
            self.solvable()
        except _Breach as breach:
            self.fail(graph, None, str(breach))
        for value in graph.params:
            symbols.update(symbols_in(value.type))
        self.body(graph, Facts(), symbols, fused=False)

    def purpose(self, main: Graph) -> None:
        """A graph that says what a call of `main`, or of a version of it, computes.

        A call in it is of the function as it was called before lowering.
        """
        self.is_purpose = True
        symbols = set(main.sizes) | HOST_SYMBOLS
        for value in main.params:
            symbols.update(symbols_in(value.type))
        facts = Facts()
        for guard in main.constraints:
            facts = facts.assume(guard.cond)
        self.body(self.graph, facts, symbols, fused=True)

    def solvable(self) -> None:
        """Every symbol of the params follows from their shapes and the sizes."""
        known = dict.fromkeys(self.graph.sizes, 2)  # any number: they are given
        shapes = [
            (v.name, tuple(d.substitute(known) for d in v.shape))
            for v in self.graph.params
        ]
        try:
            solve(shapes, Facts())
        except ValueError as error:
            raise _Breach(str(error)) from None

    def body(self, graph: Graph, facts: Facts, symbols: set[str], fused: bool) -> Facts:
        """Checks a graph or region; `symbols` is extended by what it introduces."""
        at: Op | None = None
        try:
            scope: dict[str, Value] = {}
            for value in graph.params:
                self.define(value, scope)
            try:
                for guard in graph.constraints:
                    facts = facts.assume(guard.cond)
            except ValueError as error:
                raise _Breach(
                    f"its constraints contradict each other: {error}"
                ) from None
            for at in graph.ops:
                facts = self.op(at, facts, scope, symbols, fused)
            at = None
            for value in graph.results:
                if scope.get(value.name) is not value:
                    raise _Breach(f"returns {value}, which it does not define")
            for guard in graph.constraints:
                self.known(guard.cond.symbols(), symbols, f"constraint {guard.cond}")
        except _Breach as breach:
            self.fail(graph, at, str(breach))
        return facts

    def fail(self, graph: Graph, op: Op | None, problem: str) -> NoReturn:
        where = f"graph @{self.graph.name}"
        if graph is not self.graph:
            where += f", region @{graph.name}"
        detail = f"{where}: {problem}"
        if op is not None:
            detail = f"{where}: {op.name}: {problem}\n{around(graph, op)}"
        raise InternalError(f"verify {self.stage.value}", detail) from None

    # -- rules of one op

    def define(self, value: Value, scope: dict[str, Value]) -> None:
        if value in self.defined:
            raise _Breach(f"{value} is defined a second time")
        if value.name in scope:
            raise _Breach(f"the name {value} is given a second time")
        if self.stage is not Stage.LOWERED and value.type.strides is not None:
            raise _Breach(f"{value}: {value.type} has strides before lowering")
        strides = value.type.strides
        if strides is not None and len(strides) != value.type.rank:
            raise _Breach(f"{value}: {value.type} has strides of another rank")
        self.defined.add(value)
        scope[value.name] = value

    def known(self, names: Iterable[str], symbols: set[str], what: str) -> None:
        unknown = [name for name in dict.fromkeys(names) if name not in symbols]
        if unknown:
            raise _Breach(f"symbol {', '.join(unknown)} of {what} is not in scope")

    def op(
        self,
        op: Op,
        facts: Facts,
        scope: dict[str, Value],
        symbols: set[str],
        fused: bool,
    ) -> Facts:
        if op.name not in OPS:
            raise _Breach("there is no such op")
        if not allowed(op.name, self.stage, fused):
            place = "a fusion" if fused else f"the {self.stage.value} stage"
            raise _Breach(f"is not an op of {place}")
        for value in op.operands:
            if scope.get(value.name) is not value:
                known = value in self.defined
                why = "is defined outside this body" if known else "is not defined"
                raise _Breach(f"operand {value} {why}")
        self.attributes(op, symbols)
        named = self.symbols[op][1]
        self.callee(op, facts)
        facts = self.regions(op, facts, symbols)
        facts = self.types(op, facts)
        if op.name in _INTRODUCES:
            dims = [d for v in op.results for d in v.shape]
            symbols.update(dim.symbol for dim in dims if dim.symbol is not None)
        unknown = not symbols.issuperset(named)
        for value in op.results:
            if unknown:
                what = f"result {value}: {value.type}"
                self.known(symbols_in(value.type), symbols, what)
            self.define(value, scope)
        return facts

    def attributes(self, op: Op, symbols: set[str]) -> None:
        found = self.symbols.get(op)
        if found is None:
            given = dict(op.attrs)
            try:
                wanted = OPS[op.name].normalise(given)
            except (TypeError, ValueError) as error:
                raise _Breach(str(error)) from None
            if tuple(op.attrs) != wanted or len(given) != len(op.attrs):
                raise _Breach(f"attributes {op.attrs} should be {wanted}")
            read = frozenset(
                name
                for _, attr in op.attrs
                for dim in exprs_of(attr)
                for name in dim.symbols()
                if op.name != "match_cast" or dim.symbol is None  # which it introduces
            )
            named = frozenset(n for v in op.results for n in symbols_in(v.type))
            found = self.symbols[op] = read, named
        if not symbols.issuperset(found[0]):
            for name, attr in op.attrs:
                names = (n for dim in exprs_of(attr) for n in dim.symbols())
                self.known(
                    [n for n in names if n in found[0]], symbols, f"attribute {name}"
                )

    def callee(self, op: Op, facts: Facts) -> None:
        match op.name:
            case "constant":
                name = op.str_attr("name")
                if name not in self.module.constants:
                    raise _Breach(f"there is no constant @{name}")
                type = self.module.constants[name].type
                if [v.type for v in op.results] != [type]:
                    raise _Breach(f"constant @{name} is {type}")
            case "call":
                if op.str_attr("callee") not in self.module.graphs:
                    raise _Breach(f"there is no graph @{op.attr('callee')}")
            case "call_library" if not self.is_purpose:
                self.computes(op)
                if op.str_attr("callee") not in self.module.libraries:
                    raise _Breach(f"there is no library @{op.attr('callee')}")
                roles = self.module.libraries[op.str_attr("callee")].roles
                if roles is not None and len(op.operands) != len(roles):
                    raise _Breach(f"@{op.attr('callee')} takes {len(roles)} operands")
            case "call_loop" if not self.is_purpose:
                self.computes(op)
                if op.str_attr("callee") not in self.module.loops:
                    raise _Breach(f"there is no loop @{op.attr('callee')}")
                self.loop_call(op, self.module.loops[op.str_attr("callee")], facts)

    def computes(self, op: Op) -> None:
        name = dict(op.attrs).get("computes")
        if name is not None and name not in self.module.graphs:
            raise _Breach(f"there is no graph @{name}")

    def loop_call(self, op: Op, func: LoopFunc, facts: Facts) -> None:
        sizes = op.dims_attr("sizes")
        if len(sizes) != len(func.sizes):
            raise _Breach(f"@{func.name} takes {len(func.sizes)} sizes")
        env = dict(zip(func.sizes, sizes, strict=True))
        try:
            values = destinations(func, op)
        except ValueError as error:
            raise _Breach(str(error)) from None
        types = tuple(None if value is None else value.type for value in values)
        like = func.name, sizes, types, facts
        if like in self.calls:  # by a layer like this one
            return
        self.calls.add(like)
        for value, buffer in zip(values, func.buffers, strict=True):
            if value is None:
                continue
            if value.dtype is not buffer.dtype:
                raise _Breach(
                    f"buffer %{buffer.name} of @{func.name} is {buffer.dtype}, "
                    f"{value} is {value.type}"
                )
            shape = tuple(d.substitute(env) for d in buffer.shape)
            if value.type.strides is not None:
                if value.type.shape == shape:
                    strides = tuple(s.substitute(env) for s in buffer.strides)
                    self.strides(value, buffer, strides, facts)
                elif _is_dense(buffer):
                    strides = contiguous_strides(value.shape)
                    self.strides(value, buffer, strides, facts)
                continue
            if not _is_dense(buffer):
                continue
            wanted = TensorType(buffer.dtype, shape)
            if facts.prove(le(wanted.numel, value.type.numel)) is False:
                raise _Breach(
                    f"buffer %{buffer.name} of @{func.name} is {wanted}, more than "
                    f"{value}: {value.type}"
                )

    def strides(
        self, value: Value, buffer: Buffer, wanted: Sequence[Expr], facts: Facts
    ) -> None:
        """A view that is given for a buffer has its strides, or is all of its memory;
        along axes of size 1 it may have others."""
        found = value.type.strides
        assert found is not None
        for size, given, want in zip(value.shape, found, wanted, strict=True):
            if given == want or is_one(size):
                continue
            if facts.prove(eq(given, want)) is not True:
                raise _Breach(
                    f"buffer %{buffer.name} has the strides {tuple(wanted)}, "
                    f"{value} {found}"
                )

    def regions(self, op: Op, facts: Facts, symbols: set[str]) -> Facts:
        for region in op.regions:
            inside = self.entered(op, region, facts, symbols)
            inner = set(symbols) | set(region.sizes)
            dims = [d for v in region.params for d in v.shape]
            inner.update(dim.symbol for dim in dims if dim.symbol is not None)
            for value in region.params:
                what = f"param {value} of region @{region.name}"
                self.known(symbols_in(value.type), inner, what)
            fused = op.name in ("fusion", "chunk") or op.name in ATTENTIONS
            self.body(region, inside, inner, fused=fused)
            if op.name == "fusion":
                for value in region.results:
                    self.known(symbols_in(value.type), symbols, f"result {value}")
        return facts

    def entered(self, op: Op, region: Graph, facts: Facts, symbols: set[str]) -> Facts:
        """A symbol of a region's param that is known outside means the same inside."""
        skipped = _NOT_PASSED.get(op.name, len(region.sizes))
        if op.name == "bind":
            for name, most in zip(region.sizes, op.dims_attr("most"), strict=True):
                facts = facts.assume(le(sym(name), most))
        if op.name == "chunk":  # its rule compares params with operands
            return facts.assume(le(sym(region.sizes[0]), op.dim_attr("extent")))
        own = (
            op.name == "loop" or op.name in ATTENTIONS
        )  # the first is the op's to give
        params = region.params[1:] if own else region.params
        passes = op.operands[skipped:]
        scanned = op.int_attr("scanned") if op.name == "scan" else 0
        for k, (param, value) in enumerate(zip(params, passes, strict=False)):
            given = value.shape[1:] if k >= len(passes) - scanned else value.shape
            for dim, passed in zip(param.shape, given, strict=False):
                fresh = dim.symbol is not None and dim.symbol not in symbols
                if not fresh and facts.prove(eq(dim, passed)) is not True:
                    raise _Breach(
                        f"region {region.name} takes {param}: {param.type}, is given "
                        f"{value}: {value.type}; {dim} == {passed} is not proved"
                    )
                if fresh and op.name in ("if", "fusion"):  # entered once
                    facts = facts.assume(eq(dim, passed))
        return facts

    def types(self, op: Op, facts: Facts) -> Facts:
        """The results are what the shape rule gives."""
        if self.typed.get(op) is facts:
            return facts
        cx = InferContext(
            facts,
            fresh=self.fresh_symbol,
            callees=self.module.graphs,
            declared=tuple(v.type for v in op.results),
        )
        try:
            found = infer(cx, op)
        except (PliantError, TypeError, ValueError) as error:
            raise _Breach(str(error)) from None
        if cx.guards and self.stage is Stage.IMPORTED:
            conds = ", ".join(str(guard.cond) for guard in cx.guards)
            raise _Breach(f"needs {conds}: neither proved nor a constraint")
        if len(found) != len(op.results):
            raise _Breach(f"has {len(found)} results, not {len(op.results)}")
        for value, type in zip(op.results, found, strict=True):
            self.same_type(value, type, cx)
        alone = not op.regions and op.name != "call"
        if alone and cx.facts is facts and not cx.guards:
            self.typed[op] = facts
        return cx.facts

    def fresh_symbol(self, hint: str) -> Expr:
        self.fresh += 1
        return sym(f"{_FRESH}{self.fresh}")

    def same_type(self, value: Value, wanted: TensorType, cx: InferContext) -> None:
        have = value.type
        if have == wanted:
            return
        problem = f"result {value} is {have}, should be {wanted}"
        if have.dtype is not wanted.dtype or have.rank != wanted.rank:
            raise _Breach(problem)
        for mine, dim in zip(have.shape, wanted.shape, strict=True):
            if (dim.symbol or "").startswith(_FRESH):
                if mine.symbol is None:
                    raise _Breach(f"{problem}: {mine} must be a symbol of its own")
                # What the rule knows of its symbol holds for the one in the graph.
                cx.facts = cx.facts.assume(eq(dim, mine))
            elif not cx.proves_equal(mine, dim):
                raise _Breach(f"{problem}: {mine} == {dim} is not proved")


def around(graph: Graph, op: Op) -> str:
    """The op, marked, among its neighbours; regions left out."""
    position = next(i for i, other in enumerate(graph.ops) if other is op)
    first = max(position - NEIGHBOURS, 0)
    lines = []
    for other in graph.ops[first : position + NEIGHBOURS + 1]:
        head, _, rest = print_op(other).partition("\n")
        text = f"{head} ..." if rest else head
        lines.append(f"{'  > ' if other is op else '    '}{text}")
    return "\n".join(lines)


def _is_dense(buffer: Buffer) -> bool:
    return buffer.strides == contiguous_strides(buffer.shape)


def destinations(func: LoopFunc, op: Op) -> list[Value | None]:
    """The value behind each buffer of a called loop function.

    Results take the "out" buffers, operands the others in order. Without results the
    operands are all the buffers. Scratch that is not passed is None.
    """
    operands, results = list(op.operands), list(op.results)
    lacking = len(func.buffers) - len(operands) - len(results)
    scratch = sum(buffer.role is Role.WORK for buffer in func.buffers)
    omitted = scratch > 0 and lacking == scratch
    found: list[Value | None] = []
    for buffer in func.buffers:
        if buffer.role is Role.WORK and omitted:
            found.append(None)
            continue
        queue = results if results and buffer.role is Role.OUT else operands
        if not queue:
            raise ValueError(f"@{func.name} is given nothing for %{buffer.name}")
        found.append(queue.pop(0))
    if operands or results:
        left = ", ".join(map(str, operands + results))
        raise ValueError(f"@{func.name} has no buffer for {left}")
    return found
