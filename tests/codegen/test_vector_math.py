"""Accuracy, special values and code quality of the emitted elementwise math.

Every op is compiled by LLVM for the host and for baseline x86-64, run over random bit
patterns (all exponents, subnormals, NaNs) and over the interesting range of the op, and
compared with an 80-bit or mpmath reference. The error is in units of the spacing of the
format at the true value.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from llvmlite import binding as llvm
from llvmlite import ir

from pliant.codegen.vector_math import (
    BINARY,
    SUPPORTED,
    UNARY,
    emit_binary,
    emit_unary,
)
from pliant.errors import InternalError

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or np.finfo(np.longdouble).nmant < 63,
    reason="the reference needs 80-bit floats",
)

Array = np.ndarray[Any, Any]
MAX_ULP = 4.0
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
LONG = np.longdouble
DTYPES = {"f32": np.float32, "f64": np.float64}
HOST_HAS_FMA = bool(llvm.get_host_cpu_features().get("fma"))
HOST = pytest.param(
    "host", marks=pytest.mark.skipif(not HOST_HAS_FMA, reason="the host lacks FMA")
)
# What each op is most often asked, besides random bit patterns.
RANGES = {
    "exp": (-110.0, 95.0),
    "expm1": (-3.0, 3.0),
    "sigmoid": (-110.0, 110.0),
    "tanh": (-10.0, 10.0),
    "erf": (-6.5, 6.5),
    "erfc": (-6.5, 10.5),
    "log": (0.3, 3.0),
    "log1p": (-1.0, 2.0),
    "logit": (0.0, 1.0),
}


class Kernel:
    """`out[i] = op(x[i] ...)` over arrays, W lanes at a time."""

    def __init__(self, op: str, dtype: str, width: int, target: str) -> None:
        self.width, self.dtype = width, DTYPES[dtype]
        self.arity = 1 if op in UNARY else 2
        fma = target == "host"
        host = llvm.get_host_cpu_features().flatten()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name() if fma else "x86-64",
            features=host if fma else "",
            opt=3,
            jit=True,
        )
        parsed = llvm.parse_assembly(str(self._module(op, dtype, fma)))
        parsed.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(parsed, builder)
        self.assembly: str = machine.emit_assembly(parsed)
        self.engine = llvm.create_mcjit_compiler(parsed, machine)
        self.engine.finalize_object()
        pointers = [ctypes.c_void_p] * (self.arity + 1)
        signature = ctypes.CFUNCTYPE(None, *pointers, ctypes.c_int64)
        self.entry = signature(self.engine.get_function_address("kernel"))

    def _module(self, op: str, dtype: str, fma: bool) -> ir.Module:
        module = ir.Module()
        module.triple = llvm.get_default_triple()
        scalar = ir.FloatType() if dtype == "f32" else ir.DoubleType()
        lanes = ir.VectorType(scalar, self.width) if self.width > 1 else scalar
        index, pointer = ir.IntType(64), ir.PointerType()
        parameters = [pointer] * (self.arity + 1) + [index]
        signature = ir.FunctionType(ir.VoidType(), parameters)
        function = ir.Function(module, signature, "kernel")
        *arrays, size = function.args
        entry, loop, done = (function.append_basic_block() for _ in range(3))
        ir.IRBuilder(entry).branch(loop)
        builder = ir.IRBuilder(loop)
        i = builder.phi(index)
        i.add_incoming(index(0), entry)
        places = [builder.gep(a, [i], source_etype=scalar) for a in arrays]
        align = 4 if dtype == "f32" else 8
        args = [builder.load(p, typ=lanes, align=align) for p in places[:-1]]
        emit: Callable[..., ir.Value] = emit_unary if op in UNARY else emit_binary
        builder.store(emit(builder, op, *args, fma=fma), places[-1], align=align)
        following = builder.add(i, index(self.width))
        i.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", following, size), loop, done)
        ir.IRBuilder(done).ret_void()
        return module

    def __call__(self, *arrays: Array) -> Array:
        size = len(arrays[0])
        padding = np.ones(-size % self.width, self.dtype)
        padded = [np.concatenate([a, padding]) for a in arrays]
        out = np.empty_like(padded[0])
        self.entry(*(a.ctypes.data for a in padded), out.ctypes.data, len(out))
        return out[:size]


@functools.cache
def kernel(op: str, dtype: str, width: int, target: str) -> Kernel:
    return Kernel(op, dtype, width, target)


def ulp_error(got: Array, true: Array) -> Array:
    """|got - true| over the spacing at `true`; inf where NaN or infinity is wrong."""
    with np.errstate(all="ignore"):
        rounded = true.astype(got.dtype)
        largest = np.finfo(got.dtype).max
        spacing = np.spacing(np.minimum(np.abs(rounded), largest)).astype(LONG)
        error = np.abs(got.astype(LONG) - true) / spacing
        # Beyond the largest number, inf is as good as what rounding would give.
        limit = np.abs(true) >= LONG(largest)
        error = np.where(
            limit & np.isinf(got) & (np.sign(got) == np.sign(true)), 0, error
        )
    error[(got == rounded) | (np.isnan(got) & np.isnan(true))] = 0
    return np.where(np.isnan(error), np.inf, error)


def random_bits(dtype: str, size: int, seed: int) -> Array:
    word = np.uint32 if dtype == "f32" else np.uint64
    bits = np.random.default_rng(seed).integers(0, np.iinfo(word).max, size, word, True)
    return bits.view(DTYPES[dtype])


def specials(dtype: str) -> Array:
    info = np.finfo(DTYPES[dtype])
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 1e-3, 7.25, 100.0, 2.0**23, 2.0**23 + 1]
    half += [2.0**52 + 1, np.inf, np.nan, float(info.tiny), float(info.max)]
    half += [float(info.smallest_subnormal), float(info.eps), 1 - float(info.epsneg)]
    return np.array([*half, *(-v for v in half)], DTYPES[dtype])


def samples(op: str, dtype: str, size: int) -> Array:
    generator = np.random.default_rng(len(op))
    low, high = RANGES.get(op, (-10.0, 10.0))
    if dtype == "f64" and op in ("exp", "sigmoid"):
        low, high = 7.2 * low, 7.2 * high
    if dtype == "f64" and op == "erfc":
        high = 27.5
    spread = generator.standard_normal(size) * np.exp(generator.uniform(-20, 8, size))
    uniform = generator.uniform(low, high, size)
    arrays = [spread.astype(DTYPES[dtype]), uniform.astype(DTYPES[dtype])]
    return np.concatenate([random_bits(dtype, size, 1), *arrays, specials(dtype)])


def long_erf(x: Array) -> Array:
    mpmath.mp.prec = 80

    def one(value: float) -> np.longdouble:
        if value == 0:  # mpmath has no -0
            return LONG(value)
        if not np.isfinite(value):
            return LONG(np.sign(value))
        exact = mpmath.erf(mpmath.mpf(value))
        high = float(exact)
        return LONG(high) + LONG(float(exact - mpmath.mpf(high)))

    return np.array([one(float(v)) for v in x], LONG)


def long_erfc(x: Array) -> Array:
    mpmath.mp.prec = 80

    def one(value: float) -> np.longdouble:
        if np.isnan(value):
            return LONG(value)
        exact = mpmath.erfc(mpmath.mpf(min(max(value, -50.0), 50.0)))
        return LONG(mpmath.nstr(exact, 25))  # may be far below a double

    return np.array([one(float(v)) for v in x], LONG)


REFERENCE: dict[str, Callable[..., Array]] = {
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "logit": lambda x: np.where(
        np.abs(x - 0.5) < 0.25, 2 * np.arctanh(2 * x - 1), np.log(x / (1 - x))
    ),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "erf": long_erf,
    "erfc": long_erfc,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
}


@functools.cache
def unary_case(op: str, dtype: str) -> tuple[Array, Array]:
    x = samples(op, dtype, 4_000 if op in ("erf", "erfc") else 100_000)
    with np.errstate(all="ignore"):
        return x, REFERENCE[op](x.astype(LONG))


@pytest.mark.parametrize("target", [HOST, "baseline"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", sorted(REFERENCE.keys() & UNARY.keys()))
def test_unary_accuracy(op: str, dtype: str, target: str) -> None:
    x, true = unary_case(op, dtype)
    got = kernel(op, dtype, 8, target)(x)
    error = ulp_error(got, true)
    worst = int(np.argmax(error))
    assert error[worst] <= MAX_ULP, (x[worst], got[worst], true[worst])
    zero = (true == 0) & (got == 0)
    assert np.array_equal(np.signbit(got[zero]), np.signbit(true[zero]))


@pytest.mark.parametrize("target", [HOST, "baseline"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decay_is_exp_of_what_is_not_positive(dtype: str, target: str) -> None:
    x = -np.abs(samples("exp", dtype, 100_000))
    with np.errstate(all="ignore"):
        true = np.exp(x.astype(LONG))
    got = kernel("decay", dtype, 8, target)(x)
    tiny = np.finfo(DTYPES[dtype]).tiny
    normal = (true >= 4 * tiny) | np.isnan(true)
    assert ulp_error(got[normal], true[normal]).max() <= MAX_ULP
    rest = got[~normal]
    assert ((rest == 0) | ((rest >= tiny) & (rest <= 5 * tiny))).all()
    assert (got[x == -np.inf] == 0).all()


EXACT: dict[str, Callable[..., Array]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
    "abs": np.abs,
    "neg": np.negative,
}
TORCH: dict[str, Callable[..., torch.Tensor]] = {
    **{op: getattr(torch, op) for op in UNARY if op != "decay"},
    "pow": torch.pow,
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "nextafter": torch.nextafter,
    "mod": torch.remainder,
    "floordiv": torch.floor_divide,
}


def same_number(a: Array, b: Array) -> Array:
    """Equal with the sign of zero, or both NaN."""
    equal = (a == b) & (np.signbit(a) == np.signbit(b))
    return equal | (np.isnan(a) & np.isnan(b))


@pytest.mark.parametrize("target", [HOST, "baseline"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", EXACT)
def test_exact_unary(op: str, dtype: str, target: str) -> None:
    x = np.concatenate(
        [samples(op, dtype, 50_000), np.arange(-9, 9, 0.5, DTYPES[dtype])]
    )
    with np.errstate(invalid="ignore"):  # signalling NaNs among the random bits
        expected = EXACT[op](x)
    assert same_number(kernel(op, dtype, 8, target)(x), expected).all()


@functools.cache
def binary_case(op: str, dtype: str) -> tuple[Array, Array]:
    """Random bits, ordinary numbers, small integers, and for pow results in range."""
    generator, size, form = np.random.default_rng(7), 50_000, DTYPES[dtype]
    random = random_bits(dtype, size, 2), random_bits(dtype, size, 3)
    plain = generator.uniform(-50, 50, size), generator.uniform(-9, 9, size)
    whole = generator.integers(-40, 40, size), generator.integers(-9, 9, size)
    groups = [random, plain, whole]
    if op == "pow":
        low, high = (-104.0, 89.0) if dtype == "f32" else (-746.0, 710.0)
        logs = generator.uniform(low, high, size)
        near_one = 1 + generator.uniform(-1, 1, size) * np.exp(
            generator.uniform(-20, -1, size)
        )
        for base in (np.exp(generator.uniform(-9, 9, size)), near_one):
            rounded = base.astype(form).astype(np.float64)
            rounded[rounded == 1] = 2
            groups.append((rounded, logs / np.log(rounded)))
    left = np.concatenate([a.astype(form) for a, _ in groups])
    return left, np.concatenate([b.astype(form) for _, b in groups])


@pytest.mark.parametrize("target", [HOST, "baseline"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["pow", "atan2"])
def test_binary_accuracy(op: str, dtype: str, target: str) -> None:
    x, y = binary_case(op, dtype)
    with np.errstate(all="ignore"):
        reference = np.power if op == "pow" else np.arctan2
        true = reference(x.astype(LONG), y.astype(LONG))
    got = kernel(op, dtype, 8, target)(x, y)
    error = ulp_error(got, true)
    worst = int(np.argmax(error))
    assert error[worst] <= MAX_ULP, (x[worst], y[worst], got[worst], true[worst])


@pytest.mark.parametrize("target", [HOST, "baseline"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mod_and_floordiv_round_as_python_does(dtype: str, target: str) -> None:
    """torch's own vector code is inexact for large quotients; C's fmod is the truth."""
    x, y = binary_case("mod", dtype)
    with np.errstate(all="ignore"):
        rest = np.fmod(x, y)
        other_side = (rest != 0) & ((y < 0) != (rest < 0))
        expected = np.where(other_side, rest + y, rest)
    assert same_number(kernel("mod", dtype, 8, target)(x, y), expected).all()
    quotient = torch.floor_divide(torch.from_numpy(x), torch.from_numpy(y)).numpy()
    assert same_number(kernel("floordiv", dtype, 8, target)(x, y), quotient).all()


@pytest.mark.parametrize("target", [HOST, "baseline"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_minimum_and_maximum(dtype: str, target: str) -> None:
    """NaN wins, and -0 < +0 whatever the order (torch: the second of equal zeros)."""
    x, y = binary_case("maximum", dtype)
    zeros = np.array([0.0, -0.0, 0.0, -0.0, np.nan, 1.0, np.nan], DTYPES[dtype])
    others = np.array([-0.0, 0.0, 0.0, -0.0, 1.0, np.nan, np.inf], DTYPES[dtype])
    x, y = np.concatenate([zeros, x]), np.concatenate([others, y])
    high, low = np.maximum(x, y), np.minimum(x, y)
    high[:4], low[:4] = [0.0, 0.0, 0.0, -0.0], [-0.0, -0.0, 0.0, -0.0]
    assert same_number(kernel("maximum", dtype, 8, target)(x, y), high).all()
    assert same_number(kernel("minimum", dtype, 8, target)(x, y), low).all()


@pytest.mark.parametrize("target", [HOST, "baseline"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", sorted(SUPPORTED - {"minimum", "maximum", "decay"}))
def test_special_values_are_torchs(op: str, dtype: str, target: str) -> None:
    """Zeros, infinities and NaN in the result, with signs, wherever torch has them."""
    x = specials(dtype)
    if op == "mod":  # torch's vector code fails on large quotients
        x = x[~(np.abs(x) > 1e3) | ~np.isfinite(x)]
        x = x[(np.abs(x) >= 1e-3) | (x == 0) | np.isnan(x)]
    grid = [x] if op in UNARY else [a.ravel() for a in np.meshgrid(x, x)]
    expected = TORCH[op](*map(torch.from_numpy, grid)).numpy()
    got = kernel(op, dtype, 4, target)(*grid)
    special = (expected == 0) | ~np.isfinite(expected) | (got == 0) | ~np.isfinite(got)
    flushed = (got != 0) & (np.abs(got) < np.finfo(got.dtype).tiny)  # by torch's code
    wrong = special & ~flushed & ~same_number(got, expected)
    where = [tuple(a[i] for a in grid) for i in np.flatnonzero(wrong)]
    assert not where, (where, got[wrong], expected[wrong])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["exp", "erf", "log", "sin", "pow", "mod"])
def test_all_widths_give_the_same_bits(op: str, dtype: str) -> None:
    arrays = (samples(op, dtype, 5_000),) if op in UNARY else binary_case(op, dtype)
    arrays = tuple(a[:10_000] for a in arrays)
    expected = kernel(op, dtype, 8, "baseline")(*arrays)
    for width in (1, 4, 16):
        got = kernel(op, dtype, width, "baseline")(*arrays)
        assert same_number(got, expected).all(), width


@pytest.mark.parametrize("target", [HOST, "baseline"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", sorted(SUPPORTED))
def test_nothing_is_called_outside_the_module(op: str, dtype: str, target: str) -> None:
    assembly = kernel(op, dtype, 8, target).assembly
    called = re.findall(r"\bcall\w*\s+(\S+)", assembly)
    called += re.findall(r"\bmovabsq?\s+\$([A-Za-z_\"]\S*)", assembly)
    assert all("pliant." in name or name.startswith("*%") for name in called), called
    if op not in ("sin", "cos", "tan"):
        assert not called


def test_unknown_ops_and_types_are_refused() -> None:
    module = ir.Module()
    signature = ir.FunctionType(ir.VoidType(), [ir.FloatType(), ir.IntType(32)])
    function = ir.Function(module, signature, "f")
    builder = ir.IRBuilder(function.append_basic_block())
    with pytest.raises(InternalError, match="gamma"):
        emit_unary(builder, "gamma", function.args[0])
    with pytest.raises(InternalError, match="i32"):
        emit_unary(builder, "exp", function.args[1])
    assert frozenset(UNARY) | frozenset(BINARY) == SUPPORTED
