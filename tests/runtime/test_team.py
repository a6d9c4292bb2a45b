"""Regions on torch's threads and on workers of our own: the same bits either way."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import hashlib, os, torch, pliant
torch.manual_seed(0)
torch.randn(512, 512) @ torch.randn(512, 512)  # torch starts its threads
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(),
                          torch.nn.Linear(256, 64), torch.nn.LayerNorm(64))
m = pliant.compile(net, (torch.randn(2, 8, 64),), ({0: "b", 1: "s"},), threads=2)
def digest():
    torch.manual_seed(1)
    total = hashlib.sha256()
    for b, s in ((1, 1), (3, 200), (16, 64)):
        total.update(m(torch.randn(b, s, 64)).numpy().tobytes())
    return total.hexdigest()
first = digest()
read, write = os.pipe()
if os.fork() == 0:  # the child has no threads of torch's: it starts its own
    torch.set_num_threads(1)
    os.write(write, digest().encode())
    os._exit(0)
os.wait()
print(first, os.read(read, 64).decode())
from pliant.runtime import binding
print(bool(binding.process().services.team_parallel))
"""


def run(share: str) -> tuple[list[str], bool]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PLIANT_SHARE_THREADS": share},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    digests, shared = done.stdout.strip().splitlines()[-2:]
    return digests.split(), shared == "True"


def test_same_bits_on_either_team() -> None:
    shared, used = run("1")
    own, unused = run("0")
    assert used and not unused
    assert len(shared) == len(own) == 2, "parent and child answer"
    assert {*shared, *own} == {shared[0]}
