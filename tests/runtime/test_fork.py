"""A child of a fork: it answers, whatever threads its parent had, and on its own.

Every case runs in a process of its own, as its threads and its forks are the subject.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pliant.runtime import binding

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")

START = """
import os, signal, sys, threading, time, torch
torch.set_num_threads(2)
torch.randn(400, 400) @ torch.randn(400, 400)
torch.randn(2_000_000).exp_()  # torch's team exists
x = torch.ones(500_000)
def compiled():
    import pliant
    from pliant.ir.parse import parse_module
    text = "graph @main(%x: f32[n]) {\\n  %y: f32[n] = exp(%x)\\n  return %y\\n}\\n"
    return pliant.compile(parse_module(text), threads=2)
def shared():
    from pliant.runtime import binding
    return bool(binding.process().services.team_parallel)
def child(model=None):
    signal.alarm(60)
    if "thread" in sys.argv or "monitor" in sys.argv:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if "monitor" in sys.argv: torch.set_num_threads(1)
    forked = model is None
    y = (model or compiled())(x).numpy()  # torch itself would wait for its team
    assert abs(y - 2.7182817).max() < 1e-5
    assert not (forked and shared())
def fork(model=None):
    pid = os.fork()
    if pid == 0:
        child(model)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
BY_FORK = """
fork()
print("answered")
"""
BY_MULTIPROCESSING = """
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=child)
process.start(); process.join()
assert process.exitcode == 0, process.exitcode
print("answered")
"""
COMPILED_BEFORE = """
m = compiled()
m(x)
assert shared()  # the parent's regions run on torch's team
fork(m)
print("answered")
"""


def run(script: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("mode", ["plain", "thread", "monitor"])
def test_loaded_in_the_child(mode: str) -> None:
    assert run(START + BY_FORK, mode) == "answered"


def test_fork_of_multiprocessing() -> None:
    assert run(START + BY_MULTIPROCESSING, "thread") == "answered"


def test_compiled_in_the_parent() -> None:
    assert run(START + COMPILED_BEFORE, "thread") == "answered"


def test_who_began_by_exec(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    for flags, wanted in ((4194304, True), (4194304 | 0x40, False), (0, False)):
        stat.write_text(f"8857 (a (b) c) R 8834 8834 2783 0 -1 {flags} 102 0")
        assert binding._began_by_exec(stat) is wanted
    stat.write_text("?")
    assert not binding._began_by_exec(stat)
    assert not binding._began_by_exec(tmp_path / "missing")
