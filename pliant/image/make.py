"""From a compiled program to its image."""

from __future__ import annotations

from dataclasses import replace

from pliant.codegen.host_bound import observed_sizes
from pliant.frontend.signature import Signature, TensorSlot
from pliant.image.parts import (
    DLPACK,
    BufferText,
    ChunkText,
    ModelImage,
    PartImage,
    ResultText,
    StepText,
)
from pliant.ir.graph import Op
from pliant.measure.rates import Rates
from pliant.passes.fuse import kernel_count
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
from pliant.sym import sym

SIZE = InputSpec(SCALAR, 0, 64, 0)


def image_of(program: Program, signature: Signature) -> ModelImage:
    """All that running the program takes, apart from its code and weights."""
    programs = list(program.parts())
    inputs = _input_specs(programs[-1], signature)
    first_weight = 0
    made: list[PartImage] = []
    for number, part in enumerate(programs):
        spec = replace(_spec(part, inputs), first_weight=first_weight)
        bound = None
        if number > 0:
            count = observed_sizes(len(programs[0].code.host.symbols))
            bound = replace(spec, inputs=(SIZE,) * count, first_weight=0)
        image = _image(part, spec, bound)
        made.append(image)
        first_weight += image.weights + (image.stamps > 0)
        handed = spec.outputs[len(image.found) :]
        inputs = (
            *inputs,
            *(SIZE for _ in image.found),
            *(InputSpec(0, o.code, o.bits, o.rank) for o in handed),
        )
    return ModelImage(tuple(made))


def _image(program: Program, spec: ModelSpec, bound: ModelSpec | None) -> PartImage:
    host, lowered = program.code.host, program.lowered
    interface, footprint = program.interface, program.footprint
    lows = (interface.facts.bounds(sym(name))[0] for name in host.symbols)
    return PartImage(
        spec=spec,
        bound=bound,
        rules=interface.rules,
        least=tuple(0 if low is None else low for low in lows),
        knobs=host.knobs,
        table=tuple(host.table.entries),
        checks=host.checks,
        faults=tuple((check.kind, check.message) for check in lowered.checks),
        found=() if program.rest is None else program.rest.found,
        steps=tuple(_step(program, step.call) for step in footprint.steps.steps),
        buffers=tuple(
            BufferText(value.name, str(value.type)) for value in footprint.layout.values
        ),
        results=tuple(_results(program)),
        weights=len(host.constants),
        stamps=host.stamps or 0,
        kernels=len(lowered.loops),
        kernel_calls=kernel_count(program.fused.main),
    )


def _step(program: Program, call: Op) -> StepText:
    callee = call.str_attr("callee")
    loop = program.lowered.chunks.get(callee)
    if loop is None:
        return StepText(callee, call.loc)
    rows, extent = str(loop.op.dim_attr("rows")), loop.op.dim_attr("extent")
    knob = list(program.lowered.knobs).index(rows)
    return StepText(callee, call.loc, ChunkText(knob, extent))


def _results(program: Program) -> list[ResultText]:
    """The memory behind the results; one that is an input is its caller's."""
    footprint, params = program.footprint, set(program.lowered.main.params)
    first = len(footprint.layout.values)
    pinned = {v: first + k for k, v in enumerate(footprint.steps.pinned)}
    return [
        ResultText(value.name, str(value.type), value.type.bytes, pinned.get(value))
        for value in dict.fromkeys(footprint.memory.outputs)
        if value not in params
    ]


# ---- what the C runtime takes


def _input_specs(last: Program, signature: Signature) -> tuple[InputSpec, ...]:
    """The inputs of a call; `last` is the part that writes some of them."""
    inputs: list[InputSpec] = []
    params = iter(last.lowered.main.params)
    written = set(last.footprint.steps.pinned)
    for slot in signature.slots:
        if isinstance(slot, TensorSlot):
            code, bits = DLPACK[slot.type.dtype]
            rank, updated = slot.type.rank, next(params) in written
            inputs.append(InputSpec(0, code, bits, rank, updated))
        else:
            inputs.append(SIZE)
    return tuple(inputs)


def _spec(program: Program, inputs: tuple[InputSpec, ...]) -> ModelSpec:
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
    )


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
    return Budgeting(
        recompute=True,
        spill=True,
        flops_per_second=rates.flops,
        bytes_per_second=rates.bytes,
        spill_bytes_per_second=rates.spill_bytes,
    )
