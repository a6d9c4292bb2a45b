"""Functions that differ in numbers alone become one, with those as parameters.

    loop @conv_0(n; ..) { .. call @gather(384*n, ..) .. }
    loop @conv_1(n; ..) { .. call @gather(768*n, ..) .. }
    ->
    loop @conv_0(n, _size0; ..) { .. call @gather(_size0*n, ..) .. }

The layers of a model repeat with other widths and at other resolutions, and LLVM takes
as long for each. This is for functions that call others: they cut a product or a
convolution into tiles, and what runs often is in the micro-kernels and in vector loops.
A number stays a number if

    it is the same in all of these functions
    a vector or unrolled loop has it as a bound, or multiplies its variable by it
    something is divided by it
    it is 0 or 1: such expressions have another form
    it is part of a value that is known once loops are unrolled (`ir/loop_known.py`),
    and such a loop has bounds that depend on it

A size computed from others, such as ceildiv(height, 4), is treated like a number if it
is proved not to be negative. The order of arithmetic is unchanged, and so are results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pliant.context import Context
from pliant.ir.graph import Attr, Graph, Module, Op
from pliant.ir.loop_known import KnownSizes
from pliant.ir.loop_walk import (
    Node,
    accesses,
    children,
    map_buffers,
    map_dims,
    rebuild,
    replace_dims,
    rewrite,
    statements,
)
from pliant.ir.loops import (
    Block,
    Buffer,
    Call,
    Dispatch,
    For,
    Index,
    Kind,
    Let,
    LoopFunc,
    LoopValue,
    Role,
    Stmt,
    Store,
    Switch,
)
from pliant.sym import (
    ZERO,
    Atom,
    CeilDiv,
    Expr,
    Facts,
    FloorDiv,
    Mod,
    Symbol,
    as_expr,
    ge,
    operands,
    sym,
)
from pliant.sym import rebuild as rebuild_atom
from pliant.sym.nodes import sum_of

MOST_PARAMETERS = 24  # of those that a function gets here


@dataclass(frozen=True, slots=True)
class _Scope:
    """What encloses a statement."""

    known: KnownSizes = field(default_factory=KnownSizes)
    # Variables of vector and unrolled loops, and what is computed from them.
    varying: frozenset[str] = frozenset()

    def inside(self, loop: For) -> _Scope:
        varying = self.varying - {loop.var}
        return _Scope(
            self.known.inside(loop), varying | {loop.var} if _fixed(loop) else varying
        )

    def behind(self, let: Let, dims: Sequence[Expr]) -> _Scope:
        varying = self.varying - {let.name}
        if any(self.varying.intersection(dim.symbols()) for dim in dims):
            varying |= {let.name}
        return _Scope(self.known.behind(let), varying)


def _fixed(loop: For) -> bool:
    """Whether a loop's bounds are part of how it runs."""
    return loop.vectors is not None or loop.kind not in (Kind.SERIAL, Kind.PARALLEL)


def _is_fixed(stmt: Stmt, known: KnownSizes) -> bool:
    """Whether the numbers of a statement are part of how it runs."""
    match stmt:
        case For():
            trips = known.most_trips(stmt)
            return _fixed(stmt) or (trips is not None and trips <= 1)
        case Store(buf, _, _):
            return buf.role is Role.REGISTER
        case _:
            return False


class _Form:
    """A function with a name for each number that may differ: `numbers` has them."""

    def __init__(self, func: LoopFunc, facts: Facts) -> None:
        self.func, self.facts = func, facts
        self.sizes = frozenset(func.sizes)
        self.numbers: dict[str, Expr] = {}
        self.calls: dict[object, Call] = {}  # of a switch, by their arguments
        self.fixed_axes = self._fixed_axes()
        self.deciding = _deciding(func)
        self.made = {buf.name: self._buffer(buf) for buf in func.buffers}
        body = map_buffers(func.body, lambda b: self.made.get(b.name, b))
        self.body = self._stmt(body, _Scope())
        self.buffers = tuple(self.made[buf.name] for buf in func.buffers)

    @property
    def key(self) -> object:
        return self.func.sizes, self.buffers, self.body

    def _fixed_axes(self) -> set[tuple[str, int]]:
        """The axes of buffers along which a vector or unrolled loop goes."""
        found: set[tuple[str, int]] = set()
        varying = {
            stmt.var
            for stmt in statements(self.func.body)
            if isinstance(stmt, For) and _fixed(stmt)
        }
        for stmt in statements(self.func.body):
            if isinstance(stmt, Let) and varying.intersection(_names(stmt)):
                varying.add(stmt.name)
        for buf, index in accesses(self.func.body):
            for axis, at in enumerate(index):
                if varying.intersection(at.symbols()):
                    found.add((buf.name, axis))
        return found

    def _buffer(self, buf: Buffer) -> Buffer:
        strides = tuple(
            stride if (buf.name, axis) in self.fixed_axes else self._dim(stride)
            for axis, stride in enumerate(buf.strides)
        )
        return replace(buf, shape=tuple(map(self._dim, buf.shape)), strides=strides)

    # ---- statements

    def _stmt(self, stmt: Stmt, scope: _Scope) -> Stmt:
        if isinstance(stmt, Call):
            return self._call(stmt, scope)
        if isinstance(stmt, Switch):
            self.calls.clear()
        node = stmt
        if not isinstance(stmt, Dispatch) and not _is_fixed(stmt, scope.known):
            node = replace_dims(stmt, lambda dim: self._dim(dim, scope.varying))
        inner = scope.inside(stmt) if isinstance(stmt, For) else scope
        new: list[Node] = []
        for child in children(node):
            if not isinstance(child, Stmt):
                new.append(self._value(stmt, child, scope))
                continue
            new.append(self._stmt(child, inner))
            if isinstance(stmt, Block) and isinstance(child, Let):
                inner = inner.behind(child, _dims(child))
        return rebuild(node, new)

    def _call(self, call: Call, scope: _Scope) -> Call:
        """The cases of a switch mostly have the same arguments."""
        key = call.sizes, call.arguments
        if key not in self.calls:
            self.calls[key] = replace_dims(
                call, lambda dim: self._dim(dim, scope.varying)
            )
        return replace(self.calls[key], function=call.function)

    def _value(self, stmt: Stmt, value: LoopValue, scope: _Scope) -> LoopValue:
        match stmt, value:
            case Let(name), Index(dim) if name in self.deciding:
                if scope.known.has(dim):
                    return value
            case _:
                pass

        def renamed(node: Node) -> Node:
            buf = getattr(node, "buffer", None)
            if buf is not None and buf.role is Role.REGISTER:
                return node
            return replace_dims(node, lambda dim: self._dim(dim, scope.varying))

        return rewrite(value, renamed)

    # ---- expressions

    def _dim(self, dim: Expr, varying: frozenset[str] = frozenset()) -> Expr:
        terms: list[Expr] = []
        for coefficient, factors in dim.terms:
            term, moves = as_expr(1), False
            for atom, power in factors:
                part, moving = self._atom(atom, varying)
                term, moves = term * part**power, moves or moving
            keeps = moves or abs(coefficient) < 2
            scale = as_expr(coefficient) if keeps else self._number(coefficient)
            terms.append(term * scale)
        return sum_of(terms)

    def _number(self, value: int) -> Expr:
        named = self._named(as_expr(abs(value)))
        return named if value > 0 else -named

    def _named(self, value: Expr) -> Expr:
        name = f"_number{len(self.numbers)}"
        self.numbers[name] = value
        return sym(name)

    def _atom(self, atom: Atom, varying: frozenset[str]) -> tuple[Expr, bool]:
        """The atom with names for numbers, and whether it is a varying one."""
        args = operands(atom)
        whole = rebuild_atom(atom, args)
        names = whole.symbols()
        if varying.intersection(names):
            return whole, True
        if isinstance(atom, Symbol):
            return whole, False
        if self._is_size(atom, whole):
            return self._named(whole), False
        if isinstance(atom, FloorDiv | CeilDiv | Mod):
            numerator, divisor = args
            if not divisor.is_const:
                divisor = self._dim(divisor)
            args = (self._dim(numerator), divisor)
        else:
            args = tuple(self._dim(arg) for arg in args)
        return rebuild_atom(atom, args), False

    def _is_size(self, atom: Atom, whole: Expr) -> bool:
        """Whether it is computed from sizes alone, and not negative."""
        divides = isinstance(atom, FloorDiv | CeilDiv | Mod)
        if not divides or not self.sizes.issuperset(whole.symbols()):
            return False
        if any(name.startswith("_") for name in whole.symbols()):
            return False  # a plan's, not the model's
        return self.facts.prove(ge(whole, ZERO)) is True


def _deciding(func: LoopFunc) -> set[str]:
    """The variables on which bounds of vector and unrolled loops depend."""
    found: set[str] = set()
    sources: dict[str, set[str]] = {}
    for stmt in statements(func.body):
        if isinstance(stmt, Let):
            sources.setdefault(stmt.name, set()).update(_names(stmt))
        if isinstance(stmt, For):
            bounds = {*stmt.begin.symbols(), *stmt.end.symbols()}
            sources.setdefault(stmt.var, set()).update(bounds)
            if _fixed(stmt):
                found |= bounds
    for buf, index in accesses(func.body):
        if buf.role is Role.REGISTER:
            found.update(name for at in index for name in at.symbols())
    new = set(found)
    while new:
        new = {n for name in new for n in sources.get(name, ())} - found
        found |= new
    return found


def _dims(let: Let) -> list[Expr]:
    return [as_expr(0)] if not isinstance(let.value, Index) else [let.value.dim]


def _names(let: Let) -> set[str]:
    return {name for dim in _dims(let) for name in dim.symbols()}


# ---- the pass


@dataclass(frozen=True, slots=True)
class _Target:
    """What a call of a function becomes: another one, and arguments for its sizes."""

    function: str
    sizes: tuple[str, ...]  # of the function that was called
    more: tuple[Expr, ...]  # arguments behind those, in terms of these sizes

    def arguments(self, given: Sequence[Expr]) -> tuple[Expr, ...]:
        known = dict(zip(self.sizes, given, strict=True))
        return (*given, *(value.substitute(known) for value in self.more))


def _unified(forms: Sequence[_Form]) -> tuple[LoopFunc, list[_Target]] | None:
    """One function for all of these, and what calls of each become."""
    first = forms[0]
    parameters: dict[tuple[Expr, ...], str] = {}
    values: dict[str, Expr] = {}
    for name in first.numbers:
        # One that its expression does not need after all may be missing elsewhere.
        column = tuple(form.numbers.get(name, ZERO) for form in forms)
        if len(set(column)) == 1:
            values[name] = column[0]
        else:
            size = parameters.setdefault(column, f"_size{len(parameters)}")
            values[name] = sym(size)
    if len(parameters) > MOST_PARAMETERS:
        return None

    def placed(dim: Expr) -> Expr:
        return dim.substitute(values)

    buffers = {
        buf.name: replace(
            buf,
            shape=tuple(map(placed, buf.shape)),
            strides=tuple(map(placed, buf.strides)),
        )
        for buf in first.buffers
    }
    body = map_buffers(map_dims(first.body, placed), lambda b: buffers.get(b.name, b))
    func = first.func
    sizes = (*func.sizes, *parameters.values())
    made = LoopFunc(func.name, sizes, tuple(buffers.values()), body)
    targets = [
        _Target(func.name, func.sizes, tuple(column[k] for column in parameters))
        for k in range(len(forms))
    ]
    return made, targets


def _retargeted(func: LoopFunc, targets: Mapping[str, _Target]) -> LoopFunc:
    def renamed(node: Node) -> Node:
        if not isinstance(node, Call) or node.function not in targets:
            return node
        target = targets[node.function]
        sizes = target.arguments(node.sizes)
        return Call(target.function, sizes, node.arguments)

    body = rewrite(func.body, renamed)
    return func if body is func.body else replace(func, body=body)


def _calling(graph: Graph, targets: Mapping[str, _Target]) -> Graph:
    """A graph whose calls are those of the functions that are left."""

    def op(old: Op) -> Op:
        regions = tuple(_calling(region, targets) for region in old.regions)
        attrs = old.attrs
        if old.name == "call_loop" and old.str_attr("callee") in targets:
            target = targets[old.str_attr("callee")]
            new: dict[str, Attr] = {
                "callee": target.function,
                "sizes": target.arguments(old.dims_attr("sizes")),
            }
            attrs = tuple((key, new.get(key, value)) for key, value in attrs)
        return replace(old, attrs=attrs, regions=regions)

    return replace(graph, ops=tuple(op(old) for old in graph.ops))


def unify(module: Module, cx: Context) -> Module:
    """A lowered module in which functions that differ in numbers alone are one."""
    facts = cx.facts(module.main)
    groups: dict[object, list[_Form]] = {}
    for func in module.loops.values():
        # A plan explains one product: the function that it belongs to stays.
        calls = any(isinstance(stmt, Call) for stmt in statements(func.body))
        if calls and func.name not in module.plans:
            form = _Form(func, facts)
            groups.setdefault(form.key, []).append(form)
    targets: dict[str, _Target] = {}
    loops = dict(module.loops)
    for forms in groups.values():
        made = _unified(forms) if len(forms) > 1 else None
        if made is None:
            continue
        func, to = made
        for form, target in zip(forms, to, strict=True):
            targets[form.func.name] = target
            del loops[form.func.name]
        loops[func.name] = func
    if not targets:
        return module
    loops = {name: _retargeted(func, targets) for name, func in loops.items()}
    graphs = {graph.name: graph for graph in (module.main, *module.versions)}
    called = {name: _calling(graph, targets) for name, graph in graphs.items()}
    return module.replace(loops=loops, graphs={**module.graphs, **called})
