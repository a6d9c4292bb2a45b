"""Complex tensors as pairs of real ones, and the aten ops on them.

The IR has real tensors only. A node of the exported graph with a complex result is a
`Complex` in the walk (torch_walk.py): its real and its imaginary part. Ops that move
elements or are linear are done to each part (`PARTWISE`), others have a row in
`OF_COMPLEX`; what is in neither is expanded by torch, or refused. At the borders of a
model, complex tensors have a last axis of 2 (signature.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from pliant.frontend.torch_ops_context import Operand, TorchContext
from pliant.frontend.torch_ops_math import Translate, hypotenuse
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Complex:
    """Real and imaginary parts, of one shape and dtype."""

    re: Value
    im: Value

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.re.shape

    @property
    def rank(self) -> int:
        return self.re.type.rank


Number: TypeAlias = "Complex | complex | Operand"


def is_complex(node: Node) -> bool:
    """Whether a node's results or operands are complex, as torch knows it."""
    vals = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    leaves = pytree.tree_leaves(vals)
    return any(isinstance(v, torch.Tensor) and v.is_complex() for v in leaves)


def holds_complex(*arguments: Any) -> bool:
    leaves = pytree.tree_leaves(arguments, is_leaf=lambda x: isinstance(x, Complex))
    return any(isinstance(x, Complex | complex) for x in leaves)


# --- parts -------------------------------------------------------------------------


def as_complex(cx: TorchContext, x: Number, dtype: DType) -> Complex:
    """A tensor or number, with an imaginary part of 0 if it has none."""
    if isinstance(x, Complex):
        return Complex(cx.cast(x.re, dtype), cx.cast(x.im, dtype))
    if isinstance(x, complex):
        return Complex(cx.tensor(x.real, dtype), cx.tensor(x.imag, dtype))
    re = cx.tensor(x, dtype)
    return Complex(re, cx.full(0.0, re.shape, dtype))


def from_pairs(cx: TorchContext, x: Value) -> Complex:
    """Of a tensor with a last axis of 2."""
    cx.b.require_equal(x.shape[-1], 2, "the last axis holds two parts")
    axis = x.type.rank - 1
    parts = [cx.slice(x, axis, k, 1) for k in range(2)]
    re, im = (cx.reshape(part, x.shape[:-1]) for part in parts)
    return Complex(re, im)


def to_pairs(cx: TorchContext, x: Complex) -> Value:
    parts = [cx.reshape(part, (*x.shape, 1)) for part in (x.re, x.im)]
    return cx.concat(parts, x.rank)


def partwise(rule: Translate) -> Translate:
    """What an op on real tensors does, done to both parts.

    A real operand among complex ones is one without imaginary part.
    """

    def translate(cx: TorchContext, *args: Any, **kwargs: Any) -> Any:
        def given(which: str) -> Any:
            def part(x: Any) -> Any:
                if isinstance(x, Complex):
                    return getattr(x, which)
                if isinstance(x, complex):
                    return x.real if which == "re" else x.imag
                if isinstance(x, list | tuple):
                    mixed = any(isinstance(each, Complex) for each in x)
                    return [zero(each) if mixed else part(each) for each in x]
                return x

            def zero(x: Any) -> Any:
                if isinstance(x, Value) and which == "im":
                    return cx.full(0.0, x.shape, x.dtype)
                return part(x)

            names = {name: part(x) for name, x in kwargs.items()}
            return rule(cx, *map(part, args), **names)

        re, im = given("re"), given("im")
        if isinstance(re, list | tuple):
            return [Complex(a, b) for a, b in zip(re, im, strict=True)]
        return Complex(re, im)

    return translate


# --- arithmetic --------------------------------------------------------------------


def _two(cx: TorchContext, x: Number, y: Number) -> tuple[Complex, Complex]:
    dtype = cx.out_dtype
    return as_complex(cx, x, dtype), as_complex(cx, y, dtype)


def multiplied(cx: TorchContext, x: Complex, y: Complex) -> Complex:
    re = cx.sub(cx.mul(x.re, y.re), cx.mul(x.im, y.im))
    return Complex(re, cx.add(cx.mul(x.re, y.im), cx.mul(x.im, y.re)))


def _scaled(cx: TorchContext, x: Complex, alpha: Any) -> Complex:
    if alpha == 1:
        return x
    return multiplied(cx, x, as_complex(cx, alpha, x.re.dtype))


def added(op: str) -> Translate:
    def translate(cx: TorchContext, x: Number, y: Number, alpha: Any = 1) -> Complex:
        a, b = _two(cx, x, y)
        b = _scaled(cx, b, alpha)
        return Complex(cx.arith(op, a.re, b.re), cx.arith(op, a.im, b.im))

    return translate


def subtracted_from(cx: TorchContext, x: Number, y: Number, alpha: Any = 1) -> Complex:
    a, b = _two(cx, x, y)
    a = _scaled(cx, a, alpha)
    return Complex(cx.sub(b.re, a.re), cx.sub(b.im, a.im))


def multiply(cx: TorchContext, x: Number, y: Number) -> Complex:
    if isinstance(x, Complex) and _is_real(y):
        return Complex(cx.mul(x.re, y), cx.mul(x.im, y))  # type: ignore[arg-type]  # real
    if isinstance(y, Complex) and _is_real(x):
        return Complex(cx.mul(x, y.re), cx.mul(x, y.im))  # type: ignore[arg-type]  # real
    return multiplied(cx, *_two(cx, x, y))


def _is_real(x: Number) -> bool:
    return not isinstance(x, Complex | complex)


def divided(cx: TorchContext, x: Complex, y: Complex) -> Complex:
    """Scaled by the larger part of y, as eager does: no square overflows."""
    most = cx.arith("maximum", cx.unary("abs", y.re), cx.unary("abs", y.im))
    c, d = cx.div(y.re, most), cx.div(y.im, most)
    size = cx.add(cx.mul(y.re, c), cx.mul(y.im, d))
    re = cx.add(cx.mul(x.re, c), cx.mul(x.im, d))
    im = cx.sub(cx.mul(x.im, c), cx.mul(x.re, d))
    return Complex(cx.div(re, size), cx.div(im, size))


def divide(cx: TorchContext, x: Number, y: Number) -> Complex:
    if isinstance(x, Complex) and _is_real(y):
        return Complex(cx.div(x.re, y), cx.div(x.im, y))  # type: ignore[arg-type]  # real
    return divided(cx, *_two(cx, x, y))


def reciprocal(cx: TorchContext, x: Complex) -> Complex:
    return divided(cx, as_complex(cx, 1.0, x.re.dtype), x)


def power(cx: TorchContext, x: Complex, exponent: int) -> Complex:
    """By products: of a small integer that is not negative."""
    if exponent == 0:
        ones = cx.full(1.0, x.shape, x.re.dtype)
        return as_complex(cx, ones, x.re.dtype)
    out = x
    for _ in range(exponent - 1):
        out = multiplied(cx, out, x)
    return out


# --- parts, sizes and angles -------------------------------------------------------


def magnitude(cx: TorchContext, x: Complex) -> Value:
    return hypotenuse(cx, x.re, x.im)


def angle(cx: TorchContext, x: Complex) -> Value:
    return cx.arith("atan2", x.im, x.re)


def conjugate(cx: TorchContext, x: Complex) -> Complex:
    return Complex(x.re, cx.unary("neg", x.im))


def polar(cx: TorchContext, size: Value, turn: Value) -> Complex:
    cos, sin = cx.unary("cos", turn), cx.unary("sin", turn)
    return Complex(cx.mul(size, cos), cx.mul(size, sin))


def exponential(cx: TorchContext, x: Complex) -> Complex:
    return polar(cx, cx.unary("exp", x.re), x.im)


def logarithm(cx: TorchContext, x: Complex) -> Complex:
    return Complex(cx.unary("log", magnitude(cx, x)), angle(cx, x))


def sign(cx: TorchContext, x: Complex) -> Complex:
    size = magnitude(cx, x)
    none = cx.arith("eq", size, 0.0)
    parts = [cx.select(none, 0.0, cx.div(part, size)) for part in (x.re, x.im)]
    re, im = (cx.cast(part, x.re.dtype) for part in parts)
    return Complex(re, im)


def pair_of(cx: TorchContext, re: Value, im: Value) -> Complex:
    re, im = cx.aligned(re, im)
    shape = cx.b.broadcast_shapes(re.shape, im.shape)
    return Complex(cx.broadcast_to(re, shape), cx.broadcast_to(im, shape))


def equal(op: str, join: str) -> Translate:
    def translate(cx: TorchContext, x: Number, y: Number) -> Value:
        dtype = next(each.re.dtype for each in (x, y) if isinstance(each, Complex))
        a, b = as_complex(cx, x, dtype), as_complex(cx, y, dtype)
        same = cx.arith(op, a.re, b.re), cx.arith(op, a.im, b.im)
        return cx.b.binary(join, *same)

    return translate


def where(cx: TorchContext, cond: Value, x: Number, y: Number) -> Complex:
    a, b = _two(cx, x, y)
    return Complex(cx.select(cond, a.re, b.re), cx.select(cond, a.im, b.im))


def converted(cx: TorchContext, x: Number, *_: Any, **__: Any) -> Complex | Value:
    """To another complex type, or from a real one; the trace knows which."""
    if not cx.val.is_complex():
        assert isinstance(x, Complex)
        return cx.cast(x.re, cx.out_dtype)
    return as_complex(cx, x, cx.out_dtype)


def replaced(cx: TorchContext, x: Complex, new: Number, *_: Any) -> Complex:
    """Another value in the shape of x."""
    found = as_complex(cx, new, x.re.dtype)
    parts = [cx.broadcast_to(part, x.shape) for part in (found.re, found.im)]
    return Complex(*parts)


def filled(rule: Translate, value: Any = None, which: int = 1) -> Translate:
    """A new tensor of one number: the value, or else the operand with this number."""

    def translate(cx: TorchContext, *args: Any, **kwargs: Any) -> Complex:
        number: Any = value
        args_ = [x.re if isinstance(x, Complex) else x for x in args]
        if value is None:
            number = args_[which]
        if isinstance(number, complex):
            args_[which] = number.real
        re = rule(cx, *args_, **kwargs)
        imaginary = number.imag if isinstance(number, complex) else 0.0
        return Complex(re, cx.full(imaginary, re.shape, re.dtype))

    return translate


# --- products ----------------------------------------------------------------------


def product_of(rule: Translate) -> Translate:
    """A bilinear op of two operands: four real ones, or two beside a real operand."""

    def translate(cx: TorchContext, x: Any, y: Any) -> Complex:
        if not isinstance(x, Complex):
            return Complex(rule(cx, x, y.re), rule(cx, x, y.im))
        if not isinstance(y, Complex):
            return Complex(rule(cx, x.re, y), rule(cx, x.im, y))
        re = cx.sub(rule(cx, x.re, y.re), rule(cx, x.im, y.im))
        return Complex(re, cx.add(rule(cx, x.re, y.im), rule(cx, x.im, y.re)))

    return translate


def einsum_of(rule: Translate) -> Translate:
    def translate(
        cx: TorchContext, equation: str, tensors: Sequence[Any], **_: Any
    ) -> Complex:
        if len(tensors) == 1:
            x = tensors[0]
            parts = [rule(cx, equation, [part]) for part in (x.re, x.im)]
            return Complex(*parts)
        if len(tensors) != 2:
            cx.unsupported("einsum of more than two complex tensors")
        product = product_of(lambda cx, x, y: rule(cx, equation, [x, y]))
        found: Complex = product(cx, *tensors)
        return found

    return translate


# Ops that move elements or are linear, by name.
PARTWISE = frozenset(
    {
        *(
            "view",
            "_unsafe_view",
            "reshape",
            "view_as",
            "reshape_as",
            "flatten",
            "ravel",
        ),
        *("unflatten", "unsqueeze", "squeeze", "permute", "transpose", "swapaxes"),
        *("swapdims", "t", "mT", "numpy_T", "movedim", "moveaxis", "expand"),
        *(
            "broadcast_to",
            "expand_as",
            "broadcast_tensors",
            "slice",
            "select",
            "narrow",
        ),
        *("split", "split_with_sizes", "chunk", "unbind", "tensor_split"),
        *("slice_scatter", "select_scatter", "cat", "concat", "concatenate", "stack"),
        *("hstack", "vstack", "repeat", "tile", "repeat_interleave", "roll", "flip"),
        *("rot90", "tril", "triu", "pad", "constant_pad_nd", "contiguous", "clone"),
        *("alias", "detach", "lift_fresh", "lift_fresh_copy", "index", "index_select"),
        *("gather", "take_along_dim", "diagonal", "sum", "mean", "cumsum", "neg"),
        *(
            "positive",
            "squeeze_copy",
            "unfold",
            "atleast_1d",
            "atleast_2d",
            "atleast_3d",
        ),
        *("trace", "index_put", "index_add", "index_copy", "scatter", "scatter_add"),
    }
)

OF_COMPLEX: dict[Any, Translate] = {
    aten.real.default: lambda cx, x: x.re,
    aten.imag.default: lambda cx, x: x.im,
    aten.view_as_real.default: to_pairs,
    aten._conj.default: conjugate,
    aten.conj.default: conjugate,
    aten.conj_physical.default: conjugate,
    aten._conj_physical.default: conjugate,
    aten.view_as_complex.default: from_pairs,
    aten.complex.default: pair_of,
    aten.polar.default: polar,
    aten.abs.default: magnitude,
    aten.absolute.default: magnitude,
    aten.angle.default: angle,
    aten.sgn.default: sign,
    aten.exp.default: exponential,
    aten.log.default: logarithm,
    aten.reciprocal.default: reciprocal,
    aten.square.default: lambda cx, x: multiplied(cx, x, x),
    aten.add.Tensor: added("add"),
    aten.add.Scalar: added("add"),
    aten.sub.Tensor: added("sub"),
    aten.sub.Scalar: added("sub"),
    aten.rsub.Tensor: subtracted_from,
    aten.rsub.Scalar: subtracted_from,
    aten.mul.Tensor: multiply,
    aten.mul.Scalar: multiply,
    aten.div.Tensor: divide,
    aten.div.Scalar: divide,
    aten.true_divide.Tensor: divide,
    aten.eq.Tensor: equal("eq", "logical_and"),
    aten.eq.Scalar: equal("eq", "logical_and"),
    aten.ne.Tensor: equal("ne", "logical_or"),
    aten.ne.Scalar: equal("ne", "logical_or"),
    aten.copy.default: replaced,
    aten.fill.Scalar: replaced,
    aten.fill.Tensor: replaced,
    aten.where.self: where,
    aten.where.ScalarOther: where,
    aten.where.ScalarSelf: where,
    aten.where.Scalar: where,
}
_CONVERSIONS = ("to", "_to_copy", "type_as")
_PRODUCTS = ("matmul", "mm", "bmm", "mv", "dot", "outer")
_FILLED = {"zeros": 0, "zeros_like": 0, "ones": 1, "ones_like": 1}
_FILLED |= {"new_zeros": 0, "new_ones": 1}


def lifted(target: Any, real: Translate | None) -> Translate | None:
    """An op on complex tensors by its translation for real ones, if it has one."""
    name = str(getattr(target, "__name__", "")).split(".")[0]
    if name in ("resolve_conj", "resolve_neg"):
        return lambda cx, x: x
    if name == "adjoint" and real is not None:
        transposed = partwise(real)
        return lambda cx, x: conjugate(cx, transposed(cx, x))
    if real is None or name.startswith(("_assert", "sym_")):  # about types and sizes
        return real
    if name in PARTWISE:
        return partwise(real)
    if name in _CONVERSIONS:
        return converted
    if name in _PRODUCTS:
        return product_of(real)
    if name == "einsum":
        return einsum_of(real)
    if name in _FILLED:
        return filled(real, _FILLED[name])
    if name in ("full", "full_like", "new_full"):
        return filled(real, which=2 if name == "new_full" else 1)
    return None
