"""Products of 8-bit integers: operands as words, and the correction of the sums.

    matmul(a: i8, b: i8) -> i32
    ->
    call matmul_left(a, words of a)                  a copy, padded along K
    call matmul_right(b, words of b)                 at compile time for a constant
    call matmul_corrections(words of a, corrections)
    call matmul(words of a, words of b, ..)          corrected in its epilogue

kernels/int8.py explains each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pliant.ir.graph import Constant, Op
from pliant.ir.loop_walk import size_symbols
from pliant.ir.loops import (
    Binary,
    Buffer,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Stmt,
    buffer,
)
from pliant.ir.packed import Packed
from pliant.ir.types import DType, TensorType, contiguous_strides
from pliant.ir.views import View
from pliant.kernels.int8 import (
    Form,
    across,
    along,
    corrections,
    form_of,
    pack_corrections,
    pack_words,
)
from pliant.kernels.packing import pack_constant
from pliant.kernels.product import Product, TileAt
from pliant.kernels.tiles import Tile
from pliant.lower.step import Argument, KernelStep, Retyped, Temporary
from pliant.machine.target import Target
from pliant.sym import Expr, as_expr

ZERO, ONE = as_expr(0), as_expr(1)


@dataclass(frozen=True, slots=True)
class CorrectedTile(TileAt):
    """A tile of a product with a lifted operand."""

    corrections: Corrections | None = None

    def element(self, m: Expr, n: Expr) -> LoopValue:
        assert self.corrections is not None
        added = self.corrections.at(self.batch, self.row + m, self.column + n)
        return Binary("add", TileAt.element(self, m, n), added)


@dataclass(frozen=True, slots=True)
class Corrections:
    """What is added to every row of a product, or to every column."""

    buffer: Buffer  # (batch.., N) or (batch.., M), batch as in the result
    argument: Argument
    by_row: bool

    def at(self, batch: tuple[Expr, ...], row: Expr, column: Expr) -> LoopValue:
        return Load(self.buffer, (*batch, row if self.by_row else column))

    def tile(self, at: TileAt) -> TileAt:
        """The tile as the epilogue should see it: corrected."""
        known = (at.batch, at.row, at.column, at.rows, at.columns, at.scratch, at.first)
        return CorrectedTile(*known, self)


Matrix = Callable[[np.ndarray], np.ndarray]  # a constant's data -> its (K, N) matrix


@dataclass(frozen=True, slots=True)
class Narrow:
    """Both operands as words: (.., M, K words) and (.., K words, N)."""

    form: Form
    steps: tuple[KernelStep, ...]  # the calls that make the words
    left: Retyped
    right: Retyped
    panels: Callable[[Tile], Packed] | None  # the panels of a constant right operand
    sums: Retyped | None  # the corrections, (.., N) or (.., M), depending on the form

    def corrections(self, spec: Product) -> Corrections | None:
        """The corrections with the batch as the product has it: axes, or more rows."""
        if self.sums is None:
            return None
        by_row = self.form.lifts_right
        lead = [
            ZERO if dim == ONE and dim != want else stride
            for dim, want, stride in zip(
                self.sums.shape, spec.batch, self.sums.strides, strict=False
            )
        ]
        shape = (*spec.batch, spec.m if by_row else spec.n)
        strides = (*lead, self.sums.strides[-1])
        held = buffer("corrections", DType.I32, shape, Role.IN, strides)
        return Corrections(held, self.sums, by_row)


def narrowed(
    name: str,
    root: Op,
    views: tuple[View, View],
    weight: tuple[Constant, Matrix] | None,
    target: Target,
) -> Narrow:
    """The product `root` on words; `weight` is B, if B is a constant."""
    left, right = (v.dtype for v in root.operands)
    form = form_of(left, right, weight is not None, target)
    source = _transposed(views[0])
    step, words = _words(f"{name}_left", source, form, form.left, form.lifts_left, left)
    a = Retyped(words.source, _transposed_type(words.type))
    if weight is not None:
        return _with_constant(form, step, a, *weight, views[1])
    given = (views[1], form, form.right, form.lifts_right, right)
    other, b = _words(f"{name}_right", *given)
    if not form.lifts_right:
        return Narrow(form, (step, other), a, b, None, None)
    summing, sums = _sums(f"{name}_corrections", words)
    return Narrow(form, (step, other, summing), a, b, None, sums)


# ---- operands known at the call


def _transposed(view: View) -> View:
    """The view with its last two axes exchanged."""
    shape, strides = (_exchanged(x) for x in (view.shape, view.strides))
    return View(view.base, view.offset, shape, strides)


def _transposed_type(kind: TensorType) -> TensorType:
    assert kind.strides is not None
    return TensorType(kind.dtype, _exchanged(kind.shape), _exchanged(kind.strides))


def _exchanged(dims: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return (*dims[:-2], dims[-1], dims[-2])


def _words(
    name: str, view: View, form: Form, part: DType, lifted: bool, dtype: DType
) -> tuple[KernelStep, Retyped]:
    """An operand (.., K, N) as words (.., K words, N), in its own axis order."""
    # An operand that the batch repeats is converted once.
    lead = tuple(
        ONE if stride == ZERO else dim
        for dim, stride in zip(view.shape[:-2], view.strides[:-2], strict=True)
    )
    once = View(view.base, view.offset, (*lead, *view.shape[-2:]), view.strides)
    columns_adjacent = view.strides[-1] == ONE and view.strides[-2] != ONE
    if not columns_adjacent:
        once = _transposed(once)
    source = buffer("source", dtype, once.shape, Role.IN, once.strides)
    make = across if columns_adjacent else along
    made, body = make(source, part, form, lifted)
    memory = Temporary(TensorType(made.dtype, made.shape))
    step = KernelStep(_function(name, body, (source, made)), (once, memory))
    k, n = form.words(view.shape[-2]), view.shape[-1]
    order = (k, n) if columns_adjacent else (n, k)
    strides = contiguous_strides((*lead, *order))
    if not columns_adjacent:
        strides = _exchanged(strides)
    strides = _repeated(view.strides[:-2], strides)
    kind = TensorType(DType.I32, (*view.shape[:-2], k, n), strides)
    return step, Retyped(memory, kind)


def _sums(name: str, words: Retyped) -> tuple[KernelStep, Retyped]:
    """The corrections for the words (.., K words, M), M numbers."""
    lead = tuple(
        ONE if stride == ZERO else dim
        for dim, stride in zip(words.shape[:-2], words.strides[:-2], strict=True)
    )
    shape = (*lead, *words.shape[-2:])
    source = buffer("words", DType.I32, shape, Role.IN, words.strides)
    made, body = corrections(source)
    memory = Temporary(TensorType(DType.I32, made.shape))
    step = KernelStep(_function(name, body, (source, made)), (words, memory))
    strides = _repeated(words.strides[:-2], made.strides)
    kind = TensorType(DType.I32, (*words.shape[:-2], words.shape[-1]), strides)
    return step, Retyped(memory, kind)


def _repeated(like: Sequence[Expr], strides: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Strides with 0 for every leading axis that has 0 in `like`."""
    lead = tuple(
        ZERO if old == ZERO else new for old, new in zip(like, strides, strict=False)
    )
    return (*lead, *strides[len(lead) :])


def _function(name: str, body: Stmt, buffers: tuple[Buffer, ...]) -> LoopFunc:
    return LoopFunc(name, size_symbols(body, buffers), buffers, body)


# ---- constants


def _with_constant(
    form: Form,
    step: KernelStep,
    left: Retyped,
    constant: Constant,
    matrix: Matrix,
    view: View,
) -> Narrow:
    layout = (view.offset, view.strides[-2:], view.shape[-2:], form)

    def packed(kind: str, make: Matrix, *key: object) -> Packed:
        return Packed((kind, layout, *key), constant, kind, DType.I32, make)

    def panels(tile: Tile) -> Packed:
        return packed("panels", partial(_packed_panels, matrix, form, tile), tile)

    k, n = form.words(view.shape[-2]), view.shape[-1]
    lead = view.shape[:-2]  # all ones
    words = packed("words", partial(_packed_words, matrix, form))
    right = Retyped(words, _dense((*lead, k, n)))
    sums = None
    if form.lifts_left:
        held = packed("corrections", partial(_packed_corrections, matrix))
        sums = Retyped(held, _dense((*lead, n)))
    return Narrow(form, (step,), left, right, panels, sums)


def _packed_words(matrix: Matrix, form: Form, data: np.ndarray) -> np.ndarray:
    return pack_words(matrix(data), form)


def _packed_panels(
    matrix: Matrix, form: Form, tile: Tile, data: np.ndarray
) -> np.ndarray:
    return pack_constant(pack_words(matrix(data), form), tile)


def _packed_corrections(matrix: Matrix, data: np.ndarray) -> np.ndarray:
    return pack_corrections(matrix(data))


def _dense(shape: tuple[Expr, ...]) -> TensorType:
    return TensorType(DType.I32, shape, contiguous_strides(shape))
