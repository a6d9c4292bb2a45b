"""Orders of real models: as good as an order searched with the sizes known."""

from __future__ import annotations

from pathlib import Path

import pytest

import pliant
from pliant.options import Options
from pliant.passes.order import calls_of, oracle_peak, orders, peak_at
from pliant.sym.points import random_points

ZOO = Path(__file__).parents[2].parent / "shared" / "zoo"
FEW = (("bert", {"layers": 2, "hidden": 128}), ("vit", {"layers": 1}))
ALL = ("minilm", "gpt2", "llama", "t5_encoder", "resnet", "evoformer", "unet")

pytestmark = pytest.mark.skipif(
    not ZOO.is_dir(), reason="the zoo is not beside the repository"
)


def check(name: str, how: dict[str, int], shapes: int) -> None:
    case = getattr(pytest.importorskip("zoo"), name)(**how)
    program = pliant.compile(
        case.model,
        case.inputs(*case.example),
        case.dynamic_shapes,
        options=Options(order=False, inplace=False),
    )._program
    module, facts = program.lowered, program.facts
    found = orders(module.main, module, facts)
    assert 1 <= len(found) <= 4 and any(one.proved for one in found)
    sizes = calls_of(module.main, module).bytes
    names = {s for e in sizes for s in e.symbols()} - {"threads"}
    for point in random_points(facts, names, 3, shapes):
        point["threads"] = 2
        original = peak_at(module.main, module, point)
        peaks = [peak_at(one.graph, module, point) for one in found]
        assert min(peaks) <= original
        assert min(peaks) <= 1.01 * oracle_peak(module.main, module, point), point
        for one, peak in zip(found, peaks, strict=True):
            assert peak <= original or not one.proved


@pytest.mark.parametrize(("name", "how"), FEW)
def test_close_to_known_sizes(
    name: str, how: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ZOO))
    check(name, how, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_all_close_to_known_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ZOO))
    check(name, {}, 50)
