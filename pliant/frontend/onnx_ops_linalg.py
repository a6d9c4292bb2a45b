"""Matrix products, einsum, determinants."""

from __future__ import annotations

from pliant.frontend.onnx_context import Node, OnnxContext
from pliant.frontend.onnx_ops_activation import Table
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, product


def matmul(cx: OnnxContext, n: Node) -> Value:
    return multiply(cx, n.tensor(0), n.tensor(1))


def multiply(cx: OnnxContext, a: Value, b: Value) -> Value:
    """numpy.matmul; batch dims that are 1 in the example broadcast."""
    rank = max(a.type.rank, b.type.rank)
    if rank > 2 and a.type.rank > 1 and b.type.rank > 1:
        a, b = batched(cx, a, b)
    return cx.b.matmul(a, b)


def batched(cx: OnnxContext, a: Value, b: Value) -> tuple[Value, Value]:
    for i in range(3, min(a.type.rank, b.type.rank) + 1):
        x, y = a.shape[-i], b.shape[-i]
        if x == 1 or y == 1 or cx.b.same(x, y):
            continue
        if cx.hint(x) == 1 and cx.hint(y) not in (1, None):
            a = cx.unit(a, a.type.rank - i)
        elif cx.hint(y) == 1 and cx.hint(x) not in (1, None):
            b = cx.unit(b, b.type.rank - i)
    return a, b


def gemm(cx: OnnxContext, n: Node) -> Value:
    """alpha A' B' + beta C"""
    a, b = n.tensor(0), n.tensor(1)
    alpha, beta = n.attr("alpha", 1.0), n.attr("beta", 1.0)
    if n.attr("transA", 0):
        a = cx.transpose(a, (1, 0))
    if n.attr("transB", 0):
        b = cx.transpose(b, (1, 0))
    made = cx.b.matmul(a, b)
    scaled = made if alpha == 1.0 else _times(cx, made, alpha)
    c = n.maybe(2)
    if c is None or beta == 0.0:
        return scaled
    c = c if beta == 1.0 else _times(cx, c, beta)
    return cx.arith("add", scaled, cx.expand_to(c, made.shape))


def _times(cx: OnnxContext, x: Value, factor: float) -> Value:
    if x.dtype.is_float:
        return cx.mul(x, factor)
    return cx.cast(cx.mul(cx.cast(x, DType.F64), factor), x.dtype)


def einsum(cx: OnnxContext, n: Node) -> Value:
    equation = n.attrs["equation"].replace(" ", "")
    values = n.tensors()
    inputs = equation.split("->")[0].split(",")
    # One size for each letter: those that are 1 in the example broadcast.
    sizes: dict[str, Expr] = {}
    for text, value in zip(inputs, values, strict=True):
        if "." in text or len(text) != value.type.rank:
            continue
        for letter, dim in zip(text, value.shape, strict=True):
            if letter in sizes and not cx.b.same(sizes[letter], dim):
                cx.b.require_equal(sizes[letter], dim, f"einsum: the size of {letter}")
            sizes.setdefault(letter, dim)
    equation = equation if "->" in equation else f"{equation}->{_implied(equation)}"
    return cx.b.emit("einsum", *values, equation=equation)


def _implied(equation: str) -> str:
    """The result without an arrow: letters that are there once, sorted."""
    letters = equation.replace(",", "").replace(".", "")
    once = sorted(c for c in set(letters) if letters.count(c) == 1)
    return ("..." if "." in equation else "") + "".join(once)


def determinant(cx: OnnxContext, n: Node) -> Value:
    """By elimination: the product of the diagonal, and a sign for each swap."""
    x = n.tensor(0)
    *batch, size, _ = x.shape
    wide = cx.cast(x, x.dtype.compute)
    count = product(batch)
    flat = cx.reshape(wide, (count, size, size))
    lu, pivots, _info = cx.b.emit_multi("lu", flat, error="")
    row = cx.iota((count, size, size), 1, DType.I64)
    column = cx.iota((count, size, size), 2, DType.I64)
    picked = cx.select(
        cx.b.binary("eq", row, column), lu, cx.full(0, lu.shape, lu.dtype)
    )
    diagonal = cx.reduce("sum", picked, (2,))
    here = cx.add(cx.iota(pivots.shape, 1, DType.I64), 1)
    swapped = cx.arith("ne", cx.cast(pivots, DType.I64), here)
    signs = cx.select(swapped, cx.full(-1, pivots.shape, lu.dtype), 1.0)
    made = cx.mul(cx.reduce("prod", diagonal, (1,)), cx.reduce("prod", signs, (1,)))
    return cx.cast(cx.reshape(made, [as_expr(d) for d in batch]), x.dtype)


LINALG: Table = {
    ("MatMul", 1): matmul,
    ("Gemm", 1): gemm,
    ("Einsum", 12): einsum,
    ("Det", 11): determinant,
}
