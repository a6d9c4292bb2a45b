"""`int(n)` and `float(n)` of a size, rewritten so that it stays a size.

    h, w = int(h), int(w)     ->     h, w = __rounds.whole(h), __rounds.whole(w)

Python's own give numbers alone, and a size that they are given is fixed to that of the
example. They are types too, as in `isinstance(n, int)`: only calls are rewritten.
"""

from __future__ import annotations

import ast
from types import FunctionType

from pliant.frontend.loop_source import ROUNDS

_CALLED = {"int": "whole", "float": "real"}  # what torch_rounds.py has for them


def rewrite_numbers(definition: ast.FunctionDef, function: FunctionType) -> bool:
    """Rewrites a function's text; whether there was a call to rewrite."""
    nodes = list(ast.walk(definition))
    code = function.__code__
    other = {*function.__globals__, *code.co_freevars}
    other |= {n.id for n in nodes if isinstance(n, ast.Name) and _is_assigned(n)}
    other |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    inside = {node for statement in definition.body for node in ast.walk(statement)}
    found = False
    for node in nodes:
        match node:
            case ast.Call(ast.Name(name), [single], []) if (
                name in _CALLED
                and name not in other
                and node in inside
                and not isinstance(single, ast.Starred)
            ):
                load = ast.Name(ROUNDS, ast.Load())
                kept = ast.Attribute(load, _CALLED[name], ast.Load())
                for made in (load, kept):
                    ast.copy_location(made, node.func)
                node.func = kept
                found = True
    return found


def _is_assigned(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)
