"""The epilogue of a matrix product: what its region computes from a tile of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pliant.ir.access import flatten, reshape_index
from pliant.ir.graph import Graph, Op, Value
from pliant.ir.groups import domain_index
from pliant.ir.loop_walk import statements, substitute, values
from pliant.ir.loops import (
    WORKER,
    Binary,
    Block,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    LoopValue,
    Prefetch,
    Role,
    Stmt,
    Store,
    as_dtype,
    buffer,
)
from pliant.kernels.product import RowsAt, TileAt
from pliant.lower.domain import Axis, merge, with_axes
from pliant.lower.evaluate import Evaluator
from pliant.lower.nest import block
from pliant.lower.step import Fusion, NumberCheck, TileAxes
from pliant.sym import Expr, Facts, as_expr, floordiv, maximum, mod, product, sym

LINE = 64  # bytes of a cache line


class TileEpilogue:
    """The epilogue: what follows a contraction in its region, on one tile."""

    def __init__(
        self, region: Graph, root: Op, facts: Facts, number_check: NumberCheck
    ) -> None:
        self.region, self.root, self.facts = region, root, facts
        self.number_check = number_check
        self.producers = region.producers()
        taken = set(root.operands)
        others = [v for v in region.params if v not in taken or self._read(v)]
        self.inputs = {
            v: buffer(f"in_{k}", v.dtype, (v.type.numel,), Role.IN)
            for k, v in enumerate(others)
        }
        results = dict.fromkeys(region.results)
        self.outputs = {
            v: buffer(f"out_{k}", v.dtype, (v.type.numel,), Role.OUT)
            for k, v in enumerate(results)
        }

    @classmethod
    def of(cls, fusion: Fusion, root: Op) -> TileEpilogue:
        return cls(fusion.region, root, fusion.facts, fusion.number_check)

    def _read(self, value: Value) -> bool:
        """Whether something besides the root reads a parameter."""
        return any(
            value in op.operands for op in self.region.ops if op is not self.root
        )

    @property
    def computes_left(self) -> bool:
        """Whether the root's left operand is computed here, not read."""
        return self.root.operands[0] in self.producers

    @property
    def is_plain(self) -> bool:
        """Whether the region is the contraction and nothing else."""
        root = self.root
        return self.region.ops == (root,) and self.region.results == (root.result,)

    def write(self, tile: TileAt, axes: TileAxes) -> list[Stmt]:
        """Loops over the tile that store every result of the region."""
        shape = self.root.result.shape

        def store(evaluator: Evaluator, here: tuple[Expr, ...]) -> None:
            for value, target in self.outputs.items():
                at = reshape_index(here, shape, value.shape, evaluator.space)
                result = as_dtype(evaluator.value(value, at), value.dtype)
                evaluator.emit(Store(target, (flatten(at, value.shape),), result))

        element = tile.element(sym("_em"), sym("_en"))
        extents = (tile.rows, tile.columns)
        origin, width = (tile.row, tile.column), tile.scratch.shape[-1].value
        loops = self._loops(shape, axes, origin, extents, element, store)
        hints = _coming(loops, tile.rows, width)
        if hints is not None:
            left = product(shape[k] for k in axes.rows) - tile.row
            more = Binary("gt", Index(left), Index(tile.rows))
            loops.insert(0, If(more, hints))
        return loops

    def left(self, rows: RowsAt, axes: TileAxes) -> list[Stmt]:
        """Loops that compute rows of the left operand, side by side."""
        value = self.root.operands[0]

        def store(evaluator: Evaluator, here: tuple[Expr, ...]) -> None:
            result = as_dtype(evaluator.value(value, here), rows.copy.dtype)
            place = (sym(WORKER), sym("_em"), sym("_en"))
            evaluator.emit(Store(rows.copy, place, result))

        origin, extents = (rows.row, rows.step), (rows.rows, rows.steps)
        return self._loops(value.shape, axes, origin, extents, None, store)

    def _loops(
        self,
        shape: tuple[Expr, ...],
        axes: TileAxes,
        origin: tuple[Expr, Expr],
        extents: tuple[Expr, Expr],
        element: LoopValue | None,
        store: Callable[[Evaluator, tuple[Expr, ...]], None],
    ) -> list[Stmt]:
        """Loops over a rectangle of a value's rows and columns, in its axis order."""
        index = list(domain_index(shape))
        for axis, position in axes.batch:
            index[axis] = position if shape[axis] != as_expr(1) else as_expr(0)
        rows = [Axis(f"_d{k}", shape[k]) for k in axes.rows if index[k] != as_expr(0)]
        columns = [
            Axis(f"_d{k}", shape[k], True)
            for k in axes.columns
            if index[k] != as_expr(0)
        ]
        space = with_axes(self.facts, [*rows, *columns])

        def leaf(
            value: Value, at: tuple[Expr, ...], where: LoopValue | None
        ) -> LoopValue | None:
            if value in self.inputs:
                return Load(self.inputs[value], (flatten(at, value.shape),), where)
            return element if value is self.root.result else None

        evaluator = Evaluator(self.producers, leaf, space, self.number_check)
        evaluator.push([*(a.name for a in rows), "_em"])
        evaluator.push([*(a.name for a in columns), "_en"])
        store(evaluator, tuple(index))
        inner, outer = evaluator.pop(), evaluator.pop()
        root = evaluator.scopes[0].body
        parts = [Block(tuple(outer)), Block(tuple(inner))]
        axes_left, merged = merge([*rows, *columns], parts)
        outer, inner = (list(p.body) for p in merged if isinstance(p, Block))
        row_axes = [a for a in axes_left if not a.reduced]
        column_axes = [a for a in axes_left if a.reduced]
        inner = _position(column_axes, origin[1] + sym("_en"), inner)
        across = For("_en", as_expr(0), extents[1], block(inner), Kind.VECTOR)
        outer = _position(row_axes, origin[0] + sym("_em"), [*outer, across])
        return [*root, For("_em", as_expr(0), extents[0], block(outer))]


def _coming(body: Sequence[Stmt], rows: Expr, width: int) -> Stmt | None:
    """Prefetches what the tile that many rows further on reads and writes.

    The rows of a tile are far apart, so no hardware prefetcher follows them.
    """
    inside = [inner for stmt in body for inner in statements(stmt)]
    if any(isinstance(stmt, Let) for stmt in inside):
        return None
    loads = (value for stmt in body for value in values(stmt))
    touched = dict.fromkeys(
        (part.buffer, part.index)
        for part in (*inside, *loads)
        if isinstance(part, (Load, Store)) and part.buffer.role is not Role.WORK
    )
    hints: list[Stmt] = []
    for buf, index in touched:
        at, *more = index
        if more or not {"_em", "_en"} <= set(at.symbols()):
            continue
        for column in range(0, width, max(LINE // buf.dtype.bytes, 1)):
            place = {"_em": sym("_em") + rows, "_en": as_expr(column)}
            hints.append(Prefetch(buf, (at.substitute(place),)))
    return For("_em", as_expr(0), rows, block(hints)) if hints else None


def _position(axes: Sequence[Axis], at: Expr, body: Sequence[Stmt]) -> list[Stmt]:
    """The body with its axes' variables computed from a flat position."""
    if not axes:
        return list(body)
    if len(axes) == 1:
        return [substitute(s, {axes[0].name: at}) for s in body]
    lets: list[Stmt] = []
    for axis in reversed(axes[1:]):
        safe = axis.extent if axis.extent.is_const else maximum(axis.extent, 1)
        lets.append(Let(axis.name, Index(mod(at, safe))))
        at = floordiv(at, safe)
    lets.append(Let(axes[0].name, Index(at)))
    return [*lets, *body]
