"""Object code -> machine code in this process."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ll

from pliant import knobs
from pliant.backend.objects import (
    assembly_text,
    object_code,
    optimised,
    target_machine,
)
from pliant.errors import InternalError
from pliant.machine.target import Target

_numbers = itertools.count()


class CompiledCode:
    """Machine code, alive as long as this object is.

    `images` are linked to one another and to `symbols`, the addresses they may call;
    they are kept, to be written to a file.
    `exports` are the functions that `address` can find. `listing` makes the optimised
    module of the code, for reading.
    """

    def __init__(
        self,
        images: Iterable[bytes],
        exports: Collection[str],
        symbols: Mapping[str, int],
        target: Target,
        listing: Callable[[], Any],
    ) -> None:
        self.images, self.target, self._listing = tuple(images), target, listing
        self._jit = llvm.create_lljit_compiler(
            target_machine(target), use_jit_link=True, suppress_errors=False
        )
        library = llvm.JITLibraryBuilder()
        for image in self.images:
            library.add_object_img(image)
        library.add_current_process()
        for name, address in symbols.items():
            library.import_symbol(name, address)
        for name in exports:
            library.export_symbol(name)
        self.exports = frozenset(exports)
        try:
            self._tracker = library.link(self._jit, f"pliant.{next(_numbers)}")
        except RuntimeError as error:
            raise InternalError("jit", f"code cannot be linked: {error}") from None
        # In this order: the JIT owns the code. Not at exit: a daemon thread may still
        # be running the code, and the process ends anyway.
        weakref.finalize(self, _free, self._tracker, self._jit).atexit = False

    def address(self, name: str) -> int:
        """Where an exported function starts; KeyError if there is none."""
        if name not in self.exports:
            raise KeyError(name)
        return int(self._tracker[name])

    @cached_property
    def _text(self) -> str:
        return assembly_text(self._listing(), self.target, 2)

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
    return assembly_text(module, target, level)
