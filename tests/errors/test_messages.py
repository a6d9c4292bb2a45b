"""docs/errors.md: every block of it is run, and answers with what stands under it.

`pytest --accept tests/errors/test_messages.py` writes the answers into the page.
"""

from __future__ import annotations

import inspect
import linecache
import re
import textwrap
import warnings
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import pliant
from pliant import errors

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
TESTS, HERE = Path(__file__).parents[1], Path(__file__).name
SETUP = re.compile(r"```python setup\n(.*?)```", re.S)
ENTRY = re.compile(r"\*\*(.+?)\*\*\n\n```python\n(.*?)```\n\n```\n(.*?)```", re.S)
WIDTH = 88
ENTRIES = ENTRY.findall(PAGE.read_text())


def run(block: CodeType, names: dict[str, Any]) -> Exception | Warning:
    """The error that a block ends in, or a warning that it gives."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", errors.GradientWarning)
        try:
            exec(block, names)
        except pliant.PliantError as error:
            return error
    ours = [w.message for w in told if w.category is errors.GradientWarning]
    assert len(ours) == 1, "the block was expected to fail"
    return ours[0]


def answer(code: str) -> str:
    """The error of a block, as the page has it: wrapped."""
    setup = SETUP.search(PAGE.read_text())
    assert setup is not None
    names: dict[str, Any] = {"__name__": "my"}
    for file, source in (("setup.py", setup[1]), ("my.py", code)):
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        block = compile(source, file, "exec")
        if file == "setup.py":
            exec(block, names)
            continue
        said = run(block, names)
    text = f"{type(said).__name__}: {said}"
    lines = (textwrap.wrap(line, WIDTH) for line in text.splitlines())
    return "\n".join(part for wrapped in lines for part in wrapped) + "\n"


@pytest.mark.parametrize(("name", "code", "expected"), ENTRIES, ids=lambda v: v[:40])
def test_message(
    name: str, code: str, expected: str, request: pytest.FixtureRequest
) -> None:
    given = answer(code)
    if plain(given) == plain(expected):
        return
    if request.config.getoption("--accept"):
        old = f"{code}```\n\n```\n{expected}```"
        PAGE.write_text(PAGE.read_text().replace(old, f"{code}```\n\n```\n{given}```"))
        return
    assert given == expected


def plain(text: str) -> str:
    """Without what depends on the machine: the bytes that a plan takes."""
    text = " ".join(text.split())
    return re.sub(r"\d+", "#", text) if text.startswith("MemoryLimitError") else text


def test_no_advice_is_a_size_below_one() -> None:
    assert not re.search(r"(use|or) \w+ <= (0|-\d+)\b", PAGE.read_text())


def test_the_kinds_of_errors_are_there() -> None:
    """Each has a row of the table, and all but those below a block that gives it."""
    page = PAGE.read_text()
    kinds = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert rows == kinds - {"PliantError"}
    shown = set(re.findall(r"^(\w+(?:Error|Warning)): ", page, re.M))
    elsewhere = {"SpillError", "InternalError", "SizeTextWarning"}
    assert shown == kinds - elsewhere
    others = (path for path in TESTS.rglob("test_*.py") if path.name != HERE)
    tests = "".join(path.read_text() for path in others)
    for kind in elsewhere:
        assert re.search(rf"\b{kind}\b", tests), kind
