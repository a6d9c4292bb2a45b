"""Arenas that no call uses go back to the system, without another call.

By resident memory and by the meter. When an arena is looked at, and what counts as a
call, is tested in C, where no time has to pass (`test_idle` in unit_memory.c).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pliant import knobs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

START = """
import gc, os, signal, sys, time, torch, pliant
from pathlib import Path
torch.set_num_threads(1)
signal.alarm(100)

class Scores(torch.nn.Module):
    def forward(self, x):
        return (x @ x.t()) @ x

x = torch.randn(3000, 8)
model = pliant.compile(Scores(), (torch.randn(3, 8),), ({0: "n"},), threads=1)

def resident():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

def reapers():
    tasks = [t for t in Path("/proc/self/task").iterdir()]
    return [t for t in tasks if (t / "comm").read_text().strip() == "pliant-idle"]

def long_calls():
    for _ in range(3):
        model(x)
    assert model.stats()["last_peak_bytes"] > 30 << 20  # metered

def until_given_back(before):
    while model.stats()["arena_bytes"] > 1 << 20:
        time.sleep(0.01)
    assert resident() < before + (4 << 20), (resident(), before)
    assert pliant.memory_budget().idle_bytes <= 1 << 20

for _ in range(10):
    model(x[:2])
assert not reapers()  # there is nothing to give back
before = resident()
"""
RETURNED = """
for _ in range(3):
    long_calls()
    held = model.stats()["arena_bytes"]
    assert held >= model.stats()["last_arena_bytes"] > 30 << 20
    assert resident() > before + held * 9 // 10
    until_given_back(before)
    assert len(reapers()) == 1
"""
RESTING = """
def switches():
    text = (reapers()[0] / "status").read_text()
    return text[text.index("voluntary_ctxt_switches"):]

long_calls()
until_given_back(before)
time.sleep(0.2)  # it looks once more, and finds nothing
then = switches()
time.sleep(1)  # ten times as long as it waits for an arena
assert switches() == then
"""
FORKED = """
def fork(run):
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        assert not reapers()
        long_calls()
        run()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

long_calls()  # the parent's may be awake
fork(lambda: until_given_back(before))
until_given_back(before)
fork(lambda: until_given_back(before))
for k in range(10):  # the interpreter ends while it is at work
    fork(lambda: sys.exit(7))
"""
KEPT = """
long_calls()
time.sleep(0.5)
assert model.stats()["arena_bytes"] > 30 << 20
assert not reapers()
"""
EXIT = """
long_calls()
assert len(reapers()) == 1
"""


@pytest.mark.parametrize(
    ("script", "seconds"),
    [
        pytest.param(RETURNED, "1", id="returned"),
        pytest.param(RESTING, "0.1", id="resting"),
        pytest.param(FORKED, "0.05", id="forked"),
        pytest.param(KEPT, "0", id="kept"),
        pytest.param(EXIT, "1000", id="exit"),
        pytest.param(EXIT, "0.001", id="exit in a hurry"),
    ],
)
def test_idle(script: str, seconds: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + script],
        env={**os.environ, "PLIANT_IDLE_SECONDS": seconds},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf"])
def test_no_time(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PLIANT_IDLE_SECONDS", text)
    with pytest.raises(ValueError, match="PLIANT_IDLE_SECONDS"):
        knobs.IDLE_SECONDS.get()
