"""Records every condition on sizes that a model's code evaluates during torch.export.

    with recorded_questions() as asked:
        ep = torch.export.export(...)

torch keeps a condition as a guard only if earlier guards do not imply it, and an
earlier one may come from inside an op, where Pliant's shape rules apply and torch's do
not. So the conditions ("questions") themselves are recorded, with torch's answers, in
the two functions of torch's symbolic shapes that decide all of them.

A condition that is evaluated while a single op runs on shapes only decides the shape of
that op's result, which Pliant computes by its own rules. It is left out. All others
decide which ops the program has: those in the model's Python code, in torch.nn, and in
composite functions that are traced into.

Of a size torch assumes that it is positive, and sympy decides `n == 0` by that before
anyone is asked. So comparisons are made again with symbols that may be 0, and what is
open then is a question too.

Whether a condition is known without asking, as that x[:, :1] is all of x, must not
follow from what a single op asked about its shapes: that holds in the trace alone. So
nothing but the sizes' own ranges decides that.

The same code also computes with sizes, where torch's symbolic size may differ from
eager's: for torch the size of x[1:] is n - 1, in eager it is 0 at n = 0. So the sizes
that the model's code computes with are recorded as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import sympy
import torch
from torch.fx.experimental import _config, proxy_tensor, symbolic_shapes
from torch.fx.experimental.sym_node import SymNode

from pliant.frontend import torch_strides, torch_views, torch_windows
from pliant.frontend.torch_strides import asked_of_strides
from pliant.frontend.torch_views import answer_at_example, contiguous_is_an_op

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FLOW = os.path.join(_TORCH, "_higher_order_ops") + os.sep
_MODULES = os.path.join(_TORCH, "nn") + os.sep
_FAKE_OPS = os.path.join(_TORCH, "_subclasses", "fake_tensor.py")
_VIEWS = torch_views.__file__  # calls an op
# They ask for the model's code.
_OWN = {__file__, torch_strides.__file__, torch_windows.__file__}
_RECORDER = os.path.join(_TORCH, "fx", "experimental", "proxy_tensor.py")
_OPS = os.path.join(_TORCH, "_ops.py")
_DYNAMO = "torch._dynamo.symbolic_convert"
# Sorts strides of what torch.cond gives, for speed alone: no condition of the program.
_STRIDES = os.path.join(_TORCH, "_inductor", "utils.py")
_TRACER = tuple(os.path.join(_TORCH, name) + os.sep for name in ("export", "_export"))

# What stands between torch and rewritten code of the model (torch_rewritten.py).
_HERE = os.path.dirname(__file__)
_PACKAGE = os.path.dirname(_HERE) + os.sep
_REWRITTEN = tuple(
    os.path.join(_HERE, name) for name in ("torch_rewritten.py", "torch_rounds.py")
)

# Functions of torch's decompositions that compute the shape in which operands meet, or
# the strides of a result: as inside an op, they decide nothing that has a value.
_SHAPES = frozenset({"_broadcast_shapes", "compute_elementwise_output_strides"})
_LAYOUT = re.compile("contiguous|non_overlapping|memory_format|channels_last|strides")
_REFERENCES = os.path.join(_TORCH, "_refs") + os.sep
_PRIMITIVES = os.path.join(_TORCH, "_prims_common") + os.sep

# 0 and 1 are sizes like others. An op that slices while it runs on shapes may make a
# symbol for a size between two that it cannot compare, which its result does not have.
_CONFIG = {"backed_size_oblivious": True, "soft_pending_unbacked_not_found_error": True}
# torch's settings are of the process, so one trace at a time.
_tracing = threading.RLock()


@dataclass(frozen=True, slots=True)
class Question:
    """A condition on sizes that held in the trace, and the line that tests it."""

    condition: Any  # a sympy Boolean
    path: str
    line: int

    @property
    def place(self) -> str:
        return f"{os.path.basename(self.path)}:{self.line}" if self.line else self.path


@dataclass(slots=True)
class Asked:
    """The conditions of the model's code on sizes, and the sizes it computed with."""

    questions: dict[Question, None] = field(default_factory=dict)
    sizes: set[Any] = field(default_factory=set)  # sympy expressions
    fixed: dict[Any, str] = field(default_factory=dict)  # equations, and their lines
    wider: dict[Any, Any] = field(default_factory=dict)  # by relation and operands
    strides_inside: bool = False  # a function inside control flow asked for strides

    def note_strides_inside(self) -> None:
        self.strides_inside = True

    def ask(self, expr: Any, answer: Any) -> None:
        if not expr.free_symbols:
            return
        number = not _is_truth(expr)
        condition = _condition(expr, answer)
        frame = _asking_frame(sys._getframe(2), number)
        if frame is not None:
            path, line = frame.f_code.co_filename, frame.f_lineno
            self.questions[Question(condition, path, line)] = None
            self.sizes.add(expr)
        if isinstance(condition, sympy.Eq) and condition.rhs.is_number:
            self.fixed.setdefault(condition, _line_of(sys._getframe(2)))

    def line_that_fixes(self, size: int) -> str:
        """The first line by which a size is this number; torch forgets which one."""
        for equation, line in self.fixed.items():
            symbols = equation.free_symbols
            if len(symbols) == 1 and equation.subs(symbols.pop(), size) == sympy.true:
                return line
        return ""

    def ask_if_zero(self, relation: Any, a: Any, b: Any, out: Any) -> None:
        """Asks what was decided only because sizes are taken to be positive."""
        if out.free_symbols and out not in (a, b):
            return  # not decided: torch asks if it has to know
        if not (a.free_symbols or b.free_symbols):
            return
        # A trace compares the same few sizes for each of its ops.
        key = relation, a, b
        wide = self.wider.get(key)
        if wide is None:
            wide = self.wider[key] = relation(maybe_zero(a), maybe_zero(b))
        if not wide.free_symbols:
            return
        larger = out in (a, b)  # or smaller: a number
        frame = _asking_frame(sys._getframe(1), larger)
        if frame is not None and not _in_flow(sys._getframe(1), frame):
            path, line = frame.f_code.co_filename, frame.f_lineno
            answer = out == a if larger else bool(out)
            self.questions[Question(_condition(wide, answer), path, line)] = None

    def compute(self, operand: Any) -> None:
        node = getattr(operand, "node", None)
        expr = None if node is None else node.expr
        if expr is None or not expr.free_symbols or expr in self.sizes:
            return
        if _asking_frame(sys._getframe(2)) is not None:
            self.sizes.add(expr)


@contextlib.contextmanager
def recorded_questions() -> Iterator[Asked]:
    """Records the questions of traces inside; 0 and 1 are ordinary sizes in them."""
    asked = Asked()
    evaluate = symbolic_shapes.ShapeEnv.evaluate_expr
    guard_or = symbolic_shapes._guard_or
    known = symbolic_shapes._static_eval_sym_bool
    dispatch = proxy_tensor.handle_sym_dispatch
    # torch looks at the statement that asks: a failed `assert` is left to the run.
    passed = symbolic_shapes.uninteresting_files() | {__file__}

    def noted_evaluate(env: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
        hints = env.backed_var_to_val
        sorts = sys._getframe(1).f_code.co_filename == _STRIDES
        if sorts and expr.free_symbols <= hints.keys():
            return bool(expr.xreplace(hints))
        with _within_op(env, expr, hints):
            answer = evaluate(env, expr, *args, **kwargs)
        asked.ask(expr, answer)
        return answer

    def noted_guard_or(a: Any, default: bool) -> bool:
        answer = guard_or(a, default)
        if isinstance(a, torch.SymBool):
            in_layout = answer_at_example(sys._getframe(1), a)
            if in_layout is not None:
                return in_layout
            asked.ask(a.node.expr, answer)
        return answer

    def known_anywhere(a: torch.SymBool) -> bool | None:
        answer = known(a)
        asks = sys._getframe(1).f_code is guard_or.__code__  # it is noted there
        if answer is None or asks:
            return answer
        alone = a.node.shape_env._maybe_evaluate_static(a.node.expr, axioms=())
        return None if alone is None else bool(alone)

    def noted_dispatch(func: Any, args: Any, kwargs: Any) -> Any:
        for operand in args:
            asked.compute(operand)
        return dispatch(func, args, kwargs)

    def noted(name: str, compare: Any, decides: Any) -> Any:
        def compared(self: Any, other: Any) -> Any:
            out = compare(self, other)
            asked.ask_if_zero(decides, self.expr, other.expr, out.expr)
            return out

        return mock.patch.object(SymNode, name, compared)

    with (
        _tracing,
        contextlib.ExitStack() as comparisons,
        _config.patch(**_CONFIG),  # type: ignore[attr-defined]  # added at run time
        mock.patch.object(symbolic_shapes.ShapeEnv, "evaluate_expr", noted_evaluate),
        mock.patch.object(symbolic_shapes, "_guard_or", noted_guard_or),
        mock.patch.object(symbolic_shapes, "_static_eval_sym_bool", known_anywhere),
        mock.patch.object(symbolic_shapes, "uninteresting_files", lambda: passed),
        mock.patch.object(proxy_tensor, "handle_sym_dispatch", noted_dispatch),
        contiguous_is_an_op(),
        asked_of_strides(_asking_frame, asked.note_strides_inside),
    ):
        for name, decides in _COMPARISONS.items():
            made = noted(name, getattr(SymNode, name), decides)
            comparisons.enter_context(made)
        yield asked


_COMPARED = "compared"  # the function in place of such a method

# The methods by which sizes are compared, and the relation that decides.
_COMPARISONS: dict[str, Any] = {
    "eq": sympy.Eq,
    "ne": sympy.Ne,
    "lt": sympy.Lt,
    "le": sympy.Le,
    "gt": sympy.Gt,
    "ge": sympy.Ge,
    "sym_max": sympy.Ge,
    "sym_min": sympy.Le,
}


def maybe_zero(expr: Any) -> Any:
    """The same expression of symbols that may be 0; they keep their names."""
    return expr.xreplace(
        {
            symbol: sympy.Symbol(symbol.name, integer=True, nonnegative=True)
            for symbol in expr.free_symbols
            if symbol.is_integer and symbol.is_positive
        }
    )


def _within_op(env: Any, expr: Any, hints: Any) -> Any:
    """Keeps what an op asks about its shapes out of the guards of a loop's function.

    torch traces the functions of while_loop and scan by themselves, on sizes of their
    own, and then tests the guards of that trace: as if the model's code had asked. That
    two sizes are equal is kept, since shapes later on are compared.
    """
    if not _is_traced() or _asking_frame(sys._getframe(2)) is not None:
        return contextlib.nullcontext()
    plain = expr.free_symbols <= hints.keys()
    equal = plain and isinstance(expr, sympy.Eq) and expr.xreplace(hints) == sympy.true
    return contextlib.nullcontext() if equal else env.suppress_guards()


def _is_traced() -> bool:
    """Whether Dynamo traces a function; it is loaded when it first does."""
    dynamo = sys.modules.get(_DYNAMO)
    return dynamo is not None and getattr(dynamo.tls, "current_tx", None) is not None


def _is_truth(expr: Any) -> bool:
    """Whether it is true or false; to sympy a symbol may be either, to torch a size."""
    truth = isinstance(expr, sympy.logic.boolalg.Boolean)
    return truth and not isinstance(expr, sympy.Symbol)


def _condition(expr: Any, answer: Any) -> Any:
    """What the answer implies: the condition, its negation, or a number's value."""
    if _is_truth(expr):
        return expr if bool(answer) else sympy.Not(expr)
    return sympy.Eq(expr, answer, evaluate=False)


def _in_flow(frame: FrameType | None, until: FrameType) -> bool:
    """Whether torch's own control flow asks: at no rows, it only runs nothing."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith((_FLOW, "<eval_with_key>")):
            return True
        if frame is until:
            return False
        frame = frame.f_back
    return False


def _line_of(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor of this package."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_TORCH, _PACKAGE)):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _in_op(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_name == "__torch_function__"


def _asking_frame(frame: FrameType | None, number: bool = False) -> FrameType | None:
    """The innermost frame of the model's code; None inside of an op or the tracer.

    A `number` is asked for before an op runs, where it takes no size.
    """
    decomposed = False
    while frame is not None:
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        calls = function == "_tensor_min_max"  # the tracer's in place of Python's
        calls |= number and function == "__torch_function__"  # arguments of an op
        own = path in _OWN
        if own or (calls and path.startswith(_TRACER)):
            # An op in C++ compares sizes itself, for the strides of its result.
            if own and function == _COMPARED and _in_op(frame.f_back):
                return None
            frame = frame.f_back
            continue
        if path in (_FAKE_OPS, _VIEWS) or path.startswith(_TRACER):
            return None
        if function in _SHAPES and path.startswith((_REFERENCES, _PRIMITIVES)):
            return None
        if path.startswith(_PRIMITIVES) and _LAYOUT.search(function):
            return None
        if path == _OPS and function == "decompose":
            decomposed = True
        if path == _RECORDER and function == "proxy_call":
            if not decomposed:
                return None  # it runs the op that it records
            decomposed = False
        if path.startswith(_MODULES) or not path.startswith((_TORCH, *_REWRITTEN)):
            return frame
        frame = frame.f_back
    return None
