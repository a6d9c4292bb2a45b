"""The cache on disk: damage, eviction, several processes, unusable folders."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import pytest

import pliant
from pliant import cache, knobs
from pliant.backend import build
from pliant.cache import DiskCache, hashed
from pliant.codegen import sources, units
from pliant.ir.parse import parse_module
from pliant.machine import target

KEY = hashed("a key")

# A kernel of vector math, one with a task for threads, and one that calls another.
MODEL = """
graph @main(%x: f32[n, m]) {
  %s: f32[n, m] = softmax(%x) {axis = 1}
  %t: f32[n, m] = call_loop(%x) {callee = "twice_rows", sizes = [n, m]}
  %e: f32[n, m] = exp(%t)
  return %s, %e
}
loop @row(m; in %a: f32[m], out %b: f32[m]) do
  for j = 0 to m vector do %b[j] = add(%a[j], %a[j]) end
end
loop @twice_rows(n, m; in %p: f32[n, m], out %q: f32[n, m]) do
  for i = 0 to n parallel do call @row(m; %p[i, 0], %q[i, 0]) end
end
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in a process that has compiled nothing yet."""
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "kept"))
    build.memo.clear()
    return tmp_path / "kept"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_file())


def compiled() -> pliant.CompiledModel:
    return pliant.compile(parse_module(MODEL), threads=1)


def answer(model: pliant.CompiledModel) -> Any:
    x = np.linspace(-1, 1, 21, dtype=np.float32).reshape(3, 7)
    soft, raised = model(x)
    wide = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(soft, wide / wide.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(raised, wide * wide, rtol=1e-5)
    return soft, raised


def counts(model: pliant.CompiledModel) -> tuple[int, int]:
    stats = model.stats()
    assert stats["kernels_built"] + stats["kernels_cached"] == stats["kernels"]
    return stats["kernels_built"], stats["kernels_cached"]


# ---- entries


def test_get_and_put(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path / "new" / "folder", 1 << 20)
    assert disk.get(KEY) is None
    for contents in (b"", b"abc\n\0def", bytes(range(256)) * 99):
        assert disk.put(KEY, contents, "test")
        assert disk.get(KEY) == contents
    assert disk.usage().entries == 1
    assert disk.folder.stat().st_mode & 0o777 == 0o700
    assert not list(disk.folder.glob("*/.*"))


def test_parts_of_a_key_are_apart() -> None:
    keys = [hashed("ab", "c"), hashed("a", "bc"), hashed("abc"), hashed("abc", "")]
    assert len(set(keys)) == 4
    assert hashed("a") == hashed(b"a")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"x",
        lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        lambda data: b"",
        lambda data: b"\n" + data,
        lambda data: b"[1]\n" + data,
        lambda data: b"\xff" * 4000,
        lambda data: data.replace(b"sha256", b"sha255"),
    ],
)
def test_damaged_entries_are_missing(tmp_path: Path, damage: Any) -> None:
    disk = DiskCache(tmp_path, 1 << 20)
    disk.put(KEY, b"some contents that matter", "test")
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert disk.get(KEY) is None
    assert not path.exists()
    assert disk.put(KEY, b"again", "test")
    assert disk.get(KEY) == b"again"


def test_used_longest_ago_goes_first(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path, 20_000)
    keys = [hashed(str(k)) for k in range(20)]
    for age, key in enumerate(keys[:10]):
        disk.put(key, bytes(1000), "test")
        os.utime(disk._path(key), (time() - 1e5 + age, time() - 1e5 + age))
    assert disk.get(keys[0]) is not None  # now the most recently used
    for key in keys[10:]:
        disk.put(key, bytes(1000), "test")
        assert disk.usage().bytes <= disk.limit + disk.limit // 8
    assert disk.get(keys[0]) is not None
    assert disk.get(keys[1]) is None
    assert disk.get(keys[-1]) is not None
    disk.trim(0)
    assert disk.usage() == cache.Usage(0, 0)


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path, 1 << 20)
    disk.put(KEY, b"x", "test")
    old, new = (tmp_path / KEY[:2] / f".writing-{name}" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time() - 1e5, time() - 1e5))
    assert disk.usage().entries == 1
    assert not old.exists()
    assert new.exists()


# ---- folders


def test_which_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", "off")
    assert cache.disk() is None
    monkeypatch.delenv("PLIANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PLIANT_CACHE_MIB", "3")
    disk = cache.disk()
    assert disk is not None
    assert (disk.folder, disk.limit) == (tmp_path / "pliant", 3 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.default_folder() == tmp_path / "home" / ".cache" / "pliant"


def test_folder_that_cannot_be_made(folder: Path) -> None:
    folder.write_text("a file")
    disk = cache.disk()
    assert disk is not None
    assert "cannot make the folder" in str(disk.problem())
    assert not disk.put(KEY, b"x", "test")
    assert disk.get(KEY) is None
    for _ in range(2):
        answer(compiled())


def test_folder_that_anyone_may_write_to(folder: Path) -> None:
    compiled()
    count = len(files(folder))
    folder.chmod(0o777)
    build.memo.clear()
    model = compiled()
    assert counts(model)[1] == 0  # what is there is not trusted
    answer(model)
    assert len(files(folder)) == count
    disk = cache.disk()
    assert disk is not None
    assert "anyone may write" in str(disk.problem())


def distrusted(disk: DiskCache, why: str) -> None:
    """Nothing is read, nothing is written, and the reason is told."""
    assert why in str(disk.problem())
    assert disk.get(KEY) is None
    assert not disk.put(KEY, b"new", "test")


@pytest.mark.parametrize(
    "mode, why", [(0o2775, "a group"), (0o777, "anyone"), (0o1777, "anyone")]
)
@pytest.mark.parametrize("inner", ["", KEY[:2]])
def test_folders_that_others_may_write_to(
    tmp_path: Path, mode: int, why: str, inner: str
) -> None:
    disk = DiskCache(tmp_path / "kept", 1 << 20)
    assert disk.put(KEY, b"x", "test") and disk.problem() is None
    (disk.folder / inner).chmod(mode)
    distrusted(disk, f"{why} may write to the folder")
    (disk.folder / inner).chmod(0o700)
    assert disk.get(KEY) == b"x" and disk.problem() is None


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_entries_that_others_may_write_to(tmp_path: Path, mode: int) -> None:
    disk = DiskCache(tmp_path, 1 << 20)
    disk.put(KEY, b"x", "test")
    (path,) = files(tmp_path)
    path.chmod(mode)
    assert disk.get(KEY) is None
    assert not path.exists()
    assert disk.put(KEY, b"again", "test") and disk.get(KEY) == b"again"


def test_what_others_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, inner folder and entry: each is asked whose it is."""
    disk = DiskCache(tmp_path / "kept", 1 << 20)
    disk.put(KEY, b"x", "test")
    (path,) = files(disk.folder)
    real = os.fstat
    for other in (disk.folder, path.parent, path):

        def fstat(number: int, other: Path = other) -> os.stat_result:
            found = real(number)
            if (found.st_dev, found.st_ino) != (
                other.stat().st_dev,
                other.stat().st_ino,
            ):
                return found
            fields = list(found[:10])
            fields[4] = os.geteuid() + 1
            return os.stat_result(fields)

        monkeypatch.setattr(os, "fstat", fstat)
        if other is not path:
            distrusted(disk, "belongs to another user")
        else:
            assert disk.get(KEY) is None
        monkeypatch.setattr(os, "fstat", real)
    assert not path.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link to the whole folder is the user's; inside it there are none."""
    real = DiskCache(tmp_path / "real", 1 << 20)
    real.put(KEY, b"x", "test")
    (tmp_path / "named").symlink_to(real.folder)
    assert DiskCache(tmp_path / "named", 1 << 20).get(KEY) == b"x"
    disk = DiskCache(tmp_path / "kept", 1 << 20)
    disk.put(KEY, b"mine", "test")
    (path,) = files(disk.folder)
    path.unlink()
    path.symlink_to(real._path(KEY))
    assert disk.get(KEY) is None
    assert real.get(KEY) == b"x"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert disk.get(KEY) is None  # and does not wait for a writer
    path.unlink(missing_ok=True)
    path.parent.rmdir()
    path.parent.symlink_to(real._path(KEY).parent)
    distrusted(disk, "may lead anywhere")
    disk.trim(0)
    assert real.get(KEY) == b"x"


def test_read_only_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is used; what is not, is compiled and not kept."""
    compiled()
    first, *others = files(folder)
    first.unlink()
    for path in (*(p.parent for p in others), first.parent, folder):
        path.chmod(0o500)
    if os.access(folder, os.W_OK):  # root writes anywhere
        monkeypatch.setattr(os, "access", lambda *args, **kwargs: False)
    build.memo.clear()
    try:
        model = compiled()
        answer(model)
        assert counts(model)[1] >= 1
        assert not first.exists()
        build.memo.clear()
        answer(compiled())
    finally:
        for path in (folder, *folder.glob("*")):
            path.chmod(0o700)


# ---- compiled kernels


def test_kernels_are_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled()
    wanted = answer(first)
    kernels = first.stats()["kernels"]
    assert counts(first) == (kernels, 0)
    assert len(files(folder)) == kernels + 2  # and the host functions

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("LLVM IR was built")

    for name in ("emit_loop_function", "emit_calls", "emit_sizes"):
        monkeypatch.setattr(units, name, never)
    for _ in range(2):
        again = compiled()
        assert counts(again) == (0, kernels)
        for got, right in zip(answer(again), wanted, strict=True):
            np.testing.assert_array_equal(got, right)
        build.memo.clear()  # as in another process


def test_what_differs_is_built_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    other = pliant.compile(parse_module(MODEL.replace("exp(", "sin(")), threads=1)
    assert counts(other)[0] == 1
    assert counts(other)[1] >= 1
    monkeypatch.setenv("PLIANT_OPT_LEVEL", "1")
    assert counts(compiled())[1] == 0
    monkeypatch.delenv("PLIANT_OPT_LEVEL")
    monkeypatch.setattr(units, "toolchain", lambda: "another LLVM")
    assert counts(compiled())[1] == 0
    monkeypatch.undo()
    monkeypatch.setenv("PLIANT_CACHE", str(folder))
    baseline, default = target.baseline(), target.named(knobs.TARGET.get())
    if target.runs_here(baseline) and baseline.features != default.features:
        plain = pliant.compile(parse_module(MODEL), threads=1, target=baseline)
        assert counts(plain)[1] == 0
        answer(plain)


def test_code_generators_without_sources(tmp_path: Path) -> None:
    """Told apart by their bytecode, and by what an archive holds."""
    package = tmp_path / "generator"
    package.mkdir()
    found = set()
    for text in ("answer = 1", "answer = 2"):
        (package / "__init__.py").write_text("")
        (package / "part.py").write_text(text)
        for source in package.glob("*.py"):
            made = str(source.with_suffix(".pyc"))
            py_compile.compile(str(source), made, doraise=True)
            source.unlink()
        found.add(hash_elsewhere(tmp_path))
        archive = tmp_path / f"{text[-1]}.zip"
        with zipfile.ZipFile(archive, "w") as whole:
            for path in package.glob("*.pyc"):
                whole.write(path, f"generator/{path.name}")
        found.add(hash_elsewhere(archive))
    # An archive holds the same files under the same names.
    assert len(found) == 2 and "None" not in found


def hash_elsewhere(path: Path) -> str:
    script = (
        "from pliant.codegen.sources import files_hash; import sys; "
        "sys.path.insert(0, sys.argv[1]); print(files_hash(['generator']))"
    )
    made = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout.strip()


def test_an_unknown_code_generator_keeps_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sources.files_hash(["no_such_module"]) is None
    monkeypatch.setattr(units, "_FILES", None)
    answer(compiled())
    assert not folder.exists()


def test_damaged_kernels_are_built_anew(folder: Path) -> None:
    wanted = answer(compiled())
    kernels = len(files(folder))
    for number, path in enumerate(files(folder)):
        data = path.read_bytes()
        path.write_bytes(data[:-1] if number % 2 else data[:-5] + b"wrong")
    build.memo.clear()
    model = compiled()
    assert counts(model)[1] == 0
    for got, right in zip(answer(model), wanted, strict=True):
        np.testing.assert_array_equal(got, right)
    assert len(files(folder)) == kernels


def test_listing_of_cached_code(folder: Path) -> None:
    compiled()
    build.memo.clear()
    model = compiled()
    assert counts(model)[0] == 0
    code = model.program.code.machine
    names = list(model.program.lowered.loops)
    text, ir = code.assembly(), code.llvm_ir()
    for name in (*names, "pliant_run", "pliant_bind"):
        assert f"{name}:" in text
        assert f"@{name}(" in ir


def test_memory_holds_a_bounded_number() -> None:
    memo = build._Memo(100)
    for k in range(30):
        memo.put(str(k), bytes(30))
        assert memo.get("0") == bytes(30)  # in use, so it stays
        assert memo.held <= 100
    assert memo.get("1") is None
    assert memo.get("29") == bytes(30)
    memo.put("large", bytes(1000))
    assert memo.held == 0


# ---- several processes

SCRIPT = """
import json, sys
import numpy as np
import pliant
from pliant import knobs
from pliant.ir.parse import parse_module

model = pliant.compile(parse_module(sys.stdin.read()), threads=1)
x = np.linspace(-1, 1, 21, dtype=np.float32).reshape(3, 7)
stats = model.stats()
result = [r.tolist() for r in model(x)]
print(json.dumps([result, stats["kernels_built"], stats["kernels_cached"]]))
"""


def start(seed: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
    )
    assert process.stdin is not None
    process.stdin.write(MODEL)
    process.stdin.close()
    return process


def result_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    text = process.stdout.read()
    assert process.wait() == 0
    return json.loads(text)


def test_processes_that_start_together(folder: Path) -> None:
    wanted = [r.tolist() for r in answer(compiled())]
    cache.DiskCache(folder, 1).trim(0)
    started = [start(seed) for seed in range(8)]
    for process in started:
        got, built, cached = result_of(process)
        assert got == wanted
        assert built + cached > 0
    # Whatever seed its hashes had, a later process finds everything.
    got, built, cached = result_of(start(99))
    assert (got, built) == (wanted, 0)
    assert cached > 0
    assert not list(folder.glob("*/.*"))
