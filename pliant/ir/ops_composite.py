"""Rows of composite ops, which have a spelling in primitive ops (passes/decompose.py).

What they compute, and when an operand is legal, heads ir/ops.py.
"""

from __future__ import annotations

from pliant.ir import interp_ops as numpy_ops
from pliant.ir import shapes
from pliant.ir import shapes_composite as composite
from pliant.ir.opdef import AttrSpec, OpDef, Trait, define

_A, _CO = AttrSpec, Trait.COMPOSITE
_ATTEND = (
    _A("scale", "float?", None),
    _A("causal", "bool", False),
    _A("masked", "bool", False),
    _A("swapped", "bool", False),
    _A("nan_rows", "bool", False),
)
_FROM_ROW = (*_ATTEND, _A("first", "dim", 0), _A("zero_nan", "bool", False))
_NORM = (_A("eps", "float"), _A("affine", "str", "none", tuple(composite.AFFINE)))

COMPOSITE_OPS: tuple[OpDef, ...] = (
    define(
        "argreduce",
        _CO,
        1,
        shapes.argreduce,
        _A("op", "str", choices=("max", "min")),
        _A("axis", "int"),
        _A("keepdims", "bool", False),
        meaning=numpy_ops.argreduce,
        traits=(Trait.FLAT,),
    ),
    define(
        "random",
        _CO,
        1,
        composite.random,
        _A("number", "int"),
        _A("shape", "dims"),
        meaning=numpy_ops.random,
    ),
    define("linear", _CO, (2, 3), composite.linear, meaning=numpy_ops.linear),
    define(
        "softmax",
        _CO,
        1,
        composite.axis_kept,
        _A("axis", "int"),
        meaning=numpy_ops.softmax,
    ),
    define(
        "log_softmax",
        _CO,
        1,
        composite.axis_kept,
        _A("axis", "int"),
        meaning=numpy_ops.log_softmax,
    ),
    define("relu", _CO, 1, composite.relu, meaning=numpy_ops.relu),
    define("silu", _CO, 1, composite.axis_kept, meaning=numpy_ops.silu),
    define(
        "gelu",
        _CO,
        1,
        composite.axis_kept,
        _A("approximate", "str", "none", choices=("none", "tanh")),
        meaning=numpy_ops.gelu,
    ),
    define(
        "layer_norm",
        _CO,
        (1, 3),
        composite.layer_norm,
        _A("axes", "int"),
        *_NORM,
        meaning=numpy_ops.layer_norm,
    ),
    define(
        "rms_norm",
        _CO,
        (1, 2),
        composite.layer_norm,
        _A("axes", "int"),
        *_NORM,
        meaning=numpy_ops.rms_norm,
    ),
    define(
        "group_norm",
        _CO,
        (1, 3),
        composite.channel_norm,
        _A("groups", "int"),
        *_NORM,
        meaning=numpy_ops.group_norm,
    ),
    define(
        "batch_norm",
        _CO,
        (3, 5),
        composite.channel_norm,
        *_NORM,
        meaning=numpy_ops.batch_norm,
    ),
    define(
        "attention",
        _CO,
        (3, None),
        composite.attention,
        *_FROM_ROW,
        optional_regions=1,
        traits=(Trait.ATTENTION,),
    ),
    define(
        "attention_lse",
        _CO,
        (3, None),
        composite.attention_lse,
        *_FROM_ROW,
        optional_regions=1,
        traits=(Trait.ATTENTION,),
    ),
    define(
        "attention_backward",
        _CO,
        (6, None),
        composite.attention_backward,
        *_ATTEND,
        optional_regions=1,
        traits=(Trait.ATTENTION,),
    ),
    define(
        "resize",
        _CO,
        1,
        composite.resize,
        _A("shape", "dims"),
        _A("mode", "str", choices=("nearest", "nearest_exact", "linear", "cubic")),
        _A("align_corners", "bool", False),
        _A("scales", "floats?", ()),
    ),
    define(
        "einsum",
        _CO,
        (1, None),
        composite.einsum,
        _A("equation", "str"),
        meaning=numpy_ops.einsum,
    ),
)
