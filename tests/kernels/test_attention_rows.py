"""Causal attention of rows from a number on, against float64, torch and interpreter.

Every graph is compiled once for all sizes. `guarded.py` says how a read or write
outside a buffer is caught, and a value that was never written.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from attention_gradients import KINDS
from guarded import GuardedProgram, Side
from machines import TARGETS, machine
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Module
from pliant.ir.interp import run_graph
from pliant.ir.text import print_module
from pliant.ir.types import DType, tensor
from pliant.kernels.attention_rows import FEW, LEAST_KEYS
from pliant.kernels.attention_tiles import blocking
from pliant.sym import Expr, as_expr, sym

P = sym("p")
any_target = pytest.mark.parametrize("target", TARGETS)
FLOOR = {DType.F64: 1e-14, DType.F32: 1e-6, DType.F16: 5e-4, DType.BF16: 4e-3}


@dataclass(frozen=True)
class Case:
    """What is fixed when a graph is made; batch, heads, lengths and p are symbols."""

    first: Expr = P
    head: int = 16
    group: int = 1
    mask: str = "none"  # none, bool, additive
    swapped: bool = False
    nan_rows: bool = False
    dtype: DType = DType.F32
    lse: bool = True

    def graph(self) -> Graph:
        """out and lse of q, k, v, a value of p elements[, mask]."""
        b = Builder()
        batch, heads, s, t = (sym(name) for name in "bhst")
        q = b.param("q", tensor(self.dtype, batch, heads * self.group, s, self.head))
        k, v = (
            b.param(name, tensor(self.dtype, batch, heads, t, self.head))
            for name in "kv"
        )
        b.param("past", tensor(DType.BOOL, P))
        operands = [q, k, v]
        if self.mask != "none":
            kind = DType.BOOL if self.mask == "bool" else self.dtype
            operands.append(b.param("mask", tensor(kind, batch, 1, s, t)))
        results = b.emit_multi(
            "attention_lse" if self.lse else "attention",
            *operands,
            causal=True,
            first=self.first,
            masked=self.mask != "none",
            swapped=self.swapped,
            nan_rows=self.nan_rows,
        )
        return b.finish("main", results)


@functools.cache
def program(case: Case, target: str = "machine") -> GuardedProgram:
    return GuardedProgram(Module({"main": case.graph()}), machine(target))


@dataclass(frozen=True)
class Sizes:
    p: int  # the symbol that `first` is made of
    s: int
    t: int
    b: int = 1
    h: int = 2


def inputs(case: Case, n: Sizes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n.p + 10 * n.s + 1000 * n.t)
    kind = KINDS[case.dtype]
    shapes = (
        (n.b, n.h * case.group, n.s, case.head),
        *2 * [(n.b, n.h, n.t, case.head)],
    )
    made = [torch.randn(shape, generator=generator).to(kind) for shape in shapes]
    made.append(torch.zeros(n.p, dtype=torch.bool))
    noise = torch.randn((n.b, 1, n.s, n.t), generator=generator)
    if case.mask != "none":
        made.append(noise > -0.7 if case.mask == "bool" else noise.to(kind))
    return made


def array(x: Tensor) -> np.ndarray:
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(np.uint16)
    return x.numpy()


def run(
    case: Case, given: list[Tensor], target: str = "machine", threads: int = 1
) -> list[Tensor]:
    """The results, at both ends of guarded memory, which agree to the bit."""
    made, arrays = program(case, target), [array(x) for x in given]
    sides = [[np.array(x) for x in made(arrays, side, threads)] for side in Side]
    for a, b in zip(*sides, strict=True):
        np.testing.assert_array_equal(a, b)
    out, *sums = (torch.from_numpy(x) for x in sides[0])
    return [out.view(KINDS[case.dtype]), *sums]


def seen(case: Case, n: Sizes) -> Tensor:
    first = case.first.evaluate({"p": n.p})
    return torch.arange(n.t)[None, :] <= first + torch.arange(n.s)[:, None]


def reference(case: Case, n: Sizes, given: list[Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse in float64."""
    q, k, v = (x.double() for x in given[:3])
    keys, values = (x.repeat_interleave(case.group, 1) for x in (k, v))
    scores = q @ keys.mT / math.sqrt(case.head)
    for mask in given[4:]:
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask
    scores = scores.masked_fill(~seen(case, n), -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1)
    nothing = math.nan if case.nan_rows and n.t else 0.0
    out = (weights @ values).masked_fill(empty, nothing)
    return out, scores.logsumexp(-1)


def error_of_torch(case: Case, n: Sizes, given: list[Tensor], exact: Tensor) -> float:
    q, k, v = given[:3]
    if not exact.numel() or not n.t or exact.isnan().any():
        return 0.0
    mask = seen(case, n)
    for other in given[4:]:
        if other.dtype is torch.bool:
            mask = mask & other
        else:
            mask = other.masked_fill(~mask, -math.inf)
    out = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return float((out.double() - exact).abs().max())


def check(case: Case, n: Sizes, given: list[Tensor], found: list[Tensor]) -> None:
    exact, sums = reference(case, n, given)
    out = found[0].transpose(-2, -3) if case.swapped else found[0]
    assert out.shape == exact.shape
    floor = FLOOR[case.dtype]
    allowed = floor + 2 * error_of_torch(case, n, given, exact)
    torch.testing.assert_close(
        out.double(), exact, atol=allowed, rtol=0, equal_nan=True
    )
    if case.lse:
        wide = 1e-12 if case.dtype is DType.F64 else 1e-5
        torch.testing.assert_close(found[1].double(), sums, atol=wide, rtol=wide)


def run_all(case: Case, n: Sizes, target: str = "machine", threads: int = 1) -> None:
    given = inputs(case, n)
    check(case, n, given, run(case, given, target, threads))


def edges() -> Iterator[Sizes]:
    """Keys up to the last row's own, more, and fewer."""
    for p, s, more in itertools.product((0, 1, 5, 13, 700), (0, 1, 3, 31), (0, 9, -4)):
        yield Sizes(p, s, max(p + s + more, 0))


# ---- compiled


@any_target
def test_lengths(target: str) -> None:
    for n in edges():
        run_all(Case(), n, target)


@any_target
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_masks_and_groups(target: str, threads: int, group: int, mask: str) -> None:
    case = Case(group=group, mask=mask, head=8, swapped=group == 3)
    for p, s, t in ((0, 7, 7), (5, 1, 6), (13, 37, 61), (300, 64, 364), (97, 11, 50)):
        run_all(case, Sizes(p, s, t, 2, 3), target, threads)


@any_target
@pytest.mark.parametrize("dtype", [DType.F64, DType.F16, DType.BF16], ids=str)
@pytest.mark.parametrize("mask", ["none", "additive"])
def test_types(target: str, dtype: DType, mask: str) -> None:
    case = Case(dtype=dtype, group=2, mask=mask, swapped=True)
    for p, s, t in ((0, 3, 3), (1, 1, 2), (13, 7, 20), (601, 33, 640)):
        run_all(case, Sizes(p, s, t), target)


@pytest.mark.parametrize("threads", [1, 2])
def test_several_blocks(threads: int) -> None:
    """Rows of several units, with keys of several blocks each."""
    for group, (p, s, t) in itertools.product(
        (1, 2), ((1000, 600, 1600), (333, 1100, 2000), (2000, 131, 1500))
    ):
        run_all(Case(group=group, head=8), Sizes(p, s, t, 1, 1), threads=threads)


@any_target
@pytest.mark.parametrize("mask", ["none", "bool"])
def test_keys_split_between_threads(target: str, mask: str) -> None:
    """Few rows, one head, many keys: no part need be seen by every row."""
    many = 2 * LEAST_KEYS
    case = Case(head=8, mask=mask)
    for s, more in itertools.product((1, 3, 16), (0, 700, -20)):
        n = Sizes(many, s, many + s + more, 1, 1)
        run_all(case, n, target, threads=2)
    # The second part begins beyond what the first rows see.
    before = Case(head=8, mask=mask, first=P - 9)
    for t in (many, many + 5):
        run_all(before, Sizes(many // 2, 16, t, 1, 1), target, threads=2)
        run_all(before, Sizes(many // 2 + 2, 16, t, 1, 1), target, threads=2)


@any_target
@pytest.mark.parametrize("nan_rows", [False, True])
def test_first_below_zero(target: str, nan_rows: bool) -> None:
    """The rows before row 0 see nothing, whatever tile they are in."""
    case = Case(first=P - 40, nan_rows=nan_rows, group=2, head=8)
    for p, s, t in ((0, 7, 7), (0, 100, 60), (39, 5, 5), (13, 600, 700), (3, 2, 0)):
        run_all(case, Sizes(p, s, t), target)


def test_expressions_and_numbers() -> None:
    for first in (2 * P + 1, P * P, as_expr(5), as_expr(-3)):
        case = Case(first=first, lse=False)
        for n in (Sizes(0, 3, 3), Sizes(4, 7, 30), Sizes(3, 1, 1)):
            run_all(case, n)


@pytest.mark.parametrize("first", [2**62, -(2**62)])
def test_numbers_beyond_any_size(first: int) -> None:
    case = Case(first=as_expr(first), lse=False)
    run_all(case, Sizes(0, 7, 40))


# ---- the number of columns visited


def test_hidden_blocks_are_not_visited() -> None:
    """Keys that no row sees are not read: they may be anything."""
    length = 3 * blocking(DType.F32, machine("machine")).KC
    case = Case()
    for p, s in ((0, 1), (7, 40), (length, 3)):
        n = Sizes(p, s, p + s + length)
        given = inputs(case, n)
        for x in given[1:3]:
            x[:, :, p + s :] = math.nan
        clean = [x.nan_to_num(0.0) if x.is_floating_point() else x for x in given]
        for a, b in zip(run(case, given), run(case, clean), strict=True):
            assert torch.equal(a, b)


def test_rows_from_zero_have_the_plain_kernel() -> None:
    """A constant 0 costs nothing: the kernel binds no number of earlier rows."""

    def text(first: Expr) -> str:
        return print_module(program(Case(first=first)).program.lowered)

    assert "_at_past" in text(P) and "_at_past" not in text(as_expr(0))


# ---- rows in chunks


def whole_and_chunks(
    case: Case, length: int, chunk: int, target: str = "machine"
) -> list[tuple[Tensor, Tensor]]:
    given = inputs(case, Sizes(0, length, length, 1, 2))
    whole = run(case, given, target)[0]
    pairs = []
    for begin in range(0, length, chunk):
        rows = [given[0][:, :, begin : begin + chunk].contiguous()]
        past = torch.zeros(begin, dtype=torch.bool)
        part = run(case, [*rows, *given[1:3], past], target)[0]
        pairs.append((part, whole[:, :, begin : begin + chunk]))
    return pairs


def test_chunks_are_the_rows_of_the_whole() -> None:
    for length, chunk in ((7, 3), (100, 33), (700, 150), (1300, 600)):
        for part, rows in whole_and_chunks(Case(), length, chunk):
            torch.testing.assert_close(part, rows, atol=1e-6, rtol=1e-5)


@any_target
def test_chunks_with_the_same_blocks_of_keys_have_the_same_bits(target: str) -> None:
    """One or two rows are dot products on unpacked keys, which add up otherwise."""
    length = blocking(DType.F32, machine(target)).KC
    most = FEW[-1]
    for chunk in (most + 1, 31, length // 2 + 1, length):
        for part, rows in whole_and_chunks(Case(), length, chunk, target):
            if part.shape[-2] > most:
                assert torch.equal(part, rows)


# ---- interpreted


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(group=2, mask="bool", swapped=True),
        Case(mask="additive", dtype=DType.F64),
        Case(dtype=DType.BF16, lse=False),
        Case(first=P - 2, nan_rows=True),
    ],
    ids=["plain", "grouped", "f64", "bf16", "nan_rows"],
)
def test_interpreter(case: Case) -> None:
    module = Module({"main": case.graph()})
    for p, s, t in ((0, 3, 3), (1, 1, 2), (5, 7, 12), (5, 7, 20), (5, 7, 9), (3, 0, 3)):
        n = Sizes(p, s, t)
        given = inputs(case, n)
        found = run_graph(module, [array(x) for x in given])
        check(case, n, given, [torch.from_numpy(np.array(x)) for x in found])
