"""The report in a real browser: it loads, slides, and shows the API's numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import pliant
from tests.browser.driver import Browser, browser, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

DIMS = {"batch": 2, "seq": 256}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(x @ x.transpose(1, 2), -1)
        scores = scores * scores.sigmoid()
        y = scores @ x
        return y + self.down(torch.nn.functional.gelu(self.up(y)))


@pytest.fixture(scope="module")
def model() -> pliant.CompiledModel:
    watch = pliant.Instruments(profile=True, keep_ir=True)
    x = torch.randn(2, 8, 32)
    shapes = ({0: "batch", 1: "seq"},)
    return pliant.compile(Attention(), (x,), shapes, threads=1, instruments=watch)


@pytest.fixture(scope="module")
def page(
    model: pliant.CompiledModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Browser, Path]]:
    folder = tmp_path_factory.mktemp("report")
    model.report(folder / "report.html", torch.randn(2, 256, 32))
    with browser() as made:
        made.open(folder / "report.html")
        yield made, folder


def test_the_file_needs_no_network(page: tuple[Browser, Path]) -> None:
    text = (page[1] / "report.html").read_text()
    outside = re.findall(
        r"(?:src|href)=|url\(|https?://(?!www\.w3\.org/2000/svg)", text
    )
    assert outside == []
    assert page[0].errors() == []


def test_it_has_what_the_model_has(
    page: tuple[Browser, Path], model: pliant.CompiledModel
) -> None:
    text = page[0].run("return document.body.innerText")
    plan = model.memory_plan(**DIMS)
    assert f"{plan.peak_bytes} bytes" in text and model.peak_summary in text
    for title in ("Memory over time", "Kernels", "Guards and assumptions", "Stages"):
        assert title in text
    assert "test_report_page.py" in text  # lines of the model
    names = page[0].run(
        "return [...document.querySelectorAll('.stage > summary')]"
        ".map(e => e.innerText)"
    )
    stages = [name.split()[0] for name in names]
    assert stages[0] == "import" and "fuse" in stages and stages[-1] == "unify"
    assert page[0].run("return document.querySelectorAll('.diff .new').length") > 5


@pytest.mark.parametrize("dim", ["batch", "seq"])
def test_the_slider(
    page: tuple[Browser, Path], model: pliant.CompiledModel, dim: str
) -> None:
    move = """
        const slider = document.querySelector(`input.size[data-dim="${arguments[0]}"]`);
        slider.value = arguments[1];
        slider.dispatchEvent(new Event("input"));
        const at = `section[data-dim="${arguments[0]}"]`;
        document.querySelector(at + ".peak").setLimit(1e15);
        return [
          document.querySelector(at + ".memory output").textContent,
          document.querySelector(at + ".peak .plan").dataset.peak,
          document.querySelectorAll(at + ".memory .frame:not([hidden]) rect").length,
        ]"""
    for k in range(3):
        size, peak, values = page[0].run(move, dim, k)
        at = {**DIMS, dim: int(size)}
        assert int(peak) == model.memory_plan(**at).peak_bytes
        assert values == len(model.memory_timeline(**at).placed)


def test_the_limit_is_dragged(
    page: tuple[Browser, Path], model: pliant.CompiledModel
) -> None:
    where = page[0].run("""
        const s = document.querySelector('section.peak[data-dim="seq"]');
        s.scrollIntoView();
        const svg = s.querySelector("svg"), box = svg.getBoundingClientRect();
        return [box.left, box.top, Number(svg.dataset.top),
                Number(svg.dataset.bottom)]""")
    left, above, top, bottom = where
    at = {**DIMS, "seq": 64}
    page[0].run("""
        const slider = document.querySelector('input.size[data-dim="seq"]');
        slider.value = report.sizes.seq.findIndex(at => at.size === 64);
        slider.dispatchEvent(new Event("input"))""")
    said = "return document.querySelector('section.peak[data-dim=seq] .plan').innerText"
    y = above + bottom
    page[0].drag(left + 300, above + (top + bottom) / 2, y)
    assert "refused, it needs" in page[0].run(said)
    page[0].drag(left + 300, y, above + top)
    assert f"({model.memory_plan(**at).peak_bytes} bytes)" in page[0].run(said)
    page[0].screenshot(page[1] / "limit.png")


def test_pointing_at_a_value(page: tuple[Browser, Path]) -> None:
    x, y = page[0].run("""
        window.scrollTo(0, 0);
        const at = 'section.memory[data-dim="batch"] .frame:not([hidden]) rect';
        const boxes = [...document.querySelectorAll(at)];
        const box_of = e => e.getBoundingClientRect();
        const area = e => box_of(e).width * box_of(e).height;
        boxes.sort((a, b) => area(b) - area(a));
        boxes[0].scrollIntoView({block: "center"});
        const box = boxes[0].getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2]""")
    page[0].point(x, y)
    tip = page[0].run("return document.getElementById('tip').innerText")
    assert re.search(r"f32\[.*\], \d+ bytes, steps \d+ to \d+; by \w+ \(.*\)", tip)
