"""What a name of an ONNX graph can stand for, while the graph is translated.

    Value      a tensor of the compiled function
    Known      a tensor whose elements are known at compile time: numbers, or integers
               and ratios that follow from sizes
    Coded      a tensor of a type that the IR does not have: bytes, and what they mean
    Items      a sequence of tensors, whose length is known
    Absent     an optional value that is empty

`Known` is what makes a shape subgraph vanish: Shape gives one, and the ops of
onnx_known.py compute with it. An array of symbolic elements has the NumPy type
`object`, and its elements are int, float, bool, Expr, Ratio or Cond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from pliant.frontend.onnx_types import Element
from pliant.ir.graph import Value
from pliant.sym import Cond, Expr, as_expr

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A float that is an integer expression divided by a positive integer, exactly."""

    top: Expr
    bottom: int

    @classmethod
    def of(cls, value: Any) -> Ratio | None:
        """The ratio of an element; None if it is none, or too fine to be exact."""
        if isinstance(value, Ratio):
            return value
        if isinstance(value, Expr):
            return cls(value, 1)
        if isinstance(value, bool | Cond) or not np.isfinite(value):
            return None
        found = Fraction(float(value))
        if found.denominator > _FINEST:
            return None
        return cls(as_expr(found.numerator), found.denominator)


# A product of a size and a float is exact in f32 as long as this many bits are enough.
_FINEST = 2**8


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A tensor known at compile time; `name` is that of its data in the model."""

    array: Array
    element: Element
    name: str = ""

    @property
    def is_symbolic(self) -> bool:
        return bool(self.array.dtype == object)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A tensor of codes, one byte or two each, of an element type without a DType."""

    codes: Value
    element: Element

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.codes.shape


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """A sequence; `element` is the type of its tensors where it has none."""

    values: tuple[Entry, ...]
    element: Element | None = None


class Absent:
    """An optional value without an element."""


ABSENT = Absent()

Entry: TypeAlias = Value | Known | Coded | Items | Absent


def symbolic(elements: Any, shape: tuple[int, ...] | None = None) -> Array:
    """An array of these elements; of plain integers where all of them are constant."""
    flat = [_plain(e) for e in np.asarray(elements, dtype=object).reshape(-1)]
    made = np.empty(len(flat), dtype=object)
    made[:] = flat
    wanted = np.shape(elements) if shape is None else shape
    return made.reshape(wanted)


def _plain(element: Any) -> Any:
    if isinstance(element, Expr) and element.is_const:
        return element.value
    if isinstance(element, Ratio) and element.top.is_const:
        return element.top.value / element.bottom
    return element


def settled(array: Array, element: Element) -> Array:
    """The same as an array of numbers, if all its elements are."""
    if array.dtype != object:
        return array
    flat = [_plain(e) for e in array.reshape(-1)]
    if any(isinstance(e, Expr | Ratio | Cond) for e in flat):
        return symbolic(flat, array.shape)
    return np.array(flat, dtype=element.numpy).reshape(array.shape)


# ---- the tensors in entries


def tensors_in(entries: Iterable[Entry]) -> list[Value]:
    """The tensors in entries, each once."""
    found: dict[Value, None] = {}
    for entry in entries:
        match entry:
            case Value():
                found[entry] = None
            case Coded(codes, _):
                found[codes] = None
            case Items(values, _):
                found.update(dict.fromkeys(tensors_in(values)))
    return list(found)


def replaced(entry: Entry, by: Mapping[Value, Value]) -> Entry:
    match entry:
        case Value():
            return by[entry]
        case Coded(codes, element):
            return Coded(by[codes], element)
        case Items(values, element):
            return Items(tuple(replaced(v, by) for v in values), element)
    return entry
