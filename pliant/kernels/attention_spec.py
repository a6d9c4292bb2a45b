"""The description of an attention kernel, its result, and the names it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pliant.ir.loops import (
    Binary,
    Buffer,
    Cast,
    Const,
    Index,
    Let,
    LoopFunc,
    LoopValue,
    Stmt,
    Unary,
)
from pliant.ir.types import DType
from pliant.sym import ZERO, Expr, as_expr, maximum, sym


@dataclass(frozen=True, slots=True)
class Scored:
    """Statements that compute the score of one column of a row, and that score."""

    body: tuple[Stmt, ...]
    value: LoopValue


KEY = "_at_key"  # the index of a key, where a score is computed

# (index of batch, head and query; (score, in range?, its key) per column; names that
# differ from column to column) -> the statements a row computes once, and each score
ScoreOf = Callable[
    [
        Sequence[Expr],
        Sequence[tuple[LoopValue, LoopValue | None, Expr]],
        frozenset[str],
    ],
    tuple[list[Stmt], list[Scored]],
]


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention op. Strides are of (batch.., head, position, element), in elements.

    The last stride of q and out is 1. `score` reads the buffers `reads`.
    """

    dtype: DType
    batch: tuple[Expr, ...]
    heads: Expr
    kv_heads: Expr
    q_len: Expr
    kv_len: Expr
    head: Expr
    value_head: Expr
    q_strides: tuple[Expr, ...]
    k_strides: tuple[Expr, ...]
    v_strides: tuple[Expr, ...]
    out_strides: tuple[Expr, ...]
    reads: tuple[Buffer, ...] = ()
    score: ScoreOf | None = None
    causal: bool = False
    first: Expr = ZERO  # with `causal`, the number of row 0
    nan_rows: bool = False  # fully masked rows give NaN, not 0
    zero_nan: bool = False  # rows whose weights are NaN give 0
    scale: float | None = None  # None: 1/sqrt(head)
    lse: bool = False  # the logarithm of each row's sum of exponentials is a result


@dataclass(frozen=True, slots=True)
class AttentionBackward:
    """The gradients of one; its result, read here, has the forward's `out_strides`."""

    forward: Attention
    grad_strides: tuple[Expr, ...]
    lse_strides: tuple[Expr, ...]
    dq_strides: tuple[Expr, ...]
    dk_strides: tuple[Expr, ...]
    dv_strides: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """The loop function, the functions it calls, its scratch.

    The parameters are (q, k, v, reads.., out[, lse], work..), and for gradients (grad,
    out, lse, q, k, v, reads.., dq, dk, dv, work..).
    """

    func: LoopFunc
    helpers: tuple[LoopFunc, ...]
    work: tuple[Buffer, ...]


def at_(name: str) -> Expr:
    """A name of this kernel, prefixed so that it cannot be a size of the model."""
    return sym(f"_at_{name}")


def let(name: str, dim: Expr | int) -> Let:
    return Let(f"_at_{name}", Index(as_expr(dim)))


def is_(op: str, x: Expr, y: Expr | int) -> LoopValue:
    return Binary(op, Index(x), Index(as_expr(y)))


def scale_of(spec: Attention) -> LoopValue:
    """The factor that scales the scores."""
    head, compute = spec.head, spec.dtype.compute
    if spec.scale is not None:
        return Const(spec.scale, compute)
    if head.is_const:
        return Const(max(head.value, 1) ** -0.5, compute)
    root = Unary("sqrt", Cast(Index(maximum(head, 1)), compute))
    return Binary("div", Const(1.0, compute), root)
