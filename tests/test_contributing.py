"""The diffs in CONTRIBUTING.md are of this tree.

That of a pass applies to it, and the pass works. The others are of code that is there:
they apply in reverse.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIFFS = re.findall(
    r"^## (.*?)$[^#]*?```diff\n(.*?)```",
    (ROOT / "CONTRIBUTING.md").read_text(),
    re.M | re.S,
)
NEW = "Adding a pass"


def apply(diff: str, folder: Path, *options: str) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    done = subprocess.run(
        ["git", "apply", *options, "-"],
        input=diff,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_there_are_four_walks() -> None:
    assert len(DIFFS) == 4 and NEW in dict(DIFFS)


@pytest.mark.parametrize(("name", "diff"), [d for d in DIFFS if d[0] != NEW])
def test_a_diff_of_what_is_there(name: str, diff: str) -> None:
    apply(diff, ROOT, "--check", "--reverse")


def test_the_diff_of_a_pass_works(tmp_path: Path) -> None:
    """On a copy of the tree; --accept writes what the pass makes of the module."""
    for name in ("pliant", "docs", "tests/passes", "pyproject.toml"):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    for source in (ROOT / "tests").glob("*.py"):
        shutil.copy(source, tmp_path / "tests")
    apply(dict(DIFFS)[NEW], tmp_path)
    for more in (["--accept"], ["tests/test_pipeline.py"]):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/passes/test_subtract.py",
        ]
        done = subprocess.run(
            [*command, *more],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "EXPECTTEST_ACCEPT": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sub(%x, %y)" in (tmp_path / "tests/passes/test_subtract.py").read_text()
