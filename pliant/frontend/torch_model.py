"""The front end for torch: an nn.Module or an ExportedProgram -> its programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pliant.errors import OptionError
from pliant.frontend.contract import Imported
from pliant.frontend.growing import grown
from pliant.frontend.torch_export import from_exported
from pliant.frontend.torch_programs import programs
from pliant.frontend.torch_state import cumulative, with_buffers
from pliant.growing import Growing
from pliant.ir.graph import Module


def import_model(
    model: Any,
    example_inputs: tuple[Any, ...] | list[Any] | None,
    dynamic_shapes: Any,
    simplify: Callable[[Module], Module],
    seconds: dict[str, float],
) -> tuple[Imported, ...]:
    """The program of the example, then those of other branches on sizes.

    `simplify` brings modules into a canonical form, in which two that compute the same
    look alike. The time spent in torch is added to `seconds`.
    """
    if isinstance(model, torch.export.ExportedProgram):
        tensors = {**model.constants, **model.state_dict}
        _, axes = _growing(example_inputs)
        ways = with_buffers([from_exported(model)], tensors)
        return tuple(_seeded(grown(way, axes)) for way in ways)
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"cannot compile a {type(model).__name__}: give an nn.Module, "
            "an ExportedProgram or a pliant IR module"
        )
    plain, axes = _growing(example_inputs)
    examples = _examples(model, plain)
    given = _examples(model, example_inputs)
    started = perf_counter()
    with cumulative(model):
        ways = programs(model, examples, dynamic_shapes, simplify=simplify)
    ways = with_buffers(ways, dict(model.named_buffers(remove_duplicate=False)))
    seconds["export"] = perf_counter() - started
    ways = tuple(grown(_seeded(way), axes) for way in ways)
    return tuple(
        replace(way, signature=way.signature.with_example(given, {})) for way in ways
    )


def _growing(inputs: Any) -> tuple[Any, dict[int, int]]:
    """Example inputs with the rows of what grows, and the axes, by argument."""
    leaves, structure = pytree.tree_flatten(inputs)
    axes = {k: g.axis for k, g in enumerate(leaves) if isinstance(g, Growing)}
    rows = [g.tensor.clone() if isinstance(g, Growing) else g for g in leaves]
    return pytree.tree_unflatten(rows, structure) if axes else inputs, axes


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


def _examples(model: torch.nn.Module, given: Any) -> tuple[Any, ...]:
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
