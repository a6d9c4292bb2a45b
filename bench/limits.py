"""What the machine can do: multiply-adds a second, and bytes read a second.

Both are loops of machine code made for the purpose: independent FMAs in registers, and
loads that are only summed, over more memory than the caches hold.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from time import perf_counter

import numpy as np

from pliant.backend.jit import CompiledCode, compile_ir
from pliant.target import host

CHAINS = 12  # more than latency times ports, and they fit 16 registers
FMA_STEPS = 20_000_000
READ_BYTES = 1 << 30
TRIES = 7

FMA = """
declare {vector} @llvm.fma.{suffix}({vector}, {vector}, {vector})

define void @multiply_add(ptr %place, i64 %count) {{
entry:
  %x = load {vector}, ptr %place, align 4
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
{phis}
{steps}
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %loop, label %done
done:
{stores}
  ret void
}}
"""

READ = """
define void @read(ptr %place, i64 %count) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
{phis}
  %first = mul i64 %i, {chains}
{steps}
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %loop, label %done
done:
{stores}
  ret void
}}
"""


@cache
def code() -> CompiledCode:
    lanes = host().lanes
    vector, suffix = f"<{lanes} x float>", f"v{lanes}f32"
    numbers = range(CHAINS)

    def lines(text: str) -> str:
        return "\n".join(text.format(k=k, v=vector, s=suffix) for k in numbers)

    shared = {
        "vector": vector,
        "suffix": suffix,
        "chains": CHAINS,
        "phis": lines(
            "  %a{k} = phi {v} [ zeroinitializer, %entry ], [ %b{k}, %loop ]"
        ),
        "stores": lines(
            "  %p{k} = getelementptr {v}, ptr %place, i64 {k}\n"
            "  store {v} %b{k}, ptr %p{k}, align 4"
        ),
    }
    multiply = lines("  %b{k} = call {v} @llvm.fma.{s}({v} %x, {v} %a{k}, {v} %x)")
    load = lines(
        "  %i{k} = add i64 %first, {k}\n"
        "  %q{k} = getelementptr {v}, ptr %place, i64 %i{k}\n"
        "  %l{k} = load {v}, ptr %q{k}, align 4\n"
        "  %b{k} = fadd {v} %a{k}, %l{k}"
    )
    text = FMA.format(**shared, steps=multiply) + READ.format(**shared, steps=load)
    return compile_ir(text, host())


def fma_peak(threads: int) -> float:
    """Floating-point operations a second, two for each multiply-add."""
    run = _function("multiply_add")
    place = [np.zeros(CHAINS * host().lanes, np.float32) for _ in range(threads)]
    work = 2 * CHAINS * host().lanes * FMA_STEPS * threads
    return work / _fastest(lambda k: run(place[k].ctypes.data, FMA_STEPS), threads)


def read_bandwidth(threads: int) -> float:
    """Bytes a second that all threads together read, each from its own part."""
    run = _function("read")
    step = CHAINS * host().vector_bytes
    steps = READ_BYTES // threads // step
    place = [np.ones(steps * step // 4, np.float32) for _ in range(threads)]
    read = steps * step * threads
    return read / _fastest(lambda k: run(place[k].ctypes.data, steps), threads)


def _function(name: str) -> Callable[[int, int], None]:
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    function: Callable[[int, int], None] = kind(code().address(name))
    return function


def _fastest(work: Callable[[int], None], threads: int) -> float:
    """Least seconds in which every thread did its work."""
    best = float("inf")
    for _ in range(TRIES):
        team = [threading.Thread(target=work, args=(k,)) for k in range(1, threads)]
        started = perf_counter()
        for member in team:
            member.start()
        work(0)
        for member in team:
            member.join()
        best = min(best, perf_counter() - started)
    return best
