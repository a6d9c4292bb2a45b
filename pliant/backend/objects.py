"""LLVM IR -> object code, for any target and by several threads at once.

The pipeline is short: functions marked for it are inlined, allocas become registers
(SROA), branches and expressions are simplified. What LLVM's longer one would find in
other code is not in ours: the loop IR says which loops run by lanes or are unrolled,
and the code generator computes an expression once and before the loops in which it does
not change (`codegen/builder.py`).

LLVM can run on several threads that share no context, target machine or pass manager,
but llvmlite holds a global lock. So every module has its own context and every run its
own compiler, and the two long calls (optimise a function, emit a module) bypass
llvmlite's lock. The many short ones do not.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ll

from pliant.errors import InternalError
from pliant.machine.target import Target

_lock = threading.Lock()
_initialised: set[str] = set()


@dataclass(frozen=True, slots=True)
class Compiler:
    """What one thread at a time compiles with."""

    machine: Any
    tuning: Any
    inline: Any  # passes over a module
    simplify: Any  # passes over a function


def optimised(source: ll.Module | str, target: Target, opt_level: int) -> Any:
    """LLVM's form of a module, after the pass pipeline."""
    with _compiler(target, opt_level) as compiler:
        module = llvm.parse_assembly(str(source), llvm.create_context())
        module.triple = target.triple
        if opt_level > 0:
            _simplify(module, compiler)
        return module


def object_code(
    module: Any, target: Target, opt_level: int, symbols: Collection[str]
) -> bytes:
    """The object code of an optimised module, which may call `symbols`.

    Generated code calls no library; a call that LLVM introduced would be our bug.
    """
    for function in module.functions:
        name = function.name
        outside = function.is_declaration and not name.startswith("llvm.")
        if outside and name not in symbols:
            raise InternalError("jit", f"generated code calls '{name}', not given")
    with _compiler(target, opt_level) as compiler:
        return _emit(module, compiler)


def assembly_text(module: Any, target: Target, opt_level: int) -> str:
    """The machine code of an optimised module, for reading."""
    with _compiler(target, opt_level) as compiler:
        return str(compiler.machine.emit_assembly(module))


def target_machine(target: Target, opt_level: int = 2) -> Any:
    """An LLVM target machine with the target's features, all of them listed."""
    _initialise(target.triple)
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu,
        features=target.feature_text,
        opt=opt_level,
        reloc="pic",
        codemodel="small",
        jit=True,
    )


_idle: dict[tuple[Target, int], list[Compiler]] = {}


@contextmanager
def _compiler(target: Target, opt_level: int) -> Iterator[Compiler]:
    """A compiler that no other thread uses.

    They are kept, because llvmlite frees pass managers only in part.
    """
    with _lock:
        free = _idle.setdefault((target, opt_level), [])
        compiler = free.pop() if free else None
    if compiler is None:
        compiler = _make(target, opt_level)
    try:
        yield compiler
    finally:
        with _lock:
            free.append(compiler)


def _make(target: Target, opt_level: int) -> Compiler:
    machine = target_machine(target, opt_level)
    tuning = llvm.create_pipeline_tuning_options(opt_level)
    inline = llvm.create_new_module_pass_manager()
    inline.add_always_inliner_pass()
    inline.add_global_dead_code_eliminate_pass()
    simplify = llvm.create_new_function_pass_manager()
    simplify.add_sroa_pass()
    simplify.add_simplify_cfg_pass()
    simplify.add_instruction_combine_pass()
    simplify.add_simplify_cfg_pass()
    return Compiler(machine, tuning, inline, simplify)


def _simplify(module: Any, compiler: Compiler) -> None:
    # Each run has its own pass builder: a run leaves callbacks in its builder, and all
    # of them would be called around every pass of the next run.
    compiler.inline.run(
        module, llvm.create_pass_builder(compiler.machine, compiler.tuning)
    )
    run = _unlocked("LLVMPY_RunNewFunctionPassManager")
    for function in module.functions:
        if not function.is_declaration:
            passes = llvm.create_pass_builder(compiler.machine, compiler.tuning)
            run(compiler.simplify, function, passes)


def _emit(module: Any, compiler: Compiler) -> bytes:
    """Like llvmlite's TargetMachine.emit_object, without its lock."""
    lib = llvm.ffi.lib
    emit = _unlocked("LLVMPY_TargetMachineEmitToMemory")
    with llvm.ffi.OutputString() as message:
        buffer = emit(compiler.machine, module, 1, message)
        if not buffer:
            raise InternalError("jit", f"no object code: {message}")
    try:
        start, size = (
            lib.LLVMPY_GetBufferStart(buffer),
            lib.LLVMPY_GetBufferSize(buffer),
        )
        return ctypes.string_at(start, size)
    finally:
        lib.LLVMPY_DisposeMemoryBuffer(buffer)


def _unlocked(name: str) -> Any:
    """A function of llvmlite's library; with the lock if that cannot be avoided."""
    function = getattr(llvm.ffi.lib, name)
    return getattr(function, "_cfn", function)


def _initialise(triple: str) -> None:
    """Initialises LLVM's back end for a triple: this machine's, or all of them."""
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
