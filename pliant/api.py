"""`pliant.compile`: from a model to a `CompiledModel`."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from pliant import knobs, target
from pliant.errors import PliantError
from pliant.ir.graph import Graph, Module
from pliant.model import CompiledModel, parse_bytes
from pliant.options import Options
from pliant.pipeline import compile_module
from pliant.signature import (
    FixedSlot,
    Result,
    Signature,
    SizeSlot,
    TensorSlot,
)


def compile(
    model: Any,
    example_inputs: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    *,
    memory_limit: int | str | None = None,
    threads: int | None = None,
    options: Options | None = None,
    target: target.Target | None = None,
) -> CompiledModel:
    """Compiles a model once, for every shape.

    `model` is an nn.Module (with `example_inputs` and `dynamic_shapes`, as torch.export
    takes them; a name instead of a Dim is a symbol of that name), an ExportedProgram,
    or a pliant IR module. `memory_limit` caps what one call allocates: bytes, or a text
    such as "512MiB". `threads` defaults to every core.
    """
    options = options or Options()
    limit = parse_bytes(memory_limit)
    chosen = target or _default_target()
    workers = threads or knobs.THREADS.get() or chosen.cores
    if workers < 1:
        raise ValueError(f"threads must be at least 1, not {workers}")
    seconds: dict[str, float] = {}
    started = perf_counter()
    if isinstance(model, Module):
        module, signature = model, _plain_signature(model.main)
    else:
        module, signature = _import_torch(
            model, example_inputs, dynamic_shapes, seconds
        )
    seconds["import"] = perf_counter() - started - seconds.get("export", 0.0)
    slots = signature.slots
    inputs = tuple(
        (slot.name, slot.type.shape if isinstance(slot, TensorSlot) else (_sym(slot),))
        for slot in slots
    )
    tensors = [k for k, slot in enumerate(slots) if isinstance(slot, TensorSlot)]
    numbers = {
        param.name: k for param, k in zip(module.main.params, tensors, strict=True)
    }
    program = compile_module(module, inputs, numbers, options, chosen)
    return CompiledModel(
        program, signature, workers, limit, {**seconds, **program.seconds}
    )


def _sym(slot: SizeSlot) -> Any:
    from pliant.sym import sym

    return sym(slot.symbol)


def _default_target() -> target.Target:
    name = knobs.TARGET.get()
    made: target.Target = getattr(target, name)()
    return made


def _plain_signature(graph: Graph) -> Signature:
    """Parameters by position; a tuple of results unless there is one."""
    arguments: list[TensorSlot | SizeSlot | FixedSlot] = [
        TensorSlot(p.name, p.type) for p in graph.params
    ]
    arguments += [SizeSlot(name, name) for name in graph.sizes]

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        _check_count(len(arguments), len(args) + len(kwargs))
        return list(args)

    results = tuple(Result(tensor=k) for k in range(len(graph.results)))
    return Signature(
        tuple(arguments), results, flatten, tuple, True, len(graph.results) == 1
    )


def _check_count(expected: int, got: int) -> None:
    from pliant.errors import ShapeError

    if expected != got:
        raise ShapeError(
            f"the model takes {expected} inputs, got {got}",
            expected=expected,
            got=got,
        )


def _import_torch(
    model: Any,
    example_inputs: tuple[Any, ...] | None,
    dynamic_shapes: Any,
    seconds: dict[str, float],
) -> tuple[Module, Signature]:
    try:
        import torch
    except ImportError as error:
        raise PliantError(
            "compiling a torch model needs torch: pip install 'pliant[torch]'"
        ) from error
    from pliant.frontend import torch_export as front

    info: Any = None
    if isinstance(model, torch.nn.Module):
        if example_inputs is None:
            raise PliantError("compiling an nn.Module needs example_inputs")
        started = perf_counter()
        program, info = front.export_module(
            model, tuple(example_inputs), dynamic_shapes
        )
        seconds["export"] = perf_counter() - started
    elif isinstance(model, torch.export.ExportedProgram):
        program = model
    else:
        raise PliantError(
            f"cannot compile a {type(model).__name__}: give an nn.Module, "
            "an ExportedProgram or a pliant IR module"
        )
    imported = front.from_exported(program, info)
    return imported.module, _torch_signature(imported)


def _torch_signature(imported: Any) -> Signature:
    from torch.utils import _pytree as pytree

    from pliant.frontend import torch_export as front

    params = imported.module.main.params
    arguments: list[TensorSlot | SizeSlot | FixedSlot] = []
    for item in imported.inputs:
        match item:
            case front.TensorInput(name, param):
                arguments.append(TensorSlot(name, params[param].type))
            case front.SizeInput(name, symbol):
                arguments.append(SizeSlot(name, symbol))
            case front.ConstantInput(name, value):
                arguments.append(FixedSlot(name, value))
    results: list[Result] = []
    for item in imported.outputs:
        match item:
            case front.TensorOutput(number):
                results.append(Result(tensor=number))
            case front.SizeOutput(value):
                results.append(Result(size=value))
            case front.ConstantOutput(value):
                results.append(Result(fixed=value))
    spec, out_spec = imported.in_spec, imported.out_spec

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        flat, given = pytree.tree_flatten((args, dict(kwargs)))
        _check_count(len(arguments), len(flat))
        if given != spec:
            flat = _by_name(args, kwargs, spec, given)
        return flat

    def unflatten(leaves: list[Any]) -> Any:
        return pytree.tree_unflatten(leaves, out_spec)

    leaf = pytree.tree_structure(0)
    plain = pytree.tree_structure((tuple(0 for _ in arguments), {}))
    return Signature(
        tuple(arguments),
        tuple(results),
        flatten,
        unflatten,
        spec == plain,
        out_spec == leaf and len(results) == 1 and results[0].tensor is not None,
    )


def _by_name(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], spec: Any, given: Any
) -> list[Any]:
    from pliant.errors import ShapeError

    raise ShapeError(
        f"the arguments have another structure than the example's: "
        f"expected {spec}, got {given}",
        expected=str(spec),
        got=str(given),
    )
