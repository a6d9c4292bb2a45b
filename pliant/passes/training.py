"""A training step as passes: what is differentiated, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Value
from pliant.ir.spec import Stage
from pliant.passes.absorb import absorb
from pliant.passes.canonicalize import canonicalize
from pliant.passes.context import Context
from pliant.passes.contractions import contractions
from pliant.passes.decompose import decompose
from pliant.passes.gradient import gradient, smooth
from pliant.passes.merge import merge

# (builder, params by name, gradients) -> results after the loss
Extend = Callable[[Builder, dict[str, Value], Sequence[Value]], Sequence[Value]]


@dataclass(frozen=True, slots=True)
class Training:
    """The parameters of `main` to differentiate by, and what becomes of gradients.

    `updates` names, for each result behind the loss, the parameter whose new value it
    is; without any, the results are the caller's.
    """

    wrt: tuple[str, ...]
    extend: Extend
    updates: tuple[str, ...] = ()


def differentiate(graph: Graph, training: Training, cx: Context) -> Graph:
    """Gradients behind the loss, and then what `extend` makes of them."""
    params = {v.name: v for v in graph.params}
    graph = gradient(graph, [params[name] for name in training.wrt], cx)
    loss, *grads = graph.results
    builder = Builder.within(graph)
    results = training.extend(builder, params, grads)
    return graph.replace(ops=(*graph.ops, *builder.ops), results=(loss, *results))


GraphPass = Callable[[Graph, Context], Graph]


def _smooth(training: Training) -> GraphPass:
    def run(graph: Graph, cx: Context) -> Graph:
        names = set(training.wrt)
        return smooth(graph, [v for v in graph.params if v.name in names], cx)

    return run


def _spelled_out(graph: Graph, cx: Context) -> Graph:
    options = replace(cx.options, attention=False)
    return decompose(graph, replace(cx, options=options))


def training_passes(training: Training) -> tuple[tuple[str, GraphPass, Stage], ...]:
    """The passes over `main`, in order, as the pipeline has them."""
    return (
        ("canonicalize", canonicalize, Stage.IMPORTED),
        ("smooth", _smooth(training), Stage.IMPORTED),
        ("decompose", decompose, Stage.DECOMPOSED),
        ("plain", canonicalize, Stage.DECOMPOSED),
        ("gradient", lambda g, cx: differentiate(g, training, cx), Stage.DECOMPOSED),
        ("spell", _spelled_out, Stage.DECOMPOSED),
        ("clean", canonicalize, Stage.DECOMPOSED),
        ("contractions", contractions, Stage.DECOMPOSED),
        ("simplify", canonicalize, Stage.DECOMPOSED),
        ("absorb", absorb, Stage.DECOMPOSED),
        ("merge", merge, Stage.DECOMPOSED),
    )
