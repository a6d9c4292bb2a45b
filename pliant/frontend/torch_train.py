"""A torch model and its loss -> one program, whose parameters are inputs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from pliant.errors import OptionError
from pliant.frontend.contract import Imported
from pliant.frontend.torch_programs import programs
from pliant.frontend.torch_state import cumulative, memory_of, promoted
from pliant.ir.graph import Constant, Module


@dataclass(frozen=True, slots=True)
class TrainingSource:
    """An imported model and loss; the last params of `main` are variables.

    The signature is that of (inputs, targets) alone.
    """

    imported: Imported
    root: torch.nn.Module  # of model and loss
    parameters: Mapping[str, Any]  # a param of main -> torch's parameter
    buffers: Mapping[str, Any]  # a param of main -> torch's tensor, which main changes
    frozen: tuple[Any, ...]  # torch's tensors that are constants of main


class _WithLoss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: tuple[Any, ...], targets: tuple[Any, ...]) -> Any:
        return self.loss(self.model(*inputs), *targets)


def import_training(
    model: torch.nn.Module,
    loss: Callable[..., Any],
    examples: tuple[tuple[Any, ...], tuple[Any, ...]],
    shapes: Any,
    reserved: Sequence[str],
    simplify: Callable[[Module], Module],
    seconds: dict[str, float],
) -> TrainingSource:
    """No variable is called by a `reserved` name; times are noted in `seconds`."""
    whole = _WithLoss(model, loss)
    whole.training = model.training
    started = perf_counter()
    pair = (tuple(examples[0]), tuple(examples[1]))
    with cumulative(model):
        # Sizes at which the code goes another way are refused.
        imported = programs(whole, pair, shapes, training=True, simplify=simplify)[0]
    seconds["export"] = perf_counter() - started
    started = perf_counter()
    module, parameters, buffers, frozen = _variables(
        imported.module, whole, imported.signature.changed, reserved
    )
    (result, *more) = module.main.results[: len(module.main.results) - len(buffers)]
    if more or result.type.rank != 0 or not result.dtype.is_float:
        kinds = ", ".join(str(v.type) for v in (result, *more))
        raise OptionError(
            f"the loss must give one number, a tensor of no dims; it gives {kinds}: "
            "take its mean or sum"
        )
    imported = replace(
        imported,
        module=module,
        signature=imported.signature.with_example(pair, {}),
    )
    seconds["import"] = perf_counter() - started
    return TrainingSource(imported, whole, parameters, buffers, tuple(frozen))


def _variables(
    module: Module,
    whole: torch.nn.Module,
    changed: Sequence[str],
    reserved: Sequence[str],
) -> tuple[Module, dict[str, Any], dict[str, Any], list[Any]]:
    """Constants that are trained, or changed, become params of `main`.

    The last results of `main` are the new values of what is changed. The last of what
    is given are the module's tensors that stay constants.
    """
    tensors: dict[str, Any] = {
        name: p for name, p in whole.named_parameters() if p.requires_grad
    }
    _check_memory(tensors)
    tensors |= {name: whole.get_buffer(name) for name in changed}
    trained = {memory_of(name, t): (name, t) for name, t in tensors.items()}
    others = {
        memory_of(name, t): t
        for name, t in (*whole.named_buffers(), *whole.named_parameters())
        if name not in tensors
    }
    frozen: list[Any] = []

    def wanted(constant: Constant) -> str | None:
        kept: Any = constant.keep
        key = None if kept is None else memory_of(constant.name, kept)
        if key in others and key not in trained:
            frozen.append(others[key])
        if key not in trained:
            return None
        path, tensor = trained[key]
        if not tensor.is_contiguous():
            kind = "buffer" if path in changed else "parameter"
            raise OptionError(
                f"{kind} '{path.removeprefix('model.')}' is not contiguous: replace it "
                "by its .contiguous() before training"
            )
        return path

    made, params = promoted(module, wanted, reserved)
    parameters = {v.name: tensors[p] for p, v in params.items() if p not in changed}
    buffers = {params[path].name: tensors[path] for path in changed}
    if not parameters:
        raise OptionError("the loss depends on no parameter that requires a gradient")
    return made, parameters, buffers, frozen


def _check_memory(parameters: Mapping[str, Any]) -> None:
    """Two parameters in one memory would be one here; torch updates both."""
    seen: dict[object, str] = {}
    for name, p in parameters.items():
        other = seen.setdefault(memory_of(name, p), name)
        if other != name:
            pair = " and ".join(f"'{n.removeprefix('model.')}'" for n in (other, name))
            raise OptionError(
                f"the parameters {pair} share memory but are two tensors: "
                "let both names have the same nn.Parameter"
            )
