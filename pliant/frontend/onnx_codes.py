"""Element types of 8 bits or fewer that the IR does not have, as codes in bytes.

A code means a number: of integers by arithmetic on the bits, of floats by a table of
all codes. The other way, the code of a number is found among the numbers at which the
rounding changes, which are sorted: `boundary[k]` is the least magnitude that has the
code k+1. Rounding is to nearest, and to the even code in the middle.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pliant.frontend.onnx_context import OnnxContext
from pliant.frontend.onnx_types import ELEMENTS, Element
from pliant.frontend.onnx_values import Array, Coded, Known
from pliant.ir.graph import Value
from pliant.ir.types import DType

_UINT8 = ELEMENTS[2]
_FLOAT = ELEMENTS[1]


def coded_constant(cx: OnnxContext, known: Known) -> Coded:
    raw = np.ascontiguousarray(known.array).view(np.uint8).reshape(known.shape)
    mask = np.uint8((1 << known.element.bits) - 1)
    codes = cx.data(raw & mask, _UINT8, known.name)
    return Coded(codes, known.element)


# ---- what codes mean


def decode(cx: OnnxContext, coded: Coded, dtype: DType) -> Value:
    """The numbers of codes."""
    element, codes = coded.element, coded.codes
    if element.is_float:
        table = cx.data(meanings(element.name), _FLOAT, f"codes_{element.name}")
        place = cx.cast(codes, DType.I64)
        cx.nonnegative.add(place)
        return cx.cast(cx.b.emit("index", table, place), dtype)
    wide = cx.cast(codes, DType.I32)
    mask = (1 << element.bits) - 1
    low = cx.arith("bitwise_and", wide, mask)
    if element.name.startswith("INT"):
        half = 1 << (element.bits - 1)
        low = cx.sub(cx.arith("bitwise_xor", low, half), half)
    return cx.cast(low, dtype)


@functools.cache
def meanings(name: str) -> Array:
    """The number of each code, as f32."""
    element = next(e for e in ELEMENTS.values() if e.name == name)
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    found: Array = codes.view(element.numpy).astype(np.float32)
    return found


# ---- codes of numbers


def encode(
    cx: OnnxContext, x: Value, element: Element, saturate: bool, rounded: str
) -> Coded:
    if not element.is_float:
        return Coded(_integer_codes(cx, x, element), element)
    if element.name == "FLOAT8E8M0":
        return Coded(_exponent_codes(cx, x, saturate, rounded), element)
    x = cx.cast(x, DType.F32)
    edges, largest = boundaries(element.name)
    row = cx.data(edges.reshape(1, -1), _FLOAT, f"edges_{element.name}")
    size = cx.unary("abs", x)
    flat = cx.reshape(size, (1, x.type.numel))
    found = cx.b.emit("search", row, flat, right=True)
    code = cx.cast(cx.reshape(found, x.shape), DType.I32)
    special = _specials(element.name)
    over = cx.arith("gt", code, largest)
    infinite, nan = cx.unary("isinf", x), cx.unary("isnan", x)
    if element.name == "FLOAT4E2M1" or saturate:
        code = cx.arith("minimum", code, largest)
    else:
        beyond = special.nan if special.infinity is None else special.infinity
        out = cx.b.binary("logical_or", over, infinite)
        code = cx.select(out, cx.full(beyond, x.shape, DType.I32), code)
    sign_bit = 1 << (element.bits - 1)
    bits = cx.b.bitcast(x, DType.I32)
    negative = cx.arith("lt", bits, 0)
    if special.unsigned_zero:  # these have no negative zero, and one NaN
        negative = cx.b.binary("logical_and", negative, cx.arith("ne", code, 0))
        lone = cx.arith("eq", code, special.nan)
        negative = cx.b.binary("logical_and", negative, cx.unary("logical_not", lone))
    code = cx.select(negative, cx.arith("bitwise_or", code, sign_bit), code)
    if (
        special.nan is None
    ):  # NaN has no code: zero, of the other sign as ml_dtypes has it
        none = cx.select(
            cx.arith("lt", bits, 0),
            cx.full(0, x.shape, DType.I32),
            cx.full(sign_bit, x.shape, DType.I32),
        )
        code = cx.select(nan, none, code)
    else:
        both = cx.full(special.nan, x.shape, DType.I32)
        if not special.unsigned_zero:
            minus = cx.full(special.nan | sign_bit, x.shape, DType.I32)
            both = cx.select(cx.arith("lt", bits, 0), minus, both)
        code = cx.select(nan, both, code)
    return Coded(cx.cast(code, DType.U8), element)


class _Special:
    """Codes of a float type that are no numbers."""

    def __init__(self, nan: Any, infinity: Any, unsigned_zero: bool) -> None:
        self.nan, self.infinity, self.unsigned_zero = nan, infinity, unsigned_zero


def _specials(name: str) -> _Special:
    return {
        "FLOAT8E4M3FN": _Special(0x7F, None, False),
        "FLOAT8E4M3FNUZ": _Special(0x80, None, True),
        "FLOAT8E5M2": _Special(0x7E, 0x7C, False),
        "FLOAT8E5M2FNUZ": _Special(0x80, None, True),
        "FLOAT4E2M1": _Special(None, None, False),
    }[name]


@functools.cache
def boundaries(name: str) -> tuple[Array, int]:
    """Where the code of a magnitude changes, and the code of the largest number."""
    element = next(e for e in ELEMENTS.values() if e.name == name)
    positive = meanings(name)[: 1 << (element.bits - 1)]
    finite = positive[np.isfinite(positive)].astype(np.float64)
    largest = len(finite) - 1
    # One step more tells what is too large.
    numbers = np.append(finite, 2 * finite[-1] - finite[-2])
    middle = (numbers[:-1] + numbers[1:]) / 2
    edges = middle.astype(np.float32)
    odd = np.arange(1, len(numbers)) % 2 == 1
    # The middle itself goes to the even code.
    edges[odd] = np.nextafter(edges[odd], np.float32(np.inf))
    return edges, largest


def _integer_codes(cx: OnnxContext, x: Value, element: Element) -> Value:
    """The low bits of integers."""
    mask = (1 << element.bits) - 1
    code = cx.arith("bitwise_and", cx.cast(x, DType.I32), mask)
    return cx.cast(code, DType.U8)


def _exponent_codes(cx: OnnxContext, x: Value, saturate: bool, mode: str) -> Value:
    """E8M0: the biased exponent of an f32, rounded by what is below it."""
    bits = cx.b.bitcast(cx.cast(x, DType.F32), DType.I32)
    exponent = cx.arith("bitwise_and", cx.arith("shift_right", bits, 23), 0xFF)
    fraction = cx.arith("bitwise_and", bits, 0x7FFFFF)
    up = cx.full(False, x.shape, DType.BOOL)
    if mode == "up":
        up = cx.arith("gt", fraction, 0)
    elif mode == "nearest":
        up = cx.arith("gt", fraction, 0x400000)
        tie = cx.b.binary(
            "logical_and",
            cx.arith("eq", fraction, 0x400000),
            cx.arith("gt", exponent, 0),
        )
        up = cx.b.binary("logical_or", up, tie)
    special = cx.arith("eq", exponent, 0xFF)
    up = cx.b.binary("logical_and", up, cx.unary("logical_not", special))
    if saturate:
        full = cx.arith("eq", exponent, 0xFE)
        up = cx.b.binary("logical_and", up, cx.unary("logical_not", full))
    return cx.cast(cx.add(exponent, cx.cast(up, DType.I32)), DType.U8)
