"""The parts of the benchmark: rounds, what counts as wrong, memory, tables."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from pliant.benchmark import report
from pliant.benchmark.accuracy import Reference, allowed, error
from pliant.benchmark.engines import ENGINES, NotAvailable, Setup, export_onnx
from pliant.benchmark.memory import high_water
from pliant.benchmark.models import SHAPES, load
from pliant.benchmark.roofline import limit_for, roofline_tables
from pliant.benchmark.timing import FEWEST_ROUNDS, Spread, geomean, interleaved
from pliant.benchmark.worker import Job, check, measure_kernels, prepare

TINY = Path(__file__).with_name("tiny.py")


def test_rounds() -> None:
    seen: list[str] = []
    calls = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    samples = interleaved(calls, 4)
    assert [len(times) for times in samples.values()] == [4, 4]
    assert set(seen) == {"a", "b"}
    slow = interleaved({"slow": lambda: sleep(0.06)}, 50, seconds=0.0)
    assert len(slow["slow"]) == FEWEST_ROUNDS


def test_spread_has_quartiles() -> None:
    assert Spread.of([5, 1, 2, 3, 4]) == Spread(3, 2, 4)
    assert Spread(0.1234, 0.1, 0.2).text() == "0.123 (0.100 to 0.200)"
    assert geomean([1, 4]) == pytest.approx(2)
    assert math.isnan(geomean([]))


def test_lower_precision_is_wrong() -> None:
    case = load(f"{TINY}:net", None)
    given = case.at((2, 5))
    exact = Reference(case.model)(given)
    assert exact[0].dtype == torch.float64
    plain = error(case.model(*given).detach(), exact)
    half = error(case.model.bfloat16()(given[0].bfloat16()).detach(), exact)
    assert plain <= allowed(exact, plain, ours=True)
    assert plain <= allowed(exact, plain, ours=False)
    assert half > allowed(exact, plain, ours=True)
    assert half > allowed(exact, plain, ours=False)


def test_errors_see_what_is_missing() -> None:
    x = torch.ones(2, 3)
    assert error(x, torch.ones(3, 2)) == math.inf
    assert error((x, x), x) == math.inf
    assert error(x * math.nan, x) == math.inf
    infinite = torch.tensor([math.inf, 1.0])
    assert error(infinite, infinite) == 0


def test_a_wrong_engine_is_left_out() -> None:
    case = load(f"{TINY}:net", None)
    setup = Setup(case, 1, Path())
    right, wrong = prepare("eager", setup), prepare("eager", setup)
    assert wrong.engine is not None
    layers = torch.nn.Sequential(case.model, torch.nn.Dropout(1.0)).train()
    wrong.engine = ENGINES["eager"].prepare(
        Setup(type(case)(**{**fields_of(case), "model": layers}), 1, Path())
    )
    found = check(case, [right, wrong], {(2, 5): case.at((2, 5))}, lambda _: None)
    assert right.engine is not None and found[2, 5]["eager"] > 0
    assert wrong.engine is None and wrong.about["status"] == "wrong"


def fields_of(case: Any) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "tvm"])
def test_peers_agree_where_installed(engine: str, tmp_path: Path) -> None:
    case = load(f"{TINY}:net", None)
    setup = Setup(case, 1, tmp_path)
    try:
        if ENGINES[engine].from_onnx:
            export_onnx(setup)
        ready = ENGINES[engine].prepare(setup)
    except NotAvailable as missing:
        pytest.skip(str(missing))
    for shape in ((1, 1), (2, 7), (5, 31)):
        given = case.at(shape)
        exact = Reference(case.model)(given)
        call = ready.bind(given)
        first = call()
        assert error(ready.tensors(first), exact) < 1e-5
        assert error(ready.tensors(call()), exact) < 1e-5


def test_memory_of_a_call() -> None:
    size = 64 << 20
    found = high_water(lambda: torch.ones(size, dtype=torch.uint8))
    if found is None:
        pytest.skip("this system does not tell")
    # A page of it may have been there before.
    assert size - resource.getpagesize() <= found < 1.5 * size
    again = high_water(lambda: None)
    assert again is not None and again < size // 4


def test_eight_shapes_for_every_kind_of_model() -> None:
    for dims, shapes in SHAPES.items():
        assert len(set(shapes)) == 8
        assert all(len(shape) == len(dims) for shape in shapes)


# ---- tables


def result(*ratios: float) -> dict[str, Any]:
    rows = [
        {
            "shape": [1, k],
            "best_peer": "eager",
            "best_speedup": ratio,
            "engines": {
                "pliant": {"ms": {"median": 1.0, "low": 1.0, "high": 1.0}},
                "eager": {
                    "ms": {"median": ratio, "low": ratio, "high": ratio},
                    "speedup": {"median": ratio, "low": ratio, "high": ratio},
                },
            },
        }
        for k, ratio in enumerate(ratios)
    ]
    ok = {"status": "ok", "compile_seconds": 1.0, "export_seconds": 0.0}
    missing = {"status": "not available", "reason": "no tvm"}
    return {
        "model": "net",
        "threads": 2,
        "dims": ["batch", "seq"],
        "memory_shape": None,
        "rows": rows,
        "engines": {"pliant": ok, "eager": ok, "tvm": missing},
    }


def test_summary() -> None:
    found = report.summary([result(2.0, 0.5)])
    assert found["geomean"]["eager"] == pytest.approx(1.0)
    assert found["worst_best"] == 0.5
    (slow,) = found["slow"]
    assert slow["shape"] == [1, 1] and slow["best_peer"] == "eager"
    assert found["left_out"] == ["net, 2 threads: TVM not available: no tvm"]
    assert not report.failed([result(2.0)])
    assert report.failed([{"model": "net", "threads": 1, "error": "gone"}])


def test_failed_runs_leave_no_old_numbers(tmp_path: Path) -> None:
    report.store_result(tmp_path, result(2.0), {"date": "today"})
    (path,) = tmp_path.glob("models/*.json")
    assert json.loads(path.read_text())["machine"] == {"date": "today"}
    gone = {"model": "net", "threads": 2, "error": "gone"}
    report.store_result(tmp_path, gone, {"date": "today"})
    assert not list(tmp_path.glob("models/*.json"))


def test_kernels_and_their_limits(tmp_path: Path) -> None:
    job = Job(
        model=f"{TINY}:net",
        zoo=None,
        threads=1,
        engines=("pliant",),
        shapes=((2, 5),),
        few_shapes=False,
        seconds=0.1,
        memory=False,
        kernels=True,
        folder=str(tmp_path),
    )
    found = measure_kernels(job, lambda _: None)
    (call,) = found["calls"]
    flops = sum(kernel["flops"] for kernel in call["kernels"])
    assert flops == 2 * 10 * (8 * 16 + 16 * 4)
    limits = {"fma_gflops_1": 100.0, "fma_gflops_all": 200.0}
    limits |= {"read_gbs_1": 10.0, "read_gbs_all": 15.0}
    (table,) = roofline_tables(found, limits)
    assert "100 GFLOP/s, 10 GB/s" in table.title
    assert len(table.rows) == len(call["kernels"])
    assert limit_for(limits, "fma_gflops", 10**6) == 200
