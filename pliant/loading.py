"""`pliant.load`: a model from a file that `save` wrote.

What this file imports needs NumPy and the C runtime, and neither torch nor LLVM.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from pliant.artifact import container
from pliant.artifact.read import MappedCode, OpenArtifact, open_artifact
from pliant.artifact.stored import StoredProgram, StoredReport
from pliant.errors import ArtifactError
from pliant.model.arguments import parse_bytes
from pliant.model.arrays import Weights
from pliant.model.buffers import StoredBuffers
from pliant.model.compiled import CompiledModel
from pliant.model.threads import check_threads, workers
from pliant.runtime.description import RuntimeStatus

AnyModel = TypeVar("AnyModel", bound=CompiledModel)


def load(
    path: str | os.PathLike[str],
    *,
    memory_limit: int | str | None = None,
    threads: int | None = None,
    digest: str | None = None,
    key: bytes | None = None,
    check_weights: bool = True,
) -> CompiledModel:
    """A compiled model from a file, without its compiler: docs/artifacts.md.

    `memory_limit` and `threads` are as for `compile`; a limit that the model was saved
    with holds unless another one is given. A `digest`, as `save` returned it, is
    checked against all of the content; with a `key`, the file must have been signed
    with it (`pliant.sign`). Without `check_weights`, damage of weights is
    not looked for. ArtifactError says why a file cannot be loaded.
    """
    started = perf_counter()
    limit = parse_bytes(memory_limit)
    check_threads(threads)
    count = workers(threads)
    opened = open_artifact(Path(path), digest, check_weights, count, key)
    if limit is None:
        limit = opened.model.memory_limit
    code = opened.code()
    arrays = opened.buffers()
    buffers = StoredBuffers(arrays) if arrays else None
    first, *others = opened.variant.programs
    how = opened, code, buffers, count, limit, started
    training = opened.model.training
    if training is not None:
        from pliant.model.stored_step import StoredStep

        step = _model(StoredStep, first, *how)
        if others or buffers is None:
            raise ArtifactError(f"{path} is damaged: it is no training step")
        step.resume(opened, training)
        return step
    if not others:
        return _model(CompiledModel, first, *how)
    from pliant.model.branching import BranchingModel

    model = _model(BranchingModel, first, *how)
    model.others = tuple(_model(CompiledModel, program, *how) for program in others)
    return model


def sign(path: str | os.PathLike[str], key: bytes) -> None:
    """Signs a file that `save` wrote with a secret key of 16 bytes or more.

    `load(path, key=key)` refuses a file that nobody with the key has signed.
    """
    container.sign(Path(path), key)


def _model(
    kind: type[AnyModel],
    program: StoredProgram,
    opened: OpenArtifact,
    code: MappedCode,
    buffers: StoredBuffers | None,
    threads: int,
    limit: int | None,
    started: float,
) -> AnyModel:
    signature = program.signature.signature()
    own = None
    if signature.held:
        own = buffers
        missing = buffers is None or any(
            held.name not in buffers.arrays for held in signature.held
        )
        if missing or buffers is None:
            raise ArtifactError(f"{opened.file.path} lacks a buffer of the model")
        signature = buffers.extend(signature)
    weights = Weights(opened.weights(program))
    report = StoredReport(
        program.peak, program.explanation, {"load": perf_counter() - started}
    )
    try:
        return kind(
            program.image,
            code.of(program),
            signature,
            weights,
            threads,
            limit,
            report,
            own,
        )
    except RuntimeStatus:
        raise ArtifactError(
            f"{opened.file.path} is damaged: its tables do not fit together"
        ) from None
