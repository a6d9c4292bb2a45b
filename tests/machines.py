"""The machine that tests take this one for, and the targets that it can run.

`PLIANT_TARGET=avx2 make test` runs every test as if the machine had no more than AVX2:
models are compiled for it unless a test says otherwise, `MACHINE` is it, `TARGETS` are
the classes of machine that it runs, and `target.host()` has no feature that it has not.
No test states a size that only some machines choose: that follows from a Target.
"""

from __future__ import annotations

from dataclasses import replace

import llvmlite.binding as llvm

from pliant import knobs
from pliant.machine.target import Target, named, runs_here

MACHINE = named(knobs.TARGET.get())
if not runs_here(MACHINE):
    raise SystemExit(f"this machine cannot run tests for the target '{MACHINE.name}'")
# What LLVM takes every x86-64 to have, and tells of it besides instructions.
PLAIN = {"64bit", "cmov", "cx8", "fxsr", "mmx", "nopl", "sse", "sse2", "x87"}


def hide_features() -> None:
    """From now on LLVM finds nothing on this machine that MACHINE has not."""
    present = llvm.get_host_cpu_features()
    kept = PLAIN | used_by(MACHINE)
    less = type(present)({n: has and n in kept for n, has in present.items()})
    llvm.get_host_cpu_features = lambda: less


def used_by(target: Target) -> set[str]:
    return {name[1:] for name in target.features if name.startswith("+")}


def runs(target: Target) -> bool:
    """Whether MACHINE has every feature that the target uses."""
    return used_by(target) <= PLAIN | used_by(MACHINE)


# By name, for parameters of tests: the machine itself, and what has shorter vectors.
TARGETS = [
    "machine",
    *(
        name
        for name in ("avx2", "baseline")
        if runs(named(name)) and named(name).lanes < MACHINE.lanes
    ),
]


def machine(name: str = "machine") -> Target:
    """The target of a name in `TARGETS`."""
    return MACHINE if name == "machine" else named(name)


def with_caches(target: Target, *kibibytes: int) -> Target:
    """The same with caches of other sizes: L1, L2, L3."""
    first, second, third = (
        replace(cache, bytes=size << 10)
        for cache, size in zip(target.caches, kibibytes, strict=True)
    )
    return replace(target, caches=(first, second, third))
