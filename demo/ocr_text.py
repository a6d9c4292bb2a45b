"""From a page to what the models take, and from what they give to boxes and text.

    detection    page -> how likely each pixel is text -> boxes of connected ones
    direction    a line -> whether it is upside down
    recognition  a line, as wide as it is -> a character for every few columns

Boxes are upright: the pages have no slanted lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

THRESHOLD = 0.3  # of a pixel that is text
SURE = 0.5  # the mean over a box
UNCLIP = 1.6  # the model marks the core of a line: area to perimeter, times this
HEIGHT = 48  # of a line when it is read
DIRECTION_WIDTH = 192  # so much of a line tells which way up it is
TURNED = 0.9  # as likely must a line be upside down to be turned

Array = np.ndarray[Any, Any]
Model = Callable[[Array], Array]
Box = tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True)
class Models:
    detect: Model
    direct: Model
    read: Model


@dataclass(frozen=True)
class Found:
    box: Box
    text: str
    score: float
    turned: bool


def read_page(models: Models, image: Array, characters: list[str]) -> list[Found]:
    chance = models.detect(page_input(image))[0, 0]
    found = []
    for box in boxes(chance, image.shape[0], image.shape[1]):
        left, top, right, bottom = box
        line = image[top:bottom, left:right]
        start = np.ascontiguousarray(line_input(line)[..., :DIRECTION_WIDTH])
        turned = bool(models.direct(start)[0, 1] > TURNED)
        line = line[::-1, ::-1] if turned else line
        text, score = decode(models.read(line_input(line))[0], characters)
        found.append(Found(box, text, score, turned))
    return found


# ---- what the models take


def page_input(image: Array) -> Array:
    """The model halves a page five times."""
    height, width = (max(32, round(side / 32) * 32) for side in image.shape[:2])
    return _normal(
        Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
    )


def line_input(line: Array) -> Array:
    """A line of the height that models want, and as wide as it then is."""
    width = max(1, round(HEIGHT * line.shape[1] / line.shape[0]))
    return _normal(
        Image.fromarray(line).resize((width, HEIGHT), Image.Resampling.BILINEAR)
    )


def _normal(image: Any) -> Array:
    """(1, 3, height, width) from -1 to 1, blue first."""
    pixels = np.asarray(image, np.float32)[..., ::-1] / 127.5 - 1
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


# ---- what they give


def boxes(chance: Array, height: int, width: int) -> list[Box]:
    """The boxes of what is connected, from top to bottom, in pixels of the page."""
    labels, count = connected(chance > THRESHOLD)
    tall, wide = height / chance.shape[0], width / chance.shape[1]
    found: list[Box] = []
    for number in range(1, count + 1):
        rows, columns = np.nonzero(labels == number)
        top, bottom = rows.min(), rows.max() + 1
        left, right = columns.min(), columns.max() + 1
        sides = bottom - top, right - left
        if min(sides) < 3 or chance[top:bottom, left:right].mean() < SURE:
            continue
        more = sides[0] * sides[1] * UNCLIP / (2 * (sides[0] + sides[1]))
        box = (left - more) * wide, (top - more) * tall
        far = (right + more) * wide, (bottom + more) * tall
        found.append(
            (
                max(0, int(box[0])),
                max(0, int(box[1])),
                min(width, int(far[0] + 1)),
                min(height, int(far[1] + 1)),
            )
        )
    return sorted(found, key=lambda b: (b[1], b[0]))


def connected(mask: Array) -> tuple[Array, int]:
    """Runs of each row, joined with those of the row above that they touch."""
    labels = np.zeros(mask.shape, np.int32)
    parent = [0]

    def root(n: int) -> int:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for y, row in enumerate(mask):
        edges = np.flatnonzero(np.diff(row.astype(np.int8), prepend=0, append=0))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            above = labels[y - 1, max(0, start - 1) : end + 1] if y else labels[0, :0]
            touched = {root(int(n)) for n in np.unique(above) if n}
            if not touched:
                parent.append(len(parent))
                touched = {len(parent) - 1}
            first = min(touched)
            for other in touched:
                parent[other] = first
            labels[y, start:end] = first
    roots = sorted({root(n) for n in range(1, len(parent))})
    number = {r: k + 1 for k, r in enumerate(roots)}
    final = np.array([0, *(number[root(n)] for n in range(1, len(parent)))], np.int32)
    return final[labels], len(roots)


def decode(chances: Array, characters: list[str]) -> tuple[str, float]:
    """The likeliest character of each column; one that stays counts once, 0 is none."""
    best = chances.argmax(1)
    new = np.concatenate([[True], best[1:] != best[:-1]]) & (best != 0)
    text = "".join(characters[k] for k in best[new])
    return text, float(chances.max(1)[new].mean()) if new.any() else 0.0
