"""Decompositions compute what torch computes, at sizes 0, 1, odd and prime."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Module
from pliant.ir.interp import run_graph
from pliant.ir.ops import OPS, Trait
from pliant.ir.types import DType, tensor
from pliant.machine import target
from pliant.options import Options
from pliant.passes.decompose import decompose
from pliant.sym import sym

DTYPE = {
    torch.float32: DType.F32,
    torch.float64: DType.F64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.bool: DType.BOOL,
    torch.int64: DType.I64,
}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}
SIZES = (0, 1, 3, 7)


def array(t):
    return (t.float() if t.dtype is torch.bfloat16 else t).numpy()


def rand(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def check(name, inputs, want, dynamic=((0, 0),), attrs=None):
    """Builds `name` with the given (input, axis) dims symbolic, decomposes, runs."""
    b = Builder()
    values = []
    for i, t in enumerate(inputs):
        dims = list(t.shape)
        for which, axis in dynamic:
            if which == i:
                dims[axis] = sym(f"d{i}_{axis}")
        values.append(b.param(f"x{i}", tensor(DTYPE[t.dtype], *dims)))
    attrs = attrs(*values) if callable(attrs) else attrs or {}
    graph = b.finish("main", [b.emit(name, *values, **attrs)])
    graph = decompose(graph, Context(Options(attention=False), target.host()))
    assert not any(Trait.COMPOSITE in OPS[op.name].traits for op in graph.ops)
    (got,) = run_graph(Module({"main": graph}), [array(t) for t in inputs])
    assert got.shape == tuple(want.shape)
    atol = TOLERANCE.get(want.dtype, 1e-5)
    np.testing.assert_allclose(got, array(want), rtol=atol, atol=atol)
    if name == "relu":
        zero = got == 0
        assert (np.signbit(got[zero]) == np.signbit(array(want)[zero])).all()
    return graph


@pytest.mark.parametrize("size", SIZES)
def test_linear(size):
    x, w, bias = rand(size, 5, 8), rand(3, 8), rand(3)
    check("linear", [x, w, bias], F.linear(x, w, bias))
    check("linear", [x, w], F.linear(x, w), dynamic=((0, 1),))
    vector = rand(8)
    check("linear", [vector, w], F.linear(vector, w), dynamic=())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_softmax(size, dtype):
    x = rand(size, 5, dtype=dtype) * 30
    for axis in (0, 1):
        attrs = {"axis": axis}
        check("softmax", [x], F.softmax(x, axis), attrs=attrs)
        check("log_softmax", [x], F.log_softmax(x, axis), attrs=attrs)


def test_softmax_of_masked_rows_is_nan():
    x = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]])
    check("softmax", [x], F.softmax(x, 1), attrs={"axis": 1})


SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -2.5, 90.0, -90])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations(dtype):
    x = torch.cat([SPECIAL, rand(17)]).to(dtype)
    check("relu", [x], F.relu(x))
    check("silu", [x], F.silu(x))
    check("gelu", [x], F.gelu(x, approximate="tanh"), attrs={"approximate": "tanh"})
    # torch's f32 kernel gives NaN for gelu(inf), its f64 kernel inf, as here.
    below = x[x != math.inf]
    check("gelu", [below], F.gelu(below))
    wide = x.double()
    check("gelu", [wide], F.gelu(wide))


def test_relu_of_integers():
    x = torch.arange(-3, 4)
    check("relu", [x], F.relu(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_norms_over_last_dims(size, dtype):
    x = rand(size, 5, 8, dtype=dtype) + 3
    w, bias = rand(5, 8, dtype=dtype), rand(5, 8, dtype=dtype)
    for affine, extra in (("none", []), ("w", [w]), ("wb", [w, bias])):
        attrs = {"axes": 2, "eps": 1e-5, "affine": affine}
        want = F.layer_norm(x, (5, 8), *extra, eps=1e-5)
        check("layer_norm", [x, *extra], want, attrs=attrs)
        if affine != "wb":
            want = F.rms_norm(x, (5, 8), *extra, eps=1e-5)
            check("rms_norm", [x, *extra], want, attrs=attrs)


def test_norm_over_a_symbolic_dim():
    x = rand(4, 7)
    attrs = {"axes": 1, "eps": 1e-5}
    want = F.layer_norm(x, (7,))
    check("layer_norm", [x], want, attrs=attrs, dynamic=((0, 0), (0, 1)))


@pytest.mark.parametrize("size", SIZES)
def test_group_norm(size):
    x, w, bias = rand(size, 6, 5, 3), rand(6), rand(6)
    attrs = {"groups": 3, "eps": 1e-5, "affine": "wb"}
    want = F.group_norm(x, 3, w, bias)
    dynamic = ((0, 0), (0, 2), (0, 3))
    graph = check("group_norm", [x, w, bias], want, attrs=attrs, dynamic=dynamic)
    assert not graph.constraints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_batch_norm(size, dtype):
    x, mean, var = rand(size, 4, 5, dtype=dtype), rand(4), rand(4).abs() + 0.1
    w, bias = rand(4) + 1, rand(4)
    attrs = {"eps": 1e-3, "affine": "wb"}
    want = F.batch_norm(x.float(), mean, var, w, bias, eps=1e-3).to(dtype)
    check("batch_norm", [x, mean, var, w, bias], want, attrs=attrs)
    want = F.batch_norm(x.float(), mean, var, eps=1e-3).to(dtype)
    check("batch_norm", [x, mean, var], want, attrs={"eps": 1e-3})


# ---- resize

TORCH_MODE = {
    ("nearest", 1): "nearest",
    ("nearest", 2): "nearest",
    ("nearest_exact", 2): "nearest-exact",
    ("linear", 1): "linear",
    ("linear", 2): "bilinear",
    ("linear", 3): "trilinear",
    ("cubic", 2): "bicubic",
}


@pytest.mark.parametrize("new", [(1, 1), (3, 11), (10, 14), (2, 5), (13, 4)])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "nearest_exact", "linear", "cubic"])
@pytest.mark.parametrize("size", [(5, 7), (1, 1), (2, 13)])
def test_resize_to_a_size(size, mode, align, new):
    if align and mode.startswith("nearest"):
        return
    x = rand(2, 3, *size)
    how = {} if mode.startswith("nearest") else {"align_corners": align}
    want = F.interpolate(x, new, mode=TORCH_MODE[mode, 2], **how)
    attrs = {"shape": new, "mode": mode, "align_corners": align}
    dynamic = ((0, 0), (0, 2), (0, 3))
    check("resize", [x], want, attrs=attrs, dynamic=dynamic)


@pytest.mark.parametrize("scale", [(2.0, 2.0), (0.6, 1.7), (1.3, 0.5)])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_by_a_factor(mode, scale):
    x = rand(2, 3, 7, 10)
    want = F.interpolate(x, scale_factor=scale, mode=TORCH_MODE[mode, 2])
    attrs = {"shape": want.shape[2:], "mode": mode, "scales": scale}
    check("resize", [x], want, attrs=attrs, dynamic=((0, 2), (0, 3)))


def test_resize_other_ranks_and_types():
    x = rand(2, 3, 7)
    for mode in ("nearest", "linear"):
        want = F.interpolate(x, 12, mode=TORCH_MODE[mode, 1])
        check("resize", [x], want, attrs={"shape": (12,), "mode": mode})
    x = rand(1, 2, 3, 4, 5)
    want = F.interpolate(x, (5, 4, 9), mode="trilinear")
    check("resize", [x], want, attrs={"shape": (5, 4, 9), "mode": "linear"})
    x = rand(1, 2, 3, 5, dtype=torch.bfloat16)
    want = F.interpolate(x, (7, 8), mode="bilinear")
    check("resize", [x], want, attrs={"shape": (7, 8), "mode": "linear"})


def test_resize_by_a_symbolic_factor_of_two():
    x = rand(1, 2, 5, 3)
    want = F.interpolate(x, scale_factor=2.0, mode="nearest")

    def attrs(value):
        shape = tuple(2 * d for d in value.shape[2:])
        return {"shape": shape, "mode": "nearest", "scales": (2.0, 2.0)}

    check("resize", [x], want, attrs=attrs, dynamic=((0, 2), (0, 3)))


# ---- einsum


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(3, 5), (5, 7)]),
        ("bij,bjk->bik", [(2, 3, 5), (2, 5, 7)]),
        ("bhqd,bhkd->bhqk", [(2, 3, 5, 4), (2, 3, 7, 4)]),
        ("bqhd,bkhd->bhqk", [(2, 5, 3, 4), (2, 7, 3, 4)]),
        ("ijkl,klm->mij", [(2, 3, 5, 4), (5, 4, 6)]),
        ("i,j->ij", [(3,), (5,)]),
        ("ij,ij->ij", [(3, 5), (3, 5)]),
        ("ij->ji", [(3, 5)]),
        ("ij->", [(3, 5)]),
        ("ij,k->i", [(3, 5), (7,)]),
        ("ii->i", [(5, 5)]),
        ("ii", [(5, 5)]),
        ("iij,j->i", [(3, 3, 5), (5,)]),
        ("ij,jk,kl->il", [(2, 3), (3, 5), (5, 7)]),
        ("...ij,...jk->...ik", [(2, 3, 5), (4, 2, 5, 7)]),
        ("bi,ij", [(2, 3), (3, 5)]),
        ("ij,jk->ik", [(3, 1), (5, 7)]),
        ("ij,jk->ik", [(0, 5), (5, 7)]),
        ("ij,jk->ik", [(3, 0), (0, 7)]),
    ],
)
def test_einsum(equation, shapes):
    inputs = [rand(*s) for s in shapes]
    want = torch.einsum(equation, *inputs)
    check("einsum", inputs, want, attrs={"equation": equation}, dynamic=())


def test_einsum_with_symbolic_dims_adds_no_second_guard():
    x, y = rand(3, 5, 4), rand(3, 4, 7)
    dynamic = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
    attrs = {"equation": "bij,bjk->bik"}
    graph = check("einsum", [x, y], x @ y, attrs=attrs, dynamic=dynamic)
    assert len(graph.constraints) == 2


# ---- attention

SEQ = ((0, 2), (1, 2), (2, 2))


def qkv(rows, columns, heads=4, kv_heads=4, dtype=torch.float32):
    q = rand(2, heads, rows, 8, dtype=dtype)
    k, v = rand(2, kv_heads, columns, 8), rand(2, kv_heads, columns, 6)
    return q, k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (1, 1), (3, 0), (0, 3), (7, 7)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(rows, columns, causal, dtype):
    q, k, v = qkv(rows, columns, dtype=dtype)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    attrs = {"causal": causal}
    check("attention", [q, k, v], want, attrs=attrs, dynamic=SEQ)


@pytest.mark.parametrize("first", [0, 1, 5, 13, -3])
@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (1, 14), (0, 3), (7, 7)])
def test_attention_from_a_row(first, rows, columns):
    q, k, v = qkv(rows, columns)
    seen = torch.arange(columns)[None, :] <= first + torch.arange(rows)[:, None]
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    attrs = {"causal": True, "first": first}
    check("attention", [q, k, v], want, attrs=attrs, dynamic=SEQ)


def test_attention_masks_and_fully_masked_rows():
    q, k, v = qkv(5, 7)
    keep = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) > 0.4
    keep[2] = False
    added = torch.where(keep, 0.5, -math.inf)
    for mask in (keep, added, keep[None, None], keep[:1], keep[None].expand(4, 5, 7)):
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        inputs = [q, k, v, mask.contiguous()]
        check(
            "attention",
            inputs,
            want,
            attrs={"masked": True},
            dynamic=((0, 0), (1, 0), (2, 0)),
        )
    assert (F.scaled_dot_product_attention(q, k, v, attn_mask=keep)[:, :, 2] == 0).all()


def test_grouped_query_attention():
    q, k, v = qkv(5, 7, heads=6, kv_heads=2)
    want = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    attrs = {"scale": 0.3}
    check("attention", [q, k, v], want, attrs=attrs, dynamic=SEQ)


# ---- the pass


def test_attention_stays_and_nothing_to_do_is_the_same_graph():
    b = Builder()
    q = b.param("q", tensor(DType.F32, 1, 2, sym("s"), 8))
    graph = b.finish("main", [b.emit("attention", q, q, q)])
    assert decompose(graph) is graph


def test_ops_keep_their_location_and_regions_are_decomposed():
    b = Builder()
    count = b.param("i", tensor(DType.I64))
    x = b.param("x", tensor(DType.F32, sym("n")))
    inner = b.child()
    inner.param("i", tensor(DType.I64))
    carried = inner.param("x", x.type)
    body = inner.finish("body", [inner.emit("silu", carried, loc="net.py:3")])
    graph = b.finish("main", [b.emit("loop", count, x, regions=[body])])
    (region,) = decompose(graph).ops[0].regions
    assert {op.loc for op in region.ops} == {"net.py:3"}
    assert "silu" not in {op.name for op in region.ops}
