"""Frozen values as JSON, and back, by the types of their fields.

A dataclass is the list of its fields; an expression is its text; one of several classes
has the name of its class in front. What does not fit the types is refused, so a value
that was read has the structure that the code relies on. A field that is a `Sequence` is
decoded when its items are read: its expressions are for errors and reports, and a model
that only runs parses none.
"""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pliant.errors import ArtifactError
from pliant.ir.types import DTYPES, DType
from pliant.sym import Expr, parse

T = TypeVar("T")
Decode = Callable[[Any], Any]
_LARGEST = 2**63


class Unstorable(Exception):
    """A value that has no form in a file."""


# ---- writing


def encode(value: Any) -> Any:
    """A value of declared types as JSON."""
    if value is None or isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, Expr):
        return str(value)
    if isinstance(value, DType):
        return value.text
    if isinstance(value, Deferred):
        return value.raw  # as it was read
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if value is int or value is float:
        return value.__name__
    if is_dataclass(value):
        kind: Any = type(value)
        hints = _hints(kind)
        return [
            _encode_field(hints[field.name], getattr(value, field.name))
            for field in fields(value)
        ]
    raise Unstorable(f"a {type(value).__name__}")


def _encode_field(kind: Any, value: Any) -> Any:
    if kind is object or kind == Mapping[str, object]:
        return encode_plain(dict(value) if isinstance(value, Mapping) else value)
    if _classes(kind):
        return [type(value).__name__, *encode(value)]
    item = None if isinstance(value, Deferred) else _item_type(kind)
    if item is not None and (_classes(item) or _is_text_or_expr(item)):
        return [_encode_field(item, each) for each in value]
    if _is_text_or_expr(kind) and isinstance(value, Expr):
        return [str(value)]
    return encode(value)


def _is_text_or_expr(kind: Any) -> bool:
    return _is_union(kind) and set(get_args(kind)) == {str, Expr}


def encode_plain(value: Any) -> Any:
    """Plain values of Python, told apart by their types."""
    if value is None or isinstance(value, bool | int | str):
        if type(value) not in (type(None), bool, int, str):
            raise Unstorable(f"a {type(value).__name__}")
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) in (tuple, list):
        return {type(value).__name__: [encode_plain(item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: encode_plain(item) for key, item in value.items()}}
    raise Unstorable(f"a {type(value).__name__}")


# ---- reading


def decode(kind: type[T], value: Any) -> T:
    """The value of a type; ArtifactError if it is not one."""
    try:
        wanted: Any = kind
        decoded: T = _decoder(wanted)(value)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _malformed(error) from None
    return decoded


def _malformed(error: Exception) -> ArtifactError:
    return ArtifactError(
        f"the file's description of its model is malformed: {error or 'too deep'}"
    )


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of its fields; `get_type_hints` takes most of the time of a load."""
    names = vars(sys.modules[kind.__module__])
    return {field.name: _evaluated(field.type, names) for field in fields(kind)}


def _evaluated(text: Any, names: dict[str, Any]) -> Any:
    """An annotation of our own code, which `from __future__` has left as a text."""
    if not isinstance(text, str):
        return text
    found = _PLAIN_TYPES.get(text)
    return eval(text, names) if found is None else found


_PLAIN_TYPES: Mapping[str, Any] = {
    "int": int,
    "str": str,
    "bool": bool,
    "float": float,
    "tuple[int, ...]": tuple[int, ...],
}


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _classes(kind: Any) -> tuple[type, ...]:
    """The dataclasses of a union of them; nothing if it is no such union."""
    found = get_args(kind) if _is_union(kind) else ()
    return found if found and all(map(is_dataclass, found)) else ()


def _item_type(kind: Any) -> Any:
    """Of a tuple of any length, or of a sequence."""
    args = get_args(kind)
    if get_origin(kind) is tuple and len(args) == 2 and args[1] is Ellipsis:
        return args[0]
    return args[0] if get_origin(kind) is Sequence else None


@cache
def _decoder(kind: Any) -> Decode:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if is_dataclass(kind):
        return _dataclass_decoder(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _one_of(args)
    item = _item_type(kind)
    if item is not None and origin is Sequence:
        inner = _decoder(item)
        return lambda value: Deferred(_list(value), inner)
    if item is not None:
        inner = _decoder(item)
        return lambda value: tuple([inner(x) for x in _list(value)])
    if origin is tuple:
        return _tuple_decoder([_decoder(arg) for arg in args])
    if kind == Mapping[str, object]:
        return _plain_mapping
    if _is_union(kind):
        return _union_decoder(kind)
    raise TypeError(f"no form for {kind}")


def _dataclass_decoder(kind: Any) -> Decode:
    inner: list[Decode] = []

    def decoded(value: Any) -> Any:
        given = _list(value)
        if not inner:  # not before: a class may have fields of its own type
            hints = _hints(kind)
            inner.extend(_decoder(hints[field.name]) for field in fields(kind))
        if len(given) != len(inner):
            raise ValueError(f"{kind.__name__} has {len(given)} fields")
        return kind(*[each(x) for each, x in zip(inner, given, strict=True)])

    return decoded


def _tuple_decoder(inner: Sequence[Decode]) -> Decode:
    def decoded(value: Any) -> Any:
        given = _list(value)
        if len(given) != len(inner):
            raise ValueError(f"{len(given)} items instead of {len(inner)}")
        return tuple([each(x) for each, x in zip(inner, given, strict=True)])

    return decoded


def _union_decoder(kind: Any) -> Decode:
    classes = {found.__name__: _decoder(found) for found in _classes(kind)}
    if classes:
        return lambda value: classes[_text(_list(value)[0])](value[1:])
    args = get_args(kind)
    others = [arg for arg in args if arg is not type(None)]
    if set(others) == {type[int], type[float]}:
        return lambda value: (
            None if value is None else {"int": int, "float": float}[value]
        )
    if set(others) == {str, int} or set(others) == {str, Expr}:
        # A text beside an expression: an expression is in a list of its own.
        return _either(others)
    (other,) = others
    inner = _decoder(other)
    return lambda value: None if value is None else inner(value)


def _either(kinds: Sequence[Any]) -> Decode:
    if Expr in kinds:
        return lambda value: (
            _expr(_single(value)) if isinstance(value, list) else _text(value)
        )
    return lambda value: _text(value) if isinstance(value, str) else _int(value)


def _single(value: list[Any]) -> Any:
    (inner,) = value
    return inner


def _one_of(allowed: tuple[Any, ...]) -> Decode:
    def decoded(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"{value!r} is none of {allowed}")
        return value

    return decoded


class Deferred(Sequence[T]):
    """Items that are decoded when they are read."""

    __slots__ = ("_decode", "_raw")

    def __init__(self, raw: Sequence[Any], decode: Callable[[Any], T]) -> None:
        self._raw, self._decode = raw, decode

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def raw(self) -> Sequence[Any]:
        return self._raw

    def __getitem__(self, key: Any) -> Any:
        try:
            if isinstance(key, slice):
                return tuple([self._decode(item) for item in self._raw[key]])
            return self._decode(self._raw[key])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _malformed(error) from None

    def __iter__(self) -> Iterator[T]:
        return iter(self[:])


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{_shown(value)} is no list")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{_shown(value)} is no text")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or not -_LARGEST <= value < _LARGEST:
        raise ValueError(f"{_shown(value)} is no integer of 64 bits")
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{_shown(value)} is neither true nor false")
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{_shown(value)} is no number")
    return float(value)


_HUGE_POWER = re.compile(r"\*\*\s*\d{3}")


@lru_cache(maxsize=1 << 12)
def _expr(text: Any) -> Expr:
    if _HUGE_POWER.search(_text(text)):
        raise ValueError(f"{_shown(text)} has a huge power")
    return parse(text)


def _dtype(value: Any) -> DType:
    return DTYPES[_text(value)]


def decode_plain(value: Any) -> Any:
    """The inverse of `encode_plain`."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is not dict or len(value) != 1:
        raise ValueError(f"{_shown(value)} is no plain value")
    ((kind, inside),) = value.items()
    match kind:
        case "float":
            return float.fromhex(_text(inside))
        case "tuple":
            return tuple([decode_plain(item) for item in _list(inside)])
        case "list":
            return [decode_plain(item) for item in _list(inside)]
        case "dict" if type(inside) is dict:
            return {key: decode_plain(item) for key, item in inside.items()}
        case _:
            raise ValueError(f"{_shown(value)} is no plain value")


def _plain_mapping(value: Any) -> dict[str, object]:
    found = decode_plain(value)
    if type(found) is not dict:
        raise ValueError(f"{_shown(value)} is no mapping")
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


_SIMPLE: dict[Any, Decode] = {
    int: _int,
    float: _float,
    bool: _bool,
    str: _text,
    object: decode_plain,
    Expr: _expr,
    DType: _dtype,
}
