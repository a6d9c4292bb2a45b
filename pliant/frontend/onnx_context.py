"""What the translation of an ONNX op sees: its inputs, attributes and version.

    def clip(cx: OnnxContext, n: Node) -> Value:
        x = n.tensor(0)                  # a Value; what is known becomes a constant
        low = n.number(1)                # a float that is known, else None
        axes = n.ints(1)                 # integers that must be known
        mode = n.attr("mode", "max")

A rule gives the result, or a tuple of them. Where an integer must be known and is not,
`ints` looks for inputs of the model that it follows from: with an example of them, the
walk starts again with their values fixed (`Refix`), and every call must pass these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from pliant.errors import ModelError, PliantError
from pliant.frontend.onnx_types import BOOL, ELEMENTS, INT64, OF_DTYPE, Element
from pliant.frontend.onnx_values import (
    ABSENT,
    Absent,
    Array,
    Coded,
    Entry,
    Items,
    Known,
    Ratio,
    settled,
    symbolic,
)
from pliant.frontend.operands import Operand, Real, Size
from pliant.frontend.translate import (
    Translation,
    Unsupported,
    constant_of,
)
from pliant.ir.build import Builder
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Cond, Expr, as_expr

Answer: TypeAlias = "Entry | tuple[Entry | None, ...]"
# None: this use of the op is left to its body.
Rule: TypeAlias = "Callable[[OnnxContext, Node], Answer | None]"
T = TypeVar("T")


class Refix(PliantError):
    """Values of inputs, or sizes of them, must be fixed: translate again with them."""

    def __init__(self, inputs: Sequence[str] = (), symbols: Sequence[str] = ()) -> None:
        self.inputs, self.symbols = tuple(inputs), tuple(symbols)


class OnnxContext(Translation):
    """The state of one import of an ONNX model."""

    def __init__(self, builder: Builder, hints: Mapping[str, int]) -> None:
        super().__init__(builder)
        self.hints = hints  # sizes of the example, by symbol
        self.node: Node | None = None
        self.visited = 0  # nodes, each time that one is translated
        self.specialise = self._fix
        self.examples: frozenset[str] = frozenset()  # inputs with example values
        self.fixed: frozenset[str] = frozenset()  # those that are fixed to them

    # ---- sizes

    def _fix(self, size: Expr) -> None:
        """Fixes the symbols of a size to those of the example, if there is one."""
        symbols = [s for s in size.symbols() if s in self.hints]
        if len(symbols) == len(size.symbols()) and symbols:
            raise Refix(symbols=symbols)

    def hint(self, size: Size) -> int | None:
        """The size in the example; None without one."""
        expr = as_expr(size)
        if expr.is_const:
            return expr.value
        if any(s not in self.hints for s in expr.symbols()):
            return None
        return int(expr.evaluate(self.hints))

    # ---- tensors

    def data(self, array: Array, element: Element, name: str = "") -> Value:
        """A constant of the compiled function."""
        dtype = element.dtype
        if dtype is None:
            self.unsupported(f"a constant of {element.name}")
        if array.ndim == 0 and dtype is not DType.BF16:
            return self.tensor(array.item(), dtype)
        held = np.ascontiguousarray(array.astype(element.numpy, copy=False))
        held = held.reshape(array.shape)
        if dtype is DType.BF16:
            held = held.view(np.uint16)
        taken = self.b.constants
        wanted = name or "constant"
        unique, number = wanted, 0
        while unique in taken and taken[unique].data is not held:
            same = taken[unique].data
            if same.dtype == held.dtype and np.array_equal(same, held):
                break
            number += 1
            unique = f"{wanted}.{number}"
        return self.b.constant(constant_of(unique, dtype, held))

    def value(self, entry: Entry) -> Value:
        """The entry as a tensor of the compiled function."""
        match entry:
            case Value():
                return entry
            case Known() if not entry.is_symbolic:
                made = self.data(entry.array, entry.element, entry.name)
                if entry.array.dtype.kind in "iub" and (entry.array >= 0).all():
                    self.nonnegative.add(made)
                return made
            case Known():
                return self._made(entry)
            case Coded(_, element):
                self.unsupported(f"{element.name} is only cast and dequantized")
            case Items():
                self.unsupported("a sequence where a tensor is expected")
            case Absent():
                self.unsupported("an empty optional where a tensor is expected")
        raise TypeError(f"not an entry: {entry!r}")

    def _made(self, known: Known) -> Value:
        """A tensor of elements that follow from sizes."""
        dtype = known.element.dtype or DType.I64
        flat = [self._scalar(e, dtype) for e in known.array.reshape(-1)]
        if not known.shape:
            return flat[0]
        rows = [self.reshape(v, (1,)) for v in flat]
        return self.reshape(self.concat(rows, 0), known.shape)

    def _scalar(self, element: Any, dtype: DType) -> Value:
        match element:
            case Ratio(top, bottom):
                return self.tensor(Real(ratio=(top, as_expr(bottom))), dtype)
            case Cond():
                return self.cast(self.truth(element), dtype)
            case Expr():
                return self.tensor(element, dtype)
            case _:
                return self.tensor(element, dtype)

    def truth(self, cond: Cond) -> Value:
        """A condition on sizes as a bool scalar."""
        left = self.tensor(cond.lhs, DType.I64)
        right = self.tensor(cond.rhs, DType.I64)
        kind = cond.kind
        if kind == "divides":
            rest = self.b.binary("mod", right, left)
            return self.b.binary("eq", rest, self.tensor(0, DType.I64))
        return self.b.binary(kind, left, right)

    def element_of(self, entry: Entry) -> Element:
        match entry:
            case Value():
                return OF_DTYPE[entry.dtype]
            case Known() | Coded():
                return entry.element
            case Items() if entry.element is not None:
                return entry.element
            case Items() if entry.values:
                return self.element_of(entry.values[0])
        raise Unsupported("a value without an element type")

    def shape_of(self, entry: Entry) -> tuple[Expr, ...]:
        if isinstance(entry, Known):
            return tuple(as_expr(n) for n in entry.shape)
        if isinstance(entry, Value | Coded):
            return entry.shape
        raise Unsupported("the shape of a sequence")

    def sizes(self, values: Sequence[Size]) -> Known:
        """A vector of sizes, as Shape gives it."""
        flat = [self.simplify(v) for v in values]
        return Known(settled(symbolic(flat, (len(flat),)), INT64), INT64)

    # ---- broadcasting

    def join(self, op: str, x: Operand, y: Operand) -> Value:
        """A binary op of two tensors of one type, or a tensor and a number."""
        if isinstance(x, Value) and isinstance(y, Value):
            self.same_types(x, y)
            x, y = self.spread(x, y)
        return self.arith(op, x, y)

    def same_types(self, x: Value, y: Value) -> None:
        """Operator sets have no promotion."""
        if x.dtype is not y.dtype:
            raise ModelError(
                f"{self.op_name} at {self.b.loc} has operands of {x.dtype} and "
                f"{y.dtype}; its operator set takes one type"
            )

    def spread(self, *values: Value) -> list[Value]:
        """The values with dims of 1 where the example says that they broadcast."""
        rank = max(v.type.rank for v in values)
        padded = [(None,) * (rank - v.type.rank) + v.shape for v in values]
        out = list(values)
        for i in range(rank):
            dims = [shape[i] for shape in padded]
            there = [d for d in dims if d is not None]
            if len(there) < 2 or all(self.b.same(there[0], d) for d in there[1:]):
                continue
            hints = [None if d is None else self.hint(d) for d in dims]
            if None in [h for h, d in zip(hints, dims, strict=True) if d is not None]:
                continue
            if all(h in (1, None) for h in hints):
                continue
            for k, (dim, hint) in enumerate(zip(dims, hints, strict=True)):
                if dim is not None and hint == 1 and not dim.is_const:
                    out[k] = self.unit(out[k], i - rank + out[k].type.rank)
        return out

    def unit(self, x: Value, axis: int) -> Value:
        """x with a dim that is 1, and must be."""
        self.b.require_equal(x.shape[axis], 1, "a dim that broadcasts must be 1")
        shape = (*x.shape[:axis], as_expr(1), *x.shape[axis + 1 :])
        return self.keep_sign(x, self.b.emit("reshape", x, shape=shape))

    def broadcast_shape(self, *shapes: Sequence[Expr]) -> tuple[Expr, ...]:
        """The common shape; where sizes differ, those that are 1 in the example."""
        rank = max(map(len, shapes), default=0)
        out = [as_expr(1)] * rank
        for shape in shapes:
            for i, dim in enumerate(shape, rank - len(shape)):
                if out[i] == 1 or (self.hint(out[i]) == 1 and self.hint(dim) != 1):
                    if out[i] != 1:
                        self.b.require_equal(out[i], 1, "a dim that broadcasts")
                    out[i] = dim
                elif dim != 1:
                    if self.hint(dim) == 1 and self.hint(out[i]) != 1:
                        self.b.require_equal(dim, 1, "a dim that broadcasts")
                    else:
                        out[i] = self.b.require_equal(out[i], dim, "broadcast")
        return tuple(out)

    def expand_to(self, x: Value, shape: Sequence[Size]) -> Value:
        """x broadcast to a shape that it fits, dims of 1 by the example."""
        dims = tuple(as_expr(d) for d in shape)
        lead = len(dims) - x.type.rank
        for axis, (have, want) in enumerate(zip(x.shape, dims[lead:], strict=True)):
            if have.is_const or self.b.same(have, want):
                continue
            if self.hint(have) == 1 and self.hint(want) != 1:
                x = self.unit(x, axis)
        return self.broadcast_to(x, dims)


@dataclass(slots=True, eq=False)
class Node:
    """A node of the graph whose inputs are resolved."""

    cx: OnnxContext
    walk: Any  # the Walk of its graph, for what has graphs inside
    proto: Any
    domain: str
    version: int  # of the operator set that last changed the op
    opset: int  # that the model uses of the op's domain
    core: int  # and of the default domain
    inputs: tuple[Entry | None, ...]
    attrs: dict[str, Any]
    sources: tuple[frozenset[str], ...]  # inputs of the model behind each input
    used: frozenset[int]  # outputs that are read

    @property
    def op(self) -> str:
        return str(self.proto.op_type)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(self.proto.output)

    def attr(self, name: str, default: T) -> T:
        found: T = self.attrs.get(name, default)
        return found

    def has(self, i: int) -> bool:
        return i < len(self.inputs) and self.inputs[i] is not None

    def entry(self, i: int) -> Entry:
        found = self.inputs[i] if i < len(self.inputs) else None
        if found is None:
            self.cx.unsupported(f"its input {i} is missing")
        return found

    def tensor(self, i: int) -> Value:
        return self.cx.value(self.entry(i))

    def maybe(self, i: int) -> Value | None:
        """The input as a tensor; None if it is left out."""
        return self.tensor(i) if self.has(i) and self.inputs[i] is not ABSENT else None

    def tensors(self, start: int = 0) -> list[Value]:
        return [self.tensor(i) for i in range(start, len(self.inputs))]

    @property
    def rank(self) -> int:
        return len(self.cx.shape_of(self.entry(0)))

    # ---- what must be known

    def known(self, i: int) -> Known | None:
        """The input if its elements are known."""
        found = self.inputs[i] if i < len(self.inputs) else None
        return found if isinstance(found, Known) else None

    def needed(self, i: int, what: str) -> Array:
        """The elements of an input, which decide what is compiled."""
        found = self.known(i)
        if found is not None:
            return found.array
        cx = self.cx
        sources = self.sources[i] if i < len(self.sources) else frozenset()
        sources = sources - cx.fixed
        if sources and sources <= cx.examples:
            raise Refix(inputs=sorted(sources))
        if sources:
            advice = f"give example_inputs with values of {', '.join(sorted(sources))}"
            cx.unsupported(f"{what} must be known when the model is compiled: {advice}")
        raise Unsupported(f"{what} is computed from data, so that no size is known")

    def sizes(self, i: int, what: str) -> list[Size]:
        """Integers of an input, constant or over sizes."""
        array = self.needed(i, what)
        out: list[Size] = []
        for each in array.reshape(-1):
            if isinstance(each, Expr):
                out.append(each)
            elif isinstance(each, Ratio | Cond):
                self.cx.unsupported(f"{what} is no integer")
            else:
                out.append(int(each))
        return out

    def ints(self, i: int, what: str) -> list[int]:
        return [self.cx.constant_int(s, what) for s in self.sizes(i, what)]

    def integer(self, i: int, what: str) -> int:
        return self.ints(i, what)[0]

    def floats(self, i: int, what: str) -> list[float]:
        array = self.needed(i, what)
        if array.dtype == object:
            self.cx.unsupported(f"{what} depends on sizes")
        return [float(x) for x in array.reshape(-1)]

    def number(self, i: int) -> Any:
        """The one element of an input if it is a known number, else None."""
        found = self.known(i)
        if found is None or found.is_symbolic or found.array.size != 1:
            return None
        return found.array.reshape(-1)[0].item()

    # ---- axes

    def axis(self, axis: int, rank: int | None = None) -> int:
        """Counted from the front, and there."""
        rank = self.rank if rank is None else rank
        if not -rank <= axis < max(rank, 1):
            self.cx.unsupported(f"axis {axis} of a tensor of rank {rank}")
        return axis % max(rank, 1)

    def axes_input(self, place: int) -> list[int] | None:
        """`axes` as an attribute in old versions, an input in new ones."""
        if "axes" in self.attrs:
            return [self.axis(int(a)) for a in self.attrs["axes"]]
        if not self.has(place):
            return None
        return [self.axis(a) for a in self.ints(place, "axes")]


def as_element(number: int) -> Element | None:
    return ELEMENTS.get(number)


__all__ = ["ABSENT", "BOOL", "Node", "OnnxContext", "Refix", "Rule", "as_element"]
