"""Serves a language model over HTTP, as OpenAI's clients speak it.

MODEL is a GGUF file, or `smollm2` (see `pliant chat --help`). Requests share the model
by continuous batching. With --memory-limit, a request begins when everything with it
fits: weights, caches with room for the whole of each request, and the planned peak of
the largest call. Others wait, and one that could never run is refused with the numbers.
The limit is for what Pliant holds; Python and its packages need memory beside it.

    pliant serve smollm2 --memory-limit 1GiB
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Hello"}]}'

SIGTERM or Ctrl-C ends it: no new requests, and those that run have --grace seconds.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pliant
from pliant.commands.chat import smollm2
from pliant.errors import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or smollm2")
    parser.add_argument("--memory-limit", metavar="BYTES", help="such as 2GiB")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: one that is free")
    parser.add_argument("--name", help="of the model; default: that of its file")
    parser.add_argument(
        "--rows", type=int, default=64, metavar="COUNT", help="most requests at once"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="most of a request; default: what the model was trained for",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=512,
        metavar="COUNT",
        help="of a request that does not say",
    )
    parser.add_argument(
        "--waiting", type=int, default=1000, metavar="COUNT", help="most that wait"
    )
    parser.add_argument(
        "--grace", type=int, default=30, metavar="SECONDS", help="after SIGTERM"
    )
    parser.add_argument("--threads", type=int, help="default: every core")


def run(args: argparse.Namespace) -> int:
    try:
        import uvicorn

        from pliant.serving.app import Server, ServerSettings
    except ImportError as missing:
        raise OptionError(
            f"pliant serve needs the package {missing.name}: "
            "pip install 'pliant[serve]'"
        ) from None
    from pliant.language.batch import Batch

    path = smollm2() if args.model == "smollm2" else Path(args.model)
    name = args.name or ("smollm2" if args.model == "smollm2" else path.stem)
    with _listening(args.host, args.port) as listener:
        lm = pliant.load_gguf(path, threads=args.threads)
        batch = Batch(
            lm,
            memory_limit=args.memory_limit,
            most_rows=args.rows,
            context=args.context,
        )
        server = Server(batch, ServerSettings(name, args.max_new_tokens, args.waiting))
        config = uvicorn.Config(
            server.app,
            log_level="warning",
            timeout_graceful_shutdown=args.grace,
            lifespan="on",
        )
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if args.json:
            told = {"model": name, "url": url, "memory_limit": batch.limit}
            print(json.dumps(told), flush=True)
        else:
            print(f"serving {name} at {url}", file=sys.stderr, flush=True)
        with _no_signals():
            uvicorn.Server(config).run(sockets=[listener])
    return 0


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()  # from now on no other server can have the port
        except (OSError, OverflowError) as error:
            raise OptionError(
                f"cannot listen at {host}, port {port}: {error}"
            ) from None
        yield listener


@contextmanager
def _no_signals() -> Iterator[None]:
    """The signals that end the server do not end the process by themselves.

    uvicorn raises them once more when it has stopped.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
