"""A fusion region becomes a loop function.

    fusion(x, w, b) { layer norm }
    ->
    for d0 in 0..batch*seq parallel {
      sum = 0;  for d2 in 0..768 vector { sum += x[768*d0 + d2] }
      var = 0;  for d2 ... { var += (x[..] - mean)^2 }
      for d2 ... { y[768*d0 + d2] = (x[..] - mean) * rstd * w[d2] + b[d2] }
    }

One kernel may hold several reductions over the same axes. Each is a stage, a loop over
the row. Values that later stages need again and that are expensive to compute are kept
in a row of scratch (or in the result itself, if the value is a result).

Where it pays, a group is lowered several times under different assumptions on its sizes
(`lower/variants.py`), and the kernel chooses between the bodies when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pliant.errors import InternalError
from pliant.ir.access import Space, flatten, numel
from pliant.ir.graph import Graph, Value
from pliant.ir.groups import (
    Structure,
    domain_index,
    domain_space,
    is_row,
    result_index,
    structure,
)
from pliant.ir.loops import (
    WORKER,
    Accumulate,
    Accumulator,
    Alloc,
    Block,
    Buffer,
    Dispatch,
    Load,
    LoopValue,
    Read,
    Role,
    Stmt,
    Store,
    Variant,
    as_dtype,
    buffer,
)
from pliant.ir.ops import OPS
from pliant.ir.packed import PackedWeight
from pliant.lower import rows as row_shapes
from pliant.lower.domain import Axis, merge, sorted_breaks, with_axes
from pliant.lower.evaluate import Breaks, Evaluator, number_of
from pliant.lower.group_memory import GroupMemory
from pliant.lower.nest import (
    COLUMN_BLOCK,
    block,
    inner_loops,
    parallel,
    read_along,
    split,
    tiled,
)
from pliant.lower.rows import THREADS, RowPlan, stage_loop
from pliant.lower.runs import Runs
from pliant.lower.step import KernelStep, NumberCheck
from pliant.lower.variants import (
    ANY,
    Nest,
    VariantGuard,
    row_assumptions,
    short_room,
    size_assumptions,
    specialised,
    vector_assumptions,
)
from pliant.sym import Expr, Facts, as_expr, product, sym

# A value that costs more than this (ir/opdef.py: Cost) is kept for later stages of its
# row, in memory or in registers, instead of being recomputed.
KEEP_COST = 6
KEEP_IN_REGISTERS_COST = 3


@dataclass(frozen=True, slots=True)
class Lowering:
    """The inputs of lowering besides the group itself."""

    facts: Facts
    number_check: NumberCheck
    lanes: int
    variants: bool = True
    # Parameters of the group that an earlier kernel has checked to be below a size.
    below: Mapping[Value, Expr] = field(default_factory=dict)


def lower_group(
    region: Graph,
    name: str,
    cx: Lowering,
    packed: Mapping[Value, PackedWeight] | None = None,
) -> KernelStep:
    """The loop function of a map or row region.

    `packed` are parameters that are stored only as panels of a matrix product.
    """
    memory = GroupMemory(region, packed or {})
    body = _body(region, memory, cx, ANY)
    if body is None:
        raise InternalError("lower", f"fusion {name} is not one loop nest")
    return memory.step(name, body)


def _body(
    region: Graph, memory: GroupMemory, cx: Lowering, given: VariantGuard
) -> Stmt | None:
    """The group's loops and their variants; None if they are not a single nest."""
    shape = structure(region.ops, region.results, cx.facts)
    if shape is None:
        return None
    general = _GroupLowering(region, shape, memory, cx, given)
    body = general.lower()
    nest = general.nest
    if nest is None or not cx.variants:
        return body
    variants: list[Variant] = []
    if not given.symbols:
        for assumption in size_assumptions(region, body, cx.facts):
            there = specialised(region, assumption, cx.facts)
            inner = _body(there, memory, cx, assumption)
            if inner is not None and inner != body:
                variants.append(Variant(assumption.name, assumption.guards, inner))
    for assumption in (
        *row_assumptions(nest, cx.facts, cx.lanes),
        *vector_assumptions(nest, cx.facts, cx.lanes),
    ):
        inner = _GroupLowering(region, shape, memory, cx, assumption).lower()
        if all(cx.facts.prove(guard) for guard in assumption.guards):
            body = inner  # always true
            break
        variants.append(Variant(assumption.name, assumption.guards, inner))
    if not variants:
        return body
    return Dispatch((*variants, Variant(ANY.name, (), body)))


class _GroupLowering:
    """Lowers one region under one assumption."""

    def __init__(
        self,
        region: Graph,
        shape: Structure,
        memory: GroupMemory,
        cx: Lowering,
        given: VariantGuard,
    ) -> None:
        self.region, self.shape, self.facts = region, shape, cx.facts
        self.memory, self.cx, self.given = memory, cx, given
        self.producers = region.producers()
        self.inputs = dict(zip(region.params, memory.inputs, strict=True))
        self.packed = {
            v: weight
            for v, weight in zip(region.params, memory.packed, strict=True)
            if weight is not None
        }
        results = dict.fromkeys(region.results)
        self.outputs = dict(zip(results, memory.outputs, strict=True))
        self._domain = domain_space(shape.domain, cx.facts)
        self.depth = _depths(region)
        self.kept: dict[Value, Buffer] = {}  # scratch that later stages read
        # Numbered, not named after values, so that equal kernels are equal objects.
        reduces = [op for op in region.ops if op.name == "reduce"]
        self.accumulators = {op.result: f"_acc{k}" for k, op in enumerate(reduces)}
        self.stage = 0
        self.work = max(1, sum(OPS[op.name].cost for op in region.ops))
        self.nest: Nest | None = None  # of the whole domain, if that is a single nest

    def lower(self) -> Stmt:
        domain = self.shape.domain
        return self._nest(domain, domain_index(domain))

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
        check = self.cx.number_check
        evaluator = Evaluator(self.producers, self._leaf, space, check, self.cx.below)
        self.evaluator = evaluator
        if self.shape.reduced:
            return self._rows(axes, evaluator)
        if extents == self.shape.domain:
            found = self._breaks(axes, space)
            for axis in axes:
                breaks = sorted_breaks(found.get(axis.name, ()), axis, self.facts)
                if breaks:
                    return self._segments(axis, breaks)
        return self._map(axes, evaluator)

    def _breaks(self, axes: Sequence[Axis], space: Space) -> dict[str, set[Expr]]:
        """Where concats change operand, by axis name."""
        if not any(op.name == "concat" for op in self.region.ops):
            return {}
        finder = Breaks(self.producers, self._leaf, space)
        outer, self.evaluator = self.evaluator, finder
        finder.push(axis.name for axis in axes)
        for value in self.outputs:
            finder.value(value, self._place(value))
        self.evaluator = outer
        return finder.found

    def _segments(self, axis: Axis, breaks: Sequence[Expr]) -> Stmt:
        """One nest per segment of an axis in which every concat reads one operand."""
        k = int(axis.name[2:])
        self.nest = None
        nests: list[Stmt] = []
        bounds = [as_expr(0), *breaks, axis.extent]
        for low, high in pairwise(bounds):
            extents = list(self.shape.domain)
            extents[k] = high - low
            index = list(domain_index(self.shape.domain))
            index[k] = low if extents[k] == as_expr(1) else low + axis.var
            nests.append(self._nest(tuple(extents), tuple(index)))
        self.nest = None
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
            self.nest = Nest((), (), None, self.work)
            return block([*root, *outer, split(axes[0], inner, self.work)])
        along = read_along(axes, inner)
        self.nest = Nest(
            tuple(axes), (), axes[-1] if along is None else None, self.work
        )
        if along is not None:
            return block([*root, tiled(axes, along, outer, inner, self.work)])
        loop = inner_loops(axes[-1:], inner, True, self.given.multiple)
        work = axes[-1].extent * self.work
        return block([*root, parallel(axes[:-1], [*outer, loop], work)])

    def _rows(self, axes: list[Axis], evaluator: Evaluator) -> Stmt:
        kept = [axis for axis in axes if not axis.reduced]
        # The last axis decides: if it is reduced, a row is contiguous and the vector
        # runs along it; if it is kept, the vector runs across rows.
        across = bool(axes) and not axes[-1].reduced
        evaluator.push(axis.name for axis in (kept[:-1] if across else kept))
        if across:
            evaluator.push([kept[-1].name])
        else:
            self._choose_kept(evaluator)
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
        work = product(axis.extent for axis in reduced) * self.work
        if not axes:  # every extent is 1
            return block([*root, *row_shapes.plain(row, reduced, Runs(self.facts))])
        if not across:
            self.nest = Nest(tuple(kept), tuple(reduced), reduced[-1], self.work)
            return block([*root, self._along_rows(kept, reduced, row, work)])
        row = row_shapes.plain(row, reduced, Runs(self.facts))
        columns = kept[-1]
        if len(kept) == 1:
            loop = split(columns, row, work, size=COLUMN_BLOCK)
            return block([*root, *outer, loop])
        loop = inner_loops([columns], row, vector=True)
        work = work * columns.extent
        return block([*root, parallel(kept[:-1], [*outer, loop], work)])

    def _along_rows(
        self,
        kept: Sequence[Axis],
        reduced: Sequence[Axis],
        row: Sequence[Stmt],
        work: Expr,
    ) -> Stmt:
        """Contiguous rows: the vector loop runs along them."""
        runs = Runs(self.facts, self.cx.lanes)
        match self.given.plan:
            case RowPlan.SPLIT:
                declared = [s for s in row if isinstance(s, Accumulator)]
                slots = row_shapes.slots(declared)
                for slot in slots.values():
                    self.memory.work(slot.buffer)
                pieces = row_shapes.split(row, reduced, slots, runs)
                return inner_loops(kept, pieces, vector=False)
            case RowPlan.SHORT:
                room = short_room(self.cx.lanes)
                return parallel(kept, row_shapes.short(row, reduced[0], room), work)
            case RowPlan.PLAIN:
                return parallel(kept, row_shapes.plain(row, reduced, runs), work)

    def _stage(self, axes: Sequence[Axis], evaluator: Evaluator) -> None:
        """One loop over the row: this stage's reductions, results and kept values."""
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
        evaluator.emit(stage_loop(inner))

    # ---- elements

    def _is_row(self, value: Value) -> bool:
        return is_row(value, self.shape, self.facts)

    def _scratch_index(self) -> tuple[Expr, ...]:
        reduced = self.shape.reduced
        position = flatten(
            [self.index[k] for k in reduced], [self.shape.domain[k] for k in reduced]
        )
        match self.given.plan:
            case RowPlan.SHORT:
                return (position,)
            case RowPlan.SPLIT:  # one row at a time, written by all workers
                return (as_expr(0), position)
            case RowPlan.PLAIN:
                return (sym(WORKER), position)

    def _place(self, value: Value) -> tuple[Expr, ...]:
        """The index of a result, in the box of the domain being written."""
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
        if value in self.inputs and value.type.numel == as_expr(0):
            # It has no elements, and maybe no address: loops around this never run,
            # but what does not depend on them is computed ahead of them.
            return number_of(0, value.dtype.compute)
        if value in self.packed:
            at = self.packed[value].index(index)
            return Load(self.inputs[value], at, where)
        if value in self.inputs:
            return Load(self.inputs[value], (flatten(index, value.shape),), where)
        op = self.producers[value]
        if op.name == "reduce":
            return Read(self.accumulators[value], value.dtype.compute)
        return self._kept_value(value, index, where)

    def _kept_value(
        self, value: Value, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue | None:
        """A value that an earlier stage of the row left in memory or in registers."""
        if self.stage > self.depth[value] and where is None:
            if value in self.kept and index == self._place(value):
                return Load(self.kept[value], self._scratch_index())
            if self._reread(value) and index == self._place(value):
                at = (flatten(index, value.shape),)
                return Load(self.outputs[value], at)
        return None

    def _reread(self, value: Value) -> bool:
        """Whether a full-size result that an earlier stage stored is read back."""
        return (
            value in self.outputs
            and bool(self.shape.reduced)
            and not self._is_row(value)
            and value.dtype.compute is value.dtype
        )

    def _choose_kept(self, evaluator: Evaluator) -> None:
        """Keeps large, expensive values that several stages need, the last first."""
        short = self.given.plan is RowPlan.SHORT
        least = KEEP_IN_REGISTERS_COST if short else KEEP_COST
        size = numel(self.shape.domain, self.facts)
        row = product(self.shape.domain[k] for k in self.shape.reduced)
        for op in reversed(self.region.ops):
            if op.name == "reduce" or not op.results:
                continue
            value = op.result
            if value in self.outputs or numel(value.shape, self.facts) != size:
                continue
            if len(self._stages_of(value)) < 2 or self._cost(value) < least:
                continue
            number = len(self.kept)
            if short:
                room = (short_room(self.cx.lanes),)
                registers = buffer(f"row_{number}", value.dtype, room, Role.REGISTER)
                evaluator.emit(Alloc(registers))
                self.kept[value] = registers
            else:
                each = (sym(THREADS), row)
                scratch = buffer(f"work_{number}", value.dtype, each, Role.WORK)
                self.kept[value] = self.memory.work(scratch)

    def _stages_of(self, value: Value) -> set[int]:
        """Stages whose loops compute `value`, given what is already kept."""
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
            if numel(v.shape, self.facts) == size  # others are computed once per row
        }
        cost = sum(OPS[self.producers[v].name].cost for v in cone)
        leaves = {v for c in cone for v in self.producers[c].operands}
        return cost + 2 * len(leaves & set(self.region.params))


def _depths(region: Graph) -> dict[Value, int]:
    """How many reductions a value depends on, one after another."""
    depth: dict[Value, int] = dict.fromkeys(region.params, 0)
    for op in region.ops:
        level = max((depth[v] for v in op.operands), default=0)
        for value in op.results:
            depth[value] = level + 1 if op.name == "reduce" else level
    return depth
