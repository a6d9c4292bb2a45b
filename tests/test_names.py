"""One name for one thing: class names are distinct across the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pliant

PACKAGE = Path(pliant.__file__).parent


def test_class_names_are_distinct() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
