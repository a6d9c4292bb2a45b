"""`python -m bench.coverage CARD [--only TEXT] [--processes N] [--limit SECONDS]`."""

from __future__ import annotations

import argparse
import datetime
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.coverage import pool, report

LIMITS = {"opinfo": 90.0, "aten": 60.0, "models": 300.0}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.coverage", description=__doc__)
    parser.add_argument("card", choices=list(LIMITS))
    parser.add_argument(
        "--only", help="entries with this in their name; writes no page"
    )
    parser.add_argument("--every", type=int, default=1, help="a sample; writes no page")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, help="seconds for an entry")
    parser.add_argument("--fresh", action="store_true", help="forget a run's beginning")
    arguments = parser.parse_args()
    card = arguments.card
    names = importlib.import_module(f"bench.coverage.{card}").names()
    whole = len(names)
    names = [n for n in names if not arguments.only or arguments.only in n]
    names = names[:: arguments.every]
    # Kept by commit: an interrupted run goes on, and results of other code do not mix.
    kept = Path(tempfile.gettempdir()) / "pliant_coverage" / f"{card}_{_commit()}.jsonl"
    if arguments.fresh:
        kept.unlink(missing_ok=True)
    limit = arguments.limit or LIMITS[card]
    found = pool.run(card, names, kept, arguments.processes, limit)
    print(", ".join(f"{n} {kind}" for kind, n in report.counts(found).items()))
    if len(names) == whole:
        about = {
            "torch": torch.__version__,
            "commit": _commit(),
            "date": datetime.date.today().isoformat(),
        }
        report.save(card, found, about)
    return 0


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
