"""Executes loop functions element by element: the oracle of the lowered program.

A function is turned into Python source once, one line per value, on NumPy scalars, so
that every operation rounds and wraps as its dtype does. Every access is checked against
its buffer's shape; a register must be written before it is read. Loops of every kind
run in order; `check_races` reports two parallel iterations that meet in one element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.errors import InternalError, PliantError
from pliant.ir.graph import Module
from pliant.ir.loops import (
    DOT_PARTS,
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
    dtype_of,
    statements,
)
from pliant.ir.types import NUMPY, DType
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

Array = np.ndarray[Any, np.dtype[Any]]


class LoopFault(InternalError):
    """A loop function did what no loop function may do."""

    def __init__(self, detail: str) -> None:
        super().__init__("interpreter", detail)


class CheckFailure(PliantError):
    """A Check of a loop function failed."""

    def __init__(self, function: str, number: int) -> None:
        self.function, self.number = function, number
        super().__init__(f"check {number} of loop @{function} failed")


# ---- arithmetic: the meaning of the elementwise ops, for arrays and for scalars


def bf16_bits(x: Any) -> Any:
    """The bits of f32 numbers rounded to bf16, half to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)[()]


def bf16_value(bits: Any) -> Any:
    """The f32 numbers of bf16 bits."""
    wide = np.asarray(bits, np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32)[()]


_ERF = np.frompyfunc(math.erf, 1, 1)


def _erf(x: Any) -> Any:
    return np.asarray(_ERF(x)).astype(x.dtype)[()]


def _sign(x: Any) -> Any:
    # As torch: 0 for NaN.
    return ((x > 0) * x.dtype.type(1) - (x < 0) * x.dtype.type(1)).astype(x.dtype)


def _round(x: Any) -> Any:
    return np.rint(x) if x.dtype.kind == "f" else x


def _power(x: Any, y: Any) -> Any:
    if x.dtype.kind == "f":
        return np.power(x, y)
    # 1/x**|y| towards zero: only 1 and -1 keep a magnitude.
    small = np.where(abs(x) == 1, np.power(x, np.abs(y) % 2), 0).astype(x.dtype)
    return np.where(y < 0, small, np.power(x, np.maximum(y, 0)))[()]


def _decay(x: Any) -> Any:
    return np.where(np.exp(x) < np.finfo(x.dtype).tiny, 0, np.exp(x)).astype(x.dtype)[
        ()
    ]


UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": _sign,
    "exp": np.exp,
    "decay": _decay,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "erf": _erf,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": _round,
    "trunc": np.trunc,
    "bitwise_not": np.invert,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "logical_not": np.logical_not,
}

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": _power,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "atan2": np.arctan2,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
}

# The same, where Python has an operator for scalars.
_INLINE: dict[str, str] = {
    "neg": "-{}",
    "abs": "abs({})",
    "rsqrt": "1 / sqrt({})",
    "reciprocal": "1 / {}",
    "bitwise_not": "~{}",
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "floordiv": "{} // {}",
    "mod": "{} % {}",
    "minimum": "{0} if {0} < {1} or {0} != {0} else {1}",
    "maximum": "{0} if {0} > {1} or {0} != {0} else {1}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "logical_and": "{} & {}",
    "logical_or": "{} | {}",
    "logical_xor": "{} ^ {}",
    "bitwise_and": "{} & {}",
    "bitwise_or": "{} | {}",
    "bitwise_xor": "{} ^ {}",
    "shift_left": "{} << {}",
    "shift_right": "{} >> {}",
}
_COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def convert(x: Any, source: DType, target: DType) -> Any:
    """A cast, as C does it; bf16 is an f32 that bf16 can hold."""
    if target is DType.BOOL:
        return np.not_equal(x, 0)
    if target is DType.BF16:
        return bf16_value(bf16_bits(np.asarray(x).astype(np.float32)))
    return np.asarray(x).astype(NUMPY[target])[()]


def literal(number: float | int | bool, dtype: DType) -> Any:
    """The scalar of a number; an integer wraps."""
    return convert(np.asarray(number), DType.F64, dtype)


def identity(op: str, dtype: DType) -> Any:
    """What a reduction starts from."""
    match op, dtype.kind:
        case ("sum", _):
            return literal(0, dtype)
        case ("prod", _):
            return literal(1, dtype)
        case ("max", "f"):
            return literal(-math.inf, dtype)
        case ("min", "f"):
            return literal(math.inf, dtype)
        case ("max" | "min", "b"):
            return np.bool_(op == "min")
        case ("max", _):
            return np.iinfo(NUMPY[dtype]).min + literal(0, dtype)  # type: ignore[type-var]
        case ("min", _):
            return np.iinfo(NUMPY[dtype]).max + literal(0, dtype)  # type: ignore[type-var]
    raise LoopFault(f"no reduction is called '{op}'")


# ---- memory


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """An address: bytes, and an offset into them."""

    data: Array
    offset: int = 0
    shared: bool = True  # False for a worker's scratch, which iterations take over

    def at(self, distance: int) -> Memory:
        return Memory(self.data, self.offset + distance, self.shared)


def memory_of(array: Array) -> Memory:
    """The memory of a contiguous array; writes to it are seen in the array."""
    if not array.flags.c_contiguous:
        raise ValueError("a buffer must be contiguous; give a Memory for a strided one")
    return Memory(array.reshape(-1).view(np.uint8))


def storage(dtype: DType) -> np.dtype[Any]:
    """How an element lies in memory: bf16 as its bits."""
    return np.dtype(np.uint16) if dtype is DType.BF16 else NUMPY[dtype]


class _Run:
    """The state of one `run_loop`: what its functions share."""

    def __init__(self, module: Module | None, workers: int, check_races: bool) -> None:
        self.module, self.workers, self.check_races = module, workers, check_races
        self.iteration: int | None = None
        self.writers: dict[int, int] = {}
        self.failed: tuple[str, int] | None = None

    def typed(
        self, func: str, buffer: Buffer, memory: Memory, shape: Any, strides: Any
    ) -> tuple[Array, int]:
        """The elements of a memory, and where the buffer starts among them."""
        kind = storage(buffer.dtype)
        where = f"buffer %{buffer.name} {tuple(shape)} of loop @{func}"
        if memory.offset % kind.itemsize:
            raise LoopFault(f"{where} starts at byte {memory.offset}: misaligned")
        if min(shape, default=1) < 0:
            raise LoopFault(f"{where} has a negative extent")
        count = memory.data.size // kind.itemsize
        start = memory.offset // kind.itemsize
        steps = [(d - 1) * s for d, s in zip(shape, strides, strict=True)]
        low = start + sum(min(step, 0) for step in steps)
        high = start + sum(max(step, 0) for step in steps)
        if min(shape, default=1) > 0 and not 0 <= low <= high < count:
            raise LoopFault(
                f"{where} spans elements {low} to {high} of a memory of {count}"
            )
        return memory.data[: count * kind.itemsize].view(kind), start

    def outside(self, func: str, what: str, index: Any, shape: Any) -> None:
        at = ", ".join(map(str, index))
        raise LoopFault(f"{what}[{at}] is outside {tuple(shape)} in loop @{func}")

    def undefined(self, func: str, what: str, index: Any) -> None:
        at = ", ".join(map(str, index))
        raise LoopFault(f"{what}[{at}] is read before it is written in loop @{func}")

    def fail(self, func: str, number: int) -> None:
        self.failed = self.failed or (func, number)

    def begin(self, func: str) -> None:
        if self.iteration is not None:
            raise LoopFault(f"a parallel loop of @{func} runs inside another")
        self.writers.clear()

    def touch(self, func: str, what: str, address: int, writes: bool) -> None:
        if self.iteration is None:
            return
        first = self.writers.get(address, self.iteration)
        if first != self.iteration:
            verb = "write" if writes else "use"
            raise LoopFault(
                f"parallel iterations {first} and {self.iteration} of loop @{func} "
                f"both {verb} one element of {what}"
            )
        if writes:
            self.writers[address] = first

    def call(self, name: str, sizes: Any, memories: Any) -> None:
        if self.module is None or name not in self.module.loops:
            raise LoopFault(f"call of @{name}, which the module does not have")
        self.run(self.module.loops[name], sizes, memories)

    def run(self, func: LoopFunc, sizes: Any, memories: Any) -> None:
        if (len(sizes), len(memories)) != (len(func.sizes), len(func.buffers)):
            raise LoopFault(
                f"loop @{func.name} takes {len(func.sizes)} sizes and "
                f"{len(func.buffers)} buffers, not {len(sizes)} and {len(memories)}"
            )
        _compiled(func, self.check_races)(self, sizes, memories)


def run_loop(
    func: LoopFunc,
    module: Module | None,
    sizes: Mapping[str, int] | Sequence[int],
    buffers: Sequence[Array | Memory],
    *,
    workers: int = 1,
    check_races: bool = False,
) -> None:
    """Runs a loop function on the given memory; results are in its "out" buffers.

    `workers` is how many share a parallel loop, in contiguous parts.
    """
    if isinstance(sizes, Mapping):
        sizes = [sizes[name] for name in func.sizes]
    memories = [b if isinstance(b, Memory) else memory_of(b) for b in buffers]
    run = _Run(module, workers, check_races)
    with np.errstate(all="ignore"):
        run.run(func, [int(size) for size in sizes], memories)
    if run.failed is not None:
        raise CheckFailure(*run.failed)


# ---- from a loop function to Python

_Code = Callable[[_Run, Sequence[int], Sequence[Memory]], None]
_CACHE: dict[tuple[int, bool], tuple[LoopFunc, _Code]] = {}
_CACHE_SIZE = 512


def _compiled(func: LoopFunc, check_races: bool) -> _Code:
    # By identity: a deep comparison would cost more than it saves. The function is
    # held, so its id is not given away while the entry lives.
    key = (id(func), check_races)
    if key not in _CACHE:
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        _CACHE[key] = (func, _Compiler(func, check_races).code())
    return _CACHE[key][1]


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

    def code(self) -> _Code:
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
        code: _Code = self.globals["run"]
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
            return f"{right} % {left} == 0"
        return f"{left} {_COND_SIGNS[cond.kind]} {right}"

    def atom(self, atom: Atom) -> str:
        inner = [self.dim(arg) for arg in operands(atom)]
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
            self.globals["Memory"] = Memory
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
                return self.apply(op, UNARY.get(op), (x,), dtype_of(value))
            case Binary(op, x, y):
                return self.apply(op, BINARY.get(op), (x, y), dtype_of(value))
            case Fma(x, y, z):
                return self.apply("fma", _fma, (x, y, z), dtype_of(value))
            case Dot(parts, x, y, z):
                return self.apply(parts, _DOTS.get(parts), (x, y, z), DType.I32)
            case Select(cond, x, y):
                c, a, b = self.value(cond), self.value(x), self.value(y)
                return self.value_name(f"{a} if {c} else {b}")
            case Cast(x, dtype):
                return self.cast(self.value(x), dtype_of(x), dtype)
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

    def apply(
        self,
        op: str,
        function: Callable[..., Any] | None,
        parts: tuple[LoopValue, ...],
        result: DType,
    ) -> str:
        if function is None:
            raise LoopFault(f"unknown op '{op}' in loop @{self.func.name}")
        names = [self.value(part) for part in parts]
        dtype = dtype_of(parts[0])
        # Half floats are storage only: computed in f32, then rounded back.
        names = [self.cast(name, dtype, dtype.compute) for name in names]
        if op in _INLINE:
            name = self.value_name(_INLINE[op].format(*names))
        else:
            name = self.value_name(f"{self.function(function)}({', '.join(names)})")
        return self.cast(name, result.compute, result)

    def cast(self, name: str, source: DType, target: DType) -> str:
        if source is target:
            return name
        if target is DType.F32:
            return self.value_name(f"np.float32({name})")
        dtypes = f"{self.held(source)}, {self.held(target)}"
        return self.value_name(f"{self.function(convert)}({name}, {dtypes})")

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
                start = self.held(identity(op, dtype))
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
            case Check(cond, number):
                self.emit(f"if not {self.value(cond)}:")
                self.emit(f"    cx.fail({self.func.name!r}, {number})")
            case Prefetch(buffer, _):
                self.prefetched.add(buffer.name)
            case Call():
                self.call(stmt)
            case _:
                raise LoopFault(f"unknown statement {stmt!r}")

    def loop(self, loop: For) -> None:
        var = self.name("i")
        span = f"range({self.dim(loop.begin)}, {self.dim(loop.end)}, {loop.step})"
        kept = dict(self.symbols)
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
        op, dtype = _COMBINE[declared.op], declared.dtype
        if dtype is DType.BOOL:
            op = "logical_or" if declared.op == "max" else "logical_and"
        x = self.cast(self.value(value), dtype, dtype.compute)
        held = self.cast(target, dtype, dtype.compute)
        name = self.value_name(_INLINE[op].format(held, x))
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


def _tuple(texts: Sequence[str]) -> str:
    return f"({', '.join(texts)},)" if texts else "()"


def _fma(x: Any, y: Any, z: Any) -> Any:
    if x.dtype == np.float32:  # a product of two f32 is exact in f64
        return np.float32(np.float64(x) * np.float64(y) + np.float64(z))
    return x * y + z


def _parts(word: Any, count: int, signed: bool) -> list[int]:
    """The parts of an i32, the lowest bits first."""
    bits = 32 // count
    found = [int(word) >> bits * part & (1 << bits) - 1 for part in range(count)]
    return [p - (1 << bits) if signed and p >> bits - 1 else p for p in found]


def _dot(parts: str) -> Callable[[Any, Any, Any], Any]:
    count, x_signed, y_signed = DOT_PARTS[parts]

    def dot(x: Any, y: Any, z: Any) -> Any:
        pairs = zip(_parts(x, count, x_signed), _parts(y, count, y_signed), strict=True)
        total = (int(z) + sum(a * b for a, b in pairs)) & 0xFFFFFFFF
        return np.uint32(total).astype(np.int32)

    return dot


_DOTS = {parts: _dot(parts) for parts in DOT_PARTS}
