"""ONNX ops: a sample of the package's node tests, com.microsoft against its runtime.

`make coverage-onnx` runs all of the node tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import pliant
from bench.coverage import onnx_dynamic, onnx_nodes
from tests.frontend.onnx_models import FLOAT, drawn, model, reference

node = helper.make_node

SAMPLE = [
    "add_bcast",
    "and_bcast3v1d",
    "argmax_keepdims_example",
    "averagepool_2d_ceil",
    "batchnorm_example",
    "bitcast_float32_to_int32",
    "clip_example",
    "compress_0",
    "constantofshape_float_ones",
    "convtranspose_output_shape",
    "cumsum_1d_exclusive",
    "dequantizelinear_axis",
    "div_uint64",
    "dynamicquantizelinear",
    "einsum_batch_matmul",
    "gather_1",
    "gemm_all_attributes",
    "gridsample_bicubic",
    "gru_seq_length",
    "layer_normalization_4d_axis1",
    "lstm_with_peepholes",
    "matmulinteger",
    "max_uint32",
    "maxpool_with_argmax_2d_precomputed_pads",
    "mod_mixed_sign_int64",
    "nllloss_NCd1_weight",
    "nonmaxsuppression_two_classes",
    "onehot_with_axis",
    "pow_types_float32_int64",
    "qlinearmatmul_2D_uint8_float32",
    "reduce_log_sum_exp_default_axes_keepdims_example",
    "reflect_pad",
    "resize_downsample_sizes_cubic_antialias",
    "resize_tf_crop_and_resize",
    "reversesequence_batch",
    "roialign_mode_max",
    "scan9_sum",
    "scatternd_max",
    "sce_mean_weight_ii",
    "sequence_map_add_2_sequences",
    "slice_neg_steps",
    "split_to_sequence_1",
    "stft_with_window",
    "tensorscatter_circular",
    "top_k_negative_axis",
    "tril_neg",
    "unique_not_sorted_without_axis",
    "where_example",
]
FREE = [
    "add_bcast",
    "concat_3d_axis_1",
    "conv_with_strides_padding",
    "causal_conv_with_state_silu_fp16",
    "causal_conv_with_state_with_bias_and_past_state",
    "cumsum_2d_axis_1",
    "expand_dim_changed",
    "gather_0",
    "instancenorm_example",
    "lstm_defaults",
    "matmul_3d",
    "maxpool_2d_same_upper",
    "nonzero_example",
    "reshape_reordered_all_dims",
    "softmax_axis_2",
    "squeeze_negative_axes",
    "transpose_default",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_node(name: str) -> None:
    found = onnx_nodes.evaluate(f"test_{name}")
    assert found.kind == "pass", found.text


@pytest.mark.parametrize("name", FREE)
def test_node_with_free_dims(name: str) -> None:
    found = onnx_dynamic.evaluate(f"test_{name}")
    assert found.kind == "pass", found.text


# ---- com.microsoft


def _check(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, Any],
    outputs: list[str],
    shapes: dict[str, list[Any]] | None = None,
    constants: dict[str, Any] | None = None,
) -> None:
    kinds = {
        name: (
            helper.np_dtype_to_tensor_dtype(x.dtype),
            (shapes or {}).get(name, x.shape),
        )
        for name, x in inputs.items()
    }
    proto = model(nodes, kinds, outputs, constants, domains=["com.microsoft"])
    for value in proto.graph.output:
        value.type.Clear()
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    wanted = session.run(None, inputs)
    for value in proto.graph.output:
        value.type.tensor_type.elem_type = FLOAT
    found = pliant.compile(proto)(**inputs)
    found = found if len(wanted) > 1 else (found,)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if ours.dtype.kind in "iu":
            assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1
        else:
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def _ms(op: str, inputs: list[str], outputs: list[str], **attrs: Any) -> onnx.NodeProto:
    return node(op, inputs, outputs, domain="com.microsoft", **attrs)


@pytest.mark.parametrize("op", ["Gelu", "FastGelu", "QuickGelu", "BiasGelu"])
def test_gelu(op: str) -> None:
    inputs = {"x": drawn(0, 3, 8)}
    if op in ("BiasGelu", "FastGelu"):
        inputs["b"] = drawn(1, 8)
    shapes = {"x": ["n", 8]}
    _check([_ms(op, list(inputs), ["y"])], inputs, ["y"], shapes)


def test_fused_matmul() -> None:
    made = _ms("FusedMatMul", ["a", "b"], ["y"], alpha=0.5, transB=1)
    _check([made], {"a": drawn(0, 2, 3, 4), "b": drawn(1, 2, 5, 4)}, ["y"])


def test_skip_norms() -> None:
    x = {"x": drawn(0, 2, 3, 8), "s": drawn(1, 2, 3, 8), "w": drawn(2, 8)}
    made = _ms("SkipSimplifiedLayerNormalization", ["x", "s", "w"], ["y"], epsilon=1e-5)
    _check([made], x, ["y"])
    x["b"] = drawn(3, 8)
    names = ["x", "s", "w", "b"]
    made = _ms("SkipLayerNormalization", names, ["y", "", "", "t"], epsilon=1e-5)
    _check([made], x, ["y", "t"])


def test_embed_layer_norm() -> None:
    rng = np.random.default_rng(0)
    inputs = {
        "ids": rng.integers(0, 20, (2, 5)).astype(np.int32),
        "segments": rng.integers(0, 2, (2, 5)).astype(np.int32),
    }
    tables = {"words": (20, 8), "places": (9, 8), "kinds": (2, 8), "w": (8,), "b": (8,)}
    constants = {n: drawn(k, *s) for k, (n, s) in enumerate(tables.items())}
    names = [*inputs, *tables]
    made = _ms("EmbedLayerNormalization", names, ["y", "m"], epsilon=1e-5)
    shapes: dict[str, list[Any]] = {n: ["batch", "seq"] for n in inputs}
    _check([made], inputs, ["y"], shapes, constants)


@pytest.mark.parametrize("causal", [0, 1])
def test_attention(causal: int) -> None:
    x = {"x": drawn(0, 2, 5, 8)}
    made = _ms("Attention", ["x", "w", "b"], ["y"], num_heads=2, unidirectional=causal)
    constants = {"w": drawn(1, 8, 24), "b": drawn(2, 24)}
    _check([made], x, ["y"], {"x": ["batch", "seq", 8]}, constants)


def test_multi_head_attention() -> None:
    inputs = {
        "q": drawn(0, 2, 3, 8),
        "k": drawn(1, 2, 5, 8),
        "v": drawn(2, 2, 5, 8),
        "b": drawn(3, 24),
        "m": np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32),
    }
    made = _ms("MultiHeadAttention", list(inputs), ["y"], num_heads=2)
    _check([made], inputs, ["y"])


def test_rotary_embedding() -> None:
    inputs = {
        "x": drawn(0, 2, 3, 16),
        "p": np.array([[0, 1, 2], [3, 4, 5]], np.int64),
    }
    tables = {"c": drawn(1, 10, 4), "s": drawn(2, 10, 4)}
    for interleaved in (0, 1):
        made = _ms(
            "RotaryEmbedding", ["x", "p", "c", "s"], ["y"], interleaved=interleaved
        )
        _check([made], inputs, ["y"], None, tables)


@pytest.mark.parametrize("ends", [(0.0, 1.0, 1.0), (0.5, 0.75, 0.5), (3.0, -0.5, -1)])
def test_range_of_floats_made_of_sizes(ends: tuple[float, float, float]) -> None:
    start, step, factor = ends
    nodes = [
        node("Shape", ["x"], ["s"], start=0, end=1),
        node("Squeeze", ["s"], ["q"]),
        node("Cast", ["q"], ["f"], to=FLOAT),
        node("Mul", ["f", "factor"], ["limit"]),
        node("Range", ["start", "limit", "step"], ["y"]),
    ]
    given = {"start": start, "step": step, "factor": factor}
    constants = {name: np.float32(value) for name, value in given.items()}
    m = pliant.compile(model(nodes, {"x": (FLOAT, ["n", 2])}, ["y"], constants))
    for n in (0, 1, 2, 7, 16):
        want = np.arange(start, n * factor, step).astype(np.float32)
        np.testing.assert_array_equal(m(np.zeros((n, 2), np.float32)), want)


def test_regions_that_decide_their_samples() -> None:
    attributes = {"output_height": 2, "output_width": 3, "sampling_ratio": 0}
    made = node("RoiAlign", ["x", "rois", "batch"], ["y"], **attributes)
    inputs: dict[str, Any] = {
        "x": (FLOAT, ["n", 2, "h", "w"]),
        "rois": (FLOAT, ["r", 4]),
        "batch": (onnx.TensorProto.INT64, ["r"]),
    }
    proto = model([made], inputs, ["y"])
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    m = pliant.compile(proto, threads=1)
    for regions, high, wide in ((1, 9, 12), (5, 20, 7), (0, 4, 4), (3, 40, 33)):
        rng = np.random.default_rng(regions)
        corners = rng.random((regions, 2, 2)) * (wide, high)
        rois = np.concatenate([corners.min(1), corners.max(1)], 1).astype(np.float32)
        x = drawn(regions, 2, 2, high, wide)
        batch = rng.integers(0, 2, regions)
        (want,) = session.run(None, {"x": x, "rois": rois, "batch": batch})
        np.testing.assert_allclose(m(x, rois, batch), want, 1e-4, 1e-5)
    assert m.compile_count == 1


def test_norm_of_groups_as_it_is_exported() -> None:
    """It stays in channels' own order, so that convolutions around it are joined."""
    nodes = [
        node("Reshape", ["x", "three"], ["flat"]),
        node("InstanceNormalization", ["flat", "w", "b"], ["normed"], epsilon=1e-3),
        node("Shape", ["x"], ["s"]),
        node("Reshape", ["normed", "s"], ["y"]),
    ]
    constants = {
        "three": np.array([0, 2, -1]),
        "w": np.array([1.0, 3.0], np.float32),
        "b": np.array([0.0, -1.0], np.float32),
    }
    proto = model(nodes, {"x": (FLOAT, ["n", 6, "h", "w"])}, ["y"], constants)
    m = pliant.compile(proto, threads=1)
    kinds = [op for op in m.program.fused.main.ops if op.name == "fusion"]
    assert len(kinds) <= 2
    for shape in ((1, 6, 2, 3), (2, 6, 5, 1), (3, 6, 4, 4)):
        x = drawn(0, *shape)
        (want,) = reference(proto, x)
        np.testing.assert_allclose(m(x), want, 1e-4, 1e-5)


@pytest.mark.parametrize("window", [1, 3, 20])
def test_group_query_attention_of_a_window(window: int) -> None:
    """Compared with the last columns that each row sees, in NumPy."""
    size, heads = 8, 4
    made = _ms(
        "GroupQueryAttention",
        ["q", "k", "v", "pk", "pv", "ends", "total"],
        ["y"],
        num_heads=heads,
        kv_num_heads=2,
        local_window_size=window,
    )
    inputs: dict[str, Any] = {
        "q": (FLOAT, ["b", "s", heads * size]),
        **{name: (FLOAT, ["b", "s", 2 * size]) for name in "kv"},
        **{name: (FLOAT, ["b", 2, "p", size]) for name in ("pk", "pv")},
        "ends": (onnx.TensorProto.INT32, ["b"]),
        "total": (onnx.TensorProto.INT32, []),
    }
    m = pliant.compile(model([made], inputs, ["y"], domains=["com.microsoft"]))
    for batch, rows, past in ((1, 9, 0), (2, 1, 12), (2, 4, 3)):
        q = drawn(0, batch, rows, heads * size)
        k, v = (drawn(i, batch, rows, 2 * size) for i in (1, 2))
        pk, pv = (drawn(i, batch, 2, past, size) for i in (3, 4))
        ends = np.full(batch, past + rows - 1, np.int32)
        got = m(q, k, v, pk, pv, ends, np.array(past + rows, np.int32))

        def split(x: Any, count: int) -> Any:
            return x.reshape(*x.shape[:2], count, size).transpose(0, 2, 1, 3)

        keys, values = (
            np.repeat(np.concatenate([old, split(new, 2)], 2), 2, 1)
            for old, new in ((pk, k), (pv, v))
        )
        scores = split(q, heads) @ keys.swapaxes(2, 3) / np.sqrt(size)
        row = np.arange(rows)[:, None] + past
        column = np.arange(past + rows)
        seen = (column <= row) & (column > row - window)
        weights = np.exp(np.where(seen, scores, -np.inf))
        want = (weights / weights.sum(-1, keepdims=True)) @ values
        want = want.transpose(0, 2, 1, 3).reshape(batch, rows, heads * size)
        np.testing.assert_allclose(got, want, 1e-4, 1e-5)


def test_group_query_attention() -> None:
    past, fresh, size = 4, 2, 16
    inputs = {
        "q": drawn(0, 1, fresh, 4 * size),
        "k": drawn(1, 1, fresh, 2 * size),
        "v": drawn(2, 1, fresh, 2 * size),
        "pk": drawn(3, 1, 2, past, size),
        "pv": drawn(4, 1, 2, past, size),
        "ends": np.array([past + fresh - 1], np.int32),
        "total": np.array(past + fresh, np.int32),
    }
    made = _ms(
        "GroupQueryAttention",
        list(inputs),
        ["y", "nk", "nv"],
        num_heads=4,
        kv_num_heads=2,
    )
    _check([made], inputs, ["y", "nk", "nv"])


def test_matmul_nbits() -> None:
    rng = np.random.default_rng(0)
    x = {"x": drawn(0, 3, 64)}
    constants = {
        "w": rng.integers(0, 256, (6, 2, 16)).astype(np.uint8),
        "s": np.abs(drawn(1, 12)),
    }
    made = _ms("MatMulNBits", ["x", "w", "s"], ["y"], K=64, N=6, bits=4, block_size=32)
    _check([made], x, ["y"], {"x": ["rows", 64]}, constants)


def test_qlinear_add() -> None:
    rng = np.random.default_rng(0)
    inputs = {n: rng.integers(0, 256, (3, 5)).astype(np.uint8) for n in "ab"}
    constants = {
        **{n: np.float32(0.02) for n in ("sa", "sb", "sc")},
        **{n: np.uint8(3) for n in ("za", "zb", "zc")},
    }
    names = ["a", "sa", "za", "b", "sb", "zb", "sc", "zc"]
    _check([_ms("QLinearAdd", names, ["y"])], inputs, ["y"], None, constants)


_CODES = {name: np.uint8(zero) for name, zero in (("z", 120), ("zb", 100), ("zy", 110))}
_SCALES = {"s": np.float32(0.02), "sb": np.float32(0.03), "sy": np.float32(0.04)}
_WEIGHTS = {
    "w": np.random.default_rng(1).integers(-127, 128, (8, 6)).astype(np.int8),
    "ws": np.linspace(0.01, 0.02, 6, dtype=np.float32),
    "wz": np.zeros(6, np.int8),
}
_BIAS = {"c": np.arange(6, dtype=np.int32) * 100, "f": drawn(0, 6)}


@pytest.mark.parametrize(
    "op, names, shapes, attrs",
    [
        ("QLinearAveragePool", "x s z sy zy", [(1, 3, 5, 6)], {"kernel_shape": [2, 3]}),
        (
            "QLinearAveragePool",
            "x s z sy zy",
            [(1, 5, 6, 3)],
            {"kernel_shape": [2, 2], "pads": [1, 0, 0, 1], "channels_last": 1},
        ),
        ("QLinearGlobalAveragePool", "x s z sy zy", [(2, 3, 4, 4)], {}),
        (
            "QLinearGlobalAveragePool",
            "x s z sy zy",
            [(2, 4, 4, 3)],
            {"channels_last": 1},
        ),
        ("QLinearWhere", "go x s z v sb zb sy zy", [(3, 4), (3, 4)], {}),
        ("QGemm", "x s z w ws wz c", [(3, 8)], {"alpha": 0.5}),
        ("QGemm", "x s z w ws wz c sy zy", [(3, 8)], {}),
        ("QGemm", "x s z w s wz", [(8, 3)], {"transA": 1}),
        ("MatMulIntegerToFloat", "x w s ws z wz f", [(2, 3, 8)], {}),
        ("DynamicQuantizeMatMul", "x w ws wz f", [(2, 3, 8)], {}),
    ],
)
def test_quantized_ops_of_microsoft(
    op: str, names: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    order = names.split()
    inputs: dict[str, Any] = {
        name: rng.integers(0, 256, shape).astype(np.uint8)
        for name, shape in zip("xv", shapes, strict=False)
    }
    if op == "DynamicQuantizeMatMul":
        inputs["x"] = drawn(2, *shapes[0])
    if "go" in order:
        inputs = {"go": rng.integers(0, 2, (1, 4)).astype(bool), **inputs}
    constants = {**_CODES, **_SCALES, **_WEIGHTS, **_BIAS}
    if attrs.get("transA") or "ws" not in order:
        constants["wz"] = np.int8(0)  # as the scale, one for all
    known = {name: constants[name] for name in order if name in constants}
    free = {name: [f"{name}0", *x.shape[1:]] for name, x in inputs.items()}
    dims = free if len(inputs) == 1 and not attrs.get("transA") else None
    _check([_ms(op, order, ["y"], **attrs)], inputs, ["y"], dims, known)


@pytest.mark.parametrize("op, gates", [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_states_of_layers_with_dims_of_other_names(op: str, gates: int) -> None:
    """The batch of a first state is that of the rows, whatever it is called."""
    states = {"h": ("b", 4)} | ({"c": ("d", 4)} if op == "LSTM" else {})
    node = helper.make_node(
        op, ["x", "w", "r", "", "", *states], ["y", "last"], hidden_size=4
    )
    inputs = {"x": (FLOAT, ("t", "a", 3))}
    inputs |= {name: (FLOAT, (1, *dims)) for name, dims in states.items()}
    weights = {"w": drawn(0, 1, 4 * gates, 3), "r": drawn(1, 1, 4 * gates, 4)}
    proto = model([node], inputs, ["y", "last"], weights)
    m = pliant.compile(proto)
    for steps, batch in ((5, 2), (1, 1), (2, 7)):
        given = [drawn(2, steps, batch, 3)]
        given += [drawn(3 + k, 1, batch, 4) for k in range(len(states))]
        for found, wanted in zip(m(*given), reference(proto, *given), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(pliant.ShapeError, match="the first state of a layer"):
        m(drawn(2, 5, 2, 3), *(drawn(3, 1, 3, 4) for _ in states))


def test_a_layer_of_another_rank() -> None:
    weights = {"w": drawn(0, 1, 16, 3), "r": drawn(1, 1, 16, 4)}
    nodes = [
        helper.make_node("Reshape", ["x", "to"], ["rows"]),
        helper.make_node("LSTM", ["rows", "w", "r"], ["y"], hidden_size=4),
    ]
    constants = {**weights, "to": np.array([1, 1, -1, 3])}
    proto = model(nodes, {"x": (FLOAT, ("n",))}, ["y"], constants)
    with pytest.raises(pliant.PliantError, match=r"rank 4 and not 3|malformed") as told:
        pliant.compile(proto)
    assert not isinstance(told.value, pliant.InternalError)


def test_branches_of_other_ranks_ask_for_an_example() -> None:
    """As `squeeze` is exported: what a size decides, an example fixes."""
    then = model([helper.make_node("Squeeze", ["x", "axis"], ["y1"])], {}, ["y1"])
    other = model([helper.make_node("Identity", ["x"], ["y2"])], {}, ["y2"])
    for graph in (then.graph, other.graph):
        graph.output[0].type.Clear()
        graph.output[0].type.tensor_type.elem_type = FLOAT
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "axis"], ["size"]),
        helper.make_node("Equal", ["size", "one"], ["is_one"]),
        helper.make_node(
            "If", ["is_one"], ["y"], then_branch=then.graph, else_branch=other.graph
        ),
    ]
    constants = {"axis": np.array([0]), "one": np.array([1])}
    proto = model(nodes, {"x": (FLOAT, ("n", 3))}, ["y"], constants)
    with pytest.raises(pliant.UnsupportedOpError, match="give example_inputs"):
        pliant.compile(proto)
    m = pliant.compile(proto, (drawn(0, 1, 3),))
    np.testing.assert_array_equal(m(drawn(1, 1, 3)), drawn(1, 1, 3)[0])
    with pytest.raises(pliant.ShapeError, match="the branch that the example takes"):
        m(drawn(1, 2, 3))


@pytest.mark.parametrize(
    "kind, zero, columns",
    [(np.int8, 0, False), (np.uint8, 128, False), (np.int8, 0, True)],
)
def test_dynamic_quantize_lstm(kind: Any, zero: int, columns: bool) -> None:
    """Weights of 8 bits in both directions, states quantized in each step."""
    rng, size, width = np.random.default_rng(0), 8, 5
    low, high = np.iinfo(kind).min // 2, np.iinfo(kind).max // 2
    low, high = (low + zero // 2, high + zero // 2) if zero else (low, high)
    shape = (2, 4 * size) if columns else (2,)
    constants = {
        "w": rng.integers(low, high, (2, width, 4 * size)).astype(kind),
        "r": rng.integers(low, high, (2, size, 4 * size)).astype(kind),
        "b": 0.1 * drawn(1, 2, 8 * size),
        "ws": rng.uniform(0.005, 0.02, shape).astype(np.float32),
        "wz": np.full(shape, zero, kind),
        "rs": rng.uniform(0.005, 0.02, shape).astype(np.float32),
        "rz": np.full(shape, zero, kind),
    }
    names = ["x", "w", "r", "b", "", "h", "c", "", "ws", "wz", "rs", "rz"]
    lstm = _ms(
        "DynamicQuantizeLSTM",
        names,
        ["y", "yh", "yc"],
        hidden_size=size,
        direction="bidirectional",
    )
    kinds = {
        "x": (FLOAT, ("t", "n", width)),
        "h": (FLOAT, (2, "n", size)),
        "c": (FLOAT, (2, "n", size)),
    }
    proto = model(
        [lstm], kinds, ["y", "yh", "yc"], constants, domains=["com.microsoft"]
    )
    m = pliant.compile(proto)
    # ONNX Runtime takes part of a state in each of its threads.
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    for steps, batch in ((1, 1), (6, 1), (9, 3)):
        feeds = {
            "x": drawn(steps, steps, batch, width),
            "h": 0.3 * drawn(2, 2, batch, size),
            "c": drawn(3, 2, batch, size),
        }
        for ours, theirs in zip(m(**feeds), session.run(None, feeds), strict=True):
            assert ours.shape == theirs.shape
            # A sum in another order may round a state to the next of 255 codes.
            np.testing.assert_allclose(ours, theirs, atol=5e-3)


@pytest.mark.parametrize("op, gates", [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_clips_of_layers(op: str, gates: int, direction: str) -> None:
    """Of what gates are computed from; the cell of an LSTM is not clipped."""
    ways = 2 if direction == "bidirectional" else 1
    constants = {
        "w": drawn(0, ways, 4 * gates, 3),
        "r": drawn(1, ways, 4 * gates, 4),
        "b": drawn(2, ways, 8 * gates),
    }
    names = ["x", "w", "r", "b"]
    if op == "LSTM":
        constants |= {"h": drawn(3, ways, 2, 4), "c": drawn(4, ways, 2, 4)}
        constants["p"] = drawn(5, ways, 12)
        names += ["", "h", "c", "p"]
    attrs = {"hidden_size": 4, "direction": direction, "clip": 0.5}
    node = helper.make_node(op, names, ["y", "last"], **attrs)
    _check([node], {"x": drawn(6, 5, 2, 3)}, ["y", "last"], None, constants)


@pytest.mark.parametrize("factor", [0.5, 0.6, 0.7, 0.9, 1.3, 2.2])
def test_nearest_of_operator_set_10(factor: float) -> None:
    """Its node test: 0.6 of [1, 2, 3, 4] is [1, 3]."""
    x = drawn(0, 1, 2, 7, 8)
    scales = {"s": np.array([1, 1, factor, 2.0], np.float32)}
    node = helper.make_node("Resize", ["x", "s"], ["y"], mode="nearest")
    proto = model([node], {"x": (FLOAT, (1, 2, "h", "w"))}, ["y"], scales, opset=10)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    (wanted,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(pliant.compile(proto)(x), wanted)


def test_group_normalization_of_operator_set_18() -> None:
    """A weight for each group; later operator sets have one for each channel."""
    x = drawn(0, 2, 4, 3, 3)
    constants = {"s": drawn(1, 2), "b": drawn(2, 2)}
    node = helper.make_node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=2)
    proto = model([node], {"x": (FLOAT, ("n", 4, "h", "w"))}, ["y"], constants, 18)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    (wanted,) = session.run(None, {"x": x})
    np.testing.assert_allclose(pliant.compile(proto)(x), wanted, rtol=1e-4, atol=1e-5)
    for groups in (0, -2, 3, 2**40):
        proto.graph.node[0].attribute[0].i = groups
        with pytest.raises(pliant.PliantError) as told:
            pliant.compile(proto)
        assert not isinstance(told.value, pliant.InternalError), told.value
