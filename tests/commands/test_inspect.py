"""`pliant inspect`: what it prints, draws, and its exit status."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from pliant.cli import main
from pliant.report import drawing

NET = f"{Path(__file__).with_name('tiny.py')}:net"
AT = ["inspect", NET, "--threads", "1", "--memory", "batch=2,seq=3000"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", NET],
        ["inspect", NET, "--memory", "batch"],
        ["inspect", NET, "--memory", "batch=2"],
        ["inspect", NET, "--memory", "batch=2,rows=3"],
        ["inspect", NET, "--memory", "batch=2,seq=-3"],
        [*AT, "--plot", "picture.gif"],
        [*AT, "--plot", "picture.html", "--over", "rows"],
        [*AT, "--memory-limit", "much"],
    ],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    told = capsys.readouterr()
    assert told.err and not told.out


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(AT) == 0
    told = capsys.readouterr().out
    for words in ("peak ", "lower bound", "formula", "live at the peak", "batch*seq"):
        assert words in told
    assert re.search(r"384000 +\d+\.\d% +\w+ +f32\[batch, seq, 16\]", told)


def test_text_calls_symbols_by_the_names_of_dims(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*AT[:1], NET.replace(":net", ":unnamed"), *AT[2:]]) == 0
    told = capsys.readouterr().out
    assert "batch*seq" in told and "f32[batch, seq, 16]" in told
    assert not re.search(r"\bs\d", told)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*AT, "--json"]) == 0
    told: Any = json.loads(capsys.readouterr().out)
    assert told["dims"] == told["symbols"] == {"batch": 2, "seq": 3000}
    assert told["peak_bytes"] == told["arena_bytes"] + told["output_bytes"]
    assert told["output_bytes"] == 2 * 3000 * 4 * 4
    assert max(m["live_bytes"] for m in told["timeline"]) == told["lower_bound"]
    assert told["timeline"][told["peak_step"]]["live_bytes"] == told["lower_bound"]
    assert told["live"][0]["bytes"] == 2 * 3000 * 16 * 4


def test_what_a_limit_saves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*AT, "--memory-limit", "1GiB"]) == 0
    assert "saved        0 bytes of " in capsys.readouterr().out


def test_a_limit_that_cannot_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*AT, "--memory-limit", "1KiB"]) == 1
    told = capsys.readouterr()
    assert "limit" in told.err and not told.out


def test_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.html"
    assert main([*AT, "--plot", str(path)]) == 0
    text = path.read_text()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    pictures = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(pictures) == text.count('class="frame"') + 1 > 10
    assert text.count('class="frame">') == 1  # the others wait for the slider
    for picture in pictures:
        words = [
            t.text for t in ElementTree.fromstring(picture) if t.tag[-4:] == "text"
        ]
        assert "all optimisations" in words and "without order" in words


def test_png(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "memory.png"
    assert main([*AT, "--plot", str(path)]) == 0
    with Image.open(path) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
        assert picture.size[0] == 760 * drawing.SCALE
    blue, red = (31, 111, 235), (209, 36, 47)  # with and without an optimisation
    assert {blue, red} <= colours

    def without_pillow(name: str, *rest: Any, **more: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return found(name, *rest, **more)

    found = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without_pillow)
    assert main([*AT, "--plot", str(tmp_path / "other.png")]) == 2
    assert "pliant[plot]" in capsys.readouterr().err


def test_ticks() -> None:
    assert drawing.ticks(1.9) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert drawing.ticks(0) == [0.0, 1.0]
    for top in (1e-3, 0.7, 1, 3, 99, 12345):
        assert drawing.ticks(top)[-1] >= top * 0.999


def test_lines_break_where_nothing_is_known() -> None:
    points = ((0, 1.0), (1, 2.0), (2, None), (3, 1.0))
    chart = drawing.Chart("t", "x", "y", (drawing.Series("<s>", points),))
    lines = [m for m in drawing.marks(chart) if isinstance(m, drawing.PlotLine)]
    drawn = [m for m in lines if m.colour == drawing.COLOURS[0]]
    assert [len(m.points) for m in drawn] == [2, 1, 2]  # the last is the legend's
    assert "&lt;s&gt;" in drawing.svg(chart)
