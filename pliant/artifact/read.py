"""A file -> what a running model is built from. Needs NumPy and the C runtime alone."""

from __future__ import annotations

import ctypes
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import numpy as np

from pliant.artifact import container
from pliant.artifact.codec import decode
from pliant.artifact.container import Container, damaged
from pliant.artifact.stored import (
    EntryPoints,
    StoredModel,
    StoredProgram,
    StoredSignature,
    StoredVariant,
    StoredWeight,
)
from pliant.errors import ArtifactError, PliantError
from pliant.frontend.signature import FixedSlot, GrownResult, LengthSlot, TensorSlot
from pliant.image.parts import Addresses, LoadedCode
from pliant.machine import features
from pliant.runtime.binding import ABI_VERSION, load
from pliant.runtime.description import ImageDesc, ImageImport, ImagePointer, array
from pliant.runtime.imports import import_address

_LARGE = 1 << 20  # bytes of a tensor that is worth a thread


@dataclass(frozen=True, slots=True)
class OpenArtifact:
    """A file that was checked, with the variant for this machine."""

    file: Container
    model: StoredModel
    variant: StoredVariant

    def weights(self, program: StoredProgram) -> list[np.ndarray]:
        """The arrays that code reads, where the file is mapped."""
        return [self.file.tensor(weight.tensor) for weight in program.weights]

    def buffers(self) -> dict[str, np.ndarray]:
        """Copies of the buffers that calls change."""
        return {
            name: self.file.tensor(weight.tensor).copy()
            for name, weight in self.model.buffers
        }

    def code(self) -> MappedCode:
        return MappedCode(self.file, self.variant)


def open_artifact(
    path: Path,
    digest: str | None,
    check_weights: bool,
    threads: int = 1,
    key: bytes | None = None,
) -> OpenArtifact:
    """Reads and checks a file; with a digest, it must be that of all its content.

    With a key, the file must be signed with it.
    """
    file = container.open_container(path)
    if key is not None:
        container.check_signature(file, key)
    if digest is not None and digest != file.digest:
        raise ArtifactError(
            f"{path} has the digest {file.digest}, and {digest} is expected: it is "
            "another model"
        )
    model = read_plan(file)
    variant = _chosen(path, model.variants)
    used = [w for _, w in model.buffers]
    used += [w for program in variant.programs for w in program.weights]
    distinct = list({weight.tensor: weight for weight in used}.values())
    exactly = digest is not None or key is not None
    _check_weights(file, distinct, check_weights, exactly, threads)
    for program in variant.programs:
        _check_program(path, file, program)
    return OpenArtifact(file, model, variant)


def read_plan(file: Container) -> StoredModel:
    try:
        plan = json.loads(file.plan)
    except (ValueError, RecursionError):
        raise damaged(file.path, "its plan is no JSON") from None
    return decode(StoredModel, plan)


def _chosen(path: Path, variants: Sequence[StoredVariant]) -> StoredVariant:
    """The best variant that this machine runs."""
    here = features.architecture()
    problems: list[str] = []
    for variant in variants:
        lacks = features.lacking(variant.features)
        if variant.architecture != here:
            problems.append(f"{variant.target} is for {variant.architecture}")
        elif lacks:
            problems.append(f"{variant.target} needs {', '.join(lacks)}")
        elif variant.abi != ABI_VERSION:
            problems.append(
                f"{variant.target} calls version {variant.abi} of the runtime, and "
                f"this pliant has {ABI_VERSION}"
            )
        else:
            return variant
    raise ArtifactError(
        f"{path} has no code that runs here ({here}): {'; '.join(problems)}. Save the "
        "model again, for a target that this machine has"
    )


def _check_weights(
    file: Container,
    weights: Sequence[StoredWeight],
    check: bool,
    exactly: bool,
    threads: int,
) -> None:
    """On several threads, since this is most of what loading a large model takes."""
    tensors = [(weight, file.tensor(weight.tensor)) for weight in weights]
    if not check and not exactly:
        return
    tensors.sort(key=lambda pair: pair[1].nbytes)  # popped from the end: largest first
    left = {weight.tensor for weight in weights}  # not proved to be as saved
    problems: list[Exception] = []  # why a check came to no end

    def work() -> None:
        while tensors:
            try:
                weight, tensor = tensors.pop()
            except IndexError:  # another thread was faster
                return
            try:
                if _is_as_saved(weight, tensor, check, exactly):
                    left.discard(weight.tensor)
            except Exception as error:
                problems.append(error)

    large = sum(tensor.nbytes >= _LARGE for _, tensor in tensors)
    others = [Thread(target=work) for _ in range(min(threads, large) - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if problems:
        raise problems[0]
    if left:
        raise damaged(file.path, f"its tensor '{min(left)}' has changed")


def _is_as_saved(
    weight: StoredWeight, tensor: np.ndarray, check: bool, exactly: bool
) -> bool:
    if check and f"{container.checksum(tensor):016x}" != weight.checksum:
        return False
    return not exactly or container.sha256(tensor) == weight.sha256


def _check_program(path: Path, file: Container, program: StoredProgram) -> None:
    """That tables which belong together have one length, and name what there is."""
    parts = program.image.parts
    counts = [part.weights for part in parts]
    good = parts and len(parts) == len(program.entries) == len(program.peak)
    good = good and sum(counts) == len(program.weights)
    first = 0
    for part in parts:
        spec = part.spec
        good = (
            good
            and part.weights >= 0
            and part.stamps >= 0
            and spec.first_weight == first
            and len(part.table) == spec.n_table
            and len(part.steps) == len(spec.steps)
            and len(part.buffers) == len(spec.buffers)
            and len(part.knobs) == len(spec.knobs)
            and len(part.rules.bindings) == len(part.least) == spec.n_symbols
        )
        first += part.weights + (part.stamps > 0)
    bounds = [part.bound is None for part in parts]
    ends = [bound is None for _, bound in program.entries]
    good = good and _is_whole(program.signature)
    if not good or bounds != ends or bounds != [True] + [False] * (len(parts) - 1):
        raise damaged(path, "its tables do not fit together")


def _is_whole(signature: StoredSignature) -> bool:
    """Whether all that a signature says of arguments, by number, is of tensors."""
    slots = [a for a in signature.arguments if not isinstance(a, FixedSlot)]
    slots += [held.slot for held in signature.held]
    lengths = {a.symbol for a in slots if isinstance(a, LengthSlot)}
    grown = {slot for slot, _ in signature.grows}
    results = [r for r in signature.results if isinstance(r, GrownResult)]
    named = [*signature.written, *grown, *(slot for slot, _ in signature.layouts)]
    return (
        all(0 <= k < len(slots) and isinstance(slots[k], TensorSlot) for k in named)
        and {symbol for _, symbol in signature.grows} == lengths
        and all(result.slot in grown for result in results)
    )


class MappedCode:
    """Machine code in memory, as long as this object lives."""

    def __init__(self, file: Container, variant: StoredVariant) -> None:
        content = file.tensor(variant.code)
        pointers = [ImagePointer(*pair) for pair in variant.pointers]
        imports = [
            ImageImport(at, _address(file, name)) for at, name in variant.imports
        ]
        description = ImageDesc(
            bytes=content.ctypes.data,
            code_bytes=variant.code_bytes,
            data_bytes=content.nbytes - variant.code_bytes,
            n_pointers=len(pointers),
            pointers=array(ImagePointer, pointers),
            n_imports=len(imports),
            imports=array(ImageImport, imports),
        )
        self.code_bytes, self.path = variant.code_bytes, file.path
        self.base = load().plt_image_map(ctypes.byref(description))
        if not self.base:
            raise ArtifactError(
                f"the code in {file.path} is malformed, or this system lets no process "
                "make code executable"
            )
        unmap = load().plt_image_unmap
        # Not at exit: a thread may still be running the code.
        weakref.finalize(self, unmap, self.base, content.nbytes).atexit = False

    def of(self, program: StoredProgram) -> LoadedCode:
        parts = tuple(
            (self._addresses(own), None if bound is None else self._addresses(bound))
            for own, bound in program.entries
        )
        return LoadedCode(parts, self)

    def _addresses(self, entries: EntryPoints) -> Addresses:
        offsets = entries.run, entries.sizes, entries.bind
        if not all(0 <= offset < self.code_bytes for offset in offsets):
            raise damaged(self.path, "a function is outside its code")
        return Addresses(*(self.base + offset for offset in offsets))


def _address(file: Container, name: str) -> int:
    try:
        return import_address(name)
    except PliantError as error:
        raise ArtifactError(f"{file.path} cannot be run: {error}") from None


def tensor_bytes(file: Container) -> Mapping[str, int]:
    """The bytes of each tensor, by name."""
    return {name: tensor.nbytes for name, tensor in file.tensors.items()}
