"""What the ops of a lowered graph mean: memory, and calls that read and write it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pliant.ir.calls import computed_by
from pliant.ir.graph import Graph, Op, Value
from pliant.ir.interp_loops import run_loop
from pliant.ir.interp_memory import ByteRange, poisoned, sizes_of
from pliant.ir.interp_numbers import bf16_bits
from pliant.ir.loops import Role
from pliant.ir.spec import destinations
from pliant.ir.types import DType

if TYPE_CHECKING:
    from pliant.ir.interp import Interpreter


def _alloc(run: Interpreter, op: Op, values: dict[Value, Any], env: Any) -> None:
    memory = poisoned(op.dim_attr("bytes").evaluate(env))
    values[op.result] = run.place(op.result.type, memory, env)


def _view(run: Interpreter, op: Op, values: dict[Value, Any], env: Any) -> None:
    source = run.placed(op.operands[0], values, env)
    memory = source.memory.at(op.dim_attr("offset").evaluate(env))
    values[op.result] = run.place(op.result.type, memory, env)


def _call_loop(run: Interpreter, op: Op, values: dict[Value, Any], env: Any) -> None:
    func = run.module.loops[op.str_attr("callee")]
    sizes = sizes_of(op.dims_attr("sizes"), env)
    bound = dict(zip(func.sizes, sizes, strict=True))
    for value in op.results:
        values[value] = run.fresh(value.type, env)
    memories: list[ByteRange] = []
    for given, buffer in zip(destinations(func, op), func.buffers, strict=True):
        if given is not None:
            memories.append(run.placed(given, values, env).memory)
        else:
            shape = sizes_of(buffer.shape, bound)
            memories.append(poisoned(math.prod(shape) * buffer.dtype.bytes))
    run_loop(
        *(func, run.module, sizes, memories),
        workers=run.workers,
        check_races=run.check_races,
    )


def _call_library(run: Interpreter, op: Op, values: dict[Value, Any], env: Any) -> None:
    name = op.str_attr("callee")
    library, purpose = run.module.libraries[name], computed_by(op, run.module)
    if library.roles is not None and purpose is not None:
        _call_known_library(run, op, library.roles, purpose, values, env)
        return
    if name not in run.libraries:
        raise ValueError(f"the interpreter has no code for library function @{name}")
    inputs = [run.placed(v, values, env).elements() for v in op.operands]
    for value in op.results:
        values[value] = run.fresh(value.type, env)
    outputs = [values[value].elements() for value in op.results]
    run.libraries[name](inputs, outputs)


def _call_known_library(
    run: Interpreter,
    op: Op,
    roles: Sequence[Role],
    purpose: Graph,
    values: dict[Value, Any],
    env: Any,
) -> None:
    """A call whose roles are known does what it computes."""
    given: dict[Role, list[Value]] = {role: [] for role in Role}
    for value, role in zip(op.operands, roles, strict=True):
        given[role].append(value)
    inputs = [run.placed(v, values, env).array() for v in given[Role.IN]]
    (root,) = purpose.ops
    known = dict(zip(root.operands, inputs, strict=True))
    arrays = run.evaluate(root, [known[v] for v in root.operands], env)
    for value, array in zip(given[Role.OUT], arrays, strict=True):
        array = run.rounded(array, value.dtype)
        bits = bf16_bits(array) if value.dtype is DType.BF16 else array
        run.placed(value, values, env).elements()[...] = bits


LOWERED: dict[str, Callable[..., None]] = {
    "alloc": _alloc,
    "view": _view,
    "call_loop": _call_loop,
    "call_library": _call_library,
}
