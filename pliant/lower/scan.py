"""Kernels that walk a window or an axis for each result element.

pool, transposed convolution: a loop over the window inside a map over the results.
cumulate: a loop along one axis inside loops over all others. scatter: blocks of
columns; each goes over all rows in order, so that sums do not depend on the number of
threads. The ops that compute their operands are computed inside the loops, as in any
fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pliant.ir.access import Space, flatten
from pliant.ir.graph import Graph, Op, Value
from pliant.ir.groups import domain_index
from pliant.ir.loop_walk import size_symbols
from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Binary,
    Buffer,
    Const,
    For,
    If,
    Index,
    Kind,
    Load,
    LoopFunc,
    LoopValue,
    Read,
    Role,
    Select,
    Stmt,
    Store,
    as_dtype,
    buffer,
)
from pliant.ir.ops import OPAQUE
from pliant.ir.reductions import COMBINES, identity
from pliant.ir.types import DType
from pliant.lower.domain import Axis, with_axes
from pliant.lower.evaluate import BoundValue, Evaluator
from pliant.lower.nest import COLUMN_BLOCK, block, inner_loops, parallel, split
from pliant.lower.step import KernelStep, NumberCheck
from pliant.sym import (
    Expr,
    Facts,
    as_expr,
    ceildiv,
    maximum,
    minimum,
    sym,
)

LOWEST = {
    DType.I64: -(2**63),
    DType.I32: -(2**31),
    DType.I16: -(2**15),
    DType.I8: -128,
    DType.U64: 0,
    DType.U32: 0,
    DType.U16: 0,
    DType.U8: 0,
    DType.BOOL: False,
}


class _Scan:
    def __init__(self, region: Graph, facts: Facts, check: NumberCheck) -> None:
        (self.root,) = (op for op in region.ops if op.name in OPAQUE)
        self.region, self.facts = region, facts
        self.inputs = {
            v: buffer(f"in_{k}", v.dtype, (v.type.numel,), Role.IN)
            for k, v in enumerate(region.params)
        }
        result = self.root.result
        self.out = buffer("out", result.dtype, (result.type.numel,), Role.OUT)
        space = Space(facts, {})
        self.evaluator = Evaluator(region.producers(), self._leaf, space, check)

    def _leaf(
        self, value: Value, index: tuple[Expr, ...], where: LoopValue | None
    ) -> LoopValue | None:
        if value not in self.inputs:
            return None
        return Load(self.inputs[value], (flatten(index, value.shape),), where)

    def step(self, name: str, body: Stmt) -> KernelStep:
        buffers: list[Buffer] = [*self.inputs.values(), self.out]
        func = LoopFunc(name, size_symbols(body, buffers), tuple(buffers), body)
        return KernelStep(func, (*self.inputs, self.root.result))

    def axes(self, shape: Sequence[Expr]) -> list[Axis]:
        return [Axis(f"_d{k}", d) for k, d in enumerate(shape) if d != as_expr(1)]

    def store(self, index: tuple[Expr, ...], value: LoopValue) -> Stmt:
        result = self.root.result
        at = (flatten(index, result.shape),)
        return Store(self.out, at, as_dtype(value, result.dtype))

    def over_results(
        self, inside: Callable[[tuple[Expr, ...]], None], work: Expr
    ) -> Stmt:
        """A map over the result; `inside` emits the statements of one element."""
        shape = self.root.result.shape
        axes = self.axes(shape)
        self.evaluator.space = with_axes(self.facts, axes)
        self.evaluator.push(a.name for a in axes[:-1])
        self.evaluator.push(a.name for a in axes[-1:])
        inside(domain_index(shape))
        inner, outer = self.evaluator.pop(), self.evaluator.pop()
        root = self.evaluator.scopes[0].body
        loop = inner_loops(axes[-1:], inner, vector=True)
        width = axes[-1].extent if axes else as_expr(1)
        return block([*root, parallel(axes[:-1], [*outer, loop], work * width)])

    def window(
        self, extents: Sequence[Expr], body: Callable[[tuple[Expr, ...]], None]
    ) -> None:
        """Serial loops over a window around what `body` emits."""
        names = [f"_w{k}" for k in range(len(extents))]
        self.evaluator.push(names)
        body(tuple(sym(n) for n in names))
        stmt: Stmt = block(self.evaluator.pop())
        for name, extent in reversed(list(zip(names, extents, strict=True))):
            stmt = For(name, as_expr(0), extent, stmt)
        self.evaluator.emit(stmt)

    def accumulator(self, op: str, dtype: DType) -> str:
        name = self.evaluator.fresh("acc")
        self.evaluator.emit(Accumulator(name, dtype, op))
        self.evaluator.declare(name)
        return name


def _pool(scan: _Scan, name: str) -> KernelStep:
    op = scan.root
    (x,) = op.operands
    window, stride = op.ints_attr("window"), op.ints_attr("stride")
    dilation, low = op.ints_attr("dilation"), op.ints_attr("low")
    lead = x.type.rank - len(window)
    dtype = x.dtype.compute
    largest = op.str_attr("op") == "max"

    def element(index: tuple[Expr, ...]) -> None:
        acc = scan.accumulator("max" if largest else "sum", dtype)

        def visit(w: tuple[Expr, ...]) -> None:
            at = [
                index[lead + k] * stride[k] + w[k] * dilation[k] - low[k]
                for k in range(len(window))
            ]
            inside = _inside(at, x.shape[lead:])
            guard = scan.evaluator.local(inside)
            value = scan.evaluator.value(x, (*index[:lead], *at), guard)
            if largest:
                value = Select(guard, value, _lowest(dtype))
            scan.evaluator.emit(Accumulate(acc, value))

        scan.window([as_expr(w) for w in window], visit)
        result: LoopValue = Read(acc, dtype)
        if not largest:
            count = _pool_count(op, index, lead)
            result = Binary("div", result, as_dtype(Index(count), dtype))
        scan.evaluator.emit(scan.store(index, result))

    work = as_expr(4)
    for w in window:
        work = work * w
    return scan.step(name, scan.over_results(element, work))


def _pool_count(op: Op, index: tuple[Expr, ...], lead: int) -> Expr:
    """The size of a mean's window: elements inside the input, or also its padding."""
    (x,) = op.operands
    window, stride = op.ints_attr("window"), op.ints_attr("stride")
    low, high = op.ints_attr("low"), op.ints_attr("high")
    dilation, whole = op.ints_attr("dilation"), op.bool_attr("include_pad")
    count = as_expr(1)
    for k, size in enumerate(window):
        first = index[lead + k] * stride[k] - low[k]
        end = x.shape[lead + k] + (high[k] if whole else 0)
        if dilation[k] == 1:
            start = first if whole else maximum(first, 0)
            count = count * (minimum(first + size, end) - start)
            continue
        # Tap t is at first + t*dilation: those before the end, without those before 0.
        taps = minimum(ceildiv(end - first, dilation[k]), size)
        if not whole:
            taps = taps - ceildiv(maximum(-first, 0), dilation[k])
        count = count * taps
    return count


def _along(
    scan: _Scan, name: str, axis: int, body: Callable[[tuple[Expr, ...]], list[Stmt]]
) -> KernelStep:
    """One loop per position of all axes but `axis`; the body runs along `axis`.

    If the last axis is another one, its positions run as lanes of one vector loop.
    """
    (x, *_) = scan.root.operands
    index = list(domain_index(x.shape))
    index[axis] = sym("_w0")
    axes = [a for a in scan.axes(x.shape) if a.name != f"_d{axis}"]
    scan.evaluator.space = with_axes(scan.facts, axes)
    scan.evaluator.push(a.name for a in axes)
    rest = body(tuple(index))
    inner = [*scan.evaluator.pop(), *rest]
    root = scan.evaluator.scopes[0].body
    work = 4 * x.shape[axis]
    last = f"_d{x.type.rank - 1}"
    if not axes or axes[-1].name != last:
        return scan.step(name, block([*root, parallel(axes, inner, work)]))
    *outer, columns = axes
    if not outer:
        loop = split(columns, inner, work, size=COLUMN_BLOCK)
    else:
        across = inner_loops([columns], inner, vector=True)
        loop = parallel(outer, [across], work * columns.extent)
    return scan.step(name, block([*root, loop]))


def _cumulate(scan: _Scan, name: str) -> KernelStep:
    (x,) = scan.root.operands
    axis = scan.root.int_attr("axis")
    # As eager: in f64, where every element is a result that is rounded once.
    dtype = DType.F64 if x.dtype is DType.F32 else x.dtype.compute

    def walk(index: tuple[Expr, ...]) -> list[Stmt]:
        acc = scan.accumulator(scan.root.str_attr("op"), dtype)

        def visit(_: tuple[Expr, ...]) -> None:
            term = as_dtype(scan.evaluator.value(x, index), dtype)
            scan.evaluator.emit(Accumulate(acc, term))
            scan.evaluator.emit(scan.store(index, Read(acc, dtype)))

        scan.window([x.shape[axis]], visit)
        return []

    return _along(scan, name, axis, walk)


def _scatter(scan: _Scan, name: str) -> KernelStep:
    index, rows = scan.root.operands
    result = scan.root.result
    width, dtype = result.shape[1], result.dtype
    column = Axis("_d1", width)
    begin = sym("_p") * COLUMN_BLOCK
    ends = (begin, minimum(width, begin + COLUMN_BLOCK))

    def across(at: Expr, body: Sequence[Stmt], value: LoopValue) -> Stmt:
        store = Store(scan.out, (at * width + column.var,), as_dtype(value, dtype))
        return For(column.name, *ends, block([*body, store]), Kind.VECTOR)

    op = scan.root.str_attr("op")
    clear = across(sym("_d0"), [], Const(identity(op, dtype), dtype))
    row = Axis("_w0", index.shape[0])
    scan.evaluator.space = with_axes(scan.facts, [row, column])
    scan.evaluator.push(["_p", row.name])
    bound = BoundValue(scan.root.name, 0, result.shape[0], scan.root.loc)
    place, fits = scan.evaluator.gathered(index, (row.var,), bound, None)
    scan.evaluator.push([column.name])
    added = scan.evaluator.value(rows, (row.var, column.var))
    inner = scan.evaluator.pop()
    before = Load(scan.out, (place * width + column.var,))
    total = Binary(COMBINES[op], as_dtype(before, dtype.compute), added)
    written = across(place, inner, total)
    visit = [*scan.evaluator.pop(), written if fits is None else If(fits, written)]
    walk = [
        For("_d0", as_expr(0), result.shape[0], clear),
        For(row.name, as_expr(0), row.extent, block(visit)),
    ]
    work = COLUMN_BLOCK * (result.shape[0] + 4 * row.extent)
    blocks = Axis("_p", ceildiv(width, COLUMN_BLOCK))
    root = scan.evaluator.scopes[0].body
    if blocks.extent == as_expr(1):
        walk = [For(blocks.name, as_expr(0), as_expr(1), block(walk))]
    return scan.step(name, block([*root, parallel([blocks], walk, work)]))


def _inside(at: Sequence[Expr], shape: Sequence[Expr]) -> LoopValue:
    whole: LoopValue | None = None
    for i, dim in zip(at, shape, strict=True):
        for test in (
            Binary("ge", Index(i), Index(as_expr(0))),
            Binary("lt", Index(i), Index(dim)),
        ):
            whole = test if whole is None else Binary("logical_and", whole, test)
    assert whole is not None
    return whole


def _lowest(dtype: DType) -> Const:
    return Const(LOWEST.get(dtype, float("-inf")), dtype)


_KERNELS: dict[str, Callable[[_Scan, str], KernelStep]] = {
    "pool": _pool,
    "cumulate": _cumulate,
    "scatter": _scatter,
}


def lower_scan(
    region: Graph, name: str, facts: Facts, check: NumberCheck
) -> KernelStep:
    scan = _Scan(region, facts, check)
    return _KERNELS[scan.root.name](scan, name)
