"""Random models against their reference, for minutes: `make fuzz`, `make fuzz-onnx`.

    python tests/fuzz/hunt.py --minutes 20 [--seed 0] [--only aten.unfold.default]
    python tests/fuzz/hunt.py --of onnx [--only Conv]
    python tests/fuzz/hunt.py --of files [--only test_loop11]

Models of torch are compared with eager, those of ONNX with ONNX Runtime, and damaged
files are only read. A second process makes and judges them, so one that ends it, or
never ends, is reported like any other, with its seed. Of every fourth model of torch a
training step is judged instead, by its gradients. What fails is made smaller while it
still fails and printed as a program. The exit status is 1 if anything failed, or if
nothing was judged.
"""

from __future__ import annotations

import argparse
import base64
import collections
import os
import pickle
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from gradients import judge_gradients
from judge import Verdict, judge
from onnx_damage import damaged, judge_damaged
from onnx_judge import judge_onnx
from onnx_random import onnx_model
from random_models import model

PATIENCE = 120.0  # seconds of the processor that one model may take
IDLE = 600.0  # seconds in which it uses less: it waits for something
MOST_ATTEMPTS = 40  # to make a failing model smaller


class Worker:
    """The second process. A question gives an answer, or the Verdict that none came."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, *question: Any) -> Any:
        process = self.process or self.start()
        assert process.stdin and process.stdout
        process.stdin.write(packed(question))
        process.stdin.flush()
        ready = answered(process)
        line = process.stdout.readline() if ready else b""
        if line:
            return pickle.loads(base64.b64decode(line))
        if not ready:
            process.kill()
        status = process.wait()
        self.process = None
        if not ready:
            return Verdict("hang", f"no answer in {PATIENCE:.0f} s of the processor")
        return Verdict("crash", f"the process ended with status {status}")

    def start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--answer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PLIANT_GUARD_PAGES": "1", **os.environ},
        )
        return self.process

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin
            self.process.stdin.close()
            self.process.wait()


def answered(process: subprocess.Popen[bytes]) -> bool:
    """Whether an answer comes, however busy the machine is."""
    used, began = processor_seconds(process.pid), time.monotonic()
    while not select.select([process.stdout], [], [], 1.0)[0]:
        spent = processor_seconds(process.pid) - used
        if spent > PATIENCE or time.monotonic() - began > IDLE + 20 * spent:
            return False
    return True


def processor_seconds(process: int) -> float:
    """What a process and its threads have used so far."""
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def packed(value: Any) -> bytes:
    return base64.b64encode(pickle.dumps(value)) + b"\n"


def answers() -> None:
    """The second process: questions on stdin, answers on stdout."""
    import torch

    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin.buffer:
        what, *rest = pickle.loads(base64.b64decode(line))
        out.write(packed(ANSWERS[what](*rest)))
        out.flush()


ANSWERS: dict[str, Callable[..., Any]] = {
    "make": model,
    "judge": judge,
    "gradients": judge_gradients,
    "make onnx": onnx_model,
    "judge onnx": judge_onnx,
    "make files": damaged,
    "judge files": judge_damaged,
}


def question(of: str, seed: int) -> tuple[Any, ...]:
    """How a model is judged: the name of an answer, and what it is told."""
    if of != "torch":
        return (f"judge {of}",)
    if seed % 4 == 3:
        return ("gradients", seed % 8 == 3)  # of whole numbers
    return ("judge", None, 1 + seed % 2)


def shrunk(
    worker: Worker, failing: Any, verdict: Verdict, how: tuple[Any, ...]
) -> tuple[Any, Verdict]:
    """The smallest model found that fails in the same way."""
    what, *rest = how
    attempts, progress = 0, True
    while progress:
        progress = False
        for smaller in failing.smaller():
            if smaller == failing or attempts >= MOST_ATTEMPTS:
                continue
            attempts += 1
            found = worker.ask(what, smaller, *rest)
            if found.kind == verdict.kind:
                failing, verdict, progress = smaller, found, True
                break
    return failing, verdict


def reason(verdict: Verdict) -> str:
    """Why a model was refused, without its names and numbers."""
    text = verdict.text
    found = re.search(r"\n\s+(\S+): ([^\n]*)", text)
    if "UnsupportedOpError" in text and found:
        text = f"{found[1]}: {found[2]}"
    return re.sub(r"'[^']*'|\d+|\b[xv]\d+\b", "*", text.split("\n")[0])[:110]


def hunt(seconds: float, seed: int, only: str | None, of: str = "torch") -> int:
    worker = Worker()
    counts: collections.Counter[str] = collections.Counter()
    why: collections.Counter[str] = collections.Counter()
    used: collections.Counter[str] = collections.Counter()
    seen: set[tuple[str, ...]] = set()
    started = told = time.monotonic()
    while time.monotonic() < started + seconds:
        made = worker.ask("make" if of == "torch" else f"make {of}", seed, only)
        if isinstance(made, Verdict):  # the reference's own doing
            counts["reference failed"] += 1
            seed += 1
            continue
        how = question(of, seed)
        what, *rest = how
        verdict = worker.ask(what, made, *rest)
        counts[verdict.kind] += 1
        used.update(made.parts())
        if verdict.kind == "refused":
            why[reason(verdict)] += 1
        if verdict.bad:
            small, last = shrunk(worker, made, verdict, how)
            key = (last.kind, *sorted(set(small.parts())))
            if key not in seen:
                seen.add(key)
                print(f"--- seed {seed}: {last.kind}: {last.text}\n{small.script()}")
                sys.stdout.flush()
        seed += 1
        if time.monotonic() > told + 60:
            told = time.monotonic()
            minutes = (told - started) / 60
            print(f"{minutes:.0f} min: {dict(counts)}", file=sys.stderr, flush=True)
    worker.stop()
    total = max(sum(counts.values()), 1)
    print(f"{total} models, {len(used)} ops: {dict(counts)}")
    print(f"refused: {counts['refused'] / total:.1%}")
    for text, count in why.most_common(20):
        print(f"  {count:4} {text}")
    judged = sum(counts.values()) - counts["reference failed"]
    return 1 if seen or not judged else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()) * 1000)
    parser.add_argument("--of", choices=("torch", "onnx", "files"), default="torch")
    parser.add_argument("--only", help="an op that every model has, or the file")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        answers()
        return 0
    print(f"from seed {given.seed}", file=sys.stderr)
    return hunt(given.minutes * 60, given.seed, given.only, given.of)


if __name__ == "__main__":
    sys.exit(main())
