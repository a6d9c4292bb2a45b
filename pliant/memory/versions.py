"""The memory and the steps of a program that has several versions of `main`.

The runtime knows one set of buffers and one set of steps, and a version is a sequence
of some of them. Two versions are never in memory together, so their buffers may be the
same ones: those of the same name and size are. Calls with equal arguments are then one
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pliant.ir.graph import Graph, Module, Value
from pliant.memory.liveness import Memory, liveness
from pliant.memory.remat import Step, Steps, Touch, steps
from pliant.sym import Expr


@dataclass(frozen=True, slots=True)
class Layout:
    """The bytes of every buffer, and which are those of each version.

    The first version is `main`, and its buffers have the first numbers.
    """

    values: tuple[Value, ...]  # of the first version that has the buffer
    bytes: tuple[Expr, ...]
    versions: tuple[tuple[Graph, Memory, Mapping[Value, int]], ...]


def layout(module: Module) -> Layout:
    """The buffers of all versions of a lowered module."""
    numbers: dict[tuple[str, Expr], int] = {}
    values: list[Value] = []
    found = []
    for version in (module.main, *module.versions):
        memory = liveness(version)
        own: dict[Value, int] = {}
        for b in memory.buffers:
            key = b.value.name, b.bytes
            if key not in numbers:
                numbers[key] = len(numbers)
                values.append(b.value)
            own[b.value] = numbers[key]
        found.append((version, memory, own))
    sizes = tuple(size for _, size in numbers)
    return Layout(tuple(values), sizes, tuple(found))


def all_steps(module: Module, of: Layout, sequences: Sequence[Sequence[int]]) -> Steps:
    """The steps of all versions, numbered as `sequences` say: those of `main` first."""
    _, memory, _ = of.versions[0]
    main = steps(module, memory)
    pinned = {_pinned(v, memory): k for k, v in enumerate(main.pinned)}
    made: dict[int, Step] = {}
    for (version, held, own), sequence in zip(of.versions, sequences, strict=True):
        found = steps(module.with_main(version), held)
        objects = [own[b.value] for b in held.buffers]
        objects += [len(of.bytes) + pinned[_pinned(v, held)] for v in found.pinned]
        for number, step in zip(sequence, found.steps, strict=True):
            touches = tuple(
                Touch(objects[t.object], t.reads, t.writes) for t in step.touches
            )
            made.setdefault(
                number, Step(step.call, touches, step.repeatable, step.work)
            )
    ordered = tuple(made[k] for k in sorted(made))
    return Steps(ordered, main.pinned)


def _pinned(value: Value, memory: Memory) -> Value | int:
    """Identifies a result by its number, and an input that is written by its value."""
    return memory.outputs.index(value) if value in memory.outputs else value
