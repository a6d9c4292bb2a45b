"""Elementwise ops and casts of the loop IR, compiled, against the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled_loops import (
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    I32,
    TARGETS,
    agree,
    compiled,
    elementwise,
    i,
    n,
    run,
    vector,
)

from pliant.ir.interp_memory import storage
from pliant.ir.loops import (
    Binary,
    Block,
    Buffer,
    Cast,
    Const,
    Fma,
    Kind,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Select,
    Store,
    Unary,
    buffer,
)
from pliant.ir.types import DType

INTS = (DType.I64, DType.I32, DType.I16, DType.I8, DType.U8)
FLOAT_UNARY: tuple[str, ...] = (
    "neg",
    "abs",
    "sign",
    "exp",
    "sqrt",
    "reciprocal",
    "tanh",
    "floor",
)
FLOAT_UNARY += ("ceil", "round", "trunc", "sigmoid", "rsqrt", "log")
FLOAT_BINARY = ("add", "sub", "mul", "div", "minimum", "maximum")
INT_BINARY: tuple[str, ...] = (
    "add",
    "sub",
    "mul",
    "floordiv",
    "mod",
    "minimum",
    "maximum",
)
INT_BINARY += ("bitwise_and", "bitwise_or", "bitwise_xor")
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, np.inf, -np.inf, np.nan, 1e30, -1e30]


def specials(size: int, rng: np.random.Generator) -> Any:
    return rng.choice([*SPECIAL, 3.0, 7.25, -100.75, 255.0, 40000.0, 3e9, 1e-40], size)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_float_ops(dtype: DType) -> None:
    outs: list[tuple[DType, LoopValue]] = []
    x, y = (buffer(name, dtype, (n,), Role.IN) for name in ("x", "y"))
    a, b = Load(x, (i,)), Load(y, (i,))
    outs += [(dtype, Unary(op, a)) for op in FLOAT_UNARY]
    outs += [(BOOL, Unary(op, a)) for op in ("isnan", "isinf", "logical_not")]
    outs += [(dtype, Binary(op, a, b)) for op in FLOAT_BINARY]
    outs += [(BOOL, Binary(op, a, b)) for op in COMPARE]
    outs += [(dtype, Select(Binary("lt", a, b), a, b))]
    outs += [(BOOL, Binary("logical_and", Unary("isnan", a), Unary("isnan", b)))]
    agree_outputs(
        f"float_{dtype}",
        (x, y),
        outs,
        {
            0: lambda s, rng: specials(s["n"], rng),
            1: lambda s, rng: specials(s["n"], rng),
        },
    )


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_int_ops(dtype: DType) -> None:
    x, y = (buffer(name, dtype, (n,), Role.IN) for name in ("x", "y"))
    a, b = Load(x, (i,)), Load(y, (i,))
    outs: list[tuple[DType, LoopValue]] = []
    outs += [(dtype, Unary(op, a)) for op in ("neg", "abs", "sign", "bitwise_not")]
    outs += [(dtype, Binary(op, a, b)) for op in INT_BINARY]
    outs += [(BOOL, Binary(op, a, b)) for op in COMPARE]
    outs += [(BOOL, Unary("logical_not", a))]
    small = Binary("bitwise_and", b, Const(7, dtype))
    outs += [(dtype, Binary("shift_left", a, small))]
    outs += [(dtype, Binary("shift_right", a, small))]
    outs += [(dtype, Binary("pow", a, small))]
    info = np.iinfo(storage(dtype))

    def data(sizes: dict[str, int], rng: np.random.Generator) -> Any:
        return rng.choice(
            [0, 1, 2, 3, 7, 100, info.max, info.min, -1 % 256 if info.min == 0 else -1],
            sizes["n"],
        )

    agree_outputs(f"int_{dtype}", (x, y), outs, {0: data, 1: data})


def agree_outputs(
    name: str,
    ins: tuple[Buffer, ...],
    outs: list[tuple[DType, LoopValue]],
    inputs: Any,
    tolerance: float = 2e-6,
) -> None:
    """One loop that stores each value to a buffer of its own."""
    buffers = [buffer(f"o{p}", d, (n,), Role.OUT) for p, (d, _) in enumerate(outs)]
    body = Block(
        tuple(
            Store(out, (i,), value)
            for out, (_, value) in zip(buffers, outs, strict=True)
        )
    )
    func = LoopFunc(name, ("n",), (*ins, *buffers), vector("i", n, body))
    agree(func, sizes=(1, 9, 61), inputs=inputs, tolerance=tolerance)


@pytest.mark.parametrize("source", list(DType), ids=str)
def test_casts(source: DType) -> None:
    x = buffer("x", source, (n,), Role.IN)
    outs: list[tuple[DType, LoopValue]] = [
        (to, Cast(Load(x, (i,)), to)) for to in DType
    ]

    def data(sizes: dict[str, int], rng: np.random.Generator) -> Any:
        if source is BF16:
            return rng.integers(0, 1 << 16, sizes["n"])
        if source is F16:
            return rng.integers(0, 1 << 16, sizes["n"], np.uint16).view(np.float16)
        if source.is_float:
            tiny = rng.standard_normal(sizes["n"]) * 10.0 ** rng.integers(
                -9, 6, sizes["n"]
            )
            return np.where(
                rng.random(sizes["n"]) < 0.5, tiny, specials(sizes["n"], rng)
            )
        if source is BOOL:
            return rng.integers(0, 2, sizes["n"])
        info = np.iinfo(storage(source))
        return rng.integers(
            info.min, info.max, sizes["n"], endpoint=True, dtype=info.dtype
        )

    agree_outputs(f"cast_{source}", (x,), outs, {0: data}, tolerance=0)


def test_half_rounds_to_even_bit_for_bit() -> None:
    """All f32 near ties of f16 and bf16, and NaN payloads, on every target."""
    rng = np.random.default_rng(0)
    halves = rng.integers(0, 1 << 16, 4000, np.uint16)
    near = halves.view(np.float16).astype(np.float32).view(np.uint32)
    ties = np.concatenate([near + d for d in (0, 0xFFF, 0x1000, 0x1001)])
    ties = np.concatenate([ties, (halves.astype(np.uint32) << 16) + 0x8000])
    x = ties.astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        wanted = x.astype(np.float16)
    for to in TARGETS:
        down = elementwise("down", F16, (F32,), lambda v: Cast(v, F16))
        up = elementwise("up", F32, (F16,), lambda v: Cast(v, F32))
        code = compiled([down, up], to)
        got = np.zeros(x.size, np.float16)
        run(code, "down", (x.size,), [x, got])
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
        clean = ~np.isnan(wanted)
        mine, theirs = got.view(np.uint16), wanted.view(np.uint16)
        np.testing.assert_array_equal(mine[clean], theirs[clean], err_msg=to.name)
        every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
        wide = np.zeros(every.size, np.float32)
        run(code, "up", (every.size,), [every, wide])
        np.testing.assert_array_equal(wide, every.astype(np.float32), err_msg=to.name)


@pytest.mark.parametrize(
    "kind", [Kind.SERIAL, Kind.VECTOR], ids=lambda kind: kind.value
)
def test_map(kind: Kind) -> None:
    agree(
        elementwise(
            "map",
            F32,
            (F32, F32),
            lambda a, b: Fma(a, b, Binary("sub", a, Const(0.25, F32))),
            kind,
        )
    )


def test_mixed_widths() -> None:
    """bool, i8 and f64 side by side in one loop."""
    agree(
        elementwise(
            "mixed",
            F64,
            (BOOL, DType.I8, F64, BF16),
            lambda p, a, b, c: Select(
                p, Binary("mul", Cast(a, F64), b), Cast(Cast(c, F32), F64)
            ),
        )
    )


def test_no_trap_on_any_integer() -> None:
    """Division by zero gives 0, the least integer by -1 wraps."""
    func = elementwise("divide", I32, (I32, I32), lambda a, b: Binary("floordiv", a, b))
    least = -(2**31)
    for to in TARGETS:
        x = np.array([1, least, 7, -7, 7, -7] * 5, np.int32)
        y = np.array([0, -1, 2, 2, -2, -2] * 5, np.int32)
        z = np.zeros(30, np.int32)
        run(compiled([func], to), "divide", (30,), [x, y, z])
        assert z[:6].tolist() == [0, least, 3, -4, -4, 3]
