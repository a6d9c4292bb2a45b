"""Python arithmetic on sizes in an exported graph: SymInts folded to expressions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pliant.frontend.torch_dims import decimal, lowest_bits
from pliant.frontend.torch_ops_context import Real, TorchContext
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, ceildiv, floordiv, ge, maximum, minimum, mod


@dataclass(frozen=True, slots=True)
class Undecided:
    """A truth about sizes as torch knows it, which is known in the trace alone.

    None: where a view begins in memory. To us a view is a value of its own.
    """

    truth: torch.SymBool | None = None


Fold = Callable[..., Any]


def collapse(value: Any) -> Any:
    """A constant expression as an int."""
    return value.value if isinstance(value, Expr) and value.is_const else value


def _is_whole(x: Any) -> bool:
    return isinstance(x, int | Expr) and not isinstance(x, bool)


def _ratio(x: Any) -> tuple[Expr, Expr] | None:
    if _is_whole(x):
        return as_expr(x), as_expr(1)
    if isinstance(x, Real):
        return x.ratio
    if isinstance(x, float) and math.isfinite(x):
        near = decimal(x)
        if near is not None:
            return as_expr(near.numerator), as_expr(near.denominator)
    return None


def _real(cx: TorchContext, op: str, x: Any, y: Any) -> Real:
    """Float arithmetic in f64, as Python's."""
    left, right = (cx.tensor(n, DType.F64) for n in (x, y))
    return Real(value=cx.b.binary(op, left, right))


def _arithmetic(op: str, whole: Callable[[Any, Any], Any]) -> Fold:
    def fold(cx: TorchContext, x: Any, y: Any) -> Any:
        if _is_whole(x) and _is_whole(y):
            return whole(as_expr(x), y)
        if isinstance(x, float | int) and isinstance(y, float | int):
            return whole(x, y)
        a, b = _ratio(x), _ratio(y)
        if a is not None and b is not None and op == "mul":
            return Real((a[0] * b[0], a[1] * b[1]))
        return _real(cx, op, x, y)

    return fold


def true_divide(cx: TorchContext, x: Any, y: Any) -> Any:
    if isinstance(x, float | int) and isinstance(y, float | int):
        return x / y
    a, b = _ratio(x), _ratio(y)
    if a is not None and b is not None:
        return Real((a[0] * b[1], a[1] * b[0]))
    return _real(cx, "div", x, y)


def _positive(cx: TorchContext, divisor: Any) -> Any:
    """Python divides by no 0, and quotients of ours by nothing below 1."""
    if isinstance(divisor, Expr) and not divisor.is_const:
        cx.require(ge(divisor, 1), "a divisor must be positive")
    return divisor


def floor_divide(cx: TorchContext, x: Any, y: Any) -> Any:
    if _is_whole(x) and _is_whole(y):
        return floordiv(x, _positive(cx, y))
    return cx.unsupported("floor division of floats that depend on sizes")


def _shifted(
    cx: TorchContext, x: Any, bits: Any, by: Callable[[Expr, int], Expr]
) -> Expr:
    return by(as_expr(x), 1 << cx.constant_int(bits, "the bits of a shift"))


def power(cx: TorchContext, x: Any, y: Any) -> Any:
    if _is_whole(x) and isinstance(y, int) and y >= 0:
        return as_expr(x) ** y
    if y == 0.5:
        return square_root(cx, x)
    return _real(cx, "pow", x, y)


def _in_domain(cx: TorchContext, x: Any, least: int) -> Value:
    """The number in f64; where Python's math would raise, the call is refused."""
    ratio = _ratio(x)
    if ratio is not None:
        cx.require(ge(ratio[0], least), "math domain")
    return cx.tensor(x, DType.F64)


def square_root(cx: TorchContext, x: Any) -> Any:
    if isinstance(x, float | int):
        return math.sqrt(x)
    return Real(value=cx.b.unary("sqrt", _in_domain(cx, x, 0)))


def binary_logarithm(cx: TorchContext, x: Any) -> Any:
    if isinstance(x, float | int):
        return math.log2(x)
    natural = cx.b.unary("log", _in_domain(cx, x, 1))
    return Real(value=cx.div(natural, cx.tensor(math.log(2), DType.F64)))


def _rounded(
    divide: Callable[[Expr, Expr], Expr], plain: Callable[[float], int]
) -> Fold:
    def fold(cx: TorchContext, x: Any) -> Any:
        if isinstance(x, float):
            return plain(x)
        ratio = _ratio(x)
        if ratio is None:
            cx.unsupported("rounding a float that depends on sizes")
        return divide(*ratio)

    return fold


def _compare(cx: TorchContext, *_: Any) -> Undecided:
    return undecided(cx)


def undecided(cx: TorchContext) -> Undecided:
    return Undecided(cx.val if isinstance(cx.val, torch.SymBool) else None)


def _and(cx: TorchContext, x: Any, y: Any) -> Any:
    """Of conditions, or of the bits of a size: all below a power of 2, or all above."""
    if isinstance(cx.val, torch.SymBool):
        return undecided(cx)
    found = lowest_bits(x, y)
    if found is None:
        cx.unsupported("these bits of a size: take all bits below one, or above")
    return found


def _or(cx: TorchContext, x: Any, y: Any) -> Any:
    if isinstance(cx.val, torch.SymBool):
        return undecided(cx)
    return cx.unsupported("the bits of a size")


def to_float(cx: TorchContext, x: Any) -> Any:
    return (
        float(x)
        if isinstance(x, int | float)
        else (x if isinstance(x, Real) else Real((as_expr(x), as_expr(1))))
    )


def negate(cx: TorchContext, x: Any) -> Any:
    return -x if isinstance(x, int | float | Expr) else _real(cx, "mul", x, -1.0)


def absolute(cx: TorchContext, x: Any) -> Any:
    if isinstance(x, Real):
        return Real(value=cx.b.unary("abs", cx.real(x)))
    return abs(x) if isinstance(x, int | float) else maximum(x, -x)


def truncate(cx: TorchContext, x: Any) -> Any:
    """Towards zero: up, where the number is negative."""
    ratio = None if isinstance(x, float) else _ratio(x)
    if ratio is None or cx.proves(ge(ratio[0], 0)):
        return _rounded(floordiv, math.trunc)(cx, x)
    return maximum(floordiv(*ratio), 0) + minimum(ceildiv(*ratio), 0)


SIZES: dict[Any, Fold] = {
    operator.add: _arithmetic("add", operator.add),
    operator.sub: _arithmetic("sub", operator.sub),
    operator.mul: _arithmetic("mul", operator.mul),
    operator.truediv: true_divide,
    operator.floordiv: floor_divide,
    operator.mod: lambda cx, x, y: mod(x, _positive(cx, y)),
    operator.pow: power,
    operator.lshift: lambda cx, x, y: _shifted(cx, x, y, operator.mul),
    operator.rshift: lambda cx, x, y: _shifted(cx, x, y, floordiv),
    operator.neg: negate,
    operator.abs: absolute,
    abs: absolute,
    operator.eq: _compare,
    operator.ne: _compare,
    operator.lt: _compare,
    operator.le: _compare,
    operator.gt: _compare,
    operator.ge: _compare,
    operator.and_: _and,
    operator.or_: _or,
    operator.not_: _compare,
    math.floor: _rounded(floordiv, math.floor),
    math.ceil: _rounded(ceildiv, math.ceil),
    math.trunc: truncate,
    math.sqrt: square_root,
    torch.sym_max: lambda cx, x, y: maximum(x, y),
    torch.sym_min: lambda cx, x, y: minimum(x, y),
    torch.sym_int: truncate,
    torch.sym_float: to_float,
    torch.sym_not: _compare,
    torch.sym_sum: lambda cx, parts: sum(parts, as_expr(0)),
    torch._sym_log2: binary_logarithm,  # type: ignore[attr-defined]  # private
    torch._sym_sqrt: square_root,  # type: ignore[attr-defined]  # private
    torch.ops.aten.sym_size.int: lambda cx, x, dim: x.shape[dim],
    torch.ops.aten.sym_storage_offset.default: lambda cx, x: Undecided(),
    torch.ops.aten.sym_numel.default: lambda cx, x: x.type.numel,
}
