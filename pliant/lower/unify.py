"""Functions that differ in numbers or sizes alone become one, with parameters.

    loop @conv_0(n; ..) { .. call @gather(384*n, ..) .. }
    loop @conv_1(n; ..) { .. call @gather(768*n, ..) .. }
    ->
    loop @conv_0(_size0; ..) { .. call @gather(_size0, ..) .. }

The layers of a model repeat with other widths and at other resolutions, and LLVM takes
as long for each. A size computed from the model's is a parameter wherever it differs,
also in the guards of variants. A number is one in functions that call others: they cut
a product or a convolution into tiles, and what runs often is in the micro-kernels and
in vector loops. In those, the bounds of vector and unrolled loops stay as they are, and
so does what decides about them once loops are unrolled (`ir/loop_known.py`). What else
stays is in `size_forms.py`.

Functions that are called come before those that call them, so that callers of functions
which have become one can become one too. The order of arithmetic is unchanged, and so
are results.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from pliant.context import Context
from pliant.ir.callees import callees
from pliant.ir.graph import Attr, Graph, KernelPlan, Module, Op
from pliant.ir.loop_known import KnownSizes
from pliant.ir.loop_walk import (
    Node,
    accesses,
    children,
    map_buffers,
    rebuild,
    replace_dims,
    rewrite,
    rewrite_statements,
    size_symbols,
    statements,
)
from pliant.ir.loops import (
    Block,
    Buffer,
    Call,
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
from pliant.lower.size_forms import SizeForms
from pliant.sym import Expr, Facts, as_expr, sym

MOST_PARAMETERS = 32  # of those that a function gets here


@dataclass(frozen=True, slots=True)
class _Enclosing:
    """What encloses a statement."""

    known: KnownSizes = field(default_factory=KnownSizes)
    # Variables of vector and unrolled loops, and what is computed from them.
    varying: frozenset[str] = frozenset()

    def inside(self, loop: For) -> _Enclosing:
        varying = self.varying - {loop.var}
        return _Enclosing(
            self.known.inside(loop), varying | {loop.var} if _fixed(loop) else varying
        )

    def behind(self, let: Let, dims: Sequence[Expr]) -> _Enclosing:
        varying = self.varying - {let.name}
        if any(self.varying.intersection(dim.symbols()) for dim in dims):
            varying |= {let.name}
        return _Enclosing(self.known.behind(let), varying)


def _fixed(loop: For) -> bool:
    """Whether a loop's bounds are part of how it runs."""
    return loop.vectors is not None or loop.kind not in (Kind.SERIAL, Kind.PARALLEL)


def _without_exchange(stmt: Stmt) -> Stmt:
    exchange = isinstance(stmt, For) and stmt.kind is Kind.EXCHANGE
    return Block(()) if exchange else stmt


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
    """A function in which the numbers and sizes that may differ are open."""

    def __init__(self, func: LoopFunc, sizes: SizeForms) -> None:
        self.func, self.sizes = func, sizes
        self.open: list[Expr] = []  # what is open, from the first place to the last
        self.values: Iterator[Expr] | None = None
        self.calls: dict[object, Call] = {}  # of a switch, by their arguments
        self.fixed_axes = self._fixed_axes()
        self.deciding = _deciding(func)
        self.buffers, self.body = self._visit()
        # Most sizes of the model are in what is open.
        self.kept = tuple(s for s in func.sizes if s not in sizes.sizes)

    @property
    def key(self) -> object:
        return self.kept, self.buffers, self.body

    def with_open(self, values: Iterable[Expr]) -> tuple[tuple[Buffer, ...], Stmt]:
        """Its buffers and body with these values for what is open."""
        self.values = iter(values)
        return self._visit()

    def _visit(self) -> tuple[tuple[Buffer, ...], Stmt]:
        self.calls.clear()
        made = {buf.name: self._buffer(buf) for buf in self.func.buffers}
        body = map_buffers(self.func.body, lambda b: made.get(b.name, b))
        return tuple(made.values()), self._stmt(body, _Enclosing())

    def _dim(self, dim: Expr, varying: frozenset[str] = frozenset()) -> Expr:
        found = self.sizes.of(dim, varying)
        if self.values is None:
            self.open.extend(found.open)
            return found.form
        values = islice(self.values, len(found.names))
        return found.form.substitute(dict(zip(found.names, values, strict=True)))

    def _fixed_axes(self) -> set[tuple[str, int]]:
        """The axes of buffers along which a vector or unrolled loop goes.

        Not those of an exchange, which computes the address of each of its rows once.
        """
        found: set[tuple[str, int]] = set()
        body = rewrite_statements(self.func.body, _without_exchange)
        varying = {
            stmt.var
            for stmt in statements(body)
            if isinstance(stmt, For) and _fixed(stmt)
        }
        for stmt in statements(body):
            if isinstance(stmt, Let) and varying.intersection(_names(stmt)):
                varying.add(stmt.name)
        for buf, index in accesses(body):
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

    def _stmt(self, stmt: Stmt, scope: _Enclosing) -> Stmt:
        if isinstance(stmt, Call):
            return self._call(stmt, scope)
        if isinstance(stmt, Switch):
            self.calls.clear()
        node = stmt
        if not _is_fixed(stmt, scope.known):
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

    def _call(self, call: Call, scope: _Enclosing) -> Call:
        """The cases of a switch mostly have the same arguments."""
        key = call.sizes, call.arguments
        if key not in self.calls:
            self.calls[key] = replace_dims(
                call, lambda dim: self._dim(dim, scope.varying)
            )
        return replace(self.calls[key], function=call.function)

    def _value(self, stmt: Stmt, value: LoopValue, scope: _Enclosing) -> LoopValue:
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
    passed: tuple[Expr, ...]  # the arguments, in terms of these sizes

    def arguments(self, given: Sequence[Expr]) -> tuple[Expr, ...]:
        known = dict(zip(self.sizes, given, strict=True))
        return tuple(value.substitute(known) for value in self.passed)


def _unified(forms: Sequence[_Form]) -> tuple[LoopFunc, list[_Target]] | None:
    """One function for all of these, and what calls of each become."""
    first = forms[0]
    parameters: dict[tuple[Expr, ...], str] = {}
    values: list[Expr] = []
    for column in zip(*(form.open for form in forms), strict=True):
        if len(set(column)) == 1:
            values.append(column[0])
        else:
            name = parameters.setdefault(column, f"_size{len(parameters)}")
            values.append(sym(name))
    if len(parameters) > MOST_PARAMETERS:
        return None
    buffers, body = first.with_open(values)
    func = first.func
    used = size_symbols(body, buffers)
    # A size of the model that is left is left in all of the functions.
    sizes = tuple(s for s in func.sizes if s in first.kept or s in used)
    made = LoopFunc(func.name, (*sizes, *parameters.values()), buffers, body)
    same = tuple(map(sym, sizes))
    targets = [
        _Target(
            func.name, form.func.sizes, (*same, *(column[k] for column in parameters))
        )
        for k, form in enumerate(forms)
    ]
    return made, targets


def _retargeted(func: LoopFunc, targets: Mapping[str, _Target]) -> LoopFunc:
    # The cases of a switch mostly pass the same sizes.
    passed: dict[object, tuple[Expr, ...]] = {}

    def renamed(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Call) or stmt.function not in targets:
            return stmt
        target = targets[stmt.function]
        key = stmt.sizes, target.sizes, target.passed
        if key not in passed:
            passed[key] = target.arguments(stmt.sizes)
        return Call(target.function, passed[key], stmt.arguments)

    body = rewrite_statements(func.body, renamed)
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


def _outline(func: LoopFunc) -> object:
    """What functions have in common that may become one: a first look at them."""
    kinds = tuple((buf.role, buf.dtype, len(buf.shape)) for buf in func.buffers)
    return kinds, tuple(map(_seen, statements(func.body)))


def _seen(stmt: Stmt) -> object:
    """What a statement has in common with those that may become one with it."""
    if isinstance(stmt, For) and _fixed(stmt):
        return For, stmt.begin, stmt.end, stmt.step
    return type(stmt)


def _levels(loops: Mapping[str, LoopFunc]) -> list[list[str]]:
    """The functions that call none, then those that call these alone, and so on."""
    level: dict[str, int] = {}

    def visit(name: str) -> int:
        if name not in level:
            called = callees(loops[name])
            level[name] = max((visit(callee) + 1 for callee in called), default=0)
        return level[name]

    found: dict[int, list[str]] = {}
    for name in loops:
        found.setdefault(visit(name), []).append(name)
    return [found[k] for k in sorted(found)]


class _Unifier:
    """Goes through the functions of a module, level by level."""

    def __init__(self, facts: Facts, alone: Container[str]) -> None:
        self.facts = facts
        self.alone = alone  # functions that stay as they are
        self.targets: dict[str, _Target] = {}
        self.made: dict[str, LoopFunc] = {}
        self.sizes: dict[tuple[frozenset[str], bool], SizeForms] = {}

    def level(self, funcs: Iterable[LoopFunc], calling: bool) -> None:
        alike: dict[object, list[LoopFunc]] = {}
        for func in funcs:
            now = _retargeted(func, self.targets) if calling else func
            if func.name in self.alone:
                self.made[func.name] = now
                continue
            alike.setdefault(_outline(now), []).append(now)
        for group in alike.values():
            if len(group) == 1:
                self.made[group[0].name] = group[0]
            else:
                self._group(group, calling)

    def _group(self, funcs: Iterable[LoopFunc], calling: bool) -> None:
        groups: dict[object, list[_Form]] = {}
        for func in funcs:
            form = _Form(func, self._sizes(frozenset(func.sizes), calling))
            groups.setdefault(form.key, []).append(form)
        for forms in groups.values():
            unified = _unified(forms) if len(forms) > 1 else None
            if unified is None:
                self.made |= {form.func.name: form.func for form in forms}
                continue
            made, calls = unified
            self.made[made.name] = made
            for form, target in zip(forms, calls, strict=True):
                self.targets[form.func.name] = target

    def _sizes(self, sizes: frozenset[str], calling: bool) -> SizeForms:
        key = sizes, calling
        if key not in self.sizes:
            self.sizes[key] = SizeForms(sizes, self.facts, numbers=calling)
        return self.sizes[key]


def unify(module: Module, cx: Context) -> Module:
    """A lowered module in which functions that differ in numbers or sizes are one."""
    # A plan tells of the chunk that each loop over chunks is for.
    unifier = _Unifier(cx.facts(module.main), module.chunks)
    for level, names in enumerate(_levels(module.loops)):
        unifier.level((module.loops[name] for name in names), level > 0)
    targets, made = unifier.targets, unifier.made
    if not targets:
        return module
    plans: dict[str, tuple[KernelPlan, ...]] = {}
    for name, plan in module.plans.items():
        now = targets[name].function if name in targets else name
        plans[now] = (*plans.get(now, ()), *plan)
    # As before in their order, which the texts of dumps follow.
    loops = {name: made[name] for name in module.loops if name in made}
    versions = {graph.name: graph for graph in (module.main, *module.versions)}
    called = {name: _calling(graph, targets) for name, graph in versions.items()}
    graphs = {**module.graphs, **called}
    return module.replace(loops=loops, plans=plans, graphs=graphs)
