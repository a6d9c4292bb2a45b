"""Traces a model with torch.export, and records its conditions on sizes.

`trace` takes the user's arguments; `trace_again` traces the same model at other sizes,
where its code may take other branches (torch_programs.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any
from unittest import mock

import sympy
import torch
from torch._higher_order_ops import utils as flow
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from pliant.frontend.torch_bounds import shared_bounds
from pliant.frontend.torch_builtins import sizes_as_numbers
from pliant.frontend.torch_dims import (
    SymbolInfo,
    declared_symbols,
    enlarged,
    symbol_of,
)
from pliant.frontend.torch_packed import packed_sequences
from pliant.frontend.torch_questions import Asked, recorded_questions
from pliant.frontend.torch_rewritten import keep_sizes
from pliant.frontend.torch_scalars import sizes_in_tensors
from pliant.frontend.torch_shapes import symbolic_shapes
from pliant.frontend.torch_spec import LeafSpec, Spec, read_spec
from pliant.frontend.torch_spec_errors import (
    FixedDim,
    check_sizes,
    eager_failure,
    export_error,
    fixed_dims,
    let_torch_decide,
)
from pliant.frontend.torch_strides import need_all_strides
from pliant.frontend.torch_windows import symbolic_windows
from pliant.sym import Expr


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced model, and what it was traced with."""

    program: ExportedProgram
    info: SymbolInfo
    values: tuple[Any, ...]  # flat examples, of the sizes of the trace
    declared: Spec


def trace(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    training: bool = False,
) -> Traced:
    kwargs = dict(example_kwargs or {})
    declared = read_spec(model, example_inputs, kwargs, dynamic_shapes)
    leaves = declared.leaves
    flat, spec = pytree.tree_flatten((example_inputs, kwargs))
    check_sizes(flat, leaves)
    flat = _apart(flat)
    attempts = [enlarged(flat, leaves, alike=False), enlarged(flat, leaves, alike=True)]
    # Each in turn: sizes as guessed, all alike, as given, with those of 0 fixed.
    shapes = declared.for_torch
    tries = [(values, shapes) for values in (*attempts, flat) if values is not None]
    if any(0 in value.shape for value in flat if isinstance(value, torch.Tensor)):
        tries.append((flat, _fixed_where_empty(flat, leaves)))
    failure: Exception | None = None
    for values, dims in tries:
        try:
            program, asked = _export(model, values, spec, dims, training)
        except Exception as error:  # torch raises many kinds; the first one counts
            failure = failure or error
            continue
        if _leaves_out(program, flat) and values is not flat:
            continue  # the code took a size that was guessed to be the only one
        info = declared_symbols(traced_dims(program), leaves)
        info = replace(info, asked=asked)
        return Traced(program, info, tuple(values), declared)
    assert failure is not None
    fixed = _fixed_dims(model, flat, spec, declared)
    with _quiet():
        eager = (
            None if fixed else eager_failure(model, *pytree.tree_unflatten(flat, spec))
        )
    raise export_error(failure, flat, leaves, fixed, eager) from failure


def trace_again(
    model: torch.nn.Module,
    first: Traced,
    values: Sequence[Any],
    names: Mapping[tuple[int, int], Expr],
    fixed: Collection[tuple[int, int]],
    training: bool = False,
) -> Traced:
    """A trace with examples of other sizes, some of which are fixed.

    `names` are the symbols of the first trace, by input and axis; `fixed` are places
    too. Others may turn out to be fixed.
    """
    spec = first.program.call_spec.in_spec
    assert spec is not None
    shapes = ShapesCollection()
    for number, leaf in enumerate(first.declared.leaves):
        varying = [a for a, dim in leaf.dims.items() if dim.dynamic]
        free = [axis for axis in varying if (number, axis) not in fixed]
        if -1 in free:
            raise ValueError("an integer of another size cannot stay dynamic")
        if free:
            shapes[values[number]] = dict.fromkeys(free, Dim.AUTO)
    program, asked = _export(model, values, spec, shapes, training)
    sizes = traced_dims(program)
    info = declared_symbols(sizes, first.declared.leaves)
    known = dict(info.names)
    for (number, axis), name in names.items():
        size = symbol_of(sizes[number].get(axis))
        if isinstance(size, sympy.Symbol) and len(name.symbols()) == 1:
            known.setdefault(str(size), name)
    info = replace(info, names=known, asked=asked)
    return replace(first, program=program, info=info, values=tuple(values))


def _leaves_out(program: ExportedProgram, flat: Sequence[Any]) -> bool:
    """Whether a size of the example is none that the program is for."""
    for value, sizes in zip(flat, traced_dims(program), strict=True):
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        if any(
            isinstance(sizes[k], int) and sizes[k] != n for k, n in enumerate(shape)
        ):
            return True
    return False


def _fixed_where_empty(flat: Sequence[Any], leaves: Sequence[LeafSpec]) -> Any:
    """The dims that vary but for those of 0 that may be fixed: some code takes no other
    size there."""
    shapes = ShapesCollection()
    for value, leaf in zip(flat, leaves, strict=True):
        dims = {
            axis: dim.for_torch
            for axis, dim in leaf.dims.items()
            if dim.must_vary or (axis >= 0 and dim.dynamic and value.shape[axis])
        }
        if dims:
            shapes[value] = dims
    return shapes


@contextmanager
def _unseen_flow() -> Iterator[None]:
    """Dynamo, by which torch traces loops and branches, finds no earlier traces.

    It keeps a trace with the code object of the op's wrapper, whatever the model, and
    first asks whether the sizes are those of the old trace: a question about symbols of
    this one, which a "yes" fixes. So each wrapper gets a code object of its own.
    """
    compile_and_call: Any = flow._hop_compile_and_call

    def unseen(function: Any, *args: Any) -> Any:
        if isinstance(function, FunctionType):
            copied = FunctionType(
                function.__code__.replace(),
                function.__globals__,
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            copied.__kwdefaults__ = function.__kwdefaults__
            function = copied
        return compile_and_call(function, *args)

    with mock.patch.object(flow, "_hop_compile_and_call", unseen):
        yield


_REPORTS = (
    "torch._subclasses.fake_tensor",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs no errors of traces: some are attempts, and the last one is raised."""
    if "TORCH_LOGS" in os.environ:
        yield
        return
    with ExitStack() as stack:
        for name in _REPORTS:
            logger = logging.getLogger(name)
            stack.enter_context(mock.patch.object(logger, "disabled", True))
        # It prints the graph so far of a trace that fails.
        silent = mock.patch("torch.export._trace.print", _nothing, create=True)
        stack.enter_context(silent)
        yield


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _export(
    model: torch.nn.Module,
    values: Sequence[Any],
    spec: pytree.TreeSpec,
    shapes: Any,
    training: bool,
) -> tuple[ExportedProgram, Asked]:
    args, kwargs = pytree.tree_unflatten(list(values), spec)

    def exported() -> tuple[ExportedProgram, Asked]:
        with (
            torch.set_grad_enabled(training),
            _quiet(),
            recorded_questions() as asked,
            shared_bounds(),
            symbolic_shapes(),
            packed_sequences(),
            sizes_in_tensors(),
            sizes_as_numbers(model),
            _unseen_flow(),
            symbolic_windows(),
        ):
            program = torch.export.export(
                model, args, kwargs, dynamic_shapes=shapes, strict=False
            )
        if asked.strides_inside:
            need_all_strides(program.graph)
        return program, asked

    return keep_sizes(exported)


def _fixed_dims(
    model: torch.nn.Module,
    flat: Sequence[Any],
    spec: pytree.TreeSpec,
    declared: Spec,
) -> list[FixedDim]:
    """Dims declared dynamic that are fixed by a trace that is free to do so."""
    shapes = let_torch_decide(declared.for_torch)
    try:
        program, asked = _export(model, flat, spec, shapes, training=False)
    except Exception:  # it fails for another reason, which the first failure tells
        return []
    return fixed_dims(traced_dims(program), declared.leaves, asked)


def _apart(flat: Sequence[Any]) -> list[Any]:
    """The inputs, none sharing memory: torch merges a tensor that is passed twice."""
    seen: set[int] = set()
    out: list[Any] = []
    for value in flat:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            memory = value.untyped_storage()._cdata
            value = value.clone() if memory in seen else value
            seen.add(memory)
        out.append(value)
    return out


def traced_dims(ep: ExportedProgram) -> list[Mapping[int, Any]]:
    """Per flat user input, its traced sizes by axis; an int's own is at -1."""
    wanted = [
        s for s in ep.graph_signature.input_specs if s.kind is InputKind.USER_INPUT
    ]
    names = {getattr(spec.arg, "name", None) for spec in wanted}
    out: list[Mapping[int, Any]] = []
    for node in ep.graph.nodes:
        if node.op != "placeholder" or node.name not in names:
            continue
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            out.append(dict(enumerate(val.shape)))
        else:
            out.append({-1: val})
    return out
