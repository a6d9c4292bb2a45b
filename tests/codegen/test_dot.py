"""Products of the parts of words: machine code, interpreter and NumPy agree bit by bit.

Words are random bits and the extremes of every part, so sums wrap; instructions that
this machine lacks are looked for in the assembly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import llvmlite.ir as ll
import numpy as np
import pytest
from compiled_loops import agree

from pliant.backend.jit import assembly
from pliant.codegen.llvm import emit_loop_functions
from pliant.errors import InternalError
from pliant.ir.graph import Module
from pliant.ir.interp_loops import run_loop
from pliant.ir.loops import (
    DOT_PARTS,
    Accumulate,
    Accumulator,
    Block,
    Const,
    Dot,
    For,
    Kind,
    Load,
    LoopFunc,
    Read,
    Role,
    Store,
    buffer,
)
from pliant.ir.parse import parse_module
from pliant.ir.spec_loops import verify_loop
from pliant.ir.text import print_module
from pliant.ir.types import DType
from pliant.lower.vectorize import vectorized
from pliant.machine.target import Target, avx2, avx512, baseline, host, neon
from pliant.sym import as_expr, sym

I32 = DType.I32
n, m, i, k = (sym(name) for name in "nmik")
KINDS = {"bytes": (np.uint8, np.int8), "signed_bytes": (np.int8,) * 2}
KINDS |= {"turned_bytes": (np.int8, np.uint8), "halves": (np.int16,) * 2}


def elementwise(parts: str) -> LoopFunc:
    x, y, z = (buffer(name, I32, (n,), Role.IN) for name in "xyz")
    out = buffer("out", I32, (n,), Role.OUT)
    value = Dot(parts, *(Load(source, (i,)) for source in (x, y, z)))
    body = For("i", as_expr(0), n, Store(out, (i,), value), Kind.VECTOR)
    return LoopFunc(f"dot_{parts}", ("n",), (x, y, z, out), body)


def sums(parts: str, along: bool) -> LoopFunc:
    """Products summed up along a vector loop, or in a loop inside one."""
    shape = (n, m) if along else (m, n)
    x = buffer("x", I32, shape, Role.IN)
    out = buffer("out", I32, (n,), Role.OUT)
    at = (i, k) if along else (k, i)
    value = Dot(parts, Load(x, at), Load(x, at), Const(0, I32))
    inner = Kind.VECTOR if along else Kind.SERIAL
    body = Block(
        (
            Accumulator("sum", I32, "sum"),
            For("k", as_expr(0), m, Accumulate("sum", value), inner),
            Store(out, (i,), Read("sum", I32)),
        )
    )
    outer = Kind.SERIAL if along else Kind.VECTOR
    loop = For("i", as_expr(0), n, body, outer)
    return LoopFunc(f"sums_{parts}_{along}", ("n", "m"), (x, out), loop)


def words(sizes: dict[str, int], rng: np.random.Generator) -> Any:
    count = sizes["n"] * sizes.get("m", 1)
    bits = rng.integers(0, 256, (count, 4), np.uint8)
    bits[rng.random((count, 4)) < 0.3] = 0x80
    bits[rng.random((count, 4)) < 0.2] = 0x7F
    bits[rng.random((count, 4)) < 0.2] = 0xFF
    return bits.view(np.int32)


@pytest.mark.parametrize("parts", DOT_PARTS)
def test_agrees_with_the_interpreter(parts: str) -> None:
    agree(elementwise(parts), inputs=dict.fromkeys(range(3), words))


@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("parts", DOT_PARTS)
def test_sums(parts: str, along: bool) -> None:
    sizes = [(0, 3), (5, 0), (1, 1), (17, 70), (130, 3), (300, 7)]
    agree(sums(parts, along), sizes=sizes, inputs={0: words})


@pytest.mark.parametrize("parts", DOT_PARTS)
def test_interpreter_is_numpy(parts: str) -> None:
    """What the oracle says, from the definition: parts as integers of their kind."""
    rng = np.random.default_rng(0)
    x, y, z = (words({"n": 500}, rng).reshape(-1) for _ in range(3))
    out = np.zeros(500, np.int32)
    func = elementwise(parts)
    run_loop(func, Module({}, {func.name: func}), (500,), [x, y, z, out])
    left, right = (
        w.view(kind).reshape(500, -1).astype(np.int64)
        for w, kind in zip((x, y), KINDS[parts], strict=True)
    )
    assert left.shape[1] == DOT_PARTS[parts][0]
    want = ((left * right).sum(1) + z).astype(np.int32)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("parts", DOT_PARTS)
def test_text(parts: str) -> None:
    func = elementwise(parts)
    module = Module({}, {func.name: func})
    text = print_module(module)
    assert f"dot_{parts}(%x[i], %y[i], %z[i])" in text
    assert parse_module(text).loops[func.name] == func


def test_rejected() -> None:
    func = elementwise("nibbles")
    with pytest.raises(InternalError, match="no parts called nibbles"):
        verify_loop(func)
    good = elementwise("bytes")
    floats = replace(good.buffers[0], dtype=DType.F32)
    value = Dot("bytes", Load(floats, (i,)), Const(0, I32), Const(0, I32))
    store = Store(good.buffers[3], (i,), value)
    loop = For("i", as_expr(0), n, store, Kind.VECTOR)
    with pytest.raises(InternalError, match="are i32 and f32"):
        verify_loop(replace(good, buffers=(floats, *good.buffers[1:]), body=loop))


def with_features(target: Target, *features: str) -> Target:
    return replace(target, features=(*target.features, *features))


VNNI = with_features(avx512(), "+avx512vnni")
INSTRUCTIONS: list[tuple[str, Target, str]] = [
    ("bytes", VNNI, "vpdpbusd"),
    ("turned_bytes", VNNI, "vpdpbusd"),
    ("bytes", with_features(avx2(), "+avxvnni"), "vpdpbusd"),
    ("halves", avx512(), "vpmaddwd"),
    ("halves", avx2(), "vpmaddwd"),
    ("halves", baseline(), "pmaddwd"),
    ("signed_bytes", with_features(neon(), "+dotprod"), "sdot"),
]


@pytest.mark.parametrize(("parts", "target", "instruction"), INSTRUCTIONS)
def test_instructions(parts: str, target: Target, instruction: str) -> None:
    module = ll.Module("dot")
    emit_loop_functions(module, vectorized([elementwise(parts)], target), target)
    assert instruction in assembly(module, target)


def test_which_targets_multiply_bytes() -> None:
    assert VNNI.dot("bytes")
    assert with_features(avx2(), "+avxvnni").dot("bytes")
    assert not any(t.dot("bytes") for t in (avx512(), avx2(), baseline(), neon()))
    assert host().dot("bytes") == any(map(host().has, ("avx512vnni", "avxvnni")))
