"""What a model asks of its inputs: how symbols are read, and which guards must hold.

Guards come from many places: the spec of the dims, the model's own code, the rules of
shape of every op. Whatever they say together, they hold for the example that a model
is compiled with, or compiling ends with the guard that does not, and where it is from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pliant.errors import OptionError, ShapeError
from pliant.ir.build import facts_of
from pliant.ir.graph import Graph
from pliant.sym import Expr, Facts, Guard, Solution, solve
from pliant.sym.names import is_reserved

InputDims = tuple[tuple[str, tuple[Expr, ...]], ...]  # the name and dims of each input


@dataclass(frozen=True, slots=True)
class Interface:
    """The inputs' symbolic sizes, how symbols are read from them, what must hold."""

    inputs: InputDims
    solution: Solution
    guards: tuple[Guard, ...]
    facts: Facts

    def observed(self, sizes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The sizes of all inputs by "input.axis", and the symbols read from them."""
        env: dict[str, int] = {}
        for (name, dims), given in zip(self.inputs, sizes, strict=True):
            for axis, (_, size) in enumerate(zip(dims, given, strict=True)):
                env[f"{name}.{axis}"] = size
        for binding in self.solution.bindings:
            source = self.inputs[binding.source][0]
            known = {**env, "d": env[f"{source}.{binding.axis}"]}
            env[binding.symbol] = binding.value.evaluate(known)
        return env

    def failing(self, env: Mapping[str, int]) -> Guard | None:
        """The first guard that known sizes break."""
        return next((guard for guard in self.guards if breaks(env, guard)), None)

    def refusal(self, guard: Guard, env: Mapping[str, int]) -> ShapeError:
        """A guard that failed, with the numbers it failed for."""
        culprit = next((s for s in guard.cond.symbols() if "." in s), None)
        if culprit is None:
            culprit = self._source_of(guard)
        owner, _, number = culprit.rpartition(".")
        place = f" ({guard.origin})" if guard.origin else ""
        known = ", ".join(f"{s}={env[s]}" for s in guard.cond.symbols() if s in env)
        return ShapeError(
            (guard.render(env) or f"{guard.cond} does not hold: {known}") + place,
            input=owner or None,
            dim=int(number) if number.isdigit() else None,
            expected=str(guard.cond),
            got=env.get(culprit),
        )

    def _source_of(self, guard: Guard) -> str:
        """The input dim that a guard's first symbol is read from."""
        for binding in self.solution.bindings:
            if binding.symbol in guard.cond.symbols():
                return f"{self.inputs[binding.source][0]}.{binding.axis}"
        return ""

    def check_example(self, sizes: Sequence[Sequence[int]]) -> None:
        """ShapeError if a guard refuses the sizes of the example."""
        env = self.observed(sizes)
        guard = self.failing(env)
        if guard is None:
            return
        found = self.refusal(guard, env)
        raise ShapeError(
            f"the example itself would be refused: {found}. The sizes of "
            "example_inputs, dynamic_shapes and the model's code do not fit "
            "together: compile with other sizes, or leave this dim out of "
            "dynamic_shapes",
            input=found.input,
            dim=found.dim,
            expected=found.expected,
            got=found.got,
        )


def interface_of(graph: Graph, inputs: InputDims) -> Interface:
    """What a graph asks of the runtime's inputs."""
    facts = facts_of(graph)
    try:
        solution = solve(inputs, facts)
    except ValueError as error:
        raise ShapeError(f"{error}: give the dims names of their own") from None
    # Facts are the graph's constraints, which know where they come from.
    seen = [guard for guard in solution.guards if guard.origin != "facts"]
    guards = _distinct((*seen, *graph.constraints))
    return Interface(inputs, solution, guards, facts)


def breaks(env: Mapping[str, int], guard: Guard) -> bool:
    """Whether a guard about known sizes does not hold, or has no meaning.

    One about sizes that data decide is not about these.
    """
    if any(name not in env for name in guard.cond.symbols()):
        return False
    try:
        return not guard.cond.holds(env)
    except ZeroDivisionError:
        return True


def reject_reserved(inputs: InputDims) -> None:
    for name, dims in inputs:
        for symbol in (s for d in dims for s in d.symbols()):
            if is_reserved(symbol):
                raise OptionError(
                    f"dim name '{symbol}' of input '{name}' is reserved: choose another"
                )


def _distinct(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """Guards with different conditions; the first stated wins."""
    seen: dict[object, Guard] = {}
    for guard in guards:
        seen.setdefault(guard.cond, guard)
    return tuple(seen.values())
