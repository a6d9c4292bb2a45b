"""The passes that only a training step has.

smooth      composite ops in the form that has torch's derivative
find        attention that a model writes as products, if its kernels have a gradient
gradient    backward from the loss, then the optimizer's update
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.context import Context, Training
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Op, Value
from pliant.passes.attention import gather_attention
from pliant.passes.gradient import depends, gradient, passed_on, smooth_for


def _training(cx: Context) -> Training:
    assert cx.training is not None, "a pass of training steps"
    return cx.training


def smooth(graph: Graph, cx: Context) -> Graph:
    return smooth_for(graph, _training(cx).trained(graph), cx)


def differentiate(graph: Graph, cx: Context) -> Graph:
    """Adds the gradients to the graph, and then what `extend` computes from them."""
    training = _training(cx)
    params = {v.name: v for v in graph.params}
    graph = gradient(graph, [params[name] for name in training.wrt], cx)
    own = 1 + training.changed
    builder = Builder.within(graph)
    results = training.extend(builder, params, graph.results[own:])
    kept = graph.results[: own if training.updates else 1]
    return graph.replace(ops=(*graph.ops, *builder.ops), results=(*kept, *results))


def find(graph: Graph, cx: Context) -> Graph:
    """Attention as one op, wherever the gradient of that op is known.

    The gradient goes only to queries, keys and values: other values that the scores
    read must not depend on a parameter. It is that of rows from 0 on, so a mask
    `key <= query + past` stays in the region.
    """
    active = depends(graph, _training(cx).trained(graph))

    def has_gradient(made: Sequence[Op]) -> bool:
        for op in made:
            if op.name == "attention":
                if any(v in active for v in op.operands[3:]):
                    return False
                if op.regions and not _only_shifts(op.regions[0]):
                    return False
            active.update(passed_on(op, active))
        return True

    return gather_attention(graph, cx, has_gradient, shifted=False, guards=False)


def _only_shifts(region: Graph) -> bool:
    """Whether the region only adds to scores or masks them.

    The gradient of attention does not go through its region: a slope other than 1 needs
    softmax decomposed, and so does a score that is replaced by a finite number.
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
