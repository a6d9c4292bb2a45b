"""The parts of the benchmark: rounds, what counts as wrong, memory, tables."""

from __future__ import annotations

import json
import math
import random
import resource
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from bench import pages
from bench.resident import high_water
from bench.script import RESULTS, write
from pliant.cases import load
from pliant.compare import report
from pliant.compare.accuracy import Reference, allowed, error
from pliant.compare.engines import ENGINES, Engine, NotAvailable, Setup, export_onnx
from pliant.compare.estimate import estimate
from pliant.compare.results import stamp, stamp_line
from pliant.compare.roofline import limit_for, roofline_tables
from pliant.compare.tables import Report
from pliant.compare.timing import (
    ROUNDS,
    Pace,
    Spread,
    back_and_forth,
    by_turns,
    geomean,
    geomean_spread,
    interleaved,
    turn,
)
from pliant.compare.worker import (
    Candidate,
    Job,
    check,
    compared,
    measure_kernels,
    prepare,
    remember,
)

TINY = Path(__file__).with_name("tiny.py")


def test_rounds() -> None:
    seen: list[str] = []
    calls = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    samples = interleaved(calls, 4)
    assert [len(times) for times in samples.values()] == [4, 4]
    assert set(seen) == {"a", "b"}
    slow = interleaved({"slow": lambda: sleep(0.06)}, 2)
    assert len(slow["slow"]) == 2


def test_turns_go_back_and_forth_until_it_is_enough() -> None:
    assert list(back_and_forth("abc", 3)) == ["abc", "cba", "abc"]
    seen: list[str] = []
    turns = {name: lambda name=name: float(seen.append(name) or 1) for name in "ab"}
    samples = by_turns(turns, 5, lambda samples: len(samples["a"]) == 3)
    assert "".join(seen) == "abbaab"
    assert samples == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_a_turn_repeats_short_calls() -> None:
    counts: list[int] = []

    def timed(count: int) -> float:
        counts.append(count)
        return count * 0.001

    assert turn(timed, Pace(0.01, 1000, pause=False), warm_up=1)() == 0.001
    assert counts == [1, 1, 10]
    counts.clear()
    assert turn(timed, Pace(0.01, 4))() == 0.001
    assert counts == [1, 1, 1, 1, 4]


def test_spread_holds_the_median_with_95_percent() -> None:
    assert Spread.of([5, 1, 2, 3, 4]) == Spread(3, 1, 5)
    assert Spread.of(range(15)) == Spread(7, 3, 11)
    source, held = random.Random(1), 0
    for _ in range(2000):
        found = Spread.of([source.expovariate(1.0) for _ in range(15)])
        held += found.low <= math.log(2) <= found.high
    assert 0.95 < held / 2000 < 0.99


def test_spread_of_a_mean() -> None:
    mean = geomean_spread([Spread(1.0, 0.9, 1.1)] * 4)
    assert mean.median == pytest.approx(1.0)
    assert mean.high / mean.low == pytest.approx((1.1 / 0.9) ** 0.5)


def test_the_best_peer_has_the_least_ratio() -> None:
    """Not the least median: which engine is ahead is told within each round."""
    found = compared(
        {
            "pliant": [1.0, 2.0, 4.0],
            "eager": [2.0, 3.0, 4.2],
            "openvino": [1.5, 3.2, 9.0],
        }
    )
    assert found["engines"]["eager"]["ms"]["median"] == 3000
    assert found["best_peer"] == "eager" and found["best"]["median"] == 1.5
    found = compared({"pliant": [1.0, 2.0, 2.1], "eager": [3.0, 2.2, 2.1]})
    assert found["best"]["median"] == pytest.approx(1.1)
    assert "best" not in compared({"eager": [1.0]})


def test_spread_is_told() -> None:
    assert Spread(0.1234, 0.1, 0.2).text() == "0.123 (0.100 to 0.200)"
    assert geomean([1, 4]) == pytest.approx(2)
    assert math.isnan(geomean([]))


def test_lower_precision_is_wrong() -> None:
    case = load(f"{TINY}:net")
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
    case = load(f"{TINY}:net")
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
    case = load(f"{TINY}:net")
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


# ---- tables


def result(*ratios: float) -> dict[str, Any]:
    rows = [
        {
            "shape": [1, k],
            "best_peer": "eager",
            "best": {"median": ratio, "low": ratio, "high": ratio},
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
        "about": "4 layers, random weights, 1.0 M parameters",
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
    assert json.loads(path.read_text())["stamp"] == {"date": "today"}
    gone = {"model": "net", "threads": 2, "error": "gone"}
    report.store_result(tmp_path, gone, {"date": "today"})
    assert not list(tmp_path.glob("models/*.json"))


def test_the_summary_takes_the_best_peer_of_each_shape() -> None:
    """Two peers, each ahead once: against the best of both we are slower."""
    first, second = result(2.0, 0.5), result(0.5, 2.0)
    rows = []
    for one, other in zip(first["rows"], second["rows"], strict=True):
        engines = {**one["engines"], "openvino": other["engines"]["eager"]}
        best = min(one["best"], other["best"], key=lambda each: each["median"])
        rows.append({**one, "engines": engines, "best": best})
    table = report.summary_table([{**first, "rows": rows}])
    line = dict(zip(table.columns, table.rows[-1], strict=True))
    assert line["x torch eager"] == line["x OpenVINO"] == "1.00"
    assert line["x best"].startswith("0.500 ")


def test_every_result_says_what_it_was_measured_with(tmp_path: Path) -> None:
    about = stamp(15)
    table = Report("Times", ("case", "ms"), (("a", "1"),))
    write(tmp_path, "times", about, {"rows": [{"ms": 1.23456}]}, [table], ["A note."])
    content = json.loads((tmp_path / "times.json").read_text())
    assert content["rows"] == [{"ms": 1.235}]
    for field in ("commit", "changed", "date", "rounds", "cpu", "caches", "versions"):
        assert content["stamp"][field] == about[field]
    page = (tmp_path / "times.md").read_text()
    assert page.endswith(f"A note.\n\n{stamp_line(about)}\n")
    assert "15 rounds" in page and f"Commit {about['commit']}" in page


def test_models_are_described() -> None:
    case = load(f"{TINY}:net")
    assert case.about() == "0.0 M parameters"
    assert replace(case, label="2 layers").about() == "2 layers, 0.0 M parameters"


def test_compile_seconds_are_remembered(tmp_path: Path) -> None:
    """A later run finds the engine's cache full; what counts is the first."""
    engine = Engine(lambda inputs: lambda: None, lambda result: [])
    job = Job("net", 1, ("compile",), (), False, 15, False, str(tmp_path), True)
    found = []
    for seconds in (60.0, 2.0):
        candidate = Candidate("compile", engine, {"compile_seconds": seconds})
        remember(candidate, job)
        found.append(candidate.about["compile_seconds"])
    assert found[0] == found[1] and found[0] in (60.0, None)
    path = tmp_path / "compile_1t_seconds"
    path.write_text(json.dumps({"seconds": 60.0, "load": 0.1}))
    remember(candidate, job)
    assert candidate.about["compile_seconds"] == 60.0
    path.write_text(json.dumps({"seconds": 60.0, "load": 10**6}))
    remember(candidate, job)
    assert candidate.about["compile_seconds"] is None


def test_the_time_is_told_before() -> None:
    job = Job("net", 1, ("pliant", "eager"), ((1, 2),), False, 15, False, "")
    one, two = estimate([job], None), estimate([job, job], None)
    assert (one.cells, two.cells) == (1, 2) and "15 rounds of 2 engines" in one.text()
    assert two.timing == 2 * one.timing and two.prepare == 2 * one.prepare
    more = estimate([replace(job, rounds=30)], None)
    assert more.timing == 2 * one.timing


def test_kernels_and_their_limits(tmp_path: Path) -> None:
    job = Job(
        model=f"{TINY}:net",
        threads=1,
        engines=("pliant",),
        shapes=((2, 5),),
        few_shapes=False,
        rounds=3,
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


# ---- what is stored, and the pages that show it


def test_stored_results_are_stamped() -> None:
    for path in sorted(RESULTS.rglob("*.json")):
        told = json.loads(path.read_text())["stamp"]
        assert told["commit"] and told["date"] and told["cpu"] and told["versions"]
        assert told["rounds"] == 0 or told["rounds"] >= ROUNDS, path
        assert not told["changed"], f"{path}: measured with uncommitted changes"
    for path in sorted(RESULTS.rglob("*.md")):
        assert path.read_text().splitlines()[-1].startswith("Commit "), path


def test_pages_show_what_is_stored() -> None:
    """`make pages` writes them."""
    for path in pages.pages():
        assert pages.filled(path.read_text()) == path.read_text(), path


def test_a_page_takes_the_first_tables(tmp_path: Path) -> None:
    made = [Report(f"Table {n}", ("case", "ms"), (("a", str(n)),)) for n in range(3)]
    write(tmp_path, "times", stamp(15), {}, made, ["A note."])
    marker = "<!-- begin: times.md, 2 tables, by `make times` -->"
    page = f"Before.\n\n{marker}\nold\n<!-- end -->\n\nBehind.\n"
    shown = pages.filled(page, tmp_path)
    assert "#### Table 0\n\n| case | ms |\n" in shown and "| a | 1 |\n\n" in shown
    assert "old" not in shown and "Table 2" not in shown and "A note" not in shown
    assert f"Commit {stamp(15)['commit']}" in shown and "15 rounds" in shown
    assert shown.startswith("Before.\n") and shown.endswith("Behind.\n")
    assert pages.filled(shown, tmp_path) == shown
    (tmp_path / "times.md").unlink()
    assert "*Not measured on this code yet:* `make times`" in pages.filled(
        shown, tmp_path
    )


def test_results_of_other_code_are_deleted(tmp_path: Path) -> None:
    about = {**stamp(15), "commit": "new", "changed": False}
    for name, told in (
        ("here", about),
        ("old", {**about, "commit": "old"}),
        ("edited", {**about, "changed": True}),
    ):
        write(tmp_path, name, told, {}, [])
    report.store_result(tmp_path, {**result(2.0), "model": "one"}, about)
    report.store_result(tmp_path, result(2.0), {**about, "commit": "old"})
    report.write_tables(tmp_path)
    assert "| net | 2 |" in (tmp_path / "summary.md").read_text()
    pages.prune(tmp_path, "new")
    assert {p.name for p in tmp_path.glob("*.json")} == {"here.json"}
    assert {p.name for p in tmp_path.glob("models/*.json")} == {"one_2t.json"}
    summary = (tmp_path / "summary.md").read_text()
    assert "| one | 2 |" in summary and "| net | 2 |" not in summary
    assert not (tmp_path / "old.md").exists()
