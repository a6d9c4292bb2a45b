"""What a legal loop function is, and its verifier.

Names (sizes, loop variables, Lets; buffers; scalars) are defined before use, in an
enclosing block, and not twice. Values have one type throughout; half floats are
only loaded, stored, selected and cast. `worker` is the first index of scratch and
nothing else. Registers have constant indices once loops of constant bounds, and
vector loops that do not exceed one, are written out. A parallel loop contains no
other, not through calls either, and what is accumulated or kept in registers does not
cross it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn
from weakref import ref

from pliant.errors import InternalError, PliantError
from pliant.ir.callees import callees, reached
from pliant.ir.graph import Module
from pliant.ir.identity import PerObject
from pliant.ir.infer import Attrs, InferContext
from pliant.ir.loop_known import KnownSizes
from pliant.ir.loop_walk import statements
from pliant.ir.loops import (
    DOT_PARTS,
    WORKER,
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
    Bits,
    Block,
    Buffer,
    Call,
    CallLibrary,
    Cast,
    Check,
    Const,
    Dispatch,
    Dot,
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
    Prefetch,
    Read,
    Role,
    Select,
    Stmt,
    Store,
    Switch,
    Unary,
    Variant,
    While,
    dtype_of,
    most,
)
from pliant.ir.ops_elementwise import SCALARS
from pliant.ir.reductions import COMBINES
from pliant.ir.spec_vectors import vectors_problem
from pliant.ir.text import MARK, print_loop, print_value
from pliant.ir.types import DType, TensorType, contiguous_strides
from pliant.sym import Expr, Facts

NEIGHBOURS = 5  # lines shown before and behind what is wrong
_NAMING = (Accumulator, Alloc, Let, Local)  # statements that bring a name


def verify_loop(func: LoopFunc, module: Module | None = None) -> None:
    """Raises InternalError if the loop function is not legal.

    Functions do not change: one that was found legal among the same functions is
    not looked at again.
    """
    known = _seen(func)
    called = None if module is None else reached(callees(func), module.loops)
    if called is None or not known.is_legal_with(called):
        _LoopChecker(func, module).function()
        if called is not None:
            known.legal = {name: ref(callee) for name, callee in called.items()}


@dataclass(slots=True)
class _Seen:
    """What is known of a loop function as long as it lives."""

    is_parallel: bool
    # The functions it calls, also through others, with which it was found legal.
    legal: dict[str, ref[LoopFunc]] | None = None

    def is_legal_with(self, called: Mapping[str, LoopFunc]) -> bool:
        legal = self.legal
        return legal is not None and {n: r() for n, r in legal.items()} == called


def _look(func: LoopFunc) -> _Seen:
    return _Seen(any(map(_is_parallel, statements(func.body))))


def _is_parallel(stmt: Stmt) -> bool:
    """Whether a statement itself may use all threads."""
    parallel = isinstance(stmt, For) and stmt.kind is Kind.PARALLEL
    return parallel or isinstance(stmt, CallLibrary)


_seen = PerObject(_look)


@lru_cache(maxsize=4096)
def _scalar_result(op: str, dtypes: tuple[DType, ...]) -> DType | str:
    """The dtype an elementwise op gives, or what is wrong."""
    definition = SCALARS.get(op)
    arity = (len(dtypes), len(dtypes))
    if definition is None:
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
    """One loop function, statement by statement."""

    def __init__(self, func: LoopFunc, module: Module | None) -> None:
        self.func, self.module = func, module
        self.symbols: set[str] = set()
        self.constant: set[str] = set()  # variables of written-out loops
        self.buffers: dict[str, Buffer] = {}
        self.scalars: dict[str, Local | Accumulator] = {}
        self.outside: frozenset[str] = frozenset()  # scalars, registers beyond parallel
        self.partial: frozenset[str] = frozenset()  # accumulators of vector loops
        self.parallel = False
        self.known = KnownSizes()
        self.in_vector = False
        self.checked: dict[int, DType] = {}  # values of the statement, by identity
        self.at: Stmt | None = None

    def fail(self, problem: str) -> NoReturn:
        lines = print_loop(self.func, self.at).splitlines()
        marked = next((i for i, line in enumerate(lines) if MARK in line), 0)
        first = max(marked - NEIGHBOURS, 0)
        shown = "\n".join(lines[first : marked + NEIGHBOURS + 1])
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
            names = dim.symbols()
            if self.symbols.issuperset(names):  # of which `worker` is none
                continue
            for name in names:
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
        if known is not buffer and known != buffer:
            self.fail(f"buffer %{buffer.name} is not as it was declared")
        if len(index) != len(buffer.shape):
            self.fail(
                f"{what} of %{buffer.name} has {len(index)} indices, its rank is "
                f"{len(buffer.shape)}"
            )
        plain = index
        if buffer.role is Role.WORK and index and index[0].symbol == WORKER:
            plain = index[1:]
        self.dims(plain, f"{what} of %{buffer.name}")
        if buffer.role is Role.REGISTER:
            if f"%{buffer.name}" in self.outside:
                self.fail(f"registers %{buffer.name} are outside the parallel loop")
            if not all(self.constant.issuperset(i.symbols()) for i in index):
                loose = {s for i in index for s in i.symbols()} - self.constant
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
            case Dot(parts, x, y, z):
                self.dot(parts, (x, y, z), value)
            case Select(cond, x, y):
                self.truth(cond, "the condition of a select")
                self.same(self.value(x), self.value(y), value)
            case Cast(x, _):
                self.value(x)
            case Bits(x, dtype):
                if self.value(x).bytes != dtype.bytes:
                    self.fail(f"bits of another size: {value!r}")
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

    def dot(self, parts: str, words: tuple[LoopValue, ...], value: LoopValue) -> None:
        if parts not in DOT_PARTS:
            self.fail(f"words have no parts called {parts}")
        for word in words:
            self.same(DType.I32, self.value(word), value)

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
        if isinstance(stmt, _NAMING):
            self.scoped((stmt,))
        else:
            self.stmt(stmt)

    def scoped(self, body: Sequence[Stmt]) -> None:
        kept = set(self.symbols), dict(self.buffers), dict(self.scalars), self.known
        for part in body:
            self.stmt(part)
        self.symbols, self.buffers, self.scalars, self.known = kept

    def stmt(self, stmt: Stmt) -> None:
        before, self.at = self.at, stmt
        self.checked = {}
        self.check(stmt)
        self.at = before

    def check(self, stmt: Stmt) -> None:
        match stmt:
            case Block(body):
                self.scoped(body)
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
                self.known = self.known.behind(stmt)
            case Local(name, dtype, value):
                found = self.value(value)
                if found is not dtype:
                    self.fail(f"${name} is {dtype}, the value is {found}")
                self.name_scalar(stmt)
            case Accumulator(name, dtype, op):
                if op not in COMBINES:
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
            case While(cond, body):
                if self.in_vector:
                    self.fail("a while is inside a loop that runs by lanes")
                self.truth(cond, "the condition")
                self.inner(body)
            case Switch(selector, cases):
                self.dims((selector,), "the selector")
                numbers = [number for number, _ in cases]
                if len(set(numbers)) != len(numbers):
                    self.fail(f"cases {numbers} repeat")
                for _, case in cases:
                    self.inner(case)
            case Dispatch(variants):
                self.dispatch(variants)
            case Check(cond, _, value):
                self.truth(cond, "the condition")
                if value is not None and self.value(value) is not DType.I64:
                    self.fail("what a check tells of is no i64")
            case Prefetch(buffer, index):
                self.access(buffer, index, "prefetch")
            case Call():
                self.call(stmt)
            case CallLibrary():
                self.library(stmt)
            case _:
                self.fail(f"unknown statement {stmt!r}")

    def dispatch(self, variants: tuple[Variant, ...]) -> None:
        if not variants or variants[-1].guards:
            self.fail("the last variant must be one without guards")
        for variant in variants:
            for guard in variant.guards:
                self.dims((guard.lhs, guard.rhs), f"the guards of {variant.name!r}")
            self.inner(variant.body)

    def loop(self, loop: For) -> None:
        self.dims((loop.begin, loop.end), "the bounds")
        self.dims((loop.grain,), "the grain")
        if loop.step < 1:
            self.fail(f"step {loop.step} is not positive")
        static = loop.begin.is_const and loop.end.is_const
        if loop.kind is Kind.UNROLL and not static:
            self.fail(f"the unrolled loop over {loop.var} has no constant bounds")
        problem = vectors_problem(loop, self.known, self.in_vector)
        if problem is not None:
            self.fail(problem)
        kept = (
            set(self.symbols),
            self.constant,
            self.outside,
            self.partial,
            self.parallel,
            self.known,
            self.in_vector,
        )
        self.name_symbol(loop.var)
        bounded = loop.begin.is_const and most(loop.end) is not None
        if (static and loop.kind is Kind.UNROLL) or (
            bounded and loop.kind is Kind.VECTOR
        ):
            self.constant = self.constant | {loop.var}
        self.known = self.known.inside(loop)
        self.in_vector = self.in_vector or loop.runs_by_lanes
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
        (
            self.symbols,
            self.constant,
            self.outside,
            self.partial,
            self.parallel,
            self.known,
            self.in_vector,
        ) = kept

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
            if buffer.dtype is not target.dtype and not _is_memory(buffer):
                self.fail(
                    f"%{buffer.name} is {buffer.dtype}, %{target.name} of "
                    f"@{callee.name} is {target.dtype}"
                )
            if buffer.role is Role.IN and target.role is not Role.IN:
                self.fail(f"@{callee.name} writes to %{buffer.name}, an input")
        called = reached([callee.name], self.module.loops)
        if self.func.name in called:
            self.fail(f"@{callee.name} calls @{self.func.name} back")
        for func in called.values():
            if self.parallel and _seen(func).is_parallel:
                self.fail(f"@{func.name} has a parallel loop and is called from one")

    def library(self, call: CallLibrary) -> None:
        self.dims(call.sizes, "the sizes of a library function")
        roles = [buffer.role for buffer in call.buffers]
        if roles != sorted(roles, key=_LIBRARY_ROLES.index):
            self.fail("buffers of a library function are in, out, work, in this order")
        for buffer in call.buffers:
            if self.buffers.get(buffer.name) != buffer:
                self.fail(f"buffer %{buffer.name} is not in scope")
            if buffer.strides != contiguous_strides(buffer.shape):
                self.fail(f"%{buffer.name} has gaps: a library function takes all")
        if self.parallel or self.in_vector:
            self.fail(f"{call.symbol} is called in a parallel or vector loop")
        known = self.module is not None and [
            library.symbol for library in self.module.libraries.values()
        ]
        if known is not False and call.symbol not in known:
            self.fail(f"there is no library function {call.symbol}")


_LIBRARY_ROLES = (Role.IN, Role.OUT, Role.WORK)


def _is_memory(buffer: Buffer) -> bool:
    """Whether a buffer is bytes that may hold values of any type."""
    return buffer.dtype is DType.U8 and len(buffer.shape) == 1
