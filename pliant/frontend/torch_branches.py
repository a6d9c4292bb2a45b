"""The branches on sizes that the model's Python code took while it was traced.

A trace is one path through the code. Where the path depends on a size, as in
`x * 2 if x.shape[0] > 4 else x * 3`, the condition must hold in every call, unless it
is proved, or the program of the other path is known too (torch_programs.py).

For a model that Pliant traces, all conditions are recorded (torch_questions.py). A
program that was exported by someone else states its guards and the ranges of its sizes,
and is valid only for those.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._sympy import functions as torch_sympy

from pliant.errors import PliantError
from pliant.frontend.contract import Assumption, Basis
from pliant.frontend.torch_dims import to_expr, to_ratio
from pliant.frontend.torch_questions import Asked, Question, maybe_zero
from pliant.sym import Cond, Expr, Facts, Guard, divides, eq, ge, gt, le, lt, ne

_RELATIONS = {
    sympy.Eq: eq,
    sympy.Ne: ne,
    sympy.Le: le,
    sympy.Lt: lt,
    sympy.Ge: ge,
    sympy.Gt: gt,
}


def decisions(
    ep: ExportedProgram | GraphModule,
    symbols: Mapping[str, Expr],
    asked: Asked | None,
) -> tuple[Assumption, ...]:
    """The conditions on sizes in the model's own code that held in the trace.

    The code's own checks come first, then the branches that it took, in order. `asked`
    are the recorded conditions; None for a program that someone else exported.
    """
    checks: list[Guard] = []
    branches: list[Guard] = []
    seen: set[Cond] = set()
    env = shape_env(ep)
    if env is None:
        return ()
    hints = traced_sizes(env)
    if asked is None:
        assert isinstance(ep, ExportedProgram)
        questions = tuple(guards_of(ep, env))
    else:
        questions = tuple(asked.questions)
    for question in questions:
        expr = _known(env, question.condition)
        free = sorted(map(str, expr.free_symbols))
        if any(name not in symbols for name in free):
            continue  # a size that data decides: torch checks it in the graph
        place = question.place
        check = _is_check(question.path, question.line)
        conds = conditions(expr, symbols, hints)
        if conds is None:
            branches += _pinned(expr, symbols, hints, place)
        for cond in conds or ():
            if cond in seen or Facts().prove(cond) is True:
                continue
            seen.add(cond)
            if check:
                text = f"the model checks that {cond}: "
                message = (text, cond.lhs, " and ", cond.rhs)
                checks.append(Guard(cond, message, place))
            else:
                branches.append(_taken(cond, place))
    return (
        *(Assumption(Basis.CHECKED, guard) for guard in checks),
        *(Assumption(Basis.BRANCH, guard) for guard in branches),
    )


def _known(env: Any, condition: Any) -> Any:
    """The condition over the symbols that torch kept; some of them may be 0 there."""
    of_trace = {
        symbol.name: symbol for symbol in env.backed_var_to_val if symbol.is_Symbol
    }
    left = {
        symbol: maybe_zero(env.replace(of_trace[symbol.name]))
        for symbol in condition.free_symbols
        if symbol.name in of_trace and symbol is not of_trace[symbol.name]
    }
    return env.replace(condition.xreplace(left))


_PLACE = "the exported program"


def guards_of(ep: ExportedProgram, env: Any) -> Iterator[Question]:
    """The guards on sizes of a program that someone else exported.

    It covers sizes 0 and 1 only if torch was configured to: by default torch assumes
    that every dynamic size is at least 2, and does not record what the code does below.
    A program loaded from a file does not say which of the two it is.
    """
    for guard in env.guards:
        frame = guard.sloc.framework_loc
        path, line = getattr(frame, "filename", _PLACE), getattr(frame, "lineno", 0)
        yield Question(guard.expr, path, line)
    loaded = not env.source_to_var
    if loaded:
        for text in getattr(ep, "_guards_code", None) or ():
            yield Question(_parsed(ep, text), _PLACE, 0)
    for symbol, declared in ep.range_constraints.items():
        known = declared & env.var_to_range.get(symbol, declared)
        least = sympy.Integer(2) if loaded else known.lower
        if isinstance(least, sympy.Integer):
            yield Question(sympy.Ge(symbol, least), _PLACE, 0)
        if isinstance(known.upper, sympy.Integer):
            yield Question(sympy.Le(symbol, known.upper), _PLACE, 0)


def _parsed(ep: ExportedProgram, text: str) -> Any:
    """A guard that torch wrote as Python code over the inputs' sizes."""
    shapes = {
        node.name: node.meta["val"].shape
        for node in ep.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
    }
    try:
        return _condition_of(ast.parse(text, mode="eval").body, shapes)
    except (KeyError, IndexError, ValueError, SyntaxError):
        raise PliantError(
            f"cannot read the guard {text} of this exported program: compile the "
            "nn.Module it comes from"
        ) from None


_COMPARED: dict[type[ast.cmpop], Any] = {
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}
_COMPUTED: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: torch_sympy.FloorDiv,
    ast.Mod: torch_sympy.Mod,
}


def _condition_of(node: ast.expr, shapes: Mapping[str, Sequence[Any]]) -> Any:
    """Conditions on sizes and the arithmetic in them; ValueError for all else."""
    match node:
        case ast.Constant(value=int(number)):
            return sympy.Integer(number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_condition_of(inner, shapes)
        case ast.BinOp(left=a, op=op, right=b) if type(op) in _COMPUTED:
            return _COMPUTED[type(op)](
                _condition_of(a, shapes), _condition_of(b, shapes)
            )
        case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in _COMPARED:
            return _COMPARED[type(op)](
                _condition_of(a, shapes), _condition_of(b, shapes)
            )
        case ast.BoolOp(op=op, values=parts):
            join = sympy.And if isinstance(op, ast.And) else sympy.Or
            return join(*(_condition_of(part, shapes) for part in parts))
        case ast.Subscript(  # L['x'].size()[0]
            value=ast.Call(
                func=ast.Attribute(
                    value=ast.Subscript(
                        value=ast.Name(id="L"), slice=ast.Constant(value=str(name))
                    ),
                    attr="size",
                ),
                args=[],
            ),
            slice=ast.Constant(value=int(axis)),
        ):
            size = shapes[name][axis]
            found = size.node.expr if isinstance(size, torch.SymInt) else size
            return sympy.sympify(found)
        case _:
            raise ValueError(f"no condition on sizes: {ast.dump(node)}")


def _taken(cond: Cond, place: str) -> Guard:
    varying = cond.rhs if cond.lhs.is_const else cond.lhs
    what = f"the model's code branches on this size: traced with {_stated(cond)}, got "
    return Guard(cond, (what, varying), place)


def taken(
    truth: torch.SymBool, symbols: Mapping[str, Expr], place: str
) -> tuple[bool, list[Guard]] | None:
    """What a condition on sizes was in the trace, and guards that it is; None if it is
    one of sizes that data decide."""
    expr, env = truth.node.expr, truth.node.shape_env
    hints = traced_sizes(env)
    if not {str(name) for name in expr.free_symbols} <= hints.keys() & symbols.keys():
        return None
    answer = bool(expr.subs({s: hints[str(s)] for s in expr.free_symbols}))
    held = expr if answer else sympy.Not(expr)
    conds = conditions(held, symbols, hints)
    if conds is None:
        return answer, list(_pinned(held, symbols, hints, place))
    return answer, [_taken(c, place) for c in conds if Facts().prove(c) is not True]


def _stated(cond: Cond) -> str:
    """With the constant last: n > 4."""
    signs = {"le": ">=", "lt": ">", "eq": "==", "ne": "!="}
    if cond.lhs.is_const and cond.kind in signs:
        return f"{cond.rhs} {signs[cond.kind]} {cond.lhs}"
    return str(cond)


def _pinned(
    expr: Any, symbols: Mapping[str, Expr], hints: Mapping[str, int], place: str
) -> Iterator[Guard]:
    """For a branch that no guard can express: fixes its sizes to the traced ones."""
    for name in sorted(map(str, expr.free_symbols)):
        what = f"the model's code branches on {expr}, known only for the traced size "
        message = (f"{what}{hints[name]}: ", symbols[name])
        yield Guard(eq(symbols[name], hints[name]), message, place)


# --- the questions of a trace ---------------------------------------------------


def shape_env(ep: ExportedProgram | GraphModule) -> Any:
    """torch's record of the sizes in a program; None if it has no tensors."""
    vals = (node.meta.get("val") for node in ep.graph.nodes)
    modes = (getattr(v, "fake_mode", None) for v in vals if isinstance(v, torch.Tensor))
    mode = next((m for m in modes if m is not None), None)
    return getattr(mode, "shape_env", None)


def traced_sizes(env: Any) -> dict[str, int]:
    """The sizes of the example, by torch's symbols."""
    return {str(k): int(v) for k, v in env.backed_var_to_val.items()}


def _is_check(path: str, line: int) -> bool:
    """Whether that line of the model asserts, or raises if its condition fails."""
    code = linecache.getline(path, line).strip()
    if code.startswith("assert") or "torch._check" in code:
        return True
    return linecache.getline(path, line + 1).strip().startswith("raise ")


def conditions(
    expr: Any, symbols: Mapping[str, Expr], hints: Mapping[str, int] | None = None
) -> list[Cond] | None:
    """Conditions of ours that imply it; None if it cannot be expressed.

    `hints` are the sizes of the trace, if it has them.
    """
    if expr == sympy.true:
        return []
    if isinstance(expr, sympy.Not):  # of several: ~(a | b) -> ~a & ~b
        expr = sympy.to_nnf(expr, simplify=False)
    if isinstance(expr, sympy.And):
        parts = [conditions(part, symbols, hints) for part in expr.args]
        known = [part for part in parts if part is not None]
        return list(itertools.chain(*known)) if len(known) == len(parts) else None
    if isinstance(expr, sympy.Or) and hints is not None:
        # The part that held in the trace is enough.
        at = {s: hints[str(s)] for s in expr.free_symbols}
        held = [part for part in expr.args if part.subs(at) == sympy.true]
        spelt = (conditions(part, symbols, hints) for part in held)
        return next((conds for conds in spelt if conds is not None), None)
    relation = _RELATIONS.get(type(expr))
    if relation is None:
        return None
    try:
        (a, b), (c, d) = (to_ratio(side, symbols.__getitem__) for side in expr.args)
    except (KeyError, ValueError):
        return None
    if not all(part.is_const and part.value > 0 for part in (b, d)):
        return None
    match expr:  # known as divisibility, it proves more
        case sympy.Eq(args=(torch_sympy.Mod() | torch_sympy.PythonMod() as rest, 0)):
            by, of = (to_expr(part, symbols.__getitem__) for part in rest.args[::-1])
            return [divides(by, of)]
        case _:
            pass
    return [relation(a * d, c * b)]
