"""Products of the parts of words: the dot instructions of a target.

    bytes         vpdpbusd                  AVX512-VNNI, AVX-VNNI
    turned_bytes  the same, operands exchanged
    signed_bytes  sdot                      ARM with dot products
    halves        pmaddwd, then an addition x86
    any           parts shifted out, multiplied and added

All give the same 32 bits: vpdpbusd and sdot add without saturation, and the only sum of
pmaddwd that overflows wraps.
"""

from __future__ import annotations

from collections.abc import Iterator

import llvmlite.ir as ll

from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_types import (
    I8,
    I16,
    I32,
    LLValue,
    call_intrinsic,
    constant,
    lanes_of,
    mangle,
    widen,
)
from pliant.ir.loops import DOT_PARTS
from pliant.machine.target import Target

_MULTIPLY_HALVES = {
    4: "llvm.x86.sse2.pmadd.wd",
    8: "llvm.x86.avx2.pmadd.wd",
    16: "llvm.x86.avx512.pmaddw.d.512",
}


def emit_dot(
    b: LLBuilder, parts: str, x: LLValue, y: LLValue, z: LLValue, target: Target
) -> LLValue:
    """z plus the products of the parts of x and y; all have one width."""
    lanes = lanes_of(z)
    if parts == "turned_bytes":
        return emit_dot(b, "bytes", y, x, z, target)
    if lanes > target.lanes:
        low, high = (
            emit_dot(b, parts, x, y, z, target) for x, y, z in _halves(b, x, y, z)
        )
        return b.shuffle_vector(low, high, _order(range(lanes)))
    if lanes == target.lanes and target.dot(parts):
        if parts == "bytes":
            name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
            return _call(b, name, z, x, y)
        if parts == "signed_bytes":
            name = f"llvm.aarch64.neon.sdot.{mangle(z.type)}.v{4 * lanes}i8"
            return _call(b, name, z, x, y)
        words = widen(I16, 2 * lanes)
        pair = [b.bitcast(x, words), b.bitcast(y, words)]
        return b.add(call_intrinsic(b, _MULTIPLY_HALVES[lanes], z.type, pair), z)
    return _spelled_out(b, parts, x, y, z)


def _call(b: LLBuilder, name: str, z: LLValue, x: LLValue, y: LLValue) -> LLValue:
    typ = widen(I8, 4 * lanes_of(z))
    return call_intrinsic(b, name, z.type, [z, b.bitcast(x, typ), b.bitcast(y, typ)])


def _spelled_out(
    b: LLBuilder, parts: str, x: LLValue, y: LLValue, z: LLValue
) -> LLValue:
    count, x_signed, y_signed = DOT_PARTS[parts]
    bits = 32 // count

    def part(word: LLValue, number: int, signed: bool) -> LLValue:
        up = constant(word.type, 32 - bits * (number + 1))
        down = constant(word.type, 32 - bits)
        shifted = b.shl(word, up)
        return b.ashr(shifted, down) if signed else b.lshr(shifted, down)

    for number in range(count):
        left, right = part(x, number, x_signed), part(y, number, y_signed)
        z = b.add(z, b.mul(left, right))
    return z


def _halves(b: LLBuilder, *values: LLValue) -> Iterator[tuple[LLValue, ...]]:
    """The lower lanes of every value, then the upper ones."""
    half = lanes_of(values[0]) // 2
    for first in (0, half):
        order = _order(range(first, first + half))
        yield tuple(
            b.shuffle_vector(v, ll.Constant(v.type, ll.Undefined), order)
            for v in values
        )


def _order(lanes: range) -> LLValue:
    numbers = [constant(I32, lane) for lane in lanes]
    return ll.Constant(ll.VectorType(I32, len(lanes)), numbers)
