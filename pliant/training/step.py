"""`pliant.compile_training`: forward, backward and update as one compiled step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from time import perf_counter
from typing import Any

from pliant.api import Settings, build, settings, torch_signature
from pliant.context import Training
from pliant.errors import OptionError, PliantError, SpillError
from pliant.frontend.signature import Parameters, Signature, TensorSlot
from pliant.ir.graph import Graph, Module, Names, Op, Value, names_of, substitute
from pliant.machine.target import Target
from pliant.model.arguments import is_integer, shown
from pliant.model.compiled import CompiledModel
from pliant.options import Instruments, Options
from pliant.training.state import CLIP, NUMBERS, Bound, State, groups_of
from pliant.training.variables import Variable, places_of


def compile_training(
    model: Any,
    loss: Callable[..., Any],
    optimizer: Any,
    example_inputs: tuple[tuple[Any, ...], tuple[Any, ...]],
    dynamic_shapes: Any = None,
    *,
    memory_limit: int | str | None = None,
    threads: int | None = None,
    options: Options | None = None,
    target: Target | None = None,
    clip_grad_norm: float | None = None,
    instruments: Instruments | None = None,
) -> TrainingStep:
    """Compiles a step of training, once for every shape: `step(inputs, targets)`.

    `loss` is called as `loss(model(*inputs), *targets)` and gives one number.
    `example_inputs` are the two tuples, `dynamic_shapes` has the same structure.
    `optimizer` is a torch SGD, Adam or AdamW over the model's parameters, or a
    `pliant.SGD` or `pliant.AdamW`. The step updates the model's own parameters and the
    optimizer's own state, and the buffers that the model itself changes, such as the
    statistics of a batch norm. Parameters that need no gradient, and other buffers, are
    followed, as a compiled model's are (docs/weights.md). `clip_grad_norm` bounds the
    norm of all gradients together.
    Model and optimizer are read again at every step; `StepChangedError` says what of
    them has changed if that needs another compile.
    """
    chosen = settings(options, threads, target, memory_limit, instruments)
    _check(model, loss, example_inputs, clip_grad_norm)
    seconds: dict[str, float] = {}
    source = _import(model, loss, example_inputs, dynamic_shapes, seconds)
    state = _state(source, optimizer, clip_grad_norm)
    main = state.declare(source.module.main)
    module = source.module.with_main(main)
    step = build(
        module,
        _signature(source, state, main),
        chosen,
        seconds,
        Training(state.names, state.extend, state.updates, len(source.buffers)),
        TrainingStep,
        # A loss may have tensors too.
        source.root if hasattr(loss, "named_buffers") else model,
    )
    step._source, step._state, step._chosen = source, state, chosen
    return step


def _check(model: Any, loss: Any, examples: Any, clip: Any) -> None:
    try:
        import torch
    except ImportError as error:
        raise PliantError(
            "compiling a training step needs torch: pip install 'pliant[torch]'"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"cannot train a {type(model).__name__}: give an nn.Module")
    if not callable(loss):
        raise OptionError("loss must be callable as loss(model_output, *targets)")
    pair = isinstance(examples, (tuple, list)) and len(examples) == 2
    if not pair or not all(isinstance(part, (tuple, list)) for part in examples):
        raise OptionError(
            "example_inputs must be two tuples, (model inputs, targets); "
            "for one of each write ((x,), (y,))"
        )
    number = isinstance(clip, float) or is_integer(clip)
    if clip is not None and not (number and clip > 0):
        raise OptionError(f"clip_grad_norm must be above 0, is {shown(clip)}")


# ---- the model


@dataclass(frozen=True, slots=True)
class Source:
    """An imported model and loss, the trained parameters among main's params."""

    module: Module
    root: Any  # a torch module of model and loss
    user: Signature  # of (inputs, targets)
    parameters: Mapping[str, Any]  # a param of main -> torch's parameter
    buffers: Mapping[str, Any]  # a param of main -> torch's tensor, which main changes
    frozen: tuple[Any, ...]  # torch's tensors that are constants of main
    seed: str | None  # the param that random numbers follow from


def _import(
    model: Any,
    loss: Callable[..., Any],
    examples: tuple[tuple[Any, ...], tuple[Any, ...]],
    shapes: Any,
    seconds: dict[str, float],
) -> Source:
    import torch

    from pliant.frontend.torch_programs import programs
    from pliant.pipeline import simplified

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.loss = loss

        def forward(self, inputs: tuple[Any, ...], targets: tuple[Any, ...]) -> Any:
            return self.loss(self.model(*inputs), *targets)

    whole = WithLoss()
    whole.training = model.training
    started = perf_counter()
    pair = (tuple(examples[0]), tuple(examples[1]))
    with _cumulative(model):
        # Sizes at which the code goes another way are refused.
        imported = programs(whole, pair, shapes, training=True, simplify=simplified)[0]
    seconds["export"] = perf_counter() - started
    started = perf_counter()
    module, parameters, buffers, frozen = _variables(
        imported.module, whole, imported.changed
    )
    (result, *more) = module.main.results[: len(module.main.results) - len(buffers)]
    if more or result.type.rank != 0 or not result.dtype.is_float:
        kinds = ", ".join(str(v.type) for v in (result, *more))
        raise OptionError(
            f"the loss must give one number, a tensor of no dims; it gives {kinds}: "
            "take its mean or sum"
        )
    user = torch_signature(imported, Parameters(("inputs", "targets")))
    user = user.with_example(pair, {})
    seconds["import"] = perf_counter() - started
    return Source(
        module,
        whole,
        user,
        parameters,
        buffers,
        tuple(frozen),
        imported.seed,
    )


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
    module: Module, whole: Any, changed: Sequence[str]
) -> tuple[Module, dict[str, Any], dict[str, Any], list[Any]]:
    """Constants that are trained, or changed, become params of `main`.

    The last results of `main` are the new values of what is changed. The last of what
    is given are the module's tensors that stay constants.
    """
    tensors = {name: p for name, p in whole.named_parameters() if p.requires_grad}
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
    names, mapping = Names([*names_of(main), NUMBERS, CLIP]), dict[Value, Value]()
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


# ---- its state


def _state(source: Source, given: Any, clip: float | None) -> State:
    import torch

    places = places_of(source.root)

    def variables(tensors: Mapping[str, Any]) -> tuple[Variable, ...]:
        return tuple(
            Variable(name, t.dtype, tuple(t.shape), tuple(places[id(t)]))
            for name, t in tensors.items()
        )

    made = _optimizer(given, source.parameters)
    names = {id(p): name for name, p in source.parameters.items()}
    return State(
        source.root,
        variables(source.parameters),
        variables(source.buffers),
        tuple(places[id(t)][0] for t in source.frozen),
        made,
        groups_of(made, names),
        clip,
        source.seed,
        torch.zeros((), dtype=torch.int64),
    )


def _optimizer(given: Any, parameters: Mapping[str, Any]) -> Any:
    import torch

    if isinstance(given, torch.optim.Optimizer):
        return given
    if hasattr(given, "build"):
        return given.build(parameters.values())
    raise OptionError(
        f"not an optimizer: {shown(given)}; give a torch optimizer, or pliant.SGD or "
        "pliant.AdamW"
    )


def _signature(source: Source, state: State, main: Graph) -> Signature:
    """The caller's arguments, then all that the step holds itself."""
    user = source.user
    own = len([a for a in user.arguments if isinstance(a, TensorSlot)])
    params = main.params[own:]
    shapes = [_without_data(v) for v in params]

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        given, bound = user.flatten_arguments(args, kwargs), state.bound
        if bound is None:  # a plan is asked for, not a step
            return [*given, *shapes]
        return [*given, *(bound.tensors[v.name] for v in params)]

    return replace(
        user,
        arguments=(*user.arguments, *(TensorSlot(v.name, v.type) for v in params)),
        flatten_arguments=flatten,
        positional=False,
    )


def _without_data(value: Value) -> Any:
    import torch

    from pliant.frontend.torch_ops_context import DTYPE_OF

    kinds = {ours: theirs for theirs, ours in DTYPE_OF.items()}
    shape = [dim.value for dim in value.shape]
    return torch.empty(shape, dtype=kinds[value.dtype], device="meta")


# ---- the step


class TrainingStep(CompiledModel):
    """Native code for one step of training, at every shape: `step(inputs, targets)`.

    Gives the loss before the update. The parameters are the model's own, the state is
    the optimizer's own. A call that raises has changed nothing; steps from several
    threads are taken one after the other.
    """

    _source: Source
    _state: State
    _chosen: Settings
    _gradients: CompiledModel | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = Lock()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with self._lock, _drawn(self._state, self._state.bind()) as bound:
            before = self._runtime.stats().calls
            try:
                return super().__call__(*args, **kwargs)
            except SpillError as error:
                if error.began:
                    bound.tell_torch()
                raise
            finally:
                # An interrupt is raised here although the step was taken.
                if self._runtime.stats().calls > before:
                    self._state.commit(bound)

    @property
    def optimizer(self) -> Any:
        """The torch optimizer whose options and state the step reads and writes."""
        return self._state.optimizer

    def gradients(self, inputs: tuple[Any, ...], targets: tuple[Any, ...]) -> Any:
        """(loss, {parameter's name: gradient}), nothing updated; before clipping.

        Compiled apart from the step, at the first use.
        """
        names = tuple(self._source.parameters)
        if self._gradients is None:
            main = self._source.module.main
            self._gradients = build(
                self._source.module,
                _with_gradients(self._source, self._state, main, len(names)),
                self._chosen,
                {},
                Training(
                    names,
                    lambda b, params, grads: grads,
                    changed=len(self._source.buffers),
                ),
                owner=self._weights.owner,
            )
        with self._lock, _drawn(self._state, self._state.look_up()):
            loss, *found = self._gradients(inputs, targets)
        return loss, dict(zip(names, found, strict=True))


@contextmanager
def _drawn(state: State, bound: Bound) -> Iterator[Bound]:
    """A call with these tensors, and a seed; if it fails, the seed is not used up."""
    import torch

    generator = torch.default_generator
    kept = None if state.seed_name is None else generator.get_state()
    try:
        state.draw(bound)
        state.bound = bound
        yield bound
    except BaseException:
        if kept is not None and not bound.taken:
            generator.set_state(kept)
        raise
    finally:
        state.bound = None


def _with_gradients(source: Source, state: State, main: Graph, count: int) -> Signature:
    from pliant.frontend.signature import Result

    made = _signature(source, state, main)
    results = tuple(Result(tensor=k) for k in range(1 + count))
    return replace(made, results=results, unflatten_results=tuple, single=False)
