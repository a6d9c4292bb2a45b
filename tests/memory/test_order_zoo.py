"""Orders of real models: as good as an order searched with the sizes known."""

from __future__ import annotations

import pytest

import pliant
import zoo
from bench.peaks import oracle_peak, peak_at
from pliant.memory.order import orders
from pliant.memory.order_graph import calls_of
from pliant.options import Options
from pliant.program import Program
from pliant.sym.points import random_points

FEW = (("bert", {"layers": 2, "hidden": 128}), ("vit", {"layers": 1}))
ALL = ("minilm", "gpt2", "llama", "t5_encoder", "resnet", "evoformer", "unet")


def compiled(name: str, how: dict[str, int], training: bool) -> Program:
    """A model or its training step, in the original order."""
    case = zoo.build(name, **how)
    options = Options(order=False, inplace=False)
    if not training:
        return case.compile(options=options).program
    step = pliant.compile_training(
        case.model,
        lambda y: y.square().mean(),
        pliant.SGD(0.1),
        (case.at(case.example), ()),
        (case.dynamic_shapes, ()),
        options=options,
    )
    return step.program


def check(name: str, how: dict[str, int], shapes: int, training: bool = False) -> None:
    program = compiled(name, how, training)
    module, facts = program.lowered, program.interface.facts
    found = orders(module.main, module, facts)
    assert 1 <= len(found) <= 4 and any(one.proved for one in found)
    sizes = calls_of(module.main, module).bytes
    names = {s for e in sizes for s in e.symbols()} - {"threads"}
    for point in random_points(facts, names, 3, shapes):
        point["threads"] = 2
        original = peak_at(module.main, module, point)
        peaks = [peak_at(module.main, module, point, one.calls) for one in found]
        assert min(peaks) <= original
        known = [one.calls for one in found]
        oracle = oracle_peak(module.main, module, point, known)
        assert oracle <= min(peaks) <= 1.01 * oracle, point
        for one, peak in zip(found, peaks, strict=True):
            assert peak <= original or not one.proved


@pytest.mark.parametrize(("name", "how"), FEW)
def test_close_to_known_sizes(name: str, how: dict[str, int]) -> None:
    check(name, how, 20)


def test_training_close_to_known_sizes() -> None:
    check("bert", {"layers": 1, "hidden": 128}, 10, training=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_all_close_to_known_sizes(name: str) -> None:
    check(name, {}, 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("llama", "t5_encoder", "vit", "resnet"))
def test_all_training_close_to_known_sizes(name: str) -> None:
    check(name, {}, 50, training=True)
