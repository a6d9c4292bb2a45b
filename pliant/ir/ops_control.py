"""Rows of control flow, and of the ops that there are only after lowering.

What they mean heads ir/ops.py.
"""

from __future__ import annotations

from pliant.ir import interp_ops as numpy_ops
from pliant.ir import shapes
from pliant.ir import shapes_control as control
from pliant.ir.opdef import ABSENT, AttrSpec, OpDef, Trait, define

_A, _FL, _LO = AttrSpec, Trait.CONTROL, Trait.LOWERED

CONTROL_OPS: tuple[OpDef, ...] = (
    define("if", _FL, (1, None), control.if_, regions=2),
    define("loop", _FL, (1, None), control.loop, regions=1),
    define("while", _FL, (1, None), control.while_, regions=2),
    define(
        "scan",
        _FL,
        (0, None),
        control.scan,
        _A("rounds", "dim"),
        _A("scanned", "int"),
        _A("reverse", "bool", False),
        regions=1,
    ),
    define("bind", _FL, (1, None), control.bind, _A("most", "dims"), regions=1),
    define(
        "chunk",
        _FL,
        (0, None),
        control.chunk,
        _A("extent", "dim"),
        _A("rows", "dim"),
        _A("outers", "dims"),
        _A("sums", "strs", ABSENT),
        regions=1,
    ),
    define("match_cast", _FL, 1, control.match_cast, _A("shape", "dims"), pure=False),
    define(
        "nonzero",
        _FL,
        1,
        control.nonzero,
        meaning=numpy_ops.nonzero,
        traits=(Trait.FLAT,),
    ),
    define(
        "extent",
        _FL,
        1,
        control.extent,
        _A("most", "dim"),
        _A("of", "str", "item()"),
        meaning=numpy_ops.extent,
        traits=(Trait.FLAT,),
    ),
    define(
        "call",
        _FL,
        (0, None),
        control.call,
        _A("callee", "str"),
        _A("sizes", "dims", ()),
        pure=False,
    ),
    define("fusion", _FL, (0, None), control.fusion, _A("kind", "str"), regions=1),
    # lowered
    define(
        "alloc",
        _LO,
        0,
        shapes.given,
        _A("bytes", "dim"),
        _A("shape", "dims"),
        _A("dtype", "dtype"),
        pure=False,
    ),
    define(
        "view",
        _LO,
        1,
        shapes.declared,
        _A("offset", "dim"),
        pure=False,
    ),
    *(
        define(
            name,
            _LO,
            (0, None),
            shapes.declared,
            _A("callee", "str"),
            _A("sizes", "dims", ()),
            _A("computes", "str", ABSENT),
            pure=False,
            traits=(Trait.CALL,),
        )
        for name in ("call_loop", "call_library")
    ),
)
