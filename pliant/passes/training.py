"""A training step as passes: what is differentiated, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Value
from pliant.ir.spec import Stage
from pliant.passes.absorb import absorb
from pliant.passes.attention import attention
from pliant.passes.canonicalize import canonicalize
from pliant.passes.contractions import contractions
from pliant.passes.decompose import decompose
from pliant.passes.gradient import depends, gradient, smooth
from pliant.passes.joins import joins
from pliant.passes.merge import merge

# (builder, params by name, gradients) -> results after the loss
Extend = Callable[[Builder, dict[str, Value], Sequence[Value]], Sequence[Value]]


@dataclass(frozen=True, slots=True)
class Training:
    """The parameters of `main` to differentiate by, and what becomes of gradients.

    `updates` names, for each result behind the loss, the parameter whose new value it
    is; without any, the results are the caller's. `main` itself gives the first
    `changed` of them.
    """

    wrt: tuple[str, ...]
    extend: Extend
    updates: tuple[str, ...] = ()
    changed: int = 0


def differentiate(graph: Graph, training: Training, cx: Context) -> Graph:
    """Gradients behind the loss, and then what `extend` makes of them."""
    params = {v.name: v for v in graph.params}
    graph = gradient(graph, [params[name] for name in training.wrt], cx)
    own = 1 + training.changed
    builder = Builder.within(graph)
    results = training.extend(builder, params, graph.results[own:])
    kept = graph.results[: own if training.updates else 1]
    return graph.replace(ops=(*graph.ops, *builder.ops), results=(*kept, *results))


GraphPass = Callable[[Graph, Context], Graph]


def _smooth(training: Training) -> GraphPass:
    def run(graph: Graph, cx: Context) -> Graph:
        names = set(training.wrt)
        return smooth(graph, [v for v in graph.params if v.name in names], cx)

    return run


def _is_straight(region: Graph) -> bool:
    """Whether scores come out as they go in, but for what is added or hidden.

    The gradient of attention does not go through its region: a slope other than 1
    needs softmax spelled out, and so does a score that a finite number replaces.
    """
    path, lowest = {region.params[0]}, set[Value]()
    for op in region.ops:
        read = [v in path for v in op.operands]
        match op.name, read:
            case "full", _:
                if op.attr("value") == float("-inf"):
                    lowest.add(op.result)
            case "broadcast" | "reshape", [False]:
                lowest.update({op.result} if op.operands[0] in lowest else ())
            case ("add", [True, False] | [False, True]) | ("sub", [True, False]):
                path.add(op.result)
            case "cast" | "reshape", [True]:
                path.add(op.result)
            case "select", [False, x, y] if x or y:
                hides = [v in lowest for v in op.operands[1:]]
                if not all(a or b for a, b in zip((x, y), hides, strict=True)):
                    return False
                path.add(op.result)
            case _ if any(read):
                return False
            case _:
                pass
    return region.results[0] in path


def _find(training: Training) -> GraphPass:
    """Attention that a model spells out, unless its kernels give no gradient of it."""

    def run(graph: Graph, cx: Context) -> Graph:
        found = attention(graph, cx)
        names = set(training.wrt)
        active = depends(found, [v for v in found.params if v.name in names])
        for op in found.ops:
            if op.name != "attention":
                continue
            if any(v in active for v in op.operands[3:]):
                return graph
            if op.regions and not _is_straight(op.regions[0]):
                return graph
        return found

    return run


def training_passes(training: Training) -> tuple[tuple[str, GraphPass, Stage], ...]:
    """The passes over `main`, in order, as the pipeline has them."""
    return (
        ("joins", joins, Stage.IMPORTED),
        ("canonicalize", canonicalize, Stage.IMPORTED),
        ("smooth", _smooth(training), Stage.IMPORTED),
        ("decompose", decompose, Stage.DECOMPOSED),
        ("plain", canonicalize, Stage.DECOMPOSED),
        ("find", _find(training), Stage.DECOMPOSED),
        ("gradient", lambda g, cx: differentiate(g, training, cx), Stage.DECOMPOSED),
        ("clean", canonicalize, Stage.DECOMPOSED),
        ("attention", attention, Stage.DECOMPOSED),
        ("contractions", contractions, Stage.DECOMPOSED),
        ("simplify", canonicalize, Stage.DECOMPOSED),
        ("absorb", absorb, Stage.DECOMPOSED),
        ("merge", merge, Stage.DECOMPOSED),
    )
