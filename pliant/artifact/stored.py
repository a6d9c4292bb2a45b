"""The plan of a saved model: what it is, as values that `codec.py` writes and reads.

StoredModel     versions of the model for classes of machine, and its state
StoredVariant   the programs for one of them, and their code
StoredTraining  what a training step has beside its tensors
StoredProgram   a program: image, signature, weights, entry points, reports
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pliant.errors import OptionError
from pliant.frontend.signature import (
    Held,
    Result,
    Signature,
    Slot,
    StoredCall,
)
from pliant.frontend.structure import unflattener
from pliant.image.parts import ModelImage, PeakTerms
from pliant.sym import Expr

if TYPE_CHECKING:
    from pliant.program import Program


@dataclass(frozen=True, slots=True)
class StoredSignature:
    """A `Signature` without its functions; arguments are those of the caller."""

    arguments: tuple[Slot, ...]
    results: tuple[Result, ...]
    call: StoredCall
    positional: bool
    plain: bool
    seed: str | None
    draws: bool
    changed: tuple[str, ...]
    held: tuple[Held, ...]
    stores: tuple[tuple[str, int], ...]
    written: tuple[int, ...]
    grows: tuple[tuple[int, str], ...]
    layouts: tuple[tuple[int, tuple[Expr, ...]], ...]

    def signature(self) -> Signature:
        return Signature(
            self.arguments,
            self.results,
            self.call.flatten,
            unflattener(self.call.nesting.results),
            self.positional,
            self.plain,
            seed=self.seed,
            changed=self.changed,
            held=self.held,
            stores=self.stores,
            draw=draw_seed if self.draws else None,
            written=self.written,
            grows=self.grows,
            layouts=self.layouts,
            stored=self.call,
        )


def draw_seed() -> Any:
    """From torch's generator if torch is there, else from NumPy's."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return np.array(np.random.randint(-(2**63), 2**63 - 1, dtype=np.int64))
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty((), dtype=torch.int64).random_(-(2**63), None)


@dataclass(frozen=True, slots=True)
class EntryPoints:
    """Offsets of a part's three functions in the image of the code."""

    run: int
    sizes: int
    bind: int


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor of the file, and how to tell that it is not damaged."""

    tensor: str
    checksum: str  # hexadecimal
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredProgram:
    image: ModelImage
    signature: StoredSignature
    entries: tuple[tuple[EntryPoints, EntryPoints | None], ...]  # as LoadedCode.parts
    weights: tuple[StoredWeight, ...]
    peak: PeakTerms
    explanation: str


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """The model for all machines that have some features."""

    target: str
    architecture: str
    features: tuple[str, ...]  # that a machine must have
    abi: int  # of the runtime that the code calls
    code: str  # tensor
    code_bytes: int
    pointers: tuple[tuple[int, int], ...]
    imports: tuple[tuple[int, str], ...]
    programs: tuple[StoredProgram, ...]


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Parameters that an optimizer updates alike."""

    rule: Literal["sgd", "adam", "adamw"]
    names: tuple[str, ...]
    options: Mapping[str, object]
    steps: int  # taken so far


@dataclass(frozen=True, slots=True)
class StoredTraining:
    """What a training step has beside its tensors, which are the model's buffers."""

    groups: tuple[StoredGroup, ...]
    width: int  # of a row of numbers
    clip: float | None
    seed: str | None  # the parameter that random numbers follow from
    generator: tuple[int, ...]  # state of the Mersenne Twister that draws the seeds


@dataclass(frozen=True, slots=True)
class StoredModel:
    version: str  # of the pliant that wrote it
    memory_limit: int | None
    buffers: tuple[tuple[str, StoredWeight], ...]  # that calls change, by name
    variants: tuple[StoredVariant, ...]  # the best one first
    training: StoredTraining | None = None


@dataclass(frozen=True, slots=True)
class StoredReport:
    """What is known of a model that was loaded: see `model/describing.py`."""

    terms: PeakTerms
    explanation: str
    seconds: Mapping[str, float]
    kernels_built: int = 0
    kernels_cached: int = 0

    @property
    def program(self) -> Program | None:
        return None

    def explain(self, threads: int, dims: Mapping[str, int] | None) -> str:
        """As it was when the model was saved, for the threads that it had then."""
        if dims is not None:
            raise OptionError(
                "a model that was loaded from a file does not tell how products are "
                "cut: call explain() without dims, or on the model that was saved"
            )
        return self.explanation

    def peak(self) -> PeakTerms:
        return self.terms
