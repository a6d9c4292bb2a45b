"""Shows what pliant keeps between processes, or clears it.

Kept are kernels, whole compiled programs and measurements of the machine, in a folder
that only its user may write to: PLIANT_CACHE, or pliant in the user's cache folder.
What was used longest ago goes once it holds more than PLIANT_CACHE_MIB. Clearing it is
safe at any time; models that are compiled or loaded stay as they are.
"""

from __future__ import annotations

import argparse
import json

from pliant import cache

WORDS = ("show", "clear")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=WORDS, default="show")


def run(args: argparse.Namespace) -> int:
    disk = cache.disk()
    if disk is None:
        print(json.dumps({"folder": None}) if args.json else "the cache is off")
        return 0
    problem = disk.problem()
    before = disk.usage()
    if args.what == "clear":
        disk.trim(0)
    kinds = disk.kinds()
    content = {
        "folder": str(disk.folder),
        "limit_bytes": disk.limit,
        "entries": sum(usage.entries for usage in kinds.values()),
        "bytes": sum(usage.bytes for usage in kinds.values()),
        "kinds": {
            kind: {"entries": usage.entries, "bytes": usage.bytes}
            for kind, usage in kinds.items()
        },
        "problem": problem,
    }
    if args.what == "clear":
        content["removed_bytes"] = before.bytes - disk.usage().bytes
    if args.json:
        print(json.dumps(content, indent=1))
        return int(problem is not None)
    print(f"{disk.folder}, at most {disk.limit >> 20} MiB")
    if args.what == "clear":
        print(f"  removed {before.entries} entries, {before.bytes / 2**20:.1f} MiB")
    for kind, usage in kinds.items():
        print(f"  {kind:14} {usage.entries:6} entries {usage.bytes / 2**20:8.1f} MiB")
    if problem is not None:
        print(f"  {problem}")
    return int(problem is not None)
