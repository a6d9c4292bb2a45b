"""Says what pliant found on this machine, and whether all of it works.

Versions, the target code is generated for, threads, the cache folder, checks, and the
limits of the machine if they were measured before or --measure asks for it (about a
second on an idle machine).

With --json the same as one JSON object. PLIANT_TARGET takes a file that holds it, so
code can be generated for this machine on another one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import llvmlite.binding as llvm
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pliant import cache, knobs
from pliant.codegen.units import toolchain
from pliant.errors import PliantError
from pliant.machine import target
from pliant.machine.processor import asked_threads
from pliant.machine.target import Target
from pliant.measure import probes
from pliant.measure.probes import Measured
from pliant.model.spill import spill_place
from pliant.progress import task

PACKAGES = ("pliant", "llvmlite", "numpy", "apache-tvm-ffi", "torch")

_TWICE = """
define i64 @twice(i64 %x) {
  %y = add i64 %x, %x
  ret i64 %y
}
"""
_WIDE = """
define void @wide(ptr %p) {
  %x = load <16 x float>, ptr %p, align 64
  %y = fadd <16 x float> %x, %x
  store <16 x float> %y, ptr %p, align 64
  ret void
}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure peak arithmetic and read bandwidth now",
    )


def run(args: argparse.Namespace) -> int:
    chosen = target.named(knobs.TARGET.get())
    checks = list(_checks(chosen))
    limits = probes.known(chosen)
    if args.measure and target.runs_here(chosen):
        with task("measuring"):
            limits = probes.measured(chosen, refresh=True)
    if args.json:
        print(json.dumps(_report(chosen, checks, limits), indent=1))
    else:
        _show(chosen, checks, limits)
    return 0 if all(check.problem is None for check in checks) else 1


# ---- checks


@dataclass(frozen=True, slots=True)
class Diagnosis:
    what: str
    detail: str
    problem: str | None = None


def _checks(chosen: Target) -> Iterator[Diagnosis]:
    for what, check in (
        ("runtime", _runtime),
        ("just-in-time compiler", _jit),
        ("features of the target", lambda: _features(chosen)),
        ("cache folder", _cache),
        ("spill folder", _spill),
    ):
        yield _checked(what, check)


def _checked(what: str, check: Callable[[], str]) -> Diagnosis:
    """The result of a check; an exception that it raises is the problem found."""
    try:
        return Diagnosis(what, check())
    except Exception as error:
        reason = str(error) or type(error).__name__
        return Diagnosis(what, "", reason)


def _runtime() -> str:
    from pliant.runtime import binding

    library = binding.load()
    return f"loaded, ABI {library.plt_abi_version()}"


def _jit() -> str:
    """Compiles and runs a function on this machine, whatever the target is."""
    from pliant.backend.jit import compile_ir

    code = compile_ir(_TWICE, target.host())
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    answer = kind(code.address("twice"))(21)
    if answer != 42:
        raise PliantError(f"a compiled function gave {answer} instead of 42")
    return "compiled and ran a function"


def _features(chosen: Target) -> str:
    if not target.runs_here(chosen):
        lacks = " ".join(target.missing(chosen)) or chosen.triple
        raise PliantError(f"code for '{chosen.name}' does not run here: {lacks}")
    hidden = masked(chosen)
    if hidden is not None:
        return f"all present; CPUs of this name also have {hidden}, masked here"
    return "all present"


def masked(chosen: Target) -> str | None:
    """Wider vectors that the CPU's name promises and the machine does not offer."""
    promised = _by_name_alone(chosen)
    for feature, register in (("avx512f", "%zmm"), ("avx2", "%ymm")):
        if register in promised and not chosen.has(feature):
            return feature
    return None


def _by_name_alone(chosen: Target) -> str:
    """Assembly of an addition of 16 floats, LLVM being told the CPU's name only."""
    from pliant.backend.objects import target_machine

    target_machine(chosen)  # makes the back end ready
    named = llvm.Target.from_triple(chosen.triple).create_target_machine(
        cpu=chosen.cpu, features="-prefer-256-bit" if chosen.has("sse2") else ""
    )
    return str(named.emit_assembly(llvm.parse_assembly(_WIDE)))


def _cache() -> str:
    disk = cache.disk()
    if disk is None:
        return "off"
    problem = disk.problem()
    if problem is not None:
        raise PliantError(f"{problem}; set PLIANT_CACHE to another, or to 'off'")
    if toolchain() is None:
        raise PliantError("not used: the files of the code generator cannot be read")
    used = disk.usage()
    return (
        f"{disk.folder}: {used.entries} entries, {used.bytes / 2**20:.1f} of "
        f"{disk.limit >> 20} MiB"
    )


def _spill() -> str:
    place = spill_place()
    if place.problem:
        raise PliantError(
            f"{place.problem}: memory limits are kept by computing again alone; set "
            "PLIANT_SPILL_FOLDER to a folder on a disk"
        )
    return place.folder


# ---- what there is


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["LLVM"] = ".".join(map(str, llvm.llvm_version_info))
    return found


def _threads(chosen: Target) -> dict[str, Any]:
    return {
        "per_call": knobs.THREADS.get() or asked_threads() or chosen.cores,
        "cores": chosen.cores,
        "share_with_torch": knobs.SHARE_THREADS.get(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _report(
    chosen: Target, checks: list[Diagnosis], limits: Measured | None
) -> dict[str, Any]:
    disk = cache.disk()
    folder: dict[str, Any] | None = None
    if disk is not None:
        folder = {"folder": str(disk.folder), "limit": disk.limit}
        folder |= asdict(disk.usage())
    return {
        "versions": _versions(),
        "target": chosen.to_json(),
        "threads": _threads(chosen),
        "cache": folder,
        "measured": None if limits is None else limits.to_json(),
        "checks": [asdict(check) for check in checks],
        "ok": all(check.problem is None for check in checks),
    }


# ---- for people


def _show(chosen: Target, checks: list[Diagnosis], limits: Measured | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    _table(console, "versions", list(_versions().items()))
    _table(console, "target", target.rows(chosen))
    threads = [(k.replace("_", " "), str(v)) for k, v in _threads(chosen).items()]
    _table(console, "threads", [(k, v) for k, v in threads if v != "None"])
    if limits is None:
        rows = [("", "not measured yet: pliant doctor --measure")]
    else:
        rows = limit_rows(limits)
    _table(console, "limits", rows)
    console.print("\nchecks", style="bold")
    for check in checks:
        word, style = ("OK", "green") if check.problem is None else ("problem", "red")
        line = Text.assemble(
            (f"  {word:8}", style), f"{check.what}: {check.problem or check.detail}"
        )
        console.print(line)


def limit_rows(limits: Measured) -> list[tuple[str, str]]:
    """The measured numbers, one core and all of them."""
    rows = [
        (
            "multiply-adds",
            f"{limits.fma_gflops_1:.1f} GFLOP/s on one core, "
            f"{limits.fma_gflops_all:.1f} on {limits.cores}",
        )
    ]
    for level in limits.levels:
        size = f"{level.bytes / 2**10:.0f} KiB"
        if level.bytes >= 1 << 20:
            size = f"{level.bytes / 2**20:.0f} MiB"
        note = ""
        if level.name == "memory" and not limits.beyond_l3:
            note = "; L3 is too large to be left, so some of it may be L3"
        rows.append(
            (
                f"read {level.name}",
                f"{level.gbs_1:.1f} GB/s on one core, {level.gbs_all:.1f} on "
                f"{limits.cores} ({size} each{note})",
            )
        )
    return rows


def _table(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    console.print(f"\n{title}", style="bold")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(f"  {name}"), Text(value))
    console.print(table)
