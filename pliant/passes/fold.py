"""What depends on weights alone is computed at compile time, by the interpreter.

Weights that batch norm's scale was folded into, a position table that every call slices
the same way, weights cast to the type a kernel computes in: each becomes one constant.
Only results with known sizes, and hardly larger than their data, are folded. Views of
weights are left to the kernels that read through them, but for the weights of
`coded_matmul`, which have a layout of their own. The origin of a constant is kept with
it (`Origin`), for weights that change later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from pliant.context import Context
from pliant.ir.graph import Constant, Graph, Module, Op, Origin, Value, live
from pliant.ir.interp import run_graph
from pliant.ir.ops import VIEWS, Trait, named
from pliant.ir.types import NUMPY, DType, TensorType
from pliant.sym import Expr

SLACK = 1 << 16  # elements that a folded value may have more than its operands
NEVER = named(Trait.CREATE) | {"fusion", "index"}


def _static(value: Value) -> bool:
    return all(d.is_const for d in value.shape)


def of_weights(graph: Graph) -> set[Value]:
    """Values of constant size that depend on weights alone, not on a size either."""
    known: set[Value] = set()
    for op in graph.ops:
        made = op.name in ("constant", "full") or (
            bool(op.operands) and all(v in known for v in op.operands)
        )
        if made and not op.regions and not _sized(op):
            known.update(filter(_static, op.results))
    return known


def _sized(op: Op) -> bool:
    """Whether an attribute is a size that is known only at the call."""
    for _, attr in op.attrs:
        parts = attr if isinstance(attr, tuple) else (attr,)
        if any(isinstance(part, Expr) and not part.is_const for part in parts):
            return True
    return False


def _elements(value: Value) -> int:
    return int(np.prod([d.value for d in value.shape], dtype=object))


def _is_cheap(op: Op, cheap: set[Value]) -> bool:
    """Whether it contains no data: a number, an iota, or a view of one."""
    return op.name in ("full", "iota") or (op.name in VIEWS and op.operands[0] in cheap)


def _foldable(
    op: Op,
    known: dict[Value, Constant | None],
    cheap: set[Value],
    data: dict[Value, int],
) -> bool:
    if op.name in NEVER or op.regions or len(op.results) != 1:
        return False
    if not op.operands or not _static(op.result) or _sized(op):
        return False
    if not all(v in known or v in cheap for v in op.operands):
        return False
    if op.name != "concat" and not any(v in known for v in op.operands):
        return False
    size = sum(data[v] for v in op.operands if v in known)
    return op.name in VIEWS or _elements(op.result) <= size + SLACK


def fold(module: Module, cx: Context) -> Module:
    """Replaces foldable ops of `main` with constants."""
    graph = module.main
    known: dict[Value, Constant | None] = {}  # None: a view of constants, not computed
    cheap: set[Value] = set()  # of known sizes and without data: full, iota
    # Number of stored elements that a known value is made of.
    data: dict[Value, int] = {}
    constants = dict(module.constants)
    producers = graph.producers()
    # What a kernel reads from a layout of its own has to be data.
    stored = {v for op in graph.ops if op.name == "coded_matmul" for v in op.operands}
    stored &= of_weights(graph)
    ops: list[Op] = []
    for op in graph.ops:
        if op.name == "constant":
            known[op.result] = constants[op.str_attr("name")]
            data[op.result] = _elements(op.result)
        elif (
            len(op.results) == 1
            and _static(op.result)
            and _is_cheap(op, cheap)
            and op.result not in stored
        ):
            cheap.add(op.result)
        elif _foldable(op, known, cheap, data) or not stored.isdisjoint(op.results):
            known[op.result] = None
            data[op.result] = _elements(op.result)
            if op.name in VIEWS and op.operands[0] in data:
                data[op.result] = min(data[op.result], data[op.operands[0]])
            if op.name not in VIEWS or op.result in stored:
                made = _folded(op, known, producers)
                known[op.result] = constants[made.name] = made
                attrs = (("name", made.name),)
                op = Op("constant", (), attrs, (op.result,), (), op.loc)
        ops.append(op)
    if len(constants) == len(module.constants):
        return module
    return _without_dead(module, graph.replace(ops=tuple(ops)), constants)


def _folded(
    op: Op, known: dict[Value, Constant | None], producers: dict[Value, Op]
) -> Constant:
    """The op's value; operands that are not stored constants are computed now."""
    ops: list[Op] = []
    constants: dict[str, Constant] = {}
    made: set[Value] = set()

    def need(value: Value) -> None:
        if value in made:
            return
        made.add(value)
        constant = known.get(value)
        if constant is not None:
            constants[constant.name] = constant
            attrs = (("name", constant.name),)
            ops.append(Op("constant", (), attrs, (value,)))
            return
        for operand in producers[value].operands:
            need(operand)
        ops.append(producers[value])

    need(op.result)
    graph = Graph("main", (), tuple(ops), (op.result,))
    used = tuple(constants.values())
    make = partial(_evaluate, graph, tuple((c.name, c.type) for c in used))
    data = make(*(c.data for c in used))
    origin = Origin(tuple(c.origin for c in used), make)
    name = f"{op.result.name}.folded"
    return Constant(name, op.result.type, data, origin=origin)


def _evaluate(
    graph: Graph, types: Sequence[tuple[str, TensorType]], *data: np.ndarray
) -> np.ndarray:
    """The one result of a graph of constants, with these data."""
    constants = {
        name: Constant(name, kind, values)
        for (name, kind), values in zip(types, data, strict=True)
    }
    (result,) = run_graph(Module({"main": graph}, constants=constants), [])
    dtype = graph.results[0].dtype
    if dtype is DType.BF16:
        bits = np.array(result, np.float32, order="C").view(np.uint32)
        return np.asarray(bits >> 16, np.uint16)
    made = np.asarray(result, NUMPY[dtype], order="C")
    return made.copy() if any(np.may_share_memory(made, d) for d in data) else made


def _without_dead(
    module: Module, graph: Graph, constants: dict[str, Constant]
) -> Module:
    """Drops ops and constants that nothing reads any more."""
    graph = live(graph)
    names = {op.str_attr("name") for op in graph.ops if op.name == "constant"}
    alive = {name: c for name, c in constants.items() if name in names}
    return module.replace(graphs={**module.graphs, "main": graph}, constants=alive)
