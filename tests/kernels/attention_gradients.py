"""Graphs of attention and its gradients, their inputs, and autograd in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pliant.ir.build import Builder
from pliant.ir.graph import Graph, Value
from pliant.ir.types import DType, tensor
from pliant.sym import sym

KINDS = {
    DType.F64: torch.float64,
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
}


@dataclass(frozen=True)
class Case:
    """What is fixed when a graph is made; batch, heads and lengths are symbols."""

    head: int | None = 64  # None: a symbol too
    value_head: int | None = None
    group: int = 1
    causal: bool = False
    mask: str = "none"  # none, bool, additive, sliding, hidden
    scale: float | None = None
    dtype: DType = DType.F32
    layout: str = "bhsd"  # order of the operands' axes in memory

    def graph(self) -> Graph:
        """out, lse, dq, dk, dv of q, k, v, grad[, mask]."""
        b = Builder()
        batch, heads, s, t = (sym(name) for name in "bhst")
        head = sym("head") if self.head is None else self.head
        value_head = self.value_head or head
        shapes = {
            "q": (batch, heads * self.group, s, head),
            "k": (batch, heads, t, head),
            "v": (batch, heads, t, value_head),
            "grad": (batch, heads * self.group, s, value_head),
        }
        values = {name: self.param(b, name, shape) for name, shape in shapes.items()}
        grad = values.pop("grad")
        operands = [*values.values()]
        if self.mask != "none":
            kind = DType.BOOL if self.mask in ("bool", "sliding") else self.dtype
            operands.append(b.param("mask", tensor(kind, batch, 1, s, t)))
        attrs = {
            "causal": self.causal,
            "masked": self.mask != "none",
            "scale": self.scale,
        }
        out, lse = b.emit_multi("attention_lse", *operands, **attrs)
        grads = b.emit_multi("attention_backward", grad, out, lse, *operands, **attrs)
        if self.layout == "bshd":
            out, *grads = (b.swap(x, -2, -3) for x in (out, *grads))
        return b.finish("main", [out, lse, *grads])

    def param(self, b: Builder, name: str, shape: Sequence[object]) -> Value:
        stored = [shape["bhsd".index(axis)] for axis in self.layout]
        value = b.param(name, tensor(self.dtype, *stored))
        return b.transpose(value, [self.layout.index(axis) for axis in "bhsd"])

    def stored(self, x: Tensor) -> Tensor:
        """(b, h, s, d) as it lies in memory."""
        return x.permute(["bhsd".index(axis) for axis in self.layout]).contiguous()


@dataclass(frozen=True)
class Sizes:
    b: int
    h: int
    s: int
    t: int
    d: int = 64


def inputs(case: Case, sizes: Sizes) -> list[Tensor]:
    """q, k, v, grad[, mask] as (b, h, s, d)."""
    n = sizes
    generator = torch.Generator().manual_seed(n.b + 10 * n.h + 100 * n.s + 1000 * n.t)
    head = case.head or n.d
    value_head = case.value_head or head
    shapes = (
        (n.b, n.h * case.group, n.s, head),
        (n.b, n.h, n.t, head),
        (n.b, n.h, n.t, value_head),
        (n.b, n.h * case.group, n.s, value_head),
    )
    kind = KINDS[case.dtype]
    made = [torch.randn(s, generator=generator).to(kind) for s in shapes]
    noise = torch.randn((n.b, 1, n.s, n.t), generator=generator)
    far = torch.arange(n.s)[:, None] - torch.arange(n.t)[None, :]
    match case.mask:
        case "bool":
            made.append(noise > -0.7)
        case "additive":
            made.append(noise.to(kind))
        case "sliding":
            made.append((far.abs() <= 5).expand(noise.shape).contiguous())
        case "hidden":
            noise[:, :, n.s // 2 :: 2] = -math.inf
            made.append(noise.to(kind))
    return made


def scored(case: Case, wide: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with -inf where a column is hidden; keys and values of every head."""
    q, k, v = wide[:3]
    keys, values = (x.repeat_interleave(case.group, 1) for x in (k, v))
    scale = max(q.shape[-1], 1) ** -0.5 if case.scale is None else case.scale
    scores = scale * q @ keys.mT
    for mask in wide[4:]:
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask
    if case.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores, keys, values


def softmax(scores: Tensor) -> Tensor:
    """Of each row; rows without a visible column are 0."""
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def autograd(case: Case, given: list[Tensor]) -> list[Tensor]:
    """out, lse, dq, dk, dv in float64; rows without a visible column give 0."""
    wide = [x if x.dtype is torch.bool else x.double().clone() for x in given]
    q, k, v = (x.requires_grad_() for x in wide[:3])
    scores, _, values = scored(case, wide)
    out = softmax(scores) @ values
    out.backward(wide[3])
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v)]
    return [out.detach(), scores.logsumexp(-1).detach(), *grads]


def magnitudes(case: Case, given: list[Tensor]) -> list[float]:
    """The largest sum of absolute values behind each result.

    A row's scores have the gradient P * (dO V^T - dO . O), a difference: with one
    visible column it is 0 but for the rounding of two numbers that are not small.
    """
    wide = [x if x.dtype is torch.bool else x.double() for x in given]
    scores, keys, values = scored(case, wide)
    weights, do = softmax(scores), wide[3]
    both = (do @ values.mT).abs() + (do * (weights @ values)).sum(-1, True).abs()
    scale = max(keys.shape[-1], 1) ** -0.5 if case.scale is None else case.scale
    ds = weights * both * scale
    sums = [ds @ keys.abs(), ds.mT @ wide[0].abs(), weights.mT @ do.abs()]
    found = [x.abs().max().item() if x.numel() else 0.0 for x in sums]
    return [0.0, 0.0, found[0], case.group * found[1], case.group * found[2]]


def plain(array: np.ndarray, case: Case, which: int) -> Tensor:
    """A result of the graph as (b, h, s, d)."""
    if case.dtype is DType.BF16 and which != 1:
        found = torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    else:
        found = torch.from_numpy(array.copy())
    swapped = case.layout == "bshd" and which != 1
    return found.transpose(1, 2) if swapped else found


def arrays(case: Case, given: list[Tensor]) -> list[np.ndarray]:
    """The inputs as a program takes them."""
    stored = [case.stored(x) for x in given[:4]] + given[4:]
    return [
        (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()
        for x in stored
    ]


FLOOR = {DType.F64: 1e-13, DType.F32: 2e-6, DType.F16: 2e-3, DType.BF16: 2e-2}


def check(case: Case, given: list[Tensor], found: Sequence[np.ndarray]) -> None:
    """Errors relative to the largest gradient of their kind, or to 1.

    A gradient that is all cancellation may be off by the rounding of what cancels.
    """
    wanted = autograd(case, given)
    behind = magnitudes(case, given)
    for which, (mine, true) in enumerate(zip(found, wanted, strict=True)):
        result = plain(mine, case, which).double()
        assert result.shape == true.shape
        if not true.numel():
            continue
        hidden = torch.isinf(true)
        assert torch.equal(hidden, torch.isinf(result)), f"result {which}"
        gap = (result - true).masked_fill(hidden, 0.0).abs().max().item()
        size = max(true.masked_fill(hidden, 0.0).abs().max().item(), 1.0)
        rounding = behind[which] * 2**-24 if case.dtype is DType.F32 else 0.0
        allowed = max(FLOOR[case.dtype] * size, rounding)
        assert gap <= allowed, f"result {which}: {gap} of {allowed}"
