"""Weights in blocks of few bits, decoded by ordinary graph ops.

A matrix of a GGUF file is rows of blocks. Its parts are constants, each with the rows
first: integers (R, blocks, bytes) and scales (R, blocks, 1). `decoded` emits the ops
that compute the numbers from them, for all rows or for those that an index picks.

    q8_0    32 numbers: d, 32 x i8                   q * d
    q4_0    32 numbers: d, 16 bytes of two nibbles   (q - 8) * d
    q4_1    32 numbers: d, m, 16 bytes               q * d + m
    q5_0    as q4_0, with 4 bytes of fifth bits      (q - 16) * d
    q5_1    as q4_1, with 4 bytes of fifth bits      q * d + m
    q4_k    8 times 32: d, e, 12 bytes of s and m in six bits, 128 bytes of two nibbles
                                                     q * (d * s) - e * m
    q5_k    the same with 32 bytes of fifth bits: bit k is of the k-th 32 numbers
    q6_k    16 times 16: 128 bytes of two nibbles, 64 of four times two bits above
            them, 16 x i8 s, d                       (q - 32) * (d * s)
    f16, bf16    numbers, widened where they are read

In blocks of 32, low nibbles are the first half and high ones the second. Other formats
of a file are decoded when it is read, and are f32 here. What a product reads is made of
these parts when the model is compiled (passes/coded.py): four bits a number where these
are all that there is, eight bits of more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Value
from pliant.ir.types import NUMPY, DType, tensor
from pliant.sym import as_expr, product

F32, U8 = DType.F32, DType.U8
HALF = {"f16": DType.F16, "bf16": DType.BF16}
_DTYPES = {theirs: ours for ours, theirs in NUMPY.items() if ours is not DType.BF16}


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix (rows, columns), or a vector, in the format of its file."""

    name: str
    kind: str  # "f32", or a format of the table above
    parts: Mapping[str, np.ndarray]
    columns: int

    @property
    def rows(self) -> int:
        return int(next(iter(self.parts.values())).shape[0])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def permuted(self, rows: np.ndarray) -> Weight:
        """The same with other rows, or in another order."""
        parts = {name: np.ascontiguousarray(p[rows]) for name, p in self.parts.items()}
        return Weight(self.name, self.kind, parts, self.columns)

    def value(self, b: Builder) -> Value:
        """The numbers, (rows, columns)."""
        parts = self._loaded(b)
        return b.reshape(self._decoded(b, parts), (self.rows, self.columns))

    def product(self, b: Builder, x: Value, bias: Value | None) -> Value:
        """x times the transpose of the numbers, plus a bias."""
        if self.kind not in HALF:
            more = () if bias is None else (bias,)
            return b.emit("linear", x, self.value(b), *more)
        y = b.matmul(x, b.swap(self._loaded(b)["numbers"], 0, 1))
        return y if bias is None else b.binary("add", y, bias)

    def vector(self, b: Builder) -> Value:
        return b.reshape(self.value(b), (self.columns,))

    def picked(self, b: Builder, index: Value) -> Value:
        """The numbers of some rows: only these are read and decoded."""
        parts = {k: b.emit("index", v, index) for k, v in self._loaded(b).items()}
        return b.reshape(self._decoded(b, parts), (*index.shape, self.columns))

    def _loaded(self, b: Builder) -> dict[str, Value]:
        made: dict[str, Value] = {}
        for part, data in self.parts.items():
            dtype = HALF.get(self.kind) or _DTYPES[data.dtype]
            kind = tensor(dtype, *data.shape)
            made[part] = b.constant(Constant(f"{self.name}.{part}", kind, data))
        return made

    def _decoded(self, b: Builder, parts: dict[str, Value]) -> Value:
        return _DECODED[self.kind](b, parts)


def _plain(b: Builder, parts: dict[str, Value]) -> Value:
    return b.cast(parts["numbers"], F32)


def _scaled(b: Builder, numbers: Value, parts: dict[str, Value]) -> Value:
    return b.binary("mul", numbers, b.cast(parts["scale"], F32))


def _low(b: Builder, packed: Value, bits: int) -> Value:
    return b.binary("bitwise_and", packed, b.scalar(2**bits - 1, U8))


def _above(b: Builder, packed: Value, bits: int) -> Value:
    return b.binary("shift_right", packed, b.scalar(bits, U8))


def _nibbles(b: Builder, packed: Value) -> Value:
    """(.., n) bytes -> (.., 2 n) integers of 0..15."""
    return b.concat([_low(b, packed, 4), _above(b, packed, 4)], packed.type.rank - 1)


def _joined(b: Builder, low: Value, high: Value) -> Value:
    """Four bits and those above them as one integer."""
    return b.binary("add", low, b.binary("mul", high, b.scalar(16, U8)))


def _bits(b: Builder, packed: Value, inside: bool) -> Value:
    """(.., n) bytes -> (.., n, 8) bits, or (.., 8, n) if not `inside`; each 0 or 1."""
    lead, count = packed.shape[:-1], packed.shape[-1]
    last = packed.type.rank
    axis = last if inside else last - 1
    eight = as_expr(8)
    whole = (*lead, count, eight) if inside else (*lead, eight, count)
    masks = np.left_shift(1, np.arange(8)).astype(np.uint8)
    held = b.constant(Constant("bits", tensor(U8, 8), masks))
    spread = b.broadcast(packed, whole, [k for k in range(last + 1) if k != axis])
    hit = b.binary("bitwise_and", spread, b.broadcast(held, whole, (axis,)))
    return b.cast(b.binary("ne", hit, b.full_like(hit, 0)), U8)


def _cut(b: Builder, x: Value, lead: int, width: int) -> Value:
    """What is behind the first axes, in blocks of this width: (.., blocks, width)."""
    count = product(x.shape[lead:])
    return b.reshape(x, (*x.shape[:lead], count // width, width))


def _lead(parts: dict[str, Value]) -> int:
    """The axes before blocks: one for rows, or those of an index."""
    return parts["scale"].type.rank - 2


def _q8_0(b: Builder, parts: dict[str, Value]) -> Value:
    return _scaled(b, b.cast(parts["numbers"], F32), parts)


def _centred(b: Builder, codes: Value, middle: float, parts: dict[str, Value]) -> Value:
    numbers = b.binary("sub", b.cast(codes, F32), b.scalar(middle, F32))
    return _scaled(b, numbers, parts)


def _shifted(b: Builder, codes: Value, parts: dict[str, Value]) -> Value:
    made = _scaled(b, b.cast(codes, F32), parts)
    return b.binary("add", made, b.cast(parts["least"], F32))


def _q4_0(b: Builder, parts: dict[str, Value]) -> Value:
    return _centred(b, _nibbles(b, parts["bytes"]), 8.0, parts)


def _q4_1(b: Builder, parts: dict[str, Value]) -> Value:
    return _shifted(b, _nibbles(b, parts["bytes"]), parts)


def _five(b: Builder, parts: dict[str, Value]) -> Value:
    low = _nibbles(b, parts["bytes"])
    return _joined(b, low, b.reshape(_bits(b, parts["fifth"], True), low.shape))


def _q5_0(b: Builder, parts: dict[str, Value]) -> Value:
    return _centred(b, _five(b, parts), 16.0, parts)


def _q5_1(b: Builder, parts: dict[str, Value]) -> Value:
    return _shifted(b, _five(b, parts), parts)


def _k_blocks(b: Builder, parts: dict[str, Value]) -> Value:
    """Nibbles of 32 bytes at a time: (.., blocks, 32)."""
    lead, packed = _lead(parts), parts["bytes"]
    rows = b.reshape(packed, (*packed.shape[:-1], 4, 32))
    return _cut(b, _nibbles(b, rows), lead, 32)


def _k_scaled(b: Builder, codes: Value, parts: dict[str, Value]) -> Value:
    """q * (d * s) - e * m, where s and m of a block are in six bits.

    Of 12 bytes, four have s and then four m of blocks 0..3, with two bits of blocks
    4..7 above them, whose other bits are the nibbles of the last four bytes.
    """
    lead, packed = _lead(parts), parts["sixes"]
    rows = b.reshape(packed, (*packed.shape[:-1], 3, 4))
    four = (*packed.shape[:-1], as_expr(4))
    s, m, both = (b.reshape(b.slice_axis(rows, lead + 1, k, 1), four) for k in range(3))

    def of_blocks(first: Value, others: Value, by: str) -> Value:
        second = _joined(b, others, _above(b, first, 6))
        made = b.cast(b.concat([_low(b, first, 6), second], lead + 1), F32)
        return _cut(b, b.binary("mul", b.cast(parts[by], F32), made), lead, 1)

    scale = of_blocks(s, _low(b, both, 4), "scale")
    least = of_blocks(m, _above(b, both, 4), "least")
    made = b.binary("mul", b.cast(codes, F32), scale)
    return b.binary("sub", made, least)


def _q4_k(b: Builder, parts: dict[str, Value]) -> Value:
    return _k_scaled(b, _k_blocks(b, parts), parts)


def _q5_k(b: Builder, parts: dict[str, Value]) -> Value:
    fifth = _cut(b, _bits(b, parts["fifth"], False), _lead(parts), 32)
    return _k_scaled(b, _joined(b, _k_blocks(b, parts), fifth), parts)


def _q6_k(b: Builder, parts: dict[str, Value]) -> Value:
    lead, low, high = _lead(parts), parts["bytes"], parts["above"]
    low = _nibbles(b, b.reshape(low, (*low.shape[:-1], 2, 64)))
    high = b.reshape(high, (*high.shape[:-1], 2, 32))
    pairs = [_low(b, _above(b, high, k) if k else high, 2) for k in (0, 2, 4, 6)]
    above = b.concat(pairs, high.type.rank - 1)
    codes = _joined(b, _cut(b, low, lead, 16), _cut(b, above, lead, 16))
    numbers = b.binary("sub", b.cast(codes, F32), b.scalar(32.0, F32))
    scale = _scaled(b, b.cast(parts["scales"], F32), parts)
    return b.binary("mul", numbers, _cut(b, scale, lead, 1))


_DECODED: dict[str, Callable[[Builder, dict[str, Value]], Value]] = {
    "f32": _plain,
    "f16": _plain,
    "bf16": _plain,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}


# ---- from the bytes of a file


@dataclass(frozen=True, slots=True)
class _Field:
    """A part of a block: its bytes, and what they are."""

    part: str
    bytes: int
    dtype: type[np.generic] = np.uint8


_SCALE, _LEAST = _Field("scale", 2, np.float16), _Field("least", 2, np.float16)
_LAYOUTS: dict[str, tuple[int, tuple[_Field, ...]]] = {  # numbers of a block
    "q8_0": (32, (_SCALE, _Field("numbers", 32, np.int8))),
    "q4_0": (32, (_SCALE, _Field("bytes", 16))),
    "q4_1": (32, (_SCALE, _LEAST, _Field("bytes", 16))),
    "q5_0": (32, (_SCALE, _Field("fifth", 4), _Field("bytes", 16))),
    "q5_1": (32, (_SCALE, _LEAST, _Field("fifth", 4), _Field("bytes", 16))),
    "q4_k": (256, (_SCALE, _LEAST, _Field("sixes", 12), _Field("bytes", 128))),
    "q5_k": (
        256,
        (
            _SCALE,
            _LEAST,
            _Field("sixes", 12),
            _Field("fifth", 32),
            _Field("bytes", 128),
        ),
    ),
    "q6_k": (
        256,
        (
            _Field("bytes", 128),
            _Field("above", 64),
            _Field("scales", 16, np.int8),
            _SCALE,
        ),
    ),
}
FORMATS = frozenset({*_LAYOUTS, *HALF})


def from_blocks(name: str, kind: str, data: np.ndarray) -> Weight:
    """A matrix from rows of blocks as bytes, (R, bytes of a row); or from halves."""
    if kind in HALF:
        half = np.float16 if kind == "f16" else np.uint16  # the bits
        numbers = np.ascontiguousarray(data).view(half)
        return Weight(name, kind, {"numbers": numbers}, numbers.shape[1])
    count, layout = _LAYOUTS[kind]
    blocks = data.reshape(data.shape[0], -1, sum(f.bytes for f in layout))
    parts: dict[str, np.ndarray] = {}
    start = 0
    for f in layout:
        piece = np.ascontiguousarray(blocks[:, :, start : start + f.bytes])
        parts[f.part] = piece.view(f.dtype)
        start += f.bytes
    return Weight(name, kind, parts, blocks.shape[1] * count)


def from_numbers(name: str, data: np.ndarray) -> Weight:
    numbers = np.ascontiguousarray(data, np.float32)
    rows = numbers.reshape(1, -1) if numbers.ndim == 1 else numbers
    return Weight(name, "f32", {"numbers": rows}, rows.shape[1])
