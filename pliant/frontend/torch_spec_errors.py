"""The example's sizes against the spec of the dims, and why torch.export refused."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.export import Dim
from torch.utils import _pytree as pytree

from pliant.errors import OptionError, PliantError, ShapeError
from pliant.frontend.torch_questions import Asked
from pliant.frontend.torch_spec import DimSpec, LeafSpec, described, is_hint
from pliant.sym import Expr, sym

# --- the example against the spec -----------------------------------------------


def check_sizes(flat: Sequence[Any], leaves: Sequence[LeafSpec]) -> None:
    """Checks that the example's sizes fit the spec; else an error names the place."""
    values: dict[str, tuple[int, str]] = {}
    derived: list[tuple[LeafSpec, int, Expr, int]] = []
    for value, leaf in zip(flat, leaves, strict=True):
        for axis, dim in leaf.dims.items():
            size = int(value.shape[axis]) if axis >= 0 else int(value)
            _check_size(leaf, axis, dim, size)
            if dim.expr is None:
                continue
            place = leaf.place(axis)
            if dim.expr != sym(dim.expr.symbols()[0]):
                derived.append((leaf, axis, dim.expr, size))
                continue
            name = str(dim.expr)
            other, where = values.setdefault(name, (size, place))
            if other != size:
                raise ShapeError(
                    f"dynamic_shapes: dim '{name}' is {other} at {where} of the "
                    f"example, but {size} at {place}: give them different names",
                    input=leaf.name,
                    dim=axis,
                    expected=other,
                    got=size,
                )
    for leaf, axis, expr, size in derived:
        _check_derived(leaf, axis, expr, size, values)


def _check_size(leaf: LeafSpec, axis: int, dim: DimSpec, size: int) -> None:
    fixed = dim.for_torch if isinstance(dim.for_torch, int) else None
    if fixed is not None and fixed != size:
        problem, wanted = f"is given as {fixed}", fixed
    elif dim.low is not None and size < dim.low:
        problem, wanted = f"is declared to be at least {dim.low}", dim.low
    elif dim.high is not None and size > dim.high:
        problem, wanted = f"is declared to be at most {dim.high}", dim.high
    else:
        return
    name = f"'{dim.expr}', " if dim.expr is not None else ""
    raise ShapeError(
        f"dynamic_shapes: {name}{leaf.place(axis)}, {problem}, but the example "
        f"has {size}",
        input=leaf.name,
        dim=axis,
        expected=wanted,
        got=size,
    )


def _check_derived(
    leaf: LeafSpec,
    axis: int,
    expr: Expr,
    size: int,
    values: dict[str, tuple[int, str]],
) -> None:
    """Of 2*half: the example has a whole half, the one of other places."""
    (name,) = expr.symbols()
    offset = expr.substitute({name: 0}).value
    slope = expr.substitute({name: 1}).value - offset
    known, where = values.get(name, (0, ""))
    if name in values and slope * known + offset != size:
        problem = f"'{name}' is {known} at {where} of the example, which makes it "
        problem += str(slope * known + offset)
    elif name not in values and (size - offset) % slope:
        problem = f"no whole '{name}' gives it"
    else:
        values.setdefault(name, ((size - offset) // slope, leaf.place(axis)))
        return
    raise ShapeError(
        f"dynamic_shapes: {leaf.place(axis)} is declared as {expr}, but the example "
        f"has {size}: {problem}",
        input=leaf.name,
        dim=axis,
        expected=str(expr),
        got=size,
    )


# --- what torch.export refuses --------------------------------------------------


def export_error(
    failure: Exception,
    flat: Sequence[Any],
    leaves: Sequence[LeafSpec],
    fixed: Sequence[FixedDim],
    eager: Exception | None = None,
) -> PliantError:
    """Why torch.export did not trace a model, and what to do.

    `fixed` are the dims declared dynamic that it traces with one size only; `eager` is
    how the model fails without a trace.
    """
    if fixed:
        first = fixed[0]
        places = "; ".join(
            f"{_named(dim.leaf, dim.axis)} is fixed to {dim.size} by the model"
            + (dim.place and f" ({dim.place})")
            for dim in fixed
        )
        line = next((f", or change {dim.place}" for dim in fixed if dim.place), "")
        return ShapeError(
            f"dynamic_shapes: {places}: leave it out of dynamic_shapes{line}, or give "
            "Dim.AUTO, which lets the model decide",
            input=first.leaf.name,
            dim=first.axis,
            expected=first.size,
            got=first.size,
        )
    for value, leaf in zip(flat, leaves, strict=True):
        if not isinstance(value, _LEAVES):
            return OptionError(
                f"input '{leaf.name}' is {described(value)}, which torch.export cannot"
                " take apart: register a dataclass with "
                "torch.export.register_dataclass, or pass its tensors"
            )
    line, code = _line(failure)
    if eager is not None:
        return PliantError(
            "the model itself fails with these example_inputs, before anything is "
            f"compiled: {_said(eager)}{_line(eager)[0] or line}"
        )
    advice = next((text for kind, text in _ADVICE if kind in str(failure)), "")
    quoted = f"\n    {code}" if advice and code else ""
    return PliantError(
        f"torch.export could not trace the model: {_said(failure)}{line}{quoted}"
        + (f"\n{advice}" if advice else "")
    )


def _said(failure: Exception) -> str:
    """torch's reason without its hints for its own developers."""
    said = str(failure).split("\nThe error above occurred")[0].strip()
    reason = next((said.split(mark)[0] for mark in _HINTS if mark in said), said)
    return f"{type(failure).__name__}: {reason.strip()}"


_HINTS = ("\n\nconsider using data-dependent", "\nCaused by:", "\nFor more information")


def eager_failure(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Exception | None:
    """What goes wrong when the model runs with the example as it is, without a trace.

    Its tensors have no data here, so what asks for values is no failure of its own.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = pytree.tree_map_only(
        torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), (args, kwargs)
    )
    try:
        with mode, torch.no_grad():
            model(*fakes[0], **fakes[1])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        no_data = isinstance(error, _NO_DATA) or ".numpy()" in str(error)
        return None if no_data else error
    except Exception:
        return None
    return None


_NO_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


def _line(failure: Exception) -> tuple[str, str]:
    """Where the model's code was: the innermost frame that is not of a library's."""
    files = (torch.__file__, os.path.dirname(__file__), os.__file__)
    own = [os.path.dirname(file) for file in files]
    for frame in reversed(traceback.extract_tb(failure.__traceback__)):
        if not frame.filename.startswith((*own, "<")):
            place = f" ({os.path.basename(frame.filename)}:{frame.lineno})"
            return place, frame.line or ""
    return "", ""


_LEAVES: tuple[type, ...] = (torch.Tensor, int, float, complex, bool, str, type(None))
_LEAVES += (torch.dtype, torch.device, torch.layout, torch.memory_format)

# A part of torch's message, and what helps.
_ADVICE = (
    (
        "must be bool, not SymBool",
        "This argument has to be a bool: write bool(...) around the comparison of "
        "sizes, and both answers are compiled.",
    ),
    (
        "data-dependent expression",
        "The model's code branches on the values of a tensor: use torch.where or "
        "torch.cond there, or pass the decision as an argument.",
    ),
    (
        ".numpy() is not supported",
        "The model's code leaves torch there: what NumPy computes is not part of the "
        "program. Use the torch function of the same name.",
    ),
    (
        "Constraints violated",
        "Dims that are dynamic must be free to vary: leave those named above out of "
        "dynamic_shapes, or give Dim.AUTO.",
    ),
)


def _named(leaf: LeafSpec, axis: int) -> str:
    dim = leaf.dims[axis]
    name = "" if dim.expr is None else f"'{dim.expr}', "
    return f"{name}{leaf.place(axis)}"


def let_torch_decide(for_torch: Any) -> Any:
    """The same spec with AUTO for DYNAMIC: torch then fixes what the model fixes."""
    return pytree.tree_map(
        lambda dim: Dim.AUTO if is_hint(dim, "DYNAMIC") else dim, for_torch
    )


@dataclass(frozen=True, slots=True)
class FixedDim:
    """A dim that must vary and was traced with one size."""

    leaf: LeafSpec
    axis: int
    size: int
    place: str  # the first line that took a size as this number, if known


def fixed_dims(
    sizes: Sequence[Mapping[int, Any]], leaves: Sequence[LeafSpec], asked: Asked
) -> list[FixedDim]:
    return [
        FixedDim(leaf, axis, size, asked.line_that_fixes(size))
        for traced, leaf in zip(sizes, leaves, strict=True)
        for axis, dim in leaf.dims.items()
        if dim.must_vary and _is_constant(traced.get(axis))
        for size in [int(traced[axis])]
    ]


def _is_constant(size: Any) -> bool:
    if isinstance(size, torch.SymInt):
        return bool(size.node.expr.is_number)
    return isinstance(size, int)
