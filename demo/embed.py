"""Sentences of very different lengths through one compiled encoder.

    python -m demo.embed

MiniLM, a real sentence encoder, is compiled once with symbolic batch and sequence
length. Every text is then embedded at its own length, without padding, and checked
against torch eager. Ends with status 1 if a result differs or anything was recompiled.
"""

from __future__ import annotations

import os
import sys
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import pliant
import zoo
from demo.texts import TEXTS
from pliant.compare.accuracy import eager
from pliant.compare.tables import mebibytes
from pliant.compare.timing import medians
from zoo.bert import minilm_folder

TOLERANCE = 1e-4
PAIRS = 8
TIMED = 6  # lengths, evenly spread over those of the texts
REPETITIONS = 7
THREADS = 1  # of both engines: with more, another process's load distorts the times
PLANNED = ((1, 16), (1, 128), (1, 512), (16, 128), (64, 512))

Tokens = tuple[torch.Tensor, torch.Tensor]  # ids and mask, (batch, seq) each


def load() -> tuple[nn.Module, list[Tokens]]:
    """The encoder, and every text as tokens."""
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        minilm_folder(), local_files_only=True
    )
    tokens: list[Tokens] = []
    for text in TEXTS:
        made = tokenizer(
            " ".join(text.split()),
            return_tensors="pt",
            truncation=True,
            max_length=512,
        )
        tokens.append((made["input_ids"], made["attention_mask"]))
    return zoo.build("minilm").model, tokens


def show_pairs(console: Console, vectors: torch.Tensor, lengths: list[int]) -> None:
    similarity = vectors @ vectors.T
    count = len(vectors)
    pairs = [(i, j) for i in range(count) for j in range(i)]
    pairs.sort(key=lambda pair: -similarity[pair].item())
    console.print("Nearest pairs", style="bold")
    table = Table()
    table.add_column("cosine", justify="right")
    table.add_column("text (its tokens)")
    table.add_column("nearest to (its tokens)")
    for i, j in pairs[:PAIRS]:
        shown = [f"{_short(TEXTS[k])} ({lengths[k]})" for k in (j, i)]
        table.add_row(f"{similarity[i, j].item():.3f}", *shown)
    console.print(table)


def _short(text: str, width: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"


def show_times(
    console: Console,
    encoder: nn.Module,
    model: pliant.CompiledModel,
    tokens: list[Tokens],
) -> None:
    ordered = sorted(tokens, key=lambda t: t[0].shape[1])
    chosen = [ordered[k * (len(ordered) - 1) // (TIMED - 1)] for k in range(TIMED)]
    console.print("Time per text at its own length, one thread each", style="bold")
    table = Table()
    for column in ("tokens", "eager ms", "pliant ms", "speed-up"):
        table.add_column(column, justify="right")
    for inputs in chosen:
        seconds = medians(
            {
                "eager": partial(eager, encoder, inputs),
                "pliant": partial(model, *inputs),
            },
            REPETITIONS,
        )
        theirs, ours = (seconds[name] * 1e3 for name in ("eager", "pliant"))
        table.add_row(
            str(inputs[0].shape[1]),
            f"{theirs:.2f}",
            f"{ours:.2f}",
            f"{theirs / ours:.2f}",
        )
    console.print(table)


def show_memory(console: Console, model: pliant.CompiledModel) -> None:
    console.print("Memory of a call in bytes, known before it runs", style="bold")
    console.print(f"peak = {model.peak_formula}", highlight=False, soft_wrap=True)
    table = Table()
    for column in ("batch", "seq", "peak MiB"):
        table.add_column(column, justify="right")
    for batch, seq in PLANNED:
        plan = model.memory_plan(batch=batch, seq=seq)
        table.add_row(str(batch), str(seq), mebibytes(plan.peak_bytes))
    console.print(table)


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    encoder, tokens = load()
    lengths = [ids.shape[1] for ids, _ in tokens]
    example = (torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long))
    shape = {0: "batch", 1: "seq"}
    torch.set_num_threads(THREADS)
    model = pliant.compile(encoder, example, (shape, shape), threads=THREADS)
    stats = model.stats()
    console.print(
        f"MiniLM compiled for every (batch, seq) in {stats['compile_seconds']:.1f} s: "
        f"{stats['kernel_calls']} kernel calls"
    )

    vectors = torch.cat([model(*pair) for pair in tokens])
    wanted = torch.cat([eager(encoder, pair) for pair in tokens])
    difference = (vectors - wanted).abs().max().item()
    show_pairs(console, vectors, lengths)
    show_times(console, encoder, model, tokens)
    show_memory(console, model)

    same = difference <= TOLERANCE  # False for NaN too
    once = model.compile_count == 1
    console.print(
        f"{len(tokens)} texts of {min(lengths)} to {max(lengths)} tokens, "
        f"{len(set(lengths))} different lengths, compiled {model.compile_count} time; "
        f"largest difference from eager {difference:.1e} "
        f"(allowed {TOLERANCE:.0e}): {'ok' if same and once else 'FAILED'}",
        style="green" if same and once else "red",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if same and once else 1


if __name__ == "__main__":
    sys.exit(main())
