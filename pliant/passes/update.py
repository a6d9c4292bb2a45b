"""New parameters are written over the old ones.

%p_new = alloc ..                               call_loop(%p, %g, %p)
call_loop(%p, %g, %p_new)              ->
return %loss, %p_new                            return %loss
"""

from __future__ import annotations

from collections.abc import Sequence

from pliant.ir.graph import Graph, Module, Op, Value
from pliant.lower.to_loops import Lowering, lower_group
from pliant.passes.context import Context


def update(
    module: Module, updates: Sequence[str], cx: Context, regions: list[Graph]
) -> Module:
    """The lowered module with the results behind the first stored in `updates`.

    `regions` says what each call computes, and is extended for calls that are added.
    """
    graph = module.main
    params = {v.name: v for v in graph.params}
    loss, *news = graph.results
    loops = dict(module.loops)
    ops = list(graph.ops)
    for new, name in zip(news, updates, strict=True):
        old = params[name]
        source, copied = Value("source", new.type), Value("copied", old.type)
        op = Op("reshape", (source,), (("shape", old.shape),), (copied,))
        region = Graph("copy", (source,), (op,), (copied,))
        lowering = Lowering(
            cx.facts(graph), lambda message, loc: 0, cx.target.lanes, False
        )
        step = lower_group(region, f"store_{name}", lowering)
        loops[step.func.name] = step.func
        given = {source: new, copied: old}
        arguments = tuple(given[a] for a in step.arguments if isinstance(a, Value))
        attrs = (("callee", step.func.name), ("sizes", ()))
        ops.append(Op("call_loop", arguments, attrs, (), (), ""))
        regions.append(region)
    main = graph.replace(ops=tuple(ops), results=(loss,))
    return Module(
        {**module.graphs, "main": main}, loops, module.libraries, module.constants
    )
