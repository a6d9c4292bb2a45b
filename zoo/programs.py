"""Whole programs: models that loop, branch and choose by what they compute.

    program = PROGRAMS["beam search"]
    module, inputs = program.make(), program.inputs(7)

Each has one size that varies. The number of rounds, the branch that is taken or the
size of the result is the data's. They use torch's own loops, so that they can be
exported. Eager runs these through a tracer of its own: with `python_loops()` they are
plain loops of Python instead, which is what most models have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import _higher_order_ops as loops

cond: Any = loops.cond
scan: Any = loops.scan
while_loop: Any = loops.while_loop

END = 1  # the token that ends a sequence


class Decoder(nn.Module):
    """A recurrent language model of one layer."""

    def __init__(self, vocabulary: int = 40, hidden: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(self.words(token), state)
        return self.head(state), state


class Greedy(nn.Module):
    """The likeliest token at each step, until every sequence has ended."""

    def __init__(self, length: int = 64) -> None:
        super().__init__()
        self.decoder, self.length = Decoder(), length

    def forward(self, state: Tensor, limit: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(self.length)

        def going(i: Tensor, token: Tensor, h: Tensor, out: Tensor) -> Tensor:
            return (i < limit) & (token != END).any()

        def step(i: Tensor, token: Tensor, h: Tensor, out: Tensor) -> tuple[Any, ...]:
            logits, h = self.decoder(token, h)
            token = torch.where(token == END, END, logits.argmax(-1))
            return i + 1, token, h, torch.where(places == i, token[:, None], out)

        n = state.shape[0]
        start = torch.zeros((), dtype=torch.int64)
        token = torch.zeros(n, dtype=torch.int64)
        out = torch.full((n, self.length), END)
        made: tuple[Tensor, ...] = while_loop(going, step, (start, token, state, out))
        return made


class BeamSearch(nn.Module):
    """The `beams` best sequences of each row; a beam that has ended stays as it is."""

    def __init__(self, beams: int = 4, length: int = 24) -> None:
        super().__init__()
        self.decoder, self.beams, self.length = Decoder(), beams, length

    def forward(self, state: Tensor, limit: Tensor) -> tuple[Tensor, ...]:
        n, k, hidden = state.shape[0], self.beams, state.shape[1]
        places = torch.arange(self.length)

        def going(i: Tensor, token: Tensor, *others: Tensor) -> Tensor:
            return (i < limit) & (token != END).any()

        def step(
            i: Tensor, token: Tensor, score: Tensor, h: Tensor, out: Tensor
        ) -> tuple[Any, ...]:
            logits, h = self.decoder(token.reshape(-1), h.reshape(-1, hidden))
            words = logits.shape[-1]
            chance = logits.log_softmax(-1).reshape(-1, k, words)
            ended = (token == END)[..., None]
            stay = torch.where(torch.arange(words) == END, 0.0, float("-inf"))
            total = score[..., None] + torch.where(ended, stay, chance)
            score, best = total.reshape(-1, k * words).topk(k)
            origin, token = best // words, best % words
            h = h.reshape(-1, k, hidden)
            h = h.gather(1, origin[..., None].expand(-1, k, hidden))
            out = out.gather(1, origin[..., None].expand(-1, k, self.length))
            out = torch.where(places == i, token[..., None], out)
            return i + 1, token, score, h, out

        score = torch.where(torch.arange(k) == 0, 0.0, float("-inf"))
        carried = (
            torch.zeros((), dtype=torch.int64),
            torch.zeros(n, k, dtype=torch.int64),
            score.expand(n, k).clone(),
            state[:, None].expand(n, k, hidden).clone(),
            torch.full((n, k, self.length), END),
        )
        made: tuple[Tensor, ...] = while_loop(going, step, carried)
        return made


def overlaps(boxes: Tensor) -> Tensor:
    """Intersection over union of all pairs of boxes (x0, y0, x1, y1)."""
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    return both / (area[:, None] + area[None] - both)


class Suppress(nn.Module):
    """Non-maximum suppression: the boxes that are kept, best first, by their number."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        order = scores.argsort(descending=True, stable=True)
        near = overlaps(boxes[order]) > self.threshold
        place = torch.arange(order.shape[0])

        def step(alive: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            near, at = row
            kept = alive.gather(0, at[None])
            return alive & ~(near & kept & (place > at)), kept.clone()

        alive = torch.ones_like(order, dtype=torch.bool)
        alive, _ = scan(step, alive, (near, place))
        kept = order[alive]
        return kept, boxes[kept]


class SuppressBest(nn.Module):
    """The same by choosing the best box that is left, until `limit` are kept."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, boxes: Tensor, scores: Tensor, limit: Tensor) -> Tensor:
        place = torch.arange(scores.shape[0])

        def going(i: Tensor, left: Tensor, kept: Tensor) -> Tensor:
            return (i < limit) & (left > float("-inf")).any()

        def step(i: Tensor, left: Tensor, kept: Tensor) -> tuple[Any, ...]:
            best = left.topk(1).indices
            box = boxes[best]
            near = overlaps(torch.cat([box, boxes]))[0, 1:] > self.threshold
            left = torch.where(near | (place == best), float("-inf"), left)
            return i + 1, left, kept | (place == best)

        start = torch.zeros((), dtype=torch.int64)
        kept = torch.zeros_like(place, dtype=torch.bool)
        _, _, found = while_loop(going, step, (start, scores, kept))
        return torch.nonzero(found).squeeze(1)


class TreeLSTM(nn.Module):
    """A binary tree-LSTM: levels from the leaves up, the nodes of one side by side.

    `children` has two numbers for each node, and `levels` the nodes of each level; the
    number behind the last node stands for none.
    """

    def __init__(self, size: int = 12, hidden: int = 16) -> None:
        super().__init__()
        self.hidden = hidden
        self.inner = nn.Linear(size, 5 * hidden)
        self.outer = nn.Linear(2 * hidden, 5 * hidden, bias=False)

    def forward(self, x: Tensor, children: Tensor, levels: Tensor) -> Tensor:
        given = nn.functional.pad(self.inner(x), (0, 0, 0, 1))
        pairs = nn.functional.pad(children, (0, 0, 0, 1), value=0)

        def level(
            carry: tuple[Tensor, Tensor], nodes: Tensor
        ) -> tuple[tuple[Tensor, Tensor], Tensor]:
            h, c = carry
            left, right = pairs[nodes].unbind(1)
            gates = given[nodes] + self.outer(torch.cat([h[left], h[right]], 1))
            i, f, g, o, u = gates.chunk(5, 1)
            new = i.sigmoid() * u.tanh()
            new = new + f.sigmoid() * c[left] + g.sigmoid() * c[right]
            h = h.index_copy(0, nodes, o.sigmoid() * new.tanh())
            c = c.index_copy(0, nodes, new)
            # The row that stands for no child stays zero.
            real = (torch.arange(h.shape[0]) < h.shape[0] - 1)[:, None]
            return (h * real, c * real), new.sum()

        state = x.new_zeros(x.shape[0] + 1, self.hidden)
        (h, _), _ = scan(level, (state, state.clone()), levels)
        return torch.narrow(h, 0, 0, x.shape[0])


class EarlyExit(nn.Module):
    """Layers, and after each a head; the first that is sure enough has the answer."""

    def __init__(self, size: int = 24, depth: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(size, classes) for _ in range(depth))

    def forward(self, x: Tensor, sure: Tensor) -> Tensor:
        return self.behind(x, sure, 0)

    def behind(self, x: Tensor, sure: Tensor, number: int) -> Tensor:
        x = x + self.layers[number](x).relu()
        answer = torch.softmax(self.heads[number](x), -1)
        if number + 1 == len(self.layers):
            return answer
        given = (x, answer, sure)
        chosen: Tensor = cond(
            (answer.amax(-1) > sure).all(),
            lambda x, answer, sure: answer.clone(),
            lambda x, answer, sure: self.behind(x, sure, number + 1),
            given,
        )
        return chosen


# ---- loops of Python


def _while(test: Any, body: Any, carried: tuple[Any, ...]) -> tuple[Any, ...]:
    while test(*carried):
        carried = body(*carried)
    return carried


def _scan(body: Any, carry: Any, rows: Any) -> tuple[Any, Any]:
    given = rows if isinstance(rows, tuple) else (rows,)
    made: list[Tensor] = []
    for row in zip(*given, strict=True):
        carry, out = body(carry, row if isinstance(rows, tuple) else row[0])
        made.append(out)
    return carry, torch.stack(made) if made else None


def _cond(test: Tensor, then: Any, otherwise: Any, given: tuple[Any, ...]) -> Any:
    return then(*given) if test else otherwise(*given)


@contextlib.contextmanager
def python_loops() -> Iterator[None]:
    """The programs of this file with Python's own loops and branches."""
    with mock.patch.multiple(__name__, while_loop=_while, scan=_scan, cond=_cond):
        yield


# ---- inputs


def random_boxes(n: int) -> Tensor:
    corner, size = torch.rand(n, 2), torch.rand(n, 2) * 0.6 + 0.05
    return torch.cat([corner, corner + size], 1)


def random_tree(n: int) -> tuple[Tensor, Tensor]:
    """(children, levels) of a forest whose nodes have 0 or 2 children."""
    children = torch.full((n, 2), n)
    height, free = [0] * n, list(range(n))
    for node in range(n):
        # Nodes behind the first half join two that have no parent yet.
        ready = [k for k in free if k < node]
        if node >= (n + 1) // 2 and len(ready) >= 2:
            left, right = ready[0], ready[1]
            children[node] = torch.tensor([left, right])
            free = [k for k in free if k not in (left, right)]
            height[node] = 1 + max(height[left], height[right])
    depth = 1 + max(height, default=-1)
    width = max((height.count(k) for k in range(depth)), default=0)
    levels = torch.full((depth, width), n)
    for k in range(depth):
        nodes = [node for node in range(n) if height[node] == k]
        levels[k, : len(nodes)] = torch.tensor(nodes)
    return children, levels


def _tree_inputs(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(n, 12), *random_tree(n))


@dataclass(frozen=True, slots=True)
class Program:
    """A module, its inputs at a size, and which of their dims vary."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    dynamic: tuple[dict[int, str], ...]
    smallest: int = 0  # the least size that has a meaning


N = {0: "n"}

PROGRAMS: dict[str, Program] = {
    "greedy": Program(
        Greedy, lambda n: (torch.randn(n, 32), torch.tensor(40)), (N, {})
    ),
    "beam search": Program(
        BeamSearch,
        lambda n: (torch.randn(n, 32), torch.tensor(20)),
        (N, {}),
    ),
    "nms": Program(Suppress, lambda n: (random_boxes(n), torch.rand(n)), (N, N)),
    "nms, best first": Program(
        SuppressBest,
        lambda n: (random_boxes(n), torch.rand(n), torch.tensor(20)),
        (N, N, {}),
        smallest=1,
    ),
    "tree-lstm": Program(
        TreeLSTM,
        _tree_inputs,
        (N, N, {0: "levels", 1: "width"}),
    ),
    "early exit": Program(
        EarlyExit, lambda n: (torch.randn(n, 24), torch.tensor(0.4)), (N, {})
    ),
}
