"""A fusion to lower, and what becomes of it: calls of loop functions and arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pliant.ir.graph import Constant, DataCheck, Graph, Library, Op, Value
from pliant.ir.loops import LoopFunc
from pliant.ir.packed import Packed
from pliant.ir.types import TensorType
from pliant.ir.views import View
from pliant.kernels.mix import ProductPlan
from pliant.machine.target import Target
from pliant.options import Options
from pliant.sym import Expr, Facts

NumberCheck = Callable[[DataCheck], int]


@dataclass(frozen=True, slots=True)
class Fusion:
    """A fusion to lower: its region, and the operands behind the parameters."""

    region: Graph
    name: str  # of its kernel
    views: Mapping[Value, View]
    constants: Mapping[Value, Constant]  # parameter -> the constant it is a view of
    facts: Facts
    target: Target
    options: Options
    number_check: NumberCheck

    def root(self, *names: str) -> Op:
        """The one op of its region with one of these names."""
        (root,) = (op for op in self.region.ops if op.name in names)
        return root


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of one call: this type once per worker, the worker is the first axis."""

    type: TensorType


@dataclass(frozen=True, slots=True, eq=False)
class Temporary:
    """Memory that lives from one call of a fusion to a later one."""

    type: TensorType


@dataclass(frozen=True, slots=True)
class Retyped:
    """Another argument's memory, read as another type."""

    source: Temporary | Packed
    type: TensorType

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.type.shape

    @property
    def strides(self) -> tuple[Expr, ...]:
        assert self.type.strides is not None
        return self.type.strides


# Arguments that have strides over their memory.
Strided = View | Retyped
# A region's parameter or result, a strided view of a value of the graph, or memory.
Argument = Value | View | Scratch | Temporary | Packed | Retyped


@dataclass(frozen=True, slots=True)
class KernelStep:
    """One call; `helpers` are loop functions that it calls.

    `planned` is another of those, made for this step; equal steps share it. For a
    matrix product, `product` is its plan.
    """

    func: LoopFunc
    arguments: tuple[Argument, ...]
    helpers: tuple[LoopFunc, ...] = ()
    # Arguments for func's sizes; None: the symbols of the same names.
    sizes: tuple[Expr, ...] | None = None
    planned: LoopFunc | None = None
    product: ProductPlan | None = None


@dataclass(frozen=True, slots=True)
class LibraryStep:
    """One call of an external function: (call, sizes.., inputs.., results..).

    `library` is the function, where the module does not have it yet.
    """

    callee: str
    arguments: tuple[Argument, ...]
    sizes: tuple[Expr, ...]
    library: Library | None = None


@dataclass(frozen=True, slots=True)
class TileAxes:
    """How a contraction's tile covers the axes of its result."""

    batch: tuple[tuple[int, Expr], ...]  # axis of the result, and the position along it
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def placed(self, batch: tuple[Expr, ...]) -> TileAxes:
        """With the batch axes at a position."""
        known = dict(enumerate(batch))
        at = tuple((i, known[i]) for i, _ in self.batch)
        return TileAxes(at, self.rows, self.columns)
