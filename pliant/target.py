"""What code is generated for: instruction set, vector width, registers, caches.

The CPU's name alone may promise instructions that a virtual machine masks, so a target
always carries its feature list in full, and that list is what the code generator asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import llvmlite.binding as llvm

X86_64_V3 = (
    *("+cx16", "+sahf", "+popcnt", "+sse3", "+ssse3", "+sse4.1", "+sse4.2"),
    *("+avx", "+avx2", "+bmi", "+bmi2", "+f16c", "+fma", "+lzcnt", "+movbe", "+xsave"),
)
X86_64_V4 = (
    *X86_64_V3,
    *("+avx512f", "+avx512bw", "+avx512cd", "+avx512dq", "+avx512vl"),
    # Some CPUs are tuned to split 512-bit vectors in two; ours are 512 on purpose.
    "-prefer-256-bit",
)

L1_BYTES = 32 << 10  # what to assume where the system does not tell
L2_BYTES = 512 << 10
L3_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A machine to generate code for.

    `lanes` is how many f32 the widest vector in use holds, `registers` how many such
    vectors the register file holds, `l1`, `l2`, `l3` are data cache bytes as seen by
    one core (l3 is shared), `cores` the threads worth starting.
    """

    name: str
    triple: str
    cpu: str
    features: tuple[str, ...]
    lanes: int
    registers: int
    fma: bool
    l1: int
    l2: int
    l3: int
    cores: int

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features

    @property
    def feature_text(self) -> str:
        return ",".join(self.features)

    @property
    def vector_bytes(self) -> int:
        return self.lanes * 4


def baseline() -> Target:
    """Any x86-64: SSE2, no FMA."""
    return Target(
        name="baseline",
        triple=llvm.get_default_triple(),
        cpu="x86-64",
        features=("+sse", "+sse2"),
        lanes=4,
        registers=16,
        fma=False,
        l1=_cache("L1d", L1_BYTES),
        l2=_cache("L2", L2_BYTES),
        l3=_cache("L3", L3_BYTES),
        cores=_cores(),
    )


def avx2() -> Target:
    """x86-64-v3: AVX2, FMA, F16C."""
    return replace(
        baseline(),
        name="avx2",
        cpu="x86-64-v3",
        features=X86_64_V3,
        lanes=8,
        fma=True,
    )


def avx512() -> Target:
    """x86-64-v4: AVX-512 with 512-bit vectors in use."""
    return replace(
        avx2(),
        name="avx512",
        cpu="x86-64-v4",
        features=X86_64_V4,
        lanes=16,
        registers=32,
    )


@lru_cache(maxsize=1)
def host() -> Target:
    """This machine, with the features it really offers."""
    present = llvm.get_host_cpu_features()
    for known in (avx512(), avx2(), baseline()):
        needed = (f[1:] for f in known.features if f.startswith("+"))
        if all(present.get(feature, False) for feature in needed):
            off = tuple(f for f in known.features if f.startswith("-"))
            features = tuple(present.flatten().split(",")) + off
            return replace(
                known,
                name=f"host-{known.name}",
                cpu=llvm.get_host_cpu_name(),
                features=features,
            )
    raise NotImplementedError(f"no code generation for {llvm.get_default_triple()}")


NAMED: dict[str, Callable[[], Target]] = {
    "host": host,
    "baseline": baseline,
    "avx2": avx2,
    "avx512": avx512,
}


def named(name: str) -> Target:
    """The target of that name: host, baseline, avx2 or avx512."""
    if name not in NAMED:
        raise ValueError(f"no target '{name}'; there are {', '.join(NAMED)}")
    return NAMED[name]()


def runs_here(target: Target) -> bool:
    """Whether this machine has every feature the target uses."""
    present = llvm.get_host_cpu_features()
    wanted = (f[1:] for f in target.features if f.startswith("+"))
    return all(present.get(feature, False) for feature in wanted)


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


_SYSCONF = {
    "L1d": "SC_LEVEL1_DCACHE_SIZE",
    "L2": "SC_LEVEL2_CACHE_SIZE",
    "L3": "SC_LEVEL3_CACHE_SIZE",
}
_SYSFS = {"L1d": ("1", "Data"), "L2": ("2", "Unified"), "L3": ("3", "Unified")}


@lru_cache
def _cache(level: str, fallback: int) -> int:
    try:
        size = os.sysconf(_SYSCONF[level])
    except (ValueError, OSError):
        size = 0
    return size if size > 0 else _cache_from_sysfs(level) or fallback


def _cache_from_sysfs(level: str) -> int:
    number, kind = _SYSFS[level]
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            found = [(entry / f).read_text().strip() for f in ("level", "type", "size")]
        except OSError:
            continue
        if found[:2] == [number, kind] and found[2].endswith("K"):
            return int(found[2][:-1]) << 10
    return 0
