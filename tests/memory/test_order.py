"""Orders: as good as brute force, never worse than the original, the same results."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

import pliant
from bench.peaks import oracle_peak, peak_at
from pliant.context import Context
from pliant.ir.graph import Module, Op
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_graph
from pliant.machine.target import host
from pliant.memory.liveness import ALIGN, liveness
from pliant.memory.order import order, orders
from pliant.memory.order_graph import calls_of, parts_of, permuted
from pliant.memory.order_search import (
    CallBlock,
    live_rows,
    peaks,
    search,
    unavoidable_rows,
)
from pliant.options import Options
from pliant.sym import Facts, eq, floordiv, ge, le, sym
from pliant.sym.points import random_points, representatives

SIZES = (0, 1, 7, 64, 1009)
COPY = """
loop @copy(n; in %p: f32[n], out %q: f32[n]) {
  for i = 0 to n vector do %q[i] = add(%p[i], 1.0:f32) end
}
loop @join(n; in %p: f32[n], in %r: f32[n], out %q: f32[n]) {
  for i = 0 to n vector do %q[i] = add(%p[i], %r[i]) end
}
loop @grow(n, m; in %p: f32[n], out %q: f32[m]) {
  for i = 0 to m vector do %q[i] = %p[0] end
}
loop @shrink(n, m; in %p: f32[m], in %r: f32[n], out %q: f32[n]) {
  for i = 0 to n vector do %q[i] = add(%r[i], %p[i]) end
}
loop @bump(n; in %p: f32[n], inout %q: f32[n]) {
  for i = 0 to n vector do %q[i] = add(%q[i], %p[i]) end
}
"""


def alloc(name: str, dim: str = "n") -> str:
    shape = f"{{bytes = <4*({dim})>, shape = [{dim}], dtype = f32}}"
    return f"  %{name}: f32[{dim}] = alloc() {shape}\n"


def call(callee: str, *operands: str, sizes: str = "n") -> str:
    given = ", ".join(f"%{v}" for v in operands)
    return f'  call_loop({given}) {{callee = "{callee}", sizes = [{sizes}]}}\n'


# Two branches of large values that end in small ones: one after the other is better.
BRANCHES = (
    "graph @main(%x: f32[n]) {\n"
    + alloc("a", "8*n")
    + call("grow", "x", "a", sizes="n, 8*n")
    + alloc("b", "8*n")
    + call("grow", "x", "b", sizes="n, 8*n")
    + alloc("c")
    + call("shrink", "a", "x", "c", sizes="n, 8*n")
    + alloc("d")
    + call("shrink", "b", "x", "d", sizes="n, 8*n")
    + alloc("e")
    + call("join", "c", "d", "e")
    + "  return %e\n}\n"
    + COPY
)
BRANCHES_ORDERED = (
    "graph @main(%x: f32[n]) {\n"
    + alloc("a", "8*n")
    + call("grow", "x", "a", sizes="n, 8*n")
    + alloc("c")
    + call("shrink", "a", "x", "c", sizes="n, 8*n")
    + alloc("b", "8*n")
    + call("grow", "x", "b", sizes="n, 8*n")
    + alloc("d")
    + call("shrink", "b", "x", "d", sizes="n, 8*n")
    + alloc("e")
    + call("join", "c", "d", "e")
    + "  return %e\n}\n"
)


def ordered(module: Module) -> Module:
    return order(module, Context(Options(), host()))


def check_same_results(before: Module, after: Module) -> None:
    verify(after, Stage.LOWERED)
    for n in SIZES:
        x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        want, got = (run_graph(m, [x.copy()]) for m in (before, after))
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a, b)


def test_one_branch_after_the_other() -> None:
    module = parse_module(BRANCHES)
    verify(module, Stage.LOWERED)
    result = ordered(module)
    wanted = parse_module(BRANCHES_ORDERED + COPY)
    assert print_graph(result.main) == print_graph(wanted.main)
    for n in (7, 64, 1009):
        before, after = (peak_at(m.main, m, {"n": n}) for m in (module, result))
        assert after < before
    for n in SIZES[1:]:
        x = np.ones(n, np.float32)
        want, got = (run_graph(m, [x]) for m in (module, result))
        np.testing.assert_array_equal(want[0], got[0])


def test_what_is_best_already_is_kept() -> None:
    module = parse_module(BRANCHES_ORDERED + COPY)
    assert ordered(module) is module


def test_regions_go_with_their_calls() -> None:
    module = parse_module(BRANCHES)
    numbers = iter(range(5))
    ops = tuple(
        op.replace(attrs=(*op.attrs, ("computes", str(next(numbers)))))
        if op.name == "call_loop"
        else op
        for op in module.main.ops
    )
    result = ordered(module.with_main(module.main.replace(ops=ops)))
    calls = [op for op in result.main.ops if op.name == "call_loop"]
    assert [op.str_attr("computes") for op in calls] == ["0", "2", "1", "3", "4"]


def test_constants_keep_their_numbers() -> None:
    """Every order reads weights by the same numbers."""
    module = parse_module(BRANCHES)
    for found in orders(module.main, module, Facts()):
        graph = permuted(module.main, found.calls)
        assert {id(v) for op in graph.ops for v in op.results} == {
            id(v) for op in module.main.ops for v in op.results
        }
        assert [op for op in graph.ops if op.name == "call_loop"] == [
            [op for op in module.main.ops if op.name == "call_loop"][k]
            for k in found.calls
        ]


# ---- what must come before what


def test_writes_wait_for_reads() -> None:
    """%x is written in place: after all that read it, before all that read it then."""
    text = (
        "graph @main(%x: f32[n], %g: f32[n]) {\n"
        + alloc("a")
        + call("copy", "x", "a")
        + alloc("b")
        + call("copy", "x", "b")
        + call("bump", "g", "x")
        + alloc("c")
        + call("copy", "x", "c")
        + call("bump", "a", "x")
        + "  return %b, %c\n}\n"
        + COPY
    )
    module = parse_module(text)
    before = calls_of(module.main, module).before
    assert before == (0, 0, 0b11, 0b100, 0b1101)


def test_views_are_their_buffers() -> None:
    text = (
        "graph @main(%x: f32[n]) {\n"
        + alloc("a", "2*n")
        + "  %low: f32[n] = view(%a) {offset = <0>}\n"
        + "  %high: f32[n] = view(%a) {offset = <4*n>}\n"
        + call("copy", "x", "low")
        + call("copy", "x", "high")
        + alloc("b")
        + call("join", "low", "high", "b")
        + "  return %b\n}\n"
        + COPY
    )
    module = parse_module(text)
    calls = calls_of(module.main, module)
    assert calls.before == (0, 0b1, 0b10)
    assert calls.touches == ((0,), (0,), (0,))  # the result is not in the arena
    check_same_results(module, ordered(module))


# ---- guarded orders


def crossing() -> Module:
    """Which of two orders is better depends on whether m or n is larger."""
    text = (
        "graph @main(%x: f32[n], %y: f32[m]) {\n"
        + alloc("a", "m")
        + call("grow", "x", "a", sizes="n, m")
        + alloc("b", "n")
        + call("grow", "y", "b", sizes="m, n")
        + alloc("c", "n + 8")
        + call("grow", "a", "c", sizes="m, n + 8")
        + alloc("d", "m + 8")
        + call("grow", "b", "d", sizes="n, m + 8")
        + alloc("e", "16")
        + call("grow", "c", "e", sizes="n + 8, 16")
        + alloc("f", "16")
        + call("grow", "d", "f", sizes="m + 8, 16")
        + "  return %e, %f\n}\n"
        + COPY
    )
    return parse_module(text)


@pytest.mark.parametrize("low", [0, 1])
def test_never_worse_than_the_original(low: int) -> None:
    module = crossing()
    facts = Facts().assume(ge(sym("n"), low)).assume(le(sym("m"), 4096))
    found = orders(module.main, module, facts)
    sure = [candidate for candidate in found if candidate.proved]
    assert sure
    for n, m in itertools.product((low, 1, 5, 16, 300, 4099), (0, 1, 17, 290, 4096)):
        dims = {"n": n, "m": m}
        original = peak_at(module.main, module, dims)
        for candidate in sure:
            assert peak_at(module.main, module, dims, candidate.calls) <= original
        best = min(peak_at(module.main, module, dims, c.calls) for c in found)
        assert best <= 1.01 * oracle_peak(module.main, module, dims)


@pytest.mark.parametrize("seed", range(8))
def test_many_orders_and_one_that_is_sure(seed: int) -> None:
    """Branches whose sizes cross in many ways: few orders are kept, a sure one too."""
    rng = random.Random(seed)
    text = "graph @main(%x: f32[n]) {\n"
    dims = ["n", "m", "8*k", "n + m", "2*n + k", "64"]
    for k in range(6):
        big, small = rng.sample(dims, 2)
        text += alloc(f"a{k}", big) + call("grow", "x", f"a{k}", sizes=f"n, {big}")
        text += alloc(f"b{k}", small)
        text += call("grow", f"a{k}", f"b{k}", sizes=f"{big}, {small}")
    last = [f"b{k}" for k in range(6)]
    for k, name in enumerate(last):
        text += alloc(f"c{k}", "4") + call("grow", name, f"c{k}", sizes="4, 4")
    for k in range(5):
        text += alloc(f"d{k}", "4") + call(
            "join", f"c{k}", f"c{k + 1}", f"d{k}", sizes="4"
        )
    text += "  return %d0, %d1, %d2, %d3, %d4\n}\n"
    module = parse_module(text + COPY)
    facts = Facts()
    found = orders(module.main, module, facts)
    assert len(found) <= 4 and any(candidate.proved for candidate in found)
    for point in random_points(facts, ("n", "m", "k"), seed, 10):
        original = peak_at(module.main, module, point)
        for candidate in found:
            if candidate.proved:
                assert peak_at(module.main, module, point, candidate.calls) <= original


# ---- against brute force


def random_block(rng: random.Random, calls: int) -> tuple[CallBlock, list[int]]:
    """Calls that read up to three values made before, and make one or two."""
    before: list[int] = []
    touches: list[tuple[int, ...]] = []
    makers: list[int] = []
    for k in range(calls):
        read = rng.sample(range(len(makers)), min(len(makers), rng.randint(0, 3)))
        made = range(len(makers), len(makers) + rng.randint(1, 2))
        before.append(sum(1 << m for m in {makers[b] for b in read}))
        touches.append((*read, *made))
        makers += [k] * len(made)
    count = len(makers)
    leaving = tuple(rng.random() < 0.15 for _ in range(count))
    sizes = [rng.choice((0, 1, 2, 3, 5, 8, 40)) * ALIGN for _ in range(count)]
    return CallBlock(tuple(before), tuple(touches), (False,) * count, leaving), sizes


def brute_force(block: CallBlock, sizes: list[int]) -> int:
    """The least peak of all orders: over every set of finished calls."""
    touchers = block.touchers()

    def live(done: int, extra: int) -> int:
        return sum(
            size
            for b, size in enumerate(sizes)
            if touchers[b] & (done | extra)
            and (block.leaving[b] or touchers[b] & ~done)
        )

    best = {0: 0}
    for done in range(1 << block.calls):
        if done not in best:
            continue
        for k in range(block.calls):
            after = done | 1 << k
            if after == done or block.before[k] & ~done:
                continue
            peak = max(best[done], live(done, 1 << k))
            best[after] = min(best.get(after, peak), peak)
    return best[(1 << block.calls) - 1]


@pytest.mark.parametrize("seed", range(150))
def test_as_good_as_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    block, sizes = random_block(rng, rng.randint(2, 10))
    column = np.asarray(sizes, np.int64)[:, None]
    least = int(peaks(unavoidable_rows(block), column)[0])
    original = tuple(range(block.calls))
    found = search(block, sizes, original, least)
    best = brute_force(block, sizes)
    assert least <= best
    assert found.best
    assert found.peak == best
    assert sorted(found.order) == list(original)
    done = 0
    for k in found.order:
        assert not block.before[k] & ~done
        done |= 1 << k
    assert int(peaks(live_rows(block, found.order), column)[0]) == found.peak


@pytest.mark.parametrize("seed", range(20))
def test_a_narrow_search_is_no_worse_than_its_start(seed: int) -> None:
    """With no work allowed the beam decides; time runs both ways."""
    block, sizes = random_block(random.Random(seed), 40)
    column = np.asarray(sizes, np.int64)[:, None]
    least = int(peaks(unavoidable_rows(block), column)[0])
    start = tuple(range(40))
    found = search(block, sizes, start, least, work=0)
    wide = search(block, sizes, start, least)
    first = int(peaks(live_rows(block, start), column)[0])
    assert least <= wide.peak <= first and least <= found.peak <= first


def test_blocks_are_independent() -> None:
    """Two pairs of branches in a row: cut in between, each ordered by itself."""
    text = BRANCHES.replace("  return %e\n}\n", "").replace(COPY, "")
    second = text.split("{\n", 1)[1]
    for old in "xabcde":
        second = second.replace(f"%{old}:", f"%{old}2:").replace(
            f"%{old},", f"%{old}2,"
        )
        second = second.replace(f"%{old})", f"%{old}2)")
    second = second.replace("%x2", "%e")
    module = parse_module(text + second + "  return %e2\n}\n" + COPY)
    verify(module, Stage.LOWERED)
    parts = parts_of(calls_of(module.main, module))
    assert [part.calls for part in parts] == [(0, 1, 2, 3), (4,), (5, 6, 7, 8), (9,)]
    assert parts[0].block == CallBlock(
        (0, 0, 1, 2),
        parts[0].block.touches,
        (False,) * 4,
        parts[0].block.leaving,
    )
    result = ordered(module)
    sequence = [op.operands[-1].name for op in calls(result.main.ops)]
    assert sequence == ["a", "c", "b", "d", "e", "a2", "c2", "b2", "d2", "e2"]


def calls(ops: tuple[Op, ...]) -> list[Op]:
    return [op for op in ops if op.name == "call_loop"]


def test_peak_is_that_of_the_planner() -> None:
    """The same intervals and rounding as `memory`."""
    module = parse_module(BRANCHES)
    memory = liveness(module.main)
    for n in SIZES:
        moments = range(len(module.main.ops))
        sums = [
            sum(
                -(-b.bytes.evaluate({"n": n}) // ALIGN) * ALIGN
                for b in memory.buffers
                if b.first <= k <= b.last
            )
            for k in moments
        ]
        assert peak_at(module.main, module, {"n": n}) == max(sums)


def test_a_graph_without_calls() -> None:
    module = parse_module("graph @main(%x: f32[n]) {\n  return %x\n}\n")
    (only,) = orders(module.main, module, Facts())
    assert only.proved and only.calls == ()


def test_sizes_that_few_samples_meet() -> None:
    """A guard that ties a size to a constant leaves few of them."""
    cond = eq(floordiv(sym("height"), 14), 5)
    found = representatives(Facts().assume(cond), ["height", "width"])
    assert found and all(cond.holds(point) for point in found)


def test_sizes_that_no_sample_meets() -> None:
    class Narrow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] // 5003 != 2:
                return x
            a = x.softmax(-1)
            return (a.cumsum(-1) * x.cumsum(1)).cumsum(1).softmax(1)

    x = torch.randn(1, 10010, 2, dtype=torch.float64) / 100
    compiled = pliant.compile(Narrow(), (x,), ({1: "n"},), threads=1)
    torch.testing.assert_close(compiled(x[:, :10006]), Narrow()(x[:, :10006]))


def test_sizes_beyond_64_bits() -> None:
    """Five sizes of 4096 each are more bytes than a machine has."""

    def big(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, scale_factor=2, mode="trilinear")

    class Big(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return big(x)

    x = torch.randn(2, 3, 2, 3, 4)
    dims = dict.fromkeys(range(5), torch.export.Dim.AUTO)
    compiled = pliant.compile(Big(), (x,), (dims,), threads=1)
    torch.testing.assert_close(compiled(x), big(x), atol=1e-5, rtol=1e-5)
