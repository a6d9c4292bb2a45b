"""Runs an imported model in the interpreter, as a caller of the compiled one would."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pliant.errors import ShapeError
from pliant.frontend.torch_export import (
    ConstantInput,
    ConstantOutput,
    Imported,
    SizeInput,
    SizeOutput,
    TensorInput,
    TensorOutput,
    export_module,
    from_exported,
)
from pliant.frontend.torch_ops_context import TORCH_DTYPE, to_numpy
from pliant.ir.interp import run_graph, solved


def run(imported: Imported, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    flat, spec = pytree.tree_flatten((args, dict(kwargs or {})))
    assert spec == imported.in_spec
    graph = imported.module.main
    params: dict[int, Any] = {}
    sizes: dict[str, int] = {}
    for value, slot in zip(flat, imported.inputs, strict=True):
        match slot:
            case TensorInput(_, param):
                params[param] = to_numpy(value)
            case SizeInput(_, symbol):
                assert sizes.setdefault(symbol, value) == value
            case ConstantInput(_, fixed):
                assert fixed == value
    arrays = [params[i] for i in range(len(params))]
    env = sizes | solved(graph, [a.shape for a in arrays], sizes)
    for guard in graph.constraints:
        if set(guard.cond.symbols()) <= set(env) and not guard.cond.holds(env):
            raise ShapeError(f"{guard.render(env)} ({guard.origin})")
    results = run_graph(imported.module, arrays, env=sizes)
    out: list[Any] = []
    for slot in imported.outputs:
        match slot:
            case TensorOutput(which):
                dtype = TORCH_DTYPE[graph.results[which].dtype]
                out.append(torch.from_numpy(np.array(results[which])).to(dtype))
            case SizeOutput(value):
                out.append(value.evaluate(env))
            case ConstantOutput(value):
                out.append(value)
    return pytree.tree_unflatten(out, imported.out_spec)


def imported_from(
    model: torch.nn.Module, example: tuple[Any, ...], dynamic: Any, **kwargs: Any
) -> Imported:
    ep, info = export_module(model.eval(), example, dynamic, **kwargs)
    return from_exported(ep, info)


def same(got: Any, want: Any, *, tolerance: float = 2e-5) -> None:
    """Equal pytrees; floats within the tolerance, NaN where NaN is."""
    left, left_spec = pytree.tree_flatten(got)
    right, right_spec = pytree.tree_flatten(want)
    assert left_spec == right_spec
    for a, b in zip(left, right, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, (
            a.dtype,
            b.dtype,
            a.shape,
            b.shape,
        )
        loose = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(b.dtype, tolerance)
        torch.testing.assert_close(a, b, rtol=loose, atol=loose, equal_nan=True)


def matches_eager(
    model: torch.nn.Module,
    example: tuple[Any, ...],
    dynamic: Any,
    *calls: tuple[Any, ...],
    tolerance: float = 2e-5,
) -> Imported:
    imported = imported_from(model, example, dynamic)
    for args in (example, *calls):
        with torch.no_grad():
            want = model(*pytree.tree_map(_copied, args))
        same(run(imported, args), want, tolerance=tolerance)
    return imported


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
