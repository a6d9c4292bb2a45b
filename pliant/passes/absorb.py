"""Scales and shifts by constants disappear into the weights beside them.

    %y = conv(%x, %w)                              %v = mul(%w, broadcast(%s))
    %z = mul(%y, broadcast(%s))            ->      %y = conv(%x, %v)
    %o = add(%z, broadcast(%t))                    %o = add(%y, broadcast(%t))

Whatever follows a contraction as y*s + t, with constants s and t per output channel, is
a product with other weights and one shift: batch norm in evaluation, a layer scale, a
bias. `fold` computes the new weights. A scale before a convolution likewise goes into
its input channels. So does a shift, but only without padding, since the input would
otherwise have to be padded with -t/s.

Only weights that nothing else reads are changed, and nothing is absorbed across a
rounding to a narrower type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.context import Context
from pliant.ir.access import is_one
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Names, Op, Value, names_of, substitute
from pliant.passes.fold import of_weights
from pliant.sym import Expr

ROOTS = frozenset({"conv", "conv_transpose", "matmul"})


@dataclass(frozen=True, slots=True)
class _Link:
    """One of y*v, y + v, y - v, by a value that is constant along all other axes."""

    op: Op
    operand: Value  # y
    vector: Value  # what is broadcast, or a scalar


@dataclass(slots=True)
class _Chain:
    """A contraction and the links before and after it, in order of execution."""

    root: Op
    before: list[_Link] = field(default_factory=list)
    after: list[_Link] = field(default_factory=list)

    @property
    def last(self) -> Op:
        return self.after[-1].op if self.after else self.root

    @property
    def pays(self) -> bool:
        """Whether anything is gained; a lone bias gains nothing."""
        return any(link.op.name == "mul" for link in self.before + self.after)


class _ChainFinder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers, self.users = graph.producers(), graph.users()
        self.results = set(graph.results)
        self.known = of_weights(graph)
        self.taken: set[Op] = set()  # members of chains found so far

    def chain(self, root: Op) -> _Chain | None:
        if not self._owns_weights(root):
            return None
        chain = _Chain(root)
        value, axis = root.result, _channel_axis(root)
        while (link := self._link_after(value, axis)) is not None:
            chain.after.append(link)
            value = link.op.result
        if root.name == "conv" and root.int_attr("groups") == 1:
            self._extend_before(chain)
        if not chain.pays:
            return None
        links = (link.op for link in (*chain.before, *chain.after))
        self.taken.update((root, *links))
        return chain

    def _owns_weights(self, root: Op) -> bool:
        """Whether the weights are constants that this contraction alone reads."""
        weight = root.operands[1]
        if weight not in self.known or not weight.dtype.is_float:
            return False
        if root.name == "matmul" and weight.type.rank != 2:
            return False
        if root.name == "conv_transpose" and root.int_attr("groups") != 1:
            return False
        while True:
            if len(self.users[weight]) != 1 or weight in self.results:
                return False
            producer = self.producers[weight]
            if not producer.operands:
                return True
            weight = producer.operands[0]

    def _link_after(self, value: Value, axis: int) -> _Link | None:
        users = self.users.get(value, [])
        if len(users) != 1 or value in self.results:
            return None
        return self._link(users[0], value, axis)

    def _extend_before(self, chain: _Chain) -> None:
        value, padded = chain.root.operands[0], _is_padded(chain.root)
        while len(self.users[value]) == 1 and value not in self.results:
            producer = self.producers.get(value)
            if producer is None or not producer.operands or producer in self.taken:
                return
            link = self._link(producer, producer.operands[0], 1)
            link = link or self._link(producer, producer.operands[-1], 1)
            if link is None or (padded and link.op.name != "mul"):
                return
            chain.before.insert(0, link)
            value = link.operand

    def _link(self, op: Op, y: Value, axis: int) -> _Link | None:
        if op.name not in ("mul", "add", "sub") or len(op.operands) != 2:
            return None
        first, second = op.operands
        if first is second or (op.name == "sub" and y is second):
            return None
        other = second if y is first else first
        vector = self._vector(other, axis)
        return None if vector is None else _Link(op, y, vector)

    def _vector(self, value: Value, axis: int) -> Value | None:
        """The constant behind a value that differs along one axis only."""
        op = self.producers.get(value)
        if op is None:
            return None
        if op.name == "full":
            return value
        if op.name != "broadcast" or op.operands[0] not in self.known:
            return None
        (source,) = op.operands
        wide = [
            to
            for dim, to in zip(source.shape, op.ints_attr("axes"), strict=True)
            if not is_one(dim)
        ]
        return source if wide in ([], [axis]) else None


def _channel_axis(root: Op) -> int:
    return root.result.type.rank - 1 if root.name == "matmul" else 1


def _is_padded(root: Op) -> bool:
    return any(root.ints_attr("low")) or any(root.ints_attr("high"))


class _ChainRewriter:
    def __init__(self, builder: Builder, finder: _ChainFinder) -> None:
        self.builder, self.finder = builder, finder

    def rewrite(self, chain: _Chain) -> Value:
        """The chain's last value, computed with other weights and one shift."""
        b, root = self.builder, chain.root
        weight = root.operands[1]
        shift: Value | None = None
        if chain.before:
            scale, offset = self._combined(chain.before, weight.shape[1])
            if offset is not None:
                moved = b.emit("mul", weight, b.broadcast(offset, weight.shape, (1,)))
                axes = tuple(range(1, weight.type.rank))
                shift = b.emit("reduce", moved, op="sum", axes=axes, keepdims=False)
            if scale is not None:
                weight = b.emit("mul", weight, b.broadcast(scale, weight.shape, (1,)))
        axis = _channel_axis(root)
        scale, offset = self._combined(chain.after, root.result.shape[axis], shift)
        if scale is not None:
            along = 0 if root.name == "conv" else 1
            weight = b.emit("mul", weight, b.broadcast(scale, weight.shape, (along,)))
        source = chain.before[0].operand if chain.before else root.operands[0]
        attrs: dict[str, Any] = dict(root.attrs)
        out = b.emit(root.name, source, weight, loc=root.loc, **attrs)
        if offset is None:
            return out
        return b.emit("add", out, b.broadcast(offset, out.shape, (axis,)))

    def _combined(
        self, links: Sequence[_Link], channels: Expr, shift: Value | None = None
    ) -> tuple[Value | None, Value | None]:
        """The scale and the shift of all links combined; None where there is none."""
        b = self.builder
        scale: Value | None = None
        for link in links:
            vector = self._as_vector(link, channels)
            if link.op.name == "mul":
                scale = vector if scale is None else b.emit("mul", scale, vector)
                shift = None if shift is None else b.emit("mul", shift, vector)
            else:
                shift = vector if shift is None else b.emit("add", shift, vector)
        return scale, shift

    def _as_vector(self, link: _Link, channels: Expr) -> Value:
        """The factor or summand, a scalar or (1, C, 1, ..), as (C,)."""
        b, value, size = self.builder, link.vector, (channels,)
        negative = link.op.name == "sub"
        op = self.finder.producers[value]
        if op.name == "full":
            number = op.float_attr("value") * (-1 if negative else 1)
            return b.emit("full", value=number, dtype=value.dtype, shape=size)
        if all(is_one(d) for d in value.shape):
            value = b.broadcast(b.emit("reshape", value, shape=()), size, ())
        elif value.shape != size:
            value = b.emit("reshape", value, shape=size)
        return b.emit("neg", value) if negative else value


def absorb(graph: Graph, cx: Context) -> Graph:
    finder = _ChainFinder(graph)
    roots = (op for op in graph.ops if op.name in ROOTS)
    found = [chain for root in roots if (chain := finder.chain(root)) is not None]
    chains = {chain.last: chain for chain in found}
    if not chains:
        return graph
    builder = Builder(cx.facts(graph), Names(names_of(graph)))
    rewriter = _ChainRewriter(builder, finder)
    replaced: dict[Value, Value] = {}
    for op in graph.ops:
        if op in chains:
            with builder.at(op.loc):
                replaced[op.result] = rewriter.rewrite(_renamed(chains[op], replaced))
        elif op not in finder.taken:
            builder.append(substitute(op, replaced))
    results = tuple(replaced.get(v, v) for v in graph.results)
    return graph.replace(ops=tuple(builder.ops), results=results)


def _renamed(chain: _Chain, replaced: dict[Value, Value]) -> _Chain:
    """The chain with its values replaced by those of the new graph."""
    before = list(chain.before)
    if before:
        first = before[0]
        operand = replaced.get(first.operand, first.operand)
        before[0] = _Link(first.op, operand, first.vector)
    return _Chain(substitute(chain.root, replaced), before, chain.after)
