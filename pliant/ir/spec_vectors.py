"""The legal `vectors` of a loop."""

from __future__ import annotations

from pliant.ir.loop_known import KnownSizes
from pliant.ir.loop_lanes import (
    copy_in,
    is_multiple,
    outer_accumulators,
    runs_by_lanes,
)
from pliant.ir.loops import For, Kind, Rest, Vectors


def vectors_problem(loop: For, known: KnownSizes, in_vector: bool) -> str | None:
    """What is wrong with the `vectors` of a loop; `in_vector`: inside a vector loop."""
    vectors = loop.vectors
    if vectors is None:
        return "there are no lanes to exchange" if loop.kind is Kind.EXCHANGE else None
    if loop.kind not in (Kind.VECTOR, Kind.EXCHANGE):
        return f"a {loop.kind.value} loop has no lanes"
    if vectors.lanes < 2 or vectors.lanes & (vectors.lanes - 1):
        return f"{vectors.lanes} lanes: not a power of two above 1"
    if in_vector:
        return f"the loop over {loop.var} is inside another that runs by lanes"
    if loop.kind is Kind.EXCHANGE:
        return _exchange_problem(loop, vectors)
    if not runs_by_lanes(loop):
        return f"iterations of {loop.var} cannot run side by side"
    return _turn_problem(loop, vectors) or _rest_problem(loop, vectors, known)


def _exchange_problem(loop: For, vectors: Vectors) -> str | None:
    copy = copy_in(loop)
    if copy is None or copy.across.kind is not Kind.VECTOR:
        return "an exchange is of a vector loop that copies elements"
    across, steps = copy.across, (loop.step, copy.across.step)
    static = across.begin.is_const and across.end.is_const
    if steps != (1, 1) or not static:
        return f"the loop over {across.var} has no constant bounds, or steps"
    if (across.end - across.begin).value % vectors.lanes:
        return f"the loop over {across.var} is not in whole squares"
    if copy.store.buffer.name == copy.load.buffer.name:
        return "an exchange is from one buffer to another"
    return None


def _turn_problem(loop: For, vectors: Vectors) -> str | None:
    if vectors.copies < 1 or vectors.jam < 1:
        return "a turn has at least one copy of one vector"
    if vectors.jam > 1 and outer_accumulators(loop):
        return "vectors that are jammed would add to one accumulator"
    written = vectors.most is not None or vectors.rest is Rest.HALVED
    if written and vectors.together != vectors.lanes:
        return "what is written out has no turns"
    return None


def _rest_problem(loop: For, vectors: Vectors, known: KnownSizes) -> str | None:
    if vectors.rest is Rest.HALVED:
        if vectors.most is not None:
            return "a constant number of iterations is written out, no other"
        both = known.has(loop.begin) and known.has(loop.end)
        return None if both else f"the bounds of {loop.var} are not constant"
    if vectors.rest is Rest.WHOLE and not is_multiple(loop, vectors.together):
        return f"iterations of {loop.var} are not plainly whole turns"
    if vectors.most is None:
        return None
    if not known.has(loop.begin) or loop.step != 1 or vectors.most % vectors.lanes:
        return f"{vectors.most} iterations of {loop.var} cannot be written out"
    return None if vectors.rest is Rest.MASKED else "what is written out is masked"
