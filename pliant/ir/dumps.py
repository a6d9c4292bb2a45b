"""Modules in files: the text form, and beside it the data of large constants.

    folder/08_attention.ir          what `print_module` gives
    folder/weights/<hash>.npy       a constant's data, once for all files of the folder

So a dump can be edited and read back, by `pliant opt` or by `read_module`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pliant.ir.graph import Constant, Module
from pliant.ir.parse import parse_module
from pliant.ir.text import INLINE_ELEMENTS, fingerprint, print_module

WEIGHTS = "weights"


def write_module(path: Path, module: Module) -> None:
    """Writes a module and the data that its text does not hold."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(print_module(module))
    for constant in module.constants.values():
        if constant.data.size > INLINE_ELEMENTS:
            _write_data(path.parent / WEIGHTS, constant)


def read_module(path: Path, text: str | None = None) -> Module:
    """The module of a file, or of an edited text of it."""
    folder = path.parent / WEIGHTS

    def data(digest: str) -> np.ndarray[Any, Any] | None:
        stored = folder / _file_name(digest)
        return np.load(stored, allow_pickle=False) if stored.is_file() else None

    return parse_module(path.read_text() if text is None else text, data=data)


def _write_data(folder: Path, constant: Constant) -> None:
    stored = folder / _file_name(fingerprint(constant))
    if not stored.is_file():
        folder.mkdir(exist_ok=True)
        np.save(stored, constant.data, allow_pickle=False)


def _file_name(digest: str) -> str:
    return f"{digest.replace(':', '-')}.npy"
