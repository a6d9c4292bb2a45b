"""Line charts as SVG, and the same as PNG (with pillow, the extra `plot`)."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pliant.errors import OptionError

COLOURS = ("#1f6feb", "#d1242f", "#8250df", "#1a7f37", "#bc4c00", "#57606a")
PALE = ("#9ec5fe", "#f1aeb5", "#d2b5f5", "#a3d9b1", "#ffd3a8", "#c8d1dc", "#ffe69c")
INK, GRID = "#24292f", "#d8dee4"
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 34, 44  # of the plot's frame
ROW = 18  # of the legend
LETTER = 7.5  # pixels, at most


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line; None breaks it."""

    name: str
    points: tuple[tuple[float, float | None], ...]
    steps: bool = False  # horizontal from each point to the next


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle of values; `number` is for the page that shows it.

    Its name is drawn where there is room for it.
    """

    left: float
    right: float
    low: float
    high: float
    number: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class NamedLine:
    """A horizontal line with its name: a peak, a limit."""

    name: str
    value: float
    colour: str = "#d1242f"


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    width: int = 760
    height: int = 340
    blocks: tuple[Bar, ...] = ()
    levels: tuple[NamedLine, ...] = ()
    ends: bool = False  # the last value stands beside each line


@dataclass(frozen=True, slots=True)
class ChartScale:
    """From values to pixels: the frame, and the values at its right and upper edge."""

    left: float
    right: float
    top: float
    bottom: float
    across: tuple[float, ...]
    up: tuple[float, ...]

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (
            self.left + (self.right - self.left) * x / self.across[-1],
            self.bottom - (self.bottom - self.top) * y / self.up[-1],
        )


def scale(chart: Chart) -> ChartScale:
    known = [(x, y) for s in chart.series for x, y in s.points if y is not None]
    known += [(block.right, block.high) for block in chart.blocks]
    tops = [y for _, y in known] + [level.value for level in chart.levels]
    return ChartScale(
        LEFT,
        chart.width - RIGHT,
        TOP,
        chart.height - BOTTOM,
        _whole(ticks(max((x for x, _ in known), default=1.0), 8)),
        tuple(ticks(max(tops, default=1.0))),
    )


@dataclass(frozen=True, slots=True)
class PlotLine:
    points: tuple[tuple[float, float], ...]
    colour: str
    width: float


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float  # of the middle
    words: str
    anchor: str = "start"  # start, middle, end
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Rectangle:
    x: float
    y: float
    width: float
    height: float
    colour: str
    number: int


Mark: TypeAlias = "PlotLine | Text | Rectangle"


def ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to the first that is not below `top`."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.999)
    return [step * k for k in range(math.ceil(top / step * 0.999) + 1)]


def _whole(found: Sequence[float]) -> tuple[float, ...]:
    """Those that are whole numbers: dims and steps are. At least two."""
    whole = tuple(value for value in found if value == int(value))
    return whole if len(whole) > 1 and whole[-1] == found[-1] else tuple(found)


def total_height(chart: Chart) -> int:
    return chart.height + ROW * len(chart.series)


def marks(chart: Chart) -> Iterator[Mark]:
    """What a chart consists of, in pixels from its upper left corner."""
    frame = scale(chart)
    across, up, at = frame.across, frame.up, frame.at
    right, bottom = frame.right, frame.bottom
    yield Text(LEFT, 14, chart.title, bold=True)
    for value in up:
        yield PlotLine((at(0, value), at(across[-1], value)), GRID, 1)
        yield Text(LEFT - 6, at(0, value)[1], f"{value:g}", "end")
    for value in across:
        yield Text(at(value, 0)[0], bottom + 12, f"{value:g}", "middle")
    yield PlotLine((at(0, 0), at(across[-1], 0)), INK, 1)
    yield Text(LEFT - 6, TOP - 12, chart.y_label, "end")
    yield Text((LEFT + right) / 2, bottom + 30, chart.x_label, "middle")
    pairs = [(s, COLOURS[k % len(COLOURS)]) for k, s in enumerate(chart.series)]
    for block in chart.blocks:
        x, y = at(block.left, block.high)
        x_end, y_end = at(block.right, block.low)
        colour = PALE[block.number % len(PALE)]
        yield Rectangle(x, y, x_end - x, y_end - y, colour, block.number)
        if LETTER * len(block.name) < x_end - x and y_end - y > ROW - 4:
            yield Text((x + x_end) / 2, (y + y_end) / 2, block.name, "middle")
    # The first series is on top; where others are the same, they are wider below it.
    layers = _layers(chart.series, up[-1])
    for k, (series, colour) in reversed(list(enumerate(pairs))):
        for run in _runs(series):
            yield PlotLine(tuple(at(x, y) for x, y in run), colour, 2 + 3 * layers[k])
        if chart.ends and not layers[k] and (last := _last(series)) is not None:
            x, y = at(*last)
            yield Text(x + 8, y, f"{last[1]:.0f} {chart.y_label}", bold=True)
    for level in chart.levels:
        ends = (at(0, level.value), at(across[-1], level.value))
        yield PlotLine(ends, level.colour, 1.5)
        yield Text(right, ends[0][1] - 8, level.name, "end", bold=True)
    for k, (series, colour) in enumerate(pairs):
        y = chart.height + ROW * k + 2
        yield PlotLine(((LEFT, y), (LEFT + 22, y)), colour, 3)
        yield Text(LEFT + 30, y, series.name)


def _layers(every: Sequence[Series], top: float) -> list[int]:
    """How many lines each lies below, at some point."""
    near = top / 50

    def meet(a: Series, b: Series) -> bool:
        there = dict(a.points)
        return any(
            y is not None
            and (other := there.get(x)) is not None
            and abs(y - other) < near
            for x, y in b.points
        )

    layers: list[int] = []
    for k, series in enumerate(every):
        below = [layers[j] for j in range(k) if meet(every[j], series)]
        layers.append(1 + max(below, default=-1))
    return layers


def _last(series: Series) -> tuple[float, float] | None:
    known = [(x, y) for x, y in series.points if y is not None]
    return known[-1] if known else None


def _runs(series: Series) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for x, y in series.points:
        if y is None:
            if run:
                yield run
            run = []
            continue
        if series.steps and run:
            run.append((x, run[-1][1]))
        run.append((x, y))
    if run:
        yield run


# --- SVG ------------------------------------------------------------------------


def svg(chart: Chart) -> str:
    """With the scale as attributes, for a page that moves things in it."""
    frame = scale(chart)
    values = {"left": frame.left, "right": frame.right, "top": frame.top}
    values |= {"bottom": frame.bottom, "across": frame.across[-1], "up": frame.up[-1]}
    data = "".join(f' data-{name}="{value:g}"' for name, value in values.items())
    return picture(marks(chart), chart.width, total_height(chart), data)


def picture(shown: Iterable[Mark], width: float, height: float, data: str = "") -> str:
    """Marks as one SVG."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}"{data}>'
        f"{''.join(map(_element, shown))}</svg>"
    )


def _element(mark: Mark) -> str:
    if isinstance(mark, Rectangle):
        return (
            f'<rect x="{mark.x:.1f}" y="{mark.y:.1f}" width="{mark.width:.1f}" '
            f'height="{max(mark.height, 0.5):.1f}" fill="{mark.colour}" stroke="white" '
            f'stroke-width="0.5" data-number="{mark.number}"/>'
        )
    if isinstance(mark, PlotLine):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.points)
        return (
            f'<polyline points="{points}" fill="none" stroke="{mark.colour}" '
            f'stroke-width="{mark.width:g}"/>'
        )
    weight = ' font-weight="bold"' if mark.bold else ""
    return (
        f'<text x="{mark.x:.1f}" y="{mark.y + 4:.1f}" text-anchor="{mark.anchor}" '
        f'pointer-events="none"{weight}>{html.escape(mark.words)}</text>'
    )


# --- PNG ------------------------------------------------------------------------

SCALE = 2  # pixels of the picture for one of the chart
_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def png(charts: Sequence[Chart]) -> bytes:
    """The charts, one below the other."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise OptionError(
            "a PNG needs pillow: pip install 'pliant[plot]'; an HTML file needs nothing"
        ) from error
    width = max(chart.width for chart in charts)
    heights = [total_height(chart) + ROW for chart in charts]
    image = Image.new("RGB", (width * SCALE, sum(heights) * SCALE), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(12 * SCALE)
    top = 0
    for chart, height in zip(charts, heights, strict=True):
        for mark in marks(chart):
            _paint(draw, font, mark, top)
        top += height
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _paint(draw: Any, font: Any, mark: Mark, top: int) -> None:
    if isinstance(mark, PlotLine):
        points = [(x * SCALE, (y + top) * SCALE) for x, y in mark.points]
        if len(points) == 1:
            points *= 2
        draw.line(points, fill=mark.colour, width=round(mark.width * SCALE))
        return
    if isinstance(mark, Rectangle):
        x, y = mark.x * SCALE, (mark.y + top) * SCALE
        ends = (x + mark.width * SCALE, y + mark.height * SCALE)
        draw.rectangle((x, y, *ends), fill=mark.colour, outline="white")
        return
    place = (mark.x * SCALE, (mark.y + top) * SCALE)
    draw.text(place, mark.words, INK, font, _ANCHORS[mark.anchor])
