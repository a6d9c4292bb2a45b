"""The front end for torch: an nn.Module or an ExportedProgram -> its programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pliant.errors import ModelError, OptionError
from pliant.frontend.contract import Imported
from pliant.frontend.growing import grown
from pliant.frontend.torch_dims import SymbolInfo, declared_symbols
from pliant.frontend.torch_export import from_exported
from pliant.frontend.torch_programs import programs
from pliant.frontend.torch_spec import read_spec
from pliant.frontend.torch_state import cumulative, with_buffers
from pliant.frontend.torch_trace import traced_dims
from pliant.growing import Growing
from pliant.ir.graph import Module


def import_model(
    model: Any,
    example_inputs: tuple[Any, ...] | list[Any] | None,
    dynamic_shapes: Any,
    simplify: Callable[[Module], Module],
    seconds: dict[str, float],
    example_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Imported, ...]:
    """The program of the example, then those of other branches on sizes.

    `simplify` brings modules into a canonical form, in which two that compute the same
    look alike. The time spent in torch is added to `seconds`.
    """
    if isinstance(model, torch.export.ExportedProgram):
        tensors = {**model.constants, **model.state_dict}
        _, axes = _growing(example_inputs)
        program = from_exported(model, dim_names(model, dynamic_shapes))
        ways = with_buffers([program], tensors)
        return tuple(_seeded(grown(way, axes)) for way in ways)
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"cannot compile a {type(model).__name__}: give an nn.Module (a function "
            "becomes one as its forward), an ExportedProgram, the path of an ONNX file "
            "or of a .pt2, or a pliant IR module"
        )
    kwargs = dict(example_kwargs or {})
    plain, axes = _growing(example_inputs)
    examples = _examples(model, plain, kwargs)
    given = _examples(model, example_inputs, kwargs)
    started = perf_counter()
    with cumulative(model):
        ways = programs(model, examples, dynamic_shapes, kwargs, simplify=simplify)
    ways = with_buffers(ways, dict(model.named_buffers(remove_duplicate=False)))
    seconds["export"] = perf_counter() - started
    ways = tuple(grown(_seeded(way), axes) for way in ways)
    return tuple(
        replace(way, signature=way.signature.with_example(given, kwargs))
        for way in ways
    )


def _growing(inputs: Any) -> tuple[Any, dict[int, int]]:
    """Example inputs with the rows of what grows, and the axes, by argument."""
    leaves, structure = pytree.tree_flatten(inputs)
    axes = {k: g.axis for k, g in enumerate(leaves) if isinstance(g, Growing)}
    rows = [g.tensor.clone() if isinstance(g, Growing) else g for g in leaves]
    return pytree.tree_unflatten(rows, structure) if axes else inputs, axes


def read_program(path: Path) -> torch.export.ExportedProgram:
    """What torch.export.save wrote."""
    if not path.is_file():
        raise ModelError(f"{path} cannot be read: no such file")
    try:
        return torch.export.load(path)
    except Exception as error:  # torch raises many kinds
        raise ModelError(
            f"{path} is no program that torch.export.load can read: {error}"
        ) from error


def dim_names(program: torch.export.ExportedProgram, shapes: Any) -> SymbolInfo | None:
    """The user's names for the dims of a program, which keeps none of its own.

    `shapes` is what dynamic_shapes was when it was exported, or names in its place.
    """
    if shapes is None:
        return None
    given = program.example_inputs
    if given is None:
        raise OptionError(
            "dynamic_shapes names the dims of this ExportedProgram, but the program "
            "was stored without its example inputs: leave dynamic_shapes out"
        )
    args, kwargs = given
    declared = read_spec(program.module(), args, kwargs, shapes)
    return declared_symbols(traced_dims(program), declared.leaves)


def _seeded(imported: Imported) -> Imported:
    """Each call of a program with random ops draws a seed, as eager would draw."""
    signature = imported.signature
    if signature.seed is None:
        return imported
    return replace(imported, signature=replace(signature, draw=draw_seed))


def draw_seed() -> torch.Tensor:
    """From torch's generator: torch.manual_seed decides what it is."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty((), dtype=torch.int64).random_(-(2**63), None)


def _examples(
    model: torch.nn.Module, given: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    if given is None and kwargs:
        given = ()
    if given is None:
        raise OptionError(
            "compiling an nn.Module needs example_inputs: a tuple of tensors as a call "
            "takes them"
        )
    if not isinstance(given, tuple | list):
        raise OptionError(
            "example_inputs must be a tuple of the model's inputs, got "
            f"{type(given).__name__}; for a single input write (x,)"
        )
    try:
        inspect.signature(model.forward).bind(*given, **kwargs)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"example_inputs do not fit the model's forward: {error} (arguments that "
            "a call gives by name go into example_kwargs)"
        ) from None
    return tuple(given)
