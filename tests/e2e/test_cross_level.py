"""Graph ops, loop functions, library calls and graph calls in one module."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

import pliant
from pliant.errors import PliantError, ShapeError
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module

SIZES = (0, 1, 7, 64, 1009)

LOOPS = """
graph @main(%x: f32[n, 8]) {
  %a: f32[n, 8] = exp(%x)
  %b: f32[n, 8] = call_loop(%a) {callee = "scale", sizes = [n, threads]}
  %c: f32[n, 8] = call(%b) {callee = "twice", sizes = []}
  %d: f32[m, 8] = match_cast(%c) {shape = [m, 8]}
  %e: f32[m] = reduce(%d) {op = "sum", axes = (1), keepdims = false}
  return %e
}
graph @twice(%y: f32[k, j]) {
  %z: f32[k, j] = add(%y, %y)
  return %z
}
loop @scale(rows, threads; in %p: f32[rows, 8], out %q: f32[rows, 8],
            work %w: f32[threads, 8]) {
  for i = 0 to rows parallel grain 4 {
    for j = 0 to 8 vector do %w[worker, j] = mul(%p[i, j], 3.0:f32) end
    for l = 0 to 8 vector do %q[i, l] = %w[worker, l] end
  }
}
"""

LIBRARY = """
graph @main(%x: f32[n]) {
  %a: f32[n] = neg(%x)
  %b: f32[n] = call_library(%a) {callee = "plus_one", sizes = [n]}
  %c: f32[n] = exp(%b)
  return %c
}
library @plus_one symbol "pliant_test_plus_one"
"""

C_CODE = """
void pliant_test_plus_one(void *call, long n, const float *x, float *y) {
    (void)call;
    for (long i = 0; i < n; i++) y[i] = x[i] + 1.0f;
}
"""


def test_levels_side_by_side() -> None:
    module = parse_module(LOOPS)
    assert print_module(parse_module(print_module(module))) == print_module(module)
    verify(module, Stage.IMPORTED)
    model = pliant.compile(module, threads=2)
    for n in SIZES:
        x = np.random.default_rng(n).standard_normal((n, 8)).astype(np.float32)
        want = (np.exp(x) * 6).sum(1)
        np.testing.assert_allclose(model(x), want, rtol=1e-5)
        if n < 100:
            (oracle,) = run_graph(module, [x])
            np.testing.assert_allclose(oracle, want, rtol=1e-5)


def test_match_cast_checks() -> None:
    text = """
    graph @main(%x: f32[n, 8], %y: f32[m, 8]) {
      %z: f32[n, 8] = match_cast(%y) {shape = [n, 8]}
      %s: f32[n, 8] = add(%x, %z)
      return %s
    }
    """
    model = pliant.compile(parse_module(text))
    x = np.ones((3, 8), np.float32)
    np.testing.assert_array_equal(model(x, x), x + x)
    with pytest.raises(ShapeError, match="expects dim 0"):
        model(x, np.ones((4, 8), np.float32))
    np.testing.assert_array_equal(model(x, x), x + x)


def test_library_call(tmp_path: Path) -> None:
    module = parse_module(LIBRARY)
    with pytest.raises(PliantError, match="pliant_test_plus_one"):
        pliant.compile(module)
    source, shared = tmp_path / "one.c", tmp_path / "one.so"
    source.write_text(C_CODE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shared, source], check=True)
    ctypes.CDLL(str(shared), ctypes.RTLD_GLOBAL)
    model = pliant.compile(module)
    for n in SIZES:
        x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        np.testing.assert_allclose(model(x), np.exp(1 - x), rtol=1e-5)
