"""Gradients of linear algebra (ir/ops_linalg.py), as torch has them.

Values are batches of real matrices. Where a factorization is not unique, or not smooth
(equal eigenvalues or singular values, a singular matrix), a gradient is not finite, or
any of several.

    cholesky    A = L L'        dA = 1/2 L^-T sym(L' dL) L^-1
    lu          A = P L U       dA = P L^-T (lower(L' dL) + upper(dU U')) U^-T
    eigh        A = V w V'      dA = V (diag(dw) + V' dV / (w_j - w_i)) V'
    svd         A = U s V'      see `_svd`
    qr          A = Q R         see `_of_factors`
"""

from __future__ import annotations

from pliant.errors import UnsupportedOp, UnsupportedOpError
from pliant.ir.build import Builder
from pliant.ir.graph import Op, Value
from pliant.ir.types import DType
from pliant.passes.gradient_tape import GradientPart, Grads, Parts, Rule, Tape
from pliant.sym import as_expr

# ---- matrices


def _mT(b: Builder, x: Value) -> Value:
    return b.transpose(x, (0, 2, 1))


def _product(b: Builder, *factors: Value) -> Value:
    out, *others = factors
    for factor in others:
        out = b.matmul(out, factor)
    return out


def _keep(b: Builder, x: Value, relation: str) -> Value:
    """The elements whose row is in this relation to their column; else 0."""
    rows, columns = x.shape[1:]
    row, column = b.iota((rows, as_expr(1)), 0), b.iota((as_expr(1), columns), 1)
    return b.select(b.binary(relation, row, column), x, b.scalar(0.0, x.dtype))


def _sum(b: Builder, x: Value | None, y: Value) -> Value:
    return y if x is None else b.emit("add", x, y)


def _diagonal(b: Builder, x: Value) -> Value:
    """(batch, n) as the diagonals of matrices."""
    batch, n = x.shape
    wide = b.broadcast(x, (batch, n, n), (0, 2))
    return _keep(b, wide, "eq")


def _scaled(b: Builder, x: Value, columns: Value) -> Value:
    """x diag(columns)"""
    return b.emit("mul", x, b.broadcast(columns, x.shape, (0, 2)))


def _solve(
    b: Builder, a: Value, x: Value, *, upper: bool, transposed: bool, unit: bool = False
) -> Value:
    return b.emit(
        "triangular_solve", a, x, upper=upper, transposed=transposed, unit=unit
    )


def _over(b: Builder, x: Value, gaps: Value) -> Value:
    """x / gaps beside the diagonal, and 0 on it."""
    one = b.scalar(1.0, x.dtype)
    safe = b.emit(
        "add", _keep(b, gaps, "ne"), _keep(b, b.broadcast_to(one, x.shape), "eq")
    )
    return _keep(b, b.emit("div", x, safe), "ne")


def _gaps(b: Builder, values: Value) -> Value:
    """Element (i, j) is value j less value i."""
    batch, n = values.shape
    shape = (batch, n, n)
    along, down = b.broadcast(values, shape, (0, 2)), b.broadcast(values, shape, (0, 1))
    return b.emit("sub", along, down)


def _permuted(b: Builder, pivots: Value, x: Value, *, back: bool) -> Value:
    """P' x, or with `back` P x, by the matrix of a permutation."""
    n = x.shape[1]
    order = b.emit("row_order", pivots, rows=n)
    shape = (x.shape[0], n, n)
    at = b.broadcast(
        b.cast(order, DType.I64), shape, (0, 1)
    )  # (i, j) of P' is 1 if j is at
    ones = b.cast(b.emit("eq", at, b.iota(shape, 2)), x.dtype)
    return b.matmul(_mT(b, ones) if back else ones, x)


# ---- rules


def _cholesky(tape: Tape, op: Op, grads: Grads) -> Parts:
    g, b, (a,), low = grads[0], tape.b, op.operands, op.results[0]
    if g is None:
        return
    if op.bool_attr("upper"):
        low, g = _mT(b, low), _mT(b, g)
    inner = b.matmul(_mT(b, low), g)
    inner = b.emit("add", _keep(b, inner, "ge"), _mT(b, _keep(b, inner, "gt")))
    left = _solve(b, low, inner, upper=False, transposed=True)
    # Both are symmetric: X L^-1 is the transpose of L^-T X'.
    found = _solve(b, low, _mT(b, left), upper=False, transposed=True)
    yield a, GradientPart(tape.times(_mT(b, found), 0.5))


def _lu(tape: Tape, op: Op, grads: Grads) -> Parts:
    g, b, (a,), (lu, pivots, _) = grads[0], tape.b, op.operands, op.results
    if g is None:
        return
    tape.b.require_equal(a.shape[1], a.shape[2], "gradients of LU of a square matrix")
    below = _keep(b, lu, "gt")
    low = b.emit("add", below, _identity(b, lu))
    first = _keep(b, b.matmul(_mT(b, low), _keep(b, g, "gt")), "gt")
    second = _keep(b, b.matmul(_keep(b, g, "le"), _mT(b, _keep(b, lu, "le"))), "le")
    left = _solve(
        b, lu, b.emit("add", first, second), upper=False, transposed=True, unit=True
    )
    both = _solve(b, lu, _mT(b, left), upper=True, transposed=False)
    yield a, GradientPart(_permuted(b, pivots, _mT(b, both), back=True))


def _identity(b: Builder, like: Value) -> Value:
    one = b.broadcast_to(b.scalar(1.0, like.dtype), like.shape)
    return _keep(b, one, "eq")


def _lu_solve(tape: Tape, op: Op, grads: Grads) -> Parts:
    """With A = P L U: x = U^-1 y, y = L^-1 P' b; or x = P u, u = L^-T z, z = U^-T b."""
    (g,), b, (lu, pivots, right), x = grads, tape.b, op.operands, op.result
    assert g is not None
    low, high = _keep(b, lu, "gt"), _keep(b, lu, "le")
    low = b.emit("add", low, _identity(b, lu))
    if op.bool_attr("transposed"):
        u, g = (_permuted(b, pivots, v, back=False) for v in (x, g))
        of_z = _solve(b, lu, g, upper=False, transposed=False, unit=True)
        of_right = _solve(b, lu, of_z, upper=True, transposed=False)
        of_low = b.matmul(u, _mT(b, of_z))
        of_high = b.matmul(b.matmul(_mT(b, low), u), _mT(b, of_right))
    else:
        of_y = _solve(b, lu, g, upper=True, transposed=True)
        back = _solve(b, lu, of_y, upper=False, transposed=True, unit=True)
        of_right = _permuted(b, pivots, back, back=True)
        of_high = b.matmul(of_y, _mT(b, x))
        of_low = b.matmul(back, _mT(b, b.matmul(high, x)))
    if tape.wants(right):
        yield right, GradientPart(of_right)
    if tape.wants(lu):
        both = b.emit("add", _keep(b, of_low, "gt"), _keep(b, of_high, "le"))
        yield lu, GradientPart(tape.neg(both))


def _triangular(tape: Tape, op: Op, grads: Grads) -> Parts:
    (g,), b, (a, right), x = grads, tape.b, op.operands, op.result
    assert g is not None
    upper, transposed = op.bool_attr("upper"), op.bool_attr("transposed")
    unit = op.bool_attr("unit")
    found = _solve(b, a, g, upper=upper, transposed=not transposed, unit=unit)
    if tape.wants(right):
        yield right, GradientPart(found)
    if tape.wants(a):
        pair = (x, found) if transposed else (found, x)
        whole = b.matmul(pair[0], _mT(b, pair[1]))
        relation = ("lt" if unit else "le") if upper else ("gt" if unit else "ge")
        yield a, GradientPart(tape.neg(_keep(b, whole, relation)))


def _eigh(tape: Tape, op: Op, grads: Grads) -> Parts:
    (of_values, of_vectors), b, (a,) = grads, tape.b, op.operands
    values, vectors = op.results
    inner: Value | None = None
    if of_vectors is not None:
        turned = b.matmul(_mT(b, vectors), of_vectors)
        inner = _over(b, turned, _gaps(b, values))
    if of_values is not None:
        inner = _sum(b, inner, _diagonal(b, of_values))
    if inner is not None:
        yield a, GradientPart(_product(b, vectors, inner, _mT(b, vectors)))


def _eigvalsh(tape: Tape, op: Op, grads: Grads) -> Parts:
    (g,), b, (a,) = grads, tape.b, op.operands
    assert g is not None
    upper, error = op.bool_attr("upper"), op.str_attr("error")
    _, vectors = b.emit_multi("eigh", a, upper=upper, error=error)
    yield a, GradientPart(b.matmul(_scaled(b, vectors, g), _mT(b, vectors)))


def _svd(tape: Tape, op: Op, grads: Grads) -> Parts:
    """dA = U (skew(U' dU)/E s + s skew(V' dV)/E + diag(ds)) V', E = s_j^2 - s_i^2.

    What dU has beside U, and dV beside V, adds (1 - U U') dU / s V' and its like.
    """
    (of_u, of_s, of_vh), b, (a,) = grads, tape.b, op.operands
    u, s, vh = op.results
    if op.bool_attr("full"):
        tape.b.require_equal(a.shape[1], a.shape[2], "gradients of a full svd")
    squares = _gaps(b, b.emit("mul", s, s))
    inner = None if of_s is None else _diagonal(b, of_s)
    beside: Value | None = None
    inverse = b.emit("div", b.broadcast_to(b.scalar(1.0, s.dtype), s.shape), s)
    if of_u is not None:
        turned = b.matmul(_mT(b, u), of_u)
        skew = b.emit("sub", turned, _mT(b, turned))
        inner = _sum(b, inner, _scaled(b, _over(b, skew, squares), s))
        rest = b.emit("sub", of_u, b.matmul(u, turned))
        beside = b.matmul(_scaled(b, rest, inverse), vh)
    if of_vh is not None:
        turned = b.matmul(vh, _mT(b, of_vh))
        skew = b.emit("sub", turned, _mT(b, turned))
        # s on the left is s on the right of the transpose.
        scaled = _mT(b, _scaled(b, _mT(b, _over(b, skew, squares)), s))
        inner = _sum(b, inner, scaled)
        rest = b.emit("sub", of_vh, b.matmul(_mT(b, turned), vh))
        beside = _sum(b, beside, b.matmul(_scaled(b, u, inverse), rest))
    if inner is not None:
        found = _product(b, u, inner, vh)
        yield a, GradientPart(found if beside is None else b.emit("add", found, beside))


def _singular_values(tape: Tape, op: Op, grads: Grads) -> Parts:
    (g,), b, (a,) = grads, tape.b, op.operands
    assert g is not None
    u, _, vh = b.emit_multi("svd", a, full=False, error=op.str_attr("error"))
    yield a, GradientPart(b.matmul(_scaled(b, u, g), vh))


# ---- QR: the op gives R, and what Q is made of (`householder`); the gradient of A is a
# sum of what Q and R add, so each rule gives its part of it.


def _of_factors(
    b: Builder, a: Value, q: Value, r: Value, of_q: Value | None, of_r: Value | None
) -> Value:
    """With A = [X, Y] and R = [S, T] = [S, Q' Y] cut behind the columns of Q:

    dX = (dQ + Y dT' + Q (low(M) + strictly_low(M)')) S^-T,   M = S dS' - dQ' Q
    dY = Q dT
    """
    k, more = q.shape[2], b.facts.canonical(a.shape[2] - q.shape[2])
    square = b.slice_axis(r, 2, 0, k)
    inner = of_rest = None
    if of_r is not None:
        rest, of_rest = (b.slice_axis(x, 2, k, more) for x in (a, of_r))
        inner = b.matmul(square, _mT(b, b.slice_axis(of_r, 2, 0, k)))
        of_q = _sum(b, of_q, b.matmul(rest, _mT(b, of_rest)))
    assert of_q is not None
    turned = b.unary("neg", b.matmul(_mT(b, of_q), q))
    inner = _sum(b, inner, turned)
    symmetric = b.emit("add", _keep(b, inner, "ge"), _mT(b, _keep(b, inner, "gt")))
    whole = b.emit("add", of_q, b.matmul(q, symmetric))
    found = _mT(b, _solve(b, square, _mT(b, whole), upper=True, transposed=False))
    if of_rest is None:
        zero = b.broadcast_to(b.scalar(0.0, a.dtype), (*a.shape[:2], more))
        return b.concat([found, zero], 2)
    return b.concat([found, b.matmul(q, of_rest)], 2)


def _qr(tape: Tape, op: Op, grads: Grads) -> Parts:
    g, b, (a,), (packed, tau) = grads[0], tape.b, op.operands, op.results
    if g is None:
        return
    k = tau.shape[1]
    q = b.emit("householder", b.slice_axis(packed, 2, 0, k), tau)
    rows = (b.slice_axis(x, 1, 0, k) for x in (packed, g))
    r, of_r = (_keep(b, x, "le") for x in rows)
    yield a, GradientPart(_of_factors(b, a, q, r, None, of_r))


def _householder(tape: Tape, op: Op, grads: Grads) -> Parts:
    (of_q,), b, q = grads, tape.b, op.result
    source = _factorized(tape, op)
    if of_q is None:
        return
    (a,), (packed, tau) = source.operands, source.results
    k = tau.shape[1]
    b.require_equal(q.shape[2], k, "gradients of as many columns of Q as rows or fewer")
    r = _keep(b, b.slice_axis(packed, 1, 0, k), "le")
    yield a, GradientPart(_of_factors(b, a, q, r, of_q, None))


def _factorized(tape: Tape, op: Op) -> Op:
    """The factorization whose reflectors an op takes as they are."""
    found: list[Op | None] = []
    for value in op.operands:
        source = tape.producers.get(value)
        while source is not None and source.name in ("reshape", "slice"):
            source = tape.producers.get(source.operands[0])
        found.append(source)
    packed, tau = found
    if packed is None or packed is not tau or packed.name != "qr":
        reason = "gradients of reflectors that are no factorization's"
        raise UnsupportedOpError(
            [UnsupportedOp(op.name, reason, op.loc or "unknown place")]
        )
    return packed


LINALG: dict[str, Rule] = {
    "cholesky": _cholesky,
    "lu": _lu,
    "lu_solve": _lu_solve,
    "triangular_solve": _triangular,
    "eigh": _eigh,
    "eigvalsh": _eigvalsh,
    "svd": _svd,
    "singular_values": _singular_values,
    "qr": _qr,
    "householder": _householder,
}
