"""How operands of a matrix product can lie in memory, and the sweep over sizes.

Each layout is one graph with M, N, K symbolic, compiled once. Its operands are views
made inside the graph, so that the kernel itself meets the strides; what a view leaves
out of its parameter is NaN.

A result is accepted if |got - exact| <= gamma * (|A| |B|), the bound that holds for a
sum of K products in any order, with or without FMA: gamma = K*u / (1 - K*u), u = 2^-24
(Higham, Accuracy and Stability of Numerical Algorithms, eq. 3.5; each addend of an
epilogue counts as one more product). The reference is float64, whose own error is
2^-29 of the bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from guarded import GuardedProgram, Side

from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module, Value
from pliant.ir.types import DType, tensor
from pliant.sym import Expr, sym
from pliant.target import named

LARGEST = 33
BATCH = 3
UNIT = 2.0**-24
B, M, N, K = (sym(name) for name in ("b", "m", "n", "k"))

Dims = tuple[Expr, ...]
Build = Callable[[Builder, Sequence[Value]], Value]
Arrange = Callable[[np.ndarray, np.ndarray], list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Parameters, the product of views of them, and how A and B come to lie so.

    `left` and `right` say whether A (batch, m, k) and B (batch, k, n) have a batch.
    """

    params: tuple[Dims, ...]
    build: Build
    arrange: Arrange
    left: bool = False
    right: bool = False


def within(value: np.ndarray, shape: Sequence[int], *at: slice) -> np.ndarray:
    """NaN everywhere but at `at`."""
    whole = np.full(shape, np.nan, value.dtype)
    whole[at] = value
    return whole


def product(b: Builder, x: Sequence[Value]) -> Value:
    return b.matmul(x[0], x[1])


def transposed(left: bool, right: bool) -> Layout:
    def build(b: Builder, x: Sequence[Value]) -> Value:
        return b.matmul(
            b.swap(x[0], 0, 1) if left else x[0], b.swap(x[1], 0, 1) if right else x[1]
        )

    def arrange(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
        return [a.T if left else a, b.T if right else b]

    return Layout(
        ((K, M) if left else (M, K), (N, K) if right else (K, N)), build, arrange
    )


def long_rows() -> Layout:
    def build(b: Builder, x: Sequence[Value]) -> Value:
        return b.matmul(b.slice_axis(x[0], 1, 0, K), b.slice_axis(x[1], 1, 0, N))

    def arrange(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
        (m, k), n = a.shape, b.shape[1]
        return [
            within(a, (m, k + 3), slice(None), slice(k)),
            within(b, (k, n + 2), slice(None), slice(n)),
        ]

    return Layout(((M, K + 3), (K, N + 2)), build, arrange)


def inner_window() -> Layout:
    """Rows and columns left out on every side of both operands."""

    def build(b: Builder, x: Sequence[Value]) -> Value:
        left = b.slice_axis(b.slice_axis(x[0], 0, 1, M), 1, 2, K)
        right = b.slice_axis(b.slice_axis(x[1], 0, 1, K), 1, 3, N)
        return b.matmul(left, right)

    def arrange(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
        (m, k), n = a.shape, b.shape[1]
        return [
            within(a, (m + 2, k + 5), slice(1, 1 + m), slice(2, 2 + k)),
            within(b, (k + 2, n + 7), slice(1, 1 + k), slice(3, 3 + n)),
        ]

    return Layout(((M + 2, K + 5), (K + 2, N + 7)), build, arrange)


def every_other() -> Layout:
    """Steps of two along both axes of both operands."""

    def build(b: Builder, x: Sequence[Value]) -> Value:
        left = b.slice_axis(b.slice_axis(x[0], 0, 0, M, 2), 1, 0, K, 2)
        right = b.slice_axis(b.slice_axis(x[1], 0, 0, K, 2), 1, 0, N, 2)
        return b.matmul(left, right)

    def arrange(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
        (m, k), n = a.shape, b.shape[1]
        two = slice(None, None, 2)
        return [
            within(a, (2 * m, 2 * k), two, two),
            within(b, (2 * k, 2 * n), two, two),
        ]

    return Layout(((2 * M, 2 * K), (2 * K, 2 * N)), build, arrange)


def together(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    return [a, b]


def heads() -> Layout:
    """Heads inside positions, as projections give them."""

    def build(b: Builder, x: Sequence[Value]) -> Value:
        return b.matmul(b.transpose(x[0], (1, 0, 2)), b.transpose(x[1], (1, 2, 0)))

    def arrange(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
        return [a.transpose(1, 0, 2), b.transpose(2, 0, 1)]

    return Layout(((M, B, K), (N, B, K)), build, arrange, left=True, right=True)


def expanded(left: bool) -> Layout:
    """One operand repeated over the batch by a view of stride zero."""

    def build(b: Builder, x: Sequence[Value]) -> Value:
        if left:
            return b.matmul(b.broadcast(x[0], (B, M, K), (1, 2)), x[1])
        return b.matmul(x[0], b.broadcast(x[1], (B, K, N), (1, 2)))

    params = ((M, K), (B, K, N)) if left else ((B, M, K), (K, N))
    return Layout(params, build, together, left=not left, right=left)


def turned_result() -> Layout:
    """The result stored by columns; arranged so that it is A B again."""

    def build(b: Builder, x: Sequence[Value]) -> Value:
        return b.swap(b.matmul(b.swap(x[1], 0, 1), b.swap(x[0], 0, 1)), 0, 1)

    return Layout(((M, K), (K, N)), build, together)


LAYOUTS: dict[str, Layout] = {
    "plain": Layout(((M, K), (K, N)), product, together),
    "left transposed": transposed(True, False),
    "right transposed": transposed(False, True),
    "both transposed": transposed(True, True),
    "long rows": long_rows(),
    "inner window": inner_window(),
    "every other": every_other(),
    "batch": Layout(((B, M, K), (B, K, N)), product, together, True, True),
    "shared right": Layout(((B, M, K), (K, N)), product, together, True, False),
    "shared left": Layout(((M, K), (B, K, N)), product, together, False, True),
    "heads": heads(),
    "expanded left": expanded(True),
    "expanded right": expanded(False),
    "turned result": turned_result(),
}
EPILOGUE = "bias and residual"
CONSTANT = "constant right"


def compile_layout(params: Sequence[Dims], build: Build, target: str) -> GuardedProgram:
    b = Builder()
    values = [
        b.param(f"x{k}", tensor(DType.F32, *dims)) for k, dims in enumerate(params)
    ]
    module = Module({"main": b.finish("main", [build(b, values)])})
    return GuardedProgram(module, named(target))


def check(got: np.ndarray, want: np.ndarray, magnitude: np.ndarray, terms: int) -> None:
    """`want` is a sum of that many terms, `magnitude` the sum of their magnitudes."""
    bound = terms * UNIT / (1 - terms * UNIT) * magnitude
    assert got.shape == want.shape, f"shape {got.shape}, not {want.shape}"
    wrong = ~(np.abs(got - want) <= bound)  # a NaN is wrong too
    if wrong.any():
        at = tuple(int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} elements wrong, first at {at}: "
            f"{got[at]} is not {want[at]} within {bound[at]:.3g}"
        )


def operands(batch: tuple[int, ...] = (BATCH,)) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(0)
    shape = (*batch, LARGEST, LARGEST)
    return tuple(source.standard_normal(shape, np.float32) for _ in range(2))


Case = tuple[int, ...]
Run = Callable[[Case, Side], None]


def sweep(name: str, target: str, sizes: Sequence[int]) -> tuple[Run, list[Case]]:
    """What runs one case and raises if it is wrong, and all cases."""
    if name == EPILOGUE:
        run = epilogue_cases(target)
    elif name == CONSTANT:
        return constant_cases(target, sizes)
    else:
        run = layout_cases(LAYOUTS[name], target)
    # k first: the reference of one k serves every m and n
    return run, [(m, n, k) for k, m, n in itertools.product(sizes, repeat=3)]


def layout_cases(layout: Layout, target: str) -> Run:
    program = compile_layout(layout.params, layout.build, target)
    a, b = operands()
    a, b = (a if layout.left else a[0]), (b if layout.right else b[0])
    known = References(a, b)

    def run(case: Case, side: Side) -> None:
        m, n, k = case
        inputs = layout.arrange(a[..., :m, :k], b[..., :k, :n])
        (got,) = program([np.ascontiguousarray(x) for x in inputs], side, 1 + k % 2)
        check(got, *(table[..., :m, :n] for table in known.at(k)), k)

    return run


class References:
    """A B and |A| |B| over the first k terms, in float64; the last k is kept."""

    def __init__(self, a: np.ndarray, b: np.ndarray) -> None:
        self.a, self.b = a.astype(np.float64), b.astype(np.float64)
        self.k = -1

    def at(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        if k != self.k:
            a, b = self.a[..., :k], self.b[..., :k, :]
            self.k, self.want = k, a @ b
            self.magnitude = np.abs(a) @ np.abs(b)
        return self.want, self.magnitude


def epilogue_cases(target: str) -> Run:
    """relu(A B + bias + residual): what the epilogue reads is guarded too."""

    def build(b: Builder, x: Sequence[Value]) -> Value:
        rows = b.binary("add", b.matmul(x[0], x[1]), x[2])
        return b.binary(
            "maximum", b.binary("add", rows, x[3]), b.scalar(0.0, DType.F32)
        )

    program = compile_layout(((M, K), (K, N), (N,), (M, N)), build, target)
    (a, b), (residual, bias) = operands(()), operands(())
    known = References(a, b)

    def run(case: Case, side: Side) -> None:
        m, n, k = case
        added = bias[0, :n], residual[:m, :n]
        parts = [a[:m, :k], b[:k, :n], *added]
        (got,) = program([np.ascontiguousarray(p) for p in parts], side, 1 + k % 2)
        want, magnitude = (table[:m, :n] for table in known.at(k))
        want = want + sum(x.astype(np.float64) for x in added)
        magnitude = magnitude + sum(np.abs(x) for x in added)
        check(got, np.maximum(want, 0), magnitude, k + 2)

    return run


def constant_cases(target: str, sizes: Sequence[int]) -> tuple[Run, list[Case]]:
    """Weights packed at compile time: every (N, K) of `sizes` in one module.

    Odd N come as they are, even N as the transpose of an (N, K) constant.
    """
    a, b = operands(())
    builder = Builder()
    lefts = {k: builder.param(f"x{k}", tensor(DType.F32, M, k)) for k in sizes}
    places = list(itertools.product(sizes, sizes))
    results = []
    for k, n in places:
        held = np.ascontiguousarray(b[:k, :n].T if n % 2 == 0 else b[:k, :n])
        kind = tensor(DType.F32, *held.shape)
        weight = builder.constant(Constant(f"w{k}_{n}", kind, held))
        weight = builder.swap(weight, 0, 1) if n % 2 == 0 else weight
        results.append(builder.matmul(lefts[k], weight))
    main = builder.finish("main", results)
    module = Module({"main": main}, constants=dict(builder.constants))
    program = GuardedProgram(module, named(target))
    known = {k: References(a, b).at(k) for k in sizes}

    def run(case: Case, side: Side) -> None:
        (m,) = case
        lefts = [np.ascontiguousarray(a[:m, :k]) for k in sizes]
        for (k, n), got in zip(places, program(lefts, side, 1 + m % 2), strict=True):
            check(got, *(table[:m, :n] for table in known[k]), k)

    return run, [(m,) for m in range(LARGEST + 1)]


def failures(
    name: str, target: str, sizes: Sequence[int], progress: Any
) -> Iterator[tuple[Case, str, str]]:
    """Every wrong case; `progress` holds the present one, should the process end."""
    run, cases = sweep(name, target, sizes)
    for case in cases:
        for number, side in enumerate(Side):
            progress[: len(case) + 1] = [number, *case]
            try:
                run(case, side)
            except AssertionError as error:
                yield case, side.value, str(error)
