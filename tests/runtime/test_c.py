"""The C runtime's own tests, built plainly, under sanitizers, and without threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUNTIME = HERE.parents[1] / "pliant" / "runtime"
SOURCES = [
    *("arena.c", "budget.c", "call.c", "chunk.c", "evict.c", "inputs.c", "order.c"),
    *("parts.c", "plan.c", "planner.c", "plans.c"),
    *("remat.c", "rt.c", "shape.c", "spill.c", "threads.c", "walk.c"),
]
UNIT = [
    *("unit.c", "unit_memory.c", "unit_model.c", "unit_parts.c", "unit_plan.c"),
    "unit_threads.c",
]
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
CC = shutil.which("gcc")

pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler")

# fork() in a threaded process is beyond what ThreadSanitizer follows
RACES = [
    *("calls", "regions", "nested", "callers", "concurrent_calls", "parking"),
    *("budget_waits", "budget_order", "idle_thread", "idle_callers", "parts_callers"),
]
VARIANTS = {
    "plain": (["-O2"], []),
    "address": (
        ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        # At a fork, AddressSanitizer's allocator may be locked by a thread that starts
        ["-fork", "-fork_in_call", "-idle_fork"],
    ),
    "thread": (["-O1", "-g", "-fsanitize=thread"], RACES),
    "serial": (["-O2", "-DPLT_NO_THREADS", "-DPLT_NO_MMAP", "-DPLT_NO_FILES"], []),
}


def build_and_run(
    tests: list[str], flags: list[str], given: list[str], out: Path
) -> str:
    sources = [*(HERE / n for n in tests), *(RUNTIME / n for n in SOURCES)]
    command = [CC, *WARNINGS, *flags, f"-I{RUNTIME}", *sources, "-o", out]
    subprocess.run([*map(str, command), "-pthread"], check=True)
    ran = subprocess.run(
        [str(out), *given],
        capture_output=True,
        text=True,
        timeout=300,  # a hang; on a busy machine spinning threads take minutes
        env={**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("variant", VARIANTS)
def test_unit(variant: str, tmp_path: Path) -> None:
    flags, names = VARIANTS[variant]
    assert "ok regions" in build_and_run(UNIT, flags, names, tmp_path / "unit")


@pytest.mark.parametrize("variant", ["plain", "address", "serial"])
def test_limits(variant: str, tmp_path: Path) -> None:
    """Random programs give the same results under every limit that can be met."""
    flags, _ = VARIANTS[variant]
    count = "60" if variant == "address" else "400"
    assert "ok" in build_and_run(["remat.c"], flags, [count], tmp_path / "remat")


@pytest.mark.parametrize("variant", ["plain", "address", "serial"])
def test_chunks(variant: str, tmp_path: Path) -> None:
    """Rows of chunks: the same results, in the limit, and no setting is cheaper."""
    flags, _ = VARIANTS[variant]
    count = "40" if variant == "address" else "120"
    assert "ok" in build_and_run(["chunks.c"], flags, [count], tmp_path / "chunks")


@pytest.mark.parametrize("variant", ["plain", "address"])
def test_cheapest_evictions(variant: str, tmp_path: Path) -> None:
    """What is evicted is the cheapest there is, nearly always, of all ways to evict."""
    flags, _ = VARIANTS[variant]
    count = "100" if variant == "address" else "400"
    assert "ok" in build_and_run(["cheapest.c"], flags, [count], tmp_path / "cheapest")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wraps fallocate")
@pytest.mark.parametrize("variant", ["plain", "address"])
def test_spill_file(variant: str, tmp_path: Path) -> None:
    """Room is taken before anything is written, on any file system, or refused."""
    flags, _ = VARIANTS[variant]
    wrapped = [f"-Wl,--wrap={name}" for name in ("fallocate", "pread", "pwrite")]
    given = [str(tmp_path)]
    out = build_and_run(["spill_file.c"], [*flags, *wrapped], given, tmp_path / "spill")
    assert "ok" in out


def test_no_mutable_globals(tmp_path: Path) -> None:
    """Nothing of the runtime lands in .data or .bss."""
    for name in SOURCES:
        target = tmp_path / f"{name}.o"
        command = [CC, *WARNINGS, "-O2", "-fPIC", "-c", RUNTIME / name, "-o", target]
        subprocess.run([str(part) for part in command], check=True)
        listed = subprocess.run(
            ["nm", str(target)], capture_output=True, text=True, check=True
        ).stdout
        kinds = {line.split()[-2]: line for line in listed.splitlines()}
        assert not kinds.keys() & set("bBdDC"), kinds
