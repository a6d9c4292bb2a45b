"""Every statement and value of the loop IR, compiled and run against the interpreter.

Each case runs for the host, AVX2 and SSE2 on sizes around the vector width.
"""

from __future__ import annotations

import ctypes
import re
from time import perf_counter
from typing import Any

import llvmlite.ir as ll
import numpy as np
import pytest

from pliant import runtime, target
from pliant.backend.jit import CompiledCode, compile_ir
from pliant.codegen.llvm import emit_loop_functions
from pliant.ir.graph import Module
from pliant.ir.interp_loops import CheckFailure, run_loop
from pliant.ir.interp_memory import storage
from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
    Block,
    Buffer,
    Call,
    Cast,
    Check,
    Const,
    Fma,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    Local,
    LoopFunc,
    LoopValue,
    Read,
    Role,
    Select,
    Stmt,
    Store,
    Switch,
    Unary,
    buffer,
)
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, ceildiv, maximum, minimum, sym
from pliant.target import Target

F32, F64, I64, I32 = DType.F32, DType.F64, DType.I64, DType.I32
BOOL, BF16, F16 = DType.BOOL, DType.BF16, DType.F16
TARGETS = [
    t
    for t in (target.host(), target.avx512(), target.avx2(), target.baseline())
    if target.runs_here(t)
]
SIZES = (0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 37, 200)
n, m, i, j, k = (sym(name) for name in "nmijk")
ZERO = as_expr(0)


class PltCall(ctypes.Structure):
    """struct plt_call of rt.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pool", "arena", "table", "offsets")),
        *((name, ctypes.c_void_p) for name in ("inputs", "outputs", "weights")),
        ("threads", ctypes.c_int64),
        ("status", ctypes.c_int64),
    ]


def compiled(funcs: list[LoopFunc], to: Target) -> CompiledCode:
    module = ll.Module("test")
    emit_loop_functions(module, funcs, to)
    return compile_ir(module, to, runtime.symbols())


def run(
    code: CompiledCode, name: str, sizes: tuple[int, ...], arrays: Any, threads: int = 1
) -> int:
    call = PltCall(threads=threads)
    kinds = [ctypes.c_void_p, *[ctypes.c_int64] * len(sizes)]
    kinds += [ctypes.c_void_p] * len(arrays)
    function = ctypes.CFUNCTYPE(None, *kinds)(code.address(name))
    function(ctypes.addressof(call), *sizes, *(a.ctypes.data for a in arrays))
    return int(call.status)


def filled(buf: Buffer, sizes: dict[str, int], rng: np.random.Generator) -> Any:
    """Random contents, with a guard of known bytes behind them."""
    shape = [dim.evaluate(sizes) for dim in buf.shape]
    strides = [step.evaluate(sizes) for step in buf.strides]
    count = 0
    if all(shape):
        count = 1 + sum((d - 1) * s for d, s in zip(shape, strides, strict=True))
    kind = storage(buf.dtype)
    values: Any
    if buf.dtype is BF16:
        values = rng.standard_normal(count).astype(np.float32).view(np.uint32) >> 16
    elif buf.dtype.is_float:
        values = rng.standard_normal(count)
    elif buf.dtype is BOOL:
        values = rng.integers(0, 2, count)
    else:
        values = rng.integers(0, 100, count)
    return np.concatenate([values.astype(kind), np.full(8, 77).astype(kind)])


def agree(
    *funcs: LoopFunc,
    sizes: Any = SIZES,
    tolerance: float = 2e-6,
    threads: int = 1,
    inputs: Any = None,
    targets: list[Target] = TARGETS,
) -> None:
    """The last function gives what the interpreter gives, on every target and size.

    `sizes`: the value of each size symbol, or one value for all of them.
    """
    func = funcs[-1]
    module = Module({}, {one.name: one for one in funcs})
    codes = [(to, compiled(list(funcs), to)) for to in targets]
    for size in sizes:
        values = size if isinstance(size, tuple) else (size,) * len(func.sizes)
        named = dict(zip(func.sizes, values, strict=True))
        rng = np.random.default_rng(len(func.name) + sum(values))
        arrays = [filled(buf, named, rng) for buf in func.buffers]
        for number, data in (inputs or {}).items():
            made = data(named, rng)
            arrays[number][: made.size] = made.ravel()
        wanted = [array.copy() for array in arrays]
        status = 0
        try:
            run_loop(func, module, values, wanted, workers=threads)
        except CheckFailure as failure:
            status = failure.number
        for to, code in codes:
            got = [array.copy() for array in arrays]
            assert run(code, func.name, values, got, threads) == status
            for buf, mine, theirs in zip(func.buffers, got, wanted, strict=True):
                if buf.role is Role.WORK:
                    continue
                note = f"{to.name} {named} {buf.name}"
                same(mine, theirs, buf.dtype, tolerance, note)


def same(mine: Any, theirs: Any, dtype: DType, tolerance: float, note: str) -> None:
    if dtype is BF16:
        mine, theirs = (
            (bits.astype(np.uint32) << 16).view(np.float32) for bits in (mine, theirs)
        )
    if dtype.is_float:
        rtol = {F64: 1e-12, F16: 1e-3, BF16: 8e-3}.get(dtype, tolerance)
        np.testing.assert_allclose(mine, theirs, rtol, tolerance, err_msg=note)
    else:
        np.testing.assert_array_equal(mine, theirs, err_msg=note)


def vector(
    var: str, end: Expr | int, body: Stmt, begin: Expr | int = 0, **more: Any
) -> For:
    return For(var, as_expr(begin), as_expr(end), body, Kind.VECTOR, **more)


def serial(
    var: str, end: Expr | int, body: Stmt, begin: Expr | int = 0, **more: Any
) -> For:
    return For(var, as_expr(begin), as_expr(end), body, **more)


def unroll(var: str, end: int, body: Stmt) -> For:
    return For(var, ZERO, as_expr(end), body, Kind.UNROLL)


def parallel(var: str, end: Expr, body: Stmt, grain: int = 1) -> For:
    return For(var, ZERO, end, body, Kind.PARALLEL, grain=as_expr(grain))


def elementwise(
    name: str, out: DType, ins: tuple[DType, ...], make: Any, kind: Kind = Kind.VECTOR
) -> LoopFunc:
    """out[i] = make(in0[i], in1[i], ..)"""
    inputs = tuple(
        buffer(f"x{number}", dtype, (n,), Role.IN) for number, dtype in enumerate(ins)
    )
    y = buffer("y", out, (n,), Role.OUT)
    value = make(*(Load(x, (i,)) for x in inputs))
    loop = For("i", ZERO, n, Store(y, (i,), value), kind)
    return LoopFunc(name, ("n",), (*inputs, y), loop)


# ---- elementwise ops and casts

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


# ---- reductions


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("dtype", [F32, F64, I32, I64, DType.U8], ids=str)
def test_reduce_rows(op: str, dtype: DType) -> None:
    x = buffer("x", dtype, (m, n), Role.IN)
    y = buffer("y", dtype, (m,), Role.OUT)
    body = Block(
        (
            Accumulator("a", dtype, op),
            vector("j", n, Accumulate("a", Load(x, (i, j)))),
            Store(y, (i,), Read("a", dtype)),
        )
    )
    func = LoopFunc(f"rows_{op}", ("m", "n"), (x, y), serial("i", m, body))
    shapes = [(3, size) for size in SIZES] + [(2, 517)]
    agree(func, sizes=shapes, tolerance=2e-5)


def test_max_keeps_nan() -> None:
    x, y = buffer("x", F32, (n,), Role.IN), buffer("y", F32, (1,), Role.OUT)
    body = Block(
        (
            Accumulator("a", F32, "max"),
            vector("i", n, Accumulate("a", Load(x, (i,)))),
            Store(y, (ZERO,), Read("a", F32)),
        )
    )
    func = LoopFunc("nan_max", ("n",), (x, y), body)
    for to in TARGETS:
        code = compiled([func], to)
        for at in (0, 5, 63, 64, 65, 70):
            data = np.arange(71, dtype=np.float32)
            data[at] = np.nan
            out = np.zeros(1, np.float32)
            run(code, "nan_max", (71,), [data, out])
            assert np.isnan(out[0]), (to.name, at)


def test_reduce_columns() -> None:
    """Lanes over the kept axis, serial over the reduced one."""
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (n,), Role.OUT)
    body = Block(
        (
            Accumulator("a", F32, "sum"),
            serial("i", m, Accumulate("a", Load(x, (i, j)))),
            Local("mean", F32, Binary("mul", Read("a", F32), Const(0.5, F32))),
            Store(y, (j,), Read("mean", F32)),
        )
    )
    func = LoopFunc("columns", ("m", "n"), (x, y), vector("j", n, body))
    agree(func, sizes=[(m_, n_) for n_ in SIZES for m_ in (0, 5)], tolerance=1e-5)


def test_accumulate_over_blocks() -> None:
    """One accumulator over a vector loop inside a serial one, and masked by an If."""
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (2,), Role.OUT)
    value = Load(x, (i, j))
    body = Block(
        (
            Accumulator("a", F32, "sum"),
            Accumulator("p", F32, "sum"),
            serial(
                "i",
                m,
                vector(
                    "j",
                    n,
                    Block(
                        (
                            Accumulate("a", value),
                            If(
                                Binary("gt", value, Const(0.0, F32)),
                                Accumulate("p", value),
                            ),
                        )
                    ),
                ),
            ),
            Store(y, (ZERO,), Read("a", F32)),
            Store(y, (as_expr(1),), Read("p", F32)),
        )
    )
    func = LoopFunc("blocks", ("m", "n"), (x, y), body)
    agree(func, sizes=[(3, size) for size in SIZES], tolerance=2e-5)


def test_reduce_constant_extent() -> None:
    """Trip counts known at compile time, whole and broken vectors."""
    for extent in (1, 2, 3, 5, 16, 24, 31, 64, 150):
        x, y = buffer("x", F32, (extent,), Role.IN), buffer("y", F32, (1,), Role.OUT)
        body = Block(
            (
                Accumulator("a", F32, "max"),
                vector("i", extent, Accumulate("a", Load(x, (i,)))),
                Store(y, (ZERO,), Read("a", F32)),
            )
        )
        agree(LoopFunc(f"constant_{extent}", (), (x, y), body), sizes=[()])


def softmax() -> LoopFunc:
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (m, n), Role.OUT)
    shifted = Unary("exp", Binary("sub", Load(x, (i, j)), Read("top", F32)))
    body = Block(
        (
            Accumulator("top", F32, "max"),
            vector("j", n, Accumulate("top", Load(x, (i, j)))),
            Accumulator("total", F32, "sum"),
            vector(
                "j",
                n,
                Block(
                    (
                        Local("e", F32, shifted),
                        Store(y, (i, j), Read("e", F32)),
                        Accumulate("total", Read("e", F32)),
                    )
                ),
            ),
            Local("scale", F32, Binary("div", Const(1.0, F32), Read("total", F32))),
            vector(
                "j",
                n,
                Store(y, (i, j), Binary("mul", Load(y, (i, j)), Read("scale", F32))),
            ),
        )
    )
    return LoopFunc("softmax", ("m", "n"), (x, y), parallel("i", m, body))


@pytest.mark.parametrize("threads", [1, 3])
def test_softmax_in_parallel(threads: int) -> None:
    shapes = [(7, size) for size in SIZES] + [(0, 5)]
    agree(softmax(), sizes=shapes, threads=threads, tolerance=1e-6)


# ---- addresses

INDICES = {
    "strided": (i * 3, 0),
    "row_of_other": (i * m, 0),
    "reversed": (n - 1 - i, 0),
    "divided": (i // 3, 0),
    "divided_by_size": (i // maximum(m, 1), 0),
    "rest": (i % 5, 0),
    "rest_of_size": (i % (m + 1), 0),
    "power_of_two": (i // 4 + i % 8, 0),
    "clamped": (minimum(i, m), 0),
    "below": (maximum(i - 3, 0), 0),
    "ceiling": (ceildiv(i, 3), 0),
    "negative": ((i - 20) // 3 + 7, 0),
    "negative_rest": ((i - 20) % 7, 0),
    "square": (i * i, 0),
    "uniform": (m, 0),
    "mixed": (i // 2 * m + i % 2, 0),
}


@pytest.mark.parametrize("name", list(INDICES))
@pytest.mark.parametrize("dtype", [F32, DType.I8], ids=str)
def test_addresses(name: str, dtype: DType) -> None:
    at = INDICES[name][0]
    x = buffer("x", dtype, ((n + 8) * (n + m + 30),), Role.IN)
    y = buffer("y", dtype, (n,), Role.OUT)
    z = buffer("z", I64, (n,), Role.OUT)
    body = Block((Store(y, (i,), Load(x, (at,))), Store(z, (i,), Index(at))))
    func = LoopFunc(name, ("n", "m"), (x, y, z), vector("i", n, body))
    agree(func, sizes=[(s, 6) for s in SIZES])


def test_scatter() -> None:
    x, y = buffer("x", F32, (n,), Role.IN), buffer("y", F32, (n, 3), Role.OUT)
    body = Store(y, (n - 1 - i, as_expr(1)), Load(x, (i,)))
    agree(LoopFunc("scatter", ("n",), (x, y), vector("i", n, body)))


def test_transposing_store() -> None:
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (n, m), Role.OUT)
    body = serial("i", m, vector("j", n, Store(y, (j, i), Load(x, (i, j)))))
    agree(LoopFunc("turn", ("m", "n"), (x, y), body), sizes=[(5, s) for s in SIZES])


def test_begin_and_step() -> None:
    x, y = buffer("x", F32, (n + 40,), Role.IN), buffer("y", F32, (n + 40,), Role.OUT)
    store = Store(y, (i,), Load(x, (i,)))
    for step in (1, 3):
        for kind in (Kind.SERIAL, Kind.VECTOR, Kind.PARALLEL):
            loop = For("i", m, n, store, kind, step)
            func = LoopFunc(f"step{step}_{kind.value}", ("n", "m"), (x, y), loop)
            agree(func, sizes=[(s, 5) for s in SIZES])
            fixed = For("i", as_expr(2), as_expr(19), store, kind, step)
            agree(LoopFunc("fixed", ("n",), (x, y), fixed), sizes=[9])


def test_let_gathers_with_check() -> None:
    """An embedding: row numbers from memory, clamped, out-of-range ones reported."""
    row, safe = sym("row"), sym("safe")
    ids = buffer("ids", I32, (m,), Role.IN)
    table = buffer("table", F32, (10, n), Role.IN)
    y = buffer("y", F32, (m, n), Role.OUT)
    flat = buffer("flat", F32, (m,), Role.OUT)
    clamped = minimum(maximum(row, 0), 9)
    body = Block(
        (
            serial(
                "i",
                m,
                Block(
                    (
                        Let("row", Cast(Load(ids, (i,)), I64)),
                        Let("safe", Index(clamped)),
                        vector("j", n, Store(y, (i, j), Load(table, (safe, j)))),
                    )
                ),
            ),
            vector(
                "i",
                m,
                Block(
                    (
                        Let("row", Cast(Load(ids, (i,)), I64)),
                        Check(Binary("lt", Index(row), Const(10, I64)), 41),
                        Store(flat, (i,), Load(table, (clamped, n // 2))),
                    )
                ),
            ),
        )
    )
    func = LoopFunc("embed", ("m", "n"), (ids, table, y, flat), body)
    for top in (10, 11):
        agree(
            func,
            sizes=[(s, 5) for s in SIZES if s],
            inputs={
                0: lambda sizes, rng, top=top: np.append(
                    rng.integers(0, 10, sizes["m"] - 1), top - 1
                )
            },
        )


def test_predicated_loads() -> None:
    """Padding: nothing is read outside, neither by lanes nor by all of them."""
    x = buffer("x", F32, (m, n), Role.IN)
    y = buffer("y", F32, (m + 2, n + 4), Role.OUT)
    r, c = sym("r"), sym("c")

    def inside(at: Expr, end: Expr) -> LoopValue:
        return Binary(
            "logical_and",
            Binary("ge", Index(at), Const(0, I64)),
            Binary("lt", Index(at), Index(end)),
        )

    both = Binary("logical_and", inside(r - 1, m), inside(c - 3, n))
    padded = Select(both, Load(x, (r - 1, c - 3), both), Const(9.0, F32))
    body = serial("r", m + 2, vector("c", n + 4, Store(y, (r, c), padded)))
    agree(LoopFunc("pad", ("m", "n"), (x, y), body), sizes=[(2, s) for s in SIZES])
    column = Load(x, (r - 1, ZERO), both)
    body = serial("r", m + 2, vector("c", n + 4, Store(y, (r, c), column)))
    agree(LoopFunc("column", ("m", "n"), (x, y), body), sizes=[(2, s) for s in SIZES])
    row = Load(x, (ZERO, c), inside(c, n))
    body = serial("r", m + 2, serial("c", n + 4, Store(y, (r, c), row)))
    agree(LoopFunc("row", ("m", "n"), (x, y), body), sizes=[(2, s) for s in SIZES if s])


# ---- control flow


def test_if() -> None:
    x, y = buffer("x", F32, (n,), Role.IN), buffer("y", F32, (n,), Role.INOUT)
    value = Load(x, (i,))
    by_lane = If(
        Binary("gt", value, Const(0.0, F32)),
        Store(y, (i,), Unary("sqrt", value)),
        If(Binary("lt", Index(i), Index(m)), Store(y, (i,), Load(x, (ZERO,)))),
    )
    uniform = If(
        Binary("gt", Index(m), Const(3, I64)),
        Store(y, (i,), value),
        Store(y, (i,), Const(1.0, F32)),
    )
    for name, body in (("lanes", by_lane), ("uniform", uniform)):
        for kind in (Kind.VECTOR, Kind.SERIAL):
            loop = For("i", ZERO, n, body, kind)
            func = LoopFunc(f"if_{name}", ("n", "m"), (x, y), loop)
            agree(func, sizes=[(s, 5) for s in SIZES] + [(20, 2)])


def test_switch() -> None:
    y = buffer("y", I64, (n,), Role.INOUT)
    cases = tuple((c, Store(y, (i,), Const(c * 10, I64))) for c in (0, 1, 4))
    for kind in (Kind.VECTOR, Kind.SERIAL):
        loop = For("i", ZERO, n, Switch(i % 5, cases), kind)
        agree(LoopFunc("switch", ("n",), (y,), loop))
        loop = For("i", ZERO, n, Switch(n % 5, cases), kind)
        agree(LoopFunc("switch_all", ("n",), (y,), loop))


def test_call() -> None:
    x, y = buffer("x", F32, (n,), Role.IN), buffer("y", F32, (n,), Role.OUT)
    double = LoopFunc(
        "double",
        ("n",),
        (x, y),
        vector("i", n, Store(y, (i,), Binary("add", Load(x, (i,)), Load(x, (i,))))),
    )
    a, b = buffer("a", F32, (m, n), Role.IN), buffer("b", F32, (m, n), Role.OUT)
    call = Call("double", (n - 1,), ((a, (i, as_expr(1))), (b, (i, ZERO))))
    func = LoopFunc("rows", ("m", "n"), (a, b), parallel("i", m, call))
    agree(double, func, sizes=[(4, s) for s in SIZES if s], threads=2)


def test_parallel_captures_and_workers() -> None:
    """Values made before the loop go into it; scratch is indexed by worker."""
    worker, start = sym("worker"), sym("start")
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (m, n), Role.OUT)
    work = buffer("work", F32, (4, n), Role.WORK)
    first = buffer("first", I64, (1,), Role.IN)
    body = Block(
        (
            Let("start", Binary("mod", Load(first, (ZERO,)), Const(2, I64))),
            Local("bias", F32, Const(0.5, F32)),
            Accumulator("sum", F32, "sum"),
            vector("j", n, Accumulate("sum", Load(x, (ZERO, j)))),
            For(
                "i",
                start,
                m,
                Block(
                    (
                        vector(
                            "j",
                            n,
                            Store(
                                work,
                                (worker, j),
                                Binary("add", Load(x, (i, j)), Read("bias", F32)),
                            ),
                        ),
                        vector(
                            "j",
                            n,
                            Store(
                                y,
                                (i, j),
                                Binary(
                                    "mul",
                                    Load(work, (worker, n - 1 - j)),
                                    Read("sum", F32),
                                ),
                            ),
                        ),
                    )
                ),
                Kind.PARALLEL,
                grain=as_expr(2),
            ),
            vector("j", n, Store(y, (ZERO, j), Const(3.0, F32))),
        )
    )
    func = LoopFunc("workers", ("m", "n"), (x, first, work, y), body)
    agree(func, sizes=[(9, s) for s in SIZES], threads=4, tolerance=1e-5)


def test_check_without_lanes() -> None:
    y = buffer("y", I64, (1,), Role.OUT)
    body = Block(
        (Check(Binary("lt", Index(n), Const(9, I64)), 5), Store(y, (ZERO,), Index(n)))
    )
    agree(LoopFunc("check", ("n",), (y,), body))


def test_shared_values_are_emitted_once() -> None:
    value: LoopValue = Load(buffer("x0", F32, (n,), Role.IN), (i,))
    for _ in range(60):
        value = Binary("add", value, value)
    func = elementwise("shared", F32, (F32,), lambda _: value)
    start = perf_counter()
    compiled([func], TARGETS[0])
    assert perf_counter() - start < 5


def test_vector_inside_vector_and_registers_in_a_loop() -> None:
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (m, n), Role.OUT)
    tile = buffer("tile", F32, (4,), Role.REGISTER)
    nested = vector("i", m, vector("j", n, Store(y, (i, j), Load(x, (i, j)))))
    agree(LoopFunc("nested", ("m", "n"), (x, y), nested), sizes=[(3, s) for s in SIZES])
    body = vector(
        "i",
        m,
        Block(
            (
                Alloc(tile),
                unroll("k", 4, Store(tile, (k,), Load(x, (i, k)))),
                unroll("k", 4, Store(y, (i, 3 - k), Load(tile, (k,)))),
            )
        ),
    )
    agree(LoopFunc("tile", ("m", "n"), (x, y), body), sizes=[(5, 4), (17, 6)])


# ---- the micro-kernel


def gemm(rows: int, columns: int, edges: bool = False, packed: bool = True) -> LoopFunc:
    """C = A @ B for A (rows, K), packed as (K, rows) or not, and B (K, columns)."""
    depth, width = sym("K"), sym("ldc")
    strides = (1, rows) if packed else (depth, 1)
    a = buffer("a", F32, (rows, depth), Role.IN, strides=strides)
    b = buffer("b", F32, (depth, columns), Role.IN)
    c = buffer("c", F32, (rows, columns), Role.OUT, strides=(width, 1))
    acc = buffer("acc", F32, (rows, columns), Role.REGISTER)

    def tile(body: Stmt, end: Expr | int = columns) -> Stmt:
        return unroll("i", rows, vector("j", end, body))

    product = Fma(Load(a, (i, k)), Load(b, (k, j)), Load(acc, (i, j)))
    out = tile(Store(c, (i, j), Load(acc, (i, j))), n if edges else columns)
    body = Block(
        (
            Alloc(acc),
            tile(Store(acc, (i, j), Const(0.0, F32))),
            serial("k", depth, tile(Store(acc, (i, j), product))),
            out,
        )
    )
    name = f"gemm_{rows}x{columns}"
    return LoopFunc(name, ("K", "ldc", "n"), (a, b, c), body)


MICRO = [
    (to, rows, columns)
    for to, rows, columns in (
        (
            target.host(),
            14 if target.host().lanes == 16 else 6,
            2 * target.host().lanes,
        ),
        (target.avx512(), 14, 32),
        (target.avx2(), 6, 16),
        (target.baseline(), 6, 8),
    )
    if target.runs_here(to)
]


def inner_loop(assembly: str) -> list[str]:
    """The instructions of the loop with the most multiplications."""
    best: list[str] = []
    lines = [line.strip() for line in assembly.splitlines()]
    for number, line in enumerate(lines):
        jump = re.match(r"j\w+\s+(\.LBB\w+)$", line)
        if jump and f"{jump[1]}:" in lines[:number]:
            body = lines[lines.index(f"{jump[1]}:") : number]
            if sum("mul" in x or "fmadd" in x for x in body) > sum(
                "mul" in x or "fmadd" in x for x in best
            ):
                best = body
    return best


@pytest.mark.parametrize(
    ("to", "rows", "columns"),
    MICRO,
    ids=lambda v: str(v.name if isinstance(v, Target) else v),
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
def test_micro_kernel_stays_in_registers(
    to: Target, rows: int, columns: int, packed: bool
) -> None:
    code = compiled([gemm(rows, columns, packed=packed)], to)
    loop = inner_loop(code.assembly())
    if to.fma:
        multiplies = [line for line in loop if line.startswith("vfmadd")]
        assert len(multiplies) == rows * columns // to.lanes
        moves = [line for line in loop if line.startswith("v") and "fmadd" not in line]
        assert len(moves) <= rows + columns // to.lanes
    assert not any("rsp" in line for line in loop), "\n".join(loop)


@pytest.mark.parametrize("edges", [False, True])
def test_micro_kernel_computes(edges: bool) -> None:
    for to, rows, columns in MICRO:
        code = compiled([gemm(rows, columns, edges)], to)
        rng = np.random.default_rng(1)
        for depth, cut in ((0, 1), (1, columns), (37, columns - 1), (256, 0)):
            width = columns + 3
            a = rng.standard_normal((depth, rows)).astype(np.float32)
            b = rng.standard_normal((depth, columns)).astype(np.float32)
            c = np.full((rows, width), 5, np.float32)
            run(code, f"gemm_{rows}x{columns}", (depth, width, cut), [a, b, c])
            kept = cut if edges else columns
            wanted = np.full((rows, width), 5, np.float32)
            wanted[:, :kept] = (a.T @ b)[:, :kept]
            np.testing.assert_allclose(c, wanted, 1e-4, 1e-4)


def test_same_bits_every_time() -> None:
    x = np.random.default_rng(3).standard_normal((6, 1001)).astype(np.float32)
    outs = []
    for threads in (1, 1, 3):
        y = np.zeros_like(x)
        run(compiled([softmax()], TARGETS[0]), "softmax", x.shape, [x, y], threads)
        outs.append(y)
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


# ---- dimension expressions


def random_dim(rng: np.random.Generator, depth: int) -> Expr:
    if depth == 0:
        return [i, n, m, as_expr(int(rng.integers(-3, 9)))][rng.integers(0, 4)]
    left, right = random_dim(rng, depth - 1), random_dim(rng, depth - 1)
    size = [as_expr(int(rng.choice([1, 2, 3, 5, 8, 16]))), n + 1, m + 2][
        rng.integers(0, 3)
    ]
    makers = [
        lambda: left + right,
        lambda: left - right,
        lambda: left * right,
        lambda: left // size,
        lambda: left % size,
        lambda: ceildiv(left, size),
        lambda: minimum(left, right),
        lambda: maximum(left, right),
    ]
    return makers[rng.integers(0, len(makers))]()


@pytest.mark.parametrize(
    "kind", [Kind.VECTOR, Kind.SERIAL], ids=lambda kind: kind.value
)
def test_random_dims(kind: Kind) -> None:
    rng = np.random.default_rng(17)
    dims = [random_dim(rng, int(rng.integers(1, 4))) for _ in range(60)]
    out = buffer("out", I64, (len(dims), n), Role.OUT)
    stores = tuple(
        Store(out, (as_expr(row), i), Index(dim)) for row, dim in enumerate(dims)
    )
    loop = For("i", ZERO, n, Block(stores), kind)
    func = LoopFunc("dims", ("n", "m"), (out,), loop)
    for to in TARGETS:
        code = compiled([func], to)
        for size, other in ((1, 0), (5, 3), (19, 7)):
            got = np.zeros((len(dims), size), np.int64)
            run(code, "dims", (size, other), [got])
            for row, dim in enumerate(dims):
                wanted = [
                    dim.evaluate({"n": size, "m": other, "i": at}) for at in range(size)
                ]
                assert got[row].tolist() == wanted, (to.name, str(dim))
