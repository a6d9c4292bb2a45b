"""docs/environment.md, from the knobs themselves: `python -m bench.environment`."""

from __future__ import annotations

from bench.script import ROOT
from pliant.knobs import KNOBS

PAGE = ROOT / "docs" / "environment.md"

HEAD = """# Environment variables

Made by `python -m bench.environment` from `pliant/knobs.py`. A variable is read when it
is needed, so it can be set while a process runs; unset, the default holds.

| variable | default | what it does |
| --- | --- | --- |
"""


def text() -> str:
    rows = (
        f"| `{knob.name}` | {_default(knob.default)} | {knob.doc} |\n" for knob in KNOBS
    )
    return HEAD + "".join(rows)


def _default(value: object) -> str:
    if value is None:
        return "unset"
    return str(int(value)) if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(text())
    print(f"written: {PAGE}")
