"""Between which sizes the integers of a tensor are, by the ops that compute them.

    span(cx, (ids != 0).sum(1).max())             ->  0 .. ids.shape[1]
    span(cx, 128 - torch.tensor(min(n, 128)))     ->  128 - min(n, 128), exactly

A model may compute with sizes as tensors and read a number back by `item()`. If both
ends are the same, that number is a size known before the run, and no data decide it.
Integers of weights and of inputs have no ends: they may change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import add, mul, sub

from pliant.frontend.torch_ops_context import TorchContext
from pliant.ir.graph import Op, Value
from pliant.ir.ops import Trait, has_trait
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, ge, maximum, minimum, product

_WHOLE = (DType.I64, DType.BOOL)  # narrower ones wrap around


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Every element x has low <= x <= high; None: not known."""

    low: Expr | None = None
    high: Expr | None = None

    @property
    def number(self) -> Expr | None:
        """The one value that there is."""
        return self.low if self.low is self.high else None


_ANY = ElementRange()
_BIT = ElementRange(as_expr(0), as_expr(1))


def span(cx: TorchContext, x: Value) -> ElementRange:
    return _Spans(cx).of(x)


def _with(join: Callable[..., Expr], *ends: Expr | None) -> Expr | None:
    """The end of a result, if all ends that it depends on are known."""
    known = [end for end in ends if end is not None]
    return join(*known) if len(known) == len(ends) else None


def _first(x: Expr | None, y: Expr | None) -> Expr | None:
    return y if x is None else x


class _Spans:
    def __init__(self, cx: TorchContext) -> None:
        self.cx = cx
        self.made = {value: op for op in cx.b.ops for value in op.results}
        self.known: dict[Value, ElementRange] = {}

    def of(self, x: Value) -> ElementRange:
        """Nothing is known of what comes from outside, or is not of integers."""
        if x not in self.known:
            op = self.made.get(x)
            found = _ANY
            if x.dtype is DType.BOOL:
                found = _BIT
            elif op is not None and x.dtype in _WHOLE:
                found = self.computed(op)
            simple = self.cx.simplify
            self.known[x] = ElementRange(
                _with(simple, found.low), _with(simple, found.high)
            )
        return self.known[x]

    def computed(self, op: Op) -> ElementRange:
        match op.name:
            case "full":
                value = op.attr("value")
                assert isinstance(value, int)
                return ElementRange(as_expr(value), as_expr(value))
            case "dim_value":
                return ElementRange(op.dim_attr("value"), op.dim_attr("value"))
            case "iota":
                last = op.result.shape[op.int_attr("axis")] - 1
                return ElementRange(as_expr(0), maximum(last, 0))
            case "reduce":
                return self.reduced(op)
            case "add" | "sub" | "mul" | "minimum" | "maximum":
                return self.joined(op.name, *map(self.of, op.operands))
            case "select":
                return self.one_of(*op.operands[1:])
            case "concat":
                return self.one_of(*op.operands)
            case "cast":
                return self.of(op.operands[0])
            case _ if has_trait(op, Trait.VIEW):
                return self.of(op.operands[0])
            case _:
                return _ANY

    def one_of(self, *values: Value) -> ElementRange:
        spans = [self.of(value) for value in values]
        return ElementRange(
            _with(minimum, *(each.low for each in spans)),
            _with(maximum, *(each.high for each in spans)),
        )

    def reduced(self, op: Op) -> ElementRange:
        (x,) = op.operands
        inner, how = self.of(x), op.str_attr("op")
        if how in ("max", "min"):
            return inner
        if how != "sum":
            return _ANY
        count = product(tuple(x.shape[axis] for axis in op.ints_attr("axes")))
        return ElementRange(
            _with(count.__mul__, inner.low), _with(count.__mul__, inner.high)
        )

    def joined(self, name: str, x: ElementRange, y: ElementRange) -> ElementRange:
        match name:
            case "add":
                return ElementRange(
                    _with(add, x.low, y.low), _with(add, x.high, y.high)
                )
            case "sub":
                return ElementRange(
                    _with(sub, x.low, y.high), _with(sub, x.high, y.low)
                )
            case "minimum":
                high = _with(minimum, x.high, y.high)
                return ElementRange(
                    _with(minimum, x.low, y.low),
                    high if high is not None else _first(x.high, y.high),
                )
            case "maximum":
                low = _with(maximum, x.low, y.low)
                return ElementRange(
                    low if low is not None else _first(x.low, y.low),
                    _with(maximum, x.high, y.high),
                )
        exact = x.number is not None and y.number is not None
        if exact or (self.is_positive(x.low) and self.is_positive(y.low)):
            return ElementRange(_with(mul, x.low, y.low), _with(mul, x.high, y.high))
        return _ANY

    def is_positive(self, end: Expr | None) -> bool:
        return end is not None and self.cx.b.facts.prove(ge(end, 0)) is True
