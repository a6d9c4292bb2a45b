"""The walk over an ONNX graph: each node by the table, problems collected.

A node is, in this order:
  known      an op of known tensors (onnx_known.py)
  translated by its rule (onnx_ops.py)
  expanded   by the body that its schema has in the `onnx` package, or that the model
             brings along

A subgraph (of If, Loop, Scan, SequenceMap) sees the names around it. Its tensors become
parameters of the region, what is known stays known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import onnx
from onnx import helper

from pliant.errors import ModelError
from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_known import evaluate
from pliant.frontend.onnx_limits import (
    NODES,
    OUTPUTS,
    check_counts,
    check_tensors,
)
from pliant.frontend.onnx_ops import rule_of
from pliant.frontend.onnx_tensors import dense, known_tensor
from pliant.frontend.onnx_values import (
    Coded,
    Entry,
    Known,
    replaced,
    tensors_in,
)
from pliant.frontend.translate import Location, Unsupported, Untranslated
from pliant.ir.graph import Graph, Value
from pliant.ir.types import TensorType

OLDEST = 7  # operator set
DEEPEST = 64  # functions in functions, and graphs in graphs

Names = Mapping[str, "Entry | Untranslated"]


class OnnxWalk:
    """Translates the nodes of one graph."""

    def __init__(
        self,
        cx: OnnxContext,
        opsets: Mapping[str, int],
        functions: Mapping[tuple[str, str], onnx.FunctionProto],
        read: Callable[[onnx.TensorProto], Known] = known_tensor,
        depth: int = 0,
    ) -> None:
        self.cx, self.opsets, self.functions = cx, opsets, functions
        self.read_tensor, self.depth = read, depth
        self.env: dict[str, Entry | Untranslated] = {}
        # The inputs of the model that a value follows from, by its name.
        self.sources: dict[str, frozenset[str]] = {}
        self.attrs: Mapping[str, Any] = {}  # of the function that is expanded
        self.absent: frozenset[str] = frozenset()  # inputs of it that are left out
        self.label = ""  # where in the model this graph is
        self.used: frozenset[str] = frozenset()
        if depth > DEEPEST:
            raise ModelError(f"graphs or functions are nested more than {DEEPEST} deep")

    def inner(self, opsets: Mapping[str, int] | None = None) -> OnnxWalk:
        return OnnxWalk(
            self.cx,
            self.opsets if opsets is None else opsets,
            self.functions,
            self.read_tensor,
            self.depth + 1,
        )

    # ---- the whole

    def load(self, graph: onnx.GraphProto) -> None:
        """The constants of a graph."""
        for proto in graph.initializer:
            self.env[proto.name] = self.read_tensor(proto)
        for sparse in graph.sparse_initializer:
            self.env[sparse.values.name] = dense(sparse, self.read_tensor)

    def run(self, nodes: Sequence[onnx.NodeProto], results: Sequence[str]) -> None:
        self.used = frozenset(results) | {n for node in nodes for n in reads(node)}
        for node in nodes:
            self.visit(node)

    def result(self, name: str) -> Entry | Untranslated:
        found = self.env.get(name)
        if found is None:
            raise ModelError(f"nothing gives the output '{name}'")
        return found

    def visit(self, node: onnx.NodeProto) -> None:
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        what = node.name or (node.output[0] if node.output else name)
        place = Location(what, f"node '{what}'{self.label}")
        made: Any = self.cx.attempt(
            name,
            place,
            partial(self.translated, node),
            partial(self.report, node, name, place),
        )
        answers = made if isinstance(made, tuple) else (made,)
        if isinstance(made, Untranslated):
            answers = (made,) * len(node.output)
        for output, answer in zip(node.output, answers, strict=False):
            if output and answer is not None:
                self.env[output] = answer

    def report(
        self, node: onnx.NodeProto, name: str, place: Location, reason: str
    ) -> Untranslated:
        """Records a problem, unless nothing reads what the node gives."""
        if reason and any(output in self.used for output in node.output):
            self.cx.note(name, reason, place)
        return Untranslated()

    # ---- one node

    def translated(self, proto: onnx.NodeProto) -> Any:
        cx = self.cx
        cx.visited += 1
        if cx.visited > NODES:
            raise ModelError(
                f"the model has more than {NODES} nodes, its functions and the rounds "
                "of its loops written out"
            )
        inputs: list[Entry | None] = []
        for name in proto.input:
            found = self.env.get(name) if name and name not in self.absent else None
            if isinstance(found, Untranslated):
                return found
            if name and found is None and name not in self.absent:
                raise ModelError(f"nothing gives '{name}', an input of {proto.op_type}")
            inputs.append(found)
        none: frozenset[str] = frozenset()
        sources = tuple(self.sources.get(name, none) for name in proto.input)
        for output in proto.output:
            self.sources[output] = none.union(*sources)
        node = self.resolved(proto, inputs, sources)
        check_counts(node.op, node.attrs)
        before = cx.node
        cx.node, cx.op_name = node, node.op
        try:
            made = self.answer(node)
        except MemoryError:
            raise ModelError(f"{proto.op_type} '{proto.name}' is too large") from None
        finally:
            cx.node = before
        answers = made if isinstance(made, tuple) else (made,)
        if len(answers) > OUTPUTS:
            raise ModelError(f"{proto.op_type} gives {len(answers)} results")
        entries = (e for e in answers if not isinstance(e, Untranslated) and e)
        check_tensors(tensors_in(entries), f"{proto.op_type} '{proto.name}'")
        cx.guard_sizes()
        return made

    def answer(self, node: Node) -> Any:
        if len(node.outputs) == 1:
            known = evaluate(self.cx, node)
            if known is not None:
                return known
        if (node.domain, node.op) in self.functions:
            return self.expanded(node, self.functions[node.domain, node.op])
        rule = rule_of(node.domain, node.op, node.version)
        made = None if rule is None else rule(self.cx, node)
        if made is not None:
            return made
        body = schema_body(self.cx, node)
        if body is None:
            raise Unsupported("this op has no translation")
        for name, given in schema_defaults(node).items():
            if name not in node.attrs and given.type:
                node.attrs[name] = self.attribute(given)
        return self.expanded(node, body)

    def resolved(
        self,
        proto: onnx.NodeProto,
        inputs: Sequence[Entry | None],
        sources: tuple[frozenset[str], ...],
    ) -> Node:
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        core = self.opsets.get("", onnx.defs.onnx_opset_version())
        opset = version = self.opsets.get(domain, 1) if domain else core
        if (domain, proto.op_type) not in self.functions and onnx.defs.has(
            proto.op_type, domain
        ):
            try:
                schema = onnx.defs.get_schema(proto.op_type, opset, domain)
            except onnx.defs.SchemaError:
                raise Unsupported(f"it is not in operator set {opset}") from None
            version = schema.since_version
            self.check_age(schema)
        if any(a.ref_attr_name for a in proto.attribute):
            proto = self.concrete(proto)
        attrs = ((a.name, self.attribute(a)) for a in proto.attribute)
        return Node(
            self.cx,
            self,
            proto,
            domain,
            version,
            opset,
            core,
            tuple(inputs),
            {name: value for name, value in attrs if value is not None},
            sources,
            frozenset(i for i, o in enumerate(proto.output) if o and o in self.used),
        )

    def concrete(self, proto: onnx.NodeProto) -> onnx.NodeProto:
        """A node of a function with the function's attributes in their places."""
        made = onnx.NodeProto()
        made.CopyFrom(proto)
        del made.attribute[:]
        for attribute in proto.attribute:
            value = self.attribute(attribute)
            if not attribute.ref_attr_name:
                made.attribute.append(attribute)
            elif isinstance(value, int | float | str | list):
                made.attribute.append(helper.make_attribute(attribute.name, value))
        kept = {a.name for a in made.attribute}
        for attribute in proto.attribute:
            if attribute.name not in kept and attribute.ref_attr_name in self.attrs:
                made.attribute.append(attribute)
        return made

    def check_age(self, schema: Any) -> None:
        """Rules are for the forms that ops have from operator set 7 on."""
        if schema.domain or self.opsets.get("", OLDEST) >= OLDEST:
            return
        newer = onnx.defs.get_schema(schema.name, OLDEST)
        if newer.since_version != schema.since_version:
            raise Unsupported(f"its form before operator set {OLDEST}")

    def attribute(self, proto: onnx.AttributeProto) -> Any:
        """The value of an attribute, of the function's if it refers to one."""
        if proto.ref_attr_name:
            return self.attrs.get(proto.ref_attr_name)
        kinds = onnx.AttributeProto
        match proto.type:
            case kinds.FLOAT:
                return float(proto.f)
            case kinds.INT:
                return int(proto.i)
            case kinds.STRING:
                return proto.s.decode(errors="replace")
            case kinds.TENSOR:
                return self.read_tensor(proto.t)
            case kinds.FLOATS:
                return [float(x) for x in proto.floats]
            case kinds.INTS:
                return [int(x) for x in proto.ints]
            case kinds.STRINGS:
                return [s.decode(errors="replace") for s in proto.strings]
            case kinds.SPARSE_TENSOR:
                return dense(proto.sparse_tensor, self.read_tensor)
            case kinds.GRAPH:
                return proto.g
        return proto

    # ---- functions

    def expanded(self, node: Node, body: onnx.FunctionProto) -> Any:
        """A node by the body of its function, which sees its inputs alone."""
        walk = self.inner({**self.opsets, **opsets_of(body.opset_import)})
        walk.attrs = {
            **{a.name: self.attribute(a) for a in body.attribute_proto},
            **node.attrs,
        }
        walk.label = f", part of {node.op} '{node.proto.name}'{self.label}"
        none: frozenset[str] = frozenset()
        for i, name in enumerate(body.input):
            entry = node.inputs[i] if i < len(node.inputs) else None
            if entry is not None:
                walk.env[name] = entry
                walk.sources[name] = node.sources[i] if node.sources else none
        walk.absent = frozenset(body.input) - walk.env.keys()
        problems = len(self.cx.problems)
        wanted = [o for i, o in enumerate(body.output) if i in node.used]
        walk.run(live(body.node, wanted), body.output)
        if len(self.cx.problems) > problems:
            raise Unsupported("")
        return tuple(walk.env.get(name) for name in body.output)

    # ---- subgraphs

    def outside(self, *graphs: onnx.GraphProto) -> dict[str, Entry]:
        """What graphs read of the names around them."""
        found: dict[str, Entry] = {}
        for name in sorted({n for graph in graphs for n in free_names(graph)}):
            entry = self.env.get(name)
            if isinstance(entry, Untranslated):
                raise Unsupported("")
            if entry is not None:
                found[name] = entry
        return found

    def inlined(
        self, graph: onnx.GraphProto, inputs: Sequence[Entry | None]
    ) -> tuple[Entry, ...]:
        """The results of a graph, as part of this one."""
        return self.subgraph(graph, inputs, self.outside(graph))

    def subgraph(
        self, graph: onnx.GraphProto, inputs: Sequence[Entry | None], around: Names
    ) -> tuple[Entry, ...]:
        walk = self.inner()
        walk.attrs, walk.absent = self.attrs, self.absent
        walk.label = f", in graph '{graph.name}'{self.label}"
        walk.env.update(around)
        walk.sources.update({n: self.sources[n] for n in around if n in self.sources})
        walk.load(graph)
        for proto, entry in zip(graph.input, inputs, strict=False):
            if entry is not None:
                walk.env[proto.name] = entry
        problems = len(self.cx.problems)
        walk.run(graph.node, [o.name for o in graph.output])
        if len(self.cx.problems) > problems:
            raise Unsupported("")
        made = [walk.result(o.name) for o in graph.output]
        return tuple(e for e in made if not isinstance(e, Untranslated))

    def region(
        self,
        graph: onnx.GraphProto,
        types: Sequence[TensorType],
        around: Mapping[str, Entry],
        build: Callable[[list[Value], tuple[Entry, ...]], Sequence[Value]],
        known: Callable[[list[Value]], Sequence[Entry | None]] | None = None,
    ) -> Graph:
        """A graph as a region of an op.

        Its parameters have these types, and behind them those of the tensors `around`.
        `known` makes the graph's inputs of the parameters, and `build` the region's
        results of the graph's.
        """
        cx, outer = self.cx, self.cx.b
        cx.b = outer.child()
        try:
            params = [cx.b.param("carried", t) for t in types]
            inside: dict[Value, Value] = {}
            for value in tensors_in(around.values()):
                inside[value] = cx.b.param("outer", value.type)
                if value in cx.nonnegative:
                    cx.nonnegative.add(inside[value])
            names = {n: replaced(e, inside) for n, e in around.items()}
            given = list(params) if known is None else known(params)
            results = build(params, self.subgraph(graph, given, names))
            return cx.b.finish(graph.name or "region", [*results, *inside.values()])
        finally:
            cx.b = outer


def opsets_of(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """The version of each domain; the default one has two names."""
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in imports}


# ---- what graphs read


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads, those of its subgraphs included."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from free_names(graph)


def free_names(graph: onnx.GraphProto) -> set[str]:
    """The names that a graph reads and does not define."""
    defined = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    defined.update(s.values.name for s in graph.sparse_initializer)
    free: set[str] = set()
    for node in graph.node:
        free.update(n for n in reads(node) if n and n not in defined)
        defined.update(node.output)
    free.update(o.name for o in graph.output if o.name not in defined)
    return free


def live(
    nodes: Sequence[onnx.NodeProto], wanted: Sequence[str]
) -> list[onnx.NodeProto]:
    """The nodes that these results follow from."""
    needed, kept = set(wanted), list[onnx.NodeProto]()
    for node in reversed(nodes):
        if any(o in needed for o in node.output):
            needed.update(reads(node))
            kept.append(node)
    return kept[::-1]


# ---- bodies of ops


def schema_body(cx: OnnxContext, node: Node) -> onnx.FunctionProto | None:
    """The definition of an op in other ops, if the operator set has one."""
    if not onnx.defs.has(node.op, node.domain):
        return None
    schema: Any = onnx.defs.get_schema(node.op, node.opset, node.domain)
    body = onnx.FunctionProto()
    if schema.has_function:
        versions = schema.function_opset_versions
        version = max((v for v in versions if v <= node.core), default=max(versions))
        body.ParseFromString(schema.get_function_with_opset_version(version))
        return body
    if not schema.has_context_dependent_function:
        return None
    versions = schema.context_dependent_function_opset_versions
    version = max((v for v in versions if v <= node.core), default=max(versions))
    types = [type_proto(cx, e).SerializeToString() for e in node.inputs]
    made = schema.get_context_dependent_function_with_opset_version(
        version, node.proto.SerializeToString(), types
    )
    if not made:
        return None
    body.ParseFromString(made)
    return body


def schema_defaults(node: Node) -> dict[str, onnx.AttributeProto]:
    schema = onnx.defs.get_schema(node.op, node.opset, node.domain)
    return {name: a.default_value for name, a in schema.attributes.items()}


def type_proto(cx: OnnxContext, entry: Entry | None) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    if isinstance(entry, Value | Known | Coded):
        proto.tensor_type.elem_type = cx.element_of(entry).number
        for dim in cx.shape_of(entry):
            made = proto.tensor_type.shape.dim.add()
            if dim.is_const:
                made.dim_value = dim.value
        proto.tensor_type.shape.SetInParent()
    return proto
