"""Files that are damaged, cut off, edited or of another machine: ArtifactError."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pliant
from pliant.artifact import container
from pliant.machine import features
from tests.artifact.saved_models import saved_models

X = np.ones((3, 8), np.float32)
QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "m.pliant"
    saved_models()["linear"].compile().save(path)
    pliant.load(path)(X)
    return path.read_bytes()


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes], str]:
    """Loads a file that must be refused, and gives the message."""
    path = tmp_path / "bad.pliant"

    def load(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(pliant.ArtifactError) as found:
            pliant.load(path, digest=None)
        assert str(path) in str(found.value) or "the file's" in str(found.value)
        return str(found.value)

    return load


@QUICK
@given(data=st.data())
def test_a_flipped_bit(
    good: bytes, refused: Callable[[bytes], str], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(good) * 8 - 1))
    changed = bytearray(good)
    changed[place // 8] ^= 1 << place % 8
    refused(bytes(changed))


def test_a_flipped_bit_of_each_tensor(
    good: bytes, refused: Callable[[bytes], str]
) -> None:
    length = struct.unpack_from("<Q", good)[0]
    header = json.loads(good[8 : 8 + length])
    header.pop("__metadata__")
    for entry in header.values():
        begin, end = entry["data_offsets"]
        changed = bytearray(good)
        changed[8 + length + (begin + end) // 2] ^= 16
        assert "is damaged" in refused(bytes(changed))


def test_large_weights_are_checked_on_several_threads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(600, 600) for _ in range(3)]
    net = torch.nn.Sequential(*layers)
    path = tmp_path / "m.pliant"
    pliant.compile(net, (torch.ones(2, 600),), ({0: "n"},), threads=1).save(path)
    good = path.read_bytes()
    length = struct.unpack_from("<Q", good)[0]
    header = json.loads(good[8 : 8 + length])
    ends = {n: e["data_offsets"][1] for n, e in header.items() if n[:6] == "weight"}
    assert len(ends) >= 3
    for name, end in ends.items():
        changed = bytearray(good)
        changed[8 + length + end - 1] ^= 1
        path.write_bytes(changed)
        for threads in (1, 2, 8):
            with pytest.raises(pliant.ArtifactError, match=f"'{name}' has changed"):
                pliant.load(path, threads=threads)
        pliant.load(path, threads=2, check_weights=False)


def test_a_check_that_fails_on_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight whose check came to no end is not taken for a good one."""
    layers = [torch.nn.Linear(600, 600) for _ in range(3)]
    path = tmp_path / "m.pliant"
    net, x = torch.nn.Sequential(*layers), torch.ones(2, 600)
    pliant.compile(net, (x,), ({0: "n"},), threads=1).save(path)
    check, begun = container.checksum, threading.Event()

    def fails_elsewhere(tensor: np.ndarray) -> int:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            raise MemoryError
        if tensor.nbytes >= 1 << 20:
            assert begun.wait(60)
        return check(tensor)

    monkeypatch.setattr(container, "checksum", fails_elsewhere)
    with pytest.raises(MemoryError):
        pliant.load(path, threads=2)


@QUICK
@given(data=st.data())
def test_a_file_that_is_cut_off(
    good: bytes, refused: Callable[[bytes], str], data: st.DataObject
) -> None:
    refused(good[: data.draw(st.integers(0, len(good) - 1))])


@QUICK
@given(content=st.binary(max_size=200))
def test_any_bytes(refused: Callable[[bytes], str], content: bytes) -> None:
    refused(content)


def test_longer_than_it_should_be(good: bytes, refused: Callable[[bytes], str]) -> None:
    assert "longer than its tensors" in refused(good + b"\0")


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pliant", tmp_path):
        with pytest.raises(pliant.ArtifactError, match="cannot read"):
            pliant.load(path)


# ---- signatures


def test_signed_files(good: bytes, tmp_path: Path) -> None:
    """A key is needed to make a file that loads with it."""
    path, key, other = (
        tmp_path / "m.pliant",
        b"0123456789abcdef",
        b"another key of 22 bytes",
    )
    path.write_bytes(good)
    digest = container.open_container(path).digest
    with pytest.raises(pliant.ArtifactError, match="is not signed"):
        pliant.load(path, key=key)
    for secret in (other, key):  # the last one counts
        pliant.sign(path, secret)
        assert pliant.load(path, key=secret, digest=digest).dims
    assert len(path.read_bytes()) == len(good) and pliant.load(path).dims
    with pytest.raises(pliant.ArtifactError, match="is not by this key"):
        pliant.load(path, key=other)
    with pytest.raises(pliant.OptionError, match="at least 16 bytes"):
        pliant.sign(path, b"short")
    # Another model with this one's signature, and a digest of its own that is right.
    signed = container.open_container(path).signature
    version, *others = parts(good)[2]
    edited = with_plan(good, [f"{version}.1", *others])
    path.write_bytes(edited.replace(b"0" * 64, signed.encode(), 1))
    assert container.open_container(path).signature == signed
    with pytest.raises(pliant.ArtifactError, match="somebody changed the file"):
        pliant.load(path, key=key)


def test_a_signature_covers_the_weights(good: bytes, tmp_path: Path) -> None:
    """Also where a checksum of 64 bits, which can be forged, is right."""
    path, key = tmp_path / "m.pliant", b"0123456789abcdef"
    path.write_bytes(good)
    pliant.sign(path, key)
    content = bytearray(path.read_bytes())
    header, _, _ = parts(bytes(content))
    name = next(n for n in header if n.startswith(container.WEIGHT))
    first = 8 + struct.unpack_from("<Q", content)[0] + header[name]["data_offsets"][0]
    content[first] ^= 1
    path.write_bytes(content)
    with pytest.raises(pliant.ArtifactError, match="damaged"):
        pliant.load(path, key=key, check_weights=False)


# ---- edited files, whose digests are right


def parts(good: bytes) -> tuple[dict[str, Any], bytes, Any]:
    """Header, tensors and plan of a file."""
    length = struct.unpack_from("<Q", good)[0]
    header, rest = json.loads(good[8 : 8 + length]), good[8 + length :]
    begin, end = header["plan"]["data_offsets"]
    return header, rest, json.loads(rest[begin:end])


def with_plan(good: bytes, plan: Any) -> bytes:
    """The file with another plan, and everything that tells of it corrected."""
    header, rest, _ = parts(good)
    tensors = {}
    for name, entry in header.items():
        if name.startswith((container.CODE, container.WEIGHT)):
            begin, end = entry["data_offsets"]
            dtype = container._TYPES[entry["dtype"]]
            shaped = np.frombuffer(rest[begin:end], dtype).reshape(entry["shape"])
            tensors[name] = shaped
    with TemporaryDirectory() as folder:
        path = Path(folder) / "edited"
        container.write(path, json.dumps(plan).encode(), tensors)
        return path.read_bytes()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values in a plan."""
    found = [path] if path else []
    if isinstance(value, list):
        for k, item in enumerate(value):
            found += places(item, (*path, k))
    return found


WRONG = st.sampled_from(
    [None, -1, 0, 1, 7, 2**31, -(2**63), 2**64, 1.5, "", "n", "n**9999", [], [[]], {}]
)


@settings(QUICK, max_examples=150)
@given(data=st.data())
def test_an_edited_plan_never_ends_the_process(
    good: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    """Every table is checked before it is used; what is no table may stay wrong."""
    _, _, plan = parts(good)
    # Offsets of functions are trusted as the code itself is.
    variant = plan[3][0]
    programs = variant[8]
    kept = [json.dumps(program[2]) for program in programs]
    path = data.draw(st.sampled_from(places(plan)))
    *way, last = path
    inside = plan
    for key in way:
        inside = inside[key]
    inside[last] = data.draw(WRONG)
    same = isinstance(plan, list) and _functions(plan) == kept
    file = tmp_path / "edited.pliant"
    file.write_bytes(with_plan(good, plan))
    try:
        model = pliant.load(file)
        if same:
            model.memory_plan(n=3)
            model.explain()
    except pliant.PliantError:
        pass


def _functions(plan: Any) -> list[str] | None:
    try:
        return [json.dumps(program[2]) for program in plan[3][0][8]]
    except (TypeError, IndexError, KeyError):
        return None


def test_edited_tables_are_told(good: bytes, refused: Callable[[bytes], str]) -> None:
    def edited(change: Callable[[Any], None]) -> str:
        _, _, plan = parts(good)
        change(plan[3][0])
        return refused(with_plan(good, plan))

    def image(variant: Any) -> Any:
        return variant[8][0][0][0][0]

    def put(place: list[Any], value: Any) -> None:
        place[0] = value

    assert "of the runtime" in edited(lambda v: v.__setitem__(3, 1))
    assert "is for aarch64" in edited(lambda v: v.__setitem__(1, "aarch64"))
    assert "needs avx9000" in edited(lambda v: v[2].append("avx9000"))
    assert "not offered" in edited(lambda v: v[7].append([v[5], "system"]))
    assert "malformed" in edited(lambda v: v[6].append([0, 0]))
    assert "malformed" in edited(lambda v: v[6].append([v[5], 2**40]))
    assert "malformed" in edited(lambda v: v.__setitem__(5, v[5] + 1))
    assert "outside its code" in edited(lambda v: put(v[8][0][2][0][0], v[5]))
    assert "has no tensor" in edited(lambda v: v.__setitem__(4, "code.7"))
    assert "fit together" in edited(lambda v: image(v)[0][3].append([0]))
    assert "fit together" in edited(lambda v: v[8][0][3].pop())
    assert "malformed" in edited(lambda v: image(v).pop())


def test_another_version_of_the_format(
    good: bytes, refused: Callable[[bytes], str]
) -> None:
    other = good.replace(b'"version":"4"', b'"version":"5"', 1)
    assert "has version 5 of the format" in refused(other)
    named = good.replace(b'"format":"pliant"', b'"format":"flying"', 1)
    assert "not written by pliant" in refused(named)


def test_a_machine_without_the_features(
    good: bytes, refused: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_present", lambda: frozenset({"lm", "sse"}))
    assert "has no code that runs here" in refused(good)


def test_features_are_those_that_llvm_finds() -> None:
    """All that LLVM reports of this machine is known by its name here."""
    from pliant.machine import target

    host = target.host()
    if host.triple.startswith("x86_64"):
        wanted = features.needed(host.features)
        assert "sse2" in wanted and features.lacking(wanted) == ()


def test_any_reader_of_safetensors_reads_it(good: bytes, tmp_path: Path) -> None:
    from safetensors import safe_open

    path = tmp_path / "m.safetensors"
    path.write_bytes(good)
    with safe_open(path, "np") as file:
        assert file.metadata()["format"] == "pliant"
        weights = [name for name in file.keys() if name.startswith("weight.")]  # noqa: SIM118
        assert sum(file.get_tensor(name).nbytes for name in weights) > 0


@pytest.mark.parametrize("seed", range(3))
def test_hostile_files(good: bytes, seed: int) -> None:
    """A short run of what `make fuzz-artifacts` does for long."""
    from tests.artifact import hostile

    found = hostile.run(good, seed, 60)
    assert found["refused"] > 5
