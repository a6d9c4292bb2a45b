"""The example notebooks run, and show the model."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    missing = "not installed: pip install '.[notebook]'"
    nbformat = pytest.importorskip("nbformat", reason=missing)
    nbclient = pytest.importorskip("nbclient", reason=missing)
    pytest.importorskip("ipykernel", reason=missing)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    shown = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    assert any("compiled model" in text and "peak over" in text for text in shown)
