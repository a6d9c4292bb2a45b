"""Ops on tensors that are known at compile time: how shape subgraphs vanish.

    Shape(x)  ->  [batch, 8, seq]
    Gather, Concat, Mul, ..  ->  [batch, 8*seq]
    Reshape(y, that)         ->  reshape %y {shape = [batch, 8*seq]}

An array of numbers is computed by NumPy, in its own type; one with symbolic elements
element by element. A function gives None where it cannot: the op is then translated as
any other, and what is known becomes a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_limits import is_plain, product_is_plain
from pliant.frontend.onnx_types import BOOL, ELEMENTS, INT64
from pliant.frontend.onnx_values import Array, Known, Ratio, settled, symbolic
from pliant.sym import (
    Cond,
    Expr,
    as_expr,
    ceildiv,
    eq,
    floordiv,
    le,
    lt,
    maximum,
    minimum,
    mod,
    ne,
)

MOST = 4096  # elements: what is larger is data

Elementwise = Callable[[OnnxContext, Any, Any], Any]
Function = Callable[[OnnxContext, Node, list[Array]], "Array | None"]


class Cannot(Exception):
    """The elements of this result are not known."""


def evaluate(cx: OnnxContext, n: Node) -> Known | None:
    """The result of an op of known tensors, if it is known too."""
    function = FUNCTIONS.get(n.op) if n.domain == "" else None
    if function is None or not n.inputs:
        return None
    arrays = [known.array for known in n.inputs if isinstance(known, Known)]
    if len(arrays) != len(n.inputs) or any(a.size > MOST for a in arrays):
        return None
    try:
        with np.errstate(all="ignore"):
            found = function(cx, n, arrays)
    except (Cannot, IndexError, ValueError):
        return None  # what is wrong is told where the op is translated
    if found is not None and not isinstance(found, np.ndarray):
        found = symbolic([found], ())  # NumPy gives an element for a rank of 0
    if found is None or found.size > MOST:
        return None
    first = n.inputs[0]
    assert isinstance(first, Known)
    element = first.element
    if n.op in _TRUTHS:
        element = BOOL
    elif n.op in ("Shape", "Size", "NonZero"):
        element = INT64
    elif n.op == "Cast":
        element = ELEMENTS[n.attrs["to"]]
    elif n.op == "Where":
        second = n.inputs[1]
        assert isinstance(second, Known)
        element = second.element
    made = settled(found, element)
    if made.dtype == object and not all(map(_is_plain, made.reshape(-1))):
        return None
    return Known(made, element)


def _is_plain(element: Any) -> bool:
    """Whether arithmetic may go on with an element: sizes can grow without end."""
    size = element.top if isinstance(element, Ratio) else element
    if isinstance(size, int):
        return abs(size) < 2**63
    return not isinstance(size, Expr) or is_plain(size)


# ---- element by element


def _each(function: Elementwise, numeric: Callable[..., Any]) -> Function:
    """A binary op; also of more operands, from the left."""

    def apply(cx: OnnxContext, _: Node, arrays: list[Array]) -> Array:
        out = arrays[0]
        for other in arrays[1:]:
            if out.dtype != object and other.dtype != object:
                out = np.asarray(numeric(out, other))
                continue
            left, right = np.broadcast_arrays(out, other)
            pairs = zip(left.reshape(-1), right.reshape(-1), strict=True)
            flat = [function(cx, _number(a), _number(b)) for a, b in pairs]
            out = symbolic(flat, left.shape)
        return out

    return apply


def _number(element: Any) -> Any:
    return element.item() if isinstance(element, np.generic) else element


def _ratios(a: Any, b: Any) -> tuple[Ratio, Ratio]:
    left, right = Ratio.of(a), Ratio.of(b)
    if left is None or right is None:
        raise Cannot
    return left, right


def _is_float(*elements: Any) -> bool:
    return any(isinstance(e, float | Ratio) for e in elements)


def _whole(element: Any) -> Expr:
    if isinstance(element, Cond | Ratio | float):
        raise Cannot
    return as_expr(int(element)) if not isinstance(element, Expr) else element


def _add(cx: OnnxContext, a: Any, b: Any) -> Any:
    if _is_float(a, b):
        x, y = _ratios(a, b)
        return Ratio(x.top * y.bottom + y.top * x.bottom, x.bottom * y.bottom)
    return cx.simplify(_whole(a) + _whole(b))


def _sub(cx: OnnxContext, a: Any, b: Any) -> Any:
    if _is_float(a, b):
        x, y = _ratios(a, b)
        return Ratio(x.top * y.bottom - y.top * x.bottom, x.bottom * y.bottom)
    return cx.simplify(_whole(a) - _whole(b))


def _mul(cx: OnnxContext, a: Any, b: Any) -> Any:
    if _is_float(a, b):
        x, y = _ratios(a, b)
        common = math.gcd(y.top.value, x.bottom) if y.top.is_const else 1
        top = x.top * (as_expr(y.top.value // common) if common > 1 else y.top)
        return Ratio(top, x.bottom // common * y.bottom)
    left, right = _whole(a), _whole(b)
    if not product_is_plain(left, right):
        raise Cannot
    return cx.simplify(left * right)


def _div(cx: OnnxContext, a: Any, b: Any) -> Any:
    if _is_float(a, b):
        x, y = _ratios(a, b)
        if not y.top.is_const or y.top.value <= 0:
            raise Cannot
        share, bottom = x.top * y.bottom, x.bottom * y.top.value
        if share.is_const:
            common = math.gcd(share.value, bottom)
            return Ratio(as_expr(share.value // common), bottom // common)
        return Ratio(share, bottom)
    top, by = _whole(a), _whole(b)
    # Towards zero in ONNX: what is not negative rounds down.
    if not cx.proves(le(1, by)) or cx.b.facts.prove(le(0, top)) is False:
        raise Cannot
    if not cx.proves(le(0, top)):
        cx.require(le(0, top), "a size that is divided must not be negative")
    return cx.simplify(floordiv(top, by))


def _mod(cx: OnnxContext, a: Any, b: Any) -> Any:
    x, y = _whole(a), _whole(b)
    if not cx.proves(le(1, y)):
        raise Cannot
    return cx.simplify(mod(x, y))


def _least(cx: OnnxContext, a: Any, b: Any) -> Any:
    return cx.simplify(minimum(_whole(a), _whole(b)))


def _most(cx: OnnxContext, a: Any, b: Any) -> Any:
    return cx.simplify(maximum(_whole(a), _whole(b)))


def _compare(kind: Callable[[Any, Any], Cond]) -> Elementwise:
    def compare(cx: OnnxContext, a: Any, b: Any) -> Any:
        if _is_float(a, b):
            x, y = _ratios(a, b)
            cond = kind(x.top * y.bottom, y.top * x.bottom)
        elif isinstance(a, Cond) or isinstance(b, Cond):
            raise Cannot
        else:
            cond = kind(_whole(a), _whole(b))
        proved = cx.b.facts.prove(cond)
        return cond if proved is None else proved

    return compare


def _and(_: OnnxContext, a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    if a is True or b is True:
        return b if a is True else a
    raise Cannot


def _or(_: OnnxContext, a: Any, b: Any) -> Any:
    if a is True or b is True:
        return True
    if a is False or b is False:
        return b if a is False else a
    raise Cannot


def _trunc_div(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    safe = np.where(b == 0, 1, b)
    quotient = np.abs(a) // np.abs(safe)
    return np.asarray(np.sign(a) * np.sign(safe) * quotient).astype(a.dtype)


def _unary(
    function: Callable[[OnnxContext, Any], Any], numeric: Callable[[Any], Any]
) -> Function:
    def apply(cx: OnnxContext, _: Node, arrays: list[Array]) -> Array:
        (x,) = arrays
        if x.dtype != object:
            return np.asarray(numeric(x))
        flat = [function(cx, _number(e)) for e in x.reshape(-1)]
        return symbolic(flat, x.shape)

    return apply


def _negative(cx: OnnxContext, a: Any) -> Any:
    return _sub(cx, 0, a)


def _floor(cx: OnnxContext, a: Any) -> Any:
    x = Ratio.of(a)
    if x is None:
        raise Cannot
    return Ratio(cx.simplify(floordiv(x.top, x.bottom)), 1)


def _ceil(cx: OnnxContext, a: Any) -> Any:
    x = Ratio.of(a)
    if x is None:
        raise Cannot
    return Ratio(cx.simplify(ceildiv(x.top, x.bottom)), 1)


def _not(_: OnnxContext, a: Any) -> Any:
    return a.negated() if isinstance(a, Cond) else not a


def _abs(cx: OnnxContext, a: Any) -> Any:
    if cx.proves(le(0, _whole(a))):
        return a
    raise Cannot


def _never(*_: Any) -> Any:
    raise Cannot


# ---- casts and choices


def _cast(cx: OnnxContext, n: Node, arrays: list[Array]) -> Array | None:
    element = ELEMENTS.get(n.attrs["to"])
    (x,) = arrays
    if element is None or element.dtype is None:
        return None
    if x.dtype != object:
        return x.astype(element.numpy) if element.dtype.text != "bf16" else None
    flat = [_cast_one(cx, e, element.is_float, element is BOOL) for e in x.reshape(-1)]
    return symbolic(flat, x.shape)


def _cast_one(cx: OnnxContext, element: Any, to_float: bool, to_bool: bool) -> Any:
    element = _number(element)
    if to_bool:
        if isinstance(element, Expr):
            return _compare(ne)(cx, element, 0)
        if isinstance(element, Ratio):
            return _compare(ne)(cx, element.top, 0)
        return element if isinstance(element, Cond) else bool(element)
    if isinstance(element, Cond):
        raise Cannot
    if to_float:
        return Ratio(element, 1) if isinstance(element, Expr) else element
    if isinstance(element, Ratio):
        if not cx.proves(le(0, element.top)):
            raise Cannot  # towards zero
        return cx.simplify(floordiv(element.top, element.bottom))
    return element if isinstance(element, Expr) else int(element)


def _where(cx: OnnxContext, _: Node, arrays: list[Array]) -> Array:
    cond, x, y = np.broadcast_arrays(*arrays)
    if all(a.dtype != object for a in arrays):
        return np.where(*arrays)
    flat = []
    for c, a, b in zip(cond.reshape(-1), x.reshape(-1), y.reshape(-1), strict=True):
        if isinstance(c, Cond):
            if isinstance(a, Expr | int) and a == b:
                flat.append(a)
                continue
            raise Cannot
        flat.append(_number(a) if c else _number(b))
    return symbolic(flat, cond.shape)


# ---- movement


def _axes(n: Node, arrays: list[Array], place: int) -> list[int] | None:
    if "axes" in n.attrs:
        return [int(a) for a in n.attrs["axes"]]
    if len(arrays) <= place:
        return None
    if arrays[place].dtype == object:
        raise Cannot
    return [int(a) for a in arrays[place].reshape(-1)]


def _plain_ints(array: Array) -> list[int]:
    if array.dtype == object:
        raise Cannot
    return [int(x) for x in array.reshape(-1)]


def _gather(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    data, indices = arrays
    if indices.dtype == object:
        raise Cannot
    return np.take(data, indices, axis=n.attr("axis", 0))


def _concat(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    wide = object if any(a.dtype == object for a in arrays) else arrays[0].dtype
    return np.concatenate([a.astype(wide) for a in arrays], n.attr("axis", 0))


def _slice(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    x = arrays[0]
    if n.version < 10:
        starts, ends = list(n.attrs["starts"]), list(n.attrs["ends"])
        axes, steps = n.attrs.get("axes"), None
    else:
        starts, ends = _plain_ints(arrays[1]), _plain_ints(arrays[2])
        axes = _plain_ints(arrays[3]) if len(arrays) > 3 else None
        steps = _plain_ints(arrays[4]) if len(arrays) > 4 else None
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    cut = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        low: int | None = start
        high: int | None = end
        if step < 0 and end < -x.shape[axis]:
            high = None
        cut[axis] = slice(low, high, step)
    return x[tuple(cut)]


def _squeeze(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    axes = _axes(n, arrays, 1)
    return np.squeeze(arrays[0], None if axes is None else tuple(axes))


def _unsqueeze(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    axes = _axes(n, arrays, 1)
    return np.expand_dims(arrays[0], tuple(axes or ()))


def _reshape(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    shape = _plain_ints(arrays[1])
    if not n.attr("allowzero", 0):
        shape = [arrays[0].shape[i] if s == 0 else s for i, s in enumerate(shape)]
    return arrays[0].reshape(shape)


def _transpose(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    return np.transpose(arrays[0], n.attrs.get("perm"))


def _expand(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    shape = _plain_ints(arrays[1])
    if math.prod(shape) * max(arrays[0].size, 1) > MOST:
        raise Cannot
    return arrays[0] * np.ones(shape, arrays[0].dtype)


def _tile(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    repeats = _plain_ints(arrays[1])
    if math.prod(repeats) * max(arrays[0].size, 1) > MOST:
        raise Cannot
    return np.tile(arrays[0], repeats)


def _flatten(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    (x,) = arrays
    axis = n.attr("axis", 1) % (x.ndim + 1)
    return x.reshape((int(np.prod(x.shape[:axis])), -1))


def _reduce(function: Elementwise, numeric: Callable[..., Any]) -> Function:
    def apply(cx: OnnxContext, n: Node, arrays: list[Array]) -> Array:
        axes, x = _axes(n, arrays, 1), arrays[0]
        if not axes and n.attr("noop_with_empty_axes", 0):
            return x
        keep = bool(n.attr("keepdims", 1))
        chosen = tuple(axes) if axes else None
        if x.dtype != object:
            return np.asarray(numeric(x, axis=chosen, keepdims=keep), dtype=x.dtype)
        if x.ndim != 1 or not x.size:
            raise Cannot
        total = _number(x[0])
        for element in x[1:]:
            total = function(cx, total, _number(element))
        return symbolic([total], (1,) if keep else ())

    return apply


def _range(cx: OnnxContext, _: Node, arrays: list[Array]) -> Array:
    if any(a.dtype == object for a in arrays):
        raise Cannot
    start, limit, step = (a.reshape(-1)[0] for a in arrays)
    if abs((float(limit) - float(start)) / float(step or 1)) > MOST:
        raise Cannot
    made: Array = np.arange(start, limit, step, dtype=arrays[0].dtype)
    return made


def _identity(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    return arrays[0]


def _shape(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    sizes = np.array(arrays[0].shape, np.int64)
    return sizes[n.attr("start", 0) : n.attrs.get("end")]


def _size(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    return np.array(arrays[0].size, np.int64)


def _nonzero(_: OnnxContext, n: Node, arrays: list[Array]) -> Array:
    if arrays[0].dtype == object:
        raise Cannot
    return np.array(np.nonzero(arrays[0]), np.int64)


def _power(a: Array, b: Array) -> Array:
    if a.dtype.kind != "f" and (b < 0).any():
        raise Cannot
    return np.power(a, b).astype(a.dtype)


def _greater(a: Any, b: Any) -> Cond:
    return lt(b, a)


def _not_less(a: Any, b: Any) -> Cond:
    return le(b, a)


def _numbers_mod(a: Array, b: Array) -> Array:
    return np.asarray(np.mod(a, b)) if a.dtype.kind != "f" else _never()


FUNCTIONS: dict[str, Function] = {
    "Add": _each(_add, np.add),
    "Sub": _each(_sub, np.subtract),
    "Mul": _each(_mul, np.multiply),
    "Div": _each(_div, _trunc_div),
    "Mod": _each(_mod, _numbers_mod),
    "Pow": _each(_never, _power),
    "Min": _each(_least, np.minimum),
    "Max": _each(_most, np.maximum),
    "Sum": _each(_add, np.add),
    "Equal": _each(_compare(eq), np.equal),
    "Less": _each(_compare(lt), np.less),
    "LessOrEqual": _each(_compare(le), np.less_equal),
    "Greater": _each(_compare(_greater), np.greater),
    "GreaterOrEqual": _each(_compare(_not_less), np.greater_equal),
    "And": _each(_and, np.logical_and),
    "Or": _each(_or, np.logical_or),
    "Not": _unary(_not, np.logical_not),
    "Neg": _unary(_negative, np.negative),
    "Abs": _unary(_abs, np.abs),
    "Floor": _unary(_floor, np.floor),
    "Ceil": _unary(_ceil, np.ceil),
    "Sqrt": _unary(_never, np.sqrt),
    "Cast": _cast,
    "Where": _where,
    "Gather": _gather,
    "Concat": _concat,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Expand": _expand,
    "Tile": _tile,
    "Flatten": _flatten,
    "ReduceProd": _reduce(_mul, np.prod),
    "ReduceSum": _reduce(_add, np.sum),
    "ReduceMin": _reduce(_least, np.min),
    "ReduceMax": _reduce(_most, np.max),
    "Range": _range,
    "Identity": _identity,
    "Shape": _shape,
    "Size": _size,
    "NonZero": _nonzero,
}
_TRUTHS = frozenset(
    ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not"]
)
