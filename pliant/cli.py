"""The command line: `pliant <command>`. Exit status 0, 1 (failed) or 2 (usage).

A command is imported when it is run: `pliant run` starts without LLVM and torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Collection, Sequence

import pliant
from pliant.errors import OptionError, PliantError

COMMANDS: dict[str, str] = {
    "bench": "times models against other engines",
    "cache": "what is kept between processes; clears it",
    "chat": "talk with a language model",
    "compile": "a model to a file that runs without its compiler",
    "completion": "a script that completes command lines, for a shell",
    "doctor": "what pliant found on this machine, and whether it works",
    "explain": "what a model is compiled to",
    "inspect": "the memory of a call, before it runs; what is in a saved model",
    "opt": "run stages of the compiler on a module in text form",
    "report": "memory, kernels, guards and stages of a model in one HTML file",
    "run": "a saved model on arrays",
    "serve": "a language model over HTTP, within a memory limit",
    "verify": "a compiled model against the one it was made of, at random sizes",
}
EXTRAS = {"torch": "torch", "onnx": "onnx", "gguf": "llm", "tokenizers": "llm"}
FAILED, USAGE, INTERRUPTED = 1, 2, 130


def parser(wanted: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Of all commands; only the `wanted` ones know their arguments."""
    top = argparse.ArgumentParser(prog="pliant", description=pliant.__doc__)
    top.add_argument("--version", action="version", version=pliant.__version__)
    top.set_defaults(parser=parser)
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name, help in COMMANDS.items():
        if name not in wanted:
            commands.add_parser(name, help=help, add_help=False)
            continue
        module = importlib.import_module(f"pliant.commands.{name}")
        entry = commands.add_parser(
            name,
            help=help,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        entry.add_argument("--json", action="store_true", help="print JSON")
        entry.add_argument(
            "--debug", action="store_true", help="show where in pliant an error is from"
        )
        module.add_arguments(entry)
        entry.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    named = [word for word in words if not word.startswith("-")][:1]
    arguments = parser(named).parse_args(words)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as problem:
        return _failed(arguments, problem)
    return status


def _failed(arguments: argparse.Namespace, problem: Exception) -> int:
    """Says what went wrong: the user's mistake, or with its class an error of ours."""
    if arguments.debug:
        traceback.print_exception(problem)
    if isinstance(problem, ModuleNotFoundError) and problem.name in EXTRAS:
        extra = EXTRAS[problem.name]
        problem = PliantError(
            f"this needs {problem.name}: pip install 'pliant[{extra}]'"
        )
    known = isinstance(problem, PliantError)
    text = str(problem) if known else f"{type(problem).__name__}: {problem}"
    hint = "" if known or arguments.debug else " (--debug shows where)"
    print(f"pliant {arguments.command}: {text}{hint}", file=sys.stderr)
    return USAGE if isinstance(problem, OptionError) else FAILED


if __name__ == "__main__":
    sys.exit(main())
