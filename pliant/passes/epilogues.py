"""Which elementwise ops a contraction's kernel leaves to its readers, by bytes.

    %m = matmul(..)                        %m = matmul(..)
    %q = mul(%m, %m)                       ... %m
    %s = reduce(%q)        in one kernel
    ... %m                                 %s = fusion(%m) { mul, reduce }

An elementwise op after a matmul costs nothing in the matmul's kernel. But its result is
written to memory if it is read by an op that cannot be in that kernel: a reduction, an
op after one, the epilogue of another contraction. Such a reader can recompute the op
from what is in memory anyway. So a kernel takes the set of ops for which its results
have the fewest bytes: less to write, and less live memory. Without a proof that bytes
are saved, an op stays with its contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from pliant.ir.access import numel
from pliant.ir.graph import Op
from pliant.ir.ops import Trait, has_trait
from pliant.sym import Expr, Facts, as_expr, le


@dataclass(frozen=True, slots=True)
class Flow:
    """The ops that kernels compute, by position; views between them are transparent."""

    ops: Sequence[Op]
    readers: Mapping[int, Sequence[int]]
    sources: Callable[[int], Sequence[int]]
    stored: Collection[int]  # results of the graph
    apart: Collection[int]
    facts: Facts

    def is_elementwise(self, k: int) -> bool:
        return has_trait(self.ops[k], Trait.ELEMENTWISE)

    def absorbs(self, reader: int, k: int) -> bool:
        """Whether an op can recompute k's result instead of loading it."""
        if (reader in self.apart) != (k in self.apart):
            return False
        return self.is_elementwise(reader) or self.ops[reader].name == "reduce"

    def size(self, positions: Collection[int]) -> Expr:
        total = as_expr(0)
        for k in positions:
            total = total + self.ops[k].result.type.bytes
        return self.facts.canonical(total)


def left_to_readers(flow: Flow, roots: Collection[int]) -> set[int]:
    """Elementwise ops that contractions' kernels could take but should not."""
    owners = _owners(flow, roots)
    found: set[int] = set()
    for root in sorted(roots):
        found |= _left(flow, root, owners)
    return found


def _owners(flow: Flow, roots: Collection[int]) -> dict[int, int]:
    """The contraction that owns each elementwise op: the last one it depends on.

    Only elementwise ops lie between the two.
    """
    owners: dict[int, int] = {root: root for root in roots}
    for k in sorted(flow.readers):
        if k in owners or not flow.is_elementwise(k):
            continue
        behind = [owners[s] for s in flow.sources(k) if s in owners]
        if behind:
            owners[k] = max(behind)
    return owners


def _followers(flow: Flow, root: int, owners: Mapping[int, int]) -> set[int]:
    """The ops that the root's kernel could take."""
    size = numel(flow.ops[root].result.shape, flow.facts)
    taken = {root}
    beyond: set[int] = set()  # after the root, and not in its kernel
    waiting = sorted(flow.readers[root])
    seen = set(waiting)
    candidates = sum(owners.get(k) == root for k in waiting)
    while candidates:
        k = heappop(waiting)
        candidates -= owners.get(k) == root
        fits = (
            owners.get(k) == root
            and (k in flow.apart) == (root in flow.apart)
            and numel(flow.ops[k].result.shape, flow.facts) == size
            and not any(s in beyond for s in flow.sources(k))
        )
        (taken if fits else beyond).add(k)
        for reader in flow.readers[k]:
            if reader not in seen:
                seen.add(reader)
                heappush(waiting, reader)
                candidates += owners.get(reader) == root
    return taken


def _outputs(flow: Flow, taken: Collection[int]) -> set[int]:
    return {
        k
        for k in taken
        if k in flow.stored or any(r not in taken for r in flow.readers[k])
    }


def _left(flow: Flow, root: int, owners: Mapping[int, int]) -> set[int]:
    """The followers to leave out, last to first, if that saves bytes."""
    taken = _followers(flow, root, owners)
    whole = _outputs(flow, taken)
    if len(whole) < 2:
        return set()
    kept = set(taken)
    for k in sorted(taken - {root}, reverse=True):
        readers = flow.readers[k]
        if k in flow.stored or any(r in kept for r in readers):
            continue
        if all(flow.absorbs(r, k) for r in readers):
            after = kept - {k}
            if _at_most(flow, _outputs(flow, after), _outputs(flow, kept)):
                kept = after
    for k in sorted(taken - kept):  # keep all that cost nothing
        inside = [s for s in flow.sources(k) if s in taken]
        if all(s in kept for s in inside):
            after = kept | {k}
            if _at_most(flow, _outputs(flow, after), _outputs(flow, kept)):
                kept = after
    fewer = _outputs(flow, kept)
    if len(fewer) < len(whole) and _at_most(flow, fewer, whole):
        return taken - kept
    return set()


def _at_most(flow: Flow, a: Collection[int], b: Collection[int]) -> bool:
    one, other = flow.size(set(a) - set(b)), flow.size(set(b) - set(a))
    return one == other or flow.facts.prove(le(one, other)) is True
