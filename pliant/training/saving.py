"""A training step -> a file: its state is that of the module and the optimizer now."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pliant.artifact.save import SavedProgram, SavedVariant, save
from pliant.artifact.stored import StoredGroup, StoredTraining
from pliant.errors import ArtifactError
from pliant.frontend.signature import Held, TensorSlot
from pliant.frontend.torch_tensors import to_numpy
from pliant.model.step_numbers import RULES
from pliant.training.state import Group, State
from pliant.version import VERSION

if TYPE_CHECKING:
    from pliant.training.step import TrainingStep

_WORDS = 624  # of the state of a Mersenne Twister


def save_step(step: TrainingStep, path: str | os.PathLike[str]) -> str:
    state, signature = step._state, step._signature
    call = step._source.imported.signature.stored
    if call is None:
        raise ArtifactError(
            "the step takes containers that only the library they came from knows: it "
            "cannot be saved"
        )
    step._weights.refresh()
    bound = state.bind()  # what it makes anew is zero, as the first step would have it
    given = sum(isinstance(a, TensorSlot) for a in call_arguments(step))
    slots = [a for a in signature.arguments if isinstance(a, TensorSlot)][given:]
    tensors = dict(bound.tensors)
    if state.seed_name is not None:
        tensors[state.seed_name] = state.seed
    arrays = {s.name: to_numpy(tensors[s.name].detach()) for s in slots}
    description, program = step._description, step.program
    stored = replace(
        signature,
        held=tuple(Held(slot.name, slot) for slot in slots),
        stores=tuple((name, k) for k, name in enumerate(state.updates)),
        stored=call,
        seed=None,
    )
    saved = SavedProgram(
        program,
        description.image,
        stored,
        step._weights.arrays,
        description.report.peak(),
        description.report.explain(description.threads, None),
    )
    training = _training(state, bound.found)
    variant = SavedVariant([saved])
    return save(Path(path), [variant], arrays, step.memory_limit, VERSION, training)


def call_arguments(step: TrainingStep) -> tuple[Any, ...]:
    return step._source.imported.signature.arguments


def _training(state: State, found: Mapping[str, Any]) -> StoredTraining:
    options = state._found_groups(found)
    groups = tuple(
        _group(state, group, given, {name: found[name] for name in group.names})
        for group, given in zip(state.groups, options, strict=True)
    )
    return StoredTraining(
        groups,
        max(len(group.rule.numbers) for group in state.groups),
        state.clip,
        state.seed_name,
        () if state.seed_name is None else _generator(),
    )


def _group(
    state: State, group: Group, options: Mapping[str, Any], members: Mapping[str, Any]
) -> StoredGroup:
    _, names = RULES[group.rule.kind]
    return StoredGroup(
        group.rule.kind,  # type: ignore[arg-type]  # one of the words in RULES
        group.names,
        {name: _plain(options[name]) for name in names},
        state._steps_before(group, members, options),
    )


def _plain(value: Any) -> object:
    """A number, or a pair; torch also takes tensors of one number."""
    return tuple(map(float, value)) if isinstance(value, tuple) else float(value)


def _generator() -> tuple[int, ...]:
    """Torch's generator as the words of its Mersenne Twister, and the place in them.

    The state that torch gives is seed, words left, a flag, the next word, 624 words of
    which each takes 8 bytes, and normal numbers kept for later.
    """
    import torch

    state = torch.get_rng_state().numpy()
    left, _ = state[8:16].view(np.int32)
    (following,) = state[16:24].view(np.uint64)
    words = state[24 : 24 + 8 * _WORDS].view(np.uint64)
    place = _WORDS if left == 1 else int(following)
    return (*map(int, words), place)
