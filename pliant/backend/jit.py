"""LLVM IR -> machine code in this process.

The pipeline is LLVM's function simplification (SROA, CSE, instcombine, LICM, GVN,
simplifycfg, ...) after inlining what asks for it. Loop and SLP vectorisation and
unrolling stay off: the loop IR already says which loops run by lanes.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from time import perf_counter
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ll

from pliant import knobs
from pliant.errors import InternalError
from pliant.target import Target

# LLVM may turn loops into these; the process has them.
LIBC_SYMBOLS = frozenset({"memset", "memcpy", "memmove"})

_numbers = itertools.count()
_lock = threading.Lock()
_initialised = False


@dataclass(frozen=True, slots=True)
class CompileTimes:
    """Seconds spent in each part of `compile_ir`."""

    parse: float
    optimise: float
    generate: float
    link: float

    @property
    def total(self) -> float:
        return self.parse + self.optimise + self.generate + self.link


class CompiledCode:
    """Machine code, alive as long as this object is."""

    def __init__(
        self, module: Any, target: Target, image: bytes, symbols: Mapping[str, int]
    ) -> None:
        self._module, self._target, self.object_code = module, target, image
        self.times = CompileTimes(0.0, 0.0, 0.0, 0.0)
        self._jit = llvm.create_lljit_compiler(
            target_machine(target), use_jit_link=True, suppress_errors=False
        )
        library = llvm.JITLibraryBuilder()
        library.add_object_img(image)
        library.add_current_process()
        for name, address in symbols.items():
            library.import_symbol(name, address)
        _check_symbols(module, symbols)
        self._names = frozenset(
            f.name
            for f in module.functions
            if not f.is_declaration and f.linkage == llvm.Linkage.external
        )
        for name in self._names:
            library.export_symbol(name)
        self._tracker = library.link(self._jit, f"pliant.{next(_numbers)}")
        # In this order: the code belongs to the JIT. Not at exit: a daemon thread may
        # be running the code, and the process ends anyway.
        weakref.finalize(self, _free, self._tracker, self._jit).atexit = False

    def address(self, name: str) -> int:
        """Where a function with external linkage starts; KeyError if there is none."""
        if name not in self._names:
            raise KeyError(name)
        return int(self._tracker[name])

    @cached_property
    def _text(self) -> str:
        return str(target_machine(self._target).emit_assembly(self._module))

    def assembly(self) -> str:
        """The machine code as text."""
        return self._text

    def llvm_ir(self) -> str:
        """The module after optimisation."""
        return str(self._module)


def _check_symbols(module: Any, symbols: Mapping[str, int]) -> None:
    """Generated code calls no library; a call that LLVM made up would be our bug."""
    known = LIBC_SYMBOLS | symbols.keys()
    for function in module.functions:
        name = function.name
        outside = function.is_declaration and not name.startswith("llvm.")
        if outside and name not in known:
            raise InternalError("jit", f"generated code calls '{name}', not given")


def _free(tracker: Any, jit: Any) -> None:
    tracker.close()
    jit.close()


def compile_ir(
    source: ll.Module | str,
    target: Target,
    symbols: Mapping[str, int] | None = None,
    opt_level: int | None = None,
) -> CompiledCode:
    """Compiles a module for this process; `symbols` are the addresses it may call."""
    _initialise()
    level = knobs.OPT_LEVEL.get() if opt_level is None else opt_level
    started = perf_counter()
    module = llvm.parse_assembly(str(source))
    module.triple = target.triple
    parsed = perf_counter()
    optimise(module, target, level)
    optimised = perf_counter()
    image = target_machine(target, level).emit_object(module)
    generated = perf_counter()
    code = CompiledCode(module, target, image, symbols or {})
    code.times = CompileTimes(
        parsed - started,
        optimised - parsed,
        generated - optimised,
        perf_counter() - generated,
    )
    return code


def target_machine(target: Target, opt_level: int = 2) -> Any:
    """An LLVM target machine with the target's features, all of them spelled out."""
    _initialise()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu,
        features=target.feature_text,
        opt=opt_level,
        reloc="pic",
        codemodel="small",
        jit=True,
    )


def optimise(module: Any, target: Target, opt_level: int = 2) -> None:
    """Runs the pass pipeline over a parsed module, in place."""
    if opt_level == 0:
        return
    passes, inline, simplify = _pipeline(target, opt_level)
    inline.run(module, passes)
    for function in module.functions:
        if not function.is_declaration:
            simplify.run(function, passes)


@lru_cache(maxsize=8)  # llvmlite frees a pass builder only in part
def _pipeline(target: Target, opt_level: int) -> tuple[Any, Any, Any]:
    tuning = llvm.create_pipeline_tuning_options(opt_level)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    tuning.loop_unrolling = tuning.loop_interleaving = False
    passes = llvm.create_pass_builder(target_machine(target, opt_level), tuning)
    inline = llvm.create_new_module_pass_manager()
    inline.add_always_inliner_pass()
    inline.add_global_dead_code_eliminate_pass()
    return passes, inline, passes.getFunctionPassManager()


def _initialise() -> None:
    global _initialised
    with _lock:
        if not _initialised:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            _initialised = True
