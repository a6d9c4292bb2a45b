"""Constants in the layouts that kernels read, computed at compile time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pliant.ir.graph import Constant, Names, Origin
from pliant.ir.types import DType, TensorType
from pliant.machine import pages
from pliant.sym import Expr, as_expr, ceildiv, floordiv, mod


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A constant in another layout, made at compile time.

    Those with equal keys and sources are one. `make` computes it from the source's
    data, now and whenever those change.
    """

    key: tuple[object, ...]
    source: Constant
    layout: str  # a word for its name
    dtype: DType
    make: Callable[[np.ndarray], np.ndarray]
    within: Within | None = None  # it is not stored: another one holds it

    def of(self, source: Constant) -> Packed:
        """Another constant in the same layout."""
        held = self.within
        within = None if held is None else replace(held, whole=held.whole.of(source))
        return replace(self, source=source, within=within)


@dataclass(frozen=True, slots=True, eq=False)
class Within:
    """A run of elements of a packed constant."""

    whole: Packed
    offset: int  # in elements
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A 2-d weight that is stored only as the panels of a matrix product: (P, K, NR).

    `axis` is the axis of the weight that the panels cut, the product's N.
    """

    packed: Packed
    axis: int
    width: int  # NR

    def index(self, at: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The index in the panels of an element of the weight."""
        n, k = at if self.axis == 0 else (at[1], at[0])
        return (floordiv(n, self.width), k, mod(n, self.width))

    def shape(self, shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
        n, k = shape if self.axis == 0 else (shape[1], shape[0])
        return (ceildiv(n, self.width), k, as_expr(self.width))


@dataclass(slots=True)
class PackedConstants:
    """What was packed so far; regions and versions of a model share it."""

    known: dict[tuple[str, object], Constant] = field(default_factory=dict)
    layouts: dict[str, Packed] = field(default_factory=dict)  # by the constant's name
    # Weights that are stored in no other form, by the name of their source.
    whole: dict[str, PackedWeight] = field(default_factory=dict)

    def constant(self, packed: Packed, taken: Mapping[str, Constant]) -> Constant:
        """A packed constant; its name is not one of `taken`."""
        key = packed.source.name, packed.key
        if key not in self.known:
            made = self.known[key] = self._made(packed, taken)
            self.layouts[made.name] = packed
        return self.known[key]

    def _made(self, packed: Packed, taken: Mapping[str, Constant]) -> Constant:
        source, name = packed.source, f"{packed.source.name}.{packed.layout}"
        known = taken.get(name)
        if known is not None and _holds(known, packed):
            return known  # of a chunk, in a dump that is read back
        data = packed.make(source.data)
        kind = TensorType(packed.dtype, tuple(as_expr(d) for d in data.shape))
        name = Names({*taken, *self.layouts}).fresh(name)
        return Constant(name, kind, data, origin=Origin((source.origin,), packed.make))


def _holds(known: Constant, packed: Packed) -> bool:
    """Whether a constant is the packed weight."""
    with pages.copying():  # what is compared must be complete
        data = packed.make(packed.source.data)
    same = known.type.dtype is packed.dtype and known.data.shape == data.shape
    return same and np.array_equal(known.data, data)
