"""One line on a terminal: what a compile is doing, once it takes long."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import pliant
from pliant import progress
from pliant.pipeline import STAGES


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    screen = io.StringIO()
    made = Console(file=screen, force_terminal=True, width=200)
    monkeypatch.setattr(progress, "Console", lambda **_: made)
    return screen


class Line:
    """Keeps what is said instead of showing it."""

    def __init__(self) -> None:
        self.text, self.part = "", ""
        self.said: list[str] = []

    def say(self, text: str, part: str = "") -> None:
        self.text, self.part = text, part
        self.said.append(part)


def test_stages_are_told_in_order() -> None:
    line = Line()
    token = progress._LINE.set(line)
    try:
        pliant.compile(torch.nn.Linear(4, 4), (torch.randn(2, 4),), ({0: "n"},))
    finally:
        progress._LINE.reset(token)
    parts = [part for part in line.said if part]
    names = [stage.name for stage in STAGES]
    found = [names.index(part) for part in parts if part in names]
    assert found == sorted(found) and len(found) > 10
    assert parts[0] == "import" and parts[-1].startswith("machine code of")
    assert (line.text, line.part) == ("", "")  # the line is given back


def test_shown_at_once_or_later(terminal: io.StringIO) -> None:
    with progress.task("nothing", after=60.0):
        progress.step("never seen")
    assert terminal.getvalue() == ""
    with progress.task("outer"):
        line = progress._LINE.get()
        assert line is not None
        line.timer.join()
        assert line.status is not None
        with progress.task("inner"):
            assert line.text == "inner"
        progress.step("part")
        assert line.line() == "outer: part"


def test_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress.task("something") as say:
        say("else")
        progress.step("part")
    assert capfd.readouterr() == ("", "")


def test_the_log_has_stages_and_what_came_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, "pliant"):
        pliant.compile(torch.nn.Linear(4, 4), (torch.randn(2, 4),), ({0: "n"},))
    said = [record.getMessage() for record in caplog.records if record.name == "pliant"]
    assert "stage fuse" in said
    assert any(text.startswith("compiled Linear in ") for text in said)
    assert any("dims n, " in text for text in said)


def test_nothing_is_printed_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    pliant.compile(torch.nn.Linear(4, 4), (torch.randn(2, 4),), ({0: "n"},))
    assert capfd.readouterr() == ("", "")


def test_in_a_notebook_it_is_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def display(data: dict[str, str], **_: Any) -> Any:
        shown.append(data["text/plain"])
        return SimpleNamespace(update=display)

    module = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=object()),
        display=SimpleNamespace(display=display),
    )
    monkeypatch.setitem(progress.sys.modules, "IPython", module)
    with progress.task("compiling net"):
        progress.step("fuse")
    with progress.task("compiling another", after=60.0):
        progress.step("fuse")
    words = [text.partition(" (")[0] for text in shown]
    assert words == ["compiling net", "compiling net: fuse", "compiling net"]
