"""Runs an imported model in the interpreter, as a caller of the compiled one would."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pliant.errors import ShapeError
from pliant.frontend.contract import Imported
from pliant.frontend.signature import (
    FixedResult,
    FixedSlot,
    SizeResult,
    SizeSlot,
    TensorResult,
    TensorSlot,
)
from pliant.frontend.torch_export import export_module, from_exported
from pliant.frontend.torch_tensors import as_real, to_numpy, torch_dtype
from pliant.ir.interp import run_graph, solved


def run(imported: Imported, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    signature, module = imported.signature, imported.checked()
    flat = signature.flatten_arguments(args, dict(kwargs or {}))
    graph = module.main
    arrays: list[Any] = []
    sizes: dict[str, int] = {}
    for value, slot in zip(flat, signature.arguments, strict=True):
        match slot:
            case TensorSlot():
                arrays.append(to_numpy(as_real(value)))
            case SizeSlot(_, symbol):
                assert sizes.setdefault(symbol, value) == value
            case FixedSlot(_, fixed):
                assert fixed == value
    env = sizes | solved(graph, [a.shape for a in arrays], sizes)
    for guard in graph.constraints:
        if set(guard.cond.symbols()) <= set(env) and not guard.cond.holds(env):
            raise ShapeError(f"{guard.render(env)} ({guard.origin})")
    for cond in (assumed.guard.cond for assumed in imported.assumptions):
        assert not set(cond.symbols()) <= set(env) or cond.holds(env)
    results = run_graph(module, arrays, env=sizes)
    out: list[Any] = []
    for item in signature.results:
        match item:
            case TensorResult(which, is_complex, is_float):
                dtype = torch_dtype(graph.results[which].dtype)
                found = torch.from_numpy(np.array(results[which])).to(dtype)
                found = torch.complex(*found.unbind(-1)) if is_complex else found
                out.append(float(found) if is_float else found)
            case SizeResult(size):
                out.append(size.evaluate(env))
            case FixedResult(fixed):
                out.append(fixed)
    return signature.unflatten_results(out)


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
