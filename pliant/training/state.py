"""The tensors that a training step reads and writes besides its arguments.

They belong to the module and the optimizer. At each call, parameters and buffers are
looked up in the module, groups and options in `optimizer.param_groups`, state in
`optimizer.state`. The compiled code follows changes of values, of memory, and of
options that are numbers; for any other change, a `StepChangedError` says what has
changed. Nothing is written to the optimizer before a step has succeeded:

    bind      tensors for a call; state that is not there yet is made, but not stored
    (the call)
    commit    stores new state, counts the step, and tells torch what was written
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.errors import OptionError, StepChangedError
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Value
from pliant.ir.types import DType, TensorType
from pliant.model.stored_step import CLIP, NUMBERS
from pliant.sym import as_expr
from pliant.training.optimizers import (
    UpdateRule,
    clipped,
    rule_of,
    structure_of,
    updated,
)
from pliant.training.variables import AGAIN, Variable, VariablePlace

# ---- the optimizer


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters of `main` that one group of the optimizer updates alike."""

    rule: UpdateRule
    structure: tuple[object, ...]
    names: tuple[str, ...]


def assigned(optimizer: Any, names: Mapping[int, str]) -> dict[int, dict[str, Any]]:
    """The trained parameters, by name, of each group of the optimizer.

    `names` are those of the parameters that the loss reads, by id.
    """
    found: dict[int, dict[str, Any]] = {}
    for number, options in enumerate(optimizer.param_groups):
        for p in options["params"]:
            name = names.get(id(p))
            if name is not None and p.requires_grad:
                found.setdefault(number, {})[name] = p
    return found


def groups_of(optimizer: Any, names: Mapping[int, str]) -> tuple[Group, ...]:
    """The optimizer's groups; a parameter in none of them is not trained."""
    check_hooks(optimizer, ())
    groups = []
    for number, members in assigned(optimizer, names).items():
        options = optimizer.param_groups[number]
        check_hooks(optimizer, members.items())
        rule, kind = rule_of(optimizer, options), structure_of(optimizer, options)
        groups.append(Group(rule, kind, tuple(members)))
    if not groups:
        raise OptionError("the optimizer has none of the parameters the loss reads")
    return tuple(groups)


def check_hooks(optimizer: Any, members: Iterable[tuple[str, Any]]) -> None:
    """Refuses hooks that torch would call in a step: compiled code does not."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise OptionError(
            "the optimizer has step hooks, which a compiled step does not call: "
            "remove them, and do their work between steps"
        )
    for name, p in members:
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise OptionError(
                f"parameter '{name}' has a hook on its gradient, which a compiled step "
                "does not call: remove it"
            )


# ---- a call


@dataclass(slots=True)
class BoundTensors:
    """The tensors of one call by main's params, and what becomes of them after it."""

    tensors: dict[str, Any] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)  # the module's own objects
    fresh: list[tuple[Any, str, Any]] = field(default_factory=list)  # state to store
    counted: list[Any] = field(default_factory=list)  # parameters whose step counts
    written: list[Any] = field(default_factory=list)
    taken: bool = False  # the step has succeeded

    def tell_torch(self) -> None:
        """Increments torch's version counters of all that compiled code wrote."""
        from torch.autograd.graph import increment_version

        increment_version(self.written)


@dataclass(slots=True)
class State:
    """The variables of a step, where they are, and how they are updated."""

    root: Any  # the module that holds model and loss
    variables: tuple[Variable, ...]  # parameters
    buffers: tuple[Variable, ...]  # that the model changes
    frozen: tuple[VariablePlace, ...]  # of parameters and buffers that are constants
    optimizer: Any
    groups: tuple[Group, ...]
    clip: float | None
    seed_name: str | None  # the param that random numbers follow from
    seed: Any = None
    bound: BoundTensors | None = None  # of the call that is running

    @property
    def names(self) -> tuple[str, ...]:
        """The trained parameters."""
        return tuple(name for group in self.groups for name in group.names)

    @property
    def held(self) -> list[tuple[str, str]]:
        return [
            (name, slot)
            for group in self.groups
            for name in group.names
            for slot in group.rule.state
        ]

    @property
    def updates(self) -> tuple[str, ...]:
        buffers = (buffer.name for buffer in self.buffers)
        return (*buffers, *self.names, *(f"{name}.{slot}" for name, slot in self.held))

    # ---- what is compiled

    @property
    def key(self) -> str:
        """What `extend` computes, in words: two states with one key compute alike."""
        groups = ((group.structure, group.names) for group in self.groups)
        kind = type(self.optimizer).__name__
        return f"{kind} {list(groups)} clip={self.clip is not None}"

    def declare(self, main: Graph) -> Graph:
        """`main`, with the state and the numbers as more params."""
        types = {v.name: v.type for v in main.params}
        more = [Value(f"{name}.{slot}", types[name]) for name, slot in self.held]
        width = max(len(group.rule.numbers) for group in self.groups)
        size = (as_expr(len(self.groups)), as_expr(width))
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
            gradients = clipped(b, gradients, params[CLIP])
        new: dict[str, Value] = {}
        for row, group in enumerate(self.groups):
            for name in group.names:
                p, g = params[name], gradients[name]
                held = [params[f"{name}.{slot}"] for slot in group.rule.state]
                made = updated(b, group.rule, p, g, held, params[NUMBERS], row)
                keys = (name, *(f"{name}.{slot}" for slot in group.rule.state))
                new.update(zip(keys, made, strict=True))
        return [new[key] for key in self.updates[len(self.buffers) :]]

    # ---- before a call

    def look_up(self) -> BoundTensors:
        """The module's tensors as they are now."""
        bound = BoundTensors()
        owners: dict[int, str] = {}
        for variable in (*self.variables, *self.buffers):
            tensor = variable.find(self.root)
            name = variable.name
            if owners.setdefault(id(tensor), name) != name:
                raise StepChangedError(
                    f"'{owners[id(tensor)]}' and '{name}' were two tensors when the "
                    f"step was compiled, and are one now: {AGAIN}"
                )
            bound.tensors[name] = tensor.detach()
            bound.found[name] = tensor
        return bound

    def bind(self) -> BoundTensors:
        """All that a step needs; nothing is changed yet."""
        import torch

        with torch.inference_mode(False):
            bound = self.look_up()
            found = self._found_groups(bound.found)
            bound.written = [bound.found[v.name] for v in self.buffers]
            rows = []
            for group, options in zip(self.groups, found, strict=True):
                members = {name: bound.found[name] for name in group.names}
                check_hooks(self.optimizer, members.items())
                before = self._steps_before(group, members, options)
                rows.append(list(group.rule.numbers_of(options, before)))
                self._bind_state(group, members, bound)
                bound.written += members.values()
            width = max(map(len, rows))
            rows = [[*row, *[0.0] * (width - len(row))] for row in rows]
            bound.tensors[NUMBERS] = torch.tensor(rows, dtype=torch.float64)
            if self.clip is not None:
                bound.tensors[CLIP] = torch.tensor(self.clip, dtype=torch.float64)
            return bound

    def _found_groups(self, tensors: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The options of each compiled group now; the trained must be the same."""
        names = {id(tensors[v.name]): v.name for v in self.variables}
        now = assigned(self.optimizer, names)
        trained = {name: number for number, m in now.items() for name in m}
        compiled = self.names
        for name in compiled:
            if name not in trained:
                raise self._not_trained(name, tensors[name])
        extra = [name for name in trained if name not in set(compiled)]
        frozen = {id(place.tensor(self.root)): place.name for place in self.frozen}
        extra += [
            frozen[id(p)]
            for options in self.optimizer.param_groups
            for p in options["params"]
            if id(p) in frozen and p.requires_grad
        ]
        if extra:
            raise StepChangedError(
                f"parameter '{extra[0]}' is trained now (unfrozen, or added to the "
                f"optimizer), and was not when the step was compiled: {AGAIN}"
            )
        found = []
        for group in self.groups:
            numbers = {trained[name] for name in group.names}
            if len(numbers) > 1:
                raise StepChangedError(
                    "parameters that were in one group of the optimizer when the step "
                    f"was compiled are in several now: {AGAIN}"
                )
            options = self.optimizer.param_groups[numbers.pop()]
            if structure_of(self.optimizer, options) != group.structure:
                raise StepChangedError(
                    "momentum, nesterov, amsgrad or maximize of the optimizer were "
                    f"switched on or off since the step was compiled: {AGAIN}"
                )
            found.append(options)
        return found

    def _not_trained(self, name: str, tensor: Any) -> StepChangedError:
        held = any(
            p is tensor for o in self.optimizer.param_groups for p in o["params"]
        )
        if held:
            why = "was frozen (requires_grad is False) after the step was compiled"
        else:
            why = (
                "is not in the optimizer: it was replaced in the model, or taken out "
                "of the optimizer, after the step was compiled"
            )
        return StepChangedError(f"parameter '{name}' {why}: {AGAIN}")

    def _steps_before(
        self, group: Group, members: Mapping[str, Any], options: Mapping[str, Any]
    ) -> int:
        """How many steps the group's parameters have taken."""
        states = [self.optimizer.state.get(p) or {} for p in members.values()]
        if group.rule.counts:
            counts = {int(s["step"]) if "step" in s else 0 for s in states}
        else:
            counts = {
                int(all(s.get(slot) is not None for slot in group.rule.state))
                for s in states
            }
            if not options.get("dampening"):  # then the first step is no exception
                counts = {max(counts)}
        if len(counts) > 1:
            raise StepChangedError(
                "parameters of one group of the optimizer have been updated a "
                f"different number of times ({min(counts)} and {max(counts)}): put "
                f"them into groups of their own, and {AGAIN}"
            )
        return counts.pop()

    def _bind_state(
        self, group: Group, members: Mapping[str, Any], b: BoundTensors
    ) -> None:
        """The optimizer's state, or new state to be stored once the step succeeds."""
        import torch

        variables = {v.name: v for v in self.variables}
        for name, p in members.items():
            state = self.optimizer.state.get(p) or {}
            for slot in group.rule.state:
                tensor = state.get(slot)
                if tensor is None and group.rule.counts and "step" in state:
                    raise StepChangedError(
                        f"the optimizer's state of '{name}' counts steps, but has no "
                        f"'{slot}': load a whole state"
                    )
                if tensor is None:
                    tensor = torch.zeros_like(
                        p, memory_format=torch.contiguous_format, requires_grad=False
                    )
                    b.fresh.append((p, slot, tensor))
                elif not tensor.is_contiguous():
                    tensor = tensor.contiguous()
                    b.fresh.append((p, slot, tensor))
                variables[name].check(f"the optimizer's {slot} of '{name}'", tensor)
                b.tensors[f"{name}.{slot}"] = tensor
                b.written.append(tensor)
            if group.rule.counts:
                b.counted.append(p)

    def draw(self, bound: BoundTensors) -> None:
        """A seed for the call to come, from torch's generator."""
        if self.seed_name is not None:
            self.seed.random_(-(2**63), None)
            bound.tensors[self.seed_name] = self.seed

    # ---- after it

    def commit(self, bound: BoundTensors) -> None:
        """Stores what a step that succeeded has made, and counts it."""
        import torch

        bound.taken = True
        wide = torch.get_default_dtype() is torch.float64  # as torch's optimizers do
        kind = torch.float64 if wide else torch.float32
        with torch.inference_mode(False), torch.no_grad():
            states = self.optimizer.state
            for p in bound.counted:
                state = states[p]
                if "step" not in state:
                    state["step"] = torch.zeros((), dtype=kind)
                state["step"] += 1
            for p, slot, tensor in bound.fresh:
                states[p][slot] = tensor
            bound.tell_torch()
        self.optimizer._opt_called = True  # what torch's schedulers look at
