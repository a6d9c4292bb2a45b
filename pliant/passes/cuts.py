"""Cutting a value into chunks of rows, and what that cuts before it.

A chunk of a value has, of one axis, only the rows that a round of a loop computes. For
most ops the rows of a result depend on the same rows of their operands; an operand that
every row depends on (a weight, the keys of attention) is needed whole:

    matmul(a, b), cut at the rows of the result    a is cut at its rows, b is whole
    reduce(x) {axes = (2)}, cut at axis 1          x is cut at axis 1
    reduce(x) {axes = (1)}                         nothing may be cut: every row of x
                                                   is in each element

The last is what a loop over chunks may still compute: each round reduces its rows, and
adds that to what the rounds before have in sum (`Sum`). So it is with a product whose
contracted axis is cut, the gradient of a weight.

`behind` states that for each op, and `chunked` makes the op that computes the rows. An
axis may be cut between factors: [batch*seq, 768] at seq has `batch` runs of rows. A
value may lack the last row of all (logits, where labels are those of the next row): of
it, the last round has one row less. An op without a rule is not cut, so what it reads
is needed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pliant.ir.access import is_one
from pliant.ir.graph import Attr, Graph, Names, Op, Value
from pliant.ir.ops import LOOKUPS, Trait, has_trait
from pliant.ir.reductions import COMBINES
from pliant.ir.types import DType, TensorType
from pliant.sym import (
    ONE,
    Expr,
    Facts,
    as_expr,
    ge,
    le,
    maximum,
    minimum,
    product,
    sym,
)
from pliant.sym.nodes import long_division


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of an axis whose dim is outer * extent * inner: some of the middle ones.

    Where it is `short`, there are extent - 1 rows: the last one is not there.
    """

    axis: int
    outer: Expr = ONE
    inner: Expr = ONE
    short: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        key = self.axis, self.outer, self.inner, self.short
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash  # asked for often: cuts are keys of most tables here

    @property
    def is_plain(self) -> bool:
        """Whether the rows are those of the axis itself."""
        return self.outer == ONE and self.inner == ONE

    def at(self, axis: int) -> Cut:
        return replace(self, axis=axis)


Demand = Cut | None  # None: the whole value
Demands = tuple[Demand, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """An op that combines all rows: a round gives its part of each element."""

    op: Op
    combine: str  # by which reduction
    behind: Demands  # the rows of its operands


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one round: of the cutter's extent, `rows` many from `first` on.

    `short` is how many of them there are where the last row of all is not.
    """

    cutter: Cutter
    rows: Expr
    first: Expr
    names: Names  # of the values of a round
    short: Expr | None = None

    def count(self, cut: Cut) -> Expr:
        if not cut.short:
            return self.rows
        assert self.short is not None, cut
        return self.short

    def shape(self, shape: Sequence[Expr], cut: Demand) -> tuple[Expr, ...]:
        if cut is None:
            return tuple(shape)
        dims = list(shape)
        dims[cut.axis] = cut.outer * self.count(cut) * cut.inner
        return tuple(dims)

    def value(self, of: Value, cut: Demand) -> Value:
        """A value with the rows of a round."""
        kind = of.type.with_shape(self.shape(of.shape, cut))
        return Value(self.names.fresh(of.name), kind)


class Cutter:
    """The cuts behind ops, at the rows of one extent."""

    def __init__(self, extent: Expr, facts: Facts) -> None:
        self.extent, self.facts = facts.canonical(extent), facts
        self._known: dict[tuple[Op, Demand], Demands | None] = {}
        self._quotients: dict[tuple[Expr, Expr], Expr | None] = {}
        self._regions: dict[tuple[Graph, Demands], RegionCuts | None] = {}
        self._sums: dict[Graph, list[RegionCuts]] = {}

    def cuts_of(self, shape: Sequence[Expr]) -> list[Cut]:
        """The ways to cut a shape, the axes in order; rows that are one run first."""
        found: list[Cut] = []
        for axis, dim in enumerate(shape):
            if dim.is_const and not self.extent.is_const:
                continue
            for short in (False, True):
                rest = self.quotient(dim, self.length(short))
                if rest == ONE:
                    found.append(Cut(axis, short=short))
                elif rest is not None:
                    ways = (ONE, rest), (rest, ONE)
                    found += (Cut(axis, *way, short) for way in ways)
        return found

    def length(self, short: bool) -> Expr:
        """How many rows there are in all."""
        return self.extent - 1 if short else self.extent

    def quotient(self, dim: Expr, by: Expr) -> Expr | None:
        """dim / by where that is exact."""
        key = dim, by
        if key not in self._quotients:
            self._quotients[key] = self._quotient(dim, by)
        return self._quotients[key]

    def _quotient(self, dim: Expr, by: Expr) -> Expr | None:
        dim, by = self.facts.canonical(dim), self.facts.canonical(by)
        if dim == by:
            return ONE
        if by == ONE:
            return dim
        if by == as_expr(0):
            return None
        whole, rest = long_division(dim, by)
        return whole if rest == as_expr(0) else None

    def behind(self, op: Op, cut: Cut) -> Demands | None:
        """What an op needs of its operands for the rows of its result, if known."""
        key = op, cut
        if key not in self._known:
            self._known[key] = self._behind(op, cut)
        return self._known[key]

    def _behind(self, op: Op, cut: Cut) -> Demands | None:
        rule = _RULES.get(op.name)
        if rule is not None:
            return rule(self, op, cut)
        if has_trait(op, Trait.ELEMENTWISE):
            return (cut,) * len(op.operands)
        return None

    def region(self, region: Graph, cuts: Sequence[Demand]) -> RegionCuts | None:
        """The cuts of all that a region computes; None if it cannot be cut so."""
        key = region, tuple(cuts)
        if key not in self._regions:
            self._regions[key] = self._region(region, cuts)
        return self._regions[key]

    def sums(self, region: Graph) -> list[RegionCuts]:
        """The ways to compute a region's result as a sum over chunks."""
        if region not in self._sums:
            ways = (self._region(region, (None,), way) for way in self._sums_of(region))
            self._sums[region] = [cuts for cuts in ways if cuts is not None]
        return self._sums[region]

    def _sums_of(self, region: Graph) -> Iterator[Sum]:
        op = root_of(region)
        combine = None if op is None else combined_by(op)
        if op is None or combine is None:
            return
        first = op.operands[0]
        contracted = contracted_axes(op)
        for cut in self.cuts_of(first.shape):
            if cut.axis not in contracted:
                continue
            if op.name == "reduce":
                yield Sum(op, combine, (cut,))
                continue
            other = op.operands[1]
            there = cut.at(other.type.rank - 2)
            if there in self.cuts_of(other.shape):
                yield Sum(op, combine, (cut, there))

    def _region(
        self, region: Graph, cuts: Sequence[Demand], total: Sum | None = None
    ) -> RegionCuts | None:
        wanted: dict[Value, set[Demand]] = {}
        for value, cut in zip(region.results, cuts, strict=True):
            wanted.setdefault(value, set()).add(cut)
            if (cut is None and total is None) or len(wanted[value]) > 1:
                return None
        root = None if total is None else total.op
        demands: dict[Value, Demand] = {}
        for op in reversed(region.ops):
            made = [v for v in op.results if v in wanted]
            if not made:
                continue
            for value in made:
                if not _settle(value, wanted[value], demands):
                    return None
            if total is not None and op is root:
                behind: Demands | None = total.behind
            else:
                behind = self.op_behind(op, [demands[v] for v in made])
            if behind is None or len(set(zip(op.operands, behind, strict=True))) > len(
                set(op.operands)
            ):
                return None  # or one operand twice, but not the same rows
            for value, demand in zip(op.operands, behind, strict=True):
                wanted.setdefault(value, set()).add(demand)
        for param in region.params:
            if param in wanted and not _settle(param, wanted[param], demands):
                return None
        given = zip(region.results, cuts, strict=True)
        if any(demands[value] != cut for value, cut in given):
            return None
        # A value that is needed whole after all is computed in every round.
        for op in region.ops:
            if op is not root and any(demands.get(v, ONE) is None for v in op.results):
                if not _is_cheap(op):
                    return None
                if any(demands[v] is not None for v in op.operands):
                    return None
        return RegionCuts(demands, total)

    def op_behind(self, op: Op, wanted: Sequence[Demand]) -> Demands | None:
        """What an op needs for these rows of those of its results that are needed."""
        if all(demand is None for demand in wanted):
            return (None,) * len(op.operands)
        (cut,) = set(wanted) if len(set(wanted)) == 1 else (None,)
        if cut is None or len(op.results) != 1:
            return None
        return self.behind(op, cut)


def root_of(region: Graph) -> Op | None:
    """The op that computes a region's only result, which may be a view of its own."""
    if len(region.results) != 1:
        return None
    producers = region.producers()
    op = producers.get(region.results[0])
    while op is not None and op.name in ("reshape", "transpose"):
        op = producers.get(op.operands[0])
    return op


def contracted_axes(op: Op) -> tuple[int, ...]:
    """The axes of the first operand whose elements are all in each result."""
    if op.name == "reduce":
        return op.ints_attr("axes")
    return (op.operands[0].type.rank - 1,)


def combined_by(op: Op) -> str | None:
    """The reduction that combines parts of an op's result; None: that is not exact.

    Sums are not rounded to few bits after every chunk.
    """
    combine = {"matmul": "sum", "reduce": ""}.get(op.name)
    if combine is None:
        return None
    combine = combine or op.str_attr("op")
    dtype = op.result.dtype
    exact = combine in ("max", "min") or dtype.compute is dtype
    numbers = combine in COMBINES and dtype is not DType.BOOL
    return combine if numbers and exact else None


def _is_cheap(op: Op) -> bool:
    """Whether a value may be computed in every round: no more than is read of it."""
    traits = (Trait.FORMULA, Trait.VIEW, Trait.ELEMENTWISE)
    return op.name in LOOKUPS or any(has_trait(op, trait) for trait in traits)


def _settle(value: Value, wanted: set[Demand], demands: dict[Value, Demand]) -> bool:
    """The rows to have of a value; all, from which some are read, if ops differ."""
    if len(wanted) == 1:
        (demands[value],) = wanted
        return True
    demands[value] = None
    return all(cut is None or cut.is_plain for cut in wanted)


@dataclass(frozen=True, slots=True)
class RegionCuts:
    """The rows that a chunk has of each value of a region; absent: not needed."""

    demands: Mapping[Value, Demand]
    total: Sum | None = None  # what its result is combined by, if it is no rows

    def ops(self, region: Graph, chunk: Chunk, values: dict[Value, Value]) -> list[Op]:
        """The ops of a chunk; `values` has those that there are already."""
        made: list[Op] = []
        for op in region.ops:
            if all(v in self.demands for v in op.results):
                cut = self.demands[op.results[0]]
                if self.total is not None and op is self.total.op:
                    behind: Demands | None = self.total.behind
                else:
                    behind = chunk.cutter.op_behind(op, [cut])
                assert behind is not None, op  # the region's cuts were found by it
                given = dict(values)
                for value, wanted in zip(op.operands, behind, strict=True):
                    if wanted is not None and self.demands[value] is None:
                        made.append(rows_of(values[value], wanted, chunk))
                        given[value] = made[-1].result
                made += chunked(op, cut, chunk, given)
                values.update((v, given[v]) for v in op.results)
        return made


def rows_of(value: Value, cut: Cut, chunk: Chunk) -> Op:
    """The op that reads the rows of a chunk from a whole value."""
    assert cut.outer == ONE, cut  # otherwise they are several runs
    starts = [as_expr(0)] * value.type.rank
    starts[cut.axis] = chunk.first * cut.inner
    part = chunk.value(value, cut)
    attrs: tuple[tuple[str, Attr], ...] = (
        ("starts", tuple(starts)),
        ("shape", part.shape),
        ("steps", (1,) * value.type.rank),
    )
    return Op("slice", (value,), attrs, (part,))


def chunked(op: Op, cut: Demand, chunk: Chunk, values: dict[Value, Value]) -> list[Op]:
    """An op for the rows of a chunk, and what it needs; its results go to `values`."""
    operands = tuple(values[v] for v in op.operands)
    results = tuple(chunk.value(v, cut) for v in op.results)
    values.update(zip(op.results, results, strict=True))
    attrs, regions = op.attrs, op.regions
    before: list[Op] = []
    if cut is not None and op.name in _CONVOLUTIONS and _has_windows(op, cut):
        before, attrs = _windows(op, operands[0], cut, chunk)
        operands = (before[-1].result, *operands[1:])
    elif cut is not None:
        change = _CHANGES.get(op.name)
        if change is not None:
            attrs, regions = change(op, cut, chunk)
        elif any(name == "shape" for name, _ in attrs):
            attrs = _with(attrs, shape=chunk.shape(op.dims_attr("shape"), cut))
    new = op.replace(operands=operands, results=results, attrs=attrs, regions=regions)
    if cut is not None and op.name == "iota" and op.int_attr("axis") == cut.axis:
        return _shifted(new, chunk, values, op.result)
    return [*before, new]


def _windows(
    op: Op, whole: Value, cut: Cut, chunk: Chunk
) -> tuple[list[Op], tuple[tuple[str, Attr], ...]]:
    """The rows that a convolution reads, with zeros around them; and its attributes."""
    window = _window_of(op, cut, chunk.rows, chunk.first)
    assert window is not None, op  # its rule has found it
    fresh, rank = chunk.names.fresh, whole.type.rank

    def along(value: Expr, others: Sequence[Expr]) -> tuple[Expr, ...]:
        return (*others[: cut.axis], value, *others[cut.axis + 1 :])

    zeros = (as_expr(0),) * rank
    shape = along(window.count, whole.shape)
    rows = Value(fresh(f"{whole.name}_rows"), whole.type.with_shape(shape))
    attrs: tuple[tuple[str, Attr], ...] = (
        ("starts", along(window.start, zeros)),
        ("shape", shape),
        ("steps", (1,) * rank),
    )
    read = Op("slice", (whole,), attrs, (rows,), (), op.loc)
    total = along(window.low + window.count + window.high, whole.shape)
    padded = Value(fresh(f"{whole.name}_window"), whole.type.with_shape(total))
    attrs = (
        ("low", along(window.low, zeros)),
        ("high", along(window.high, zeros)),
        ("value", 0),
    )
    around = Op("pad", (rows,), attrs, (padded,), (), op.loc)
    at = _spatial(op, cut)
    none = {
        name: tuple(0 if k == at else n for k, n in enumerate(op.ints_attr(name)))
        for name in ("low", "high")
    }
    return [read, around], _with(op.attrs, **none)


def _with(
    attrs: tuple[tuple[str, Attr], ...], **changes: Attr
) -> tuple[tuple[str, Attr], ...]:
    return tuple((name, changes.get(name, value)) for name, value in attrs)


def _shifted(op: Op, chunk: Chunk, values: dict[Value, Value], of: Value) -> list[Op]:
    """The index along the axis counts from the first row of the chunk."""
    result, fresh = op.result, chunk.names.fresh
    first = Value(fresh(f"{result.name}_first"), TensorType(result.dtype, ()))
    attrs: tuple[tuple[str, Attr], ...]
    attrs = (("value", chunk.first), ("dtype", result.dtype))
    number = Op("dim_value", (), attrs, (first,), (), op.loc)
    wide = Value(fresh(f"{result.name}_firsts"), result.type)
    attrs = (("shape", result.shape), ("axes", ()))
    spread = Op("broadcast", (first,), attrs, (wide,), (), op.loc)
    total = Value(fresh(f"{result.name}_rows"), result.type)
    added = Op("add", (result, wide), (), (total,), (), op.loc)
    values[of] = total
    return [op, number, spread, added]


# ---- what is behind the rows of a result

_CONVOLUTIONS = {"conv": 2, "conv_last": 1}  # the first spatial axis of each

_Rule = Callable[[Cutter, Op, Cut], "Demands | None"]


def _create(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    counts = op.name == "iota" and op.int_attr("axis") == cut.axis
    return None if counts and not cut.is_plain else ()


def _broadcast(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    axes = op.ints_attr("axes")
    if cut.axis not in axes:
        return (None,)
    axis = axes.index(cut.axis)
    if op.name == "stretch":
        return None
    own, wide = op.operands[0].shape[axis], op.dims_attr("shape")[cut.axis]
    return (None,) if is_one(own) and not is_one(wide) else (cut.at(axis),)


def _reshape(cutter: Cutter, op: Op, cut: Cut) -> Demands | None:
    found = _through_reshape(cutter, op.result.shape, cut, op.operands[0].shape)
    return None if found is None else (found,)


def _through_reshape(
    cutter: Cutter, shape: Sequence[Expr], cut: Cut, other: Sequence[Expr]
) -> Cut | None:
    """The cut of the same elements in another shape."""
    before = product(shape[: cut.axis]) * cut.outer
    ahead, length = ONE, cutter.length(cut.short)
    for axis, dim in enumerate(other):
        outer = cutter.quotient(before, ahead)
        if outer is not None:
            inner = cutter.quotient(dim, outer * length)
            if inner is not None and not (dim.is_const and not cutter.extent.is_const):
                return Cut(axis, cutter.facts.canonical(outer), inner, cut.short)
        ahead = cutter.facts.canonical(ahead * dim)
    return None


def _transpose(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    return (cut.at(op.ints_attr("perm")[cut.axis]),)


def _slice(cutter: Cutter, op: Op, cut: Cut) -> Demands | None:
    axis = cut.axis
    start, step = op.dims_attr("starts")[axis], op.ints_attr("steps")[axis]
    whole = op.operands[0].shape[axis]
    if (start, step) == (as_expr(0), 1):
        if cutter.quotient(whole, op.dims_attr("shape")[axis]) == ONE:
            return (cut,)
        if cut.is_plain and cut.short and cutter.quotient(whole, cutter.extent) == ONE:
            return (Cut(axis),)
    # Other rows than its own: each round reads them from the whole.
    return (None,) if cut.is_plain else None


def _same_rows(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    return (cut,)


def _flip(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    return None if cut.axis in op.ints_attr("axes") else (cut,)


def _concat(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    return None if op.int_attr("axis") == cut.axis else (cut,) * len(op.operands)


def _pad(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    added = op.dims_attr("low")[cut.axis], op.dims_attr("high")[cut.axis]
    if added == (as_expr(0), as_expr(0)):
        return (cut,)
    if added == (as_expr(0), ONE) and cut.is_plain and not cut.short:
        return (Cut(cut.axis, short=True),)
    return None


def _index(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    indices = op.operands[1:]
    rank = indices[0].type.rank
    if cut.axis < rank:
        return (None, *(cut for _ in indices))
    return (cut.at(cut.axis - rank + len(indices)), *(None for _ in indices))


def _take_along(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    return (None if op.int_attr("axis") == cut.axis else cut), cut


def _reduce(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    reduced = op.ints_attr("axes")
    if op.bool_attr("keepdims"):
        return None if cut.axis in reduced else (cut,)
    kept = [k for k in range(op.operands[0].type.rank) if k not in reduced]
    return (cut.at(kept[cut.axis]),)


def _along_axis(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    return None if op.int_attr("axis") == cut.axis else (cut,)


def _pool(_: Cutter, op: Op, cut: Cut) -> Demands | None:
    leading = op.result.type.rank - len(op.ints_attr("window"))
    return (cut,) if cut.axis < leading else None


def _matmul(cutter: Cutter, op: Op, cut: Cut) -> Demands | None:
    a, b = op.operands
    rank = op.result.type.rank
    if cut.axis == rank - 2:
        return cut, None
    if cut.axis == rank - 1:
        return None, cut
    return _batch(op.result, a, cut), _batch(op.result, b, cut)


def _batch(result: Value, operand: Value, cut: Cut) -> Demand:
    """A batch axis of an operand: cut, or one for all rows."""
    alone = is_one(operand.shape[cut.axis]) and not is_one(result.shape[cut.axis])
    return None if alone else cut


def _conv(cutter: Cutter, op: Op, cut: Cut) -> Demands | None:
    if not _has_windows(op, cut):
        return cut, None
    rows, first = sym("_rows"), sym("_first")
    rows_of_all = cut.is_plain and not cut.short
    window = _window_of(op, cut, rows, first) if rows_of_all else None
    if window is None:
        return None
    facts = cutter.facts
    for cond in (ge(rows, 1), ge(first, 0), le(first + rows, cutter.extent)):
        facts = facts.assume(cond)
    # Windows of neighbouring rows overlap: each round reads its own from the whole.
    legal = (ge(window.count, 0), ge(window.low, 0), ge(window.high, 0))
    inside = le(window.start + window.count, op.operands[0].shape[cut.axis])
    proved = all(facts.prove(cond) is True for cond in (*legal, inside))
    return (None, None) if proved else None


def _spatial(op: Op, cut: Cut) -> int:
    """Which of the spatial axes of a convolution is cut; not one of them: negative."""
    at = cut.axis - _CONVOLUTIONS[op.name]
    return at if at < len(op.ints_attr("stride")) else -1


def _has_windows(op: Op, cut: Cut) -> bool:
    """Whether a row of a convolution needs other rows than its own."""
    at = _spatial(op, cut)
    if at < 0:
        return cut.axis != 0
    own = op.ints_attr("stride")[at] == 1 and op.operands[1].shape[2 + at] == ONE
    return not own or (op.ints_attr("low")[at], op.ints_attr("high")[at]) != (0, 0)


@dataclass(frozen=True, slots=True)
class _HaloWindow:
    """Rows that a convolution reads: `count` from `start` on, and zeros around them."""

    start: Expr
    count: Expr
    low: Expr
    high: Expr


def _window_of(op: Op, cut: Cut, rows: Expr, first: Expr) -> _HaloWindow | None:
    """What a convolution reads for some rows of its result."""
    at, strides = _spatial(op, cut), op.ints_attr("stride")
    if at < 0 or not op.operands[1].shape[2 + at].is_const:
        return None
    size = op.operands[1].shape[2 + at].value
    reach = op.ints_attr("dilation")[at] * (size - 1) + 1
    begin = first * strides[at] - op.ints_attr("low")[at]
    end = begin + (rows - 1) * strides[at] + reach
    start = maximum(begin, 0) if op.ints_attr("low")[at] else begin
    stop = minimum(end, op.operands[0].shape[cut.axis])
    return _HaloWindow(start, stop - start, start - begin, end - stop)


def _score_axis(op: Op, cut: Cut) -> int:
    """The axis of the scores (.., heads, rows, columns) that is cut."""
    rank = op.result.type.rank
    swapped = op.bool_attr("swapped")
    heads, rows = (rank - 2, rank - 3) if swapped else (rank - 3, rank - 2)
    return {heads: rank - 3, rows: rank - 2}.get(cut.axis, cut.axis)


def _attention(cutter: Cutter, op: Op, cut: Cut) -> Demands | None:
    query, key, value, *others = op.operands
    rank = query.type.rank
    axis = _score_axis(op, cut)
    if axis == rank - 1 or not cut.is_plain or cut.short:
        return None
    there = cut.at(axis)
    if axis == rank - 2:
        main: Demands = there, None, None
    elif axis == rank - 3 and query.shape[axis] != key.shape[axis]:
        return None
    else:
        main = tuple(_batch(query, x, there) for x in (query, key, value))
    if not op.regions:
        return (*main, *(_batch(query, x, there) for x in others)) if others else main
    inside = cutter.region(op.regions[0], [there])
    if inside is None:
        return None
    params = op.regions[0].params
    if inside.demands.get(params[0], there) != there:
        return None
    return (*main, *(inside.demands.get(p) for p in params[1:]))


_RULES: dict[str, _Rule] = {
    "full": _create,
    "iota": _create,
    "broadcast": _broadcast,
    "stretch": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "flip": _flip,
    "rounded": _same_rows,
    "concat": _concat,
    "pad": _pad,
    "index": _index,
    "take_along": _take_along,
    "reduce": _reduce,
    "cumulate": _along_axis,
    "pool": _pool,
    "matmul": _matmul,
    "conv": _conv,
    "conv_last": _conv,
    "attention": _attention,
}


# ---- attributes and regions of the op that computes the rows

_Changed = tuple[tuple[tuple[str, Attr], ...], tuple[Graph, ...]]


def _chunked_attention(op: Op, cut: Cut, chunk: Chunk) -> _Changed:
    axis = _score_axis(op, cut)
    attrs = op.attrs
    if axis == op.operands[0].type.rank - 2 and op.bool_attr("causal"):
        attrs = _with(attrs, first=op.dim_attr("first") + chunk.first)
    if not op.regions:
        return attrs, ()
    region = op.regions[0]
    inside = chunk.cutter.region(region, [cut.at(axis)])
    assert inside is not None, op  # its rule has found them
    demands = {p: inside.demands.get(p) for p in region.params}
    demands[region.params[0]] = cut.at(axis)
    params = {p: chunk.value(p, demands[p]) for p in region.params}
    values = dict(params)
    ops = inside.ops(region, chunk, values)
    results = tuple(values[v] for v in region.results)
    made = region.replace(
        params=tuple(params.values()), ops=tuple(ops), results=results
    )
    return attrs, (made,)


def _chunked_slice(op: Op, cut: Cut, chunk: Chunk) -> _Changed:
    starts = list(op.dims_attr("starts"))
    if chunk.cutter.behind(op, cut) == (None,):
        starts[cut.axis] += chunk.first * op.ints_attr("steps")[cut.axis]
    shape = chunk.shape(op.dims_attr("shape"), cut)
    return _with(op.attrs, starts=tuple(starts), shape=shape), ()


def _chunked_pad(op: Op, cut: Cut, chunk: Chunk) -> _Changed:
    high = list(op.dims_attr("high"))
    (behind,) = chunk.cutter.behind(op, cut) or (None,)
    if behind is not None and behind.short != cut.short:
        high[cut.axis] = chunk.count(cut) - chunk.count(behind)
    return _with(op.attrs, high=tuple(high)), ()


_CHANGES: dict[str, Callable[[Op, Cut, Chunk], _Changed]] = {
    "slice": _chunked_slice,
    "pad": _chunked_pad,
    "attention": _chunked_attention,
}
