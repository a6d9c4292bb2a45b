"""Ops without a translation, replaced by torch's own decomposition of just that op.

    expanded(module)                    kron(x, y)
                                   ->   mul(_unsafe_view(x, ..), _unsafe_view(y, ..))

The decomposition is traced on the tensors that the trace of the model has there, with
their symbolic sizes, and its nodes take the op's place in a copy of the graph; what
they hold that has no translation either is expanded in turn. So views and in-place
writes inside of it are nodes like all others (torch_alias.py).

A decomposition may branch on sizes. These conditions are assumptions like those of the
model's own code, and are stated at the line that uses the op. A decomposition that was
traced for one size alone is not used, and neither is one that branches on data.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from pliant.frontend.torch_alias import functional_twin, is_in_place
from pliant.frontend.torch_ops import TABLE, complex_translation, translation
from pliant.frontend.torch_ops_complex import is_complex
from pliant.frontend.torch_questions import Asked, Question, recorded_questions
from pliant.frontend.torch_rules import Decomposition, asked_here, rules_of
from pliant.frontend.torch_sizes import SIZES

_FRAME = re.compile(r'File "(.+?)", line (\d+), in ')


@dataclass(frozen=True, slots=True)
class Expansion:
    """A graph without ops that torch can decompose, and the conditions it is for."""

    module: GraphModule
    asked: Asked = field(default_factory=Asked)


_DONE: weakref.WeakKeyDictionary[GraphModule, Expansion] = weakref.WeakKeyDictionary()


def expanded(module: GraphModule, wanted: Callable[[Node], bool]) -> Expansion:
    """The graph with every wanted op that has no translation expanded.

    The same module gives the same expansion: a second import of it, with sizes fixed,
    must take the branches of the first.
    """
    if module not in _DONE:
        nodes = [node for node in module.graph.nodes if _unknown(node) and wanted(node)]
        _DONE[module] = _Expander(module).run(nodes) if nodes else Expansion(module)
    return _DONE[module]


def _unknown(node: Node) -> bool:
    """Whether a node calls an op without a translation, of its own or of its twin.

    The twin of an op that writes in place is the op that returns a new tensor.
    """
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if is_complex(node):
        twin = functional_twin(target)
        known = complex_translation(target) or (twin and complex_translation(twin))
        return not known and target not in SIZES
    known = translation(target) is not None or target in SIZES
    return not known and functional_twin(target) not in TABLE


class _Expander:
    def __init__(self, module: GraphModule) -> None:
        self.module, self.asked = module, Asked()
        self.mode = _fake_mode(module)
        self.constants = 0

    def run(self, nodes: list[Node]) -> Expansion:
        if self.mode is None:
            return Expansion(self.module)
        copied: dict[Node, Node] = {}
        graph = Graph()
        graph.output(graph.graph_copy(self.module.graph, copied))
        for old, new in copied.items():
            new.name = old.name
        module = GraphModule(_attributes(self.module), graph)
        for node in nodes:
            self.expand(module, copied[node], frozenset())
        return Expansion(module, self.asked)

    def expand(self, module: GraphModule, node: Node, above: frozenset[object]) -> None:
        """Replaces a node by the nodes of its decomposition, if it has one.

        `above` are the ops whose decomposition the node is a part of. A decomposition
        that contains one of them is not used.
        """
        assert isinstance(node.target, torch._ops.OpOverload)
        above |= {node.target}
        for rule in rules_of(node.target):
            traced = self.trace(node, rule, above)
            if traced is not None:
                inside = self.splice(module, node, *traced)
                for new in inside:
                    if _unknown(new) and (new.users or is_in_place(new.target)):
                        self.expand(module, new, above)
                return

    def trace(
        self, node: Node, rule: Decomposition, above: frozenset[object]
    ) -> tuple[GraphModule, list[Node]] | None:
        """The decomposition as a graph of the node's operands; None if it has none."""
        operands = list(node.all_input_nodes)
        vals = [operand.meta.get("val") for operand in operands]
        if any(val is None for val in vals):
            return None

        def call(*given: Any) -> Any:
            at = dict(zip(operands, given, strict=True))
            args = map_arg(node.args, at.__getitem__)
            kwargs = map_arg(node.kwargs, at.__getitem__)
            return rule(*args, **kwargs)

        try:
            with (
                torch.no_grad(),
                self.unchanged(),
                recorded_questions() as asked,
                self.mode,
            ):
                inner = make_fx(call, tracing_mode="real", pre_dispatch=True)(*vals)
        except Exception:  # torch's rules fail in many ways
            return None
        questions = [q for q in asked_here(asked) if self.held(q)]
        if any(fixes_a_size(question) for question in questions):
            return None
        if _type(inner) != _type(node.meta.get("val")):
            return None
        if _data_symbols(inner.graph.nodes) - _data_symbols(operands):
            return None  # a number of the data, whose bounds are forgotten with it
        if any(each.target in above for each in inner.graph.nodes):
            return None
        path, line = _source(node)
        for question in questions:
            self.asked.questions[Question(question.condition, path, line)] = None
        self.asked.sizes |= asked.sizes
        return inner, operands

    def held(self, question: Question) -> bool:
        """Whether it is true of the example's own sizes.

        If not, torch did not look at them: it was asked whether something is known to
        be so for every size (guard_or_false), and what follows is right in any case.
        """
        sizes = self.mode.shape_env.backed_var_to_val
        return bool(question.condition.subs(sizes) != sympy.false)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restores what torch knew about sizes before a decomposition was traced.

        What it learns there is recorded as conditions instead, if the rule is used.
        """
        env, mode = self.mode.shape_env, self.mode
        caches, mode.cache_enabled = mode.cache_enabled, False
        state = dict(vars(env)) if env is not None else {}
        kept = {
            name: value.copy()
            for name, value in state.items()
            if isinstance(value, dict | list | set)
        }
        try:
            yield
        finally:
            mode.cache_enabled = caches
            for name, value in kept.items():
                setattr(env, name, value)
            if env is not None:
                env._update_version_counter()

    def splice(
        self,
        module: GraphModule,
        node: Node,
        inner: GraphModule,
        operands: list[Node],
    ) -> list[Node]:
        """The nodes of a traced decomposition, in the place of the node."""
        at: dict[Node, Any] = {}
        made: list[Node] = []
        pending = iter(operands)
        results: Any = None
        for each in inner.graph.nodes:
            if each.op == "placeholder":
                at[each] = next(pending)
            elif each.op == "output":
                results = map_arg(each.args[0], at.__getitem__)
            else:
                with module.graph.inserting_before(node):
                    new = module.graph.node_copy(each, at.__getitem__)
                if each.op == "get_attr":
                    new.target = self.attribute(module, inner, str(each.target))
                for key in ("stack_trace", "nn_module_stack"):
                    if key in node.meta:
                        new.meta[key] = node.meta[key]
                origin = node.meta.get("part_of") or str(node.target)
                new.meta["part_of"] = origin
                at[each] = new
                made.append(new)
        _replace(module.graph, node, results)
        return made

    def attribute(self, module: GraphModule, inner: GraphModule, name: str) -> str:
        """A constant of the decomposition, as one of the graph."""
        self.constants += 1
        unique = f"_expanded_{self.constants}"
        setattr(module, unique, getattr(inner, name))
        return unique


def _replace(graph: Graph, node: Node, results: Any) -> None:
    """Replaces a node by results that were computed in its place."""
    if isinstance(results, tuple | list):
        for user in list(node.users):
            which = user.args[1]
            assert isinstance(which, int)
            user.replace_all_uses_with(results[which])
            graph.erase_node(user)
    elif isinstance(results, Node):
        node.replace_all_uses_with(results)
    graph.erase_node(node)


def fixes_a_size(question: Question) -> bool:
    """Whether a condition fixes a size to that of the example, or depends on data."""
    expr = question.condition
    if any(str(symbol).startswith(("u", "zuf")) for symbol in expr.free_symbols):
        return True
    unevaluated = isinstance(expr, sympy.Eq) and expr.rhs.is_number
    return bool(unevaluated and expr.lhs.is_Symbol and expr.rhs not in (0, 1))


def _data_symbols(nodes: Iterable[Node]) -> set[str]:
    """Symbols for numbers that torch reads from data."""
    numbers = (node.meta.get("val") for node in nodes)
    found = (n.node.expr.free_symbols for n in numbers if isinstance(n, torch.SymInt))
    return {str(s) for symbols in found for s in symbols if str(s).startswith("u")}


def _type(result: Any) -> object:
    """The number and types of results, which an op and its decomposition share."""
    if isinstance(result, GraphModule):
        (out,) = (n for n in result.graph.nodes if n.op == "output")
        result = map_arg(out.args[0], lambda n: n.meta.get("val"))
    if isinstance(result, tuple | list):
        return [_type(each) for each in result]
    if isinstance(result, torch.Tensor):
        return result.dtype, result.dim()
    return type(result).__name__


def _source(node: Node) -> tuple[str, int]:
    """File and line of the last frame outside torch."""
    folder = torch.__path__[0]
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if not f[0].startswith((folder, "torch/"))]
    if not (own or frames):
        return str(node.target), 0
    path, line = (own or frames)[-1]
    return path, int(line)


def _fake_mode(module: GraphModule) -> Any:
    vals = (node.meta.get("val") for node in module.graph.nodes)
    modes = (getattr(v, "fake_mode", None) for v in vals if isinstance(v, torch.Tensor))
    return next((mode for mode in modes if mode is not None), None)


def _attributes(module: GraphModule) -> dict[str, Any]:
    """What the graph of a module refers to by name."""
    names = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    return {name: getattr(module, name) for name in sorted(names)}
