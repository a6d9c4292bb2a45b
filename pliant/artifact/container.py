"""The file of a saved model: a safetensors file that also holds code and a plan.

    8 bytes       length of the header
    header        JSON: the tensors by name, and `__metadata__`
    plan          JSON in a tensor of bytes: what the model is (artifact/stored.py)
    code.*        images of machine code (artifact/link.py)
    weight.*      the tensors that compiled code reads, and buffers that it changes

Tensors follow one another without gaps, as the format asks; tensors of zeros, `pad.*`,
bring each to its alignment. Any reader of safetensors opens the file.

`digest` in the metadata is the SHA-256 of header (with zeros for digest and signature),
plan and code. The plan has the SHA-256 of each weight, so the digest identifies all
that is in the file. `signature` is zeros, or an HMAC of the digest (`sign`). Weights
are large, and hashing them takes longer than loading: unless a digest or a key is
given, they are checked by a checksum that finds any damage.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import mmap
import os
import re
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pliant.errors import ArtifactError, OptionError
from pliant.runtime.binding import load

FORMAT, VERSION = "pliant", "4"
PLAN = "plan"
CODE, WEIGHT, PAD = "code.", "weight.", "pad."
LINE, PAGE = 64, 4096
_LARGE = 1 << 20  # bytes of a tensor that begins on a page
_MOST_HEADER = 100_000_000  # as the format has it
_NO_DIGEST = "0" * 64  # and no signature
_SHORTEST_KEY = 16  # bytes

_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def checksum(array: np.ndarray) -> int:
    """Finds damage; see plt_checksum."""
    return int(load().plt_checksum(array.ctypes.data, array.nbytes))


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(_bytes(array)).hexdigest()


# ---- writing


def write(path: Path, plan: bytes, tensors: Mapping[str, np.ndarray]) -> str:
    """Writes a file, and returns its digest. An old file is replaced at the end."""
    whole = {PLAN: np.frombuffer(plan, np.uint8), **tensors}
    table: dict[str, Any] = {}
    placed: list[np.ndarray] = []
    at = 0

    def place(name: str, array: np.ndarray) -> None:
        nonlocal at
        entry = {"dtype": _NAMES[array.dtype], "shape": list(array.shape)}
        table[name] = {**entry, "data_offsets": [at, at + array.nbytes]}
        placed.append(array)
        at += array.nbytes

    for name, array in whole.items():
        gap = -at % (PAGE if array.nbytes >= _LARGE or name[:5] == CODE else LINE)
        if gap:
            place(f"{PAD}{len(placed)}", np.zeros(gap, np.uint8))
        place(name, array)
    header = _header(table, _NO_DIGEST)
    covered = [array for name, array in whole.items() if not name.startswith(WEIGHT)]
    digest = _digest(header, covered)
    _replace(path, [memoryview(_header(table, digest)), *map(_bytes, placed)])
    return digest


def _header(table: Mapping[str, Any], digest: str) -> bytes:
    metadata = {"format": FORMAT, "version": VERSION, "digest": digest}
    metadata["signature"] = _NO_DIGEST
    text = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":"))
    padded = text.encode()
    padded += b" " * (-(8 + len(padded)) % PAGE)
    return struct.pack("<Q", len(padded)) + padded


def _digest(header: bytes, arrays: Sequence[np.ndarray]) -> str:
    found = hashlib.sha256(header)
    for array in arrays:
        found.update(_bytes(array))
    return found.hexdigest()


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _replace(path: Path, parts: Sequence[memoryview]) -> None:
    """Nobody sees a file that is written in part."""
    try:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(number, "wb") as file:
                for part in parts:
                    file.write(part)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(f"cannot write {path}: {reason}") from error


# ---- reading


@dataclass(frozen=True, slots=True)
class Container:
    """An open file: its plan, and its tensors, which are mapped and read-only."""

    path: Path
    digest: str
    signature: str
    plan: bytes
    tensors: Mapping[str, np.ndarray]

    def tensor(self, name: str) -> np.ndarray:
        if name not in self.tensors:
            raise ArtifactError(f"{self.path} has no tensor '{name}'")
        return self.tensors[name]


def open_container(path: Path) -> Container:
    """Maps a file, and checks everything but its weights."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is no plain file")  # a pipe may never answer
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise damaged(path, "it is too short to be a saved model")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ArtifactError(f"cannot read {path}: {why}") from None
    length = struct.unpack_from("<Q", content)[0]
    if length > min(size - 8, _MOST_HEADER):
        raise damaged(path, "it ends inside its header, or is no saved model")
    raw = content[8 : 8 + length]
    table, digest, signature = _parsed(path, raw)
    tensors = dict(_tensors(path, table, content, 8 + length, size))
    if PLAN not in tensors:
        raise damaged(path, "it has no plan")
    plain = raw
    for text in (digest, signature):
        plain = plain.replace(text.encode(), _NO_DIGEST.encode(), 1)
    checked = content[:8] + plain
    covered = [a for name, a in tensors.items() if not name.startswith((WEIGHT, PAD))]
    if _digest(checked, covered) != digest:
        raise damaged(path, "its content does not have its digest")
    if any(a.any() for name, a in tensors.items() if name.startswith(PAD)):
        raise damaged(path, "there is data between its tensors")
    return Container(path, digest, signature, tensors[PLAN].tobytes(), tensors)


def sign(path: Path, key: bytes) -> None:
    """Writes the signature into a file; its content and its digest stay as they are."""
    file = open_container(path)
    field = b'"signature":"%s"'
    try:
        with path.open("r+b") as written:
            (length,) = struct.unpack("<Q", written.read(8))
            at = written.read(length).find(field % file.signature.encode())
            if at < 0:
                raise damaged(path, "it has no signature")
            written.seek(8 + at)
            written.write(field % signature_of(file.digest, key).encode())
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error.strerror}") from error


def check_signature(file: Container, key: bytes) -> None:
    """ArtifactError unless someone with this key signed the file."""
    if file.signature == _NO_DIGEST:
        raise ArtifactError(f"{file.path} is not signed, and a key is given")
    if not hmac.compare_digest(file.signature, signature_of(file.digest, key)):
        raise ArtifactError(
            f"the signature of {file.path} is not by this key: it was signed with "
            "another one, or somebody changed the file"
        )


def signature_of(digest: str, key: bytes) -> str:
    if len(key) < _SHORTEST_KEY:
        raise OptionError(f"a key has at least {_SHORTEST_KEY} bytes, not {len(key)}")
    return hmac.new(key, b"pliant model " + digest.encode(), "sha256").hexdigest()


def damaged(path: Path, how: str) -> ArtifactError:
    return ArtifactError(
        f"{path} is damaged: {how}; copy it again, or save the model again"
    )


def _parsed(path: Path, raw: bytes) -> tuple[dict[str, Any], str, str]:
    """The table of tensors, the digest, and the signature."""
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise damaged(path, "its header is no JSON") from None
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ArtifactError(f"{path} was not written by pliant's save()")
    version = metadata.get("version")
    if version != VERSION:
        raise ArtifactError(
            f"{path} has version {version} of the format, and this pliant reads "
            f"version {VERSION}: save the model again with this pliant, or install the "
            "one that wrote it"
        )
    found = [metadata.get(name) for name in ("digest", "signature")]
    for text in found:
        if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{64}", text):
            raise damaged(path, "it has no digest")
    return header, *found


def _tensors(
    path: Path, table: Mapping[str, Any], content: mmap.mmap, first: int, size: int
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors, which must follow one another up to the end of the file."""
    at = 0
    for name, entry in table.items():
        try:
            dtype = _TYPES[entry["dtype"]]
            shape = tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            sizes = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            fits = sizes and end - begin == math.prod(shape) * dtype.itemsize
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits or begin != at or first + end > size:
            raise damaged(path, f"its tensor '{name}' is not where it should be")
        at = end
        whole = np.frombuffer(content, np.uint8, end - begin, first + begin)
        if whole.size and whole.ctypes.data % LINE and not name.startswith(PAD):
            raise damaged(path, f"its tensor '{name}' is not aligned")
        yield name, whole.view(dtype).reshape(shape)
    if first + at != size:
        raise damaged(path, "it is longer than its tensors")
