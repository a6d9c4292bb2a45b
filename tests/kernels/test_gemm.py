"""Matrix products in machine code: one compile, then every awkward size.

Sizes straddle the tile (14 x 32 with 512-bit vectors, 6 x 16 and 6 x 8 below), operands
come transposed, sliced, broadcast or constant, and what follows the product is computed
on its tiles.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from machines import TARGETS, machine
from torch import Tensor, nn

import pliant
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module, Value
from pliant.ir.types import DType, tensor
from pliant.kernels.packing import pack_constant
from pliant.kernels.tiles import gemm_tile
from pliant.machine.target import avx2, avx512, baseline
from pliant.sym import as_expr, sym

SIZES = (0, 1, 2, 3, 5, 7, 8, 13, 14, 15, 16, 17, 31, 32, 33)
B, H, M, N, K = (sym(name) for name in ("b", "h", "m", "n", "k"))
Build = Callable[..., Value | Sequence[Value]]


def compile_graph(
    params: Sequence[tuple[DType, tuple[Any, ...]]],
    build: Build,
    target: str = "machine",
    options: pliant.Options | None = None,
) -> pliant.CompiledModel:
    """A graph of parameters x0, x1, ... compiled for every size of its symbols."""
    b = Builder()
    values = [b.param(f"x{k}", tensor(d, *dims)) for k, (d, dims) in enumerate(params)]
    results = build(b, *values)
    results = [results] if isinstance(results, Value) else list(results)
    module = Module({"main": b.finish("main", results)}, constants=dict(b.constants))
    given = options or pliant.Options()
    return pliant.compile(module, threads=2, target=machine(target), options=given)


def random(dtype: type[np.generic], *shape: int, seed: int = 0) -> np.ndarray:
    source = np.random.default_rng((seed, *shape))
    if np.issubdtype(dtype, np.integer):
        return source.integers(-9, 9, shape).astype(dtype)
    return source.standard_normal(shape).astype(dtype)


def close(got: Any, want: np.ndarray, at: Any) -> None:
    assert got.shape == want.shape, at
    assert got.dtype == want.dtype, at
    loose = 1e-10 if want.dtype == np.float64 else 3e-5
    np.testing.assert_allclose(got, want, rtol=loose, atol=loose, err_msg=str(at))


@pytest.mark.parametrize("target", TARGETS)
def test_every_size(target: str) -> None:
    f32 = DType.F32
    model = compile_graph([(f32, (M, K)), (f32, (K, N))], Builder.matmul, target)
    for m, n, k in itertools.product(SIZES, SIZES, SIZES):
        x, y = random(np.float32, m, k), random(np.float32, k, n, seed=1)
        close(model(x, y), x @ y, (m, n, k))
    for m, n, k in [(113, 65, 129), (1, 300, 257), (300, 1, 5), (225, 33, 64)]:
        x, y = random(np.float32, m, k), random(np.float32, k, n, seed=1)
        close(model(x, y), x @ y, (m, n, k))


@pytest.mark.parametrize("dtype", [DType.F64, DType.I64, DType.I32])
@pytest.mark.parametrize("target", TARGETS)
def test_dtypes(dtype: DType, target: str) -> None:
    kind = {DType.F64: np.float64, DType.I64: np.int64, DType.I32: np.int32}[dtype]
    model = compile_graph([(dtype, (M, K)), (dtype, (K, N))], Builder.matmul, target)
    for m, n, k in itertools.product((0, 1, 7, 17), (1, 8, 33), (0, 1, 31)):
        x, y = random(kind, m, k), random(kind, k, n, seed=1)
        close(model(x, y), x @ y, (m, n, k))


def test_transposed_operands() -> None:
    def build(b: Builder, x: Value, y: Value) -> Value:
        return b.matmul(b.transpose(x, (1, 0)), b.transpose(y, (1, 0)))

    f32 = DType.F32
    both = compile_graph([(f32, (K, M)), (f32, (N, K))], build)
    for m, n, k in itertools.product((0, 1, 14, 33), (1, 17, 33), (0, 1, 5, 32)):
        x, y = random(np.float32, k, m), random(np.float32, n, k)
        close(both(x, y), x.T @ y.T, (m, n, k))


def test_strided_operands() -> None:
    """Slices, steps and flips of a parameter, read in place or copied."""

    def build(b: Builder, x: Value, y: Value) -> list[Value]:
        rows = b.slice_axis(x, 0, 1, M, 2)
        inner = b.slice_axis(rows, 1, 2, K)
        stepped = b.slice_axis(rows, 1, 0, K, 2)
        back = b.emit("flip", inner, axes=(0, 1))
        right = b.slice_axis(b.slice_axis(y, 0, 1, K), 1, 3, N)
        flipped = b.emit("flip", right, axes=(0, 1))
        return [
            b.matmul(inner, right),
            b.matmul(stepped, right),
            b.matmul(back, flipped),
        ]

    f32 = DType.F32
    params = [(f32, (2 * M + 1, 2 * K + 2)), (f32, (K + 1, N + 5))]
    model = compile_graph(params, build)
    for m, n, k in itertools.product((0, 1, 15), (0, 1, 33), (0, 1, 7)):
        x, y = (
            random(np.float32, 2 * m + 1, 2 * k + 2),
            random(np.float32, k + 1, n + 5),
        )
        rows, right = x[1 : 1 + 2 * m : 2], y[1 : k + 1, 3 : 3 + n]
        inner = rows[:, 2 : 2 + k]
        wants = [
            inner @ right,
            rows[:, : 2 * k : 2] @ right,
            inner[::-1, ::-1] @ right[::-1, ::-1],
        ]
        for got, want in zip(model(x, y), wants, strict=True):
            close(got, want, (m, n, k))


BATCHES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "both": ((B, H, M, K), (B, H, K, N)),
    "right shared": ((B, H, M, K), (K, N)),
    "left shared": ((M, K), (B, H, K, N)),
    "right over b": ((B, H, M, K), (1, H, K, N)),
    "right over h": ((B, H, M, K), (B, 1, K, N)),
    "left over b": ((1, H, M, K), (B, 1, K, N)),
    "one row": ((B, H, 1, K), (B, H, K, N)),
    "one column": ((B, H, M, K), (B, H, K, 1)),
    "outer product": ((B, H, M, 1), (B, H, 1, N)),
    "vector right": ((B, M, K), (K,)),
    "vector left": ((K,), (B, K, N)),
    "dot": ((K,), (K,)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str) -> None:
    left, right = BATCHES[name]
    f32 = DType.F32
    model = compile_graph([(f32, left), (f32, right)], Builder.matmul)
    for b, h, m, n, k in [
        (0, 2, 3, 4, 5),
        (1, 1, 1, 1, 1),
        (2, 3, 5, 33, 7),
        (3, 2, 15, 8, 0),
        (5, 1, 2, 65, 31),
    ]:
        env = {"b": b, "h": h, "m": m, "n": n, "k": k}
        x = random(np.float32, *(as_expr(d).evaluate(env) for d in left))
        y = random(np.float32, *(as_expr(d).evaluate(env) for d in right), seed=1)
        close(model(x, y), np.matmul(x, y), env)


def test_transposed_batch() -> None:
    """Heads inside positions, as projections give them: rows are not adjacent."""

    def build(b: Builder, x: Value, y: Value) -> Value:
        q, k = b.transpose(x, (0, 2, 1, 3)), b.transpose(y, (0, 2, 3, 1))
        return b.matmul(q, k)

    f32 = DType.F32
    model = compile_graph([(f32, (B, M, 3, 5)), (f32, (B, N, 3, 5))], build)
    for b, m, n in itertools.product((0, 1, 2), (0, 1, 17), (1, 33)):
        x, y = random(np.float32, b, m, 3, 5), random(np.float32, b, n, 3, 5)
        want = x.transpose(0, 2, 1, 3) @ y.transpose(0, 2, 3, 1)
        close(model(x, y), want, (b, m, n))


def test_broadcast_left_operand() -> None:
    """One left matrix for a whole batch, and one right: the batch is not more rows."""

    def build(b: Builder, x: Value, y: Value, z: Value) -> list[Value]:
        plain = b.broadcast(x, (B, M, K), (1, 2))
        spaced = b.broadcast(x, (B, 1, M, K), (2, 3))
        return [b.matmul(plain, y), b.matmul(spaced, y)]

    f32 = DType.F32
    model = compile_graph([(f32, (M, K)), (f32, (K, N)), (f32, (B,))], build)
    for b, m, n, k in [(0, 2, 3, 4), (1, 1, 1, 1), (3, 5, 7, 6), (40, 17, 33, 9)]:
        x, y = random(np.float32, m, k), random(np.float32, k, n, seed=1)
        plain, spaced = model(x, y, random(np.float32, b))
        close(plain, np.broadcast_to(x @ y, (b, m, n)), (b, m, n, k))
        close(spaced, np.broadcast_to(x @ y, (b, 1, m, n)), (b, m, n, k))


@pytest.mark.parametrize("columns", [1, 5, 15, 31, 33, 63])
def test_constant_weight(columns: int) -> None:
    """Packed at compile time; (K, N) as it is and as a transposed (N, K)."""
    plain = random(np.float32, 7, columns)
    turned = random(np.float32, columns, 7)

    def constant(b: Builder, name: str, data: np.ndarray) -> Value:
        kind = tensor(DType.F32, *data.shape)
        return b.constant(Constant(name, kind, data))

    def build(b: Builder, x: Value) -> list[Value]:
        weight = b.transpose(constant(b, "turned", turned), (1, 0))
        half = b.slice_axis(weight, 1, 0, columns // 2 + 1)
        return [
            b.matmul(x, constant(b, "plain", plain)),
            b.matmul(x, weight),
            b.matmul(x, half),
        ]

    model = compile_graph([(DType.F32, (M, 7))], build)
    for m in (0, 1, 13, 14, 15, 29, 120):
        x = random(np.float32, m, 7)
        wants = [x @ plain, x @ turned.T, x @ turned.T[:, : columns // 2 + 1]]
        for got, want in zip(model(x), wants, strict=True):
            close(got, want, m)


FIXED_SIZES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "rows": ((0, K), (K, N)),
    "columns": ((M, K), (K, 0)),
    "terms": ((M, 0), (0, N)),
    "batch": ((0, M, K), (0, K, N)),
}


@pytest.mark.parametrize("name", FIXED_SIZES)
def test_sizes_fixed_at_zero(name: str) -> None:
    left, right = FIXED_SIZES[name]
    f32 = DType.F32
    model = compile_graph([(f32, left), (f32, right)], Builder.matmul)
    env = {"m": 3, "n": 4, "k": 5}
    x, y = (
        random(np.float32, *(as_expr(d).evaluate(env) for d in dims))
        for dims in (left, right)
    )
    close(model(x, y), np.matmul(x, y), name)


def test_epilogue_divides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How a block's rows are cut is worked out once, not for every row that is
    written."""
    weight = random(np.float32, 70, 64)

    def build(b: Builder, x: Value) -> Value:
        constant = Constant("weight", tensor(DType.F32, *weight.shape), weight)
        product = b.matmul(x, b.constant(constant))
        return b.binary("mul", product, product)

    monkeypatch.setenv("PLIANT_DUMP", str(tmp_path))
    compile_graph([(DType.F32, (M, 70))], build)
    (code,) = tmp_path.rglob("code.s")
    unit = re.search(
        r"^matmul_0_planned\._u:(.*?)\.size", code.read_text(), re.M | re.S
    )
    assert unit is not None
    before, after = unit[1].rsplit("callq\t*", 1)  # the tile's kernel, from a table
    assert re.search(r"\bi?div[lq]\b", before)
    assert not re.search(r"\bi?div[lq]\b", after)


@pytest.mark.parametrize("patching", [True, False])
@pytest.mark.parametrize("n", [32, 40, 64])
@pytest.mark.parametrize("target", TARGETS)
def test_rows_from_far_away(target: str, n: int, patching: bool) -> None:
    """More rows than L2 holds, and a constant that stays there: kernels of their own
    bring the rows near that the next tile reads."""
    k, weight = 250, random(np.float32, 250, n)

    def build(b: Builder, x: Value) -> Value:
        kind = tensor(DType.F32, k, n)
        product = b.matmul(x, b.constant(Constant("weight", kind, weight)))
        return b.binary("mul", product, product)

    options = pliant.Options(patching=patching)
    model = compile_graph([(DType.F32, (M, k))], build, target, options)
    for m in (1, 500, 1999, 4001):
        x = random(np.float32, m, k)
        close(model(x), (x @ weight) ** 2, m)


@pytest.mark.parametrize("axis", [0, 1])
def test_part_of_a_constant(axis: int) -> None:
    """How much of the weight is read is known at run time only."""
    weight = random(np.float32, 9, 33)

    def build(b: Builder, x: Value, like: Value) -> Value:
        whole = b.constant(Constant("weight", tensor(DType.F32, 9, 33), weight))
        return b.matmul(x, b.slice_axis(whole, axis, 0, N))

    f32 = DType.F32
    params = [(f32, (M, 9 if axis else N)), (f32, (N,))]
    model = compile_graph(params, build)
    for m, n in itertools.product((0, 1, 15), (0, 1, 7, 9)):
        x = random(np.float32, m, 9 if axis else n)
        part = weight[:, :n] if axis else weight[:n]
        close(model(x, random(np.float32, n)), x @ part, (m, n))


def test_packing() -> None:
    weight = np.arange(3 * 5, dtype=np.float32).reshape(3, 5)
    tile = replace(gemm_tile(DType.F32, baseline()), NR=4)
    packed = pack_constant(weight, tile)
    assert packed.shape == (2, 3, 4)
    np.testing.assert_array_equal(packed[0], weight[:, :4])
    np.testing.assert_array_equal(packed[1, :, 0], weight[:, 4])
    assert not packed[1, :, 1:].any()
    assert pack_constant(weight[:, :0], tile).shape == (0, 3, 4)


def test_tiles_fill_the_registers() -> None:
    for target, tall, wide in ((avx512(), 14, 32), (avx2(), 6, 16), (baseline(), 6, 8)):
        tile = gemm_tile(DType.F32, target)
        assert (tall, wide) == (tile.MR, tile.NR)
        vectors = wide * 4 // target.vector_bytes
        assert tile.MR * vectors + vectors + 1 <= target.registers
        assert wide // 2 == gemm_tile(DType.F64, target).NR


class Epilogues(nn.Module):
    """What follows a product: each of these ends in its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(9, 35)

    def forward(
        self, x: Tensor, residual: Tensor, mask: Tensor, scale: Tensor
    ) -> tuple[Tensor, ...]:
        y = self.up(x)  # (b, s, 35)
        rows = y * mask[:, :, None]  # over columns
        batches = y * scale[:, None, None]  # over rows and columns
        return (
            F.gelu(y),
            y + residual,
            rows.masked_fill(mask[:, :, None] > 0, 2.0),
            batches,
            y.unflatten(-1, (5, 7)).transpose(1, 2) * 2,
            y.sigmoid().flatten(0, 1),
            (y > 0),
        )


@cache
def epilogues() -> Epilogues:
    torch.manual_seed(0)
    return Epilogues().eval().requires_grad_(False)


def epilogue_inputs(b: int, s: int) -> tuple[Tensor, ...]:
    torch.manual_seed(b + s)
    mask = torch.randint(0, 2, (b, s)).float()
    return torch.randn(b, s, 9), torch.randn(b, s, 35), mask, torch.randn(b)


def test_groups_of_panels_that_are_empty() -> None:
    """For two threads 41 panels are dealt out in 8 groups of 6, the last partial."""
    f32 = DType.F32
    model = compile_graph([(f32, (M, K)), (f32, (K, N))], Builder.matmul)
    for m, n, k in ((600, 1285, 1352), (130, 1285, 1352), (43, 1285, 1352)):
        x, y = (np.sign(random(np.float32, *size)) for size in ((m, k), (k, n)))
        np.testing.assert_array_equal(model(x, y), x @ y)


@pytest.mark.parametrize("target", TARGETS)
def test_epilogues(target: str) -> None:
    model = epilogues()
    both = {0: "b", 1: "s"}
    compiled = pliant.compile(
        model,
        epilogue_inputs(2, 5),
        (both, both, both, {0: "b"}),
        target=machine(target),
        threads=2,
    )
    for b, s in itertools.product((0, 1, 3), (0, 1, 7, 14, 15, 50)):
        inputs = epilogue_inputs(b, s)
        for k, (got, want) in enumerate(
            zip(compiled(*inputs), model(*inputs), strict=True)
        ):
            torch.testing.assert_close(
                got, want, rtol=3e-5, atol=3e-5, msg=lambda m, k=k: f"{k}: {m}"
            )


def test_epilogue_of_a_batched_product() -> None:
    """Scores with a bias per head and a mask per image, as attention adds them."""

    def build(b: Builder, q: Value, k: Value, bias: Value, keep: Value) -> list[Value]:
        scores = b.matmul(q, b.transpose(k, (0, 1, 3, 2)))
        scores = b.binary("add", scores, bias)
        scores = b.select(keep, scores, b.scalar(-1.0, DType.F32))
        return [scores, b.unary("tanh", scores)]

    f32 = DType.F32
    params = [
        (f32, (B, H, M, 5)),
        (f32, (B, H, N, 5)),
        (f32, (H, M, N)),
        (DType.BOOL, (B, 1, 1, N)),
    ]
    model = compile_graph(params, build)
    for b, h, m, n in [(0, 1, 2, 3), (1, 1, 1, 1), (2, 3, 15, 33), (3, 2, 0, 4)]:
        q, k = random(np.float32, b, h, m, 5), random(np.float32, b, h, n, 5)
        bias = random(np.float32, h, m, n)
        keep = random(np.float32, b, 1, 1, n) > 0
        want = np.where(keep, q @ k.swapaxes(-1, -2) + bias, np.float32(-1))
        got = model(q, k, bias, keep)
        close(got[0], want, (b, h, m, n))
        close(got[1], np.tanh(want), (b, h, m, n))


NAMES = (
    ("rows", "height", "tiles"),
    ("start", "blocks", "block_rows"),
    ("u", "u0", "t"),
    ("d0", "d1", "p"),
    ("em", "en", "k"),
    ("i", "j", "K"),
    ("lda", "v1", "i1"),
)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_any_name_of_a_dim(names: tuple[str, ...]) -> None:
    """Sizes may be called what a kernel might call its own variables."""
    rows, inner, columns = map(sym, names)

    def build(b: Builder, x: Value, y: Value) -> list[Value]:
        product = b.binary("add", b.matmul(x, y), b.scalar(1.0, DType.F32))
        top = b.reduce("sum", product, (1,), keepdims=True)
        return [b.binary("sub", product, top), b.emit("cumulate", x, op="sum", axis=0)]

    f32 = DType.F32
    model = compile_graph([(f32, (rows, inner)), (f32, (inner, columns))], build)
    for m in (0, 1, 5, 33):
        x, y = random(np.float32, m, 6), random(np.float32, 6, 20)
        product = x @ y + 1
        got = model(x, y)
        close(got[0], product - product.sum(1, keepdims=True), m)
        close(got[1], x.cumsum(0, dtype=np.float32), m)


@pytest.mark.parametrize("n", [5, 70])
def test_single_step_of_computed_rows(n: int) -> None:
    """Rows of one step look like a transposed operand; what is computed is not one."""

    def build(b: Builder, x: Value, y: Value) -> Value:
        return b.matmul(b.cast(x, DType.F32), b.cast(y, DType.F32))

    model = compile_graph([(DType.F16, (M, 1)), (DType.F16, (1, n))], build)
    for m in (0, 1, 2, 15, 100, 901):
        x, y = random(np.float16, m, 1), random(np.float16, 1, n)
        close(model(x, y), x.astype(np.float32) @ y.astype(np.float32), m)
