"""The description of a compiled program for the runtime."""

from __future__ import annotations

from dataclasses import replace

from pliant import knobs
from pliant.codegen.host_bound import observed_sizes
from pliant.frontend.signature import Signature, SizeSlot, TensorSlot
from pliant.ir.types import DType
from pliant.measure.rates import Rates
from pliant.model.spill import spill_place
from pliant.program import Program
from pliant.runtime.description import (
    READS,
    SCALAR,
    WRITES,
    Budgeting,
    BufferSpec,
    InputSpec,
    KnobSpec,
    ModelSpec,
    OrderSpec,
    OutputSpec,
    StepSpec,
)

# DLPack type codes: (code, bits).
DLPACK: dict[DType, tuple[int, int]] = {
    DType.F64: (2, 64),
    DType.F32: (2, 32),
    DType.F16: (2, 16),
    DType.BF16: (4, 16),
    DType.I64: (0, 64),
    DType.I32: (0, 32),
    DType.I16: (0, 16),
    DType.I8: (0, 8),
    DType.U64: (1, 64),
    DType.U32: (1, 32),
    DType.U16: (1, 16),
    DType.U8: (1, 8),
    DType.BOOL: (6, 8),
}


SIZE = InputSpec(SCALAR, 0, 64, 0)


def input_specs(last: Program, signature: Signature) -> tuple[InputSpec, ...]:
    """The inputs of a call; `last` is the part that writes some of them."""
    inputs: list[InputSpec] = []
    params = iter(last.lowered.main.params)
    written = set(last.footprint.steps.pinned)
    for slot in signature.slots:
        match slot:
            case TensorSlot():
                code, bits = DLPACK[slot.type.dtype]
                rank, updated = slot.type.rank, next(params) in written
                inputs.append(InputSpec(0, code, bits, rank, updated))
            case SizeSlot():
                inputs.append(SIZE)
    return tuple(inputs)


def runtime_spec(
    program: Program, inputs: tuple[InputSpec, ...], threads: int, limit: int | None
) -> ModelSpec:
    """Inputs, results, buffers and steps, with their indices in the table of sizes."""
    host = program.code.host
    outputs = []
    for value, slot_index in zip(
        program.lowered.main.results, host.output_slots, strict=True
    ):
        code, bits = DLPACK[value.dtype]
        outputs.append(OutputSpec(code, bits, value.type.rank, slot_index))
    return ModelSpec(
        inputs,
        len(host.symbols),
        len(host.table.entries),
        tuple(BufferSpec(slot) for slot in host.buffer_slots),
        tuple(outputs),
        steps=_steps(program),
        orders=_orders(program),
        knobs=_knobs(program),
        n_pinned=len(program.footprint.steps.pinned),
        budgeting=_budgeting(program.footprint.rates),
        threads=threads,
        memory_limit=limit,
        guard_pages=knobs.GUARD_PAGES.get(),
    )


def bound_spec(part: ModelSpec, sizes: int) -> ModelSpec:
    """What plans the most that a part takes, from so many sizes of inputs."""
    inputs = (SIZE,) * observed_sizes(sizes)
    return replace(part, inputs=inputs, memory_limit=None, first_weight=0)


def _steps(program: Program) -> tuple[StepSpec, ...]:
    made: list[StepSpec] = []
    steps, host = program.footprint.steps.steps, program.code.host
    for step, slots in zip(steps, host.work_slots, strict=True):
        touches = tuple(
            (t.object, READS * t.reads | WRITES * t.writes) for t in step.touches
        )
        made.append(StepSpec(touches, *slots, step.repeatable))
    return tuple(made)


def _orders(program: Program) -> tuple[OrderSpec, ...]:
    """The order of the lowered graph, then those that need less at some sizes."""
    own, *versions = program.code.host.sequences
    orders = [OrderSpec(own)]
    orders += [OrderSpec(tuple(own[k] for k in o)) for o in program.lowered.orders]
    knobs = list(program.lowered.knobs)
    for graph, sequence in zip(program.lowered.versions, versions, strict=True):
        used = tuple(k for k, name in enumerate(knobs) if name in graph.sizes)
        orders.append(OrderSpec(sequence, knobs=used))
    return tuple(orders)


def _knobs(program: Program) -> tuple[KnobSpec, ...]:
    slots = program.code.host.knob_slots
    knobs = program.lowered.knobs.values()
    return tuple(
        KnobSpec(slot, knob.multiple) for slot, knob in zip(slots, knobs, strict=True)
    )


def _budgeting(rates: Rates | None) -> Budgeting:
    """Without rates nothing is recomputed or spilled."""
    if rates is None:
        return Budgeting()
    place = spill_place()
    return Budgeting(
        recompute=True,
        spill=not place.problem,
        spill_folder=place.folder,
        spill_problem=place.problem,
        flops_per_second=rates.flops,
        bytes_per_second=rates.bytes,
        spill_bytes_per_second=rates.spill_bytes,
    )
