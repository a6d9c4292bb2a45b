"""A function of a model's code, compiled from another text than its own.

The text is rewritten where a size that varies would be fixed: loops become scans
(loop_source.py), `int(n)` stays a size (number_source.py).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import CodeType, FunctionType

from pliant.frontend.loop_source import ROUNDS, rewrite_loops
from pliant.frontend.number_source import rewrite_numbers


def rewritten(function: FunctionType) -> CodeType | None:
    """The code of a function that keeps sizes; None if there is nothing to rewrite."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None  # made without a text
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    found = rewrite_loops(definition, function)
    found |= rewrite_numbers(definition, function)
    if not found:
        return None
    (load,) = ast.parse(f"from pliant.frontend import torch_rounds as {ROUNDS}").body
    definition.body.insert(0, ast.copy_location(load, definition))
    ast.increment_lineno(tree, first - 1)
    return _compiled(function, definition)


def is_rewritten(code: CodeType) -> bool:
    return ROUNDS in code.co_varnames + code.co_cellvars


def _compiled(function: FunctionType, definition: ast.FunctionDef) -> CodeType | None:
    """The code alone: defaults, decorators and variables from outside stay as they
    are, those of the function."""
    outside = function.__code__.co_freevars
    arguments = definition.args
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [d and ast.Constant(None) for d in arguments.kw_defaults]
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    definition.returns, definition.decorator_list = None, []
    maker = ast.parse(f"def __maker({', '.join(outside)}): pass")
    holder = maker.body[0]
    assert isinstance(holder, ast.FunctionDef)
    holder.body = [definition]
    made = compile(
        ast.fix_missing_locations(maker), function.__code__.co_filename, "exec"
    )
    code = _inner(_inner(made, "__maker"), definition.name)
    if code.co_freevars != outside:
        return None
    return code.replace(co_qualname=function.__code__.co_qualname)


def _inner(code: CodeType, name: str) -> CodeType:
    return next(
        c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name
    )
