"""Edited files whose digests are right: random changes of bytes and of JSON.

Loading one ends in a model or in an ArtifactError, and planning with it in a plan or a
PliantError. Nothing else may happen: no other exception, no crash. What is left is
the machine code, with which whoever can write a file may do anything.

    python -m tests.artifact.hostile --minutes 20 --seed 7

Each round is a process, so that a crash is found; its seed makes it happen again.
"""

from __future__ import annotations

import argparse
import copy
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import pliant
from tests.artifact.test_damage import parts, places, with_plan

ODD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 63, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63), 2**63, 2**70),
    *(None, True, 0.5, 1e308, "", "n", "n*m", "((((", "2**99", "\0", [], {}, [[]], [0]),
)
ROUND = 40  # edited files in one process


def edited(plan: Any, draw: random.Random) -> Any:
    """The plan with some places changed: replaced, dropped, doubled or exchanged.

    What is in the file as code is not one of them: entry points, tables of addresses.
    """
    made = copy.deepcopy(plan)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        ways = places(made)
        if not ways:
            return made
        *way, last = draw.choice(ways)
        inside = made
        for key in way:
            inside = inside[key]
        match draw.randrange(5):
            case 0 if isinstance(inside, list):
                inside.insert(last, inside[last])
            case 1 if isinstance(inside, list):
                del inside[last]
            case 2 if isinstance(inside[last], int):
                inside[last] += draw.choice((-1, 1, 8, -8, 4096))
            case 3:
                other = made
                for key in draw.choice(ways):
                    other = other[key] if _has(other, key) else other
                inside[last] = copy.deepcopy(other)
            case _:
                inside[last] = draw.choice(ODD)
    return made


def _has(value: Any, key: Any) -> bool:
    try:
        value[key]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def same_code(plan: Any, other: Any) -> bool:
    """Whether a plan calls the code as the good one does."""
    try:
        return all(
            one[4:8] == two[4:8] and [p[2] for p in one[8]] == [p[2] for p in two[8]]
            for one, two in zip(plan[3], other[3], strict=True)
        )
    except (TypeError, IndexError, KeyError, ValueError):
        return True  # refused before any code is looked at


def tried(content: bytes, path: Path) -> str:
    """What became of a file: loaded, or refused."""
    path.write_bytes(content)
    try:
        model = pliant.load(path)
        model.explain()
        model.stats()
        model.memory_plan(**dict.fromkeys(model.dims, 3))
    except pliant.ArtifactError:
        return "refused"
    except pliant.PliantError:
        pass  # a plan is refused, or has no such dims
    return "loaded"


def run(good: bytes, seed: int, count: int) -> dict[str, int]:
    """Tries `count` edited files; anything but a PliantError is raised."""
    draw = random.Random(seed)
    _, _, plan = parts(good)
    found = {"refused": 0, "loaded": 0}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count):
            if draw.random() < 0.8:
                changed = edited(plan, draw)
                if not same_code(changed, plan):
                    continue
                content = with_plan(good, changed)
            else:
                content = bytearray(good)
                for _ in range(draw.choice((1, 2, 9))):
                    content[draw.randrange(len(content))] = draw.randrange(256)
            found[tried(bytes(content), Path(folder) / "m.pliant")] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="default: several models")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args()
    if args.once:
        print(run(args.file.read_bytes(), args.seed, ROUND))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        files = [args.file] if args.file else _saved(Path(folder))
        return _hunt(files, args.minutes, args.seed)


def _saved(folder: Path) -> list[Path]:
    """One model of each kind."""
    from tests.artifact.saved_models import saved_models

    made = []
    for name, saved in saved_models().items():
        made.append(folder / f"{name}.pliant")
        saved.compile().save(made[-1])
    return made


def _hunt(files: list[Path], minutes: float, first: int) -> int:
    end, seed, bad = time.monotonic() + 60 * minutes, first, 0
    while time.monotonic() < end:
        file = files[seed % len(files)]
        words = [str(file), "--once", "--seed", str(seed)]
        command = [sys.executable, "-m", "tests.artifact.hostile", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            bad += 1
            print(f"{file.name}, seed {seed}: status {done.returncode}")
            print(done.stderr[-2000:])
        seed += 1
    print(f"{ROUND * (seed - first)} files, {bad} processes failed")
    return int(bool(bad))


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())
