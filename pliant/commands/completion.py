"""Prints a script that completes `pliant` command lines.

    eval "$(pliant completion bash)"      in ~/.bashrc
    eval "$(pliant completion zsh)"       in ~/.zshrc, after compinit
    pliant completion fish > ~/.config/fish/completions/pliant.fish

The script has the commands and options of this version in it, so that pressing tab
starts no Python.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping

Options = Mapping[str, tuple[str, ...]]  # of each command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SCRIPTS))


def run(args: argparse.Namespace) -> int:
    script = SCRIPTS[args.shell](_options(args.parser()))
    print(json.dumps({"script": script}) if args.json else script)
    return 0


def _options(top: argparse.ArgumentParser) -> Options:
    """Options and fixed words of every command."""
    found: dict[str, tuple[str, ...]] = {}
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found[name] = tuple(_words(command))
    return found


def _words(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in command._actions:
        yield from action.option_strings
        if not action.option_strings and action.choices is not None:
            yield from map(str, action.choices)


def _bash(options: Options) -> str:
    cases = "\n".join(
        f"    {name}) words='{' '.join(words)}' ;;" for name, words in options.items()
    )
    return f"""\
_pliant() {{
  local words='{" ".join(options)} --help --version' word=${{COMP_WORDS[COMP_CWORD]}}
  if [ "$COMP_CWORD" -gt 1 ]; then
    case ${{COMP_WORDS[1]}} in
{cases}
    *) words='' ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _pliant pliant"""


def _zsh(options: Options) -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(options)}"


def _fish(options: Options) -> str:
    lines = [
        "complete -c pliant -n __fish_use_subcommand -f "
        f"-a '{' '.join(options)} --help --version'"
    ]
    lines += [
        f"complete -c pliant -n '__fish_seen_subcommand_from {name}' "
        f"-a '{' '.join(words)}'"
        for name, words in options.items()
    ]
    return "\n".join(lines)


SCRIPTS: Mapping[str, Callable[[Options], str]] = {
    "bash": _bash,
    "fish": _fish,
    "zsh": _zsh,
}
