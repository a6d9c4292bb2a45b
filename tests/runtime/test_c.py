"""The C runtime's own tests, built plainly, under sanitizers, and without threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUNTIME = HERE.parents[1] / "pliant" / "runtime"
SOURCES = ["arena.c", "call.c", "planner.c", "plans.c", "rt.c", "threads.c"]
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
CC = shutil.which("gcc")

pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler")

# fork() in a threaded process is beyond what ThreadSanitizer follows
RACES = ["calls", "regions", "nested", "callers", "concurrent_calls", "parking"]
VARIANTS = {
    "plain": (["-O2"], []),
    "address": (
        ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        # AddressSanitizer's allocator may be locked by another thread at the fork
        ["-fork_in_call"],
    ),
    "thread": (["-O1", "-g", "-fsanitize=thread"], RACES),
    "serial": (["-O2", "-DPLT_NO_THREADS", "-DPLT_NO_MMAP"], []),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_unit(variant: str, tmp_path: Path) -> None:
    flags, names = VARIANTS[variant]
    program = tmp_path / "unit"
    sources = [HERE / "unit.c", *(RUNTIME / name for name in SOURCES)]
    command = [CC, *WARNINGS, *flags, f"-I{RUNTIME}", *sources, "-o", program]
    subprocess.run([*map(str, command), "-pthread"], check=True)
    ran = subprocess.run(
        [str(program), *names],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ok regions" in ran.stdout


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
