"""torch's ops with functions inside: cond, while_loop, scan, map.

Each function is a graph of its own and becomes a region. Tensors that it uses from
outside are among its operands; sizes are seen from outside. A complex tensor is two
operands, its parts. A region that draws random numbers has a seed as its last
parameter. A loop carries it: every round draws from another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.fx import Node

from pliant.frontend.torch_ops_complex import Complex
from pliant.frontend.torch_ops_context import TorchContext, Unsupported
from pliant.frontend.torch_sizes import Undecided
from pliant.ir.graph import Graph, Names, Value, names_of
from pliant.ir.types import DType, TensorType

# Seeds of rounds follow one another as the numbers of Knuth's generator (MMIX). Those
# of a loop start at another function of the seed outside, so that the rounds of loops
# in loops have different ones.
_NEXT = 6364136223846793005, 1442695040888963407
_FIRST = 2862933555777941757, 3037000493


@dataclass(frozen=True, slots=True)
class TorchRegion:
    """A graph inside an op, and what its parameters and results mean."""

    graph: Graph
    is_complex: tuple[bool, ...]  # of each result: it is two of the graph's
    seeded: bool  # its last parameter is a seed

    def with_seed(self) -> Graph:
        """The graph with a seed as its last parameter, in any case."""
        if self.seeded:
            return self.graph
        name = Names(names_of(self.graph)).fresh("seed")
        seed = Value(name, TensorType(DType.I64, ()))
        return self.graph.replace(params=(*self.graph.params, seed))

    def joined(self, values: Sequence[Value]) -> list[Value | Complex]:
        """Results of the op as those of the function."""
        rest = iter(values)
        return [
            Complex(next(rest), next(rest)) if is_complex else next(rest)
            for is_complex in self.is_complex
        ]


def parts_of(operands: Sequence[Any]) -> list[Value]:
    """The tensors among operands, complex ones as their parts."""
    found: list[Value] = []
    for x in operands:
        if isinstance(x, Complex):
            found += [x.re, x.im]
        elif isinstance(x, Value):
            found.append(x)
    return found


def next_seed(cx: TorchContext, seed: Value, numbers: tuple[int, int] = _NEXT) -> Value:
    factor, more = (cx.b.full(n, DType.I64, ()) for n in numbers)
    return cx.b.binary("add", cx.b.binary("mul", seed, factor), more)


class Regions(Protocol):
    """What translates the graphs inside an op."""

    @property
    def cx(self) -> TorchContext: ...

    def region(
        self, reference: Any, operands: list[Any], name: str, rounds: bool
    ) -> TorchRegion: ...


Flow = Callable[[Regions, Node, list[Any]], list[Any]]


def _made(
    walk: Regions, parts: Sequence[tuple[Any, list[Any], str, bool]]
) -> list[TorchRegion]:
    """The regions; a problem in one of them is reported where it arose."""
    problems = walk.cx.problems
    before = len(problems)
    made = [walk.region(*part) for part in parts]
    if len(problems) > before:
        raise Unsupported("")
    return made


def _check_tensors(operands: Sequence[Any], what: str) -> None:
    if any(not isinstance(x, Value | Complex) for x in operands):
        raise Unsupported(f"a {what} that carries numbers: carry tensors")


def branch(walk: Regions, node: Node, args: list[Any]) -> list[Any]:
    condition, operands = args[0], args[3]
    parts = [(node.args[k], operands, w, False) for k, w in ((1, "then"), (2, "else"))]
    then, other = _made(walk, parts)
    cx = walk.cx
    if isinstance(condition, Undecided):
        raise Unsupported("a torch.cond on sizes: use a Python if")
    if then.is_complex != other.is_complex:
        raise Unsupported("branches of which one gives complex numbers")
    tensors, regions = parts_of(operands), [then.graph, other.graph]
    if then.seeded or other.seeded:
        tensors.append(cx.seed())
        regions = [then.with_seed(), other.with_seed()]
    condition = cx.b.reshape(cx.to_bool(cx.tensor(condition)), ())
    return then.joined(cx.b.emit_multi("if", condition, *tensors, regions=regions))


def while_loop(walk: Regions, node: Node, args: list[Any]) -> list[Any]:
    _check_tensors(args[2], "while_loop")
    given, count, cx = [*args[2], *args[3]], len(parts_of(args[2])), walk.cx
    asked, repeated = _made(
        walk,
        [(node.args[0], given, "cond", False), (node.args[1], given, "body", True)],
    )
    test, body, tensors = asked.graph, repeated.graph, parts_of(given)
    results = body.results
    seeds: tuple[Value, ...] = ()
    if asked.seeded or repeated.seeded:
        if not repeated.seeded:
            raise Unsupported("random numbers in the condition of a loop alone")
        *own, seed = results
        test, results = asked.with_seed(), tuple(own)
        tensors, seeds = [*tensors, next_seed(cx, cx.seed(), _FIRST)], (seed,)
    # Values the loop only reads are carried unchanged.
    kept = body.params[count : len(parts_of(given))]
    body = body.replace(results=(*results, *kept, *seeds))
    every = cx.b.emit_multi("while", *tensors, regions=(test, body))
    return repeated.joined(every[:count])


def scan(walk: Regions, node: Node, args: list[Any]) -> list[Any]:
    _check_tensors([*args[1], *args[2]], "scan")
    return _scanned(walk, node.args[0], args[1], args[2], args[3])


def map_(walk: Regions, node: Node, args: list[Any]) -> list[Any]:
    _check_tensors(args[1], "map")
    return _scanned(walk, node.args[0], [], args[1], args[2])


def _scanned(
    walk: Regions,
    reference: Any,
    carried: list[Any],
    rows: list[Any],
    others: Sequence[Any],
) -> list[Any]:
    """A function of (carried.., row.., other..) over rows.

    It gives the carried values after it, then what is stacked.
    """
    cx = walk.cx
    given = [*carried, *map(_row, rows), *others]
    (region,) = _made(walk, [(reference, given, "body", True)])
    body, results = region.graph, region.graph.results
    start, fixed, stacks = parts_of(carried), parts_of(others), parts_of(rows)
    count, last = len(start), len(start) + len(stacks)
    kept = body.params[last : last + len(fixed)]
    seeds: tuple[Value, ...] = ()
    if region.seeded:
        *own_results, seed = results
        results, seeds = tuple(own_results), (seed,)
        start.append(next_seed(cx, cx.seed(), _FIRST))
    # In the IR's order: carried, read only, rows.
    own = body.params[last + len(fixed) :]
    body = body.replace(
        params=(*body.params[:count], *own, *kept, *body.params[count:last]),
        results=(*results[:count], *seeds, *kept, *results[count:]),
    )
    made = cx.b.emit_multi(
        "scan",
        *start,
        *fixed,
        *stacks,
        regions=(body,),
        rounds=stacks[0].shape[0],
        scanned=len(stacks),
    )
    return region.joined([*made[:count], *made[len(start) + len(fixed) :]])


def _row(x: Any) -> Any:
    """Stands for a row of a tensor where the param of a region is made."""
    if isinstance(x, Complex):
        return Complex(_row(x.re), _row(x.im))
    return Value("row", x.type.with_shape(x.shape[1:]))


FLOWS: dict[str, Flow] = {
    "cond": branch,
    "while_loop": while_loop,
    "scan": scan,
    "map_impl": map_,
}
