"""Shape rules of the primitive ops: elementwise, create, move, reduce, contract.

What each op means is defined in ir/ops.py, whose table names these functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pliant.ir.infer import Attrs, Infer, InferContext, Types
from pliant.ir.types import NARROW, DType, TensorType
from pliant.sym import Expr, as_expr, divides, eq, floordiv, le

# ---- elementwise


def elementwise(kinds: str, to: DType | None = None) -> Infer:
    def rule(cx: InferContext, types: Types, _: Attrs) -> Types:
        cx.want(types[0], kinds)
        dtype = cx.same_dtype(types)
        shape = cx.same_shape(types, "operands must have one shape")
        return (TensorType(dtype if to is None else to, shape),)

    return rule


def select(cx: InferContext, types: Types, _: Attrs) -> Types:
    cx.want(types[0], "b", "condition")
    dtype = cx.same_dtype(types[1:])
    # The shape's spelling is that of the chosen tensors.
    shape = cx.same_shape((*types[1:], types[0]), "operands must have one shape")
    return (TensorType(dtype, shape),)


def cast(_: InferContext, types: Types, attrs: Attrs) -> Types:
    return (types[0].with_dtype(attrs.dtype("dtype")),)


def bitcast(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    source, to = attrs.dtype("source"), attrs.dtype("dtype")
    if source is not types[0].dtype or source.bytes != to.bytes:
        cx.fail_dtype(f"takes {source} to {to}, is given {types[0]}")
    return (types[0].with_dtype(to),)


# ---- create


def given(cx: InferContext, _: Types, attrs: Attrs) -> Types:
    if "axis" in attrs:
        axis, rank = attrs.integer("axis"), len(attrs.dims("shape"))
        if not 0 <= axis < rank:
            cx.fail(f"axis {axis} is outside rank {rank}")
    return (TensorType(attrs.dtype("dtype"), attrs.dims("shape")),)


def dim_value(cx: InferContext, _: Types, attrs: Attrs) -> Types:
    return (TensorType(attrs.dtype("dtype"), ()),)


def declared(cx: InferContext, _: Types, __: Attrs) -> Types:
    return cx.declared


def constant(cx: InferContext, _: Types, __: Attrs) -> Types:
    if len(cx.declared) != 1:
        raise TypeError(cx.describe("the type of a constant must be stated"))
    return cx.declared


# ---- move


def _widened(
    cx: InferContext, types: Types, attrs: Attrs
) -> Iterator[tuple[Expr, Expr, str]]:
    """Each operand dim that is not 1, the result's, and what is said of them."""
    (x,), shape, axes = types, attrs.dims("shape"), attrs.ints("axes")
    if len(axes) != x.rank or list(axes) != sorted(set(axes)):
        cx.fail(f"axes {axes} must name one rising result dim per dim of {x}")
    for i, axis in enumerate(axes):
        if not 0 <= axis < len(shape):
            cx.fail(f"axis {axis} is outside rank {len(shape)}")
        if x.shape[i] != 1:
            yield x.shape[i], shape[axis], f"dim {i} must fit"


def broadcast(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    for dim, wide, why in _widened(cx, types, attrs):
        cx.require_equal(dim, wide, why)
    return (types[0].with_shape(attrs.dims("shape")),)


def stretch(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    for dim, wide, why in _widened(cx, types, attrs):
        if not cx.proves_equal(dim, wide):
            cx.require(eq((dim - 1) * (dim - wide), 0), why)
    return (types[0].with_shape(attrs.dims("shape")),)


def reshape(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    out = types[0].with_shape(attrs.dims("shape"))
    cx.require_equal(types[0].numel, out.numel, "number of elements must stay")
    return (out,)


def transpose(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), perm = types, attrs.ints("perm")
    if sorted(perm) != list(range(x.rank)):
        cx.fail(f"{perm} is no permutation of the dims of {x}")
    return (x.with_shape(tuple(x.shape[p] for p in perm)),)


def slice_(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), shape = types, attrs.dims("shape")
    starts, steps = attrs.dims("starts"), attrs.ints("steps")
    if not len(starts) == len(steps) == len(shape) == x.rank:
        cx.fail(f"starts, shape and steps must have one entry per dim of {x}")
    rows = zip(x.shape, starts, shape, steps, strict=True)
    for i, (dim, start, size, step) in enumerate(rows):
        if step < 1:
            cx.fail(f"step {step} of dim {i} must be positive")
        cx.require(le(0, start), f"start of dim {i}")
        cx.require(le(0, size), f"size of dim {i}")
        if size != 0:
            cx.require(le(start + (size - 1) * step + 1, dim), f"end of dim {i}")
    return (x.with_shape(shape),)


def flip(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    for axis in attrs.ints("axes"):
        cx.axis(axis, types[0])
    return (types[0],)


def concat(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    axis = cx.axis(attrs.integer("axis"), types[0])
    cx.same_dtype(types)
    rest = [t.with_shape(t.shape[:axis] + t.shape[axis + 1 :]) for t in types]
    shape = list(cx.same_shape(rest, "dims beside the axis must agree"))
    shape.insert(axis, sum((t.shape[axis] for t in types), as_expr(0)))
    return (types[0].with_shape(tuple(shape)),)


def pad(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), low, high = types, attrs.dims("low"), attrs.dims("high")
    if not len(low) == len(high) == x.rank:
        cx.fail(f"low and high must have one entry per dim of {x}")
    for i, (before, behind) in enumerate(zip(low, high, strict=True)):
        cx.require(le(0, before), f"low of dim {i}")
        cx.require(le(0, behind), f"high of dim {i}")
    rows = zip(low, x.shape, high, strict=True)
    return (x.with_shape(tuple(a + d + b for a, d, b in rows)),)


def index(cx: InferContext, types: Types, _: Attrs) -> Types:
    x, *indices = types
    for i in indices:
        cx.want(i, "iu", "index")
    if len(indices) > x.rank:
        cx.fail(f"{len(indices)} indices into {x}")
    shape = cx.same_shape(indices, "indices must have one shape")
    return (x.with_shape(shape + x.shape[len(indices) :]),)


def in_range(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    cx.want(types[0], "iu", "index")
    cx.require(le(0, attrs.dim("size")), "the size of an axis")
    return types


def divisor(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    cx.want(types[0], "iu", "divisor")
    return types


def take_along(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, i = types
    cx.want(i, "iu", "index")
    axis = cx.axis(attrs.integer("axis"), x)
    cx.require_rank(i, x.rank, "index")
    for d, (have, want) in enumerate(zip(x.shape, i.shape, strict=True)):
        if d != axis:  # torch.gather allows a shorter index, read from the front
            cx.require(le(want, have), f"index dim {d} must fit")
    return (x.with_shape(i.shape),)


# ---- reduce, contract


def _reduced(x: TensorType, axes: tuple[int, ...], keepdims: bool) -> TensorType:
    one = as_expr(1)
    if keepdims:
        shape = tuple(one if i in axes else d for i, d in enumerate(x.shape))
    else:
        shape = tuple(d for i, d in enumerate(x.shape) if i not in axes)
    return x.with_shape(shape)


def reduce(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), axes = types, attrs.ints("axes")
    for axis in axes:
        cx.axis(axis, x)
    if len(set(axes)) != len(axes):
        cx.fail(f"axes {axes} repeat")
    cx.want(x, "b" if attrs.text("op") in ("any", "all") else "fiu")
    return (_reduced(x, axes, attrs.flag("keepdims")),)


def argreduce(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), axis = types, cx.axis(attrs.integer("axis"), types[0])
    cx.require(le(1, x.shape[axis]), "the axis must have elements")
    return (_reduced(x, (axis,), attrs.flag("keepdims")).with_dtype(DType.I64),)


def scatter(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    i, u = types
    cx.want(i, "iu", "index")
    cx.want(u, "fiu")
    cx.require_rank(i, 1, "index")
    cx.require_rank(u, 2, "rows to merge")
    cx.require_equal(i.shape[0], u.shape[0], "one index for each row")
    return (u.with_shape((attrs.dim("rows"), u.shape[1])),)


def cumulate(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    cx.axis(attrs.integer("axis"), types[0])
    cx.want(types[0], "fiu")
    return types


def coded_matmul(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, q, scale, *least = types
    cx.want(q, "iu", "codes")
    if x.dtype is not DType.F32 or q.dtype.bytes != 1:
        cx.fail(f"takes f32 and 8-bit codes, not {x} and {q}")
    if attrs.integer("bits") not in (4, 8):
        cx.fail("codes have 4 or 8 bits")
    for kind, what in ((q, "codes"), (scale, "scales")):
        cx.require_rank(kind, 2, what)
    for kind in least:
        cx.same_shape((scale, kind), "a least for each scale")
    cx.require_equal(x.shape[-1], q.shape[1], "rows and codes must agree")
    cx.require_equal(q.shape[0], scale.shape[0], "each row of codes has scales")
    cx.require(divides(scale.shape[1], q.shape[1]), "groups must divide K")
    return (x.with_shape((*x.shape[:-1], q.shape[0])),)


def grouped_matmul(cx: InferContext, types: Types, _: Attrs) -> Types:
    a, b, ends = types
    if not (a.dtype is DType.F32 and b.dtype.compute is DType.F32):
        cx.same_dtype((a, b))
    cx.want(a, "f")
    cx.want(ends, "i", "ends")
    for kind, rank, what in ((a, 2, "rows"), (b, 3, "matrices"), (ends, 1, "ends")):
        cx.require_rank(kind, rank, what)
    cx.require_equal(a.shape[1], b.shape[1], "rows and columns must agree")
    cx.require_equal(ends.shape[0], b.shape[0], "each matrix has a group of rows")
    return (a.with_shape((a.shape[0], b.shape[2])),)


def matmul(cx: InferContext, types: Types, _: Attrs) -> Types:
    a, b = types
    if a.dtype in NARROW and b.dtype in NARROW:
        dtype = DType.I32
    elif a.dtype is DType.F32 and b.dtype.compute is DType.F32:
        dtype = DType.F32
    else:
        dtype = cx.same_dtype(types)
    cx.want(a, "fiu")
    if a.rank != b.rank or a.rank < 2:
        cx.fail(f"operands must have one rank of at least 2, are {a} and {b}")
    batch = []
    for i, (x, y) in enumerate(zip(a.shape[:-2], b.shape[:-2], strict=True)):
        if x == 1 or y == 1:
            batch.append(y if x == 1 else x)
        else:
            batch.append(cx.require_equal(x, y, f"batch dim {i} must agree"))
    cx.require_equal(a.shape[-1], b.shape[-2], "inner dims must agree")
    return (TensorType(dtype, (*batch, a.shape[-2], b.shape[-1])),)


def _window(
    cx: InferContext,
    dims: Sequence[Expr],
    window: Sequence[Expr],
    attrs: Attrs,
) -> tuple[Expr, ...]:
    """Output sizes of a window that slides over padded dims."""
    names = ("stride", "low", "high", "dilation")
    lists = [attrs.ints(name) for name in names]
    for name, values in zip(names, lists, strict=True):
        if len(values) != len(window):
            cx.fail(f"{name} must have {len(window)} entries")
    out = []
    for i, row in enumerate(zip(dims, window, *lists, strict=True)):
        dim, size, stride, low, high, dilation = row
        span = dilation * (size - 1) + 1
        padded = dim + low + high
        cx.require(le(span, padded), f"spatial dim {i} must hold the window")
        out.append(floordiv(padded - span, stride) + 1)
    return tuple(out)


def conv(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, w = types
    dtype, groups = cx.same_dtype(types), attrs.integer("groups")
    cx.require_rank(w, x.rank, "weight")
    if x.rank < 3:
        cx.fail(f"input must be (N, C, spatial..), is {x}")
    cx.require_equal(x.shape[1], w.shape[1] * groups, "channels must agree")
    cx.require(divides(groups, w.shape[0]), "groups must divide output channels")
    spatial = _window(cx, x.shape[2:], w.shape[2:], attrs)
    return (TensorType(dtype, (x.shape[0], w.shape[0], *spatial)),)


def conv_last(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, w = types
    dtype = cx.same_dtype(types)
    cx.require_rank(w, x.rank, "weight")
    if x.rank < 3:
        cx.fail(f"input must be (N, spatial.., C), is {x}")
    cx.require_equal(x.shape[-1], w.shape[1], "channels must agree")
    spatial = _window(cx, x.shape[1:-1], w.shape[2:], attrs)
    return (TensorType(dtype, (x.shape[0], *spatial, w.shape[0])),)


def conv_transpose(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, w = types
    dtype, groups = cx.same_dtype(types), attrs.integer("groups")
    cx.require_rank(w, x.rank, "weight")
    if x.rank < 3:
        cx.fail(f"input must be (N, C, spatial..), is {x}")
    cx.require_equal(x.shape[1], w.shape[0], "channels must agree")
    cx.require(divides(groups, w.shape[0]), "groups must divide input channels")
    names = ("stride", "low", "high", "dilation", "extra")
    lists = [attrs.ints(name) for name in names]
    for name, values in zip(names, lists, strict=True):
        if len(values) != x.rank - 2:
            cx.fail(f"{name} must have {x.rank - 2} entries")
    spatial = []
    for i, row in enumerate(zip(x.shape[2:], w.shape[2:], *lists, strict=True)):
        dim, size, stride, low, high, dilation, extra = row
        out = (dim - 1) * stride - low - high + dilation * (size - 1) + extra + 1
        cx.require(le(1, out), f"output size of spatial dim {i}")
        spatial.append(out)
    return (TensorType(dtype, (x.shape[0], w.shape[1] * groups, *spatial)),)


def pool(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), window = types, attrs.ints("window")
    if len(window) > x.rank:
        cx.fail(f"window {window} has more dims than {x}")
    if attrs.text("op") == "mean":
        cx.want(x, "f")
    lead = x.rank - len(window)
    spatial = _window(cx, x.shape[lead:], [as_expr(k) for k in window], attrs)
    return (x.with_shape(x.shape[:lead] + spatial),)
