"""A fusion region becomes a loop function.

    fusion(x, w, b) { layer norm }
    ->
    for d0 in 0..batch*seq parallel {
      sum = 0;  for d2 in 0..768 vector { sum += x[768*d0 + d2] }
      var = 0;  for d2 ... { var += (x[..] - mean)^2 }
      for d2 ... { y[768*d0 + d2] = (x[..] - mean) * rstd * w[d2] + b[d2] }
    }

One kernel may hold several reductions over the same axes: each is a stage, a loop over
the row, and what later stages need again and is costly to compute is kept in a row of
scratch (or in the result itself, where it is one).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from pliant.errors import InternalError
from pliant.ir.access import flatten, numel
from pliant.ir.graph import Graph, Value
from pliant.ir.loops import (
    WORKER,
    Accumulate,
    Accumulator,
    Block,
    Buffer,
    For,
    Let,
    Load,
    LoopFunc,
    LoopValue,
    Read,
    Role,
    Stmt,
    Store,
    buffer,
    statements,
)
from pliant.ir.types import TensorType
from pliant.lower.domain import Axis, merge, with_axes
from pliant.lower.evaluate import Evaluator, as_dtype
from pliant.lower.nest import block, inner_loops, parallel, split
from pliant.lower.rebuild import dims_in, values_in
from pliant.lower.step import Argument, NumberCheck, PackedWeight, Scratch, Step
from pliant.passes.groups import (
    Structure,
    domain_index,
    domain_space,
    is_row,
    result_index,
    structure,
)
from pliant.sym import Expr, Facts, as_expr, ge, le, product, sym

THREADS = "threads"  # the size symbol every host function knows: workers of the call

# Relative cost of computing one element, in cheap ops: decides what is kept in scratch
# rather than computed again, and how much work is worth a thread.
COST = {
    "exp": 8,
    "expm1": 12,
    "log": 10,
    "log1p": 12,
    "sin": 12,
    "cos": 12,
    "tan": 16,
    "tanh": 12,
    "erf": 14,
    "sigmoid": 12,
    "pow": 24,
    "atan2": 24,
    "div": 4,
    "floordiv": 6,
    "mod": 6,
    "sqrt": 4,
    "rsqrt": 5,
    "index": 4,
    "take_along": 4,
    "concat": 3,
    "pad": 3,
}
KEEP_COST = 6  # a value dearer than this is kept for later stages of its row


def size_symbols(body: Stmt, buffers: Sequence[Buffer]) -> tuple[str, ...]:
    """The symbols a program uses and does not bind: its integer parameters."""
    bound = {WORKER}
    for stmt in statements(body):
        match stmt:
            case For():
                bound.add(stmt.var)
            case Let(name, _):
                bound.add(name)
            case _:
                pass
    used = {s for e in dims_in([body]) for s in e.symbols()}
    for stmt in statements(body):
        if isinstance(stmt, For):
            used.update(stmt.grain.symbols())
    for b in buffers:
        used.update(s for e in (*b.shape, *b.strides) for s in e.symbols())
    return tuple(sorted(used - bound))


def lower_group(
    region: Graph,
    name: str,
    facts: Facts,
    number_check: NumberCheck,
    packed: Mapping[Value, PackedWeight] | None = None,
) -> Step:
    """The loop function of a map or row region.

    `packed` are parameters that exist only as panels of a matrix product.
    """
    shape = structure(region.ops, region.results, facts)
    if shape is None:
        raise InternalError("lower", f"fusion {name} is not one loop nest")
    return _Group(region, shape, facts, number_check, packed or {}).lower(name)


class _Group:
    """One region on its way to loops."""

    def __init__(
        self,
        region: Graph,
        shape: Structure,
        facts: Facts,
        number_check: NumberCheck,
        packed: Mapping[Value, PackedWeight],
    ) -> None:
        self.packed = packed
        self.region, self.shape, self.facts = region, shape, facts
        self.number_check = number_check
        self.producers = region.producers()
        self.inputs = {
            v: buffer(
                f"in_{k}",
                v.dtype,
                packed[v].shape(v.shape) if v in packed else (v.type.numel,),
                Role.IN,
            )
            for k, v in enumerate(region.params)
        }
        self.outputs: dict[Value, Buffer] = {}
        for k, v in enumerate(dict.fromkeys(region.results)):
            self.outputs[v] = buffer(f"out_{k}", v.dtype, (v.type.numel,), Role.OUT)
        self._domain = domain_space(shape.domain, facts)
        self.depth = _depths(region)
        self.kept: dict[Value, Buffer] = {}  # scratch that later stages read
        self.scratch: list[Scratch] = []
        # Numbered, not named after values: equal kernels must be equal objects.
        reduces = [op for op in region.ops if op.name == "reduce"]
        self.accumulators = {op.result: f"_acc{k}" for k, op in enumerate(reduces)}
        self.stage = 0
        self.work = max(1, sum(COST.get(op.name, 1) for op in region.ops))

    def lower(self, name: str) -> Step:
        domain = self.shape.domain
        body = self._nest(domain, domain_index(domain))
        buffers = (*self.inputs.values(), *self.outputs.values(), *self.kept.values())
        used = {b.name for b in _buffers_in(body)}
        live = [b for b in buffers if b.name in used or b.role is Role.OUT]
        owner: dict[str, Argument] = {}
        for v, b in self.inputs.items():
            owner[b.name] = self.packed[v].packed if v in self.packed else v
        owner.update({b.name: v for v, b in self.outputs.items()})
        kept = zip(self.kept.values(), self.scratch, strict=True)
        owner.update({b.name: s for b, s in kept})
        func = LoopFunc(name, size_symbols(body, live), tuple(live), body)
        return Step(func, tuple(owner[b.name] for b in live))

    # ---- nests

    def _nest(self, extents: tuple[Expr, ...], index: tuple[Expr, ...]) -> Stmt:
        """The loops over a box of the domain; `index` is a position in the domain."""
        axes = [
            Axis(f"_d{k}", extent, k in self.shape.reduced)
            for k, extent in enumerate(extents)
            if not (extent.is_const and extent.value == 1)
        ]
        space = with_axes(self.facts, axes)
        self.index, self.space = index, space
        evaluator = Evaluator(self.producers, self._leaf, space, self.number_check)
        if self.shape.reduced:
            return self._rows(axes, evaluator)
        stmt = self._map(axes, evaluator)
        for axis in axes:
            if axis.name in evaluator.breaks and extents == self.shape.domain:
                breaks = sorted_breaks(evaluator, axis, self.facts)
                if breaks:
                    return self._segments(axis, breaks)
        return stmt

    def _segments(self, axis: Axis, breaks: Sequence[Expr]) -> Stmt:
        """A nest per run of an axis in which every concat reads one operand."""
        k = int(axis.name[2:])
        nests: list[Stmt] = []
        bounds = [as_expr(0), *breaks, axis.extent]
        for low, high in pairwise(bounds):
            extents = list(self.shape.domain)
            extents[k] = high - low
            index = list(domain_index(self.shape.domain))
            index[k] = low if extents[k] == as_expr(1) else low + axis.var
            nests.append(self._nest(tuple(extents), tuple(index)))
        return block(nests)

    def _map(self, axes: list[Axis], evaluator: Evaluator) -> Stmt:
        evaluator.push(axis.name for axis in axes[:-1])
        evaluator.push(axis.name for axis in axes[-1:])
        for value in self.outputs:
            self._store(value, evaluator)
        inner, outer = evaluator.pop(), evaluator.pop()
        root = evaluator.scopes[0].body
        parts = [Block(tuple(root)), Block(tuple(outer)), Block(tuple(inner))]
        axes, merged = merge(axes, parts)
        root, outer, inner = (list(p.body) for p in merged if isinstance(p, Block))
        if not axes:
            return block([*root, *outer, *inner])
        if len(axes) == 1:
            return block([*root, *outer, split(axes[0], inner, self.work)])
        loop = inner_loops(axes[-1:], inner, vector=True)
        work = axes[-1].extent * self.work
        return block([*root, parallel(axes[:-1], [*outer, loop], work)])

    def _rows(self, axes: list[Axis], evaluator: Evaluator) -> Stmt:
        kept = [axis for axis in axes if not axis.reduced]
        # The last axis decides: if it is reduced, a row is contiguous and the vector
        # runs along it; if it is kept, the vector runs across rows.
        across = bool(axes) and not axes[-1].reduced
        if not across:
            self._choose_kept()
        evaluator.push(axis.name for axis in (kept[:-1] if across else kept))
        if across:
            evaluator.push([kept[-1].name])
        for stage in range(max(self.depth.values(), default=0) + 1):
            self.stage = stage
            self._stage(axes, evaluator)
        row = evaluator.pop()
        outer = evaluator.pop() if across else []
        root = evaluator.scopes[0].body
        parts = [Block(tuple(root)), Block(tuple(outer)), Block(tuple(row))]
        axes, merged = merge(axes, parts)
        root, outer, row = (list(p.body) for p in merged if isinstance(p, Block))
        reduced = [axis for axis in axes if axis.reduced]
        kept = [axis for axis in axes if not axis.reduced]
        row = [_place_inner(s, reduced, not across) for s in row]
        work = product(axis.extent for axis in reduced) * self.work
        if not across:
            return block([*root, parallel(kept, row, work)])
        columns = kept[-1]
        if len(kept) == 1:
            loop = split(columns, row, self.work, size=COLUMN_BLOCK)
            return block([*root, *outer, loop])
        loop = inner_loops([columns], row, vector=True)
        work = work * columns.extent
        return block([*root, parallel(kept[:-1], [*outer, loop], work)])

    def _stage(self, axes: Sequence[Axis], evaluator: Evaluator) -> None:
        """One loop over the row: the reductions, results and kept values now due."""
        reduces = [
            op
            for op in self.region.ops
            if op.name == "reduce" and self.depth[op.operands[0]] == self.stage
        ]
        due = [v for v in self.depth if self.depth[v] == self.stage]
        rows = [v for v in due if v in self.outputs and self._is_row(v)]
        full = [v for v in due if v in self.outputs and not self._is_row(v)]
        kept = [v for v in due if v in self.kept]
        for value in rows:
            self._store(value, evaluator)
        if not (reduces or full or kept):
            return
        for op in reduces:
            name = self.accumulators[op.result]
            kind = {"any": "max", "all": "min"}.get(op.str_attr("op"))
            dtype = op.result.dtype.compute
            evaluator.emit(Accumulator(name, dtype, kind or op.str_attr("op")))
            evaluator.declare(name)
        evaluator.push(axis.name for axis in axes if axis.reduced)
        for value in full:
            self._store(value, evaluator)
        for value in kept:
            result = as_dtype(evaluator.value(value, self._place(value)), value.dtype)
            evaluator.emit(Store(self.kept[value], self._scratch_index(), result))
        for op in reduces:
            x = evaluator.value(op.operands[0], self.index)
            evaluator.emit(Accumulate(self.accumulators[op.result], x))
        inner = evaluator.pop()
        evaluator.emit(For(_INNER, as_expr(0), as_expr(0), Block(tuple(inner))))

    # ---- elements

    def _is_row(self, value: Value) -> bool:
        return is_row(value, self.shape, self.facts)

    def _scratch_index(self) -> tuple[Expr, ...]:
        reduced = self.shape.reduced
        position = flatten(
            [self.index[k] for k in reduced], [self.shape.domain[k] for k in reduced]
        )
        return (sym(WORKER), position)

    def _place(self, value: Value) -> tuple[Expr, ...]:
        """Where a result stands, for the box of the domain being written."""
        here = result_index(value, self.shape, self._domain)
        assert here is not None
        if self.index == domain_index(self.shape.domain):
            return here
        moved = {
            f"_d{k}": i
            for k, i in enumerate(self.index)
            if domain_index(self.shape.domain)[k] != i
        }
        return tuple(i.substitute(moved) for i in here)

    def _store(self, value: Value, evaluator: Evaluator) -> None:
        index = self._place(value)
        result = as_dtype(evaluator.value(value, index), value.dtype)
        target = self.outputs[value]
        evaluator.emit(Store(target, (flatten(index, value.shape),), result))

    def _leaf(
        self, value: Value, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue | None:
        if value in self.packed:
            at = self.packed[value].index(index)
            return Load(self.inputs[value], at, where)
        if value in self.inputs:
            return Load(self.inputs[value], (flatten(index, value.shape),), where)
        op = self.producers[value]
        if op.name == "reduce":
            return Read(self.accumulators[value], value.dtype.compute)
        if self.stage > self.depth[value] and where is None:
            if value in self.kept and index == self._place(value):
                return Load(self.kept[value], self._scratch_index())
            if self._reread(value) and index == self._place(value):
                at = (flatten(index, value.shape),)
                return Load(self.outputs[value], at)
        return None

    def _reread(self, value: Value) -> bool:
        """A full result that an earlier stage stored is read, not computed, again."""
        return (
            value in self.outputs
            and bool(self.shape.reduced)
            and not self._is_row(value)
            and value.dtype.compute is value.dtype
        )

    def _choose_kept(self) -> None:
        """Values needed by several stages, full-size and dear: the last such first."""
        size = numel(self.shape.domain, self.facts)
        row = product(self.shape.domain[k] for k in self.shape.reduced)
        for op in reversed(self.region.ops):
            if op.name == "reduce" or not op.results:
                continue
            value = op.result
            if value in self.outputs or numel(value.shape, self.facts) != size:
                continue
            if len(self._stages_of(value)) < 2 or self._cost(value) < KEEP_COST:
                continue
            kind = TensorType(value.dtype, (row,))
            self.kept[value] = buffer(
                f"work_{len(self.kept)}", value.dtype, (sym(THREADS), row), Role.WORK
            )
            self.scratch.append(Scratch(kind))

    def _stages_of(self, value: Value) -> set[int]:
        """Stages whose loops compute `value`, given what is kept already."""
        stages: set[int] = set()
        roots = [
            (op.operands[0], self.depth[op.operands[0]])
            for op in self.region.ops
            if op.name == "reduce"
        ]
        roots += [(v, self.depth[v]) for v in (*self.outputs, *self.kept)]
        for root, stage in roots:
            if value in self._cone(root, stage):
                stages.add(stage)
        return stages

    def _cone(self, root: Value, stage: int) -> set[Value]:
        found: set[Value] = set()
        stack = [root]
        while stack:
            v = stack.pop()
            op = self.producers.get(v)
            if v in found or op is None or op.name == "reduce":
                continue
            found.add(v)
            if (v in self.kept or v in self.outputs) and self.depth[v] < stage:
                continue
            stack.extend(op.operands)
        return found

    def _cost(self, value: Value) -> int:
        size = numel(self.shape.domain, self.facts)
        cone = {
            v
            for v in self._cone(value, self.depth[value])
            if numel(v.shape, self.facts) == size  # the rest is computed once a row
        }
        cost = sum(COST.get(self.producers[v].name, 1) for v in cone)
        leaves = {v for c in cone for v in self.producers[c].operands}
        return cost + 2 * len(leaves & set(self.region.params))


_INNER = "_inner"  # marks a stage's loop until the axes are merged
COLUMN_BLOCK = 64


def _place_inner(stmt: Stmt, reduced: Sequence[Axis], vector: bool) -> Stmt:
    if isinstance(stmt, For) and stmt.var == _INNER:
        body = stmt.body.body if isinstance(stmt.body, Block) else (stmt.body,)
        return inner_loops(reduced, body, vector)
    return stmt


def _depths(region: Graph) -> dict[Value, int]:
    """How many reductions stand before a value, one after another."""
    depth: dict[Value, int] = dict.fromkeys(region.params, 0)
    for op in region.ops:
        level = max((depth[v] for v in op.operands), default=0)
        for value in op.results:
            depth[value] = level + 1 if op.name == "reduce" else level
    return depth


def sorted_breaks(evaluator: Evaluator, axis: Axis, facts: Facts) -> list[Expr]:
    """The breaks of an axis in order, if their order is provable; else none."""
    found = [
        e
        for e in evaluator.breaks[axis.name]
        if not facts.prove(le(e, 0)) and not facts.prove(ge(e, axis.extent))
    ]
    ordered: list[Expr] = []
    for e in found:
        k = 0
        while k < len(ordered):
            order = facts.compare(e, ordered[k])
            if order is None:
                return []
            if order in ("lt", "le"):
                break
            k += 1
        ordered.insert(k, e)
    return ordered


def _buffers_in(body: Stmt) -> Iterator[Buffer]:
    for stmt in statements(body):
        if isinstance(stmt, Store):
            yield stmt.buffer
    for value in values_in(body):
        if isinstance(value, Load):
            yield value.buffer
