"""Every family of aten ops against eager, on sizes that the trace did not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_oracle import imported_from, matches_eager, run, same

SIZES = [(0, 7), (1, 1), (3, 13), (6, 5)]
Case = tuple[str, Callable[..., Any]]


class Several(nn.Module):
    """Many small functions of the same inputs, exported at once."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        self.cases = cases

    def forward(self, *args: torch.Tensor) -> dict[str, Any]:
        return {name: function(*args) for name, function in self.cases}


def check(
    cases: list[Case],
    make: Callable[..., tuple[torch.Tensor, ...]],
    dynamic: Any,
    sizes: list[tuple[int, ...]],
    tolerance: float = 2e-5,
) -> None:
    torch.manual_seed(0)
    model = Several(cases)
    imported = imported_from(model, make(4, 9), (tuple(dynamic),))
    for size in [(4, 9), *sizes]:
        args = make(*size)
        got, want = run(imported, args), model(*args)
        for name in want:
            try:
                same(got[name], want[name], tolerance=tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name} at {size}: {error}") from None


def floats(b: int, n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(b, n) * 2, torch.randn(b, n)


PAIR = [{0: "b", 1: "n"}] * 2

UNARY = "exp expm1 sin cos tan tanh sinh cosh erf erfc sigmoid neg abs sign floor ceil "
UNARY += "trunc round frac square isnan isinf isfinite logical_not relu exp2 rad2deg"
POSITIVE = "log log1p log2 log10 sqrt rsqrt reciprocal"


def test_unary() -> None:
    cases: list[Case] = [
        (n, lambda x, y, n=n: getattr(torch, n)(x)) for n in UNARY.split()
    ]
    cases += [
        (n, lambda x, y, n=n: getattr(torch, n)(x.abs() + 0.25))
        for n in POSITIVE.split()
    ]
    cases += [("logit", lambda x, y: [x.sigmoid().logit(), x.logit(), x.logit(0.1)])]
    cases += [("round2", lambda x, y: torch.round(x, decimals=2))]
    check(cases, floats, PAIR, SIZES)


def test_binary_and_choice() -> None:
    cases: list[Case] = [
        ("add", lambda x, y: torch.add(x, y, alpha=3)),
        ("sub", lambda x, y: torch.sub(x, y, alpha=2)),
        ("rsub", lambda x, y: torch.rsub(x, y)),
        ("mul", lambda x, y: x * y),
        ("div", lambda x, y: x / (y.abs() + 1)),
        ("floor", lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="floor")),
        ("trunc", lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="trunc")),
        ("remainder", lambda x, y: torch.remainder(x, 0.7)),
        ("fmod", lambda x, y: torch.fmod(x, 0.7)),
        ("pow", lambda x, y: (x.abs() + 0.1) ** y),
        ("powers", lambda x, y: [x**2, x**3, (x * x + 1) ** 0.5, (x * x + 1) ** -0.5]),
        ("power_of", lambda x, y: 2.0**x),
        ("atan2", lambda x, y: torch.atan2(x, y)),
        ("minimum", lambda x, y: torch.minimum(x, y)),
        ("max_other", lambda x, y: torch.max(x, y)),
        ("lerp", lambda x, y: torch.lerp(x, y, 0.3)),
        ("addcmul", lambda x, y: torch.addcmul(x, y, y, value=0.5)),
        ("addcdiv", lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=0.5)),
        ("compare", lambda x, y: [x == y, x != y, x < y, x <= 0.5, x > y, x >= 0]),
        ("clamp", lambda x, y: [x.clamp(-1, 1), x.clamp(min=0.2), x.clamp(max=y)]),
        ("where", lambda x, y: [torch.where(x > 0, x, y), torch.where(x > 0, x, -1.0)]),
        ("masked_fill", lambda x, y: x.masked_fill(y > 0, -5.0)),
        ("nan_to_num", lambda x, y: torch.nan_to_num(x / (y > 0), 1.0)),
        (
            "logical",
            lambda x, y: [(x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0)],
        ),
        ("logical2", lambda x, y: torch.logical_xor(x > 0, y)),
        ("not", lambda x, y: ~(x > 0)),
        ("broadcast", lambda x, y: x[:, :1] * y + y[0:1]),
    ]
    check(cases, floats, PAIR, [(1, 1), (3, 13), (6, 5)])


def test_integers_and_promotion() -> None:
    def make(b: int, n: int) -> tuple[torch.Tensor, ...]:
        wide = torch.randint(-9, 9, (b, n))
        return wide, torch.randint(1, 5, (b, n), dtype=torch.int32)

    cases: list[Case] = [
        ("sum", lambda x, y: [x + y, x * y, x - 3, y + 1.5, y / 2]),
        ("int32", lambda x, y: [y + 1, y * 2, y - y]),
        (
            "divide",
            lambda x, y: [x // y, x % y, torch.div(x, y, rounding_mode="trunc")],
        ),
        ("fmod", lambda x, y: torch.fmod(x, y)),
        ("true", lambda x, y: x / y),
        (
            "zero_dim",
            lambda x, y: [y + x.sum(), y * torch.tensor(2.5), y + torch.tensor(7)],
        ),
        ("bits", lambda x, y: [x & 3, x | y, x ^ 5, ~x, x << 2, x >> 1]),
        ("bool", lambda x, y: [(x > 0) + (y > 2), (x > 0) * (y > 2), (x > 0) + 1]),
        ("mean", lambda x, y: [x.sum(), y.sum(1), (x > 0).sum(), x.float().mean()]),
        ("float", lambda x, y: [x.exp(), y.sqrt(), torch.sigmoid(x)]),
        ("pow", lambda x, y: [x**2, x**3]),
        ("compare", lambda x, y: [x > y, x == 1.5, y.to(torch.bool)]),
        ("abs", lambda x, y: [x.abs(), x.sign(), x.clamp(-2, 2), torch.relu(x)]),
        ("cast", lambda x, y: [x.to(torch.int8), x.double(), y.half(), x.type_as(y)]),
        ("f64", lambda x, y: x.double() * 0.1),
    ]
    check(cases, make, PAIR, SIZES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(dtype: torch.dtype) -> None:
    def make(b: int, n: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(b, n).to(dtype), torch.randn(b, n).to(dtype)

    cases: list[Case] = [
        ("scalar", lambda x, y: [x * 0.1, x + 1e-3, 0.3 - x, x / 3]),
        ("mean", lambda x, y: [(x * 100).mean(), x.sum(1), x.var(1, correction=0)]),
        ("mixed", lambda x, y: [x + y.float(), x * y, x.float()]),
        ("act", lambda x, y: [F.gelu(x), F.silu(x), F.softplus(x), F.hardswish(x)]),
        ("softmax", lambda x, y: torch.softmax(x, -1)),
    ]
    check(cases, make, PAIR, [(1, 1), (3, 13)])


def test_activations() -> None:
    names = "silu gelu leaky_relu elu selu celu hardsigmoid hardswish hardtanh relu6 "
    names += "softplus mish logsigmoid softsign softshrink hardshrink tanhshrink"
    cases: list[Case] = [(n, lambda x, y, n=n: getattr(F, n)(x)) for n in names.split()]
    cases += [
        ("gelu_tanh", lambda x, y: F.gelu(x, approximate="tanh")),
        ("threshold", lambda x, y: F.threshold(x, 0.1, 20.0)),
        ("glu", lambda x, y: F.glu(torch.cat([x, y], 1), 1)),
        ("prelu", lambda x, y: F.prelu(x, torch.tensor([0.2]))),
        ("softmax", lambda x, y: [F.softmax(x, 1), F.log_softmax(x, 0)]),
    ]
    check(cases, floats, PAIR, SIZES)


def test_reductions() -> None:
    cases: list[Case] = [
        ("sum", lambda x, y: [x.sum(), x.sum(0), x.sum((0, 1), keepdim=True)]),
        ("mean", lambda x, y: [x.mean(), x.mean(-1), x.mean((0, 1), keepdim=True)]),
        ("var", lambda x, y: [x.var(1), x.std(1, correction=0), x.var()]),
        ("var_mean", lambda x, y: torch.var_mean(x, 1, keepdim=True)),
        ("amax", lambda x, y: [x.amax(1), x.amin((0, 1)), x.max(), x.min()]),
        ("prod", lambda x, y: [x.prod(), x.prod(1)]),
        (
            "any",
            lambda x, y: [(x > 1).any(), (x > 1).all(1), (x > 9).any(0, keepdim=True)],
        ),
        ("arg", lambda x, y: [x.argmax(), x.argmin(1), x.argmax(1, keepdim=True)]),
        ("max_dim", lambda x, y: [*x.max(1), *x.min(0, keepdim=True)]),
        (
            "norm",
            lambda x, y: [x.norm(), x.norm(dim=1), torch.linalg.vector_norm(x, 1, 1)],
        ),
        (
            "weight_norm",
            lambda x, y: [
                torch._weight_norm(x, y[:, :1] + 2, 0),
                torch._weight_norm(x, y[:1, :1] + 2, -1),
            ],
        ),
        (
            "norms",
            lambda x, y: [torch.linalg.vector_norm(x, 3.0, 1), F.normalize(x, dim=1)],
        ),
        ("logsumexp", lambda x, y: torch.logsumexp(x, 1)),
        ("cumsum", lambda x, y: [x.cumsum(1), (x > 0).cumsum(0), x.cumprod(1)]),
        ("diff", lambda x, y: [x.diff(), (x > 0).diff(dim=0)]),
        ("count", lambda x, y: torch.count_nonzero(x > 0, 1)),
        ("loss", lambda x, y: [F.mse_loss(x, y), F.l1_loss(x, y)]),
        (
            "losses",
            lambda x, y: [
                F.smooth_l1_loss(x, y, beta=0.3),
                F.smooth_l1_loss(x, y, beta=0.0),
                F.huber_loss(x, y, delta=0.5, reduction="none"),
                F.kl_div(x, y.relu(), reduction="sum"),
                F.kl_div(x, y, log_target=True, reduction="none"),
                F.soft_margin_loss(x, y),
            ],
        ),
        ("cosine", lambda x, y: F.cosine_similarity(x, y, dim=1)),
    ]
    check(cases, floats, PAIR, [(1, 1), (3, 13), (6, 5)], tolerance=1e-4)


def test_empty_reductions() -> None:
    cases: list[Case] = [
        ("sum", lambda x, y: [x.sum(), x.sum(1), x.prod(0)]),
        ("mean", lambda x, y: [x.mean(), x.mean(1)]),
        ("any", lambda x, y: [(x > 0).any(1), (x > 0).all(0)]),
        ("cumsum", lambda x, y: [x.cumsum(0), x.diff(dim=0), x.diff(dim=1)]),
    ]
    check(cases, floats, PAIR, [(0, 3), (3, 0), (0, 0)])


def test_movement() -> None:
    cases: list[Case] = [
        (
            "view",
            lambda x, y: [x.view(-1), x.reshape(x.shape[1], x.shape[0]), x.view(-1, 1)],
        ),
        (
            "flatten",
            lambda x, y: [x[None].flatten(1), x.flatten(), x.unflatten(0, (1, -1))],
        ),
        (
            "transpose",
            lambda x, y: [x.t(), x.transpose(0, 1), x.permute(1, 0), x.mT, x.T],
        ),
        (
            "movedim",
            lambda x, y: [x[None].movedim(0, 2), x[None].movedim((0, 1), (1, 0))],
        ),
        (
            "squeeze",
            lambda x, y: [x[None].squeeze(0), x[:, None].squeeze(1), x.unsqueeze(-1)],
        ),
        ("expand", lambda x, y: [x[:1].expand(5, -1), x[:, None].expand(-1, 2, -1)]),
        ("expand_as", lambda x, y: x[:, :1].expand_as(y)),
        (
            "slice",
            lambda x, y: [x[1:], x[:, :-1], x[:, ::2], x[:, 100:]],
        ),
        ("slices", lambda x, y: [x[:, -100:-1], x[:, 1:100], x[3:1]]),
        ("select", lambda x, y: [x[0], x[-1], x[:, 0], x.narrow(1, 0, 1)]),
        ("cat", lambda x, y: [torch.cat([x, y]), torch.cat([x, y[:, :1]], 1)]),
        ("cat_types", lambda x, y: torch.cat([x, (y > 0), y.int()], 1)),
        ("stack", lambda x, y: [torch.stack([x, y]), torch.stack([x, y], -1)]),
        ("stacks", lambda x, y: [torch.hstack([x, y]), torch.vstack([x[0], y[0]])]),
        ("unbind", lambda x, y: [*torch.stack([x, y, x]).unbind(0)]),
        ("split", lambda x, y: [*torch.cat([x[:, :1]] * 7, 1).split(3, 1)]),
        ("split_sizes", lambda x, y: [*torch.cat([x[:, :1]] * 7, 1).split([2, 5], 1)]),
        ("chunk", lambda x, y: [*torch.stack([x] * 5).chunk(2)]),
        ("halves", lambda x, y: [*torch.cat([x, x], 1).chunk(2, 1)]),
        ("repeat", lambda x, y: [x.repeat(2, 3), x.repeat(2, 1, 1), x.tile(2)]),
        (
            "interleave",
            lambda x, y: [x.repeat_interleave(2), x.repeat_interleave(3, 1)],
        ),
        (
            "roll",
            lambda x, y: [
                x.roll(1, 1),
                x.roll(-2, 0),
                x.roll(3),
                x.roll((1, 2), (0, 1)),
            ],
        ),
        ("flip", lambda x, y: [x.flip(0), x.flip(0, 1), x.rot90()]),
        ("triangles", lambda x, y: [x.tril(), x.triu(1), (x > 0).tril(-1)]),
        ("pad", lambda x, y: [F.pad(x, (1, 2)), F.pad(x, (0, 1, 2, 0), value=3.0)]),
        ("crop", lambda x, y: F.pad(x, (-1, 2))),
        ("replicate", lambda x, y: F.pad(x[None], (1, 2), mode="replicate")),
        ("meshgrid", lambda x, y: torch.meshgrid(x[0], y[:, 0], indexing="ij")),
        ("meshgrid_xy", lambda x, y: torch.meshgrid(x[0], y[:, 0], indexing="xy")),
        ("diagonal", lambda x, y: [x.diagonal(), x.diagonal(1)]),
        ("unfold", lambda x, y: x.unfold(1, 1, 2)),
        ("sizes", lambda x, y: [x.shape[0] * 2 + x.shape[1] // 2, x.numel(), 7, None]),
    ]
    check(cases, floats, PAIR, [(1, 1), (3, 13), (6, 5), (5, 2)])


def test_movement_of_nothing() -> None:
    cases: list[Case] = [
        ("view", lambda x, y: [x.reshape(-1), x.t(), x[:, None], x[1:], x[:, ::2]]),
        ("cat", lambda x, y: [torch.cat([x, y]), torch.stack([x, y]), x.repeat(2, 2)]),
        ("roll", lambda x, y: [x.roll(1, 1), x.roll(-2, 0), x.flip(0)]),
        ("triangles", lambda x, y: [x.tril(), F.pad(x, (1, 2))]),
        ("arange", lambda x, y: [torch.arange(x.shape[0]), torch.ones_like(x)]),
    ]
    check(cases, floats, PAIR, [(0, 3), (3, 0), (0, 0)])


def test_reflect_and_circular_padding() -> None:
    cases: list[Case] = [
        ("reflect", lambda x, y: F.pad(x[None], (2, 1), mode="reflect")),
        ("circular", lambda x, y: F.pad(x[None], (2, 1), mode="circular")),
    ]
    check(cases, floats, PAIR, [(1, 3), (3, 13)])


def test_creation() -> None:
    cases: list[Case] = [
        (
            "arange",
            lambda x, y: [torch.arange(x.shape[1]), torch.arange(2, x.shape[0] + 9)],
        ),
        (
            "stepped",
            lambda x, y: [torch.arange(0, x.shape[1] * 2, 3), torch.arange(9, 1, -2)],
        ),
        (
            "floats",
            lambda x, y: [
                torch.arange(0, 2, 0.3),
                torch.arange(5, dtype=torch.float16),
                torch.arange(x.shape[0], -x.shape[1], -1.0),
            ],
        ),
        (
            "full",
            lambda x, y: [
                torch.full(x.shape, 3.5),
                torch.full_like(x, 2, dtype=torch.int32),
            ],
        ),
        (
            "zeros",
            lambda x, y: [
                torch.zeros(x.shape[0], 2),
                torch.ones_like(x),
                x.new_zeros(3),
            ],
        ),
        (
            "new",
            lambda x, y: [
                x.new_ones(x.shape[1]),
                x.new_full((2,), 7),
                torch.zeros_like(x),
            ],
        ),
        ("eye", lambda x, y: [torch.eye(x.shape[0]), torch.eye(2, x.shape[1])]),
        ("linspace", lambda x, y: torch.linspace(-1, 1, 7)),
        (
            "sized",
            lambda x, y: [x * x.shape[0], x / x.shape[1], x * (x.shape[1] ** -0.5)],
        ),
        ("scalar", lambda x, y: torch.tensor(3.0) * x),
        ("one_hot", lambda x, y: F.one_hot(torch.arange(4), 6)),
    ]
    check(cases, floats, PAIR, [(1, 1), (3, 13), (6, 5)])


def test_picking() -> None:
    table = torch.randn(11, 3)

    def make(b: int, n: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(0, 11, (b, n)), torch.randint(-b, b, (b, n))

    cases: list[Case] = [
        ("embedding", lambda i, j: F.embedding(i, table)),
        ("index", lambda i, j: [table[i], i[j], i[j, torch.arange(i.shape[1])]]),
        ("slices", lambda i, j: [table[:, torch.arange(2)], i[:, [0, -1]]]),
        ("apart", lambda i, j: i[None][:, j[:, :1], :]),
        (
            "separated",
            lambda i, j: table[None, :, :, None][[0], :, torch.tensor([1, 2])],
        ),
        (
            "index_select",
            lambda i, j: [i.index_select(0, i[:, 0] * 0), table.index_select(0, i[0])],
        ),
        (
            "gather",
            lambda i, j: [table.gather(0, i[:, :1].expand(-1, 3)), i.gather(1, i * 0)],
        ),
        ("along", lambda i, j: torch.take_along_dim(table, i[:, :1], 0)),
        ("mask_write", lambda i, j: i.masked_fill(j < 0, 1)),
    ]
    check(cases, make, PAIR, [(1, 1), (3, 13), (6, 5)])


def test_products() -> None:
    w, b = torch.randn(6, 5), torch.randn(6)

    def make(n: int, m: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(n, m, 5), torch.randn(n, 5, m)

    cases: list[Case] = [
        (
            "matmul",
            lambda x, y: [x @ y, x[0] @ y[0], x @ w.t(), x[0, 0] @ w.t(), x @ w[0]],
        ),
        (
            "bmm",
            lambda x, y: [torch.bmm(x, y), torch.mv(x[0], w[0]), torch.dot(w[0], w[1])],
        ),
        ("addmm", lambda x, y: torch.addmm(b, x[0], w.t(), beta=2, alpha=0.5)),
        ("baddbmm", lambda x, y: torch.baddbmm(x @ y, x, y, beta=0.5)),
        (
            "linear",
            lambda x, y: [F.linear(x, w, b), F.linear(x, w), F.linear(x[0, 0], w, b)],
        ),
        ("outer", lambda x, y: torch.outer(x[0, 0], y[0, 0])),
        (
            "einsum",
            lambda x, y: [
                torch.einsum("bij,bjk->bik", x, y),
                torch.einsum("bij->bj", x),
            ],
        ),
        ("ellipsis", lambda x, y: torch.einsum("...ij, kj -> ...ik", x, w)),
        ("diagonal", lambda x, y: torch.einsum("ij,ij->i", w, w)),
    ]
    check(cases, make, [{0: "b", 1: "n"}, {0: "b", 2: "n"}], [(1, 1), (3, 13)], 1e-4)


def test_attention() -> None:
    def make(b: int, n: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(b, 4, n, 8), torch.randn(b, 2, n, 8)

    sdpa = F.scaled_dot_product_attention
    cases: list[Case] = [
        ("plain", lambda q, k: sdpa(q, q, q)),
        ("causal", lambda q, k: sdpa(q, q, q, is_causal=True, scale=0.3)),
        ("grouped", lambda q, k: sdpa(q, k, k, enable_gqa=True)),
        (
            "bool",
            lambda q, k: sdpa(
                q, q, q, attn_mask=(q @ q.mT > -1) | torch.eye(q.shape[2]).bool()
            ),
        ),
        ("bias", lambda q, k: sdpa(q, q, q, attn_mask=(q @ q.mT)[:, :1])),
        ("batchless", lambda q, k: sdpa(q[0], q[0], q[0])),
        ("wide", lambda q, k: sdpa(q, q[:1, :1], q[:1, :1])),
    ]
    check(cases, make, [{0: "b", 2: "n"}] * 2, [(1, 1), (3, 13)])


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


def test_convolutions_2d() -> None:
    torch.manual_seed(0)
    model = Layers(
        nn.Conv2d(4, 6, 3, padding=1, stride=2),
        nn.Conv2d(4, 8, (3, 1), groups=2, dilation=2, bias=False),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=2, padding_mode="circular"),
        nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1),
        nn.ConvTranspose2d(4, 6, 2, groups=2),
    ).eval()
    shapes = {0: "b", 2: "h", 3: "w"}
    calls = [(torch.randn(*s),) for s in ((1, 4, 5, 6), (3, 4, 17, 11))]
    matches_eager(model, (torch.randn(2, 4, 8, 7),), (shapes,), *calls, tolerance=1e-4)


def test_pools() -> None:
    model = Layers(
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(2),
        nn.AvgPool2d(3, 2, 1),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3),
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveAvgPool2d((3, 2)),
        nn.AdaptiveMaxPool2d((2, 3)),
    )
    shapes = {0: "b", 2: "h", 3: "w"}
    calls = [(torch.randn(*s),) for s in ((1, 4, 5, 6), (3, 4, 17, 11), (2, 4, 6, 4))]
    matches_eager(model, (torch.randn(2, 4, 8, 7),), (shapes,), *calls)


def test_one_dimensional() -> None:
    torch.manual_seed(0)
    model = Layers(
        nn.Conv1d(4, 6, 3, padding=1),
        nn.ConvTranspose1d(4, 2, 3, stride=2),
        nn.AvgPool1d(3, 1),
        nn.AdaptiveAvgPool1d(2),
        nn.InstanceNorm1d(4, affine=True),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=1.5, mode="linear"),
    ).eval()
    calls = [(torch.randn(*s),) for s in ((1, 4, 4), (3, 4, 17))]
    matches_eager(
        model, (torch.randn(2, 4, 9),), ({0: "b", 2: "n"},), *calls, tolerance=1e-4
    )


def test_norms() -> None:
    torch.manual_seed(0)
    batch_norm = nn.BatchNorm2d(4)
    batch_norm.running_mean = torch.randn(4)
    batch_norm.running_var = torch.rand(4) + 0.5
    model = Layers(
        batch_norm,
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4),
        nn.LayerNorm(6),
        nn.LayerNorm(6, bias=False),
        nn.LayerNorm(6, elementwise_affine=False),
        nn.RMSNorm(6, eps=1e-6),
        nn.RMSNorm(6),
    ).eval()
    calls = [(torch.randn(*s),) for s in ((1, 4, 2, 6), (3, 4, 17, 6))]
    matches_eager(
        model, (torch.randn(2, 4, 5, 6),), ({0: "b", 2: "h"},), *calls, tolerance=1e-4
    )


def test_resizing() -> None:
    def sized(mode: str, **options: Any) -> Case:
        label = f"{mode}{options}"
        return label, lambda x: F.interpolate(x, mode=mode, **options)

    cases = [
        sized("nearest", scale_factor=2),
        sized("nearest", size=(5, 7)),
        sized("nearest-exact", size=(5, 7)),
        sized("bilinear", scale_factor=2),
        sized("bilinear", size=(5, 7), align_corners=True),
        sized("bicubic", size=(5, 7)),
        sized("bicubic", scale_factor=(0.5, 1.5)),
        ("shuffle", lambda x: F.pixel_shuffle(torch.cat([x, x], 1), 2)),
        (
            "unshuffle",
            lambda x: F.pixel_unshuffle(torch.cat([x, x], 2)[:, :, :, :4], 2),
        ),
    ]

    def make(h: int, w: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(1, 2, h, w),)

    check(cases, make, [{2: "h", 3: "w"}], [(4, 4), (13, 8)], 1e-4)


def test_data_dependent_sizes() -> None:
    class Picked(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            mask = x > 0
            return x[mask], mask.nonzero(), torch.masked_select(x, mask).exp()

    x = torch.randn(3, 5)
    calls = [(torch.randn(1, 7),), (-torch.ones(2, 2),), (torch.ones(4, 1),)]
    matches_eager(Picked(), (x,), ({0: "b", 1: "n"},), *calls)
