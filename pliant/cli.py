"""The command line: `pliant <command>`. Exit status 0, 1 (failed) or 2 (usage)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

import pliant
from pliant.commands import (
    bench,
    chat,
    compile,
    doctor,
    explain,
    inspect,
    opt,
    report,
    run,
)
from pliant.errors import OptionError, PliantError

COMMANDS: tuple[ModuleType, ...] = (
    bench,
    chat,
    compile,
    doctor,
    explain,
    inspect,
    opt,
    report,
    run,
)
FAILED, USAGE, INTERRUPTED = 1, 2, 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="pliant", description=pliant.__doc__)
    top.add_argument("--version", action="version", version=pliant.__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for module in COMMANDS:
        entry = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        entry.add_argument("--json", action="store_true", help="print JSON")
        module.add_arguments(entry)
        entry.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except OptionError as problem:
        print(f"pliant {arguments.command}: {problem}", file=sys.stderr)
        return USAGE
    except PliantError as problem:
        print(f"pliant {arguments.command}: {problem}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
