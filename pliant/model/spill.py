"""The folder to which buffers are spilled under a memory limit.

It must not be a file system in memory (tmpfs, ramfs): spilling there would take the
memory that the limit is to save. Without another folder, plans only recompute.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

from pliant import knobs
from pliant.runtime.binding import in_memory

_LASTING = "/var/tmp"  # kept over a restart, so hardly ever in memory


@dataclass(frozen=True, slots=True)
class SpillPlace:
    """The folder; or, if it cannot be used, why."""

    folder: str
    problem: str = ""


def spill_place() -> SpillPlace:
    """PLIANT_SPILL_FOLDER, or else the first temporary folder on a disk."""
    given = knobs.SPILL_FOLDER.get()
    if given is not None:
        found = [given]
    else:
        usual = dict.fromkeys((tempfile.gettempdir(), _LASTING))
        found = [name for name in usual if os.access(name, os.W_OK | os.X_OK)]
    for name in found:
        if not in_memory(name):
            return SpillPlace(name)
    if not found:
        return SpillPlace("", "there is no temporary folder that can be written to")
    verb = "are" if len(found) > 1 else "is"
    return SpillPlace("", f"{' and '.join(found)} {verb} in memory")
