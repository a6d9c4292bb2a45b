"""Steps follow their optimizer and module as they are at each call, or refuse.

Every test trains a twin with torch, and wants the same parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant

Make = Callable[[Any], torch.optim.Optimizer]
SHAPES = (({0: "n"},), ({0: "n"},))


def rows(n: int, seed: int = 0) -> tuple[tuple[Tensor], tuple[Tensor]]:
    generator = torch.Generator().manual_seed(100 * n + seed)
    x = torch.randn(n, 6, generator=generator)
    return (x,), (torch.randn(n, 3, generator=generator),)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    # No bias in front of the norm: it would have a gradient of rounding errors only.
    first = nn.Linear(6, 9, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))


def in_torch(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    F.mse_loss(net(*batch[0]), *batch[1]).backward()
    optimizer.step()


def step_of(net: nn.Module, optimizer: Any, **options: Any) -> pliant.TrainingStep:
    return pliant.compile_training(
        net, F.mse_loss, optimizer, rows(5), SHAPES, threads=1, **options
    )


def same(net: nn.Module, other: nn.Module) -> None:
    for name, want in other.state_dict().items():
        got = net.state_dict()[name]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=name)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


BOTH = pytest.mark.parametrize("make", [momentum, adam])


class Twins:
    """A net trained by a compiled step, and its like trained by torch."""

    def __init__(self, make: Make, net: Callable[[], nn.Module] = network) -> None:
        self.net = net()
        self.other = copy.deepcopy(self.net)
        self.mine = make(self.net.parameters())
        self.theirs = make(self.other.parameters())
        self.step = step_of(self.net, self.mine)
        self.seed = 0

    def train(self, *sizes: int) -> None:
        for n in sizes:
            self.seed += 1
            self.step(*rows(n, self.seed))
            in_torch(self.other, self.theirs, rows(n, self.seed))
        same(self.net, self.other)

    def both(self, change: Callable[[torch.optim.Optimizer], None]) -> None:
        change(self.mine)
        change(self.theirs)

    def everything(self) -> Any:
        return copy.deepcopy((self.net.state_dict(), self.mine.state_dict()))

    def refuses(self, match: str) -> None:
        """The next step says why it cannot be taken, and changes nothing."""
        before = self.everything()
        with pytest.raises(pliant.StepChangedError, match=match) as caught:
            self.step(*rows(4))
        assert isinstance(caught.value, pliant.OptionError)
        torch.testing.assert_close(self.everything(), before, rtol=0, atol=0)


# ---- checkpoints


@BOTH
def test_resumed_in_another_process(make: Make) -> None:
    """What was saved here goes on here and in torch, with its schedule."""
    net, reference = network(), network()
    mine, theirs = make(net.parameters()), make(reference.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.3) for o in (mine, theirs)]
    step = step_of(net, mine)

    def further(step: pliant.TrainingStep, sizes: range) -> None:
        for n in sizes:
            step(*rows(n))
            in_torch(reference, theirs, rows(n))
            for schedule in schedules:
                schedule.step()

    further(step, range(4, 7))  # statistics of two rows would leave no gradient
    saved = copy.deepcopy(
        (net.state_dict(), mine.state_dict(), schedules[0].state_dict())
    )
    fresh = network()
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    resumed = make(fresh.parameters())
    again = step_of(fresh, resumed)
    schedules[0] = torch.optim.lr_scheduler.StepLR(resumed, 2, 0.3)
    fresh.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    schedules[0].load_state_dict(saved[2])
    further(again, range(7, 11))
    same(fresh, reference)
    assert resumed.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] < 0.1
    want = theirs.state_dict()["state"]
    got = resumed.state_dict()["state"]
    assert [list(s) for s in got.values()] == [list(s) for s in want.values()]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@BOTH
def test_a_loaded_state_keeps_its_numbers(make: Make) -> None:
    twins = Twins(make)
    twins.train(3, 5)
    twins.both(lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())))
    twins.train(4)
    twins.both(lambda o: o.param_groups[0].update(lr=0.0))
    before = copy.deepcopy(list(twins.net.parameters()))
    if make is momentum:
        twins.train(4)
        torch.testing.assert_close(list(twins.net.parameters()), before)
    twins.both(lambda o: o.param_groups[0].update(lr=0.05))
    twins.train(5, 2)


@pytest.mark.parametrize(
    "make, changes",
    [
        (momentum, {"lr": 0.02, "momentum": 0.5, "dampening": 0.1}),
        (momentum, {"weight_decay": 0.3, "lr": torch.tensor(0.03)}),
        (adam, {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.2}),
    ],
)
def test_numbers_are_read_at_every_step(make: Make, changes: dict[str, Any]) -> None:
    twins = Twins(make)
    twins.train(3, 5)
    twins.both(lambda o: o.param_groups[0].update(changes))
    twins.train(3, 5)


# ---- calls that fail


@BOTH
def test_a_refused_first_call_leaves_no_state(make: Make) -> None:
    twins = Twins(make)
    twins.step.memory_plan(*rows(3))
    for wrong in (torch.randn(4, 7), torch.randn(4, 6).double()):
        with pytest.raises(pliant.PliantError):
            twins.step((wrong,), (torch.randn(4, 3),))
    twins.step.memory_limit = 1
    with pytest.raises(pliant.MemoryLimitError):
        twins.step(*rows(4))
    twins.step.memory_limit = None
    assert not twins.mine.state
    twins.train(4, 3, 5)


def test_a_wrong_target_leaves_statistics() -> None:
    """Found before anything is written, although it comes last in the model."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = adam(net.parameters())
    step = pliant.compile_training(
        net,
        F.cross_entropy,
        optimizer,
        ((torch.randn(4, 6),), (torch.tensor([0, 1, 2, 0]),)),
        SHAPES,
        threads=1,
    )
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(pliant.IndexRangeError):
        step((torch.randn(3, 6),), (torch.tensor([0, 1, 9]),))
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert not optimizer.state


def test_a_refused_call_uses_up_no_random_numbers() -> None:
    net = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    step = step_of(net, pliant.SGD(0.1))
    state = torch.get_rng_state()
    with pytest.raises(pliant.ShapeError):
        step((torch.ones(4, 7),), (torch.ones(4, 3),))
    assert torch.equal(torch.get_rng_state(), state)
    step(*rows(4))
    assert not torch.equal(torch.get_rng_state(), state)


@BOTH
def test_an_interrupt_after_the_step(make: Make) -> None:
    """Raised when the step was taken, it does not undo the counting of it."""
    twins = Twins(make)
    signature = twins.step._runner.signature

    class Interrupting:
        def __getattr__(self, name: str) -> Any:
            return getattr(signature, name)

        def rebuild(self, *args: Any) -> Any:
            raise KeyboardInterrupt

    twins.step._runner.signature = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        twins.step(*rows(4, seed=9))
    in_torch(twins.other, twins.theirs, rows(4, seed=9))
    twins.step._runner.signature = signature
    twins.train(3, 5)


# ---- tensors that are other ones now


def test_other_memory_is_followed() -> None:
    twins = Twins(adam)
    twins.train(3)
    for p in twins.net.parameters():
        p.data = p.data.clone()
    for buffer in twins.net.buffers():
        buffer.data = buffer.data.clone()
    for state in twins.mine.state.values():
        state["exp_avg"] = state["exp_avg"].clone()
    twins.net.load_state_dict(twins.net.state_dict())
    twins.train(5, 4)


def test_a_replaced_buffer_is_followed() -> None:
    twins = Twins(momentum)
    for net in (twins.net, twins.other):
        net[1].running_mean = torch.full((9,), 3.0)
    twins.train(5, 4)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.reshape(-1, 2, 3, 1)).tanh().mean((2, 3)))


def pictures() -> nn.Module:
    torch.manual_seed(0)
    return Pictures()


def test_another_layout_is_refused_and_undone() -> None:
    twins = Twins(adam, pictures)
    twins.train(3)
    twins.net.to(memory_format=torch.channels_last)
    twins.refuses(r"'conv.weight' is not contiguous any more, its strides are")
    twins.net.to(memory_format=torch.contiguous_format)
    twins.train(5)


def test_state_in_another_layout_is_taken_over() -> None:
    twins = Twins(adam, pictures)
    twins.train(3)
    parameter = twins.net.conv.weight
    state = twins.mine.state[parameter]
    for slot in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        state[slot] = state[slot].to(memory_format=torch.channels_last)
    twins.train(5, 4)


def test_another_type_is_refused() -> None:
    twins = Twins(momentum)
    twins.net.double()
    twins.refuses(r"was float32\[9, 6\] when .* is float64\[9, 6\] now")
    twins.net.float()
    twins.train(3)


def test_replaced_parameters_are_refused() -> None:
    twins = Twins(momentum)
    twins.train(3)
    twins.net.load_state_dict(copy.deepcopy(twins.net.state_dict()), assign=True)
    twins.refuses("parameter '0.weight' is not in the optimizer: it was replaced")
    twins.net[3] = nn.Linear(9, 3)
    twins.refuses("is not in the optimizer")
    del twins.net[3]
    twins.refuses("has no '3.weight' any more")


def test_replaced_in_both_is_followed() -> None:
    twins = Twins(momentum)
    twins.net[3].weight = nn.Parameter(twins.net[3].weight.detach().clone())
    twins.mine.param_groups[0]["params"] = list(twins.net.parameters())
    twins.train(3, 5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()))


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def test_ties_are_kept() -> None:
    twins = Twins(momentum, tied)
    twins.train(3)
    net: Any = twins.net
    weight = net.first.weight
    net.second.weight = nn.Parameter(weight.detach().clone())
    twins.refuses("'first.weight' and 'second.weight' were one tensor")
    net.second.weight = weight
    twins.train(3)
    with pytest.raises(pliant.OptionError, match="share memory but are two"):
        net.second.weight = nn.Parameter(weight.data)
        step_of(net, pliant.SGD(0.1))


def test_new_ties_are_refused() -> None:
    twins = Twins(momentum, lambda: nn.Sequential(*map(nn.Linear, (6, 6), (6, 3))))
    net: Any = twins.net
    twins.train(3)
    net[1].bias = net[0].bias
    twins.refuses(r"'1\.bias' was float32\[3\]")
    twins = Twins(momentum, lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)))
    net = twins.net
    net[0].bias = net[0].weight
    twins.refuses("are one now")


# ---- what is trained


def test_freezing_is_refused() -> None:
    twins = Twins(momentum)
    twins.train(3)
    twins.net[0].requires_grad_(False)
    twins.refuses("'0.weight' was frozen")
    twins.net[0].requires_grad_(True)
    twins.train(3)


def half_frozen() -> nn.Module:
    net = network()
    net[0].requires_grad_(False)
    return net


def test_unfreezing_is_refused() -> None:
    twins = Twins(momentum, half_frozen)
    twins.train(3)
    twins.net[0].requires_grad_(True)
    twins.refuses("'0.weight' is trained now")
    twins.net[0].requires_grad_(False)
    twins.train(5)


def test_unfreezing_what_no_optimizer_has_is_nothing() -> None:
    net = half_frozen()
    trained = [p for p in net.parameters() if p.requires_grad]
    step = step_of(net, torch.optim.SGD(trained, lr=0.1))
    before = net[0].weight.clone()
    net[0].requires_grad_(True)
    step(*rows(3))
    assert torch.equal(net[0].weight, before)


def test_groups_that_are_added() -> None:
    """Refused if the loss reads their parameters, and nothing to us otherwise."""
    net = network()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    step = step_of(net, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    step(*rows(4))
    optimizer.add_param_group({"params": net[3].parameters(), "lr": 0.5})
    with pytest.raises(pliant.StepChangedError, match=r"'3\.weight' is trained now"):
        step(*rows(4))
    again = step_of(net, optimizer)
    twin = copy.deepcopy(net)
    theirs = torch.optim.SGD(
        [
            {"params": twin[0].parameters()},
            {"params": twin[3].parameters(), "lr": 0.5},
        ],
        lr=0.1,
    )
    again(*rows(4))
    in_torch(twin, theirs, rows(4))
    same(net, twin)


def test_groups_in_another_order_are_followed() -> None:
    def make(net: Any) -> torch.optim.Optimizer:
        halves = [{"params": net[0].parameters(), "lr": 0.3}]
        return torch.optim.SGD([*halves, {"params": net[3].parameters()}], lr=0.01)

    net, other = network(), network()
    mine, theirs = make(net), make(other)
    step = step_of(net, mine)
    mine.param_groups.reverse()
    mine.param_groups[1]["lr"] = theirs.param_groups[0]["lr"] = 0.2
    step(*rows(4))
    in_torch(other, theirs, rows(4))
    same(net, other)
    first, second = mine.param_groups
    second["params"].append(first["params"].pop())
    with pytest.raises(pliant.StepChangedError, match="are in several now"):
        step(*rows(4))


@pytest.mark.parametrize(
    "make, changes",
    [
        (momentum, {"momentum": 0.0}),
        (momentum, {"nesterov": True}),
        (adam, {"maximize": True}),
        (adam, {"amsgrad": False}),
    ],
)
def test_switches_are_refused(make: Make, changes: dict[str, Any]) -> None:
    twins = Twins(make)
    twins.train(3)
    twins.mine.param_groups[0].update(changes)
    twins.refuses("compile_training again")


def test_counts_that_differ_are_refused() -> None:
    twins = Twins(adam)
    twins.train(3)
    del twins.mine.state[next(twins.net.parameters())]
    twins.refuses(r"different number of times \(0 and 1\)")
    twins = Twins(momentum)
    twins.train(3)
    del twins.mine.state[next(twins.net.parameters())]
    twins.refuses(r"different number of times \(0 and 1\)")


def test_frozen_values_that_change_are_followed() -> None:
    twins = Twins(momentum, half_frozen)
    twins.train(3)
    for net in (twins.net, twins.other):
        with torch.no_grad():
            net[0].weight.mul_(0.5)
    twins.train(3, 5)


def only_biases() -> nn.Module:
    net = network()
    for name, p in net.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return net


def test_frozen_values_beside_trained_ones_are_taken_once() -> None:
    """The step's own writes are no change that frozen weights would have to follow."""
    twins = Twins(momentum, only_biases)
    kept = list(twins.step._weights.arrays)
    twins.train(3, 5)
    twins.step.gradients(*rows(4))
    assert all(a is b for a, b in zip(kept, twins.step._weights.arrays, strict=True))
    for net in (twins.net, twins.other):
        with torch.no_grad():
            net[3].weight.mul_(0.5)
    twins.train(3, 5)


def test_hooks_are_refused() -> None:
    twins = Twins(momentum)
    handle = twins.mine.register_step_post_hook(lambda *_: None)
    with pytest.raises(pliant.OptionError, match="step hooks"):
        twins.step(*rows(3))
    handle.remove()
    handle = next(twins.net.parameters()).register_hook(lambda g: g * 2)
    with pytest.raises(pliant.OptionError, match=r"'0\.weight' has a hook"):
        twins.step(*rows(3))
    handle.remove()
    twins.train(3)


# ---- what torch is told


@BOTH
def test_changes_are_counted(make: Make) -> None:
    twins = Twins(make)
    twins.train(3)
    states = [t for s in twins.mine.state.values() for t in s.values()]
    written = [*twins.net.parameters(), *twins.net.buffers(), *states]
    before = [t._version for t in written]
    with pytest.raises(pliant.ShapeError):
        twins.step((torch.ones(4, 7),), (torch.ones(4, 3),))
    assert [t._version for t in written] == before
    waiting = F.mse_loss(twins.net(*rows(4)[0]), *rows(4)[1])
    before = [t._version for t in written]
    twins.step(*rows(4))
    assert all(t._version > v for t, v in zip(written, before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waiting.backward()


def test_state_made_in_inference_mode_is_as_any() -> None:
    twins = Twins(adam)
    with torch.inference_mode():
        twins.step(*rows(3))
    in_torch(twins.other, twins.theirs, rows(3))
    twins.train(4)
    in_torch(twins.net, twins.mine, rows(3))
    in_torch(twins.other, twins.theirs, rows(3))
    same(twins.net, twins.other)
