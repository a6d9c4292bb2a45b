"""A compiled program on buffers that lie against pages without access.

The host functions are called by address, as the runtime calls them, but every input,
result, weight and arena buffer has pages of its own between two that trap. A buffer
ends right before the second one or starts right after the first: an access beyond that
end kills the process. On its other side it has a margin that must come back untouched.
All that is not an input holds NaN before the run, so a value that was never written, or
was read from beside a buffer, shows in the result.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from enum import Enum

import numpy as np

from pliant.ir.graph import Module
from pliant.ir.interp_memory import storage
from pliant.machine.target import Target
from pliant.options import Options
from pliant.pipeline import compile_module
from pliant.program import Program

PAGE = mmap.PAGESIZE
POISON = 0xFF  # a NaN in every float type
MARGIN = 256  # bytes beside a buffer that are checked for writes
LINE = 64  # the arena's buffers start on and fill whole cache lines
SPARE_SLOT = PAGE  # room for a buffer of no bytes


class Side(Enum):
    START = "start"
    END = "end"


class Guarded:
    """Pages between two without access, for one buffer at a time."""

    def __init__(self) -> None:
        self.capacity = 0
        self.reserve(SPARE_SLOT)

    def reserve(self, count: int) -> None:
        if count <= self.capacity:
            return
        self.capacity = -(-count // PAGE) * PAGE
        try:
            pages = mmap.mmap(-1, self.capacity + 2 * PAGE)
        except OSError as error:
            raise OSError(f"no memory for a buffer of {count} bytes") from error
        first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for trap in (first, first + PAGE + self.capacity):
            if protect(trap, PAGE, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        self.base = first + PAGE
        self.room = np.frombuffer(pages, np.uint8, self.capacity, PAGE)

    def place(self, count: int, side: Side, unit: int) -> None:
        """A poisoned buffer of `count` bytes in whole `unit`s at one end."""
        self.reserve(count + unit)
        taken = -(-count // unit) * unit
        self.start = 0 if side is Side.START else self.capacity - taken
        self.count = count
        low = max(0, self.start - MARGIN)
        high = min(self.capacity, self.start + taken + MARGIN)
        self.room[low:high] = POISON
        self.beside = self.room[low : self.start], self.room[self.start + count : high]
        self.address = self.base + self.start

    def array(self, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
        held = self.room[self.start : self.start + self.count]
        return held.view(dtype).reshape(shape)

    def untouched_beside(self) -> bool:
        return all((part == POISON).all() for part in self.beside)


class Call(ctypes.Structure):
    """plt_call of rt.h, without a pool: chunks run one after the other."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("pool", "arena", "table", "offsets", "inputs", "outputs")
    ] + [
        ("weights", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("status", ctypes.c_int64),
        ("program", ctypes.c_void_p),
        ("value", ctypes.c_int64),
    ]


class GuardedProgram:
    """A module compiled for all sizes, run on guarded buffers."""

    def __init__(self, module: Module, target: Target) -> None:
        params = module.main.params
        inputs = tuple((p.name, p.type.shape) for p in params)
        numbers = {p.name: k for k, p in enumerate(params)}
        # Sizes of chunks are chosen by the planner, which does not run here.
        self.program, weights = compile_module(
            module, inputs, numbers, Options(chunk=False), target
        )
        self.run, self.sizes, self.bind = host_functions(self.program)
        host, lowered = self.program.code.host, self.program.lowered
        self.results = lowered.main.results
        self.inputs = [Guarded() for _ in params]
        self.outputs = [Guarded() for _ in self.results]
        self.arena = [Guarded() for _ in host.buffer_slots]
        self.constants = [weight.data for weight in weights]
        self.weights = [Guarded() for _ in self.constants]
        self.table = np.zeros(len(host.table.entries), np.int64)
        self.symbols = np.zeros(len(host.symbols) + 1, np.int64)
        assert not self.program.lowered.versions, "their sizes have further symbols"

    def __call__(
        self, inputs: Sequence[np.ndarray], side: Side, threads: int = 1
    ) -> list[np.ndarray]:
        """The results, in guarded memory until the next call."""
        self._solve(inputs, threads)
        for slot, value in zip(self.inputs, inputs, strict=True):
            _fill(slot, value, side)
        for slot, value in zip(self.weights, self.constants, strict=True):
            _fill(slot, value, side)
        host = self.program.code.host
        for slot, entry in zip(self.arena, host.buffer_slots, strict=True):
            slot.place(int(self.table[entry]), side, LINE)
        results = []
        for slot, value, entry in zip(
            self.outputs, self.results, host.output_slots, strict=True
        ):
            shape = self.table[entry : entry + value.type.rank]
            kind = storage(value.dtype)
            slot.place(int(shape.prod()) * kind.itemsize, side, kind.itemsize)
            results.append(slot.array(kind, shape))
        self._run(threads)
        for group in (self.inputs, self.weights, self.arena, self.outputs):
            for number, slot in enumerate(group):
                assert slot.untouched_beside(), f"written beside buffer {number}"
        for slot, value in zip(self.inputs, inputs, strict=True):
            held = slot.array(value.dtype, value.shape)
            same = np.array_equal(held, value, equal_nan=value.dtype.kind == "f")
            assert same, "an input was written"
        return results

    def _solve(self, inputs: Sequence[np.ndarray], threads: int) -> None:
        dims = np.array([d for value in inputs for d in value.shape] or [0], np.int64)
        failed = self.bind(dims.ctypes.data, self.symbols.ctypes.data)
        assert failed == 0, self.program.guards[failed - 1]
        self.symbols[-1] = threads
        self.sizes(self.symbols.ctypes.data, self.table.ctypes.data)

    def _run(self, threads: int) -> None:
        arena = self.arena[0].address if self.arena else 0
        offsets = np.array([slot.address - arena for slot in self.arena], np.int64)
        call = Call(0, arena, self.table.ctypes.data, offsets.ctypes.data)
        pointers = []
        for name in ("inputs", "outputs", "weights"):
            at = np.array([slot.address for slot in getattr(self, name)], np.uint64)
            pointers.append(at)
            setattr(call, name, at.ctypes.data)
        call.threads = threads
        steps = np.array([*range(len(self.program.code.host.calls)), -1], np.int64)
        call.program = steps.ctypes.data
        self.run(ctypes.byref(call))
        assert call.status == 0


def host_functions(program: Program) -> tuple[ctypes._CFuncPtr, ...]:
    """run(call), sizes(symbols, table), bind(dims, symbols)."""
    pointer = ctypes.c_void_p
    kinds = {
        "pliant_run": ctypes.CFUNCTYPE(None, pointer),
        "pliant_sizes": ctypes.CFUNCTYPE(None, pointer, pointer),
        "pliant_bind": ctypes.CFUNCTYPE(ctypes.c_int64, pointer, pointer),
    }
    return tuple(
        kind(program.code.machine.address(name)) for name, kind in kinds.items()
    )


def _fill(slot: Guarded, value: np.ndarray, side: Side) -> None:
    slot.place(value.nbytes, side, value.itemsize)
    slot.array(value.dtype, value.shape)[...] = value
