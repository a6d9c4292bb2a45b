"""Loop functions compiled, and compared with the interpreter on every target.

Each runs for the machine, AVX-512, AVX2 and SSE2 on sizes around the vector width.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.ir as ll
import numpy as np
from machines import MACHINE, runs

from pliant import runtime
from pliant.backend.jit import CompiledCode, compile_ir
from pliant.codegen.llvm import emit_loop_functions
from pliant.ir.graph import Module
from pliant.ir.interp_loops import CheckFailure, run_loop
from pliant.ir.interp_memory import storage
from pliant.ir.loops import (
    Buffer,
    For,
    Kind,
    Load,
    LoopFunc,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.lower.vectorize import vectorized
from pliant.machine import target
from pliant.machine.target import Target
from pliant.sym import Expr, as_expr, sym

F32, F64, I64, I32 = DType.F32, DType.F64, DType.I64, DType.I32
BOOL, BF16, F16 = DType.BOOL, DType.BF16, DType.F16
CLASSES = (target.avx512(), target.avx2(), target.baseline())
TARGETS = [MACHINE, *(t for t in CLASSES if runs(t) and t != MACHINE)]
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
        ("program", ctypes.c_void_p),
        ("value", ctypes.c_int64),
    ]


def compiled(funcs: list[LoopFunc], to: Target) -> CompiledCode:
    module = ll.Module("test")
    emit_loop_functions(module, vectorized(funcs, to), to)
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
