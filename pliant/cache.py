"""What one process worked out, for the next: files named by a hash of what they hold.

    <folder>/<first two digits>/<key>
                             {"sha256": .., "bytes": .., "kind": ..} "\\n" contents

The folder is PLIANT_CACHE. A key is a hash of everything its contents depend on, so an
entry is never stale, and processes that start together may all write the same one: each
writes a file of its own and renames it. Contents are checked when read; what is cut or
damaged counts as missing and is removed. Nothing here raises: a folder that cannot be
used only means that nothing is kept.

What is read is run, so it must come from this user, or from root: the folder, each
folder in it and each entry belong to one of them, and nobody else may write to them.
Each is opened from the one above it and asked by its descriptor, so that what was
checked is what is read. What lies above the folder needs no check: who may rename
things there can put something else in its place, but nothing that belongs to us.

Entries read longest ago go first once the folder holds more than PLIANT_CACHE_MIB.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def hashed(*parts: str | bytes | memoryview) -> str:
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
        try:
            with self._entries_of(key) as folder:
                return _read(key, folder)
        except OSError:
            return None

    def put(self, key: str, contents: bytes, kind: str) -> bool:
        """Keeps the contents; False where the folder does not allow it.

        The kind is a word for people who look at the cache.
        """
        data = _packed(contents, kind)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._may_write():
                return False
            with suppress(FileExistsError):
                self._path(key).parent.mkdir(mode=0o700)
            with self._entries_of(key) as folder:
                _write(key, data, folder)
        except OSError:
            return False
        self._account(len(data))
        return True

    def problem(self) -> str | None:
        """Why nothing can be kept here, or not everything, if so."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            return f"cannot make the folder {self.folder}: {error.strerror}"
        if not self._may_write():
            return f"no right to write to the folder {self.folder}"
        try:
            with _folder(str(self.folder)) as outer:
                for path in self.folder.glob("[0-9a-f][0-9a-f]"):
                    with _folder(path.name, outer):
                        pass
        except _Distrust as error:
            return f"{error} (in {self.folder}): what is in it is not used"
        except OSError as error:
            return f"cannot read the folder {error.filename}: {error.strerror}"
        return None

    def _may_write(self) -> bool:
        return os.access(self.folder, os.W_OK | os.X_OK)

    @contextmanager
    def _entries_of(self, key: str) -> Iterator[int]:
        """The folder of a key's entry, open; OSError if it cannot be trusted."""
        assert _KEY.fullmatch(key), key
        with (
            _folder(str(self.folder)) as outer,
            _folder(key[:2], outer) as inner,
        ):
            yield inner

    def usage(self) -> Usage:
        sizes = [entry.bytes for entry in self._entries()]
        return Usage(len(sizes), sum(sizes))

    def kinds(self) -> dict[str, Usage]:
        """What there is, by kind."""
        found: dict[str, Usage] = {}
        for entry in self._entries():
            kind = _kind_of(entry.path)
            known = found.get(kind, Usage(0, 0))
            found[kind] = Usage(known.entries + 1, known.bytes + entry.bytes)
        return dict(sorted(found.items()))

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
                found = path.lstat()
            except OSError:  # removed meanwhile
                continue
            if path.parent.is_symlink():
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


# ---- trust


class _Distrust(OSError):
    """Others may have put something there."""


@contextmanager
def _folder(name: str, above: int | None = None) -> Iterator[int]:
    """A folder that only we or root can write to, open.

    The path that the user gives may be a link of theirs; nothing in it is one.
    """
    link = os.lstat(name, dir_fd=above)
    if stat.S_ISLNK(link.st_mode) and (
        above is not None or link.st_uid not in _owners()
    ):
        raise _Distrust(f"the link {name} may lead anywhere")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if above is not None:
        flags |= os.O_NOFOLLOW
    number = os.open(name, flags, dir_fd=above)
    try:
        _trust(f"the folder {name}", os.fstat(number))
        yield number
    finally:
        os.close(number)


def _trust(what: str, found: os.stat_result) -> None:
    if found.st_uid not in _owners():
        raise _Distrust(f"{what} belongs to another user")
    if found.st_mode & stat.S_IWOTH:
        raise _Distrust(f"anyone may write to {what}")
    if found.st_mode & stat.S_IWGRP:
        raise _Distrust(f"a group may write to {what}")


def _owners() -> tuple[int, int]:
    return (os.geteuid(), 0)


def _read(key: str, folder: int) -> bytes | None:
    """An entry of an open folder; what is no file of ours, or damaged, is removed."""
    # A pipe would wait for its other end.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    contents = None
    try:
        number = os.open(key, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link
            _remove(key, folder)
        return None
    with open(number, "rb") as file:
        found = os.fstat(number)
        with suppress(_Distrust):
            _trust("the entry", found)
            if stat.S_ISREG(found.st_mode):
                contents = _unpacked(file.read())
    if contents is None:
        _remove(key, folder)
    elif time() - found.st_mtime > _FRESH_SECONDS:
        with suppress(OSError):
            os.utime(key, dir_fd=folder)
    return contents


def _write(key: str, data: bytes, folder: int) -> None:
    """Makes an entry of an open folder: all of it, or nothing."""
    name = f"{_MARK}{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        with open(number, "wb") as file:
            file.write(data)
        os.replace(name, key, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _remove(name, folder)
        raise


# ---- which folder


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


# ---- contents


def _packed(contents: bytes, kind: str) -> bytes:
    digest = hashlib.sha256(contents).hexdigest()
    header = json.dumps({"sha256": digest, "bytes": len(contents), "kind": kind})
    return header.encode() + b"\n" + contents


def _header(data: bytes) -> tuple[dict[str, object], int] | None:
    """The header, and where it ends."""
    end = data.find(b"\n", 0, _LONGEST_HEADER)
    try:
        header = json.loads(data[:end]) if end >= 0 else None
    except ValueError:
        return None
    return (header, end) if isinstance(header, dict) else None


def _kind_of(path: Path) -> str:
    found = None
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(number, "rb") as file:
            if stat.S_ISREG(os.fstat(number).st_mode):
                found = _header(file.read(_LONGEST_HEADER))
    return "damaged" if found is None else str(found[0].get("kind", "damaged"))


def _unpacked(data: bytes) -> bytes | None:
    found = _header(data)
    if found is None:
        return None
    header, end = found
    contents = data[end + 1 :]
    whole = header.get("bytes") == len(contents)
    digest = hashlib.sha256(contents).hexdigest()
    return contents if whole and header.get("sha256") == digest else None


def _remove(name: str | Path, folder: int | None = None) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
