"""A torch model and its loss -> one program, whose parameters are inputs of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from pliant.errors import OptionError
from pliant.frontend.contract import Imported
from pliant.frontend.torch_programs import programs
from pliant.ir.graph import Module, Names, Op, Value, names_of, substitute


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
    with _cumulative(model):
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


@contextmanager
def _cumulative(model: Any) -> Iterator[None]:
    """A momentum of None would make a trace read a count: it is NaN meanwhile."""
    norms = [
        m
        for m in model.modules()
        if getattr(m, "momentum", 0) is None and hasattr(m, "num_batches_tracked")
    ]
    for norm in norms:
        norm.momentum = math.nan
    try:
        yield
    finally:
        for norm in norms:
            norm.momentum = None


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
    trained = {_memory(name, t): (name, t) for name, t in tensors.items()}
    others = {
        _memory(name, t): t
        for name, t in (*whole.named_buffers(), *whole.named_parameters())
        if name not in tensors
    }
    frozen: list[Any] = []
    main = module.main
    params: list[Value] = []
    parameters: dict[str, Any] = {}
    buffers: dict[str, tuple[str, Any]] = {}
    names, mapping = Names([*names_of(main), *reserved]), dict[Value, Value]()
    ops: list[Op] = []
    for op in main.ops:
        found = None
        if op.name == "constant":
            constant = module.constants[op.str_attr("name")]
            kept: Any = constant.keep
            key = None if kept is None else _memory(constant.name, kept)
            found = None if key is None else trained.get(key)
            if found is None and key in others:
                frozen.append(others[key])
        if found is None:
            ops.append(substitute(op, mapping))
            continue
        path, tensor = found
        name = path.removeprefix("model.")
        if not tensor.is_contiguous():
            kind = "buffer" if path in changed else "parameter"
            raise OptionError(
                f"{kind} '{name}' is not contiguous: replace it by "
                "its .contiguous() before training"
            )
        params.append(Value(names.fresh(name), op.result.type))
        mapping[op.result] = params[-1]
        if path in changed:
            buffers[path] = (params[-1].name, tensor)
        else:
            parameters[params[-1].name] = tensor
    if not parameters:
        raise OptionError("the loss depends on no parameter that requires a gradient")
    results = tuple(mapping.get(v, v) for v in main.results)
    params = [*main.params, *params]
    graph = main.replace(params=tuple(params), ops=tuple(ops), results=results)
    made = module.with_main(graph)
    return made, parameters, dict(buffers[p] for p in changed), frozen


def _memory(name: str, tensor: Any) -> tuple[object, ...]:
    """What tells a tensor's memory from others'; one without any has a name."""
    where = tensor.data_ptr() if tensor.numel() else name
    return where, tuple(tensor.shape)


def _check_memory(parameters: Mapping[str, Any]) -> None:
    """Two parameters in one memory would be one here; torch updates both."""
    seen: dict[object, str] = {}
    for name, p in parameters.items():
        other = seen.setdefault(_memory(name, p), name)
        if other != name:
            pair = " and ".join(f"'{n.removeprefix('model.')}'" for n in (other, name))
            raise OptionError(
                f"the parameters {pair} share memory but are two tensors: "
                "let both names have the same nn.Parameter"
            )
