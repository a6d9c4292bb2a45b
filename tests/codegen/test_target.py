"""Targets and knobs."""

from __future__ import annotations

import pytest

from pliant import knobs, target


def test_host_lists_what_the_machine_has() -> None:
    here = target.host()
    assert target.runs_here(here)
    assert here.lanes in (4, 8, 16)
    assert here.fma == here.has("fma")
    assert here.cores >= 1
    assert 8 << 10 <= here.l1 <= here.l2 <= max(here.l2, here.l3)
    if here.lanes == 16:
        assert "-prefer-256-bit" in here.features


def test_fixed_targets() -> None:
    plain, wide, widest = target.baseline(), target.avx2(), target.avx512()
    assert (plain.lanes, plain.registers, plain.fma) == (4, 16, False)
    assert (wide.lanes, wide.registers, wide.fma) == (8, 16, True)
    assert (widest.lanes, widest.registers, widest.fma) == (16, 32, True)
    assert wide.vector_bytes == 32
    assert wide.has("f16c")
    assert not plain.has("f16c")
    assert target.runs_here(plain)


def test_named() -> None:
    assert target.named("avx2") == target.avx2()
    with pytest.raises(ValueError, match="no target 'mmx'; there are host, baseline"):
        target.named("mmx")


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
    monkeypatch.setenv("PLIANT_TARGET", "avx2")
    assert ("PLIANT_TARGET", "avx2") in knobs.cache_key()
    assert all(name != "PLIANT_THREADS" for name, _ in knobs.cache_key())
