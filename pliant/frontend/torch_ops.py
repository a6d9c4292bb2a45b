"""The table of supported aten overloads: overload -> translation.

One dict per family of ops; each translation is called with the context and the
operands in the order of the aten schema. An in-place overload (`add_`) is translated
by its functional twin (`add`), so it has no entry.
"""

from __future__ import annotations

from typing import Any

from pliant.frontend.torch_ops_backward import BACKWARD
from pliant.frontend.torch_ops_loss import LOSS
from pliant.frontend.torch_ops_math import MATH, Translate
from pliant.frontend.torch_ops_nn import NN
from pliant.frontend.torch_ops_pick import PICK
from pliant.frontend.torch_ops_reduce import REDUCE
from pliant.frontend.torch_ops_shape import SHAPE
from pliant.frontend.torch_ops_train import TRAIN

TABLE: dict[Any, Translate] = {
    **MATH,
    **REDUCE,
    **LOSS,
    **SHAPE,
    **PICK,
    **NN,
    **TRAIN,
    **BACKWARD,
}
