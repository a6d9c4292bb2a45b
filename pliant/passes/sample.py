"""`sample` in terms of indexing, which has a gradient.

%y = sample(%x, %i, %j, %s, %t)
->
the four elements around each point by `index`, 0 where they are outside, times
their shares of the result; x has its channels last for that.
"""

from __future__ import annotations

import itertools

from pliant.ir.build import Builder
from pliant.ir.graph import Op, Value
from pliant.ir.types import DType
from pliant.sym import Expr


def spell_out_sample(b: Builder, op: Op) -> Value:
    x, rows, columns, down, across = op.operands
    height, width = x.shape[2:]
    flat = b.reshape(x, (*x.shape[:2], height * width))
    pixels = b.transpose(flat, (0, 2, 1))  # (N, H*W, C)
    image = b.iota(rows.shape)
    total: Value | None = None
    for sides in itertools.product((0, 1), repeat=2):
        row, column = (
            b.binary("add", b.cast(at, DType.I64), b.scalar(side, DType.I64))
            for at, side in zip((rows, columns), sides, strict=True)
        )
        inside = b.binary(
            "logical_and", _within(b, row, height), _within(b, column, width)
        )
        place = b.binary("add", b.binary("mul", row, b.dim_value(width)), column)
        place = b.select(inside, place, b.scalar(0, DType.I64))
        place = b.in_range(place, height * width, wraps=False, of="sample", axis=1)
        picked = b.emit("index", pixels, image, place)  # (N, P, C)
        zero = b.scalar(0, x.dtype)
        picked = b.select(b.unsqueeze(inside, 2), picked, zero)
        share = b.binary("mul", _share(b, down, sides[0]), _share(b, across, sides[1]))
        part = b.binary("mul", picked, b.unsqueeze(share, 2))
        total = part if total is None else b.binary("add", total, part)
    assert total is not None
    return b.transpose(total, (0, 2, 1))


def _within(b: Builder, at: Value, size: Expr) -> Value:
    low = b.binary("ge", at, b.scalar(0, DType.I64))
    return b.binary("logical_and", low, b.binary("lt", at, b.dim_value(size)))


def _share(b: Builder, share: Value, side: int) -> Value:
    return share if side else b.binary("sub", b.scalar(1, share.dtype), share)
