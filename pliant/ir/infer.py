"""Support for shape rules: typed attributes, and the context that collects guards.

A rule has the signature `Infer`: it takes the operands' types and the attributes,
registers its requirements with the context, and returns the results' types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from pliant.errors import DTypeError, ShapeError
from pliant.ir.graph import Attr, Graph
from pliant.ir.types import DType, TensorType
from pliant.sym import Cond, Expr, Facts, Guard, eq, sym


class Attrs:
    """Attributes by name, with typed readers."""

    __slots__ = ("_values", "op")

    def __init__(self, op: str, values: Iterable[tuple[str, Attr]]) -> None:
        self.op = op
        self._values = dict(values)

    def __getitem__(self, name: str) -> Attr:
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def integer(self, name: str) -> int:
        value = self._values[name]
        assert isinstance(value, int)
        return value

    def ints(self, name: str) -> tuple[int, ...]:
        value = self._values[name]
        assert isinstance(value, tuple)
        return tuple(v for v in value if isinstance(v, int))

    def dims(self, name: str) -> tuple[Expr, ...]:
        value = self._values[name]
        assert isinstance(value, tuple)
        return tuple(v for v in value if isinstance(v, Expr))

    def dim(self, name: str) -> Expr:
        value = self._values[name]
        assert isinstance(value, Expr)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._values[name]
        assert isinstance(value, tuple)
        return tuple(v for v in value if isinstance(v, str))

    def text(self, name: str) -> str:
        value = self._values[name]
        assert isinstance(value, str)
        return value

    def flag(self, name: str) -> bool:
        value = self._values[name]
        assert isinstance(value, bool)
        return value

    def dtype(self, name: str) -> DType:
        value = self._values[name]
        assert isinstance(value, DType)
        return value


def _number_fresh() -> Callable[[str], Expr]:
    count = iter(range(1 << 62))
    return lambda hint: sym(f"{hint}{next(count)}")


@dataclass(slots=True)
class InferContext:
    """The facts that a shape rule may use, and the requirements that it states.

    `facts` grows with every requirement; `guards` are those that can only be checked at
    run time. `fresh` names a symbol for a data-dependent size. `declared` are result
    types stated by the op itself, for ops whose results cannot be inferred.
    """

    facts: Facts
    op: str = ""
    loc: str = ""
    guards: list[Guard] = field(default_factory=list)
    fresh: Callable[[str], Expr] = field(default_factory=_number_fresh)
    callees: Mapping[str, Graph] = field(default_factory=dict)
    regions: tuple[Graph, ...] = ()
    declared: tuple[TensorType, ...] = ()

    def proves_equal(self, a: Expr, b: Expr) -> bool:
        return a is b or self.facts.prove(eq(a, b)) is True

    def require_equal(self, a: Expr, b: Expr, why: str) -> Expr:
        """The dim that both are: the constant one if there is one, else the plainer."""
        if a is b:
            return a
        self.require(eq(a, b).plain(), why)
        if a.is_const or b.is_const:
            return a if a.is_const else b
        return a if len(str(a)) <= len(str(b)) else b

    def require(self, cond: Cond, why: str) -> None:
        """Requires a condition: proved, or else guarded; ShapeError if impossible."""
        answer = self.facts.prove(cond)
        if answer is False:
            raise ShapeError(self.describe(f"{why}: {cond} cannot hold"))
        if answer is None:
            words = {"eq": " == ", "ne": " != ", "le": " <= ", "lt": " < "}
            sign = words.get(cond.kind, " divides ")
            message = (f"{self.op}: {why}: ", cond.lhs, sign, cond.rhs)
            self.guards.append(Guard(cond, message, self.loc))
            try:
                self.facts = self.facts.assume(cond)
            except ValueError as error:  # contradicts what is known
                raise ShapeError(self.describe(f"{why}: {cond}: {error}")) from None

    def require_rank(self, type: TensorType, rank: int, what: str) -> None:
        if type.rank != rank:
            self.fail(f"{what} must have rank {rank}, is {type}")

    def same_shape(self, types: Sequence[TensorType], why: str) -> tuple[Expr, ...]:
        shape = types[0].shape
        for other in types[1:]:
            if len(other.shape) != len(shape):
                self.fail(f"{why}: ranks of {types[0]} and {other} differ")
            shape = tuple(
                self.require_equal(a, b, f"{why} at dim {i}")
                for i, (a, b) in enumerate(zip(shape, other.shape, strict=True))
            )
        return shape

    def same_dtype(self, types: Sequence[TensorType]) -> DType:
        for other in types[1:]:
            if other.dtype is not types[0].dtype:
                self.fail_dtype(f"operands are {types[0]} and {other}, must agree")
        return types[0].dtype

    def want(self, type: TensorType, kinds: str, what: str = "operand") -> None:
        if type.dtype.kind not in kinds:
            names = {"f": "float", "i": "int", "u": "unsigned int", "b": "bool"}
            allowed = " or ".join(names[k] for k in kinds)
            self.fail_dtype(f"{what} is {type}, must be {allowed}")

    def axis(self, axis: int, type: TensorType) -> int:
        if not 0 <= axis < type.rank:
            self.fail(f"axis {axis} is outside {type}")
        return axis

    def describe(self, problem: str) -> str:
        where = f" at {self.loc}" if self.loc else ""
        return f"{self.op}{where}: {problem}"

    def fail(self, problem: str) -> NoReturn:
        raise ShapeError(self.describe(problem))

    def fail_dtype(self, problem: str) -> NoReturn:
        raise DTypeError(self.describe(problem))


Types = tuple[TensorType, ...]
Infer = Callable[[InferContext, Types, Attrs], Types]


def bare(dim: Expr) -> str | None:
    """The name, if the dim is one symbol."""
    return dim.symbol
