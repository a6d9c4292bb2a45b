"""Shape rules of the composite ops, those that passes/decompose.py takes apart."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

from pliant.errors import ShapeError
from pliant.ir.graph import Graph, Op, Value
from pliant.ir.infer import Attrs, InferContext, Types
from pliant.ir.types import DType, TensorType
from pliant.sym import Expr, divides, le


def axis_kept(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    if "axis" in attrs:
        cx.axis(attrs.integer("axis"), types[0])
    cx.want(types[0], "f")
    return types


def relu(cx: InferContext, types: Types, _: Attrs) -> Types:
    cx.want(types[0], "fiu")
    return types


def random(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (seed,) = types
    cx.want(seed, "i", "seed")
    cx.require_rank(seed, 0, "seed")
    return (TensorType(DType.F32, attrs.dims("shape")),)


def linear(cx: InferContext, types: Types, _: Attrs) -> Types:
    x, w, *bias = types
    dtype = cx.same_dtype(types)
    cx.require_rank(w, 2, "weight")
    if x.rank < 1:
        cx.fail("input must have a last dim")
    cx.require_equal(x.shape[-1], w.shape[1], "features must agree")
    for b in bias:
        cx.require_rank(b, 1, "bias")
        cx.require_equal(b.shape[0], w.shape[0], "bias must fit the weight")
    return (TensorType(dtype, (*x.shape[:-1], w.shape[0])),)


AFFINE = {"none": 0, "w": 1, "wb": 2}


def _affine(cx: InferContext, types: Types, attrs: Attrs, fixed: int) -> Types:
    """The weight and bias that follow the fixed operands."""
    count = AFFINE[attrs.text("affine")]
    if len(types) != fixed + count:
        cx.fail(f"affine '{attrs.text('affine')}' takes {fixed + count} operands")
    cx.want(types[0], "f")
    return types[fixed:]


def layer_norm(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, axes = types[0], attrs.integer("axes")
    if not 1 <= axes <= x.rank:
        cx.fail(f"cannot normalise {axes} dims of {x}")
    tail = x.with_shape(x.shape[x.rank - axes :])
    for w in _affine(cx, types, attrs, 1):
        cx.same_shape((tail, w), "weights must have the normalised shape")
    return (x,)


def channel_norm(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x = types[0]
    if x.rank < 2:
        cx.fail(f"input must be (N, C, ..), is {x}")
    fixed = 1 if "groups" in attrs else 3
    for w in (*types[1:fixed], *_affine(cx, types, attrs, fixed)):
        cx.require_rank(w, 1, "per-channel operand")
        cx.require_equal(w.shape[0], x.shape[1], "channels must agree")
    if "groups" in attrs:
        groups = attrs.integer("groups")
        cx.require(divides(groups, x.shape[1]), "groups must divide channels")
    return (x,)


def keeps_size(op: Op) -> bool:
    """Whether a resize goes by the sizes where an axis keeps its own, not by its scale.

    torch does, in linear modes and in `nearest` of two axes, there also for twice the
    size; a new size of floor(n * 1.25) is n for n below 4.
    """
    mode, axes = op.str_attr("mode"), len(op.dims_attr("shape"))
    return mode == "linear" or (mode == "nearest" and axes == 2)


def attention(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    if attrs.dim("first") != 0 and not attrs.flag("causal"):
        cx.fail("'first' numbers the rows of the causal mask: 'causal' must be set")
    return _attention(cx, types, attrs)


def _attention(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    q, k, v = types[:3]
    dtype = cx.same_dtype(types[:3])
    cx.want(q, "f")
    if not q.rank == k.rank == v.rank or q.rank < 3:
        cx.fail(f"q, k, v must have one rank of at least 3, are {q}, {k}, {v}")
    more = None if cx.regions else int(attrs.flag("masked"))
    if more is not None and len(types) != 3 + more:
        cx.fail("the mask operand and the attribute 'masked' must agree")
    batch = cx.same_shape([t.with_shape(t.shape[:-3]) for t in types[:3]], "batch")
    heads, rows = q.shape[-3], q.shape[-2]
    cx.require_equal(k.shape[-3], v.shape[-3], "heads of k and v must agree")
    cx.require_equal(k.shape[-2], v.shape[-2], "lengths of k and v must agree")
    cx.require_equal(q.shape[-1], k.shape[-1], "head sizes of q and k must agree")
    if heads is not k.shape[-3]:
        cx.require(divides(k.shape[-3], heads), "heads of k must divide heads of q")
    full = (*batch, heads, rows, k.shape[-2])
    for region in cx.regions:
        _score_region(cx, region, TensorType(dtype, full), types[3:])
    for mask in () if cx.regions else types[3:]:
        if mask.dtype is not DType.BOOL:
            cx.want(mask, "f", "mask")
        if mask.rank > len(full):
            cx.fail(f"mask {mask} has more dims than the scores")
        for a, b in zip(mask.shape, full[len(full) - mask.rank :], strict=True):
            if a != 1:
                cx.require_equal(a, b, "mask must fit the scores")
    middle = (rows, heads) if attrs.flag("swapped") else (heads, rows)
    return (TensorType(dtype, (*batch, *middle, v.shape[-1])),)


def attention_lse(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (out,) = attention(cx, types, attrs)
    return (out, TensorType(out.dtype.compute, types[0].shape[:-1]))


def attention_backward(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    given, rest = types[:3], types[3:]
    q, k, v = rest[:3]
    _attention(cx, rest, attrs)
    for region in cx.regions:
        if not _only_shifts(region):
            cx.fail(f"region {region.name} must add to the scores or hide some")
    out = TensorType(q.dtype, (*q.shape[:-1], v.shape[-1]))
    lse = TensorType(q.dtype.compute, q.shape[:-1])
    for name, found, wanted in zip(
        ("grad_out", "out", "lse"), given, (out, out, lse), strict=True
    ):
        if found.dtype is not wanted.dtype or found.rank != wanted.rank:
            cx.fail(f"{name} must be {wanted}, is {found}")
        for a, b in zip(found.shape, wanted.shape, strict=True):
            cx.require_equal(a, b, f"{name} must fit the rows")
    if not attrs.flag("swapped"):
        return (q, k, v)
    return tuple(
        t.with_shape((*t.shape[:-3], t.shape[-2], t.shape[-3], t.shape[-1]))
        for t in (q, k, v)
    )


_SHIFTS = frozenset({"add", "select", "broadcast", "reshape", "cast"})


def _only_shifts(region: Graph) -> bool:
    """Whether every score is kept, added to, or made -inf."""
    scores, lowest = {region.params[0]}, set[Value]()
    for op in region.ops:
        if op.name == "full" and op.attr("value") == -math.inf:
            lowest.update(op.results)
        taken = [v in scores for v in op.operands]
        if not any(taken):
            if op.name in ("broadcast", "reshape") and op.operands[0] in lowest:
                lowest.update(op.results)
            continue
        others = [v for v in op.operands[1:] if v not in scores]
        hides = op.name != "select" or all(v in lowest for v in others)
        if op.name not in _SHIFTS or sum(taken) != 1 or not hides:
            return False
        scores.update(op.results)
    return True


def _score_region(
    cx: InferContext, region: Graph, scores: TensorType, others: Types
) -> None:
    """A region of attention takes the scores and what else it reads, gives scores."""
    given = (scores, *others)
    takes = tuple(v.type for v in region.params)
    same = len(takes) == len(given) and all(
        a.dtype is b.dtype and _equal(cx, a, b)
        for a, b in zip(takes, given, strict=True)
    )
    if not same:
        cx.fail(f"region {region.name} takes {takes}, is given {given}")
    if len(region.results) != 1 or not _equal(cx, region.results[0].type, scores):
        cx.fail(f"region {region.name} must give scores of the shape of {scores}")
    cx.want(region.results[0].type, "f", "score")


def _equal(cx: InferContext, a: TensorType, b: TensorType) -> bool:
    return a.rank == b.rank and all(map(cx.proves_equal, a.shape, b.shape))


def resize(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), shape, scales = types, attrs.dims("shape"), attrs["scales"]
    assert isinstance(scales, tuple)
    if len(shape) > x.rank - 2 or len(scales) not in (0, len(shape)):
        cx.fail(f"shape {shape} and scales {scales} do not fit {x}")
    if attrs.text("mode") not in ("nearest", "nearest_exact"):
        cx.want(x, "f")
    lead = x.rank - len(shape)
    for i, dim in enumerate(x.shape[lead:]):
        cx.require(le(1, dim), f"spatial dim {i} must have elements")
    return (x.with_shape(x.shape[:lead] + shape),)


def einsum_labels(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """One label string per operand, and the result's; `...` gets labels of its own.

    Ellipses align at the end, as in torch; without `->` the result holds the labels
    seen once, sorted, behind the ellipsis.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if len(inputs) != len(ranks):
        raise ShapeError(f"einsum '{equation}' takes {len(inputs)} operands")
    # Greek letters never clash with the labels a model may use.
    spare = "αβγδεζηθικλμνξοπρστυφχψω"
    dots = ""
    out = []
    for labels, rank in zip(inputs, ranks, strict=True):
        if "..." in labels:
            hidden = rank - (len(labels) - 3)
            own = spare[len(spare) - hidden :] if hidden else ""
            dots = own if len(own) > len(dots) else dots
            labels = labels.replace("...", own)
        if len(labels) != rank:
            raise ShapeError(f"einsum '{equation}': '{labels}' names rank {rank}")
        out.append(labels)
    if not arrow:
        names = sorted(set(left) & set(string.ascii_letters))
        return out, dots + "".join(c for c in names if left.count(c) == 1)
    return out, right.replace("...", dots)


def einsum(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    dtype = cx.same_dtype(types)
    inputs, output = einsum_labels(attrs.text("equation"), [t.rank for t in types])
    size: dict[str, Expr] = {}
    for labels, type in zip(inputs, types, strict=True):
        for label, dim in zip(labels, type.shape, strict=True):
            known = size.get(label, dim)
            if known == 1 or dim == 1:  # torch broadcasts a 1 along a label
                size[label] = dim if known == 1 else known
            else:
                size[label] = cx.require_equal(known, dim, f"label '{label}'")
    return (TensorType(dtype, tuple(size[label] for label in output)),)
