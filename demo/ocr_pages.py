"""Pages to read, drawn with Pillow: every line with its text and where it is."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

TEXT = (
    "batch shape stride kernel matrix vector thread buffer symbol guard plan memory "
    "compiler model layer weight sequence dynamic static once every page letter paper "
    "river mountain garden window morning evening winter summer silver copper"
)
WORDS = TEXT.split()
# Width, height, size of the letters, lines that are upside down.
PAGES = (
    (480, 320, 22, 0),
    (640, 480, 20, 2),
    (900, 240, 30, 0),
    (360, 720, 18, 1),
    (800, 1000, 24, 3),
    (1280, 704, 28, 0),
)


@dataclass(frozen=True)
class Line:
    text: str
    box: tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True)
class Page:
    image: Any  # uint8, (height, width, 3)
    lines: tuple[Line, ...]


def draw(width: int, height: int, letters: int, turned: int, seed: int) -> Page:
    rng = random.Random(seed)
    paper = Image.new("RGB", (width, height), (250, 248, 242))
    font = ImageFont.load_default(letters)
    lines: list[Line] = []
    top = letters
    while top + 2 * letters < height:
        text = _sentence(rng, font, width - 3 * letters)
        left = letters + rng.randrange(letters)
        box = ImageDraw.Draw(paper).textbbox((left, top), text, font=font)
        x0, y0, x1, y1 = (int(v) for v in box)
        tile = Image.new("RGB", (x1 - x0 + 8, y1 - y0 + 8), (250, 248, 242))
        ImageDraw.Draw(tile).text(
            (left - x0 + 4, top - y0 + 4), text, (30, 30, 60), font
        )
        if len(lines) < turned:
            tile = tile.rotate(180)
        paper.paste(tile, (x0 - 4, y0 - 4))
        lines.append(Line(text, (x0, y0, x1, y1)))
        top += int(letters * rng.choice((1.9, 2.3, 3.0)))
    return Page(np.asarray(paper), tuple(lines))


def _sentence(rng: random.Random, font: Any, room: int) -> str:
    text = rng.choice(WORDS).capitalize()
    wanted = rng.uniform(0.3, 1.0) * room
    while True:
        longer = f"{text} {rng.choice((*WORDS, str(rng.randrange(1000))))}"
        if font.getlength(longer) > wanted:
            return text
        text = longer


def pages() -> list[Page]:
    return [draw(*page, seed) for seed, page in enumerate(PAGES)]
