"""torch's ops with functions inside: cond, while_loop, scan, map.

Each function is a graph of its own and becomes a region. Tensors that it uses from
outside are among its operands; sizes are seen from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.fx import Node

from pliant.frontend.torch_ops_context import TorchContext, Unsupported
from pliant.frontend.torch_sizes import Undecided
from pliant.ir.graph import Graph, Value


class Regions(Protocol):
    """What translates the graphs inside an op."""

    @property
    def cx(self) -> TorchContext: ...

    def region(self, reference: Any, operands: list[Any], name: str) -> Graph: ...


Flow = Callable[[Regions, Node, list[Any]], list[Value]]


def _made(walk: Regions, parts: Sequence[tuple[Any, list[Any], str]]) -> list[Graph]:
    """The regions; a problem in one of them is reported where it arose."""
    problems = walk.cx.problems
    before = len(problems)
    made = [walk.region(*part) for part in parts]
    if len(problems) > before:
        raise Unsupported("")
    return made


def _tensors(operands: Sequence[Any], what: str) -> list[Value]:
    if any(not isinstance(x, Value) for x in operands):
        raise Unsupported(f"a {what} that carries numbers: carry tensors")
    return list(operands)


def branch(walk: Regions, node: Node, args: list[Any]) -> list[Value]:
    condition, operands = args[0], args[3]
    parts = [(node.args[1], operands, "then"), (node.args[2], operands, "else")]
    regions = _made(walk, parts)
    cx = walk.cx
    if isinstance(condition, Undecided):
        raise Unsupported("a torch.cond on sizes: use a Python if")
    tensors = [x for x in operands if isinstance(x, Value)]
    condition = cx.b.reshape(cx.to_bool(cx.tensor(condition)), ())
    return list(cx.b.emit_multi("if", condition, *tensors, regions=regions))


def while_loop(walk: Regions, node: Node, args: list[Any]) -> list[Value]:
    carried = _tensors(args[2], "while_loop")
    given = [*carried, *args[3]]
    parts = [(node.args[0], given, "cond"), (node.args[1], given, "body")]
    test, body = _made(walk, parts)
    # Values the loop only reads are carried unchanged.
    kept = body.params[len(carried) :]
    body = body.replace(results=(*body.results, *kept))
    tensors = [x for x in given if isinstance(x, Value)]
    every = walk.cx.b.emit_multi("while", *tensors, regions=(test, body))
    return list(every[: len(carried)])


def scan(walk: Regions, node: Node, args: list[Any]) -> list[Value]:
    carried, rows = _tensors(args[1], "scan"), _tensors(args[2], "scan")
    return _scanned(walk, node.args[0], carried, rows, args[3])


def map_(walk: Regions, node: Node, args: list[Any]) -> list[Value]:
    return _scanned(walk, node.args[0], [], _tensors(args[1], "map"), args[2])


def _scanned(
    walk: Regions,
    reference: Any,
    carried: list[Value],
    rows: list[Value],
    others: Sequence[Any],
) -> list[Value]:
    """A function of (carried.., row.., other..) over rows.

    It gives the carried values after it, then what is stacked.
    """
    cx = walk.cx
    inside = [_row(x) for x in rows]
    given = [*carried, *inside, *others]
    (body,) = _made(walk, [(reference, given, "body")])
    fixed = [x for x in others if isinstance(x, Value)]
    count, last = len(carried), len(carried) + len(rows)
    # In the IR's order: carried, read only, rows.
    params = (*body.params[:count], *body.params[last:], *body.params[count:last])
    kept, results = body.params[last:], body.results
    body = body.replace(
        params=params, results=(*results[:count], *kept, *results[count:])
    )
    made = cx.b.emit_multi(
        "scan",
        *carried,
        *fixed,
        *rows,
        regions=(body,),
        rounds=rows[0].shape[0],
        scanned=len(rows),
    )
    return [*made[:count], *made[count + len(fixed) :]]


def _row(x: Value) -> Value:
    """Stands for a row of a tensor where the param of a region is made."""
    return Value("row", x.type.with_shape(x.shape[1:]))


FLOWS: dict[str, Flow] = {
    "cond": branch,
    "while_loop": while_loop,
    "scan": scan,
    "map_impl": map_,
}
