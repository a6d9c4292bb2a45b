"""What control flow, chunks, fusions and calls of graphs mean, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from pliant.ir.graph import Op, Value, chunk_rows
from pliant.ir.interp_memory import Array, sizes_of
from pliant.ir.reductions import identity
from pliant.sym import as_expr

if TYPE_CHECKING:
    from pliant.ir.interp import Interpreter


def _if(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    then, other = op.regions
    return run.region(then if operands[0] else other, operands[1:], env)


def _loop(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    carried = operands[1:]
    for i in range(int(operands[0])):
        carried = run.region(op.regions[0], [np.asarray(i, np.int64), *carried], env)
    return carried


def _while(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    cond, body = op.regions
    while run.region(cond, operands, env)[0]:
        operands = run.region(body, operands, env)
    return operands


def _scan(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    rounds, count = op.dim_attr("rounds").evaluate(env), -op.int_attr("scanned")
    first = len(operands) + count
    carried, scanned = operands[:first], operands[first:]
    stacked = [run.fresh(v.type, env).elements() for v in op.results[first:]]
    order = range(rounds)
    for i in reversed(order) if op.bool_attr("reverse") else order:
        results = run.region(op.regions[0], [*carried, *(x[i] for x in scanned)], env)
        carried = results[:first]
        for stack, row in zip(stacked, results[first:], strict=True):
            stack[i] = row
    return [*carried, *stacked]


def _bind(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    (region,) = op.regions
    count = len(region.sizes)
    for size, most in zip(operands[:count], op.dims_attr("most"), strict=True):
        if not 0 <= int(size) <= most.evaluate(env):
            raise ValueError(f"{int(size)} is no size: at most {most}")
    sizes = {n: int(x) for n, x in zip(region.sizes, operands, strict=False)}
    found = run.region(region, operands[count:], {**env, **sizes})
    out = []
    for array, value, inner in zip(found, op.results, region.results, strict=True):
        if value.type.rank == inner.type.rank and value.type == inner.type:
            out.append(array)
            continue
        whole = np.zeros(sizes_of(value.shape, env), array.dtype)
        whole[: array.size] = array.reshape(-1)
        out.append(whole)
    return out


# What two elements combined are, by the reduction.
_TOTALS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def _start(value: Value, combine: str) -> bool | int | float:
    return identity(combine, value.dtype) if combine else 0


def _row_size(value: Value, names: Collection[str]) -> str | None:
    """Which of the sizes that are numbers of rows a value's shape has."""
    found = (s for dim in value.shape for s in dim.symbols() if s in names)
    return next(found, None)


def _chunk(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    (region,) = op.regions
    extent, rows = (op.dim_attr(name).evaluate(env) for name in ("extent", "rows"))
    every = chunk_rows(region, as_expr(extent))
    outers = sizes_of(op.dims_attr("outers"), env)
    values = (*region.params, *region.results)
    cuts = [_row_size(value, every) for value in values]
    given = list(zip(region.params, operands, outers, cuts, strict=False))
    sums = op.sums
    results = [
        run.rounded(np.full(sizes_of(v.shape, env), _start(v, combine)), v.dtype)
        for v, combine in zip(op.results, sums, strict=True)
    ]
    for first in range(0, extent, max(rows, 1)):
        count = min(rows, extent - first)
        numbers = count, first, min(count, extent - 1 - first)
        inside = {**env, **dict(zip(region.sizes, numbers, strict=False))}

        taken = []
        for param, array, outer, size in given:
            if size is not None and array.size:
                array = array.reshape(outer, every[size].value, -1)
                array = array[:, first : first + inside[size]]
            if size is not None:
                array = array.reshape(sizes_of(param.shape, inside))
            taken.append(array)
        found = run.region(region, taken, inside)
        for k, (whole, array, outer, size) in enumerate(
            zip(results, found, outers[len(given) :], cuts[len(given) :], strict=True)
        ):
            if size is None:
                total = _TOTALS[sums[k]](whole, array)
                results[k] = run.rounded(total, op.results[k].dtype)
            elif whole.size:
                target = whole.reshape(outer, every[size].value, -1)
                target = target[:, first : first + inside[size]]
                target[...] = array.reshape(target.shape)
    return results


def _match_cast(
    run: Interpreter, op: Op, env: Any, operands: list[Array]
) -> list[Array]:
    return operands


def _call(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    callee = run.module.graphs[op.str_attr("callee")]
    sizes = sizes_of(op.dims_attr("sizes"), env)
    return run.call(callee, operands, dict(zip(callee.sizes, sizes, strict=True)))


def _fusion(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    return run.region(op.regions[0], operands, env)


CONTROL: dict[str, Callable[..., list[Array]]] = {
    "if": _if,
    "loop": _loop,
    "while": _while,
    "scan": _scan,
    "bind": _bind,
    "chunk": _chunk,
    "match_cast": _match_cast,
    "call": _call,
    "fusion": _fusion,
}
