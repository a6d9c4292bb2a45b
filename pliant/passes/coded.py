"""Products with weights that are computed from few bits: decoded in their kernel.

    %q = cast(bitwise_and(%bytes, 15))          u8 constants: 0 .. 15
    %w = reshape(add(mul(%q, %scale), %least))  one scale for each group of a row
    %y = matmul(%x, transpose(%w))
    ->
    %y = coded_matmul(%x, reshape(%codes), %scale, %least) {bits = 4}

What counts is what the ops compute, not where they come from: a number of the weight
has to be (code + zero) * scale + least, where code is an integer made of constants,
whose range follows from the ops, and scale, least and zero are constants of a group of
K, or of a row. Nothing is known from the data, so the codes may change later. Stage
`fold` then computes the codes, and never the numbers.

The weight may also be the right operand itself, (K, N) or (groups, group, N), as it is
in ONNX files: constants are transposed then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pliant.context import Context
from pliant.ir.access import is_one
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Op, Value, live, substitute
from pliant.ir.types import DType
from pliant.passes.fold import of_weights
from pliant.sym import ONE, as_expr

_RANGES = {DType.U8: (0, 255), DType.I8: (-128, 127)}
_LIMITS = {
    **_RANGES,
    **{t: (-(1 << w), (1 << w) - 1) for t, w in ((DType.I16, 15), (DType.I32, 31))},
    DType.I64: (-(1 << 63), (1 << 63) - 1),
}
_MOVES = frozenset({"reshape", "transpose", "broadcast", "slice"})
_KEPT = (DType.F16, DType.F32)
_STEPS = frozenset({"bitwise_and", "bitwise_xor", "shift_right", "add", "sub", "mul"})
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _CodedNumbers:
    """(code + zero) * scale + least; parts are (N, groups), or (N, 1) of rows."""

    codes: Value
    range: Range
    zero: float = 0.0
    zeros: Value | None = None  # a part of each group, beside `zero`
    scale: Value | None = None
    least: Value | None = None


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.producers = graph.producers()
        self.constant = of_weights(graph)
        self.b = Builder.within(graph)
        self.turned = False  # the weight at hand is (K, N), not (N, K)

    def producer(self, value: Value) -> Op | None:
        return self.producers.get(value)

    def number(self, value: Value) -> int | None:
        """The whole number that all elements are."""
        op = self.producer(value)
        while op is not None and op.name in _MOVES:
            op = self.producer(op.operands[0])
        if op is None or op.name != "full":
            return None
        found = op.attr("value")
        assert isinstance(found, bool | int | float)
        return int(found) if float(found).is_integer() else None

    # ---- integers

    def range(self, value: Value) -> Range | None:
        """Bounds of integers that are made of constants, without looking at these."""
        op = self.producer(value)
        if op is None or value.dtype not in _LIMITS:
            return None
        found: Range | None = None
        if op.name == "constant":
            return _RANGES.get(value.dtype)
        if op.name == "cast" and op.operands[0].dtype is DType.BOOL:
            found = (0, 1) if op.operands[0] in self.constant else None
        elif op.name in (*_MOVES, "cast") and op.operands[0].dtype in _LIMITS:
            found = self.range(op.operands[0])
        elif op.name == "concat":
            parts = [self.range(v) for v in op.operands]
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                found = min(p[0] for p in known), max(p[1] for p in known)
        elif op.name in _STEPS:
            by, inner = self.number(op.operands[1]), self.range(op.operands[0])
            if by is not None:
                found = _changed(op.name, inner, by)
            elif op.name == "add" and inner is not None:
                other = self.range(op.operands[1])
                if other is not None:
                    found = inner[0] + other[0], inner[1] + other[1]
        if found is None:
            return None
        low, high = _LIMITS[value.dtype]  # beyond, it would wrap
        return found if low <= found[0] and found[1] <= high else None

    # ---- numbers of the weight, (N, groups, group) or (N, K)

    def numbers(self, value: Value) -> _CodedNumbers | None:
        op = self.producer(value)
        if op is None or value.dtype is not DType.F32:
            return None
        if op.name == "cast" and op.operands[0] in self.constant:
            found = self.range(op.operands[0])
            return None if found is None else _CodedNumbers(op.operands[0], found)
        if op.name == "reshape":  # of codes alone: parts would be of other groups
            plain = self.numbers(op.operands[0])
            if plain is None or plain != _CodedNumbers(plain.codes, plain.range):
                return None
            return replace(plain, codes=self.b.reshape(plain.codes, value.shape))
        if op.name not in ("add", "sub", "mul"):
            return None
        x, y = op.operands
        inner = self.numbers(x)
        if inner is None and op.name != "sub":
            x, y = y, x
            inner = self.numbers(x)
        if inner is None or inner.least is not None:
            return None
        if op.name != "mul" and inner.scale is None and inner.zeros is None:
            by = self.number(y)
            if by is not None:
                sign = 1 if op.name == "add" else -1
                return replace(inner, zero=inner.zero + sign * by)
        part = self.part(y)
        if part is None:
            return None
        if op.name == "mul":
            return None if inner.scale is not None else replace(inner, scale=part)
        if op.name == "sub":
            part = self.b.unary("neg", self.b.cast(part, DType.F32))
        if inner.scale is None:
            return None if inner.zeros is not None else replace(inner, zeros=part)
        return replace(inner, least=part)

    def part(self, value: Value) -> Value | None:
        """What is one number for each group, as (N, groups), or for each row."""
        op, b = self.producer(value), self.b
        if op is None or value not in self.constant or value.type.rank not in (2, 3):
            return None
        if op.name == "full":  # one number for all
            part, sizes = b.full(op.float_attr("value"), value.dtype), {}
        elif op.name == "broadcast":
            part, axes = op.operands[0], op.ints_attr("axes")
            sizes = dict(zip(axes, part.shape, strict=True))
        else:
            return None
        row, group, member = self.axes(value)
        rows = sizes.get(row, ONE)
        groups = ONE if group is None else sizes.get(group, ONE)
        if rows not in (ONE, value.shape[row]) or not is_one(sizes.get(member, ONE)):
            return None
        if group is not None and groups not in (ONE, value.shape[group]):
            return None
        inner = self.producer(part)
        if inner is not None and inner.name == "cast":
            before = inner.operands[0]
            part = before if before.dtype in _KEPT else part
        if self.turned:
            part = b.swap(b.reshape(part, (groups, rows)), 0, 1)
        else:
            part = b.reshape(part, (rows, groups))
        wide = value.shape[row], groups
        return part if rows == wide[0] else b.broadcast(part, wide, (0, 1))

    def axes(self, value: Value) -> tuple[int, int | None, int]:
        """Which axes of a weight, (N, K) or in groups, are rows, groups, members."""
        if value.type.rank == 2:
            return (1, None, 0) if self.turned else (0, None, 1)
        return (2, 0, 1) if self.turned else (0, 1, 2)

    def weight(self, right: Value) -> Value | None:
        """The matrix that a right operand (1.., K, N) is, or is the transpose of."""
        value, swapped = right, False
        while (op := self.producer(value)) is not None:
            inner = op.operands[0] if op.operands else value
            if op.name == "transpose":
                *lead, a, b = op.ints_attr("perm")
                if (a, b) != (inner.type.rank - 1, inner.type.rank - 2) or lead != [
                    *range(len(lead))
                ]:
                    return None
                # Beside an axis of one element, the others stay in their order.
                swapped ^= not any(map(is_one, value.shape[-2:]))
            elif op.name == "reshape" and _without_ones(inner) == _without_ones(value):
                pass
            else:
                break
            value = inner
        self.turned = not swapped and not any(map(is_one, right.shape[-2:]))
        return value if value.type.rank >= 2 else None

    def replaced(self, op: Op) -> Value | None:
        """The coded product that a matmul is."""
        x, right = op.operands
        if op.result.dtype is not DType.F32 or x.dtype is not DType.F32:
            return None
        weight = self.weight(right)
        if weight is None:
            return None
        k, n = right.shape[-2:]
        if not (n.is_const and k.is_const) or any(
            not is_one(d) for d in right.shape[:-2]
        ):
            return None
        made = self.producer(weight)
        while made is not None and made.name == "reshape":
            weight = made.operands[0]
            made = self.producer(weight)
        found = self.numbers(weight)
        row = -1 if self.turned else 0
        if found is None or found.scale is None or weight.shape[row] != n:
            return None
        if weight.type.rank not in (2, 3) or found.codes.shape != weight.shape:
            return None
        parts = [p for p in (found.scale, found.zeros, found.least) if p is not None]
        groups = max(part.shape[1].value for part in parts)
        low, high = found.range
        kept = [t for t, ends in _RANGES.items() if ends[0] <= low <= high <= ends[1]]
        if not k.value or k.value % (2 * groups) or not kept:
            return None
        b = self.b

        def in_groups(part: Value) -> Value:
            return b.broadcast(part, (n, as_expr(groups)), (0, 1))

        scale = in_groups(found.scale)
        least = None if found.least is None else in_groups(found.least)
        if found.zeros is not None:
            zeros = b.cast(in_groups(found.zeros), DType.F32)
            shift = b.binary("mul", zeros, b.cast(scale, DType.F32))
            if least is not None:
                shift = b.binary("add", shift, b.cast(least, DType.F32))
            least = shift
        if least is not None and least.dtype is not scale.dtype:
            scale, least = b.cast(scale, DType.F32), b.cast(least, DType.F32)
        if scale.dtype not in _KEPT:
            return None
        codes = found.codes
        if codes.dtype not in _RANGES:
            codes = b.cast(codes, kept[0])
        if self.turned:
            codes = b.swap(b.reshape(codes, (k, n)), 0, 1)
        codes = b.reshape(codes, (n, k))
        operands = (x, codes, scale, *(() if least is None else (least,)))
        bits = 4 if high - low < 16 else 8
        return b.emit("coded_matmul", *operands, bits=bits, low=low, zero=found.zero)


def _changed(name: str, inner: Range | None, by: int) -> Range | None:
    if name == "bitwise_and":
        return (0, by) if by >= 0 else None
    if inner is None:
        return None
    match name:
        case "bitwise_xor":
            most = (1 << max(by, inner[1]).bit_length()) - 1
            return (0, most) if min(by, inner[0]) >= 0 else None
        case "shift_right":
            return (inner[0] >> by, inner[1] >> by) if 0 <= by < 8 else None
        case "add":
            return inner[0] + by, inner[1] + by
        case "mul":
            ends = inner[0] * by, inner[1] * by
            return min(ends), max(ends)
        case _:
            return inner[0] - by, inner[1] - by


def _without_ones(value: Value) -> list[object]:
    return [d for d in value.shape if d != as_expr(1)]


def coded(graph: Graph, cx: Context) -> Graph:
    finder, mapping = _Finder(graph), dict[Value, Value]()
    ops: list[Op] = []
    for op in graph.ops:
        made = finder.replaced(op) if op.name == "matmul" else None
        if made is None:
            finder.b.ops.clear()
            ops.append(substitute(op, mapping))
            continue
        ops += [substitute(new, mapping) for new in finder.b.ops]
        finder.b.ops.clear()
        mapping[op.result] = made
    if not mapping:
        return graph
    results = tuple(mapping.get(v, v) for v in graph.results)
    return live(graph.replace(ops=tuple(ops), results=results))
