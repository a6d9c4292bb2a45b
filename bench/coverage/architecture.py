"""One architecture of a scorecard: compiled once, called at several sizes.

At each size, against the model in double precision:

    max |ours - f64|  <=  2 * max |eager - f64|  +  1e-5 * scale

where the scale is the largest number of the result, or 1 (docs/numerics.md). A model
that has f32 built in has no result in double: there, eager stands for it, and ours may
be off by 1e-4 of the scale. A size that eager refuses is left out; one that eager takes
and the compiled model refuses makes the verdict `refused`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import pliant
from bench.coverage.judge import Verdict, first_line, refusal
from pliant.errors import InternalError

FLOOR, FLOOR_OF_SINGLE = 1e-5, 1e-4
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model with random weights, and its inputs at sizes such as (batch, length).

    The first size is the example's. `names` are the model's keywords that the inputs
    are given by; without them they go by position.
    """

    build: Callable[[], torch.nn.Module]
    inputs: Callable[..., Tensors]
    dims: Any
    sizes: Sequence[tuple[int, ...]]
    names: tuple[str, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()  # more keywords, such as use_cache


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(rows: int, length: int, most: int = 90) -> torch.Tensor:
    """Token numbers above those that configurations have a special use for."""
    generator = torch.Generator().manual_seed(97 * rows + length)
    return torch.randint(10, most, (rows, length), generator=generator)


class Plain(torch.nn.Module):
    """A model with tensors as arguments, and with its tensors as the results."""

    def __init__(self, model: torch.nn.Module, names: Any, fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.fixed = model, names, dict(fixed)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if self.names:
            given = dict(zip(self.names, inputs, strict=True))
            return found_tensors(self.model(**given, **self.fixed))
        return found_tensors(self.model(*inputs, **self.fixed))


def found_tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of any structure, a model's output class among them."""
    if hasattr(result, "to_tuple"):
        result = result.to_tuple()
    leaves = pytree.tree_leaves(result, is_leaf=lambda x: hasattr(x, "to_tuple"))
    out: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            out.append(leaf)
        elif hasattr(leaf, "to_tuple"):
            out += found_tensors(leaf)
    return out


def judge_architecture(case: Architecture) -> Verdict:
    torch.manual_seed(0)
    model = Plain(_shaken(case.build().eval()), case.names, case.fixed).eval()
    example = case.inputs(*case.sizes[0])
    if isinstance(eager := _run(model, example), Exception):
        return Verdict("eager_cannot", f"{type(eager).__name__}: {first_line(eager)}")
    shapes = {"inputs": case.dims}
    try:
        with torch.no_grad():
            compiled = pliant.compile(model, example, shapes)
    except Exception as error:
        return refusal(error, model, example, for_torch(shapes))
    double = copy.deepcopy(model).double()
    refused: list[str] = []
    tried = 0
    for size in case.sizes:
        inputs = case.inputs(*size)
        eager = _run(model, inputs)
        if isinstance(eager, Exception):
            continue
        tried += 1
        ours = _run(compiled, inputs)
        if isinstance(ours, InternalError):
            return Verdict("internal", f"at {size}: {first_line(ours)}")
        if isinstance(ours, pliant.PliantError):
            refused.append(f"at {size}: {type(ours).__name__}: {first_line(ours)}")
        elif isinstance(ours, Exception):
            return Verdict("internal", f"at {size}: {type(ours).__name__}: {ours}")
        elif problem := _apart(double, inputs, eager, ours):
            return Verdict("wrong", f"at {size}: {problem}")
    if refused:
        return Verdict("refused", "; ".join(refused))
    return Verdict("pass", "" if tried > 1 else "eager takes no other size")


def _shaken(model: torch.nn.Module) -> torch.nn.Module:
    """No parameter is constant: a gate of zeros has ties alone, a scale of zeros hides
    what it multiplies."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1:
                first = parameter.flatten()[0]
                if bool((parameter == first).all()):
                    parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def for_torch(shapes: Any) -> Any:
    """torch.export knows no names: each is a dim that it must not fix."""
    return pytree.tree_map(
        lambda dim: torch.export.Dim.DYNAMIC if isinstance(dim, str) else dim, shapes
    )


def _run(model: Callable[..., Any], inputs: Tensors) -> Any:
    try:
        with torch.no_grad():
            return found_tensors(model(*(x.clone() for x in inputs)))
    except Exception as error:
        return error


def _apart(
    double: torch.nn.Module, inputs: Tensors, eager: list[Any], ours: list[Any]
) -> str:
    """How results differ beyond what the rule allows; nothing if they do not."""
    if len(ours) != len(eager):
        return f"{len(ours)} results, not {len(eager)}"
    for mine, its in zip(ours, eager, strict=True):
        if mine.shape != its.shape or mine.dtype != its.dtype:
            kinds = f"{mine.dtype}{list(mine.shape)}, {its.dtype}{list(its.shape)}"
            return f"types differ: {kinds}"
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    exact = _run(double, wide)
    single = isinstance(exact, Exception) or len(exact) != len(eager)
    exact = eager if single else exact
    for mine, its, true in zip(ours, eager, exact, strict=True):
        if not its.is_floating_point():
            if not torch.equal(mine, its) and torch.equal(its, true):
                return f"{int((mine != its).sum())} of {its.numel()} integers differ"
            continue
        scale = max(1.0, _largest(true[true.isfinite()]))
        floor = (FLOOR_OF_SINGLE if single else FLOOR) * scale
        error, allowed = _error(mine, true), 2 * _error(its, true) + floor
        if not error <= allowed:
            return f"off by {error:.3g}, allowed are {allowed:.3g} (scale {scale:.3g})"
    return ""


def _error(got: torch.Tensor, true: torch.Tensor) -> float:
    same = (got == true) | (got.isnan() & true.isnan())
    off = (got.double() - true.double()).abs().masked_fill(same, 0.0)
    found = _largest(off)
    return math.inf if math.isnan(found) else found


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
