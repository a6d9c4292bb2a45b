"""Puts stored results into the pages that show them: `python -m bench.pages`.

A page has, between two markers, the first tables of a result and what they were
measured with; the marker names the command that measures:

    <!-- begin: bench/results/summary.md, 2 tables, by `make bench` -->
    <!-- end -->

"2 tables, columns 1 to 5, by" leaves out the other columns, and the titles.

With --check nothing is written: the exit status is 1 if a page is not up to date, and
results of another commit than the code's are listed. With --prune these are deleted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.script import RESULTS, ROOT
from pliant.compare.report import MODELS, write_tables
from pliant.compare.results import commit

PAGES = ("README.md", "docs/*.md")
BLOCK = re.compile(
    r"(<!-- begin: (?P<path>\S+), (?P<count>\d+) tables?, "
    r"(?:columns (?P<columns>\d+ to \d+), )?"
    r"by `(?P<command>[^`]+)` -->\n).*?(<!-- end -->)",
    re.DOTALL,
)
STAMP_PARTS = 4  # of the stamp that a page shows: commit, date, rounds, machine


def pages(root: Path = ROOT) -> list[Path]:
    return [path for pattern in PAGES for path in sorted(root.glob(pattern))]


def filled(text: str, root: Path = ROOT) -> str:
    """A page with every block updated from the results."""

    def block(found: re.Match[str]) -> str:
        path = root / found["path"]
        content = f"*Not measured on this code yet:* `{found['command']}`\n"
        if path.exists():
            content = shown(path.read_text(), int(found["count"]))
        if found["columns"]:
            content = narrowed(content, *map(int, found["columns"].split(" to ")))
        return f"{found[1]}\n{content}\n<!-- end -->"

    return BLOCK.sub(block, text)


def shown(result: str, count: int) -> str:
    """The first tables of a result one level deeper, and the start of its stamp."""
    tables = re.split(r"^(?=### )", result, flags=re.MULTILINE)[1:]
    lines = result.rstrip().splitlines()
    parts = []
    for table in tables[:count]:
        title, rows = table.splitlines()[0], re.findall(r"^\|.*", table, re.MULTILINE)
        parts.append("\n".join([f"#{title}", "", *rows, ""]))
    stamp = "; ".join(lines[-1].split("; ")[:STAMP_PARTS])
    return "\n".join([*parts, f"{stamp}.\n"])


def narrowed(content: str, first: int, last: int) -> str:
    """The first to the last column of each table, without its title."""
    lines: list[str] = []
    for line in content.splitlines():
        if line.startswith("|"):
            lines.append("|".join(["", *line.split("|")[first : last + 1], ""]))
        elif not line.startswith("#"):
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


def stored(folder: Path = RESULTS) -> Iterator[tuple[Path, str | None]]:
    """Every result, and the commit it was measured on; None if it is not recorded."""
    for path in sorted(folder.rglob("*.json")):
        stamp = json.loads(path.read_text()).get("stamp", {})
        yield path, None if stamp.get("changed") else stamp.get("commit")


def prune(folder: Path, current: str) -> list[Path]:
    """Deletes results measured on other code; the tables of models are rewritten."""
    gone = [path for path, told in stored(folder) if told != current]
    for path in gone:
        path.unlink()
        path.with_suffix(".md").unlink(missing_ok=True)
    if any(path.parent.name == MODELS for path in gone):
        for name in ("summary.md", "models.md"):
            (folder / name).unlink(missing_ok=True)
        if any(folder.glob(f"{MODELS}/*.json")):
            write_tables(folder)
    return gone


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.pages", description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--prune", action="store_true")
    arguments = parser.parse_args()
    current = commit()["commit"]
    if arguments.prune:
        for path in prune(RESULTS, current):
            print(f"deleted: {path.relative_to(ROOT)}")
    other = [(path, told) for path, told in stored() if told != current]
    for path, told in other:
        print(f"{path.relative_to(ROOT)}: of {told or 'no commit'}, code is {current}")
    old = []
    for path in pages():
        text = path.read_text()
        if (new := filled(text)) != text:
            old.append(path)
            if not arguments.check:
                path.write_text(new)
    for path in old:
        verb = "not up to date" if arguments.check else "written"
        print(f"{path.relative_to(ROOT)}: {verb}")
    return 1 if arguments.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
