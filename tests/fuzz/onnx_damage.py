"""Damaged ONNX files: valid ones with a few changes, each of which is a number.

    made = damaged(seed)      a Damaged: a valid file and the numbers of its changes
    judge_damaged(made)       fine, refused, or what must never be

A change is of one field of the message (another number, name, attribute, type or dim, a
part that is left out, doubled, or put elsewhere), or of bytes of the file. What reads a
file must answer with a model or a typed error, and open nothing outside its folder.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import onnx
from google.protobuf.descriptor import FieldDescriptor
from judge import Verdict
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

import pliant
from pliant.errors import InternalError

INTEGERS = (0, 1, -1, 2, 7, 63, 255, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, 1e-40, 0.5, 3e38, float("inf"), float("nan"))
TEXTS = (
    *("", "x", "y", "../secret", "/etc/passwd", "link", "a/../../secret", "\0", "é"),
    *("Relu", "Loop", "Conv", "Reshape", "com.microsoft", "ij->ji", "%s%n", "w" * 5000),
)
SECRET = b"kept outside the folder of the model"


@dataclass(frozen=True)
class Damaged:
    seed: int
    base: str
    changes: tuple[int, ...]

    def smaller(self) -> Iterator[Damaged]:
        for at in range(len(self.changes)):
            rest = (*self.changes[:at], *self.changes[at + 1 :])
            yield replace(self, changes=rest)

    def parts(self) -> tuple[str, ...]:
        return (self.base,)

    def script(self) -> str:
        return f"judge_damaged(Damaged({self.seed}, {self.base!r}, {self.changes}))"

    def content(self) -> bytes:
        """The file: first what changes the message, then what changes bytes."""
        proto = onnx.ModelProto()
        proto.CopyFrom(cases()[self.base].model)
        late: list[random.Random] = []
        for change in self.changes:
            rng = random.Random(change)
            if change % 4 == 3:
                late.append(rng)
            else:
                change_message(rng, proto)
        content = bytearray(proto.SerializeToString())
        for rng in late:
            change_bytes(rng, content)
        return bytes(content)


def damaged(seed: int, only: str | None = None) -> Damaged:
    rng = random.Random(seed)
    changes = tuple(rng.getrandbits(40) for _ in range(rng.choice((1, 1, 2, 3, 6))))
    return Damaged(seed, only or rng.choice(bases()), changes)


@functools.cache
def cases() -> dict[str, Any]:
    """The node tests of the onnx package, one of a kind: `conv_*`, `loop*`, .."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_model_tests(kind="node")
    return {case.name: case for case in found if "_expanded" not in case.name}


@functools.cache
def bases() -> list[str]:
    """Names, so that each op comes as often as any other."""
    kinds: dict[tuple[str, ...], str] = {}
    for name, case in cases().items():
        nodes = case.model.graph.node
        kinds.setdefault(tuple(n.op_type for n in nodes), name)
    return list(kinds.values())


# ---- changes


def change_bytes(rng: random.Random, content: bytearray) -> None:
    if not content:
        return
    at = rng.randrange(len(content))
    match rng.randrange(4):
        case 0:
            content[at] = rng.randrange(256)
        case 1:
            del content[at:]
        case 2:
            del content[at : at + rng.randrange(1, 9)]
        case _:
            content[at:at] = rng.randbytes(rng.randrange(1, 9))


def change_message(rng: random.Random, proto: Any) -> None:
    """One field of one message in it."""
    message = rng.choice([m for m in messages(proto) if m.DESCRIPTOR.fields])
    present = [field for field, _ in message.ListFields()]
    known = list(message.DESCRIPTOR.fields)
    field = rng.choice(present if present and rng.random() < 0.8 else known)
    if field.is_repeated:
        change_list(rng, getattr(message, field.name), field)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        change_part(rng, message, field, list(messages(proto)))
    else:
        setattr(message, field.name, scalar(rng, field))


def messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        for part in value if field.is_repeated else (value,):
            yield from messages(part)


def change_list(rng: random.Random, values: Any, field: FieldDescriptor) -> None:
    choice = rng.randrange(4)
    at = rng.randrange(len(values)) if len(values) else None
    if choice == 0 and at is not None:
        del values[at]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        made = values.add()
        if at is not None:
            made.CopyFrom(values[at])
        if choice == 1:  # in another order
            order = [type(v).FromString(v.SerializeToString()) for v in values]
            rng.shuffle(order)
            del values[:]
            values.extend(order)
    elif choice == 1 and at is not None:
        values[at] = scalar(rng, field)
    else:
        values.extend([scalar(rng, field)] * rng.choice((1, 1, 3, 70)))


def change_part(
    rng: random.Random, message: Any, field: FieldDescriptor, others: list[Any]
) -> None:
    alike = [m for m in others if m.DESCRIPTOR is field.message_type]
    if alike and rng.random() < 0.5:
        held = rng.choice(alike).SerializeToString()
        getattr(message, field.name).ParseFromString(held)
    else:
        message.ClearField(field.name)


def scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return rng.choice((b"", b"\xff" * 8, rng.randbytes(16), b"NOTSET", b"i,i"))
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return rng.choice(FLOATS)
        case FieldDescriptor.TYPE_ENUM:
            return rng.choice([v.number for v in field.enum_type.values])
        case FieldDescriptor.TYPE_INT32:
            return rng.choice((*range(24), -1, 2**31 - 1))
        case FieldDescriptor.TYPE_UINT64:
            return rng.choice((0, 1, 2**63))
    return rng.choice(INTEGERS)


# ---- judging


def judge_damaged(made: Damaged) -> Verdict:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        folder.mkdir()
        (Path(place) / "secret").write_bytes(SECRET)
        os.symlink("../secret", folder / "link")
        path = folder / "m.onnx"
        path.write_bytes(made.content())
        with Watch() as opened:
            found = _tried(str(path), made.base)
        return Verdict("outside", f"opened {opened[0]}") if opened else found


def _tried(path: str, base: str) -> Verdict:
    given = example(base)
    called = False
    try:
        compiled = pliant.compile(path, given)
        called = True
        compiled(*given)
    except InternalError as error:
        return Verdict("internal", str(error)[:2000])
    except pliant.PliantError as error:
        where = "call" if called else "compile"
        return Verdict("refused", f"{where}: {type(error).__name__}: {error}"[:500])
    except Exception as error:
        return Verdict("internal", f"untyped {type(error).__name__}: {error}"[:2000])
    return Verdict("fine")


def example(base: str) -> tuple[Any, ...]:
    """The inputs that the test of the valid file has."""
    return tuple(_array(x) for x in cases()[base].data_sets[0][0])


def _array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return [_array(x) for x in value] if isinstance(value, list) else value


class Watch:
    """Sees whether a file is opened that hostile names of files point to."""

    opened: ClassVar[list[str]] = []
    hooked: ClassVar[bool] = False  # a hook of the interpreter stays

    def __enter__(self) -> list[str]:
        if not Watch.hooked:
            sys.addaudithook(Watch.hook)
            Watch.hooked = True
        Watch.opened.clear()
        return Watch.opened

    def __exit__(self, *_: object) -> None:
        pass

    @staticmethod
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str):
            path = os.path.realpath(args[0])
            if path.endswith(("/secret", "/passwd")):
                Watch.opened.append(path)
