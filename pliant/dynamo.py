"""`torch.compile(model, backend="pliant", dynamic=True)`.

AOTAutograd splits a captured graph into forward and backward; each is compiled once
for every shape. Parameters are inputs, so an optimizer may change them. What torch
specialises (sizes 0 and 1, branches of the model's code) is guarded by torch, and
gives another graph. An op without translation is an UnsupportedOpError: nothing runs
in eager mode instead.

`options` may have `memory_limit` and `threads`, as `pliant.compile` takes them, `dims`
(names for axes of the function's arguments: {"ids": {0: "batch", 1: "seq"}}; a dim
without a name is called after its argument and axis, ids_1), and any field of
`pliant.Options`. The limit is for each call of a graph, and does not count what the
forward keeps for the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from pliant.api import build
from pliant.api import settings as checked_settings
from pliant.collection import paused_collection
from pliant.errors import OptionError
from pliant.frontend.signature import FixedResult, SizeResult
from pliant.frontend.torch_graph import (
    Argument,
    ArgumentWindow,
    Computed,
    DimNames,
    ImportedGraph,
    InputView,
    Output,
    ResultView,
    from_graph,
)
from pliant.frontend.torch_model import draw_seed
from pliant.frontend.torch_ops import decompositions
from pliant.model.arguments import parse_bytes
from pliant.model.compiled import CompiledModel
from pliant.options import Options
from pliant.sym.names import is_name

_COMPILED: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()


def backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend of torch.compile; found by the name "pliant" once installed."""
    if mode is not None:
        raise OptionError(
            f"the pliant backend has no mode {mode!r}: leave it out, or use options"
        )
    settings = _settings(options or {})

    def compiler(kind: str) -> Callable[..., Any]:
        return lambda graph, inputs: compile_graph(graph, kind, settings)

    compiled = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decompositions(),
    )
    result: Callable[..., Any] = compiled(gm, example_inputs)
    return result


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """torch.compile's options as arguments of `pliant.compile`."""
    switches = {field.name for field in fields(Options)}
    known = switches | {"memory_limit", "threads", "dims"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise OptionError(
            f"unknown option(s) of the pliant backend: {', '.join(unknown)}; "
            f"known: {', '.join(sorted(known))}"
        )
    chosen = {k: v for k, v in options.items() if k in switches}
    return {
        "memory_limit": parse_bytes(options.get("memory_limit")),
        "threads": options.get("threads"),
        "options": Options(**chosen),
        "dims": _dim_names(options.get("dims", {})),
    }


def _dim_names(given: Any) -> DimNames:
    """Names of dims, by the name of the function's argument and the axis."""
    fits = isinstance(given, Mapping) and all(
        isinstance(axes, Mapping)
        and all(isinstance(k, int) and is_name(name) for k, name in axes.items())
        for axes in given.values()
    )
    if not fits:
        raise OptionError(
            "the option 'dims' names axes of the function's arguments, such as "
            f"{{'ids': {{0: 'batch', 1: 'seq'}}}}; not {given!r}"
        )
    names: DimNames = given
    return names


@paused_collection()
def compile_graph(
    gm: GraphModule, kind: str, settings: Mapping[str, Any]
) -> CompiledGraph:
    """One graph of AOTAutograd as something to call with the list of its inputs."""
    settings = dict(settings)
    names = settings.pop("dims", {})
    with _disable_current_modes():
        imported = from_graph(gm, names)
        model: CompiledModel | None = None
        if imported.program.module.main.results:
            chosen = checked_settings(**settings, target=None)
            model = build(imported.program, chosen, {})
    graph = CompiledGraph(imported, model, kind)
    _COMPILED.add(graph)
    return graph


def compiled_graphs() -> list[CompiledGraph]:
    """The graphs of this process that torch still holds."""
    return sorted(_COMPILED, key=lambda graph: graph.number)


class CompiledGraph:
    """Calls a compiled model as AOTAutograd calls a graph.

    `kind` is "inference", "forward" or "backward"; `model` is None where a graph only
    passes inputs on.
    """

    _count = 0

    def __init__(
        self, imported: ImportedGraph, model: CompiledModel | None, kind: str
    ) -> None:
        self._boxed_call = True  # to torch: takes a list, and empties it
        self.model, self.kind = model, kind
        CompiledGraph._count += 1
        self.number = CompiledGraph._count
        self._arguments, self._sizes = imported.arguments, imported.sizes
        self._seeded = imported.seeded
        self._sources, self._outputs = imported.sources, imported.outputs
        self._symbolic = any(map(_needs_sizes, imported.outputs))

    def __call__(self, args: list[Any]) -> list[Any]:
        inputs = tuple(args)
        args.clear()
        results: tuple[Any, ...] = ()
        if self.model is not None:
            given = [_stored(inputs[a.number], a) for a in self._arguments]
            if self._seeded:  # torch.manual_seed decides, as in eager mode
                given.append(draw_seed())
            given += [inputs[source.number] for source in self._sizes]
            made = self.model(*given)
            results = made if isinstance(made, tuple) else (made,)
        env = self._environment(inputs) if self._symbolic else {}
        return [_output(item, inputs, results, env) for item in self._outputs]

    def _environment(self, inputs: Sequence[Any]) -> dict[str, int]:
        env = {}
        for name, source in self._sources.items():
            value = inputs[source.number]
            env[name] = int(value if source.axis is None else value.shape[source.axis])
        return env


def _stored(tensor: torch.Tensor, argument: Argument) -> torch.Tensor:
    return tensor if argument.order is None else tensor.permute(argument.order)


def _needs_sizes(item: Output) -> bool:
    match item:
        case SizeResult() | ResultView() | InputView(window=ArgumentWindow()):
            return True
        case _:
            return False


def _output(
    item: Output,
    inputs: Sequence[Any],
    results: Sequence[Any],
    env: Mapping[str, int],
) -> Any:
    match item:
        case Computed():
            return _computed(item, results)
        case InputView(number, None):
            return inputs[number]
        case InputView(number, ArgumentWindow() as window):
            return _view(inputs[number], window, env)
        case ResultView(base, window):
            return _view(_computed(base, results), window, env)
        case SizeResult(value):
            return value.evaluate(env)
        case FixedResult(fixed):
            return fixed


def _computed(item: Computed, results: Sequence[Any]) -> torch.Tensor:
    made: torch.Tensor = results[item.result]
    return made if item.axes is None else made.permute(item.axes)


def _view(
    tensor: torch.Tensor, window: ArgumentWindow, env: Mapping[str, int]
) -> torch.Tensor:
    return tensor.detach().as_strided(
        [n.evaluate(env) for n in window.shape],
        [n.evaluate(env) for n in window.strides],
        tensor.storage_offset() + window.offset.evaluate(env),
    )
