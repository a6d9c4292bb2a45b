"""Every error a user can see. A user's mistake and a bug of ours are never mixed.

`PliantError` is the root. All but `InternalError` say what failed, where, which
shapes or symbols are involved, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class PliantError(Exception):
    """Root of all errors raised by pliant."""


@dataclass(frozen=True, slots=True)
class UnsupportedOp:
    """One op that no stage can translate, and where the model uses it."""

    name: str
    reason: str
    loc: str


class UnsupportedOpError(PliantError):
    """The model uses ops that pliant cannot compile; lists all of them."""

    def __init__(self, ops: Sequence[UnsupportedOp]) -> None:
        self.ops = tuple(ops)
        lines = [f"  {op.name}: {op.reason}\n      at {op.loc}" for op in self.ops]
        super().__init__(
            f"{len(self.ops)} op(s) of this model are not supported:\n"
            + "\n".join(lines)
            + "\nRewrite these places with supported ops, or compile the part of the "
            "model around them."
        )


class OptionError(PliantError, ValueError):
    """What was asked of `compile`, or a memory limit, makes no sense."""


class StepChangedError(OptionError):
    """A step's model or optimizer is not what it was compiled for: compile again."""


class ShapeError(PliantError):
    """An input's size breaks what the model was compiled for."""

    def __init__(
        self,
        message: str,
        *,
        input: str | None = None,
        dim: int | None = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        self.input, self.dim, self.expected, self.got = input, dim, expected, got
        super().__init__(message)


class DTypeError(PliantError):
    """An input has the wrong element type, device or kind."""

    def __init__(
        self,
        message: str,
        *,
        input: str | None = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        self.input, self.expected, self.got = input, expected, got
        super().__init__(message)


class WeightError(PliantError):
    """The weights that a compiled model follows are not what it was compiled for."""

    def __init__(
        self, message: str, *, name: str, expected: object = None, got: object = None
    ) -> None:
        self.name, self.expected, self.got = name, expected, got
        super().__init__(message)


class GradientWarning(UserWarning):
    """An input needs a gradient, which a compiled model does not give."""


class SizeTextWarning(UserWarning):
    """The model's code makes a text of a size, which is a symbol while it is traced."""


class IndexRangeError(PliantError, IndexError):
    """A value used as an index (a token id, say) is outside the indexed axis."""


class DivisionError(PliantError, ZeroDivisionError):
    """An integer was to be divided by 0, or its remainder taken."""


class MatrixError(PliantError, RuntimeError):
    """A matrix cannot be factorized: it is singular, or not positive-definite."""


DATA_ERRORS: Mapping[str, type[PliantError]] = {
    "index": IndexRangeError,
    "division": DivisionError,
    "size": ShapeError,
    "matrix": MatrixError,
}


class MemoryLimitError(PliantError):
    """The call cannot run inside the memory limit, or the budget of the process.

    `least` is the least peak that any plan for these dims reaches, `largest` the
    largest value of each dim, the others as they are, for which some plan fits. If the
    call would fit the budget but not beside what others hold, `in_use` is that, and
    `least` what the call's plan needs.
    """

    def __init__(
        self,
        message: str,
        *,
        limit: int,
        least: int,
        largest: Mapping[str, int] | None = None,
        in_use: int | None = None,
    ) -> None:
        self.limit, self.least, self.in_use = limit, least, in_use
        self.largest = dict(largest or {})
        super().__init__(message)


class SpillError(PliantError, OSError):
    """The file for buffers that the memory limit leaves no room for has failed.

    All its room is taken before a call starts, so a full disk refuses the call, and
    nothing has changed. `began` says that the disk failed after that: what a training
    step updates may then be new in part.
    """

    began: bool = False


class ArtifactError(PliantError):
    """A saved model cannot be read, or does not fit this machine."""


class ModelError(ArtifactError):
    """A model file of another program is damaged, or breaks the rules of its format."""


class InternalError(PliantError):
    """A bug of ours: names the stage, and how to report it."""

    def __init__(self, stage: str, detail: str) -> None:
        self.stage, self.detail = stage, detail
        super().__init__(
            f"internal error in stage '{stage}': {detail}\n"
            "This is a bug in pliant. Run again with PLIANT_DUMP=<folder> set and "
            "report the files written there."
        )
