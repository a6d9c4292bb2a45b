"""Function calls and match-casts go away, before anything looks at shapes.

    %y: f32[2*m] = call(%x) {callee = "twice"}  ->  the callee's ops, with its symbols
                                                    replaced by the caller's dims
    %z: f32[k, 4] = match_cast(%x: f32[n, 4])   ->  k is n from here on; what is not
                                                    known equal becomes a constraint

A symbol that a match-cast binds is an expression of the caller's dims, since every size
in a graph without data-dependent ops is; so it is replaced, and only checks remain.
"""

from __future__ import annotations

from collections.abc import Mapping

from pliant.errors import InternalError
from pliant.ir.graph import Attr, Graph, Module, Names, Op, Value, names_of
from pliant.ir.types import TensorType
from pliant.sym import Expr, Guard, eq, sym


def inline(module: Module) -> Module:
    """`main` without calls and match-casts."""
    used = {op.name for graph in module.graphs.values() for op in graph.ops}
    if not used & {"call", "match_cast"}:
        return module
    main = module.main
    writer = _InlineWriter(module, Names(names_of(main)), list(main.constraints))
    known = {v: v for v in main.params}
    dims = (d for v in main.params for d in v.shape)
    known_names = (*main.sizes, *(s for d in dims for s in d.symbols()))
    symbols = {name: sym(name) for name in known_names}
    results = writer.write(main, known, symbols, ())
    graph = main.replace(
        ops=tuple(writer.ops), results=results, constraints=tuple(writer.guards)
    )
    return module.replace(graphs={"main": graph})


class _InlineWriter:
    def __init__(self, module: Module, names: Names, guards: list[Guard]) -> None:
        self.module, self.names, self.guards = module, names, guards
        self.ops: list[Op] = []

    def write(
        self,
        graph: Graph,
        values: dict[Value, Value],
        symbols: dict[str, Expr],
        stack: tuple[str, ...],
    ) -> tuple[Value, ...]:
        """Appends a graph's ops; returns the values of its results."""
        if graph.name in stack:
            raise InternalError("inline", f"@{graph.name} calls itself")
        inside = (*stack, graph.name)
        for op in graph.ops:
            operands = tuple(values[v] for v in op.operands)
            if op.name == "call":
                callee = self.module.graphs[op.str_attr("callee")]
                sizes = [d.substitute(symbols) for d in op.dims_attr("sizes")]
                given = dict(zip(callee.sizes, sizes, strict=True))
                results = self._call(callee, operands, given, inside)
                values.update(zip(op.results, results, strict=True))
            elif op.name == "match_cast":
                self._bind(operands[0].type, op.result.type, symbols, op.loc)
                values[op.result] = operands[0]
            else:
                fresh = tuple(
                    Value(self.names.fresh(v.name), _typed(v.type, symbols))
                    if stack
                    else Value(v.name, _typed(v.type, symbols))
                    for v in op.results
                )
                attrs = tuple((k, _replaced(a, symbols)) for k, a in op.attrs)
                self.ops.append(
                    op.replace(operands=operands, results=fresh, attrs=attrs)
                )
                values.update(zip(op.results, fresh, strict=True))
        return tuple(values[v] for v in graph.results)

    def _call(
        self,
        callee: Graph,
        operands: tuple[Value, ...],
        symbols: dict[str, Expr],
        stack: tuple[str, ...],
    ) -> tuple[Value, ...]:
        """The callee's ops; `symbols` are its integer arguments."""
        for param, operand in zip(callee.params, operands, strict=True):
            self._bind(operand.type, param.type, symbols, f"@{callee.name}")
        for guard in callee.constraints:
            message = tuple(
                piece if isinstance(piece, str) else piece.substitute(symbols)
                for piece in guard.message
            )
            cond = guard.cond.substitute(symbols)
            self.guards.append(Guard(cond, message, guard.origin))
        values = dict(zip(callee.params, operands, strict=True))
        return self.write(callee, values, symbols, stack)

    def _bind(
        self,
        have: TensorType,
        want: TensorType,
        symbols: dict[str, Expr],
        where: str,
    ) -> None:
        """New symbols of `want` take their value from `have`; the rest is checked."""
        for actual, named in zip(have.shape, want.shape, strict=True):
            name = named.symbol
            if name is not None and name not in symbols:
                symbols[name] = actual
        for axis, (actual, named) in enumerate(
            zip(have.shape, want.shape, strict=True)
        ):
            expected = named.substitute(symbols)
            if expected == actual:
                continue
            message = (f"{where} expects dim {axis} to be ", expected, ", is ", actual)
            self.guards.append(Guard(eq(actual, expected), message, where))


def _typed(type: TensorType, symbols: Mapping[str, Expr]) -> TensorType:
    if not symbols:
        return type
    return TensorType(type.dtype, tuple(d.substitute(symbols) for d in type.shape))


def _replaced(attr: Attr, symbols: Mapping[str, Expr]) -> Attr:
    if isinstance(attr, Expr):
        return attr.substitute(symbols)
    if isinstance(attr, tuple):
        return tuple(_replaced(a, symbols) for a in attr)
    return attr
