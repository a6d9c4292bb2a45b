"""The parts of a compiled model in the runtime.

A model whose data decide sizes runs in parts (`passes/split.py`); any other has one.
The runtime runs them all in one call of the first. Here each is a `ModelPart`: its
image, its model in the runtime, and the sizes that are known when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pliant import knobs
from pliant.image.parts import Addresses, LoadedCode, ModelImage, PartImage
from pliant.model.spill import spill_place
from pliant.runtime.binding import RuntimeModel
from pliant.runtime.description import Budgeting, ModelSpec, PlanInfo
from pliant.sym.rules import Found


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One part; the first has no `found`, and no bound."""

    image: PartImage
    runtime: RuntimeModel
    found: tuple[Found, ...]  # the sizes that earlier parts find
    stamps: np.ndarray | None  # of its kernels, if it is profiled

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.image.symbols

    def is_known(self, env: Mapping[str, int]) -> bool:
        """Whether these sizes are all that it needs."""
        return all(name in env for name in self.symbols)

    def plan(self, env: Mapping[str, int], limit: int | None) -> PlanInfo:
        """Its plan; at sizes that are not known, the plan that holds for all."""
        if self.is_known(env):
            return self.runtime.plan([env[name] for name in self.symbols], limit)
        assert self.runtime.bound is not None
        most = dict(env)
        for size in self.found:
            known = all(name in env for name in size.most.symbols())
            end = max(size.most.evaluate(env), 0) if known else size.end.evaluate(env)
            most.setdefault(size.name, end)
        return self.runtime.bound.plan([most[name] for name in self.symbols], limit)

    def least(self, env: Mapping[str, int]) -> int:
        """The smallest peak of a plan at these sizes."""
        return self.runtime.least([env[name] for name in self.symbols])

    def handed_bytes(self, env: Mapping[str, int]) -> int:
        """The bytes of its results."""
        return sum(kind.bytes.evaluate(env) for kind in self.image.output_types)


@dataclass(frozen=True, slots=True)
class WeightBlocks:
    """The memory behind the pointers that code calls weights, by part.

    A part has its weights, then a block for the times of its kernels if it is profiled.
    """

    counts: tuple[int, ...]  # of each part's weights
    stamps: tuple[np.ndarray | None, ...]

    @classmethod
    def of(cls, image: ModelImage) -> WeightBlocks:
        stamps = (p.stamps for p in image.parts)
        return cls(
            tuple(part.weights for part in image.parts),
            tuple(np.zeros(words, np.int64) if words else None for words in stamps),
        )

    def all(self, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Every block, in order."""
        made, rest = list[np.ndarray](), list(weights)
        for count, stamps in zip(self.counts, self.stamps, strict=True):
            made += rest[:count] if stamps is None else [*rest[:count], stamps]
            del rest[:count]
        return made


def runtime_spec(spec: ModelSpec, threads: int, limit: int | None) -> ModelSpec:
    """A model's description in this process."""
    return replace(
        spec,
        budgeting=_budgeting(spec.budgeting),
        threads=threads,
        memory_limit=limit,
        guard_pages=knobs.GUARD_PAGES.get(),
    )


def _budgeting(given: Budgeting) -> Budgeting:
    if not given.spill:
        return given
    place = spill_place()
    return replace(
        given,
        spill=not place.problem,
        spill_folder=place.folder,
        spill_problem=place.problem,
    )


def _runtime(
    spec: ModelSpec,
    at: Addresses,
    weights: Sequence[int] = (),
    next: RuntimeModel | None = None,
    bound: RuntimeModel | None = None,
) -> RuntimeModel:
    return RuntimeModel(spec, at.run, at.sizes, at.bind, weights, next, bound)


def make_parts(
    image: ModelImage,
    code: LoadedCode,
    threads: int,
    limit: int | None,
    blocks: WeightBlocks,
    weights: Sequence[np.ndarray],
) -> tuple[ModelPart, ...]:
    """A model of the runtime for each part, linked to the next."""
    pointers = [block.ctypes.data for block in blocks.all(weights)]
    made: list[ModelPart] = []
    following: RuntimeModel | None = None
    for number in reversed(range(len(image.parts))):
        part = image.parts[number]
        at, bound_at = code.parts[number]
        bound = None
        if part.bound is not None and bound_at is not None:
            bound = _runtime(runtime_spec(part.bound, threads, None), bound_at)
        given = pointers if number == 0 else ()
        spec = runtime_spec(part.spec, threads, limit)
        following = _runtime(spec, at, given, following, bound)
        found = tuple(size for p in image.parts[:number] for size in p.found)
        made.append(ModelPart(part, following, found, blocks.stamps[number]))
    return tuple(reversed(made))
