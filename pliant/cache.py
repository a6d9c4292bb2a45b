"""What one process worked out, for the next: files named by a hash of what they hold.

    <folder>/<first two digits>/<key>     {"sha256": .., "bytes": ..} "\\n" contents

The folder is PLIANT_CACHE. A key is a hash of everything its contents depend on, so an
entry is never stale, and processes that start together may all write the same one: each
writes a file of its own and renames it. Contents are checked when read; what is cut or
damaged counts as missing and is removed. Nothing here raises: a folder that cannot be
used only means that nothing is kept.

Entries read longest ago go first once the folder holds more than PLIANT_CACHE_MIB.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from time import time

from pliant import knobs

OFF = "off"
_KEY = re.compile(r"[0-9a-f]{16,}")
_MARK = ".writing-"  # how the names of files being written begin
_LONGEST_HEADER = 256
_FRESH_SECONDS = 3600.0  # a use is recorded, and a file being written may take, so long


def hashed(*parts: str | bytes) -> str:
    """A key: the hash of the parts, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(f"{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Usage:
    entries: int
    bytes: int


@dataclass(slots=True)
class DiskCache:
    """A folder of entries, holding about `limit` bytes at most."""

    folder: Path
    limit: int
    _written: int | None = None  # bytes since the folder was last measured
    _lock: Lock = field(default_factory=Lock)

    def get(self, key: str) -> bytes | None:
        """The contents under a key; None if there are none, or none that are whole."""
        path = self._path(key)
        if self._distrust() is not None:
            return None
        try:
            with path.open("rb") as file:
                data = file.read()
                used = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        contents = _unpacked(data)
        if contents is None:
            _remove(path)
        elif time() - used > _FRESH_SECONDS:
            _touch(path)
        return contents

    def put(self, key: str, contents: bytes) -> bool:
        """Keeps the contents; False where the folder does not allow it."""
        if self.problem() is not None:
            return False
        path = self._path(key)
        data = _packed(contents)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            number, name = tempfile.mkstemp(prefix=_MARK, dir=path.parent)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(data)
                Path(name).replace(path)
            except BaseException:
                _remove(Path(name))
                raise
        except OSError:
            return False
        self._account(len(data))
        return True

    def problem(self) -> str | None:
        """Why nothing can be kept here, if so."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            return f"cannot make the folder {self.folder}: {error.strerror}"
        if not os.access(self.folder, os.W_OK | os.X_OK):
            return f"no right to write to the folder {self.folder}"
        return self._distrust()

    def _distrust(self) -> str | None:
        """Why others may have put something into the folder: what is in it is run."""
        try:
            found = self.folder.stat()
        except OSError as error:
            return f"cannot read the folder {self.folder}: {error.strerror}"
        if found.st_mode & stat.S_IWOTH:
            return f"anyone may write to the folder {self.folder}"
        if found.st_uid not in (os.getuid(), 0):
            return f"the folder {self.folder} belongs to another user"
        return None

    def usage(self) -> Usage:
        sizes = [entry.bytes for entry in self._entries()]
        return Usage(len(sizes), sum(sizes))

    def trim(self, limit: int | None = None) -> None:
        """Removes the entries read longest ago until `limit` bytes are left at most."""
        allowed = self.limit if limit is None else limit
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        total = sum(entry.bytes for entry in entries)
        for entry in entries:
            if total <= allowed:
                break
            _remove(entry.path)
            total -= entry.bytes

    def _account(self, count: int) -> None:
        """Measures the folder at the first entry, and again after much was written."""
        with self._lock:
            first = self._written is None
            self._written = count + (self._written or 0)
            if not first and self._written < self.limit // 8:
                return
            self._written = 0
        if self.usage().bytes > self.limit:
            self.trim(self.limit - self.limit // 8)

    def _path(self, key: str) -> Path:
        assert _KEY.fullmatch(key), key
        return self.folder / key[:2] / key

    def _entries(self) -> Iterator[_Entry]:
        """Every entry; what a process that died left half-written is removed."""
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            try:
                found = path.stat()
            except OSError:  # removed meanwhile
                continue
            if _KEY.fullmatch(path.name):
                yield _Entry(path, found.st_size, found.st_mtime)
                continue
            abandoned = time() - found.st_mtime > _FRESH_SECONDS
            if path.name.startswith(_MARK) and abandoned:
                _remove(path)


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    bytes: int
    used: float


def default_folder() -> Path:
    """Where caches of this user belong (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:  # a user without a home
            base = str(Path(tempfile.gettempdir()) / f"pliant-{os.getuid()}")
    return Path(base) / "pliant"


def disk() -> DiskCache | None:
    """The cache that PLIANT_CACHE names; None if it says "off"."""
    name = knobs.CACHE.get()
    if name == OFF:
        return None
    folder = default_folder() if name is None else Path(name).expanduser()
    return _opened(folder.absolute(), knobs.CACHE_MIB.get() << 20)


@lru_cache(maxsize=8)
def _opened(folder: Path, limit: int) -> DiskCache:
    return DiskCache(folder, limit)


def _packed(contents: bytes) -> bytes:
    digest = hashlib.sha256(contents).hexdigest()
    header = json.dumps({"sha256": digest, "bytes": len(contents)})
    return header.encode() + b"\n" + contents


def _unpacked(data: bytes) -> bytes | None:
    end = data.find(b"\n", 0, _LONGEST_HEADER)
    try:
        header = json.loads(data[:end]) if end >= 0 else None
    except ValueError:
        return None
    if not isinstance(header, dict):
        return None
    contents = data[end + 1 :]
    whole = header.get("bytes") == len(contents)
    digest = hashlib.sha256(contents).hexdigest()
    return contents if whole and header.get("sha256") == digest else None


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _touch(path: Path) -> None:
    with suppress(OSError):
        os.utime(path)
