"""torch.export's program -> graph function.

    ep, symbols = export_module(model, example_inputs, dynamic_shapes)
    imported = from_exported(ep, symbols)

The graph is read before decomposition, so attention, linear and norms stay whole.
Shapes are ours: every op is typed by its own rule, torch's symbolic sizes serve only
to name the dims of inputs. So sizes 0 and 1 are as good as any, and a condition that
the model states (a table of 512 positions) comes out as a guard with its source line.

`Imported` also tells a caller how to flatten arguments and rebuild results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from pliant.errors import UnsupportedOp, UnsupportedOpError
from pliant.frontend.torch_branches import decisions
from pliant.frontend.torch_dims import SymbolInfo, fresh_symbol, to_expr
from pliant.frontend.torch_integers import bound_integer, open_integer
from pliant.frontend.torch_ops_context import DTYPE_OF, Context, to_numpy
from pliant.frontend.torch_trace import trace, traced_dims
from pliant.frontend.torch_walk import Walk, location
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module, Value
from pliant.ir.types import TensorType
from pliant.sym import Cond, Expr, Guard, as_expr, sym

# --- what an import is ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorInput:
    """Flat input that is parameter number `param` of the graph."""

    name: str
    param: int


@dataclass(frozen=True, slots=True)
class SizeInput:
    """Flat integer input that is the value of a symbol."""

    name: str
    symbol: str


@dataclass(frozen=True, slots=True)
class ConstantInput:
    """Flat input that the trace fixed: a call must pass an equal value."""

    name: str
    value: object


@dataclass(frozen=True, slots=True)
class TensorOutput:
    """Flat output that is result number `result` of the graph."""

    result: int


@dataclass(frozen=True, slots=True)
class SizeOutput:
    """Flat output that is an integer computed from sizes."""

    value: Expr


@dataclass(frozen=True, slots=True)
class ConstantOutput:
    """Flat output that is the same in every call; None too."""

    value: object


Input: TypeAlias = "TensorInput | SizeInput | ConstantInput"
Output: TypeAlias = "TensorOutput | SizeOutput | ConstantOutput"


@dataclass(frozen=True, slots=True)
class Imported:
    """A graph, and how a model's arguments and results map to it.

    `in_spec` flattens `(args, kwargs)`. `declared` are the user's bounds; they are
    among the graph's constraints, and so are the `checks` that the model's Python code
    states, and those of the `branches` on sizes that it took that are not covered.
    """

    module: Module
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    declared: tuple[Guard, ...] = ()
    branches: tuple[Guard, ...] = ()
    checks: tuple[Guard, ...] = ()
    aliases: Mapping[str, Expr] = field(default_factory=dict)
    seed: str | None = None  # the parameter that random numbers follow from
    changed: tuple[str, ...] = ()  # buffers whose new values are the last results

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.inputs)


# --- export ---------------------------------------------------------------------


def export_module(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    training: bool = False,
) -> tuple[ExportedProgram, SymbolInfo]:
    """Traces a model. In `dynamic_shapes` a string may stand for a Dim.

    With `training`, what the model computes without gradients is told apart.
    """
    traced = trace(model, example_inputs, dynamic_shapes, example_kwargs, training)
    return traced.program, traced.info


# --- import ---------------------------------------------------------------------


def from_exported(
    ep: ExportedProgram,
    names: Mapping[str, str] | SymbolInfo | None = None,
    training: bool = False,
    covered: Mapping[Cond, Guard | None] = MappingProxyType({}),
) -> Imported:
    """The program as a graph; UnsupportedOpError lists everything that is not.

    `names` gives torch's symbols the user's names; others are s0, s1, .. in order of
    first appearance. Bounds are enforced only if a SymbolInfo declares them. With
    `training`, random ops are there, and what is detached is marked so. A branch by
    size that is `covered` is not enforced: the program is known to be right on the
    other side as well, or a weaker guard is there instead.
    """
    return _Import(ep, _as_info(names), training, covered).run()


def _as_info(names: Mapping[str, str] | SymbolInfo | None) -> SymbolInfo:
    if isinstance(names, SymbolInfo):
        return names
    return SymbolInfo({k: sym(v) for k, v in (names or {}).items()})


class _Import:
    def __init__(
        self,
        ep: ExportedProgram,
        info: SymbolInfo,
        training: bool,
        covered: Mapping[Cond, Guard | None],
    ) -> None:
        self.ep, self.info = ep, info
        self.cx = Context(Builder(), training)
        self.cx.covered = covered
        self.symbols: dict[str, Expr] = dict(info.names)
        self.taken = {n for e in self.symbols.values() for n in e.symbols()}
        self.problems: list[UnsupportedOp] = []
        self.inputs: list[Input] = []
        self.sizes: list[str] = []
        self.weights: dict[tuple[object, ...], Constant] = {}
        self.walk = Walk(self.cx, self.symbols, self.problems)

    def run(self) -> Imported:
        self._open_integers()
        for guard in self.info.bounds:
            self.cx.enforce(guard)
        self._read_inputs()
        found = decisions(self.ep, self.symbols, self.info.asked)
        for guard in found.checks:
            self.cx.enforce(guard)
        for guard in found.branches:
            self.cx.take_branch(guard)
        self.walk.sizes_read = self._sizes_read()
        self._check_mutations()
        self.walk.run(self.ep.graph_module)
        results, outputs = self._read_outputs()
        changed = self._changed()
        results += [self.walk.env[node] for node in changed]
        if self.problems:
            raise UnsupportedOpError(_distinct(self.problems))
        graph = self.cx.b.finish("main", results, self.sizes)
        spec = self.ep.call_spec
        assert spec.in_spec is not None and spec.out_spec is not None
        return Imported(
            Module({"main": graph}, constants=dict(self.cx.b.constants)),
            tuple(self.inputs),
            outputs,
            spec.in_spec,
            spec.out_spec,
            self.info.bounds,
            tuple(self.cx.branches),
            tuple(found.checks),
            self.info.aliases,
            None if self.cx.seed_value is None else self.cx.seed_value.name,
            tuple(changed.values()),
        )

    def _sizes_read(self) -> frozenset[Any] | None:
        """Sizes that the model's code or an op's argument is computed from, as torch
        knows them; None if it is not known which."""
        if self.info.asked is None:
            return None
        vals = (node.meta.get("val") for node in self.ep.graph.nodes)
        numbers = (v.node.expr for v in vals if isinstance(v, torch.SymInt))
        return frozenset((*self.info.asked.sizes, *numbers))

    # inputs

    def _open_integers(self) -> None:
        """Integers that have a name already, before bounds of theirs are known."""
        for sizes in traced_dims(self.ep):
            name = str(getattr(getattr(sizes.get(-1), "node", None), "expr", ""))
            if name in self.symbols:
                for symbol in self.symbols[name].symbols():
                    open_integer(self.cx, symbol)

    def _read_inputs(self) -> None:
        nodes = {n.name: n for n in self.ep.graph.nodes if n.op == "placeholder"}
        for spec in self.ep.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                self._read_user_input(node)
            elif spec.kind is InputKind.TOKEN or spec.target is None:
                continue
            else:
                self._read_weight(node, spec.target)
                if spec.kind is InputKind.BUFFER and self.cx.training:
                    self.walk.buffers[node] = spec.target

    def _read_user_input(self, node: Node) -> None:
        name, val = node.name, node.meta.get("val")
        if isinstance(val, torch.Tensor):
            self.inputs.append(TensorInput(name, len(self.cx.b.params)))
            dtype = DTYPE_OF.get(val.dtype)
            if dtype is None:
                self._problem(node, f"element type {val.dtype} is not supported")
                return
            type = TensorType(dtype, tuple(self._dim(d) for d in val.shape))
            self.walk.env[node] = self.cx.b.param(name, type)
        elif isinstance(val, torch.SymInt):
            self._read_size(node, val)
        elif isinstance(val, torch.SymFloat | torch.SymBool):
            self._problem(node, "a float or bool input that varies: pass a tensor")
        else:
            self.inputs.append(ConstantInput(name, val))
            self.walk.env[node] = val

    def _read_size(self, node: Node, val: torch.SymInt) -> None:
        value = self._dim(val)
        self.walk.env[node] = value
        symbols = value.symbols()
        if value.is_const:
            self.inputs.append(ConstantInput(node.name, value.value))
        elif len(symbols) == 1 and value == sym(symbols[0]):
            self.inputs.append(SizeInput(node.name, symbols[0]))
            if symbols[0] not in self.sizes:
                self.sizes.append(symbols[0])
                open_integer(self.cx, symbols[0])
                bound_integer(self.cx, node, symbols[0])
        else:
            self._problem(node, f"an integer input that must equal {value}")

    def _dim(self, size: Any) -> Expr:
        if not isinstance(size, torch.SymInt):
            return as_expr(int(size))
        expr = size.node.expr
        for symbol in sorted(expr.free_symbols, key=str):
            if str(symbol) not in self.symbols:
                self.symbols[str(symbol)] = fresh_symbol(self.taken)
        return to_expr(expr, self.symbols.__getitem__)

    def _read_weight(self, node: Node, target: str) -> None:
        found = self.ep.state_dict.get(target)
        tensor = self.ep.constants.get(target) if found is None else found
        if not isinstance(tensor, torch.Tensor):
            self._problem(node, f"a {type(tensor).__name__} is no tensor")
        elif tensor.dtype not in DTYPE_OF:
            if node.users:
                self._problem(node, f"element type {tensor.dtype} is not supported")
        else:
            self.walk.lazy[node] = lambda: self._load(target, tensor)

    def _load(self, name: str, tensor: torch.Tensor) -> Value:
        """Tied weights are one constant: same memory, same layout."""
        layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        key = (tensor.data_ptr(), *layout) if tensor.numel() else (name,)
        if key not in self.weights:
            shape = tuple(as_expr(n) for n in tensor.shape)
            kind = TensorType(DTYPE_OF[tensor.dtype], shape)
            self.weights[key] = Constant(name, kind, to_numpy(tensor), keep=tensor)
        return self.cx.b.constant(self.weights[key])

    def _check_mutations(self) -> None:
        for spec in self.ep.graph_signature.output_specs:
            if spec.kind in (
                OutputKind.BUFFER_MUTATION,
                OutputKind.USER_INPUT_MUTATION,
            ):
                name = "buffer" if spec.kind is OutputKind.BUFFER_MUTATION else "input"
                reason = f"the model changes its {name} '{spec.target}' in every call"
                self.problems.append(UnsupportedOp(f"update of a {name}", reason, "-"))

    def _changed(self) -> dict[Node, str]:
        """Buffers that the model has written, and their names."""
        written, memory = self.walk.written, dict[int, str]()
        for target in self.walk.buffers.values():
            found = self.ep.state_dict.get(target)
            tensor = self.ep.constants.get(target) if found is None else found
            assert isinstance(tensor, torch.Tensor)
            other = memory.setdefault(tensor.data_ptr(), target)
            if other != target and {other, target} & set(written.values()):
                reason = f"the model changes '{target}', which is also '{other}'"
                self.problems.append(UnsupportedOp("update of a buffer", reason, "-"))
        return written

    # outputs

    def _read_outputs(self) -> tuple[list[Value], tuple[Output, ...]]:
        (node,) = (n for n in self.ep.graph.nodes if n.op == "output")
        kinds = [spec.kind for spec in self.ep.graph_signature.output_specs]
        results: list[Value] = []
        outputs: list[Output] = []
        for argument, kind in zip(node.args[0], kinds, strict=True):
            if kind is not OutputKind.USER_OUTPUT:
                continue
            value = self.walk.output(argument)
            if isinstance(value, Value):
                outputs.append(TensorOutput(len(results)))
                results.append(value)
            elif isinstance(value, Expr) and not value.is_const:
                outputs.append(SizeOutput(value))
            elif isinstance(value, Expr):
                outputs.append(ConstantOutput(value.value))
            elif value is None or isinstance(value, bool | int | float | str):
                outputs.append(ConstantOutput(value))
            elif not self.problems:
                self._problem(
                    argument, "returns a number that is neither int nor fixed"
                )
        return results, tuple(outputs)

    def _problem(self, node: Node, reason: str) -> None:
        self.problems.append(UnsupportedOp(node.name, reason, location(node).full))


def _distinct(problems: Sequence[UnsupportedOp]) -> list[UnsupportedOp]:
    return list(dict.fromkeys(problems))


__all__ = [
    "ConstantInput",
    "ConstantOutput",
    "Imported",
    "SizeInput",
    "SizeOutput",
    "SymbolInfo",
    "TensorInput",
    "TensorOutput",
    "export_module",
    "from_exported",
]
