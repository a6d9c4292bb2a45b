"""Dims in torch.export: names, bounds, examples, symbols.

The user's declarations of dims are read in torch_spec.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as torch_sympy

from pliant.frontend.torch_questions import Asked
from pliant.frontend.torch_spec import DimSpec, LeafSpec
from pliant.frontend.translate import fresh_symbol
from pliant.sym import (
    Cond,
    Expr,
    Facts,
    Guard,
    as_expr,
    ceildiv,
    floordiv,
    ge,
    gt,
    le,
    maximum,
    minimum,
    mod,
    sym,
)

_FAR = 10_000  # sizes to look at when a condition is restated
DECLARED = "declared by the user"
_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31)


@dataclass(frozen=True, slots=True)
class SymbolInfo:
    """What the user said about dims, by the name of torch's symbol.

    `asked` are the conditions of the model's code on sizes; None if not recorded.
    """

    names: Mapping[str, Expr] = field(default_factory=dict)
    bounds: tuple[Guard, ...] = ()
    asked: Asked | None = None


# --- examples of size 0 and 1 ---------------------------------------------------


def enlarged(
    flat: Sequence[Any], leaves: Sequence[LeafSpec], *, alike: bool
) -> list[Any] | None:
    """The inputs with dynamic dims of 0 or 1 made larger; None if there is none.

    torch specialises on 0 and 1. Unnamed dims that share an axis are taken to be
    equal; with `alike`, all of them are.
    """
    sizes: dict[object, int] = {}
    primes = iter(_PRIMES)
    used = {
        int(n) for leaf in flat if isinstance(leaf, torch.Tensor) for n in leaf.shape
    }

    def size_of(key: object) -> int:
        if key not in sizes:
            sizes[key] = next((p for p in primes if p not in used), 37)
        return sizes[key]

    out: list[Any] = []
    for value, leaf in zip(flat, leaves, strict=True):
        for axis, dim in leaf.dims.items():
            if not dim.dynamic or _size(value, axis) not in (0, 1):
                continue
            key = dim.expr if dim.expr is not None else ("all" if alike else axis)
            size = size_of(key)
            if isinstance(value, torch.Tensor):
                value = _stretched(value, axis, size)
            else:
                value = size
        out.append(value)
    return out if sizes else None


def _size(value: Any, axis: int) -> int | None:
    if isinstance(value, torch.Tensor):
        return int(value.shape[axis])
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _stretched(value: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Repeats what is there, so that ids stay valid; zeros if nothing is."""
    if value.shape[axis] == 0:
        shape = [size if i == axis else n for i, n in enumerate(value.shape)]
        return torch.zeros(shape, dtype=value.dtype, device=value.device)
    repeats = [size if i == axis else 1 for i in range(value.dim())]
    return value.detach().repeat(repeats)


# --- torch's symbols ------------------------------------------------------------


def symbol_of(size: Any) -> sympy.Expr | None:
    """The sympy expression of a SymInt, None for a plain number."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def declared_symbols(
    sizes: Sequence[Mapping[int, Any]], leaves: Sequence[LeafSpec]
) -> SymbolInfo:
    """Names and bounds of torch's symbols; `sizes` are the traced dims by axis."""
    names: dict[str, Expr] = {}
    unnamed: list[tuple[DimSpec, str]] = []
    for traced, leaf in zip(sizes, leaves, strict=True):
        for axis, dim in leaf.dims.items():
            expr = symbol_of(traced.get(axis))
            if expr is None:
                continue
            if dim.expr is None:
                if isinstance(expr, sympy.Symbol):
                    unnamed.append((dim, str(expr)))
            elif isinstance(expr, sympy.Symbol):
                names.setdefault(str(expr), dim.expr)
    bounds: dict[Guard, None] = {}
    for leaf in leaves:
        for dim in leaf.dims.values():
            if dim.expr is not None:
                bounds.update(dict.fromkeys(_bounds(dim.expr, dim)))
    taken = {name for expr in names.values() for name in expr.symbols()}
    for dim, name in unnamed:
        if name not in names and (dim.low is not None or dim.high is not None):
            names[name] = fresh_symbol(taken)
        if name in names:
            bounds.update(dict.fromkeys(_bounds(names[name], dim)))
    return SymbolInfo(names, tuple(bounds))


def _bounds(expr: Expr, dim: DimSpec) -> Iterator[Guard]:
    if dim.low:
        message = (f"{expr} is declared to be at least {dim.low}: ", expr)
        yield Guard(ge(expr, dim.low), message, DECLARED)
    if dim.high is not None:
        message = (f"{expr} is declared to be at most {dim.high}: ", expr)
        yield Guard(le(expr, dim.high), message, DECLARED)


def to_expr(expr: sympy.Expr, symbol: Callable[[str], Expr]) -> Expr:
    """A sympy size as a Pliant expression; ValueError if it cannot be expressed."""
    args = [to_expr(a, symbol) for a in expr.args] if _plain(expr) else []
    match expr:
        case sympy.Symbol():
            return symbol(str(expr))
        case sympy.Integer():
            return as_expr(int(expr))
        case sympy.Add():
            return sum(args, as_expr(0))
        case sympy.Mul():
            out = as_expr(1)
            for arg in args:
                out = out * arg
            return out
        case sympy.Pow() if isinstance(expr.exp, sympy.Integer) and expr.exp >= 0:
            return args[0] ** int(expr.exp)
        case torch_sympy.PowByNatural() if args[1].is_const:
            return args[0] ** args[1].value
        case torch_sympy.FloorDiv() | torch_sympy.CleanDiv():
            return floordiv(*args)
        case torch_sympy.CeilDiv():
            return ceildiv(*args)
        case torch_sympy.Mod() | torch_sympy.PythonMod() | sympy.Mod():
            return mod(*args)
        case torch_sympy.Max() | sympy.Max():
            return maximum(*args)
        case torch_sympy.Min() | sympy.Min():
            return minimum(*args)
        case torch_sympy.FloorToInt():
            return floordiv(*to_ratio(expr.args[0], symbol))
        case torch_sympy.TruncToInt():  # towards zero: up, where it is negative
            ratio = to_ratio(expr.args[0], symbol)
            if Facts().prove(ge(ratio[0], 0)) is True:
                return floordiv(*ratio)
            return maximum(floordiv(*ratio), 0) + minimum(ceildiv(*ratio), 0)
        case torch_sympy.CeilToInt():
            return ceildiv(*to_ratio(expr.args[0], symbol))
        case torch_sympy.BitwiseFn_bitwise_and():
            found = lowest_bits(*map(_number_or_size, args))
            if found is not None:
                return as_expr(found)
    raise ValueError(f"no integer expression for {expr}")


def _number_or_size(expr: Expr) -> int | Expr:
    return expr.value if expr.is_const else expr


def lowest_bits(x: int | Expr, y: int | Expr) -> int | Expr | None:
    """x & 7 -> x mod 8; x & ~7 -> x - x mod 8; None for bits in between."""
    if isinstance(x, int) and isinstance(y, int):
        return x & y
    size, bits = (y, x) if isinstance(x, int) else (x, y)
    if not isinstance(bits, int):
        return None
    above = bits < 0
    power = -bits if above else bits + 1
    if power & (power - 1):
        return None
    rest = mod(size, power)
    return size - rest if above else rest


def _plain(expr: sympy.Expr) -> bool:
    rounding = (
        torch_sympy.FloorToInt,
        torch_sympy.TruncToInt,
        torch_sympy.CeilToInt,
    )
    return not isinstance(expr, rounding)


def decimal(number: float, *, below: bool = False) -> Fraction | None:
    """The short fraction that a float stands for, 3/5 for 0.6; None if sizes could
    tell them apart.

    A product n * 0.6 of floats is rounded, and so is 0.6 itself. Where n * 3/5 is a
    whole number m, the product is m too if the error of 0.6, relative to it, is at most
    2**-54, half of what separates floats just below a power of two. 0.7 is further off,
    and 90 * 0.7 is just below 63. Where n * 3/5 is not whole, floor and ceil of both
    agree. With `below`, only a float below the fraction counts, as it does for floor.
    """
    near, exact = Fraction(number).limit_denominator(1 << 20), Fraction(number)
    if float(near) != number:
        return None
    close = abs(exact - near) <= abs(near) * Fraction(1, 1 << 54)
    return near if close or (below and exact > near) else None


def to_ratio(expr: sympy.Expr, symbol: Callable[[str], Expr]) -> tuple[Expr, Expr]:
    """A float that is a ratio of integers: what a rounding rounds."""
    if isinstance(expr, torch_sympy.IntTrueDiv):
        return to_expr(expr.args[0], symbol), to_expr(expr.args[1], symbol)
    if isinstance(expr, torch_sympy.ToFloat):
        return to_expr(expr.args[0], symbol), as_expr(1)
    if isinstance(expr, torch_sympy.FloatTrueDiv):
        (a, b), (c, d) = (to_ratio(arg, symbol) for arg in expr.args)
        return a * d, b * c
    if isinstance(expr, sympy.Mul):
        top, bottom = as_expr(1), as_expr(1)
        for arg in expr.args:
            num, den = to_ratio(arg, symbol)
            top, bottom = top * num, bottom * den
        return top, bottom
    if isinstance(expr, sympy.Float | sympy.Rational):
        exact = isinstance(expr, sympy.Rational)
        near = Fraction(int(expr.p), int(expr.q)) if exact else decimal(float(expr))
        if near is None:
            raise ValueError(f"{expr} is no short fraction")
        return as_expr(near.numerator), as_expr(near.denominator)
    return to_expr(expr, symbol), as_expr(1)


def _holds(cond: Cond, sizes: dict[str, int]) -> bool:
    try:
        return cond.holds(sizes)
    except ZeroDivisionError:  # a size that has no meaning here
        return False


def as_bound(cond: Cond) -> Cond:
    """The same, said as a bound of one size: min(n, 7) - min(n, 2) == 5 is 7 <= n."""
    cond = cond.plain()
    if cond.kind != "eq" or len(cond.symbols()) != 1:
        return cond
    (name,) = cond.symbols()
    # Where it changes is near a number in it.
    end = 2 * max(map(int, re.findall(r"\d+", str(cond)))) + 8
    held = [n for n in range(min(end, _FAR)) if _holds(cond, {name: n})]
    if not held:
        return cond
    size, low, high = sym(name), held[0], held[-1]
    above = Facts().assume(gt(size, high))
    if low > 0 and Facts().assume(ge(size, low)).prove(cond) is True:
        return ge(size, low)
    if len(held) == high + 1 and above.prove(cond) is False:
        return le(size, high)
    return cond
