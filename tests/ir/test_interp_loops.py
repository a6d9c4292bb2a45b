"""The loop interpreter: exact arithmetic, checked accesses, races, checks."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from pliant.errors import InternalError
from pliant.ir.graph import Module
from pliant.ir.interp_code import source_of
from pliant.ir.interp_loops import CheckFailure, run_loop
from pliant.ir.interp_memory import ByteRange, LoopFault
from pliant.ir.parse import parse_loop, parse_module

Array = np.ndarray[Any, np.dtype[Any]]


def run(text: str, sizes: dict[str, int], *buffers: Any, **options: Any) -> None:
    module = parse_module(text)
    func = next(iter(module.loops.values()))
    run_loop(func, module, sizes, list(buffers), **options)


GEMM = """
loop @gemm(n, m, k, threads; in %a: f32[n, k], in %b: f32[k, m], out %c: f32[n, m],
           work %w: f32[threads, m]) {
  for i = 0 to n parallel {
    for j = 0 to m vector {
      %w[worker, j] = 0.0:f32
    }
    for p = 0 to k {
      for j = 0 to m vector do
        %w[worker, j] = fma(%a[i, p], %b[p, j], %w[worker, j])
      end
    }
    for j = 0 to m vector {
      %c[i, j] = %w[worker, j]
    }
  }
}
"""


@pytest.mark.parametrize("n", (0, 1, 3, 7))
@pytest.mark.parametrize("k", (0, 1, 5))
def test_gemm(n: int, k: int) -> None:
    random = np.random.default_rng(0)
    a = random.standard_normal((n, k)).astype(np.float32)
    b = random.standard_normal((k, 5)).astype(np.float32)
    c, w = np.full((n, 5), np.nan, np.float32), np.zeros((2, 5), np.float32)
    sizes = {"n": n, "m": 5, "k": k, "threads": 2}
    run(GEMM, sizes, a, b, c, w, workers=2, check_races=True)
    np.testing.assert_allclose(c, a @ b, rtol=1e-6, atol=1e-6)


def test_speed() -> None:
    a, b = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)
    c, w = np.empty((64, 64), np.float32), np.empty((1, 64), np.float32)
    start = time.perf_counter()
    run(GEMM, {"n": 64, "m": 64, "k": 64, "threads": 1}, a, b, c, w)
    assert time.perf_counter() - start < 5  # 262,144 multiply-adds
    assert (c == 64).all()


@pytest.mark.parametrize(
    ("op", "dtype", "values", "wanted"),
    [
        ("sum", "f32", [1e8, 1.0, -1e8], 0.0),  # rounded after each addition
        ("sum", "i8", [100, 100], -56),
        ("prod", "f64", [2.0, 3.0], 6.0),
        ("max", "f32", [1.0, math.nan, 3.0], math.nan),
        ("min", "f32", [math.nan, 1.0], math.nan),
        ("max", "f32", [], -math.inf),
        ("min", "i32", [], 2**31 - 1),
        ("max", "u8", [], 0),
        ("max", "bool", [False, True, False], True),
        ("min", "bool", [True, False, True], False),
        ("min", "bool", [], True),
        ("sum", "f64", [], 0.0),
    ],
)
def test_accumulators(op: str, dtype: str, values: list[Any], wanted: Any) -> None:
    names = {"f32": "float32", "f64": "float64", "i8": "int8", "u8": "uint8"}
    kind = np.dtype({**names, "i32": "int32"}.get(dtype, dtype))
    text = f"""loop @f(n; in %x: {dtype}[n], out %y: {dtype}[]) {{
      accumulator $s: {dtype} = {op}
      for i = 0 to n vector {{
        accumulate $s, %x[i]
      }}
      %y[] = $s
    }}"""
    x, y = np.array(values, kind), np.zeros((), kind)
    run(text, {"n": len(values)}, x, y)
    np.testing.assert_array_equal(y, np.array(wanted, kind))


def evaluate(value: str, dtype: str, kind: Any, **inputs: Array) -> Any:
    """One value stored to %y."""
    given = "".join(f", in %{n}: {t}" for n, t in _TYPES.items() if n in inputs)
    text = f"loop @f(;out %y: {dtype}[]{given}) {{\n %y[] = {value}\n}}"
    y = np.zeros((), kind)
    run(text, {}, y, *(inputs[n] for n in _TYPES if n in inputs))
    return y[()]


_TYPES = {"h": "f16[1]", "b": "bf16[1]", "f": "f32[1]", "i": "i64[1]"}


@pytest.mark.parametrize(
    ("value", "dtype", "kind", "wanted"),
    [
        ("floordiv(-7:i64, 2:i64)", "i64", np.int64, -4),
        ("mod(-7:i64, 2:i64)", "i64", np.int64, 1),
        ("mul(9223372036854775807:i64, 2:i64)", "i64", np.int64, -2),
        ("add(200:u8, 100:u8)", "u8", np.uint8, 44),
        ("div(1.0:f32, 0.0:f32)", "f32", np.float32, np.inf),
        ("maximum(1.0:f32, nan:f32)", "f32", np.float32, np.nan),
        ("minimum(nan:f32, 1.0:f32)", "f32", np.float32, np.nan),
        ("maximum(2:i64, 3:i64)", "i64", np.int64, 3),
        ("sqrt(2.0:f32)", "f32", np.float32, np.sqrt(np.float32(2))),
        ("rsqrt(4.0:f64)", "f64", np.float64, 0.5),
        ("erf(0.5:f32)", "f32", np.float32, np.float32(math.erf(0.5))),
        ("sigmoid(-200.0:f32)", "f32", np.float32, 0),
        ("round(2.5:f32)", "f32", np.float32, 2),
        ("sign(nan:f32)", "f32", np.float32, 0),
        ("pow(2.0:f32, 0.5:f32)", "f32", np.float32, np.float32(2) ** np.float32(0.5)),
        ("cast(-2.7:f32, i64)", "i64", np.int64, -2),
        ("cast(300:i64, u8)", "u8", np.uint8, 44),
        ("cast(nan:f32, bool)", "bool", np.bool_, True),
        ("cast(0.0:f32, bool)", "bool", np.bool_, False),
        ("cast(1.001:f32, f16)", "f16", np.float16, np.float16(1.001)),
        ("cast(1.00390625:f32, bf16)", "bf16", np.uint16, 0x3F80),  # tie to even
        ("cast(nan:f32, bf16)", "bf16", np.uint16, 0x7FC0),
        ("select(lt(1.0:f32, nan:f32), 1:i64, 2:i64)", "i64", np.int64, 2),
        ("logical_and(true:bool, false:bool)", "bool", np.bool_, False),
        ("logical_not(false:bool)", "bool", np.bool_, True),
        ("isnan(nan:f32)", "bool", np.bool_, True),
        ("shift_left(1:i64, 4:i64)", "i64", np.int64, 16),
        ("bitwise_not(5:u8)", "u8", np.uint8, 250),
        ("index(3*4 + 1)", "i64", np.int64, 13),
        ("fma(16777217.0:f64, 1.0:f64, 1.0:f64)", "f64", np.float64, 16777218),
        ("add(0.1:f32, 0.2:f32)", "f32", np.float32, np.float32(0.1) + np.float32(0.2)),
    ],
)
def test_values(value: str, dtype: str, kind: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(evaluate(value, dtype, kind), np.array(wanted, kind))


def test_half_storage() -> None:
    bits = np.array([0x3FC0], np.uint16)  # 1.5
    assert evaluate("cast(%b[0], f32)", "f32", np.float32, b=bits) == 1.5
    half = np.array([1.5], np.float16)
    assert evaluate("cast(%h[0], f32)", "f32", np.float32, h=half) == 1.5
    assert evaluate("%h[0]", "f16", np.float16, h=half) == 1.5


def test_predicated_load_reads_nothing() -> None:
    x = np.array([5.0], np.float32)
    inside = "%f[9] where lt(index(9), 1:i64)"
    assert evaluate(inside, "f32", np.float32, f=x) == 0
    assert evaluate("%f[0] where true:bool", "f32", np.float32, f=x) == 5


def test_control() -> None:
    text = """
    loop @f(n; in %x: i64[n], out %y: i64[n]) {
      for i = 0 to n step 2 {
        let k = %x[i]
        local $t: i64 = index(k + i)
        if gt($t, 3:i64) {
          %y[i] = $t
        } else do
          %y[i] = neg($t)
        end
        switch k % 3 {
          case 0 {
            %y[i] = 100:i64
          }
          case 2 do
            call @g(n - i; %x[i], %y[i])
          end
        }
      }
    }
    loop @g(m; in %x: i64[m], out %y: i64[1]) {
      %y[0] = %x[m - 1]
    }"""
    x, y = np.array([1, 9, 5, 9, 6, 9, 7]), np.zeros(7, np.int64)
    run(text, {"n": 7}, x, y)
    assert y.tolist() == [-1, 0, 7, 0, 100, 0, 13]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("%y[i + 1] = %x[i]", r"store of %y[4] is outside (4,) in loop @f"),
        ("%y[i] = %x[i - 1]", r"load of %x[-1] is outside (4,) in loop @f"),
        (
            "alloc register %r: f32[2] %y[i] = %r[1]",
            "%r[1] is read before it is written",
        ),
        ("call @g(5; %y[i])", "buffer %x (5,) of loop @g spans elements 0 to 4"),
        ("call @h(;)", "call of @h, which the module does not have"),
        ("call @g(;)", "takes 1 sizes and 1 buffers, not 0 and 0"),
    ],
)
def test_faults(statement: str, message: str) -> None:
    text = f"""
    loop @f(n; in %x: f32[n], out %y: f32[n]) {{
      for i = 0 to n {{
        {statement}
      }}
    }}
    loop @g(n; out %x: f32[n]) {{}}"""
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    with pytest.raises(LoopFault) as caught:
        run(text, {"n": 4}, x, y)
    assert message in str(caught.value)


def test_registers() -> None:
    text = """loop @f(;out %y: f32[2, 3]) {
      alloc register %r: f32[2, 3]
      for u = 0 to 2 unroll {
        for v = 0 to 3 vector {
          %r[u, v] = cast(index(3*u + v), f32)
        }
      }
      for u = 0 to 2 unroll {
        for v = 0 to 3 vector {
          %y[u, v] = %r[u, v]
        }
      }
    }"""
    y = np.zeros((2, 3), np.float32)
    run(text, {}, y)
    assert y.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_races() -> None:
    text = """loop @f(n; inout %y: i64[n]) {
      for i = 0 to n parallel {
        STATEMENT
      }
    }"""
    y = np.zeros(4, np.int64)
    for statement, message in (
        ("%y[i//2] = index(i)", "iterations 0 and 1 of loop @f both write"),
        ("%y[i] = %y[max(i - 1, 0)]", "both use one element of %y"),
    ):
        with pytest.raises(LoopFault, match=message):
            run(text.replace("STATEMENT", statement), {"n": 4}, y, check_races=True)
        run(text.replace("STATEMENT", statement), {"n": 4}, y)
    nested = text.replace("STATEMENT", "for j = 0 to 1 parallel {}")
    with pytest.raises(LoopFault, match="runs inside another"):
        run(nested, {"n": 4}, y)


def test_checks_do_not_stop_the_run() -> None:
    text = """loop @f(n; out %y: i64[n]) {
      for i = 0 to n {
        check lt(index(i), 2:i64) else 7
        %y[i] = index(i)
      }
    }"""
    y = np.zeros(4, np.int64)
    with pytest.raises(CheckFailure, match="check 7 of loop @f failed") as caught:
        run(text, {"n": 4}, y)
    assert caught.value.number == 7
    assert y.tolist() == [0, 1, 2, 3]


def test_strided_memory() -> None:
    text = """loop @f(n; in %x: f32[n, 2] strides [3, 1], out %y: bf16[n]) {
      for i = 0 to n {
        %y[i] = cast(add(%x[i, 0], %x[i, 1]), bf16)
      }
    }"""
    data = np.arange(8, dtype=np.float32)
    out = np.zeros(10, np.uint8)
    buffers = [ByteRange(data.view(np.uint8), 4), ByteRange(out, 2)]
    run(text, {"n": 2}, *buffers)
    assert out.view(np.uint16)[1:3].tolist() == [0x4040, 0x4110]  # 3 and 9
    with pytest.raises(LoopFault, match="misaligned"):
        run(text, {"n": 2}, ByteRange(data.view(np.uint8), 2), buffers[1])
    with pytest.raises(LoopFault, match="spans elements 1 to 11 of a memory of 8"):
        run(text, {"n": 4}, *buffers)
    with pytest.raises(ValueError, match="contiguous"):
        run(text, {"n": 2}, data.reshape(2, 4).T, buffers[1])


def test_prefetched_memory_may_lie_anywhere() -> None:
    text = """loop @f(n; in %x: f32[n], out %y: f32[n]) {
      for i = 0 to n {
        prefetch %x[i]
        %y[i] = VALUE
      }
    }"""
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    beyond = ByteRange(x.view(np.uint8), 64)
    run(text.replace("VALUE", "2.0:f32"), {"n": 4}, beyond, y)
    assert y.tolist() == [2, 2, 2, 2]
    with pytest.raises(LoopFault, match="spans elements 16 to 19 of a memory of 4"):
        run(text.replace("VALUE", "%x[i]"), {"n": 4}, beyond, y)


def test_worker() -> None:
    text = """loop @f(n, threads; out %y: i64[n], work %w: i64[threads]) {
      for i = 0 to n parallel {
        %w[worker] = index(i)
        %y[i] = %w[worker]
      }
    }"""
    y, w = np.zeros(7, np.int64), np.full(3, -1)
    run(text, {"n": 7, "threads": 3}, y, w, workers=3, check_races=True)
    assert y.tolist() == list(range(7))
    assert w.tolist() == [2, 4, 6]
    with pytest.raises(InternalError, match="outside"):
        run(text, {"n": 7, "threads": 2}, y, w[:2].copy(), workers=3)


def test_shared_values_and_deep_values() -> None:
    value = "%x[]"
    for _ in range(150):
        value = f"neg({value})"
    func = parse_loop(f"loop @f(;in %x: f32[], out %y: f32[]) {{\n%y[] = {value}\n}}")
    x, y = np.full((), 3, np.float32), np.zeros((), np.float32)
    run_loop(func, Module({}), [], [x, y])
    assert y == 3
    assert source_of(func).startswith("def run(")
