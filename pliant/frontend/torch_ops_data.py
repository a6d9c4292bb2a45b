"""aten ops whose results have sizes that only the data tell, and checks of such sizes.

A size of data is a fresh symbol, and memory is planned for the most that it can be. For
`unique` that is the number of elements. What the data alone limit, an `item()` or the
sum of repeats, needs a limit that the model states: torch._check(n <= most), on the
size itself or on sizes that it is compared with. Every such check is a requirement of
the graph, proved or tested when the sizes are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch

from pliant.frontend.signature import LARGEST
from pliant.frontend.torch_branches import conditions
from pliant.frontend.torch_dims import to_expr
from pliant.frontend.torch_numbers import span
from pliant.frontend.torch_ops_context import Real, Size, TorchContext, as_index
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_sort import sorted_along
from pliant.frontend.torch_ops_window import drop_axis
from pliant.ir.graph import Value
from pliant.ir.types import DType, TensorType
from pliant.sym import (
    Cond,
    Expr,
    Facts,
    as_expr,
    eq,
    floordiv,
    ge,
    le,
    maximum,
    minimum,
    product,
)

aten = torch.ops.aten

_NO_BOUND = 1 << 48  # an upper bound above this is torch's own


# ---- checks


def _is_data(symbol: Any) -> bool:
    """Whether torch made a symbol for a size that it could not know."""
    return str(symbol).startswith("u")


def _stated(node: torch.fx.Node) -> Any:
    """The condition of a check, as torch knows it; None if it is no such node."""
    if node.target is not aten._assert_scalar.default:
        return None
    tested = node.args[0]
    val = tested.meta.get("val") if isinstance(tested, torch.fx.Node) else tested
    return val.node.expr if isinstance(val, torch.SymBool) else None


def check(cx: TorchContext, *_: Any) -> None:
    """torch._check of sizes that data decide; all others are guards of the trace."""
    assert cx.node is not None
    stated = _stated(cx.node)
    if stated is None or not any(map(_is_data, stated.free_symbols)):
        return
    if any(str(s) not in cx.symbols for s in stated.free_symbols):
        return  # of a size that nothing here has
    found = conditions(stated, cx.symbols)
    if found is None:
        cx.unsupported(f"a check that compares no two sizes: {stated}")
    for cond in found:
        if not _holds_of_all_sizes(cond):
            cx.require(cond, "the model checks this of its data")


def _holds_of_all_sizes(cond: Cond) -> bool:
    """Torch also checks bounds of its own, as products of the largest sizes."""
    facts = Facts()
    for name in cond.symbols():
        facts = facts.with_range(name, 0, LARGEST)
    return facts.prove(cond) is True


def check_async(cx: TorchContext, tested: Value, message: str = "") -> None:
    """torch._assert_async: a number of the data that must not be 0."""
    holds = cx.cast(cx.arith("ne", tested, cx.tensor(0, tested.dtype)), DType.I64)
    size = cx.b.emit("extent", cx.reshape(holds, ()), most=as_expr(1), of="assertion")
    cx.require(eq(size.shape[0], 1), message or "the model asserts this of its data")


def _orders(stated: Any) -> Iterator[tuple[Any, Any]]:
    """(low, high) with low <= high, of a condition."""
    match stated:
        case sympy.And():
            for part in stated.args:
                yield from _orders(part)
        case sympy.Le():
            yield stated.lhs, stated.rhs
        case sympy.Ge():
            yield stated.rhs, stated.lhs
        case sympy.Lt():
            yield stated.lhs, stated.rhs - 1
        case sympy.Gt():
            yield stated.rhs, stated.lhs - 1
        case sympy.Eq():
            yield stated.lhs, stated.rhs
            yield stated.rhs, stated.lhs
        case _:
            pass


def _limits(cx: TorchContext, symbol: Any, seen: frozenset[Any]) -> Iterator[Any]:
    """What the graph's checks have a size be at most, over sizes known by now."""
    assert cx.node is not None
    stated = (_stated(node) for node in cx.node.graph.nodes)
    for low, high in (pair for each in stated for pair in _orders(each)):
        gap = sympy.expand(high - low)
        times = gap.coeff(symbol)
        rest = gap - times * symbol
        if times.is_Integer and times < 0 and symbol not in rest.free_symbols:
            most = _known(cx, sympy.expand(rest), seen | {symbol})
            if most is not None:
                yield most, -times


def _known(cx: TorchContext, expr: Any, seen: frozenset[Any]) -> Any:
    """An expression never below this one, without sizes that are not known yet."""
    for other in sorted(expr.free_symbols, key=str):
        if str(other) in cx.symbols:
            continue
        times = expr.coeff(other)
        rest = expr - times * other
        if not times.is_Integer or other in rest.free_symbols or other in seen:
            return None
        expr = rest
        if times > 0:
            ends = [m for m, by in _limits(cx, other, seen) if by == 1]
            if not ends:
                return None
            expr = sympy.expand(rest + times * ends[0])
    return expr


def most_of(cx: TorchContext, size: torch.SymInt) -> Expr | None:
    """The most that a size of data can be, by what the model checks; None: any."""
    symbol = size.node.expr
    found: list[Expr] = []
    for most, by in _limits(cx, symbol, frozenset()):
        try:
            end = to_expr(most, cx.symbols.__getitem__)
        except (KeyError, ValueError):
            continue
        found.append(end if by == 1 else floordiv(end, int(by)))
    if not found:
        upper = size.node.shape_env.bound_sympy(symbol).upper
        return None if upper > _NO_BOUND else as_expr(int(upper))
    return cx.simplify(maximum(minimum(*found), 0))


def _size(
    cx: TorchContext,
    number: Value,
    size: Any,
    what: str,
    how: str,
    of: str,
    known: Expr | None = None,
) -> Expr:
    """A number of the data as a size, at most what is `known`, or the model states."""
    if not isinstance(size, torch.SymInt) or size.node.expr.free_symbols == set():
        cx.unsupported(f"{what} that is no size of its own")
    most = most_of(cx, size) if known is None else known
    if most is None:
        cx.unsupported(f"{what} without a bound: add torch._check({how} <= most)")
    number = cx.reshape(cx.cast(number, DType.I64), ())
    made = cx.b.emit("extent", number, most=most, of=of)
    cx.symbols.setdefault(str(size.node.expr), made.shape[0])
    return made.shape[0]


def _zero(cx: TorchContext, gap: Value, what: str) -> Value:
    """A number that must be 0, checked when it is used."""
    return cx.b.in_range(gap, 1, wraps=False, of=what, axis=-1)


def item(cx: TorchContext, x: Value) -> Expr | Real:
    """A number of the data, a size if it is an integer; of sizes alone it is theirs."""
    number = cx.val
    if isinstance(number, torch.SymFloat):
        return Real(value=cx.reshape(cx.cast(x, DType.F64), ()))
    if not isinstance(number, torch.SymInt):
        cx.unsupported("item() of a tensor of bool")
    known = span(cx, x)
    if known.number is not None:
        cx.symbols.setdefault(str(number.node.expr), known.number)
        return known.number
    least = number.node.shape_env.bound_sympy(number.node.expr).lower
    if least < 0 and not (known.low is not None and cx.proves(ge(known.low, 0))):
        cx.unsupported("item() that may be negative: add torch._check(n >= 0)")
    return _size(cx, x, number, "item()", "n", "item()", known.high)


# ---- elements without repeats


def _different(cx: TorchContext, rows: Value) -> Value:
    """Whether each row (n, ..) differs from the one before it; the first does."""
    n = rows.shape[0]
    some = cx.simplify(minimum(n, 1))
    rest = cx.simplify(n - some)
    unlike = cx.arith("ne", cx.slice(rows, 0, some, rest), cx.slice(rows, 0, 0, rest))
    for _ in rows.shape[1:]:
        unlike = cx.reduce("any", unlike, (1,))
    return cx.concat([cx.full(True, (some,), DType.BOOL), unlike], 0)


def _runs(
    cx: TorchContext, rows: Value, inverse: bool, counts: bool
) -> tuple[Value, Value, Value]:
    """The first row of each run of equals, the run of each row, and their lengths."""
    n = rows.shape[0]
    first = _different(cx, rows)
    found = cx.b.emit("nonzero", first)
    places = drop_axis(cx, found, 1)
    cx.nonnegative.add(places)
    kept = cx.b.emit("index", rows, places)
    number = length = cx.full(0, (0,), DType.I64)
    if inverse:
        reached = cx.b.emit("cumulate", cx.cast(first, DType.I64), op="sum", axis=0)
        number = cx.sub(reached, 1)
    if counts:
        count = places.shape[0]
        some = cx.simplify(minimum(count, 1))
        end = cx.full(n, (some,), DType.I64)
        later = cx.slice(places, 0, some, cx.simplify(count - some))
        length = cx.sub(cx.concat([later, end], 0), places)
    return kept, number, length


def _put_back(cx: TorchContext, numbers: Value, order: Value) -> Value:
    """Values for sorted elements, in the order before sorting."""
    (n,) = numbers.shape
    blank = cx.full(0, (n, 1), DType.I64)
    return cx.b.emit("scatter_rows", blank, order, cx.reshape(numbers, (n, 1)))


def unique(
    cx: TorchContext,
    x: Value,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> list[Value]:
    """In ascending order, with `sorted=False` too."""
    n = x.type.numel
    values, order = sorted_along(cx, cx.reshape(x, (n,)), 0)
    kept, number, length = _runs(cx, values, return_inverse, return_counts)
    if return_inverse:
        number = cx.reshape(_put_back(cx, number, order), x.shape)
    return [kept, number, length]


def unique_consecutive(
    cx: TorchContext,
    x: Value,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> list[Value]:
    if dim is None:
        flat = cx.reshape(x, (x.type.numel,))
        kept, number, length = _runs(cx, flat, return_inverse, return_counts)
        shaped = cx.reshape(number, x.shape) if return_inverse else number
        return [kept, shaped, length]
    if cx.val[0].dim() != x.type.rank:
        cx.unsupported("torch.export mistakes its shape: give a dim from the front")
    axis = cx.axis(dim, x.type.rank)
    rows = cx.move_axis(x, axis, 0)
    kept, number, length = _runs(cx, rows, return_inverse, return_counts)
    return [cx.move_axis(kept, 0, axis), number, length]


# ---- repeats and counts


def repeat_interleave(
    cx: TorchContext, repeats: Value, output_size: Size | None = None
) -> Value:
    """The place of each element as often as it is repeated."""
    return _repeated(cx, repeats, cx.val.shape[0], output_size)


def _repeated(
    cx: TorchContext, repeats: Value, size: Any, output_size: Size | None
) -> Value:
    repeats = as_index(cx, repeats)
    n = repeats.shape[0]
    if output_size is None:
        total = cx.reduce("sum", repeats, (0,))
        of = "repeat_interleave: the sum of repeats"
        length = _size(cx, total, size, "repeats", "result.shape[dim]", of)
    else:
        length = as_expr(output_size)
    repeats = cx.in_range(repeats, cx.simplify(length + 1), 0)
    ends = cx.b.emit("cumulate", repeats, op="sum", axis=0)
    numbers = cx.iota((length,), 0, DType.I64)
    if output_size is not None:
        gap = cx.sub(length, cx.reduce("sum", repeats, (0,)))
        gap = _zero(cx, gap, "repeat_interleave: output_size less the sum of repeats")
        numbers = cx.add(numbers, gap)
    rows, wanted = cx.reshape(ends, (1, n)), cx.reshape(numbers, (1, length))
    found = cx.b.emit("search", rows, wanted, right=True)
    place = cx.in_range(cx.reshape(found, (length,)), n, 0)
    cx.nonnegative.add(place)
    return place


def repeat_elements(
    cx: TorchContext,
    x: Value,
    repeats: Value,
    dim: int | None = None,
    output_size: Size | None = None,
) -> Value:
    if dim is None:
        x, dim = cx.reshape(x, (x.type.numel,)), 0
    axis = cx.axis(dim, x.type.rank)
    repeats = cx.broadcast_to(
        cx.reshape(repeats, (repeats.type.numel,)), (x.shape[axis],)
    )
    place = _repeated(cx, repeats, cx.val.shape[axis], output_size)
    picked = cx.b.emit("index", cx.move_axis(x, axis, 0), place)
    return cx.keep_sign(x, cx.move_axis(picked, 0, axis))


def bincount(
    cx: TorchContext, x: Value, weights: Value | None = None, minlength: int = 0
) -> Value:
    """How often each number is there, or the sum of its weights."""
    (n,), places = x.shape, as_index(cx, x)
    most = cx.b.reduce(
        "max", cx.concat([places, cx.full(-1, (1,), DType.I64)], 0), (0,), False
    )
    total = cx.arith("maximum", cx.add(most, 1), minlength)
    of = "bincount: the largest number and 1"
    size = _size(cx, total, cx.val.shape[0], "bincount", "result.shape[0]", of)
    places = cx.in_range(places, size, 0)
    dtype = cx.out_dtype
    rows = cx.full(1, (n,), dtype) if weights is None else cx.cast(weights, dtype)
    added = cx.b.emit("scatter", places, cx.reshape(rows, (n, 1)), op="sum", rows=size)
    return cx.reshape(added, (size,))


# ---- parts, and places in a number that is given


def tensor_split(
    cx: TorchContext, x: Value, places: Value, dim: int = 0
) -> list[Value]:
    """The slices of an axis between places that are data."""
    if places.type.rank != 1:
        cx.unsupported("tensor_split into a number of parts that data decide")
    axis = cx.axis(dim, x.type.rank)
    n, count = x.shape[axis], len(cx.val)
    cx.b.require_equal(places.shape[0], count - 1, "tensor_split: as many as traced")
    places = as_index(cx, places)
    ends = [cx.reshape(cx.slice(places, 0, k, 1), ()) for k in range(count - 1)]
    ends = [_from_front(cx, end, n) for end in ends]
    zero, whole = cx.full(0, (), DType.I64), cx.tensor(n, DType.I64)
    front, out = cx.move_axis(x, axis, 0), []
    bounds = zip([zero, *ends], [*ends, whole], cx.val, strict=True)
    for start, end, val in bounds:
        length = cx.arith("maximum", cx.sub(end, start), 0)
        made = cx.b.emit("extent", length, most=n, of="tensor_split: a part")
        size = val.shape[axis]
        if isinstance(size, torch.SymInt):
            cx.symbols.setdefault(str(size.node.expr), made.shape[0])
        place = cx.add(cx.iota(made.shape, 0, DType.I64), start)
        cx.nonnegative.add(place)
        out.append(cx.move_axis(cx.b.emit("index", front, place), 0, axis))
    return out


def _from_front(cx: TorchContext, place: Value, n: Expr) -> Value:
    """The end of a slice, as Python counts."""
    place = cx.select(cx.arith("lt", place, 0), cx.add(place, n), place)
    return cx.arith("minimum", cx.arith("maximum", place, 0), n)


def narrow(cx: TorchContext, x: Value, dim: int, start: Value, length: Size) -> Value:
    """So many elements of an axis, from a place that is data."""
    axis, count = cx.axis(dim, x.type.rank), as_expr(length)
    n = x.shape[axis]
    cx.require(le(count, n), "narrow: no longer than the axis")
    start = cx.reshape(as_index(cx, start), ())
    start = cx.select(cx.arith("lt", start, 0), cx.add(start, n), start)
    start = cx.in_range(start, cx.simplify(n - count + 1), axis)
    place = cx.add(cx.iota((count,), 0, DType.I64), start)
    cx.nonnegative.add(place)
    picked = cx.b.emit("index", cx.move_axis(x, axis, 0), place)
    return cx.keep_sign(x, cx.move_axis(picked, 0, axis))


def nonzero_static(
    cx: TorchContext, x: Value, *, size: Size, fill_value: int = -1
) -> Value:
    """The places of the first elements that are not 0, as many as are asked for."""
    n, rank, count = x.type.numel, x.type.rank, as_expr(size)
    if not rank:
        return cx.full(0, (count, 0), DType.I64)
    flags = cx.cast(cx.reshape(cx.to_bool(x), (1, n)), DType.I64)
    reached = cx.b.emit("cumulate", flags, op="sum", axis=1)
    wanted = cx.add(cx.iota((1, count), 1, DType.I64), 1)
    found = cx.reshape(cx.b.emit("search", reached, wanted, right=False), (count,))
    exists = cx.arith("lt", found, n)
    columns, below = [], as_expr(1)
    for axis in reversed(range(rank)):
        along = cx.arith("floordiv", found, cx.simplify(maximum(below, 1)))
        place = cx.arith("mod", along, cx.simplify(maximum(x.shape[axis], 1)))
        columns.append(cx.reshape(cx.select(exists, place, fill_value), (count, 1)))
        below = below * x.shape[axis]
    return cx.concat(columns[::-1], 1)


# ---- writing where a mask says


def write_masked(
    cx: TorchContext, x: Value, mask: Value, lead: int, rows: Value
) -> Value:
    """x[.., mask] = rows: a row for each True, or one for all."""
    if rows.type.numel == 1:
        tail = x.type.rank - lead - mask.type.rank
        mask = cx.reshape(cx.to_bool(mask), (*mask.shape, *[1] * tail))
        return cx.b.select(mask, cx.cast(cx.reshape(rows, ()), x.dtype), x)
    shape = x.shape[:lead], mask.shape, x.shape[lead + mask.type.rank :]
    count = mask.type.numel
    for have, want in zip(mask.shape, x.shape[lead:], strict=False):
        cx.b.require_equal(have, want, "a mask must have the size it masks")
    flags = cx.reshape(cx.to_bool(mask), (count,))
    ones = cx.cast(flags, DType.I64)
    number = cx.sub(cx.b.emit("cumulate", ones, op="sum", axis=0), ones)
    rank = lead + 1 + len(shape[2])
    rows = cx.reshape(rows, (*[1] * (rank - rows.type.rank), *rows.shape))
    given = rows.shape[lead]
    # One row is for all; else there must be as many as places.
    several = cx.simplify(minimum(maximum(given - 1, 1 - given), 1))
    gap = cx.sub(cx.reduce("sum", ones, (0,)), given)
    what = "index_put: places of the mask less values given"
    gap = _zero(cx, cx.mul(gap, several), what)
    some = cx.simplify(minimum(count, 1))
    rows = cx.broadcast_to(cx.cast(rows, x.dtype), (*shape[0], given, *shape[2]))
    blank = cx.full(0, (*shape[0], some, *shape[2]), x.dtype)
    front = cx.move_axis(cx.concat([rows, blank], lead), lead, 0)
    wanted = cx.select(flags, cx.mul(number, several), cx.tensor(given, DType.I64))
    wanted = cx.in_range(cx.add(wanted, gap), cx.simplify(given + some), 0)
    picked = cx.move_axis(cx.b.emit("index", front, wanted), 0, lead)
    flat = cx.reshape(x, (*shape[0], count, *shape[2]))
    where = cx.reshape(flags, (count, *[1] * len(shape[2])))
    return cx.reshape(cx.select(where, picked, flat), x.shape)


def _ordered(cx: TorchContext, columns: Value) -> Value:
    """The places of columns (length, n) in their order, by the first number first."""
    outer = cx.b
    cx.b = outer.child()
    try:
        order = cx.b.param("order", TensorType(DType.I64, columns.shape[1:]))
        row = cx.b.param("row", columns.type.with_shape(columns.shape[1:]))
        cx.nonnegative.add(order)
        _, places = sorted_along(cx, cx.b.emit("index", row, order), 0)
        body = cx.b.finish("step", [cx.b.emit("index", order, places)])
    finally:
        cx.b = outer
    first, rounds = cx.iota(columns.shape[1:], 0, DType.I64), columns.shape[0]
    # Sorting keeps equals in order: from the last number to the first.
    (made,) = cx.b.emit_multi(
        "scan",
        *(first, columns),
        regions=(body,),
        rounds=rounds,
        scanned=1,
        reverse=True,
    )
    cx.nonnegative.add(made)
    return made


def unique_dim(
    cx: TorchContext,
    x: Value,
    dim: int,
    *_: bool,
) -> list[Value]:
    """Rows in ascending order; what nothing reads of the results is not computed."""
    axis = cx.axis(dim, x.type.rank)
    rows = cx.move_axis(x, axis, 0)
    n, length = rows.shape[0], product(rows.shape[1:])
    order = _ordered(cx, cx.transpose(cx.reshape(rows, (n, length)), (1, 0)))
    rows = cx.b.emit("index", rows, order)
    kept, number, counts = _runs(cx, rows, True, True)
    number = cx.reshape(_put_back(cx, number, order), (n,))
    return [cx.move_axis(kept, 0, axis), number, counts]


DATA: dict[Any, Translate] = {
    aten.item.default: item,
    aten._local_scalar_dense.default: item,
    aten._assert_scalar.default: check,
    aten._assert_async.default: check_async,
    aten._assert_async.msg: check_async,
    aten._unique2.default: unique,
    aten.unique_dim.default: unique_dim,
    aten.unique_consecutive.default: unique_consecutive,
    aten.repeat_interleave.Tensor: repeat_interleave,
    aten.repeat_interleave.self_Tensor: repeat_elements,
    aten.bincount.default: bincount,
    aten.tensor_split.tensor_indices_or_sections: tensor_split,
    aten.narrow.Tensor: narrow,
    aten.nonzero_static.default: nonzero_static,
}
