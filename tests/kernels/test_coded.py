"""Products with weights in few bits: found by what the ops compute, decoded inside."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from guarded import GuardedProgram, Side
from machines import machine, runs
from torch import Tensor, nn

import pliant
from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module, Value
from pliant.ir.interp import run_graph
from pliant.ir.types import NUMPY, DType, tensor
from pliant.machine.target import host, named
from pliant.passes.coded import coded
from pliant.sym import sym

F32, F16, I8, U8 = DType.F32, DType.F16, DType.I8, DType.U8
M = sym("m")
TARGETS = ["machine", *(n for n in ("avx512", "avx2", "baseline") if runs(named(n)))]
Sizes = tuple[int, int, int]  # N, K, group


class Weight:
    """Emits a weight (N, K) from packed constants, and knows its numbers."""

    def __init__(self, b: Builder, sizes: Sizes) -> None:
        self.b, (self.n, self.k, self.group) = b, sizes
        self.source = np.random.default_rng(sizes)
        self.groups = self.k // self.group

    def constant(self, data: np.ndarray, dtype: DType) -> Value:
        name = f"c{len(self.b.constants)}"
        return self.b.constant(Constant(name, tensor(dtype, *data.shape), data))

    def codes(self, dtype: DType, per: int = 1) -> Value:
        low, high = (-128, 127) if dtype is I8 else (0, 255)
        shape = self.n, self.groups, self.group // per
        data = self.source.integers(low, high + 1, shape).astype(NUMPY[dtype])
        return self.constant(data, dtype)

    def part(self, dtype: DType = F16) -> Value:
        data = self.source.standard_normal((self.n, self.groups, 1))
        return self.b.cast(self.constant(data.astype(NUMPY[dtype]), dtype), F32)

    def nibbles(self) -> Value:
        b, packed = self.b, self.codes(U8, 2)
        low = b.binary("bitwise_and", packed, b.scalar(15, U8))
        high = b.binary("shift_right", packed, b.scalar(4, U8))
        return b.cast(b.concat([low, high], 2), F32)


def q8_0(w: Weight) -> Value:
    return w.b.binary("mul", w.b.cast(w.codes(I8), F32), w.part())


def bytes_above(w: Weight) -> Value:
    made = w.b.binary("sub", w.b.cast(w.codes(U8), F32), w.b.scalar(128.0, F32))
    return w.b.binary("mul", made, w.part(F32))


def q4_0(w: Weight) -> Value:
    made = w.b.binary("sub", w.nibbles(), w.b.scalar(8.0, F32))
    return w.b.binary("mul", made, w.part())


def q4_1(w: Weight) -> Value:
    return w.b.binary("add", w.b.binary("mul", w.nibbles(), w.part()), w.part())


def zero_points(w: Weight) -> Value:
    return w.b.binary("mul", w.b.binary("sub", w.nibbles(), w.part()), w.part())


def signed(w: Weight) -> Value:
    """Nibbles made signed as integers, as torchao does it."""
    b, packed = w.b, w.codes(I8)
    low = b.binary("bitwise_and", packed, b.scalar(15, I8))
    made = b.binary("sub", low, b.scalar(8, I8))
    return b.binary("mul", w.part(), b.cast(made, F32))


FORMATS = (q8_0, bytes_above, q4_0, q4_1, zero_points, signed)


def module_of(make: Callable[[Weight], Value], sizes: Sizes, follows: bool) -> Module:
    n, k, _ = sizes
    b = Builder()
    x = b.param("x", tensor(F32, M, k))
    weight = b.reshape(make(Weight(b, sizes)), (n, k))
    y = b.matmul(x, b.swap(weight, 0, 1))
    if follows:
        row = b.reshape(b.iota((n,), 0, F32), (1, n))
        y = b.unary("tanh", b.binary("add", y, row))
    return Module({"main": b.finish("main", [y])}, constants=dict(b.constants))


def kinds(program: Any) -> list[str]:
    ops = program.fused.main.ops
    return [op.str_attr("kind") for op in ops if op.name == "fusion"]


SIZES: tuple[Sizes, ...] = (
    (1, 32, 32),
    (16, 64, 32),
    (37, 96, 32),
    (33, 128, 128),
    (70, 2, 2),
    (5, 1376, 32),
)


def expected(module: Module, x: np.ndarray) -> np.ndarray:
    (want,) = run_graph(module, [x])
    return np.asarray(want)


CASES = [
    *(
        pytest.param(make, "machine", SIZES[k % 3 :: 3])
        for k, make in enumerate(FORMATS)
    ),
    *((q4_1, target, SIZES[2:4]) for target in TARGETS),
]


@pytest.mark.parametrize(("make", "target", "every"), CASES)
def test_formats(
    make: Callable[[Weight], Value], target: str, every: Sequence[Sizes]
) -> None:
    for number, sizes in enumerate(every):
        module = module_of(make, sizes, number % 2 == 1)
        program = GuardedProgram(module, machine(target))
        assert kinds(program.program)[-1] == "coded_matmul", sizes
        for m in (0, 1, 2, 3, 4, 5, 6, 7, 13, 40):
            x = np.random.default_rng(m).standard_normal((m, sizes[1]), np.float32)
            (got,) = program([x], (Side.START, Side.END)[m % 2], 1 + m % 2)
            np.testing.assert_allclose(
                got, expected(module, x), 1e-4, 1e-4 * sizes[1], err_msg=str((m, sizes))
            )


def test_the_numbers_are_never_in_memory() -> None:
    module = module_of(q4_1, (64, 128, 32), False)
    m = pliant.compile(module, threads=1)
    assert m.weight_bytes == 64 * 128 // 2 + 2 * 2 * 64 * 4
    plain = pliant.compile(module, threads=1, options=pliant.Options(coded=False))
    assert plain.weight_bytes >= 64 * 128 * 4
    x = np.random.default_rng(0).standard_normal((3, 128), np.float32)
    np.testing.assert_allclose(m(x), plain(x), 1e-4, 1e-4)


class Linear(nn.Module):
    """A layer of int8 weights, one scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(-128, 128, (40, 64), dtype=torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.rand(40, 1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale).relu()


def test_from_torch() -> None:
    """Batches of rows; and the codes follow the module."""
    net, x = Linear(), torch.rand(2, 3, 64)
    m = pliant.compile(net, (x,), ({0: "b", 1: "n"},), threads=2)
    assert kinds(m.program) == ["coded_matmul"]
    for shape in itertools.product((0, 1, 3), (1, 2, 9)):
        x = torch.rand(*shape, 64)
        torch.testing.assert_close(m(x), net(x), rtol=1e-4, atol=1e-3)
    net.weight.copy_(torch.randint(-128, 128, (40, 64)))
    net.scale.mul_(2)
    torch.testing.assert_close(m(x), net(x), rtol=1e-4, atol=1e-3)


def not_a_scale(w: Weight) -> Value:
    """Something that differs inside of a group."""
    data = w.source.standard_normal((w.n, w.groups, w.group)).astype(np.float32)
    return w.b.binary("mul", w.b.cast(w.codes(I8), F32), w.constant(data, F32))


def squared(w: Weight) -> Value:
    made = q8_0(w)
    return w.b.binary("mul", made, made)


def scaled_twice(w: Weight) -> Value:
    return w.b.binary("mul", q4_1(w), w.part())


@pytest.mark.parametrize("make", [not_a_scale, squared, scaled_twice])
def test_other_weights_are_left(make: Callable[[Weight], Value]) -> None:
    module = module_of(make, (20, 64, 32), False)
    m = pliant.compile(module, threads=1)
    assert "coded_matmul" not in kinds(m.program)
    x = np.random.default_rng(0).standard_normal((5, 64), np.float32)
    np.testing.assert_allclose(m(x), expected(module, x), 1e-3, 1e-2)


class Packed(nn.Module):
    """A layer whose weight is computed from bytes in some way."""

    def __init__(self, weight: Callable[[Packed], Tensor], inputs: int = 64) -> None:
        super().__init__()
        self.weight, self.inputs = weight, inputs
        data = torch.randint(0, 256, (32, 64), dtype=torch.int32)
        self.register_buffer("bytes", data.to(torch.uint8))
        self.register_buffer("signed", (data - 128).to(torch.int8))
        self.register_buffer("scale", torch.rand(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight(self))


VIEWS_OF_CODES: dict[str, tuple[Callable[[Packed], Tensor], int]] = {
    "every second": (lambda p: p.bytes[:, ::2].float() * p.scale, 32),
    "columns": (lambda p: p.bytes[:, 8:40].float() * p.scale, 32),
    "rows": (lambda p: p.bytes[4:20].float() * p.scale[4:20], 64),
    "a column": (lambda p: p.bytes[:, :1].expand(32, 64).float() * p.scale, 64),
    "a row": (lambda p: p.bytes[:1].expand(32, 64).float() * p.scale, 64),
    "halves": (
        lambda p: (
            p.signed.view(32, 2, 32).transpose(0, 1).reshape(32, 64).float() * p.scale
        ),
        64,
    ),
    "much of a column": (
        lambda p: (p.bytes[:, :1].expand(32, 4096) & 15).float() * p.scale,
        4096,
    ),
    "scales of a slice": (lambda p: p.signed[:8].float() * p.scale[::4], 64),
    "nothing": (lambda p: p.bytes[:, :0].float() * p.scale, 0),
}


@pytest.mark.parametrize("name", VIEWS_OF_CODES)
def test_codes_that_are_views_of_others(name: str) -> None:
    weight, inputs = VIEWS_OF_CODES[name]
    net = Packed(weight, inputs)
    m = pliant.compile(net, (torch.rand(3, inputs),), ({0: "n"},), threads=1)
    for rows in (0, 1, 7):
        x = torch.rand(rows, inputs)
        torch.testing.assert_close(m(x), net(x), rtol=1e-4, atol=1e-3)


def test_codes_that_a_call_gives() -> None:
    """A mask bounds any integers, but only those of constants are packed."""

    class Given(nn.Module):
        def forward(self, x: Tensor, codes: Tensor) -> Tensor:
            return nn.functional.linear(x, (codes & 15).float() * 0.5)

    x = torch.rand(5, 64)
    draw = partial(torch.randint, 0, 256, (32, 64))
    m = pliant.compile(Given(), (x, draw()), ({0: "n"}, None), threads=1)
    for codes in (draw(), draw()):
        torch.testing.assert_close(m(x, codes), Given()(x, codes))


def test_codes_that_wrap() -> None:
    """The range of i16 sums that leave i16 is not known."""

    def weight(p: Packed) -> Tensor:
        wide = p.bytes.to(torch.int16) + 32760
        return ((wide >> 7) >> 7).to(torch.int8).float() * p.scale

    net, x = Packed(weight), torch.rand(5, 64)
    net.bytes.fill_(200)
    m = pliant.compile(net, (x,), ({0: "n"},), threads=1)
    torch.testing.assert_close(m(x), net(x), rtol=1e-4, atol=1e-3)


def test_a_square_weight_that_is_not_transposed() -> None:
    """Axes are exchanged beside one of one element: the others keep their order."""
    b = Builder()
    x = b.param("x", tensor(F32, M, 64))
    weight = b.reshape(q8_0(Weight(b, (64, 64, 32))), (64, 64))
    swapped = b.transpose(b.reshape(weight, (64, 1, 64)), (0, 2, 1))
    y = b.matmul(x, b.reshape(swapped, (64, 64)))
    graph = b.finish("main", [y])
    module = Module({"main": graph}, constants=dict(b.constants))
    found = module.with_main(coded(graph, Context(pliant.Options(), host())))
    rows = np.random.default_rng(0).standard_normal((5, 64), np.float32)
    np.testing.assert_allclose(
        expected(found, rows), expected(module, rows), 1e-3, 1e-2
    )
