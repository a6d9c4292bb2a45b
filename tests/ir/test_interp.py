"""The graph interpreter against torch and NumPy, on dims 0, 1, odd and prime."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pliant.errors import DTypeError, IndexRangeError, InternalError, ShapeError
from pliant.ir.build import Builder
from pliant.ir.graph import Constant, Graph, Module, Op, Value
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.types import DType, TensorType, tensor
from pliant.sym import Expr, sym

Array = np.ndarray[Any, np.dtype[Any]]
SIZES = (0, 1, 3, 7)
N, M, K = sym("n"), sym("m"), sym("k")
DTYPE_OF = {
    "float32": DType.F32,
    "float64": DType.F64,
    "float16": DType.F16,
    "int64": DType.I64,
    "int32": DType.I32,
    "uint8": DType.U8,
    "bool": DType.BOOL,
}


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def apply(op_name: str, /, *inputs: Array, dims: Any = (), **attrs: Any) -> Array:
    """One op on the inputs; their dims are fresh symbols unless given."""
    b = Builder()
    values: list[Value] = []
    for i, x in enumerate(inputs):
        shape = dims[i] if dims else x.shape
        type = tensor(DTYPE_OF[x.dtype.name], *shape)
        values.append(b.param(f"x{i}", type))
    out = b.emit(op_name, *values, **attrs)
    module = Module({"main": b.finish("main", [out])}, constants=b.constants)
    (found,) = run_graph(module, list(inputs))
    return found


def close(found: Array, wanted: Any, atol: float = 2e-6) -> None:
    if isinstance(wanted, torch.Tensor):
        wanted = wanted.numpy()
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=atol)


# ---- elementwise

SPECIAL = np.array(
    [-math.inf, -2.5, -1.0, -0.0, 0.0, 0.5, 1.5, 2.5, math.inf, math.nan]
)
UNARY = (
    "neg abs sign exp expm1 log log1p sqrt rsqrt reciprocal sin cos tan tanh erf "
    "sigmoid floor ceil round trunc isnan isinf"
)


@pytest.mark.parametrize("op", UNARY.split())
def test_unary(op: str) -> None:
    x = SPECIAL.astype(np.float32)
    name = {"neg": "neg", "abs": "abs"}.get(op, op)
    close(apply(op, x), getattr(torch, name)(torch.from_numpy(x)))


BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "pow": torch.pow,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


@pytest.mark.parametrize("op", BINARY)
def test_binary(op: str) -> None:
    values = [-math.inf, -2.5, -1.0, 0.5, 2.0, math.nan]
    x, y = np.meshgrid(values, [-2.0, 0.5, 3.0, math.nan])
    x, y = x.astype(np.float32), y.astype(np.float32)
    close(apply(op, x, y), BINARY[op](torch.from_numpy(x), torch.from_numpy(y)))


def test_integers_wrap_and_round_down() -> None:
    x = np.array([7, -7, 7, -7, 2**62], np.int64)
    y = np.array([3, 3, -3, -3, 4], np.int64)
    assert apply("floordiv", x, y).tolist() == [2, -3, -3, 2, 2**60]
    assert apply("mod", x, y).tolist() == [1, 2, -2, -1, 0]
    assert apply("mul", x, y).tolist() == [21, -21, -21, 21, 0]
    assert apply("pow", np.array([2, -1, 3]), np.array([10, -3, -2])).tolist() == [
        1024,
        -1,
        0,
    ]
    assert apply("shift_right", x[:2], np.array([1, 1])).tolist() == [3, -4]
    assert apply("bitwise_not", np.array([5], np.uint8)).tolist() == [250]


def test_cast_and_select() -> None:
    x = np.array([-1.5, 0.0, 2.7, math.nan], np.float32)
    assert apply("cast", x, dtype=DType.BOOL).tolist() == [True, False, True, True]
    assert apply("cast", x[:3], dtype=DType.I32).tolist() == [-1, 0, 2]
    wrapped = apply("cast", np.array([300, -1]), dtype=DType.U8)
    assert wrapped.tolist() == [44, 255]
    cond = np.array([True, False, False, True])
    found = apply("select", cond, x, np.zeros(4, np.float32))
    np.testing.assert_array_equal(found, np.where(cond, x, 0))


def test_half_is_rounded_after_every_op() -> None:
    x = np.array([1.001], np.float16)
    assert apply("mul", x, x).dtype == np.float16
    b = Builder()
    x_, y_ = (b.param(name, tensor(DType.BF16, 1)) for name in "xy")
    module = Module({"main": b.finish("main", [b.emit("add", x_, y_)])})
    one, small = np.array([1.0], np.float32), np.array([2.0**-9], np.float32)
    assert run_graph(module, [one, small])[0].tolist() == [1.0]
    bits = np.array([0x3F80], np.uint16)
    assert run_graph(module, [bits, small])[0].tolist() == [1.0]
    assert run_graph(module, [one, small], precise=True)[0].tolist() == [1 + 2.0**-9]


# ---- create and move


@pytest.mark.parametrize("n", SIZES)
def test_move(n: int) -> None:
    x = numbers(n, 5)
    dims = [(N, 5)]
    close(apply("transpose", x, dims=dims, perm=(1, 0)), x.T)
    close(apply("reshape", x, dims=dims, shape=(N * 5,)), x.reshape(-1))
    close(apply("flip", x, dims=dims, axes=(0, 1)), x[::-1, ::-1])
    wide = apply("broadcast", x, dims=dims, shape=(2, N, 3, 5), axes=(1, 3))
    close(wide, np.broadcast_to(x[None, :, None], (2, n, 3, 5)))
    part = apply("slice", x, dims=dims, starts=(0, 1), shape=(N, 2), steps=(1, 3))
    close(part, x[:, 1:5:3])
    padded = apply("pad", x, dims=dims, low=(1, N), high=(0, 2), value=-math.inf)
    close(padded, np.pad(x, [(1, 0), (n, 2)], constant_values=-np.inf))
    close(apply("concat", x, x, x, dims=dims * 3, axis=0), np.concatenate([x] * 3))


@pytest.mark.parametrize("n", SIZES)
def test_create(n: int) -> None:
    b = Builder()
    b.param("x", tensor(DType.F32, N))
    outs = [
        b.full(2.5, DType.F16, (N, 2)),
        b.iota((2, N, 3), 1),
        b.dim_value(N * N + 1, DType.F32),
        b.constant(Constant("c", tensor(DType.BF16, 1), np.array([0x4000], np.uint16))),
    ]
    module = Module({"main": b.finish("main", outs)}, constants=b.constants)
    full, iota, dim, constant = run_graph(module, [numbers(n)])
    close(full, np.full((n, 2), 2.5, np.float16))
    close(iota, np.broadcast_to(np.arange(n)[None, :, None], (2, n, 3)))
    close(dim, np.array(n * n + 1, np.float32))
    close(constant, np.array([2.0], np.float32))


def test_index() -> None:
    x = numbers(5, 4, 3)
    i = np.array([[0, 4], [2, 2]])
    close(apply("index", x, i), x[i])
    close(apply("index", x, i, i % 3), x[i, i % 3])
    along = np.array([[[3, 0, 1]], [[2, 2, 2]]])
    wanted = torch.gather(torch.from_numpy(x), 1, torch.from_numpy(along))
    close(apply("take_along", x, along, axis=1), wanted)
    with pytest.raises(IndexRangeError, match="index 5 is outside axis 0 of size 5"):
        apply("index", x, np.array([0, 5]))
    with pytest.raises(IndexRangeError, match="-1"):
        apply("take_along", x, along * 0 - 1, axis=1)


# ---- reduce and contract


@pytest.mark.parametrize("n", SIZES)
def test_reduce(n: int) -> None:
    x = numbers(3, n)
    dims = [(3, N)]
    close(apply("reduce", x, dims=dims, op="sum", axes=(1,)), x.sum(1))
    close(
        apply("reduce", x, dims=dims, op="prod", axes=(0, 1), keepdims=True),
        x.prod((0, 1), keepdims=True),
    )
    top = apply("reduce", x, dims=dims, op="max", axes=(1,))
    close(top, x.max(1, initial=-np.inf))
    close(apply("cumulate", x, dims=dims, op="sum", axis=1), x.cumsum(1))
    flags = x > 0
    close(apply("reduce", flags, dims=dims, op="any", axes=(1,)), flags.any(1))
    close(apply("reduce", flags, dims=dims, op="all", axes=(1,)), flags.all(1))


def test_reductions_keep_nan_and_type() -> None:
    x = np.array([[1, math.nan, 3]], np.float32)
    assert math.isnan(apply("reduce", x, op="max", axes=(1,))[0])
    assert math.isnan(apply("reduce", x, op="min", axes=(1,))[0])
    assert apply("argreduce", x, op="max", axis=1).tolist() == [1]
    equal = np.array([2, 5, 5])
    assert apply("argreduce", equal, op="max", axis=0).item() == 1
    small = np.array([200, 100], np.uint8)
    assert apply("reduce", small, op="sum", axes=(0,)).item() == 44


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", SIZES)
def test_matmul(n: int, k: int) -> None:
    a, b = numbers(1, n, k), numbers(3, k, 5)
    close(apply("matmul", a, b, dims=[(1, N, K), (3, K, 5)]), a @ b)
    w, bias = numbers(4, k), numbers(4)
    found = apply("linear", a, w, bias, dims=[(1, N, K), (4, K), (4,)])
    close(found, a @ w.T + bias)


@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("batch", (0, 1, 3))
def test_conv(batch: int, groups: int) -> None:
    x, w = numbers(batch, 4, 9, 7), numbers(6, 4 // groups, 3, 2)
    found = apply(
        "conv",
        x,
        w,
        stride=(2, 1),
        low=(1, 0),
        high=(1, 0),
        dilation=(1, 2),
        groups=groups,
    )
    wanted = F.conv2d(
        torch.from_numpy(x),
        torch.from_numpy(w),
        stride=(2, 1),
        padding=(1, 0),
        dilation=(1, 2),
        groups=groups,
    )
    close(found, wanted)


@pytest.mark.parametrize("batch", (0, 1, 3))
def test_conv_last(batch: int) -> None:
    x, w = numbers(batch, 9, 7, 4), numbers(6, 4, 3, 2)
    window = {"stride": (2, 1), "low": (1, 0), "high": (1, 0), "dilation": (1, 2)}
    found = apply("conv_last", x, w, **window)
    wanted = F.conv2d(
        torch.from_numpy(x).permute(0, 3, 1, 2),
        torch.from_numpy(w),
        stride=(2, 1),
        padding=(1, 0),
        dilation=(1, 2),
    )
    close(found, wanted.permute(0, 2, 3, 1))


def test_conv_pads_each_side() -> None:
    x, w = numbers(2, 3, 5), numbers(4, 3, 3)
    found = apply("conv", x, w, stride=(1,), low=(2,), high=(0,), dilation=(1,))
    wanted = F.conv1d(F.pad(torch.from_numpy(x), (2, 0)), torch.from_numpy(w))
    close(found, wanted)


@pytest.mark.parametrize("groups", (1, 2))
def test_conv_transpose(groups: int) -> None:
    x, w = numbers(2, 4, 5, 3), numbers(4, 3, 3, 2)
    found = apply(
        "conv_transpose",
        x,
        w,
        stride=(2, 3),
        low=(1, 0),
        high=(1, 0),
        dilation=(1, 2),
        groups=groups,
        extra=(1, 2),
    )
    wanted = F.conv_transpose2d(
        torch.from_numpy(x),
        torch.from_numpy(w),
        stride=(2, 3),
        padding=(1, 0),
        output_padding=(1, 2),
        groups=groups,
        dilation=(1, 2),
    )
    close(found, wanted)


def test_pool() -> None:
    x = numbers(2, 3, 7, 5)
    t = torch.from_numpy(x)
    window: dict[str, Any] = {"window": (3, 2), "stride": (2, 1), "dilation": (1, 1)}
    pads: dict[str, Any] = {"low": (1, 1), "high": (1, 1)}
    found = apply("pool", x, op="max", **window, **pads)
    close(found, F.max_pool2d(t, (3, 2), (2, 1), 1))
    for include in (True, False):
        found = apply("pool", x, op="mean", include_pad=include, **window, **pads)
        close(found, F.avg_pool2d(t, (3, 2), (2, 1), 1, count_include_pad=include))


# ---- composite


@pytest.mark.parametrize("n", SIZES)
def test_activations(n: int) -> None:
    x = numbers(2, n) * 3
    t, dims = torch.from_numpy(x), [(2, N)]
    close(apply("softmax", x, dims=dims, axis=1), F.softmax(t, 1))
    close(apply("log_softmax", x, dims=dims, axis=0), F.log_softmax(t, 0))
    close(apply("relu", x, dims=dims), F.relu(t))
    close(apply("silu", x, dims=dims), F.silu(t))
    close(apply("gelu", x, dims=dims), F.gelu(t))
    tanh = apply("gelu", x, dims=dims, approximate="tanh")
    close(tanh, F.gelu(t, approximate="tanh"))


@pytest.mark.parametrize("n", (1, 3, 7))
def test_norms(n: int) -> None:
    x, w, b = numbers(n, 4, 6), numbers(4, 6, seed=1), numbers(4, 6, seed=2)
    t, tw, tb = map(torch.from_numpy, (x, w, b))
    dims: list[tuple[Expr | int, ...]] = [(N, 4, 6), (4, 6), (4, 6)]
    found = apply("layer_norm", x, w, b, dims=dims, axes=2, eps=1e-5, affine="wb")
    close(found, F.layer_norm(t, (4, 6), tw, tb))
    found = apply("layer_norm", x, dims=dims[:1], axes=1, eps=1e-5)
    close(found, F.layer_norm(t, (6,)))
    found = apply("rms_norm", x, w, dims=dims[:2], axes=2, eps=1e-6, affine="w")
    close(found, F.rms_norm(t, (4, 6), tw, 1e-6))
    channels: list[tuple[Expr | int, ...]] = [(N, 4, 6), *([(4,)] * 4)]
    cw, cb, mean, var = (numbers(4, seed=s) for s in range(4))
    var = np.abs(var)
    found = apply(
        "group_norm", x, cw, cb, dims=channels[:3], groups=2, eps=1e-5, affine="wb"
    )
    close(found, F.group_norm(t, 2, torch.from_numpy(cw), torch.from_numpy(cb)))
    found = apply(
        "batch_norm", x, mean, var, cw, cb, dims=channels, eps=1e-5, affine="wb"
    )
    parts = [torch.from_numpy(part) for part in (mean, var, cw, cb)]
    close(found, F.batch_norm(t, parts[0], parts[1], parts[2], parts[3]))


@pytest.mark.parametrize("rows", (1, 3, 7))
@pytest.mark.parametrize("kind", ("plain", "causal", "bool", "float", "grouped"))
def test_attention(rows: int, kind: str) -> None:
    heads = 2 if kind == "grouped" else 4
    q, k, v = numbers(2, 4, rows, 8), numbers(2, heads, 5, 8), numbers(2, heads, 5, 3)
    t: list[Any] = [torch.from_numpy(x) for x in (q, k, v)]
    inputs = [q, k, v]
    options: dict[str, Any] = {}
    attrs: dict[str, Any] = {}
    if kind == "causal":
        options["is_causal"] = attrs["causal"] = True
    elif kind == "bool":
        inputs.append(numbers(rows, 5, seed=3) > -0.5)
        inputs[3][:, 0] = True
    elif kind == "float":
        inputs.append(numbers(2, 1, rows, 5, seed=3))
    elif kind == "grouped":
        options["enable_gqa"] = True
    if len(inputs) == 4:
        options["attn_mask"] = torch.from_numpy(inputs[3])
        attrs["masked"] = True
    wanted = F.scaled_dot_product_attention(*t, **options)
    close(apply("attention", *inputs, **attrs), wanted)


def test_attention_of_nothing_is_zero() -> None:
    q, k = numbers(1, 2, 3, 4), numbers(1, 2, 5, 4)
    mask = np.ones((3, 5), np.bool_)
    mask[1] = False
    found = apply("attention", q, k, k, mask, masked=True)
    assert (found[:, :, 1] == 0).all()
    assert not np.isnan(found).any()
    empty = numbers(1, 2, 0, 4)
    assert (apply("attention", q, empty, empty) == np.zeros((1, 2, 3, 4))).all()


@pytest.mark.parametrize("mode", ("nearest", "nearest_exact", "linear", "cubic"))
@pytest.mark.parametrize("aligned", (False, True))
@pytest.mark.parametrize("out", ((1, 4), (7, 13), (3, 2)))
def test_resize(mode: str, aligned: bool, out: tuple[int, int]) -> None:
    x = numbers(2, 3, 5, 4)
    names = {"linear": "bilinear", "cubic": "bicubic", "nearest_exact": "nearest-exact"}
    align = None if mode.startswith("nearest") else aligned
    wanted = F.interpolate(
        torch.from_numpy(x), out, mode=names.get(mode, mode), align_corners=align
    )
    found = apply("resize", x, shape=out, mode=mode, align_corners=aligned)
    close(found, wanted, atol=1e-5)


def test_resize_by_stated_scale() -> None:
    x = numbers(1, 1, 5, 5)
    for mode, name in (("nearest", "nearest"), ("linear", "bilinear")):
        wanted = F.interpolate(
            torch.from_numpy(x),
            scale_factor=(1.7, 2.3),
            mode=name,
            recompute_scale_factor=False,
        )
        shape = tuple(wanted.shape[2:])
        close(apply("resize", x, shape=shape, mode=mode, scales=(1.7, 2.3)), wanted)


@pytest.mark.parametrize(
    "equation", ("ij,jk->ik", "bij,bjk", "...i,i->...", "ii->i", "ij,kj->", "ij->ji")
)
def test_einsum(equation: str) -> None:
    shapes: dict[str, list[Any]] = {
        "ij,jk->ik": [(2, 3), (3, 5)],
        "bij,bjk": [(2, 3, 4), (2, 4, 5)],
    }
    shapes |= {"...i,i->...": [(2, 3, 4), (4,)], "ii->i": [(3, 3)]}
    shapes |= {"ij,kj->": [(2, 3), (5, 3)], "ij->ji": [(2, 3)]}
    inputs = [numbers(*shape) for shape in shapes[equation]]
    wanted = torch.einsum(equation, *map(torch.from_numpy, inputs))
    close(apply("einsum", *inputs, equation=equation), wanted)


# ---- control, symbols, constraints

CONTROL = """
graph @main(%x: f32[n], %many: i64[], %c: bool[]) sizes (k) {
  constraint n <= 9 says ("n is at most 9, is ", <n>) at "here"
  constraint u0 <= 4
  %p: f32[n], %q: f32[n] = if(%c, %x)
    region @then(%a: f32[n]) {
      %b: f32[n] = add(%a, %a)
      return %a, %b
    }
    region @else(%a: f32[n]) {
      %b: f32[n] = neg(%a)
      return %b, %a
    }
  %grown: f32[u1] = loop(%many, %p)
    region @body(%i: i64[], %a: f32[r]) {
      %b: f32[2*r] = concat(%a, %a) {axis = 0}
      return %b
    }
  %zero: f32[n] = full() {value = 0.0, dtype = f32, shape = [n]}
  %flags: bool[n] = gt(%x, %zero)
  %where: i64[u0, 1] = nonzero(%flags)
  %known: f32[n*k] = match_cast(%grown) {shape = [n*k]}
  %out: f32[n] = call(%q) {callee = "twice", sizes = [k]}
  return %known, %out, %where
}
graph @twice(%v: f32[len]) sizes (s) {
  %y: f32[len] = fusion(%v) {kind = "loop"}
    region @body(%a: f32[len]) {
      %s: f32[] = dim_value() {value = <s>, dtype = f32}
      %w: f32[len] = broadcast(%s) {shape = [len], axes = ()}
      %b: f32[len] = mul(%a, %w)
      return %b
    }
  return %y
}
graph @halves(%x: f32[]) {
  %r: f32[] = while(%x)
    region @cond(%a: f32[]) {
      %one: f32[] = full() {value = 1.0, dtype = f32, shape = ()}
      %c: bool[] = gt(%a, %one)
      return %c
    }
    region @body(%a: f32[]) {
      %two: f32[] = full() {value = 2.0, dtype = f32, shape = ()}
      %b: f32[] = div(%a, %two)
      return %b
    }
  return %r
}
"""


def test_control_flow() -> None:
    module = parse_module(CONTROL)
    x = np.array([1, -2, 3], np.float32)
    inputs = [x, np.array(2), np.array(True)]
    known, out, where = run_graph(module, inputs, env={"k": 4})
    close(known, np.tile(x, 4))
    close(out, 8 * x)
    assert where.tolist() == [[0], [2]]
    with pytest.raises(ShapeError, match="must be k"):
        run_graph(module, inputs, env={"k": 5})
    with pytest.raises(ShapeError, match=r"n is at most 9, is n \(=10\)"):
        run_graph(module, [numbers(10), *inputs[1:]], env={"k": 4})
    with pytest.raises(ShapeError, match="u0 <= 4"):
        ones = np.ones(5, np.float32)
        run_graph(module, [ones, *inputs[1:]], env={"k": 4})
    with pytest.raises(ShapeError, match="needs the size k"):
        run_graph(module, inputs)
    (small,) = run_graph(module, [np.array(9, np.float32)], "halves")
    assert small == 0.5625


def test_symbols_are_solved() -> None:
    text = """graph @main(%x: f32[2*n + 1, m], %y: f32[m]) {
      %d: i64[] = dim_value() {value = <n*m>, dtype = i64}
      return %d
    }"""
    module = parse_module(text)
    (found,) = run_graph(module, [numbers(7, 2), numbers(2)])
    assert found == 6
    with pytest.raises(ShapeError, match="input 'y', axis 0"):
        run_graph(module, [numbers(7, 2), numbers(3)])
    with pytest.raises(ShapeError, match="multiple of 2"):
        run_graph(module, [numbers(8, 2), numbers(2)])
    with pytest.raises(ShapeError, match="rank 2"):
        run_graph(module, [numbers(7), numbers(2)])
    with pytest.raises(DTypeError, match="must be f32, got float64"):
        run_graph(module, [numbers(7, 2).astype(np.float64), numbers(2)])
    with pytest.raises(ShapeError, match="takes 2 inputs"):
        run_graph(module, [numbers(7, 2)])


def test_a_wrong_type_is_reported_with_its_op() -> None:
    x = Value("x", tensor(DType.F32, N))
    y = Value("y", tensor(DType.F32, N + 1))
    graph = Graph("main", (x,), (Op("exp", (x,), (), (y,)),), (y,))
    with pytest.raises(InternalError, match=r"%y: f32\[n \+ 1\]") as caught:
        run_graph(Module({"main": graph}), [numbers(3)])
    assert "exp(%x)" in "".join(caught.value.__notes__)


# ---- lowered

LOWERED = """
graph @main(%x: f32[n, 3]) {
  %arena: u8[48*n + 64] = alloc() {bytes = <48*n + 64>, shape = [48*n + 64], dtype = u8}
  %a: f32[n, 3] strides [4, 1] = view(%arena) {offset = <64>}
  call_loop(%x, %a) {callee = "copy", sizes = [n]}
  %b: bf16[n] = call_loop(%a) {callee = "sum", sizes = [n]}
  %c: f32[n, 3] = call_library(%x) {callee = "double"}
  return %a, %b, %c
}
loop @copy(n; in %x: f32[n, 3], out %y: f32[n, 3] strides [4, 1]) {
  for i = 0 to n parallel {
    for j = 0 to 3 vector {
      %y[i, j] = mul(%x[i, j], 2.0:f32)
    }
  }
}
loop @sum(n; in %x: f32[n, 3] strides [4, 1], out %y: bf16[n], work %w: f32[2, 1]) {
  for i = 0 to n parallel {
    %w[worker, 0] = 0.0:f32
    for j = 0 to 3 {
      %w[worker, 0] = add(%w[worker, 0], %x[i, j])
    }
    %y[i] = cast(%w[worker, 0], bf16)
  }
}
library @double symbol "double_it"
"""


@pytest.mark.parametrize("n", SIZES)
def test_lowered(n: int) -> None:
    def double(inputs: list[Array], outputs: list[Array]) -> None:
        outputs[0][...] = inputs[0] * 2

    module = parse_module(LOWERED)
    x = np.round(numbers(n, 3))
    a, b, c = run_graph(
        module, [x], libraries={"double": double}, workers=2, check_races=True
    )
    close(a, 2 * x)
    close(b, (2 * x).sum(1))
    close(c, 2 * x)
    with pytest.raises(ValueError, match="@double"):
        run_graph(module, [x])


def test_a_view_outside_its_memory_is_refused() -> None:
    text = LOWERED.replace("offset = <64>", "offset = <68>")
    text = text.replace("48*n + 64", "16*n + 60")
    with pytest.raises(
        InternalError, match="spans elements 17 to 27 of a memory of 27"
    ):
        run_graph(parse_module(text), [numbers(3, 3)])


def test_precise() -> None:
    type = TensorType(DType.F32, (N,))
    b = Builder()
    x = b.param("x", type)
    out = b.emit(
        "exp", b.emit("cast", b.emit("cast", x, dtype=DType.F16), dtype=DType.F32)
    )
    module = Module({"main": b.finish("main", [out])})
    data = numbers(5)
    (found,) = run_graph(module, [data], precise=True)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, np.exp(data.astype(np.float64)))
