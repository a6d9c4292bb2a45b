"""The table of supported aten overloads: overload -> translation.

One dict per family of ops; each translation is called with the context and the
operands in the order of the aten schema. An in-place overload (`add_`) is translated
by its functional twin (`add`), so it has no entry. What is not in the table torch may
decompose (`decompositions`), where the graph is one of torch.compile's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from pliant.frontend.torch_ops_activation import ACTIVATION
from pliant.frontend.torch_ops_airy import AIRY
from pliant.frontend.torch_ops_backward import BACKWARD
from pliant.frontend.torch_ops_bins import BINS
from pliant.frontend.torch_ops_complex import OF_COMPLEX, lifted
from pliant.frontend.torch_ops_complex_linalg import COMPLEX_LINALG
from pliant.frontend.torch_ops_complex_math import COMPLEX_MATH
from pliant.frontend.torch_ops_data import DATA
from pliant.frontend.torch_ops_distance import DISTANCE
from pliant.frontend.torch_ops_fft import FFT
from pliant.frontend.torch_ops_linalg import LINALG
from pliant.frontend.torch_ops_loss import LOSS
from pliant.frontend.torch_ops_math import MATH, Translate
from pliant.frontend.torch_ops_nn import NN
from pliant.frontend.torch_ops_norm import NORM
from pliant.frontend.torch_ops_pick import PICK
from pliant.frontend.torch_ops_pool import POOL
from pliant.frontend.torch_ops_random import RANDOM
from pliant.frontend.torch_ops_recurrent import RECURRENT
from pliant.frontend.torch_ops_reduce import REDUCE
from pliant.frontend.torch_ops_resize import RESIZE
from pliant.frontend.torch_ops_sample import SAMPLE
from pliant.frontend.torch_ops_scatter import SCATTER
from pliant.frontend.torch_ops_series import SERIES
from pliant.frontend.torch_ops_shape import SHAPE
from pliant.frontend.torch_ops_sort import SORT, grouped_mm
from pliant.frontend.torch_ops_special import SPECIAL
from pliant.frontend.torch_ops_spectral import EIGENVALUES, SPECTRAL
from pliant.frontend.torch_ops_strided import STRIDED
from pliant.frontend.torch_ops_train import TRAIN
from pliant.frontend.torch_ops_window import WINDOW

aten = torch.ops.aten

TABLE: dict[Any, Translate] = {
    **MATH,
    **ACTIVATION,
    **REDUCE,
    **LOSS,
    **SHAPE,
    **WINDOW,
    **PICK,
    **SORT,
    **BINS,
    **NN,
    **RESIZE,
    **NORM,
    **RECURRENT,
    **TRAIN,
    **BACKWARD,
    **SCATTER,
    **DATA,
    **SPECIAL,
    **AIRY,
    **DISTANCE,
    **SAMPLE,
    **RANDOM,
    **STRIDED,
    **POOL,
    **SERIES,
    **LINALG,
    **SPECTRAL,
    **FFT,
}

# Ops that complex tensors take part in, and what they do then.
COMPLEX: dict[Any, Translate] = {
    **OF_COMPLEX,
    **COMPLEX_MATH,
    **COMPLEX_LINALG,
    **FFT,
    **EIGENVALUES,
}

# Ops that other packages define: by name, as they exist once the package is loaded.
BY_NAME: dict[str, Translate] = {
    "transformers.grouped_mm_fallback.default": grouped_mm,
}


# Functions of floats that torch has no derivative of: a gradient stops at them.
_FAMILIES = "bessel|chebyshev|hermite|laguerre|legendre"
_FLAT = re.compile(rf"aten::(special_airy_ai|special_\w*({_FAMILIES})_\w+|histc)")


def translation(target: Any) -> Translate | None:
    found = TABLE.get(target)
    if found is None:
        return BY_NAME.get(str(target))
    return _constant(found) if without_derivative(target) else found


def without_derivative(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and _FLAT.fullmatch(schema.name) is not None


def _constant(translate: Translate) -> Translate:
    return lambda cx, *args, **kw: cx.detached(translate(cx, *args, **kw))


def complex_translation(target: Any) -> Translate | None:
    """The same where operands or results are complex."""
    found = COMPLEX.get(target)
    return lifted(target, TABLE.get(target)) if found is None else found


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of the ops that have no translation."""
    more = [
        aten.native_group_norm.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
    ]
    every = {**core_aten_decompositions(), **get_decompositions(more)}
    return {op: rule for op, rule in every.items() if op not in TABLE}
