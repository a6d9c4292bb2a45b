"""The C runtime from Python: its functions, and a `Model` around them.

`rt.h` documents the ABI; names here follow it. A `RuntimeModel` does not keep the code
behind its function addresses alive, nor the weights it is created with: its owner must.
Weights set later (`set_weights`) are kept alive by the calls that use them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_uint64, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from pliant import knobs
from pliant.runtime.caller import Caller, ResultMemory, framework_of_torch, is_plain
from pliant.runtime.description import (
    BFLOAT,
    CAN_SPILL,
    NO_LIMIT,
    TENSOR,
    BudgetInfo,
    Eviction,
    EvictionStruct,
    ImageDesc,
    ModelDesc,
    ModelSpec,
    Overflow,
    PlanInfo,
    PlanInfoStruct,
    RuntimeStatus,
    Services,
    Stats,
    StatsInfo,
    Status,
    array,
    describe,
)

ABI_VERSION = 10
LIBRARY = Path(__file__).with_name("_plt.so")
GUARD_PAGES, POISON, NO_MAP = 1, 2, 4


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "plt_abi_version": (c_int64, []),
    "plt_pool_create": (c_void_p, [POINTER(Services)]),
    "plt_pool_destroy": (None, [c_void_p]),
    "plt_model_create": (c_void_p, [POINTER(ModelDesc), POINTER(Services)]),
    "plt_model_destroy": (None, [c_void_p]),
    "plt_plan": (c_int, [c_void_p, POINTER(c_int64), c_int64, POINTER(PlanInfoStruct)]),
    "plt_least": (c_int, [c_void_p, POINTER(c_int64), POINTER(c_int64)]),
    "plt_bind": (
        c_int,
        [c_void_p, POINTER(c_int64), POINTER(c_int64), POINTER(c_int64)],
    ),
    "plt_last_symbols": (c_int, [c_void_p, POINTER(c_int64)]),
    "plt_budget_create": (c_void_p, [POINTER(Services)]),
    "plt_budget_set": (None, [c_void_p, c_int64, c_int64]),
    "plt_budget_read": (None, [c_void_p, POINTER(BudgetInfo)]),
    "plt_folder_in_memory": (c_int, [c_char_p]),
    "plt_stats": (None, [c_void_p, POINTER(StatsInfo)]),
    "plt_trim": (None, [c_void_p]),
    "plt_set_limit": (c_int, [c_void_p, c_int64]),
    "plt_set_threads": (c_int, [c_void_p, c_int64]),
    "plt_use_ffi": (None, [c_void_p, POINTER(Services)]),
    "plt_image_map": (c_void_p, [POINTER(ImageDesc)]),
    "plt_image_unmap": (None, [c_void_p, c_int64]),
    "plt_checksum": (c_uint64, [c_void_p, c_int64]),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The built runtime, with its functions declared."""
    if not LIBRARY.exists():
        raise ImportError(
            f"the compiled runtime {LIBRARY.name} is missing; "
            "build it with `pip install -e .` or `python setup.py build_ext --inplace`"
        )
    library = ctypes.CDLL(str(LIBRARY))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.plt_abi_version() != ABI_VERSION:
        raise ImportError(
            f"{LIBRARY.name} was built from other sources; build it again"
        )
    return library


def _address(function: Any) -> int:
    return cast(int, ctypes.cast(function, c_void_p).value)


def symbols() -> dict[str, int]:
    """Addresses of what generated code may call."""
    library = load()
    return {
        name: _address(getattr(library, name))
        for name in ("plt_parallel", "plt_clock", "plt_special")
    }


def in_memory(folder: str) -> bool:
    """Whether the files of a folder are kept in memory (tmpfs)."""
    return bool(load().plt_folder_in_memory(os.fsencode(folder)))


_TEAM = {
    "team_parallel": "GOMP_parallel",
    "team_number": "omp_get_thread_num",
    "team_size": "omp_get_num_threads",
}


def _began_by_exec(stat: Path = Path("/proc/self/stat")) -> bool:
    """Whether this process was started by exec, and is not a forked child.

    A forked child has the memory of its parent's threads, but none of the threads.
    This is read from the flags of the first thread (proc(5); the 9th field, the 7th
    after the name, which may contain blanks). Where there is no such file, they are 0.
    """
    try:
        flags = int(stat.read_text().rpartition(")")[2].split()[6])
    except (OSError, ValueError, IndexError):
        return False
    return flags != 0 and not flags & _FORKED


_FORKED = 0x40  # PF_FORKNOEXEC


def _torch_team() -> ctypes.CDLL | None:
    """The OpenMP library that torch runs on, if its threads can be used here.

    They cannot be used in a forked child: if its parent had a team, the library would
    wait for threads that do not exist. Such a process gets workers of its own.
    """
    torch = sys.modules.get("torch")
    if torch is None or not _began_by_exec():
        return None
    for path in sorted(Path(str(torch.__file__)).parent.glob("lib/libgomp*.so*")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        if all(hasattr(library, name) for name in _TEAM.values()):
            return library
    return None


class _Process:
    """What all models of this process share: threads, and the budget."""

    def __init__(self) -> None:
        self.services = Services()
        team = _torch_team() if knobs.SHARE_THREADS.get() else None
        if team is not None:
            for name, function in _TEAM.items():
                setattr(self.services, name, _address(getattr(team, function)))
        self.services.pool = load().plt_pool_create(byref(self.services))
        if not self.services.pool:
            raise MemoryError("no memory for the thread pool")
        self.services.poll = _address(load().plt_python_poll)
        self.services.idle_ns = int(knobs.IDLE_SECONDS.get() * 1e9)
        self.services.budget = load().plt_budget_create(byref(self.services))
        if not self.services.budget:
            raise MemoryError("no memory for the budget")


@functools.cache
def process() -> _Process:
    """One per process, never freed: the pool's workers end with the process."""
    return _Process()


class _Ffi:
    """What the runtime needs of tvm-ffi: addresses and function objects.

    It is imported when a call first has tensors of a framework that C code does not
    read: importing it takes long, and imports torch.
    """

    ADDRESSES: ClassVar = {
        "ffi_env_allocator": "TVMFFIEnvGetDLPackManagedTensorAllocator",
        "ffi_env_alloc": "TVMFFIEnvTensorAlloc",
        "ffi_from_dlpack": "TVMFFITensorFromDLPackVersioned",
        "ffi_function_call": "TVMFFIFunctionCall",
        "ffi_object_decref": "TVMFFIObjectDecRef",
        "ffi_take_error": "TVMFFIErrorMoveFromRaised",
    }

    def __init__(self) -> None:
        import tvm_ffi

        library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
        self.services = Services(
            **{k: _address(getattr(library, v)) for k, v in self.ADDRESSES.items()}
        )
        self.array = tvm_ffi.get_global_func("ffi.Array")
        self.shape = tvm_ffi.get_global_func("ffi.Shape")
        self.item = tvm_ffi.get_global_func("ffi.ArrayGetItem")
        self.services.ffi_make_array = self.array.__chandle__()
        self.services.ffi_make_shape = self.shape.__chandle__()
        self.call = tvm_ffi.Function.__from_extern_c__(_address(load().plt_ffi_call))
        self.call.release_gil = True
        self.failures = tvm_ffi.Shape, int  # types of what tells of a failure
        self.tensor = tvm_ffi.Tensor


@functools.cache
def _ffi() -> _Ffi:
    return _Ffi()


def set_budget(limit: int, wait_ns: int) -> None:
    """For all calls of this process; `plt_budget_set` says what the numbers mean."""
    load().plt_budget_set(process().services.budget, limit, wait_ns)


def read_budget() -> BudgetInfo:
    info = BudgetInfo()
    load().plt_budget_read(process().services.budget, byref(info))
    return info


class RuntimeModel(Caller):
    """A compiled model: three functions by address, and a description of its memory.

    Called with tensors and ints, it returns None, a tensor, or a tuple of tensors:
    NumPy arrays if an argument is one, else tensors of the arguments' framework.

    With `next` it is a part of a model, and what is called is the first part. `bound`
    plans the most memory that a part takes (`rt.h`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        run_addr: int,
        sizes_addr: int,
        bind_addr: int,
        weights: Sequence[int] = (),
        next: RuntimeModel | None = None,
        bound: RuntimeModel | None = None,
    ) -> None:
        self._pointer = self._handle = 0
        self.next, self.bound = next, bound
        self._weights: tuple[Any, ...] | None = None
        self._watch: Any = None
        self._renewing: Callable[[], None] | None = None
        self.spec = spec
        self._library = load()
        self._tvm_ffi: _Ffi | None = None
        results = len(self.last.spec.outputs)
        self._several = range(results) if results > 1 else None
        functions = run_addr, sizes_addr, bind_addr
        parts = (0 if part is None else part._live() for part in (next, bound))
        description = describe(spec, functions, weights, *parts)
        services = Services.from_buffer_copy(process().services)
        services.flags = GUARD_PAGES * spec.guard_pages | POISON * spec.poison
        pointer = self._library.plt_model_create(byref(description), byref(services))
        if not pointer:
            raise RuntimeStatus(Status.MODEL, (0, 0, 0))
        self._pointer = self._handle = pointer
        self._framework = framework_of_torch()
        self._serve(pointer, self._framework)

    @property
    def last(self) -> RuntimeModel:
        """The last part, whose outputs are the results."""
        return self if self.next is None else self.next.last

    # ---- weights

    def set_weights(self, blocks: Sequence[np.ndarray[Any, Any]]) -> None:
        """Sets the weights of later calls; calls that have begun keep theirs."""
        addresses = [block.ctypes.data for block in blocks]
        table = bytes(array(c_void_p, addresses))
        self._weights = (table, *blocks)
        self._hold(self._weights)

    def follow(self, watch: Any, renew: Callable[[], None] | None) -> None:
        """Checks `watch` at every call; on a change, `renew` sets new weights.

        Nothing is checked if `watch` is None.
        """
        self._watch, self._renewing = watch, renew
        self._follow(watch)

    def _renew(self) -> None:
        renew = self._renewing
        if renew is not None:
            renew()

    # ---- calls

    def _call_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments that `Caller` cannot read: NumPy, other frameworks, wrong kinds."""
        if kwargs:
            raise TypeError(f"a Model takes no keywords: {', '.join(kwargs)}")
        if not any(isinstance(argument, np.ndarray) for argument in args):
            if not self._framework and self._pointer:
                self._framework = framework_of_torch()
                if self._framework:
                    self._serve(self._pointer, self._framework)
                    return self(*args)
            if args:
                return self._run(args)
        plain = all(type(a) is int or isinstance(a, np.ndarray) for a in args)
        if plain and self._has_array_results:
            return self._run_plain(args)
        result = self._run([_exportable(a) for a in args])
        if self._several is not None:
            return tuple([_to_numpy(r) for r in result])
        return _to_numpy(result)

    @functools.cached_property
    def _has_array_results(self) -> bool:
        """Whether NumPy has the element types of all results."""
        return all(o.code != BFLOAT for o in self.last.spec.outputs)

    def _run_plain(self, args: tuple[Any, ...]) -> Any:
        """Runs on arrays and ints alone."""
        made = self._run_arrays(ResultMemory, args)
        if isinstance(made, tuple):
            status, detail = made
            raise RuntimeStatus(Status(status), detail)
        arrays = tuple([np.asarray(memory) for memory in made])
        return arrays if self._several is not None else arrays[0] if arrays else None

    def _call_failed(
        self, args: tuple[Any, ...], status: int, detail: tuple[int, ...]
    ) -> Any:
        raise RuntimeStatus(Status(status), detail)

    def _run(self, args: Sequence[Any]) -> Any:
        """Runs through tvm-ffi, on tensors of any framework that it knows."""
        for number, argument in enumerate(args):
            if not is_plain(argument):
                raise RuntimeStatus(Status.KIND, (number, TENSOR, -1))
        ffi = self._with_ffi()
        if self._watch is not None and self._watch.changed():
            self._renew()
        held = self._weights  # until the call has ended
        table = 0 if held is None else _address_of(held[0])
        try:
            result = ffi.call(self._pointer, table, *args)
        except Exception as error:  # the runtime raises none: an argument is no tensor
            raise self._not_exported(args) from error
        if type(result) in ffi.failures:
            raise self._failure(result)
        if self._several is None:
            return result
        item = ffi.item  # a third of the cost of iterating over the Array
        return tuple([item(result, i) for i in self._several])

    def _with_ffi(self) -> _Ffi:
        if self._tvm_ffi is None:
            ffi = _ffi()
            if self._pointer:
                self._library.plt_use_ffi(self._pointer, byref(ffi.services))
            self._tvm_ffi = ffi
        return self._tvm_ffi

    def _not_exported(self, args: Sequence[Any]) -> RuntimeStatus:
        """The argument whose framework refuses to export it: KIND, as if unknown."""
        for number, argument in enumerate(args):
            try:
                _ffi().call(0, 0, argument)  # no model: only converts
            except Exception:
                return RuntimeStatus(Status.KIND, (number, TENSOR, -1))
        return RuntimeStatus(Status.KIND, (-1, TENSOR, -1))

    @staticmethod
    def _failure(result: Any) -> RuntimeStatus:
        if isinstance(result, int):  # too broken for a Shape
            return RuntimeStatus(Status(result >> 32), (result & 0xFFFFFFFF, 0, 0))
        status, *detail = (int(x) for x in result)
        return RuntimeStatus(Status(status), detail)

    def _live(self) -> int:
        if not self._pointer:
            raise RuntimeStatus(Status.CLOSED, (0, 0, 0))
        return self._pointer

    def plan(self, symbols: Sequence[int], limit: int | None = None) -> PlanInfo:
        """Plans without running; raises LIMIT if the peak is above the limit."""
        if len(symbols) != self.spec.n_symbols:
            raise ValueError(f"expected {self.spec.n_symbols} symbols: {symbols}")
        n = len(self.spec.buffers)
        offsets, sizes = (c_int64 * n)(), (c_int64 * n)()
        table = (c_int64 * self.spec.n_table)()
        rows = (c_int64 * len(self.spec.knobs))()
        most = sum(len(step.touches) for step in self.spec.steps)
        evictions = (EvictionStruct * most)()
        info = PlanInfoStruct(evictions=evictions, max_evictions=most)
        rooms = {"offsets": offsets, "sizes": sizes, "table": table, "knobs": rows}
        for name, room in rooms.items():
            setattr(info, name, ctypes.cast(room, POINTER(c_int64)))
        status = self._library.plt_plan(
            self._live(),
            array(c_int64, symbols),
            NO_LIMIT if limit is None else limit,
            byref(info),
        )
        if status != Status.OK:
            raise RuntimeStatus(Status(status), tuple(info.detail))
        return PlanInfo(
            arena_bytes=info.arena_bytes,
            output_bytes=info.output_bytes,
            peak_bytes=info.peak_bytes,
            lower_bound=info.lower_bound,
            order=info.order,
            recomputed_steps=info.recomputed_steps,
            spilled_bytes=info.spilled_bytes,
            extra_nanoseconds=info.extra_nanoseconds,
            nanoseconds=info.nanoseconds,
            knobs=tuple(rows),
            evictions=tuple(
                Eviction(e.buffer, e.action == CAN_SPILL, e.after, e.before)
                for e in evictions[: info.n_evictions]
            ),
            offsets=tuple(offsets),
            sizes=tuple(sizes),
            table=tuple(table),
        )

    def least(self, symbols: Sequence[int]) -> int:
        """The smallest peak that any plan for these symbols reaches."""
        least = c_int64()
        status = self._library.plt_least(
            self._live(), array(c_int64, symbols), byref(least)
        )
        if status != Status.OK:
            raise RuntimeStatus(Status(status), (-1, 0, 0))
        return least.value

    def bind(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Symbols for these input sizes (flattened in order).

        Raises GUARD if a guard fails, and OVERFLOW if computing one overflows 64 bits.
        """
        solved = (c_int64 * (self.spec.n_symbols + 1))()
        guard = c_int64()
        status = self._library.plt_bind(
            self._live(), array(c_int64, dims), solved, byref(guard)
        )
        if status != Status.OK:
            detail = (guard.value, Overflow.GUARD, 0)
            raise RuntimeStatus(Status(status), detail)
        return tuple(solved)[: self.spec.n_symbols]

    def last_symbols(self) -> tuple[int, ...]:
        """The symbols of the last call; none if there was none, or another runs."""
        symbols = (c_int64 * (self.spec.n_symbols + 1))()
        status = self._library.plt_last_symbols(self._live(), symbols)
        return tuple(symbols)[: self.spec.n_symbols] if status == Status.OK else ()

    def stats(self) -> Stats:
        info = StatsInfo()
        self._library.plt_stats(self._live(), byref(info))
        own = Stats(*(getattr(info, name) for name in Stats.__dataclass_fields__))
        if self.next is None:
            return own
        rest = self.next.stats()
        return replace(
            own,
            plans_made=own.plans_made + rest.plans_made,
            plan_hits=own.plan_hits + rest.plan_hits,
            plans_cached=own.plans_cached + rest.plans_cached,
        )

    def trim(self) -> None:
        """Frees idle arenas and cached plans."""
        self._library.plt_trim(self._live())
        for part in (self.next, self.bound):
            if part is not None:
                part.trim()

    def set_limit(self, limit: int | None) -> None:
        self._library.plt_set_limit(
            self._live(), NO_LIMIT if limit is None else max(limit, 0)
        )

    def set_threads(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._library.plt_set_threads(self._live(), threads)
        for part in (self.next, self.bound):
            if part is not None:
                part.set_threads(threads)

    def close(self) -> None:
        """Refuses further calls and frees the memory.

        The handle itself lives as long as this object: a call in another thread may
        still be running on it.
        """
        if self._pointer:
            self.trim()
            self._pointer = 0
            self._serve(0, 0)

    def __del__(self) -> None:
        handle, self._handle, self._pointer = getattr(self, "_handle", 0), 0, 0
        if handle:
            self._library.plt_model_destroy(handle)


def _address_of(table: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(table), c_void_p).value or 0


def _exportable(argument: Any) -> Any:
    """A read-only array as a writable one, because NumPy refuses to export the former.

    The runtime never writes a NumPy input, so no copy is needed.
    """
    if isinstance(argument, np.ndarray) and not argument.flags.writeable:
        return np.asarray(_Writable(argument))
    return argument


class _Writable:
    """An array's memory. A NumPy array made from this keeps the first one alive."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        described = array.__array_interface__
        self.__array_interface__ = {**described, "data": (described["data"][0], False)}


def _to_numpy(result: Any) -> Any:
    return np.from_dlpack(result) if isinstance(result, _ffi().tensor) else result
