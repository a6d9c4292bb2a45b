"""Units of a model -> machine code in this process, by the cheapest available way.

in memory    a process that compiles two models with a common kernel compiles it once
on disk      so does the next process (pliant/cache.py)
LLVM         everything else; LLVM IR is emitted here while LLVM compiles on all cores
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter

import llvmlite.ir as ll

from pliant import cache
from pliant.backend.jit import CompiledCode
from pliant.backend.objects import object_code, optimised
from pliant.codegen.builder import SourceLine
from pliant.codegen.host_plan import HostPlan
from pliant.codegen.units import Unit, program_units, toolchain, whole_program
from pliant.ir.loops import LoopFunc
from pliant.machine.processor import cores
from pliant.machine.target import Target

MEMO_BYTES = 64 << 20


@dataclass(slots=True)
class _Memo:
    """Object code by key, of the most recently used units."""

    limit: int
    held: int = 0
    images: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    lock: Lock = field(default_factory=Lock)

    def get(self, key: str) -> bytes | None:
        with self.lock:
            if key in self.images:
                self.images.move_to_end(key)
            return self.images.get(key)

    def put(self, key: str, image: bytes) -> None:
        with self.lock:
            if key in self.images:
                return
            self.images[key] = image
            self.held += len(image)
            while self.held > self.limit:
                _, oldest = self.images.popitem(last=False)
                self.held -= len(oldest)

    def clear(self) -> None:
        with self.lock:
            self.images.clear()
            self.held = 0


memo = _Memo(MEMO_BYTES)


@dataclass(frozen=True, slots=True)
class Build:
    """Machine code and its origin."""

    code: CompiledCode
    kernels_built: int  # by LLVM
    kernels_cached: int  # found in memory or on disk
    emit_seconds: float  # finding known object code, and emitting LLVM IR for the rest
    compile_seconds: float  # LLVM's time beyond that, and linking


def build(
    loops: Mapping[str, LoopFunc],
    plan: HostPlan,
    target: Target,
    symbols: Mapping[str, int],
    opt_level: int,
) -> Build:
    """Machine code for a lowered model; `symbols` are the addresses it may call."""
    started = perf_counter()
    program = program_units(loops, plan, target, opt_level)
    units = {unit.key: unit for unit in program.all()}
    images = _known(units)
    missing = [unit for key, unit in units.items() if key not in images]
    # Largest first, so that no long one runs alone at the end.
    missing.sort(key=lambda unit: -unit.size)
    with ThreadPoolExecutor(cores(), "pliant-llvm") as workers:
        futures: dict[str, Future[bytes]] = {}
        for unit in missing:
            text = _text(unit.emit())
            allowed = unit.calls | symbols.keys()
            work = workers.submit(_object, text, target, unit.opt_level, allowed)
            futures[unit.key] = work
        emitted = perf_counter()
        for key, future in futures.items():
            images[key] = future.result()
    _keep({key: images[key] for key in futures})
    objects = (images[key] for key in units)
    code = built_again(
        objects, program.host_symbols, loops, plan, target, symbols, opt_level
    )
    built = sum(unit.key in futures for unit in program.kernels.values())
    return Build(
        code,
        built,
        len(program.kernels) - built,
        emitted - started,
        perf_counter() - emitted,
    )


def built_again(
    images: Iterable[bytes],
    exports: Collection[str],
    loops: Mapping[str, LoopFunc],
    plan: HostPlan,
    target: Target,
    symbols: Mapping[str, int],
    opt_level: int,
) -> CompiledCode:
    """Machine code of objects that `build` made of the same model."""
    return CompiledCode(
        images,
        exports,
        symbols,
        target,
        lambda: optimised(whole_program(loops, plan, target), target, opt_level),
    )


def _text(module: ll.Module) -> str:
    """The text of a module, which is taken apart: its parts refer to one another, so
    only the garbage collector would free them, and slowly.
    """
    text = str(module)
    for function in module.functions:
        for block in function.blocks:
            for instruction in (*block.instructions, block.terminator):
                if not isinstance(instruction, SourceLine) and instruction is not None:
                    vars(instruction).clear()
            vars(block).clear()
        for argument in function.args:
            vars(argument).clear()
        vars(function).clear()
    vars(module).clear()
    return text


def _disk() -> cache.DiskCache | None:
    """The disk cache; None if the generator's hash, part of all keys, is unknown."""
    return None if toolchain() is None else cache.disk()


def _known(units: Mapping[str, Unit]) -> dict[str, bytes]:
    """Object code that needs no LLVM."""
    found: dict[str, bytes] = {}
    disk = _disk()
    for key in units:
        image = memo.get(key)
        if image is None and disk is not None:
            image = disk.get(key)
            if image is not None:
                memo.put(key, image)
        if image is not None:
            found[key] = image
    return found


def _keep(images: Mapping[str, bytes]) -> None:
    disk = _disk()
    for key, image in images.items():
        memo.put(key, image)
        if disk is not None:
            disk.put(key, image, "object code")


def _object(
    text: str, target: Target, opt_level: int, allowed: frozenset[str]
) -> bytes:
    return object_code(optimised(text, target, opt_level), target, opt_level, allowed)
