"""`pliant.compile`: from a model to a `CompiledModel`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar

from pliant import knobs
from pliant.collection import paused_collection
from pliant.context import Training
from pliant.errors import OptionError, PliantError, ShapeError
from pliant.frontend.signature import (
    FixedSlot,
    Parameters,
    Result,
    Signature,
    SizeSlot,
    TensorSlot,
)
from pliant.ir.graph import Graph, Module
from pliant.machine import target
from pliant.machine.processor import asked_threads
from pliant.machine.target import Target
from pliant.model.arguments import is_integer, parse_bytes, shown
from pliant.model.branching import BranchingModel
from pliant.model.compiled import CompiledModel
from pliant.options import Instruments, Options
from pliant.pipeline import compile_module, simplified

MOST_THREADS = 1024

AnyModel = TypeVar("AnyModel", bound=CompiledModel)


@paused_collection()
def compile(
    model: Any,
    example_inputs: tuple[Any, ...] | list[Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    memory_limit: int | str | None = None,
    threads: int | None = None,
    options: Options | None = None,
    target: Target | None = None,
    instruments: Instruments | None = None,
) -> CompiledModel:
    """Compiles a model once, for every shape.

    `model` is an nn.Module (with `example_inputs` and `dynamic_shapes`, as torch.export
    takes them; a name instead of a Dim is a symbol of that name), an ExportedProgram,
    or a pliant IR module. `memory_limit` caps what one call allocates: bytes, or a text
    such as "512MiB". `threads` defaults to PLIANT_THREADS, else what torch or
    OMP_NUM_THREADS were told, else the cores that the process may use. The result
    follows the model's weights (docs/weights.md).
    """
    chosen = settings(options, threads, target, memory_limit, instruments)
    seconds: dict[str, float] = {}
    started = perf_counter()
    if isinstance(model, Module):
        imported = [(model, _plain_signature(model.main))]
    else:
        imported = _import_torch(model, example_inputs, dynamic_shapes, seconds)
    seconds["import"] = perf_counter() - started - seconds.get("export", 0.0)
    owner = None if isinstance(model, Module) else model
    (module, signature), *more = imported
    if not more:
        return build(module, signature, chosen, seconds, owner=owner)
    main, *others = (
        build(m, replace(s, example=()), chosen, seconds, kind=kind, owner=owner)
        for (m, s), kind in zip(
            imported, (BranchingModel, *[CompiledModel] * len(more)), strict=True
        )
    )
    assert isinstance(main, BranchingModel)
    main.others = tuple(others)
    main.check_example(signature.example)
    return main


@dataclass(frozen=True, slots=True)
class Settings:
    """What a compile is asked for, checked."""

    options: Options
    target: Target
    threads: int
    memory_limit: int | None
    instruments: Instruments


def settings(
    options: Options | None,
    threads: int | None,
    target: Target | None,
    memory_limit: int | str | None,
    instruments: Instruments | None = None,
) -> Settings:
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise OptionError(f"options must be pliant.Options, not {shown(options)}")
    instruments = Instruments() if instruments is None else instruments
    if not isinstance(instruments, Instruments):
        raise OptionError(
            f"instruments must be pliant.Instruments, not {shown(instruments)}"
        )
    limit = parse_bytes(memory_limit)
    chosen = _default_target() if target is None else target
    if not isinstance(chosen, Target):
        raise OptionError(f"target must be a pliant.Target, not {shown(chosen)}")
    _check_runs(chosen)
    _check_threads(threads)
    workers = _workers(threads, chosen)
    return Settings(options, chosen, workers, limit, instruments)


def build(
    module: Module,
    signature: Signature,
    chosen: Settings,
    seconds: Mapping[str, float],
    training: Training | None = None,
    kind: type[AnyModel] = CompiledModel,  # type: ignore[assignment]
    owner: object = None,
) -> AnyModel:
    """Compiles an imported module; `kind` is what the caller gets.

    Constants that are tensors of the `owner`, an nn.Module or an ExportedProgram,
    follow it.
    """
    slots = signature.slots
    inputs = tuple(
        (slot.name, slot.type.shape if isinstance(slot, TensorSlot) else (_sym(slot),))
        for slot in slots
    )
    tensors = [k for k, slot in enumerate(slots) if isinstance(slot, TensorSlot)]
    numbers = {
        param.name: k for param, k in zip(module.main.params, tensors, strict=True)
    }
    # What is not in the example has sizes of its own: parameters that are trained.
    more = inputs[len(signature.example) :] if signature.example else ()
    held = (tuple(d.value for d in dims) for _, dims in more)
    program, weights = compile_module(
        module,
        inputs,
        numbers,
        chosen.options,
        chosen.target,
        training,
        (*signature.example, *held),
        chosen.instruments,
    )
    told = {**seconds, **program.seconds}
    return kind(
        program,
        weights,
        signature,
        chosen.threads,
        chosen.memory_limit,
        told,
        module.constants,
        owner,
    )


def _workers(threads: int | None, chosen: Target) -> int:
    """Threads of a call: what the caller says, the knob, the process, the machine."""
    told = threads or knobs.THREADS.get() or asked_threads() or chosen.cores
    return min(told, MOST_THREADS)


def _check_threads(threads: Any) -> None:
    if threads is None:
        return
    if not is_integer(threads) or not 1 <= threads <= MOST_THREADS:
        raise OptionError(
            f"threads must be an int from 1 to {MOST_THREADS}, or None for every core; "
            f"not {shown(threads)}"
        )


def _check_runs(chosen: Target) -> None:
    if not target.runs_here(chosen):
        lacks = ", ".join(target.missing(chosen)) or "another architecture"
        raise OptionError(
            f"this machine cannot run code for the target '{chosen.name}': {lacks}"
        )


def _sym(slot: SizeSlot) -> Any:
    from pliant.sym import sym

    return sym(slot.symbol)


def _default_target() -> Target:
    return target.named(knobs.TARGET.get())


def _plain_signature(graph: Graph) -> Signature:
    """Parameters by position; a tuple of results unless there is one."""
    arguments: list[TensorSlot | SizeSlot | FixedSlot] = [
        TensorSlot(p.name, p.type) for p in graph.params
    ]
    arguments += [SizeSlot(name, name) for name in graph.sizes]

    parameters = Parameters(tuple(a.name for a in arguments))

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        return list(parameters.bind(args, kwargs)[0])

    results = tuple(Result(tensor=k) for k in range(len(graph.results)))
    return Signature(
        tuple(arguments), results, flatten, tuple, True, len(graph.results) == 1
    )


def _import_torch(
    model: Any,
    example_inputs: tuple[Any, ...] | list[Any] | None,
    dynamic_shapes: Any,
    seconds: dict[str, float],
) -> list[tuple[Module, Signature]]:
    """The program of the example first, then those of other ways by size."""
    try:
        import torch
    except ImportError as error:
        raise PliantError(
            "compiling a torch model needs torch: pip install 'pliant[torch]'"
        ) from error
    from pliant.frontend.torch_export import from_exported
    from pliant.frontend.torch_programs import programs

    if isinstance(model, torch.export.ExportedProgram):
        imported = from_exported(model)
        parameters = _parameters(model, imported.in_spec)
        return [(imported.module, torch_signature(imported, parameters))]
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"cannot compile a {type(model).__name__}: give an nn.Module, "
            "an ExportedProgram or a pliant IR module"
        )
    examples = _examples(model, example_inputs)
    started = perf_counter()
    ways = programs(model, examples, dynamic_shapes, simplify=simplified)
    seconds["export"] = perf_counter() - started
    parameters = _parameters(model, ways[0].in_spec)
    signatures = [torch_signature(way, parameters) for way in ways]
    return [
        (way.module, signature.with_example(examples, {}))
        for way, signature in zip(ways, signatures, strict=True)
    ]


def _examples(model: Any, given: Any) -> tuple[Any, ...]:
    if given is None:
        raise OptionError("compiling an nn.Module needs example_inputs")
    if not isinstance(given, tuple | list):
        raise OptionError(
            "example_inputs must be a tuple of the model's inputs, got "
            f"{type(given).__name__}; for a single input write (x,)"
        )
    try:
        inspect.signature(model.forward).bind(*given)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"example_inputs do not fit the model's forward: {error}"
        ) from None
    return tuple(given)


def _parameters(model: Any, spec: Any) -> Parameters:
    """The names of the arguments, and the defaults of those left out.

    An exported program knows only the arguments of its example.
    """
    by_position, by_name = spec.children()
    count, keywords = by_position.num_children, tuple(by_name.context)
    if hasattr(model, "module_call_graph"):
        told = model.module_call_graph[0].signature
        names = () if told is None else tuple(told.forward_arg_names or ())
        return Parameters(_numbered(names, count), keywords)
    names, defaults = (), {}
    for item in inspect.signature(model.forward).parameters.values():
        if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD):
            names = (*names, item.name)
        if item.default is not item.empty:
            defaults[item.name] = item.default
    return Parameters(_numbered(names, count), keywords, names[count:], defaults)


def _numbered(names: tuple[str, ...], count: int) -> tuple[str, ...]:
    """`count` names; those of *args, which no keyword can give, are numbers."""
    return (*names[:count], *(f"#{k}" for k in range(len(names), count)))


def torch_signature(imported: Any, parameters: Parameters) -> Signature:
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

    plain = pytree.tree_structure((tuple(0 for _ in arguments), {}))
    positional = spec == plain

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        bound = parameters.bind(args, kwargs)
        if positional:
            return list(bound[0])
        try:
            return list(spec.flatten_up_to(bound))
        except ValueError:
            raise _other_structure(parameters, spec, bound) from None

    def unflatten(leaves: list[Any]) -> Any:
        return pytree.tree_unflatten(leaves, out_spec)

    leaf = pytree.tree_structure(0)
    return Signature(
        tuple(arguments),
        tuple(results),
        flatten,
        unflatten,
        positional,
        out_spec == leaf and len(results) == 1 and results[0].tensor is not None,
    )


def _other_structure(parameters: Parameters, spec: Any, bound: Any) -> ShapeError:
    """Names the first argument that is nested in another way than the example's."""
    from torch.utils import _pytree as pytree

    by_position, by_name = spec.children()
    expected = [*by_position.children(), *by_name.children()]
    given = [*bound[0], *bound[1].values()]
    names = [*parameters.positional, *parameters.keywords]
    for name, wanted, value in zip(names, expected, given, strict=True):
        try:
            wanted.flatten_up_to(value)
        except ValueError:
            got = pytree.tree_structure(value)
            return ShapeError(
                f"input '{name}' has another structure than the example's: "
                f"expected {wanted}, got {got}",
                input=name,
                expected=str(wanted),
                got=str(got),
            )
    return ShapeError("the arguments have another structure than the example's")
