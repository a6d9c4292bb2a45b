"""A training step that was loaded from a file, with a state of its own.

It goes on where the saved one was: parameters, optimizer state, counts of steps and the
generator of its random numbers are those of that moment, and it needs neither torch nor
the compiler. Options of the optimizer may be changed between steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from pliant.artifact.read import OpenArtifact
from pliant.artifact.stored import StoredTraining
from pliant.artifact.write import save_again
from pliant.errors import ArtifactError, OptionError
from pliant.model.buffers import StoredBuffers
from pliant.model.compiled import CompiledModel
from pliant.model.step_numbers import RULES

# Parameters of every step, and of one that clips.
NUMBERS, CLIP = "numbers", "clip_grad_norm"


class StoredStep(CompiledModel):
    """`step(inputs, targets)`, as a `TrainingStep`; see the file's head."""

    _buffers: StoredBuffers

    def resume(self, opened: OpenArtifact, training: StoredTraining) -> None:
        """Before the first step."""
        self._opened, self._training = opened, training
        self._turn = Lock()
        self.options: list[dict[str, Any]] = [dict(g.options) for g in training.groups]
        self._steps = [group.steps for group in training.groups]
        self._generator = np.random.MT19937(0)
        for group, options in zip(training.groups, self.options, strict=True):
            missing = [n for n in RULES[group.rule][1] if n not in options]
            row = RULES[group.rule][0](options, group.steps) if not missing else ()
            if not 0 < len(row) <= training.width:
                raise ArtifactError(f"{opened.file.path} is damaged: its options")
        arrays = self._buffers.arrays
        shape = (len(training.groups), training.width)
        wanted: dict[str, tuple[Any, Any]] = {NUMBERS: (shape, np.float64)}
        if training.clip is not None:
            wanted[CLIP] = ((), np.float64)
        if training.seed is not None:
            wanted[training.seed] = ((), np.int64)
            self._set_generator(training.generator)
        for name, (sizes, kind) in wanted.items():
            array = arrays.get(name)
            if array is None or array.shape != sizes or array.dtype != kind:
                raise ArtifactError(f"{opened.file.path} is damaged: its {name}")

    def _set_generator(self, words: Sequence[int]) -> None:
        good = len(words) == 625 and all(0 <= w < 2**32 for w in words)
        if not good or words[-1] > 624:
            raise ArtifactError(f"{self._opened.file.path} is damaged: its generator")
        key = np.array(words[:-1], np.uint32)
        state: Any = {"key": key, "pos": words[-1]}
        self._generator.state = {"bit_generator": "MT19937", "state": state}

    # ---- steps

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            kept = self._generator.state
            before = self._runtime.stats().calls
            try:
                self._prepare()
                return super().__call__(*args, **kwargs)
            finally:
                # An interrupt is raised here although the step was taken.
                if self._runtime.stats().calls > before:
                    self._steps = [count + 1 for count in self._steps]
                else:
                    self._generator.state = kept

    def _prepare(self) -> None:
        """The numbers of the step to come."""
        arrays, training = self._buffers.arrays, self._training
        if len(self.options) != len(training.groups):
            raise OptionError("a step keeps its groups: change the options in them")
        rows = zip(training.groups, self.options, self._steps, strict=True)
        for k, (group, options, before) in enumerate(rows):
            row = RULES[group.rule][0](options, before)
            arrays[NUMBERS][k, : len(row)] = row
        if training.clip is not None:
            arrays[CLIP][...] = training.clip
        if training.seed is not None:
            # As torch draws 64 bits: two words, the higher one first.
            high, low = (int(word) for word in self._generator.random_raw(2))
            arrays[training.seed][...] = np.uint64(high << 32 | low).astype(np.int64)

    @property
    def steps(self) -> int:
        """How many steps the parameters have taken, if their optimizer counts."""
        return max(self._steps)

    @property
    def state(self) -> Mapping[str, np.ndarray]:
        """Copies of the parameters, the buffers that the model changes, and the
        optimizer's tensors, which are called `parameter.slot`."""
        apart = {NUMBERS, CLIP, self._training.seed}
        arrays = self._buffers.arrays
        with self._turn:
            return {k: v.copy() for k, v in arrays.items() if k not in apart}

    # ---- in a file

    def save(
        self, path: str | os.PathLike[str], *, variants: Sequence[CompiledModel] = ()
    ) -> str:
        """Writes the step as it is now, with all its code; returns the digest."""
        if variants:
            raise ArtifactError("a training step is saved for the targets that it has")
        with self._turn:
            groups = zip(self._training.groups, self.options, self._steps, strict=True)
            inner: Any = self._generator.state["state"]
            words = (*map(int, inner["key"]), int(inner["pos"]))
            training = replace(
                self._training,
                groups=tuple(
                    replace(group, options=dict(options), steps=count)
                    for group, options, count in groups
                ),
                generator=() if self._training.seed is None else words,
            )
            arrays, limit = self._buffers.arrays, self.memory_limit
            return save_again(Path(path), self._opened, arrays, training, limit)
