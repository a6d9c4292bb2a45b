"""Loops: while, a counted loop, and a scan over rows.

Each carried value has two memories, the result of the loop and another one. Rounds
read one of them and write the other in turn, so that nothing is copied from round to
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pliant.ir.graph import Graph, Op, Value
from pliant.ir.loops import (
    Binary,
    Block,
    Buffer,
    For,
    If,
    Index,
    Let,
    Role,
    Stmt,
    Store,
    While,
)
from pliant.ir.types import DType, TensorType
from pliant.memory.flow_function import FlowFunction, copy, first, flat, inputs_of
from pliant.memory.flow_regions import Flows, LoweredRegion, Place
from pliant.sym import Expr, as_expr, floordiv, maximum, mod, sym


@dataclass(frozen=True, slots=True)
class _Carried:
    """The values of a loop: those it only reads, and those it changes."""

    fixed: dict[int, Value]  # by position: what every round is given
    changing: tuple[int, ...]


def _carried(flows: Flows, op: Op, body: Graph, values: Sequence[Value]) -> _Carried:
    """Splits a loop's values; results that are not carried are the operands."""
    own = 1 if op.name == "loop" else 0  # the number of the round
    fixed: dict[int, Value] = {}
    for k, value in enumerate(values):
        if body.results[k] is body.params[own + k]:
            fixed[k] = value
            flows.values[op.results[k]] = value
    changing = tuple(k for k in range(len(values)) if k not in fixed)
    return _Carried(fixed, changing)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A region of a loop, to be called with the present values."""

    rounds: _Rounds
    region: LoweredRegion
    params: Mapping[Value, Place | int]  # a place, or the position of a carried value

    def calls(
        self, memory: Buffer, results: Sequence[Place | int], odd: bool
    ) -> Iterator[Stmt]:
        """An odd turn reads the second memory of what is carried, writes the first."""
        rounds = self.rounds

        def place(at: Place | int, second: bool) -> Place:
            return rounds.carried(at, second) if isinstance(at, int) else at

        given = [place(self.params[p], odd) for p in self.region.graph.params]
        written = [place(at, not odd) for at in results]
        return self.region.calls(memory, given, written, rounds.made.weights)


class _Rounds:
    """What loops share: values that are carried from round to round."""

    def __init__(
        self, flows: Flows, op: Op, name: str, body: Graph, values: Sequence[Value]
    ) -> None:
        self.flows, self.name, self.values = flows, name, values
        self.split = _carried(flows, op, body, values)
        self.inputs = inputs_of(values)
        self.changing = self.split.changing
        results = [op.results[k] for k in self.changing]
        made = self.made = FlowFunction(
            tuple(self.inputs),
            list(self.inputs.values()),
            [flat(v.name, v.type, Role.OUT) for v in results],
        )
        self.first = dict(zip(self.changing, made.outputs, strict=True))
        self.second = {
            k: made.scratch(f"next_{v.name}", v.dtype, v.type.numel)
            for k, v in zip(self.changing, results, strict=True)
        }

    def given(self, value: Value, name: str, first: bool = False) -> Buffer:
        """The buffer of an operand that is not carried."""
        made = flat(name, value.type, Role.IN)
        place = 0 if first else len(self.made.operands)
        operands = self.made.operands
        self.made.operands = (*operands[:place], value, *operands[place:])
        self.made.inputs.insert(place, made)
        return made

    def lowered(
        self,
        region: Graph,
        what: str,
        results: Sequence[Value],
        before: Sequence[Place] = (),
        behind: Sequence[Place] = (),
    ) -> _Turn:
        """A region that gives these results.

        It takes the carried values, and other ones before and behind them.
        """
        places = [*before, *range(len(self.values)), *behind]
        params = dict(zip(region.params, places, strict=True))
        fixed = self.split.fixed.items()
        given = {region.params[len(before) + k]: value for k, value in fixed}
        region = region.replace(results=tuple(results))
        lowered, _ = self.flows.region(region, given, f"{self.name}.{what}")
        self.made.read(self.flows, [lowered])
        return _Turn(self, lowered, params)

    def carried(self, position: int, second: bool) -> Place:
        if position in self.split.fixed:
            return Place(self.inputs[self.values[position]])
        return Place((self.second if second else self.first)[position])

    def wanted(self, body: Graph) -> list[Value]:
        return [body.results[k] for k in self.changing]

    def start(self) -> list[Stmt]:
        return [
            copy(target, self.inputs[self.values[k]], self.values[k].type.numel)
            for k, target in self.first.items()
        ]

    def settle(self) -> list[Stmt]:
        """Copies the carried values to the results, after an odd number of rounds."""
        return [
            copy(target, self.second[k], self.values[k].type.numel)
            for k, target in self.first.items()
        ]

    def counted(self, total: Expr, turn: Callable[[Expr, bool], list[Stmt]]) -> Stmt:
        """Rounds with the numbers 0 to total: two of them in each iteration."""
        pair = 2 * sym("_pair")
        both = Block((*turn(pair, False), *turn(pair + 1, True)))
        left = Binary("eq", Index(mod(total, 2)), Index(as_expr(1)))
        last = Block((*turn(total - 1, False), *self.settle()))
        pairs = For("_pair", as_expr(0), floordiv(total, 2), both)
        return Block((pairs, If(left, last)))


def while_(flows: Flows, op: Op, name: str) -> FlowFunction:
    condition, body = op.regions
    rounds = _Rounds(flows, op, name, body, op.operands)
    made = rounds.made
    test = rounds.lowered(condition, "test", condition.results)
    each = rounds.lowered(body, "body", rounds.wanted(body))
    flag = made.scratch("test", DType.BOOL, as_expr(1))
    memory = made.memory(test.region.bytes, each.region.bytes)
    ask, run = (
        [tuple(turn.calls(memory, results, odd)) for odd in (False, True)]
        for turn, results in ((test, [Place(flag)]), (each, rounds.changing))
    )
    # Rounds in pairs; after the first of one the values are in the second memory.
    even = Block((*run[1], *ask[0]))
    odd = Block(tuple(rounds.settle()))
    pair = Block((*run[0], *ask[1], If(first(flag), even, odd)))
    made.body += [*rounds.start(), *ask[0], While(first(flag), pair)]
    return made


def loop(flows: Flows, op: Op, name: str) -> FlowFunction:
    count, *values = op.operands
    (body,) = op.regions
    rounds = _Rounds(flows, op, name, body, values)
    made = rounds.made
    number = rounds.given(count, "count", first=True)
    counter = made.scratch("round", DType.I64, as_expr(1))
    each = rounds.lowered(body, "body", rounds.wanted(body), before=[Place(counter)])
    memory = made.memory(each.region.bytes)

    def turn(number: Expr, odd: bool) -> list[Stmt]:
        at = Store(counter, (as_expr(0),), Index(number))
        return [at, *each.calls(memory, rounds.changing, odd)]

    total = (
        Let("_given", first(number)),
        Let("_rounds", Index(maximum(sym("_given"), 0))),
    )
    made.body += [*rounds.start(), *total, rounds.counted(sym("_rounds"), turn)]
    return made


def scan(flows: Flows, op: Op, name: str) -> FlowFunction:
    """Rows are read and written where they are."""
    (body,) = op.regions
    count = len(op.operands) - op.int_attr("scanned")
    rounds = _Rounds(flows, op, name, body, op.operands[:count])
    made, total = rounds.made, op.dim_attr("rounds")
    stacks = [flat(v.name, v.type, Role.OUT) for v in op.results[count:]]
    made.outputs += stacks
    rows = body.results[count:]

    def at_row(buf: Buffer, type: TensorType) -> Place:
        return Place(buf, sym("_row") * type.bytes)

    scanned = [
        at_row(rounds.given(value, f"rows_{k}"), param.type)
        for k, (value, param) in enumerate(
            zip(op.operands[count:], body.params[count:], strict=True)
        )
    ]
    wanted = [*rounds.wanted(body), *rows]
    each = rounds.lowered(body, "body", wanted, behind=scanned)
    memory = made.memory(each.region.bytes)
    stacked = [at_row(b, v.type) for b, v in zip(stacks, rows, strict=True)]

    def turn(number: Expr, odd: bool) -> list[Stmt]:
        at = total - 1 - number if op.bool_attr("reverse") else number
        calls = each.calls(memory, [*rounds.changing, *stacked], odd)
        return [Block((Let("_row", Index(at)), *calls))]

    made.body += [*rounds.start(), rounds.counted(total, turn)]
    return made
