"""Compiled models -> a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pliant.artifact import container
from pliant.artifact.codec import Unstorable, encode_plain
from pliant.artifact.link import LinkedImage, link
from pliant.artifact.stored import (
    EntryPoints,
    StoredModel,
    StoredProgram,
    StoredSignature,
    StoredTraining,
    StoredVariant,
    StoredWeight,
)
from pliant.artifact.write import StoredWeights, write_model
from pliant.errors import ArtifactError
from pliant.frontend.signature import Parameters, Signature, StoredCall, TensorSlot
from pliant.image.parts import DLPACK, ModelImage, PeakTerms
from pliant.ir.types import DType
from pliant.machine import features
from pliant.machine.target import Target
from pliant.program import HOST_FUNCTIONS, Code, Program
from pliant.runtime.binding import ABI_VERSION
from pliant.runtime.imports import is_import

_UNSIGNED = DLPACK[DType.U16][0]


@dataclass(frozen=True, slots=True)
class SavedProgram:
    """What of a compiled program goes into a file."""

    program: Program
    image: ModelImage
    signature: Signature
    weights: Sequence[np.ndarray]
    peak: PeakTerms
    explanation: str


@dataclass(frozen=True, slots=True)
class SavedVariant:
    """The programs of a model for one target: the first, then those for other paths."""

    programs: Sequence[SavedProgram]

    @property
    def target(self) -> Target:
        return self.programs[0].program.code.machine.target


def save(
    path: Path,
    variants: Sequence[SavedVariant],
    buffers: Mapping[str, np.ndarray],
    memory_limit: int | None,
    version: str,
    training: StoredTraining | None = None,
) -> str:
    """Writes a file, and returns its digest; ArtifactError if that cannot be."""
    tensors: dict[str, np.ndarray] = {}
    add = StoredWeights(tensors)
    best = sorted(variants, key=lambda v: (-v.target.lanes, -len(v.target.features)))
    stored = StoredModel(
        version,
        memory_limit,
        tuple((name, add(array)) for name, array in buffers.items()),
        tuple(_variant(v, number, tensors, add) for number, v in enumerate(best)),
        training,
    )
    return write_model(path, stored, tensors)


def _variant(
    variant: SavedVariant,
    number: int,
    tensors: dict[str, np.ndarray],
    add: Callable[[np.ndarray], StoredWeight],
) -> StoredVariant:
    target = variant.target
    architecture = target.triple.split("-")[0]
    if architecture != "x86_64":
        raise ArtifactError(
            f"code for {architecture} cannot be saved yet, only that for x86_64"
        )
    wanted = features.needed(target.features)
    unknown = features.lacking(wanted)
    if unknown:
        raise ArtifactError(
            f"whether a machine has {', '.join(unknown)} cannot be told without LLVM: "
            "compile the model for a class of machine, such as Target avx2"
        )
    codes = [code for saved in variant.programs for code in _codes(saved.program)]
    linked = link([code.machine.images for code in codes])
    outside = sorted({name for _, name in linked.imports if not is_import(name)})
    if outside:
        raise ArtifactError(
            f"the model calls {', '.join(outside)} of a library that this process has "
            "loaded: such a model cannot be saved"
        )
    tensors[f"{container.CODE}{number}"] = np.frombuffer(linked.content, np.uint8)
    exports = iter(range(len(codes)))
    programs = tuple(
        _program(saved, linked, [next(exports) for _ in _codes(saved.program)], add)
        for saved in variant.programs
    )
    return StoredVariant(
        target.name,
        architecture,
        wanted,
        ABI_VERSION,
        f"{container.CODE}{number}",
        linked.code_bytes,
        linked.pointers,
        linked.imports,
        programs,
    )


def _codes(program: Program) -> list[Code]:
    """The code of each part, and of what plans the most that the next one takes."""
    made: list[Code] = []
    for part in program.parts():
        made += [part.code] if part.rest is None else [part.code, part.rest.bound]
    return made


def _program(
    saved: SavedProgram,
    linked: LinkedImage,
    groups: Sequence[int],
    add: Callable[[np.ndarray], StoredWeight],
) -> StoredProgram:
    found = [
        EntryPoints(*(linked.exports[group][name] for name in HOST_FUNCTIONS))
        for group in groups
    ]
    # Behind the code of a part is the bound of the next.
    bounds = (None, *found[1::2])
    entries = tuple(zip(found[::2], bounds, strict=True))
    image, signature = _with_bits(saved.image, saved.signature)
    return StoredProgram(
        image,
        _signature(signature),
        entries,
        tuple(map(add, saved.weights)),
        saved.peak,
        saved.explanation,
    )


def _with_bits(image: ModelImage, signature: Signature) -> tuple[ModelImage, Signature]:
    """Buffers of bf16, which NumPy has not, as integers of 16 bits.

    Code reads and writes the same memory; only the check of a call sees the type.
    """
    names = {h.slot.name for h in signature.held if h.slot.type.dtype is DType.BF16}
    if not names:
        return image, signature
    places = {k for k, slot in enumerate(signature.slots) if slot.name in names}

    def as_bits(slot: TensorSlot) -> TensorSlot:
        if slot.name not in names:
            return slot
        return replace(slot, type=replace(slot.type, dtype=DType.U16))

    parts = []
    for part in image.parts:
        inputs = tuple(
            replace(spec, code=_UNSIGNED) if k in places else spec
            for k, spec in enumerate(part.spec.inputs)
        )
        parts.append(replace(part, spec=replace(part.spec, inputs=inputs)))
    arguments = tuple(
        as_bits(slot) if isinstance(slot, TensorSlot) else slot
        for slot in signature.arguments
    )
    held = tuple(replace(h, slot=as_bits(h.slot)) for h in signature.held)
    return (
        replace(image, parts=tuple(parts)),
        replace(signature, arguments=arguments, held=held),
    )


def _signature(signature: Signature) -> StoredSignature:
    call = signature.stored
    if call is None:
        raise ArtifactError(
            "the model takes or returns containers or element types that only the "
            "library it came from knows: it cannot be saved; wrap it in a module that "
            "takes and returns tensors, tuples, lists and dicts"
        )
    own = len(signature.arguments) - len(signature.held)
    return StoredSignature(
        signature.arguments[:own],
        signature.results,
        replace(call, parameters=_parameters(call)),
        signature.direct_but_held if signature.held else signature.positional,
        signature.plain,
        signature.seed,
        signature.draw is not None,
        signature.changed,
        signature.held,
        signature.stores,
        signature.written,
        signature.grows,
        signature.layouts,
    )


def _parameters(call: StoredCall) -> Parameters:
    """Without defaults that are not plain values: no call can pass these."""
    defaults: dict[str, object] = {}
    for name, value in call.parameters.defaults.items():
        try:
            encode_plain(value)
        except Unstorable:
            continue
        defaults[name] = value
    return replace(call.parameters, defaults=defaults)
