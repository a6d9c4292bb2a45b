"""The memory plan of a call, without running it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pliant.errors import ShapeError
from pliant.frontend.signature import LARGEST, Signature
from pliant.image.parts import ResultText
from pliant.model.arguments import is_integer, parse_bytes, shown
from pliant.model.parts import ModelPart
from pliant.model.refusals import Refusals
from pliant.runtime.binding import read_budget
from pliant.runtime.description import TENSOR, WRITES, PlanInfo, RuntimeStatus, Status

if TYPE_CHECKING:
    from pliant.report.timeline import Timeline


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
    # Of inputs that grow, with all their room: the caller holds them, and the call
    # allocates nothing for them.
    grown_bytes: int = 0
    # Some size that data decide was not given: no value of it needs more than this.
    is_bound: bool = False
    predicted_seconds: float = 0.0  # of the call, by the cost model


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


def limit_of(given: int | str | None, own: int | None) -> Limit:
    """The limit that is given, or that of a call now.

    That is the smaller one of the model's own and the process's budget.
    """
    if given is not None:
        return Limit(parse_bytes(given))
    budget = read_budget().limit
    if budget >= 0 and (own is None or budget < own):
        return Limit(budget, is_budget=True)
    return Limit(own)


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The plan of one part, and the bytes of what earlier parts hand over."""

    part: ModelPart
    info: PlanInfo
    handed: int

    @property
    def peak_bytes(self) -> int:
        return self.info.peak_bytes + self.handed


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans of one compiled program, for dims or for inputs."""

    signature: Signature
    threads: int
    refusals: Refusals

    @property
    def parts(self) -> tuple[ModelPart, ...]:
        return self.refusals.parts

    def plan(
        self,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
        limit: Limit,
        weight_bytes: int,
    ) -> MemoryPlan:
        """The plan for inputs, if there are any, or for dims by name."""
        if inputs or any(_is_shaped(value) for value in named.values()):
            return self._of_inputs(inputs, named, limit, weight_bytes)
        dims = self.named("memory_plan", self.signature.with_room(named))
        return self._of_dims(dims, limit, weight_bytes)

    def _of_inputs(
        self,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
        limit: Limit,
        weight_bytes: int,
    ) -> MemoryPlan:
        """The plan for inputs, of which only shapes and strides are read."""
        found = {size.name for size in self.parts[-1].found}
        given = {name: value for name, value in named.items() if name not in found}
        flat = list(self.signature.flatten(inputs, given))
        self.signature.check(flat, shapes_only=True)
        dims = self.refusals.symbols_of(flat)
        sizes = {name: value for name, value in named.items() if name in found}
        dims = self.named("memory_plan", {**dims, **sizes}) if sizes else dims
        return self._of_dims(dims, limit, weight_bytes, self._copied(flat))

    def _of_dims(
        self, dims: Mapping[str, int], limit: Limit, weight_bytes: int, copied: int = 0
    ) -> MemoryPlan:
        plans = self.placed(dims, limit, copied)
        return MemoryPlan(
            max(plan.peak_bytes for plan in plans) + copied,
            max(plan.info.arena_bytes for plan in plans),
            plans[-1].info.output_bytes,
            weight_bytes,
            max(plan.info.lower_bound + plan.handed for plan in plans),
            dims,
            self._knobs(plans, dims),
            copied,
            self.signature.grown_bytes(dims) if self.signature.grows else 0,
            not self.parts[-1].is_known(dims),
            sum(plan.info.nanoseconds for plan in plans) * 1e-9,
        )

    def timeline(self, named: Mapping[str, Any], limit: Limit) -> Timeline:
        """What a call holds at every step."""
        from pliant.report.timeline import joined, timeline

        room = self.signature.with_room(named)
        dims = self.named("memory_timeline", room, complete=True)
        env = {**dims, "threads": self.threads}
        handed: list[tuple[ResultText, int]] = []
        made: list[Timeline] = []
        for plan in self.placed(dims, limit):
            image, info = plan.part.image, plan.info
            spec = plan.part.runtime.spec
            results = [(value, value.bytes.evaluate(env)) for value in image.results]
            made.append(
                timeline(
                    list(zip(spec.steps, image.steps, strict=True)),
                    list(zip(image.buffers, info.sizes, strict=True)),
                    [*handed, *results],
                    spec.orders[info.order],
                    info.evictions,
                    info.offsets,
                )
            )
            # Earlier results are no objects of a later part.
            handed += [(replace(value, pinned=None), size) for value, size in results]
        return joined(made)

    def named(
        self, method: str, dims: Mapping[str, Any], complete: bool = False
    ) -> dict[str, int]:
        """Dims by name; raises if one is missing or the model does not accept it.

        Sizes that data decide may be missing, unless all are wanted.
        """
        every = self.refusals.all_dims
        wanted = every if complete else self.refusals.dims
        unknown = [name for name in dims if name not in every]
        missing = [name for name in wanted if name not in dims]
        if unknown or missing:
            free = [f"{name} (optional)" for name in every if name not in wanted]
            raise ShapeError(
                f"{method} takes the dims {', '.join((*wanted, *free))}; "
                f"missing: {', '.join(missing) or 'none'}, "
                f"unknown: {', '.join(unknown) or 'none'}",
                expected=every,
                got=tuple(dims),
            )
        for name, value in dims.items():
            if not is_integer(value) or not 0 <= value <= LARGEST:
                raise ShapeError(
                    f"dim {name} is {shown(value)}: a size is an int from 0 to 2**63-1",
                    expected="a size",
                    got=value,
                )
        env = {name: int(dims[name]) for name in every if name in dims}
        for part in self.parts:
            guard = part.image.rules.failing(env)
            if guard is not None:
                raise part.image.rules.refusal(guard, env)
        return env

    def placed(
        self, dims: Mapping[str, int], limit: Limit, copied: int = 0
    ) -> list[PartPlan]:
        """The runtime's plans within a limit, less the bytes of copied inputs.

        Of a part whose sizes are not all known, it is the plan for any sizes.
        """
        made: list[PartPlan] = []
        handed = 0
        for part in self.parts:
            info = self._placed(part, dims, limit, copied + handed)
            made.append(PartPlan(part, info, handed))
            handed += info.output_bytes
        return made

    def _placed(
        self, part: ModelPart, dims: Mapping[str, int], limit: Limit, held: int
    ) -> PlanInfo:
        rest = None if limit.bytes is None else max(limit.bytes - held, 0)
        try:
            info = part.plan(dims, rest)
        except RuntimeStatus as status:
            if status.status is Status.OVERFLOW:
                image = part.image
                raise self.refusals.of_overflow(status.detail, dims, image) from None
            if status.status is not Status.LIMIT:
                raise self.refusals.of_call(status, []) from None
            least = status.detail[1]
        else:
            if limit.bytes is None or info.peak_bytes + held <= limit.bytes:
                return info
            least = info.peak_bytes
        assert limit.bytes is not None
        detail = (limit.is_budget, least + held, limit.bytes)
        raise self.refusals.of_limit(detail, dims)

    def _copied(self, flat: Sequence[Any]) -> int:
        """Bytes of the inputs that the runtime copies: those that are not row-major."""
        return sum(
            math.prod(int(n) for n in value.shape) * (spec.bits // 8)
            for value, spec in zip(
                flat, self.parts[0].runtime.spec.inputs, strict=False
            )
            if spec.kind == TENSOR and not _row_major(value)
        )

    def _knobs(
        self, plans: Sequence[PartPlan], dims: Mapping[str, int]
    ) -> dict[str, object]:
        """What was chosen: the order, the chunks, the values recomputed or spilled."""
        made = tuple(r for plan in plans for r in _rematerialised(plan))
        orders = tuple(plan.info.order for plan in plans)
        order = orders[0] if len(orders) == 1 else orders
        chunks = tuple(c for plan in plans for c in _chunks(plan, dims))
        return {"order": order, "chunks": chunks, "rematerialised": made}


def _chunks(plan: PartPlan, dims: Mapping[str, int]) -> Iterator[Chunked]:
    """The regions that run in chunks, in their order."""
    texts, info = plan.part.image.steps, plan.info
    for number in plan.part.runtime.spec.orders[info.order].steps:
        chunk = texts[number].chunk
        if chunk is not None:
            total = chunk.extent.evaluate(dims)
            rows = min(info.knobs[chunk.knob], total)
            yield Chunked(str(chunk.extent), total, rows, texts[number].loc)


def _rematerialised(plan: PartPlan) -> Iterator[Rematerialised]:
    image, info = plan.part.image, plan.info
    for e in info.evictions:
        maker = next(
            text
            for step, text in zip(image.spec.steps, image.steps, strict=True)
            if any(
                touched == e.buffer and how & WRITES for touched, how in step.touches
            )
        )
        yield Rematerialised(
            image.buffers[e.buffer].name,
            maker.loc,
            "spill" if e.spilled else "recompute",
            info.sizes[e.buffer],
            (e.after, e.before),
        )


def _is_shaped(value: object) -> bool:
    return hasattr(value, "shape") and not is_integer(value)


def _row_major(value: Any) -> bool:
    """The same check as the runtime's; a tensor without data counts as aligned."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.c_contiguous and value.flags.aligned)
    if not hasattr(value, "is_contiguous"):
        return True
    meta = value.device.type == "meta"
    aligned = meta or value.data_ptr() % value.element_size() == 0
    return bool(value.is_contiguous() and (aligned or value.numel() == 0))
