"""The table of stages is one: what the docs, the options and the commands say of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from pliant import pipeline
from pliant.context import Context, Training
from pliant.machine.target import named
from pliant.options import SWITCHES, Options
from pliant.pipeline import CODE_STEPS, STAGES

DOCS = Path(pipeline.__file__).parents[1] / "docs"
ARCHITECTURE = DOCS / "architecture.md"


def lines_of(text: str) -> list[str]:
    """Lines indented by four, as the file's head lists stages."""
    return [line.strip() for line in text.splitlines() if re.match(r" {4}\S", line)]


def test_the_head_of_the_file_lists_the_stages() -> None:
    told = [stage.line() for stage in STAGES]
    told += [f"{name:13} {what_for}" for name, what_for, _ in CODE_STEPS]
    assert lines_of(pipeline.__doc__ or "") == told


def test_every_switch_is_read_by_a_stage() -> None:
    read = {name for stage in STAGES for name in (*stage.needs, *stage.reads)}
    read |= {name for _, _, names in CODE_STEPS for name in names}
    assert read == set(SWITCHES)


def test_names_are_distinct() -> None:
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names)


def test_the_architecture_page_has_the_table() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", ARCHITECTURE.read_text(), re.M
    )
    wanted = [
        (
            stage.name,
            stage.line()[14:],
            ", ".join((*stage.needs, *stage.reads)) or "-",
        )
        for stage in STAGES
    ]
    assert [(n, w, s.replace("`", "")) for n, w, s in rows] == wanted


def test_the_architecture_page_has_the_layers() -> None:
    """Its table of folders has those of the import contract, in their order."""
    settings = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    layers = [
        {part.strip().removeprefix("pliant.") for part in layer.split("|")}
        for layer in contract["layers"]
    ]
    page = ARCHITECTURE.read_text()
    _, _, table = page[: page.index("## Front ends")].partition("| folder |")
    rows = [
        re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1])
        for row in table.splitlines()[2:]
        if row.startswith("|")
    ]
    names = [name for row in rows for name in row]
    assert sorted(names) == sorted(name for layer in layers for name in layer)
    level = {name: k for k, layer in enumerate(layers) for name in layer}
    told = [level[name] for name in names]
    assert told == sorted(told)


def test_every_switch_has_a_place_to_look_at() -> None:
    rows = re.findall(r"^\| (.*?) \| .* \|$", (DOCS / "debugging.md").read_text(), re.M)
    named_there = {word for row in rows for word in re.findall(r"\w+", row)}
    assert set(SWITCHES) <= named_there


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_stage_is_left_out(switch: str) -> None:
    training = Training((), lambda b, params, gradients: gradients)
    for trained in (None, training):
        on = Context(Options(), named("avx2"), trained)
        off = Context(Options(**{switch: False}), named("avx2"), trained)
        for stage in STAGES:
            if stage.applies(on) != stage.applies(off):
                assert switch in stage.needs


def test_stages_of_training() -> None:
    training = Training((), lambda b, params, gradients: gradients)
    inference = Context(Options(), named("avx2"))
    step = Context(Options(), named("avx2"), training)
    only = [s.name for s in STAGES if s.applies(step) and not s.applies(inference)]
    assert only == ["smooth", "find", "gradient", "clean", "recompute"]
    left = [s.name for s in STAGES if s.applies(inference) and not s.applies(step)]
    assert left == ["overwrite", "coded", "layout"]
