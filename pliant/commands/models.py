"""What a command takes as a model: a saved one, or one to compile."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pliant
from pliant.errors import OptionError

if TYPE_CHECKING:
    from pliant.cases import Case

SAVED, ONNX, LANGUAGE, EXPORTED, PYTHON = ".pliant", ".onnx", ".gguf", ".pt2", ".py"
WEIGHTS = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")

MODELS = """MODEL is one of
  file.py            with `model`, `inputs` (a tuple of example tensors) and
                     `dynamic_shapes` at its top, or a function `build` that returns
                     the three
  file.py:function   the same from a function of another name
  file.pt2           what torch.export.save wrote
  file.onnx          its dims are those that the file has names for
  file.gguf          a language model
  file.pliant        what `pliant compile` or `save` wrote
  a name             of a model of the zoo, in a checkout"""
TAKES = (
    "a model is a file.py (with `model`, `inputs` and `dynamic_shapes`), "
    "file.py:function, .pt2, .onnx, .gguf or .pliant, or in a checkout the name of a "
    "model of the zoo"
)

Dynamic = tuple[str, dict[int, str | int]]


def add_model(parser: argparse.ArgumentParser, **more: Any) -> None:
    parser.add_argument("model", metavar="MODEL", **more)
    parser.epilog = MODELS


def add_dynamic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dynamic",
        metavar="INPUT:AXIS=NAME,..",
        type=_dynamic,
        action="append",
        default=[],
        help="dims of an input that may vary, for an ONNX file; for every such input "
        "once",
    )


def _dynamic(text: str) -> Dynamic:
    name, sign, dims = text.rpartition(":")
    found: dict[int, str | int] = {}
    for part in dims.split(","):
        axis, equals, size = part.partition("=")
        if not (sign and name and axis.isdecimal() and equals and size):
            raise argparse.ArgumentTypeError(f"'{text}' is not INPUT:AXIS=NAME,..")
        found[int(axis)] = int(size) if size.isdecimal() else size
    return name, found


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that a command was given, not yet compiled or loaded."""

    name: str
    kind: str  # a suffix; "" for a model of the zoo
    dynamic_shapes: Mapping[str, Any] | None = None  # of an ONNX file

    @property
    def is_case(self) -> bool:
        """Whether there is a module of torch, with inputs for any dims."""
        return self.kind in (PYTHON, EXPORTED, "")

    def case(self) -> Case:
        from pliant.frontend.torch_tensors import need_torch

        need_torch(f"reading {self.name}")
        from pliant.cases import load

        return load(self.name)

    def compiled(self, case: Case | None = None, **how: Any) -> pliant.CompiledModel:
        """Compiles it; `how` are arguments of `pliant.compile`."""
        from pliant.progress import task  # uses rich, which a saved model does not need

        with task(f"compiling {self.name}"):
            if self.kind == ONNX:
                shapes = self.dynamic_shapes
                return pliant.compile(self.name, dynamic_shapes=shapes, **how)
            if self.kind == LANGUAGE:
                return pliant.load_gguf(self.name, **how).model
            return (self.case() if case is None else case).compile(**how)

    def opened(
        self,
        threads: int | None = None,
        memory_limit: str | None = None,
        key: Path | None = None,
    ) -> pliant.CompiledModel:
        """A saved model, loaded, or any other, compiled; `key` is the file of one."""
        if self.kind == SAVED:
            secret = None if key is None else key_of(key)
            return pliant.load(
                self.name, threads=threads, memory_limit=memory_limit, key=secret
            )
        if key is not None:
            raise OptionError("--key is for a file.pliant, which was signed with it")
        return self.compiled(threads=threads, memory_limit=memory_limit)


def key_of(path: Path) -> bytes:
    """The secret key in a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read the key {path}: {error.strerror}") from None


def source(
    name: str, dynamic: list[Dynamic] | None = None, refused: Mapping[str, str] = {}
) -> ModelSource:
    """What a name on the command line stands for.

    `refused` are the kinds that a command does not take, with what to do instead.
    """
    kind = _kind(name)
    if kind in refused:
        raise OptionError(f"{name}: {refused[kind]}")
    if dynamic and kind != ONNX:
        raise OptionError(
            "--dynamic is for an ONNX file; this model names its own dims"
        )
    return ModelSource(name, kind, dict(dynamic or ()) or None)


def language_dims(dims: Mapping[str, int] | None) -> dict[str, int]:
    """All dims of a language model's step: room for its tokens, logits of the last."""
    given = {"past": 0, **(dims or {})}
    if set(given) != {"batch", "past", "new"}:
        raise OptionError(
            "--dims of a language model are batch, new, and past (tokens before them)"
        )
    past, new = given["past"], given["new"]
    return {**given, "kept": min(1, new), "capacity": past + new}


def inputs_at(case: Case, dims: Mapping[str, int] | None) -> list[Any]:
    """Its inputs at these dims, or at those of its example."""
    at = dims or dict(zip(case.dims, case.example, strict=True))
    if set(at) != set(case.dims):
        raise OptionError(f"--dims needs every dim: {', '.join(case.dims) or 'none'}")
    return list(case.at(tuple(at[name] for name in case.dims)))


def _kind(name: str) -> str:
    path, colon, _ = name.rpartition(":")
    suffix = Path(path if colon and path.endswith(PYTHON) else name).suffix
    if suffix in (PYTHON, EXPORTED, ONNX, LANGUAGE, SAVED):
        return suffix
    if suffix in WEIGHTS:
        raise OptionError(
            f"{name} has weights and no program: load them into the module of a "
            "file.py; " + TAKES
        )
    if suffix or "/" in name or colon or Path(name).exists():
        raise OptionError(f"{name} is no model that pliant reads: {TAKES}")
    return ""
