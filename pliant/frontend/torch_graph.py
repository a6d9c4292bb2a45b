"""A functional fx graph of AOTAutograd -> graph function.

    imported = from_graph(gm)

Every tensor is an input, parameters too. Sizes are inputs (SymInt placeholders) or are
read from shapes, and keep torch's names. Memory is as the trace has it, because what
surrounds the graph relies on it: a tensor laid out with its dims permuted enters and
leaves as the permuted view of a row-major one, and a result that is a view of an input
or of another result stays one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from pliant.frontend.contract import Basis, Imported
from pliant.frontend.ir_module import plain_signature
from pliant.frontend.signature import FixedResult, SizeResult
from pliant.frontend.torch_alias import shares_memory
from pliant.frontend.torch_dims import to_expr
from pliant.frontend.torch_integers import bound_integer, open_integer
from pliant.frontend.torch_ops_context import TorchContext
from pliant.frontend.torch_tensors import dtype_of, to_numpy
from pliant.frontend.torch_walk import TorchWalk, location
from pliant.frontend.translate import constant_of
from pliant.ir.build import Builder
from pliant.ir.graph import Value
from pliant.ir.types import TensorType
from pliant.sym import Expr, Guard, as_expr, eq, ge, le, sym
from pliant.sym.names import is_name

# --- what an import is ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Argument:
    """Parameter of the graph: which input, and its dims in the order of memory."""

    number: int
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ArgumentSource:
    """Where a symbol's value is read from: an integer input, or a dim of a tensor."""

    number: int
    axis: int | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """Result number `result`; `axes` undoes the order of memory."""

    result: int
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ArgumentWindow:
    """Sizes, strides and offset of a view, relative to what it is a view of."""

    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    offset: Expr


@dataclass(frozen=True, slots=True)
class InputView:
    """An input, or a view of it."""

    number: int
    window: ArgumentWindow | None


@dataclass(frozen=True, slots=True)
class ResultView:
    """A view of another result."""

    base: Computed
    window: ArgumentWindow


Output: TypeAlias = Computed | InputView | ResultView | SizeResult | FixedResult


@dataclass(frozen=True, slots=True)
class ImportedGraph:
    """A program; its parameters, then its sizes, by input number; where results go.

    `seeded`: one more parameter before the sizes, which random numbers follow from.
    """

    program: Imported
    arguments: tuple[Argument, ...]
    seeded: bool
    sizes: tuple[ArgumentSource, ...]
    sources: Mapping[str, ArgumentSource]
    outputs: tuple[Output, ...]


DimNames = Mapping[str, Mapping[int, str]]  # of inputs of the user's function, by axis


def from_graph(
    gm: GraphModule, names: DimNames = MappingProxyType({})
) -> ImportedGraph:
    """The graph in our IR; UnsupportedOpError lists everything that is not."""
    return _GraphImport(gm, names).run()


_SOURCE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")


def _sources_of(size: torch.SymInt) -> list[tuple[str, int]]:
    """The arguments of the user's function that a size is read from, with the axis."""
    env = size.node.shape_env
    known = getattr(env, "var_to_sources", {}).get(size.node.expr, ())
    found = (_SOURCE.fullmatch(str(_text(source))) for source in known)
    return [(match[1], int(match[2])) for match in found if match]


def _text(source: Any) -> object:
    name = source.name
    return name() if callable(name) else name


# --- layouts --------------------------------------------------------------------


def _size_key(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dims from the outermost in memory to the innermost; None if it has gaps."""
    sizes = [_size_key(n) for n in tensor.shape]
    strides = [_size_key(n) for n in tensor.stride()]
    ones = [i for i, n in enumerate(sizes) if n == 1]
    left = [i for i in range(len(sizes)) if i not in ones]
    order: list[int] = []
    expected: Any = 1
    while left:
        # Of several that fit, all but one have a size that the trace knows to be 1.
        inner = next((i for i in reversed(left) if strides[i] == expected), None)
        if inner is None:
            return None
        left.remove(inner)
        order.insert(0, inner)
        expected = expected * sizes[inner]
    if order == sorted(order):
        return tuple(range(len(sizes)))
    return (*ones, *order)


def _permuted(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of memory where it is dense and not that of the dims."""
    order = memory_order(tensor)
    return None if order is None or order == tuple(sorted(order)) else order


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(order.index(i) for i in range(len(order)))


# --- the import -----------------------------------------------------------------


class _GraphImport:
    def __init__(self, gm: GraphModule, names: DimNames) -> None:
        self.gm, self.names = gm, names
        self.cx = TorchContext(Builder())
        self.symbols = self.cx.symbols
        self.walk = TorchWalk(self.cx)
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        (self.output,) = (n for n in gm.graph.nodes if n.op == "output")
        self.arguments: list[Argument] = []
        self.sources: dict[str, ArgumentSource] = {}
        self.results: list[Value] = []
        self.computed: dict[Node, Computed] = {}
        self.traced: dict[str, torch.SymInt] = {}
        self.cx.specialise = self._specialise

    def run(self) -> ImportedGraph:
        self._read_symbols()
        self._read_inputs()
        self._read_constants()
        self.walk.run(self.gm)
        outputs = tuple(self._output(o) for o in self._returned())
        sizes = {n: s for n, s in self.sources.items() if s.axis is None}
        module = self.cx.finish(self.results, list(sizes))
        signature = plain_signature(module.main)
        return ImportedGraph(
            Imported(module, signature, tuple(self.cx.assumptions)),
            tuple(self.arguments),
            self.cx.seed_value is not None,
            tuple(sizes.values()),
            self.sources,
            outputs,
        )

    def _returned(self) -> list[Any]:
        returned = self.output.args[0]
        assert isinstance(returned, list | tuple)
        return list(returned)

    # inputs

    def _read_symbols(self) -> None:
        """Where each symbol is read: an integer input rather than a dim."""
        for number, node in enumerate(self.placeholders):
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt):
                self._source(val, ArgumentSource(number), node)
        for number, node in enumerate(self.placeholders):
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor):
                for axis, size in enumerate(val.shape):
                    self._source(size, ArgumentSource(number, axis))

    def _source(
        self, size: Any, source: ArgumentSource, integer: Node | None = None
    ) -> None:
        expr = _size_key(size)
        if isinstance(expr, int) or not expr.is_Symbol or str(expr) in self.symbols:
            return
        name = self._name(size)
        self.symbols[str(expr)] = value = sym(name)
        self.traced[name] = size
        self.sources[name] = source
        limits = size.node.shape_env.bound_sympy(expr)
        if integer is not None and limits.lower < 0:
            open_integer(self.cx, name)
            bound_integer(self.cx, integer, name)
        name = f"dim {name}"
        if limits.lower.is_Integer and limits.lower > 0:
            low = int(limits.lower)
            message = (f"{name} was traced as at least {low}: ", value)
            guard = Guard(ge(value, low), message, "torch.compile")
            self.cx.assume(Basis.TRACED, guard)
        if limits.upper.is_Integer and limits.upper < 1 << 48:
            high = int(limits.upper)
            message = (f"{name} was traced as at most {high}: ", value)
            guard = Guard(le(value, high), message, "torch.compile")
            self.cx.assume(Basis.TRACED, guard)

    def _name(self, size: torch.SymInt) -> str:
        """The user's name, else one after the argument and axis, else torch's."""
        sources = _sources_of(size)
        given = [self.names[n][k] for n, k in sources if k in self.names.get(n, ())]
        for name in (*given, *(f"{name}_{axis}" for name, axis in sources)):
            if name not in self.sources and is_name(name):
                return name
        name = str(size.node.expr)
        while name in self.sources:  # a user's name for another dim
            name += "_"
        return name

    def _read_inputs(self) -> None:
        needed = {s.number for s in self.sources.values() if s.axis is not None}
        for number, node in enumerate(self.placeholders):
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt):
                self._try(node, partial(self._read_size, node, val))
            elif not isinstance(val, torch.Tensor):
                self._set(node, val)
                if isinstance(val, torch.SymFloat | torch.SymBool):
                    self._problem(node, "a float or bool that varies: pass a tensor")
            elif number in needed or set(node.users) - {self.output}:
                self._try(node, partial(self._read_tensor, node, number))

    def _try(self, node: Node, read: Callable[[], None]) -> None:
        try:
            read()
        except (KeyError, ValueError) as error:
            self._problem(node, f"a size that no input tells: {error}")

    def _set(self, node: Node, value: Any) -> None:
        self.walk.env[node] = value

    def _read_size(self, node: Node, val: torch.SymInt) -> None:
        self._set(node, self._dim(val))

    def _read_tensor(self, node: Node, number: int) -> None:
        val = node.meta["val"]
        dtype = dtype_of(val.dtype)
        if dtype is None or val.layout is not torch.strided:
            what = val.layout if dtype is not None else f"element type {val.dtype}"
            self._problem(node, f"{what} is not supported")
            return
        order = _permuted(val)
        shape = [self._dim(d) for d in val.shape]
        stored = shape if order is None else [shape[i] for i in order]
        value = self.cx.b.param(node.name, TensorType(dtype, tuple(stored)))
        if order is not None:
            value = self.cx.transpose(value, _inverse(order))
        self.arguments.append(Argument(number, order))
        self._set(node, value)

    def _dim(self, size: Any) -> Expr:
        expr = _size_key(size)
        if isinstance(expr, int):
            return as_expr(expr)
        return to_expr(expr, self.symbols.__getitem__)

    def _specialise(self, size: Expr) -> None:
        """Fixes sizes to their traced values: torch guards them, and recompiles."""
        for name in size.symbols():
            if name in self.traced:
                value, only = sym(name), int(self.traced[name])
                message = (f"dim {name} was fixed to {only}: ", value)
                guard = Guard(eq(value, only), message, "torch.compile")
                self.cx.assume(Basis.TRACED, guard)

    def _read_constants(self) -> None:
        for node in self.gm.graph.nodes:
            if node.op != "get_attr":
                continue
            tensor = getattr(self.gm, str(node.target), None)
            if isinstance(tensor, torch.Tensor):
                self.walk.lazy[node] = partial(self._load, node.name, tensor)

    def _load(self, name: str, tensor: torch.Tensor) -> Value:
        dtype = self.cx.dtype(tensor.dtype)
        return self.cx.b.constant(constant_of(name, dtype, to_numpy(tensor), tensor))

    # outputs

    def _output(self, argument: Any) -> Output:
        if not isinstance(argument, Node):
            return FixedResult(argument)
        val = argument.meta.get("val")
        if not isinstance(val, torch.Tensor):
            return self._number(argument)
        root = _root(argument)
        if root.op == "placeholder":
            window = None if root is argument else self._window(argument, root)
            return InputView(self.placeholders.index(root), window)
        if root is not argument and root in self._returned():
            return ResultView(self._compute(root), self._window(argument, root))
        return self._compute(argument)

    def _number(self, node: Node) -> Output:
        val, value = node.meta.get("val"), self.walk.output(node)
        if isinstance(val, torch.SymBool):  # torch guards the answer
            return FixedResult(bool(val))
        if isinstance(value, Expr) and value.is_const:
            return FixedResult(value.value)
        if isinstance(value, Expr):
            return SizeResult(value)
        if not (value is None or isinstance(value, bool | int | float)):
            self._problem(node, "returns a number that is neither int nor fixed")
        return FixedResult(value)

    def _window(self, node: Node, root: Node) -> ArgumentWindow:
        val, base = node.meta["val"], root.meta["val"]
        offset = self._dim(val.storage_offset()) - self._dim(base.storage_offset())
        return ArgumentWindow(
            tuple(self._dim(n) for n in val.shape),
            tuple(self._dim(n) for n in val.stride()),
            offset,
        )

    def _compute(self, node: Node) -> Computed:
        if node in self.computed:
            return self.computed[node]
        value = self.walk.output(node)
        order = _permuted(node.meta["val"])
        if isinstance(value, Value):
            if order is not None:
                value = self.cx.transpose(value, order)
            self.results.append(value)
        elif not self.cx.problems:
            self._problem(node, "this result of the op is not computed")
        axes = None if order is None else _inverse(order)
        self.computed[node] = Computed(len(self.results) - 1, axes)
        return self.computed[node]

    def _problem(self, node: Node, reason: str) -> None:
        name = str(node.target) if node.op == "call_function" else node.name
        self.cx.note(name, reason, location(node))


def _root(node: Node) -> Node:
    """The node whose memory this one's is a view of."""
    for above in _owners(node):
        node = above
    return node


def _owners(node: Node) -> Iterator[Node]:
    while True:
        source = shares_memory(node)
        if source is None:
            return
        if source.target is operator.getitem or isinstance(
            source.meta.get("val"), torch.Tensor
        ):
            yield source
        node = source
