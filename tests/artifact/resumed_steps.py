"""Goes on with saved steps where neither torch nor LLVM can be imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tests.artifact.observed import BLOCKED, shown

COUNT = 4


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    rows = 3 + number
    x = random.standard_normal((rows, 6), np.float32)
    return x, random.standard_normal((rows, 3), np.float32)


def main(folder: Path) -> None:
    for name in BLOCKED:
        sys.modules[name] = None  # type: ignore[assignment]
    import pliant

    found = {}
    for path in sorted(folder.glob("*.pliant")):
        step = pliant.load(path, threads=2)
        losses = []
        for number in range(COUNT):
            if number == 2:  # once more by way of a file
                step.save(path.with_suffix(".again"))
                step = pliant.load(path.with_suffix(".again"), threads=2)
            x, y = batch(number)
            losses.append(shown(step((x,), (y,))))
        state = {name: shown(array) for name, array in step.state.items()}
        found[path.stem] = {"losses": losses, "state": state, "steps": step.steps}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
