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
    try:
        for name in names:
            for each in _with_inner(name, importlib.util.find_spec(name)):
                found += each
    except (AttributeError, ImportError, OSError, ValueError):
        return None
    return hashed(*found) if found else None


def _with_inner(name: str, spec: Any) -> Iterator[tuple[str, bytes]]:
    """A module's name and the file that it is loaded from: source, bytecode or a
    library; then those of the modules in it."""
    yield name, bytes(spec.loader.get_data(spec.loader.get_filename(name)))
    places = spec.submodule_search_locations
    for item in sorted(pkgutil.iter_modules(places or ()), key=lambda item: item.name):
        finder: Any = item.module_finder
        inner = f"{name}.{item.name}"
        # The finder of a folder takes the last part of a name, as that of an archive.
        yield from _with_inner(inner, finder.find_spec(inner))
