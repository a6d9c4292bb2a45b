"""The memory plan of a call, without running it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pliant.errors import ShapeError
from pliant.frontend.signature import LARGEST, Signature
from pliant.model.arguments import is_integer, shown
from pliant.model.refusals import Refusals, sizes_of
from pliant.program import Program
from pliant.report.timeline import Timeline, timeline
from pliant.runtime.binding import RuntimeModel, read_budget
from pliant.runtime.description import TENSOR, PlanInfo, RuntimeStatus, Status


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one call, planned without running it."""

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
    """A value that is evicted between two steps."""

    value: str
    loc: str  # where the model computes it
    action: str  # "recompute" or "spill"
    bytes: int
    steps: tuple[int, int]  # that use it before and after


@dataclass(frozen=True, slots=True)
class Chunked:
    """A part of the model that runs in chunks of rows."""

    dim: str  # which rows, as an expression over the dims
    total: int  # how many there are
    rows: int  # of a chunk
    loc: str  # where the model computes the first of it

    @property
    def chunks(self) -> int:
        return -(-self.total // max(self.rows, 1))


@dataclass(frozen=True, slots=True)
class Limit:
    """A cap on what one call allocates; None: there is none."""

    bytes: int | None
    is_budget: bool = False  # of the process


def limit_now(own: int | None) -> Limit:
    """The limit of a call now: the smaller of the model's and the process's budget."""
    budget = read_budget().limit
    if budget >= 0 and (own is None or budget < own):
        return Limit(budget, is_budget=True)
    return Limit(own)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans of one compiled program, for dims or for inputs."""

    program: Program
    signature: Signature
    runtime: RuntimeModel
    threads: int
    refusals: Refusals

    def of_inputs(
        self,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
        limit: Limit,
        weight_bytes: int,
    ) -> MemoryPlan:
        """The plan for inputs, of which only shapes and strides are read."""
        flat = list(self.signature.flatten(inputs, named))
        self.signature.check(flat, shapes_only=True)
        dims = self.refusals.bound(sizes_of(flat))
        return self.of_dims(dims, limit, weight_bytes, self._copied(flat))

    def of_dims(
        self, dims: Mapping[str, int], limit: Limit, weight_bytes: int, copied: int = 0
    ) -> MemoryPlan:
        info = self.placed(dims, limit, copied)
        return MemoryPlan(
            info.peak_bytes + copied,
            info.arena_bytes,
            info.output_bytes,
            weight_bytes,
            info.lower_bound,
            dims,
            self._knobs(info, dims),
            copied,
        )

    def timeline(self, dims: Mapping[str, int], limit: Limit) -> Timeline:
        """What a call holds at every step."""
        info, footprint = self.placed(dims, limit), self.program.footprint
        env = {**dims, "threads": self.threads}
        params = set(self.program.lowered.main.params)
        return timeline(
            footprint.steps,
            list(zip(footprint.layout.values, info.sizes, strict=True)),
            [
                (value, value.type.bytes.evaluate(env))
                for value in dict.fromkeys(footprint.memory.outputs)
                if value not in params
            ],
            self.runtime.spec.orders[info.order],
            info.evictions,
        )

    def named(self, method: str, dims: Mapping[str, Any]) -> dict[str, int]:
        """Dims by name; raises if one is missing or the model does not accept it."""
        wanted, interface = self.refusals.dims, self.program.interface
        unknown = [name for name in dims if name not in wanted]
        missing = [name for name in wanted if name not in dims]
        if unknown or missing:
            raise ShapeError(
                f"{method} takes the dims {', '.join(wanted)}; "
                f"missing: {', '.join(missing) or 'none'}, "
                f"unknown: {', '.join(unknown) or 'none'}",
                expected=wanted,
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
        guard = interface.failing(env)
        if guard is not None:
            raise interface.refusal(guard, env)
        return env

    def placed(
        self, dims: Mapping[str, int], limit: Limit, copied: int = 0
    ) -> PlanInfo:
        """The runtime's plan within a limit, less the bytes of copied inputs."""
        rest = None if limit.bytes is None else max(limit.bytes - copied, 0)
        values = [dims[name] for name in self.refusals.dims]
        try:
            info = self.runtime.plan(values, rest)
        except RuntimeStatus as status:
            if status.status is Status.OVERFLOW:
                raise self.refusals.of_overflow(status.detail, dims) from None
            if status.status is not Status.LIMIT:
                raise self.refusals.of_call(status, []) from None
            least = status.detail[1]
        else:
            if limit.bytes is None or info.peak_bytes + copied <= limit.bytes:
                return info
            least = info.peak_bytes
        assert limit.bytes is not None
        detail = (limit.is_budget, least + copied, limit.bytes)
        raise self.refusals.of_limit(detail, dims)

    def _copied(self, flat: Sequence[Any]) -> int:
        """Bytes of the inputs that the runtime copies: those that are not row-major."""
        return sum(
            math.prod(int(n) for n in value.shape) * (spec.bits // 8)
            for value, spec in zip(flat, self.runtime.spec.inputs, strict=False)
            if spec.kind == TENSOR and not _row_major(value)
        )

    def _knobs(self, info: PlanInfo, dims: Mapping[str, int]) -> dict[str, object]:
        """What was chosen: the order, the chunks, the values recomputed or spilled."""
        footprint = self.program.footprint
        made: list[Rematerialised] = []
        for e in info.evictions:
            value = footprint.layout.values[e.buffer]
            maker = next(
                s
                for s in footprint.steps.steps
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
        return {
            "order": info.order,
            "chunks": tuple(self._chunks(info, dims)),
            "rematerialised": tuple(made),
        }

    def _chunks(self, info: PlanInfo, dims: Mapping[str, int]) -> Iterator[Chunked]:
        """The parts that run in chunks, in their order."""
        lowered = self.program.lowered
        rows = dict(zip(lowered.knobs, info.knobs, strict=True))
        steps = self.program.footprint.steps.steps
        for number in self.runtime.spec.orders[info.order].steps:
            op = steps[number].call
            loop = lowered.chunks.get(str(dict(op.attrs).get("callee")))
            if loop is not None:
                name = str(loop.op.dim_attr("rows"))
                extent = loop.op.dim_attr("extent")
                total = extent.evaluate(dims)
                yield Chunked(str(extent), total, min(rows[name], total), op.loc)


def _row_major(value: Any) -> bool:
    """The same check as the runtime's; a tensor without data counts as aligned."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.c_contiguous and value.flags.aligned)
    if not hasattr(value, "is_contiguous"):
        return True
    meta = value.device.type == "meta"
    aligned = meta or value.data_ptr() % value.element_size() == 0
    return bool(value.is_contiguous() and (aligned or value.numel() == 0))
