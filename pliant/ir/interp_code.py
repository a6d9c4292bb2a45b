"""From a loop function to Python source, one line per value, on NumPy scalars.

The code checks every access against its buffer's shape, and that a register is written
before it is read; faults go to the run (interp_loops.py) that it is given as `cx`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.ir.interp_memory import ByteRange, LoopFault, storage
from pliant.ir.interp_numbers import (
    bf16_bits,
    bf16_value,
    convert,
    literal,
    reinterpret,
    start_of,
)
from pliant.ir.interp_words import DOTS, fma
from pliant.ir.loop_walk import statements
from pliant.ir.loops import (
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
    Rest,
    Role,
    Select,
    Setting,
    Stmt,
    Store,
    Switch,
    Unary,
    While,
    dtype_of,
)
from pliant.ir.ops_elementwise import SCALARS
from pliant.ir.reductions import COMBINES
from pliant.ir.types import DType
from pliant.sym import (
    Atom,
    CeilDiv,
    Cond,
    Expr,
    FloorDiv,
    Max,
    Min,
    Mod,
    Symbol,
    operands,
)

_COND_SIGNS = {"eq": "==", "ne": "!=", "le": "<=", "lt": "<"}


# On a run, its sizes and its memories.
Code = Callable[[object, Sequence[int], Sequence[ByteRange]], None]


def compile_loop(func: LoopFunc, check_races: bool) -> Code:
    """What runs a loop function."""
    return _Compiler(func, check_races).code()


def source_of(func: LoopFunc) -> str:
    """The Python text a function runs as."""
    compiler = _Compiler(func, False)
    compiler.code()
    return "\n".join(compiler.lines)


@dataclass(frozen=True, slots=True)
class _Place:
    """How the code reaches a buffer."""

    array: str
    start: str
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    number: int  # of the parameter; -1 for registers


class _Compiler:
    def __init__(self, func: LoopFunc, check_races: bool) -> None:
        self.func, self.check_races = func, check_races
        self.lines: list[str] = []
        self.depth = 1
        self.fresh = 0
        self.globals: dict[str, Any] = {"np": np, "sqrt": np.sqrt}
        self.symbols: dict[str, str] = {WORKER: "worker"}
        self.scalars: dict[str, str] = {}
        self.places: dict[str, _Place] = {}
        self.used: set[str] = set()  # buffers that are read, written or passed on
        self.prefetched: set[str] = set()
        self.accumulators: dict[str, Accumulator] = {}
        self.memo: dict[int, str] = {}
        for stmt in statements(func.body):
            if isinstance(stmt, Accumulator):
                self.accumulators[stmt.name] = stmt

    def code(self) -> Code:
        func = self.func
        self.lines.append("def run(cx, sizes, memories):")
        self.emit("worker = 0")
        for number, size in enumerate(func.sizes):
            self.symbols[size] = self.name("n")
            self.emit(f"{self.symbols[size]} = sizes[{number}]")
        spans: dict[str, tuple[int, int]] = {}
        for number, buffer in enumerate(func.buffers):
            first = len(self.lines)
            self.parameter(number, buffer)
            spans[buffer.name] = (first, len(self.lines))
        self.stmt(func.body)
        for name in self.prefetched - self.used:  # may lie anywhere: not checked
            first, last = spans[name]
            self.lines[first:last] = ["    pass"] * (last - first)
        exec(
            compile("\n".join(self.lines), f"<loop {func.name}>", "exec"), self.globals
        )
        code: Code = self.globals["run"]
        return code

    # -- pieces

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def name(self, hint: str) -> str:
        self.fresh += 1
        return f"{hint}{self.fresh}"

    def value_name(self, text: str) -> str:
        name = self.name("t")
        self.emit(f"{name} = {text}")
        return name

    def held(self, thing: Any) -> str:
        """A name in the code for an object."""
        name = self.name("c")
        self.globals[name] = thing
        return name

    def dim(self, expr: Expr) -> str:
        """Python text of an expression, safe as an operand."""
        terms = []
        for coefficient, factors in expr.terms:
            parts = [str(coefficient)] if coefficient != 1 or not factors else []
            for atom, power in factors:
                parts += [self.atom(atom)] * power
            terms.append(" * ".join(parts))
        if not terms:
            return "0"
        bare = len(terms) == 1 and terms[0].isidentifier()
        return terms[0] if bare else f"({' + '.join(terms)})"

    def cond(self, cond: Cond) -> str:
        left, right = self.dim(cond.lhs), self.dim(cond.rhs)
        if cond.kind == "divides":
            rest = self.atom(Mod(cond.rhs, cond.lhs))
            return f"({right} == 0 if {left} == 0 else {rest} == 0)"
        return f"{left} {_COND_SIGNS[cond.kind]} {right}"

    def atom(self, atom: Atom) -> str:
        inner = [self.dim(arg) for arg in operands(atom)]
        if isinstance(atom, FloorDiv | CeilDiv | Mod) and not _is_positive(atom.den):
            inner[1] = f"max({inner[1]}, 1)"  # a denominator below 1 counts as 1
        match atom:
            case Symbol(name):
                if name not in self.symbols:
                    raise LoopFault(f"'{name}' is undefined in loop @{self.func.name}")
                return self.symbols[name]
            case FloorDiv():
                return f"({inner[0]} // {inner[1]})"
            case CeilDiv():
                return f"(-(-{inner[0]} // {inner[1]}))"
            case Mod():
                return f"({inner[0]} % {inner[1]})"
            case Min():
                return f"min({', '.join(inner)})"
            case Max():
                return f"max({', '.join(inner)})"
        raise LoopFault(f"unknown atom {atom}")

    def parameter(self, number: int, buffer: Buffer) -> None:
        array, start = self.name("a"), self.name("o")
        shape = tuple(self.value_name(self.dim(d)) for d in buffer.shape)
        strides = tuple(self.value_name(self.dim(s)) for s in buffer.strides)
        self.emit(f"m{number} = memories[{number}]")
        if buffer.role is Role.WORK:
            self.globals["Memory"] = ByteRange
            self.emit(f"m{number} = Memory(m{number}.data, m{number}.offset, False)")
        self.emit(
            f"{array}, {start} = cx.typed({self.func.name!r}, {self.held(buffer)}, "
            f"m{number}, {_tuple(shape)}, {_tuple(strides)})"
        )
        if self.check_races:
            self.emit(f"p{number} = {array}.ctypes.data")
        self.places[buffer.name] = _Place(array, start, shape, strides, number)

    def address(self, buffer: Buffer, index: tuple[Expr, ...], verb: str) -> str:
        """Emits the checks; gives the text of the flat element number."""
        place = self.place(buffer)
        if len(index) != len(place.shape):
            raise LoopFault(
                f"%{buffer.name} of rank {len(place.shape)} is indexed by "
                f"{len(index)} in loop @{self.func.name}"
            )
        names = [self.value_name(self.dim(i)) for i in index]
        if names:
            tests = [f"0 <= {i} < {d}" for i, d in zip(names, place.shape, strict=True)]
            what = f"{verb} of %{buffer.name}"
            self.emit(f"if not ({' and '.join(tests)}):")
            self.emit(
                f"    cx.outside({self.func.name!r}, {what!r}, {_tuple(names)}, "
                f"{_tuple(place.shape)})"
            )
        parts = [f"{i} * {s}" for i, s in zip(names, place.strides, strict=True)]
        return " + ".join([place.start, *parts])

    def place(self, buffer: Buffer) -> _Place:
        if buffer.name not in self.places:
            raise LoopFault(f"%{buffer.name} is undefined in loop @{self.func.name}")
        self.used.add(buffer.name)
        return self.places[buffer.name]

    def touched(self, buffer: Buffer, address: str, writes: bool) -> None:
        number = self.place(buffer).number
        if self.check_races and number >= 0:
            size = storage(buffer.dtype).itemsize
            self.emit(f"if m{number}.shared:")
            self.emit(
                f"    cx.touch({self.func.name!r}, {'%' + buffer.name!r}, "
                f"p{number} + ({address}) * {size}, {writes})"
            )

    # -- values

    def value(self, value: LoopValue) -> str:
        """Emits the value; the name that holds it. A shared part is emitted once."""
        if id(value) not in self.memo:
            self.memo[id(value)] = self.value_text(value)
        return self.memo[id(value)]

    def value_text(self, value: LoopValue) -> str:
        match value:
            case Const(number, dtype):
                return self.held(literal(number, dtype))
            case Index(dim):
                return self.value_name(f"np.int64({self.dim(dim)})")
            case Load():
                return self.load(value)
            case Read(name, _):
                if name not in self.scalars:
                    raise LoopFault(f"${name} is undefined in loop @{self.func.name}")
                # A copy: an accumulator may change before the value is used again.
                return self.value_name(self.scalars[name])
            case Unary(op, x):
                return self.scalar(op, (x,), dtype_of(value))
            case Binary(op, x, y):
                return self.scalar(op, (x, y), dtype_of(value))
            case Fma(x, y, z):
                return self.apply("fma", fma, (x, y, z), dtype_of(value))
            case Dot(parts, x, y, z):
                return self.apply(parts, DOTS.get(parts), (x, y, z), DType.I32)
            case Select(cond, x, y):
                c, a, b = self.value(cond), self.value(x), self.value(y)
                return self.value_name(f"{a} if {c} else {b}")
            case Cast(x, dtype):
                return self.cast(self.value(x), dtype_of(x), dtype)
            case Bits(x, dtype):
                types = f"{self.held(dtype_of(x))}, {self.held(dtype)}"
                bits = self.function(reinterpret)
                return self.value_name(f"{bits}({self.value(x)}, {types})")
        raise LoopFault(f"unknown value {value!r}")

    def load(self, load: Load) -> str:
        buffer = load.buffer
        if load.where is None:
            return self.element(buffer, load.index)
        result = self.value_name(self.held(literal(0, buffer.dtype)))
        self.emit(f"if {self.value(load.where)}:")
        self.depth += 1
        self.emit(f"{result} = {self.element(buffer, load.index)}")
        self.depth -= 1
        return result

    def element(self, buffer: Buffer, index: tuple[Expr, ...]) -> str:
        address = self.address(buffer, index, "load")
        self.touched(buffer, address, writes=False)
        place = self.place(buffer)
        name = self.value_name(f"{place.array}[{address}]")
        if place.number < 0:
            at = _tuple([self.dim(i) for i in index])
            self.emit(f"if {name} is None:")
            self.emit(f"    cx.undefined({self.func.name!r}, '%{buffer.name}', {at})")
        elif buffer.dtype is DType.BF16:
            return self.value_name(f"{self.function(bf16_value)}({name})")
        return name

    def function(self, function: Callable[..., Any]) -> str:
        name = f"f_{getattr(function, '__name__', 'lambda').strip('<>')}_{id(function)}"
        self.globals[name] = function
        return name

    def scalar(self, op: str, parts: tuple[LoopValue, ...], result: DType) -> str:
        """An elementwise op, as its row says."""
        row = SCALARS.get(op)
        if row is None or row.meaning is None:
            raise LoopFault(f"unknown op '{op}' in loop @{self.func.name}")
        return self.apply(op, row.meaning, parts, result, row.inline)

    def apply(
        self,
        op: str,
        function: Callable[..., Any] | None,
        parts: tuple[LoopValue, ...],
        result: DType,
        inline: str = "",
    ) -> str:
        if function is None:
            raise LoopFault(f"unknown op '{op}' in loop @{self.func.name}")
        names = [self.value(part) for part in parts]
        dtype = dtype_of(parts[0])
        # Half floats are storage only: computed in f32, then rounded back.
        names = [self.cast(name, dtype, dtype.compute) for name in names]
        if inline:
            name = self.value_name(inline.format(*names))
        else:
            name = self.value_name(f"{self.function(function)}({', '.join(names)})")
        return self.cast(name, result.compute, result)

    def cast(self, name: str, source: DType, target: DType) -> str:
        if source is target:
            return name
        if target is DType.F32:
            return self.value_name(f"np.float32({name})")
        return self.value_name(f"{self.function(convert)}({name}, {self.held(target)})")

    # -- statements

    def scoped(self, stmt: Stmt) -> None:
        """A statement inside another: its names end with it."""
        kept = dict(self.symbols), dict(self.scalars), dict(self.places)
        self.depth += 1
        self.emit("pass")
        self.stmt(stmt)
        self.depth -= 1
        self.symbols, self.scalars, self.places = kept

    def stmt(self, stmt: Stmt) -> None:
        self.memo = {}  # values are not carried over: memory may have changed
        match stmt:
            case Block(body):
                kept = dict(self.symbols), dict(self.scalars), dict(self.places)
                for inner in body:
                    self.stmt(inner)
                self.symbols, self.scalars, self.places = kept
            case For():
                self.loop(stmt)
            case Alloc(buffer):
                self.registers(buffer)
            case Store(buffer, index, value):
                name = self.value(value)
                address = self.address(buffer, index, "store")
                self.touched(buffer, address, writes=True)
                place = self.place(buffer)
                if buffer.dtype is DType.BF16 and place.number >= 0:
                    name = f"{self.function(bf16_bits)}({name})"
                self.emit(f"{place.array}[{address}] = {name}")
            case Let(symbol, value):
                text = f"int({self.value(value)})"
                self.symbols[symbol] = self.name("i")
                self.emit(f"{self.symbols[symbol]} = {text}")
            case Local(name, _, value):
                self.scalars[name] = self.value(value)
            case Accumulator(name, dtype, op):
                start = self.held(start_of(op, dtype))
                self.scalars[name] = self.name("s")
                self.emit(f"{self.scalars[name]} = {start}")
            case Accumulate(name, value):
                self.accumulate(name, value)
            case If(cond, then, otherwise):
                self.emit(f"if {self.value(cond)}:")
                self.scoped(then)
                if otherwise is not None:
                    self.emit("else:")
                    self.scoped(otherwise)
            case While(cond, body):
                self.emit("while cx.failed is None:")
                self.depth += 1
                self.emit(f"if not {self.value(cond)}: break")
                self.depth -= 1
                self.scoped(body)
            case Switch(selector, cases):
                chosen = self.value_name(self.dim(selector))
                for position, (number, case) in enumerate(cases):
                    self.emit(f"{'elif' if position else 'if'} {chosen} == {number}:")
                    self.scoped(case)
            case Dispatch(variants):
                for position, variant in enumerate(variants):
                    tests = [self.cond(guard) for guard in variant.guards] or ["True"]
                    word = "elif" if position else "if"
                    self.emit(f"{word} {' and '.join(tests)}:")
                    self.scoped(variant.body)
            case Check(cond, number, value):
                shown = "None" if value is None else self.value(value)
                self.emit(f"if not {self.value(cond)}:")
                self.emit(f"    cx.fail({self.func.name!r}, {number}, {shown})")
            case Prefetch(buffer, _):
                self.prefetched.add(buffer.name)
            case Call():
                self.call(stmt)
            case CallLibrary():
                self.library(stmt)
            case _:
                raise LoopFault(f"unknown statement {stmt!r}")

    def loop(self, loop: For) -> None:
        var = self.name("i")
        span = f"range({self.dim(loop.begin)}, {self.dim(loop.end)}, {loop.step})"
        kept = dict(self.symbols)
        self.planned(loop, span)
        self.symbols[loop.var] = var
        if loop.kind is Kind.PARALLEL:
            self.emit(f"cx.begin({self.func.name!r})")
            trips, number = self.value_name(f"len({span})"), self.name("k")
            self.emit(f"for {number}, {var} in enumerate({span}):")
            self.emit(f"    worker = {number} * cx.workers // {trips}")
            self.emit(f"    cx.iteration = {number}")
        else:
            self.emit(f"for {var} in {span}:")
        self.scoped(loop.body)
        if loop.kind is Kind.PARALLEL:
            self.emit("cx.iteration = None; worker = 0")
        self.symbols = kept

    def planned(self, loop: For, span: str) -> None:
        """A check that there are no more iterations than a loop is written out for."""
        vectors = loop.vectors
        if vectors is None or loop.kind is not Kind.VECTOR:
            return
        wrong = ""
        if vectors.most is not None:
            wrong = f"len({span}) > {vectors.most}"
        elif vectors.rest is Rest.WHOLE:
            wrong = f"len({span}) % {vectors.together}"
        if wrong:
            self.emit(f"if {wrong}:")
            self.emit(f"    cx.unplanned({self.func.name!r}, {loop.var!r}, {span})")

    def registers(self, buffer: Buffer) -> None:
        shape = [dim.value for dim in buffer.shape]
        strides = [dim.value for dim in buffer.strides]
        steps = [max(d - 1, 0) * s for d, s in zip(shape, strides, strict=True)]
        array = self.name("r")
        self.emit(f"{array} = [None] * {1 + sum(steps)}")
        self.places[buffer.name] = _Place(
            array, "0", tuple(map(str, shape)), tuple(map(str, strides)), -1
        )

    def accumulate(self, name: str, value: LoopValue) -> None:
        if name not in self.scalars or name not in self.accumulators:
            raise LoopFault(f"${name} is no accumulator in loop @{self.func.name}")
        target, declared = self.scalars[name], self.accumulators[name]
        op, dtype = COMBINES[declared.op], declared.dtype
        if dtype is DType.BOOL:
            op = "logical_or" if declared.op == "max" else "logical_and"
        x = self.cast(self.value(value), dtype, dtype.compute)
        held = self.cast(target, dtype, dtype.compute)
        name = self.value_name(SCALARS[op].inline.format(held, x))
        self.emit(f"{target} = {self.cast(name, dtype.compute, dtype)}")

    def call(self, call: Call) -> None:
        passed = []
        for buffer, index in call.arguments:
            place = self.place(buffer)
            if place.number < 0:
                raise LoopFault(f"registers %{buffer.name} have no address to pass")
            parts = [
                f"{self.dim(i)} * {s}"
                for i, s in zip(index, place.strides, strict=True)
            ]
            size = storage(buffer.dtype).itemsize
            distance = " + ".join(parts) or "0"
            passed.append(f"m{place.number}.at(({distance}) * {size})")
        sizes = _tuple([self.dim(size) for size in call.sizes])
        self.emit(f"cx.call({call.function!r}, {sizes}, {_tuple(passed)})")

    def library(self, call: CallLibrary) -> None:
        places = [self.place(buffer) for buffer in call.buffers]
        memories = _tuple([f"m{place.number}" for place in places])
        shapes = _tuple([_tuple(place.shape) for place in places])
        known = ", ".join(f"{k!r}: {self.setting(v)}" for k, v in call.settings)
        self.emit(f"cx.library({self.held(call)}, {memories}, {shapes}, {{{known}}})")

    def setting(self, value: Setting) -> str:
        match value:
            case Expr():
                return self.dim(value)
            case tuple():
                return _tuple([self.setting(part) for part in value])
            case _:
                return self.held(value)


def _is_positive(dim: Expr) -> bool:
    return dim.is_const and dim.value >= 1


def _tuple(texts: Sequence[str]) -> str:
    return f"({', '.join(texts)},)" if texts else "()"
