"""What random models are made of: for every aten overload, arguments to call it with.

An entry is the text of the arguments, with names of what to put there in braces:

    {x} float of any rank      {v} rank >= 1     {m} rank >= 2     {r} rank 2
    {c} rank 3, (batch, static, any)  {o} rank 4, (batch, static, any, any)  {u} rank 5
    {n} float or integer       {i} integer       {b} bool          {a} any dtype
    {p} float above zero       {l} integer inside [0, 4)
    {y} {z} broadcast with the first, same dtype;  {like} the same shape as well
    {mask} bool, broadcasts with the first;  {plain} one element, same dtype
    {d} an axis of the first; {e} another; {D} several; {N} the size of {d}
    {S} the shape of the first
    {index} integers inside axis {d}, rank 1
    {s} a number; {q} one above 0; {j} an integer; {k} True or False; {f} a float dtype
    {t} any dtype; {W:8,C,3} a weight; C and L are the first's size of axis 1 and -1

`STEP` ops make a large difference of a small one, so they take values without rounding
errors alone; `KEEP` ops hand those on unrounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.frontend.torch_ops_bins import BINS
from pliant.frontend.torch_ops_random import RANDOM
from pliant.frontend.torch_ops_series import SERIES
from pliant.frontend.torch_ops_strided import STRIDED


@dataclass(frozen=True)
class Entry:
    overload: str  # "aten.add.Tensor"
    arguments: str
    step: bool = False
    keep: bool = False
    text: bool = False  # `arguments` is the whole expression


def _entries(table: dict[str, str | tuple[str, ...]], **flags: bool) -> list[Entry]:
    out = []
    for names, arguments in table.items():
        for name in names.split():
            full = name if "." in name else f"{name}.default"
            full = full if full.startswith("prims.") else f"aten.{full}"
            texts = (arguments,) if isinstance(arguments, str) else arguments
            out += [Entry(full, text, **flags) for text in texts]
    return out


SMOOTH = _entries(
    {
        "exp expm1 exp2 sin cos tan tanh sinh cosh erf erfc sigmoid": "{x}",
        "log log1p log2 log10 sqrt rsqrt reciprocal": ("{p}", "{x}"),
        "logit": ("{x}.sigmoid()", "{x}, 0.01"),
        "acos asin atanh erfinv": "{x}.sigmoid() * 0.9",
        "atan asinh sinc special_erfcx special_log_ndtr special_ndtr": "{x}",
        "acosh": "{p} + 1.1",
        "special_ndtri": "{x}.sigmoid()",
        "lgamma digamma": "{p} + 0.1",
        "i0 special_i0e special_i1 special_i1e special_modified_bessel_i0 "
        "special_modified_bessel_i1 special_spherical_bessel_j0": "{x}",
        "special_airy_ai": "{x}",
        "special_modified_bessel_k0 special_modified_bessel_k1 "
        "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1": "{p}",
        "square deg2rad rad2deg": "{n}",
        "silu mish selu celu hardsigmoid hardswish log_sigmoid softplus": "{x}",
        "gelu": ("{x}", "{x}, approximate='tanh'"),
        "elu": ("{x}", "{x}, 0.7, 1.1, 1.3"),
        "leaky_relu": "{x}, 0.2",
        "prelu": "{c}, {W:C}",
        "_prelu_kernel": "{x}, {plain}",
        "glu": "{c}, 1",
        "add.Tensor sub.Tensor subtract.Tensor rsub.Tensor": (
            "{n}, {y}",
            "{x}, {y}, alpha=0.5",
            "{x}, {i}",
            "{x}, {plain}",
        ),
        "mul.Tensor multiply.Tensor": ("{n}, {y}", "{x}, {mask}", "{x}, {plain}"),
        "div.Tensor divide.Tensor true_divide.Tensor": ("{x}, {y}", "{i}, {q}"),
        "add.Scalar sub.Scalar rsub.Scalar mul.Scalar": ("{x}, {s}", "{i}, {j}"),
        "div.Scalar": "{n}, {q}",
        "pow.Tensor_Scalar": ("{p}, 1.5", "{x}, 2", "{x}, 3", "{p}, -0.5", "{p}, {s}"),
        "pow.Tensor_Tensor": "{p}, {y}",
        "pow.Scalar": "1.7, {x}",
        "atan2 hypot": "{x}, {y}",
        "lerp.Tensor": "{x}, {like}, {y}",
        "lerp.Scalar": ("{x}, {y}, 0.3", "{x}, {y}, 0.8"),
        "addcmul addcdiv": ("{x}, {y}, {z}", "{x}, {y}, {z}, value=0.3"),
        "sum mean prod var std": "{x}",
        "sum.dim_IntList mean.dim": (
            "{v}, {D}",
            "{v}, [{d}], {k}",
            "{v}, [], {k}",
            "{v}, None",
            "{v}, [{d}], {k}, dtype=torch.float64",
        ),
        "prod.dim_int": "{v}, {d}, {k}",
        "var.dim std.dim": ("{v}, {D}, {k}", "{v}, {D}, {k}, {k}"),
        "var.correction std.correction": (
            "{v}, {D}, correction=0",
            "{v}, {D}, correction=1, keepdim=True",
            "{v}",
        ),
        "var_mean.correction std_mean.correction": (
            "{v}, {D}, correction=0, keepdim={k}"
        ),
        "var_mean.dim": "{v}, {D}, {k}, {k}",
        "linalg_vector_norm": (
            "{v}, 2, {D}, {k}",
            "{v}, 1, {D}",
            "{v}, 3.0, [{d}]",
            "{v}, float('inf'), [{d}]",
            "{v}",
        ),
        "norm.Scalar": ("{x}", "{x}, 1"),
        "norm.ScalarOpt_dim": ("{v}, 2, {D}, {k}", "{v}, 1, [{d}]"),
        "norm.ScalarOpt_dim_dtype": "{v}, 2, {D}, {k}, dtype=torch.float64",
        # Of no elements, eager's own ends the process.
        "_weight_norm": "{W:6,4} * {x}.sum(), {W:6,1}, 0",
        "logsumexp": "{v}, {D}, {k}",
        "softmax.int log_softmax.int": ("{v}, {d}", "{v}, {d}, torch.float64"),
        "_softmax _log_softmax": "{v}, {d}, False",
        "cumsum cumprod logcumsumexp": "{v}, {d}",
        "quantile.scalar nanquantile.scalar": "{v}, 0.3, {d}, {k}",
        "quantile nanquantile": (
            "{x}.float(), torch.tensor([0.2, 0.7])",
            "{v}.double(), torch.tensor([0.5]).double(), {d}, interpolation='nearest'",
        ),
        "diff": ("{v}", "{v}, 1, {d}", "{v}, 2, {d}"),
        "cosine_similarity": "{v}, {like}, {d}",
        "mse_loss l1_loss": ("{x}, {like}", "{x}, {like}, 0", "{x}, {like}, 2"),
        "smooth_l1_loss huber_loss": ("{x}, {like}, 1, 0.7", "{x}, {like}, 0, 1.5"),
        "kl_div": ("{x}, {like}.abs()", "{x}, {like}, 0, log_target=True"),
        "soft_margin_loss": "{x}, {like}",
        "binary_cross_entropy_with_logits": (
            "{x}, {like}",
            "{x}, {like}, None, None, 0",
        ),
        "matmul": ("{m}, {m}.mT", "{r}, {r}.mT", "{v}, {W:L,5}", "{v}, {W:L}"),
        "mm": ("{r}, {r}.mT", "{r}, {W:L,7}"),
        "bmm": ("{c}, {c}.mT", "{c}.mT, {c}"),
        "mv": "{r}, {r}[0]",
        "dot vdot": "{r}[0], {r}[-1]",
        "inner": "{v}, {v}",
        "outer ger": "{r}[0], {r}[:, 0]",
        "addmm": (
            "{r}[:, :1], {r}, {W:L,7}",
            "{W:7}, {r}, {W:L,7}, beta=0.5, alpha=2",
        ),
        "addmv": "{r}[:, 0], {r}, {r}[0]",
        "baddbmm": "{c}[:, :1, :1], {c}, {c}.mT, beta=0.5, alpha=0.3",
        "linear": ("{v}, {W:5,L}", "{v}, {W:9,L}, {W:9}"),
        "einsum": ("'bcn,bdn->bcd', [{c}, {c}]", "'bcn,cd->bdn', [{c}, {W:C,3}]"),
        "conv1d": (
            "{c}, {W:5,C,3}",
            "{c}, {W:5,C,1}, {W:5}, [2]",
            "{c}, {W:C,1,3}, None, [1], [1], [2], C",
        ),
        "conv1d.padding": "{c}, {W:5,C,3}, None, [1], 'same'",
        "conv2d": (
            "{o}, {W:5,C,3,3}, {W:5}, [1, 1], [1, 1]",
            "{o}, {W:6,C,1,1}, None, [2, 1]",
            "{o}, {W:C,1,3,2}, None, [1, 1], [1, 0], [1, 2], C",
        ),
        "conv2d.padding": "{o}, {W:5,C,3,3}, None, [1, 1], 'same'",
        "conv3d": "{u}, {W:3,C,2,1,2}, None, [1, 1, 1], [1, 0, 1]",
        "conv3d.padding": "{u}, {W:3,C,1,3,1}, None, [1, 1, 1], 'same'",
        "convolution": (
            "{c}, {W:5,C,3}, {W:5}, [1], [1], [1], False, [0], 1",
            "{o}, {W:C,3,2,2}, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1",
        ),
        "conv_transpose1d": "{c}, {W:C,3,3}, {W:3}, [2], [1], [1]",
        "conv_transpose2d.input": "{o}, {W:C,2,3,3}, None, [2, 1], [1, 0], [1, 0]",
        "conv_transpose3d.input": "{u}, {W:C,2,1,2,2}, None, [1, 2, 1]",
        "avg_pool1d": ("{c}, [2]", "{c}, [3], [2], [1], True, False"),
        "avg_pool2d": (
            "{o}, [2, 2]",
            "{o}, [3, 2], [2, 1], [1, 1], True, False",
            "{o}, [2, 2], [1, 1], [0, 1], False, True, 3",
        ),
        "avg_pool3d": "{u}, [2, 1, 2], [1, 1, 1]",
        "adaptive_avg_pool1d": "{c}, [3]",
        "adaptive_avg_pool2d _adaptive_avg_pool2d": ("{o}, [3, 2]", "{o}, [1, 1]"),
        "adaptive_avg_pool3d": "{u}, [2, 1, 3]",
        "layer_norm": ("{v}, [{v}.shape[-1]]", "{v}, [L], {W:L}, {W:L}"),
        "native_layer_norm": "{v}, [L], {W:L}, None, 1e-3",
        "rms_norm": ("{v}, [{v}.shape[-1]], None, 1e-3", "{v}, [L], {W:L}"),
        "_fused_rms_norm": "{v}, [L], {W:L}, 1e-3",
        "group_norm": ("{c}, 1", "{o}, 2, {W:C}, {W:C}"),
        "_native_batch_norm_legit_no_training": (
            "{c}, {W:C}, {W:C}, {W:C}, {W:C}.abs(), 0.1, 1e-3"
        ),
        "batch_norm": (
            "{o}, {W:C}, {W:C}, {W:C}, {W:C}.abs(), False, 0.1, 1e-3, False"
        ),
        "instance_norm": (
            "{o}, None, None, None, None, True, 0.1, 1e-3, False",
            "{c}, {W:C}, {W:C}, None, None, True, 0.1, 1e-3, False",
        ),
        "scaled_dot_product_attention": (
            "{c}.mT, {c}.mT, {c}.mT",
            "{o}, {o}, {o}, None, 0.0, True",
            "{o}, {o}, {o}, {o}[:1, :1, :, :1], scale=0.4",
        ),
        "_scaled_dot_product_flash_attention_for_cpu": "{o}, {o}, {o}, 0.0, {k}",
        "upsample_linear1d": "{c}, [7], {k}",
        "upsample_bilinear2d upsample_bicubic2d": (
            "{o}, [5, 8], {k}",
            "{o}, [2 * {o}.shape[2], 3], {k}",
        ),
        "upsample_trilinear3d": "{u}, [3, 4, 5], {k}",
        "upsample_linear1d.vec": ("{c}, None, {k}, [2.0]", "{c}, [6], {k}, None"),
        "upsample_bilinear2d.vec": (
            "{o}, None, {k}, [2.0, 1.5]",
            "{o}, [4, 9], {k}, None",
        ),
        "upsample_bicubic2d.vec": "{o}, None, {k}, [1.5, 2.0]",
        "upsample_trilinear3d.vec": "{u}, None, {k}, [1.0, 2.0, 2.0]",
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa": (
            "{o}, [5, 8], {k}",
            "{o}, [2, 3], False",
        ),
        "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec": (
            "{o}, [4, 9], {k}, None",
            "{o}, None, False, [1.5, 2.0]",
        ),
        "grid_sampler_2d": (
            "{o}, torch.stack([{o}[:, 0]] * 2, -1).tanh(), 0, 0, {k}",
            "{o}, torch.stack([{o}[:, 0]] * 2, -1).tanh(), 2, 1, {k}",
        ),
        "grid_sampler_3d": (
            "{u}, torch.stack([{u}[:, 0]] * 3, -1).tanh(), 0, 0, {k}",
            "{u}, torch.stack([{u}[:, 0]] * 3, -1), 0, 1, {k}",
        ),
        "addbmm": "{c}[0, :, :1], {c}, {c}.mT, beta=0.5, alpha=0.3",
        "cdist _cdist_forward": (
            "{c}, {c}.flip(1), 1.0, None",
            "{c}, {c} + 1, 3.0, None",
        ),
        "_pdist_forward": "{r}, 1.0",
        "index_reduce": (
            "{v}, {d}, torch.arange({N}) // 2, {like}, 'prod'",
            "{v}, {d}, torch.arange({N}) // 2, {like}, 'mean'",
            "{v}, {d}, torch.arange({N}) // 2, {like}, 'mean', include_self=False",
        ),
        "scatter.reduce": (
            "{v}, {d}, {v}.long() * 0, {like}, reduce='add'",
            "{v}, {d}, {v}.long() * 0, {like}, reduce='multiply'",
        ),
        "scatter.value_reduce": "{v}, {d}, {v}.long() * 0, 0.5, reduce='add'",
        "scatter_reduce.two": (
            "{v}, {d}, {v}.long() * 0, {like}, 'sum'",
            "{v}, {d}, {v}.long() * 0, {like}, 'mean', include_self=False",
        ),
        "index_add": "{v}, {d}, torch.arange({N}).flip(0), {like}",
        "scatter_add": "{v}, {d}, torch.zeros_like({v}, dtype=torch.int64), {like}",
        "convolution_backward": (
            "aten.conv2d({o}, {W:5,C,3,3}), {o}, {W:5,C,3,3}, [5], [1, 1], [0, 0], "
            "[1, 1], False, [0, 0], 1, [True, True, True]"
        ),
    }
)

# Numbers without ties: of equal ones eager may choose any.
_RANKS = "{v}.flatten().argsort(stable=True).view_as({v})"

STEP = _entries(
    {
        "nonzero_static": ("{n}, size=3", "{b}, size=2, fill_value=7"),
        "sort argsort": (f"{_RANKS}, {{d}}, {{k}}", f"{_RANKS}.float(), {{d}}"),
        "sort.stable": (
            "{v}, stable=True, dim={d}, descending={k}",
            "{n}, stable=True",
        ),
        "argsort.stable": "{v}, stable=True, dim={d}, descending={k}",
        "msort": "{n}",
        "topk": (
            f"{_RANKS}, ({{N}} + 1) // 2, {{d}}, {{k}}",
            f"{_RANKS}.float(), 1, {{d}}, {{k}}",
        ),
        "kthvalue": f"{_RANKS}.float(), ({{N}} + 1) // 2, {{d}}, {{k}}",
        "median nanmedian": "{x}",
        "median.dim nanmedian.dim": f"{_RANKS}.float(), {{d}}, {{k}}",
        "mode": f"{_RANKS}, {{d}}, {{k}}",
        "cummax cummin": "{v}, {d}",
        "searchsorted.Tensor": (
            "{v}.sort().values, {v}",
            "{v}, {v}, sorter={v}.argsort(stable=True), right=True",
        ),
        "searchsorted.Scalar": "{r}[0].sort().values, 0.3",
        "bucketize.Tensor": "{x}, {W:5}.sort().values, right={k}",
        "bucketize.Scalar": "0.3, {r}[0].sort().values",
        "isin.Tensor_Tensor": ("{n}, {y}", "{i}, {y}, invert=True"),
        "isin.Tensor_Scalar": "{n}, 1",
        "isin.Scalar_Tensor": "1, {n}",
        "histc": ("{x}, 5, -1, 1", "{x}, 3"),
        "sign sgn": "{n}",
        "floor ceil trunc fix": "{n}",
        "round": ("{n}", "{x} * 4"),
        "round.decimals": "{x}, decimals=1",
        "frac": "{x}",
        "isnan isinf isfinite logical_not": "{n}",
        "div.Tensor_mode": (
            "{n}, {y}, rounding_mode='floor'",
            "{x}, {y}, rounding_mode='trunc'",
        ),
        "div.Scalar_mode": (
            "{n}, 2, rounding_mode='floor'",
            "{x}, 0.7, rounding_mode='trunc'",
        ),
        "floor_divide": "{n}, {y}",
        "floor_divide.Scalar": ("{n}, 3", "{i}, -2"),
        "remainder.Tensor fmod.Tensor": "{n}, {y}",
        "remainder.Scalar fmod.Scalar": ("{n}, 3", "{n}, -2", "{x}, 0.7"),
        "remainder.Scalar_Tensor": ("5, {i}", "2.5, {x}"),
        "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor": (
            "{a}, {y}",
            "{x}, {i}",
            "{n}, {plain}",
        ),
        "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar": (
            "{n}, 0",
            "{x}, 0.5",
            "{i}, 1.5",
        ),
        "logical_and logical_or logical_xor": ("{a}, {y}", "{x}, {mask}"),
        "threshold": "{x}, 0.3, -1.0",
        "isposinf isneginf": "{n}",
        # The sign of a NaN is nobody's promise.
        "signbit": "torch.nan_to_num({n}, 1.0)",
        "angle": "{x}",
        "heaviside": "{n}, {y}",
        "copysign.Tensor": "{x}, torch.nan_to_num({y}, 1.0)",
        "nextafter": "{x}, {y}",
        "copysign.Scalar": "{x}, -2.0",
        "adaptive_max_pool3d": "{u}, [2, 1, 2]",
        "softshrink hardshrink": "{x}, 0.4",
        "any all": ("{b}", "{n}"),
        "any.dim all.dim": "{b}.unsqueeze(0), 0, {k}",
        "any.dims all.dims": "{b}.unsqueeze(0), [0], {k}",
        "argmax argmin": ("{v}, {d}, {k}", "{v}", "{v}, None, {k}"),
        "max.dim min.dim": "{v}, {d}, {k}",
        "count_nonzero": ("{n}", "{v}, {d}"),
        "count_nonzero.dim_IntList": "{v}, {D}",
        "nonzero": "{n}",
        "max_pool2d_with_indices": "{o}, [2, 2]",
        "max_pool3d_with_indices": "{u}, [2, 1, 2]",
        "adaptive_max_pool1d": "{c}, [3]",
        "adaptive_max_pool2d": "{o}, [2, 3]",
        "masked_select": "{n}, {mask}",
    },
    step=True,
    keep=True,
)

KEEP = _entries(
    {
        "index_copy": "{v}, {d}, torch.arange({N}).flip(0), {like}",
        "neg abs": "{n}",
        "positive": "{n}",
        "bitwise_not": ("{i}", "{b}"),
        "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor "
        "__or__.Tensor __xor__.Tensor": ("{i}, {y}", "{b}, {y}"),
        "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar "
        "__or__.Scalar __xor__.Scalar": ("{i}, 5", "{b}, True"),
        "bitwise_left_shift.Tensor bitwise_right_shift.Tensor __lshift__.Tensor "
        "__rshift__.Tensor": "{i}, {l}",
        "bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar "
        "__lshift__.Scalar __rshift__.Scalar": "{i}, 2",
        "minimum maximum min.other max.other fmax fmin": "{n}, {y}",
        "clamp": ("{n}, -1, 2", "{x}, None, 0.5", "{x}, 0.1"),
        "clip": "{n}, -1, 1",
        "clamp.Tensor": "{x}, {y}, {z}",
        "clamp_min clamp_max": ("{n}, 1", "{x}, 0.25"),
        "clamp_min.Tensor clamp_max.Tensor": "{n}, {y}",
        "where.self": ("{mask_of} {n}, {y}", "{mask_of} {a}, {plain}"),
        "where.ScalarOther": "{mask_of} {x}, -0.5",
        "where.ScalarSelf": "{mask_of} 0.5, {x}",
        "where.Scalar": ("{b}, 1, 0", "{b}, 0.5, 2"),
        "masked_fill.Scalar": "{n}, {mask}, 2",
        "masked_fill.Tensor": "{n}, {mask}, {plain}",
        "nan_to_num": ("{x}", "{x}, 1.0, 2.0, -2.0"),
        "relu": "{n}",
        "relu6": "{x}",
        "hardtanh": "{x}, -0.5, 0.75",
        "amax amin": ("{v}, {D}, {k}", "{v}"),
        "aminmax": ("{v}, dim={d}, keepdim={k}", "{v}"),
        "max min": "{n}",
        "max_pool1d": ("{c}, [2]", "{c}, [3], [2], [1], [1], True"),
        "max_pool2d": ("{o}, [2, 2]", "{o}, [3, 2], [2, 1], [1, 1], [1, 1], {k}"),
        "max_pool3d": "{u}, [2, 1, 2], [1, 1, 1]",
        "upsample_nearest1d _upsample_nearest_exact1d": "{c}, [7]",
        "upsample_nearest2d _upsample_nearest_exact2d": "{o}, [5, 2 * {o}.shape[3]]",
        "upsample_nearest3d": "{u}, [3, 4, 5]",
        "upsample_nearest1d.vec _upsample_nearest_exact1d.vec": "{c}, None, [2.0]",
        "upsample_nearest2d.vec _upsample_nearest_exact2d.vec": (
            "{o}, None, [2.0, 1.5]",
            "{o}, [3, 4], None",
        ),
        "upsample_nearest3d.vec": "{u}, None, [1.0, 2.0, 2.0]",
        "view reshape _unsafe_view": (
            "{a}, [-1]",
            "{c}, [{c}.shape[0] * C, {c}.shape[2]]",
            "{o}, [{o}.shape[0], -1, {o}.shape[3]]",
            "{c}, [{c}.shape[0], 2, C // 2, {c}.shape[2]]",
        ),
        "view_as reshape_as": "{a}, {like}",
        "flatten.using_ints": ("{a}", "{m}, 0, 1", "{m}, -2, -1"),
        "ravel": "{a}",
        "unflatten.int": ("{c}, 1, [2, -1]", "{o}, 1, [-1, 2]"),
        "unsqueeze": ("{a}, 0", "{a}, -1"),
        "squeeze": ("{v}.unsqueeze({d})", "{a}"),
        "squeeze.dim": ("{v}.unsqueeze(0), 0", "{v}, {d}"),
        "squeeze.dims": ("{v}.unsqueeze(0), [0]", "{v}, {D}"),
        "permute": ("{c}, [2, 0, 1]", "{o}, [0, 2, 3, 1]", "{u}, [4, 1, 0, 3, 2]"),
        "transpose.int swapaxes swapdims": "{m}, {d}, {e}",
        "t numpy_T": "{r}",
        "mT adjoint": "{m}",
        "movedim.int moveaxis.int": "{m}, {d}, {e}",
        "movedim.intlist moveaxis.intlist": "{c}, [0, 1], [2, 0]",
        "expand broadcast_to": (
            "{a}.unsqueeze(0), [3, *{a}.shape]",
            "{v}.amax({d}, True), {S}",
        ),
        "expand_as": "{v}.amax({d}, True), {v}",
        "broadcast_tensors": "[{v}.amax({d}, True), {v}]",
        "meshgrid": "[{r}[0], {r}[:, 0]]",
        "meshgrid.indexing": (
            "[{r}[0], {r}[:, 0]], indexing='xy'",
            "[{r}[0], {r}[:, 0]], indexing='ij'",
        ),
        "slice.Tensor": (
            "{v}, {d}, 1",
            "{v}, {d}, 0, -1",
            "{v}, {d}, 0, 9223372036854775807, 2",
            "{v}, {d}, -3",
            "{v}, {d}, 1, {N} // 2 + 1",
        ),
        "select.int": ("{v}, {d}, 0", "{v}, {d}, -1"),
        "narrow": ("{v}, {d}, 0, 1", "{v}, {d}, 1, {N} - 1"),
        "split.Tensor": "{v}, ({N} + 1) // 2, {d}",
        "split.sizes split_with_sizes": ("{c}, [1, C - 1], 1", "{c}, [C - 2, 2], 1"),
        "chunk": ("{c}, 2, 1", "{v}, 1, {d}"),
        "unbind.int": ("{c}, 1", "{o}, 1"),
        "tensor_split.sections": ("{c}, 3, 1", "{v}, 1, {d}"),
        # Of windows that overlap, eager's own writes through one into others.
        "slice_scatter": (
            "{v}.contiguous(), {like}, {d}",
            "{v}.contiguous(), {v}.narrow({d}, 0, 1), {d}, 0, 1",
        ),
        "select_scatter": "{v}.contiguous(), {v}.select({d}, 0), {d}, -1",
        "cat concat concatenate": (
            "[{v}, {like}], {d}",
            "[{v}, {v}.narrow({d}, 0, 1), {like}], {d}",
        ),
        "stack": ("[{a}, {like}], 0", "[{a}, {like}], -1"),
        "hstack vstack": "[{a}, {like}]",
        "repeat tile": ("{r}, [2, 1]", "{c}, [1, 1, 3]", "{v}, [2] * {v}.dim()"),
        "repeat_interleave.self_int": ("{v}, 2, {d}", "{v}, 3"),
        "roll": ("{v}, [1], [{d}]", "{v}, [-2], [{d}]", "{v}, [3]"),
        "flip": ("{v}, [{d}]", "{v}, {D}"),
        "rot90": ("{m}, 1, [0, 1]", "{m}, 2, [1, 0]", "{m}, 3, [0, -1]"),
        "tril triu": ("{m}", "{m}, 1", "{m}, -1"),
        "pad": (
            "{v}, [1, 2]",
            "{v}, [1, 0], 'constant', 0.5",
            "{c}, [1, 1], 'reflect'",
            "{o}, [1, 0, 0, 1], 'replicate'",
            "{c}, [1, 1], 'circular'",
        ),
        "constant_pad_nd": ("{v}, [1, 2], 0.5", "{v}, [-1, 1]"),
        "contiguous clone alias lift_fresh_copy": "{a}",
        "detach": "{a}",
        "detach_": "{a}.clone()",
        "dropout": "{x}, 0.3, False",
        "feature_dropout": "{c}, 0.3, False",
        "alpha_dropout": "{x}, 0.3, False",
        "native_dropout": "{x}, 0.3, False",
        "to.dtype": ("{i}, {f}", "{b}, {t}", "{x}, torch.float64"),
        "_to_copy": ("{i}, dtype={f}", "{b}, dtype={t}"),
        "to.device": "{i}, 'cpu', {f}",
        "to.dtype_layout": "{i}, dtype={f}",
        "to.other type_as": ("{i}, {x}", "{b}, {i}"),
        "prims.convert_element_type.default": ("{i}, {f}", "{b}, {t}"),
        "zeros_like ones_like": ("{a}", "{a}, dtype={t}"),
        "full_like": ("{a}, 2", "{x}, 0.5"),
        "fill.Scalar": "{n}, 3",
        "fill.Tensor": "{n}, {plain}",
        "zero": "{a}",
        "copy": "{n}, {y}",
        "new_zeros new_ones": ("{a}, [2, 3]", "{v}, [{N}]"),
        "new_full": "{v}, [{N}, 2], 3",
        "zeros ones": ("[{N_of}, 2]", "[{N_of}], dtype={t}"),
        "full": ("[{N_of}, 2], 1.5", "[2, {N_of}], 3, dtype={t}"),
        "scalar_tensor": ("0.5", "{N_of}"),
        "arange": ("{N_of}", "{N_of}, dtype=torch.float32"),
        "arange.start": "1, {N_of} + 1",
        "arange.start_step": ("0, {N_of}, 2", "{N_of}, 0, -1"),
        "eye": "{N_of}",
        "eye.m": "{N_of}, 3",
        "one_hot": "{l}, 4",
        "index_select": "{v}, {d}, {index}",
        "gather": "{v}, {d}, torch.zeros_like({v}, dtype=torch.int64)",
        "take": "{v}, {index_flat}",
        "take_along_dim": "{v}, torch.zeros_like({v}, dtype=torch.int64), {d}",
        "index.Tensor": (
            "{r}, [{index0}]",
            "{c}, [None, torch.arange(2)]",
            "{r}, [None, {index1}]",
        ),
        "index_put _unsafe_index_put": (
            "{c}, [torch.arange({c}.shape[0]), torch.tensor(1)], {c}[:, 0]",
        ),
        "scatter.value": "{v}, {d}, torch.zeros_like({v}, dtype=torch.int64), 0.5",
        "scatter.src": (
            "{c}, 1, torch.arange(C).flip(0)[None, :, None].expand({c}.shape), {like}",
        ),
        "diagonal": ("{m}", "{m}, 1, -2, -1", "{c}, 0, 0, 2"),
        "diagonal_scatter": (
            "{m}.contiguous(), {m}.diagonal()",
            "{m}.contiguous(), {m}.diagonal(1, -2, -1), 1, -2, -1",
        ),
        "index_fill.int_Scalar": "{v}, {d}, {index}, 0.5",
        "index_fill.int_Tensor": "{v}, {d}, {index}, {plain}.reshape([])",
        "index_reduce": "{v}, {d}, torch.arange({N}) // 2, {like}, 'amax'",
        "scatter_reduce.two": (
            "{v}, {d}, {v}.long() * 0, {like}, 'amax'",
            "{v}, {d}, {v}.long() * 0, {like}, 'amin', include_self=False",
        ),
        "put": "{v}, torch.arange({v}.numel()).flip(0), {like}",
        "masked_scatter": "{v}, {mask}, {like}",
        "unfold": ("{c}, 1, 2, 1", "{c}, 2, 2, 1", "{v}, {d}, 1, 1"),
        "pixel_shuffle": "{o}, 2",
        # Of no elements, eager gives the shape of its operand.
        "pixel_unshuffle": "F.pad({o}, [1] * 8).repeat(1, 1, 2, 2), 2",
        "embedding": "{W:4,6}, {l}",
    },
    keep=True,
)

# What they take is exact, what they give is not.
ROUNDED = _entries(
    {
        "nll_loss nll_loss_nd": "{r}.log_softmax(1), {r}.argmax(1)",
        "nll_loss2d": "{o}.log_softmax(1), {o}.argmax(1)",
        "cross_entropy_loss": (
            "{r}, {r}.flip(0).argmax(1)",
            "{r}, {r}.argmin(1), None, 0, -100, 0.1",
            "{r}, {r}.softmax(1)",
        ),
        "gather": "{v}, {d}, {v}.argmax({d}, True)",
        "embedding_dense_backward": "{c}, ({c}[:, :, 0] > 0).to(torch.int64), 4, -1, 0",
        "max_pool2d_with_indices_backward": (
            "{o}[:, :, :-1, :-1], {o}, [2, 2], [1, 1], [0, 0], [1, 1], False, "
            "aten.max_pool2d_with_indices({o}, [2, 2], [1, 1])[1]"
        ),
    },
    step=True,
)

OTHER = _entries({"linspace": "0.0, 1.0, 7", "_int_mm": "{byte}, {byte}.t()"})

RESIZES = "upsample_.*(linear|cubic)"

_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")

# Through complex numbers and back to real ones.
SPECTRA = [
    Entry("fft", text, text=True)
    for text in (
        "torch.fft.rfft({v}, dim={d}).abs()",
        "torch.fft.fft({v}, dim={d}, norm='ortho').real",
        "torch.fft.ifft(torch.complex({v}, {v}.sin()), dim={d}).imag",
        "torch.fft.irfft({v}, n=6, dim={d})",
        "torch.fft.hfft({v}, n=7, dim={d})",
        "torch.fft.fft2({m}).real",
    )
]

# Python code that is no overload of its own: views, slices, branches on sizes.
PYTHON = [
    Entry("branch", text, keep=True, text=True)
    for text in (
        "({v} if {N} == 1 else -{v})",
        "({v}.abs() if {N} > 4 else {v})",
        "({v} if {N} % 2 == 0 else {v}.flip(0))",
        "({v}.relu() if {v}.shape[-1] >= {v}.shape[0] else {v})",
    )
] + [
    Entry("view", text, keep=True, text=True)
    for text in (
        "{v}[1:]",
        "{v}[..., ::2]",
        "{v}[:-1]",
        "{v}[None]",
        "{m}[:, -1:]",
        "{m}[..., None, :]",
        "{v}.contiguous().view(-1)[: {N}]",
        "{c}.transpose(1, 2).reshape({c}.shape[0], -1)",
        "{v}.permute(*reversed(range({v}.dim())))",
    )
]

# Statements that change a value, and with it all that are views of it.
CHANGES = (
    "{v}.add_({plain})",
    "{v}[0] = 0.5",
    "{v}[..., 0].mul_(2)",
    "{v}.narrow({d}, 0, 1).zero_()",
    "{v}[1:] = {v}[:-1].clone()",
    "{m}.mT.neg_()",
    "{v}.flatten()[:2].fill_(1)",
    "{v}.masked_fill_({mask}, 0.25)",
    "{v}.copy_({y})",
    "{v}.relu_()",
    "{m}.diagonal().add_(1)",
)

# Overloads that no random model calls, and why.
# Ops of the random ones that are fuzzed where they drop nothing.
_NOT_ALWAYS_RANDOM = {
    f"aten.{name}.default"
    for name in ("dropout", "native_dropout", "feature_dropout", "alpha_dropout")
}

_FFTS = [f"fft_{kind}{form}" for kind in _KINDS for form in ("", "2", "n")]
LEFT_OUT = {
    **{
        str(overload): "random numbers of its own; test_random_ops.py has it"
        for overload in RANDOM
        if str(overload) not in _NOT_ALWAYS_RANDOM
    },
    **{
        str(overload): "tests/frontend/test_series_ops.py has it"
        for overload in (*SERIES, *STRIDED)
    },
    **{str(overload): "tests/frontend/test_bins_ops.py has it" for overload in BINS},
    **{
        f"pliant.{name}.default": "tests/frontend/test_packed_sequences.py has it"
        for name in ("recurrent", "lengths")
    },
    **{
        f"aten.{name}": "a size of data; tests/frontend/test_data_ops.py has it"
        for name in (
            *("_unique2.default", "unique_consecutive.default", "unique_dim.default"),
            *("bincount.default", "repeat_interleave.Tensor"),
            *(
                "repeat_interleave.self_Tensor",
                *("tensor_split.tensor_indices_or_sections", "narrow.Tensor"),
            ),
        )
    },
    **{
        f"aten.{name}.default": "tests/frontend/test_series_ops.py has it"
        for name in (
            *("fractional_max_pool2d", "fractional_max_pool3d", "bilinear"),
            *("avg_pool2d_backward", "_adaptive_avg_pool2d_backward"),
            *("_adaptive_avg_pool3d", "embedding_renorm"),
        )
    },
    **{
        f"aten.{name}": "not unique, or not of every matrix; test_linalg_ops.py has it"
        for name in (
            *("cholesky.default", "linalg_cholesky.default"),
            *("linalg_cholesky_ex.default", "cholesky_solve.default"),
            *("cholesky_inverse.default", "linalg_solve_triangular.default"),
            *("triangular_solve.default", "linalg_lu_factor_ex.default"),
            *("linalg_lu_factor.default", "linalg_lu.default", "lu_unpack.default"),
            *("linalg_lu_solve.default", "_linalg_solve_ex.default"),
            *("linalg_solve_ex.default", "linalg_solve.default"),
            *("linalg_inv_ex.default", "linalg_inv.default", "inverse.default"),
            *("_linalg_det.default", "_linalg_slogdet.default", "geqrf.default"),
            *("linalg_householder_product.default", "orgqr.default", "ormqr.default"),
            *("linalg_qr.default", "_linalg_svd.default", "_linalg_eigh.default"),
            *("linalg_pinv.atol_rtol_tensor", "linalg_pinv.atol_rtol_float"),
            *("linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.default"),
            *("linalg_matrix_rank.atol_rtol_float", "linalg_matrix_rank.tol_tensor"),
            *("linalg_ldl_factor_ex.default", "linalg_ldl_factor.default"),
            *("linalg_ldl_solve.default", "linalg_matrix_exp.default"),
            "_linalg_check_errors.default",
        )
    },
    **{
        f"aten.{name}.default": "gives or takes complex numbers; see SPECTRA"
        for name in (*_FFTS, "_fft_c2c", "_fft_r2c", "_fft_c2r", "stft", "istft")
    },
    "aten.stft.center": "gives complex numbers; test_fft_ops.py has it",
    "aten.fft_fftfreq.default": "takes no tensor; test_fft_ops.py has it",
    "aten.fft_rfftfreq.default": "takes no tensor; test_fft_ops.py has it",
    **{
        f"aten.{name}": "has weights of its own; tests/e2e/test_recurrent.py has it"
        for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for name in (f"{layer}.input", f"{layer}_cell.default")
    },
    "aten.item.default": "gives a size; tests/e2e/test_data_sizes.py has it",
    "aten._local_scalar_dense.default": "gives a size, as item does",
    "aten.multilabel_margin_loss_forward.default": (
        "targets end at -1; tests/frontend/test_bins_ops.py has it"
    ),
    "aten._grouped_mm.default": "takes bf16 alone; tests/frontend has it",
    "aten.special_bessel_j0.default": "eager's f64 is off by 1e-6",
    "aten.special_bessel_j1.default": "eager's f64 is off by 1e-6",
    "aten.special_bessel_y0.default": "eager's f64 is off by 1e-6",
    "aten.special_bessel_y1.default": "eager's f64 is off by 1e-6",
    "aten._euclidean_dist.default": "eager's own is a product, which cancels",
    "aten._embedding_bag.default": "gives what only eager's backward reads",
    "aten._embedding_bag_forward_only.default": "gives what only eager's own reads",
    "aten.lift_fresh.default": "torch.export makes a copy of it, which eager is not",
    "aten._assert_async.default": "gives nothing to compare; eager raises",
    "aten._assert_async.msg": "gives nothing to compare; eager raises",
    "aten._assert_scalar.default": "gives nothing to compare; torch.export makes it",
    "aten._assert_tensor_metadata.default": "gives nothing; torch.export makes it",
    "aten.sym_constrain_range.default": "gives nothing; torch.export makes it",
    "aten.sym_constrain_range_for_size.default": "gives nothing; export makes it",
    "aten.empty.memory_format": "its values are undefined",
    "aten.empty_like.default": "its values are undefined",
    "aten.new_empty.default": "its values are undefined",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (
        "needs a forward result of eager's own; tests/training has it"
    ),
}

ENTRIES = [*SMOOTH, *STEP, *KEEP, *ROUNDED, *OTHER, *SPECTRA, *PYTHON]
