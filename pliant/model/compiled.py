"""A compiled model: running it, planning its memory, describing it.

Planning is in planning.py, the errors of refused calls in refusals.py, and reports as
text in report/.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pliant.errors import GradientWarning, OptionError, PliantError
from pliant.frontend.signature import Signature, SizeSlot, TensorSlot
from pliant.frontend.torch_meaning import check_meaning, plain_tensor
from pliant.ir.graph import Constant
from pliant.model.arguments import is_integer, parse_bytes
from pliant.model.buffers import BoundBuffers, Buffers, commit, writable
from pliant.model.parts import WeightBlocks, make_parts
from pliant.model.planning import Limit, MemoryPlan, Planner, limit_now
from pliant.model.refusals import Refusals, check_written, sizes_of, unreadable
from pliant.model.weights import WeightPlace, Weights
from pliant.passes.fuse import kernel_count
from pliant.program import Program
from pliant.report.explain import explain, formula
from pliant.report.profile import KernelTime, kernel_times
from pliant.report.timeline import Timeline
from pliant.runtime.caller import Caller
from pliant.runtime.description import RuntimeStatus, Status

_PACKAGE = str(Path(__file__).parent.parent)
# What flattening, copying or a better message may help with.
_MENDABLE = (Status.KIND, Status.LAYOUT, Status.COUNT)


class CompiledModel(Caller):
    """Native code for every shape. Safe to call from several threads.

    Called, it runs the model: torch in gives torch out, NumPy in gives NumPy out.
    `program` is what the compiler made of it, for tools and tests to look at.
    """

    def __init__(
        self,
        program: Program,
        weights: Sequence[Constant],
        signature: Signature,
        threads: int,
        memory_limit: int | None,
        seconds: Mapping[str, float],
        given: Mapping[str, Constant] | None = None,
        owner: object = None,
        buffers: Buffers | None = None,
        apart: frozenset[WeightPlace] = frozenset(),
    ) -> None:
        """`owner` holds the tensors of the constants `given`, if they are followed.

        Calls change the `buffers`, and the tensors at the places `apart`.
        """
        self._buffers = buffers
        self.program = program
        self._signature = signature
        self._seconds = dict(seconds)
        apart |= frozenset() if buffers is None else buffers.places
        self._weights = Weights(weights, given or {}, owner, apart)
        blocks = WeightBlocks.of(program)
        self._parts = make_parts(
            program, signature, threads, memory_limit, blocks, self._weights.arrays
        )
        self._runtime = self._parts[0].runtime
        self._weights.serve(self._runtime, blocks.all)
        self._threads, self._limit = threads, memory_limit
        self._refusals = Refusals(self._parts, signature, threads)
        self._planner = Planner(signature, threads, self._refusals)
        self._warned = False
        self._direct = signature.is_direct
        if self._direct:
            self._delegate(self._runtime, signature.rebuild_direct())

    # ---- running

    def _call_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that needs flattening or rebuilding, or has no torch tensors."""
        buffers = self._buffers
        if buffers is None:
            return self._run_flat(args, kwargs)
        with buffers.lock:
            bound = buffers.bound = buffers.bind(self._signature)
            try:
                result = self._run_flat(args, kwargs, bound)
                if self._signature.direct_but_held:
                    rebuild = self._signature.rebuild_direct()
                    buffers.attach(self, self._runtime, rebuild, bound)
                return result
            except BaseException as error:
                # An interrupt may come when the run has ended; nothing is lost if not.
                if not isinstance(error, PliantError) or getattr(error, "began", False):
                    bound.commit()
                raise
            finally:
                buffers.bound = None

    def _run_flat(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound: BoundBuffers | None = None,
    ) -> Any:
        direct = self._direct and not kwargs
        flat = args if direct else self._signature.flatten(args, kwargs)
        given = self._signature.drawn(flat)
        if self._signature.written:
            check_written(self._signature, flat)
            given = list(given)
            for slot in self._signature.written:
                given[slot] = writable(given[slot])
        if bound is not None:
            bound.check(self._signature, flat[: len(flat) - len(bound.given)])
        try:
            result = self._runtime(*given)
        except RuntimeStatus as status:
            if status.status not in _MENDABLE:
                raise self._refusals.of_call(status, given) from None
            if direct:  # a default may be missing, or the count be wrong
                flat = self._signature.flatten(args, kwargs)
                given = self._signature.drawn(flat)
            result = self._run_mended(given)
        for slot in self._signature.written:
            commit(flat[slot], given[slot])
        if bound is not None:
            bound.commit()
        return self._signature.rebuild((flat, result), self.symbols_of)

    def _call_failed(
        self, args: tuple[Any, ...], status: int, detail: tuple[int, ...]
    ) -> Any:
        """Handles a direct call with wrong arguments, or that failed while it ran."""
        found = Status(status)
        if found not in _MENDABLE:
            raise self._refusals.of_call(RuntimeStatus(found, detail), args)
        flat = self._signature.flatten(args, {})
        result = self._run_mended(flat)
        return self._signature.rebuild((flat, result), self.symbols_of)

    def _run_mended(self, flat: Sequence[Any]) -> Any:
        """Checks the arguments, copies what the runtime cannot read, and runs."""
        self._signature.check(flat)
        values: list[Any] = []
        for slot, value in zip(self._signature.slots, flat, strict=True):
            try:
                values.append(self._plain(slot, value))
            except PliantError:
                raise
            except Exception:  # a tensor class without memory of its own
                raise unreadable(slot, value) from None
        try:
            return self._runtime(*values)
        except RuntimeStatus as status:
            raise self._refusals.of_call(status, values) from None

    def _plain(self, slot: TensorSlot | SizeSlot, value: Any) -> Any:
        """The argument as a tensor or array that its bytes describe completely."""
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            whole = all(stride % array.itemsize == 0 for stride in array.strides)
            return array if whole else array.copy()  # DLPack: strides in elements
        if not hasattr(value, "is_contiguous"):
            return value
        needs_gradient = check_meaning(slot, value)
        if needs_gradient and not self._warned:
            self._warned = True
            warnings.warn(
                f"input '{slot.name}' requires a gradient, and a compiled model gives "
                "none: its results are constants to autograd. Call it under "
                "torch.no_grad() if that is meant; to train, use "
                "pliant.compile_training or torch.compile(backend='pliant')",
                GradientWarning,
                stacklevel=_levels(),
            )
        return plain_tensor(value)

    def symbols_of(self, flat: Sequence[Any]) -> dict[str, int]:
        """The value of every symbol for these inputs."""
        return self._bind(sizes_of(flat))

    def _bind(self, sizes: list[int]) -> dict[str, int]:
        return self._refusals.bound(sizes)

    # ---- weights

    def refresh(self) -> None:
        """Takes the module's weights as they are now.

        A call does so by itself when torch has counted a change of them. This is for
        changes that torch does not count: through `.data`, NumPy or the storage.
        """
        held = self._buffers is not None and self._buffers.is_following
        if not self._weights.is_following and not held:
            raise PliantError(
                "this model follows no module: it was compiled from none, the module "
                "is gone, or freeze() was called"
            )
        self._weights.refresh(always=True)

    def freeze(self) -> None:
        """Keeps the weights as they are now, and stops following the module."""
        self._weights.refresh()
        self._weights.stop()
        if self._buffers is not None:
            with self._buffers.lock:
                self._buffers.freeze()

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._weights.arrays)

    # ---- time

    def profile(self, /, *args: Any, **kwargs: Any) -> list[KernelTime]:
        """Runs once and returns the time of each kernel call, in order.

        For a model compiled with `Instruments(profile=True)`. Calls from other threads
        meanwhile write their times to the same place.
        """
        if self._parts[0].stamps is None:
            raise OptionError(
                "this model keeps no times: compile it with "
                "instruments=pliant.Instruments(profile=True)"
            )
        for part in self._parts:
            assert part.stamps is not None
            part.stamps.fill(0)
        self(*args, **kwargs)
        flat = self._signature.flatten(args, kwargs)
        dims = {**self.symbols_of(flat), "threads": self._threads}
        times: list[KernelTime] = []
        for part in self._parts:
            assert part.stamps is not None
            dims |= zip(part.symbols, part.runtime.last_symbols(), strict=False)
            times += kernel_times(part.program, part.stamps.tolist(), dims)
        return times

    # ---- memory

    def memory_plan(
        self, /, *inputs: Any, memory_limit: int | str | None = None, **dims: Any
    ) -> MemoryPlan:
        """The peak of a call, from inputs or from dims.

        Of inputs only shapes and strides are read. Sizes that the data decide may be
        given by name too; without them, it is a bound that holds for all
        (`is_bound`). The limit is the model's and the process's (`set_memory_budget`),
        unless one is given.
        """
        limit, planner = self._limit_of(memory_limit), self._planner
        if inputs or any(_is_shaped(value) for value in dims.values()):
            return planner.of_inputs(inputs, dims, limit, self.weight_bytes)
        values = planner.named("memory_plan", dims)
        return planner.of_dims(values, limit, self.weight_bytes)

    def memory_timeline(
        self, *, memory_limit: int | str | None = None, **dims: Any
    ) -> Timeline:
        """The memory that a call at these dims would hold at every step."""
        values = self._planner.named("memory_timeline", dims, complete=True)
        return self._planner.timeline(values, self._limit_of(memory_limit))

    def _limit_of(self, given: int | str | None) -> Limit:
        return limit_now(self._limit) if given is None else Limit(parse_bytes(given))

    @property
    def peak_formula(self) -> str:
        """The peak with every knob off, as a function of the dims."""
        return formula(self.program, self._threads)

    @property
    def memory_limit(self) -> int | None:
        """Cap on all that one call allocates, in bytes; may change between calls."""
        return self._limit

    @memory_limit.setter
    def memory_limit(self, limit: int | str | None) -> None:
        self._set_limit(parse_bytes(limit))

    def _set_limit(self, limit: int | None) -> None:
        self._limit = limit
        self._runtime.set_limit(limit)

    def trim(self) -> None:
        """Returns the arena to the system."""
        self._runtime.trim()

    # ---- what it is

    @property
    def dims(self) -> tuple[str, ...]:
        """The free symbols, in order of first appearance.

        Those that the data decide are behind those that the inputs decide.
        """
        return self._refusals.all_dims

    @property
    def compile_count(self) -> int:
        """How many times code was generated: once."""
        return 1

    def stats(self) -> dict[str, Any]:
        run, parts = self._runtime.stats(), list(self.program.parts())
        return {
            "compiles": self.compile_count,
            "calls": run.calls,
            "failures": run.failures,
            "plans": run.plans_made,
            "plan_hits": run.plan_hits,
            "plans_cached": run.plans_cached,
            "arena_bytes": run.arena_bytes,
            "last_peak_bytes": run.last_peak_bytes,
            "last_planned_bytes": run.last_planned_bytes,
            "last_copied_bytes": run.last_copied_bytes,
            "last_arena_bytes": run.last_arena_bytes,
            "last_sizes": self._last_sizes(),
            "recomputed_calls": run.last_recomputed_steps,
            "spilled_bytes": run.last_spilled_bytes,
            "weight_bytes": self.weight_bytes,
            "kernels": sum(len(p.lowered.loops) for p in parts),
            "kernel_calls": sum(kernel_count(p.fused.main) for p in parts),
            "kernels_built": sum(p.code.kernels_built for p in parts),
            "kernels_cached": sum(p.code.kernels_cached for p in parts),
            "threads": self._threads,
            "compile_seconds": sum(self._seconds.values()),
            "stage_seconds": dict(self._seconds),
        }

    def _last_sizes(self) -> dict[str, int]:
        """What the data of the last call decided; nothing if there was none."""
        part = self._parts[-1]
        if not part.found:
            return {}
        values = part.runtime.last_symbols()
        names = {size.name for size in part.found}
        pairs = zip(part.symbols, values, strict=False)
        return {name: value for name, value in pairs if name in names}

    def explain(self, /, **dims: int) -> str:
        """Symbols, constraints with their origin, kernels, guards, order, memory.

        With dims, also how each matrix product is cut at those sizes.
        """
        known = self._planner.named("explain", dims) if dims else None
        return explain(self.program, self._threads, known)


def _is_shaped(value: object) -> bool:
    return hasattr(value, "shape") and not is_integer(value)


def _levels() -> int:
    """How many frames of this package are on the stack, with the caller's own."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
