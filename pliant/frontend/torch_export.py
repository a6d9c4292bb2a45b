"""torch.export's program -> graph function.

    ep, symbols = export_module(model, example_inputs, dynamic_shapes)
    imported = from_exported(ep, symbols)

The graph is read before decomposition, so attention, linear and norms stay whole.
Shapes are computed by Pliant: every op is typed by its own rule, and torch's symbolic
sizes are only used to name the dims of inputs. So sizes 0 and 1 are ordinary, and a
condition of the model (a table of 512 positions) becomes a guard with its source line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from pliant.frontend.contract import Basis, Imported
from pliant.frontend.signature import (
    FixedResult,
    FixedSlot,
    Result,
    SizeResult,
    SizeSlot,
    Slot,
    TensorResult,
    TensorSlot,
)
from pliant.frontend.torch_branches import decisions
from pliant.frontend.torch_dims import SymbolInfo, to_expr
from pliant.frontend.torch_integers import bound_integer, open_integer
from pliant.frontend.torch_ops_complex import Complex, from_pairs, to_pairs
from pliant.frontend.torch_ops_context import Real, TorchContext
from pliant.frontend.torch_signature import Names, torch_signature
from pliant.frontend.torch_strides import ASKED
from pliant.frontend.torch_tensors import as_real, dtype_of, to_numpy
from pliant.frontend.torch_trace import trace, traced_dims
from pliant.frontend.torch_walk import TorchWalk, expand, location
from pliant.frontend.translate import Location, Untranslated, constant_of
from pliant.ir.build import Builder
from pliant.ir.finders import FINDERS, size_of
from pliant.ir.graph import Constant, Value
from pliant.ir.types import DType, TensorType
from pliant.sym import Cond, Expr, Guard, as_expr, eq, sym

_NOWHERE = Location("", "-")

# --- export ---------------------------------------------------------------------


def export_module(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    training: bool = False,
) -> tuple[ExportedProgram, SymbolInfo]:
    """Traces a model. In `dynamic_shapes` a string may stand for a Dim.

    With `training`, parts that the model computes without gradients are marked.
    """
    traced = trace(model, example_inputs, dynamic_shapes, example_kwargs, training)
    return traced.program, traced.info


# --- import ---------------------------------------------------------------------


def from_exported(
    ep: ExportedProgram,
    names: Mapping[str, str] | SymbolInfo | None = None,
    training: bool = False,
    covered: Mapping[Cond, Guard | None] = MappingProxyType({}),
    parameters: Names | None = None,
) -> Imported:
    """The program as a graph; UnsupportedOpError lists everything that is not.

    `names` gives torch's symbols the user's names; others are s0, s1, .. in order of
    first appearance. Bounds are enforced only if a SymbolInfo declares them. With
    `training`, random ops are imported, and detached values are marked. A branch on a
    size that is `covered` is not enforced: the program is known to be right on the
    other side as well, or has a weaker guard instead. `parameters` are the names that a
    call may use, if they differ from the program's own.
    """
    return _ExportImport(ep, _as_info(names), training, covered).run(parameters)


def _as_info(names: Mapping[str, str] | SymbolInfo | None) -> SymbolInfo:
    if isinstance(names, SymbolInfo):
        return names
    return SymbolInfo({k: sym(v) for k, v in (names or {}).items()})


class _ExportImport:
    def __init__(
        self,
        ep: ExportedProgram,
        info: SymbolInfo,
        training: bool,
        covered: Mapping[Cond, Guard | None],
    ) -> None:
        self.ep, self.info = ep, info
        self.expansion = expand(ep.graph_module)
        self.graph = self.expansion.module.graph
        self.cx = TorchContext(Builder(), training)
        self.cx.covered = covered
        self.cx.specialise = self._specialise
        self.cx.symbols.update(info.names)
        self.slots: list[Slot] = []
        self.places: dict[Node, int] = {}  # of arguments that are tensors, by slot
        self.sizes: list[str] = []
        self.params: dict[Node, Value] = {}
        self.weights: dict[tuple[object, ...], Constant] = {}
        self.walk = TorchWalk(self.cx)

    def run(self, parameters: Names | None) -> Imported:
        self._open_integers()
        for guard in self.info.bounds:
            self.cx.assume(Basis.DECLARED, guard)
        self._read_inputs()
        for found in decisions(self.ep, self.cx.symbols, self.info.asked):
            self.cx.assume(found.basis, found.guard)
        for found in decisions(self.ep, self.cx.symbols, self.expansion.asked):
            self.cx.assume(found.basis, found.guard)
        self.walk.sizes_read = self._sizes_read()
        self.walk.run(self.expansion.module)
        self._read_mutations()
        values, results = self._read_outputs()
        written = self._written(values)
        changed = self._changed(values)
        module = self.cx.finish(values, self.sizes)
        seed = self.cx.seed_value
        signature = torch_signature(self.ep, self.slots, results, parameters)
        signature = replace(
            signature,
            seed=None if seed is None else seed.name,
            changed=tuple(changed.values()),
            written=tuple(written),
            stores=tuple(written.values()),
            layouts=self._layouts(),
        )
        return Imported(module, signature, tuple(self.cx.assumptions))

    def _specialise(self, size: Expr) -> None:
        """Fixes a size to the one of the trace, unless the user counts on others."""
        env = next((v.fake_mode.shape_env for v in self._traced()), None)
        if env is None:
            return
        values = {
            ours.symbols()[0]: int(env.backed_var_to_val[theirs])
            for theirs in env.backed_var_to_val
            if (ours := self.cx.symbols.get(str(theirs))) is not None
            and len(ours.symbols()) == 1
        }
        named = {n for e in self.info.names.values() for n in e.symbols()}
        if any(name in named or name not in values for name in size.symbols()):
            return
        for name in size.symbols():
            fixed = eq(sym(name), values[name])
            why = f"{self.cx.op_name} is compiled for this size alone"
            self.cx.assume(Basis.TRACED, self.cx.guard(fixed, why))

    def _traced(self) -> Iterator[Any]:
        vals = (node.meta.get("val") for node in self.graph.nodes)
        return (
            v for v in vals if isinstance(v, torch.Tensor) and hasattr(v, "fake_mode")
        )

    def _sizes_read(self) -> frozenset[Any] | None:
        """Sizes that the model's code or an op's argument is computed from, as torch
        knows them; None if it is not known which."""
        if self.info.asked is None:
            return None
        vals = (node.meta.get("val") for node in self.graph.nodes)
        numbers = (v.node.expr for v in vals if isinstance(v, torch.SymInt))
        expansion = self.expansion.asked.sizes
        return frozenset((*self.info.asked.sizes, *expansion, *numbers))

    # inputs

    def _open_integers(self) -> None:
        """Integers that have a name already, before bounds of theirs are known."""
        for sizes in traced_dims(self.ep):
            name = str(getattr(getattr(sizes.get(-1), "node", None), "expr", ""))
            if name in self.cx.symbols:
                for symbol in self.cx.symbols[name].symbols():
                    open_integer(self.cx, symbol)

    def _read_inputs(self) -> None:
        nodes = {n.name: n for n in self.graph.nodes if n.op == "placeholder"}
        for spec in self.ep.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                self._read_user_input(node)
            elif spec.kind is InputKind.TOKEN or spec.target is None:
                continue
            else:
                self._read_weight(node, spec.target)
                if spec.kind is InputKind.BUFFER:
                    self.walk.buffers[node] = spec.target

    def _read_user_input(self, node: Node) -> None:
        name, val = node.name, node.meta.get("val")
        if isinstance(val, torch.Tensor):
            if val.is_complex() and val.dtype is not torch.complex32:
                self._read_complex(node, val)
                return
            dtype = dtype_of(val.dtype)
            if dtype is None:
                self._problem(node, f"element type {val.dtype} is not supported")
                return
            type = TensorType(dtype, tuple(self._dim(d) for d in val.shape))
            self._place(node)
            if not self.cx.training:
                self.walk.inputs[node] = self.places[node]
            self.slots.append(TensorSlot(name, type))
            self.params[node] = self.walk.env[node] = self.cx.b.param(name, type)
        elif isinstance(val, torch.SymInt):
            self._read_size(node, val)
        elif isinstance(val, torch.SymFloat | torch.SymBool):
            self._problem(node, "a float or bool input that varies: pass a tensor")
        else:
            self.slots.append(FixedSlot(name, val))
            self.walk.env[node] = val

    def _place(self, node: Node) -> None:
        slots = [slot for slot in self.slots if not isinstance(slot, FixedSlot)]
        self.places[node] = len(slots)

    def _read_complex(self, node: Node, val: torch.Tensor) -> None:
        dims = (*(self._dim(d) for d in val.shape), as_expr(2))
        kind = TensorType(self.cx.dtype(val.dtype), dims)
        self._place(node)
        self.slots.append(TensorSlot(node.name, kind, is_complex=True))
        self.walk.env[node] = from_pairs(self.cx, self.cx.b.param(node.name, kind))

    def _read_size(self, node: Node, val: torch.SymInt) -> None:
        value = self._dim(val)
        self.walk.env[node] = value
        symbol = value.symbol
        if value.is_const:
            self.slots.append(FixedSlot(node.name, value.value))
        elif symbol is not None:
            self.slots.append(SizeSlot(node.name, symbol))
            if symbol not in self.sizes:
                self.sizes.append(symbol)
                open_integer(self.cx, symbol)
                bound_integer(self.cx, node, symbol)
        else:
            self._problem(node, f"an integer input that must equal {value}")

    def _dim(self, size: Any) -> Expr:
        if not isinstance(size, torch.SymInt):
            return as_expr(int(size))
        expr = size.node.expr
        for symbol in sorted(expr.free_symbols, key=str):
            self.cx.symbol(str(symbol))  # numbered in this order
        return to_expr(expr, self.cx.symbol)

    def _read_weight(self, node: Node, target: str) -> None:
        found = self.ep.state_dict.get(target)
        tensor = self.ep.constants.get(target) if found is None else found
        if not isinstance(tensor, torch.Tensor):
            self._problem(node, f"a {type(tensor).__name__} is no tensor")
            return
        dtype = dtype_of(tensor.dtype)
        if dtype is not None:
            self.walk.lazy[node] = partial(self._load, target, tensor, dtype)
        elif tensor.dtype in (torch.complex64, torch.complex128):
            self.walk.lazy[node] = partial(self._load_complex, target, tensor)
        elif node.users:
            self._problem(node, f"element type {tensor.dtype} is not supported")

    def _load(self, name: str, tensor: torch.Tensor, dtype: DType) -> Value:
        """Tied weights are one constant: same memory, same layout."""
        layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        key = (tensor.data_ptr(), *layout) if tensor.numel() else (name,)
        if key not in self.weights:
            self.weights[key] = constant_of(
                name, dtype, to_numpy(as_real(tensor)), tensor
            )
        return self.cx.b.constant(self.weights[key])

    def _load_complex(self, name: str, tensor: torch.Tensor) -> Complex:
        dtype = self.cx.dtype(tensor.dtype)
        return from_pairs(self.cx, self._load(name, tensor, dtype))

    def _read_mutations(self) -> None:
        """What a functional program gives as new values of buffers and inputs."""
        (node,) = (n for n in self.graph.nodes if n.op == "output")
        found = {n.name: n for n in self.graph.nodes if n.op == "placeholder"}
        signature = self.ep.graph_signature
        holders = {s.target: found[s.arg.name] for s in signature.input_specs}
        for argument, spec in zip(node.args[0], signature.output_specs, strict=True):
            if spec.kind is OutputKind.BUFFER_MUTATION:
                holder = holders[spec.target]
                self.walk.written[holder] = str(spec.target)
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                holder = found[str(spec.target)]
                if holder not in self.walk.inputs:
                    reason = f"the step would change its input '{spec.target}'"
                    self.cx.note("update of an input", reason, _NOWHERE)
                    continue
                self.walk.overwritten[holder] = self.walk.inputs[holder]
            else:
                continue
            self.walk.env[holder] = self.walk.output(argument)

    def _written(self, values: list[Value]) -> dict[int, tuple[str, int]]:
        """Inputs that the model has written, by slot; adds their new values.

        For each the parameter, and the number of the new value.
        """
        made: dict[int, tuple[str, int]] = {}
        for node, slot in self.walk.overwritten.items():
            if isinstance(self.walk.env[node], Untranslated):
                continue  # reported
            param = self.params[node]
            new = self.cx.cast(self.walk.read(node), param.dtype)
            made[slot] = param.name, len(values)
            values.append(self.cx.reshape(new, param.shape))
        return made

    def _layouts(self) -> tuple[tuple[int, tuple[Expr, ...]], ...]:
        """Strides of inputs that a write or the model's code depends on, by slot."""
        return tuple(
            (slot, tuple(self._dim(n) for n in as_real(node.meta["val"]).stride()))
            for node, slot in self.places.items()
            if node in self.walk.laid_out or ASKED in node.meta
        )

    def _changed(self, values: list[Value]) -> dict[Node, str]:
        """Buffers that the model has written; adds their new values."""
        written = self.walk.written
        tensors = {**self.ep.constants, **self.ep.state_dict}
        owners: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                where = tensor.untyped_storage().data_ptr()
                owners.setdefault(where, []).append(name)
        for names in owners.values():
            for name in set(names) & set(written.values()) if len(names) > 1 else ():
                other = next(n for n in names if n != name)
                reason = f"the model changes '{name}', which shares memory with "
                self.cx.note("update of a buffer", f"{reason}'{other}'", _NOWHERE)
        for node, name in written.items():
            new, tensor = self.walk.env[node], tensors[name]
            if isinstance(new, Untranslated):
                continue  # reported
            if isinstance(new, Complex):
                new = to_pairs(self.cx, new)
            new = self.cx.cast(new, self.cx.dtype(tensor.dtype))
            values.append(self.cx.reshape(new, tuple(as_real(tensor).shape)))
        return written

    # outputs

    def _read_outputs(self) -> tuple[list[Value], list[Result]]:
        (node,) = (n for n in self.graph.nodes if n.op == "output")
        kinds = [spec.kind for spec in self.ep.graph_signature.output_specs]
        values: list[Value] = []
        results: list[Result] = []
        found = {size_of(op) for op in self.cx.b.ops if op.name in FINDERS}
        for argument, kind in zip(node.args[0], kinds, strict=True):
            if kind is not OutputKind.USER_OUTPUT:
                continue
            value = self.walk.output(argument)
            if isinstance(value, Value):
                results.append(TensorResult(len(values)))
                values.append(value)
            elif isinstance(value, Complex):
                results.append(TensorResult(len(values), is_complex=True))
                values.append(to_pairs(self.cx, value))
            elif isinstance(value, Real):
                results.append(TensorResult(len(values), number_type=float))
                values.append(self.cx.real(value))
            elif isinstance(value, Expr) and not found.isdisjoint(value.symbols()):
                results.append(TensorResult(len(values), number_type=int))
                values.append(self.cx.tensor(value, DType.I64))
            elif isinstance(value, Expr) and not value.is_const:
                results.append(SizeResult(value))
            elif isinstance(value, Expr):
                results.append(FixedResult(value.value))
            elif value is None or isinstance(value, bool | int | float | str):
                results.append(FixedResult(value))
            elif not self.cx.problems:
                self._problem(
                    argument, "returns a number that is neither int nor fixed"
                )
        return values, results

    def _problem(self, node: Node, reason: str) -> None:
        self.cx.note(node.name, reason, location(node))
