"""The structure of nested arguments and results, as data that needs no framework.

    ({"mask": x}, [y, z])      tuple(dict mask(leaf), list(leaf, leaf))

Results of a class that is only known where the model was compiled are given as a
`Record`, which has the fields of the class by name, by key and by number.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pliant.errors import ShapeError

Kind = Literal["leaf", "tuple", "list", "dict", "named", "record"]
KINDS: tuple[Kind, ...] = ("leaf", "tuple", "list", "dict", "named", "record")


@dataclass(frozen=True, slots=True)
class Nesting:
    """A leaf, or a container of others; `name` is that of its class, if it has one."""

    kind: Kind
    parts: tuple[Nesting, ...] = ()
    keys: tuple[str | int, ...] = ()
    name: str = ""

    @property
    def leaves(self) -> int:
        return 1 if self.kind == "leaf" else sum(part.leaves for part in self.parts)

    def nodes(self) -> Iterator[Nesting]:
        yield self
        for part in self.parts:
            yield from part.nodes()

    def __str__(self) -> str:
        inside = map(str, self.parts)
        match self.kind:
            case "leaf":
                return "*"
            case "tuple":
                return f"({', '.join(inside)}{',' if len(self.parts) == 1 else ''})"
            case "list":
                return f"[{', '.join(inside)}]"
        pairs = zip(self.keys, inside, strict=True)
        text = ", ".join(f"{key!r}: {part}" for key, part in pairs)
        return f"{self.name}{{{text}}}"


LEAF = Nesting("leaf")


def tuple_of(count: int) -> Nesting:
    return Nesting("tuple", (LEAF,) * count)


class Record(OrderedDict[str, Any]):
    """A result with named fields: `r.logits`, `r["logits"]` or `r[0]`."""

    def __getitem__(self, key: Any) -> Any:
        by_place = isinstance(key, int | slice)
        return self.to_tuple()[key] if by_place else super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(name) from None

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


def flattened(nesting: Nesting, value: Any, name: str) -> list[Any]:
    """The leaves of an argument; ShapeError if it is nested in another way."""
    leaves: list[Any] = []
    if not _flatten(nesting, value, leaves):
        got = nesting_of(value)
        raise ShapeError(
            f"input '{name}' has another structure than the example's: "
            f"expected {nesting}, got {got}",
            input=name,
            expected=str(nesting),
            got=str(got),
        )
    return leaves


def _flatten(nesting: Nesting, value: Any, leaves: list[Any]) -> bool:
    match nesting.kind:
        case "leaf":
            leaves.append(value)
            return True
        case "tuple" | "list":
            if type(value) is not (tuple if nesting.kind == "tuple" else list):
                return False
            inside: Sequence[Any] = value
        case "dict":
            if not isinstance(value, dict) or set(value) != set(nesting.keys):
                return False
            inside = [value[key] for key in nesting.keys]
        case _:
            return False
    return len(inside) == len(nesting.parts) and all(
        _flatten(part, item, leaves)
        for part, item in zip(nesting.parts, inside, strict=True)
    )


def nesting_of(value: Any) -> Nesting:
    """How a value is nested."""
    if type(value) in (tuple, list):
        kind: Kind = "tuple" if type(value) is tuple else "list"
        return Nesting(kind, tuple(map(nesting_of, value)))
    if isinstance(value, dict):
        return Nesting("dict", tuple(map(nesting_of, value.values())), tuple(value))
    return LEAF


def unflattener(nesting: Nesting, first: int = 0) -> Callable[[Sequence[Any]], Any]:
    """What builds the structure from leaves, of which its own begin at `first`."""
    if nesting.kind == "leaf":
        return lambda leaves: leaves[first]
    parts: list[Callable[[Sequence[Any]], Any]] = []
    for part in nesting.parts:
        parts.append(unflattener(part, first))
        first += part.leaves
    make = _maker(nesting)
    return lambda leaves: make([part(leaves) for part in parts])


def _maker(nesting: Nesting) -> Callable[[Sequence[Any]], Any]:
    """What makes a container of its items."""
    keys: Sequence[Any] = nesting.keys
    match nesting.kind:
        case "tuple":
            return tuple
        case "list":
            return list
        case "dict":
            return lambda items: dict(zip(keys, items, strict=True))
        case "named":
            names = [str(key) for key in keys]
            named: Any = namedtuple(nesting.name, names)  # type: ignore[misc]
            return lambda items: named(*items)
        case _:
            return lambda items: Record(zip(keys, items, strict=True))


@dataclass(frozen=True, slots=True)
class CallNesting:
    """How arguments and results are nested; what `torch_signature.py` has by torch."""

    arguments: tuple[Nesting, ...]  # those given by position, then those by name
    results: Nesting

    def flatten(
        self, names: Sequence[str], bound: tuple[tuple[Any, ...], Mapping[str, Any]]
    ) -> list[Any]:
        """The leaves of arguments that were given as the example's were."""
        given = (*bound[0], *bound[1].values())
        each = zip(self.arguments, given, names, strict=True)
        return [x for part, value, name in each for x in flattened(part, value, name)]
