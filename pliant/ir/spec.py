"""What a legal module is at each stage, and the verifier that holds passes to it.

IMPORTED    ops of the source model; every condition a shape rule needs is proved, or
            stated by a constraint of the graph
DECOMPOSED  no composite op but attention
FUSED       a function holds fusions, ops that create or view, and control; a fusion's
            region holds decomposed ops
LOWERED     alloc, view, call_loop, call_library, constant, control

At every stage: each value is defined once, before its uses, in the body that uses it;
operands, attributes and result types are what the op table says; every symbol is
introduced (by a param's shape, a size, or a data-dependent result) before it is used.
Loop functions are checked whenever the module has some; their rules are at
`_LoopChecker`. A breach is a bug of ours: InternalError with the op and its neighbours.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NoReturn

import numpy as np

from pliant.errors import InternalError, PliantError
from pliant.ir.access import VIEWS
from pliant.ir.graph import Attr, Constant, Graph, Module, Op, Value
from pliant.ir.loops import (
    WORKER,
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
    Block,
    Buffer,
    Call,
    Cast,
    Check,
    Const,
    Fma,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    Local,
    LoopFunc,
    LoopValue,
    Read,
    Role,
    Select,
    Stmt,
    Store,
    Switch,
    Unary,
    dtype_of,
    statements,
)
from pliant.ir.ops import OPS, Attrs, InferContext, Trait, infer
from pliant.ir.text import MARK, print_loop, print_op, print_value
from pliant.ir.types import NUMPY, DType, TensorType, contiguous_strides
from pliant.sym import Expr, Facts, Symbol, eq, le, solve, sym

HOST_SYMBOLS = frozenset({"threads"})  # every function knows them
_NEIGHBOURS = 5
_FRESH = "?"  # names of symbols that a shape rule makes up, while it is checked
_REDUCTIONS = ("sum", "prod", "max", "min")


class Stage(enum.Enum):
    IMPORTED = "imported"
    DECOMPOSED = "decomposed"
    FUSED = "fused"
    LOWERED = "lowered"


def verify(module: Module, stage: Stage) -> None:
    """Raises InternalError if the module is not legal at the stage."""
    tables = (module.graphs, module.loops, module.libraries, module.constants)
    for table in tables:
        for key, item in table.items():
            if key != item.name:
                problem = f"@{item.name} is filed under the name @{key}"
                raise InternalError(f"verify {stage.value}", problem)
    for constant in module.constants.values():
        _verify_constant(constant, stage)
    for graph in module.graphs.values():
        _GraphChecker(module, graph, stage).function()
    for func in module.loops.values():
        verify_loop(func, module)


def verify_loop(func: LoopFunc, module: Module | None = None) -> None:
    """Raises InternalError if the loop function is not legal."""
    _LoopChecker(func, module).function()


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


CALLS = frozenset({"call_loop", "call_library"})  # side by side with tensor ops


def allowed(op: str, stage: Stage, fused: bool) -> bool:
    """Whether an op may stand in a function, or (fused) in a fusion's region."""
    traits = OPS[op].traits
    if op in CALLS:
        return True
    composite = Trait.COMPOSITE in traits and op != "attention"
    control = Trait.CONTROL in traits
    if fused:
        return not (composite or control or Trait.LOWERED in traits)
    match stage:
        case Stage.IMPORTED:
            return op != "fusion" and Trait.LOWERED not in traits
        case Stage.DECOMPOSED:
            return not composite and op != "fusion" and Trait.LOWERED not in traits
        case Stage.FUSED:
            contract = Trait.CONTRACT in traits or op == "attention"
            return control or contract or Trait.CREATE in traits or op in VIEWS
        case Stage.LOWERED:
            plain = Trait.LOWERED in traits or op == "constant"
            return plain or (control and op != "fusion")


# Ops whose result dims, where they are symbols of their own, introduce them.
_INTRODUCES = frozenset({"match_cast", "nonzero", "if", "loop", "while"})


def bare(dim: Expr) -> str | None:
    """The name, if the dim is one symbol."""
    match dim.terms:
        case ((1, ((Symbol(name), 1),)),):
            return name
    return None


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
    """A broken rule, on its way to where its op is known."""


class _GraphChecker:
    """One graph function; `body` is the graph or region that is being checked."""

    def __init__(self, module: Module, graph: Graph, stage: Stage) -> None:
        self.module, self.graph, self.stage = module, graph, stage
        self.defined: set[Value] = set()
        self.fresh = 0

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
        self.callee(op, facts)
        facts = self.regions(op, facts, symbols)
        facts = self.types(op, facts)
        if op.name in _INTRODUCES:
            dims = [d for v in op.results for d in v.shape]
            symbols.update(name for name in map(bare, dims) if name is not None)
        for value in op.results:
            self.known(symbols_in(value.type), symbols, f"result {value}: {value.type}")
            self.define(value, scope)
        return facts

    def attributes(self, op: Op, symbols: set[str]) -> None:
        given = dict(op.attrs)
        try:
            wanted = OPS[op.name].normalise(given)
        except (TypeError, ValueError) as error:
            raise _Breach(str(error)) from None
        if tuple(op.attrs) != wanted or len(given) != len(op.attrs):
            raise _Breach(f"attributes {op.attrs} should be {wanted}")
        for name, attr in op.attrs:
            for dim in exprs_of(attr):
                fresh = op.name == "match_cast" and bare(dim) is not None
                if not fresh:
                    self.known(dim.symbols(), symbols, f"attribute {name}")

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
            case "call_library":
                if op.str_attr("callee") not in self.module.libraries:
                    raise _Breach(f"there is no library @{op.attr('callee')}")
            case "call_loop":
                if op.str_attr("callee") not in self.module.loops:
                    raise _Breach(f"there is no loop @{op.attr('callee')}")
                self.loop_call(op, self.module.loops[op.str_attr("callee")], facts)

    def loop_call(self, op: Op, func: LoopFunc, facts: Facts) -> None:
        sizes = op.dims_attr("sizes")
        if len(sizes) != len(func.sizes):
            raise _Breach(f"@{func.name} takes {len(func.sizes)} sizes")
        env = dict(zip(func.sizes, sizes, strict=True))
        try:
            values = destinations(func, op)
        except ValueError as error:
            raise _Breach(str(error)) from None
        for value, buffer in zip(values, func.buffers, strict=True):
            if value is None:
                continue
            if value.dtype is not buffer.dtype:
                raise _Breach(
                    f"buffer %{buffer.name} of @{func.name} is {buffer.dtype}, "
                    f"{value} is {value.type}"
                )
            shape = tuple(d.substitute(env) for d in buffer.shape)
            wanted = TensorType(buffer.dtype, shape)
            dense = value.type.strides is None and _is_dense(buffer)
            fits = le(wanted.numel, value.type.numel)
            if dense and facts.prove(fits) is False:
                raise _Breach(
                    f"buffer %{buffer.name} of @{func.name} is {wanted}, more than "
                    f"{value}: {value.type}"
                )

    def regions(self, op: Op, facts: Facts, symbols: set[str]) -> Facts:
        for region in op.regions:
            inside = self.entered(op, region, facts, symbols)
            inner = set(symbols)
            dims = [d for v in region.params for d in v.shape]
            inner.update(name for name in map(bare, dims) if name is not None)
            for value in region.params:
                what = f"param {value} of region @{region.name}"
                self.known(symbols_in(value.type), inner, what)
            self.body(region, inside, inner, fused=op.name == "fusion")
            if op.name == "fusion":
                for value in region.results:
                    self.known(symbols_in(value.type), symbols, f"result {value}")
        return facts

    def entered(self, op: Op, region: Graph, facts: Facts, symbols: set[str]) -> Facts:
        """A symbol of a region's param that is known outside means the same inside."""
        skipped = 1 if op.name in ("if", "loop") else 0
        params = region.params[1:] if op.name == "loop" else region.params
        for param, value in zip(params, op.operands[skipped:], strict=False):
            for dim, passed in zip(param.shape, value.shape, strict=False):
                fresh = bare(dim) is not None and bare(dim) not in symbols
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
            self.same_type(op, value, type, cx)
        return cx.facts

    def fresh_symbol(self, hint: str) -> Expr:
        self.fresh += 1
        return sym(f"{_FRESH}{self.fresh}")

    def same_type(
        self, op: Op, value: Value, wanted: TensorType, cx: InferContext
    ) -> None:
        have = value.type
        problem = f"result {value} is {have}, should be {wanted}"
        if have.dtype is not wanted.dtype or have.rank != wanted.rank:
            raise _Breach(problem)
        for mine, dim in zip(have.shape, wanted.shape, strict=True):
            if (bare(dim) or "").startswith(_FRESH):
                if bare(mine) is None:
                    raise _Breach(f"{problem}: {mine} must be a symbol of its own")
                # What the rule knows of its symbol holds for the one in the graph.
                cx.facts = cx.facts.assume(eq(dim, mine))
            elif not cx.proves_equal(mine, dim):
                raise _Breach(f"{problem}: {mine} == {dim} is not proved")


def around(graph: Graph, op: Op) -> str:
    """The op, marked, among its neighbours; regions left out."""
    position = next(i for i, other in enumerate(graph.ops) if other is op)
    first = max(position - _NEIGHBOURS, 0)
    lines = []
    for other in graph.ops[first : position + _NEIGHBOURS + 1]:
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


# ---- loop functions


@lru_cache(maxsize=4096)
def _scalar_result(op: str, dtypes: tuple[DType, ...]) -> DType | str:
    """The dtype an elementwise op gives, or what is wrong."""
    definition = OPS.get(op)
    arity = (len(dtypes), len(dtypes))
    if definition is None or not definition.is_(Trait.ELEMENTWISE):
        return f"there is no elementwise op {op}"
    if definition.arity != arity:
        return f"{op} does not take {len(dtypes)} operands"
    types = tuple(TensorType(dtype, ()) for dtype in dtypes)
    cx = InferContext(Facts(), op=op)
    try:
        return definition.infer(cx, types, Attrs(op, ()))[0].dtype
    except PliantError as error:
        return str(error)


class _LoopChecker:
    """One loop function.

    Names (sizes, loop variables, Lets; buffers; scalars) are defined before use, in an
    enclosing block, and not twice. Values have one type throughout; half floats are
    only loaded, stored, selected and cast. `worker` is the first index of scratch and
    nothing else. Registers have constant indices once loops of constant bounds are
    written out. A parallel loop contains no other, not through calls either, and what
    is accumulated or kept in registers does not cross it.
    """

    def __init__(self, func: LoopFunc, module: Module | None) -> None:
        self.func, self.module = func, module
        self.symbols: set[str] = set()
        self.constant: set[str] = set()  # variables of written-out loops
        self.buffers: dict[str, Buffer] = {}
        self.scalars: dict[str, Local | Accumulator] = {}
        self.outside: frozenset[str] = frozenset()  # scalars, registers beyond parallel
        self.partial: frozenset[str] = frozenset()  # accumulators of vector loops
        self.parallel = False
        self.checked: dict[int, DType] = {}  # values of the statement, by identity
        self.at: Stmt | None = None

    def fail(self, problem: str) -> NoReturn:
        lines = print_loop(self.func, self.at).splitlines()
        marked = next((i for i, line in enumerate(lines) if MARK in line), 0)
        first = max(marked - _NEIGHBOURS, 0)
        shown = "\n".join(lines[first : marked + _NEIGHBOURS + 1])
        raise InternalError(
            "verify loop", f"loop @{self.func.name}: {problem}\n{shown}"
        )

    def function(self) -> None:
        func = self.func
        for size in func.sizes:
            self.name_symbol(size)
        for buffer in func.buffers:
            if buffer.role is Role.REGISTER:
                self.fail(f"register %{buffer.name} cannot be a parameter")
            self.declare(buffer)
            self.dims((*buffer.shape, *buffer.strides), f"buffer %{buffer.name}")
        self.stmt(func.body)

    # -- names

    def name_symbol(self, name: str) -> None:
        if name == WORKER or name in self.symbols:
            self.fail(f"the name {name} is taken")
        self.symbols.add(name)

    def name_scalar(self, stmt: Local | Accumulator) -> None:
        if stmt.name in self.scalars:
            self.fail(f"the name ${stmt.name} is taken")
        self.scalars[stmt.name] = stmt

    def declare(self, buffer: Buffer) -> None:
        if buffer.name in self.buffers:
            self.fail(f"the name %{buffer.name} is taken")
        if len(buffer.strides) != len(buffer.shape):
            self.fail(f"buffer %{buffer.name} has strides of another rank")
        self.buffers[buffer.name] = buffer

    def dims(self, dims: Sequence[Expr], what: str) -> None:
        for dim in dims:
            for name in dim.symbols():
                if name == WORKER:
                    self.fail(
                        f"worker is used in {what}, not as first index of scratch"
                    )
                if name not in self.symbols:
                    self.fail(f"{name} in {what} is not in scope")

    def access(self, buffer: Buffer, index: tuple[Expr, ...], what: str) -> None:
        known = self.buffers.get(buffer.name)
        if known is None:
            self.fail(f"buffer %{buffer.name} is not in scope")
        if known != buffer:
            self.fail(f"buffer %{buffer.name} is not as it was declared")
        if len(index) != len(buffer.shape):
            self.fail(
                f"{what} of %{buffer.name} has {len(index)} indices, its rank is "
                f"{len(buffer.shape)}"
            )
        plain = index
        if buffer.role is Role.WORK and index and bare(index[0]) == WORKER:
            plain = index[1:]
        self.dims(plain, f"{what} of %{buffer.name}")
        if buffer.role is Role.REGISTER:
            if f"%{buffer.name}" in self.outside:
                self.fail(f"registers %{buffer.name} are outside the parallel loop")
            loose = {s for i in index for s in i.symbols()} - self.constant
            if loose:
                self.fail(
                    f"index of registers %{buffer.name} is not constant: "
                    f"{', '.join(sorted(loose))} is no variable of an unrolled or "
                    "vector loop with constant bounds"
                )

    # -- values

    def value(self, value: LoopValue) -> DType:
        """The type of a value that is legal here; a shared part is checked once."""
        if id(value) not in self.checked:
            self.checked[id(value)] = self.checked_value(value)
        return self.checked[id(value)]

    def checked_value(self, value: LoopValue) -> DType:
        match value:
            case Const(number, dtype):
                fits = dtype.is_float or float(number).is_integer()
                if isinstance(number, bool) != (dtype is DType.BOOL) or not fits:
                    self.fail(f"{number!r} is no literal of {dtype}")
            case Index(dim):
                self.dims((dim,), f"index({dim})")
            case Load(buffer, index, where):
                if where is not None:
                    self.truth(where, "the predicate of a load")
                self.access(buffer, index, "load")
            case Read(name, dtype):
                self.read(name, dtype)
            case Unary(op, x):
                self.elementwise(op, (x,), value)
            case Binary(op, x, y):
                self.elementwise(op, (x, y), value)
            case Fma(x, y, z):
                self.elementwise("mul", (x, y), value)
                self.elementwise("add", (x, z), value)
            case Select(cond, x, y):
                self.truth(cond, "the condition of a select")
                self.same(self.value(x), self.value(y), value)
            case Cast(x, _):
                self.value(x)
            case _:
                self.fail(f"unknown value {value!r}")
        return dtype_of(value)

    def read(self, name: str, dtype: DType) -> None:
        declared = self.scalars.get(name)
        if declared is None:
            self.fail(f"${name} is not in scope")
        if declared.dtype is not dtype:
            self.fail(f"${name} is {declared.dtype}, read as {dtype}")
        if name in self.partial:
            self.fail(f"${name} is read inside the vector loop that accumulates it")

    def elementwise(
        self, op: str, parts: tuple[LoopValue, ...], value: LoopValue
    ) -> None:
        dtypes = tuple(self.value(part) for part in parts)
        for dtype in dtypes:
            self.same(dtypes[0], dtype, value)
            if dtype.compute is not dtype:
                self.fail(
                    f"{print_value(value)} computes in {dtype}, which is storage "
                    f"only: cast to {dtype.compute}"
                )
        found = _scalar_result(op, dtypes)
        if isinstance(found, str):
            self.fail(found)
        if not isinstance(value, Fma) and found is not dtype_of(value):
            self.fail(f"{print_value(value)} is {dtype_of(value)}, should be {found}")

    def same(self, a: DType, b: DType, value: LoopValue) -> None:
        if a is not b:
            self.fail(f"operands of {print_value(value)} are {a} and {b}")

    def truth(self, value: LoopValue, what: str) -> None:
        dtype = self.value(value)
        if dtype is not DType.BOOL:
            self.fail(f"{what} is {dtype}, not bool")

    # -- statements

    def inner(self, stmt: Stmt) -> None:
        """A statement inside another: its names end with it."""
        kept = set(self.symbols), dict(self.buffers), dict(self.scalars)
        self.stmt(stmt)
        self.symbols, self.buffers, self.scalars = kept

    def stmt(self, stmt: Stmt) -> None:
        before, self.at = self.at, stmt
        self.checked = {}
        self.check(stmt)
        self.at = before

    def check(self, stmt: Stmt) -> None:
        match stmt:
            case Block(body):
                kept = set(self.symbols), dict(self.buffers), dict(self.scalars)
                for part in body:
                    self.stmt(part)
                self.symbols, self.buffers, self.scalars = kept
            case For():
                self.loop(stmt)
            case Alloc(buffer):
                if buffer.role is not Role.REGISTER:
                    self.fail(f"%{buffer.name} is {buffer.role.value}, not register")
                if not all(d.is_const for d in (*buffer.shape, *buffer.strides)):
                    self.fail(f"registers %{buffer.name} have no static shape")
                self.declare(buffer)
            case Store(buffer, index, value):
                dtype = self.value(value)
                self.access(buffer, index, "store")
                if buffer.role is Role.IN:
                    self.fail(f"%{buffer.name} is an input")
                if dtype is not buffer.dtype:
                    self.fail(f"%{buffer.name} is {buffer.dtype}, the value is {dtype}")
            case Let(name, value):
                dtype = self.value(value)
                if dtype is not DType.I64:
                    self.fail(f"{name} is {dtype}, not i64")
                self.name_symbol(name)
            case Local(name, dtype, value):
                found = self.value(value)
                if found is not dtype:
                    self.fail(f"${name} is {dtype}, the value is {found}")
                self.name_scalar(stmt)
            case Accumulator(name, dtype, op):
                if op not in _REDUCTIONS:
                    self.fail(f"no reduction is called {op}")
                if dtype.compute is not dtype:
                    self.fail(f"${name} accumulates in {dtype}, which is storage only")
                self.name_scalar(stmt)
            case Accumulate(name, value):
                self.accumulate(name, self.value(value))
            case If(cond, then, otherwise):
                self.truth(cond, "the condition")
                self.inner(then)
                if otherwise is not None:
                    self.inner(otherwise)
            case Switch(selector, cases):
                self.dims((selector,), "the selector")
                numbers = [number for number, _ in cases]
                if len(set(numbers)) != len(numbers):
                    self.fail(f"cases {numbers} repeat")
                for _, case in cases:
                    self.inner(case)
            case Check(cond, _):
                self.truth(cond, "the condition")
            case Call():
                self.call(stmt)
            case _:
                self.fail(f"unknown statement {stmt!r}")

    def loop(self, loop: For) -> None:
        self.dims((loop.begin, loop.end), "the bounds")
        self.dims((loop.grain,), "the grain")
        if loop.step < 1:
            self.fail(f"step {loop.step} is not positive")
        static = loop.begin.is_const and loop.end.is_const
        if loop.kind is Kind.UNROLL and not static:
            self.fail(f"the unrolled loop over {loop.var} has no constant bounds")
        kept = (
            set(self.symbols),
            self.constant,
            self.outside,
            self.partial,
            self.parallel,
        )
        self.name_symbol(loop.var)
        if static and loop.kind in (Kind.UNROLL, Kind.VECTOR):
            self.constant = self.constant | {loop.var}
        if loop.kind is Kind.PARALLEL:
            if self.parallel:
                self.fail(f"parallel loop over {loop.var} is inside another")
            self.parallel = True
            registers = {
                f"%{b.name}" for b in self.buffers.values() if b.role is Role.REGISTER
            }
            self.outside = frozenset(self.scalars) | registers
        if loop.kind is Kind.VECTOR:
            grown = {s.name for s in statements(loop.body) if isinstance(s, Accumulate)}
            self.partial = self.partial | (grown & set(self.scalars))
        self.inner(loop.body)
        self.symbols, self.constant, self.outside, self.partial, self.parallel = kept

    def accumulate(self, name: str, dtype: DType) -> None:
        declared = self.scalars.get(name)
        if not isinstance(declared, Accumulator):
            self.fail(f"${name} is no accumulator in scope")
        if name in self.outside:
            self.fail(f"${name} is accumulated across a parallel loop")
        if declared.dtype is not dtype:
            self.fail(f"${name} is {declared.dtype}, the value is {dtype}")

    def call(self, call: Call) -> None:
        self.dims(call.sizes, "the sizes of a call")
        for buffer, index in call.arguments:
            self.access(buffer, index, "argument")
            if buffer.role is Role.REGISTER:
                self.fail(f"registers %{buffer.name} have no address to pass")
        if self.module is None:
            return
        callee = self.module.loops.get(call.function)
        if callee is None:
            self.fail(f"there is no loop @{call.function}")
        wanted = (len(callee.sizes), len(callee.buffers))
        if (len(call.sizes), len(call.arguments)) != wanted:
            self.fail(f"@{callee.name} takes {wanted[0]} sizes, {wanted[1]} buffers")
        for (buffer, _), target in zip(call.arguments, callee.buffers, strict=True):
            if buffer.dtype is not target.dtype:
                self.fail(
                    f"%{buffer.name} is {buffer.dtype}, %{target.name} of "
                    f"@{callee.name} is {target.dtype}"
                )
            if buffer.role is Role.IN and target.role is not Role.IN:
                self.fail(f"@{callee.name} writes to %{buffer.name}, an input")
        reached = list(self.reachable(callee))
        if any(func.name == self.func.name for func in reached):
            self.fail(f"@{callee.name} calls @{self.func.name} back")
        for func in reached:
            if self.parallel and _is_parallel(func):
                self.fail(f"@{func.name} has a parallel loop and is called from one")

    def reachable(self, func: LoopFunc) -> Iterator[LoopFunc]:
        assert self.module is not None
        seen: dict[str, LoopFunc] = {func.name: func}
        queue = [func]
        while queue:
            for stmt in statements(queue.pop().body):
                if isinstance(stmt, Call) and stmt.function not in seen:
                    found = self.module.loops.get(stmt.function)
                    if found is not None:
                        seen[stmt.function] = found
                        queue.append(found)
        return iter(seen.values())


def _is_parallel(func: LoopFunc) -> bool:
    return any(
        isinstance(stmt, For) and stmt.kind is Kind.PARALLEL
        for stmt in statements(func.body)
    )
