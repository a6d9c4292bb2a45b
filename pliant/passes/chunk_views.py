"""What the forms of a graph that is to run in chunks are made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pliant.ir.access import is_one
from pliant.ir.graph import Graph, Op, Value
from pliant.ir.ops import IN_MEMORY, VIEWS
from pliant.passes.cuts import Chunk, Cut, RegionCuts

PANEL_COLUMNS = 64  # whole panels of every target's packed weights


@dataclass(slots=True)
class Bases:
    """Who makes and reads the values of a graph that are in memory."""

    graph: Graph
    producers: Mapping[Value, Op] = field(init=False)
    # The ops that read each value, through views, in their order; None: it is a result.
    readers: dict[Value, dict[Op | None, None]] = field(init=False)

    def __post_init__(self) -> None:
        self.producers = self.graph.producers()
        self.readers = {}
        for op in self.graph.ops:
            if op.name not in VIEWS:
                for value in op.operands:
                    self.readers.setdefault(self.base(value), {})[op] = None
        for value in self.graph.results:
            self.readers.setdefault(self.base(value), {})[None] = None

    def base(self, value: Value) -> Value:
        """The value in memory that a view reads."""
        op = self.producers.get(value)
        while op is not None and op.name in VIEWS:
            value = op.operands[0]
            op = self.producers.get(value)
        return value


def reads_part(fusion: Op, param: Value, cut: Cut) -> bool:
    """Whether a kernel can read a part of a value in memory, cut so, for a parameter.

    A contraction reads its operands through strides. What comes after it, and kernels
    without one, read operands from their start to their end.
    """
    readers = [op for op in fusion.regions[0].ops if param in op.operands]
    strided = all(op.name in IN_MEMORY for op in readers)
    return strided or all(is_one(size) for size in param.shape[: cut.axis])


def cut_kernel(
    fusion: Op,
    cut: Cut,
    cuts: RegionCuts,
    chunk: Chunk,
    operands: Mapping[Value, Value],
) -> Op:
    """A kernel that gives a part of its result; `operands` by the region's params."""
    region = fusion.regions[0]
    params = {p: chunk.value(p, cuts.demands[p]) for p in operands}
    values = dict(params)
    ops = cuts.ops(region, chunk, values)
    results = tuple(values[v] for v in region.results)
    body = Graph(region.name, tuple(params.values()), tuple(ops), results)
    outer = chunk.value(fusion.result, cut)
    given = tuple(operands.values())
    return Op("fusion", given, fusion.attrs, (outer,), (body,), fusion.loc)
