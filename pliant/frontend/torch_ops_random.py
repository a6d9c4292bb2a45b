"""Random numbers: from a counter, so that a seed alone decides them.

Every random op of a call has a number, and element i of op n is a hash of the call's
seed, n and i (`random` in ir/ops.py, SplitMix64 in passes/decompose.py): uniform in
[0, 1), of 24 bits. All other distributions are computed from such elements.

    normal        sqrt(-2 log(1 - u)) cos(2 pi v)              Box and Muller (1958)
    exponential   -log(1 - u) / rate, geometric its whole number, cauchy by tan
    permutation   the order of random keys; of 48 bits, so that equal ones are rare
    multinomial   where u falls among the running sums; without replacement the largest
                  weight / exponential (Efraimidis and Spirakis 2006), as in torch

The numbers are not torch's, which follow from the order in which elements are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pliant.frontend.torch_ops_context import HALF, Operand, Size, TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import Expr, as_expr, le

aten = torch.ops.aten

_DIGITS = {DType.F16: 11, DType.BF16: 8}  # of a half float below 1


# --- numbers in [0, 1) ------------------------------------------------------------


def drawn(cx: TorchContext, shape: Sequence[Size]) -> Value:
    """f32 of 24 bits."""
    if not cx.random:
        cx.unsupported("random numbers in a branch or loop of a training step")
    dims = tuple(as_expr(size) for size in shape)
    return cx.b.emit("random", cx.seed(), number=cx.next_number(), shape=dims)


def _fine(cx: TorchContext, shape: Sequence[Size]) -> Value:
    """f64 of 48 bits."""
    high, low = (cx.cast(drawn(cx, shape), DType.F64) for _ in range(2))
    return cx.add(high, cx.mul(low, 2.0**-24))


def _unit(cx: TorchContext, shape: Sequence[Size], dtype: DType) -> Value:
    """In [0, 1) after rounding to the dtype as well; computed in f32 or f64."""
    if dtype is DType.F64:
        return _fine(cx, shape)
    found = drawn(cx, shape)
    if dtype not in HALF:
        return found
    steps = 2.0 ** _DIGITS[dtype]
    return cx.mul(cx.unary("floor", cx.mul(found, steps)), 1 / steps)


def _real(cx: TorchContext, x: Value) -> None:
    if not x.dtype.is_float:
        cx.unsupported(f"{cx.op_name} of {x.dtype}")


def rand(cx: TorchContext, shape: Sequence[Size], **_: Any) -> Value:
    return cx.cast(_unit(cx, shape, cx.out_dtype), cx.out_dtype)


def uniform(
    cx: TorchContext,
    x: Value,
    low: Any = 0.0,
    high: Any = 1.0,
    **named: Any,
) -> Value:
    _real(cx, x)
    low, high = named.get("from", low), named.get("to", high)
    found = _unit(cx, x.shape, x.dtype)
    return cx.cast(cx.add(cx.mul(found, cx.sub(high, low)), low), x.dtype)


def bernoulli(cx: TorchContext, x: Value, p: Operand | None = None) -> Value:
    """1 with probability p, or that of each element."""
    chance = drawn(cx, x.shape)
    return cx.cast(cx.arith("lt", chance, x if p is None else p), x.dtype)


# --- other distributions ------------------------------------------------------------


def _standard(cx: TorchContext, shape: Sequence[Size], dtype: DType) -> Value:
    wide = DType.F64 if dtype is DType.F64 else DType.F32
    radius = _exponential(cx, shape, wide)
    angle = cx.mul(_unit(cx, shape, wide), 2 * math.pi)
    return cx.mul(cx.unary("sqrt", cx.mul(radius, 2.0)), cx.unary("cos", angle))


def _exponential(cx: TorchContext, shape: Sequence[Size], dtype: DType) -> Value:
    """Of rate 1, and above 0."""
    wide = DType.F64 if dtype is DType.F64 else DType.F32
    found = cx.unary("neg", _unit(cx, shape, wide))
    least = 2.0**-49 if wide is DType.F64 else 2.0**-25  # half of the least but 0
    return cx.arith("maximum", cx.unary("neg", cx.unary("log1p", found)), least)


def randn(cx: TorchContext, shape: Sequence[Size], **_: Any) -> Value:
    return cx.cast(_standard(cx, shape, cx.out_dtype), cx.out_dtype)


def normal(
    cx: TorchContext,
    x: Value,
    mean: Operand = 0.0,
    std: Operand = 1.0,
) -> Value:
    _real(cx, x)
    found = _standard(cx, x.shape, x.dtype)
    return cx.cast(cx.add(cx.mul(found, std), mean), x.dtype)


def normal_of(cx: TorchContext, mean: Operand, std: Operand = 1.0) -> Value:
    """Of tensors, or of one: they broadcast."""
    given = [v for v in (mean, std) if isinstance(v, Value)]
    shape = cx.b.broadcast_shapes(*(v.shape for v in given))
    out = cx.out_dtype
    return normal(cx, cx.full(0.0, shape, out), mean, std)


def normal_shaped(
    cx: TorchContext,
    mean: Operand,
    std: Operand,
    shape: Sequence[Size],
    **_: Any,
) -> Value:
    return normal(cx, cx.full(0.0, shape, cx.out_dtype), mean, std)


def log_normal(
    cx: TorchContext,
    x: Value,
    mean: Operand = 1.0,
    std: Operand = 2.0,
) -> Value:
    wide = cx.full(0.0, x.shape, x.dtype.compute)
    return cx.cast(cx.unary("exp", normal(cx, wide, mean, std)), x.dtype)


def exponential(cx: TorchContext, x: Value, lambd: Operand = 1.0) -> Value:
    _real(cx, x)
    found = _exponential(cx, x.shape, x.dtype)
    return cx.cast(cx.div(found, lambd), x.dtype)


def geometric(cx: TorchContext, x: Value, p: float) -> Value:
    """How many trials of chance p until one succeeds: 1, 2, .."""
    if p == 1:
        return cx.full(1, x.shape, x.dtype)
    found = _exponential(cx, x.shape, DType.F64)
    trials = cx.unary("floor", cx.mul(found, -1 / math.log1p(-p)))
    return cx.cast(cx.add(trials, 1.0), x.dtype)


def cauchy(
    cx: TorchContext,
    x: Value,
    median: Operand = 0.0,
    sigma: Operand = 1.0,
) -> Value:
    _real(cx, x)
    wide = x.dtype.compute
    angle = cx.mul(cx.sub(_unit(cx, x.shape, wide), 0.5), math.pi)
    spread = cx.mul(cx.unary("tan", angle), sigma)
    return cx.cast(cx.add(spread, median), x.dtype)


# --- integers -----------------------------------------------------------------------


def _whole(cx: TorchContext, shape: Sequence[Size], low: Any, high: Any) -> Value:
    """i64 from low up to, not including, high."""
    span = cx.sub(high, low) if _is_value(low, high) else as_expr(high) - as_expr(low)
    if isinstance(span, Expr):
        if span.is_const and span.value > 2**32:
            return cx.add(_bits(cx, shape, span.value), low)
        cx.require(le(1, span), "random integers need a range")
    found = cx.arith("mul", _fine(cx, shape), span, DType.F64)
    return cx.add(cx.cast(cx.unary("floor", found), DType.I64), low)


def _is_value(*operands: Any) -> bool:
    return any(isinstance(x, Value) for x in operands)


def _bits(cx: TorchContext, shape: Sequence[Size], span: int) -> Value:
    """i64 from 0 up to a span of more than 32 bits: 63 random bits, by remainder."""
    out: Value | None = None
    for count in (21, 21, 21):
        part = cx.mul(drawn(cx, shape), 2.0**count)
        part = cx.cast(cx.unary("floor", part), DType.I64)
        out = part if out is None else cx.add(cx.mul(out, 2**21), part)
    assert out is not None
    return out if span >= 2**63 else cx.arith("mod", out, span)


def randint(cx: TorchContext, high: Any, shape: Sequence[Size], **_: Any) -> Value:
    return cx.cast(_whole(cx, shape, 0, high), cx.out_dtype)


def randint_from(
    cx: TorchContext,
    low: Any,
    high: Any,
    shape: Sequence[Size],
    **_: Any,
) -> Value:
    return cx.cast(_whole(cx, shape, low, high), cx.out_dtype)


def randint_like(cx: TorchContext, x: Value, high: Any, **_: Any) -> Value:
    return cx.cast(_whole(cx, x.shape, 0, high), cx.out_dtype)


def randint_like_from(
    cx: TorchContext, x: Value, low: Any, high: Any, **_: Any
) -> Value:
    return cx.cast(_whole(cx, x.shape, low, high), cx.out_dtype)


# Integers that random_() fills a tensor with, up to and with this one.
_MOST = {
    DType.F16: 2**11,
    DType.BF16: 2**8,
    DType.F32: 2**24,
    DType.F64: 2**53,
    DType.BOOL: 1,
}


def random_from(
    cx: TorchContext,
    x: Value,
    low: Any = 0,
    high: Any = None,
    **named: Any,
) -> Value:
    low, high = named.get("from", low), named.get("to", high)
    if high is None:
        bits = 8 * x.dtype.bytes - (x.dtype.kind == "i")
        high = _MOST.get(x.dtype, 2**bits - 1) + 1
    return cx.cast(_whole(cx, x.shape, low, high), x.dtype)


def random_to(cx: TorchContext, x: Value, high: Any) -> Value:
    return random_from(cx, x, 0, high)


def randperm(cx: TorchContext, n: Size, **_: Any) -> Value:
    keys = _fine(cx, (n,))
    places = cx.b.emit_multi("sort", keys, axis=0, descending=False)[1]
    cx.nonnegative.add(places)
    return cx.cast(places, cx.out_dtype)


def multinomial(
    cx: TorchContext,
    x: Value,
    num_samples: Size,
    replacement: bool = False,
) -> Value:
    """Places of a row, each with the chance that its weight is of the row's sum."""
    rows = cx.reshape(x, (1, *x.shape)) if x.type.rank == 1 else x
    rows = cx.cast(rows, DType.F64)
    count, size = rows.shape
    samples = as_expr(num_samples)
    cx.require(le(1, size), "multinomial needs a weight")
    if replacement:
        sums = cx.b.emit("cumulate", rows, op="sum", axis=1)
        total = cx.slice(sums, 1, size - 1, 1)
        chance = cx.mul(_fine(cx, (count, samples)), total)
        places = cx.b.emit("search", sums, chance, right=True)
        places = cx.arith("minimum", places, size - 1)  # of a row of no weight
    else:
        cx.require(le(samples, size), "multinomial without replacement")
        race = cx.div(rows, _exponential(cx, rows.shape, DType.F64))
        places = cx.b.emit_multi("top", race, axis=1, k=samples, largest=True)[1]
    cx.nonnegative.add(places)
    return cx.reshape(places, (samples,)) if x.type.rank == 1 else places


# --- what lets elements through ------------------------------------------------------


def kept(cx: TorchContext, shape: Sequence[Size], p: float) -> Value:
    """What a dropout lets through: each element with probability 1 - p."""
    return cx.b.binary("ge", drawn(cx, shape), cx.b.scalar(p, DType.F32))


def dropout(
    cx: TorchContext, x: Value, p: float = 0.5, train: bool = False, whole: bool = False
) -> Value:
    """With `whole`, of whole channels."""
    if not train or not p:
        return x
    if p == 1:
        return cx.mul(x, 0.0)
    keep = _channels(cx, x, p) if whole else kept(cx, x.shape, p)
    return cx.b.select(keep, cx.mul(x, 1 / (1 - p)), cx.b.scalar(0.0, x.dtype))


def native_dropout(
    cx: TorchContext, x: Value, p: float, train: bool | None = None
) -> list[Any]:
    """(out, which elements were kept)"""
    if train is False or not p:
        return [x, cx.full(True, x.shape, DType.BOOL)]
    keep = kept(cx, x.shape, float(p))
    scaled = cx.mul(x, 0.0 if p == 1 else 1 / (1 - p))
    return [cx.select(keep, scaled, 0.0), keep]


def _channels(cx: TorchContext, x: Value, p: float) -> Value:
    """Whole channels: what lies behind the first two dims."""
    ones = (as_expr(1),) * (x.type.rank - 2)
    return cx.b.broadcast_to(kept(cx, (*x.shape[:2], *ones), p), x.shape)


# What SELU tends to far below 0 (Klambauer et al. 2017), as torch has it.
_SELU_LEAST = 1.7580993408473766


def alpha_dropout(
    cx: TorchContext, x: Value, p: float = 0.5, train: bool = False, whole: bool = False
) -> Value:
    """To SELU's least value, then scaled: mean 0 and variance 1 stay."""
    if not train or not p:
        return x
    if p == 1:
        return cx.mul(x, 0.0)
    factor = 1 / math.sqrt((_SELU_LEAST**2 * p + 1) * (1 - p))
    least = _SELU_LEAST * factor
    there = cx.add(cx.mul(x, factor), least * p)
    gone = cx.b.scalar(least * p - least, x.dtype)
    keep = _channels(cx, x, p) if whole else kept(cx, x.shape, p)
    return cx.b.select(keep, there, gone)


def rrelu(
    cx: TorchContext,
    x: Value,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Value:
    """Below 0 times a slope: in training a random one, else the mean of the bounds."""
    return _leaky(cx, x, lower, upper, training)[0]


def _leaky(
    cx: TorchContext, x: Value, lower: Any, upper: Any, training: bool
) -> tuple[Value, Value]:
    """(out, what each element was multiplied with)"""
    slope: Operand = (lower + upper) / 2
    if training:
        found = _unit(cx, x.shape, x.dtype.compute)
        slope = cx.add(cx.mul(found, upper - lower), lower)
    wide = cx.cast(x, x.dtype.compute)
    below = cx.arith("le" if training else "lt", wide, 0.0)
    noise = cx.select(below, slope, 1.0)
    out = cx.select(below, cx.mul(wide, noise), wide)
    return cx.cast(out, x.dtype), cx.cast(noise, x.dtype)


def rrelu_with_noise(
    cx: TorchContext,
    x: Value,
    noise: Value,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> list[Any]:
    """(out, the slopes); without training, the noise as it was"""
    out, slopes = _leaky(cx, x, lower, upper, training)
    return [out, slopes if training else noise]


def _like(rule: Translate) -> Translate:
    return lambda cx, x, *_, **__: rule(cx, x.shape)


def _ungenerated(rule: Translate) -> Translate:
    """The op with numbers of the call's seed; a generator that is passed is refused."""

    def translate(
        cx: TorchContext, *args: Any, generator: Any = None, **named: Any
    ) -> Any:
        if any(isinstance(given, torch.Generator) for given in (*args, generator)):
            cx.unsupported("random numbers of a generator that is passed")
        return rule(cx, *args, **named)

    return translate


_RULES: dict[Any, Translate] = {
    aten.rand.default: rand,
    aten.rand.generator: rand,
    aten.rand_like.default: _like(rand),
    aten.rand_like.generator: _like(rand),
    aten.randn.default: randn,
    aten.randn.generator: randn,
    aten.randn_like.default: _like(randn),
    aten.randn_like.generator: _like(randn),
    aten.randint.default: randint,
    aten.randint.generator: randint,
    aten.randint.low: randint_from,
    aten.randint.low_generator: randint_from,
    aten.randint_like.default: randint_like,
    aten.randint_like.generator: randint_like,
    aten.randint_like.Tensor: randint_like,
    aten.randint_like.low_dtype: randint_like_from,
    aten.randint_like.low_generator_dtype: randint_like_from,
    aten.randperm.default: randperm,
    aten.randperm.generator: randperm,
    aten.random.default: random_from,
    getattr(aten.random, "from"): random_from,
    aten.random.to: random_to,
    aten.uniform.default: uniform,
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.p: bernoulli,
    aten.bernoulli.Tensor: bernoulli,
    aten.normal_functional.default: normal,
    aten.normal.Tensor_float: normal_of,
    aten.normal.float_Tensor: normal_of,
    aten.normal.Tensor_Tensor: normal_of,
    aten.normal.float_float: normal_shaped,
    aten.log_normal.default: log_normal,
    aten.exponential.default: exponential,
    aten.geometric.default: geometric,
    aten.cauchy.default: cauchy,
    aten.multinomial.default: multinomial,
    aten.dropout.default: dropout,
    aten.native_dropout.default: native_dropout,
    aten.feature_dropout.default: partial(dropout, whole=True),
    aten.alpha_dropout.default: alpha_dropout,
    aten.feature_alpha_dropout.default: partial(alpha_dropout, whole=True),
    aten.rrelu.default: rrelu,
    aten.rrelu_with_noise_functional.default: rrelu_with_noise,
}

RANDOM = {op: _ungenerated(rule) for op, rule in _RULES.items()}
