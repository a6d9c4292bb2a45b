"""The table of ONNX ops: (op, operator set that introduced this form) -> rule.

The tables are in one file for each area. An op that changed has a row for each form,
and a node gets the newest that is not newer than it. Ops of other domains are written
as "domain::Op".
"""

from __future__ import annotations

from pliant.frontend.onnx_context import Rule
from pliant.frontend.onnx_ops_activation import ACTIVATIONS
from pliant.frontend.onnx_ops_attention import ATTENTION
from pliant.frontend.onnx_ops_conv import CONVOLUTIONS
from pliant.frontend.onnx_ops_create import CREATE
from pliant.frontend.onnx_ops_data import DATA
from pliant.frontend.onnx_ops_flow import FLOW
from pliant.frontend.onnx_ops_image import IMAGES
from pliant.frontend.onnx_ops_index import INDEX
from pliant.frontend.onnx_ops_linalg import LINALG
from pliant.frontend.onnx_ops_math import MATH
from pliant.frontend.onnx_ops_microsoft import MICROSOFT
from pliant.frontend.onnx_ops_move import MOVE
from pliant.frontend.onnx_ops_norm import NORMS
from pliant.frontend.onnx_ops_pool import POOLS
from pliant.frontend.onnx_ops_quant import QUANTIZED
from pliant.frontend.onnx_ops_quant_microsoft import QUANTIZED_MICROSOFT
from pliant.frontend.onnx_ops_recurrent import RECURRENT
from pliant.frontend.onnx_ops_recurrent_quant import QUANTIZED_LAYERS
from pliant.frontend.onnx_ops_reduce import REDUCE
from pliant.frontend.onnx_ops_sequence import SEQUENCES
from pliant.frontend.onnx_ops_signal import SIGNAL
from pliant.frontend.onnx_ops_train import TRAINING

TABLE: dict[tuple[str, int], Rule] = {
    **MATH,
    **ACTIVATIONS,
    **REDUCE,
    **MOVE,
    **INDEX,
    **CREATE,
    **LINALG,
    **CONVOLUTIONS,
    **POOLS,
    **NORMS,
    **IMAGES,
    **DATA,
    **FLOW,
    **RECURRENT,
    **QUANTIZED_LAYERS,
    **QUANTIZED,
    **QUANTIZED_MICROSOFT,
    **ATTENTION,
    **SEQUENCES,
    **SIGNAL,
    **TRAINING,
    **MICROSOFT,
}

_FORMS: dict[str, list[tuple[int, Rule]]] = {}
for (_name, _since), _rule in TABLE.items():
    _FORMS.setdefault(_name, []).append((_since, _rule))


def rule_of(domain: str, op: str, version: int) -> Rule | None:
    """The rule for a form of an op, if there is one."""
    name = f"{domain}::{op}" if domain else op
    forms = [form for form in _FORMS.get(name, ()) if form[0] <= version]
    return max(forms, key=lambda form: form[0])[1] if forms else None
