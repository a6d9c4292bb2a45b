"""The kernels of ir/ops_fft.py: functions of pliant/library/fft.c."""

from __future__ import annotations

from pliant.ir.graph import Op
from pliant.ir.ops_fft import NORMS
from pliant.lower.library_kernel import LibraryKernel, Workspace, code, flag
from pliant.sym import Expr, as_expr, ceildiv, floordiv, maximum, minimum, product

# fft.c
LARGEST_PRIME, LANES, ELEMENTS, APART = 61, 16, 32768, 80


def _around(op: Op) -> tuple[Expr, Expr, Expr]:
    """(outer, n, inner), n of the sequence and not of half its spectrum."""
    shape, axis = op.operands[0].shape, op.int_attr("axis")
    n = op.dim_attr("n") if op.name == "irfft" else shape[axis]
    return product(shape[:axis]), n, product(shape[axis + 1 :])


def _norm(op: Op) -> Expr:
    return as_expr(NORMS.index(op.str_attr("norm")))


def _is_smooth(n: int) -> bool:
    for prime in range(2, LARGEST_PRIME + 1):
        while n % prime == 0:
            n //= prime
    return n == 1


def _convolved(n: int) -> int:
    """The smallest 4, 5, 6 or 7 times a power of 2 that is not below 2n - 1."""
    sizes = (size << shift for size in range(4, 8) for shift in range(64))
    return min(size for size in sizes if size >= 2 * n - 1)


def _lengths(op: Op, n: Expr) -> tuple[Expr, Expr]:
    """Complex numbers in a lane of a buffer, and in the tables, at most.

    A convolution is shorter than 5/2 of what it transforms. Of a known length, it is
    known whether there is one.
    """
    if not n.is_const:
        return floordiv(5 * n, 2), 7 * n
    whole = n.value
    own = whole // 2 if op.name != "fft" and whole % 2 == 0 else whole
    half = 0 if op.name == "fft" else whole // 2 + 1
    if own < 1 or _is_smooth(own):
        return as_expr(max(own, half)), n
    longer = _convolved(own)
    return as_expr(max(longer, half)), as_expr(whole + own + 2 * longer)


def _work(op: Op) -> Workspace:
    outer, n, inner = _around(op)
    rows, each = outer * inner, op.operands[0].dtype.bytes
    length, table = _lengths(op, n)
    fitting = floordiv(as_expr(ELEMENTS), maximum(n, 1))
    lanes = maximum(minimum(as_expr(LANES), rows, fitting), 1)
    room = 4 * each * (length * lanes + APART)
    return Workspace(64 * ceildiv(room, 64), ceildiv(rows, lanes), 2 * each * table)


FFT_KERNELS: dict[str, LibraryKernel] = {
    "fft": LibraryKernel(
        "plt_fft",
        lambda op: (code(op), flag(op, "inverse"), _norm(op), *_around(op)),
        _work,
    ),
    "rfft": LibraryKernel(
        "plt_rfft", lambda op: (code(op), _norm(op), *_around(op)), _work
    ),
    "irfft": LibraryKernel(
        "plt_irfft", lambda op: (code(op), _norm(op), *_around(op)), _work
    ),
}
