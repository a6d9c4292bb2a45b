"""A plan and tensors -> a file. Needs NumPy and the C runtime alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from pliant.artifact import container
from pliant.artifact.codec import Unstorable, encode
from pliant.artifact.read import OpenArtifact
from pliant.artifact.stored import StoredModel, StoredTraining, StoredWeight
from pliant.errors import ArtifactError


def save_again(
    path: Path,
    opened: OpenArtifact,
    buffers: Mapping[str, np.ndarray],
    training: StoredTraining | None,
    memory_limit: int | None,
) -> str:
    """Writes a file that was read, with other buffers; the digest of the new one."""
    model = opened.model
    code = {variant.code for variant in model.variants}
    programs = [p for variant in model.variants for p in variant.programs]
    used = dict.fromkeys(w for p in programs for w in p.weights)
    tensors = {
        **{name: opened.file.tensor(name) for name in sorted(code)},
        **{weight.tensor: opened.file.tensor(weight.tensor) for weight in used},
    }
    add = StoredWeights(tensors, used)
    stored = replace(
        model,
        memory_limit=memory_limit,
        buffers=tuple((name, add(array)) for name, array in buffers.items()),
        training=training,
    )
    return write_model(path, stored, tensors)


def write_model(path: Path, stored: StoredModel, tensors: dict[str, np.ndarray]) -> str:
    try:
        plan = json.dumps(encode(stored), separators=(",", ":"), allow_nan=False)
    except (Unstorable, ValueError) as error:
        raise ArtifactError(f"the model cannot be saved: {error} has no form") from None
    # Code before weights: what is read at once lies together.
    ordered = sorted(tensors.items(), key=lambda item: item[0][:5] != container.CODE)
    return container.write(path, plan.encode(), dict(ordered))


class StoredWeights:
    """Adds arrays to the tensors of a file; equal ones are one."""

    def __init__(
        self, tensors: dict[str, np.ndarray], given: Iterable[StoredWeight] = ()
    ) -> None:
        """Some are `given`, and are among the tensors."""
        self.tensors = tensors
        self.known: dict[tuple[object, ...], StoredWeight] = {}
        for weight in given:
            array = tensors[weight.tensor]
            self.known[array.dtype, array.shape, weight.sha256] = weight

    def __call__(self, array: np.ndarray) -> StoredWeight:
        array = np.ascontiguousarray(array).reshape(array.shape)
        digest = container.sha256(array)
        key = array.dtype, array.shape, digest
        if key not in self.known:
            number = len(self.known)
            while (name := f"{container.WEIGHT}{number}") in self.tensors:
                number += 1
            self.tensors[name] = array
            check = f"{container.checksum(array):016x}"
            self.known[key] = StoredWeight(name, check, digest)
        return self.known[key]
