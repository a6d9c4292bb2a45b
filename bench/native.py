"""Kernels called by address in a native loop, so that no Python is timed.

    repeat(function, argument, count)   function(argument), `count` times
    sgemm(argument)                     a Fortran sgemm, its arguments in an array

Ours is the compiled host flow on memory that was planned and allocated before. A peer
is the sgemm that its library exports, which its Python call ends in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch

import pliant
from pliant.backend.jit import CompiledCode, compile_ir
from pliant.compare.timing import Timed
from pliant.machine.target import host
from pliant.runtime import binding

Array = np.ndarray[Any, Any]

SGEMM_ARGUMENTS = 13
LINE = 64  # bytes; the runtime's alignment of an arena

SOURCE = """
define void @repeat(ptr %function, ptr %argument, i64 %count) {{
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %done
body:
  call void %function(ptr %argument)
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}}

define void @sgemm(ptr %argument) {{
  %function = load ptr, ptr %argument
{loads}
  call void %function({values})
  ret void
}}
"""


@cache
def code() -> CompiledCode:
    numbers = range(1, SGEMM_ARGUMENTS + 1)
    loads = "\n".join(
        f"  %at{k} = getelementptr ptr, ptr %argument, i64 {k}\n"
        f"  %value{k} = load ptr, ptr %at{k}"
        for k in numbers
    )
    values = ", ".join(f"ptr %value{k}" for k in numbers)
    return compile_ir(SOURCE.format(loads=loads, values=values), host())


def repeated(function: int, argument: int, keep: Sequence[object]) -> Timed:
    """`function(argument)` in a native loop; `keep` keeps their memory alive."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    repeat = kind(code().address("repeat"))

    def run(count: int, _keep: Sequence[object] = keep) -> float:
        started = perf_counter()
        repeat(function, argument, count)
        return perf_counter() - started

    return run


# ---- ours


class NativeCall(ctypes.Structure):
    """plt_call of rt.h."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("pool", "arena", "table", "offsets")),
        *((name, ctypes.c_void_p) for name in ("inputs", "outputs", "weights")),
        *((name, ctypes.c_int64) for name in ("threads", "status")),
        ("program", ctypes.c_void_p),
    ]


def host_flow(
    model: pliant.CompiledModel, inputs: Sequence[Array], output: Array, threads: int
) -> Timed:
    """The kernels of one call of a model with one result, as the runtime starts them.

    The model must have been compiled for that many threads.
    """
    runtime = model._runtime
    dims = [d for value in inputs for d in value.shape]
    plan = runtime.plan(runtime.bind(dims))
    room = np.empty(plan.arena_bytes + LINE, np.uint8)
    weights = model._weights.arrays
    table = np.array(plan.table, np.int64)
    offsets = np.array(plan.offsets, np.int64)
    steps = np.array([*range(len(model.program.code.host.calls)), -1], np.int64)
    pointers = [
        np.array([value.ctypes.data for value in group], np.uint64)
        for group in (inputs, [output], weights)
    ]
    pool = binding.process().services.pool if threads > 1 else 0
    call = NativeCall(
        pool,
        -(-room.ctypes.data // LINE) * LINE,
        *(x.ctypes.data for x in (table, offsets, *pointers)),
        threads,
        0,
        steps.ctypes.data,
    )
    keep = (model, inputs, output, room, weights, table, offsets, pointers, steps, call)
    run = model.program.code.machine.address("pliant_run")
    return repeated(run, ctypes.addressof(call), keep)


# ---- peers


@dataclass(frozen=True, slots=True)
class Blas:
    """A library's sgemm, the width of its integers, and how to set its threads."""

    name: str
    sgemm: int
    integer: type[np.signedinteger[Any]]
    set_threads: Callable[[int], object]


@cache
def blas_libraries() -> tuple[Blas, ...]:
    """torch's MKL and NumPy's OpenBLAS, as far as the wheels export them."""
    found: list[Blas] = []
    torch_path = Path(str(torch.__file__)).parent / "lib" / "libtorch_cpu.so"
    numpy_paths = sorted(
        Path(np.__file__).parents[1].glob("numpy.libs/libscipy_openblas64_*.so")
    )
    if torch_path.exists():
        library = ctypes.CDLL(str(torch_path))
        if hasattr(library, "sgemm_"):
            address = _address(library.sgemm_)
            found.append(Blas("MKL", address, np.int32, torch.set_num_threads))
    for path in numpy_paths[:1]:
        library = ctypes.CDLL(str(path))
        address = _address(library.scipy_sgemm_64_)
        limit = library.scipy_openblas_set_num_threads64_
        found.append(Blas("OpenBLAS", address, np.int64, limit))
    return tuple(found)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def set_peer_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    for library in blas_libraries():
        library.set_threads(threads)


def blas_product(blas: Blas, a: Array, b: Array, c: Array, turned: bool) -> Timed:
    """C (M, N) = A (M, K) B, where B is stored as (K, N), or as (N, K) if `turned`.

    Fortran is column-major: its first operand is our B, and the result is C transposed.
    """
    (m, k), n = a.shape, c.shape[1]
    integers = np.array([n, m, k, max(k if turned else n, 1), max(k, 1), max(n, 1)])
    sizes = integers.astype(blas.integer)
    step = sizes.itemsize
    at_n, at_m, at_k, ldb, lda, ldc = (sizes.ctypes.data + i * step for i in range(6))
    letters = np.frombuffer(b"T\0N\0" if turned else b"N\0N\0", np.uint8).copy()
    numbers = np.array([1.0, 0.0], np.float32)
    one, zero = numbers.ctypes.data, numbers.ctypes.data + 4
    turn, plain = letters.ctypes.data, letters.ctypes.data + 2
    operands = (b.ctypes.data, ldb, a.ctypes.data, lda, zero, c.ctypes.data, ldc)
    arguments = np.array(
        [blas.sgemm, turn, plain, at_n, at_m, at_k, one, *operands], np.uint64
    )
    keep = (a, b, c, sizes, letters, numbers, arguments)
    return repeated(code().address("sgemm"), arguments.ctypes.data, keep)
