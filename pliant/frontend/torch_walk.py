"""The walk over an exported graph: each node by the table, problems collected."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from pliant.errors import PliantError
from pliant.frontend.contract import Basis
from pliant.frontend.torch_alias import (
    Aliases,
    functional_twin,
    is_in_place,
)
from pliant.frontend.torch_branches import decisions, taken
from pliant.frontend.torch_dims import as_bound, to_expr
from pliant.frontend.torch_expand import Expansion, expanded
from pliant.frontend.torch_flow import FLOWS, TorchRegion, next_seed, parts_of
from pliant.frontend.torch_ops import TABLE, complex_translation, translation
from pliant.frontend.torch_ops_complex import (
    Complex,
    as_complex,
    from_pairs,
    holds_complex,
    is_complex,
    replaced,
)
from pliant.frontend.torch_ops_context import TorchContext, Unsupported, short_name
from pliant.frontend.torch_sizes import SIZES, Undecided, collapse, undecided
from pliant.frontend.torch_tensors import as_real, dtype_of, to_numpy
from pliant.frontend.torch_views import name_of
from pliant.frontend.translate import POISON, Location, constant_of
from pliant.ir.graph import Value
from pliant.ir.types import TensorType
from pliant.sym import Expr, as_expr, eq

_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)(?:\n[ \t]+(\S.*))?')
_TORCH_FOLDER = os.path.dirname(torch.__file__)


def location(node: Node) -> Location:
    """The last frame outside torch; the last one of all if none is."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return Location("", "unknown source line")
    own = [f for f in frames if not f[0].startswith((_TORCH_FOLDER, "torch/"))]
    path, line, function, code = (own or frames)[-1]
    short = f"{os.path.basename(path)}:{line}"
    return Location(short, f"{short} in {function}" + (f": {code}" if code else ""))


IGNORED = frozenset({"_set_grad_enabled", "_assert", "_exit_autocast"})


def expand(module: GraphModule) -> Expansion:
    """The graph with those of its live ops expanded that have no translation."""
    return expanded(module, _live(module).__contains__)


class TorchWalk:
    """Translates the nodes of one graph, and of the graphs inside it."""

    def __init__(self, cx: TorchContext) -> None:
        self.cx, self.symbols, self.problems = cx, cx.symbols, cx.problems
        self.env: dict[Node, Any] = {}
        self.lazy: dict[Node, Callable[[], Any]] = {}  # weights, read when used
        self.buffers: dict[Node, str] = {}  # weights that a call may change
        self.written: dict[Node, str] = {}  # those that it did
        self.inputs: dict[Node, int] = {}  # arguments that it may change, by slot
        self.overwritten: dict[Node, int] = {}  # those that it did
        self.laid_out: set[Node] = set()  # those that must have the traced strides
        self.aliases: Aliases | None = None
        # Sizes, as torch knows them, that something was computed from; None: any.
        self.sizes_read: frozenset[Any] | None = None
        self.module: GraphModule | None = None
        self.live: set[Node] = set()  # what a result or a write depends on

    def run(self, module: GraphModule) -> None:
        self.module = module
        self.live = _live(module)
        if any(is_in_place(n.target) or _trains(n) for n in module.graph.nodes):
            self.aliases = Aliases(self)
        for node in module.graph.nodes:
            if node.op == "call_function":
                self.visit(node)
            elif node.op == "get_attr":
                self.find_constant(module, node)

    def find_constant(self, module: GraphModule, node: Node) -> None:
        """A tensor that an inner graph or a decomposition has as its own."""
        tensor = getattr(module, str(node.target), None)
        if isinstance(tensor, torch.Tensor) and tensor.is_complex():
            pairs, parts = as_real(tensor), self.cx.dtype(tensor.dtype)
            data = constant_of(node.name, parts, to_numpy(pairs), pairs)
            self.env[node] = from_pairs(self.cx, self.cx.b.constant(data))
            return
        dtype = dtype_of(tensor.dtype) if isinstance(tensor, torch.Tensor) else None
        if dtype is not None and node not in self.env and node not in self.lazy:
            data = constant_of(node.name, dtype, to_numpy(tensor), tensor)
            self.env[node] = self.cx.b.constant(data)

    def visit(self, node: Node) -> None:
        self.env[node] = self.cx.attempt(
            str(node.target),
            location(node),
            partial(self.translated, node),
            partial(self.report, node),
        )

    def translated(self, node: Node) -> Any:
        result = self.update(node) if _writes(node.target) else self.translate(node)
        self.cx.guard_sizes()
        if self.aliases is not None:
            self.aliases.track(node)
        return result

    def report(self, node: Node, reason: str) -> Any:
        """Records a problem and returns a stand-in, so that later ones are found too.

        A result that nothing reads needs no translation.
        """
        if node not in self.live:
            return POISON
        if reason and "part_of" in node.meta:
            name, reason = node.meta["part_of"], f"{node.target} in it: {reason}"
            self.cx.note(name, reason, location(node))
        elif reason:
            self.cx.note(str(node.target), reason, location(node))
        with suppress(Unsupported, PliantError, KeyError, ValueError):
            return self.stand_in(node.meta.get("val"))
        return POISON

    def stand_in(self, val: Any) -> Any:
        """Something of the traced type; no code is made from a walk with problems."""
        if isinstance(val, tuple | list):
            return [self.stand_in(each) for each in val]
        if not isinstance(val, torch.Tensor):
            return POISON
        shape = [d if isinstance(d, int) else self.size(d) for d in val.shape]
        dtype = self.cx.dtype(val.dtype)
        return self.cx.b.param("unknown", TensorType(dtype, tuple(map(as_expr, shape))))

    def output(self, argument: Any) -> Any:
        return self.read(argument) if isinstance(argument, Node) else argument

    # operands

    def read(self, node: Node) -> Any:
        if node not in self.env and node in self.lazy:
            self.env[node] = self.lazy[node]()
        if self.aliases is not None:
            self.aliases.refresh(node)
        if node.op == "get_attr":  # an inner graph, or a constant of one
            return self.env.get(node, node)
        return self.env.get(node, POISON)

    def resolve(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return collapse(self.read(argument))
        if isinstance(argument, list | tuple):
            return [self.resolve(a) for a in argument]
        if isinstance(argument, dict):
            return {k: self.resolve(v) for k, v in argument.items()}
        return argument

    def operands(self, node: Node) -> tuple[list[Any], dict[str, Any]]:
        """Resolved operands; in a call by schema, those it can pass by position."""
        args = [self.resolve(a) for a in node.args]
        kwargs = {k: self.resolve(v) for k, v in node.kwargs.items()}
        if isinstance(node.target, torch._ops.OpOverload):
            for argument in node.target._schema.arguments[len(args) :]:
                if argument.kwarg_only or argument.name not in kwargs:
                    break
                args.append(kwargs.pop(argument.name))
        return args, kwargs

    # one node

    def translate(self, node: Node) -> Any:
        self.cx.node, self.cx.state = node, self
        target = node.target
        if node not in self.live and is_random(target):
            return POISON  # and no seed is drawn for it
        args, kwargs = self.operands(node)
        special = self.special(node, args)
        rule = translation(target)
        if is_complex(node) or holds_complex(args, kwargs):
            rule = complex_translation(target)
        known = rule is not None or target in SIZES or special is not None
        if not known and getattr(target, "__name__", "") in IGNORED:
            return None
        if not known and target is not operator.getitem:
            raise Unsupported(_why_unknown(target))
        if any(_poisoned(a) for a in (*args, *kwargs.values())):
            raise Unsupported("")  # reported where it arose
        if special is not None:
            return special()
        if target is operator.getitem:
            return self.item(node, args[0], args[1])
        if target in SIZES:
            return self.fold(node, args)
        assert rule is not None
        if target is not torch.ops.aten._assert_scalar.default:
            args, kwargs = tree_map_only(Undecided, self.decide, (args, kwargs))
        return self.checked(node, rule(self.cx, *args, **kwargs))

    def decide(self, found: Undecided) -> bool:
        """A condition on sizes that an op takes: as in the trace, under guards."""
        if found.truth is None:
            self.cx.unsupported("depends on where a view begins in memory")
        known = taken(found.truth, self.symbols, self.cx.b.loc)
        if known is None:
            self.cx.unsupported("a condition on sizes that data decide, as a value")
        answer, guards = known
        for guard in guards:
            self.cx.assume(Basis.BRANCH, guard)
        return answer

    def item(self, node: Node, source: Any, which: Any) -> Any:
        picked = source[which]
        if picked is None and node.users:
            self.cx.unsupported("this result of the op is not computed")
        return POISON if picked is None else picked

    def fold(self, node: Node, args: list[Any]) -> Any:
        if any(isinstance(a, Undecided) for a in args):
            return undecided(self.cx)
        args = [a.re if isinstance(a, Complex) else a for a in args]
        return collapse(SIZES[node.target](self.cx, *args))

    def update(self, node: Node) -> Any:
        """An in-place op: its functional twin, then a write."""
        self.cx.node = node
        target = node.args[0]
        assert isinstance(target, Node) and self.aliases is not None
        self.aliases.check_writable(target)
        args, kwargs = self.operands(node)
        if any(_poisoned(a) for a in (*args, *kwargs.values())):
            raise Unsupported("")
        old = args[0]
        twin = functional_twin(node.target)
        if holds_complex(args, kwargs):
            return self.update_complex(node, target, args, kwargs)
        if any(r.alias_info is not None for r in twin._schema.returns):
            self.cx.unsupported(
                f"changes a tensor's shape, not its values: call {name_of(twin)}"
            )
        new = TABLE[twin](self.cx, *args, **kwargs)
        new = self.cx.broadcast_to(self.cx.cast(new, old.dtype), old.shape)
        self.aliases.write(target, new)
        return new

    def update_complex(
        self, node: Node, target: Node, args: list[Any], kwargs: dict[str, Any]
    ) -> Complex:
        rule = complex_translation(functional_twin(node.target))
        old = args[0]
        if rule is None or not isinstance(old, Complex):
            self.cx.unsupported("this in-place change of complex numbers")
        assert self.aliases is not None
        if self.aliases.root(target).op == "placeholder":
            self.cx.unsupported("in-place change of a complex input or buffer")
        new = replaced(self.cx, old, rule(self.cx, *args, **kwargs))
        self.aliases.write(target, new)
        return new

    def store(self, node: Node, new: Value) -> None:
        """An operand that an op changes beside its result: a norm's statistics."""
        assert self.aliases is not None
        self.aliases.check_writable(node)
        old = self.read(node)
        self.aliases.write(node, self.cx.cast(new, old.dtype))

    def sibling(self, node: Node, name: str) -> Value:
        """The buffer of this name in the module that a buffer belongs to, as it is."""
        assert self.aliases is not None
        path = self.buffers.get(self.aliases.root(node), "").rpartition(".")
        wanted = f"{path[0]}{path[1]}{name}"
        found = [other for other, target in self.buffers.items() if target == wanted]
        if not found:
            self.cx.unsupported(f"there is no buffer {name} beside {node.name}")
        return self.cx.tensor(self.read(found[0]))

    def checked(self, node: Node, result: Any) -> Any:
        """The result in the dtype the trace found; data-dependent sizes bound."""
        val = node.meta.get("val")
        if isinstance(result, list):
            pairs = zip(result, val or (), strict=True)
            return [self.conform(node, r, v) for r, v in pairs]
        return self.conform(node, result, val)

    def conform(self, node: Node, result: Any, val: Any) -> Any:
        if isinstance(val, torch.Tensor) and val.is_complex():
            if isinstance(result, Value):
                result = as_complex(self.cx, result, self.cx.dtype(val.dtype))
            if isinstance(result, Complex):
                parts = (
                    self.conform_part(node, p, val) for p in (result.re, result.im)
                )
                return Complex(*parts)
        return self.conform_part(node, result, val)

    def conform_part(self, node: Node, result: Any, val: Any) -> Any:
        if not isinstance(result, Value) or not isinstance(val, torch.Tensor):
            return result
        if result.type.rank != val.dim():
            raise AssertionError(f"{result.type} should have rank {val.dim()}")
        for ours, size in zip(result.shape, val.shape, strict=True):
            expr = size.node.expr if isinstance(size, torch.SymInt) else None
            if isinstance(expr, sympy.Symbol):
                self.symbols.setdefault(str(expr), ours)
            self.agree(node, ours, size if expr is None else expr)
        return self.cx.cast(result, self.cx.dtype(val.dtype))

    def agree(self, node: Node, ours: Expr, traced: Any) -> None:
        """Requires the traced size if the model's code may have read it.

        For x[-3:] the trace has the size 3, and values computed from it; at n = 2 these
        would be wrong. A size that nothing was computed from need not agree.
        """
        if isinstance(traced, int):
            theirs = as_expr(traced)
        else:
            if any(str(name) not in self.symbols for name in traced.free_symbols):
                return
            try:
                theirs = to_expr(traced, self.symbols.__getitem__)
            except ValueError:
                return
        if ours is theirs or (theirs.is_const and ours.is_const):
            return
        cond = eq(ours, theirs)
        if self.cx.proves(cond) or not self.is_read(traced):
            return
        why = f"{short_name(node.target)}: the trace took this size to be {theirs}"
        self.cx.assume(Basis.BRANCH, self.cx.guard(as_bound(cond), why))

    def is_read(self, traced: Any) -> bool:
        """Whether the model may have computed with a size as torch knows it."""
        if self.sizes_read is None or isinstance(traced, int):
            return True
        if not traced.free_symbols or traced.is_Symbol:
            return True
        return any(read.has(traced) for read in self.sizes_read)

    def size(self, val: torch.SymInt) -> Expr:
        return to_expr(val.node.expr, self.symbols.__getitem__)

    # ops with graphs inside

    def special(self, node: Node, args: list[Any]) -> Callable[[], Any] | None:
        name = str(getattr(node.target, "__name__", ""))
        match name:
            case "wrap_with_set_grad_enabled":
                return lambda: self.without_gradient(node, args)
            case "wrap_with_autocast" if args[2] is False:
                return lambda: self.inline(node.args[4], args[5:])
            case _ if name in FLOWS:
                return lambda: FLOWS[name](self, node, args)
            case _:
                return None

    def without_gradient(self, node: Node, args: list[Any]) -> list[Any]:
        """An inner graph; in training, no gradient leaves one that switched it off."""
        results = self.inline(node.args[1], args[2:])
        if args[0] or not self.cx.training:
            return results
        return [self.cx.detached(r) if isinstance(r, Value) else r for r in results]

    def inner(self, reference: Any) -> GraphModule:
        assert isinstance(reference, Node) and self.module is not None
        found = getattr(self.module, str(reference.target))
        assert isinstance(found, GraphModule)
        return found

    def inline(self, reference: Any, operands: list[Any]) -> list[Any]:
        """The results of an inner graph, its ops placed right here."""
        expansion = expand(self.inner(reference))
        module = expansion.module
        for found in decisions(module, self.symbols, expansion.asked):
            self.cx.assume(found.basis, found.guard)
        walk = TorchWalk(self.cx)
        if self.sizes_read is not None:
            walk.sizes_read = self.sizes_read | expansion.asked.sizes
        params = [n for n in module.graph.nodes if n.op == "placeholder"]
        walk.env.update(zip(params, operands, strict=True))
        walk.run(module)
        (out,) = (n for n in module.graph.nodes if n.op == "output")
        results = out.args[0]
        single = not isinstance(results, tuple | list)
        return [walk.output(r) for r in ([results] if single else results)]

    def region(
        self, reference: Any, operands: list[Any], name: str, rounds: bool
    ) -> TorchRegion:
        """An inner graph as a region; sizes are seen from outside, tensors passed.

        With `rounds`, it runs repeatedly: if it draws random numbers, its last result
        is the next seed.
        """
        cx = self.cx
        outer, random, seed = cx.b, cx.random, cx.seed_value
        cx.b, cx.seed_value = outer.child(), None
        cx.random = random and not cx.training
        try:
            results = self.inline(reference, [self.param(name, x) for x in operands])
            if any(not isinstance(r, Value | Complex) for r in results):
                raise Unsupported("a branch or loop body that returns no tensor")
            values = parts_of(results)
            drawn = cx.seed_value
            if drawn is not None and rounds:
                values.append(next_seed(cx, drawn))
            kinds = tuple(isinstance(r, Complex) for r in results)
            return TorchRegion(cx.b.finish(name, values), kinds, drawn is not None)
        finally:
            cx.b, cx.random, cx.seed_value = outer, random, seed

    def param(self, name: str, x: Any) -> Any:
        """The parameter of a region for an operand; numbers are known inside."""
        if isinstance(x, Complex):
            return Complex(self.param(name, x.re), self.param(name, x.im))
        return self.cx.b.param(f"{name}_arg", x.type) if isinstance(x, Value) else x


def _live(module: GraphModule) -> set[Node]:
    """The nodes that a result, a write or a check depends on."""
    found: set[Node] = set()
    for node in reversed(module.graph.nodes):
        target = node.target
        acts = node.op == "output" or is_in_place(target) or _trains(node)
        graphs = any(n.op == "get_attr" for n in node.all_input_nodes)
        if acts or graphs or "assert" in str(target):
            found.add(node)
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _writes(target: Any) -> bool:
    """An in-place op; detach_ and its like are in the table and write nothing."""
    return target not in TABLE and functional_twin(target) in TABLE


def _trains(node: Node) -> bool:
    """A norm that updates statistics, which its schema does not tell."""
    norms = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
    return node.target in norms and node.args[3] is not None and node.args[5] is True


def is_random(target: Any) -> bool:
    """An op that draws random numbers."""
    seeded = torch.Tag.nondeterministic_seeded
    return isinstance(target, torch._ops.OpOverload) and seeded in target.tags


def _poisoned(argument: Any) -> bool:
    if isinstance(argument, list | tuple):
        return any(_poisoned(a) for a in argument)
    return argument is POISON


def _why_unknown(target: Any) -> str:
    if is_in_place(target):
        return "this in-place op has no translation"
    return "this op has no translation"
