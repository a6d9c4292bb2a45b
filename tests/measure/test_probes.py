"""Measuring the machine: the loops are right, and numbers are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import llvmlite.ir as ll
import numpy as np
import pytest

from pliant import cache
from pliant.backend.jit import assembly
from pliant.codegen.llvm import emit_loop_functions
from pliant.errors import OptionError
from pliant.ir.interp_loops import run_loop
from pliant.ir.spec_loops import verify_loop
from pliant.lower.vectorize import vectorized
from pliant.machine import target
from pliant.machine.processor import Cache
from pliant.measure import probes
from pliant.measure.probes import CHAINS, Measured, measured

NAMES = ("host", "avx2", "baseline")
HERE = [t for t in map(target.named, NAMES) if target.runs_here(t)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "ROUNDS", 1)
    monkeypatch.setattr(probes, "ROUND_SECONDS", 1e-5)
    monkeypatch.setattr(probes, "LARGEST_ARRAY", 1 << 22)
    monkeypatch.setattr(probes, "_memo", {})
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "kept"))


# ---- the loops


def run(to: target.Target, name: str, sizes: tuple[int, ...], given: np.ndarray) -> Any:
    out = np.zeros((CHAINS, to.lanes), np.float32)
    function = probes._function(probes.code(to), name, len(sizes))
    function(None, *sizes, given.ctypes.data, out.ctypes.data)
    return out


@pytest.mark.parametrize("to", HERE, ids=lambda t: t.name)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_peak_computes(to: target.Target, count: int) -> None:
    func = probes.peak_function(to.lanes)
    verify_loop(func)
    given = np.array([0.5, 1.0], np.float32)
    wanted = np.zeros((CHAINS, to.lanes), np.float32)
    run_loop(func, None, (count,), [given, wanted])
    got = run(to, "peak", (count,), given)
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_allclose(got, 2.0 * (1.0 - 0.5**count), rtol=1e-6)


@pytest.mark.parametrize("to", HERE, ids=lambda t: t.name)
@pytest.mark.parametrize(("count", "blocks"), [(0, 3), (1, 0), (1, 1), (3, 5)])
def test_read_reads_all(to: target.Target, count: int, blocks: int) -> None:
    func = probes.read_function(to.lanes)
    verify_loop(func)
    rng = np.random.default_rng(0)
    data = rng.integers(-9, 9, (blocks, CHAINS, to.lanes)).astype(np.float32)
    wanted = np.zeros((CHAINS, to.lanes), np.float32)
    run_loop(func, None, (count, blocks), [data, wanted])
    got = run(to, "read", (count, blocks), data)
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(got, count * data.sum(0))


@pytest.mark.parametrize("name", ["avx2", "avx512", "neon"])
def test_chains_stay_in_registers(name: str) -> None:
    """Between the first and the last multiply-add there is nothing else."""
    to = target.named(name)
    module = ll.Module("test")
    emit_loop_functions(module, vectorized([probes.peak_function(to.lanes)], to), to)
    lines = [line.split() for line in assembly(module, to).splitlines()]
    words = [line[0] for line in lines if line]
    chains = [k for k, w in enumerate(words) if w.startswith(("vfmadd", "fmla"))]
    assert len(chains) == CHAINS
    between = words[chains[0] : chains[-1] + 1]
    others = {w for w in between if not w.startswith(("vfmadd", "fmla"))}
    # An FMA of NEON adds to a register it overwrites: y is copied first.
    assert others <= ({"mov", "add", "subs", "cmp"} if name == "neon" else set())


# ---- what is measured


def test_array_sizes() -> None:
    small = (Cache(32 << 10, 8, 64), Cache(1 << 20, 8, 64), Cache(1 << 20, 16, 64))
    to = replace(target.avx2(), caches=small, cores=2)
    sizes, beyond = probes.array_bytes(to)
    assert sizes == (16 << 10, 512 << 10, 2 << 20, 2 << 20)
    assert beyond
    large = (*small[:2], Cache(1 << 30, 16, 64))
    sizes, beyond = probes.array_bytes(replace(to, caches=large))
    assert sizes[2] == 8 << 20
    assert not beyond


def test_numbers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    here = target.host()
    assert probes.known(here) is None
    first = measured(here)
    assert [level.name for level in first.levels] == ["L1", "L2", "L3", "memory"]
    assert 0 < first.fma_gflops_1 <= first.fma_gflops_all
    assert 0 < first.read_gbs_1 <= first.read_gbs_all
    assert first.cores == here.cores
    assert Measured.from_json(json.loads(json.dumps(first.to_json()))) == first

    def never(to: target.Target) -> Measured:
        raise AssertionError("measured again")

    made = probes._measure
    monkeypatch.setattr(probes, "_measure", never)
    assert measured(here) is first
    monkeypatch.setattr(probes, "_memo", {})  # as in another process
    assert measured(here) == first
    assert probes.known(replace(here, cores=here.cores + 1)) is None
    monkeypatch.setattr(probes, "_measure", made)
    assert measured(here, refresh=True) is not first


def test_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", "off")
    assert cache.disk() is None
    assert measured(target.host()) is measured(target.host())


def test_of_another_machine() -> None:
    foreign = next(
        t for t in map(target.named, ("neon", "baseline")) if not target.runs_here(t)
    )
    with pytest.raises(OptionError, match=f"cannot run code for '{foreign.name}'"):
        measured(foreign)
