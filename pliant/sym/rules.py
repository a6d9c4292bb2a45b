"""What a program asks of sizes: how symbols are read, and what must hold of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pliant.errors import ShapeError
from pliant.sym.advice import bound_text, nearest_text
from pliant.sym.expr import Expr
from pliant.sym.guards import Binding, Guard

InputDims = tuple[tuple[str, tuple[Expr, ...]], ...]  # the name and dims of each input


@dataclass(frozen=True, slots=True)
class SizeRules:
    """The inputs' symbolic sizes, how symbols are read from them, what must hold."""

    inputs: Sequence[tuple[str, tuple[Expr, ...]]]
    bindings: Sequence[Binding]
    guards: Sequence[Guard]

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(binding.symbol for binding in self.bindings)

    def observed(self, sizes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The sizes of all inputs by "input.axis", and the symbols read from them."""
        env: dict[str, int] = {}
        for (name, dims), given in zip(self.inputs, sizes, strict=True):
            for axis, (_, size) in enumerate(zip(dims, given, strict=True)):
                env[f"{name}.{axis}"] = size
        for binding in self.bindings:
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
        return ShapeError(
            _sentence(guard, env),
            input=owner or None,
            dim=int(number) if number.isdigit() else None,
            expected=str(guard.cond),
            got=env.get(culprit),
        )

    def _source_of(self, guard: Guard) -> str:
        """The input dim that a guard's first symbol is read from."""
        for binding in self.bindings:
            if binding.symbol in guard.cond.symbols():
                return f"{self.inputs[binding.source][0]}.{binding.axis}"
        return ""


def _sentence(guard: Guard, env: Mapping[str, int]) -> str:
    """What must hold, the numbers, where that comes from, and what would do."""
    known = ", ".join(f"{s}={env[s]}" for s in guard.cond.symbols() if s in env)
    text = guard.render(env) or f"{guard.cond} does not hold: {known}"
    place = guard.origin if guard.origin and not _names_axis(guard) else ""
    why, bound = _reason(guard), bound_text(guard.cond, env)
    if bound is not None and why is not None:
        return f"{bound} ({', '.join(filter(None, (why, place)))})"
    near = nearest_text(guard, env)
    return (
        text + (f" ({place})" if place else "") + (f"; {near} would do" if near else "")
    )


def _names_axis(guard: Guard) -> bool:
    """Whether the guard is of an input's axis, which its message names already."""
    return any(name == guard.origin for name in guard.cond.symbols())


# Of these ops, a bound comes from what was cut out of a table and is too short.
_SHORTER = ("broadcast: ", "slice: ")


def _reason(guard: Guard) -> str | None:
    """The words of the message before its numbers; None if these are part of them.

    Of a table that is too short, it is that.
    """
    first = guard.message[0] if guard.message else ""
    if not isinstance(first, str) or not first.endswith(": "):
        return None
    words = first.removesuffix(": ")
    if words.startswith(_SHORTER) and guard.cond.rhs.is_const:
        return f"a table of {guard.cond.rhs} positions ends there"
    return "" if " is declared to be " in words else words


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


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """`value` fits in 64 bits and is in low .. high, where these are given."""

    value: Expr
    what: str
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        """Equal for checks with equal code."""
        return f"check {self.low} <= {self.value} <= {self.high}"


@dataclass(frozen=True, slots=True)
class Found:
    """A size that data decide, and the most that it can be.

    `most` may be in terms of sizes that were found before, `end` is not: it is the
    largest that `most` gets for any of these.
    """

    name: str
    most: Expr
    end: Expr
