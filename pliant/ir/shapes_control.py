"""Shape rules of the control ops: regions, calls, and sizes known only to the run."""

from __future__ import annotations

from collections.abc import Mapping

from pliant.errors import ShapeError
from pliant.ir.graph import Graph, Value, chunk_rows
from pliant.ir.infer import Attrs, InferContext, Types
from pliant.ir.reductions import COMBINES
from pliant.ir.types import DType, TensorType
from pliant.sym import Expr, as_expr, eq, le, sym
from pliant.sym.monotone import largest


def _enter(cx: InferContext, region: Graph, types: Types) -> list[tuple[bool, ...]]:
    """Checks a region's params against what is passed; tells which dims vary."""
    params = [v.type for v in region.params]
    if len(params) != len(types):
        cx.fail(f"region {region.name} takes {len(params)} values, not {len(types)}")
    varying = []
    for param, type in zip(params, types, strict=True):
        if param.dtype is not type.dtype or param.rank != type.rank:
            cx.fail(f"region {region.name} takes {param}, is given {type}")
        flags = []
        for want, have in zip(param.shape, type.shape, strict=True):
            equal = cx.proves_equal(want, have)
            if not equal and want.symbol is None:
                cx.fail(f"region {region.name} takes {param}, is given {type}")
            flags.append(not equal)
        varying.append(tuple(flags))
    return varying


def _condition(cx: InferContext, type: TensorType) -> None:
    if type.dtype is not DType.BOOL or type.rank:
        cx.fail(f"the condition must be bool[], is {type}")


def if_(cx: InferContext, types: Types, _: Attrs) -> Types:
    _condition(cx, types[0])
    then, other = cx.regions
    for region in cx.regions:
        _enter(cx, region, types[1:])
    if len(then.results) != len(other.results):
        cx.fail("both regions must give the same number of results")
    out = []
    for a, b in zip(then.results, other.results, strict=True):
        if a.dtype is not b.dtype or a.type.rank != b.type.rank:
            cx.fail(f"regions give {a.type} and {b.type}")
        pairs = zip(a.shape, b.shape, strict=True)
        shape = (x if cx.proves_equal(x, y) else cx.fresh("u") for x, y in pairs)
        out.append(a.type.with_shape(tuple(shape)))
    return tuple(out)


def _carry(cx: InferContext, body: Graph, types: Types, first: int) -> Types:
    """Types of carried values after any number of rounds."""
    varying = _enter(cx, body, types)[first:]
    carried = types[first:]
    results = tuple(v.type for v in body.results)
    if len(results) != len(carried):
        cx.fail(f"the body gives {len(results)} values for {len(carried)} carried")
    return _carried(cx, carried, results, varying)


def _carried(
    cx: InferContext, carried: Types, results: Types, varying: list[tuple[bool, ...]]
) -> Types:
    out = []
    for type, result, flags in zip(carried, results, varying, strict=True):
        if type.dtype is not result.dtype or type.rank != result.rank:
            cx.fail(f"a carried value is {type} before and {result} after a round")
        shape = []
        for dim, after, varies in zip(type.shape, result.shape, flags, strict=True):
            if not varies and not cx.proves_equal(dim, after):
                cx.fail(
                    f"a carried dim is {dim} before and {after} after a round: give "
                    "the body's param a symbol of its own, or add a match_cast"
                )
            shape.append(cx.fresh("u") if varies else dim)
        out.append(type.with_shape(tuple(shape)))
    return tuple(out)


def loop(cx: InferContext, types: Types, _: Attrs) -> Types:
    if types[0].dtype is not DType.I64 or types[0].rank:
        cx.fail(f"the number of rounds must be i64[], is {types[0]}")
    return _carry(cx, cx.regions[0], types, 1)


def scan(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    count = len(types) - attrs.integer("scanned")
    rounds, carried = attrs.dim("rounds"), types[:count]
    passed = list(carried)
    for type in types[count:]:
        if not type.rank:
            cx.fail("what is scanned must have an axis of rows")
        cx.require_equal(type.shape[0], rounds, "the number of rows")
        passed.append(type.with_shape(type.shape[1:]))
    (body,) = cx.regions
    if any(map(any, _enter(cx, body, tuple(passed)))):
        cx.fail("the body's params have sizes of their own")
    results = tuple(v.type for v in body.results)
    if len(results) < count:
        cx.fail(f"the body gives {len(results)} values for {count} carried")
    fixed = [(False,) * type.rank for type in carried]
    after = _carried(cx, carried, results[:count], fixed)
    stacked = (t.with_shape((rounds, *t.shape)) for t in results[count:])
    return (*after, *stacked)


def bind(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (region,) = cx.regions
    most = dict(zip(region.sizes, attrs.dims("most"), strict=True))
    count = len(most)
    for type in types[:count]:
        if type.dtype is not DType.I64 or type.rank:
            cx.fail(f"a size must be i64[], is {type}")
    facts = cx.facts
    for name, bound in most.items():
        facts = facts.assume(le(sym(name), bound))
    _enter(cx, region, types[count:])
    out = []
    for value in region.results:
        if all(s not in most for d in value.shape for s in d.symbols()):
            out.append(value.type)
            continue
        room = largest(value.type.numel, most, facts)
        if room is None:
            cx.fail(f"no largest size of {value.type} is known")
        out.append(value.type.with_shape((room,)))
    return tuple(out)


def chunk(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    """Params and results with all rows in the place of those of a round."""
    (region,) = cx.regions
    if len(region.sizes) not in (2, 3):
        cx.fail("the region takes the number of rows and the first of them")
    if len(attrs.dims("outers")) != len(region.params) + len(region.results):
        cx.fail("every operand and result has a number of runs")
    every = chunk_rows(region, attrs.dim("extent"))

    def whole(value: Value) -> TensorType:
        shape = tuple(d.substitute(every) for d in value.shape)
        return value.type.with_shape(shape)

    def is_cut(value: Value) -> bool:
        return any(not every.keys().isdisjoint(d.symbols()) for d in value.shape)

    sums = attrs.texts("sums") if "sums" in attrs else ("",) * len(region.results)
    if len(sums) != len(region.results):
        cx.fail("every result has the name of a reduction, or none")
    params = [whole(v) for v in region.params]
    if len(params) != len(types):
        cx.fail(f"the region takes {len(params)} values, not {len(types)}")
    for want, have in zip(params, types, strict=True):
        equal = map(cx.proves_equal, want.shape, have.shape)
        if want.rank != have.rank or want.dtype is not have.dtype or not all(equal):
            cx.fail(f"the region takes rows of {want}, is given {have}")
    for value, outer in zip(
        (*region.params, *region.results), attrs.dims("outers"), strict=True
    ):
        cut = is_cut(value)
        if cut == (outer == as_expr(0)):
            cx.fail(f"{value}: {value.type} has {outer} runs of rows")
    for value, combine in zip(region.results, sums, strict=True):
        cut = is_cut(value)
        if combine and combine not in COMBINES:
            cx.fail(f"there is no reduction {combine}")
        if cut == bool(combine):
            cx.fail(f"{value}: {value.type} is rows, or what rounds have in sum")
    return tuple(map(whole, region.results))


def while_(cx: InferContext, types: Types, _: Attrs) -> Types:
    cond, body = cx.regions
    _enter(cx, cond, types)
    if len(cond.results) != 1:
        cx.fail("the first region must give one condition")
    _condition(cx, cond.results[0].type)
    return _carry(cx, body, types, 0)


def fusion(cx: InferContext, types: Types, _: Attrs) -> Types:
    _enter(cx, cx.regions[0], types)
    return tuple(v.type for v in cx.regions[0].results)


def match_cast(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    out = types[0].with_shape(attrs.dims("shape"))
    cx.require_rank(out, types[0].rank, "shape")
    for have, want in zip(types[0].shape, out.shape, strict=True):
        if cx.facts.prove(eq(have, want)) is False:
            cx.fail(f"{types[0]} can never be {out}")
        cx.facts = cx.facts.assume(eq(have, want))
    return (out,)


def nonzero(cx: InferContext, types: Types, _: Attrs) -> Types:
    count = cx.fresh("u")
    cx.facts = cx.facts.assume(le(count, types[0].numel))
    return (TensorType(DType.I64, (count, as_expr(types[0].rank))),)


def extent(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    if types[0].dtype is not DType.I64 or types[0].rank:
        cx.fail(f"a size must be i64[], is {types[0]}")
    size = cx.fresh("u")
    cx.facts = cx.facts.assume(le(size, attrs.dim("most")))
    return (TensorType(DType.BOOL, (size,)),)


def call(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    name = attrs.text("callee")
    callee = cx.callees.get(name)
    if callee is None:
        raise ShapeError(cx.describe(f"there is no function {name}"))
    params = [v.type for v in callee.params]
    sizes = attrs.dims("sizes")
    if len(params) != len(types) or len(sizes) != len(callee.sizes):
        cx.fail(f"{name} takes {len(params)} values and {len(callee.sizes)} sizes")
    bound: dict[str, Expr] = dict(zip(callee.sizes, sizes, strict=True))
    for param, type in zip(params, types, strict=True):
        if param.dtype is not type.dtype or param.rank != type.rank:
            cx.fail(f"{name} takes {param}, is given {type}")
        for want, have in zip(param.shape, type.shape, strict=True):
            symbol = want.symbol
            if symbol is not None:
                bound.setdefault(symbol, have)
    for param, type in zip(params, types, strict=True):
        for want, have in zip(param.shape, type.shape, strict=True):
            _determined(cx, name, want, bound)
            cx.require_equal(want.substitute(bound), have, f"argument of {name}")
    for guard in callee.constraints:
        # The callee's other symbols are bound inside it, and checked there.
        if set(guard.cond.symbols()) <= set(bound):
            cx.require(guard.cond.substitute(bound), f"constraint of {name}")
    out = []
    for value in callee.results:
        for dim in value.shape:
            _determined(cx, name, dim, bound)
        shape = tuple(dim.substitute(bound) for dim in value.shape)
        out.append(value.type.with_shape(shape))
    return tuple(out)


def _determined(
    cx: InferContext, callee: str, dim: Expr, bound: Mapping[str, Expr]
) -> None:
    loose = [s for s in dim.symbols() if s not in bound]
    if loose:
        cx.fail(
            f"{', '.join(loose)} in the signature of {callee} does not follow from the "
            "arguments: add a match_cast of the result to a known shape"
        )
