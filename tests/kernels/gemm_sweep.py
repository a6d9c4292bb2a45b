"""Matrix products over many sizes, on guarded memory.

A result is accepted if |got - exact| <= gamma * (|A| |B|), the bound that holds for a
sum of K products in any order, with or without FMA: gamma = K*u / (1 - K*u), u = 2^-24
(Higham, Accuracy and Stability of Numerical Algorithms, eq. 3.5; each addend of an
epilogue counts as one more product). The reference is float64, whose own error is
2^-29 of the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from gemm_layouts import LAYOUTS, Build, Dims, K, Layout, M, N
from guarded import GuardedProgram, Side
from machines import machine

from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Module, Value
from pliant.ir.types import DType, tensor

BATCH = 3
UNIT = 2.0**-24
EPILOGUE = "bias and residual"
CONSTANT = "constant right"

Case = tuple[int, int, int]  # M, N, K
Run = Callable[[Case, Side], None]


def compile_layout(params: Sequence[Dims], build: Build, target: str) -> GuardedProgram:
    b = Builder()
    values = [
        b.param(f"x{k}", tensor(DType.F32, *dims)) for k, dims in enumerate(params)
    ]
    module = Module({"main": b.finish("main", [build(b, values)])})
    return GuardedProgram(module, machine(target))


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


class Operands:
    """A and B as large as any case needs, with A B and |A| |B| in float64."""

    def __init__(self, cases: Sequence[Case], left: bool, right: bool) -> None:
        m, n, k = (max(sizes) for sizes in zip(*cases, strict=True))
        source = np.random.default_rng(0)
        self.a = source.standard_normal((*[BATCH] * left, m, k), np.float32)
        self.b = source.standard_normal((*[BATCH] * right, k, n), np.float32)
        self.bias = source.standard_normal(n, np.float32)
        self.residual = source.standard_normal((m, n), np.float32)
        self.k = -1

    def at(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        m, n, k = case
        return self.a[..., :m, :k], self.b[..., :k, :n]

    def products(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """A B and |A| |B|; those of one K serve every M and N."""
        m, n, k = case
        if k != self.k:
            a = self.a[..., :k].astype(np.float64)
            b = self.b[..., :k, :].astype(np.float64)
            self.k, self.known = k, (a @ b, np.abs(a) @ np.abs(b))
        want, magnitude = self.known
        return want[..., :m, :n], magnitude[..., :m, :n]


def layout_run(layout: Layout, target: str, cases: Sequence[Case]) -> Run:
    program = compile_layout(layout.params, layout.build, target)
    x = Operands(cases, layout.left, layout.right)

    def run(case: Case, side: Side) -> None:
        parts = [np.ascontiguousarray(p) for p in layout.arrange(*x.at(case))]
        (got,) = program(parts, side, threads_of(case))
        check(got, *x.products(case), case[2])

    return run


def threads_of(case: Case) -> int:
    """One or two, mixed among the cases."""
    return 1 + sum(case) % 2


def epilogue_run(target: str, cases: Sequence[Case]) -> Run:
    """relu(A B + bias + residual): what the epilogue reads is guarded too."""

    def build(b: Builder, x: Sequence[Value]) -> Value:
        rows = b.binary("add", b.matmul(x[0], x[1]), x[2])
        whole = b.binary("add", rows, x[3])
        return b.binary("maximum", whole, b.scalar(0.0, DType.F32))

    program = compile_layout(((M, K), (K, N), (N,), (M, N)), build, target)
    x = Operands(cases, False, False)

    def run(case: Case, side: Side) -> None:
        m, n, k = case
        added = x.bias[:n], x.residual[:m, :n]
        parts = [np.ascontiguousarray(p) for p in (*x.at(case), *added)]
        (got,) = program(parts, side, threads_of(case))
        want, magnitude = x.products(case)
        want = want + sum(p.astype(np.float64) for p in added)
        magnitude = magnitude + sum(np.abs(p) for p in added)
        check(got, np.maximum(want, 0), magnitude, k + 2)

    return run


def constant_run(target: str, cases: Sequence[Case]) -> Run:
    """Weights packed at compile time: every (N, K) of the cases in one module.

    The first case of an M runs them all. Odd N come as they are, even N as the
    transpose of an (N, K) constant.
    """
    x = Operands(cases, False, False)
    builder = Builder()
    terms = sorted({k for _, _, k in cases})
    lefts = {k: builder.param(f"x{k}", tensor(DType.F32, M, k)) for k in terms}
    places = sorted({(n, k) for _, n, k in cases})
    results = []
    for n, k in places:
        held = np.ascontiguousarray(x.b[:k, :n].T if n % 2 == 0 else x.b[:k, :n])
        kind = tensor(DType.F32, *held.shape)
        weight = builder.constant(Constant(f"w{n}_{k}", kind, held))
        weight = builder.swap(weight, 0, 1) if n % 2 == 0 else weight
        results.append(builder.matmul(lefts[k], weight))
    main = builder.finish("main", results)
    module = Module({"main": main}, constants=dict(builder.constants))
    program = GuardedProgram(module, machine(target))
    done: dict[tuple[int, Side], dict[tuple[int, int], np.ndarray]] = {}

    def run(case: Case, side: Side) -> None:
        m, n, k = case
        if (m, side) not in done:
            parts = [np.ascontiguousarray(x.a[:m, :k]) for k in terms]
            found = map(np.array, program(parts, side, 1 + m % 2))
            done[m, side] = dict(zip(places, found, strict=True))
        check(done[m, side][n, k], *x.products(case), k)

    return run


def failures(
    name: str, target: str, cases: Sequence[Case], progress: Any
) -> Iterator[tuple[Case, str, str]]:
    """Every wrong case; `progress` holds the present one, should the process end."""
    if name == EPILOGUE:
        run = epilogue_run(target, cases)
    elif name == CONSTANT:
        run = constant_run(target, cases)
    else:
        run = layout_run(LAYOUTS[name], target, cases)
    for number, side in enumerate(Side):
        for case in cases:
            progress[:] = [number, *case]
            try:
                run(case, side)
            except AssertionError as error:
                yield case, side.value, str(error)
