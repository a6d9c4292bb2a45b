"""The machine that code is generated for: instruction set, vectors, caches.

A CPU's name may promise instructions that a virtual machine masks, so a target always
carries its full feature list. Only this file interprets the list: code that depends on
the machine asks the target for a capability, not for a feature by name.

A target is detected (`host`), one of a few classes of machine (`named`), or read from
the file that `pliant doctor --json` wrote on another machine (`load`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from pliant.errors import OptionError
from pliant.machine import processor
from pliant.machine.processor import Cache

X86_64_V2 = (
    *("+sse", "+sse2"),
    *("+cx16", "+sahf", "+popcnt", "+sse3", "+ssse3", "+sse4.1", "+sse4.2"),
)
X86_64_V3 = (
    *X86_64_V2[2:],
    *("+avx", "+avx2", "+bmi", "+bmi2", "+f16c", "+fma", "+lzcnt", "+movbe", "+xsave"),
)
X86_64_V4 = (
    *X86_64_V3,
    *("+avx512f", "+avx512bw", "+avx512cd", "+avx512dq", "+avx512vl"),
    # Some CPUs are tuned to split 512-bit vectors in two; ours are 512 on purpose.
    "-prefer-256-bit",
)
ARMV8 = ("+neon", "+fp-armv8", "-aes", "-crc", "-sha2")

X86_TRIPLE = "x86_64-unknown-linux-gnu"
ARM_TRIPLE = "aarch64-unknown-linux-gnu"
LANES = (4, 8, 16)


@dataclass(frozen=True, slots=True)
class Target:
    """A machine to generate code for."""

    name: str
    triple: str
    cpu: str
    features: tuple[str, ...]
    lanes: int  # f32 elements of the widest vector in use
    registers: int  # number of vector registers
    fma: bool
    fma_ports: int  # vector multiply-adds that can start in one cycle
    fma_latency: int  # cycles until the result of one can be used by the next
    load_ports: int  # vector loads that can start in one cycle
    caches: tuple[Cache, Cache, Cache]  # L1, L2, L3; the last is shared
    cores: int  # number of threads to start

    def has(self, feature: str) -> bool:
        """Whether the list has LLVM's name of a feature; for reports only."""
        return f"+{feature}" in self.features

    # ---- capabilities

    def masks(self, bytes: int) -> bool:
        """Whether loads and stores of whole vectors can be masked.

        `bytes` is the size of an element: AVX-512 masks every size, AVX2 those of 4 and
        8 bytes. A machine without masks accesses the elements one by one.
        """
        return self.has("avx512bw") or (self.has("avx2") and bytes >= 4)

    @property
    def rounds(self) -> bool:
        """Whether one instruction rounds floats to integral values, in every direction.

        ARM has such instructions too, but they are not used yet.
        """
        return self.has("sse4.1")

    @property
    def converts_half(self) -> bool:
        """Whether instructions convert vectors between f16 and f32.

        ARM has such instructions too, but they are not used yet.
        """
        return self.has("f16c")

    def dot(self, parts: str) -> bool:
        """Whether an instruction adds up products of the parts of words, in vectors.

        `parts` are those of `ir.loops.Dot`; the vectors have `lanes` words.
        """
        match parts:
            case "bytes" | "turned_bytes":  # vpdpbusd
                if self.has("avxvnni") and self.lanes <= 8:
                    return True
                wide = self.lanes == 16 or self.has("avx512vl")
                return self.has("avx512vnni") and wide
            case "signed_bytes":  # sdot
                return self.has("dotprod") and self.lanes == 4
            case "halves":  # pmaddwd
                return self.has({4: "sse2", 8: "avx2", 16: "avx512bw"}[self.lanes])
            case _:
                raise ValueError(f"no parts of words: {parts}")

    # ---- sizes

    @property
    def feature_text(self) -> str:
        return ",".join(self.features)

    @property
    def vector_bytes(self) -> int:
        return self.lanes * 4

    @property
    def l1(self) -> int:
        return self.caches[0].bytes

    @property
    def l2(self) -> int:
        return self.caches[1].bytes

    @property
    def l3(self) -> int:
        return self.caches[2].bytes

    # ---- as JSON

    def to_json(self) -> dict[str, Any]:
        """The form that `from_json` reads."""
        return asdict(self)

    @staticmethod
    def from_json(data: object) -> Target:
        """A target from its JSON form; an OptionError says what is wrong with it."""
        if not isinstance(data, Mapping):
            raise OptionError(f"a target is a JSON object, not {_shown(data)}")
        known = {field.name for field in fields(Target)}
        missing = ", ".join(sorted(known - data.keys()))
        unknown = ", ".join(sorted(map(str, data.keys() - known)))
        if missing or unknown:
            raise OptionError(
                "the fields of a target do not fit this version of pliant; "
                f"missing: {missing or 'none'}, unknown: {unknown or 'none'}"
            )
        problems = list(_problems(data))
        if problems:
            raise OptionError(f"not a target: {'; '.join(problems)}")
        first, second, third = (Cache(**cache) for cache in data["caches"])
        features = tuple(data["features"])
        caches = (first, second, third)
        return Target(**{**data, "features": features, "caches": caches})


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    for name in ("name", "triple", "cpu"):
        if not isinstance(data[name], str):
            yield f"{name} must be a text, not {_shown(data[name])}"
    features = data["features"]
    if not isinstance(features, list | tuple) or not all(
        isinstance(f, str) and f[:1] in ("+", "-") for f in features
    ):
        yield "features must be a list of texts such as '+avx2'"
    if data["lanes"] not in LANES:
        yield f"lanes must be one of {LANES}, not {_shown(data['lanes'])}"
    if not isinstance(data["fma"], bool):
        yield f"fma must be true or false, not {_shown(data['fma'])}"
    for name in ("registers", "fma_ports", "fma_latency", "load_ports", "cores"):
        if not _is_count(data[name]):
            yield f"{name} must be a positive integer, not {_shown(data[name])}"
    caches = data["caches"]
    names = {field.name for field in fields(Cache)}
    if (
        not isinstance(caches, list | tuple)
        or len(caches) != 3
        or not all(isinstance(c, Mapping) and c.keys() == names for c in caches)
        or not all(_is_count(number) for c in caches for number in c.values())
    ):
        yield f"caches must be three objects with positive {', '.join(sorted(names))}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# ---- classes of machine


def baseline() -> Target:
    """Any x86-64: SSE2, no FMA."""
    here = llvm.get_default_triple()
    return Target(
        name="baseline",
        triple=here if here.startswith("x86_64") else X86_TRIPLE,
        cpu="x86-64",
        features=("+sse", "+sse2"),
        lanes=4,
        registers=16,
        fma=False,
        fma_ports=2,
        fma_latency=4,
        load_ports=2,
        caches=processor.caches(),
        cores=processor.cores(),
    )


def sse4() -> Target:
    """x86-64-v2: SSE4.2, still without FMA."""
    return replace(baseline(), name="sse4", cpu="x86-64-v2", features=X86_64_V2)


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


def neon() -> Target:
    """Any 64-bit ARM: vectors of four floats, FMA.

    Scheduled for a common out-of-order core: with LLVM's generic model, loads move up
    so far that the widest micro-kernel runs out of registers.
    """
    here = llvm.get_default_triple()
    return replace(
        baseline(),
        name="neon",
        triple=here if _is_arm(here) else ARM_TRIPLE,
        cpu="cortex-a72",
        features=ARMV8,
        registers=32,
        fma=True,
    )


def _is_arm(triple: str) -> bool:
    return triple.startswith(("aarch64", "arm64"))


@lru_cache(maxsize=1)
def host() -> Target:
    """This machine, with the features it really offers."""
    triple = llvm.get_default_triple()
    present = llvm.get_host_cpu_features()
    if _is_arm(triple):
        classes = [neon()]
    elif triple.startswith("x86_64"):
        classes = [avx512(), avx2(), sse4(), baseline()]
    else:
        raise OptionError(f"pliant generates no code for {triple}")
    known = next((t for t in classes if not missing(t)), classes[-1])
    off = tuple(f for f in known.features if f.startswith("-"))
    supported = tuple(present.flatten().split(",")) if present else known.features
    return replace(
        known,
        name=f"host-{known.name}",
        cpu=llvm.get_host_cpu_name(),
        features=supported + off,
    )


def missing(target: Target) -> tuple[str, ...]:
    """Features that the target uses and this machine does not offer."""
    present = llvm.get_host_cpu_features()
    wanted = (f[1:] for f in target.features if f.startswith("+"))
    return tuple(feature for feature in wanted if not present.get(feature, False))


def runs_here(target: Target) -> bool:
    """Whether this machine has every feature the target uses."""
    return not _is_foreign(target.triple) and not missing(target)


def _is_foreign(triple: str) -> bool:
    here: str = llvm.get_default_triple()
    if _is_arm(triple) and _is_arm(here):
        return False
    return triple.split("-")[0] != here.split("-")[0]


# ---- by name, or from a file

NAMED: dict[str, Callable[[], Target]] = {
    "host": host,
    "baseline": baseline,
    "sse4": sse4,
    "avx2": avx2,
    "avx512": avx512,
    "x86-64-v2": sse4,
    "x86-64-v3": avx2,
    "x86-64-v4": avx512,
    "neon": neon,
}


def named(name: str) -> Target:
    """The target of that name, or the one in the JSON file at that path."""
    if name in NAMED:
        return NAMED[name]()
    if name.endswith(".json") or "/" in name:
        return load(Path(name))
    raise OptionError(
        f"no target '{name}'; there are {', '.join(NAMED)}, "
        "and files that `pliant doctor --json` writes"
    )


def load(path: Path) -> Target:
    """The target in a file that `pliant doctor --json` wrote, or a target alone."""
    try:
        data = json.loads(path.expanduser().read_text())
    except OSError as error:
        raise OptionError(f"cannot read the target {path}: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"the target {path} is no JSON: {error}") from None
    if isinstance(data, dict) and "target" in data:
        data = data["target"]
    try:
        return Target.from_json(data)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None


def rows(target: Target) -> list[tuple[str, str]]:
    """The target as a table of names and values, for reading."""
    has_fma = "fma" if target.fma else "no fma"
    table = [
        ("name", target.name),
        ("triple", target.triple),
        ("cpu", target.cpu),
        ("cores", str(target.cores)),
        ("vectors", f"{target.registers} of {target.lanes} floats"),
        (
            "arithmetic",
            f"{has_fma}, {target.fma_ports} a cycle, latency {target.fma_latency}, "
            f"{target.load_ports} loads a cycle",
        ),
    ]
    for level, cache in enumerate(target.caches, 1):
        size = f"{cache.bytes >> 10} KiB"
        if cache.bytes >= 1 << 20:
            size = f"{cache.bytes / (1 << 20):g} MiB"
        ways = f"{cache.ways} ways, lines of {cache.line} bytes"
        table.append((f"L{level}", f"{size}, {ways}"))
    used = [f[1:] for f in target.features if f.startswith("+")]
    table.append(("features", " ".join(used)))
    return table
