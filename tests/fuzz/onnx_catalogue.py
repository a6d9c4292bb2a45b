"""What a random ONNX model may have: for each op a function that adds a node of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from onnx_random import Maker, Unfit, Value

Entry = Callable[[Maker], Any]
ENTRIES: dict[str, Entry] = {}


def smooth(op: str, low: float = -8, high: float = 8, **attrs: Any) -> Entry:
    """A function of floats between these."""

    def entry(m: Maker) -> None:
        x = m.float()
        if any(((a < low) | (a > high)).any() for a in x.arrays):
            bounds = [m.constant(v, np.float32) for v in (low, high)]
            (x,) = m.add("Clip", [x, *bounds], exact=True)
        m.add(op, [x], **attrs)

    return entry


def plain(op: str, exact_only: bool = False, **attrs: Any) -> Entry:
    """An op whose results are exact if its operand is."""
    return lambda m: m.add(op, [m.float(exact=exact_only)], exact=True, **attrs)


def binary(op: str, exact: bool = True, exact_only: bool = False) -> Entry:
    def entry(m: Maker) -> None:
        numbers = m.rng.random() < 0.8
        x = m.float(exact=exact_only) if numbers else m.whole()
        y = m.fellow(x)
        if exact_only and not y.exact:
            raise Unfit
        m.add(op, [x, y], exact=exact)

    return entry


def logical(op: str) -> Entry:
    def entry(m: Maker) -> None:
        x = m.truth()
        m.add(op, [x, m.fellow(x)])

    return entry


def axis_of(m: Maker, x: Value) -> int:
    if not x.rank:
        raise Unfit
    return m.rng.randrange(-x.rank, x.rank)


def reduced(op: str, exact: bool = False) -> Entry:
    def entry(m: Maker) -> None:
        x = m.float()
        axes = sorted({axis_of(m, x) % x.rank for _ in range(m.rng.randint(1, 2))})
        if any(0 in a.shape for a in x.arrays):
            raise Unfit
        keep = m.rng.randint(0, 1)
        if m.opset >= 18 or op == "ReduceSum":
            m.add(op, [x, m.constant(axes)], exact=exact, keepdims=keep)
        else:
            m.add(op, [x], exact=exact, keepdims=keep, axes=axes)

    return entry


def chosen(op: str) -> Entry:
    def entry(m: Maker) -> None:
        x = m.float(exact=True)
        last = m.rng.randint(0, 1)
        axis, keep = axis_of(m, x), m.rng.randint(0, 1)
        m.add(op, [x], axis=axis, keepdims=keep, select_last_index=last)

    return entry


def over_axis(op: str, exact_only: bool = False) -> Entry:
    def entry(m: Maker) -> None:
        x = m.float(exact=exact_only)
        m.add(op, [x], exact=exact_only, axis=axis_of(m, x))

    return entry


# ---- products


def matmul(m: Maker) -> None:
    x = m.float()
    inner = x.static(-1) if x.rank else None
    if inner is not None and m.rng.random() < 0.6:
        m.add("MatMul", [x, m.weight(inner, m.rng.choice((1, 3, 8)))], exact=True)
        return
    m.add("MatMul", [x, m.pick(lambda v: v.is_float and v.rank > 0)], exact=True)


def gemm(m: Maker) -> None:
    x = m.float(2)
    flip = m.rng.randint(0, 1)
    inner = x.static(0 if flip else 1)
    if inner is None:
        raise Unfit
    y = m.weight(inner, 5)
    bias = m.weight(*m.rng.choice(((5,), (1, 5), ())))
    m.add("Gemm", [x, y, bias], transA=flip, alpha=0.5, beta=m.rng.choice((0.0, 2.0)))


def einsum(m: Maker) -> None:
    x = m.float(3)
    y = m.fellow(x)
    equation = m.rng.choice(
        ("bij,bij->bi", "bij,bkj->bik", "bij,bij->", "bij,bij->jib")
    )
    m.add("Einsum", [x, y], equation=equation)


def conv(m: Maker) -> None:
    x = m.float(m.rng.choice((3, 4)))
    channels = x.static(1)
    if channels is None:
        raise Unfit
    spatial = x.rank - 2
    group = m.rng.choice([g for g in (1, 2, channels) if channels % g == 0])
    kernel = [m.rng.choice((1, 2, 3)) for _ in range(spatial)]
    more: dict[str, Any] = {
        "pads": [m.rng.choice((0, 1, 2)) for _ in range(2 * spatial)]
    }
    if m.rng.random() < 0.2:
        more = {"auto_pad": m.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))}
    if m.rng.random() < 0.5:
        more["strides"] = [m.rng.choice((1, 2)) for _ in range(spatial)]
    if m.rng.random() < 0.3 and "auto_pad" not in more:
        more["dilations"] = [m.rng.choice((1, 2)) for _ in range(spatial)]
    weight = m.weight(group * m.rng.choice((1, 2)), channels // group, *kernel)
    m.add("Conv", [x, weight], exact=True, group=group, **more)


def conv_transpose(m: Maker) -> None:
    x = m.float(m.rng.choice((3, 4)))
    channels = x.static(1)
    if channels is None:
        raise Unfit
    spatial = x.rank - 2
    kernel = [m.rng.choice((1, 2, 3)) for _ in range(spatial)]
    strides = [m.rng.choice((1, 2, 3)) for _ in range(spatial)]
    weight = m.weight(channels, m.rng.choice((1, 3)), *kernel)
    m.add("ConvTranspose", [x, weight], strides=strides)


def pool(op: str) -> Entry:
    def entry(m: Maker) -> None:
        x = m.float(m.rng.choice((3, 4)))
        spatial = x.rank - 2
        kernel = [m.rng.choice((1, 2, 3)) for _ in range(spatial)]
        pads = [m.rng.randrange(k) for k in kernel] * 2
        more: dict[str, Any] = {"ceil_mode": m.rng.choice((0, 0, 1))}
        if op == "AveragePool":
            more["count_include_pad"] = m.rng.randint(0, 1)
        if op == "LpPool" and m.opset < 18:
            more = {}
        strides = [m.rng.choice((1, 2)) for _ in range(spatial)]
        exact = op == "MaxPool"
        m.add(op, [x], exact, kernel_shape=kernel, pads=pads, strides=strides, **more)

    return entry


# ---- norms


def layer_norm(m: Maker) -> None:
    x = m.float()
    size = x.static(-1) if x.rank else None
    if size is None or size < 2 or m.opset < 17:
        raise Unfit
    m.add("LayerNormalization", [x, m.weight(size), m.weight(size)], axis=-1)


def layer_norm_written_out(m: Maker) -> None:
    """As exporters write it for older operator sets."""
    x = m.float()
    size = x.static(-1) if x.rank else None
    if size is None or size < 2 or m.opset >= 18:
        raise Unfit
    (mean,) = m.add("ReduceMean", [x], axes=[-1])
    (apart,) = m.add("Sub", [x, mean])
    (square,) = m.add("Pow", [apart, m.constant(2.0, np.float32)])
    (variance,) = m.add("ReduceMean", [square], axes=[-1])
    (safe,) = m.add("Add", [variance, m.constant(1e-5, np.float32)])
    (root,) = m.add("Sqrt", [safe])
    (even,) = m.add("Div", [apart, root])
    (scaled,) = m.add("Mul", [even, m.weight(size)])
    m.add("Add", [scaled, m.weight(size)])


def channel_norm(op: str) -> Entry:
    def entry(m: Maker) -> None:
        x = m.float(m.rng.choice((3, 4)))
        size = x.static(1)
        if size is None:
            raise Unfit
        parts = [m.weight(size) for _ in range(2)]
        if op == "BatchNormalization":
            spread = np.linspace(0.5, 2, size)
            parts += [m.weight(size), m.constant(spread, np.float32)]
        more = {"num_groups": 2} if op == "GroupNormalization" else {}
        if op == "GroupNormalization" and (m.opset < 21 or size % 2):
            raise Unfit
        m.add(op, [x, *parts], **more)

    return entry


# ---- movement


def transpose(m: Maker) -> None:
    x = m.pick(lambda v: v.rank > 1)
    m.add("Transpose", [x], exact=x.exact, perm=m.rng.sample(range(x.rank), x.rank))


def reshape(m: Maker) -> None:
    x = m.pick(lambda v: v.rank > 1)
    shape = [0] * (x.rank - 2)
    m.add("Reshape", [x, m.constant([*shape, -1])], exact=x.exact)


def reshape_by_sizes(m: Maker) -> None:
    """The shape as exporters compute it: Shape, Gather, Mul, Concat."""
    x = m.pick(lambda v: v.rank > 1)
    (shape,) = m.add("Shape", [x])
    first, second = (m.add("Gather", [shape, m.constant([k])])[0] for k in (0, 1))
    (joined,) = m.add("Mul", [first, second])
    (target,) = m.add("Concat", [joined, m.constant([-1])], axis=0)
    m.add("Reshape", [x, target], exact=x.exact)


def flatten(m: Maker) -> None:
    x = m.float()
    m.add("Flatten", [x], exact=x.exact, axis=m.rng.randint(0, x.rank))


def unsqueeze(m: Maker) -> None:
    x = m.float()
    at = m.constant([m.rng.randrange(-x.rank - 1, x.rank + 1)])
    m.add("Unsqueeze", [x, at], exact=x.exact)


def squeeze(m: Maker) -> None:
    x = m.pick(lambda v: any(set(d) == {1} for d in v.dims))
    axis = next(k for k, d in enumerate(x.dims) if set(d) == {1})
    m.add("Squeeze", [x, m.constant([axis])], exact=x.exact)


def concat(m: Maker) -> None:
    x = m.pick(lambda v: v.rank > 0)
    y = m.fellow(x)
    m.add("Concat", [x, y, x], exact=x.exact and y.exact, axis=axis_of(m, x))


def split(m: Maker) -> None:
    x = m.pick(lambda v: v.rank > 0)
    axis = axis_of(m, x)
    size = x.static(axis)
    if size is not None and size > 1:
        cut = m.rng.randrange(1, size)
        parts = m.constant([cut, size - cut])
        m.add("Split", [x, parts], exact=x.exact, outputs=2, axis=axis)
    elif m.opset >= 18:
        m.add("Split", [x], exact=x.exact, outputs=2, axis=axis, num_outputs=2)


def slice_(m: Maker) -> None:
    x = m.pick(lambda v: v.rank > 0)
    axis = axis_of(m, x)
    start, end, step = m.rng.choice(
        (
            (0, 2, 1),
            (1, 2**40, 1),
            (-1, -(2**40), -1),
            (0, -1, 2),
            (-3, 2**31, 1),
            (2, 0, -1),
        )
    )
    parts = [m.constant([v]) for v in (start, end, axis, step)]
    m.add("Slice", [x, *parts], exact=x.exact)


def pad(m: Maker) -> None:
    x = m.float()
    mode = m.rng.choice(("constant", "reflect", "edge"))
    low = -1 if mode == "constant" else 0
    pads = [m.rng.choice((0, 0, 1, 2, low)) for _ in range(2 * x.rank)]
    m.add("Pad", [x, m.constant(pads)], exact=x.exact, mode=mode)


def expand(m: Maker) -> None:
    x = m.float()
    y = m.fellow(x)
    (shape,) = m.add("Shape", [y])
    m.add("Expand", [x, shape], exact=x.exact)


def tile(m: Maker) -> None:
    x = m.float()
    repeats = [m.rng.choice((1, 1, 2, 3)) for _ in range(x.rank)]
    m.add("Tile", [x, m.constant(repeats)], exact=x.exact)


def gather(m: Maker) -> None:
    x = m.pick(lambda v: v.rank > 0)
    places = m.rng.choice(([0, -1], [[0], [0]], 0, [-1, 0, 0]))
    m.add("Gather", [x, m.constant(places)], exact=x.exact, axis=axis_of(m, x))


def embedding(m: Maker) -> None:
    ids = m.whole()
    if any(((a < -9) | (a > 8)).any() for a in ids.arrays):
        raise Unfit
    m.add("Gather", [m.weight(9, 4), ids], exact=True)


def gather_elements(m: Maker) -> None:
    x = m.float()
    axis = axis_of(m, x)
    (none,) = m.add("IsNaN", [x])  # an index of x's own sizes, all of it 0
    (y,) = m.add("Cast", [none], to=TensorProto.INT64)
    m.add("GatherElements", [x, y], exact=x.exact, axis=axis)


def gather_nd(m: Maker) -> None:
    x = m.float(3)
    m.add("GatherND", [x, m.constant([[0, 0], [-1, 0]])], exact=x.exact)


def scatter_nd(m: Maker) -> None:
    x = m.float(2)
    width = x.static(1)
    if width is None:
        raise Unfit
    m.add("ScatterND", [x, m.constant([[0]]), m.weight(1, width)], exact=x.exact)


def scatter_elements(m: Maker) -> None:
    x = m.float(2)
    at, values = m.constant([[0, 0]]), m.constant([[0.5, 1.5]], np.float32)
    how = m.rng.choice(("none", "add")) if m.opset >= 16 else "none"
    at = m.constant([[0]]) if how == "none" else at
    values = m.constant([[0.5]], np.float32) if how == "none" else values
    more = {} if how == "none" else {"reduction": how}
    m.add("ScatterElements", [x, at, values], exact=x.exact, axis=0, **more)


def depth(op: str) -> Entry:
    def entry(m: Maker) -> None:
        x = m.float(4)
        m.add(op, [x], exact=x.exact, blocksize=2)

    return entry


def resize(m: Maker) -> None:
    x = m.float(4)
    mode = m.rng.choice(("nearest", "linear", "cubic"))
    ways = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    scale = m.rng.choice((2.0, 0.5, 1.5))
    scales = m.constant([1, 1, scale, m.rng.choice((1.0, 2.0))], np.float32)
    way = m.rng.choice(ways)
    if way == "align_corners":  # of other factors ONNX Runtime has a meaning of its own
        scales = m.constant([1, 1, 2, 2], np.float32)
    m.add("Resize", [x, "", scales], mode=mode, coordinate_transformation_mode=way)


def top_k(m: Maker) -> None:
    x = m.float(exact=True)
    axis, least = axis_of(m, x), m.rng.randint(0, 1)
    if min(x.dims[axis]) < 1:
        raise Unfit
    m.add("TopK", [x, m.constant([1])], True, 2, axis=axis, largest=least)


def cumsum(m: Maker) -> None:
    x = m.float()
    at = m.constant(axis_of(m, x))
    ways = {"exclusive": m.rng.randint(0, 1), "reverse": m.rng.randint(0, 1)}
    m.add("CumSum", [x, at], exact=x.exact, **ways)


def trilu(m: Maker) -> None:
    x = m.pick(lambda v: v.is_float and v.rank > 1)
    at = m.constant(m.rng.randint(-2, 2))
    m.add("Trilu", [x, at], exact=x.exact, upper=m.rng.randint(0, 1))


def one_hot(m: Maker) -> None:
    x = m.whole()
    m.add("OneHot", [x, m.constant([5]), m.constant([0, 1], np.float32)], exact=True)


def nonzero(m: Maker) -> None:
    m.add("NonZero", [m.float(exact=True)])


def compress(m: Maker) -> None:
    x = m.pick(lambda v: v.rank > 0)
    m.add("Compress", [x, m.constant([True], bool)], exact=x.exact, axis=axis_of(m, x))


def range_of_sizes(m: Maker) -> None:
    x = m.pick(lambda v: v.rank > 0)
    (shape,) = m.add("Shape", [x])
    (size,) = m.add("Gather", [shape, m.constant(axis_of(m, x))])
    (steps,) = m.add("Range", [m.constant(0), size, m.constant(1)])
    m.add("Cast", [steps], exact=True, to=TensorProto.FLOAT)


def filled(m: Maker) -> None:
    (shape,) = m.add("Shape", [m.pick(lambda v: v.rank > 0)])
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [1.5])
    m.add("ConstantOfShape", [shape], exact=True, value=value)


# ---- elements


def clip(m: Maker) -> None:
    bounds = [m.constant(v, np.float32) for v in (-1.5, 2)]
    x = m.float()
    m.add("Clip", [x, *bounds], exact=x.exact)


def where(m: Maker) -> None:
    x = m.float()
    y = m.fellow(x)
    m.add("Where", [m.truth(), x, y], exact=x.exact and y.exact)


def cast(m: Maker) -> None:
    x = m.pick(lambda v: v.exact and v.dtype != bool)
    kinds = TensorProto
    to = m.rng.choice((kinds.FLOAT, kinds.INT64, kinds.INT32, kinds.DOUBLE, kinds.BOOL))
    m.add("Cast", [x], exact=True, to=to)


def power(m: Maker) -> None:
    x = m.float()
    (positive,) = m.add("Abs", [x], exact=x.exact)
    by = m.constant(m.rng.choice((2.0, 3.0, 0.5)), np.float32)
    m.add("Pow", [positive, by])


def divided(m: Maker) -> None:
    x = m.float()
    (positive,) = m.add("Abs", [m.fellow(x)])
    (above,) = m.add("Add", [positive, m.constant(0.5, np.float32)])
    m.add("Div", [x, above])


def whole_parts(op: str) -> Entry:
    def entry(m: Maker) -> None:
        x = m.whole()
        by = m.constant(m.rng.choice((2, 3, 7)), x.dtype)
        m.add(op, [x, by])

    return entry


def prelu(m: Maker) -> None:
    x = m.float()
    m.add("PRelu", [x, m.weight(1)], exact=x.exact)


def there_and_back(m: Maker) -> None:
    """Quantized and back, of multiples of the scale."""
    x = m.float(exact=True)
    scale, zero = m.constant(0.5, np.float32), m.constant(m.rng.choice((0, 7)), np.int8)
    (codes,) = m.add("QuantizeLinear", [x, scale, zero])
    m.add("DequantizeLinear", [codes, scale, zero], exact=True)


# ---- recurrent, control, com.microsoft


def recurrent(op: str, gates: int) -> Entry:
    def entry(m: Maker) -> None:
        x = m.float(3)
        width = x.static(2)
        if width is None:
            raise Unfit
        way = m.rng.choice(("forward", "reverse", "bidirectional"))
        ways = 2 if way == "bidirectional" else 1
        weights = [m.weight(ways, gates * 3, n) for n in (width, 3)]
        bias = m.weight(ways, gates * 6)
        m.add(op, [x, *weights, bias], outputs=2, direction=way, hidden_size=3)

    return entry


def branch(m: Maker) -> None:
    x = m.float()
    condition = m.pick(
        lambda v: v.dtype == bool and v.rank == 0, lambda: m.input("bool", 0)
    )
    graphs = []
    for name, op in (("yes", "Neg"), ("no", "Abs")):
        made = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        node = helper.make_node(op, [x.name], [name])
        graphs.append(helper.make_graph([node], name, [], [made]))
    m.add("If", [condition], x.exact, then_branch=graphs[0], else_branch=graphs[1])


def loop(m: Maker) -> None:
    x = m.float()
    info = helper.make_tensor_value_info
    given = [
        info("i", TensorProto.INT64, []),
        info("go", TensorProto.BOOL, []),
        info("state", TensorProto.FLOAT, None),
    ]
    nodes = [
        helper.make_node("Identity", ["go"], ["more"]),
        helper.make_node("Mul", ["state", "state"], ["square"]),
        helper.make_node("Tanh", ["square"], ["after"]),
        helper.make_node("Sub", [x.name, "after"], ["row"]),
    ]
    made = [
        info("more", TensorProto.BOOL, []),
        info("after", TensorProto.FLOAT, None),
        info("row", TensorProto.FLOAT, None),
    ]
    body = helper.make_graph(nodes, "body", given, made)
    m.add("Loop", [m.constant(m.rng.randint(1, 4)), "", x], outputs=2, body=body)


def skip_norm(m: Maker) -> None:
    x = m.float(3)
    y, size = m.fellow(x), x.static(2)
    if size is None or size < 2 or y.dims != x.dims:
        raise Unfit
    scale, bias = m.weight(size), m.weight(size)
    m.add("SkipLayerNormalization", [x, y, scale, bias], domain="com.microsoft")


def bias_gelu(m: Maker) -> None:
    x = m.float()
    size = x.static(-1) if x.rank else None
    if size is None:
        raise Unfit
    op = m.rng.choice(("BiasGelu", "FastGelu"))
    m.add(op, [x, m.weight(size)], domain="com.microsoft")


def fused_matmul(m: Maker) -> None:
    x = m.float(3)
    y = m.fellow(x)
    flips = {"transA": m.rng.randint(0, 1), "transB": m.rng.randint(0, 1)}
    m.add("FusedMatMul", [x, y], domain="com.microsoft", alpha=0.5, **flips)


ENTRIES.update(
    {
        op: smooth(op)
        for op in ("Exp", "Tanh", "Sigmoid", "Erf", "Sin", "Cos", "Softplus")
    }
    | {op: smooth(op) for op in ("Atan", "Asinh", "Sinh", "Softsign", "Elu", "Selu")}
    | {
        op: smooth(op)
        for op in ("HardSwish", "HardSigmoid", "Celu", "LeakyRelu", "Mish")
    }
    | {"Sqrt": smooth("Sqrt", 0.25), "Log": smooth("Log", 0.25), "Gelu": smooth("Gelu")}
    | {"Reciprocal": smooth("Reciprocal", 0.5), "Acos": smooth("Acos", -0.75, 0.75)}
    | {"QuickGelu": smooth("QuickGelu", domain="com.microsoft")}
    | {op: plain(op) for op in ("Neg", "Abs", "Relu", "Identity")}
    | {op: plain(op, True) for op in ("Floor", "Ceil", "Round", "Sign", "IsNaN")}
    | {"ThresholdedRelu": plain("ThresholdedRelu", True, alpha=0.5)}
    | {op: binary(op) for op in ("Add", "Sub", "Mul", "Max", "Min")}
    | {op: binary(op, exact_only=True) for op in ("Equal", "Less", "GreaterOrEqual")}
    | {op: logical(op) for op in ("And", "Or", "Xor")}
    | {"Not": lambda m: m.add("Not", [m.truth()])}
    | {op: reduced(op) for op in ("ReduceMean", "ReduceL2", "ReduceLogSumExp")}
    | {op: reduced(op, True) for op in ("ReduceSum", "ReduceMax", "ReduceMin")}
    | {op: reduced(op, True) for op in ("ReduceProd", "ReduceL1", "ReduceSumSquare")}
    | {op: chosen(op) for op in ("ArgMax", "ArgMin")}
    | {op: over_axis(op) for op in ("Softmax", "LogSoftmax", "LpNormalization")}
    | {"Hardmax": over_axis("Hardmax", True)}
    | {"MatMul": matmul, "Gemm": gemm, "Einsum": einsum, "Conv": conv}
    | {"ConvTranspose": conv_transpose, "Resize": resize}
    | {op: pool(op) for op in ("MaxPool", "AveragePool", "LpPool")}
    | {"GlobalAveragePool": lambda m: m.add("GlobalAveragePool", [m.float(4)])}
    | {"GlobalMaxPool": lambda m: m.add("GlobalMaxPool", [m.float(4)], exact=True)}
    | {"LayerNormalization": layer_norm, "ReduceMean Sub Pow": layer_norm_written_out}
    | {op: channel_norm(op) for op in ("BatchNormalization", "InstanceNormalization")}
    | {"GroupNormalization": channel_norm("GroupNormalization")}
    | {"LRN": lambda m: m.add("LRN", [m.float(4)], size=3)}
    | {"Transpose": transpose, "Reshape": reshape, "Shape Reshape": reshape_by_sizes}
    | {"Flatten": flatten, "Unsqueeze": unsqueeze, "Squeeze": squeeze, "Concat": concat}
    | {"Split": split, "Slice": slice_, "Pad": pad, "Expand": expand, "Tile": tile}
    | {"Gather": gather, "Embedding": embedding, "GatherElements": gather_elements}
    | {"GatherND": gather_nd, "ScatterND": scatter_nd}
    | {"ScatterElements": scatter_elements, "DepthToSpace": depth("DepthToSpace")}
    | {"SpaceToDepth": depth("SpaceToDepth"), "TopK": top_k, "CumSum": cumsum}
    | {"Trilu": trilu, "OneHot": one_hot, "NonZero": nonzero, "Compress": compress}
    | {"Range": range_of_sizes, "ConstantOfShape": filled, "Clip": clip, "Where": where}
    | {"Cast": cast, "Pow": power, "Div": divided, "Mod": whole_parts("Mod")}
    | {
        "whole Div": whole_parts("Div"),
        "PRelu": prelu,
        "QuantizeLinear": there_and_back,
    }
    | {
        "LSTM": recurrent("LSTM", 4),
        "GRU": recurrent("GRU", 3),
        "RNN": recurrent("RNN", 1),
    }
    | {"If": branch, "Loop": loop, "SkipLayerNormalization": skip_norm}
    | {"BiasGelu": bias_gelu, "FusedMatMul": fused_matmul}
)
