"""Linear algebra in native code and in the interpreter, against eager.

Arenas end at guard pages and start as NaN. Matrices are 0, 1 and a few sizes; what is
not unique (signs of vectors) is compared by what it multiplies to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_oracle
from guarded_runs import hostile  # noqa: F401  (a fixture)
from torch import linalg, nn

import pliant
from pliant.runtime import lapack

BOTH = (torch.float32, torch.float64)
SQUARES = ((2, 3, 3), (1, 1, 1), (0, 4, 4), (3, 0, 0), (5, 8, 8), (2, 67, 67))
RECTANGLES = (
    *((2, 3, 5), (2, 5, 3), (1, 1, 1), (2, 0, 3), (2, 3, 0), (0, 2, 2)),
    (2, 70, 33),
)
BATCHED = ({0: "b", 1: "n", 2: "n"},)
ANY = ({0: "b", 1: "m", 2: "n"},)


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: torch.Tensor) -> Any:
        found = self.function(*x)
        return tuple(found) if isinstance(found, tuple) else found


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=dtype)


def regular(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Well conditioned, so that pivots do not depend on rounding."""
    x = normal(*shape, dtype=dtype)
    return x + 2 * torch.eye(*shape[-2:], dtype=dtype).flip(-1)


def positive(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    x = normal(*shape, dtype=dtype)
    return x @ x.mT + shape[-1] * torch.eye(shape[-1], dtype=dtype)


def near(got: Any, want: Any, dtype: torch.dtype) -> None:
    limit = 2e-4 if dtype is torch.float32 else 1e-10
    got, want = ((x,) if torch.is_tensor(x) else tuple(x) for x in (got, want))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.isnan(), b.isnan())
        if b.is_floating_point() and b.numel():
            scale = b.nan_to_num(0, 0, 0).abs().max().clamp(min=1)
            assert (a - b).nan_to_num(0, 0, 0).abs().max() <= limit * scale
        else:
            assert torch.equal(a, b)


def check(
    function: Callable[..., Any],
    make: Callable[..., torch.Tensor],
    shapes: tuple[tuple[int, ...], ...],
    dims: Any,
) -> None:
    """Compiled and interpreted as eager, at every shape."""
    for dtype in BOTH:
        example = make(*shapes[0], dtype=dtype)
        model = Call(function)
        compiled = pliant.compile(model, (example,), (dims,), threads=2)
        imported = torch_oracle.imported_from(model, (example,), (dims,))
        for shape in shapes:
            x = make(*shape, dtype=dtype)
            want = model(x)
            near(compiled(x), want, dtype)
            near(torch_oracle.run(imported, (x,)), want, dtype)


def test_cholesky() -> None:
    def model(x: torch.Tensor) -> Any:
        low, high = linalg.cholesky(x), linalg.cholesky(x, upper=True)
        ones = torch.ones_like(x.sum(-1, keepdim=True))
        solved = torch.cholesky_solve(ones, low), torch.cholesky_solve(ones, high, True)
        return low, high, *linalg.cholesky_ex(x), *solved, torch.cholesky_inverse(low)

    check(model, positive, SQUARES, BATCHED)


def test_lu() -> None:
    def model(x: torch.Tensor) -> Any:
        found, pivots = linalg.lu_factor(x)
        right = torch.ones_like(x[..., :2])
        solved = linalg.lu_solve(found, pivots, right)
        adjoint = linalg.lu_solve(found, pivots, right, adjoint=True)
        beside = linalg.lu_solve(found, pivots, right.mT, left=False)
        return found, pivots, solved, adjoint, beside, linalg.slogdet(x)[1]

    check(
        model,
        regular,
        ((2, 3, 3), (1, 2, 2), (0, 4, 4), (5, 8, 8), (2, 67, 67)),
        BATCHED,
    )


def test_lu_of_rectangles() -> None:
    check(lambda x: (*linalg.lu(x), *linalg.lu_factor_ex(x)), normal, RECTANGLES, ANY)


def test_solve_and_inverse() -> None:
    def model(x: torch.Tensor) -> Any:
        vector = linalg.solve(x, x[..., 0])
        matrix = linalg.solve(x, x[0, :, :2])
        right = linalg.solve(x, x.mT, left=False)
        inverses = linalg.inv(x), *linalg.inv_ex(x), *linalg.solve_ex(x, x)
        return vector, matrix, right, *inverses, linalg.det(x), *linalg.slogdet(x)

    check(model, regular, ((3, 4, 4), (1, 2, 2), (5, 8, 8), (2, 67, 67)), BATCHED)


def test_a_matrix_that_eager_takes_for_vectors_is_refused() -> None:
    model = Call(lambda x: linalg.solve(x, x[0, :, :2]))
    m = pliant.compile(model, (regular(3, 4, 4, dtype=torch.float32),), (BATCHED,))
    x = regular(2, 2, 2, dtype=torch.float32)
    assert model(x).shape == (2, 2)
    with pytest.raises(pliant.ShapeError, match="vector"):
        m(x)


def test_determinant_of_no_rows_and_of_singular_matrices() -> None:
    model = Call(lambda x: (linalg.det(x), *linalg.slogdet(x)))
    m = pliant.compile(model, (normal(2, 3, 3),), (BATCHED,))
    for x in (normal(2, 0, 0), normal(0, 3, 3), torch.zeros(2, 3, 3)):
        near(m(x), model(x), torch.float32)


def test_triangles() -> None:
    def model(x: torch.Tensor) -> Any:
        right = x[..., :2]
        ways = [(u, d) for u in (False, True) for d in (False, True)]
        solved = [
            linalg.solve_triangular(x, right, upper=u, unitriangular=d) for u, d in ways
        ]
        beside = [
            linalg.solve_triangular(x, right.mT, upper=u, left=False) for u, _ in ways
        ]
        old = [torch.triangular_solve(right, x, u, d)[0] for u, d in ways]
        return (*solved, *beside, *old)

    shapes = ((2, 3, 3), (1, 2, 2), (0, 4, 4), (5, 8, 8))
    check(model, positive, shapes, BATCHED)


@pytest.mark.parametrize("mode", ("reduced", "complete", "r"))
def test_qr(mode: str) -> None:
    check(lambda x: tuple(linalg.qr(x, mode)), normal, RECTANGLES, ANY)


def test_householder_products() -> None:
    def model(x: torch.Tensor) -> Any:
        tau = x[:, 0, :2]
        square = x[:, :, :2]
        ways = [(left, t) for left in (False, True) for t in (False, True)]
        made = [
            torch.ormqr(square, tau, x if left else x.mT, left=left, transpose=t)
            for left, t in ways
        ]
        return (linalg.householder_product(square, tau), *made)

    check(model, normal, ((2, 5, 3), (1, 2, 2), (3, 41, 33)), ANY)


@pytest.mark.parametrize("full", (False, True))
def test_svd(full: bool) -> None:
    def model(x: torch.Tensor) -> Any:
        u, s, vh = linalg.svd(x, full_matrices=full)
        k = s.shape[-1]
        back = (u[..., :k] * s[..., None, :]) @ vh[..., :k, :]
        return s, linalg.svdvals(x), back, u.mT @ u, vh @ vh.mT

    check(model, normal, RECTANGLES, ANY)


@pytest.mark.parametrize("triangle", ("L", "U"))
def test_eigh(triangle: str) -> None:
    def model(x: torch.Tensor) -> Any:
        values, vectors = linalg.eigh(x, UPLO=triangle)
        back = (vectors * values[..., None, :]) @ vectors.mT
        return values, linalg.eigvalsh(x, UPLO=triangle), back, vectors.mT @ vectors

    check(model, normal, SQUARES, BATCHED)


def test_pseudo_inverse_rank_and_condition() -> None:
    def model(x: torch.Tensor) -> Any:
        low = x[..., :1] @ x[..., :1, :]  # of rank 1
        ranks = linalg.matrix_rank(low), linalg.matrix_rank(x, atol=0.5)
        norms = linalg.matrix_norm(x, "nuc"), linalg.cond(x)
        return linalg.pinv(low), linalg.pinv(x), *ranks, *norms

    check(model, normal, ((2, 3, 5), (2, 5, 3), (1, 1, 1), (4, 9, 2)), ANY)


def test_powers_and_exponentials() -> None:
    def model(x: torch.Tensor) -> Any:
        powers = [linalg.matrix_power(x, k) for k in (-2, 0, 3)]
        return (*powers, torch.matrix_exp(x), torch.matrix_exp(0.01 * x))

    check(model, regular, ((2, 3, 3), (1, 2, 2), (4, 9, 9)), BATCHED)


def test_exponential_of_large_matrices() -> None:
    m = pliant.compile(Call(torch.matrix_exp), (normal(2, 3, 3),), (BATCHED,))
    for scale in (0.0, 1e-8, 30.0, 60.0):
        x = scale * normal(9, 5, 5)
        exact = torch.matrix_exp(x.double()).float()
        # Squares of large numbers overflow, and what cancels out then is no number.
        fits = torch.matrix_exp(x).isfinite().all(-1).all(-1)
        assert torch.equal(m(x).isfinite().all(-1).all(-1), fits)
        near(m(x)[fits], exact[fits], torch.float32)


def test_symmetric_indefinite() -> None:
    def model(x: torch.Tensor) -> Any:
        whole = x + x.mT
        found, pivots = linalg.ldl_factor(whole)
        return linalg.ldl_solve(found, pivots, x[..., :2]), pivots, found

    shapes = ((2, 3, 3), (1, 2, 2), (5, 8, 8), (2, 30, 30))
    check(model, normal, shapes, BATCHED)


@pytest.mark.parametrize(
    "function, words",
    (
        (linalg.inv, "element 2 is zero"),
        (lambda x: linalg.solve(x, x), "singular"),
        (linalg.cholesky, "order 2 is not positive-definite"),
        (lambda x: linalg.matrix_power(x, -1), "singular"),
        (lambda x: linalg.lu_factor(x)[0], "is zero"),
        (linalg.tensorinv, "singular"),
    ),
)
def test_a_singular_matrix_is_an_error(
    function: Callable[..., Any], words: str
) -> None:
    if function is linalg.tensorinv:
        function = partial(linalg.tensorinv, ind=1)
    good, bad = torch.eye(2), torch.ones(2, 2)
    m = pliant.compile(Call(function), (good,), ({0: "n", 1: "n"},))
    near(m(good), function(good), torch.float32)
    with pytest.raises(pliant.MatrixError, match=words):
        m(bad)
    imported = torch_oracle.imported_from(Call(function), (good,), ({0: "n", 1: "n"},))
    with pytest.raises(pliant.MatrixError, match=words):
        torch_oracle.run(imported, (bad,))
    near(m(good), function(good), torch.float32)


def test_info_instead_of_an_error() -> None:
    model = Call(lambda x: (linalg.inv_ex(x)[1], *linalg.cholesky_ex(x)[1:]))
    m = pliant.compile(model, (normal(2, 3, 3),), (BATCHED,))
    x = torch.stack([torch.eye(3), torch.ones(3, 3), torch.zeros(3, 3)])
    assert all(map(torch.equal, m(x), model(x)))


def test_nothing_converges_on_nan() -> None:
    x = normal(2, 3, 3)
    for function in (linalg.svdvals, linalg.eigvalsh):
        m = pliant.compile(Call(function), (x,), (BATCHED,))
        spoilt = x.clone()
        spoilt[1, 0, 0] = float("nan")
        with pytest.raises(pliant.MatrixError, match="converge"):
            m(spoilt)


def test_the_plan_holds_the_workspace() -> None:
    m = pliant.compile(Call(linalg.svdvals), (normal(2, 3, 5),), (ANY,), threads=1)
    plan = m.memory_plan(b=4, m=30, n=20)
    work = 4 * (30 * 20 + 10 * 20 + 64 * (30 + 20) + 32) + 4 * 8 * 20
    assert plan.peak_bytes == (work + 63) // 64 * 64 + 4 * 4 * 20
    x = normal(4, 30, 20)
    m(x)
    assert m.stats()["last_peak_bytes"] == plan.peak_bytes


def test_without_lapack_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lapack, "PACKAGE", "no_such_package")
    lapack.use_lapack.cache_clear()
    try:
        with pytest.raises(pliant.PliantError, match="pip install scipy-openblas32"):
            pliant.compile(Call(linalg.inv), (torch.eye(2),))
    finally:
        lapack.use_lapack.cache_clear()
