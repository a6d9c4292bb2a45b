"""What may go wrong around a model: no memory, no disk, signals, forks, other threads.

After each a call fails with a typed error or is right, and the next one is right. Every
case runs in a process of its own, which it may not end. A full disk under a training
step's spill file is in tests/training, forks of other kinds in tests/runtime.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and signals")

START = """
import gc, os, random, resource, signal, threading, time
import torch, pliant
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(2)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(24, 72), nn.Linear(72, 24)
    def forward(self, x):
        y = self.b(torch.tanh(self.a(x))) + x
        return y.softmax(-1), (y @ y.mT).sum(-1), y * 2
net = Net().eval().requires_grad_(False)
def data(b, s):
    return torch.randn(b, s, 24, generator=torch.Generator().manual_seed(b * 997 + s))
def compiled(threads=2):
    return pliant.compile(net, (data(2, 7),), ({0: "b", 1: "s"},), threads=threads)
def close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
def right(got, x):
    close(got, net(x))
"""

# The runtime's own blocks, and arenas as well (PLT_FLAG_NO_MAP): each fails once, in a
# call of a new size, of a known one, and of one with as little memory as can be.
ALLOCATIONS = """
import ctypes
from pliant.runtime import binding
NO_MAP = 4
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
live, left = {}, [-1]
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
def allocate(context, size):
    if left[0] >= 0:
        left[0] -= 1
        if left[0] < 0: return None
    p = libc.malloc(size or 1)
    live[p] = size
    return p
@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
def release(context, p, size):
    del live[p]
    libc.free(p)
services = binding.process().services
services.allocate = ctypes.cast(allocate, ctypes.c_void_p).value
services.release = ctypes.cast(release, ctypes.c_void_p).value
binding.GUARD_PAGES = NO_MAP
binding.POISON = 0
m = compiled(1)
def held():
    m.trim()
    gc.collect()
    return sum(live.values())
def attempts(x, before=lambda: None):
    # calls, the n-th allocation of which fails, until one has fewer
    right(m(x), x)
    base, failed = held(), 0
    for n in range(200):
        right(m(x), x)
        before()
        left[0] = n
        try:
            got = m(x)
        except pliant.PliantError as error:
            left[0] = -1
            assert not isinstance(error, pliant.InternalError), error
            failed += 1
            assert held() <= base, (n, held(), base, error)
            continue
        over, left[0] = left[0] >= 0, -1
        right(got, x)  # it may do without
        del got
        assert held() <= base, (n, held(), base)
        if over: return failed
    raise AssertionError("it never ends")
x = data(3, 33)
assert attempts(x, m.trim) >= 2
attempts(x)
try:
    m.memory_plan(x, memory_limit=1)
except pliant.MemoryLimitError as error:
    m.memory_limit = error.least
assert attempts(x, m.trim) >= 2
m.memory_limit = None
for s in (1, 0, 5): right(m(data(2, s)), data(2, s))
print("right")
"""

# Address space ends: maps of arenas, torch's storages of results, stacks of threads.
ADDRESSES = """
m = compiled()
x = data(40, 700)
def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
want, free = net(x), resource.getrlimit(resource.RLIMIT_AS)
failed = taken = 0
for mib in range(0, 120, 15):
    m.trim(); gc.collect()
    resource.setrlimit(resource.RLIMIT_AS, (used() + (mib << 20), free[1]))
    try:
        got = m(x)
        taken += 1
    except (pliant.PliantError, MemoryError) as error:
        assert not isinstance(error, pliant.InternalError), error
        got = None
        failed += 1
    resource.setrlimit(resource.RLIMIT_AS, free)
    if got is not None:
        close(got, want)
    del got
assert failed and taken, (failed, taken)
right(m(x), x)
print("right")
"""

SIGNALS = """
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupted(action, seconds):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        action()
        timer.join()
        time.sleep(0.01)  # a signal that came late is taken here
    except KeyboardInterrupt:
        pass
    timer.join()
m = compiled()
x = data(3, 40)
def calls():
    end = time.monotonic() + 0.2
    while time.monotonic() < end: m(x)
for k in range(10):
    interrupted(calls, 0.004 * (k + 1))
    right(m(x), x)
for k in range(12):
    interrupted(compiled, 0.03 * (k + 1))
other = compiled()
right(other(x), x)
right(m(x), x)
print("right")
"""

FORKS = """
m = compiled()
x = data(3, 40)
def calls():
    for s in range(1, 30): right(m(data(2, s)), data(2, s))
threads = [threading.Thread(target=calls) for _ in range(3)]
for t in threads: t.start()
want = [t.numpy().copy() for t in m(x)]
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        for _ in range(3):  # torch itself would wait for its team
            for got, should in zip(m(x), want):
                assert abs(got.numpy() - should).max() < 1e-4
        os._exit(7)
    children.append(pid)
for pid in children: assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
for t in threads: t.join()
calls()
print("right")
"""

THREADS = """
m = compiled()
sizes = [(b, s) for b in (0, 1, 3) for s in (1, 2, 17, 60)]
wants = {k: net(data(*k)) for k in sizes}
done, wrong, refused, answered = threading.Event(), [], [0], [0]
def calls(seed):
    pick = random.Random(seed)
    while not done.is_set():
        k = pick.choice(sizes)
        try:
            got = m(data(*k))
        except pliant.MemoryLimitError:
            refused[0] += 1
            continue
        except BaseException as error:
            wrong.append(error)
            return
        answered[0] += 1
        for a, b in zip(got, wants[k], strict=True):
            if a.shape != b.shape or (a.numel() and (a - b).abs().max() > 1e-4):
                wrong.append(k)
def changes():
    pick = random.Random(9)
    for _ in range(600):
        match pick.randrange(5):
            case 0: m.trim()
            case 1: m.memory_limit = pick.choice([None, 1 << 14, 1 << 16, 1 << 24])
            case 2: pliant.set_memory_budget(pick.choice([None, 1 << 15, 1 << 20]),
                                             wait=pick.choice([False, 0.01]))
            case 3: m.stats()
            case 4:
                try: m.memory_plan(b=2, s=9)
                except pliant.MemoryLimitError: pass
        time.sleep(0.002)
threads = [threading.Thread(target=calls, args=(k,)) for k in range(3)]
for t in threads: t.start()
changes()
done.set()
for t in threads: t.join()
assert not wrong, wrong[:3]
assert answered[0]
pliant.set_memory_budget(None)
m.memory_limit = None
for k in sizes: right(m(data(*k)), data(*k))
m.trim()
assert m.stats()["arena_bytes"] == 0, m.stats()
print("right")
"""

DISK = """
import tempfile
tempfile.gettempdir()  # torch asks for it, and it is found by writing a file
free = resource.getrlimit(resource.RLIMIT_FSIZE)
x = data(3, 11)
for most in (0, 100, 3000, 20000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, free[1]))
    m = compiled()
    right(m(x), x)
    resource.setrlimit(resource.RLIMIT_FSIZE, free)
right(compiled()(x), x)  # what is half written in the cache is not taken
print("right")
"""

CASES = {
    "allocations": ALLOCATIONS,
    "addresses": ADDRESSES,
    "signals": SIGNALS,
    "forks": FORKS,
    "threads": THREADS,
    "disk": DISK,
}


@pytest.mark.parametrize("case", CASES)
def test_chaos(case: str, tmp_path: Path) -> None:
    env = dict(os.environ)
    if case == "allocations":
        env["PLIANT_GUARD_PAGES"] = "1"
    if case == "disk":
        env["PLIANT_CACHE"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + CASES[case]],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"
