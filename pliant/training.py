"""`pliant.compile_training`: forward, backward and update as one compiled step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from pliant.api import Settings, build, settings, torch_signature
from pliant.errors import OptionError, PliantError
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Module, Names, Op, Value, names_of, substitute
from pliant.ir.types import DType, TensorType
from pliant.model import CompiledModel, is_integer, shown
from pliant.optimizers import Arithmetic, UpdateRule, rule_of, structure_of
from pliant.options import Options
from pliant.passes.training import Training
from pliant.signature import Parameters, Signature, TensorSlot
from pliant.sym import Guard, as_expr
from pliant.target import Target

NUMBERS, CLIP = "numbers", "clip_grad_norm"


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
    """
    chosen = settings(options, threads, target, memory_limit)
    _check(model, loss, example_inputs, clip_grad_norm)
    seconds: dict[str, float] = {}
    source = _import(model, loss, example_inputs, dynamic_shapes, seconds)
    made = _optimizer(optimizer, source.parameters)
    groups = _groups(made, source.parameters)
    state = State(source, made, groups, clip_grad_norm)
    main = state.declare(source.module.main)
    module = source.module.with_main(main)
    step = build(
        module,
        state.signature(main),
        chosen,
        seconds,
        source.assumptions,
        Training(state.names, state.extend, state.updates, len(source.buffers)),
        TrainingStep,
        model,
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
    user: Signature  # of (inputs, targets)
    parameters: Mapping[str, Any]  # a param of main -> torch's parameter
    buffers: Mapping[str, Any]  # a param of main -> torch's tensor, which main changes
    assumptions: tuple[Guard, ...]
    seed: str | None  # the param that random numbers follow from


def _import(
    model: Any,
    loss: Callable[..., Any],
    examples: tuple[tuple[Any, ...], tuple[Any, ...]],
    shapes: Any,
    seconds: dict[str, float],
) -> Source:
    import torch

    from pliant.frontend import torch_export as front

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
        program, info = front.export_module(whole, pair, shapes, training=True)
    seconds["export"] = perf_counter() - started
    started = perf_counter()
    imported = front.from_exported(program, info, training=True)
    module, parameters, buffers = _variables(imported.module, whole, imported.changed)
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
        module, user, parameters, buffers, imported.assumptions, imported.seed
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
) -> tuple[Module, dict[str, Any], dict[str, Any]]:
    """Constants that are trained, or changed, become params of `main`.

    The last results of `main` are the new values of what is changed.
    """
    tensors = {
        name: p
        for name, p in reversed(list(whole.named_parameters()))
        if p.requires_grad
    }
    tensors |= {name: whole.get_buffer(name) for name in changed}
    trained = {(t.data_ptr(), tuple(t.shape)): (name, t) for name, t in tensors.items()}
    main = module.main
    params: list[Value] = []
    parameters: dict[str, Any] = {}
    buffers: dict[str, tuple[str, Any]] = {}
    names, mapping = Names([*names_of(main), NUMBERS, CLIP]), dict[Value, Value]()
    ops: list[Op] = []
    for op in main.ops:
        found = None
        if op.name == "constant":
            kept: Any = module.constants[op.str_attr("name")].keep
            key = (kept.data_ptr(), tuple(kept.shape)) if kept is not None else None
            found = trained.get(key) if key is not None else None
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
    return module.with_main(graph), parameters, dict(buffers[p] for p in changed)


# ---- the optimizer


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters of `main` that one group of the optimizer updates alike."""

    options: Mapping[str, Any]  # the optimizer's own, read at every step
    rule: UpdateRule
    structure: tuple[object, ...]
    names: tuple[str, ...]


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


def _groups(optimizer: Any, parameters: Mapping[str, Any]) -> tuple[Group, ...]:
    """The optimizer's groups; a parameter in none of them is not trained."""
    by_memory = {p.data_ptr(): name for name, p in parameters.items() if p.numel()}
    by_memory |= {id(p): name for name, p in parameters.items()}
    groups: list[Group] = []
    for options in optimizer.param_groups:
        names = [
            by_memory.get(id(p), by_memory.get(p.data_ptr())) for p in options["params"]
        ]
        known = tuple(dict.fromkeys(n for n in names if n is not None))
        if known:
            rule, kind = rule_of(optimizer, options), structure_of(optimizer, options)
            groups.append(Group(options, rule, kind, known))
    if not groups:
        raise OptionError("the optimizer has none of the parameters the loss reads")
    return tuple(groups)


class State:
    """What a step reads and writes beside its arguments, and how it updates it."""

    def __init__(
        self,
        source: Source,
        optimizer: Any,
        groups: tuple[Group, ...],
        clip: float | None,
    ) -> None:
        import torch

        self.source, self.optimizer, self.groups = source, optimizer, groups
        self.clip = clip
        self.names = tuple(name for group in groups for name in group.names)
        self.held = [
            (name, slot)
            for group in groups
            for name in group.names
            for slot in group.rule.state
        ]
        width = max(len(group.rule.numbers) for group in groups)
        self.shape = (len(groups), width)
        self.numbers = torch.zeros(self.shape, dtype=torch.float64)
        self.clip_value = torch.full((), clip or 0.0, dtype=torch.float64)
        self.seed = torch.zeros((), dtype=torch.int64)

    @property
    def updates(self) -> tuple[str, ...]:
        held = (f"{name}.{slot}" for name, slot in self.held)
        return (*self.source.buffers, *self.names, *held)

    # ---- what is compiled

    def declare(self, main: Graph) -> Graph:
        """`main`, with the state, the numbers and the seed as more params."""
        types = {v.name: v.type for v in main.params}
        more = [Value(f"{name}.{slot}", types[name]) for name, slot in self.held]
        size = tuple(as_expr(n) for n in self.shape)
        more.append(Value(NUMBERS, TensorType(DType.F64, size)))
        if self.clip is not None:
            more.append(Value(CLIP, TensorType(DType.F64, ())))
        return main.replace(params=(*main.params, *more))

    def extend(
        self, b: Builder, params: dict[str, Value], grads: Sequence[Value]
    ) -> list[Value]:
        """The new parameters and states, in the order of `updates` behind buffers."""
        gradients = dict(zip(self.names, grads, strict=True))
        if self.clip is not None:
            gradients = _clipped(b, gradients, params[CLIP])
        new: dict[str, Value] = {}
        for row, group in enumerate(self.groups):
            for name in group.names:
                p, g = params[name], gradients[name]
                held = [params[f"{name}.{slot}"] for slot in group.rule.state]
                made = _updated(b, group.rule, p, g, held, params[NUMBERS], row)
                keys = (name, *(f"{name}.{slot}" for slot in group.rule.state))
                new.update(zip(keys, made, strict=True))
        return [new[key] for key in self.updates[len(self.source.buffers) :]]

    def signature(self, main: Graph) -> Signature:
        """The caller's arguments, then all that the step holds itself."""
        user = self.source.user
        own = len([a for a in user.arguments if isinstance(a, TensorSlot)])
        more = tuple(TensorSlot(v.name, v.type) for v in main.params[own:])

        def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
            return [*user.flatten_arguments(args, kwargs), *self.tensors(main)]

        return replace(
            user,
            arguments=(*user.arguments, *more),
            flatten_arguments=flatten,
            positional=False,
        )

    # ---- what a call is given

    def tensors(self, main: Graph) -> list[Any]:
        """All tensors behind the caller's, in the order of main's params."""
        parameters = self.source.parameters
        own = {NUMBERS: self.numbers, CLIP: self.clip_value, **self.source.buffers}
        if self.source.seed is not None:
            own[self.source.seed] = self.seed
        held = {f"{name}.{slot}": (name, slot) for name, slot in self.held}
        out: list[Any] = []
        for value in main.params:
            if value.name in parameters:
                out.append(parameters[value.name].detach())
            elif value.name in held:
                name, slot = held[value.name]
                out.append(self.slot(parameters[name], slot))
            elif value.name in own:
                out.append(own[value.name])
        return out

    def slot(self, parameter: Any, slot: str) -> Any:
        """A state of the optimizer's, made if it is not there yet."""
        import torch

        state = self.optimizer.state[parameter]
        if state.get(slot) is None:
            state[slot] = torch.zeros_like(
                parameter, memory_format=torch.contiguous_format
            )
        return state[slot]

    def begin(self) -> None:
        """Reads the optimizer's numbers for the step to come."""
        for row, group in enumerate(self.groups):
            kind = structure_of(self.optimizer, group.options)
            if kind != group.structure:
                raise OptionError(
                    "momentum, nesterov, amsgrad or maximize of the optimizer were "
                    "switched since the step was compiled: compile it again"
                )
            before = self.steps_before(group)
            told = group.rule.told(group.options, before)
            for column, number in enumerate(told):
                self.numbers[row, column] = number
        if self.clip is not None:
            self.clip_value.fill_(self.clip)
        self.draw()

    def draw(self) -> None:
        """A seed for the call to come, from torch's generator."""
        if self.source.seed is not None:
            self.seed.random_(-(2**63), None)

    def steps_before(self, group: Group) -> int:
        parameters = [self.source.parameters[name] for name in group.names]
        states = [self.optimizer.state.get(p) or {} for p in parameters]
        if not group.rule.counts:
            slots = group.rule.state
            return int(any(s.get(slot) is not None for s in states for slot in slots))
        counts = {int(s["step"]) if "step" in s else 0 for s in states}
        if len(counts) > 1:
            raise OptionError(
                "parameters of one group have been updated a different number of "
                "times: put them into groups of their own"
            )
        return counts.pop()

    def end(self) -> None:
        """Counts a step that was taken."""
        import torch

        # To autograd, and to compiled models that follow these tensors.
        changed = [self.source.parameters[name] for name in self.names]
        changed += self.source.buffers.values()
        torch.autograd.graph.increment_version(changed)
        self.optimizer._opt_called = True  # what torch's schedulers look at
        for group in self.groups:
            if not group.rule.counts:
                continue
            for name in group.names:
                state = self.optimizer.state[self.source.parameters[name]]
                if "step" not in state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                state["step"] += 1


def _clipped(b: Builder, grads: dict[str, Value], most: Value) -> dict[str, Value]:
    """All gradients times min(1, most / (norm + 1e-6)), as torch clips them."""
    squares: Value | None = None
    for g in grads.values():
        wide = b.cast(g, g.dtype.compute)
        part = b.reduce("sum", b.emit("mul", wide, wide))
        part = b.cast(part, DType.F64)
        squares = part if squares is None else b.emit("add", squares, part)
    assert squares is not None
    below = b.binary("add", b.unary("sqrt", squares), b.scalar(1e-6, DType.F64))
    ratio = b.emit("div", most, below)
    factor = b.binary("minimum", ratio, b.scalar(1.0, DType.F64))
    return {
        name: b.binary("mul", g, b.cast(factor, g.dtype)) for name, g in grads.items()
    }


def _updated(
    b: Builder,
    rule: UpdateRule,
    p: Value,
    g: Value,
    state: Sequence[Value],
    numbers: Value,
    row: int,
) -> list[Value]:
    """The new parameter and state; computed in the type that arithmetic happens in."""
    wide = p.dtype.compute

    def number(column: int) -> Value:
        one = b.emit("slice", numbers, starts=(row, column), shape=(1, 1), steps=(1, 1))
        return b.cast(b.reshape(one, ()), wide)

    told = {name: number(k) for k, name in enumerate(rule.numbers)}
    g = b.cast(g, wide)
    if rule.maximize:
        g = b.unary("neg", g)
    held = [b.cast(s, wide) for s in state]
    made = rule.emit(Arithmetic(b), b.cast(p, wide), g, held, told)
    return [b.cast(v, p.dtype) for v in made]


# ---- the step


class TrainingStep(CompiledModel):
    """Native code for one step of training, at every shape: `step(inputs, targets)`.

    Gives the loss before the update. The parameters are the model's own, the state is
    the optimizer's own.
    """

    _source: Source
    _state: State
    _chosen: Settings
    _gradients: CompiledModel | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self._state.begin()
        loss = super().__call__(*args, **kwargs)
        self._state.end()
        return loss

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
                _with_gradients(self._state, main, len(names)),
                self._chosen,
                {},
                self._source.assumptions,
                Training(
                    names,
                    lambda b, params, grads: grads,
                    changed=len(self._source.buffers),
                ),
                owner=self._weights.owner,
            )
        self._state.draw()
        loss, *found = self._gradients(inputs, targets)
        return loss, dict(zip(names, found, strict=True))


def _with_gradients(state: State, main: Graph, count: int) -> Signature:
    from pliant.signature import Result

    made = state.signature(main)
    results = tuple(Result(tensor=k) for k in range(1 + count))
    return replace(made, results=results, unflatten_results=tuple, single=False)
