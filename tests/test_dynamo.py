"""torch.compile(backend="pliant"): what surrounds a graph, and ops of training."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pliant.dynamo import CompiledGraph, backend, compiled_graphs
from pliant.errors import MemoryLimitError, OptionError, UnsupportedOpError
from pliant.frontend.torch_graph import memory_order


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend=backend, dynamic=True, options=options)


class Watch:
    """The graphs compiled since."""

    def __init__(self) -> None:
        self.seen = {graph.number for graph in compiled_graphs()}

    def graphs(self) -> list[CompiledGraph]:
        return [g for g in compiled_graphs() if g.number not in self.seen]

    def kinds(self) -> list[str]:
        return [graph.kind for graph in self.graphs()]


def same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for ours, theirs in zip(got, want, strict=True):
            same(ours, theirs)
    else:
        assert got == want and type(got) is type(want)


def agrees(function: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    """The same results, at every call, from one graph of ours."""
    ours, watch = compiled(function), Watch()
    for args in calls:
        same(ours(*args), function(*args))
    assert watch.kinds() == ["inference"]


def gradients(function: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * weights).sum().backward()
    grads = [x.grad for x in leaves if x.is_floating_point()]
    assert all(g is not None for g in grads)
    return [out.detach(), *(g for g in grads if g is not None)]


def same_gradients(
    function: Callable[..., torch.Tensor], *calls: tuple[torch.Tensor, ...]
) -> None:
    """Result and gradients as close to double precision as eager's, or nearly."""
    ours, watch = compiled(function), Watch()
    for inputs in calls:
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        exact = gradients(function, *wide)
        eager, got = gradients(function, *inputs), gradients(ours, *inputs)
        for mine, theirs, truth in zip(got, eager, exact, strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            error = (mine.double() - truth).abs().max().item()
            bound = 2 * (theirs.double() - truth).abs().max().item() + 1e-5
            assert error <= bound, (error, bound)
    assert watch.kinds() == ["forward", "backward"]


SIZES = ((3, 5), (4, 7), (13, 3), (31, 17))


def pairs(*shapes: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(shape),) for shape in (shapes or SIZES)]


# --- layouts and aliases --------------------------------------------------------


def test_memory_order() -> None:
    x = torch.empty(2, 3, 4)
    assert memory_order(x) == (0, 1, 2)
    assert memory_order(x.permute(2, 0, 1)) == (1, 2, 0)
    assert memory_order(x[:, 1:]) is None
    assert memory_order(x[:, :1].permute(1, 0, 2)) is None  # the step is 12, not 4
    assert memory_order(torch.empty(2, 1, 4).permute(1, 0, 2)) == (0, 1, 2)
    assert memory_order(torch.empty(5).expand(3, 5)) is None
    assert memory_order(torch.empty(())) == ()


def test_inputs_of_any_layout() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sum(-1)

    agrees(f, *pairs())
    agrees(f, *((x.t().contiguous().t(),) for (x,) in pairs()))
    agrees(f, *((torch.randn(x.shape[0], 2 * x.shape[1])[:, ::2],) for (x,) in pairs()))
    agrees(f, *((torch.randn(n, 1).expand(n, 6),) for n in (3, 4, 11)))


def test_strides_of_results_are_eagers() -> None:
    agrees(lambda x: (x.t().sin(), x.t().contiguous().cos()), *pairs())
    agrees(lambda x: torch.sin(x.permute(2, 0, 1)) * 2, *pairs((2, 3, 5), (7, 4, 6)))


def test_results_that_are_inputs_or_views() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return x, x.t(), x[1:, ::2], y, y.t(), y[1:], y[1:].view(-1), y

    agrees(f, *pairs())
    x = torch.randn(5, 4)
    got = compiled(f)(x)
    same_memory = [t.untyped_storage().data_ptr() for t in got]
    assert same_memory[:3] == [x.untyped_storage().data_ptr()] * 3
    assert len(set(same_memory[3:])) == 1
    y = torch.randn(9, 4)[2:]  # behind the start of its memory
    same(compiled(f)(y), f(y))


def test_views_with_gradients() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x * x).t()
        return y[1:]

    same_gradients(f, *pairs())


def test_changed_inputs_and_buffers() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x[1:] += 1
        return x.sum(0)

    ours = compiled(f)
    for (x,) in pairs():
        mine, theirs = x.clone(), x.clone()
        same(ours(mine), f(theirs))
        same(mine, theirs)

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.sum()
            return x - self.seen

    mine, theirs = Counter(), Counter()
    ours = compiled(mine)
    for (x,) in pairs():
        same(ours(x), theirs(x))
    assert torch.allclose(mine.seen, theirs.seen)


# --- numbers --------------------------------------------------------------------


def test_sizes_and_numbers() -> None:
    def f(x: torch.Tensor, n: int) -> tuple[Any, ...]:
        rows, columns = x.shape
        return x.reshape(columns, rows) + n, rows * columns, None, n + rows, 2.5

    agrees(f, *((torch.randn(a, b), 3 * a) for a, b in SIZES))


def test_zero_dims_and_casts() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = (x * 10).to(torch.int32)
        return whole, x.sum() * y, y.double(), (x > y).float().to(torch.bfloat16)

    agrees(f, *((torch.randn(s), torch.tensor(0.5)) for s in SIZES))


def test_sizes_zero_and_one() -> None:
    ours = compiled(lambda x: x.softmax(-1).sum(0))
    for shape in ((3, 4), (1, 4), (0, 4), (1, 1), (5, 1)):
        x = torch.randn(shape)
        torch.testing.assert_close(ours(x), x.softmax(-1).sum(0))


def test_graph_breaks() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y.sum() if y.sum() > 0 else y.mean()

    ours = compiled(f)
    for (x,) in pairs():
        for value in (x.abs(), -x.abs()):
            torch.testing.assert_close(ours(value), f(value))


# --- single ops -----------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: F.rms_norm(x, x.shape[-1:]),
        lambda x: F.gelu(x) + F.silu(x) * F.relu(x),
        lambda x: x.softmax(-1) * x.log_softmax(0),
        lambda x: torch.cat([x[1:], x.tanh()], 0).amax(1),
        lambda x: x.cumsum(0).sigmoid(),
        lambda x: F.smooth_l1_loss(x, x.detach().flip(0), reduction="none"),
        lambda x: torch.where(x > 0, x.abs().sqrt(), x.square()),
    ],
)
def test_elementwise_and_norms(function: Callable[..., torch.Tensor]) -> None:
    same_gradients(function, *pairs())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str) -> None:
    def f(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target, reduction=reduction)

    def target(rows: int, columns: int) -> torch.Tensor:
        picked = torch.randint(0, columns, (rows,))
        picked[0] = -100  # ignored
        return picked

    same_gradients(f, *((torch.randn(s), target(*s)) for s in SIZES))


def test_embedding_and_index() -> None:
    def f(table: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        picked = F.embedding(place, table, padding_idx=2) * table[place]
        return picked + table[:, 1][place].unsqueeze(-1)

    calls = [
        (torch.randn(n, 6), torch.randint(0, n, (b, s)))
        for n, b, s in ((5, 2, 3), (7, 4, 11), (3, 13, 17))
    ]
    same_gradients(f, *calls)


def test_gather_and_maximum() -> None:
    def f(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return x.gather(1, place) + x.max(1, keepdim=True).values

    same_gradients(
        f, *((torch.randn(a, b), torch.randint(0, b, (a, b))) for a, b in SIZES)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention(causal: bool, key_heads: int) -> None:
    grouped = key_heads != 4

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=grouped
        )

    def call(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        heads = (4, key_heads, key_heads)
        return tuple(torch.randn(batch, h, length, 8) for h in heads)

    same_gradients(f, *(call(b, s) for b, s in ((3, 5), (5, 7), (6, 33))))


def test_attention_with_mask() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(q.shape[-2])
        mask = (rows[:, None] - rows[None, :]).abs() < 3
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    calls = [[torch.randn(b, 2, s, 8) for _ in "qkv"] for b, s in ((3, 5), (4, 17))]
    same_gradients(f, *map(tuple, calls))


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"),
    [
        (2, 1, 1, 1),
        (3, 0, 1, 2),
        pytest.param(1, 1, 1, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_convolution(stride: int, padding: int, dilation: int, groups: int) -> None:
    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, stride, padding, dilation, groups)

    w, b = torch.randn(6, 4 // groups, 3, 3), torch.randn(6)
    sizes = ((5, 4, 9, 11), (7, 4, 8, 10), (12, 4, 13, 7))
    same_gradients(f, *((torch.randn(s), w, b) for s in sizes))


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_max_pool(ceil_mode: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x, 3, 2, 1, ceil_mode=ceil_mode)

    same_gradients(f, *pairs((2, 3, 9, 11), (4, 5, 8, 10), (6, 2, 7, 13)))


def test_dropout() -> None:
    ours, watch = compiled(lambda x: F.dropout(x * 1, 0.25)), Watch()
    kept = []
    for shape in ((300, 40), (500, 33)):
        x = torch.ones(shape, requires_grad=True)
        torch.manual_seed(7)
        y = ours(x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, y.detach())  # of ones: the mask, scaled
        assert set(y.detach().unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
        kept.append((y > 0).double().mean().item())
        torch.manual_seed(7)
        assert torch.equal(ours(x), y)
        assert not torch.equal(ours(x), y)
    assert all(abs(share - 0.75) < 0.015 for share in kept)
    assert watch.kinds() == ["forward", "backward"]


def test_random_numbers() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.rand(x.shape[0]), torch.bernoulli(x)

    x = torch.full((400, 50), 0.3)
    uniform, row, picked = compiled(f)(x)
    assert row.shape == (400,) and uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean().item() - 0.5) < 0.01
    assert abs(picked.mean().item() - 0.3) < 0.015
    assert set(picked.unique().tolist()) == {0.0, 1.0}


# --- options and errors ---------------------------------------------------------


def test_options() -> None:
    x = torch.randn(64, 64)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).sum()

    watch = Watch()
    ours = compiled(f, memory_limit="1MiB", threads=1, fuse=False)
    torch.testing.assert_close(ours(x), f(x))
    (graph,) = watch.graphs()
    assert graph.model is not None
    assert graph.model.memory_limit == 1 << 20
    assert graph.model.stats()["threads"] == 1
    with pytest.raises(MemoryLimitError):
        ours(torch.randn(1024, 1024))
    torch.testing.assert_close(ours(x), f(x))


def inner(error: BaseException) -> BaseException:
    """The error that a backend raised; torch wraps it."""
    return getattr(error, "inner_exception", error)


def test_wrong_options() -> None:
    for options in ({"memory": 3}, {"memory_limit": "much"}):
        with pytest.raises(Exception, match="memory") as caught:
            compiled(torch.sin, **options)(torch.randn(3))
        assert isinstance(inner(caught.value), OptionError)
        torch._dynamo.reset()
    tuned = torch.compile(torch.sin, backend=backend, mode="max-autotune")
    with pytest.raises(Exception, match="mode") as caught:
        tuned(torch.randn(3))
    assert isinstance(inner(caught.value), OptionError)


def test_every_unsupported_op_is_told() -> None:
    ops = []
    for name in ("one", "another"):
        kind = "(Tensor x) -> Tensor"
        ops.append(
            torch.library.custom_op(
                f"unknown::{name}", torch.sin, mutates_args=(), schema=kind
            )
        )
        ops[-1].register_fake(torch.empty_like)

    def f(x: torch.Tensor) -> torch.Tensor:
        return ops[0](x) + ops[1](x)

    with pytest.raises(Exception, match="not supported") as caught:
        compiled(f)(torch.randn(4, 4))
    error = inner(caught.value)
    assert isinstance(error, UnsupportedOpError)
    names = {op.name for op in error.ops}
    assert {"unknown.one.default", "unknown.another.default"} <= names
    assert "test_dynamo.py" in error.ops[0].loc


# --- threads and processes ------------------------------------------------------


def test_calls_from_several_threads() -> None:
    model = nn.Linear(8, 8)
    ours = compiled(model)
    ours(torch.randn(3, 8)).sum().backward()
    wrong: list[int] = []

    def work(size: int) -> None:
        for _ in range(20):
            x = torch.randn(size, 8, requires_grad=True)
            ours(x).sum().backward()
            assert x.grad is not None
            if not torch.allclose(
                x.grad, model.weight.sum(0).expand(size, 8), atol=1e-5
            ):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(n,)) for n in (4, 9, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_entry_point() -> None:
    """What an installation tells torch; the name alone is enough afterwards."""
    (found,) = entry_points(group="torch_dynamo_backends", name="pliant")
    assert found.load() is backend
    code = (
        "import torch; f = torch.compile(lambda x: x * 2, backend='pliant', "
        "dynamic=True); print(f(torch.ones(3)).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[2.0, 2.0, 2.0]"
