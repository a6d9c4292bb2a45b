"""The peak as text: exact in the whole, the largest terms in the summary."""

from __future__ import annotations

import torch
from torch import nn

import pliant
from pliant.report.formula import LONG, peak_summary, peak_text, readable_bytes
from pliant.sym import Expr, as_expr, ceildiv, maximum, parse, sym

B, S, H = sym("b"), sym("s"), sym("h")


def summary(*terms: Expr) -> str:
    return peak_summary(((terms,),), 2)


def test_the_largest_terms_come_first() -> None:
    peak = 24 * B * S * S + 9200 * B * S + 7 * B + 300_000
    assert summary(peak) == ("about 24 bytes per b*s^2 + 9.2 KB per b*s, 0.30 MB fixed")
    assert summary(as_expr(4096)) == "4.1 KB, whatever the sizes"


def test_quotients_are_taken_as_exact() -> None:
    assert summary(64 * ceildiv(S, 8)) == "about 8 bytes per s"
    assert summary(maximum(S, 3) * 400) == "about 400 bytes per s"


def test_threads_have_their_number() -> None:
    assert "threads" not in summary(100 * sym("threads") * S)


def test_what_is_repeated_gets_a_name() -> None:
    sizes = [H]
    for _ in range(7):
        sizes.append(ceildiv(sizes[-1] * 3 + 1, 2))
    terms = tuple(64 * k * n * n + 8 * n for k, n in enumerate(sizes, 1))
    peak = (tuple(t + 5 * k for k in range(9) for t in terms),)
    text = peak_text((peak,), 1)
    plain = sum(len(str(t)) for t in terms) * 9
    assert plain > LONG and len(text) < plain / 3
    formula, _, said = text.partition(" where ")
    env = {"h": 37}
    for part in said.split(", h_"):
        name, _, value = ("h_" + part.removeprefix("h_")).partition(" = ")
        env[name] = parse(value).evaluate(env)
    assert parse(formula).evaluate(env) == max(t.evaluate({"h": 37}) for t in peak[0])


def test_of_a_model() -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    m = pliant.compile(net, (torch.randn(2, 8, 64),), ({0: "batch", 1: "seq"},))
    assert m.peak_summary.startswith("about 1.3 KB per batch*seq, ")
    peak = m.memory_plan(batch=100, seq=100).peak_bytes
    assert abs(peak - 1280 * 100 * 100) < 0.05 * peak
    assert m.peak_summary in m.explain()


def test_bytes_by_thousands() -> None:
    shown = [readable_bytes(n) for n in (0.5, 12, 999, 9200, 300_000, 2.5e9)]
    assert shown == [
        "0.5 bytes",
        "12 bytes",
        "999 bytes",
        "9.2 KB",
        "0.30 MB",
        "2.5 GB",
    ]
