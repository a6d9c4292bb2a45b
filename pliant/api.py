"""`pliant.compile`: from a model to a `CompiledModel`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from pliant import knobs
from pliant.collection import paused_collection
from pliant.context import Training
from pliant.errors import OptionError
from pliant.frontend.contract import Imported
from pliant.frontend.ir_module import import_module
from pliant.frontend.onnx_detection import is_onnx
from pliant.frontend.signature import TensorSlot
from pliant.frontend.torch_tensors import need_torch
from pliant.image.make import image_of
from pliant.image.parts import Addresses, LoadedCode
from pliant.ir.graph import Module
from pliant.machine import target
from pliant.machine.target import Target
from pliant.model.arguments import parse_bytes, shown
from pliant.model.branching import BranchingModel
from pliant.model.compiled import CompiledModel
from pliant.model.module_buffers import ModuleBuffers
from pliant.model.threads import check_threads, workers
from pliant.model.weights import FollowingWeights, WeightPlace
from pliant.options import Instruments, Options
from pliant.pipeline import compile_module, simplified
from pliant.program import HOST_FUNCTIONS, Code, Program
from pliant.progress import LOG, step, task
from pliant.report.explain import ProgramReport

SILENT_SECONDS = 1.0  # a compile that takes longer shows its stages on a terminal

AnyModel = TypeVar("AnyModel", bound=CompiledModel)


@paused_collection()
def compile(
    model: Any,
    example_inputs: tuple[Any, ...] | list[Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    memory_limit: int | str | None = None,
    threads: int | None = None,
    options: Options | None = None,
    target: Target | None = None,
    instruments: Instruments | None = None,
) -> CompiledModel:
    """Compiles a model once, for every shape.

    `model` is an nn.Module (with `example_inputs` and `dynamic_shapes`, as torch.export
    takes them; a name instead of a Dim is a symbol of that name), an ExportedProgram or
    the path of a .pt2 (whose dims `dynamic_shapes` may name), the path of an ONNX file
    or a ModelProto (docs/onnx.md), or a pliant IR module. `example_kwargs` are inputs
    that calls give by name.
    `memory_limit` caps what one call allocates: bytes, or a text such as "512MiB".
    `threads` defaults to PLIANT_THREADS, else what torch or OMP_NUM_THREADS were set
    to, else the cores that the process may use. The result follows the model's weights
    (docs/weights.md).
    """
    chosen = settings(options, threads, target, memory_limit, instruments)
    with task(f"compiling {type(model).__name__}", after=SILENT_SECONDS):
        example = Example(example_inputs, dict(example_kwargs or {}), dynamic_shapes)
        made = _compile(_read(model), example, chosen)
    _log(model, made)
    return made


def _log(model: Any, made: CompiledModel) -> None:
    if not LOG.isEnabledFor(logging.INFO):
        return
    stats = made.stats()
    LOG.info(
        "compiled %s in %.1f s: dims %s, %d kernels (%d from the cache), %d threads",
        type(model).__name__,
        stats["compile_seconds"],
        ", ".join(made.dims) or "none",
        stats["kernels"],
        stats["kernels_cached"],
        stats["threads"],
    )
    slowest = sorted(stats["stage_seconds"].items(), key=lambda item: -item[1])[:5]
    LOG.debug("slowest stages: %s", ", ".join(f"{n} {s:.2f} s" for n, s in slowest))


@dataclass(frozen=True, slots=True)
class Example:
    """The inputs that a model is traced with, and the dims of theirs that vary."""

    inputs: Any
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any


def _read(model: Any) -> Any:
    """The program in a file of torch.export.save; any other model as it is."""
    if not isinstance(model, str | os.PathLike) or Path(model).suffix != ".pt2":
        return model
    need_torch("compiling a torch model")
    from pliant.frontend.torch_model import read_program

    return read_program(Path(model))


def _compile(model: Any, example: Example, chosen: Settings) -> CompiledModel:
    seconds: dict[str, float] = {}
    started = perf_counter()
    step("import")
    programs = _import(model, example, seconds)
    seconds["import"] = perf_counter() - started - seconds.get("export", 0.0)
    owner = None if isinstance(model, Module) or is_onnx(model) else model
    buffers = None
    if any(p.signature.held for p in programs):
        buffers = ModuleBuffers([p.signature for p in programs], owner)
        programs = tuple(
            replace(p, signature=buffers.extend(p.signature)) for p in programs
        )
    first, *more = programs
    if not more:
        return build(first, chosen, seconds, owner=owner, buffers=buffers)
    # Any of them may be the one for the example's sizes.
    free = [replace(p, signature=replace(p.signature, example=())) for p in programs]
    main = build(
        free[0], chosen, seconds, kind=BranchingModel, owner=owner, buffers=buffers
    )
    main.others = tuple(
        build(p, chosen, seconds, owner=owner, buffers=buffers) for p in free[1:]
    )
    held = (h.slot.type.shape for h in first.signature.held)
    sizes = (tuple(d.value for d in shape) for shape in held)
    main.check_example((*first.signature.example, *sizes))
    return main


def _import(
    model: Any, example: Example, seconds: dict[str, float]
) -> tuple[Imported, ...]:
    """The model's programs, by the front end that it is for."""
    if isinstance(model, Module):
        return (import_module(model),)
    if is_onnx(model):
        from pliant.frontend.onnx_model import import_onnx

        return import_onnx(model, example.inputs, example.dynamic_shapes)
    need_torch("compiling a torch model")
    from pliant.frontend.torch_model import import_model

    return import_model(
        model,
        example.inputs,
        example.dynamic_shapes,
        simplified,
        seconds,
        example.kwargs,
    )


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
    check_threads(threads)
    return Settings(options, chosen, workers(threads), limit, instruments)


def build(
    imported: Imported,
    chosen: Settings,
    seconds: Mapping[str, float],
    training: Training | None = None,
    kind: type[AnyModel] = CompiledModel,  # type: ignore[assignment]  # its bound
    owner: object = None,
    buffers: ModuleBuffers | None = None,
    apart: frozenset[WeightPlace] = frozenset(),
) -> AnyModel:
    """Compiles an imported program; `kind` is what the caller gets.

    Constants that are tensors of the `owner`, the model that was imported, follow it.
    `buffers` are those that it changes, `apart` others that calls change.
    """
    module, signature = imported.checked(), imported.signature
    slots = signature.slots
    inputs = tuple((slot.name, slot.dims) for slot in slots)
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
        signature.stores,
    )
    apart |= frozenset() if buffers is None else buffers.places
    return kind(
        image_of(program, signature),
        _loaded(program),
        signature,
        FollowingWeights(weights, module.constants, owner, apart),
        chosen.threads,
        chosen.memory_limit,
        ProgramReport(program, {**seconds, **program.seconds}),
        buffers,
    )


def _loaded(program: Program) -> LoadedCode:
    """The program's functions in this process."""

    def functions(code: Code) -> Addresses:
        return Addresses(*map(code.machine.address, HOST_FUNCTIONS))

    bound: Addresses | None = None
    made: list[tuple[Addresses, Addresses | None]] = []
    for part in program.parts():
        made.append((functions(part.code), bound))
        bound = None if part.rest is None else functions(part.rest.bound)
    return LoadedCode(tuple(made), program)


def _check_runs(chosen: Target) -> None:
    if not target.runs_here(chosen):
        lacks = ", ".join(target.missing(chosen)) or "another architecture"
        raise OptionError(
            f"this machine cannot run code for the target '{chosen.name}': {lacks}"
        )


def _default_target() -> Target:
    return target.named(knobs.TARGET.get())
