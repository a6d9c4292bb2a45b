"""Compiled programs from one process to the next, in the cache on disk (cache.py).

An entry is what the stages and LLVM made of a module, without any weight: the modules
that reports read, the plan of memory, object code, and how each constant is computed
from those of the source. Its key is a hash of all that this depends on: the text of the
imported module, options, target, the files of this package, the versions of Python,
NumPy and LLVM. So a program that is found is the one that would be compiled.

The values of weights are not part of the key. No stage reads them, except to compute
constants, and how that is done is kept as functions (`ir/graph.py::Origin`), which are
called again here. What has one value for ever (`Constant.keep` is None: the literals of
a model, the weights of an ONNX file) is part of the key all the same, by its hash.

Entries are pickles. They are read from folders that nobody else can write, as the
machine code beside them is, and which is run likewise. Saved models, which come from
elsewhere, have a format that cannot do anything (artifact/codec.py).
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache as cache_of
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from pliant import cache, knobs
from pliant.assemble import library_symbols
from pliant.backend.build import built_again
from pliant.cache import DiskCache, hashed
from pliant.codegen.host_plan import HostPlan
from pliant.codegen.sources import files_hash
from pliant.codegen.units import toolchain
from pliant.context import Training
from pliant.interface import Interface
from pliant.ir.graph import Constant, Module, Origin, ordered_origins
from pliant.ir.loops import LoopFunc
from pliant.ir.text import print_module
from pliant.ir.types import TensorType
from pliant.machine import pages
from pliant.machine.target import Target
from pliant.measure.rates import rates
from pliant.options import Instruments, Options
from pliant.program import Code, Footprint, NextProgram, Program
from pliant.runtime.binding import symbols as runtime_symbols
from pliant.sym.rules import Found, InputDims

# Read when this is imported: files that change later are not what runs here.
_FILES = files_hash(("pliant",))

Compiled: TypeAlias = tuple[Program, tuple[Constant, ...]]


# ---- keys


@dataclass(frozen=True, slots=True)
class Source:
    """What a program is compiled from, and for."""

    module: Module
    inputs: InputDims
    numbers: Mapping[str, int]
    options: Options
    target: Target
    training: Training | None
    instruments: Instruments
    stores: tuple[tuple[str, int], ...]

    def key(self) -> str | None:
        """The hash of it all; None if part of it has no text."""
        made = toolchain()
        if _FILES is None or made is None or self.module.plans:
            return None
        if self.training is not None and self.training.key is None:
            return None
        asked = (
            *(self.inputs, sorted(self.numbers.items()), self.options, self.target),
            *(self.instruments, self.stores, rates(self.target)),
            knobs.OPT_LEVEL.get(),
        )
        step = self.training
        trained = step and (step.wrt, step.key, step.updates, step.changed)
        return hashed(
            *("program", _FILES, made, sys.version, np.__version__),
            print_module(self.module.replace(constants={})),
            *(_constant_key(c) for c in self.module.constants.values()),
            *(str(each) for each in (*asked, trained)),
        )


def _constant_key(constant: Constant) -> str:
    key = f"{constant.name}: {constant.type}"
    if constant.keep is not None:
        return key
    return f"{key} {hashed(constant.data.reshape(-1).view(np.uint8).data)}"


# ---- entries


@dataclass(frozen=True, slots=True)
class _KeptCode:
    host: HostPlan
    images: tuple[bytes, ...]
    exports: tuple[str, ...]
    kernels: int

    def code(
        self, loops: Mapping[str, LoopFunc], target: Target, symbols: Mapping[str, int]
    ) -> Code:
        level = knobs.OPT_LEVEL.get()
        machine = built_again(
            self.images, self.exports, loops, self.host, target, symbols, level
        )
        return Code(self.host, machine, 0, self.kernels)


@dataclass(frozen=True, slots=True)
class _KeptPart:
    """A program without those behind it."""

    fused: Module
    lowered: Module
    interface: Interface
    footprint: Footprint
    code: _KeptCode
    found: tuple[Found, ...]
    bound: _KeptCode | None  # of the next part


@dataclass(frozen=True, slots=True)
class _Recipe:
    """An origin: a constant of the source, or made from earlier recipes."""

    given: str
    sources: tuple[int, ...] = ()
    make: Callable[..., np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class _KeptConstant:
    name: str
    type: TensorType
    recipe: int


@dataclass(frozen=True, slots=True)
class _KeptProgram:
    parts: tuple[_KeptPart, ...]
    recipes: tuple[_Recipe, ...]
    constants: tuple[_KeptConstant, ...]


def _kept_code(code: Code) -> _KeptCode:
    machine = code.machine
    count = code.kernels_built + code.kernels_cached
    return _KeptCode(code.host, machine.images, tuple(sorted(machine.exports)), count)


def _entry(source: Source, made: Compiled) -> _KeptProgram | None:
    """None if a constant is neither the source's nor made from those."""
    program, weights = made
    parts = tuple(
        _KeptPart(
            part.fused,
            part.lowered,
            part.interface,
            part.footprint,
            _kept_code(part.code),
            () if part.rest is None else part.rest.found,
            None if part.rest is None else _kept_code(part.rest.bound),
        )
        for part in program.parts()
    )
    given = {c.origin: name for name, c in source.module.constants.items()}
    origins = ordered_origins([c.origin for c in weights])
    numbers = {origin: k for k, origin in enumerate(origins)}
    recipes: list[_Recipe] = []
    for origin in origins:
        if origin not in given and origin.make is None:
            return None
        earlier = tuple(numbers[each] for each in origin.sources)
        recipes.append(_Recipe(given.get(origin, ""), earlier, origin.make))
    constants = (_KeptConstant(c.name, c.type, numbers[c.origin]) for c in weights)
    return _KeptProgram(parts, tuple(recipes), tuple(constants))


def _program(entry: _KeptProgram, target: Target) -> Program:
    """Linked in this process."""
    program: Program | None = None
    for kept in reversed(entry.parts):
        rest = None
        if program is not None and kept.bound is not None:
            code = kept.bound.code({}, target, runtime_symbols())
            rest = NextProgram(kept.found, program, code)
        symbols = runtime_symbols() | library_symbols(kept.lowered)
        program = Program(
            kept.fused,
            kept.lowered,
            kept.interface,
            kept.footprint,
            kept.code.code(kept.lowered.loops, target, symbols),
            {},
            rest,
        )
    assert program is not None
    return program


def _weights(
    entry: _KeptProgram, given: Mapping[str, Constant]
) -> tuple[Constant, ...]:
    """The constants, computed again from those of the source."""
    origins: list[Origin] = []
    data: list[np.ndarray] = []
    own: dict[int, Constant] = {}
    with pages.copying():
        for number, recipe in enumerate(entry.recipes):
            if recipe.make is None:
                own[number] = given[recipe.given]
                origins.append(own[number].origin)
                data.append(own[number].data)
                continue
            sources = tuple(origins[k] for k in recipe.sources)
            origins.append(Origin(sources, recipe.make))
            data.append(recipe.make(*(data[k] for k in recipe.sources)))
    return tuple(
        replace(own[c.recipe], name=c.name, type=c.type)
        if c.recipe in own
        else Constant(c.name, c.type, data[c.recipe], origin=origins[c.recipe])
        for c in entry.constants
    )


# ---- finding and keeping


@dataclass(frozen=True, slots=True)
class ProgramCache:
    """Where one program is, or will be kept."""

    disk: DiskCache
    key: str
    source: Source

    def find(self) -> Compiled | None:
        """The program as it was compiled, with the weights that the source has now."""
        started = perf_counter()
        contents = self.disk.get(self.key)
        entry = None if contents is None else _unpickled(contents)
        if entry is None:
            return None
        program = _program(entry, self.source.target)
        weights = _weights(entry, self.source.module.constants)
        seconds = {"cache": perf_counter() - started}
        return replace(program, seconds=seconds), weights

    def keep(self, made: Compiled) -> bool:
        entry = _entry(self.source, made)
        contents = None if entry is None else _pickled(entry)
        return contents is not None and self.disk.put(self.key, contents, "program")


def place_of(source: Source) -> ProgramCache | None:
    """Where a program is kept; None if it is not: the cache is off, or the texts of the
    stages are wanted."""
    texts = source.instruments.keep_ir or knobs.DUMP.get() is not None
    if not knobs.CACHE_PROGRAMS.get() or texts:
        return None
    disk = cache.disk()
    key = None if disk is None else source.key()
    return None if disk is None or key is None else ProgramCache(disk, key, source)


class _Pickler(pickle.Pickler):
    """Frozen classes with slots as their values: dataclasses are slow at it."""

    def reducer_override(self, value: Any) -> Any:
        kind: Any = type(value)
        if not _is_plain(kind):
            return NotImplemented
        return _restored, (kind, *(getattr(value, name) for name in _slots(kind)))


@cache_of
def _is_plain(kind: Any) -> bool:
    """Whether its fields are all that there is of an object, and it says no more."""
    return (
        is_dataclass(kind)
        and kind.__reduce__ is object.__reduce__
        and kind.__dictoffset__ == 0
    )


@cache_of
def _slots(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache_of
def _setters(kind: Any) -> tuple[Callable[[Any, Any], None], ...]:
    return tuple(getattr(kind, name).__set__ for name in _slots(kind))


def _restored(kind: type, *values: Any) -> Any:
    made: Any = object.__new__(kind)
    for put, value in zip(_setters(kind), values, strict=True):
        put(made, value)
    return made


def _pickled(entry: _KeptProgram) -> bytes | None:
    """None for what cannot be: too deep, or with a part from elsewhere."""
    written = io.BytesIO()
    try:
        _Pickler(written, protocol=5).dump(entry)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
        return None
    return written.getvalue()


def _unpickled(contents: bytes) -> _KeptProgram | None:
    try:
        entry = pickle.loads(contents)
    except Exception:  # whatever has changed that the key does not know of
        return None
    return entry if isinstance(entry, _KeptProgram) else None
