"""How many threads a call takes: who is asked, and what control groups leave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import pliant
from pliant.ir.parse import parse_module
from pliant.machine import cgroup, processor


class Fake:
    """Control groups as files: what /proc says of them, and their folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        self.proc.mkdir()
        self.groups: list[str] = []
        self.mounts = ["23 1 0:5 / /proc rw,nosuid - proc proc rw"]

    def mount(self, name: str, kind: str, options: str, root: str = "/") -> Path:
        point = self.folder / name
        point.mkdir()
        told = str(point).replace(" ", "\\040")
        number = len(self.mounts)
        self.mounts.append(
            f"{number} 1 0:9 {root} {told} rw shared:4 - {kind} none {options}"
        )
        return point

    def write(self, folder: Path, **files: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text + "\n")

    def processors(self) -> int | None:
        (self.proc / "mountinfo").write_text("\n".join(self.mounts) + "\n")
        (self.proc / "cgroup").write_text("\n".join(self.groups) + "\n")
        return cgroup.processors(self.proc)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


@pytest.mark.parametrize(
    ("quota", "wanted"),
    [
        ("max 100000", None),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("", None),
        ("broken", None),
        ("5 0", None),
    ],
)
def test_version_2(fake: Fake, quota: str, wanted: int | None) -> None:
    point = fake.mount("cgroup", "cgroup2", "rw")
    fake.groups = ["0::/pod/box"]
    fake.write(point / "pod/box", cpu__max=quota)
    assert fake.processors() == wanted


def test_the_least_of_nested_groups(fake: Fake) -> None:
    point = fake.mount("cgroup", "cgroup2", "rw")
    fake.groups = ["0::/pod/box"]
    fake.write(point / "pod/box", cpu__max="800000 100000")
    fake.write(point / "pod", cpu__max="300000 100000")
    fake.write(point / "other", cpu__max="100000 100000")
    assert fake.processors() == 3


def test_version_1(fake: Fake) -> None:
    memory = fake.mount("memory", "cgroup", "rw,memory")
    point = fake.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    fake.groups = ["5:memory:/pod", "4:cpu,cpuacct:/pod", "0::/"]
    quota = {"cpu__cfs_quota_us": "250000", "cpu__cfs_period_us": "100000"}
    fake.write(memory / "pod", **{**quota, "cpu__cfs_quota_us": "100000"})
    fake.write(point / "pod", **quota)
    assert fake.processors() == 3
    fake.write(point / "pod", cpu__cfs_quota_us="-1")
    assert fake.processors() is None


def test_a_container_sees_its_own_group_at_the_mount(fake: Fake) -> None:
    """The group's path is the host's; what is mounted here begins at that group."""
    point = fake.mount("with blank", "cgroup2", "rw", root="/docker/7")
    fake.groups = ["0::/docker/7"]
    fake.write(point, cpu__max="400000 100000")
    assert fake.processors() == 4
    fake.groups = ["0::/elsewhere"]
    assert fake.processors() == 4
    fake.groups = ["0::/../.."]
    assert fake.processors() == 4


def test_no_control_groups(fake: Fake) -> None:
    assert fake.processors() is None
    assert cgroup.processors(fake.folder / "missing") is None


# ---- who is asked


def identity() -> Any:
    return parse_module("graph @main(%x: f32[n]) {\n  return %x\n}\n")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Eight processors, and nobody said anything."""
    for name in ("PLIANT_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processor, "_allowed", lambda: frozenset(range(8)))
    monkeypatch.setattr(processor, "_whole_cores", lambda _: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    return monkeypatch


def test_a_quota_counts(alone: pytest.MonkeyPatch) -> None:
    assert processor.cores() <= 8
    alone.setattr(cgroup, "processors", lambda: 3)
    assert processor.cores() == 3
    alone.setattr(cgroup, "processors", lambda: 30)
    assert processor.cores() == 8
    alone.setattr(cgroup, "processors", lambda: None)
    assert processor.cores() == 8


def test_the_order_of_who_is_asked(alone: pytest.MonkeyPatch) -> None:
    def threads(told: int | None = None) -> int:
        model = pliant.compile(identity(), threads=told)
        return int(model.stats()["threads"])

    assert processor.asked_threads() is None  # 4 is torch's own choice
    assert threads() == processor.cores()
    alone.setattr(torch, "get_num_threads", lambda: 8)
    assert processor.asked_threads() is None
    alone.setenv("OMP_NUM_THREADS", "5,2")
    assert threads() == 8  # after OMP_NUM_THREADS=5, somebody set torch's number
    alone.setattr(torch, "get_num_threads", lambda: 5)
    assert threads() == 5
    alone.delenv("OMP_NUM_THREADS")
    alone.setattr(torch, "get_num_threads", lambda: 1)
    assert threads() == 1
    alone.setenv("PLIANT_THREADS", "3")
    assert threads() == 3
    assert threads(2) == 2


@pytest.mark.parametrize("text", ["", "0", "-2", "many", " 6 "])
def test_a_variable_that_says_nothing(alone: pytest.MonkeyPatch, text: str) -> None:
    alone.setenv("OMP_NUM_THREADS", text)
    alone.setattr(torch, "get_num_threads", lambda: 6 if "6" in text else 4)
    assert processor.asked_threads() == (6 if "6" in text else None)


def test_here() -> None:
    assert 1 <= processor.cores() <= (os.cpu_count() or 1)
    assert processor._whole_cores(frozenset({0})) == 1
