"""The machine that tests take this one for, and the targets that it can run.

`PLIANT_TARGET=avx2 make test` runs every test as if the machine had no more than AVX2:
models are compiled for it unless a test says otherwise, `MACHINE` is it, and `TARGETS`
are the classes of machine that it can run. No test asks this machine itself what it
has, or states a size that only some machines choose: that follows from a Target.
"""

from __future__ import annotations

from dataclasses import replace

from pliant import knobs
from pliant.target import Target, named, runs_here

MACHINE = named(knobs.TARGET.get())
if not runs_here(MACHINE):
    raise SystemExit(f"this machine cannot run tests for the target '{MACHINE.name}'")


def _runs(lesser: Target) -> bool:
    """Whether the machine that tests see runs this class, and it is another one."""
    wanted = {feature for feature in lesser.features if feature.startswith("+")}
    return lesser.lanes < MACHINE.lanes and wanted <= {*MACHINE.features}


# By name, for parameters of tests: the machine itself, and what has shorter vectors.
TARGETS = ["machine", *(n for n in ("avx2", "baseline") if _runs(named(n)))]


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
