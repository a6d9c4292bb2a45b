"""What the versions of `main` have in common, as the same objects.

A kernel that several versions have is lowered once, which passes tell by the identity
of its op. Versions that were made one by one, or that were read from a text, hold equal
ops instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pliant.ir.graph import Graph, Module, Op, Value
from pliant.ir.ops import VIEWS
from pliant.ir.text import print_op
from pliant.ir.types import TensorType

# What a kernel is made for includes the constants and views that it reads.
_SEEN_THROUGH = {*VIEWS, "constant"}


_Key = tuple[str, tuple[Value, ...]]  # the text of an op, and its operands


@dataclass(slots=True)
class _Common:
    ops: dict[_Key, Op] = field(default_factory=dict)
    values: dict[tuple[str, TensorType, _Key | None], Value] = field(
        default_factory=dict
    )

    def graph(self, graph: Graph) -> Graph:
        """A version in which what an earlier one has is that one's."""
        now = {v: self.value(v, None) for v in graph.params}
        ops = tuple(self.op(op, now) for op in graph.ops)
        params = tuple(now[v] for v in graph.params)
        results = tuple(now[v] for v in graph.results)
        return graph.replace(params=params, ops=ops, results=results)

    def value(self, value: Value, made_by: _Key | None) -> Value:
        return self.values.setdefault((value.name, value.type, made_by), value)

    def op(self, op: Op, now: dict[Value, Value]) -> Op:
        operands = tuple(now[v] for v in op.operands)
        key = print_op(op), operands
        made_by = key if op.name in _SEEN_THROUGH else None
        results = tuple(self.value(v, made_by) for v in op.results)
        now.update(zip(op.results, results, strict=True))
        if (operands, results) != (op.operands, op.results):
            op = op.replace(operands=operands, results=results)
        return self.ops.setdefault(key, op)


def with_shared_ops(module: Module) -> Module:
    """The module, with equal ops of its versions as one op."""
    if not module.versions:
        return module
    common = _Common()
    versions = (module.main, *module.versions)
    shared = {graph.name: common.graph(graph) for graph in versions}
    return module.replace(graphs={**module.graphs, **shared})
