"""Each rule: what is left of a graph, and that it still computes the same."""

import math

import numpy as np
import pytest

from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Module
from pliant.ir.interp import run_graph
from pliant.ir.types import NUMPY, DType, tensor
from pliant.passes.canonicalize import canonicalize
from pliant.sym import sym

F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL
n, m = sym("n"), sym("m")
SPECIAL = [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, -2.0, 3.0]


def sample(type, env):
    shape = [d.evaluate(env) for d in type.shape]
    count = math.prod(shape)
    values = (SPECIAL * (count // 8 + 1))[:count]
    if not type.dtype.is_float:
        values = [i % 2 if type.dtype is BOOL else i - 3 for i in range(count)]
    return np.array(values).astype(NUMPY[type.dtype]).reshape(shape)


def canonical(make) -> Graph:
    """The canonical graph of make(builder); checked to give the same bits."""
    b = Builder()
    results = make(b)
    graph = b.finish("main", results if isinstance(results, list) else [results])
    out = canonicalize(graph)
    assert canonicalize(out) is out
    for size in (0, 1, 3):
        env = {"n": size, "m": size}
        inputs = [sample(v.type, env) for v in graph.params]
        before = run_graph(Module({"main": graph}), inputs, env=env)
        after = run_graph(Module({"main": out}), inputs, env=env)
        for x, y in zip(before, after, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
            if x.dtype.kind == "f":
                known = ~np.isnan(x)
                np.testing.assert_array_equal(
                    np.signbit(x[known]), np.signbit(y[known])
                )
    return out


def test_matrices_swapped_behind_a_reshape() -> None:
    def exported(b, last):
        x = param(b, shape=(n, 2, 3, 4))
        flat = b.reshape(x, (n * 2, 3, 4))
        return b.reshape(b.transpose(flat, (0, 2, 1)), (n, 2, *last))

    assert left(lambda b: exported(b, (4, 3))) == ["transpose"]
    assert left(lambda b: exported(b, (2, 6))).count("reshape") == 2
    assert left(lambda b: exported(b, (3, 4))).count("reshape") == 2


def left(make) -> list[str]:
    return [op.name for op in canonical(make).ops]


def param(b, dtype=F32, shape=(n, 8), name="x"):
    return b.param(name, tensor(dtype, *shape))


def scalar_op(op, number, dtype, flip=False):
    def make(b):
        x = param(b, dtype)
        y = b.full_like(x, number)
        return b.emit(op, *((y, x) if flip else (x, y)))

    return make


@pytest.mark.parametrize(
    ("op", "number", "dtype", "flip", "want"),
    [
        ("add", 0.0, F32, False, ["full", "add"]),  # -0.0 + 0.0 is 0.0
        ("add", -0.0, F32, False, []),
        ("add", -0.0, F32, True, []),
        ("sub", 0.0, F32, False, []),
        ("sub", -0.0, F32, False, ["full", "sub"]),  # -0.0 - -0.0 is 0.0
        ("sub", 0.0, F32, True, ["full", "sub"]),
        ("mul", 1.0, F32, True, []),
        ("mul", 0.0, F32, False, ["full", "mul"]),  # NaN and Inf
        ("div", 1.0, F32, False, []),
        ("div", 1.0, F32, True, ["full", "div"]),
        ("pow", 2.0, F32, False, ["mul"]),
        ("add", 0, I64, False, []),
        ("sub", 0, I64, False, []),
        ("mul", 1, I64, False, []),
        ("mul", 0, I64, False, ["full"]),
        ("floordiv", 1, I64, False, []),
        ("logical_and", True, BOOL, False, []),
        ("logical_and", False, BOOL, True, ["full"]),
        ("logical_or", False, BOOL, False, []),
        ("logical_or", True, BOOL, False, ["full"]),
        ("logical_xor", False, BOOL, False, []),
    ],
)
def test_algebra(op, number, dtype, flip, want):
    assert left(scalar_op(op, number, dtype, flip)) == want


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda b: b.emit("cast", param(b), dtype=F32), []),
        (lambda b: b.emit("reshape", param(b), shape=(n, 8)), []),
        (lambda b: b.emit("transpose", param(b), perm=(0, 1)), []),
        (lambda b: b.emit("broadcast", param(b), shape=(n, 8), axes=(0, 1)), []),
        (lambda b: b.emit("concat", param(b), axis=0), []),
        (lambda b: b.emit("pad", param(b), low=(0, 0), high=(0, 0)), []),
        (lambda b: b.emit("flip", param(b, F32, (n, 1)), axes=(1,)), []),
        (
            lambda b: b.emit(
                "slice", param(b), starts=(0, 0), shape=(n, 8), steps=(1, 1)
            ),
            [],
        ),
        (lambda b: b.reshape(b.reshape(param(b), (n, 2, 4)), (n, 8)), []),
        (lambda b: b.reshape(b.reshape(param(b), (n, 2, 4)), (8 * n,)), ["reshape"]),
        (lambda b: b.swap(b.swap(param(b), 0, 1), 0, 1), []),
        (
            lambda b: b.transpose(
                b.transpose(param(b, F32, (n, 2, 3)), (1, 2, 0)), (0, 2, 1)
            ),
            ["transpose"],
        ),
        (
            lambda b: b.broadcast_to(
                b.broadcast_to(param(b, F32, (8,)), (n, 8)), (2, n, 8)
            ),
            ["broadcast"],
        ),
        (
            lambda b: b.broadcast_to(b.unsqueeze(param(b, F32, (n,)), 1), (n, 5)),
            ["broadcast"],
        ),
        (
            lambda b: b.slice_axis(b.slice_axis(param(b), 1, 1, 3, 2), 1, 1, 2),
            ["slice"],
        ),
        (lambda b: b.cast(b.cast(param(b, DType.F16), F32), DType.F16), []),
        (lambda b: b.cast(b.cast(param(b), DType.F16), F32), ["cast", "cast"]),
        (lambda b: b.unary("neg", b.unary("neg", param(b))), []),
        (lambda b: b.reduce("max", param(b, F32, (n, 1)), [1]), ["reshape"]),
        (lambda b: b.reduce("sum", param(b, I64, (n, 1)), [1]), ["reshape"]),
        (lambda b: b.reduce("sum", param(b, F32, (n, 1)), [1]), ["reduce"]),
        (lambda b: b.emit("maximum", *[param(b)] * 2), []),
    ],
)
def test_identities(make, want):
    assert left(make) == want


def test_compositions_keep_what_they_compose():
    out = canonical(lambda b: b.slice_axis(b.slice_axis(param(b), 1, 1, 3, 2), 1, 1, 2))
    assert out.ops[0].dims_attr("starts") == (0, 3)
    assert out.ops[0].ints_attr("steps") == (1, 2)


def test_a_known_size_is_not_given_up_for_a_symbol():
    b = Builder()
    x = b.param("x", tensor(F32, n))
    graph = b.finish("main", [b.emit("reshape", x, shape=(4,))])
    assert str(canonicalize(graph).results[0].type) == "f32[4]"


def test_constants_fold_through_elementwise_and_moves():
    def make(b):
        one = b.full(1, F32, (n, 2))
        wide = b.broadcast_to(b.unsqueeze(b.binary("add", one, one), 0), (3, n, 2))
        return b.cast(b.unary("neg", b.transpose(wide, (2, 0, 1))), I64)

    (op,) = canonical(make).ops
    assert (op.name, op.attr("value"), str(op.result.type)) == (
        "full",
        -2,
        "i64[2, 3, n]",
    )


def test_folding_rounds_as_the_type_does():
    def make(b):
        return b.binary("add", b.scalar(0.1, F32), b.scalar(0.2, F32))

    (op,) = canonical(make).ops
    assert op.attr("value") == float(np.float32(0.1) + np.float32(0.2))


@pytest.mark.parametrize("number", [math.nan, math.inf, -5e18, 1e19])
def test_casts_c_leaves_open_do_not_fold(number):
    b = Builder()
    graph = b.finish("main", [b.cast(b.scalar(number, F32), DType.I32)])
    assert [op.name for op in canonicalize(graph).ops] == ["full", "cast"]


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda b: b.binary("ge", b.iota((n,)), b.scalar(0, I64)), ["full"]),
        (lambda b: b.binary("lt", b.iota((n,)), b.dim_value(n)), ["full"]),
        (lambda b: b.binary("eq", b.iota((n,)), b.scalar(-1, I64)), ["full"]),
        (lambda b: b.binary("ne", b.dim_value(n), b.iota((n,))), ["full"]),
        (
            lambda b: b.binary("gt", b.iota((n,)), b.scalar(0, I64)),
            ["iota", "full", "gt"],
        ),
        (
            lambda b: b.emit("le", b.iota((n, m), 1), b.iota((n, m), 0)),
            ["iota", "iota", "le"],
        ),
    ],
)
def test_comparisons_of_indices(make, want):
    def whole(b):
        param(b, F32, (n, m))
        return make(b)

    assert sorted(left(whole)) == sorted(want)


def test_iota_absorbs_moves():
    def make(b):
        param(b)
        rows = b.unsqueeze(b.iota((n,)), 1)
        return b.swap(b.broadcast_to(rows, (n, 5)), 0, 1)

    (op,) = canonical(make).ops
    assert (op.name, op.int_attr("axis"), str(op.result.type)) == (
        "iota",
        1,
        "i64[5, n]",
    )


def test_select():
    def known(b):
        x, y = param(b), param(b, name="y")
        return b.select(b.full(False, BOOL, (n, 8)), x, y)

    def same(b):
        x, cond = param(b), param(b, BOOL, name="c")
        return b.select(cond, x, x)

    def negated(b):
        x, y, cond = param(b), param(b, name="y"), param(b, BOOL, name="c")
        return b.select(b.unary("logical_not", cond), x, y)

    def flag(b):
        cond = param(b, BOOL, name="c")
        return b.select(cond, *(b.full(x, BOOL, (n, 8)) for x in (True, False)))

    def negated_flag(b):
        cond = param(b, BOOL, name="c")
        return b.select(cond, *(b.full(x, BOOL, (n, 8)) for x in (False, True)))

    assert left(flag) == []
    assert left(negated_flag) == ["logical_not"]
    assert left(known) == []
    assert left(same) == []
    assert left(negated) == ["select"]


@pytest.mark.parametrize("keys,seen", [(m + 1, True), (m, True), (m + 2, False)])
def test_rows_that_see_every_key_need_no_causal_mask(keys, seen):
    b = Builder()
    q = b.param("q", tensor(F32, 1, 2, n, 4))
    k = b.param("k", tensor(F32, 1, 2, keys, 4))
    out = b.emit("attention", q, k, k, causal=True, first=m)
    (op,) = canonicalize(b.finish("main", [out])).ops
    assert op.bool_attr("causal") is not seen
    assert op.dim_attr("first") == (0 if seen else m)


def test_attention_drops_a_mask_that_hides_nothing():
    def make(b):
        q = param(b, F32, (1, 2, n, 4))
        mask = b.binary("ge", b.iota((n,)), b.scalar(0, I64))
        mask = b.binary("logical_and", mask, b.full(True, BOOL, (n, 1)))
        return b.emit("attention", q, q, q, mask, scale=0.5, masked=True)

    b = Builder()
    graph = canonicalize(b.finish("main", [make(b)]))
    (op,) = graph.ops
    assert len(op.operands) == 3
    assert op.bool_attr("masked") is False
    assert op.float_attr("scale") == 0.5


def test_equal_ops_are_shared_and_unused_ones_dropped():
    def make(b):
        x, y = param(b), param(b, name="y")
        b.unary("exp", y)
        return b.binary("mul", b.emit("add", x, y), b.emit("add", y, x))

    assert left(make) == ["add", "mul"]


def test_signed_zeros_and_types_are_not_shared():
    def make(b):
        param(b)
        return [b.scalar(0.0, F32), b.scalar(-0.0, F32), b.scalar(0, I64)]

    assert left(make) == ["full"] * 3


def test_checks_stay():
    def make(b):
        x = param(b)
        b.emit("match_cast", x, shape=(sym("k"), 8))
        return x

    assert left(make) == ["match_cast"]


def test_regions_are_canonicalized_and_nothing_to_do_is_the_same_graph():
    b = Builder()
    count, x = b.param("i", tensor(I64)), b.param("x", tensor(F32, n))
    inner = b.child()
    inner.param("i", tensor(I64))
    carried = inner.param("x", x.type)
    twice = inner.unary("neg", inner.unary("neg", inner.unary("exp", carried)))
    body = inner.finish("body", [twice])
    graph = canonicalize(b.finish("main", [b.emit("loop", count, x, regions=[body])]))
    assert [op.name for op in graph.ops[0].regions[0].ops] == ["exp"]
    assert canonicalize(graph) is graph
