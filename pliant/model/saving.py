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


def save_model(
    first: CompiledModel, others: Sequence[CompiledModel], path: str | os.PathLike[str]
) -> str:
    """Saves the programs of a model; the digest of the file."""
    models = (first, *others)
    for model in models:
        model._weights.refresh()
    buffers = first._buffers
    if buffers is None:
        return _written(first, models, {}, path)
    if not isinstance(buffers, ModuleBuffers):
        raise _loaded()
    with buffers.lock:
        return _written(first, models, buffers.arrays(), path)


def _written(
    first: CompiledModel,
    models: Sequence[CompiledModel],
    buffers: dict[str, np.ndarray],
    path: str | os.PathLike[str],
) -> str:
    programs = [_saved(model) for model in models]
    limit = first.memory_limit
    return save(Path(path), [SavedVariant(programs)], buffers, limit, VERSION)


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
