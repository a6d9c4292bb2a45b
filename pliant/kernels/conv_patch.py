"""Patches: a piece of the input with its padding written out, ready for every tap.

Output positions of a block of rows and columns are numbered q = row*pitch + column.
With stride s and dilation d, tap w of output column j reads input column

    j*s + w*d - low = (j + shift)*s + residue - low      shift, residue = divmod(w*d, s)

so a patch keeps one plane for each residue that occurs (s/gcd(s, d) of them, at most
one per tap), and within a plane tap w of position q is simply q + shift: adjacent
positions are adjacent elements, whatever the stride. The same holds for rows. Axes
before the rows (3-d) have a plane per tap. Every element of the input is copied once,
not once per tap. The padding after a row is also the padding before the next row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from pliant.ir.loops import (
    WORKER,
    Binary,
    Block,
    Buffer,
    Cast,
    For,
    Index,
    Kind,
    Let,
    Load,
    LoopValue,
    Stmt,
    Store,
)
from pliant.ir.types import DType
from pliant.kernels.micro import zero
from pliant.sym import (
    ONE,
    ZERO,
    Expr,
    as_expr,
    ceildiv,
    floordiv,
    maximum,
    minimum,
    mod,
    sym,
)


@dataclass(frozen=True, slots=True)
class Slide:
    """How a window moves along one axis."""

    extent: Expr  # size of the input along the axis
    out: Expr
    window: Expr
    stride: int = 1
    dilation: int = 1
    low: Expr = ZERO

    @property
    def phases(self) -> Expr:
        """The number of planes: residues of the stride that taps fall on."""
        return minimum(self.window, self._period)

    @property
    def _period(self) -> int:
        return self.stride // gcd(self.stride, self.dilation)

    @property
    def reach(self) -> Expr:
        """How many positions beyond the last output the taps of a plane read."""
        return floordiv(maximum(self.window - 1, 0) * self.dilation, self.stride)

    def phase(self, tap: Expr) -> Expr:
        return mod(tap, self._period)

    def residue(self, phase: Expr) -> Expr:
        return mod(phase * self.dilation, self.stride)

    def shift(self, tap: Expr) -> Expr:
        return floordiv(tap * self.dilation, self.stride)


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch of `rows` x `columns` outputs, as it lies in scratch.

    (channels, planes of the outer axes.., row phases, column phases, position)
    """

    buffer: Buffer  # (workers, elements)
    outer: tuple[Slide, ...]
    rows: Slide
    columns: Slide
    pitch: Expr  # positions between rows
    plane: Expr  # elements of a plane
    channel: Expr  # elements between channels

    def fill_taps(self, table: Buffer) -> Stmt:
        """Writes the offset of every tap, in the order of the weights."""
        number, at = ZERO, ZERO
        slides = (*self.outer, self.rows, self.columns)
        names = [f"_w{k}" for k in range(len(slides))]
        for name, slide in zip(names, slides, strict=True):
            number = number * slide.window + sym(name)
        for name, slide in zip(names, self.outer, strict=False):
            at = at * slide.window + sym(name)
        row, column = sym(names[-2]), sym(names[-1])
        at = at * self.rows.phases + self.rows.phase(row)
        at = at * self.columns.phases + self.columns.phase(column)
        offset = at * self.plane + self.rows.shift(row) * self.pitch
        offset = offset + self.columns.shift(column)
        stmt: Stmt = Store(table, (sym(WORKER), number), Index(offset))
        for name, slide in reversed(list(zip(names, slides, strict=True))):
            stmt = For(name, ZERO, slide.window, stmt)
        return stmt


@dataclass(frozen=True, slots=True)
class PatchPlace:
    """The outputs that a patch serves: the first of them, and how many."""

    image: Expr
    channel: Expr  # the first input channel
    outer: tuple[Expr, ...]
    row: Expr
    column: Expr
    rows: Expr
    columns: Expr


def fill(
    patch: Patch, x: Buffer, channels: Expr, place: PatchPlace, beyond: int
) -> Stmt:
    """Copies the input under a place's windows, with zeros outside the image.

    The `beyond` elements after every plane are zeroed as well. The last tile of a block
    computes with them, and leftover denormals would be a hundred times slower.
    """
    rows, columns = patch.rows, patch.columns
    c, r, j = sym("_c"), sym("_r"), sym("_j")
    row_phase = sym("_pr") if rows.phases != ONE else ZERO
    column_phase = sym("_pc") if columns.phases != ONE else ZERO
    position = c * patch.channel
    at = ZERO
    outer_index: list[Expr] = []
    inside: list[LoopValue] = []
    for k, (slide, here) in enumerate(zip(patch.outer, place.outer, strict=True)):
        tap = sym(f"_w{k}")
        at = at * slide.window + tap
        source = here * slide.stride + tap * slide.dilation - slide.low
        outer_index.append(source)
        inside += _bounds(source, slide.extent)
    at = (at * rows.phases + row_phase) * columns.phases + column_phase
    position = position + at * patch.plane + r * patch.pitch
    in_row = (place.row + r) * rows.stride + rows.residue(row_phase) - rows.low
    inside += _bounds(in_row, rows.extent)
    width = place.columns + columns.reach
    residue = columns.residue(column_phase)
    first = ceildiv(columns.low - residue, columns.stride) - place.column
    last = ceildiv(columns.extent + columns.low - residue, columns.stride)
    last = last - place.column
    in_column = (place.column + j) * columns.stride + residue - columns.low
    value = Load(
        x, (place.image, place.channel + c, *outer_index, sym("_y"), in_column)
    )

    def run(begin: Expr, end: Expr, stored: LoopValue) -> Stmt:
        store = Store(patch.buffer, (sym(WORKER), sym("_to") + j), stored)
        return For("_j", begin, end, store, Kind.VECTOR)

    whole = inside[0]
    for test in inside[1:]:
        whole = Binary("logical_and", whole, test)
    nothing = zero(x.dtype)
    row: Stmt = Block(
        (
            Let("_to", Index(position)),
            Let("_y", Index(in_row)),
            # A row outside the image has no inner part.
            Let("_in", Cast(whole, DType.I64)),
            Let("_low", Index(sym("_in") * minimum(maximum(first, 0), width))),
            Let("_high", Index(sym("_in") * maximum(minimum(last, width), 0))),
            run(ZERO, sym("_low"), nothing),
            run(sym("_low"), sym("_high"), value),
            run(maximum(sym("_high"), sym("_low")), width, nothing),
        )
    )
    count = place.rows + rows.reach
    end = position.substitute({"_r": count - 1}) + width
    after = Store(patch.buffer, (sym(WORKER), sym("_to") + j), nothing)
    row = Block(
        (
            For("_r", ZERO, count, row),
            Let("_to", Index(end)),
            For("_j", ZERO, as_expr(beyond), after, Kind.VECTOR),
        )
    )
    if columns.phases != ONE:
        row = For("_pc", ZERO, columns.phases, row)
    if rows.phases != ONE:
        row = For("_pr", ZERO, rows.phases, row)
    for k, slide in reversed(list(enumerate(patch.outer))):
        row = For(f"_w{k}", ZERO, slide.window, row)
    return For("_c", ZERO, channels, row)


def _bounds(at: Expr, extent: Expr) -> list[LoopValue]:
    return [
        Binary("ge", Index(at), Index(ZERO)),
        Binary("lt", Index(at), Index(extent)),
    ]
