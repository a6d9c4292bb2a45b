"""Loop IR: the tensor programs.

    func   = name, sizes: symbol*, buffers: buffer*, body: stmt
    buffer = name, dtype, shape: dim*, strides: dim*, role

    stmt   = Block(stmt*)
           | For(var, begin: dim, end: dim, step: int, kind, grain: dim, vectors?, body)
           | Alloc(buffer)                          -- registers, static shape
           | Store(buffer, index: dim*, value)
           | Let(name, value)                       -- an integer usable in indices
           | Local(name, value)                     -- a scalar, set once
           | Accumulator(name, dtype, op)           -- starts at op's identity
           | Accumulate(name, value)                -- acc = op(acc, value)
           | If(cond: value, then, otherwise)
           | While(cond: value, body)               -- also ends with a failed call
           | Switch(selector: dim, cases: (int, stmt)*)
           | Dispatch((name, guards: cond*, stmt)*)  -- the first whose guards hold
           | Check(cond: value, number: int, value?) -- fails the call, never traps
           | Prefetch(buffer, index: dim*)          -- a hint, may lie outside
           | Call(function, sizes: dim*, arguments: (buffer, index: dim*)*)
           | CallLibrary(symbol, sizes: dim*, buffer*, op, settings) -- a C function

    value  = Const(number, dtype) | Index(dim) | Load(buffer, index: dim*, where?)
           | Read(name) | Unary(op, x) | Binary(op, x, y) | Fma(x, y, z)
           | Dot(parts, x, y, z) | Select(cond, x, y) | Cast(x, dtype) | Bits(x, dtype)

A `dim` is a `sym.Expr` over the function's size symbols, the variables of enclosing
loops, integers bound by `Let`, and `worker`: the number of the worker that runs the
enclosing parallel loop (0 outside one). Indices are in elements along each axis; the
address is sum(index[i] * strides[i]).

A VECTOR loop means the same as a SERIAL one: its iterations are independent except
through accumulators, whose op is associative, so they may run side by side and be
combined in a fixed order. `lower/vectorize.py` decides how, and says it in `vectors`;
without that the loop is run as a SERIAL one. EXCHANGE is a SERIAL loop around a VECTOR
one that copies rows to columns: it is done in squares of lanes, exchanged in registers.
PARALLEL: iterations are independent and each element is written by one iteration.
UNROLL: constant bounds, written out.

`loop_walk.py` walks and rewrites programs by this grammar, `spec_loops.py` says which
are legal.

Loop functions are destination-passing: every result is a buffer of role "out". They
call no allocator: scratch is a buffer of role "work", given by the caller, whose
leading axis is the worker. A function that calls others one after another (control
flow, `memory/flow.py`) has their temporaries in one buffer of bytes: an argument of
type u8 with one axis may be passed as memory of any type.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from pliant.ir.ops_elementwise import PREDICATES
from pliant.ir.types import DType, contiguous_strides
from pliant.sym import ONE, ZERO, Cond, Expr, Min, as_expr

WORKER = "worker"


class Role(enum.Enum):
    IN = "in"
    OUT = "out"
    INOUT = "inout"
    WORK = "work"  # scratch: shape[0] is the number of workers
    REGISTER = "register"  # declared by Alloc; static shape, constant indices

    __hash__ = object.__hash__  # members are compared by identity; Enum's is slow


class Kind(enum.Enum):
    SERIAL = "serial"
    PARALLEL = "parallel"
    VECTOR = "vector"
    EXCHANGE = "exchange"
    UNROLL = "unroll"

    __hash__ = object.__hash__  # members are compared by identity; Enum's is slow


class Rest(enum.Enum):
    """What becomes of the iterations of a VECTOR loop that fill no vector."""

    WHOLE = "whole"  # there are none
    MASKED = "masked"  # one vector, of which only some lanes run
    SCALAR = "scalar"  # one by one
    HALVED = "halved"  # vectors of half the lanes, a quarter, ..; bounds are constant


@dataclass(frozen=True, slots=True)
class Vectors:
    """How the iterations of a VECTOR loop run: `lanes` of them side by side.

    In one turn `copies` bodies follow one another, each with partial accumulators of
    its own. A body is on `jam` vectors, which run its inner loops together (unroll and
    jam). With `most`, or a rest that is HALVED, there is no loop: `most` iterations or
    the constant number of them are written out.
    """

    lanes: int
    rest: Rest
    copies: int = 1
    jam: int = 1
    most: int | None = None

    @property
    def together(self) -> int:
        """Iterations of one turn."""
        return self.lanes * self.copies * self.jam


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    role: Role


def buffer(
    name: str,
    dtype: DType,
    shape: tuple[Expr | int, ...],
    role: Role,
    strides: tuple[Expr | int, ...] | None = None,
) -> Buffer:
    """A buffer, row-major unless strides are given."""
    dims = tuple(as_expr(d) for d in shape)
    steps = (
        contiguous_strides(dims)
        if strides is None
        else tuple(as_expr(s) for s in strides)
    )
    return Buffer(name, dtype, dims, steps, role)


# ---- values


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A literal of `dtype`; 0.0 and -0.0 are different ones."""

    number: float | int | bool
    dtype: DType

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Const):
            return NotImplemented
        same = repr(self.number) == repr(other.number)
        return same and self.dtype is other.dtype

    def __hash__(self) -> int:
        return hash((repr(self.number), self.dtype))


@dataclass(frozen=True, slots=True)
class Index:
    """An integer expression as an i64 value."""

    dim: Expr


@dataclass(frozen=True, slots=True)
class Load:
    """An element; its type is the buffer's storage type (bf16 stays bf16).

    Where `where` is false nothing is read and the value is zero.
    """

    buffer: Buffer
    index: tuple[Expr, ...]
    where: LoopValue | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """A Local or an Accumulator, after its loop."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Unary:
    """An elementwise op of one operand: a row of ir/ops_elementwise.py.

    Names and meaning are those of ir/ops.py. And `decay`: exp of a float that is at
    most 0 (above, it may be anything), where results too small for a normal number
    are 0.
    """

    op: str
    x: LoopValue


@dataclass(frozen=True, slots=True)
class Binary:
    """An elementwise op of two operands of one type; comparisons give bool."""

    op: str
    x: LoopValue
    y: LoopValue


@dataclass(frozen=True, slots=True)
class Fma:
    """x*y + z, rounded once where the target can, else twice."""

    x: LoopValue
    y: LoopValue
    z: LoopValue


# The parts of an i32 word: how many, and whether those of x and of y are signed.
DOT_PARTS: dict[str, tuple[int, bool, bool]] = {
    "bytes": (4, False, True),
    "turned_bytes": (4, True, False),
    "signed_bytes": (4, True, True),
    "halves": (2, True, True),
}


@dataclass(frozen=True, slots=True)
class Dot:
    """z plus the products of the parts of two words, part by part; all are i32.

    `parts` is a key of DOT_PARTS: a word is four bytes or two halves, the lowest bits
    first. The sum wraps, as all arithmetic of integers does.
    """

    parts: str
    x: LoopValue
    y: LoopValue
    z: LoopValue


@dataclass(frozen=True, slots=True)
class Select:
    """cond ? x : y; both sides are evaluated and must be safe to evaluate."""

    cond: LoopValue
    x: LoopValue
    y: LoopValue


@dataclass(frozen=True, slots=True)
class Cast:
    """Conversion as in C; float to bool is `!= 0`; f32 to half rounds to even."""

    x: LoopValue
    dtype: DType


@dataclass(frozen=True, slots=True)
class Bits:
    """The bits of x as another type of the same size."""

    x: LoopValue
    dtype: DType


LoopValue = (
    Const | Index | Load | Read | Unary | Binary | Fma | Dot | Select | Cast | Bits
)


# ---- statements


@dataclass(frozen=True, slots=True)
class Block:
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class For:
    """`for var in begin, begin+step, ... < end`.

    PARALLEL: `grain` iterations are the least worth a thread of their own (an
    expression over sizes: the work of one iteration depends on them).
    """

    var: str
    begin: Expr
    end: Expr
    body: Stmt
    kind: Kind = Kind.SERIAL
    step: int = 1
    grain: Expr = ONE
    vectors: Vectors | None = None

    @property
    def runs_by_lanes(self) -> bool:
        return self.kind is Kind.VECTOR and self.vectors is not None


@dataclass(frozen=True, slots=True)
class Alloc:
    """Registers for the rest of the enclosing block; contents start undefined."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Store:
    """The value must already have the buffer's storage type."""

    buffer: Buffer
    index: tuple[Expr, ...]
    value: LoopValue


@dataclass(frozen=True, slots=True)
class Let:
    """Binds an i64 value to a symbol for indices in the rest of the block."""

    name: str
    value: LoopValue


@dataclass(frozen=True, slots=True)
class Local:
    """Names a value for the rest of the enclosing block."""

    name: str
    dtype: DType
    value: LoopValue


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A running reduction; op: sum, prod, max, min (max/min keep NaN)."""

    name: str
    dtype: DType
    op: str


@dataclass(frozen=True, slots=True)
class Accumulate:
    name: str
    value: LoopValue


@dataclass(frozen=True, slots=True)
class If:
    cond: LoopValue
    then: Stmt
    otherwise: Stmt | None = None


@dataclass(frozen=True, slots=True)
class While:
    """Runs the body as long as cond, computed anew each time, is true.

    It also ends once a check has failed: what the condition reads may be meaningless
    then. No loop around it runs by lanes.
    """

    cond: LoopValue
    body: Stmt


@dataclass(frozen=True, slots=True)
class Switch:
    """Runs the case whose number equals the selector; none matching does nothing."""

    selector: Expr
    cases: tuple[tuple[int, Stmt], ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A body that may run where every guard holds, under a name for people."""

    name: str
    guards: tuple[Cond, ...]
    body: Stmt


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Runs the first variant whose guards hold; the last one has none.

    All variants mean the same wherever they may run: which one does is a matter of
    speed alone. Guards are conditions on sizes, the same for all lanes and workers.
    """

    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """Where cond is false the call fails with `number`; execution goes on.

    So what follows must stay in bounds even then (indices are clamped). `value`, an
    i64, is what the failure tells of: the index that is out of range.
    """

    cond: LoopValue
    number: int
    value: LoopValue | None = None


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Brings the element's cache line near; reads nothing, so any address will do."""

    buffer: Buffer
    index: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Calls a loop function; a buffer argument is its address at the index."""

    function: str
    sizes: tuple[Expr, ...]
    arguments: tuple[tuple[Buffer, tuple[Expr, ...]], ...]


Setting = Expr | bool | int | float | str | DType | tuple[int, ...] | tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class CallLibrary:
    """Calls a C function with sizes and whole buffers.

    It does what the op of that name does, with `settings` for attributes, to tensors of
    the buffers' types: its inputs, results and workspace, in this order. It may use all
    threads, so it is in no parallel loop.
    """

    symbol: str
    sizes: tuple[Expr, ...]
    buffers: tuple[Buffer, ...]
    op: str
    settings: tuple[tuple[str, Setting], ...] = ()


Stmt = (
    Block
    | For
    | Alloc
    | Store
    | Let
    | Local
    | Accumulator
    | Accumulate
    | If
    | While
    | Switch
    | Dispatch
    | Check
    | Prefetch
    | Call
    | CallLibrary
)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoopFunc:
    """A tensor program; `sizes` are its integer parameters, before its buffers."""

    name: str
    sizes: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    body: Stmt


def address(buffer: Buffer, index: Sequence[Expr]) -> Expr:
    """The number of an element in its buffer."""
    pairs = zip(index, buffer.strides, strict=True)
    return sum((i * step for i, step in pairs), ZERO)


def most(end: Expr) -> int | None:
    """A constant that a loop's end plainly does not exceed."""
    if end.is_const:
        return end.value
    if isinstance(end.atom, Min):
        return min((arg.value for arg in end.atom.args if arg.is_const), default=None)
    return None


def dtype_of(value: LoopValue) -> DType:
    """The type of a value, from its parts."""
    match value:
        case Const(_, dtype) | Read(_, dtype) | Cast(_, dtype) | Bits(_, dtype):
            return dtype
        case Index():
            return DType.I64
        case Load(buf, _, _):
            return buf.dtype
        case Unary(op, x) | Binary(op, x, _):
            return DType.BOOL if op in PREDICATES else dtype_of(x)
        case Fma(x, _, _):
            return dtype_of(x)
        case Dot():
            return DType.I32
        case Select(_, x, _):
            return dtype_of(x)


def as_dtype(value: LoopValue, dtype: DType) -> LoopValue:
    """The value as another type; itself if it is of that type."""
    return value if dtype_of(value) is dtype else Cast(value, dtype)
