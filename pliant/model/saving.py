"""A compiled model -> a file. Imported when a model is saved: it needs the compiler."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pliant.artifact.save import SavedProgram, SavedVariant, save
from pliant.errors import ArtifactError
from pliant.model.module_buffers import ModuleBuffers
from pliant.version import VERSION

if TYPE_CHECKING:
    from pliant.model.compiled import CompiledModel


def save_model(variants: Sequence[CompiledModel], path: str | os.PathLike[str]) -> str:
    """Saves a model, compiled for one or several targets; the digest of the file."""
    first = variants[0]
    if len({tuple(map(str, model._signature.slots)) for model in variants}) > 1:
        raise ArtifactError("variants must be one model, compiled for several targets")
    for model in (model for variant in variants for model in variant.programs()):
        model._weights.refresh()
    buffers = first._buffers
    if buffers is None:
        return _written(variants, {}, path)
    if not isinstance(buffers, ModuleBuffers):
        raise _loaded()
    with buffers.lock:
        return _written(variants, buffers.arrays(), path)


def _written(
    variants: Sequence[CompiledModel],
    buffers: dict[str, np.ndarray],
    path: str | os.PathLike[str],
) -> str:
    saved = [SavedVariant([_saved(m) for m in v.programs()]) for v in variants]
    return save(Path(path), saved, buffers, variants[0].memory_limit, VERSION)


def _saved(model: CompiledModel) -> SavedProgram:
    description = model._description
    report, program = description.report, description.report.program
    if program is None:
        raise _loaded()
    return SavedProgram(
        program,
        description.image,
        model._signature,
        model._weights.arrays,
        report.peak(),
        report.explain(description.threads, None),
    )


def _loaded() -> ArtifactError:
    return ArtifactError("this model was loaded from a file: copy that file instead")
