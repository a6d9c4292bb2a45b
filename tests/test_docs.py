"""The documentation is true: its programs run, what is made of code is up to date."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pliant
from bench import environment

DOCS = Path(__file__).parents[1] / "docs"
PROGRAMS = [DOCS / "quickstart.md", *sorted((DOCS / "cookbook").glob("*.md"))]
PACKAGE = DOCS.parent / "pliant"
OF_PEERS = {"TVM_NUM_THREADS", "INFERENCE_NUM_THREADS", "PYTHONPATH"}  # of workers
FENCED = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_are_a_program(page: Path, tmp_path: Path) -> None:
    program = tmp_path / f"page_{page.stem}.py"  # not the name of what it imports
    program.write_text("\n".join(FENCED.findall(page.read_text())))
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_environment_variable_is_listed() -> None:
    """`python -m bench.environment` writes the page."""
    page = environment.PAGE.read_text()
    assert page == environment.text()
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    known = re.findall(r"[\"\'](?:PLIANT_[A-Z_]+|[A-Z]+_NUM_THREADS)[\"\']", code)
    read = re.findall(r"environ(?:\.get\(|\[)[\"\']([A-Z_]+)", code)
    for name in {*(text.strip("\"'") for text in known), *read} - OF_PEERS:
        assert f"`{name}`" in page, name


def test_what_the_reference_lists_is_there_and_described() -> None:
    names = re.findall(r"^::: (\S+)", (DOCS / "reference.md").read_text(), re.M)
    assert len(names) > 5
    for name in names:
        module, _, attribute = name.rpartition(".")
        owner = __import__(module, fromlist=[attribute])
        assert inspect.getdoc(getattr(owner, attribute)), name


def test_every_page_is_in_the_site() -> None:
    listed = set(
        re.findall(r"- (\S+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.M)
    )
    found = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert found == listed


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*DOCS.rglob("*.md"), DOCS.parent / "README.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and "`" not in target:
                assert (page.parent / target).exists(), (page.name, target)


def test_brackets_of_a_page_are_links_or_code() -> None:
    """Text such as `x[0][1]` outside of code would be a link to nowhere."""
    for page in DOCS.rglob("*.md"):
        prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
        assert not re.search(r"(?<!\\)\][\[]", prose), page.name


def test_the_version_is_one() -> None:
    assert pliant.__version__ in (DOCS.parent / "pyproject.toml").read_text()
