"""Every overload of torch's core ATen set, each with samples of its own.

The set is what torch tags so (`torch.Tag.core`). A sample counts only if the exported
graph calls the overload; a size that an overload gives is used in a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bench.coverage.judge import Call, Verdict, graph_targets, judge, worst_of

aten = torch.ops.aten
Sample = tuple[Callable[..., Any], tuple[Any, ...]]

# An overload that no exported graph calls, by what torch.export has instead.
ELSEWHERE = {
    "sym_is_contiguous.default": "torch.export answers it from sizes and strides",
    "sym_numel.default": "torch.export has the product of sizes",
    "sym_storage_offset.default": "it is 0 for every tensor of an exported graph",
    "sym_stride.int": "torch.export computes strides from sizes",
}


@functools.cache
def overloads() -> dict[str, Any]:
    """By name, as torch's dispatcher lists them: dir(aten) has those in use alone."""
    found: dict[str, Any] = {}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        packet, _, each = rest.partition(".")
        if namespace == "aten":
            overload = getattr(getattr(aten, packet), each or "default")
            if torch.Tag.core in overload.tags:
                found[f"{packet}.{each or 'default'}"] = overload
    return found


def names() -> list[str]:
    return list(overloads())


def evaluate(name: str) -> Verdict:
    torch.manual_seed(0)
    overload = overloads()[name]
    made = samples(name, overload)
    if not made:
        return Verdict("unsupported", "there is no sample of it")
    verdicts = []
    for function, args in made:
        call = Call(function, args, {})
        verdict = judge(call, call.tensors)
        looked_at = verdict.kind == "pass" and name not in ELSEWHERE
        if looked_at and overload not in graph_targets(call, call.tensors):
            verdict = Verdict("export_cannot", "the exported graph does not call it")
        verdicts.append(verdict)
    worst = worst_of(verdicts)
    if worst.kind == "pass" and name in ELSEWHERE:
        return Verdict("pass", ELSEWHERE[name])
    return worst


def samples(name: str, overload: Any) -> list[Sample]:
    """Functions of tensors with their arguments, at least one for each overload."""
    rows = [row for table in (_plain(), _written()) for row in table.get(name, ())]
    return [row if callable(row[0]) else (overload, row) for row in rows]


def _f(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _u(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


def _i(*shape: int, most: int = 9) -> torch.Tensor:
    return torch.randint(1, most, shape)


def _b(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


def _plain() -> dict[str, list[tuple[Any, ...]]]:
    """Elementwise ops and reductions, by the kind of their operands."""
    out: dict[str, list[tuple[Any, ...]]] = {}
    for name in _FLOAT.split():
        out[f"{name}.default"] = [(_f(3, 5),), (_f(7),)]
    for name in _POSITIVE.split():
        out[f"{name}.default"] = [(_u(3, 5) + 0.1,)]
    for name in _WITHIN.split():
        out[f"{name}.default"] = [(_u(3, 5) * 1.8 - 0.9,)]
    out["acosh.default"] = [(_u(3, 5) + 1,)]
    for name in _COMPARE.split():
        out[f"{name}.Tensor"] = [(_f(3, 5), _f(3, 5)), (_i(3, 5), _i(5))]
        out[f"{name}.Scalar"] = [(_f(3, 5), 0.25), (_i(3, 5), 4)]
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        out[f"{name}.Tensor"] = [(_i(3, 5), _i(3, 5)), (_b(3, 5), _b(5))]
        out[f"{name}.Scalar"] = [(_i(3, 5), 6)]
    for name in ("logical_and", "logical_or", "logical_xor"):
        out[f"{name}.default"] = [(_b(3, 5), _b(3, 5)), (_f(3, 5), _i(5))]
    for name in ("maximum", "minimum", "atan2"):
        out[f"{name}.default"] = [(_f(3, 5), _f(5))]
    for name in ("add", "sub", "mul", "div"):
        out[f"{name}.Tensor"] = [(_f(3, 5), _f(5)), (_i(3, 5), _f(3, 1))]
        out[f"{name}.Scalar"] = [(_f(3, 5), 1.5), (_i(3, 5), 2)]
    for name in ("fmod", "remainder"):
        out[f"{name}.Tensor"] = [(_f(3, 5), _u(5) + 0.5), (_i(3, 5), _i(5))]
        out[f"{name}.Scalar"] = [(_f(3, 5), 0.75), (_i(3, 5), 4)]
    for name in ("amax", "amin"):
        out[f"{name}.default"] = [(_f(3, 5), [1]), (_f(3, 5), [0], True), (_f(3, 5),)]
    for name in ("argmax", "argmin"):
        out[f"{name}.default"] = [(_f(3, 5),), (_f(3, 5), 1), (_f(3, 5), 0, True)]
    for name in ("max", "min"):
        out[f"{name}.dim"] = [(_f(3, 5), 1), (_f(3, 5), 0, True)]
    return out


_FLOAT = """abs alias ceil clone cos cosh erf exp expm1 floor gelu isinf isnan
leaky_relu elu hardtanh relu neg reciprocal round sigmoid sign sin sinh tan tanh trunc
asinh atan logical_not argmax prod mean"""
_POSITIVE = "log log10 log1p log2 rsqrt sqrt"
_WITHIN = "acos asin atanh"
_COMPARE = "eq ne lt le gt ge"


def _norm_statistics(x: torch.Tensor, groups: int) -> tuple[Any, ...]:
    n, c, h, w = x.shape
    out = aten.native_group_norm(x, None, None, n, c, h * w, groups, 1e-5)
    return out[1], out[2]


def _sliced(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    size = aten._local_scalar_dense(number)
    check: Any = torch._check
    check(size >= 0)
    check(size <= x.shape[0])
    return x[:size] * 2


def _written() -> dict[str, list[tuple[Any, ...]]]:
    """The others; a lambda where sizes or numbers are arguments."""
    plane, volume, weight = _f(2, 3, 6, 7), _f(2, 3, 4, 6, 5), _f(4, 3, 3, 3)
    rows, index, mask = _f(4, 6), _i(4, 6, most=4), _b(4, 6)
    wide, bags = _f(2, 3, 8, 9), (_f(9, 4), _i(7), torch.tensor([0, 3, 5]))
    picked = aten.max_pool2d_with_indices(wide, [2, 2], [2, 2])
    mean, rstd = _norm_statistics(_f(2, 6, 3, 4), 3)
    layer = aten.native_layer_norm(_f(4, 6), [6], None, None, 1e-5)
    conv = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out: dict[str, list[tuple[Any, ...]]] = {
        "_adaptive_avg_pool2d.default": [(plane, [3, 2])],
        "_adaptive_avg_pool2d_backward.default": [(_f(2, 3, 3, 2), plane)],
        "_adaptive_avg_pool3d.default": [(volume, [2, 3, 2])],
        "_cdist_forward.default": [(_f(3, 5), _f(4, 5), 2.0, None)],
        "_embedding_bag.default": [
            # The other results serve its gradient; eager leaves them out where it can.
            (lambda *a: aten._embedding_bag(*a)[0], bags),
            (lambda *a: aten._embedding_bag(*a, False, 1)[0], bags),
        ],
        "_fft_c2r.default": [
            (
                lambda x: aten._fft_c2r(aten._fft_r2c(x, [1], 0, True), [1], 2, 8),
                (_f(3, 8),),
            )
        ],
        "_fft_r2c.default": [
            (lambda x: aten._fft_r2c(x, [1], 0, True).abs(), (_f(3, 8),))
        ],
        "_local_scalar_dense.default": [(_sliced, (_f(5), torch.tensor(3)))],
        "_log_softmax.default": [(_f(3, 5), 1, False)],
        "_softmax.default": [(_f(3, 5), 1, False)],
        "_native_batch_norm_legit.default": [
            (plane, _f(3), _f(3), _f(3), _u(3) + 0.5, True, 0.1, 1e-5)
        ],
        "_native_batch_norm_legit.no_stats": [(plane, _f(3), _f(3), True, 0.1, 1e-5)],
        "_native_batch_norm_legit_no_training.default": [
            (
                lambda *a: aten._native_batch_norm_legit_no_training(*a, 0.1, 1e-5)[0],
                (plane, _f(3), _f(3), _f(3), _u(3) + 0.5),
            )
        ],
        "_pdist_forward.default": [(_f(4, 5), 2.0)],
        "_to_copy.default": [
            (lambda x: aten._to_copy(x, dtype=torch.float64), (_f(3, 5),))
        ],
        "adaptive_avg_pool1d.default": [(_f(2, 3, 7), [3])],
        "addmm.default": [(_f(5), _f(3, 4), _f(4, 5))],
        "any.default": [(_b(3, 5),)],
        "any.dim": [(_b(3, 5), 1), (_f(3, 5), 0, True)],
        "any.dims": [(_b(3, 5), [0, 1]), (_b(3, 5), [1])],
        "arange.start_step": [
            (lambda x: aten.arange.start_step(1, 1 + 2 * x.shape[0], 2), (_f(5),))
        ],
        "as_strided.default": [
            (lambda x: aten.as_strided(x.clone(), [2, 3], [3, 1], 1), (_f(4, 5),)),
        ],
        "atan2.out": [
            (
                lambda x, y: aten.atan2.out(x, y, out=x.new_empty(x.shape)),
                (_f(3, 5), _f(3, 5)),
            )
        ],
        "avg_pool1d.default": [(_f(2, 3, 8), [2]), (_f(2, 3, 8), [3], [2], [1])],
        "avg_pool2d.default": [
            (plane, [2, 2]),
            (plane, [3, 3], [2, 2], [1, 1], True, False),
            (plane, [3, 3], [2, 2], [1, 1], True, True),
        ],
        "avg_pool2d_backward.default": [
            (_f(2, 3, 3, 3), plane, [2, 2], [2, 2], [0, 0], False, True, None),
            (_f(2, 3, 6, 7), plane, [3, 3], [1, 1], [1, 1], False, False, None),
        ],
        "avg_pool3d.default": [(volume, [2, 2, 2])],
        "bitwise_not.default": [(_i(3, 5),), (_b(3, 5),)],
        "bmm.default": [(_f(2, 3, 4), _f(2, 4, 5))],
        "cat.default": [([_f(3, 4), _f(3, 5)], 1), ([_f(3, 4), _f(2, 4)],)],
        "clamp.default": [(_f(3, 5), -0.5, 0.5), (_i(3, 5), None, 4)],
        "clamp.Tensor": [(_f(3, 5), _f(3, 5), None), (_f(3, 5), _f(5) - 1, _f(5) + 1)],
        "col2im.default": [(_f(2, 12, 12), [5, 4], [2, 2], [1, 1], [0, 0], [1, 1])],
        "constant_pad_nd.default": [(_f(3, 5), [1, 2, 0, 3], 0.5), (_f(3, 5), [-1, 2])],
        "convolution.default": [
            (plane, weight, _f(4), *conv),
            (plane, _f(3, 4, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
        ],
        "convolution_backward.default": [
            (_f(2, 4, 6, 7), plane, weight, [4], *conv, [True, True, True])
        ],
        "copy.default": [(_f(3, 5), _f(5))],
        "cumsum.default": [(_f(3, 5), 1), (_i(3, 5), 0)],
        "diagonal.default": [(_f(4, 6),), (_f(2, 4, 6), 1, 1, 2)],
        "div.Tensor_mode": _modes(_f(3, 5), _f(3, 5)),
        "div.Scalar_mode": _modes(_f(3, 5), 0.7),
        "embedding.default": [(_f(9, 4), _i(3, 5))],
        "embedding_dense_backward.default": [(_f(3, 5, 4), _i(3, 5), 9, -1, False)],
        "empty.memory_format": [
            (lambda x: aten.empty.memory_format(list(x.shape)).fill_(2.0), (_f(3, 5),))
        ],
        "empty_strided.default": [
            (
                lambda x: aten.empty_strided([x.shape[0], 4], [4, 1]).fill_(2.0),
                (_f(3, 5),),
            )
        ],
        "expand.default": [(lambda x: aten.expand(x, [4, x.shape[0]]), (_f(5),))],
        "fill.Scalar": [(_f(3, 5), 2.5)],
        "flip.default": [(_f(3, 5), [0, 1]), (_f(3, 5), [1])],
        "full.default": [(lambda x: aten.full(list(x.shape), 2.5), (_f(3, 5),))],
        "full_like.default": [(_f(3, 5), 2.5)],
        "gather.default": [(rows, 0, index), (rows, 1, index)],
        "grid_sampler_2d.default": [
            (plane, _u(2, 4, 5, 2) * 2 - 1, mode, padding, align)
            for mode, padding, align in ((0, 0, False), (1, 1, True), (2, 2, False))
        ],
        "index.Tensor": [
            (lambda x, i: aten.index.Tensor(x, [i]), (rows, _i(3, most=4))),
            (lambda x, i: aten.index.Tensor(x, [None, i]), (rows, _i(3, most=6))),
            (lambda x, m: aten.index.Tensor(x, [m]), (rows, mask)),
        ],
        "index_put.default": [
            (lambda x, i, v: aten.index_put(x, [i], v), (rows, torch.arange(3), _f(6))),
            (
                lambda x, i, v: aten.index_put(x, [i], v, True),
                (rows, _i(3, most=4), _f(3, 6)),
            ),
        ],
        "index_select.default": [(rows, 0, _i(3, most=4)), (rows, 1, _i(7, most=6))],
        "masked_scatter.default": [(rows, mask, _f(4, 6))],
        "max_pool2d_with_indices.default": [
            (plane, [2, 2]),
            (plane, [3, 3], [2, 2], [1, 1], [1, 1], True),
        ],
        "max_pool2d_with_indices_backward.default": [
            (picked[0], wide, [2, 2], [2, 2], [0, 0], [1, 1], False, picked[1])
        ],
        "max_pool3d_with_indices.default": [(volume, [2, 2, 2])],
        "mean.dim": [(_f(3, 5), [1]), (_f(3, 5), [0, 1], True)],
        "mm.default": [(_f(3, 4), _f(4, 5))],
        "native_dropout.default": [(_f(3, 50), 0.3, True), (_f(3, 5), 0.3, False)],
        "native_group_norm.default": [
            (
                lambda x, w, b: aten.native_group_norm(
                    x, w, b, x.shape[0], 6, x.shape[2] * x.shape[3], 3, 1e-5
                ),
                (_f(2, 6, 3, 4), _f(6), _f(6)),
            )
        ],
        "native_group_norm_backward.default": [
            (
                lambda g, x, m, r, w: aten.native_group_norm_backward(
                    *(g, x, m, r, w, x.shape[0], 6, x.shape[2] * x.shape[3], 3),
                    [True, True, True],
                ),
                (_f(2, 6, 3, 4), _f(2, 6, 3, 4), mean, rstd, _f(6)),
            )
        ],
        "native_layer_norm.default": [
            (
                lambda x, w, b: aten.native_layer_norm(x, [6], w, b, 1e-5),
                (rows, _f(6), _f(6)),
            )
        ],
        "native_layer_norm_backward.default": [
            (
                lambda g, x, m, r, w, b: aten.native_layer_norm_backward(
                    g, x, [6], m, r, w, b, [True, True, True]
                ),
                (_f(4, 6), rows, layer[1], layer[2], _f(6), _f(6)),
            )
        ],
        "nonzero.default": [(mask,), (_i(7, most=3) - 1,)],
        "permute.default": [(_f(2, 3, 4), [2, 0, 1])],
        "pow.Tensor_Tensor": [(_u(3, 5), _f(3, 5)), (_i(3, 5), _i(5, most=4))],
        "pow.Tensor_Scalar": [(_u(3, 5), 1.5), (_f(3, 5), 3), (_i(3, 5), 2)],
        "pow.Scalar": [(2.5, _f(3, 5))],
        "prod.dim_int": [(_f(3, 5), 1), (_f(3, 5), 0, True)],
        "rand.default": [(lambda x: aten.rand(list(x.shape)), (_f(3, 50),))],
        "randn.default": [(lambda x: aten.randn(list(x.shape)), (_f(3, 50),))],
        "randperm.default": [(lambda x: aten.randperm(x.shape[0]), (_f(50),))],
        "reflection_pad1d.default": [(_f(2, 3, 6), [1, 2])],
        "reflection_pad2d.default": [(plane, [1, 2, 2, 1])],
        "reflection_pad3d.default": [(volume, [1, 2, 2, 1, 1, 1])],
        "resize_.default": [
            (lambda x: aten.resize_(x.clone(), [1, 1]), (_f(),)),
            (lambda x: aten.resize_(x.clone(), [1]), (_f(1, 1),)),
        ],
        "repeat.default": [(_f(3, 5), [2, 3]), (_f(3), [2, 2])],
        "replication_pad2d.default": [(plane, [1, 2, 2, 1])],
        "replication_pad3d.default": [(volume, [1, 2, 2, 1, 1, 1])],
        "scalar_tensor.default": [
            (lambda x: aten.scalar_tensor(x.shape[0]) + x, (_f(5),))
        ],
        "scatter.value": [(rows, 0, index, 2.5)],
        "scatter.src": [(rows, 0, torch.argsort(_f(4, 6), 0), _f(4, 6))],
        "scatter_add.default": [(rows, 0, index, _f(4, 6)), (rows, 1, index, rows)],
        "scatter_reduce.two": [
            (rows, 0, index, _f(4, 6), op) for op in ("sum", "prod", "amax", "mean")
        ],
        "select.int": [(rows, 0, 2), (rows, 1, -1)],
        "select_scatter.default": [(rows, _f(6), 0, 2)],
        "slice.Tensor": [(rows, 0, 1, 3), (rows, 1, 0, 9223372036854775807, 2)],
        "slice_scatter.default": [
            (rows, _f(2, 6), 0, 1, 3),
            (rows, _f(4, 3), 1, 0, 6, 2),
        ],
        "sort.default": [(rows,), (rows, 0, True)],
        "split_with_sizes.default": [(_f(3, 6), [2, 4], 1)],
        "squeeze.dim": [(_f(3, 1, 5), 1), (_f(1, 5), 0)],
        "squeeze.dims": [(_f(3, 1, 5, 1), [1, 3])],
        "sum.dim_IntList": [(_f(3, 5), [1]), (_i(3, 5), [0], True), (_f(3, 5), [0, 1])],
        "sym_is_contiguous.default": [
            (lambda x: x + int(aten.sym_is_contiguous(x)), (_f(3, 5),))
        ],
        "sym_numel.default": [(lambda x: x * aten.sym_numel(x), (_f(3, 5),))],
        "sym_size.int": [(lambda x: x * aten.sym_size.int(x, 0), (_f(3, 5),))],
        "sym_storage_offset.default": [
            (lambda x: x + aten.sym_storage_offset(x), (_f(3, 5),))
        ],
        "sym_stride.int": [(lambda x: x * aten.sym_stride.int(x, 0), (_f(3, 5),))],
        "topk.default": [(rows, 3), (rows, 2, 0, False)],
        "unsqueeze.default": [(_f(3, 5), 1)],
        "upsample_bilinear2d.vec": [(plane, [9, 8], False, None)],
        "upsample_nearest2d.vec": [(plane, None, [2.0, 3.0])],
        "var.dim": [(_f(3, 5), [1]), (_f(3, 5), [0], False, True)],
        "var.correction": [
            (lambda x: aten.var.correction(x, [1], correction=0), (_f(3, 5),))
        ],
        "view.default": [(lambda x: aten.view(x.clone(), [-1]), (_f(3, 5),))],
        "where.self": [(mask, rows, _f(6))],
    }
    return out


def _modes(x: torch.Tensor, y: Any) -> list[Sample]:
    def divided(mode: str) -> Sample:
        if isinstance(y, torch.Tensor):
            return lambda a, b: aten.div.Tensor_mode(a, b, rounding_mode=mode), (x, y)
        return lambda a: aten.div.Scalar_mode(a, y, rounding_mode=mode), (x,)

    return [divided("floor"), divided("trunc")]
