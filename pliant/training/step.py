"""`pliant.compile_training`: forward, backward and update as one compiled step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from pliant.api import SILENT_SECONDS, Settings, build, settings
from pliant.context import Training
from pliant.errors import ArtifactError, OptionError, SpillError
from pliant.frontend.signature import Signature, TensorResult, TensorSlot
from pliant.frontend.torch_tensors import need_torch, without_data
from pliant.ir.graph import Graph
from pliant.machine.target import Target
from pliant.model.arguments import is_integer, shown
from pliant.model.compiled import CompiledModel
from pliant.model.stored_step import CLIP, NUMBERS
from pliant.model.weights import FollowingWeights
from pliant.model.weights import places_of as weight_places
from pliant.options import Instruments, Options
from pliant.pipeline import simplified
from pliant.progress import task
from pliant.training.state import BoundTensors, State, groups_of
from pliant.training.variables import Variable, places_of

if TYPE_CHECKING:
    from pliant.frontend.torch_train import TrainingSource


@task("compiling a training step", after=SILENT_SECONDS)
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
    module = source.imported.module
    main = state.declare(module.main)
    # A loss may have tensors too.
    owner = source.root if hasattr(loss, "named_buffers") else model
    own = {id(t) for t in (*source.parameters.values(), *source.buffers.values())}
    step = build(
        replace(
            source.imported,
            module=module.with_main(main),
            signature=_signature(source, state, main),
        ),
        chosen,
        seconds,
        Training(
            state.names, state.extend, state.updates, len(source.buffers), state.key
        ),
        TrainingStep,
        owner,
        apart=frozenset(p for p, tensor in weight_places(owner) if id(tensor) in own),
    )
    step._source, step._state, step._chosen = source, state, chosen
    return step


def _import(
    model: Any, loss: Callable[..., Any], examples: Any, shapes: Any, seconds: Any
) -> TrainingSource:
    from pliant.frontend.torch_train import import_training

    taken = (NUMBERS, CLIP)
    return import_training(model, loss, examples, shapes, taken, simplified, seconds)


def _check(model: Any, loss: Any, examples: Any, clip: Any) -> None:
    need_torch("compiling a training step")
    import torch

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


# ---- its state


def _state(source: TrainingSource, given: Any, clip: float | None) -> State:
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
        source.imported.signature.seed,
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


def _signature(source: TrainingSource, state: State, main: Graph) -> Signature:
    """The caller's arguments, then all that the step holds itself."""
    user = source.imported.signature
    own = len([a for a in user.arguments if isinstance(a, TensorSlot)])
    params = main.params[own:]
    shapes = [without_data(v.type) for v in params]

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


# ---- the step


class TrainingStep(CompiledModel):
    """Native code for one step of training, at every shape: `step(inputs, targets)`.

    Gives the loss before the update. The parameters are the model's own, the state is
    the optimizer's own. A call that raises has changed nothing; steps from several
    threads are taken one after the other.
    """

    _source: TrainingSource
    _state: State
    _chosen: Settings
    _weights: FollowingWeights
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

    def save(
        self, path: str | os.PathLike[str], *, variants: Sequence[CompiledModel] = ()
    ) -> str:
        """Writes the step and all of its state to one file: docs/artifacts.md.

        `pliant.load` gives a step with parameters, optimizer state and counters of its
        own, which goes on as this one would. Returns the digest of the content.
        """
        from pliant.training.saving import save_step

        if variants:
            raise ArtifactError("a training step is saved for one target")
        with self._lock:
            return save_step(self, path)

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
            source = self._source
            self._gradients = build(
                replace(
                    source.imported,
                    signature=_with_gradients(source, self._state, len(names)),
                ),
                self._chosen,
                {},
                Training(
                    names,
                    lambda b, params, grads: grads,
                    changed=len(source.buffers),
                    key="gradients",
                ),
                owner=self._weights.owner,
                apart=self._weights.apart,
            )
        with self._lock, _drawn(self._state, self._state.look_up()):
            loss, *found = self._gradients(inputs, targets)
        return loss, dict(zip(names, found, strict=True))


@contextmanager
def _drawn(state: State, bound: BoundTensors) -> Iterator[BoundTensors]:
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


def _with_gradients(source: TrainingSource, state: State, count: int) -> Signature:
    made = _signature(source, state, source.imported.module.main)
    results = tuple(TensorResult(k) for k in range(1 + count))
    return replace(made, results=results, unflatten_results=tuple, plain=False)
