"""Attention's gradients: strided operands in, one kernel out."""

from __future__ import annotations

from pliant.kernels.attention_backward import attention_backward
from pliant.kernels.attention_spec import AttentionBackward
from pliant.lower.attend import attention_of, result_strides, step_of
from pliant.lower.step import Fusion, KernelStep


def lower_attention_backward(fusion: Fusion) -> list[KernelStep]:
    root, views = fusion.root("attention_backward"), fusion.views
    grad, out, lse = root.operands[:3]
    lowered = attention_of(root, views[out].strides, fusion)
    dq, dk, dv = (result_strides(root, value) for value in root.results)
    spec = AttentionBackward(
        lowered.spec, views[grad].strides, views[lse].strides, dq, dk, dv
    )
    kernel = attention_backward(fusion.name, spec, fusion.target)
    return [step_of(kernel, (grad, out, lse, *lowered.operands), root.results)]
