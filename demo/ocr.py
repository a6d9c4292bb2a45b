"""Pages of different sizes read by three models, each compiled once.

    make demo-ocr

PP-OCRv4 finds the lines of a page, tells which are upside down, and reads them, each at
its own width. The models are those of the rapidocr-onnxruntime wheel; ONNX Runtime
computes the same, and its times and memory stand beside. Pages with the boxes and texts
that were found are written as PNG. Ends with status 1 if a text differs from ONNX
Runtime's, if fewer than TEXTS_RIGHT of the lines are as they were drawn, or if anything
was recompiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table

import pliant
from demo.ocr_pages import Page, pages
from demo.ocr_text import Array, Found, Model, Models, page_input, read_page
from pliant.compare.timing import medians

FILES = {
    "detect": "ch_PP-OCRv4_det_infer.onnx",
    "direct": "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "read": "ch_PP-OCRv4_rec_infer.onnx",
}
ENGINES = ("onnxruntime", "pliant")
TEXTS_RIGHT = 0.9
REPETITIONS = 5
TOLERANCE = 1e-3  # of chances
THREADS = 1


def characters(folder: Path) -> list[str]:
    """What the reading model may answer: nothing, those in its file, a space."""
    model = onnx.load(folder / FILES["read"], load_external_data=False)
    listed = next(p.value for p in model.metadata_props if p.key == "character")
    return ["", *listed.splitlines(), " "]


def load(engine: str, folder: Path) -> Models:
    make = {"pliant": compiled, "onnxruntime": session}[engine]
    return Models(**{name: make(folder / file) for name, file in FILES.items()})


def compiled(path: Path) -> Any:
    return pliant.compile(str(path), threads=THREADS)


def session(path: Path) -> Model:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = THREADS
    made = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    name = made.get_inputs()[0].name

    def call(x: Array) -> Array:
        answer: Array = made.run(None, {name: x})[0]
        return answer

    return call


# ---- what came out


def right(page: Page, found: list[Found]) -> int:
    """Lines whose text was read as it was drawn."""
    texts = {_letters(f.text) for f in found}
    return sum(_letters(line.text) in texts for line in page.lines)


def _letters(text: str) -> str:
    """Without spaces: how wide one is drawn is the font's affair."""
    return "".join(text.split()).lower()


def picture(page: Page, found: list[Found]) -> Any:
    """The page, and beside it what was read, each text in its box."""
    height, width = page.image.shape[:2]
    whole = Image.new("RGB", (2 * width, height), "white")
    whole.paste(Image.fromarray(page.image), (0, 0))
    pen = ImageDraw.Draw(whole)
    for each in found:
        left, top, _, bottom = each.box
        pen.rectangle(each.box, outline="firebrick" if each.turned else "seagreen")
        font = ImageFont.load_default(max(8, int(0.55 * (bottom - top))))
        pen.text((left + width, top + 2), each.text, "black", font)
    return whole


def table(console: Console, title: str, columns: str, rows: list[list[str]]) -> None:
    console.print(title, style="bold")
    made = Table()
    for column in columns.split(","):
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(*row)
    console.print(made)


def show_times(
    console: Console, drawn: list[Page], run: Mapping[str, Callable[[Page], Any]]
) -> None:
    rows, ratios = [], []
    for page in drawn:
        turns = {name: partial(call, page) for name, call in run.items()}
        seconds = medians(turns, REPETITIONS)
        ratios.append(seconds["onnxruntime"] / seconds["pliant"])
        height, width = page.image.shape[:2]
        shown = [f"{seconds[name] * 1e3:.0f}" for name in ENGINES]
        rows.append([f"{width} x {height}", *shown, f"{ratios[-1]:.2f}"])
    mean = float(np.exp(np.mean(np.log(ratios))))
    rows.append(["geometric mean", "", "", f"{mean:.2f}"])
    title = f"Time per page, all models, {THREADS} thread"
    table(console, title, "page,onnxruntime ms,pliant ms,speed-up", rows)


# ---- memory: a process of its own for each engine


def peak(engine: str, folder: Path) -> None:
    """Prints the MiB that loading and reading all pages add to what was there."""
    drawn, listed = pages(), characters(folder)
    before = _resident("VmRSS")
    models = load(engine, folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    loaded = _resident("VmRSS")
    for page in drawn:
        read_page(models, page.image, listed)
    print(json.dumps([loaded - before, _resident("VmHWM") - before]))


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) / 1024 for x in lines if x.startswith(field))


def show_memory(console: Console, folder: Path) -> None:
    rows = []
    for engine in ENGINES:
        command = [sys.executable, "-m", "demo.ocr", str(folder), "--peak", engine]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        loaded, most = json.loads(answer.stdout.splitlines()[-1])
        rows.append([engine, f"{loaded:.0f}", f"{most:.0f}"])
    title = "Memory that models add to a process"
    table(console, title, "engine,loaded MiB,peak MiB", rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo.ocr", description="Reads pages.")
    parser.add_argument("folder", type=Path, help="where the wheel's models are")
    parser.add_argument("--output", type=Path, help="folder of the pictures")
    parser.add_argument("--peak", choices=ENGINES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        peak(given.peak, given.folder)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    drawn, listed = pages(), characters(given.folder)
    models, seconds = {}, {}
    for engine in ENGINES:
        started = perf_counter()
        models[engine] = load(engine, given.folder)
        seconds[engine] = perf_counter() - started
    console.print(
        f"Three models compiled for every size in {seconds['pliant']:.1f} s; "
        f"ONNX Runtime loaded them in {seconds['onnxruntime']:.1f} s"
    )
    run = {e: partial(_read, models[e], listed) for e in ENGINES}
    rows, same, good, apart = [], True, 0, 0.0
    for number, page in enumerate(drawn):
        ours, theirs = run["pliant"](page), run["onnxruntime"](page)
        same &= [f.text for f in ours] == [f.text for f in theirs]
        count, turned = right(page, ours), sum(f.turned for f in ours)
        good += count
        given_page = page_input(page.image)
        chances = [models[e].detect(given_page) for e in ENGINES]
        apart = max(apart, float(np.abs(chances[0] - chances[1]).max()))
        height, width = page.image.shape[:2]
        lines = f"{count} of {len(page.lines)}"
        rows.append([f"{width} x {height}", str(len(ours)), lines, str(turned)])
        if given.output:
            given.output.mkdir(parents=True, exist_ok=True)
            picture(page, ours).save(given.output / f"page{number}.png")
    table(console, "Read", "page,boxes,lines as drawn,turned", rows)
    if given.output:
        console.print(f"Pictures are in {given.output}", highlight=False)
    show_times(console, drawn, run)
    show_memory(console, given.folder)
    every = sum(len(page.lines) for page in drawn)
    once = all(getattr(models["pliant"], n).compile_count == 1 for n in FILES)
    fine = same and once and apart <= TOLERANCE and good >= TEXTS_RIGHT * every
    console.print(
        f"{good} of {every} lines read as drawn, texts as ONNX Runtime's: {same}, "
        f"largest difference of a chance {apart:.1e} (allowed {TOLERANCE:.0e}), each "
        f"model compiled once: {once}: {'ok' if fine else 'FAILED'}",
        style="green" if fine else "red",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if fine else 1


def _read(models: Models, listed: list[str], page: Page) -> list[Found]:
    return read_page(models, page.image, listed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main())
