"""How fast this machine is at multiply-adds and at reading memory, by generated code.

Two loop functions, generated for the target as any kernel is:

    peak    independent chains of multiply-adds in registers, enough to keep every port
            busy while each chain waits for its previous result
    read    adds up an array into as many accumulators, over and over

Reading is measured with an array in each cache and one beyond them. This takes about a
second, runs only on request, and is cached on disk (cache.py) for each target.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from threading import Barrier
from time import perf_counter
from typing import Any

import llvmlite.ir as ll
import numpy as np

from pliant import cache
from pliant.backend.jit import CompiledCode, compile_ir
from pliant.codegen.llvm import emit_loop_functions
from pliant.errors import OptionError
from pliant.ir.loops import (
    Alloc,
    Binary,
    Block,
    Buffer,
    Const,
    Fma,
    For,
    Kind,
    Load,
    Local,
    LoopFunc,
    LoopValue,
    Read,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.lower.vectorize import vectorized
from pliant.machine.target import Target, runs_here
from pliant.sym import Expr, as_expr, sym

VERSION = "1"  # of the measurements and their format
CHAINS = 12  # ports * latency is 8 on most cores; more also hide the loop overhead
# Many short rounds: on a busy machine, some run without interruption.
ROUNDS = 12
ROUND_SECONDS = 0.002
LARGEST_ARRAY = 256 << 20  # larger ones take too long to fill
LEVELS = ("L1", "L2", "L3", "memory")

F32 = DType.F32
ZERO = as_expr(0)


@dataclass(frozen=True, slots=True)
class Level:
    """Reading an array of one size, per core."""

    name: str
    bytes: int
    gbs_1: float
    gbs_all: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Limits of this machine; `read` is from memory, or the outermost level."""

    cores: int
    fma_gflops_1: float
    fma_gflops_all: float
    read_gbs_1: float
    read_gbs_all: float
    levels: tuple[Level, ...]
    beyond_l3: bool  # whether "memory" was larger than L3

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Measured:
        levels = tuple(Level(**level) for level in data["levels"])
        return Measured(**{**data, "levels": levels})


def measured(target: Target, refresh: bool = False) -> Measured:
    """The limits of this machine for a target; measured if not known yet."""
    if not refresh and (found := known(target)) is not None:
        return found
    if not runs_here(target):
        raise OptionError(f"this machine cannot run code for '{target.name}'")
    result = _measure(target)
    key = _key(target)
    _memo[key] = result
    if (disk := cache.disk()) is not None:
        disk.put(key, json.dumps(result.to_json()).encode(), "measurement")
    return result


def known(target: Target) -> Measured | None:
    """Earlier measurements, if any."""
    key = _key(target)
    if key not in _memo and (disk := cache.disk()) is not None:
        data = disk.get(key)
        if data is not None:
            _memo[key] = Measured.from_json(json.loads(data))
    return _memo.get(key)


_memo: dict[str, Measured] = {}


def _key(target: Target) -> str:
    return cache.hashed("measured", VERSION, json.dumps(target.to_json()))


# ---- the loops


def _chains(to: Buffer, lanes: int, value: Callable[[Expr, Expr], LoopValue]) -> Stmt:
    """to[i, j] = value(i, j) for every chain i and lane j."""
    i, j = sym("_i"), sym("_j")
    store = Store(to, (i, j), value(i, j))
    over_lanes = For("_j", ZERO, as_expr(lanes), store, Kind.VECTOR)
    return For("_i", ZERO, as_expr(CHAINS), over_lanes, Kind.UNROLL)


def peak_function(lanes: int) -> LoopFunc:
    """out = `count` times acc * x + y, in CHAINS vectors of `lanes`."""
    given = buffer("given", F32, (2,), Role.IN)
    out = buffer("out", F32, (CHAINS, lanes), Role.OUT)
    acc = buffer("acc", F32, (CHAINS, lanes), Role.REGISTER)
    x, y = Read("x", F32), Read("y", F32)
    body = Block(
        (
            Alloc(acc),
            Local("x", F32, Load(given, (ZERO,))),
            Local("y", F32, Load(given, (as_expr(1),))),
            _chains(acc, lanes, lambda i, j: Const(0.0, F32)),
            For(
                "_n",
                ZERO,
                sym("count"),
                _chains(acc, lanes, lambda i, j: Fma(Load(acc, (i, j)), x, y)),
            ),
            _chains(out, lanes, lambda i, j: Load(acc, (i, j))),
        )
    )
    return LoopFunc("peak", ("count",), (given, out), body)


def read_function(lanes: int) -> LoopFunc:
    """out = the sum, `count` times over, of `blocks` blocks of CHAINS vectors."""
    data = buffer("data", F32, (sym("blocks"), CHAINS, lanes), Role.IN)
    out = buffer("out", F32, (CHAINS, lanes), Role.OUT)
    acc = buffer("acc", F32, (CHAINS, lanes), Role.REGISTER)
    block = sym("_block")

    def add(i: Expr, j: Expr) -> LoopValue:
        return Binary("add", Load(acc, (i, j)), Load(data, (block, i, j)))

    blocks = For("_block", ZERO, sym("blocks"), _chains(acc, lanes, add))
    body = Block(
        (
            Alloc(acc),
            _chains(acc, lanes, lambda i, j: Const(0.0, F32)),
            For("_n", ZERO, sym("count"), blocks),
            _chains(out, lanes, lambda i, j: Load(acc, (i, j))),
        )
    )
    return LoopFunc("read", ("count", "blocks"), (data, out), body)


@lru_cache(maxsize=4)
def code(target: Target) -> CompiledCode:
    module = ll.Module("measure")
    lanes = target.lanes
    probes = [peak_function(lanes), read_function(lanes)]
    emit_loop_functions(module, vectorized(probes, target), target)
    return compile_ir(module, target)


# ---- timing

TimedWork = Callable[[int, int], None]  # (thread, count): runs `count` units of work


def _rate(work: TimedWork, threads: int) -> float:
    """Units of work per second and thread, in the best of a few rounds."""
    count, spent = 1, _seconds(work, 1, 1)
    while spent < ROUND_SECONDS / 4:
        count *= max(2, min(64, int(ROUND_SECONDS / 2 / max(spent, 1e-7))))
        spent = _seconds(work, 1, count)
    return count / min(_seconds(work, threads, count) for _ in range(ROUNDS))


def _seconds(work: TimedWork, threads: int, count: int) -> float:
    """The time from the first start to the last end."""
    barrier = Barrier(threads)

    def run(number: int) -> tuple[float, float]:
        barrier.wait()
        started = perf_counter()
        work(number, count)
        return started, perf_counter()

    if threads == 1:
        spans = [run(0)]
    else:
        with ThreadPoolExecutor(threads) as pool:
            spans = list(pool.map(run, range(threads)))
    return max(end for _, end in spans) - min(start for start, _ in spans)


def _function(made: CompiledCode, name: str, sizes: int) -> Any:
    """A loop function of two buffers; ctypes releases the GIL during calls."""
    kinds = [ctypes.c_void_p, *[ctypes.c_int64] * sizes, *[ctypes.c_void_p] * 2]
    return ctypes.CFUNCTYPE(None, *kinds)(made.address(name))


def _measure(target: Target) -> Measured:
    one, every = 1, target.cores
    flops = 2.0 * CHAINS * target.lanes * 1024
    work = _peak_work(target)
    peaks = [_rate(work, threads) * threads * flops / 1e9 for threads in (one, every)]
    sizes, beyond = array_bytes(target)
    array = _array(sizes[-1] * every)
    levels: list[Level] = []
    for name, size in zip(LEVELS, sizes, strict=True):
        gbs = []
        for threads in (one, every):
            passes, held = _read_work(target, array, size)
            gbs.append(_rate(passes, threads) * held * threads / 1e9)
        levels.append(Level(name, size, round(gbs[0], 2), round(max(gbs), 2)))
    return Measured(
        cores=every,
        fma_gflops_1=round(peaks[0], 2),
        # Other processes may occupy the other cores.
        fma_gflops_all=round(max(peaks), 2),
        read_gbs_1=levels[-1].gbs_1,
        read_gbs_all=levels[-1].gbs_all,
        levels=tuple(levels),
        beyond_l3=beyond,
    )


def array_bytes(target: Target) -> tuple[tuple[int, ...], bool]:
    """Bytes each core reads, by level, and whether the last is beyond L3.

    Half of a cache leaves room for other data; L3 is shared. If an array larger than L3
    would take more than a second, the last size is the largest affordable one.
    """
    cores, (l1, l2, l3) = target.cores, (c.bytes for c in target.caches)
    third = max(min(l3 // (2 * cores), 8 * l2), 2 * l2)
    affordable = min(LARGEST_ARRAY, _free_bytes() // 4)
    last = max(min(4 * l3, affordable) // cores, third)
    return (l1 // 2, l2 // 2, third, last), last * cores > l3


def _free_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return LARGEST_ARRAY


def _array(size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Ones, aligned to a cache line."""
    raw = np.ones(size // 4 + 64, np.float32)
    skip = -raw.ctypes.data % 64 // 4
    return raw[skip:]


def _peak_work(target: Target) -> TimedWork:
    """A unit is 1024 steps of all chains."""
    function = _function(code(target), "peak", 1)
    given = np.array([0.5, 1.0], np.float32)
    outs = np.zeros((target.cores, CHAINS, target.lanes), np.float32)

    def work(thread: int, count: int) -> None:
        function(None, 1024 * count, given.ctypes.data, outs[thread].ctypes.data)

    return work


def _read_work(
    target: Target, array: np.ndarray[Any, np.dtype[np.float32]], size: int
) -> tuple[TimedWork, int]:
    """One unit is a pass over a thread's part of the array; also returns its bytes."""
    function = _function(code(target), "read", 2)
    block = CHAINS * target.lanes * 4
    blocks = max(size // block, 1)
    outs = np.zeros((target.cores, CHAINS, target.lanes), np.float32)

    def work(thread: int, count: int) -> None:
        begin = array.ctypes.data + thread * blocks * block
        function(None, count, blocks, begin, outs[thread].ctypes.data)

    return work, blocks * block
