"""A compiled program as the running model needs it: frozen values, and no compiler.

    ModelImage   the parts of a program, in the order in which they run
    PartImage    what the C runtime takes, and the words for errors and reports
    LoadedCode   where the functions of the parts are in this process

`image/make.py` makes it of a `Program`; `pliant/artifact` writes it to a file and reads
it again. A running model (`pliant/model`) is built from it in either case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pliant.ir.types import DType, TensorType
from pliant.runtime.description import ModelSpec
from pliant.sym import Expr
from pliant.sym.rules import Found, SizeCheck, SizeRules

# DLPack type codes: (code, bits).
DLPACK: dict[DType, tuple[int, int]] = {
    DType.F64: (2, 64),
    DType.F32: (2, 32),
    DType.F16: (2, 16),
    DType.BF16: (4, 16),
    DType.I64: (0, 64),
    DType.I32: (0, 32),
    DType.I16: (0, 16),
    DType.I8: (0, 8),
    DType.U64: (1, 64),
    DType.U32: (1, 32),
    DType.U16: (1, 16),
    DType.U8: (1, 8),
    DType.BOOL: (6, 8),
}
_OURS = {theirs: ours for ours, theirs in DLPACK.items()}


@dataclass(frozen=True, slots=True)
class ChunkText:
    """A step that runs in chunks: the knob of its rows, and how many rows there are."""

    knob: int
    extent: Expr


@dataclass(frozen=True, slots=True)
class StepText:
    """A step for reports: its kernel, and the line of the model that asks for it."""

    kernel: str
    loc: str
    chunk: ChunkText | None = None


@dataclass(frozen=True, slots=True)
class BufferText:
    """A value in the arena."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class ResultText:
    """The memory of one or several results; `pinned` is its number among objects."""

    name: str
    type: str
    bytes: Expr
    pinned: int | None


@dataclass(frozen=True, slots=True)
class PartImage:
    """One part of a program.

    `spec` has no threads, limit or spill folder, which are those of the process that
    runs it. Its indices are into `table`.
    """

    spec: ModelSpec
    bound: ModelSpec | None  # plans the most that it takes; None: the first part
    rules: SizeRules
    least: tuple[int, ...]  # smallest value of each symbol
    knobs: tuple[str, ...]
    table: Sequence[Expr]
    checks: Sequence[SizeCheck]
    faults: Sequence[tuple[str, str]]  # of data: the kind of error, and its message
    found: tuple[Found, ...]  # the sizes that it finds, its first results
    steps: Sequence[StepText]
    buffers: Sequence[BufferText]
    results: Sequence[ResultText]
    weights: int  # how many constants it reads
    stamps: int  # words for the times of its kernels; 0: it is not profiled
    kernels: int
    kernel_calls: int

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.rules.symbols

    @property
    def output_types(self) -> tuple[TensorType, ...]:
        """The types of its results, in their order."""
        return tuple(
            TensorType(
                _OURS[o.code, o.bits],
                tuple(self.table[o.dim_index : o.dim_index + o.rank]),
            )
            for o in self.spec.outputs
        )


@dataclass(frozen=True, slots=True)
class ModelImage:
    parts: tuple[PartImage, ...]

    @property
    def found(self) -> tuple[Found, ...]:
        """The sizes that data decide, in the order in which they are found."""
        return tuple(size for part in self.parts for size in part.found)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the three functions of a part start."""

    run: int
    sizes: int
    bind: int


@dataclass(frozen=True, slots=True)
class LoadedCode:
    """The functions of each part, and of what plans the most that it takes.

    `owner` keeps the machine code in memory.
    """

    parts: tuple[tuple[Addresses, Addresses | None], ...]
    owner: object


# Live bytes at moments that could be the peak, of each order of each part.
PeakTerms = tuple[tuple[Sequence[Expr], ...], ...]
