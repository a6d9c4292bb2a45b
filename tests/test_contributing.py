"""The diffs in CONTRIBUTING.md are of code that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def added_lines() -> list[tuple[str, str]]:
    """The file and the text of every line that a diff adds, without shortened ones."""
    found: list[tuple[str, str]] = []
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for diff in re.findall(r"```diff\n(.*?)```", text, re.S):
        file = ""
        for line in diff.splitlines():
            named = re.match(r"(?:---|\+\+\+) [ab]/(\S+)", line)
            if named is not None:
                file = named[1]
            elif line.startswith("+") and "..." not in line:
                found.append((file, line[1:]))
    return found


def test_diffs_are_of_code_that_is_there() -> None:
    lines = added_lines()
    assert len({file for file, _ in lines}) > 8
    for file, line in lines:
        assert line in (ROOT / file).read_text().splitlines(), (file, line)
