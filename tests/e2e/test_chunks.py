"""Under a memory limit, parts of a model run in chunks of rows: the same results."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant

DIMS = ({0: "batch", 1: "length"},)
WIDTH = 128  # heads are in groups, and queries apart from keys, from 64 columns on
TOLERANCE = 2e-5


class Decoder(nn.Module):
    """Two layers with causal attention."""

    def __init__(self, width: int = WIDTH, heads: int = 4, wider: int = 512) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "other": nn.LayerNorm(width),
                    "up": nn.Linear(width, wider),
                    "down": nn.Linear(wider, width),
                }
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.cos()
        for layer in self.layers:
            qkv = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, self.heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](y.transpose(1, 2).flatten(2))
            x = x + layer["down"](F.gelu(layer["up"](layer["other"](x))))
        return x.sin()


class Pairs(nn.Module):
    """Rows and columns of one size: the cut is at one axis of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 24), nn.Linear(4, 24)
        self.norm, self.out = nn.LayerNorm(24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x).sigmoid(), self.right(x).tanh()
        pairs = torch.einsum("bikc,bjkc->bijc", a, b)
        return x + self.out(self.norm(pairs))


class Image(nn.Module):
    """Convolutions, cut at the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x * 2))).tanh()


@pytest.fixture(scope="module")
def decoder() -> tuple[nn.Module, pliant.CompiledModel]:
    torch.manual_seed(0)
    model = Decoder().eval().requires_grad_(False)
    return model, pliant.compile(model, (torch.randn(2, 7, WIDTH),), DIMS, threads=2)


def limits(m: pliant.CompiledModel, x: Tensor) -> tuple[int, int]:
    """The peak without a limit, and the least."""
    m.memory_limit = None
    peak = m.memory_plan(x).peak_bytes
    with pytest.raises(pliant.MemoryLimitError) as caught:
        m.memory_plan(x, memory_limit=1)
    return peak, int(caught.value.least)


def check(m: pliant.CompiledModel, x: Tensor, want: Tensor, steps: int = 12) -> int:
    """Runs within limits from the peak to the least; tells how many had chunks."""
    peak, least = limits(m, x)
    chunked = 0
    for k in range(steps + 1):
        limit = least + (peak - least) * k // steps
        plan = m.memory_plan(x, memory_limit=limit)
        m.memory_limit = limit
        torch.testing.assert_close(m(x), want, rtol=TOLERANCE, atol=TOLERANCE)
        stats = m.stats()
        assert plan.peak_bytes <= limit
        assert stats["last_peak_bytes"] == plan.peak_bytes
        chunked += bool(plan.knobs["chunks"])
    m.memory_limit = None
    return chunked


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 17, 64, 131, 700])
def test_decoder(
    decoder: tuple[nn.Module, pliant.CompiledModel], batch: int, length: int
) -> None:
    model, m = decoder
    x = torch.randn(batch, length, WIDTH)
    chunked = check(m, x, model(x))
    assert chunked or length < 100
    assert m.compile_count == 1


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing(
    decoder: tuple[nn.Module, pliant.CompiledModel], shape: tuple[int, int]
) -> None:
    model, m = decoder
    x = torch.randn(*shape, WIDTH)
    m.memory_limit = m.memory_plan(x).peak_bytes
    torch.testing.assert_close(m(x), model(x))
    m.memory_limit = None


def test_less_memory(decoder: tuple[nn.Module, pliant.CompiledModel]) -> None:
    """Chunks reach what evictions alone cannot."""
    model, m = decoder
    plain = pliant.compile(
        model,
        (torch.randn(2, 7, WIDTH),),
        DIMS,
        threads=2,
        options=pliant.Options(chunk=False),
    )
    for shape in [(1, 1500), (8, 300)]:
        x = torch.randn(*shape, WIDTH)
        assert limits(m, x)[1] < 0.6 * limits(plain, x)[1]
        peak, _ = limits(plain, x)
        assert m.memory_plan(x).peak_bytes == peak  # without a limit nothing is cut
    # Versions read the weights where `main` does.
    assert m.memory_plan(x).weight_bytes == plain.memory_plan(x).weight_bytes
    assert "chunks of rows" not in plain.explain()
    assert "along length" in m.explain()


def test_what_the_plan_tells(decoder: tuple[nn.Module, pliant.CompiledModel]) -> None:
    _, m = decoder
    x = torch.randn(1, 1000, WIDTH)
    peak, _ = limits(m, x)
    chunks = m.memory_plan(x, memory_limit=int(0.7 * peak)).knobs["chunks"]
    assert chunks
    for part in chunks:
        assert part.dim == "length" and part.total == 1000
        assert 0 < part.rows < 1000 and part.chunks == -(-1000 // part.rows)
        assert "test_chunks.py" in part.loc


def test_threads(decoder: tuple[nn.Module, pliant.CompiledModel]) -> None:
    model, _ = decoder
    one = pliant.compile(model, (torch.randn(2, 7, WIDTH),), DIMS, threads=1)
    x = torch.randn(2, 333, WIDTH)
    assert check(one, x, model(x))


@pytest.mark.parametrize("size", [1, 5, 33])
def test_pairs(size: int) -> None:
    torch.manual_seed(0)
    model = Pairs().eval().requires_grad_(False)
    dims = ({0: "batch", 1: "n", 2: "n"},)
    m = pliant.compile(model, (torch.randn(2, 7, 7, 4),), dims)
    for batch in (1, 3):
        x = torch.randn(batch, size, size, 4)
        assert check(m, x, model(x)) or size < 33


@pytest.mark.parametrize(
    ("kernel", "padding", "dilation"), [(3, 1, 1), (3, 2, 2), (5, 2, 1)]
)
def test_rows_of_images(kernel: int, padding: int, dilation: int) -> None:
    """Windows reach into the rows of other chunks, and over the edges."""
    torch.manual_seed(0)
    model = Wide(kernel, padding, dilation).eval().requires_grad_(False)
    dims = ({0: "batch", 2: "high", 3: "wide"},)
    m = pliant.compile(model, (torch.randn(2, 8, 19, 20),), dims)
    assert "along high" in m.explain()
    for shape in [(1, 101, 67), (2, 31, 20), (1, 5, 7), (1, 1, 1)]:
        x = torch.randn(shape[0], 8, *shape[1:])
        assert check(m, x, model(x), steps=6) or shape[1] < 31


class Wide(nn.Module):
    """A convolution to many channels, of which few are left at the end."""

    def __init__(self, kernel: int, padding: int, dilation: int) -> None:
        super().__init__()
        how = {"padding": padding, "dilation": dilation}
        self.one = nn.Conv2d(8, 16, 3, padding=1)
        self.two = nn.Conv2d(16, 64, kernel, **how)
        self.three = nn.Conv2d(64, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.one(x * 2))
        return self.three(F.gelu(self.two(y))).tanh()


def test_images() -> None:
    torch.manual_seed(0)
    model = Image().eval().requires_grad_(False)
    dims = ({0: "batch", 2: "high", 3: "wide"},)
    m = pliant.compile(model, (torch.randn(2, 3, 9, 10),), dims)
    x = torch.randn(7, 3, 31, 20)
    assert check(m, x, model(x))


def test_random_blocks() -> None:
    """Blocks of random parts: chunks of any number of rows give the same."""
    draw = random.Random(20261118)
    parts = {
        "norm": lambda w: nn.LayerNorm(w),
        "wide": lambda w: nn.Sequential(
            nn.Linear(w, 5 * w), nn.GELU(), nn.Linear(5 * w, w)
        ),
        "gate": lambda w: Gate(w),
        "soft": lambda w: nn.Softmax(-1),
        "mixed": lambda w: Mixed(w),
    }
    for _ in range(6):
        names = [draw.choice(sorted(parts)) for _ in range(draw.randint(2, 5))]
        width = draw.choice([3, 8, 17])
        torch.manual_seed(draw.randrange(1000))
        model = Residual([parts[name](width) for name in names])
        model = model.eval().requires_grad_(False)
        m = pliant.compile(model, (torch.randn(2, 7, width),), DIMS)
        for _ in range(3):
            batch, length = draw.choice([1, 2, 5]), draw.choice([1, 13, 97, 256])
            x = torch.randn(batch, length, width)
            check(m, x, model(x), steps=5)


class Residual(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        for part in self.parts:
            x = x + part(x)
        return x.cos()


class Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, -1)
        return self.out(F.silu(a) * b)


class Mixed(nn.Module):
    """Every row depends on all others: it cannot be cut along the length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x - x.mean(1, keepdim=True)).cumsum(1).tanh()


class Tied(nn.Module):
    """An embedding that is also the output layer, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, WIDTH)
        self.inner = Decoder()

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.inner(self.table(ids)), self.table.weight)


def test_a_tied_weight_is_stored_once() -> None:
    """Also if a chunk looks up rows of it."""
    net, ids = Tied().eval(), torch.randint(600, (4, 80))
    stored = []
    for chunk in (True, False):
        options = pliant.Options(chunk=chunk)
        m = pliant.compile(net, (ids,), DIMS, options=options)
        stored.append(m.stats()["weight_bytes"])
        m.memory_limit = limits(m, ids)[1]
        assert bool(m.memory_plan(ids).knobs["chunks"]) == chunk
        with torch.no_grad():
            torch.testing.assert_close(m(ids), net(ids), atol=1e-4, rtol=1e-4)
    assert stored[0] == stored[1]


class Heads(nn.Module):
    """Logits of which only reductions are results."""

    def __init__(self, width: int = 32, classes: int = 2000) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(width, 64), nn.Linear(64, classes)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        x = F.gelu(self.up(x))
        y = self.head(x)
        loss = F.cross_entropy(y.flatten(0, 1), labels.flatten())
        mean, most = y.mean((0, 1)), y.amax(1)
        return loss, y.argmax(-1), mean, most, y.flatten(0, 1).T @ x.flatten(0, 1)


def test_reductions_of_logits() -> None:
    """The loss, the best class, a sum, the largest, a product over all rows."""
    torch.manual_seed(0)
    model = Heads().eval().requires_grad_(False)
    labels = torch.zeros(2, 7, dtype=torch.int64)
    m = pliant.compile(model, (torch.randn(2, 7, 32), labels), DIMS * 2, threads=2)
    for shape in [(1, 1), (1, 2), (2, 37), (4, 131), (1, 499), (97, 3)]:
        x, labels = torch.randn(*shape, 32), torch.randint(0, 2000, shape)
        want, logits = model(x, labels), 4 * 2000 * shape[0] * shape[1]
        outputs = sum(t.numel() * t.element_size() for t in want)
        m.memory_limit = None
        peak = m.memory_plan(x, labels).peak_bytes
        with pytest.raises(pliant.MemoryLimitError) as caught:
            m.memory_plan(x, labels, memory_limit=1)
        least = int(caught.value.least)
        assert least - outputs < logits / 3 or shape[0] * shape[1] < 200
        seen: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
        for k in range(6):
            m.memory_limit = least + (peak - least) * k // 5
            plan = m.memory_plan(x, labels)
            got = m(x, labels)
            torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
            assert m.stats()["last_peak_bytes"] == plan.peak_bytes <= m.memory_limit
            # For a number of chunks, the bits are the same.
            rows = tuple(part.rows for part in plan.knobs["chunks"])
            again = seen.setdefault(rows, m(x, labels))
            assert all(map(torch.equal, got, again))
