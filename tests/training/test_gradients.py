"""Gradients against torch's autograd: parts of models, at sizes 1, odd, prime, 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import (
    GPT,
    TEXTS,
    TOKENS,
    Bert,
    Llama,
    text_batch,
    token_batch,
    token_loss,
)
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from training_oracle import check_gradients, eager

import pliant

ROWS = (({0: "n"},), ({0: "n"},))


def rows(n: int, width: int, out: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, width, generator=generator)
    return (x,), (torch.randn(n, out, generator=generator),)


def test_feedforward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    batches = [rows(n, 8, 4) for n in (1, 2, 7, 13, 64)]
    check_gradients(model, F.mse_loss, rows(5, 8, 4), ROWS, batches)


def test_no_rows() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().sum()

    check_gradients(model, loss, rows(5, 3, 2), ROWS, [rows(0, 3, 2)])


@pytest.mark.parametrize("kind", [GPT, Llama])
def test_language_models(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    batches = [token_batch(b, s) for b, s in ((1, 1), (3, 7), (1, 33))]
    check_gradients(kind(), token_loss, token_batch(2, 5), TOKENS, batches)


def test_masked_encoder() -> None:
    torch.manual_seed(0)
    batches = [text_batch(b, s) for b, s in ((1, 1), (3, 7), (5, 17))]
    check_gradients(Bert(), F.cross_entropy, text_batch(2, 5), TEXTS, batches)


class Apply(nn.Module):
    """One trained tensor of the input's shape but its first dim, then a function."""

    def __init__(self, start: Tensor, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(start), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


PLACES = torch.tensor([0, 2, 2, 0])
SPECIAL = torch.tensor([0.0, 1.0, -1.0, 0.5, 3.0, -3.0, 90.0, -90.0, 1e-20, 6.0])
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "silu": F.silu,
    "gelu": F.gelu,
    "mish": F.mish,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softsign": F.softsign,
    "softshrink": F.softshrink,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-1.0, 3.0),
    "square": torch.square,
    "cube": lambda x: x**3,
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "log": lambda x: (x.abs() + 1).log(),
    "exp": lambda x: (x / 30).exp(),
    "erfc": torch.erfc,
    "logit": lambda x: (x.abs() / 100 + 0.05).logit(),
    "logit between bounds": lambda x: x.logit(0.1),
    "atan2": lambda x: torch.atan2(x, x + 2),
    "copysign": lambda x: torch.copysign(x, x.flip(-1)) * torch.arange(10.0),
    "asinh": torch.asinh,
    "erfinv": lambda x: (x.tanh() * 0.9).erfinv(),
    "lgamma": lambda x: (x.abs() + 0.3).lgamma(),
    "softmax": lambda x: x.softmax(-1) * torch.arange(10.0),
    "log_softmax": lambda x: x.log_softmax(-1) * torch.arange(10.0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "amax": lambda x: x.amax(-1),
    "prod": lambda x: (x.abs() / 10 + 0.5).prod(-1),
    "cumsum": lambda x: x.cumsum(-1) * torch.arange(10.0),
    "cumprod": lambda x: (x.abs() / 10 + 0.5).cumprod(-1) * torch.arange(10.0),
    "cumprod of zeros": lambda x: x.clamp(0.0, 1.2).cumprod(-1).cumsum(-1),
    "cumprod over one zero": lambda x: (
        x - x.detach() + torch.arange(10.0) / 4 - 0.75
    ).cumprod(-1),
    "norm": lambda x: x.norm(dim=-1),
    "std": lambda x: x.std(-1),
    "sort": lambda x: x.sort(stable=True, dim=-1).values * torch.arange(10.0),
    "topk": lambda x: x.topk(4).values * torch.arange(4.0),
    "kthvalue": lambda x: x.kthvalue(3).values ** 2,
    "median": lambda x: x.median(-1).values ** 2,
    "quantile": lambda x: x.quantile(0.3, -1) ** 2,
    "cummax": lambda x: x.cummax(-1).values * torch.arange(10.0),
    "logcumsumexp": lambda x: x.logcumsumexp(-1) * torch.arange(10.0).sub(4),
    "overwritten": lambda x: x.T.index_put((PLACES[:2],), x.T[3:5] ** 2) ** 2,
    "normalised": lambda x: F.normalize(x, dim=-1) * torch.arange(10.0),
    "slices": lambda x: x[:, 1:4] * x[:, 5:8] + x[:, ::3][:, :3],
    "flip": lambda x: x.flip(-1) * torch.arange(10.0),
    "pad": lambda x: F.pad(x, (1, 2)).square(),
    "gather": lambda x: x.gather(1, (x[:, :3] > 0).long()) ** 2,
    "index": lambda x: x[:, [1, 1, 4]] ** 2,
    "scatter_add": lambda x: x.scatter_add(1, (x > 0).long() * 3, x * x) ** 2,
    "scatter_reduce": lambda x: x.scatter_reduce(1, (x > 0).long(), x * x, "amax"),
    "index_copy": lambda x: x.index_copy(1, torch.arange(3), x[:, 4:7]) ** 2,
    "index_add": lambda x: x.index_add(1, PLACES, x[:, :4], alpha=3) ** 2,
    "index_put": lambda x: x.T.index_put((PLACES,), x.T[3:7], accumulate=True) ** 2,
    "maximum": lambda x: torch.maximum(x, x.flip(-1)) * torch.arange(10.0),
    "where": lambda x: torch.where(x > 1, x * 2, x * x),
    "stack": lambda x: torch.stack((x, x * 2), 1).mean((1, 2)) ** 2,
    "detach": lambda x: x * x.detach(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    """At zeros, bounds and far out, where a derivative is a matter of taste."""
    model = Apply(SPECIAL.clone(), FUNCTIONS[name])
    generator = torch.Generator().manual_seed(0)

    def batch(n: int) -> tuple[tuple[Tensor], tuple[()]]:
        x = torch.randn(n, 10, generator=generator)
        x[:1] = 1.0
        return (x,), ()

    batches = [batch(n) for n in (1, 3, 13)]
    step = pliant.compile_training(
        model, torch.sum, pliant.SGD(0.1), batch(5), (({0: "n"},), ()), threads=2
    )
    for inputs, targets in batches:
        _, ours = step.gradients(inputs, targets)
        _, theirs = eager(model, torch.sum, (inputs, targets))
        torch.testing.assert_close(
            ours["weight"], theirs["weight"], rtol=2e-5, atol=2e-5, equal_nan=True
        )


def labels(n: int, classes: int, ignored: int | None) -> Tensor:
    found = torch.arange(n) * 7 % classes
    if ignored is not None:
        found[::3] = ignored
    return found


SHARES = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0])
LOSSES: dict[str, tuple[Callable[..., Tensor], int | None]] = {
    "plain": (F.cross_entropy, None),
    "ignored": (F.cross_entropy, -100),
    "other ignored": (lambda x, y: F.cross_entropy(x, y, ignore_index=2), 2),
    "weighted": (lambda x, y: F.cross_entropy(x, y, SHARES.to(x.dtype)), None),
    "summed": (lambda x, y: F.cross_entropy(x, y, reduction="sum"), -100),
    "each": (lambda x, y: F.cross_entropy(x, y, reduction="none").square().sum(), -100),
    "smoothed": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), -100),
    "smoothed, weighted": (
        lambda x, y: F.cross_entropy(x, y, SHARES.to(x.dtype), label_smoothing=0.2),
        -100,
    ),
    "nll": (lambda x, y: F.nll_loss(x.log_softmax(-1), y), -100),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_classes(name: str) -> None:
    torch.manual_seed(0)
    loss, ignored = LOSSES[name]

    def batch(n: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
        (x,), _ = rows(n, 3, 1)
        return (x * 4,), (labels(n, 5, ignored),)

    batches = [batch(n) for n in (3, 7, 31)]
    check_gradients(nn.Linear(3, 5), loss, batch(5), ROWS, batches)


@pytest.mark.parametrize(
    "loss",
    [
        F.l1_loss,
        F.binary_cross_entropy_with_logits,
        lambda x, y: F.cross_entropy(x, y.softmax(-1)),
        lambda x, y: F.smooth_l1_loss(x, y, beta=0.7),
        lambda x, y: F.huber_loss(x, y.to(x.dtype), delta=0.6, reduction="sum"),
        lambda x, y: F.kl_div(x.log_softmax(-1), y.relu(), reduction="batchmean"),
        lambda x, y: F.kl_div(x, y, log_target=True),
        lambda x, y: F.soft_margin_loss(x, y.sign()),
    ],
)
def test_other_losses(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    nn.init.zeros_(model.bias)
    batches = [rows(n, 3, 4) for n in (1, 7)]
    step = check_gradients(model, loss, rows(5, 3, 4), ROWS, batches)
    nn.init.zeros_(model.weight)  # all logits 0: a slope of its own
    _, ours = step.gradients(*batches[1])
    _, theirs = eager(model, loss, batches[1])
    torch.testing.assert_close(ours["weight"], theirs["weight"], rtol=1e-5, atol=1e-6)


def test_trained_bias_of_attention() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(2, 8, 8))
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            n = x.shape[1]
            bias = self.bias[:, :n, :n]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def batch(b: int, n: int) -> tuple[tuple[Tensor], tuple[()]]:
        return (torch.randn(b, n, 8),), ()

    torch.manual_seed(0)
    check_gradients(
        Biased(),
        lambda y: y.square().sum(),
        batch(2, 5),
        (({0: "b", 1: "n"},), ()),
        [batch(1, 1), batch(3, 8)],
    )


def test_frozen_parameters_have_no_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    step = check_gradients(model, F.mse_loss, rows(5, 4, 3), ROWS, [rows(1, 4, 3)])
    before = model[0].weight.clone()
    step(*rows(7, 4, 3))
    assert torch.equal(model[0].weight, before)
    assert "weight" not in step.optimizer.state.get(model[0].weight, {})


def test_parts_without_gradient() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                aim = self.one(x)
            return self.two(x) * aim + self.one(x).detach()

    model = Teacher()
    step = pliant.compile_training(
        model, F.mse_loss, pliant.SGD(0.1), rows(5, 3, 3), ROWS
    )
    _, ours = step.gradients(*rows(7, 3, 3))
    _, theirs = eager(model, F.mse_loss, rows(7, 3, 3))
    assert theirs["one.weight"] is None and not ours["one.weight"].any()
    torch.testing.assert_close(ours["two.weight"], theirs["two.weight"])


def test_every_op_without_a_gradient_is_listed() -> None:
    def products(x: Tensor) -> Tensor:
        more = x.scatter_reduce(1, (x > 2).long(), x * 2, "prod")
        start = torch.zeros((), dtype=torch.int64)
        return while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, y.exp()), (start, more)
        )[1]

    with pytest.raises(pliant.UnsupportedOpError) as caught:
        pliant.compile_training(
            Apply(torch.ones(4, 9), products),
            torch.sum,
            pliant.SGD(0.1),
            ((torch.ones(4, 9),), ()),
        )
    assert [op.name for op in caught.value.ops] == ["scatter", "while"]
    assert all("gradient" in op.reason for op in caught.value.ops)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"loss": lambda y, t: y - t}, "one number"),
        ({"example_inputs": (torch.ones(2, 3),)}, "two tuples"),
        ({"optimizer": "sgd"}, "not an optimizer"),
        ({"clip_grad_norm": -1.0}, "above 0"),
        ({"model": print}, "nn.Module"),
        ({"model": nn.Linear(3, 3).requires_grad_(False)}, "no parameter"),
    ],
)
def test_what_cannot_be_compiled(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "model": nn.Linear(3, 3),
        "loss": F.mse_loss,
        "optimizer": pliant.SGD(0.1),
        "example_inputs": rows(2, 3, 3),
        **change,
    }
    with pytest.raises(pliant.PliantError, match=message):
        pliant.compile_training(**given)
