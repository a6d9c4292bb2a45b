"""Attention: strided operands in, one kernel out."""

from __future__ import annotations

from pliant.ir.graph import Graph
from pliant.ir.types import TensorType, contiguous_strides
from pliant.kernels.attention import Attention, attention
from pliant.lower.contract import Operands
from pliant.lower.step import Argument, Scratch, Step
from pliant.passes.views import View
from pliant.sym import Expr, as_expr
from pliant.target import Target


def _aligned(mask: View, rank: int) -> tuple[Expr, ...]:
    """A mask's strides over (batch.., head, query, key): 0 where it is broadcast."""
    strides = [
        as_expr(0) if dim == as_expr(1) else stride
        for dim, stride in zip(mask.shape, mask.strides, strict=True)
    ]
    return (*[as_expr(0)] * (rank - len(strides)), *strides)


def lower_attention(
    region: Graph, name: str, operands: Operands, target: Target
) -> list[Step]:
    (root,) = (op for op in region.ops if op.name == "attention")
    q, k, v, *rest = root.operands
    views = [operands.views[value] for value in root.operands]
    mask = rest[0] if rest else None
    *batch, heads, q_len, head = q.shape
    scale = root.attr("scale")
    out = contiguous_strides(root.result.shape)
    if root.bool_attr("swapped"):
        # The result is (.., position, head, element): what a following transpose of
        # heads and positions would have made.
        out = (*out[:-3], out[-2], out[-3], out[-1])
    spec = Attention(
        dtype=q.dtype,
        batch=tuple(batch),
        heads=heads,
        kv_heads=k.shape[-3],
        q_len=q_len,
        kv_len=k.shape[-2],
        head=head,
        value_head=v.shape[-1],
        q_strides=views[0].strides,
        k_strides=views[1].strides,
        v_strides=views[2].strides,
        out_strides=out,
        mask=None if mask is None else mask.dtype,
        mask_strides=() if mask is None else _aligned(views[3], len(batch) + 3),
        causal=root.bool_attr("causal"),
        scale=head.value**-0.5 if scale is None else root.float_attr("scale"),
    )
    kernel = attention(name, spec, target)
    work: list[Argument] = [
        Scratch(TensorType(b.dtype, b.shape[1:])) for b in kernel.work
    ]
    arguments = (*root.operands, root.result, *work)
    return [Step(kernel.func, arguments, tuple(kernel.helpers))]
