"""Whether two graphs compute the same, op by op.

`same_graphs` is value numbering: a parameter is numbered by its position, a literal by
its elements, a weight by its memory, a result by the op, its attributes and its
operands' numbers. Equal numbers are equal values, so names and the order of ops do not
matter. It is a proof in one direction only: graphs that compute the same with different
ops are not recognized as equal. `form_of` is stricter: graphs of one form are equal but
for names and places in the source, and what is made of one can be used for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pliant.ir.graph import Attr, Constant, Graph, Module, Op, Value
from pliant.ir.ops import Trait, has_trait


def same_graphs(a: Module, b: Module) -> bool:
    """Both `main`s give equal results for equal arguments, at every size."""
    if len(a.main.params) != len(b.main.params):
        return False
    numbers = _Numbers()
    return numbers.results(a.main, a.constants) == numbers.results(b.main, b.constants)


class _Numbers:
    def __init__(self) -> None:
        self._of: dict[object, int] = {}

    def number(self, key: object) -> int:
        return self._of.setdefault(key, len(self._of))

    def results(self, graph: Graph, constants: Mapping[str, Constant]) -> object:
        known: dict[Value, int] = {}
        for place, param in enumerate(graph.params):
            known[param] = self.number(("param", place, param.type))
        effects = []
        for op in graph.ops:
            key = self._op(op, known, constants)
            if not has_trait(op, Trait.PURE):
                effects.append(self.number(key))
            for place, value in enumerate(op.results):
                known[value] = self.number((key, place))
        return tuple(known[v] for v in graph.results), tuple(effects)

    def _op(
        self, op: Op, known: Mapping[Value, int], constants: Mapping[str, Constant]
    ) -> object:
        operands = [known[v] for v in op.operands]
        if has_trait(op, Trait.COMMUTATIVE):
            operands.sort()
        attrs: object = tuple((name, attr_key(value)) for name, value in op.attrs)
        if op.name == "constant":
            attrs = self._constant(constants[op.str_attr("name")])
        regions = tuple(self.results(region, constants) for region in op.regions)
        types = tuple(v.type for v in op.results)
        return op.name, tuple(operands), attrs, regions, types

    def _constant(self, constant: Constant) -> object:
        data = constant.data
        if constant.keep is None and data.nbytes <= 64:
            return constant.type, data.tobytes()
        # Weights are held once: the same memory. Others that are equal now may change.
        return constant.type, data.ctypes.data, data.nbytes


def form_of(graph: Graph) -> object:
    """A graph without the names of its values."""
    numbers: dict[Value, int] = {}
    for param in graph.params:
        numbers[param] = len(numbers)
    ops: list[object] = []
    for op in graph.ops:
        operands = tuple(numbers[v] for v in op.operands)
        types = tuple(v.type for v in op.results)
        regions = tuple(map(form_of, op.regions))
        ops.append((op.name, operands, attr_key(op.attrs), types, regions))
        for value in op.results:
            numbers[value] = len(numbers)
    params = tuple(v.type for v in graph.params)
    results = tuple(numbers[v] for v in graph.results)
    stated = tuple(guard.cond for guard in graph.constraints)
    return params, tuple(ops), results, graph.sizes, stated


def values_of(graph: Graph) -> Iterator[Value]:
    """Its values, and those of its regions, in the order of their definition."""
    yield from graph.params
    for op in graph.ops:
        for region in op.regions:
            yield from values_of(region)
        yield from op.results


def places_of(graph: Graph) -> Iterator[str]:
    """Where its ops, and those of its regions, are in the source."""
    for op in graph.ops:
        yield op.loc
        for region in op.regions:
            yield from places_of(region)


def attr_key(attr: Attr) -> object:
    """0.0 and -0.0, 1 and True are different attributes."""
    if isinstance(attr, tuple):
        return tuple(map(attr_key, attr))
    return (type(attr), repr(attr) if isinstance(attr, float) else attr)
