"""The parts of a compiled model in the runtime.

A model whose data decide sizes runs in parts (`passes/split.py`); any other has one.
The runtime runs them all in one call of the first. Here each is a `ModelPart`: its
program, its model in the runtime, and the sizes that are known when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pliant.frontend.signature import Signature
from pliant.model.runtime_spec import SIZE, bound_spec, input_specs, runtime_spec
from pliant.passes.split import Found
from pliant.program import Code, Program
from pliant.runtime.binding import RuntimeModel
from pliant.runtime.description import InputSpec, ModelSpec, PlanInfo


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One part; the first has no `found`, and no bound."""

    program: Program
    runtime: RuntimeModel
    found: tuple[Found, ...]  # the sizes that earlier parts find
    stamps: np.ndarray | None  # of its kernels, if it is profiled

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.program.code.host.symbols

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
        results = self.program.lowered.main.results
        return sum(value.type.bytes.evaluate(env) for value in results)


def _runtime(
    spec: ModelSpec,
    code: Code,
    weights: Sequence[int] = (),
    next: RuntimeModel | None = None,
    bound: RuntimeModel | None = None,
) -> RuntimeModel:
    run, sizes, bind = map(
        code.machine.address, ("pliant_run", "pliant_sizes", "pliant_bind")
    )
    return RuntimeModel(spec, run, sizes, bind, weights, next, bound)


@dataclass(frozen=True, slots=True)
class WeightBlocks:
    """The memory behind the pointers that code calls weights, by part.

    A part has its weights, then a block for the times of its kernels if it is profiled.
    """

    first: tuple[int, ...]  # block of each part
    stamps: tuple[np.ndarray | None, ...]

    @classmethod
    def of(cls, program: Program) -> WeightBlocks:
        first, stamps, count = list[int](), list[np.ndarray | None](), 0
        for part in program.parts():
            host = part.code.host
            first.append(count)
            stamps.append(np.zeros(host.stamps, np.int64) if host.stamps else None)
            count += len(host.constants) + (stamps[-1] is not None)
        return cls(tuple(first), tuple(stamps))

    def all(self, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Every block, in order."""
        ends = [*self.first[1:], None]
        made, rest = list[np.ndarray](), list(weights)
        for stamps, end in zip(self.stamps, ends, strict=True):
            times = [] if stamps is None else [stamps]
            count = len(rest) if end is None else end - len(made) - len(times)
            made += [*rest[:count], *times]
            del rest[:count]
        return made


def make_parts(
    program: Program,
    signature: Signature,
    threads: int,
    limit: int | None,
    blocks: WeightBlocks,
    weights: Sequence[np.ndarray],
) -> tuple[ModelPart, ...]:
    """A model of the runtime for each part, linked to the next."""
    programs = list(program.parts())
    inputs: list[tuple[InputSpec, ...]] = [input_specs(programs[-1], signature)]
    for earlier in programs[:-1]:
        assert earlier.rest is not None
        sizes = len(earlier.rest.found)
        outputs = runtime_spec(earlier, (), threads, None).outputs[sizes:]
        handed = (InputSpec(0, o.code, o.bits, o.rank) for o in outputs)
        inputs.append((*inputs[-1], *((SIZE,) * sizes), *handed))
    pointers = [block.ctypes.data for block in blocks.all(weights)]
    made: list[ModelPart] = []
    following: RuntimeModel | None = None
    for number in reversed(range(len(programs))):
        part = programs[number]
        spec = runtime_spec(part, inputs[number], threads, limit)
        spec = replace(spec, first_weight=blocks.first[number])
        bound = None
        if number > 0:
            rest = programs[number - 1].rest
            assert rest is not None
            most = bound_spec(spec, len(program.code.host.symbols))
            bound = _runtime(most, rest.bound)
        given = pointers if number == 0 else ()
        following = _runtime(spec, part.code, given, following, bound)
        known = len(program.found) - len(part.found)
        found = program.found[:known]
        made.append(ModelPart(part, following, found, blocks.stamps[number]))
    return tuple(reversed(made))
