"""`python -m zoo`: the models of the zoo."""

from __future__ import annotations

from pliant.compare.tables import Report, console, dims_text
from zoo import MODELS

ROWS = tuple(
    (
        name,
        model.depth,
        f"{model.parameters / 1e6:.1f}",
        model.weights,
        f"({', '.join(model.sizes.dims)})",
        dims_text(model.sizes.example),
    )
    for name, model in MODELS.items()
)
COLUMNS = ("model", "depth", "M parameters", "weights", "dims", "exported at")

if __name__ == "__main__":
    Report("The zoo", COLUMNS, ROWS).show(console())
