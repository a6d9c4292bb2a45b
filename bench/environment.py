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

# Of other programs, and read or set by pliant too.
OTHERS = {
    "OMP_NUM_THREADS": "Worker threads, where neither caller nor PLIANT_THREADS says.",
    "MKL_NUM_THREADS": "Changes the threads of torch, and not those of pliant.",
    "XDG_CACHE_HOME": "The folder that the default PLIANT_CACHE is in (~/.cache).",
    "TORCH_LOGS": "If set, torch's own log of an export is shown.",
    "OPENBLAS_NUM_THREADS": "Set to 1 while LAPACK is loaded, and then put back.",
}
TAIL = """
Variables of other programs that pliant reads, too:

| variable | what it does |
| --- | --- |
"""


def text() -> str:
    rows = (
        f"| `{knob.name}` | {_default(knob.default)} | {knob.doc} |\n" for knob in KNOBS
    )
    others = (f"| `{name}` | {doc} |\n" for name, doc in OTHERS.items())
    return HEAD + "".join(rows) + TAIL + "".join(others)


def _default(value: object) -> str:
    if value is None:
        return "unset"
    return str(int(value)) if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(text())
    print(f"written: {PAGE}")
