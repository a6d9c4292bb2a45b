"""Targets and knobs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import llvmlite.ir as ll
import numpy as np
import pytest

import pliant
from pliant import knobs
from pliant.backend.jit import assembly
from pliant.codegen.llvm import emit_loop_functions
from pliant.errors import OptionError
from pliant.ir.loops import (
    DOT_PARTS,
    Alloc,
    Block,
    Const,
    Fma,
    For,
    Kind,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.lower.vectorize import vectorized
from pliant.machine import processor, target
from pliant.machine.processor import cores
from pliant.machine.target import Target
from pliant.sym import as_expr, sym

ALL = tuple(make() for make in target.NAMED.values())


def test_host_lists_what_the_machine_has() -> None:
    here = target.host()
    assert target.runs_here(here)
    assert here.lanes in (4, 8, 16)
    assert here.fma == (here.has("fma") or here.has("neon"))
    assert here.cores >= 1
    assert 8 << 10 <= here.l1 <= here.l2 <= max(here.l2, here.l3)
    for cache in here.caches:
        assert cache.line in (32, 64, 128)
        assert cache.ways >= 1
    if here.lanes == 16:
        assert "-prefer-256-bit" in here.features


def test_fixed_targets() -> None:
    plain, wide, widest = target.baseline(), target.avx2(), target.avx512()
    assert (plain.lanes, plain.registers, plain.fma) == (4, 16, False)
    assert (wide.lanes, wide.registers, wide.fma) == (8, 16, True)
    assert (widest.lanes, widest.registers, widest.fma) == (16, 32, True)
    assert wide.vector_bytes == 32
    old = target.named("x86-64-v2")
    assert (old.name, old.lanes, old.fma) == ("sse4", 4, False)
    assert old.has("sse4.1") and not old.has("avx")
    arm = target.neon()
    assert (arm.lanes, arm.registers, arm.fma) == (4, 32, True)
    assert arm.triple.startswith(("aarch64", "arm64"))
    assert target.runs_here(plain) != target.runs_here(arm)


def test_what_targets_can_do() -> None:
    """Element sizes that are masked, rounding, half floats, dots of parts."""

    def can(t: Target) -> tuple[object, ...]:
        masked = [size for size in (1, 2, 4, 8) if t.masks(size)]
        parts = [name for name in DOT_PARTS if t.dot(name)]
        return masked, t.rounds, t.converts_half, parts

    def has(t: Target, *more: str) -> Target:
        return replace(t, features=(*t.features, *more))

    plain, wide, widest, arm = (
        target.baseline(),
        target.avx2(),
        target.avx512(),
        target.neon(),
    )
    every, bytes = [1, 2, 4, 8], ["bytes", "turned_bytes"]
    assert can(plain) == ([], False, False, ["halves"])
    assert can(wide) == ([4, 8], True, True, ["halves"])
    assert can(widest) == (every, True, True, ["halves"])
    assert can(has(widest, "+avx512vnni"))[-1] == [*bytes, "halves"]
    assert can(has(wide, "+avxvnni"))[-1] == [*bytes, "halves"]
    assert can(has(wide, "+avx512vnni"))[-1] == ["halves"]  # needs avx512vl there
    assert can(arm) == ([], False, False, [])
    assert can(has(arm, "+dotprod"))[-1] == ["signed_bytes"]
    with pytest.raises(ValueError, match="no parts of words: nibbles"):
        plain.dot("nibbles")


def test_named() -> None:
    assert target.named("avx2") == target.avx2()
    with pytest.raises(OptionError, match="no target 'mmx'; there are host, baseline"):
        target.named("mmx")


def test_code_for_another_machine_is_not_run() -> None:
    foreign = [t for t in (target.neon(), target.baseline()) if not target.runs_here(t)]
    lacking = replace(target.host(), features=(*target.host().features, "+amx-fp16"))
    assert target.missing(lacking) == ("amx-fp16",)
    for to in (*foreign, lacking):
        with pytest.raises(OptionError, match="cannot run code for the target"):
            pliant.compile(pliant_module(), target=to)


def pliant_module() -> Any:
    from pliant.ir.parse import parse_module

    return parse_module("graph @main(%x: f32[n]) {\n  return %x\n}\n")


# ---- caches


def test_caches_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sysconf tells nothing, the files tell all of L1 and a part of L2."""
    for number, (level, kind, size, ways) in enumerate(
        [("1", "Instruction", "64K", "2"), ("1", "Data", "48K", "12")]
    ):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, text in {
            "level": level,
            "type": kind,
            "size": size,
            "ways_of_associativity": ways,
            "coherency_line_size": "128",
        }.items():
            (folder / name).write_text(f"{text}\n")
    second = tmp_path / "index2"
    second.mkdir()
    (second / "level").write_text("2")
    (second / "type").write_text("Unified")
    (second / "size").write_text("3M")
    monkeypatch.setattr(processor, "_sysconf", lambda name: 0)
    monkeypatch.setattr(processor, "SYSFS", tmp_path)
    processor.caches.cache_clear()
    try:
        first, other, last = processor.caches()
    finally:
        processor.caches.cache_clear()
    assert first == processor.Cache(48 << 10, 12, 128)
    assert other == processor.Cache(3 << 20, 8, 64)
    assert last == processor.ASSUMED[2]


# ---- JSON


@pytest.mark.parametrize("to", ALL, ids=lambda t: t.name)
def test_json_round_trip(to: Target, tmp_path: Path) -> None:
    assert Target.from_json(json.loads(json.dumps(to.to_json()))) == to
    path = tmp_path / "processor.json"
    path.write_text(json.dumps(to.to_json()))
    assert target.named(str(path)) == to
    path.write_text(json.dumps({"target": to.to_json(), "pliant": "0.1.0"}))
    assert target.named(str(path)) == to


def broken(**changes: Any) -> dict[str, Any]:
    return {**target.avx2().to_json(), **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 2], "a target is a JSON object, not"),
        ({"name": "x"}, "missing: caches, cores"),
        (broken(speed=3), "unknown: speed"),
        (broken(lanes=5), r"lanes must be one of \(4, 8, 16\), not 5"),
        (broken(cores=0), "cores must be a positive integer, not 0"),
        (broken(registers=True), "registers must be a positive integer, not True"),
        (broken(fma="yes"), "fma must be true or false, not 'yes'"),
        (broken(features="+avx2"), "features must be a list of texts"),
        (broken(features=["avx2"]), "features must be a list of texts"),
        (broken(caches=[]), "caches must be three objects"),
        (broken(caches=[{"bytes": 1, "ways": 1, "line": 0}] * 3), "with positive"),
        (broken(cpu=7), "cpu must be a text, not 7"),
    ],
)
def test_json_that_is_no_target(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        Target.from_json(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(OptionError, match=rf"bad\.json: .*{message}"):
        target.load(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot read .*none\.json: No such"):
        target.named(str(tmp_path / "none.json"))
    path = tmp_path / "text.json"
    path.write_text("{")
    with pytest.raises(OptionError, match="is no JSON"):
        target.named(str(path))


def test_table() -> None:
    rows = dict(target.rows(target.avx512()))
    assert rows["vectors"] == "32 of 16 floats"
    assert "avx512f" in rows["features"]
    assert "prefer-256-bit" not in rows["features"]
    assert "ways, lines of" in rows["L2"]


# ---- knobs


def test_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in knobs.KNOBS:
        monkeypatch.delenv(knob.name, raising=False)
        assert knob.get() == knob.default
        assert knob.doc.endswith(".")
    assert knobs.THREADS.get() is None
    monkeypatch.setenv("PLIANT_THREADS", "3")
    assert knobs.THREADS.get() == 3
    monkeypatch.setenv("PLIANT_THREADS", "0")
    with pytest.raises(ValueError, match="PLIANT_THREADS='0': must be at least 1"):
        knobs.THREADS.get()


def test_target_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "here.json"
    path.write_text(json.dumps(replace(target.host(), cores=1).to_json()))
    monkeypatch.setenv("PLIANT_TARGET", str(path))
    monkeypatch.delenv("PLIANT_THREADS", raising=False)
    model = pliant.compile(pliant_module())
    assert model.stats()["threads"] == cores()  # the target's cores are not here
    np.testing.assert_array_equal(model(np.ones(3, np.float32)), np.ones(3))
    monkeypatch.setenv("PLIANT_TARGET", "mmx")
    with pytest.raises(OptionError, match="no target 'mmx'"):
        pliant.compile(pliant_module())


# ---- micro-kernels, by their assembly


def micro_kernel(rows: int, columns: int) -> LoopFunc:
    """C (rows, columns) = A (rows, K) x B (K, columns), C in registers throughout."""
    f32, k = DType.F32, sym("K")
    a = buffer("a", f32, (rows, k), Role.IN, (sym("lda"), 1))
    b = buffer("b", f32, (k, columns), Role.IN)
    c = buffer("c", f32, (rows, columns), Role.OUT)
    acc = buffer("acc", f32, (rows, columns), Role.REGISTER)
    i, j, at, zero = sym("_i"), sym("_j"), sym("_k"), as_expr(0)

    def tile(value: LoopValue, to: Any) -> Stmt:
        inner = For("_j", zero, as_expr(columns), Store(to, (i, j), value), Kind.VECTOR)
        return For("_i", zero, as_expr(rows), inner, Kind.UNROLL)

    step = Fma(Load(a, (i, at)), Load(b, (at, j)), Load(acc, (i, j)))
    body = Block(
        (
            Alloc(acc),
            tile(Const(0.0, f32), acc),
            For("_k", zero, k, tile(step, acc)),
            tile(Load(acc, (i, j)), c),
        )
    )
    return LoopFunc("micro", ("K", "lda"), (a, b, c), body)


def inner_loop(text: str, multiply: str) -> list[str]:
    """The instructions of the loop with the most multiply-adds, and its end."""
    best: list[str] = []
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines):
        jump = re.match(r"(?:j|b\.|cb|tb)\S*\s+(?:.*,\s*)?(\.LBB\w+)$", line)
        if jump and f"{jump[1]}:" in lines[:number]:
            body = lines[lines.index(f"{jump[1]}:") : number + 1]
            if _count(body, multiply) > _count(best, multiply):
                best = body
    return best


def _count(lines: list[str], word: str) -> int:
    return sum(line.startswith(word) for line in lines)


@pytest.mark.parametrize(
    ("to", "multiply", "vector"),
    [
        (target.neon(), "fmla", r"v\d+\.4s"),
        (target.avx512(), "vfmadd", "%zmm"),
        (target.avx2(), "vfmadd", "%ymm"),
    ],
    ids=lambda v: v.name if isinstance(v, Target) else "",
)
def test_micro_kernel_of_any_machine(to: Target, multiply: str, vector: str) -> None:
    """As tall as two vectors of B and one of A leave room for; nothing is spilled."""
    tallest = (to.registers - 3) // 2
    for rows in (1, 2, tallest - 1, tallest):
        module = ll.Module("test")
        kernels = vectorized([micro_kernel(rows, 2 * to.lanes)], to)
        emit_loop_functions(module, kernels, to)
        loop = inner_loop(assembly(module, to), multiply)
        multiplies = [line for line in loop if line.startswith(multiply)]
        assert len(multiplies) == 2 * rows
        assert all(re.search(vector, line) for line in multiplies)
        stack = [line for line in loop if re.search(r"\[sp|%rsp|%rbp", line)]
        assert not stack, "\n".join(loop)
