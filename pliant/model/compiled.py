"""A compiled model: call it, ask it for its memory, ask it what it is."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral
from typing import Any, TypeGuard

import numpy as np

from pliant.errors import (
    DTypeError,
    GradientWarning,
    InternalError,
    MemoryLimitError,
    OptionError,
    PliantError,
    ShapeError,
    SpillError,
)
from pliant.frontend.signature import (
    LARGEST,
    Signature,
    SizeSlot,
    TensorSlot,
    not_a_tensor,
)
from pliant.ir.graph import Constant
from pliant.ir.guard_errors import guard_error, observed
from pliant.model.meaning import check_meaning, plain_tensor
from pliant.model.runtime_spec import runtime_spec
from pliant.model.weights import Weights
from pliant.passes.fuse import kernel_count
from pliant.pipeline import Program
from pliant.report.explain import explain, formula
from pliant.report.profile import KernelTime, kernel_times
from pliant.report.timeline import Timeline, timeline
from pliant.runtime.binding import Model, read_budget
from pliant.runtime.caller import Caller
from pliant.runtime.description import (
    TENSOR,
    Overflow,
    PlanInfo,
    RuntimeStatus,
    Status,
)
from pliant.sym import Expr, Guard, sym

# What flattening, copying or a better message may help with.
_MENDABLE = (Status.KIND, Status.LAYOUT, Status.COUNT)
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9}


_LIMIT = re.compile(
    r"\s*([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})\s*([A-Za-z]*)\s*", re.ASCII
)


def parse_bytes(limit: int | str | None) -> int | None:
    """512, "512MiB", "1.5 GiB", "200MB" in bytes; None stays None.

    More than 64 bits can say is cut to the most they can, which no call reaches.
    """
    if limit is None:
        return None
    if is_integer(limit):
        if limit < 0:
            raise OptionError(f"a memory limit cannot be negative: {shown(limit)}")
        return min(int(limit), LARGEST)
    match = _LIMIT.fullmatch(limit) if isinstance(limit, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise OptionError(
            f"not a memory limit: {limit!r}; use bytes or a text such as '512MiB'"
        )
    return min(int(Fraction(match[1]) * _UNITS[match[2].upper()]), LARGEST)


def is_integer(value: object) -> TypeGuard[int]:
    """An int of Python or NumPy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value for a message; Python refuses to print very long numbers."""
    if is_integer(value) and int(value).bit_length() > 256:
        return f"a number of {int(value).bit_length()} bits"
    return repr(value)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one call, told without running it."""

    peak_bytes: int  # all that the call allocates at its highest moment; copies too
    arena_bytes: int
    output_bytes: int
    weight_bytes: int
    lower_bound: int  # what no placement of these buffers could beat
    dims: Mapping[str, int]
    knobs: Mapping[str, object] = field(default_factory=dict)
    copy_bytes: int = 0  # of inputs that are not row-major: copied for the call


@dataclass(frozen=True, slots=True)
class Rematerialised:
    """A value that gives its memory back between two steps."""

    value: str
    loc: str  # where the model computes it
    action: str  # "recompute" or "spill"
    bytes: int
    steps: tuple[int, int]  # that use it before and after


class CompiledModel(Caller):
    """Native code for every shape. Safe to call from several threads.

    Called, it runs the model: torch in gives torch out, NumPy in gives NumPy out.
    """

    def __init__(
        self,
        program: Program,
        signature: Signature,
        threads: int,
        memory_limit: int | None,
        seconds: Mapping[str, float],
        given: Mapping[str, Constant] | None = None,
        owner: object = None,
    ) -> None:
        """`owner` is whose tensors the constants `given` are, if they are followed."""
        self._program, self._signature = program, signature
        self._seconds = dict(seconds)
        self._weights = Weights(program.weights, given or {}, owner)
        program.weights = ()  # they may change: held here alone
        self._stamps = None
        stamps: list[np.ndarray[Any, Any]] = []
        if program.host.stamps:
            self._stamps = np.zeros(program.host.stamps, np.int64)
            stamps.append(self._stamps)
        blocks = [*self._weights.arrays, *stamps]
        self._runtime = Model(
            runtime_spec(program, signature, threads, memory_limit),
            program.code.address("pliant_run"),
            program.code.address("pliant_sizes"),
            program.code.address("pliant_bind"),
            [block.ctypes.data for block in blocks],
        )
        self._weights.serve(self._runtime, stamps)
        self._threads, self._limit = threads, memory_limit
        self._warned = False
        self._direct = signature.is_direct
        if self._direct:
            self._delegate(self._runtime)

    # ---- running

    def _call_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that needs flattening or rebuilding, or has no torch tensors."""
        direct = self._direct and not kwargs
        flat = args if direct else self._signature.flatten(args, kwargs)
        try:
            result = self._runtime(*flat)
        except RuntimeStatus as status:
            if status.status not in _MENDABLE:
                raise self._error(status, flat) from None
            if direct:  # a default may be missing, or the count be wrong
                flat = self._signature.flatten(args, kwargs)
            result = self._run_mended(flat)
        if direct:
            return result
        return self._signature.rebuild((flat, result), self.symbols_of)

    def _call_failed(
        self, args: tuple[Any, ...], status: int, detail: tuple[int, int, int]
    ) -> Any:
        """A direct call whose arguments are at fault, or that failed as it ran."""
        found = Status(status)
        if found not in _MENDABLE:
            raise self._error(RuntimeStatus(found, detail), args)
        return self._run_mended(self._signature.flatten(args, {}))

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
                raise _unreadable(slot, value) from None
        try:
            return self._runtime(*values)
        except RuntimeStatus as status:
            raise self._error(status, values) from None

    def _plain(self, slot: TensorSlot | SizeSlot, value: Any) -> Any:
        """What the runtime takes: its bytes are its values, wherever they lie."""
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
                stacklevel=4,  # the caller's line
            )
        return plain_tensor(value)

    def symbols_of(self, flat: Sequence[Any]) -> dict[str, int]:
        """The value of every symbol for these inputs."""
        return self._bind(self._sizes(flat))

    def _sizes(self, flat: Sequence[Any]) -> list[int]:
        sizes: list[int] = []
        for value in flat:
            sizes.extend([value] if isinstance(value, int) else value.shape)
        return [int(s) for s in sizes]

    def _bind(self, sizes: list[int]) -> dict[str, int]:
        try:
            values = self._runtime.bind(sizes)
        except RuntimeStatus as status:
            env = self._observed(sizes)
            if status.status is Status.OVERFLOW:
                raise self._overflow_error(status.detail, env) from None
            guard = self._program.guards[status.detail[0]]
            raise self._guard_error(guard, env) from None
        return dict(zip(self.dims, values, strict=True))

    # ---- weights

    def refresh(self) -> None:
        """Takes the module's weights as they are now.

        A call does so by itself when torch has counted a change of them. This is for
        changes that torch does not count: through `.data`, NumPy or the storage.
        """
        if not self._weights.is_following:
            raise PliantError(
                "this model follows no module: it was compiled from none, the module "
                "is gone, or freeze() was called"
            )
        self._weights.refresh(always=True)

    def freeze(self) -> None:
        """Keeps the weights as they are now, and lets go of the module's."""
        self._weights.refresh()
        self._weights.stop()

    # ---- time

    def profile(self, /, *args: Any, **kwargs: Any) -> list[KernelTime]:
        """Runs once and tells the time of each kernel call, in order.

        For a model compiled with `Options(profile=True)`. Calls from other threads
        meanwhile write their times to the same place.
        """
        if self._stamps is None:
            raise OptionError(
                "this model keeps no times: compile it with Options(profile=True)"
            )
        self(*args, **kwargs)
        flat = self._signature.flatten(args, kwargs)
        dims = {**self.symbols_of(flat), "threads": self._threads}
        return kernel_times(self._program, self._stamps.tolist(), dims)

    # ---- memory

    def memory_plan(
        self, /, *inputs: Any, memory_limit: int | str | None = None, **dims: Any
    ) -> MemoryPlan:
        """The peak of a call, from inputs or from dims.

        Of inputs only shapes and strides are read. The limit is the model's and the
        process's (`set_memory_budget`), unless one is given.
        """
        flat: list[Any] = []
        if inputs or any(_is_shaped(value) for value in dims.values()):
            flat = list(self._signature.flatten(inputs, dims))
            self._signature.check(flat, shapes_only=True)
            values = self._bind(self._sizes(flat))
        else:
            values = self._named("memory_plan", dims)
        copied = self._copied(flat)
        info = self._plan(values, memory_limit, copied)
        return MemoryPlan(
            info.peak_bytes + copied,
            info.arena_bytes,
            info.output_bytes,
            self.weight_bytes,
            info.lower_bound,
            values,
            self._knobs(info),
            copied,
        )

    def memory_timeline(
        self, *, memory_limit: int | str | None = None, **dims: Any
    ) -> Timeline:
        """What a call at these dims holds at every step, told without running it."""
        values = self._named("memory_timeline", dims)
        info = self._plan(values, memory_limit)
        memory = self._program.memory
        env = {**values, "threads": self._threads}
        params = set(self._program.lowered.main.params)
        return timeline(
            self._program.steps,
            [(b.value, n) for b, n in zip(memory.buffers, info.sizes, strict=True)],
            [
                (value, value.type.bytes.evaluate(env))
                for value in dict.fromkeys(memory.outputs)
                if value not in params
            ],
            self._runtime.spec.orders[info.order],
            info.evictions,
        )

    def _limit_of(self, given: int | str | None) -> tuple[int | None, bool]:
        """The limit of a plan, the one given, else what holds for a call now.

        And whether it is the budget of the process.
        """
        if given is not None:
            return parse_bytes(given), False
        budget = read_budget().limit
        if budget >= 0 and (self._limit is None or budget < self._limit):
            return budget, True
        return self._limit, False

    def _copied(self, flat: Sequence[Any]) -> int:
        """Bytes of the inputs that the runtime copies, as they are not row-major."""
        specs = self._runtime.spec.inputs
        return sum(
            _numel(value) * (spec.bits // 8)
            for value, spec in zip(flat, specs, strict=False)
            if spec.kind == TENSOR and not _row_major(value)
        )

    def _plan(
        self,
        values: Mapping[str, int],
        memory_limit: int | str | None,
        copied: int = 0,
    ) -> PlanInfo:
        limit, shared = self._limit_of(memory_limit)
        rest = None if limit is None else max(limit - copied, 0)
        try:
            info = self._runtime.plan([values[name] for name in self.dims], rest)
        except RuntimeStatus as status:
            if status.status is Status.OVERFLOW:
                raise self._overflow_error(status.detail, values) from None
            if status.status is not Status.LIMIT:
                raise self._error(status, []) from None
            least = status.detail[1]
        else:
            if limit is None or info.peak_bytes + copied <= limit:
                return info
            least = info.peak_bytes
        assert limit is not None
        raise self._limit_error((shared, least + copied, limit), values)

    def _knobs(self, info: PlanInfo) -> dict[str, object]:
        """The order taken, and what is computed again or spilled on the way."""
        buffers, steps = self._program.memory.buffers, self._program.steps.steps
        made: list[Rematerialised] = []
        for e in info.evictions:
            value = buffers[e.buffer].value
            maker = next(
                s
                for s in steps
                if any(t.object == e.buffer and t.writes for t in s.touches)
            )
            made.append(
                Rematerialised(
                    value.name,
                    maker.call.loc,
                    "spill" if e.spilled else "recompute",
                    info.sizes[e.buffer],
                    (e.after, e.before),
                )
            )
        return {"order": info.order, "rematerialised": tuple(made)}

    def _named(self, method: str, dims: Mapping[str, Any]) -> dict[str, int]:
        unknown = [name for name in dims if name not in self.dims]
        missing = [name for name in self.dims if name not in dims]
        if unknown or missing:
            raise ShapeError(
                f"{method} takes the dims {', '.join(self.dims)}; "
                f"missing: {', '.join(missing) or 'none'}, "
                f"unknown: {', '.join(unknown) or 'none'}",
                expected=self.dims,
                got=tuple(dims),
            )
        for name, value in dims.items():
            if not is_integer(value) or not 0 <= value <= LARGEST:
                raise ShapeError(
                    f"dim {name} is {shown(value)}: a size is an int from 0 to 2**63-1",
                    expected="a size",
                    got=value,
                )
        env = {name: int(value) for name, value in dims.items()}
        for guard in self._program.guards:
            if _fails(guard, env):
                raise self._guard_error(guard, env)
        return env

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._weights.arrays)

    @property
    def peak_formula(self) -> str:
        """The peak with every knob off, as a function of the dims."""
        return formula(self._program, self._threads)

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
        """Gives the arena back to the system."""
        self._runtime.trim()

    # ---- what it is

    @property
    def dims(self) -> tuple[str, ...]:
        """The free symbols, in order of first appearance."""
        return self._program.host.symbols

    @property
    def compile_count(self) -> int:
        """How often code was generated: once."""
        return 1

    def stats(self) -> dict[str, Any]:
        run = self._runtime.stats()
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
            "recomputed_calls": run.last_recomputed_steps,
            "spilled_bytes": run.last_spilled_bytes,
            "weight_bytes": self.weight_bytes,
            "kernels": len(self._program.lowered.loops),
            "kernel_calls": kernel_count(self._program.fused.main),
            "kernels_built": self._program.kernels_built,
            "kernels_cached": self._program.kernels_cached,
            "threads": self._threads,
            "compile_seconds": sum(self._seconds.values()),
            "stage_seconds": dict(self._seconds),
        }

    def explain(self, /, **dims: int) -> str:
        """Symbols, constraints with their origin, kernels, guards, order, memory.

        With dims, also how each matrix product is cut at those sizes.
        """
        known = self._named("explain", dims) if dims else None
        return explain(self._program, self._threads, known)

    # ---- errors

    def _error(self, status: RuntimeStatus, flat: Sequence[Any]) -> PliantError:
        self._signature.check(flat)
        first, least, began = status.detail
        match status.status:
            case Status.GUARD:
                guard = self._program.guards[first]
                return self._guard_error(guard, self._observed(self._sizes(flat)))
            case Status.LIMIT:
                return self._limit_error(status.detail, self.symbols_of(flat))
            case Status.BUDGET:
                return _budget_error(*status.detail)
            case Status.SPILL:
                return _spill_error(first, least, bool(began))
            case Status.RUN:
                check = self._program.checks[first - 1]
                message = check.text.replace("{value}", str(least))
                words = set(re.findall(r"\w+", message))
                sizes = [
                    f"{name}={value}"
                    for name, value in self.symbols_of(flat).items()
                    if name in words
                ]
                told = f", with {', '.join(sizes)}" if sizes else ""
                return check.error(message + told)
            case Status.KIND | Status.LAYOUT:
                return _unreadable(self._signature.slots[first], flat[first])
            case Status.OVERFLOW:
                env = self._observed(self._sizes(flat))
                return self._overflow_error(status.detail, env)
            case Status.MEMORY:
                return MemoryLimitError(
                    "the system has no memory for this call; use smaller sizes",
                    limit=0,
                    least=first,
                )
            case other:
                return InternalError("run", f"{other.name} {status.detail}")

    def _overflow_error(
        self, detail: tuple[int, int, int], env: Mapping[str, int]
    ) -> ShapeError:
        """Which size is beyond what can be computed with, and by how much."""
        number, host = detail[0], self._program.host
        env = {**env, "threads": self._threads}
        dims = ", ".join(f"{name}={env[name]}" for name in self.dims if name in env)
        value: Expr | None = None
        most, what = LARGEST, "all that the call allocates"
        match Overflow(detail[1]):
            case Overflow.GUARD if number < len(host.guards):
                guard = host.guards[number]
                if _fails(guard, env):
                    return self._guard_error(guard, env)
                what = f"what the model requires, {guard.cond},"
            case Overflow.GUARD:
                binding = host.bindings[number - len(host.guards)]
                what = f"the value of {binding.symbol}"
            case Overflow.TABLE if number < len(host.table.entries):
                value, what = host.table.entries[number], "a size"
            case Overflow.TABLE:
                check = host.checks[number - len(host.table.entries)]
                value, what = check.value, check.what
                most = LARGEST if check.high is None else check.high
                if check.low is not None and _told(value, env).startswith("-"):
                    return ShapeError(
                        f"{what} would be {_told(value, env)} ({dims}): "
                        "a size cannot be negative",
                        expected="a size",
                        got=value.evaluate(env),
                    )
            case Overflow.BUFFER:
                buffer = self._program.memory.buffers[number]
                value, what = buffer.bytes, f"a buffer for {buffer.value.type}"
            case Overflow.OUTPUT:
                kind = self._program.lowered.main.results[number].type
                value, what = kind.bytes, f"a result, {kind}"
            case _:
                pass
        told = "more" if value is None else _told(value, env)
        return ShapeError(
            f"these sizes are too large ({dims}): {what} comes to {told}, and at most "
            f"{most} can be computed with; use smaller sizes",
            expected=f"at most {most}",
            got=told,
        )

    def _limit_error(
        self, detail: tuple[int, int, int], dims: Mapping[str, int]
    ) -> MemoryLimitError:
        """What would fit: the least limit for these dims, the largest of each dim."""
        shared, least, limit = detail
        limit_name = "budget of the process" if shared else "limit"
        largest: dict[str, int] = {}
        for name in self.dims:
            found = self._largest(name, dims, limit)
            if found is not None:
                largest[name] = found
        told = ", or ".join(f"{name} <= {value}" for name, value in largest.items())
        sizes = ", ".join(f"{name}={value}" for name, value in dims.items())
        unspilled = self._runtime.spec.budgeting.spill_problem
        return MemoryLimitError(
            f"this call needs {least} bytes at least"
            + (f" ({sizes})" if sizes else "")
            + f", the memory {limit_name} is {limit}; raise it"
            + (f", or use {told}" if told else "")
            + (
                f"; nothing is spilled to a file: {unspilled}, set PLIANT_SPILL_FOLDER "
                "to a folder on a disk and compile again"
                if unspilled
                else ""
            ),
            limit=limit,
            least=least,
            largest=largest,
        )

    def _largest(self, name: str, dims: Mapping[str, int], limit: int) -> int | None:
        """The largest value of a dim below its own whose least peak fits, if any."""

        def fits(value: int) -> bool:
            env = {**dims, name: value}
            if any(_fails(guard, env) for guard in self._program.guards):
                return False
            try:
                return self._runtime.least([env[d] for d in self.dims]) <= limit
            except RuntimeStatus as status:
                if status.status is Status.OVERFLOW:
                    return False
                raise

        low, _ = self._program.facts.bounds(sym(name))
        fitting, above = max(low or 0, 0), dims[name]
        if fitting >= above or not fits(fitting):
            return None
        while above - fitting > 1:
            middle = (fitting + above) // 2
            if fits(middle):
                fitting = middle
            else:
                above = middle
        return fitting

    def _observed(self, sizes: list[int]) -> dict[str, int]:
        """The sizes of all inputs by "input.axis", and the symbols read from them."""
        rest = iter(sizes)
        shapes = [[next(rest) for _ in dims] for _, dims in self._program.shapes]
        return observed(self._program.shapes, self._program.solution, shapes)

    def _guard_error(self, guard: Guard, env: Mapping[str, int]) -> ShapeError:
        """The failed guard with the numbers of this call."""
        return guard_error(guard, env, self._program.shapes, self._program.solution)


def _spill_error(number: int, size: int, began: bool) -> SpillError:
    told = f"spilling {size} bytes failed"
    if began:
        told += " after the call had begun; what it updates may be new in part"
    error = SpillError(
        number,
        f"{told}: {os.strerror(number)}; set PLIANT_SPILL_FOLDER to a folder with "
        "room and compile again, or raise the memory limit",
    )
    error.began = began
    return error


def _fails(guard: Guard, env: Mapping[str, int]) -> bool:
    """Whether a guard about known names does not hold, or has no meaning."""
    if any(name not in env for name in guard.cond.symbols()):
        return False
    try:
        return not guard.cond.holds(env)
    except ZeroDivisionError:
        return True


def _told(value: Expr, env: Mapping[str, int]) -> str:
    try:
        return shown(value.evaluate(env))
    except ZeroDivisionError:
        return "something undefined"


def _budget_error(budget: int, needed: int, in_use: int) -> MemoryLimitError:
    return MemoryLimitError(
        f"this call needs {needed} bytes, and of the memory budget of the process, "
        f"{budget} bytes, calls that run and idle arenas hold {in_use}; raise it "
        "(pliant.set_memory_budget), let calls wait longer, or make fewer at once",
        limit=budget,
        least=needed,
        in_use=in_use,
    )


def _numel(value: Any) -> int:
    return math.prod(int(n) for n in value.shape)


def _row_major(value: Any) -> bool:
    """As the runtime sees it; memory that is not there yet counts as aligned."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.c_contiguous and value.flags.aligned)
    if not hasattr(value, "is_contiguous"):
        return True
    meta = value.device.type == "meta"
    aligned = meta or value.data_ptr() % value.element_size() == 0
    return bool(value.is_contiguous() and (aligned or value.numel() == 0))


def _unreadable(slot: TensorSlot | SizeSlot, value: object) -> DTypeError:
    return not_a_tensor(slot, value, "one that cannot be read: ")


def _is_shaped(value: object) -> bool:
    return hasattr(value, "shape") and not is_integer(value)
