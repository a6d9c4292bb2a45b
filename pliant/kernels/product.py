"""The description of a matrix product: sizes, operands, prologue and epilogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pliant.ir.loops import WORKER, Buffer, Load, LoopValue, Stmt
from pliant.ir.types import DType
from pliant.kernels.micro import Elements
from pliant.kernels.packing import Right
from pliant.sym import ZERO, Expr, sym

Address = tuple[Buffer, tuple[Expr, ...]]
# Writes the results of one tile of the product.
Epilogue = Callable[["TileAt"], list[Stmt]]
# Computes rows of the left operand.
Prologue = Callable[["RowsAt"], list[Stmt]]
# The address of the result at (batch.., row, column), if there is no other epilogue.
Plain = Callable[[tuple[Expr, ...], Expr, Expr], Address]


@dataclass(frozen=True, slots=True)
class Cuts:
    """How rows may be cut."""

    strips: bool = True  # by strips, if the product is small and has no epilogue
    even: bool = True  # into tiles of even height; else whole tiles, then the remainder


@dataclass(frozen=True, slots=True)
class TileAt:
    """A tile of the result, as the epilogue sees it."""

    batch: tuple[Expr, ...]
    row: Expr  # first row and column of the tile in the result
    column: Expr
    rows: Expr
    columns: Expr
    scratch: Buffer
    first: Expr = ZERO  # row of the scratch where the tile starts

    def element(self, m: Expr, n: Expr) -> LoopValue:
        """The product at (row + m, column + n)."""
        return Load(self.scratch, (sym(WORKER), self.first + m, n))


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Rows of the left operand, as the prologue sees them: copy[worker, i, k]."""

    batch: tuple[Expr, ...]
    row: Expr  # first row and step of K
    step: Expr
    rows: Expr
    steps: Expr
    copy: Buffer
    first: Expr = ZERO  # row of the copy where they start


@dataclass(frozen=True, slots=True)
class Direct:
    """Rows of a computed left operand of which some can be read in place.

    A row consists of taps, `run` steps of K each. K has to be a single pass.
    """

    taps: Expr
    run: int
    row: Expr  # elements between rows, and between taps
    tap: Expr
    # (row, rows): 1 if all these rows can be read in place.
    inside: Callable[[Expr, Expr], Expr]
    place: Callable[[Expr, Expr], Address]  # the address of a row's tap


@dataclass(frozen=True, slots=True)
class Around:
    """What a kernel computes around its product."""

    epilogue: Epilogue
    plain: Plain | None = None  # if the epilogue is nothing but a store
    prologue: Prologue | None = None
    direct: Direct | None = None  # rows that are read in place instead of copied


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product: sizes, operand layouts."""

    dtype: DType
    batch: tuple[Expr, ...]
    m: Expr
    n: Expr
    k: Expr
    a_strides: tuple[Expr, ...]  # (batch.., M, K)
    b_batch: tuple[Expr, ...]  # batch axes of B: each as in `batch`, or 1
    b_strides: tuple[Expr, ...] | None  # (batch.., K, N); None: a constant, packed
    computed: bool = False  # A is no buffer: its rows are computed as they are copied
    parts: str | None = None  # kind of words, see kernels/micro.py; None: plain numbers
    stored: DType | None = None  # the type that B is stored in, if it differs
    alone: bool = False  # no epilogue: the product is stored in place

    @property
    def b_dtype(self) -> DType:
        return self.stored or self.dtype

    @property
    def elements(self) -> Elements:
        """What the kernels multiply: packing widens a B that is not constant."""
        widened = self.b_strides is not None
        stored = self.dtype if widened else self.b_dtype
        return Elements(self.dtype, stored, self.parts)

    @property
    def right(self) -> Right:
        assert self.b_strides is not None
        return Right(self.b_batch, self.n, self.k, self.b_strides)
