"""What a call holds at every step, against the planner's own numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pliant
from pliant.image.parts import BufferText, ResultText, StepText
from pliant.report.timeline import timeline
from pliant.runtime.description import READS, WRITES, Eviction, OrderSpec, StepSpec
from pliant.sym import as_expr

Step = tuple[StepSpec, StepText]


def step(kernel: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> Step:
    touches = [(k, READS) for k in reads] + [(k, WRITES) for k in writes]
    return StepSpec(tuple(touches)), StepText(kernel, f"net.py:{kernel[-1]}")


# a -> b -> c, then c and a -> result: `a` is kept over the whole run.
SIZES = {"a": 100, "b": 300, "c": 64}
BUFFERS = [(BufferText(name, "u8[1]"), size) for name, size in SIZES.items()]
RESULT = ResultText("y", "u8[1]", as_expr(1), pinned=3)
STEPS = [
    step("k0", (), (0,)),
    step("k1", (0,), (1,)),
    step("k2", (1,), (2,)),
    step("k3", (0, 2), (3,)),
]


def live(order: OrderSpec, evictions: tuple[Eviction, ...] = ()) -> list[int]:
    told = timeline(STEPS, BUFFERS, [(RESULT, 10)], order, evictions)
    return [moment.live_bytes for moment in told.moments]


def test_spans_are_rounded_to_lines() -> None:
    order = OrderSpec((0, 1, 2, 3))
    assert live(order) == [10 + 128, 10 + 448, 10 + 512, 10 + 192]
    told = timeline(STEPS, BUFFERS, [(RESULT, 10)], order)
    assert (told.peak_step, told.peak_bytes) == (2, 522)
    assert [(h.name, h.bytes, h.kernel, h.loc) for h in told.held] == [
        ("b", 300, "k1", "net.py:1"),
        ("a", 100, "k0", "net.py:0"),
        ("c", 64, "k2", "net.py:2"),
        ("y", 10, "k3", "net.py:3"),
    ]


def test_given_up_values_and_shared_memory() -> None:
    given_up = Eviction(buffer=0, spilled=False, after=1, before=3)
    assert live(OrderSpec((0, 1, 2, 3)), (given_up,))[2] == 10 + 384
    assert live(OrderSpec((0, 1, 2, 3), (0, 1, 1)))[2:] == [10 + 448, 10 + 448]


def test_nothing_runs() -> None:
    told = timeline([], [], [], OrderSpec(()))
    assert told.moments == told.held == () and told.peak_bytes == 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        return torch.softmax(y @ y.transpose(-1, -2), -1) @ x


@pytest.mark.parametrize("order", [True, False])
def test_the_peak_is_the_planners_bound(order: bool) -> None:
    example = (torch.randn(2, 5, 32),)
    dims = ({0: "batch", 1: "seq"},)
    m = pliant.compile(Net(), example, dims, options=pliant.Options(order=order))
    for batch, seq in ((1, 1), (0, 7), (3, 0), (5, 13), (2, 257), (1, 1009)):
        plan = m.memory_plan(batch=batch, seq=seq)
        told = m.memory_timeline(batch=batch, seq=seq)
        assert told.peak_bytes == plan.lower_bound
        assert sum(h.bytes for h in told.held) <= plan.lower_bound
        assert all(h.kernel and h.loc for h in told.held)


def test_an_order_of_some_steps() -> None:
    """What only other steps touch takes no memory."""
    assert live(OrderSpec((0, 1))) == [10 + 128, 10 + 448]
