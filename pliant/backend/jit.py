"""LLVM IR -> machine code: objects for any target, and code in this process.

The pipeline is LLVM's function simplification (SROA, CSE, instcombine, LICM, GVN,
simplifycfg, ...) after inlining what asks for it. Loop and SLP vectorisation and
unrolling stay off: the loop IR already says which loops run by lanes.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, lru_cache
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
_initialised: set[str] = set()


class CompiledCode:
    """Machine code, alive as long as this object is.

    `images` are linked to one another and to `symbols`, the addresses they may call;
    `exports` are the functions that have an address from here. `listing` makes the
    optimised module that the code stands in, when somebody wants to read it.
    """

    def __init__(
        self,
        images: Iterable[bytes],
        exports: Collection[str],
        symbols: Mapping[str, int],
        target: Target,
        listing: Callable[[], Any],
    ) -> None:
        self._target, self._listing = target, listing
        self._jit = llvm.create_lljit_compiler(
            target_machine(target), use_jit_link=True, suppress_errors=False
        )
        library = llvm.JITLibraryBuilder()
        for image in images:
            library.add_object_img(image)
        library.add_current_process()
        for name, address in symbols.items():
            library.import_symbol(name, address)
        for name in exports:
            library.export_symbol(name)
        self._names = frozenset(exports)
        try:
            self._tracker = library.link(self._jit, f"pliant.{next(_numbers)}")
        except RuntimeError as error:
            raise InternalError("jit", f"code cannot be linked: {error}") from None
        # In this order: the code belongs to the JIT. Not at exit: a daemon thread may
        # be running the code, and the process ends anyway.
        weakref.finalize(self, _free, self._tracker, self._jit).atexit = False

    def address(self, name: str) -> int:
        """Where an exported function starts; KeyError if there is none."""
        if name not in self._names:
            raise KeyError(name)
        return int(self._tracker[name])

    @cached_property
    def _text(self) -> str:
        return str(target_machine(self._target).emit_assembly(self._listing()))

    def assembly(self) -> str:
        """The machine code as text."""
        return self._text

    def llvm_ir(self) -> str:
        """The module after optimisation."""
        return str(self._listing())


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
    given = symbols or {}
    level = knobs.OPT_LEVEL.get() if opt_level is None else opt_level
    module = optimised(source, target, level)
    image = object_code(module, target, level, given)
    exports = [
        f.name
        for f in module.functions
        if not f.is_declaration and f.linkage == llvm.Linkage.external
    ]
    return CompiledCode([image], exports, given, target, lambda: module)


def assembly(
    source: ll.Module | str, target: Target, opt_level: int | None = None
) -> str:
    """The machine code of a module as text, for any target."""
    level = knobs.OPT_LEVEL.get() if opt_level is None else opt_level
    module = optimised(source, target, level)
    return str(target_machine(target, level).emit_assembly(module))


def object_code(
    module: Any, target: Target, opt_level: int, symbols: Collection[str]
) -> bytes:
    """The object code of an optimised module, which may call `symbols`.

    Generated code calls no library; a call that LLVM made up would be our bug.
    """
    for function in module.functions:
        name = function.name
        outside = function.is_declaration and not name.startswith("llvm.")
        if outside and name not in LIBC_SYMBOLS and name not in symbols:
            raise InternalError("jit", f"generated code calls '{name}', not given")
    return bytes(target_machine(target, opt_level).emit_object(module))


def optimised(source: ll.Module | str, target: Target, opt_level: int) -> Any:
    """LLVM's form of a module, after the pass pipeline."""
    _initialise(target.triple)
    module = llvm.parse_assembly(str(source))
    module.triple = target.triple
    if opt_level == 0:
        return module
    tuning, inline, simplify = _pipeline(target, opt_level)
    machine = target_machine(target, opt_level)
    # A pass builder of its own for each run: a run leaves callbacks behind in its
    # builder, and all that are there are called around every pass of the next run.
    inline.run(module, llvm.create_pass_builder(machine, tuning))
    for function in module.functions:
        if not function.is_declaration:
            simplify.run(function, llvm.create_pass_builder(machine, tuning))
    return module


@lru_cache(maxsize=16)
def target_machine(target: Target, opt_level: int = 2) -> Any:
    """An LLVM target machine with the target's features, all of them spelled out."""
    _initialise(target.triple)
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu,
        features=target.feature_text,
        opt=opt_level,
        reloc="pic",
        codemodel="small",
        jit=True,
    )


@lru_cache(maxsize=8)  # llvmlite frees a pass manager only in part
def _pipeline(target: Target, opt_level: int) -> tuple[Any, Any, Any]:
    """Options, the passes over a module, and those over each of its functions."""
    tuning = llvm.create_pipeline_tuning_options(opt_level)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    tuning.loop_unrolling = tuning.loop_interleaving = False
    passes = llvm.create_pass_builder(target_machine(target, opt_level), tuning)
    inline = llvm.create_new_module_pass_manager()
    inline.add_always_inliner_pass()
    inline.add_global_dead_code_eliminate_pass()
    return tuning, inline, passes.getFunctionPassManager()


def _initialise(triple: str) -> None:
    """Makes LLVM's back end for a triple ready: this machine's, or all there are."""
    native = triple == llvm.get_default_triple()
    wanted = "native" if native else "all"
    with _lock:
        if wanted in _initialised:
            return
        if native:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
        else:
            llvm.initialize_all_targets()
            llvm.initialize_all_asmprinters()
        _initialised.add(wanted)
