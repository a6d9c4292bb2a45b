"""Attention: strided operands in, one kernel out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pliant.ir.graph import Graph, Op, Value
from pliant.ir.loop_walk import substitute
from pliant.ir.loops import Buffer, Load, LoopValue, Role, Stmt, as_dtype, buffer
from pliant.ir.ops import ATTENTIONS, zeroes_nan
from pliant.ir.types import TensorType, contiguous_strides
from pliant.ir.views import View
from pliant.kernels.attention import (
    KEY,
    Attention,
    AttentionKernel,
    Scored,
    attention,
)
from pliant.lower.domain import Axis, with_axes
from pliant.lower.evaluate import Evaluator
from pliant.lower.step import Argument, Fusion, KernelStep, NumberCheck, Scratch
from pliant.passes.attention import attended, score_of
from pliant.sym import ZERO, Expr, Facts, sym


@dataclass(frozen=True, slots=True)
class RegionScore:
    """The region of an attention op, emitted as statements on one score."""

    region: Graph
    buffers: tuple[Buffer, ...]  # the region's parameters after the score
    facts: Facts
    number_check: NumberCheck

    def __call__(
        self,
        index: Sequence[Expr],
        columns: Sequence[tuple[LoopValue, LoopValue | None, Expr]],
        names: frozenset[str],
    ) -> tuple[list[Stmt], list[Scored]]:
        """What a row computes once, then the score of each kind of column.

        `columns` are (score, whether it is in range, index of its key). `names` are the
        variables that differ from column to column. What varies only by row is computed
        once.
        """
        score, *others = self.region.params
        buffers = dict(zip(others, self.buffers, strict=True))
        (result,) = self.region.results
        here: tuple[LoopValue, LoopValue | None] = (columns[0][0], None)

        def leaf(
            value: Value, at: tuple[Expr, ...], where: LoopValue | None
        ) -> LoopValue | None:
            if value is score:
                return here[0]
            if value not in buffers:
                return None
            varies = any(KEY in dim.symbols() for dim in at)
            return Load(buffers[value], at, here[1] if varies else where)

        axes = [
            Axis(position.symbol, extent)
            for position, extent in zip((*index, sym(KEY)), score.shape, strict=True)
            if position.symbol is not None
        ]
        space = with_axes(self.facts, axes)
        evaluator = Evaluator(self.region.producers(), leaf, space, self.number_check)
        out: list[Scored] = []
        for found, inside, key in columns:
            here = (found, inside)
            evaluator.push({*names, KEY})
            made = evaluator.value(result, (*index, sym(KEY)))
            made = evaluator.local(as_dtype(made, score.dtype.compute))
            body = [substitute(stmt, {KEY: key}) for stmt in evaluator.pop()]
            out.append(Scored(tuple(body), made))
        return evaluator.scopes[0].body, out


def _read(number: int, value: Value, view: View) -> Buffer:
    return buffer(f"_at_x{number}", value.dtype, view.shape, Role.IN, view.strides)


@dataclass(frozen=True, slots=True)
class Lowered:
    """The operands q, k, v, those that scores read, and the spec of the kernel."""

    operands: tuple[Value, ...]
    spec: Attention


def attention_of(root: Op, out_strides: tuple[Expr, ...], fusion: Fusion) -> Lowered:
    """The common part of attention and its gradients."""
    q, k, v = attended(root)[:3]
    views, facts = fusion.views, fusion.facts
    score = score_of(root, {}, facts)
    reads = [_read(n, value, views[value]) for n, value in enumerate(score.reads)]
    score_kernel = None
    if score.region is not None:
        score_kernel = RegionScore(
            score.region, tuple(reads), facts, fusion.number_check
        )
    *batch, heads, q_len, head = q.shape
    scale = root.attr("scale")
    spec = Attention(
        dtype=q.dtype,
        batch=tuple(batch),
        heads=heads,
        kv_heads=k.shape[-3],
        q_len=q_len,
        kv_len=k.shape[-2],
        head=head,
        value_head=v.shape[-1],
        q_strides=views[q].strides,
        k_strides=views[k].strides,
        v_strides=views[v].strides,
        out_strides=out_strides,
        reads=tuple(reads),
        score=score_kernel,
        causal=score.first is not None,
        first=ZERO if score.first is None else score.first,
        nan_rows=root.bool_attr("nan_rows"),
        zero_nan=zeroes_nan(root),
        scale=None if scale is None else root.float_attr("scale"),
        lse=root.name == "attention_lse",
    )
    return Lowered((q, k, v, *score.reads), spec)


def result_strides(root: Op, result: Value) -> tuple[Expr, ...]:
    """Strides of (batch.., head, position, element) in a result.

    A swapped result is laid out (.., position, head, element), as a transpose of heads
    and positions after it would have made it.
    """
    steps = contiguous_strides(result.shape)
    if root.bool_attr("swapped"):
        return (*steps[:-3], steps[-2], steps[-3], steps[-1])
    return steps


def step_of(
    kernel: AttentionKernel, operands: Sequence[Value], results: Sequence[Value]
) -> KernelStep:
    work: list[Argument] = [
        Scratch(TensorType(b.dtype, b.shape[1:])) for b in kernel.work
    ]
    return KernelStep(kernel.func, (*operands, *results, *work), tuple(kernel.helpers))


def lower_attention(fusion: Fusion) -> list[KernelStep]:
    root = fusion.root(*ATTENTIONS)
    lowered = attention_of(root, result_strides(root, root.results[0]), fusion)
    kernel = attention(fusion.name, lowered.spec, fusion.target)
    return [step_of(kernel, lowered.operands, root.results)]
