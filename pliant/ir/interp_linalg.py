"""What the ops of ir/ops_linalg.py mean, in NumPy: batches of matrices, in f64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pliant.errors import MatrixError

Array = np.ndarray[Any, Any]


def _raise(error: str, info: Any) -> None:
    bad = np.ravel(info)[np.ravel(info) != 0]
    if error and bad.size:
        raise MatrixError(error.replace("{value}", str(bad[0])))


def _each(
    function: Callable[..., tuple[Array, ...]], likes: tuple[Array, ...], *args: Array
) -> list[Array]:
    """A function of single matrices over a batch; `likes` are empty results."""
    found = [function(*matrices) for matrices in zip(*args, strict=True)]
    if not found:
        return list(likes)
    return [np.stack(parts) for parts in zip(*found, strict=True)]


# ---- Cholesky, LU


def cholesky(a: Array, upper: bool, error: str) -> tuple[Array, Array]:
    def one(x: Array) -> tuple[Array, Array]:
        whole = np.tril(x) if not upper else np.triu(x).T
        factor, info, n = whole.astype(np.float64), 0, len(x)
        for j in range(n):
            rest = factor[j, j] - factor[j, :j] @ factor[j, :j]
            if not rest > 0:
                info = j + 1
                break
            factor[j, j] = np.sqrt(rest)
            below = factor[j + 1 :, j] - factor[j + 1 :, :j] @ factor[j, :j]
            factor[j + 1 :, j] = below / factor[j, j]
        return (factor.T if upper else factor), np.asarray(info, np.int32)

    empty = np.zeros(a.shape[:1], np.int32)
    factor, info = _each(one, (a, empty), a)
    _raise(error, info)
    return factor.astype(a.dtype), info


def lu(a: Array, error: str) -> tuple[Array, Array, Array]:
    batch, m, n = a.shape
    k = min(m, n)

    def one(x: Array) -> tuple[Array, Array, Array]:
        x, info = x.astype(np.float64), 0
        pivots = np.zeros(k, np.int32)
        for j in range(k):
            pivot = j + int(np.argmax(np.abs(x[j:, j])))
            pivots[j] = pivot + 1
            x[[j, pivot]] = x[[pivot, j]]
            if x[j, j] == 0:
                info = info or j + 1
                continue
            x[j + 1 :, j] /= x[j, j]
            x[j + 1 :, j + 1 :] -= np.outer(x[j + 1 :, j], x[j, j + 1 :])
        return x, pivots, np.asarray(info, np.int32)

    empty = a, np.zeros((batch, k), np.int32), np.zeros(batch, np.int32)
    found, pivots, info = _each(one, empty, a)
    _raise(error, info)
    return found.astype(a.dtype), pivots, info


def row_order(pivots: Array, rows: int) -> Array:
    def one(pivots: Array) -> tuple[Array]:
        order = np.arange(rows)
        for j, pivot in enumerate(pivots - 1):
            if not 0 <= pivot < rows:
                raise MatrixError(f"pivots: {pivot + 1} is not among {rows} rows")
            order[[j, pivot]] = order[[pivot, j]]
        return (order,)

    return _each(one, (np.zeros((0, rows), np.int64),), pivots)[0]


def _substituted(a: Array, b: Array, upper: bool, unit: bool) -> Array:
    """Solves with one triangle; a zero on the diagonal gives infinities and NaN."""
    x, n = b.astype(np.float64), len(a)
    with np.errstate(all="ignore"):
        for i in range(n - 1, -1, -1) if upper else range(n):
            done = slice(i + 1, n) if upper else slice(0, i)
            x[i] -= a[i, done].astype(np.float64) @ x[done]
            if not unit:
                x[i] /= a[i, i]
    return x


def triangular_solve(
    a: Array, b: Array, upper: bool, transposed: bool, unit: bool
) -> Array:
    def one(a: Array, b: Array) -> tuple[Array]:
        a, above = (a.T, not upper) if transposed else (a, upper)
        return (_substituted(a, b, above, unit),)

    return _each(one, (b,), a, b)[0].astype(b.dtype)


def lu_solve(lu: Array, pivots: Array, b: Array, transposed: bool) -> Array:
    order = row_order(pivots, lu.shape[1])

    def one(lu: Array, order: Array, b: Array) -> tuple[Array]:
        if not transposed:
            low = _substituted(lu, b[order], False, True)
            return (_substituted(lu, low, True, False),)
        high = _substituted(lu.T, b, False, False)
        out = np.empty_like(high)
        out[order] = _substituted(lu.T, high, True, True)
        return (out,)

    return _each(one, (b,), lu, order, b)[0].astype(b.dtype)


# ---- reflectors


def qr(a: Array) -> tuple[Array, Array]:
    batch, m, n = a.shape
    if not a.size:
        return a, np.zeros((batch, min(m, n)), a.dtype)
    found, tau = np.linalg.qr(a.astype(np.float64), mode="raw")
    return np.swapaxes(found, 1, 2).astype(a.dtype), tau.astype(a.dtype)


def _reflected(qr: Array, tau: Array, c: Array, transposed: bool) -> Array:
    """Q c, or Q' c: the product of the reflectors I - tau v v'."""
    c = c.astype(np.float64)
    count = tau.shape[0]
    for i in range(count) if transposed else range(count - 1, -1, -1):
        v = qr[:, i].astype(np.float64)
        v[:i], v[i] = 0, 1
        c = c - tau[i].astype(np.float64) * np.outer(v, v @ c)
    return c


def householder(qr: Array, tau: Array) -> Array:
    def one(qr: Array, tau: Array) -> tuple[Array]:
        return (_reflected(qr, tau, np.eye(*qr.shape), False),)

    return _each(one, (qr,), qr, tau)[0].astype(qr.dtype)


def householder_multiply(
    qr: Array, tau: Array, c: Array, left: bool, transposed: bool
) -> Array:
    def one(qr: Array, tau: Array, c: Array) -> tuple[Array]:
        if left:
            return (_reflected(qr, tau, c, transposed),)
        return (_reflected(qr, tau, c.T, not transposed).T,)

    return _each(one, (c,), qr, tau, c)[0].astype(c.dtype)


# ---- singular values, eigenvalues


def svd(a: Array, full: bool, error: str) -> tuple[Array, Array, Array]:
    try:
        found = np.linalg.svd(a.astype(np.float64), full_matrices=full)
    except np.linalg.LinAlgError:
        raise MatrixError(error or "svd did not converge") from None
    u, s, vh = (x.astype(a.dtype) for x in found)
    return u, s, vh


def singular_values(a: Array, error: str) -> Array:
    try:
        found = np.linalg.svd(a.astype(np.float64), compute_uv=False)
    except np.linalg.LinAlgError:
        raise MatrixError(error or "svd did not converge") from None
    return found.astype(a.dtype)


def eigh(a: Array, upper: bool, error: str) -> tuple[Array, Array]:
    try:
        found = np.linalg.eigh(a.astype(np.float64), "U" if upper else "L")
    except np.linalg.LinAlgError:
        raise MatrixError(error or "eigh did not converge") from None
    return found[0].astype(a.dtype), found[1].astype(a.dtype)


def eigvalsh(a: Array, upper: bool, error: str) -> Array:
    return eigh(a, upper, error)[0]


def eig(a: Array, error: str) -> tuple[Array, Array]:
    try:
        values, vectors = np.linalg.eig(a.astype(np.float64))
    except np.linalg.LinAlgError:
        raise MatrixError(error or "eig did not converge") from None
    found = (np.stack([x.real, x.imag], -1) for x in (values, vectors))
    pair = tuple(x.astype(a.dtype) for x in found)
    return pair[0], pair[1]


# ---- symmetric, indefinite


def ldl(a: Array, error: str) -> tuple[Array, Array, Array]:
    """Pivots of Bunch and Kaufman, as LAPACK's sytf2 has them: a negative pair of
    pivots is a block of 2 x 2."""
    batch, n, _ = a.shape
    empty = a, np.zeros((batch, n), np.int32), np.zeros(batch, np.int32)
    found, pivots, info = _each(_ldl, empty, a)
    _raise(error, info)
    return found.astype(a.dtype), pivots, info


def _ldl(given: Array) -> tuple[Array, Array, Array]:
    alpha = (1 + np.sqrt(17)) / 8
    low = np.tril(given).astype(np.float64)
    x = low + np.tril(low, -1).T  # symmetric while it is worked on
    n, k, info = len(given), 0, 0
    pivots = np.zeros(n, np.int32)
    while k < n:
        size, pivot = _pivot(x, k, alpha)
        if pivot is None:
            info = info or k + 1
            size, pivot = 1, k
        end = k + size - 1
        if pivot != end:  # rows and columns of what is left
            x[[end, pivot], k:] = x[[pivot, end], k:]
            x[k:, [end, pivot]] = x[k:, [pivot, end]]
        block, rest = slice(k, k + size), slice(k + size, n)
        d = x[block, block]
        if np.any(d) and k + size < n:
            columns = np.linalg.solve(d, x[rest, block].T).T
            x[rest, rest] -= columns @ d @ columns.T
            x[rest, block] = columns
        pivots[block] = pivot + 1 if size == 1 else -(pivot + 1)
        k += size
    return np.tril(x), pivots, np.asarray(info, np.int32)


def _pivot(x: Array, k: int, alpha: float) -> tuple[int, int | None]:
    """The size of the next block and the row that goes to its end."""
    column = np.abs(x[k + 1 :, k])
    own, largest = abs(x[k, k]), column.max(initial=0.0)
    if max(own, largest) == 0:
        return 1, None
    if own >= alpha * largest:
        return 1, k
    row = k + 1 + int(column.argmax())
    others = np.abs(np.delete(x[row, k:], row - k)).max()
    if own * others >= alpha * largest**2:
        return 1, k
    if abs(x[row, row]) >= alpha * others:
        return 1, row
    return 2, row


def ldl_solve(ld: Array, pivots: Array, b: Array) -> Array:
    return _each(lambda *x: (_ldl_solve(*x),), (b,), ld, pivots, b)[0].astype(b.dtype)


def _ldl_solve(ld: Array, pivots: Array, b: Array) -> Array:
    n, x = len(ld), b.astype(np.float64)
    blocks: list[tuple[int, int, int]] = []  # start, size, row to exchange with its end
    k = 0
    while k < n:
        size = 1 if pivots[k] > 0 else 2
        blocks.append((k, size, abs(int(pivots[k])) - 1))
        k += size
    for k, size, row in blocks:
        end = k + size - 1
        x[[end, row]] = x[[row, end]]
        x[k + size :] -= (
            ld[k + size :, k : k + size].astype(np.float64) @ x[k : k + size]
        )
        d = np.tril(ld[k : k + size, k : k + size]).astype(np.float64)
        x[k : k + size] = np.linalg.solve(d + np.tril(d, -1).T, x[k : k + size])
    for k, size, row in reversed(blocks):
        end = k + size - 1
        below = ld[k + size :, k : k + size].astype(np.float64)
        x[k : k + size] -= below.T @ x[k + size :]
        x[[end, row]] = x[[row, end]]
    return x


def matrix_exp(a: Array) -> Array:
    """Scaled until a Taylor series of 24 terms is exact, and squared."""
    wide = a.astype(np.float64)
    if not a.size:
        return a
    fine = np.isfinite(wide).all((1, 2), keepdims=True)
    wide = np.where(fine, wide, 0.0)
    norm = np.abs(wide).sum(2).max(initial=0.0)
    squarings = max(int(np.ceil(np.log2(norm))) + 1, 0) if norm > 0 else 0
    scaled = wide / 2.0**squarings
    out = term = np.broadcast_to(np.eye(a.shape[1]), a.shape)
    for k in range(1, 25):
        term = term @ scaled / k
        out = out + term
    with np.errstate(all="ignore"):
        for _ in range(squarings):
            out = out @ out
        return np.where(fine, out, np.nan).astype(a.dtype)
