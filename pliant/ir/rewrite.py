"""Rules as data, and the one driver that applies them.

A rule set maps an op's name (or ANY) to rules, tried in order. A rule sees the op with
its operands already rewritten, and returns None for "no match", or the value(s) that
replace the op's results; what it needs in addition it emits through its Rewriter.

The driver walks forward and visits every new op at once, with the same rules. As rules
only look at an op and the producers of its operands, both final by then, one walk
reaches the fixed point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pliant.errors import InternalError
from pliant.ir.build import Builder, facts_of, symbols_of
from pliant.ir.graph import Graph, Names, Op, Value, names_of, substitute
from pliant.sym import Facts, eq

Replacement = Value | Sequence[Value] | None
Rule = Callable[["Rewriter", Op], Replacement]
RuleSet = Mapping[str, Sequence[Rule]]

ANY = "*"
_MOST_STEPS = 64  # a rule chain on one op longer than this goes in circles


def join(*sets: RuleSet) -> RuleSet:
    """All rules of the sets, in the order given."""
    out: dict[str, tuple[Rule, ...]] = {}
    for rules in sets:
        for name, more in rules.items():
            out[name] = (*out.get(name, ()), *more)
    return out


class Rewriter(Builder):
    """The builder a rule emits into; it also knows who produced a value."""

    def __init__(self, facts: Facts, names: Names) -> None:
        super().__init__(facts, names)
        self._producers: dict[Value, Op] = {}

    def producer(self, value: Value, name: str | None = None) -> Op | None:
        """The op that defines the value, if it is one of that name."""
        op = self._producers.get(value)
        return op if op is not None and name in (None, op.name) else None

    def learn(self, op: Op) -> None:
        """Takes note of a finished op."""
        self._producers.update((value, op) for value in op.results)
        if op.name == "match_cast":
            for a, b in zip(op.operands[0].shape, op.result.shape, strict=True):
                self.facts = self.facts.assume(eq(a, b))

    def attempt(self, rule: Rule, op: Op) -> tuple[list[Op], Sequence[Value]] | None:
        """The ops and values a rule gives; leaves no trace if it does not match."""
        self.ops, facts, count, self.loc = [], self.facts, len(self.guards), op.loc
        values = rule(self, op)
        if values is None:
            self.facts = facts
            del self.guards[count:]
            return None
        return self.ops, (values,) if isinstance(values, Value) else values


def rewrite(graph: Graph, rules: RuleSet, facts: Facts | None = None) -> Graph:
    """The graph at the rules' fixed point; the same object if none matched.

    Facts are those of the graph's constraints, unless others are given.
    """
    known = facts_of(graph) if facts is None else facts
    rewriter = Rewriter(known, Names(names_of(graph)))
    rewriter._symbols = symbols_of(graph)
    return _rewrite(graph, rules, rewriter)


def _rewrite(graph: Graph, rules: RuleSet, rewriter: Rewriter) -> Graph:
    out: list[Op] = []
    mapping: dict[Value, Value] = {}

    def visit(op: Op, depth: int) -> None:
        if depth > _MOST_STEPS:
            raise InternalError("rewrite", f"rules on {op.name} do not end ({op.loc})")
        op = substitute(op, mapping)
        regions = tuple(_rewrite_region(r, rules, rewriter) for r in op.regions)
        if any(a is not b for a, b in zip(regions, op.regions, strict=True)):
            op = op.replace(regions=regions)
        for rule in (*rules.get(op.name, ()), *rules.get(ANY, ())):
            found = rewriter.attempt(rule, op)
            if found is None:
                continue
            new_ops, values = found
            for new in new_ops:
                visit(new, depth + 1)
            for old, value in zip(op.results, values, strict=True):
                mapping[old] = mapping.get(value, value)
            return
        rewriter.learn(op)
        out.append(op)

    for op in graph.ops:
        visit(op, 0)
    results = tuple(mapping.get(v, v) for v in graph.results)
    same = len(out) == len(graph.ops) and all(map(_is, out, graph.ops))
    if same and all(map(_is, results, graph.results)):
        return graph
    stated = {guard.cond for guard in graph.constraints}
    new = (guard for guard in rewriter.guards if guard.cond not in stated)
    constraints = (*graph.constraints, *new)
    return graph.replace(ops=tuple(out), results=results, constraints=constraints)


def _rewrite_region(graph: Graph, rules: RuleSet, outer: Rewriter) -> Graph:
    facts = outer.facts
    for guard in graph.constraints:
        facts = facts.assume(guard.cond)
    rewriter = Rewriter(facts, outer.names)
    rewriter._symbols = outer._symbols
    return _rewrite(graph, rules, rewriter)


def _is(a: object, b: object) -> bool:
    return a is b
