"""A hash of the code generator: of the files that this process loaded it from.

The key of object code on disk contains this hash. An installation may have no sources,
only bytecode, and it may be an archive, so files are read through the modules' loaders.
If they cannot be read there is no hash, and nothing is kept on disk (backend/build.py).
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any

from pliant.cache import hashed


def files_hash(names: Iterable[str]) -> str | None:
    """A hash of modules by name; packages include everything in them."""
    found: list[str | bytes] = []
    for name in names:
        for each in _with_inner(name):
            data = _file(each)
            if data is None:
                return None
            found += [each, data]
    return hashed(*found) if found else None


def _with_inner(name: str) -> Iterator[str]:
    yield name
    spec = importlib.util.find_spec(name)
    places = None if spec is None else spec.submodule_search_locations
    for item in sorted(pkgutil.iter_modules(places or ()), key=lambda item: item.name):
        yield from _with_inner(f"{name}.{item.name}")


def _file(name: str) -> bytes | None:
    """The file that a module is loaded from: source, bytecode or a library."""
    try:
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        return bytes(loader.get_data(loader.get_filename(name)))
    except (AttributeError, ImportError, OSError, ValueError):
        return None
