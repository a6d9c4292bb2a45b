"""The rules of `canonicalize`: constants, data movement, algebra.

Algebra keeps NaN, Inf and signed zero: for floats x*0 is not 0 and x + 0.0 is not x
(-0.0 + 0.0 is 0.0), but x - 0.0 and x + -0.0 are. Integers wrap and fold freely.

A value is replaced by another of provably equal shape, unless that one's type is less
precise: f32[4] is not replaced by f32[n], even where n == 4 is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pliant.ir.build import Number, number_as
from pliant.ir.graph import Op, Value
from pliant.ir.ops import ATTENTIONS, OPS, Trait, first_row, has_trait, named
from pliant.ir.rewrite import Rewriter, Rule, RuleSet, join
from pliant.ir.types import NUMPY, DType
from pliant.passes.canonical_indices import compare_indices
from pliant.sym import ZERO, Expr, le

# ---- predicates


def _number(cx: Rewriter, value: Value) -> Number | None:
    """The number that every element is, if the value is a `full`."""
    op = cx.producer(value, "full")
    if op is None:
        return None
    number = op.attr("value")
    assert isinstance(number, (bool, int, float))
    return number


def _is_number(cx: Rewriter, value: Value, number: Number) -> bool:
    """Whether every element is this number; signed zeros differ."""
    found = _number(cx, value)
    if found is None or found != number:
        return False
    return math.copysign(1, found) == math.copysign(1, number)


def _replacement(cx: Rewriter, op: Op, value: Value) -> Value | None:
    """The value, if it may replace the op's result."""
    old, new = op.result.type, value.type
    if old.dtype is not new.dtype or old.rank != new.rank:
        return None
    for a, b in zip(old.shape, new.shape, strict=True):
        if a is not b and (a.is_const or not cx.same(a, b)):
            return None
    return value


def _full(cx: Rewriter, op: Op, number: Number) -> Value:
    return cx.full(number, op.result.dtype, op.result.shape)


# ---- constants


def _plain(result: object, dtype: DType) -> Number:
    (number,) = np.asarray(result).reshape(1).tolist()
    assert isinstance(number, (bool, int, float))
    return number_as(number, dtype)


def fold_elementwise(cx: Rewriter, op: Op) -> Value | None:
    """f(full, ..) -> full, for ops that round the same everywhere."""
    numbers = [_number(cx, v) for v in op.operands]
    meaning = OPS[op.name].meaning
    assert meaning is not None
    if any(n is None for n in numbers) or op.result.dtype is DType.BF16:
        return None
    if any(v.dtype is DType.BF16 for v in op.operands):
        return None
    with np.errstate(all="ignore"):
        args = [
            np.array([n]).astype(NUMPY[v.dtype])
            for n, v in zip(numbers, op.operands, strict=True)
        ]
        return _full(cx, op, _plain(meaning(*args), op.result.dtype))


def fold_cast(cx: Rewriter, op: Op) -> Value | None:
    number, source = _number(cx, op.operands[0]), op.operands[0].dtype
    to = op.dtype_attr("dtype")
    if number is None or source is DType.BF16:
        return None
    if to.is_int and isinstance(number, float):
        # C leaves conversions out of range undefined.
        least = 0 if to.kind == "u" else -(2 ** (8 * to.bytes - 1))
        if not least <= number < least + 2 ** (8 * to.bytes):
            return None
    with np.errstate(all="ignore"):
        stored = np.array([number]).astype(NUMPY[source])
        if to is not DType.BF16:  # a bf16 `full` rounds its number itself
            stored = stored.astype(NUMPY[to])
    return _full(cx, op, _plain(stored, to))


def fold_move(cx: Rewriter, op: Op) -> Value | None:
    """Data movement of a constant is a constant."""
    numbers = {repr(_number(cx, v)) for v in op.operands}
    number = _number(cx, op.operands[0])
    if len(numbers) != 1 or number is None:
        return None
    if op.name == "pad" and repr(number_as(_pad_value(op), op.result.dtype)) != repr(
        number
    ):
        return None
    return _full(cx, op, number)


def _pad_value(op: Op) -> Number:
    value = op.attr("value")
    assert isinstance(value, (bool, int, float))
    return value


def fold_dim_value(cx: Rewriter, op: Op) -> Value | None:
    """A known integer is a `full`."""
    value = cx.facts.canonical(op.dim_attr("value"))
    if not value.is_const:
        return None
    return _full(cx, op, value.value)


def fold_iota(cx: Rewriter, op: Op) -> Value | None:
    return _full(cx, op, 0) if op.result.shape[op.int_attr("axis")] == 1 else None


def fold_reduce(cx: Rewriter, op: Op) -> Value | None:
    """max of a constant is the constant, if there is an element at all."""
    number, kind = _number(cx, op.operands[0]), op.str_attr("op")
    if number is None or kind in ("sum", "prod"):
        return None
    neutral = {"all": True, "any": False}.get(kind)
    dims = [op.operands[0].shape[a] for a in op.ints_attr("axes")]
    if number is not neutral and any(
        cx.facts.prove(le(1, d)) is not True for d in dims
    ):
        return None
    return _full(cx, op, number)


# ---- identities of data movement


def same_type(cx: Rewriter, op: Op) -> Value | None:
    """A cast, reshape or broadcast to the type that the operand has already."""
    return _replacement(cx, op, op.operands[0])


_EXACTLY_IN: dict[DType, frozenset[DType]] = {
    DType.F16: frozenset({DType.F32, DType.F64}),
    DType.BF16: frozenset({DType.F32, DType.F64}),
    DType.F32: frozenset({DType.F64}),
    DType.I8: frozenset({DType.I16, DType.I32, DType.I64}),
    DType.U8: frozenset({DType.I16, DType.I32, DType.I64}),
    DType.U16: frozenset({DType.I32, DType.I64}),
    DType.U32: frozenset({DType.I64}),
    DType.I16: frozenset({DType.I32, DType.I64}),
    DType.I32: frozenset({DType.I64}),
    DType.BOOL: frozenset(DType) - {DType.BOOL},
}


def cast_there_and_back(cx: Rewriter, op: Op) -> Value | None:
    inner = cx.producer(op.operands[0], "cast")
    if inner is None:
        return None
    (x,) = inner.operands
    exact = inner.result.dtype in _EXACTLY_IN.get(x.dtype, frozenset())
    return _replacement(cx, op, x) if exact else None


def reshape_of_reshape(cx: Rewriter, op: Op) -> Value | None:
    inner = cx.producer(op.operands[0], "reshape")
    if inner is None:
        return None
    return cx.emit("reshape", inner.operands[0], shape=op.dims_attr("shape"))


def transposed_blocks(cx: Rewriter, op: Op) -> Value | None:
    """Matrices that are swapped while the dims before them are joined: just swapped.

    (a, b, m, n) -> (a*b, m, n) -> (a*b, n, m) -> (a, b, n, m), as exporters write it.
    """
    swap = cx.producer(op.operands[0], "transpose")
    flat = None if swap is None else cx.producer(swap.operands[0], "reshape")
    if swap is None or flat is None:
        return None
    (x,) = flat.operands
    rank, swapped = x.type.rank, swap.ints_attr("perm")
    *lead, row, column = swapped
    if lead != [*range(len(lead))] or row <= column or rank < 2:
        return None
    made = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    pairs = [*zip(x.shape[-2:], flat.result.shape[-2:], strict=True)]
    if len(made) != op.result.type.rank:
        return None
    pairs += zip(made, op.result.shape, strict=True)
    if not all(a is b or cx.same(a, b) for a, b in pairs):
        return None
    return cx.emit("transpose", x, perm=(*range(rank - 2), rank - 1, rank - 2))


def transpose_identity(cx: Rewriter, op: Op) -> Value | None:
    perm = op.ints_attr("perm")
    return op.operands[0] if perm == tuple(range(len(perm))) else None


def transpose_of_transpose(cx: Rewriter, op: Op) -> Value | None:
    inner = cx.producer(op.operands[0], "transpose")
    if inner is None:
        return None
    first = inner.ints_attr("perm")
    perm = tuple(first[p] for p in op.ints_attr("perm"))
    return cx.emit("transpose", inner.operands[0], perm=perm)


def broadcast_of_broadcast(cx: Rewriter, op: Op) -> Value | None:
    inner = cx.producer(op.operands[0], "broadcast")
    if inner is None:
        return None
    outer = op.ints_attr("axes")
    axes = tuple(outer[a] for a in inner.ints_attr("axes"))
    shape = op.dims_attr("shape")
    return cx.emit("broadcast", inner.operands[0], shape=shape, axes=axes)


def _inserted_ones(old: Sequence[Expr], new: Sequence[Expr]) -> list[int] | None:
    """Where the old dims are in the new ones, if all others are 1."""
    places: list[int] = []
    for i, dim in enumerate(new):
        if len(places) < len(old) and dim is old[len(places)]:
            places.append(i)
        elif dim != 1:
            return None
    return places if len(places) == len(old) else None


def broadcast_of_unsqueeze(cx: Rewriter, op: Op) -> Value | None:
    """A broadcast adds dims by itself."""
    inner = cx.producer(op.operands[0], "reshape")
    if inner is None:
        return None
    (x,) = inner.operands
    places = _inserted_ones(x.shape, inner.result.shape)
    if places is None:
        return None
    outer = op.ints_attr("axes")
    axes = tuple(outer[p] for p in places)
    return cx.emit("broadcast", x, shape=op.dims_attr("shape"), axes=axes)


def moved_iota(cx: Rewriter, op: Op) -> Value | None:
    """A broadcast, transposed or unsqueezed iota is an iota of the new shape."""
    inner = cx.producer(op.operands[0], "iota")
    if inner is None:
        return None
    axis, places = inner.int_attr("axis"), None
    match op.name:
        case "broadcast":
            places = list(op.ints_attr("axes"))
        case "transpose":
            perm = op.ints_attr("perm")
            places = [perm.index(i) for i in range(len(perm))]
        case "reshape":
            places = _inserted_ones(inner.result.shape, op.result.shape)
    if places is None:
        return None
    return cx.iota(op.result.shape, places[axis], inner.result.dtype)


def whole_slice(cx: Rewriter, op: Op) -> Value | None:
    trivial = all(s == 0 for s in op.dims_attr("starts"))
    unit = all(s == 1 for s in op.ints_attr("steps"))
    return _replacement(cx, op, op.operands[0]) if trivial and unit else None


def slice_of_slice(cx: Rewriter, op: Op) -> Value | None:
    inner = cx.producer(op.operands[0], "slice")
    if inner is None:
        return None
    rows = list(
        zip(
            inner.dims_attr("starts"),
            inner.ints_attr("steps"),
            op.dims_attr("starts"),
            op.ints_attr("steps"),
            strict=True,
        )
    )
    return cx.emit(
        "slice",
        inner.operands[0],
        starts=[start + more * step for start, step, more, _ in rows],
        shape=op.dims_attr("shape"),
        steps=[step * again for _, step, _, again in rows],
    )


def short_concat(cx: Rewriter, op: Op) -> Value | None:
    """Drops empty operands; a single operand is the result."""
    axis = op.int_attr("axis")
    kept = [v for v in op.operands if v.shape[axis] != 0] or [op.operands[0]]
    if len(kept) == 1:
        return _replacement(cx, op, kept[0])
    if len(kept) == len(op.operands):
        return None
    return cx.emit("concat", *kept, axis=axis)


def no_pad(cx: Rewriter, op: Op) -> Value | None:
    widths = (*op.dims_attr("low"), *op.dims_attr("high"))
    return _replacement(cx, op, op.operands[0]) if all(w == 0 for w in widths) else None


def short_flip(cx: Rewriter, op: Op) -> Value | None:
    (x,), axes = op.operands, op.ints_attr("axes")
    kept = tuple(a for a in axes if x.shape[a] != 1)
    if not kept:
        return x
    return cx.emit("flip", x, axes=kept) if kept != axes else None


def short_reduce(cx: Rewriter, op: Op) -> Value | None:
    """Over dims of size 1 it is a reshape; but a float sum turns -0.0 into 0.0."""
    (x,) = op.operands
    if op.str_attr("op") == "sum" and x.dtype.is_float:
        return None
    if any(x.shape[a] != 1 for a in op.ints_attr("axes")):
        return None
    return cx.emit("reshape", x, shape=op.result.shape)


# ---- algebra


def neutral(cx: Rewriter, op: Op) -> Value | None:
    """x op number -> x, for the number in the op's row."""
    x, y = op.operands
    number = OPS[op.name].neutral
    assert number is not None
    if _is_number(cx, y, number_as(number, y.dtype)):
        return _replacement(cx, op, x)
    swaps = has_trait(op, Trait.COMMUTATIVE)
    if swaps and _is_number(cx, x, number_as(number, x.dtype)):
        return _replacement(cx, op, y)
    return None


def whole_quotient(cx: Rewriter, op: Op) -> Value | None:
    """x // 1 -> x for ints; a float would be rounded."""
    x, y = op.operands
    whole = not x.dtype.is_float and _is_number(cx, y, 1)
    return _replacement(cx, op, x) if whole else None


def absorbing(number: Number, *, ints_only: bool = False) -> Rule:
    """x op number -> number."""

    def rule(cx: Rewriter, op: Op) -> Value | None:
        if ints_only and op.result.dtype.is_float:
            return None
        same = number_as(number, op.result.dtype)
        hit = any(_is_number(cx, v, same) for v in op.operands)
        return _full(cx, op, same) if hit else None

    return rule


def idempotent(cx: Rewriter, op: Op) -> Value | None:
    x, y = op.operands
    return _replacement(cx, op, x) if x is y else None


def double(cx: Rewriter, op: Op) -> Value | None:
    """-(-x) -> x, and the like."""
    inner = cx.producer(op.operands[0], op.name)
    return inner.operands[0] if inner is not None else None


def small_power(cx: Rewriter, op: Op) -> Value | None:
    """x**1, x**2 and x**3 as products, as torch computes them."""
    x, power = op.operands[0], _number(cx, op.operands[1])
    if power == 1:
        return _replacement(cx, op, x)
    if power == 2:
        return cx.emit("mul", x, x)
    if power == 3:
        return cx.emit("mul", cx.emit("mul", x, x), x)
    return None


def select_known(cx: Rewriter, op: Op) -> Value | None:
    cond, x, y = op.operands
    known = _number(cx, cond)
    if x is y:
        return _replacement(cx, op, x)
    return None if known is None else _replacement(cx, op, x if known else y)


def select_not(cx: Rewriter, op: Op) -> Value | None:
    cond, x, y = op.operands
    inner = cx.producer(cond, "logical_not")
    return None if inner is None else cx.emit("select", inner.operands[0], y, x)


def select_flag(cx: Rewriter, op: Op) -> Value | None:
    """c ? true : false -> c;  c ? false : true -> not c"""
    cond, x, y = op.operands
    if op.result.dtype is not DType.BOOL:
        return None
    match _number(cx, x), _number(cx, y):
        case True, False:
            return _replacement(cx, op, cond)
        case False, True:
            return cx.emit("logical_not", cond)
    return None


# ---- attention


def attention_mask(cx: Rewriter, op: Op) -> Sequence[Value] | None:
    """A mask that hides nothing is dropped."""
    if not op.bool_attr("masked"):
        return None
    mask = op.operands[-1]
    nothing: Number = True if mask.dtype is DType.BOOL else 0.0
    if _number(cx, mask) != nothing:
        return None
    attrs: dict[str, Any] = {**dict(op.attrs), "masked": False}
    return cx.emit_multi(op.name, *op.operands[:-1], **attrs)


def all_keys_seen(cx: Rewriter, op: Op) -> Sequence[Value] | None:
    """The causal mask hides nothing where row 0 sees the last key."""
    if not op.bool_attr("causal"):
        return None
    keys = op.operands[ATTENTIONS[op.name] + 1].shape[-2]
    if cx.facts.prove(le(keys, first_row(op) + 1)) is not True:
        return None
    attrs: dict[str, Any] = {**dict(op.attrs), "causal": False}
    if "first" in attrs:
        attrs["first"] = ZERO
    return cx.emit_multi(op.name, *op.operands, regions=op.regions, **attrs)


# ---- the rule sets

_INDEX_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")

FOLD: RuleSet = {
    **dict.fromkeys(named(Trait.EXACT), (fold_elementwise,)),
    "cast": (fold_cast,),
    **dict.fromkeys(
        ("broadcast", "reshape", "transpose", "slice", "flip", "concat", "pad"),
        (fold_move,),
    ),
    "dim_value": (fold_dim_value,),
    "iota": (fold_iota,),
    "reduce": (fold_reduce,),
}
MOVES: RuleSet = {
    "cast": (same_type, cast_there_and_back),
    "reshape": (same_type, reshape_of_reshape, transposed_blocks, moved_iota),
    "transpose": (transpose_identity, transpose_of_transpose, moved_iota),
    "broadcast": (
        same_type,
        broadcast_of_broadcast,
        broadcast_of_unsqueeze,
        moved_iota,
    ),
    "slice": (whole_slice, slice_of_slice),
    "concat": (short_concat,),
    "pad": (no_pad,),
    "flip": (short_flip,),
    "reduce": (short_reduce,),
}
NEUTRAL: RuleSet = {
    name: (neutral,) for name, row in OPS.items() if row.neutral is not None
}
ALGEBRA: RuleSet = {
    "mul": (absorbing(0, ints_only=True),),  # x*0 -> 0
    "floordiv": (whole_quotient,),  # x//1 -> x
    "pow": (small_power,),  # x**2 -> x*x
    "neg": (double,),  # -(-x) -> x
    "logical_not": (double,),
    "bitwise_not": (double,),
    "logical_and": (absorbing(False), idempotent),  # x & false -> false
    "logical_or": (absorbing(True), idempotent),  # x | true -> true
    "maximum": (idempotent,),  # max(x, x) -> x
    "minimum": (idempotent,),
    "select": (select_known, select_not, select_flag),
    **dict.fromkeys(_INDEX_COMPARISONS, (compare_indices,)),
    **dict.fromkeys(ATTENTIONS, (attention_mask, all_keys_seen)),
}
RULES: RuleSet = join(FOLD, MOVES, NEUTRAL, ALGEBRA)
