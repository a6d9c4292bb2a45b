"""Elementwise math as LLVM IR, for a scalar or a vector of any width.

Each (op, type) becomes one internal function of the module, made on first use:

  emit_unary(builder, "exp", x, fma=True)   ->   call @pliant.exp.v16f32(x)

Results are within 4 ulp of the true value, for float and double, over the whole range,
subnormals included; NaN, infinities and signed zeros are as in torch. No function calls
libm. `fma` says that the target has fused multiply-add and hardware rounding to
integral; it is one choice for the module, as are the target's features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from pliant.codegen import vector_math_exp as exponential
from pliant.codegen import vector_math_integral as integral
from pliant.codegen import vector_math_log as logarithm
from pliant.codegen import vector_math_pow as powers
from pliant.codegen import vector_math_trig as trigonometry
from pliant.codegen.builder import LLBuilder
from pliant.codegen.llvm_types import mangle
from pliant.codegen.vector_math_lanes import (
    DOUBLE,
    FLOAT,
    Lanes,
    scalar_type,
)
from pliant.errors import InternalError

# The files of the functions end with their part of these tables.
UNARY: dict[str, Callable[[Lanes], Lanes]] = {
    **exponential.UNARY,
    **logarithm.UNARY,
    **trigonometry.UNARY,
    **integral.UNARY,
    "sqrt": Lanes.square_root,
    "rsqrt": lambda x: 1.0 / x.square_root(),
    "reciprocal": lambda x: 1.0 / x,
    "floor": Lanes.floor,
    "ceil": Lanes.ceil,
    "round": Lanes.nearest,
    "trunc": Lanes.truncate,
    "abs": Lanes.magnitude,
    "neg": Lanes.__neg__,
}
BINARY: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    **powers.BINARY,
    **trigonometry.BINARY,
    **integral.BINARY,
    "copysign": Lanes.with_sign_of,
}

SUPPORTED: frozenset[str] = frozenset(UNARY) | frozenset(BINARY)


def emit_unary(
    builder: LLBuilder, op: str, x: ir.Value, *, fma: bool = False
) -> ir.Value:
    """op(x), lane by lane; x is float, double or a vector of them."""
    if op not in UNARY:
        raise InternalError("codegen", f"no vector math for the unary op {op!r}")
    return _call(builder, op, UNARY[op], [x], fma)


def emit_binary(
    builder: LLBuilder, op: str, x: ir.Value, y: ir.Value, *, fma: bool = False
) -> ir.Value:
    """op(x, y), lane by lane; both of one type, as in `emit_unary`."""
    if op not in BINARY:
        raise InternalError("codegen", f"no vector math for the binary op {op!r}")
    if x.type != y.type:
        raise InternalError(
            "codegen", f"{op}: operand types differ: {x.type} and {y.type}"
        )
    return _call(builder, op, BINARY[op], [x, y], fma)


def _call(
    builder: LLBuilder,
    op: str,
    body: Callable[..., Lanes],
    args: Sequence[ir.Value],
    fma: bool,
) -> ir.Value:
    type_ = args[0].type
    if scalar_type(type_) not in (FLOAT, DOUBLE):
        raise InternalError("codegen", f"{op}: vector math is for floats, not {type_}")
    name = f"pliant.{op}.{mangle(type_)}{'.fma' if fma else ''}"
    function = builder.module.globals.get(name)
    if function is None:
        function = _define(builder.module, name, body, type_, len(args), fma)
    return builder.call(function, args)


def _define(
    module: ir.Module,
    name: str,
    body: Callable[..., Lanes],
    type_: ir.Type,
    arity: int,
    fma: bool,
) -> ir.Function:
    function = ir.Function(module, ir.FunctionType(type_, [type_] * arity), name)
    function.linkage = "internal"
    for attribute in ("alwaysinline", "nounwind", "readnone"):
        function.attributes.add(attribute)
    builder = LLBuilder(function.append_basic_block("entry"))
    result = body(*(Lanes(builder, argument, fma) for argument in function.args))
    builder.ret(result.value)
    return function
