"""Tells ONNX models from others, without importing the `onnx` package."""

from __future__ import annotations

import os
from typing import Any

from pliant.errors import PliantError


def is_onnx(model: Any) -> bool:
    """Whether this is a path, or a ModelProto of the `onnx` package.

    PliantError if the package is needed and not there.
    """
    if isinstance(model, str | os.PathLike):
        need_onnx()
        return True
    kind = type(model)
    return kind.__name__ == "ModelProto" and "onnx" in kind.__module__


def need_onnx() -> None:
    try:
        import onnx  # noqa: F401  (only whether it is there)
    except ImportError as error:
        raise PliantError(
            "compiling an ONNX model needs the onnx package: pip install 'pliant[onnx]'"
        ) from error
