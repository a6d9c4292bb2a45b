"""Attention is found in products, whoever spelled it out, and computes the same."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import pliant
from pliant.context import Context
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Module, Op, Value
from pliant.ir.interp import run_graph
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.ir.types import DType, tensor
from pliant.machine.target import baseline
from pliant.options import Options
from pliant.passes.attention import attention, gather_attention
from pliant.passes.canonicalize import canonicalize
from pliant.passes.decompose import decompose
from pliant.sym import Expr, as_expr, minimum, sym

B, S, T = sym("b"), sym("s"), sym("t")
CX = Context(Options(), baseline())
ENVIRONMENTS = (
    {"b": 0, "s": 3, "t": 2},
    {"b": 1, "s": 1, "t": 1},
    {"b": 2, "s": 7, "t": 5},
)


def found(graph: Graph, *, tolerance: float = 2e-6) -> list[Op]:
    """The attention ops after the pass; the graph computes what it did, and prints."""
    plain = canonicalize(decompose(graph, CX), CX)
    out = canonicalize(attention(plain, CX), CX)
    module = Module({"main": out})
    verify(module, Stage.DECOMPOSED)
    text = print_module(module)
    assert print_module(parse_module(text)) == text
    for env in ENVIRONMENTS:
        source = np.random.default_rng(0)
        inputs = [
            source.standard_normal([d.evaluate(env) for d in p.shape]) > -0.5
            if p.dtype is DType.BOOL
            else source.standard_normal([d.evaluate(env) for d in p.shape]).astype("f4")
            for p in graph.params
        ]
        want = run_graph(Module({"main": graph}), inputs)
        got = run_graph(module, inputs)
        for a, c in zip(got, want, strict=True):
            np.testing.assert_allclose(a, c, rtol=tolerance, atol=tolerance)
    return [op for op in out.ops if op.name == "attention"]


class Parts:
    """q, k, v (b, 4, .., 8) and what models do with them."""

    def __init__(self, kv_heads: int = 4) -> None:
        b = self.b = Builder()
        self.q = b.param("q", tensor(DType.F32, B, 4, S, 8))
        self.k = b.param("k", tensor(DType.F32, B, kv_heads, T, 8))
        self.v = b.param("v", tensor(DType.F32, B, kv_heads, T, 8))

    def scores(self) -> Value:
        return self.b.matmul(self.q, self.b.swap(self.k, -1, -2))

    def times(self, x: Value, factor: float) -> Value:
        return self.b.binary("mul", x, self.b.scalar(factor, x.dtype))

    def weights(self, scores: Value) -> Value:
        return self.b.emit("softmax", scores, axis=scores.type.rank - 1)

    def mask(self, *shape: Any, dtype: DType = DType.F32) -> Value:
        return self.b.param("mask", tensor(dtype, *shape))

    def graph(self, *results: Value) -> Graph:
        return self.b.finish("main", results)

    def finish(self, scores: Value) -> Graph:
        return self.graph(self.b.matmul(self.weights(scores), self.v))


def test_plain() -> None:
    parts = Parts()
    (op,) = found(parts.finish(parts.scores()))
    assert not op.regions and op.float_attr("scale") == 1.0
    assert op.bool_attr("nan_rows") and not op.bool_attr("causal")


def guarded(parts: Parts, mask: Value) -> Graph:
    """As torch's exporter to ONNX writes it: weights that are NaN become 0."""
    b = parts.b
    hidden = b.full(-math.inf, DType.F32, (B, 4, S, T))
    wide = b.broadcast_to(mask, (B, 4, S, T))
    weights = parts.weights(b.select(wide, parts.scores(), hidden))
    nothing = b.full_like(weights, 0.0)
    kept = b.select(b.unary("isnan", weights), nothing, weights)
    return parts.graph(b.matmul(kept, parts.v))


def test_weights_that_are_nan_become_zero() -> None:
    parts = Parts()
    graph = guarded(parts, parts.mask(B, 1, S, T, dtype=DType.BOOL))
    (op,) = found(graph)
    assert op.bool_attr("zero_nan") and not op.bool_attr("nan_rows")
    module = Module({"main": graph})
    for threads, (s, t) in itertools.product((1, 2), ((7, 5), (1, 300), (40, 70))):
        model = pliant.compile(module, threads=threads)
        source = np.random.default_rng(s)
        q, k, v = (
            source.standard_normal((2, 4, n, 8)).astype(np.float32) for n in (s, t, t)
        )
        mask = source.random((2, 1, s, t)) > 0.3
        mask[0, 0, 0] = False  # a row that sees nothing
        q[1, 0, 0, 3], k[1, 2, 1, 0] = np.nan, np.inf
        with np.errstate(all="ignore"):
            (want,) = run_graph(module, [q, k, v, mask])
        assert np.isfinite(want).all() and not want[1, 0, 0].any()
        np.testing.assert_allclose(model(q, k, v, mask), want, 1e-5, 1e-5)


def test_a_guard_that_is_none() -> None:
    """Another number in place of NaN, or weights that something else reads."""
    for number, others in ((1.0, False), (0.0, True)):
        parts = Parts()
        b = parts.b
        weights = parts.weights(parts.scores())
        instead = b.full_like(weights, number)
        kept = b.select(b.unary("isnan", weights), instead, weights)
        more = [weights] if others else []
        assert not found(parts.graph(b.matmul(kept, parts.v), *more))


@pytest.mark.parametrize("where", ["scores", "divided", "q", "k"])
def test_scale(where: str) -> None:
    parts = Parts()
    if where == "q":
        parts.q = parts.times(parts.q, 0.25)
    if where == "k":
        parts.k = parts.times(parts.k, 0.25)
    scores = parts.scores()
    if where == "scores":
        scores = parts.times(scores, 0.25)
    if where == "divided":
        scores = parts.b.binary("div", scores, parts.b.scalar(4.0, DType.F32))
    (op,) = found(parts.finish(scores))
    assert op.float_attr("scale") == 0.25 and not op.regions
    assert op.operands[0].name == "q"


@pytest.mark.parametrize(
    "shape", [(B, 4, S, T), (B, 1, S, T), (S, T), (4, S, T), (B, 1, 1, T), (B, 1, S, 1)]
)
def test_additive_mask(shape: tuple[Any, ...]) -> None:
    parts = Parts()
    scores = parts.b.binary("add", parts.scores(), parts.mask(*shape))
    (op,) = found(parts.finish(parts.times(scores, 0.5)))
    assert len(op.operands) == 4 and op.operands[3].name == "mask"


def test_several_biases_are_not_summed_outside() -> None:
    parts = Parts()
    scores = parts.scores()
    for shape in ((4, S, T), (B, 1, 1, T), (B, 1, S, T)):
        scores = parts.b.binary("add", parts.mask(*shape), scores)
    (op,) = found(parts.finish(scores))
    assert len(op.operands) == 6


@pytest.mark.parametrize("fill", [-math.inf, -1e4, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("keep", [True, False])
def test_boolean_mask(fill: float, keep: bool) -> None:
    parts = Parts()
    mask = parts.mask(B, 1, 1, T, dtype=DType.BOOL)
    filler = parts.b.scalar(fill, DType.F32)
    sides = (parts.scores(), filler) if keep else (filler, parts.scores())
    (op,) = found(parts.finish(parts.b.select(mask, *sides)))
    assert len(op.operands) == 4 and not op.bool_attr("causal")


def triangle(b: Builder, kind: str) -> Value:
    rows, columns = b.iota((S, T), 0), b.iota((S, T), 1)
    if kind == "le":
        return b.emit("le", columns, rows)
    if kind == "ge":
        return b.emit("ge", rows, columns)
    if kind == "difference":
        return b.emit("lt", b.emit("sub", columns, rows), b.full(1, DType.I64, (S, T)))
    if kind == "shifted":
        return b.emit("le", columns, b.emit("add", rows, b.full(1, DType.I64, (S, T))))
    return b.emit("lt", columns, rows)


@pytest.mark.parametrize("kind", ["le", "ge", "difference"])
@pytest.mark.parametrize("how", ["set", "added", "hidden", "with another"])
def test_causal(kind: str, how: str) -> None:
    parts = Parts()
    b = parts.b
    flag, lowest = triangle(b, kind), b.scalar(-math.inf, DType.F32)
    if how == "set":
        scores = b.select(flag, parts.scores(), lowest)
    elif how == "hidden":
        scores = b.select(b.unary("logical_not", flag), lowest, parts.scores())
    elif how == "added":
        added = b.select(flag, b.scalar(0.0, DType.F32), lowest)
        scores = b.binary("add", parts.scores(), added)
    else:
        other = parts.mask(B, 1, S, T, dtype=DType.BOOL)
        both = b.binary("logical_and", flag, other)
        scores = b.select(both, parts.scores(), lowest)
    (op,) = found(parts.finish(scores))
    assert op.bool_attr("causal")
    assert len(op.operands) == (4 if how == "with another" else 3)


@pytest.mark.parametrize("kind,first", [("shifted", 1), ("strict", -1)])
def test_shifted_triangles(kind: str, first: int) -> None:
    parts = Parts()
    lowest = parts.b.scalar(-math.inf, DType.F32)
    scores = parts.b.select(triangle(parts.b, kind), parts.scores(), lowest)
    (op,) = found(parts.finish(scores))
    assert op.bool_attr("causal") and op.dim_attr("first") == first
    assert not op.regions


def rows_from(b: Builder, past: Expr, how: str) -> Value:
    """The numbers of rows from `past` on, over the grid."""
    past_value = b.dim_value(past)
    match how:
        case "grid":
            return b.binary("add", b.iota((S, T), 0), past_value)
        case "column":
            rows = b.binary("add", past_value, b.iota((S, 1), 0))
        case _:
            rows = b.reshape(b.binary("add", b.iota((S,)), past_value), (S, 1))
    return b.broadcast_to(rows, (S, T))


@pytest.mark.parametrize("rows", ["grid", "column", "reshaped"])
@pytest.mark.parametrize("how", ["plain", "chosen", "hidden", "reshaped", "both"])
def test_a_past_before_the_queries(rows: str, how: str) -> None:
    """The mask of a decoder: key <= past + query, for a past of T - S and S - T."""
    for past in (T - S, S - T, T + 3):
        parts = Parts()
        b = parts.b
        keys, queries = b.iota((S, T), 1), rows_from(b, past, rows)
        lowest = b.scalar(-math.inf, DType.F32)
        flag = b.emit("le", keys, queries)
        if how == "chosen":  # as in tril
            ones = (b.full(flag, DType.BOOL, (S, T)) for flag in (True, False))
            flag = b.select(flag, *ones)
        if how == "reshaped":
            flag = b.reshape(flag, (1, 1, S, T))
        if how == "both":
            flag = b.binary("logical_and", flag, triangle(b, "shifted"))
        scores = b.select(flag, parts.scores(), lowest)
        if how == "hidden":
            scores = b.select(b.emit("gt", keys, queries), lowest, parts.scores())
        (op,) = found(parts.finish(scores))
        assert len(op.operands) == 3 and not op.regions
        seen = past == T + 3  # it hides nothing
        assert op.bool_attr("causal") is not (seen and how != "both")
        want = as_expr(0) if seen else past
        if how == "both":
            want = as_expr(1) if seen else minimum(past, 1)
        assert op.dim_attr("first") == want


def test_gradients_are_of_rows_from_zero_on() -> None:
    """A mask with a past stays in the region of what is, or will be, differentiated."""
    parts = Parts()
    lowest = parts.b.scalar(-math.inf, DType.F32)
    scores = parts.b.select(triangle(parts.b, "shifted"), parts.scores(), lowest)
    graph = canonicalize(decompose(parts.finish(scores), CX), CX)
    out = gather_attention(graph, CX, lambda made: True, shifted=False)
    (op,) = (op for op in out.ops if op.name == "attention")
    assert op.regions and not op.bool_attr("causal") and op.dim_attr("first") == 0


def test_gradients_with_a_shifted_mask() -> None:
    """The result has a first row, its gradients have the mask in their region."""
    parts = Parts()
    b = parts.b
    grad = b.param("grad", tensor(DType.F32, B, 4, S, 8))
    given = (parts.q, parts.k, parts.v, triangle(b, "shifted"))
    out, lse = b.emit_multi("attention_lse", *given, masked=True)
    grads = b.emit_multi("attention_backward", grad, out, lse, *given, masked=True)
    graph = parts.graph(out, *grads)
    made = attention(graph, CX)
    verify(Module({"main": made}), Stage.DECOMPOSED)
    one, back = (op for op in made.ops if op.name.startswith("attention"))
    assert one.dim_attr("first") == 1 and not one.regions
    assert not back.bool_attr("causal") and back.regions
    for env in ENVIRONMENTS:
        source = np.random.default_rng(0)
        shapes = ([d.evaluate(env) for d in p.shape] for p in graph.params)
        inputs = [source.standard_normal(shape).astype("f4") for shape in shapes]
        want = run_graph(Module({"main": graph}), inputs)
        for x, y in zip(run_graph(Module({"main": made}), inputs), want, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


def test_a_finite_triangle_is_a_mask() -> None:
    """A row that another mask hides altogether is the mean of all values, then."""
    parts = Parts()
    low = parts.b.scalar(-1e9, DType.F32)
    scores = parts.b.select(triangle(parts.b, "le"), parts.scores(), low)
    (op,) = found(parts.finish(scores))
    assert not op.bool_attr("causal")


def test_anything_between_moves_in() -> None:
    """Bounded scores, as in Gemma: 50 tanh(s / 50)."""
    parts = Parts()
    bounded = parts.b.unary("tanh", parts.times(parts.scores(), 1 / 50))
    (op,) = found(parts.finish(parts.times(bounded, 50.0)))
    assert [o.name for o in op.regions[0].ops if o.name != "full"] == ["tanh", "mul"]


def test_what_is_dear_stays_outside() -> None:
    parts = Parts()
    bias = parts.b.unary("log", parts.b.unary("exp", parts.mask(4, S, T)))
    (op,) = found(parts.finish(parts.b.binary("add", parts.scores(), bias)))
    assert {o.name for o in op.regions[0].ops} == {"broadcast", "add"}


def test_repeated_heads_are_read_once() -> None:
    parts = Parts(kv_heads=2)
    b = parts.b
    grouped = []
    for x in (parts.k, parts.v):
        wide = b.broadcast(x, (B, 2, 2, T, 8), (0, 1, 3, 4))
        grouped.append(b.reshape(wide, (B, 4, T, 8)))
    parts.k, parts.v = grouped
    (op,) = found(parts.finish(parts.scores()))
    assert [v.name for v in op.operands] == ["q", "k", "v"]


def test_one_head_of_keys() -> None:
    parts = Parts(kv_heads=1)
    (op,) = found(parts.finish(parts.scores()))
    assert [v.name for v in op.operands] == ["q", "k", "v"]


def test_heads_and_batch_as_one_axis() -> None:
    """bmm: (b*h, s, d), with the mask added in (b, h, s, t)."""
    parts = Parts()
    b = parts.b
    q, k, v = (b.reshape(x, (B * 4, *x.shape[2:])) for x in (parts.q, parts.k, parts.v))
    scores = b.reshape(b.matmul(q, b.swap(k, -1, -2)), (B, 4, S, T))
    scores = b.binary("add", scores, parts.mask(B, 1, S, T))
    weights = parts.weights(b.reshape(scores, (B * 4, S, T)))
    assert len(found(parts.graph(b.matmul(weights, v)))) == 1


def test_without_batch_or_heads() -> None:
    b = Builder()
    q, k = b.param("q", tensor(DType.F32, S, 8)), b.param("k", tensor(DType.F32, T, 8))
    v = b.param("v", tensor(DType.F32, T, 3))
    scores = b.binary("add", b.matmul(q, b.swap(k, 0, 1)), b.scalar(1.0, DType.F32))
    out = b.matmul(b.emit("softmax", scores, axis=1), v)
    assert len(found(b.finish("main", [out]))) == 1


def also_a_result(parts: Parts) -> Graph:
    weights = parts.weights(parts.scores())
    return parts.graph(parts.b.matmul(weights, parts.v), weights)


def also_scores(parts: Parts) -> Graph:
    scores = parts.scores()
    return parts.graph(
        parts.b.matmul(parts.weights(scores), parts.v), parts.b.unary("exp", scores)
    )


def other_axis(parts: Parts) -> Graph:
    weights = parts.b.emit("softmax", parts.scores(), axis=2)
    return parts.graph(parts.b.matmul(weights, parts.v))


def not_of_a_product(parts: Parts) -> Graph:
    return parts.finish(parts.mask(B, 4, S, T))


def changed_weights(parts: Parts) -> Graph:
    weights = parts.times(parts.weights(parts.scores()), 2.0)
    weights = parts.b.binary("add", weights, parts.mask(S, T))
    return parts.graph(parts.b.matmul(weights, parts.v))


@pytest.mark.parametrize(
    "make", [also_a_result, also_scores, other_axis, not_of_a_product, changed_weights]
)
def test_not_attention(make: Callable[[Parts], Graph]) -> None:
    assert found(make(Parts())) == []


def test_off() -> None:
    parts = Parts()
    graph = parts.finish(parts.scores())
    off = Context(Options(attention=False), baseline())
    assert attention(graph, off) is graph


# ---- whole models, compiled


class Spelled(torch.nn.Module):
    """softmax(q k' / 4 + bias, hidden where not kept) v, or torch's op."""

    def __init__(self, op: bool, mask: str) -> None:
        super().__init__()
        self.op, self.mask = op, mask

    def forward(self, q: Any, k: Any, v: Any, extra: Any = None) -> Any:
        if self.op:
            causal = self.mask == "causal"
            return scaled_dot_product_attention(q, k, v, extra, is_causal=causal)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.mask == "additive":
            scores = scores + extra
        if self.mask == "bool":
            scores = scores.masked_fill(~extra, -math.inf)
        if self.mask == "causal":
            length = torch.arange(q.shape[-2])
            scores = scores.masked_fill(length[None] > length[:, None], -math.inf)
        return scores.softmax(-1) @ v


class Decoder(torch.nn.Module):
    """Attention to earlier keys and to the own, in three spellings of the mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Any, past: Any) -> Any:
        k = torch.cat([past, x], 2)
        s, t = x.shape[2], k.shape[2]
        numbers = torch.arange(past.shape[2], t)
        match self.kind:
            case "tril":
                mask = torch.ones(s, t, dtype=torch.bool).tril(diagonal=t - s)
            case "positions":
                mask = (torch.arange(t)[None, :] <= numbers[:, None])[None, None]
            case _:
                hidden = torch.arange(t)[None, :] > numbers.reshape(-1, 1)
                mask = torch.where(hidden, -math.inf, 0.0)
        return scaled_dot_product_attention(x, k, k, mask)


@pytest.mark.parametrize("kind", ["tril", "positions", "additive"])
def test_decoders(kind: str) -> None:
    model = Decoder(kind)
    example = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 5, 16)
    made = pliant.compile(model, example, ({2: "s"}, {2: "p"}))
    (op,) = (
        op
        for fusion in made.program.fused.main.ops
        for region in fusion.regions
        for op in region.ops
        if op.name == "attention"
    )
    assert op.bool_attr("causal") and op.dim_attr("first") == sym("p")
    assert len(op.operands) == 3
    for s, p in ((3, 5), (1, 7), (7, 0), (0, 3), (1, 0), (300, 701), (1, 5000)):
        x, past = torch.randn(2, 4, s, 16), torch.randn(2, 4, p, 16)
        torch.testing.assert_close(made(x, past), model(x, past), atol=2e-6, rtol=2e-5)


MASKS = ("none", "causal", "additive", "bool")


@cache
def compiled(op: bool, mask: str, **options: bool) -> tuple[Any, pliant.CompiledModel]:
    model = Spelled(op, mask)
    dynamic = [{0: "b", 2: "s"}] * 3
    if mask in ("additive", "bool"):
        dynamic.append({0: "b", 2: "s", 3: "s"})
    example = inputs(mask, 2, 13)
    made = pliant.compile(model, example, tuple(dynamic), options=Options(**options))
    return model, made


def inputs(mask: str, b: int, s: int) -> tuple[torch.Tensor, ...]:
    tensors = [torch.randn(b, 3, s, 16) for _ in range(3)]
    if mask == "additive":
        tensors.append(torch.randn(b, 1, s, s))
    if mask == "bool":
        tensors.append(torch.rand(b, 1, s, s) > 0.4)
        tensors[-1][..., :1] = True  # every row sees one
    return tuple(tensors)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("op", [False, True], ids=["spelled", "op"])
def test_compiled(op: bool, mask: str) -> None:
    torch.manual_seed(0)
    model, made = compiled(op, mask)
    assert made.explain().count("attention") >= 1
    for b, s in ((1, 1), (2, 7), (1, 31), (3, 128), (1, 257), (1, 611)):
        given = inputs(mask, b, s)
        wide = tuple(x.double() if x.is_floating_point() else x for x in given)
        truth = copy.deepcopy(model).double()(*wide)
        eager = (model(*given).double() - truth).abs().max().item()
        error = (made(*given).double() - truth).abs().max().item()
        assert error <= 2 * eager + 1e-6
    for b, s in ((0, 3), (2, 0)):
        assert made(*inputs(mask, b, s)).shape == (b, 3, s, 16)


@pytest.mark.parametrize("mask", ["additive", "bool"])
@pytest.mark.parametrize("op", [False, True], ids=["spelled", "op"])
def test_hidden_rows_are_as_eager_has_them(op: bool, mask: str) -> None:
    model, made = compiled(op, mask)
    given = inputs(mask, 1, 5)
    given[3][:, :, 2] = False if mask == "bool" else -math.inf
    eager, got = model(*given), made(*given)
    assert torch.equal(eager[:, :, 2].isnan(), got[:, :, 2].isnan())
    torch.testing.assert_close(got, eager, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("op", [False, True], ids=["spelled", "op"])
def test_memory_grows_with_the_length(op: bool, mask: str) -> None:
    _, made = compiled(op, mask)
    short, long, longer = (
        made.memory_plan(b=1, s=s).peak_bytes for s in (4096, 8192, 16384)
    )
    assert longer - long == 2 * (long - short)
    assert "s^2" not in made.peak_formula and "s*s" not in made.peak_formula
    _, off = compiled(op, mask, attention=False)
    assert off.memory_plan(b=1, s=16384).peak_bytes > 10 * longer
