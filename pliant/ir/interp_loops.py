"""Executes loop functions element by element: the oracle of the lowered program.

A function is turned into Python source once, one line per value, on NumPy scalars, so
that every operation rounds and wraps as its dtype does. Every access is checked against
its buffer's shape; a register must be written before it is read. Loops of every kind
run in order; `check_races` reports two parallel iterations that meet in one element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pliant.errors import PliantError
from pliant.ir.graph import Module
from pliant.ir.interp_code import Code, compile_loop
from pliant.ir.interp_memory import Array, ByteRange, LoopFault, memory_of, storage
from pliant.ir.interp_numbers import bf16_bits, bf16_value
from pliant.ir.loops import Buffer, CallLibrary, LoopFunc, Role
from pliant.ir.ops import OPS
from pliant.ir.types import DType


class CheckFailure(PliantError):
    """A Check of a loop function failed, telling of `value` if there is one."""

    def __init__(self, function: str, number: int, value: Any = None) -> None:
        self.function, self.number = function, number
        self.value = None if value is None else int(value)
        super().__init__(f"check {number} of loop @{function} failed")


class _Run:
    """The state of one `run_loop`: what its functions share."""

    def __init__(self, module: Module | None, workers: int, check_races: bool) -> None:
        self.module, self.workers, self.check_races = module, workers, check_races
        self.iteration: int | None = None
        self.writers: dict[int, int] = {}
        self.failed: tuple[str, int, Any] | None = None

    def typed(
        self, func: str, buffer: Buffer, memory: ByteRange, shape: Any, strides: Any
    ) -> tuple[Array, int]:
        """The elements of a memory, and where the buffer starts among them."""
        kind = storage(buffer.dtype)
        where = f"buffer %{buffer.name} {tuple(shape)} of loop @{func}"
        if memory.offset % kind.itemsize:
            raise LoopFault(f"{where} starts at byte {memory.offset}: misaligned")
        if min(shape, default=1) < 0:
            raise LoopFault(f"{where} has a negative extent")
        count = memory.data.size // kind.itemsize
        start = memory.offset // kind.itemsize
        steps = [(d - 1) * s for d, s in zip(shape, strides, strict=True)]
        low = start + sum(min(step, 0) for step in steps)
        high = start + sum(max(step, 0) for step in steps)
        if min(shape, default=1) > 0 and not 0 <= low <= high < count:
            raise LoopFault(
                f"{where} spans elements {low} to {high} of a memory of {count}"
            )
        return memory.data[: count * kind.itemsize].view(kind), start

    def outside(self, func: str, what: str, index: Any, shape: Any) -> None:
        at = ", ".join(map(str, index))
        raise LoopFault(f"{what}[{at}] is outside {tuple(shape)} in loop @{func}")

    def undefined(self, func: str, what: str, index: Any) -> None:
        at = ", ".join(map(str, index))
        raise LoopFault(f"{what}[{at}] is read before it is written in loop @{func}")

    def unplanned(self, func: str, var: str, span: range) -> None:
        raise LoopFault(f"{len(span)} iterations of {var} are not what @{func} plans")

    def fail(self, func: str, number: int, value: Any) -> None:
        self.failed = self.failed or (func, number, value)

    def begin(self, func: str) -> None:
        if self.iteration is not None:
            raise LoopFault(f"a parallel loop of @{func} runs inside another")
        self.writers.clear()

    def touch(self, func: str, what: str, address: int, writes: bool) -> None:
        if self.iteration is None:
            return
        first = self.writers.get(address, self.iteration)
        if first != self.iteration:
            verb = "write" if writes else "use"
            raise LoopFault(
                f"parallel iterations {first} and {self.iteration} of loop @{func} "
                f"both {verb} one element of {what}"
            )
        if writes:
            self.writers[address] = first

    def call(self, name: str, sizes: Any, memories: Any) -> None:
        if self.module is None or name not in self.module.loops:
            raise LoopFault(f"call of @{name}, which the module does not have")
        self.run(self.module.loops[name], sizes, memories)

    def library(
        self, call: CallLibrary, memories: Any, shapes: Any, settings: Any
    ) -> None:
        """What a library function does: what its op means."""
        meaning = OPS[call.op].meaning
        if meaning is None:
            raise LoopFault(f"{call.symbol} computes {call.op}, which has no meaning")
        given, results = [], []
        for buffer, memory, shape in zip(call.buffers, memories, shapes, strict=True):
            kind = storage(buffer.dtype)
            count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            data = memory.data[memory.offset : memory.offset + count]
            elements = data.view(kind).reshape(shape)
            if buffer.role is Role.IN:
                given.append(_operand(elements, buffer.dtype))
            elif buffer.role is Role.OUT:
                results.append((buffer.dtype, elements))
        found = meaning(*given, **settings)
        arrays = found if isinstance(found, tuple) else (found,)
        for (dtype, target), array in zip(results, arrays, strict=True):
            if dtype is DType.BF16:
                array = bf16_bits(np.asarray(array, np.float32))
            target[...] = np.asarray(array).astype(storage(dtype), copy=False)

    def run(self, func: LoopFunc, sizes: Any, memories: Any) -> None:
        if (len(sizes), len(memories)) != (len(func.sizes), len(func.buffers)):
            raise LoopFault(
                f"loop @{func.name} takes {len(func.sizes)} sizes and "
                f"{len(func.buffers)} buffers, not {len(sizes)} and {len(memories)}"
            )
        _compiled(func, self.check_races)(self, sizes, memories)


def _operand(elements: Array, dtype: DType) -> Array:
    """A tensor as the meanings of ops take it."""
    match dtype:
        case DType.BF16:
            return np.asarray(bf16_value(elements))
        case DType.F16:
            return elements.astype(np.float32)
        case _:
            return elements.copy()


def run_loop(
    func: LoopFunc,
    module: Module | None,
    sizes: Mapping[str, int] | Sequence[int],
    buffers: Sequence[Array | ByteRange],
    *,
    workers: int = 1,
    check_races: bool = False,
) -> None:
    """Runs a loop function on the given memory; results are in its "out" buffers.

    `workers` is how many share a parallel loop, in contiguous parts.
    """
    if isinstance(sizes, Mapping):
        sizes = [sizes[name] for name in func.sizes]
    memories = [b if isinstance(b, ByteRange) else memory_of(b) for b in buffers]
    run = _Run(module, workers, check_races)
    with np.errstate(all="ignore"):
        run.run(func, [int(size) for size in sizes], memories)
    if run.failed is not None:
        raise CheckFailure(*run.failed)


_CACHE: dict[tuple[int, bool], tuple[LoopFunc, Code]] = {}
_CACHE_SIZE = 512


def _compiled(func: LoopFunc, check_races: bool) -> Code:
    # By identity: a deep comparison would cost more than it saves. The function is
    # held, so its id is not given away while the entry lives.
    key = (id(func), check_races)
    if key not in _CACHE:
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        _CACHE[key] = (func, compile_loop(func, check_races))
    return _CACHE[key][1]
