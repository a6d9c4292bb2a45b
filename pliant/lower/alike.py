"""Fusions that are alike have one kernel, which is made once.

The layers of a model repeat. Their fusions have regions that are equal but for names,
and operands that lie in memory in the same way; their operands and weights are others.
So what a fusion becomes is kept by its form, and the next one of that form takes it
with its own arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pliant.ir.graph import Value
from pliant.ir.packed import Packed
from pliant.ir.same import form_of, values_of
from pliant.ir.views import View
from pliant.lower.step import Argument, Fusion, KernelStep, Retyped


def fusion_form(fusion: Fusion) -> object:
    """Equal for fusions whose kernels differ in arguments alone."""
    bases: dict[Value, int] = {}
    weights: dict[str, int] = {}
    operands: list[object] = []
    for param in fusion.region.params:
        view, constant = fusion.views[param], fusion.constants.get(param)
        weight = None
        if constant is not None:
            weight = weights.setdefault(constant.name, len(weights)), constant.type
        base = bases.setdefault(view.base, len(bases)), view.base.type
        operands.append((base, view.offset, view.shape, view.strides, weight))
    return form_of(fusion.region), tuple(operands), fusion.facts


@dataclass(frozen=True, slots=True)
class MadeKernel:
    """The calls that a fusion has become."""

    fusion: Fusion
    steps: Sequence[KernelStep]

    def steps_of(self, other: Fusion) -> list[KernelStep]:
        """The calls for another fusion of the same form."""
        arguments = _Arguments(self.fusion, other)
        return [
            replace(step, arguments=tuple(map(arguments.other, step.arguments)))
            for step in self.steps
        ]


class _Arguments:
    """What takes the place of each argument of a fusion in another one."""

    def __init__(self, one: Fusion, two: Fusion) -> None:
        params = list(zip(one.region.params, two.region.params, strict=True))
        pairs = zip(values_of(one.region), values_of(two.region), strict=True)
        self.values = dict(pairs)
        self.bases = {one.views[a].base: two.views[b].base for a, b in params}
        self.weights = {
            one.constants[a].name: two.constants[b]
            for a, b in params
            if a in one.constants
        }

    def other(self, argument: Argument) -> Argument:
        match argument:
            case Value():
                return self.values.get(argument, argument)
            case View(base):
                return replace(argument, base=self.bases[base])
            case Packed(source=source):
                return argument.of(self.weights[source.name])
            case Retyped(Packed(source=source) as packed):
                return replace(argument, source=packed.of(self.weights[source.name]))
            case _:
                return argument  # memory of the call itself
