"""The description of an op: everything that the compiler knows about it, in one row.

The rows are in ir/ops.py and the files that it joins, ir/ops_*.py. What is not in a row
of an elementwise op is its native code (codegen/llvm_ops.py, codegen/vector_math.py)
and its gradient (passes/gradient_rules_math.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pliant.ir.graph import Attr
from pliant.ir.infer import Infer
from pliant.ir.interp_numbers import stored
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr


class Trait(enum.Enum):
    """The family of an op, and what any pass may rely on."""

    # families: an op is of one
    ELEMENTWISE = enum.auto()
    MOVE = enum.auto()  # moves elements, computes nothing
    REDUCE = enum.auto()
    CONTRACT = enum.auto()  # a product summed up
    COMPOSITE = enum.auto()  # has a spelling in primitive ops
    CREATE = enum.auto()  # no tensor operand
    CONTROL = enum.auto()
    LOWERED = enum.auto()  # only after lowering
    # what else may be relied on
    PURE = enum.auto()  # same operands and attributes: same results, no effect
    COMMUTATIVE = enum.auto()
    EXACT = enum.auto()  # NumPy and native code give the same bits
    FLAT = enum.auto()  # the derivative is 0 wherever there is one
    PREDICATE = enum.auto()  # gives bool whatever its operands are
    JUMPS = enum.auto()  # it may differ much for operands that hardly differ
    EDGE = enum.auto()  # so it is of its last operand, where that is about 0
    FITS = enum.auto()  # of half floats it makes numbers that half floats hold
    FORMULA = enum.auto()  # elements are computed from attributes, without memory
    VIEW = enum.auto()  # an element of the operand, at an index known without data
    GATHER = enum.auto()  # an element of an operand, at an index that is computed
    LOOKUP = enum.auto()  # a gather at an index that is read
    SCAN = enum.auto()  # an element is made of several, in a nest of its own
    CONVOLUTION = enum.auto()
    ATTENTION = enum.auto()  # q, k, v are the last operands that it must have
    CALL = enum.auto()  # calls a loop function or a library
    LIBRARY = enum.auto()  # its kernel is a C function, see ir/ops_library.py

    __hash__ = object.__hash__  # members are compared by identity; Enum's is slow


FAMILIES = frozenset(
    {
        Trait.ELEMENTWISE,
        Trait.MOVE,
        Trait.REDUCE,
        Trait.CONTRACT,
        Trait.COMPOSITE,
        Trait.CREATE,
        Trait.CONTROL,
        Trait.LOWERED,
    }
)


class Cost(enum.IntEnum):
    """The cost of one element, in additions on the same vector unit.

    A row states the number. Decisions that add up costs use it directly; those that
    depend on a class of ops compare it with the least cost of the class, given here.
    """

    CHEAP = 1  # an instruction or two, or a choice among addresses
    DIVIDE = 4  # a slow instruction (division, root), or a load from where data says
    EXPANDED = 6  # many instructions: a division with its rounding, a polynomial


REQUIRED = object()
ABSENT = object()  # the default of an attribute that need not be there

# kind -> what the value must be, after ints in dims were made expressions
ATTR_KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "dtype": DType,
    "number": (bool, int, float),
    "dim": Expr,
    "ints": int,
    "floats": float,
    "dims": Expr,
    "strs": str,
}
TUPLES = frozenset({"ints", "floats", "dims", "strs"})


@dataclass(frozen=True, slots=True)
class AttrSpec:
    """An attribute; `kind` is a key of ATTR_KINDS, with `?` if it may hold None."""

    name: str
    kind: str
    default: object = REQUIRED
    choices: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        return self.kind.rstrip("?")

    @property
    def optional(self) -> bool:
        return self.kind.endswith("?")

    def normalise(self, op: str, value: object) -> Attr:
        """The value as the IR holds it; TypeError or ValueError if it cannot."""
        if self.base in TUPLES:
            if not isinstance(value, (tuple, list)):
                raise TypeError(f"{op}: {self.name} must be a tuple, is {value!r}")
            return tuple(self._element(op, v) for v in value)
        value = self._element(op, value)
        if self.choices and value not in self.choices:
            raise ValueError(
                f"{op}: {self.name} is {value!r}, must be one of {self.choices}"
            )
        return value

    def _element(self, op: str, value: object) -> Attr:
        if value is None and self.optional:
            return None
        base = self.base
        if base in ("dim", "dims") and isinstance(value, int):
            value = as_expr(int(value))
        if base in ("float", "floats") and isinstance(value, int):
            value = float(value)
        if base in ("int", "ints") and isinstance(value, Expr) and value.is_const:
            value = value.value
        stray = isinstance(value, bool) and base in ("int", "ints", "float", "floats")
        if stray or not isinstance(value, ATTR_KINDS[base]):
            raise TypeError(f"{op}: {self.name} is {value!r}, must be {self.kind}")
        return value  # type: ignore[return-value]  # ATTR_KINDS has it


@dataclass(frozen=True, slots=True)
class OpDef:
    """One op.

    `meaning` is what it computes, in NumPy: a function of the operands' arrays, and of
    the attributes by name with every dim as its number; several results are a tuple.
    None: only the interpreter can tell (ir/interp.py), because the op has regions,
    memory or the module behind it.
    `inline` is the same for NumPy scalars as Python text, where that is faster.
    `neutral` is the number with which `x op number` is x for every x, NaN and -0.0
    among them; it stands on the left as well if the op is commutative.
    """

    name: str
    arity: tuple[int, int | None]  # least and most operands; None: any number
    attrs: tuple[AttrSpec, ...]
    infer: Infer  # result types, guards, refusals
    traits: frozenset[Trait]
    regions: tuple[int, int] = (0, 0)  # least and most
    cost: int = Cost.CHEAP
    meaning: Callable[..., Any] | None = None
    inline: str = ""
    neutral: bool | int | float | None = None

    def is_(self, trait: Trait) -> bool:
        return trait in self.traits

    def normalise(self, given: Mapping[str, object]) -> tuple[tuple[str, Attr], ...]:
        """Attributes in the table's order, defaults filled in.

        A number is one that the op's element type has.
        """
        unknown = sorted(set(given) - {spec.name for spec in self.attrs})
        if unknown:
            raise TypeError(f"{self.name} has no attribute {', '.join(unknown)}")
        out: list[tuple[str, Attr]] = []
        for spec in self.attrs:
            value = given.get(spec.name, spec.default)
            if value is ABSENT:
                continue
            if value is REQUIRED:
                raise TypeError(f"{self.name} needs the attribute {spec.name}")
            value = spec.normalise(self.name, value)
            dtype = given.get("dtype")
            if isinstance(value, float) and isinstance(dtype, DType):
                value = stored(value, dtype)
            out.append((spec.name, value))
        return tuple(out)


def define(
    name: str,
    family: Trait,
    arity: tuple[int, int | None] | int,
    rule: Infer,
    *attrs: AttrSpec,
    meaning: Callable[..., Any] | None = None,
    traits: Sequence[Trait] = (),
    cost: int = Cost.CHEAP,
    pure: bool = True,
    regions: int = 0,
    optional_regions: int = 0,
) -> OpDef:
    """A row of the table."""
    every = {family, *traits, *([Trait.PURE] if pure else [])}
    count = (arity, arity) if isinstance(arity, int) else arity
    room = (regions, regions + optional_regions)
    return OpDef(name, count, attrs, rule, frozenset(every), room, cost, meaning)
