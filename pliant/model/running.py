"""Runs the calls of a compiled model that need more than its native code.

C code runs a call whose arguments are plain torch tensors (`runtime/python.c`). What it
leaves comes here: nested arguments and results, NumPy arrays, keywords, tensors that
must be copied first, buffers of the model that a call changes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pliant.errors import GradientWarning, PliantError
from pliant.frontend.signature import Signature, SizeSlot, TensorSlot
from pliant.frontend.torch_meaning import check_meaning, plain_tensor
from pliant.model.buffers import BoundBuffers, Buffers, commit, writable
from pliant.model.refusals import Refusals, check_layouts, check_written, unreadable
from pliant.runtime.binding import RuntimeModel
from pliant.runtime.caller import Caller
from pliant.runtime.description import RuntimeStatus, Status

_PACKAGE = str(Path(__file__).parent.parent)
# What flattening, copying or a better message may help with.
_MENDABLE = (Status.KIND, Status.LAYOUT, Status.COUNT)


@dataclass(slots=True)
class Runner:
    """The calls of one compiled program; they change the `buffers`."""

    signature: Signature
    runtime: RuntimeModel
    refusals: Refusals
    buffers: Buffers | None
    is_direct: bool  # as the signature says
    warned: bool = False  # that results have no gradient

    def call(self, model: Caller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model that needs flattening or has no plain torch tensors."""
        buffers = self.buffers
        if buffers is None:
            return self._flat(args, kwargs)
        with buffers.lock:
            bound = buffers.bound = buffers.bind(self.signature)
            try:
                result = self._flat(args, kwargs, bound)
                if self.signature.direct_but_held:
                    rebuild = self.signature.rebuild_direct()
                    buffers.attach(model, self.runtime, rebuild, bound)
                return result
            except BaseException as error:
                # An interrupt may come when the run has ended; nothing is lost if not.
                if not isinstance(error, PliantError) or getattr(error, "began", False):
                    bound.commit()
                raise
            finally:
                buffers.bound = None

    def failed(
        self, args: tuple[Any, ...], status: int, detail: tuple[int, ...]
    ) -> Any:
        """Handles a direct call with wrong arguments, or that failed while it ran."""
        found = Status(status)
        if found not in _MENDABLE:
            raise self.refusals.of_call(RuntimeStatus(found, detail), args)
        flat = self.signature.flatten(args, {})
        result = self._mended(flat)
        return self.signature.rebuild((flat, result), self.refusals.symbols_of)

    def _flat(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound: BoundBuffers | None = None,
    ) -> Any:
        signature = self.signature
        direct = self.is_direct and not kwargs
        own: Sequence[Any] = args if direct else signature.given(args, kwargs)
        flat = signature.opened(list(own)) if signature.grows else own
        given = signature.drawn(flat)
        if signature.layouts:
            signature.check(given)
            check_layouts(signature, flat, self.refusals.symbols_of(given))
        if signature.written:
            check_written(signature, own, flat)
            given = list(given)
            for slot in signature.written:
                given[slot] = writable(given[slot])
        if bound is not None:
            bound.check(signature, flat[: len(flat) - len(bound.given)])
        try:
            result = self.runtime(*given)
        except RuntimeStatus as status:
            if status.status not in _MENDABLE:
                raise self.refusals.of_call(status, given) from None
            if direct:  # a default may be missing, or the count be wrong
                flat = signature.flatten(args, kwargs)
                given = signature.drawn(flat)
            result = self._mended(given)
        for slot in signature.written:
            commit(flat[slot], given[slot])
        if bound is not None:
            bound.commit()
        return signature.rebuild((flat, result), self.refusals.symbols_of, own)

    def _mended(self, flat: Sequence[Any]) -> Any:
        """Checks the arguments, copies what the runtime cannot read, and runs."""
        self.signature.check(flat)
        values: list[Any] = []
        for slot, value in zip(self.signature.slots, flat, strict=True):
            try:
                values.append(self._plain(slot, value))
            except (PliantError, GradientWarning):  # that, where warnings are errors
                raise
            except Exception:  # a tensor class without memory of its own
                raise unreadable(slot, value) from None
        try:
            return self.runtime(*values)
        except RuntimeStatus as status:
            raise self.refusals.of_call(status, values) from None

    def _plain(self, slot: TensorSlot | SizeSlot, value: Any) -> Any:
        """The argument as a tensor or array that its bytes describe completely."""
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            whole = all(stride % array.itemsize == 0 for stride in array.strides)
            return array if whole else array.copy()  # DLPack: strides in elements
        if not hasattr(value, "is_contiguous"):
            return value
        needs_gradient = check_meaning(slot, value)
        if needs_gradient and not self.warned:
            self.warned = True
            warnings.warn(
                f"input '{slot.name}' requires a gradient, and a compiled model gives "
                "none: its results are constants to autograd. Call it under "
                "torch.no_grad() if that is meant; to train, use "
                "pliant.compile_training or torch.compile(backend='pliant')",
                GradientWarning,
                stacklevel=_levels(),
            )
        return plain_tensor(value)


def _levels() -> int:
    """How many frames of this package are on the stack, with the caller's own."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
