"""Shape rules on symbolic shapes: result types, guards, refusals."""

import pytest

from pliant.errors import DTypeError, ShapeError
from pliant.ir.build import Builder
from pliant.ir.ops import ATTR_KINDS, FAMILIES, OPS
from pliant.ir.types import DType, TensorType, tensor
from pliant.sym import parse

F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL
WINDOW = {"stride": (2, 1), "low": (1, 0), "high": (1, 0), "dilation": (1, 2)}


def typed(text: str) -> TensorType:
    """`f32[n, 8]`"""
    dtype, _, dims = text.rstrip("]").partition("[")
    shape = [parse(d) for d in dims.split(",") if d.strip()]
    return tensor(DType(next(d.value for d in DType if d.text == dtype)), *shape)


def infer(name, operands, **attrs):
    b = Builder()
    values = [b.param(f"x{i}", typed(t)) for i, t in enumerate(operands)]
    result = b.emit(name, *values, loc="model.py:1", **attrs)
    return str(result.type), [str(guard.cond) for guard in b.guards]


# op, operand types, attributes, result type, guards
CASES = [
    ("exp", ["f32[n, 8]"], {}, "f32[n, 8]", []),
    ("isnan", ["f16[n]"], {}, "bool[n]", []),
    ("add", ["f32[n, 8]", "f32[n, 8]"], {}, "f32[n, 8]", []),
    ("add", ["f32[n]", "f32[m]"], {}, "f32[n]", ["n == m"]),
    ("add", ["f32[n]", "f32[4]"], {}, "f32[4]", ["n == 4"]),
    ("lt", ["i64[n]", "i64[n]"], {}, "bool[n]", []),
    ("logical_and", ["bool[n]", "bool[n]"], {}, "bool[n]", []),
    ("select", ["bool[n]", "f32[n]", "f32[n]"], {}, "f32[n]", []),
    ("cast", ["f32[n]"], {"dtype": I64}, "i64[n]", []),
    ("full", [], {"value": 0.5, "dtype": F32, "shape": (2, 3)}, "f32[2, 3]", []),
    ("iota", [], {"axis": 0, "dtype": I64, "shape": (7,)}, "i64[7]", []),
    ("dim_value", [], {"value": parse("n + 1"), "dtype": I64}, "i64[]", []),
    ("broadcast", ["f32[1, 8]"], {"shape": (5, 8), "axes": (0, 1)}, "f32[5, 8]", []),
    (
        "broadcast",
        ["f32[n]"],
        {"shape": (2, parse("m")), "axes": (1,)},
        "f32[2, m]",
        ["n == m"],
    ),
    ("reshape", ["f32[n, 8]"], {"shape": (parse("4*n"), 2)}, "f32[4*n, 2]", []),
    (
        "reshape",
        ["f32[n, m]"],
        {"shape": (parse("k"),)},
        "f32[k]",
        ["m*n == k"],
    ),
    ("transpose", ["f32[a, b, c]"], {"perm": (2, 0, 1)}, "f32[c, a, b]", []),
    (
        "slice",
        ["f32[n, 8]"],
        {"starts": (0, 2), "shape": (parse("n"), 3), "steps": (1, 2)},
        "f32[n, 3]",
        [],
    ),
    (
        "slice",
        ["f32[n]"],
        {"starts": (parse("n - 1"),), "shape": (1,), "steps": (1,)},
        "f32[1]",
        ["0 <= n - 1"],
    ),
    ("flip", ["f32[n]"], {"axes": (0,)}, "f32[n]", []),
    ("concat", ["f32[n, 4]", "f32[m, 4]"], {"axis": 0}, "f32[m + n, 4]", []),
    ("pad", ["f32[n]"], {"low": (1,), "high": (parse("k"),)}, "f32[k + n + 1]", []),
    ("index", ["f32[v, d]", "i64[b, s]"], {}, "f32[b, s, d]", []),
    ("index", ["f32[v, d]", "i64[b]", "i64[b]"], {}, "f32[b]", []),
    ("take_along", ["f32[n, v]", "i64[n, k]"], {"axis": 1}, "f32[n, k]", []),
    ("reduce", ["f32[n, m]"], {"op": "sum", "axes": (1,)}, "f32[n]", []),
    (
        "reduce",
        ["f32[n, m]"],
        {"op": "max", "axes": (0,), "keepdims": True},
        "f32[1, m]",
        [],
    ),
    ("argreduce", ["f32[n, 5]"], {"op": "max", "axis": 1}, "i64[n]", []),
    ("argreduce", ["f32[n]"], {"op": "max", "axis": 0}, "i64[]", ["1 <= n"]),
    ("cumulate", ["i64[n]"], {"op": "sum", "axis": 0}, "i64[n]", []),
    ("matmul", ["f32[b, m, k]", "f32[1, k, 6]"], {}, "f32[b, m, 6]", []),
    ("matmul", ["f32[m, k]", "f32[j, n]"], {}, "f32[m, n]", ["k == j"]),
    (
        "conv",
        ["f32[n, 6, h, 9]", "f32[8, 3, 3, 3]"],
        {**WINDOW, "groups": 2},
        "f32[n, 8, ceildiv(h, 2), 5]",
        ["3 <= h + 2"],
    ),
    (
        "conv_last",
        ["f32[n, h, 9, 3]", "f32[8, 3, 3, 3]"],
        WINDOW,
        "f32[n, ceildiv(h, 2), 5, 8]",
        ["3 <= h + 2"],
    ),
    (
        "conv_transpose",
        ["f32[n, 6, 4, 4]", "f32[6, 4, 3, 3]"],
        {**WINDOW, "groups": 2, "extra": (1, 0)},
        "f32[n, 8, 8, 8]",
        [],
    ),
    (
        "pool",
        ["f32[n, 6, 8, 9]"],
        {"op": "max", "window": (2, 2), **WINDOW},
        "f32[n, 6, 5, 7]",
        [],
    ),
    ("linear", ["f32[b, s, 8]", "f32[4, 8]", "f32[4]"], {}, "f32[b, s, 4]", []),
    ("softmax", ["f32[n, m]"], {"axis": 1}, "f32[n, m]", []),
    ("log_softmax", ["f32[n, m]"], {"axis": 0}, "f32[n, m]", []),
    ("relu", ["i64[n]"], {}, "i64[n]", []),
    ("silu", ["f32[n]"], {}, "f32[n]", []),
    ("gelu", ["f32[n]"], {"approximate": "tanh"}, "f32[n]", []),
    (
        "layer_norm",
        ["f32[n, 8]", "f32[8]", "f32[8]"],
        {"axes": 1, "eps": 1e-5, "affine": "wb"},
        "f32[n, 8]",
        [],
    ),
    ("rms_norm", ["f32[n, 8]"], {"axes": 1, "eps": 1e-5}, "f32[n, 8]", []),
    ("group_norm", ["f32[n, 8, h]"], {"groups": 4, "eps": 1e-5}, "f32[n, 8, h]", []),
    (
        "batch_norm",
        ["f32[n, 8, h]", "f32[8]", "f32[8]"],
        {"eps": 1e-5},
        "f32[n, 8, h]",
        [],
    ),
    (
        "attention",
        ["f32[b, 8, s, 64]", "f32[b, 2, t, 64]", "f32[b, 2, t, 32]", "bool[s, t]"],
        {"masked": True},
        "f32[b, 8, s, 32]",
        [],
    ),
    (
        "attention",
        ["f32[8, s, 64]", "f32[2, t, 64]", "f32[2, t, 32]"],
        {"causal": True, "first": parse("t - s")},
        "f32[8, s, 32]",
        [],
    ),
    (
        "resize",
        ["f32[n, 3, h, 7]"],
        {"shape": (parse("2*h"), 14), "mode": "linear"},
        "f32[n, 3, 2*h, 14]",
        ["1 <= h"],
    ),
    (
        "einsum",
        ["f32[b, i, j]", "f32[j, k]"],
        {"equation": "bij,jk->bik"},
        "f32[b, i, k]",
        [],
    ),
    (
        "einsum",
        ["f32[a, i, j]", "f32[b, i, j]"],
        {"equation": "...ij,bij"},
        "f32[a, b]",
        [],
    ),
    ("match_cast", ["f32[n]"], {"shape": (parse("m"),)}, "f32[m]", []),
    ("nonzero", ["bool[u0, m]"], {}, "i64[u1, 2]", []),
    ("alloc", [], {"bytes": 8, "shape": (2,), "dtype": F32}, "f32[2]", []),
]


@pytest.mark.parametrize(("name", "operands", "attrs", "want", "guards"), CASES)
def test_infer(name, operands, attrs, want, guards):
    assert infer(name, operands, **attrs) == (want, guards)


def test_every_op_is_well_formed():
    for name, definition in OPS.items():
        assert definition.name == name
        assert all(spec.base in ATTR_KINDS for spec in definition.attrs)
        assert len(definition.traits & FAMILIES) == 1, name


@pytest.mark.parametrize(
    ("name", "operands", "attrs", "words"),
    [
        ("add", ["f32[3]", "f32[4]"], {}, ["add at model.py:1", "3 == 4"]),
        ("add", ["f32[n]", "f32[n + 1]"], {}, ["n == n + 1"]),
        ("matmul", ["f32[2, 3]", "f32[4, 5]"], {}, ["inner dims", "3 == 4"]),
        ("reshape", ["f32[2, 3]"], {"shape": (4,)}, ["6 == 4"]),
        ("transpose", ["f32[2, 3]"], {"perm": (0, 0)}, ["permutation"]),
        ("concat", ["f32[2, 3]", "f32[2, 4]"], {"axis": 0}, ["3 == 4"]),
        ("softmax", ["f32[2]"], {"axis": 1}, ["axis 1"]),
        ("attention", 3 * ["f32[2, n, 4]"], {"first": 1}, ["'causal' must be set"]),
    ],
)
def test_impossible_shapes_are_refused(name, operands, attrs, words):
    with pytest.raises(ShapeError) as caught:
        infer(name, operands, **attrs)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("name", "operands"),
    [("add", ["f32[n]", "i64[n]"]), ("exp", ["i64[n]"]), ("logical_not", ["f32[n]"])],
)
def test_wrong_dtypes_are_refused(name, operands):
    with pytest.raises(DTypeError, match=r"model\.py:1"):
        infer(name, operands)


def test_wrong_attributes_are_refused():
    with pytest.raises(TypeError, match="no attribute axes"):
        infer("softmax", ["f32[n]"], axes=(0,))
    with pytest.raises(TypeError, match="needs the attribute axis"):
        infer("softmax", ["f32[n]"])
    with pytest.raises(ValueError, match="must be one of"):
        infer("reduce", ["f32[n]"], op="mean", axes=(0,))
    with pytest.raises(TypeError, match="must be int"):
        infer("softmax", ["f32[n]"], axis=0.5)


def test_a_guard_is_known_afterwards():
    b = Builder()
    x, y = (b.param(v, typed(f"f32[{v}]")) for v in ("n", "m"))
    b.emit("add", x, y)
    b.emit("mul", x, y)
    assert [str(g.cond) for g in b.guards] == ["n == m"]
    assert b.guards[0].message == (
        "add: operands must have one shape at dim 0: ",
        parse("n"),
        " == ",
        parse("m"),
    )


def region(b, types, body):
    inner = b.child()
    results = body(inner, [inner.param("p", typed(t)) for t in types])
    return inner.finish("region", results)


def test_if_gives_a_fresh_symbol_where_the_regions_differ():
    b = Builder()
    cond, x = b.param("c", typed("bool[]")), b.param("x", typed("f32[n, 4]"))
    then = region(b, ["f32[n, 4]"], lambda r, v: [r.concat([v[0], v[0]], 0)])
    other = region(b, ["f32[n, 4]"], lambda r, v: [r.unary("exp", v[0])])
    out = b.emit("if", cond, x, regions=[then, other])
    assert str(out.type) == "f32[u0, 4]"


def test_loop_carries_growing_values_only_under_a_symbol_of_their_own():
    b = Builder()
    count, x = b.param("i", typed("i64[]")), b.param("x", typed("f32[n]"))

    def grow(r, v):
        return [r.concat([v[1], r.full(0.0, F32, (1,))], 0)]

    body = region(b, ["i64[]", "f32[k]"], grow)
    assert str(b.emit("loop", count, x, regions=[body]).type) == "f32[u0]"
    stiff = region(b, ["i64[]", "f32[n]"], grow)
    with pytest.raises(ShapeError, match="symbol of its own"):
        b.emit("loop", count, x, regions=[stiff])


def test_while_keeps_types():
    b = Builder()
    x = b.param("x", typed("f32[n]"))
    cond = region(b, ["f32[n]"], lambda r, v: [r.full(True, BOOL)])
    body = region(b, ["f32[n]"], lambda r, v: [r.unary("neg", v[0])])
    assert str(b.emit("while", x, regions=[cond, body]).type) == "f32[n]"


def callee(result="f32[n + m]"):
    b = Builder()
    x = b.param("x", typed("f32[n]"))
    b.param("y", typed("f32[m, n]"))
    b.emit("match_cast", x, shape=typed(result).shape)
    return b.finish("f", [b.ops[-1].result])


def test_call_unifies_dims_with_the_signature():
    b = Builder(callees={"f": callee()})
    x, y = b.param("x", typed("f32[2*s]")), b.param("y", typed("f32[7, t]"))
    out = b.emit("call", x, y, callee="f")
    assert str(out.type) == "f32[2*s + 7]"
    assert [str(g.cond) for g in b.guards] == ["2*s == t"]


def test_call_asks_for_match_cast_where_the_result_is_open():
    b = Builder(callees={"f": callee("f32[z]")})
    x, y = b.param("x", typed("f32[2]")), b.param("y", typed("f32[7, 2]"))
    with pytest.raises(ShapeError, match="match_cast"):
        b.emit("call", x, y, callee="f")
