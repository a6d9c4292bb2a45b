"""Units of compilation: what becomes one piece of object code, and its name for ever.

A loop function is a unit, and the host functions of a model are two or three. A unit's
key is a hash of all that its code depends on: the text of what it is emitted from, the
units it calls, the target, LLVM, and the files of the code generator. So object code is
found by its key, in this process or in a later one, without any LLVM IR being built.

In object code a loop function is called by its kind and key (`matmul.04f1..`), so that
the same kernel in two models is the same object, and what one model numbers matmul_0
and another matmul_7 never meets under a wrong name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import llvmlite
import llvmlite.binding as llvm
import llvmlite.ir as ll

from pliant.cache import hashed
from pliant.codegen.host import (
    BIND,
    RUN,
    SIZES,
    STEP,
    emit_calls,
    emit_sizes,
    emit_steps,
)
from pliant.codegen.host_plan import HostCall, HostPlan
from pliant.codegen.llvm import emit_loop_function, emit_loop_functions
from pliant.codegen.sources import files_hash
from pliant.ir.callees import callees, reached
from pliant.ir.identity import PerObject
from pliant.ir.loop_walk import walk
from pliant.ir.loops import Load, LoopFunc, Store
from pliant.ir.text import print_loop
from pliant.machine.target import Target

_NUMBER = re.compile(r"(_\d+)?_*$")
_DIGITS = 20  # of the key, in a symbol
# What decides how a loop function becomes LLVM IR, and that machine code.
_GENERATOR = (
    *("pliant.codegen", "pliant.backend", "pliant.sym"),
    *("pliant.ir.loops", "pliant.ir.loop_walk", "pliant.ir.loop_lanes"),
    *("pliant.ir.types", "pliant.machine.target"),
)
# Read when they are imported: files that change later are not what runs here.
_FILES = files_hash(_GENERATOR)


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of object code: its key, and how to make it."""

    key: str
    size: int  # of the text it is emitted from
    symbols: tuple[str, ...]  # what it defines
    calls: frozenset[str]  # what it calls, of other units and libraries
    emit: Callable[[], ll.Module]
    opt_level: int


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model: its loop functions by name, and its host flow.

    `sizes` runs once per new shape and is one long sequence of integer arithmetic, and
    `steps` are those that only versions for little memory have, so they are compiled
    without optimisation: that would take longer than it saves.
    """

    kernels: Mapping[str, Unit]
    calls: Unit
    steps: Unit | None  # if versions have some of their own
    sizes: Unit

    @property
    def host_symbols(self) -> tuple[str, ...]:
        return (*self.calls.symbols, *self.sizes.symbols)

    def all(self) -> Iterator[Unit]:
        yield from self.kernels.values()
        yield self.calls
        if self.steps is not None:
            yield self.steps
        yield self.sizes


def program_units(
    loops: Mapping[str, LoopFunc], plan: HostPlan, target: Target, opt_level: int
) -> Units:
    """The units of a lowered model; none is emitted yet."""
    context, quick = _Context(target, opt_level), _Context(target, 0)
    often = reached((call.callee for call in plan.own_calls), loops)
    kernels: dict[str, Unit] = {}
    for name in reached(loops, loops):  # callees first
        rare = name not in often and _only_calls(loops[name])
        _loop_unit(name, loops, kernels, quick if rare else context)
    return Units(
        kernels,
        _calls_unit(plan, kernels, context),
        _steps_unit(plan, kernels, quick),
        _sizes_unit(plan, quick),
    )


class _Context:
    """What the units are compiled for."""

    def __init__(self, target: Target, opt_level: int) -> None:
        self.target, self.opt_level = target, opt_level
        self.key = hashed(_target_text(target), str(opt_level), toolchain() or "")


def whole_program(
    loops: Mapping[str, LoopFunc], plan: HostPlan, target: Target
) -> ll.Module:
    """The same code in one module under the names the model gives, for people."""
    module = ll.Module("pliant")
    emit_loop_functions(module, loops.values(), target)
    names = {name: name for name in loops}
    emit_calls(module, plan, names)
    if plan.other_calls:
        emit_steps(module, plan, names)
    emit_sizes(module, plan)
    return module


def _loop_unit(
    name: str,
    loops: Mapping[str, LoopFunc],
    known: dict[str, Unit],
    context: _Context,
) -> Unit:
    if name in known:
        return known[name]
    func = loops[name]
    parts = _print(func)
    symbols: dict[str, str] = {}
    for callee in parts.called:
        (symbols[callee],) = _loop_unit(callee, loops, known, context).symbols
    called = (f"{callee}={symbol}" for callee, symbol in symbols.items())
    key = hashed("loop", context.key, parts.digest, *called)
    symbol = f"{parts.stem}.{key[:_DIGITS]}"
    emit = partial(
        emit_loop_function,
        func,
        tuple(loops[callee] for callee in parts.called),
        {**symbols, name: symbol},
        context.target,
    )
    calls, level = frozenset(symbols.values()), context.opt_level
    known[name] = Unit(key, parts.size, (symbol,), calls, emit, level)
    return known[name]


@dataclass(frozen=True, slots=True)
class _Print:
    """What a loop function's key is made of."""

    stem: str  # its name without a number
    digest: str  # of its text under that name
    size: int  # of that text
    called: tuple[str, ...]


def _printed(func: LoopFunc) -> _Print:
    stem = _NUMBER.sub("", func.name) or "kernel"
    text = print_loop(replace(func, name=stem))
    return _Print(stem, hashed(text), len(text), tuple(sorted(callees(func))))


_print = PerObject(_printed)  # several models share micro-kernels


def _only_calls(func: LoopFunc) -> bool:
    """Whether a function has no elements itself: a chunk's, around its kernels."""
    return not any(isinstance(node, Load | Store) for node in walk(func.body))


def _calls_unit(plan: HostPlan, kernels: Mapping[str, Unit], context: _Context) -> Unit:
    return _steps_of(plan, plan.own_calls, kernels, context, (RUN, BIND), emit_calls)


def _steps_unit(
    plan: HostPlan, kernels: Mapping[str, Unit], context: _Context
) -> Unit | None:
    if not plan.other_calls:
        return None
    return _steps_of(plan, plan.other_calls, kernels, context, (STEP,), emit_steps)


def _steps_of(
    plan: HostPlan,
    steps: tuple[HostCall, ...],
    kernels: Mapping[str, Unit],
    context: _Context,
    defines: tuple[str, ...],
    emit_into: Callable[[ll.Module, HostPlan, Mapping[str, str]], None],
) -> Unit:
    symbols = {name: unit.symbols[0] for name, unit in kernels.items()}
    calls = frozenset(c.callee if c.is_library else symbols[c.callee] for c in steps)
    names = (f"{name}={symbol}" for name, symbol in symbols.items())
    text = plan.text()
    key = hashed(*defines, context.key, text, *names)

    def emit() -> ll.Module:
        module = ll.Module(defines[0])
        emit_into(module, plan, symbols)
        return module

    return Unit(key, len(text), defines, calls | {STEP}, emit, context.opt_level)


def _sizes_unit(plan: HostPlan, context: _Context) -> Unit:
    text = plan.text()
    key = hashed("sizes", context.key, text)

    def emit() -> ll.Module:
        module = ll.Module("sizes")
        emit_sizes(module, plan)
        return module

    return Unit(key, len(text), (SIZES,), frozenset(), emit, context.opt_level)


def _target_text(target: Target) -> str:
    """What of a target the code generator asks; the rest is in the loop functions."""
    asked = (target.triple, target.cpu, target.feature_text)
    return " ".join((*asked, str((target.lanes, target.registers, target.fma))))


def toolchain() -> str | None:
    """LLVM's version, and a hash of the code generator; None if that is unknown."""
    if _FILES is None:
        return None
    version = ".".join(map(str, llvm.llvm_version_info))
    return f"llvmlite {llvmlite.__version__} LLVM {version} pliant {_FILES}"
