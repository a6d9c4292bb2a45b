"""`python -m bench.papers NAME.. [--minutes M]`: see the package."""

from __future__ import annotations

import argparse
import importlib
import sys

import torch

from bench.papers import Run
from bench.script import save, show, tell

NAMES = ("bladedisc", "disc", "relax", "ftuner")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.papers", description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*NAMES, "all"], metavar="NAME")
    parser.add_argument("--minutes", type=float, help="for each experiment")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    names = NAMES if "all" in arguments.names else arguments.names
    modules = {name: importlib.import_module(f"bench.papers.{name}") for name in names}
    minutes = {n: arguments.minutes or m.MINUTES for n, m in modules.items()}
    tell(sum(minutes.values()), ", ".join(modules))
    torch.set_num_threads(arguments.threads)
    for name, module in modules.items():
        share = minutes[name] / module.MINUTES
        found = module.run(Run(arguments.threads, share))
        show(found.tables)
        for note in found.notes:
            print(note)
        if share >= 1:
            save(
                f"papers_{name}", found.content, found.tables, found.rounds, found.notes
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
