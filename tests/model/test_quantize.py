"""`pliant.quantize`: packed weights, decoded inside products of a compiled model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pliant


class Net(nn.Module):
    """A tied head, layers with a bias, and one whose rows are no groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.inner = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        self.odd = nn.Linear(64, 33)
        self.last = nn.Linear(33, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.inner(x)
        return self.head(self.norm(x + self.last(self.odd(x))))


KINDS = [("int8", 32), ("int8", None), ("int4", 32), ("int4", 16)]


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_the_compiled_model(net: Net, kind: str, group: int | None) -> None:
    """The same numbers as the module decodes, and no float matrix in memory."""
    before = copy.deepcopy(net.state_dict())
    small = pliant.quantize(net, kind, group)
    assert all(map(torch.equal, net.state_dict().values(), before.values()))
    ids = torch.randint(50, (2, 5))
    m = pliant.compile(small, (ids,), ({0: "b", 1: "n"},), threads=2)
    program: Any = m.program
    kinds = [
        op.str_attr("kind") for op in program.fused.main.ops if op.name == "fusion"
    ]
    assert sum("coded_matmul" in k for k in kinds) == 4
    for shape in ((0, 3), (1, 1), (3, 7)):
        ids = torch.randint(50, shape)
        with torch.no_grad():
            want = small(ids)
        torch.testing.assert_close(m(ids), want, rtol=1e-4, atol=1e-4)
    plain = pliant.compile(net, (ids,), ({0: "b", 1: "n"},), threads=1)
    assert m.weight_bytes < plain.weight_bytes


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_the_numbers(net: Net, kind: str, group: int | None) -> None:
    """At most half a step away, and a little for a scale that is rounded."""
    small = pliant.quantize(net, kind, group)
    assert small.head.numbers is small.embed.numbers
    assert small.norm.weight is net.norm.weight
    assert type(small.last) is nn.Linear
    weight = net.inner[0].weight.detach()
    rows = weight.reshape(len(weight), -1, group or 64)
    steps = rows.abs().amax(-1, keepdim=True) / 127
    if kind == "int4":
        low, high = rows.aminmax(dim=-1, keepdim=True)
        steps = (high - low) / 15
    got = small.inner[0].weight
    assert got.dtype is torch.float32
    assert ((got.reshape_as(rows) - rows).abs() <= 0.51 * steps + 1e-3 * steps).all()
    again = pliant.quantize(Net(), kind, group)
    again.load_state_dict(small.state_dict())
    ids = torch.arange(50)[None]
    torch.testing.assert_close(again.embed(ids)[0], small.embed.weight)
    torch.testing.assert_close(again.head(torch.eye(64)), small.head.weight.T)


def test_numbers_at_the_edges() -> None:
    for value in (0.0, 5.0, 1e-30, 1e30):
        layer = nn.Linear(4, 2, bias=False)
        nn.init.constant_(layer.weight, value)
        for kind in ("int8", "int4"):
            got = pliant.quantize(layer, kind, 2).weight
            torch.testing.assert_close(got, layer.weight.detach(), rtol=1e-3, atol=0)
    half = pliant.quantize(nn.Linear(4, 2).half(), "int8", 4)
    assert half(torch.ones(1, 4, dtype=torch.float16)).dtype is torch.float16


def test_layers_that_do_more_than_their_class() -> None:
    """What a hook does, or a `forward` that was put on a layer, is not lost."""
    x = torch.ones(2, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    model[0].register_forward_hook(lambda layer, args, out: out * 100)
    model[1].register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    vars(model[2])["forward"] = lambda x: x[:, :8] * 3
    made = pliant.quantize(model, "int8")
    assert [type(layer) for layer in made] == [nn.Linear] * 3
    torch.testing.assert_close(made(x), model(x))


def test_what_is_refused(net: Net) -> None:
    for kind, group in [("int2", 32), ("int4", 0), ("int4", 3), ("int8", -2)]:
        with pytest.raises(pliant.OptionError):
            pliant.quantize(net, kind, group)
    bad = nn.Linear(4, 2)
    nn.init.constant_(bad.weight, float("nan"))
    with pytest.raises(pliant.OptionError, match="finite"):
        pliant.quantize(bad, "int8", 4)
    wide = nn.Linear(4, 2)
    wide.weight.data[0, :2] = torch.tensor([3e38, -3e38])
    large = nn.Linear(4, 2, dtype=torch.float64)
    large.weight.data[0, 0] = 1e300
    for layer in (wide, large):
        with pytest.raises(pliant.OptionError, match="too large"):
            pliant.quantize(layer, "int4", 4)
