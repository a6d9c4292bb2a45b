"""The elementwise ops: operands of one shape and dtype, result the same unless said.

What an op means is in its row, in NumPy. Beyond that:
  div             is true division (floats)
  floordiv, mod   round as Python does
  minimum, maximum   propagate NaN
  round           is half to even
  sign            of NaN is 0
  select          (cond: bool, x, y)
  cast            {dtype}, as in C; float to bool is `!= 0`
  bitcast         {source, dtype}: the operand's bits, of the type `source`, as another
                  type of the same size
  stop_gradient   is its operand, and a constant to passes/gradient.py, which drops it
  slope           (y, x, s) is y, and has beside y's derivative that by x, which is s;
                  passes/gradient.py drops it
  decay           of loops alone: exp of what is at most 0 (above, it may be anything),
                  where results too small for a normal number are 0

`SCALARS` are the ops of one number or two that loops have as well, by the same names:
loops have nodes of their own for select and cast. An op that is added here needs its
native code (codegen/vector_math.py, or codegen/llvm_ops.py), its gradient
(passes/gradient_rules_math.py) or the trait FLAT, and no other place: CONTRIBUTING.md
shows one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pliant.ir import shapes
from pliant.ir.interp_numbers import convert, reinterpret
from pliant.ir.opdef import AttrSpec, Cost, OpDef, Trait
from pliant.ir.types import DType

# ---- meanings that NumPy has no function for


def sign(x: Any) -> Any:
    return ((x > 0) * x.dtype.type(1) - (x < 0) * x.dtype.type(1)).astype(x.dtype)


def decay(x: Any) -> Any:
    found = np.exp(x)
    return np.where(found < np.finfo(x.dtype).tiny, 0, found).astype(x.dtype)[()]


_ERF, _ERFC = np.frompyfunc(math.erf, 1, 1), np.frompyfunc(math.erfc, 1, 1)


def erf(x: Any) -> Any:
    return np.asarray(_ERF(x)).astype(x.dtype)[()]


def erfc(x: Any) -> Any:
    return np.asarray(_ERFC(x)).astype(x.dtype)[()]


def power(x: Any, y: Any) -> Any:
    if x.dtype.kind == "f":
        return np.power(x, y)
    # 1/x**|y| towards zero: only 1 and -1 keep a magnitude.
    small = np.where(abs(x) == 1, np.power(x, np.abs(y) % 2), 0).astype(x.dtype)
    return np.where(y < 0, small, np.power(x, np.maximum(y, 0)))[()]


# ---- rows

_FLOAT, _NUMBER, _INTS, _ANY = "f", "fiu", "iub", "fiub"  # what operands may be
_COMMUTATIVE, _EXACT, _FLAT = Trait.COMMUTATIVE, Trait.EXACT, Trait.FLAT
_PREDICATE, _JUMPS, _EDGE, _FITS = (
    Trait.PREDICATE,
    Trait.JUMPS,
    Trait.EDGE,
    Trait.FITS,
)


def _row(
    arity: int,
    name: str,
    kinds: str,
    meaning: Callable[..., Any],
    *traits: Trait,
    cost: int = Cost.CHEAP,
    inline: str = "",
    neutral: bool | int | float | None = None,
) -> OpDef:
    rule = shapes.elementwise(kinds, DType.BOOL if _PREDICATE in traits else None)
    return OpDef(
        name,
        (arity, arity),
        (),
        rule,
        frozenset({Trait.ELEMENTWISE, Trait.PURE, *traits}),
        cost=cost,
        meaning=meaning,
        inline=inline,
        neutral=neutral,
    )


def _unary(
    name: str, kinds: str, meaning: Callable[[Any], Any], *traits: Trait, **more: Any
) -> OpDef:
    return _row(1, name, kinds, meaning, *traits, **more)


def _binary(
    name: str,
    kinds: str,
    meaning: Callable[[Any, Any], Any],
    *traits: Trait,
    **more: Any,
) -> OpDef:
    return _row(2, name, kinds, meaning, *traits, **more)


def _compare(
    name: str, meaning: Callable[[Any, Any], Any], inline: str, *traits: Trait
) -> OpDef:
    return _binary(
        name, _ANY, meaning, _PREDICATE, _EXACT, _FLAT, _JUMPS, *traits, inline=inline
    )


def _bits(
    name: str, kinds: str, meaning: Callable[[Any, Any], Any], inline: str, **more: Any
) -> OpDef:
    return _binary(
        name, kinds, meaning, _COMMUTATIVE, _EXACT, _FLAT, inline=inline, **more
    )


_LOWER = "{0} if {0} < {1} or {0} != {0} else {1}"
_HIGHER = "{0} if {0} > {1} or {0} != {0} else {1}"

_NUMBERS: tuple[OpDef, ...] = (
    _unary("neg", _NUMBER, np.negative, _EXACT, _FITS, inline="-{}"),
    _unary("abs", _NUMBER, np.abs, _EXACT, _FITS, inline="abs({})"),
    _unary("sign", _NUMBER, sign, _EXACT, _FLAT, _JUMPS, _FITS),
    _unary("exp", _FLOAT, np.exp, cost=8),
    _unary("expm1", _FLOAT, np.expm1, cost=12),
    _unary("log", _FLOAT, np.log, _EDGE, cost=10),
    _unary("log1p", _FLOAT, np.log1p, _EDGE, cost=12),
    _unary("logit", _FLOAT, lambda x: np.log(x / (1 - x)), _JUMPS, cost=14),
    _unary("sqrt", _FLOAT, np.sqrt, _EXACT, _EDGE, cost=4),
    _unary(
        "rsqrt",
        _FLOAT,
        lambda x: 1 / np.sqrt(x),
        _EDGE,
        cost=5,
        inline="1 / sqrt({})",
    ),
    _unary(
        "reciprocal", _FLOAT, lambda x: 1 / x, _EXACT, _EDGE, cost=4, inline="1 / {}"
    ),
    _unary("sin", _FLOAT, np.sin, cost=12),
    _unary("cos", _FLOAT, np.cos, cost=12),
    _unary("tan", _FLOAT, np.tan, cost=16),
    _unary("tanh", _FLOAT, np.tanh, cost=12),
    _unary("erf", _FLOAT, erf, cost=14),
    _unary("erfc", _FLOAT, erfc, cost=24),
    _unary("sigmoid", _FLOAT, lambda x: 1 / (1 + np.exp(-x)), cost=12),
    _unary("floor", _FLOAT, np.floor, _EXACT, _FLAT, _JUMPS, _FITS),
    _unary("ceil", _FLOAT, np.ceil, _EXACT, _FLAT, _JUMPS, _FITS),
    _unary("round", _FLOAT, np.rint, _EXACT, _FLAT, _JUMPS, _FITS),
    _unary("trunc", _FLOAT, np.trunc, _EXACT, _FLAT, _JUMPS, _FITS),
    _unary("bitwise_not", _INTS, np.invert, _EXACT, _FLAT, inline="~{}"),
    _unary("isnan", _FLOAT, np.isnan, _PREDICATE, _EXACT, _FLAT, _JUMPS),
    _unary("isinf", _FLOAT, np.isinf, _PREDICATE, _EXACT, _FLAT, _JUMPS),
    _unary("logical_not", "b", np.logical_not, _PREDICATE, _EXACT, _FLAT),
    _binary(
        "add",
        _NUMBER,
        np.add,
        _COMMUTATIVE,
        _EXACT,
        inline="{} + {}",
        neutral=-0.0,  # -0.0 + 0.0 is 0.0
    ),
    _binary("sub", _NUMBER, np.subtract, _EXACT, inline="{} - {}", neutral=0),
    _binary(
        "mul", _NUMBER, np.multiply, _COMMUTATIVE, _EXACT, inline="{} * {}", neutral=1
    ),
    _binary(
        "div",
        _FLOAT,
        np.true_divide,
        _EXACT,
        _EDGE,
        cost=4,
        inline="{} / {}",
        neutral=1,
    ),
    _binary(
        "floordiv",
        _NUMBER,
        np.floor_divide,
        _FLAT,
        _JUMPS,
        cost=6,
        inline="{} // {}",
    ),
    _binary("mod", _NUMBER, np.remainder, _JUMPS, cost=6, inline="{} % {}"),
    _binary("pow", _NUMBER, power, _JUMPS, cost=24),
    _binary("minimum", _ANY, np.minimum, _COMMUTATIVE, _EXACT, _FITS, inline=_LOWER),
    _binary("maximum", _ANY, np.maximum, _COMMUTATIVE, _EXACT, _FITS, inline=_HIGHER),
    _binary("atan2", _FLOAT, np.arctan2, _JUMPS, cost=24),
    _binary("copysign", _FLOAT, np.copysign, _EXACT, _JUMPS, _FITS),
    _binary("nextafter", _FLOAT, np.nextafter, _EXACT, _FLAT, _JUMPS),
    _compare("eq", np.equal, "{} == {}", _COMMUTATIVE),
    _compare("ne", np.not_equal, "{} != {}", _COMMUTATIVE),
    _compare("lt", np.less, "{} < {}"),
    _compare("le", np.less_equal, "{} <= {}"),
    _compare("gt", np.greater, "{} > {}"),
    _compare("ge", np.greater_equal, "{} >= {}"),
    _bits("logical_and", "b", np.logical_and, "{} & {}", neutral=True),
    _bits("logical_or", "b", np.logical_or, "{} | {}", neutral=False),
    _bits("logical_xor", "b", np.logical_xor, "{} ^ {}", neutral=False),
    _bits("bitwise_and", _INTS, np.bitwise_and, "{} & {}"),
    _bits("bitwise_or", _INTS, np.bitwise_or, "{} | {}"),
    _bits("bitwise_xor", _INTS, np.bitwise_xor, "{} ^ {}"),
    _binary("shift_left", "iu", np.left_shift, _FLAT, inline="{} << {}"),
    _binary("shift_right", "iu", np.right_shift, _FLAT, inline="{} >> {}"),
)
_LOOPS_ONLY = (_unary("decay", _FLOAT, decay, cost=8),)
_GRAPHS_ONLY = (
    OpDef(
        "select",
        (3, 3),
        (),
        shapes.select,
        frozenset({Trait.ELEMENTWISE, Trait.PURE, Trait.EXACT, Trait.FITS}),
        meaning=np.where,
    ),
    OpDef(
        "cast",
        (1, 1),
        (AttrSpec("dtype", "dtype"),),
        shapes.cast,
        frozenset({Trait.ELEMENTWISE, Trait.PURE}),
        meaning=convert,
    ),
    OpDef(
        "bitcast",
        (1, 1),
        (AttrSpec("source", "dtype"), AttrSpec("dtype", "dtype")),
        shapes.bitcast,
        frozenset({Trait.ELEMENTWISE, Trait.PURE, Trait.EXACT, Trait.FLAT, _JUMPS}),
        meaning=reinterpret,
    ),
    OpDef(
        "stop_gradient",
        (1, 1),
        (),
        shapes.elementwise(_ANY),
        frozenset({Trait.ELEMENTWISE, Trait.PURE}),
        meaning=lambda x: x,
    ),
    OpDef(
        "slope",
        (3, 3),
        (),
        shapes.elementwise(_FLOAT),
        frozenset({Trait.ELEMENTWISE, Trait.PURE}),
        meaning=lambda y, x, s: y,
    ),
)

ELEMENTWISE: tuple[OpDef, ...] = (*_NUMBERS, *_GRAPHS_ONLY)
SCALARS: dict[str, OpDef] = {row.name: row for row in (*_NUMBERS, *_LOOPS_ONLY)}
PREDICATES = frozenset(n for n, row in SCALARS.items() if row.is_(Trait.PREDICATE))
