"""Products of 8-bit integers: every sum exact, or wrapped as i32 wraps.

Values are of the whole range, its ends more often than the rest; operands lie against
pages without access; K is of every remainder of a word. Targets differ in the words
they make: bytes for a dot instruction, halves for pairs, and both kinds everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from guarded import GuardedProgram, Side
from machines import MACHINE, machine, runs
from torch import Tensor, nn

import pliant
from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module, Value
from pliant.ir.interp import run_graph
from pliant.ir.types import NUMPY, DType, tensor
from pliant.kernels.int8 import Form, form_of, pack_corrections, pack_words
from pliant.lower.lower import lower
from pliant.machine.target import Target, avx2, avx512, baseline, named, neon
from pliant.options import Options
from pliant.passes.fuse import fuse
from pliant.sym import as_expr, sym

I8, U8, I32, F32 = DType.I8, DType.U8, DType.I32, DType.F32
B, H, M, N, K = (sym(name) for name in ("b", "h", "m", "n", "k"))
# A class of machine may lack the dot instruction that this one has.
TARGETS = [
    "machine",
    *(n for n in ("avx512", "avx2", "baseline") if runs(named(n))),
]
SMALL = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 17, 31, 33)
LARGE = [(1, 300, 257), (300, 1, 5), (113, 65, 129), (70, 515, 1030), (29, 33, 4099)]
Build = Callable[..., Value | Sequence[Value]]
Params = Sequence[tuple[DType, tuple[Any, ...]]]


def product(b: Builder, x: Value, y: Value) -> Value:
    return b.emit("matmul", x, y)


def module_of(params: Params, build: Build) -> Module:
    b = Builder()
    values = [b.param(f"x{k}", tensor(d, *dims)) for k, (d, dims) in enumerate(params)]
    results = build(b, *values)
    results = [results] if isinstance(results, Value) else list(results)
    return Module({"main": b.finish("main", results)}, constants=dict(b.constants))


@cache
def guarded(dtypes: tuple[DType, DType], target: str) -> GuardedProgram:
    params = [(dtypes[0], (M, K)), (dtypes[1], (K, N))]
    return GuardedProgram(module_of(params, product), machine(target))


def compiled(params: Params, build: Build, target: str = "machine") -> Any:
    return pliant.compile(module_of(params, build), threads=2, target=machine(target))


def random(dtype: DType, *shape: int, seed: int = 0) -> np.ndarray:
    """Whole range, half of it at the ends."""
    source = np.random.default_rng((seed, *shape))
    low, high = (-128, 127) if dtype is I8 else (0, 255)
    values = source.integers(low, high + 1, shape)
    ends = source.choice([low, high], shape)
    return np.where(source.random(shape) < 0.5, ends, values).astype(NUMPY[dtype])


def exact(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """By floats where those are exact (and fast), wrapped to i32."""
    sums = np.matmul(x.astype(np.float64), y.astype(np.float64))
    return sums.astype(np.int64).astype(np.int32)


def same(got: Any, want: np.ndarray, at: Any) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), at
    np.testing.assert_array_equal(got, want, err_msg=str(at))


# ---- sizes and values


@pytest.mark.parametrize("target", TARGETS)
def test_every_size(target: str) -> None:
    program = guarded((I8, I8), target)
    cases = [*itertools.product(SMALL, SMALL, range(10)), *LARGE]
    for number, (m, n, k) in enumerate(cases):
        x, y = random(I8, m, k), random(I8, k, n, seed=1)
        side = (Side.START, Side.END)[number % 2]
        (got,) = program([x, y], side, 1 + number % 3 % 2)
        same(got, exact(x, y), (m, n, k))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("left", [I8, U8])
@pytest.mark.parametrize("right", [I8, U8])
def test_every_value(left: DType, right: DType, target: str) -> None:
    """All pairs, alone and behind pairs that a saturating sum would not survive."""
    program = guarded((left, right), target)
    everything = np.arange(256).astype(np.uint8)
    x = everything.view(NUMPY[left]).reshape(256, 1)
    y = everything.view(NUMPY[right]).reshape(1, 256)
    for k in (1, 2, 3, 4, 5, 8):
        a, b = np.repeat(x, k, 1), np.repeat(y, k, 0)
        (got,) = program([a, b], Side.END)
        same(got, exact(a, b), k)
    for m, n, k in [(0, 3, 5), (1, 1, 1), (7, 33, 6), (30, 17, 67)]:
        a, b = random(left, m, k), random(right, k, n, seed=1)
        (got,) = program([a, b], Side.START)
        same(got, exact(a, b), (m, n, k))


@pytest.mark.parametrize("target", TARGETS)
def test_sums_wrap(target: str) -> None:
    program = guarded((I8, I8), target)
    k = 131072 + 5  # of (-128)^2: the first sum beyond i32, and a little
    for value in (-128, 127):
        x, y = np.full((2, k), value, np.int8), np.full((k, 3), -128, np.int8)
        (got,) = program([x, y], Side.END)
        same(got, exact(x, y), value)
    assert exact(np.full((1, k), -128), np.full((k, 1), -128)) < 0


# ---- layouts


def transposed(b: Builder, x: Value, y: Value) -> list[Value]:
    turned = b.transpose(x, (1, 0)), b.transpose(y, (1, 0))
    return [product(b, *turned), product(b, turned[1], turned[0])]


@pytest.mark.parametrize("target", TARGETS)
def test_transposed_operands(target: str) -> None:
    """Each the left and the right one: K adjacent, and across."""
    params = [(I8, (K, M)), (I8, (M, K))]
    program = GuardedProgram(module_of(params, transposed), machine(target))
    for m, k in itertools.product((0, 1, 14, 33, 65), (0, 1, 2, 3, 5, 32, 70)):
        x, y = random(I8, k, m), random(I8, m, k)
        first, second = program([x, y], Side.END)
        same(first, exact(x.T, y.T), (m, k))
        same(second, exact(y.T, x.T), (m, k))


def strided(b: Builder, x: Value, y: Value) -> list[Value]:
    rows = b.slice_axis(x, 0, 1, M, 2)
    inner = b.slice_axis(rows, 1, 2, K)
    stepped = b.slice_axis(rows, 1, 0, K, 2)
    back = b.emit("flip", inner, axes=(0, 1))
    right = b.slice_axis(b.slice_axis(y, 0, 1, K), 1, 3, N)
    flipped = b.emit("flip", right, axes=(0, 1))
    pairs = [(inner, right), (stepped, right), (back, flipped)]
    return [product(b, *pair) for pair in pairs]


def test_strided_operands() -> None:
    model = compiled([(I8, (2 * M + 1, 2 * K + 2)), (I8, (K + 1, N + 5))], strided)
    for m, n, k in itertools.product((0, 1, 15), (0, 1, 33), (0, 1, 6, 7)):
        x, y = random(I8, 2 * m + 1, 2 * k + 2), random(I8, k + 1, n + 5)
        rows, right = x[1 : 1 + 2 * m : 2], y[1 : k + 1, 3 : 3 + n]
        inner = rows[:, 2 : 2 + k]
        wants = [(inner, right), (rows[:, : 2 * k : 2], right)]
        wants += [(inner[::-1, ::-1], right[::-1, ::-1])]
        for got, want in zip(model(x, y), wants, strict=True):
            same(got, exact(*want), (m, n, k))


BATCHES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "both": ((B, H, M, K), (B, H, K, N)),
    "right shared": ((B, H, M, K), (1, 1, K, N)),
    "left shared": ((1, 1, M, K), (B, H, K, N)),
    "right over b": ((B, H, M, K), (1, H, K, N)),
    "left over b": ((1, H, M, K), (B, 1, K, N)),
    "one row": ((B, H, 1, K), (B, H, K, N)),
    "one column": ((B, H, M, K), (B, H, K, 1)),
    "outer product": ((B, H, M, 1), (B, H, 1, N)),
    "no terms": ((B, H, M, 0), (B, H, 0, N)),
}


@pytest.mark.parametrize("target", TARGETS[:2])
@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str, target: str) -> None:
    left, right = BATCHES[name]
    model = compiled([(I8, left), (I8, right)], product, target)
    sizes = [(0, 2, 3, 4, 5), (1, 1, 1, 1, 1), (2, 3, 5, 33, 7), (3, 2, 15, 8, 0)]
    for b, h, m, n, k in [*sizes, (5, 1, 2, 65, 30)]:
        env = {"b": b, "h": h, "m": m, "n": n, "k": k}
        x = random(I8, *(as_expr(d).evaluate(env) for d in left))
        y = random(I8, *(as_expr(d).evaluate(env) for d in right), seed=1)
        same(model(x, y), exact(x, y), env)


def test_broadcast_operands() -> None:
    """One matrix for a whole batch, made into words once, by its strides."""

    def build(b: Builder, x: Value, y: Value, z: Value) -> list[Value]:
        left, right = b.broadcast(x, (B, M, K), (1, 2)), b.reshape(y, (1, K, N))
        whole = b.broadcast(y, (B, K, N), (1, 2))
        turned = b.transpose(left, (0, 2, 1))
        pairs = [(left, right), (left, whole), (turned, left)]
        return [product(b, *pair) for pair in pairs]

    model = compiled([(I8, (M, K)), (I8, (K, N)), (I8, (B,))], build)
    for b, m, n, k in [(0, 2, 3, 4), (1, 1, 1, 1), (3, 5, 7, 6), (40, 17, 33, 9)]:
        x, y = random(I8, m, k), random(I8, k, n, seed=1)
        first, second, third = model(x, y, random(I8, b))
        want = np.broadcast_to(exact(x, y), (b, m, n))
        same(first, want, (b, m, n, k))
        same(second, want, (b, m, n, k))
        same(third, np.broadcast_to(exact(x.T, x), (b, k, k)), (b, m, n, k))


@pytest.mark.parametrize("columns", [1, 5, 31, 33, 63])
@pytest.mark.parametrize("target", TARGETS)
def test_constant_weight(columns: int, target: str) -> None:
    """Made into panels of words when compiling; also one per batch, and a part."""
    plain, turned = random(I8, 7, columns), random(I8, columns, 7)
    heads = random(I8, 2, 7, columns)

    def constant(b: Builder, name: str, data: np.ndarray) -> Value:
        return b.constant(Constant(name, tensor(I8, *data.shape), data))

    def build(b: Builder, x: Value) -> list[Value]:
        weight = b.transpose(constant(b, "turned", turned), (1, 0))
        both = b.broadcast(x, (2, M, 7), (1, 2))
        same_weight = b.reshape(constant(b, "plain", plain), (1, 7, columns))
        return [
            product(b, x, constant(b, "plain", plain)),
            product(b, x, weight),
            product(b, x, b.slice_axis(weight, 1, 0, columns // 2 + 1)),
            product(b, both, constant(b, "heads", heads)),
            product(b, both, same_weight),
        ]

    program = GuardedProgram(module_of([(I8, (M, 7))], build), machine(target))
    for m in (0, 1, 13, 15, 120):
        x = random(I8, m, 7)
        part = turned.T[:, : columns // 2 + 1]
        wants = [exact(x, w) for w in (plain, turned.T, part, heads)]
        wants.append(np.broadcast_to(wants[0], (2, *wants[0].shape)))
        for got, want in zip(program([x], Side.END), wants, strict=True):
            same(got, want, m)


# ---- what follows


def dequantised(b: Builder, x: Value, y: Value, *others: Value) -> list[Value]:
    row, column, bias = others
    sums = product(b, x, y)
    number = b.cast(sums, F32)
    scaled = b.binary("mul", b.binary("mul", number, row), column)
    out = b.binary("add", scaled, bias)
    return [b.binary("maximum", out, b.scalar(0.0, F32)), sums]


@pytest.mark.parametrize("target", TARGETS)
def test_dequantising_epilogue(target: str) -> None:
    """One fusion: cast, scales of rows and of columns, bias, activation."""
    params = [(I8, (M, K)), (I8, (K, N)), (F32, (M, 1)), (F32, (N,)), (F32, (N,))]
    module = module_of(params, dequantised)
    program = GuardedProgram(module, machine(target))
    fused = [op for op in program.program.fused.main.ops if op.name == "fusion"]
    assert [op.str_attr("kind") for op in fused] == ["matmul"]
    for m, n, k in [(0, 2, 3), (1, 1, 1), (15, 33, 6), (29, 70, 131), (3, 5, 0)]:
        x, y = random(I8, m, k), random(I8, k, n, seed=1)
        source = np.random.default_rng(m)
        row = source.standard_normal((m, 1), np.float32)
        column, bias = source.standard_normal((2, n), np.float32)
        got, sums = program([x, y, row, column, bias], Side.END)
        want = exact(x, y)
        same(sums, want, (m, n, k))
        number = want.astype(np.float32) * row * column + bias
        np.testing.assert_allclose(got, np.maximum(number, 0), 1e-6, 1e-5)


# ---- the interpreter, as an oracle of the loop functions


def formed(target: Target, *features: str) -> Target:
    return replace(target, features=(*target.features, *features))


EVERY_FORM = {
    "turned_bytes": formed(avx2(), "+avxvnni"),
    "signed_bytes": formed(neon(), "+dotprod"),
    "halves": baseline(),
}


@pytest.mark.parametrize("parts", EVERY_FORM)
def test_lowered_forms_interpreted(parts: str) -> None:
    """Loop functions for targets that this machine may not be, two workers."""
    target = EVERY_FORM[parts]
    held = random(I8, 6, 9)
    assert form_of(I8, I8, False, target).parts == parts

    def build(b: Builder, x: Value, y: Value, z: Value) -> list[Value]:
        weight = b.constant(Constant("held", tensor(I8, 6, 9), held))
        fixed = product(b, z, weight)
        return [product(b, x, y), *transposed(b, y, b.transpose(y, (1, 0))), fixed]

    module = module_of([(I8, (M, K)), (I8, (K, N)), (I8, (M, 6))], build)
    lowered = lowered_for(module, target)
    for m, n, k in [(0, 1, 2), (1, 1, 1), (3, 5, 6), (7, 9, 5), (2, 17, 8), (2, 3, 0)]:
        x, y = random(I8, m, k), random(I8, k, n, seed=1)
        z = random(I8, m, 6)
        got = run_graph(lowered, [x, y, z], workers=2)
        wants = [(x, y), (y.T, y), (y, y.T), (z, held)]
        for mine, want in zip(got, wants, strict=True):
            same(mine, exact(*want), (m, n, k))


def lowered_for(module: Module, target: Target) -> Module:
    cx = Context(Options(), target)
    fused = module.with_main(fuse(module.main, cx))
    return lower(fused, cx)


def test_forms() -> None:
    """Which words a target multiplies, by the signs of the operands."""
    vnni = formed(avx512(), "+avx512vnni")
    assert form_of(I8, I8, True, vnni) == Form("bytes", U8, I8, lifts_left=True)
    turned = Form("turned_bytes", I8, U8, lifts_right=True)
    assert form_of(I8, I8, False, vnni) == turned
    for constant in (False, True):
        assert form_of(U8, I8, constant, vnni) == Form("bytes", U8, I8)
        assert form_of(I8, U8, constant, vnni) == Form("turned_bytes", I8, U8)
        assert form_of(U8, U8, constant, vnni).parts == "halves"
        signed = EVERY_FORM["signed_bytes"]
        assert form_of(U8, I8, constant, signed).parts == "halves"
        for target in (avx512(), avx2(), baseline(), neon()):
            assert form_of(I8, I8, constant, target).parts == "halves"


def test_packing() -> None:
    matrix = np.array([[1, -2], [3, 4], [-5, 6], [7, 8], [9, -128]], np.int8)
    words = pack_words(matrix, Form("bytes", U8, I8, lifts_left=True))
    parts = words.view(np.int8).reshape(2, 2, 4)  # (word, column, part)
    assert parts[0, 0].tolist() == [1, 3, -5, 7]
    assert parts[1, 1].tolist() == [-128, 0, 0, 0]
    halves = pack_words(matrix, Form("halves", DType.I16, DType.I16))
    assert halves.view(np.int16).reshape(3, 2, 2)[1, 1].tolist() == [6, 8]
    assert pack_corrections(matrix).tolist() == [-128 * 15, 128 * 112]


# ---- from torch


class Quantised(nn.Module):
    """A linear layer of int8 weights, spelled in the ways that models spell it."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product = product
        generator = torch.Generator().manual_seed(0)
        weight = torch.randint(-128, 128, (35, 18), generator=generator)
        self.register_buffer("weight", weight.to(torch.int8))
        self.register_buffer("scale", torch.rand(35, generator=generator))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        weight = self.weight.t()
        sums = self.product(x, weight)
        return (
            sums,
            sums.float() * self.scale,
            torch.mm(x.to(torch.int32), weight.to(torch.int32)),
            torch.matmul(x.long(), weight.long()),
            torch.mm(x.short(), weight.short()),
            torch.mm(x, weight),
            self.product(x, y),
            torch.mm(x.to(torch.int32), y.to(torch.int32).t().t()),
        )


@pytest.mark.parametrize("target", TARGETS[:2])
def test_from_torch(target: str) -> None:
    model = Quantised(torch._int_mm)
    # Eager's sums of bytes are oneDNN's, which saturate without a dot instruction.
    exact = Quantised(lambda x, y: torch.mm(x.to(torch.int32), y.to(torch.int32)))

    def inputs(m: int, n: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(random(I8, m, 18)), torch.tensor(random(I8, 18, n))

    shapes = ({0: "m"}, {1: "n"})
    got_model = pliant.compile(
        model, inputs(5, 6), shapes, threads=2, target=machine(target)
    )
    for m, n in [(1, 1), (2, 33), (17, 9), (64, 65)]:
        given = inputs(m, n)
        for number, (got, want) in enumerate(
            zip(got_model(*given), exact(*given), strict=True)
        ):
            assert got.dtype == want.dtype, number
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_machine_uses_the_dot_instruction() -> None:
    if not MACHINE.has("avx512vnni"):
        pytest.skip("this machine has no dot instruction for bytes")
    program = guarded((I8, I8), "machine").program
    assert "vpdpbusd" in program.code.machine.assembly()
