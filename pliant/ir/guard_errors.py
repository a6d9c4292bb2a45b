"""The example that a model is compiled with must be one that the model takes.

Guards come from many places: the spec of the dims, the model's own code, the rules of
shape of every op. Whatever they say together, they hold for the example, or compiling
ends with the guard that does not and the line it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pliant.errors import ShapeError
from pliant.sym import Expr, Guard, Solution

Inputs = Sequence[tuple[str, tuple[Expr, ...]]]


def observed(
    inputs: Inputs, solution: Solution, sizes: Sequence[Sequence[int]]
) -> dict[str, int]:
    """The sizes of all inputs by "input.axis", and the symbols read from them."""
    env: dict[str, int] = {}
    for (name, dims), given in zip(inputs, sizes, strict=True):
        for axis, (_, size) in enumerate(zip(dims, given, strict=True)):
            env[f"{name}.{axis}"] = size
    for binding in solution.bindings:
        source = inputs[binding.source][0]
        known = {**env, "d": env[f"{source}.{binding.axis}"]}
        env[binding.symbol] = binding.value.evaluate(known)
    return env


def guard_error(
    guard: Guard, env: Mapping[str, int], inputs: Inputs, solution: Solution
) -> ShapeError:
    """A guard that failed, with the numbers it failed for."""
    culprit = next((s for s in guard.cond.symbols() if "." in s), None)
    if culprit is None:
        culprit = _source_of(guard, inputs, solution)
    owner, _, number = culprit.rpartition(".")
    place = f" ({guard.origin})" if guard.origin else ""
    return ShapeError(
        guard.render(env) + place,
        input=owner or None,
        dim=int(number) if number.isdigit() else None,
        expected=str(guard.cond),
        got=env.get(culprit),
    )


def _source_of(guard: Guard, inputs: Inputs, solution: Solution) -> str:
    """The input dim that a guard's first symbol is read from."""
    for binding in solution.bindings:
        if binding.symbol in guard.cond.symbols():
            return f"{inputs[binding.source][0]}.{binding.axis}"
    return ""


def check_example(
    inputs: Inputs,
    solution: Solution,
    guards: Sequence[Guard],
    sizes: Sequence[Sequence[int]],
) -> None:
    """ShapeError if a guard refuses the sizes of the example."""
    env = observed(inputs, solution, sizes)
    for guard in guards:
        if not all(name in env for name in guard.cond.symbols()):
            continue  # of a size that data decides
        try:
            holds = guard.cond.holds(env)
        except ZeroDivisionError:
            holds = False
        if not holds:
            found = guard_error(guard, env, inputs, solution)
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
