"""The description of a model for the runtime, and of its plans, in Python and C.

Each dataclass has a counterpart in `rt.h`, declared here as a ctypes structure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

NO_LIMIT = -1
TENSOR, SCALAR = 0, 1
BFLOAT = 4  # DLPack's type code
READS, WRITES = 1, 2
CAN_RECOMPUTE, CAN_SPILL = 1, 2
MOST_KNOBS = 64
ALIGN = 64  # offsets in the arena are multiples of a cache line


class Status(IntEnum):
    """The statuses of a call; `rt.h` documents the detail of each."""

    OK = 0
    COUNT = 1
    KIND = 2
    DTYPE = 3
    RANK = 4
    DEVICE = 5
    LAYOUT = 6
    GUARD = 7
    LIMIT = 8
    OVERFLOW = 9
    MEMORY = 10
    RUN = 11
    CLOSED = 12
    MODEL = 13
    SPILL = 14
    BUDGET = 15
    INTERRUPTED = 16


class Overflow(IntEnum):
    """Which size overflows 64 bits: the second detail of an OVERFLOW."""

    ALL = 0
    BUFFER = 1
    OUTPUT = 2
    TABLE = 3
    GUARD = 4


class RuntimeStatus(Exception):
    """A call that did not succeed: the status and its three detail numbers.

    Behind them may be the number of the part of the model that failed, and the sizes
    that its data had decided by then.
    """

    def __init__(self, status: Status, detail: Sequence[int]) -> None:
        super().__init__(f"{status.name} {detail}")
        self.status = status
        self.detail: tuple[int, int, int] = (detail[0], detail[1], detail[2])
        self.part = detail[3] if len(detail) > 3 else 0
        self.sizes = tuple(detail[4:])


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A tensor of this DLPack dtype and rank, or a scalar int."""

    kind: int = TENSOR
    code: int = 2  # DLPack: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool
    bits: int = 32
    rank: int = 0
    written: bool = False  # by some step: never copied


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Bytes in the arena, from the first step that touches them to the last."""

    size_index: int


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The objects that a step touches (object, READS | WRITES), and its work."""

    touches: tuple[tuple[int, int], ...]
    flops_index: int = -1
    bytes_index: int = -1
    repeatable: bool = True


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """Some steps in one order, and the buffer in whose memory each buffer lives."""

    steps: tuple[int, ...]
    roots: tuple[int, ...] = ()  # none: each in its own
    knobs: tuple[int, ...] = ()  # numbers of those that its steps depend on


@dataclass(frozen=True, slots=True)
class KnobSpec:
    """Rows of a chunk: a number that a plan chooses, up to an entry of the table."""

    extent_index: int
    multiple: int  # the rows are one of it, or the whole extent


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A tensor whose dims are `rank` table entries from `dim_index` on."""

    code: int
    bits: int
    rank: int
    dim_index: int


@dataclass(frozen=True, slots=True)
class Budgeting:
    """What the planner may do to meet a memory limit, and the rates for its costs."""

    recompute: bool = False
    spill: bool = False
    spill_folder: str = "/tmp"
    spill_problem: str = ""  # why nothing can be spilled
    flops_per_second: float = 0.0  # of one thread; 0: what the runtime assumes
    bytes_per_second: float = 0.0
    spill_bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    inputs: tuple[InputSpec, ...]
    n_symbols: int
    n_table: int
    buffers: tuple[BufferSpec, ...]
    outputs: tuple[OutputSpec, ...]
    steps: tuple[StepSpec, ...] = ()
    orders: tuple[OrderSpec, ...] = ()  # none: the steps as they are
    knobs: tuple[KnobSpec, ...] = ()
    n_pinned: int = 0  # objects after the buffers that are always there
    budgeting: Budgeting = Budgeting()
    threads: int = 1
    memory_limit: int | None = None
    plan_capacity: int = 64
    guard_pages: bool = False
    poison: bool = False
    first_weight: int = 0  # of a part, among the weights of the first


@dataclass(frozen=True, slots=True)
class Eviction:
    """A buffer that is evicted between two steps."""

    buffer: int
    spilled: bool  # else computed again
    after: int
    before: int


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """One shape's memory. No choice of offsets needs less than `lower_bound`."""

    arena_bytes: int
    output_bytes: int
    peak_bytes: int
    lower_bound: int
    order: int
    recomputed_steps: int
    spilled_bytes: int
    extra_nanoseconds: int  # of the evictions
    nanoseconds: int  # of the whole call, by the cost model
    knobs: tuple[int, ...]  # rows of a chunk; 0: the order does not use it
    evictions: tuple[Eviction, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    calls: int
    failures: int
    plans_made: int
    plan_hits: int
    plans_cached: int
    arena_bytes: int
    last_peak_bytes: int
    last_planned_bytes: int
    last_copied_bytes: int
    last_arena_bytes: int
    max_peak_bytes: int
    last_recomputed_steps: int
    last_spilled_bytes: int


class InputDesc(Structure):
    _fields_: ClassVar = [
        (n, c_int32) for n in ("kind", "code", "bits", "rank", "written")
    ]


class BufferDesc(Structure):
    _fields_: ClassVar = [("size_index", c_int64)]


class TouchDesc(Structure):
    _fields_: ClassVar = [(n, c_int32) for n in ("object", "flags")]


class StepDesc(Structure):
    _fields_: ClassVar = [
        (n, c_int64)
        for n in (
            *("first_touch", "n_touches", "flops_index", "bytes_index"),
            "repeatable",
        )
    ]


class OrderDesc(Structure):
    _fields_: ClassVar = [
        ("n_steps", c_int64),
        ("steps", POINTER(c_int32)),
        ("roots", POINTER(c_int32)),
        ("knobs", c_uint64),
    ]


class KnobDesc(Structure):
    _fields_: ClassVar = [(n, c_int64) for n in ("extent_index", "multiple")]


class EvictionStruct(Structure):
    _fields_: ClassVar = [(n, c_int64) for n in ("buffer", "action", "after", "before")]


class OutputDesc(Structure):
    _fields_: ClassVar = [
        *((n, c_int32) for n in ("code", "bits")),
        *((n, c_int64) for n in ("rank", "dim_index")),
    ]


class ModelDesc(Structure):
    _fields_: ClassVar = [
        ("n_inputs", c_int64),
        ("inputs", POINTER(InputDesc)),
        ("n_symbols", c_int64),
        ("n_table", c_int64),
        ("n_buffers", c_int64),
        ("buffers", POINTER(BufferDesc)),
        ("n_outputs", c_int64),
        ("outputs", POINTER(OutputDesc)),
        ("n_weights", c_int64),
        ("weights", POINTER(c_void_p)),
        ("run", c_void_p),
        ("sizes", c_void_p),
        ("bind", c_void_p),
        ("threads", c_int64),
        ("memory_limit", c_int64),
        ("plan_capacity", c_int64),
        ("n_pinned", c_int64),
        ("n_steps", c_int64),
        ("steps", POINTER(StepDesc)),
        ("n_touches", c_int64),
        ("touches", POINTER(TouchDesc)),
        ("n_orders", c_int64),
        ("orders", POINTER(OrderDesc)),
        ("n_knobs", c_int64),
        ("knobs", POINTER(KnobDesc)),
        ("can", c_int64),
        ("spill_folder", c_char_p),
        ("flops_per_second", c_double),
        ("bytes_per_second", c_double),
        ("spill_bytes_per_second", c_double),
        ("next", c_void_p),
        ("bound", c_void_p),
        ("first_weight", c_int64),
    ]


class ImagePointer(Structure):
    _fields_: ClassVar = [(n, c_int64) for n in ("place", "target")]


class ImageImport(Structure):
    _fields_: ClassVar = [("place", c_int64), ("address", c_void_p)]


class ImageDesc(Structure):
    _fields_: ClassVar = [
        ("bytes", c_void_p),
        ("code_bytes", c_int64),
        ("data_bytes", c_int64),
        ("n_pointers", c_int64),
        ("pointers", POINTER(ImagePointer)),
        ("n_imports", c_int64),
        ("imports", POINTER(ImageImport)),
    ]


class Services(Structure):
    _fields_: ClassVar = [
        ("context", c_void_p),
        ("allocate", c_void_p),
        ("release", c_void_p),
        ("pool", c_void_p),
        ("budget", c_void_p),
        ("poll", c_void_p),
        ("flags", c_int64),
        ("idle_ns", c_int64),
        ("ffi_env_allocator", c_void_p),
        ("ffi_env_alloc", c_void_p),
        ("ffi_from_dlpack", c_void_p),
        ("ffi_function_call", c_void_p),
        ("ffi_object_decref", c_void_p),
        ("ffi_take_error", c_void_p),
        ("ffi_make_array", c_void_p),
        ("ffi_make_shape", c_void_p),
        ("team_parallel", c_void_p),
        ("team_number", c_void_p),
        ("team_size", c_void_p),
    ]


class Framework(Structure):
    """`framework` of python.h."""

    _fields_: ClassVar = [
        ("type", c_void_p),
        ("exchange", c_void_p),
        ("empty", c_void_p),
        ("release", c_void_p),
        ("wrap", c_void_p),
        ("parameter", c_void_p),
        ("tensor_offset", c_int64),
        ("keys_offset", c_int64),
        ("plain", c_uint64),
        ("needs_gradient", c_void_p),
        ("grad_mode", c_void_p),
        ("tangent", c_void_p),
        ("no_tangent", c_void_p),
        ("storage_bytes", c_void_p),
        ("storage_offset", c_void_p),
        ("data", c_void_p),
        ("storage_place", c_int64),
        ("counter_place", c_int64),
        ("layout_place", c_int64),
        ("layout_words", c_int64),
        ("count_place", c_int64),
        ("data_place", c_int64),
        ("tag_place", c_int64),
    ]


class BudgetInfo(Structure):
    _fields_: ClassVar = [
        (n, c_int64) for n in ("limit", "wait_ns", "running", "idle", "waiting")
    ]


class PlanInfoStruct(Structure):
    _fields_: ClassVar = [
        ("arena_bytes", c_int64),
        ("output_bytes", c_int64),
        ("peak_bytes", c_int64),
        ("lower_bound", c_int64),
        ("n_buffers", c_int64),
        ("order", c_int64),
        ("recomputed_steps", c_int64),
        ("spilled_bytes", c_int64),
        ("extra_nanoseconds", c_int64),
        ("nanoseconds", c_int64),
        ("n_evictions", c_int64),
        ("detail", c_int64 * 3),
        ("offsets", POINTER(c_int64)),
        ("sizes", POINTER(c_int64)),
        ("table", POINTER(c_int64)),
        ("knobs", POINTER(c_int64)),
        ("evictions", POINTER(EvictionStruct)),
        ("max_evictions", c_int64),
    ]


class StatsInfo(Structure):
    _fields_: ClassVar = [(name, c_int64) for name in Stats.__dataclass_fields__]


def array(kind: Any, rows: Sequence[Any]) -> Any:
    return (kind * len(rows))(*rows)


def describe(
    spec: ModelSpec,
    functions: tuple[int, int, int],
    weights: Sequence[int],
    next: int = 0,
    bound: int = 0,
) -> ModelDesc:
    """A model for `plt_model_create`; functions (run, sizes, bind), by address."""
    run, sizes, bind = functions
    inputs = [InputDesc(i.kind, i.code, i.bits, i.rank, i.written) for i in spec.inputs]
    outputs = [OutputDesc(o.code, o.bits, o.rank, o.dim_index) for o in spec.outputs]
    touches: list[TouchDesc] = []
    steps: list[StepDesc] = []
    for s in spec.steps:
        work = (s.flops_index, s.bytes_index)
        steps.append(StepDesc(len(touches), len(s.touches), *work, s.repeatable))
        touches += [TouchDesc(*touch) for touch in s.touches]
    orders = spec.orders or (OrderSpec(tuple(range(len(steps)))),)
    knobs = [KnobDesc(k.extent_index, k.multiple) for k in spec.knobs]
    budgeting = spec.budgeting
    limit = NO_LIMIT if spec.memory_limit is None else spec.memory_limit
    return ModelDesc(
        n_inputs=len(inputs),
        inputs=array(InputDesc, inputs),
        n_symbols=spec.n_symbols,
        n_table=spec.n_table,
        n_buffers=len(spec.buffers),
        buffers=array(BufferDesc, [BufferDesc(b.size_index) for b in spec.buffers]),
        n_outputs=len(outputs),
        outputs=array(OutputDesc, outputs),
        n_weights=len(weights),
        weights=array(c_void_p, weights),
        run=run,
        sizes=sizes,
        bind=bind,
        threads=spec.threads,
        memory_limit=limit,
        plan_capacity=spec.plan_capacity,
        n_pinned=spec.n_pinned,
        n_steps=len(steps),
        steps=array(StepDesc, steps),
        n_touches=len(touches),
        touches=array(TouchDesc, touches),
        n_orders=len(orders),
        orders=array(OrderDesc, [_order(o) for o in orders]),
        n_knobs=len(knobs),
        knobs=array(KnobDesc, knobs),
        can=CAN_RECOMPUTE * budgeting.recompute | CAN_SPILL * budgeting.spill,
        spill_folder=os.fsencode(budgeting.spill_folder),
        flops_per_second=budgeting.flops_per_second,
        bytes_per_second=budgeting.bytes_per_second,
        spill_bytes_per_second=budgeting.spill_bytes_per_second,
        next=next,
        bound=bound,
        first_weight=spec.first_weight,
    )


def _order(order: OrderSpec) -> OrderDesc:
    roots = array(c_int32, order.roots) if order.roots else None
    steps = array(c_int32, order.steps)
    if not all(0 <= number < MOST_KNOBS for number in order.knobs):
        raise RuntimeStatus(Status.MODEL, (0, 0, 0))
    knobs = sum(1 << number for number in set(order.knobs))
    return OrderDesc(len(order.steps), steps, roots, knobs)
