"""Nests that copy rows to columns run in squares of registers, to the same bits."""

from __future__ import annotations

import pytest
from compiled_loops import TARGETS, agree, compiled, serial, vector

from pliant.ir.loops import (
    Binary,
    Cast,
    Index,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, sym

n, m, i, j, pitch = (sym(name) for name in ("n", "m", "i", "j", "pitch"))
WIDTH = 32
DTYPES = [DType.F32, DType.F64, DType.I32, DType.BF16, DType.F16]


def columns_of(
    dtype: DType,
    masked: bool = False,
    extra: int = 0,
    first: int = 0,
    depth: Expr = n,
    width: int = WIDTH,
) -> LoopFunc:
    """to[i, j] = from[j, i], and 0 where j >= m if masked."""
    to = DType.F32 if dtype in (DType.BF16, DType.F16) else dtype
    source = buffer("x", dtype, (width + extra, n), Role.IN, (pitch, as_expr(1)))
    result = buffer("y", to, (n, width), Role.OUT)
    where = Binary("lt", Index(j), Index(m)) if masked else None
    value: LoopValue = Load(source, (j + extra, i), where)
    if to is not dtype:
        value = Cast(value, to)
    body = serial("i", depth, vector("j", width, Store(result, (i, j), value)), first)
    return LoopFunc("turned", ("n", "m", "pitch"), (source, result), body)


SIZES = [
    (rows, some, rows + 3) for rows in (0, 1, 15, 16, 17, 40) for some in (0, 5, 32)
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_rows_become_columns(dtype: DType, masked: bool) -> None:
    agree(columns_of(dtype, masked), sizes=SIZES)


def test_wide_nests_are_loops() -> None:
    narrow, wide = (columns_of(DType.F32, width=w) for w in (512, 4096))
    agree(narrow, sizes=SIZES)
    sizes = [len(compiled([f], TARGETS[0]).llvm_ir()) for f in (narrow, wide)]
    assert sizes[1] < 1.1 * sizes[0]


def test_a_part_of_the_rows() -> None:
    agree(columns_of(DType.F32, extra=3, first=2), sizes=SIZES)


def test_no_element_is_gathered() -> None:
    for target in TARGETS:
        if target.has("avx2"):
            squares = columns_of(DType.F32, depth=as_expr(64))
            assert "gather" not in compiled([squares], target).assembly()
