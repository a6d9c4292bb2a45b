"""What the model's own Python code decided by size while it was traced.

A trace is one way through the code. Where that way depends on a size, as in
`x * 2 if x.shape[0] > 4 else x * 3`, the condition must hold in every call. Two kinds
do not have to: one that only sizes 0 and 1 break (torch takes every dynamic size to be
2 or more, and its rules of shape are ours to redo), and a shortcut for special sizes
that was seen to compute the same.
"""

from __future__ import annotations

import itertools
import linecache
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions as torch_sympy

from pliant.frontend.torch_dims import to_expr, to_ratio
from pliant.sym import Cond, Expr, Facts, Guard, divides, eq, ge, gt, le, lt, ne

_RELATIONS = {
    sympy.Eq: eq,
    sympy.Ne: ne,
    sympy.Le: le,
    sympy.Lt: lt,
    sympy.Ge: ge,
    sympy.Gt: gt,
}
_TORCH_FOLDER = os.path.dirname(torch.__file__)


@dataclass(slots=True)
class Decisions:
    """Enforced: `checks` that the code states, `branches` it took. `assumed` not."""

    checks: list[Guard] = field(default_factory=list)
    branches: list[Guard] = field(default_factory=list)
    assumed: list[Guard] = field(default_factory=list)


def decisions(
    ep: ExportedProgram, symbols: Mapping[str, Expr], shortcuts: frozenset[str]
) -> Decisions:
    """Conditions on sizes in the model's own code, as they went in the trace."""
    out = Decisions()
    seen: set[Cond] = set()
    env = _shape_env(ep)
    for expr, path, line in _questions(env):
        free = sorted(map(str, expr.free_symbols))
        if any(name not in symbols for name in free):
            continue  # a size that data decides: torch checks it in the graph
        place = f"{os.path.basename(path)}:{line}"
        check = _is_check(path, line)
        conds = _conditions(expr, symbols, _hints(env))
        if conds is None and not check:
            out.branches += _pinned(expr, symbols, _hints(env), place)
        large = Facts()
        for name in free:
            large = large.assume(ge(symbols[name], 2))
        for cond in conds or ():
            if cond in seen or Facts().prove(cond) is True:
                continue
            seen.add(cond)
            if check:
                text = f"the model checks that {cond}: "
                message = (text, cond.lhs, " and ", cond.rhs)
                out.checks.append(Guard(cond, message, place))
            elif large.prove(cond) is True or str(expr) in shortcuts:
                told = (f"the trace took the branch at {place} for {cond}",)
                out.assumed.append(Guard(cond, told, place))
            else:
                out.branches.append(_taken(cond, place))
    return out


def _taken(cond: Cond, place: str) -> Guard:
    varying = cond.rhs if cond.lhs.is_const else cond.lhs
    what = f"the model's code branches on this size: traced with {_stated(cond)}, got "
    return Guard(cond, (what, varying), place)


def _stated(cond: Cond) -> str:
    """With the constant last: n > 4."""
    signs = {"le": ">=", "lt": ">", "eq": "==", "ne": "!="}
    if cond.lhs.is_const and cond.kind in signs:
        return f"{cond.rhs} {signs[cond.kind]} {cond.lhs}"
    return str(cond)


def _pinned(
    expr: Any, symbols: Mapping[str, Expr], hints: Mapping[str, int], place: str
) -> Iterator[Guard]:
    """A branch that no guard can express holds at the traced sizes, and only there."""
    for name in sorted(map(str, expr.free_symbols)):
        what = f"the model's code branches on {expr}, known only for the traced size "
        message = (f"{what}{hints[name]}: ", symbols[name])
        yield Guard(eq(symbols[name], hints[name]), message, place)


# --- the questions of a trace ---------------------------------------------------


def _shape_env(ep: ExportedProgram) -> Any:
    vals = (node.meta.get("val") for node in ep.graph.nodes)
    modes = (getattr(v, "fake_mode", None) for v in vals if isinstance(v, torch.Tensor))
    mode = next((m for m in modes if m is not None), None)
    return getattr(mode, "shape_env", None)


def _questions(env: Any) -> Iterator[tuple[Any, str, int]]:
    """(condition, file, line) of each one that code outside torch asked."""
    for guard in getattr(env, "guards", ()):
        frame = guard.sloc.framework_loc
        path = getattr(frame, "filename", _TORCH_FOLDER)
        if path.startswith(_TORCH_FOLDER):
            continue  # a question of torch's own code, called by the model
        yield env.replace(guard.expr), path, frame.lineno


def _hints(env: Any) -> dict[str, int]:
    return {str(k): int(v) for k, v in env.backed_var_to_val.items()}


def _is_check(path: str, line: int) -> bool:
    """Whether that line of the model asserts, or raises if its condition fails."""
    code = linecache.getline(path, line).strip()
    if code.startswith("assert") or "torch._check" in code:
        return True
    return linecache.getline(path, line + 1).strip().startswith("raise ")


def _conditions(
    expr: Any, symbols: Mapping[str, Expr], hints: Mapping[str, int]
) -> list[Cond] | None:
    """What makes the condition hold; None if it has no spelling."""
    if expr == sympy.true:
        return []
    if isinstance(expr, sympy.And):
        parts = [_conditions(part, symbols, hints) for part in expr.args]
        known = [part for part in parts if part is not None]
        return list(itertools.chain(*known)) if len(known) == len(parts) else None
    if isinstance(expr, sympy.Or):  # the part that held in the trace is enough
        at = {s: hints[str(s)] for s in expr.free_symbols}
        held = [part for part in expr.args if part.subs(at) == sympy.true]
        spelt = (_conditions(part, symbols, hints) for part in held)
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


# --- shortcuts ------------------------------------------------------------------

_TRIALS = 3
_LARGEST = 4096  # a size, when looking for one that takes the shortcut
_MOST = 1 << 25  # elements of an input to try it with


def shortcuts(
    ep: ExportedProgram, model: torch.nn.Module, values: Sequence[Any]
) -> frozenset[str]:
    """Conditions `size != k` whose other branch was seen to compute the same.

    Code often has a way around work that is not needed at one size, such as resizing
    a table to the size it has. At such sizes the model and the trace are both run.
    """
    env = _shape_env(ep)
    out = set()
    for expr, path, line in _questions(env):
        if not isinstance(expr, sympy.Ne) or _is_check(path, line):
            continue
        trials = list(itertools.islice(_solutions(expr, _hints(env)), _TRIALS))
        same = (_same_at(ep, model, values, trial) for trial in trials)
        if trials and all(same):
            out.add(str(expr))
    return frozenset(out)


def _solutions(expr: Any, hints: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes that break `a != b`: all its symbols alike first, then each alone."""
    free = sorted(expr.free_symbols, key=str)
    difference = sympy.lambdify(free, expr.args[0] - expr.args[1], _FUNCTIONS)
    names = [str(s) for s in free]
    given = [hints[name] for name in names]
    moving = [[True] * len(names)]
    if len(names) > 1:
        moving += [[i == j for j in range(len(names))] for i in range(len(names))]
    for moved in moving:
        for n in range(2, _LARGEST + 1):
            sizes = [n if m else g for m, g in zip(moved, given, strict=True)]
            if difference(*sizes) == 0:
                yield {**hints, **dict(zip(names, sizes, strict=True))}
                break


_FUNCTIONS = [
    {
        "FloorDiv": lambda a, b: a // b,
        "CleanDiv": lambda a, b: a // b,
        "CeilDiv": lambda a, b: -(-a // b),
        "Mod": lambda a, b: a % b,
        "PythonMod": lambda a, b: a % b,
    },
    "math",
]


def _same_at(
    ep: ExportedProgram,
    model: torch.nn.Module,
    values: Sequence[Any],
    sizes: Mapping[str, int],
) -> bool:
    try:
        flat = list(_resized(ep, values, sizes))
        args, kwargs = pytree.tree_unflatten(flat, ep.call_spec.in_spec)
        state = {name: b.detach().clone() for name, b in model.named_buffers()}
        kept = {name: b.detach().clone() for name, b in state.items()}
        with torch.no_grad():
            want = torch.func.functional_call(model, state, args, kwargs)
            try:
                have = ep.module(check_guards=False)(*args, **kwargs)
            finally:  # it may have changed the model's own
                for name, buffer in model.named_buffers():
                    buffer.copy_(kept[name])
    except Exception:  # the model's own, at a size it was not given: nothing learnt
        return False
    wanted, had = pytree.tree_leaves(want), pytree.tree_leaves(have)
    return len(wanted) == len(had) and all(map(_close, wanted, had))


def _close(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def _resized(
    ep: ExportedProgram, values: Sequence[Any], sizes: Mapping[str, int]
) -> Iterator[Any]:
    """The examples at other sizes: repeated, so that ids stay valid; floats varied."""
    wanted = set(ep.graph_signature.user_inputs)
    nodes = [n for n in ep.graph.nodes if n.op == "placeholder" and n.name in wanted]
    random = torch.Generator().manual_seed(0)
    for node, value in zip(nodes, values, strict=True):
        val = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            yield _size_at(val, sizes) if isinstance(val, torch.SymInt) else value
            continue
        shape = [_size_at(d, sizes) for d in val.shape]
        if math.prod(shape) > _MOST:
            raise ValueError(f"{shape} is too large to try")
        for axis, size in enumerate(shape):
            index = torch.arange(size) % max(value.shape[axis], 1)
            value = value.detach().index_select(axis, index)
        if value.is_floating_point():
            noise = torch.randn(shape, generator=random, dtype=torch.float32)
            value = value + noise.to(value.dtype)
        yield value


def _size_at(size: Any, sizes: Mapping[str, int]) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = size.node.expr
    return int(expr.subs({s: sizes[str(s)] for s in expr.free_symbols}))
