"""Products of 8-bit integers, as products of words.

Several consecutive elements along K form a word of 32 bits, and a word of A times a
word of B is one step of a dot instruction (ir/loops.Dot). With words as elements, the
ordinary matrix product (kernels/gemm.py) applies: same tiles, panels, plan and
epilogue, with K counted in words.

    bytes         four unsigned bytes of A by four signed ones of B: vpdpbusd
    turned_bytes  four signed bytes of A by four unsigned ones of B: the same
    signed_bytes  four by four: sdot
    halves        two by two, widened to 16 bits: pmaddwd, or whatever a target has

If both operands are signed and the instruction needs one unsigned, that one is lifted:
128 is added to every element (the highest bit is flipped), and 128 times the sums of
the other operand's elements is subtracted after the product. The column sums of a
constant B are known at compile time, so A is lifted. Otherwise B is lifted, as A
usually has fewer rows to sum than B has columns. All sums are exact, or wrap as sums in
i32 do. The operand that is not lifted is zero-padded to whole words of K, so the
padding of the other does not matter.

An operand becomes words along its own contiguous axis: elements along K are copied one
after the other (`along`), or rows of K are interleaved, a vector at a time (`across`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pliant.ir.loops import (
    DOT_PARTS,
    Accumulate,
    Accumulator,
    Binary,
    Block,
    Buffer,
    Cast,
    Const,
    Dot,
    For,
    If,
    Index,
    Kind,
    Load,
    LoopValue,
    Read,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import NUMPY, DType
from pliant.kernels.packing import PACK_WORK, unflatten_unit
from pliant.machine.target import Target
from pliant.sym import (
    Expr,
    as_expr,
    ceildiv,
    floordiv,
    maximum,
    minimum,
    product,
    sym,
)

LIFT = 128
COLUMNS = 256  # columns of a unit that sums columns
# One in every byte of a word.
ONES = Const(0x01010101, DType.I32)


@dataclass(frozen=True, slots=True)
class Form:
    """How the words of a product are formed: a key of DOT_PARTS, the part types."""

    parts: str
    left: DType
    right: DType
    lifts_left: bool = False  # 128 is added to A's elements
    lifts_right: bool = False

    @property
    def count(self) -> int:
        """Elements in a word."""
        return DOT_PARTS[self.parts][0]

    def words(self, k: Expr) -> Expr:
        return ceildiv(k, self.count)


def form_of(left: DType, right: DType, constant: bool, target: Target) -> Form:
    """The form that the target multiplies fastest; `constant`: B is a constant."""
    i8, u8, i16 = DType.I8, DType.U8, DType.I16
    both_signed = left is i8 and right is i8
    if both_signed and target.dot("signed_bytes"):
        return Form("signed_bytes", i8, i8)
    if both_signed and target.dot("bytes"):
        if constant:
            return Form("bytes", u8, i8, lifts_left=True)
        return Form("turned_bytes", i8, u8, lifts_right=True)
    if left is not right and target.dot("bytes"):
        return Form("bytes" if right is i8 else "turned_bytes", left, right)
    return Form("halves", i16, i16)


# ---- constants


def pack_words(matrix: np.ndarray, form: Form) -> np.ndarray:
    """A (K, N) right operand as words (K words, N)."""
    k, n = matrix.shape
    words = -(-k // form.count)
    padded = np.zeros((words * form.count, n), NUMPY[form.right])
    padded[:k] = matrix
    parts = padded.reshape(words, form.count, n).transpose(0, 2, 1)
    return np.ascontiguousarray(parts).view("<i4").reshape(words, n)


def pack_corrections(matrix: np.ndarray) -> np.ndarray:
    """What is added to every row of a product by (K, N) whose A is lifted."""
    sums: np.ndarray = matrix.sum(0, dtype=np.int64)
    return (-LIFT * sums).astype(np.int32)


# ---- operands known at the call


def along(source: Buffer, part: DType, form: Form, lifted: bool) -> tuple[Buffer, Stmt]:
    """Rows (.., K) as rows of parts, padded to whole words."""
    *lead, k = source.shape
    room = form.words(k) * form.count
    parts = buffer("parts", part, (*lead, room), Role.OUT)
    lets, at = unflatten_unit(sym("_u"), lead)
    here = sym("_k")
    value = _part(Load(source, (*at, here)), part, lifted)
    copy = For("_k", as_expr(0), k, Store(parts, (*at, here), value), Kind.VECTOR)
    rest = For("_k", k, room, Store(parts, (*at, here), Const(0, part)))
    return parts, _parallel(Block((*lets, copy, rest)), lead, k)


def across(
    source: Buffer, part: DType, form: Form, lifted: bool
) -> tuple[Buffer, Stmt]:
    """Columns (.., K, N) as columns of words (.., K words, N)."""
    *lead, k, n = source.shape
    words = buffer("words", DType.I32, (*lead, form.words(k), n), Role.OUT)
    units = (*lead, form.words(k))
    lets, at = unflatten_unit(sym("_u"), units)
    first, column = at[-1] * form.count, sym("_n")

    def word_row(count: int) -> Stmt:
        """A row of words of which the first `count` parts are present."""
        word: LoopValue = Const(0, DType.I32)
        for number in range(count):
            found = Load(source, (*at[:-1], first + number, column))
            bits = _bits(_part(found, part, lifted), form)
            amount = Const(32 // form.count * number, DType.I32)
            word = Binary("bitwise_or", word, Binary("shift_left", bits, amount))
        store = Store(words, (*at, column), word)
        return For("_n", as_expr(0), n, store, Kind.VECTOR)

    body = word_row(form.count)
    for count in range(form.count - 1, 0, -1):
        fewer = Binary("le", Index(k), Index(first + count))
        body = If(fewer, word_row(count), body)
    return words, _parallel(Block((*lets, body)), units, n * form.count)


def corrections(words: Buffer) -> tuple[Buffer, Stmt]:
    """What is added to the product because an operand is lifted.

    N numbers, from the words (.., K words, N) of signed bytes of the other operand.
    """
    *lead, k, n = words.shape
    sums = buffer("corrections", DType.I32, (*lead, n), Role.OUT)
    column, here = sym("_n"), sym("_k")
    rows = words.strides[-2] == as_expr(1)
    units = (*lead, n if rows else ceildiv(n, COLUMNS))
    lets, at = unflatten_unit(sym("_u"), units)
    place = at[-1] if rows else column
    zero = Const(0, DType.I32)
    one = Dot("bytes", ONES, Load(words, (*at[:-1], here, place)), zero)
    total = Binary("mul", Read("sum", DType.I32), Const(-LIFT, DType.I32))
    inner = Kind.VECTOR if rows else Kind.SERIAL
    body: Stmt = Block(
        (
            Accumulator("sum", DType.I32, "sum"),
            For("_k", as_expr(0), k, Accumulate("sum", one), inner),
            Store(sums, (*at[:-1], place), total),
        )
    )
    if not rows:
        begin = at[-1] * COLUMNS
        end = minimum(n, begin + COLUMNS)
        body = For("_n", begin, end, body, Kind.VECTOR)
    work = k if rows else k * COLUMNS
    return sums, _parallel(Block((*lets, body)), units, work)


def _part(value: LoopValue, part: DType, lifted: bool) -> LoopValue:
    cast = Cast(value, part)
    return Binary("bitwise_xor", cast, Const(LIFT, part)) if lifted else cast


def _bits(value: LoopValue, form: Form) -> LoopValue:
    """A part as the lowest bits of a word whose other bits are zero."""
    mask = Const((1 << 32 // form.count) - 1, DType.I32)
    return Binary("bitwise_and", Cast(value, DType.I32), mask)


def _parallel(body: Stmt, units: Sequence[Expr], work: Expr) -> Stmt:
    grain = maximum(1, floordiv(PACK_WORK, maximum(work, 1)))
    return For("_u", as_expr(0), product(units), body, Kind.PARALLEL, grain=grain)
