"""Attention's gradients, interpreted and spelled out, against autograd in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from pliant.context import Context
from pliant.errors import PliantError
from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Module, Value
from pliant.ir.interp import run_graph
from pliant.ir.ops import OPS, Trait
from pliant.ir.parse import parse_module
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.ir.types import DType, tensor
from pliant.machine import target
from pliant.options import Options
from pliant.passes.decompose import decompose
from pliant.sym import sym

SIZES = ((1, 1), (5, 7), (7, 7), (13, 2), (0, 3), (3, 0), (31, 37))


@dataclass(frozen=True)
class Case:
    heads: int = 2
    kv_heads: int = 2
    causal: bool = False
    mask: str = "none"
    scale: float | None = None
    swapped: bool = False

    @property
    def attrs(self) -> dict[str, object]:
        return {
            "causal": self.causal,
            "masked": self.mask != "none",
            "scale": self.scale,
            "swapped": self.swapped,
        }


CASES = {
    "plain": Case(),
    "causal": Case(causal=True, scale=0.3),
    "grouped": Case(heads=6, causal=True),
    "one key head": Case(heads=3, kv_heads=1, mask="bool"),
    "bool": Case(mask="bool", causal=True),
    "additive": Case(mask="additive"),
    "sliding": Case(mask="sliding", heads=4),
    "hidden rows": Case(mask="hidden", swapped=True),
}


def mask_of(case: Case, rows: int, columns: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(rows + 100 * columns)
    noise = torch.randn(2, 1, rows, columns, generator=generator)
    keep = noise > -0.5
    match case.mask:
        case "none":
            return None
        case "bool":
            return keep
        case "additive":
            return noise
        case "sliding":
            far = torch.arange(rows)[:, None] - torch.arange(columns)[None, :]
            return (far.abs() <= 2)[None, None]
        case _:
            keep[:, :, : rows // 2 + 1] = False
            return torch.where(keep, noise, -math.inf)


def tensors(case: Case, rows: int, columns: int) -> list[Tensor]:
    """q, k, v, the gradient of the result."""
    generator = torch.Generator().manual_seed(7 + rows + 10 * columns)
    shapes = (
        (2, case.heads, rows, 4),
        (2, case.kv_heads, columns, 4),
        (2, case.kv_heads, columns, 3),
        (2, case.heads, rows, 3),
    )
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def autograd(case: Case, given: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """out, lse, dq, dk, dv; rows without a visible column give 0."""
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    group = case.heads // case.kv_heads
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if case.scale is None else case.scale
    scores = scale * q @ keys.mT
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    if case.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    out = weights @ values
    out.backward(given[3])
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v)]
    return [out.detach(), lse.detach(), *grads]


def build(case: Case, mask: Tensor | None, dtype: DType = DType.F64) -> Graph:
    """out, lse, dq, dk, dv as one graph."""
    b = Builder()
    s, t, batch = sym("s"), sym("t"), sym("b")
    operands = [
        b.param("q", tensor(dtype, batch, case.heads, s, 4)),
        b.param("k", tensor(dtype, batch, case.kv_heads, t, 4)),
        b.param("v", tensor(dtype, batch, case.kv_heads, t, 3)),
    ]
    grad = b.param("grad", tensor(dtype, batch, case.heads, s, 3))
    if mask is not None:
        kind = DType.BOOL if mask.dtype is torch.bool else dtype
        lead = [batch if d == 2 else d for d in mask.shape[:2]]
        operands.append(b.param("mask", tensor(kind, *lead, s, t)))
    out, lse = b.emit_multi("attention_lse", *operands, **case.attrs)
    plain = b.swap(out, -2, -3) if case.swapped else out
    grads = b.emit_multi(
        "attention_backward", grad, plain, lse, *operands, **case.attrs
    )
    return b.finish("main", [out, lse, *grads])


def check(case: Case, graph: Graph, rows: int, columns: int) -> None:
    given, mask = tensors(case, rows, columns), mask_of(case, rows, columns)
    arrays = [x.numpy() for x in given]
    if mask is not None:
        arrays.append((mask if mask.dtype is torch.bool else mask.double()).numpy())
    found = run_graph(Module({"main": graph}), arrays)
    wanted = autograd(case, given, mask)
    for k, (mine, true) in enumerate(zip(found, wanted, strict=True)):
        expected = true.transpose(1, 2) if case.swapped and k != 1 else true
        np.testing.assert_allclose(mine, expected.numpy(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str) -> None:
    case = CASES[name]
    for rows, columns in SIZES:
        graph = build(case, mask_of(case, rows, columns))
        verify(Module({"main": graph}), Stage.IMPORTED)
        check(case, graph, rows, columns)


@pytest.mark.parametrize("name", CASES)
def test_spelled_out(name: str) -> None:
    case = CASES[name]
    for rows, columns in SIZES:
        graph = build(case, mask_of(case, rows, columns))
        off = Context(Options(attention=False), target.host())
        spelled = decompose(graph, off)
        assert not any(Trait.COMPOSITE in OPS[op.name].traits for op in spelled.ops)
        verify(Module({"main": spelled}), Stage.DECOMPOSED)
        check(case, spelled, rows, columns)


def test_text_round_trip() -> None:
    text = print_module(Module({"main": build(CASES["grouped"], None)}))
    assert "attention_backward" in text
    assert print_module(parse_module(text)) == text


def test_half_storage_keeps_lse_in_single() -> None:
    graph = build(Case(), None, DType.BF16)
    out, lse, dq, *_ = graph.results
    assert (out.dtype, lse.dtype, dq.dtype) == (DType.BF16, DType.F32, DType.BF16)


def bent(b: Builder, kind: str, score: Value, other: Value) -> Value:
    match kind:
        case "scaled":
            return b.binary("mul", score, other)
        case "twice":
            return b.binary("add", score, score)
        case "bounded":
            return b.unary("tanh", score)
        case "filled":
            low = b.scalar(-1e9, score.dtype)
            return b.select(b.binary("gt", other, low), score, low)
        case "hidden":
            low = b.scalar(-math.inf, score.dtype)
            return b.select(b.binary("gt", other, low), score, low)
        case _:
            return b.binary("add", score, other)


@pytest.mark.parametrize(
    "kind", ["scaled", "twice", "bounded", "filled", "hidden", "added"]
)
def test_regions_that_bend_scores_are_refused(kind: str) -> None:
    b, s = Builder(), sym("s")
    q = b.param("q", tensor(DType.F32, 1, 1, s, 2))
    lse = b.param("lse", tensor(DType.F32, 1, 1, s))
    mask = b.param("mask", tensor(DType.F32, 1, 1, s, s))
    inner = b.child()
    score = inner.param("score", mask.type)
    other = inner.param("other", mask.type)
    region = inner.finish("score", [bent(inner, kind, score, other)])
    operands = (q, q, lse, q, q, q, mask)
    if kind in ("hidden", "added"):
        made = b.emit_multi("attention_backward", *operands, regions=[region])
        assert [v.type for v in made] == [q.type] * 3
        return
    with pytest.raises(PliantError, match="must add to the scores or hide some"):
        b.emit_multi("attention_backward", *operands, regions=[region])
