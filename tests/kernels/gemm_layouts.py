"""How the operands of a matrix product can lie in memory.

Each layout is one graph with M, N, K symbolic, compiled once. Its operands are views
made inside the graph, so that the kernel itself meets the strides; what a view leaves
out of its parameter is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pliant.ir.build import Builder
from pliant.ir.graph import Value
from pliant.sym import Expr, sym

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
