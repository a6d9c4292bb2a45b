"""Attention's gradients: strided operands in, one kernel out."""

from __future__ import annotations

from pliant.ir.graph import Graph
from pliant.kernels.attention_backward import attention_backward
from pliant.kernels.attention_spec import AttentionBackward
from pliant.lower.attend import attention_of, result_strides, step_of
from pliant.lower.contract import Operands
from pliant.lower.step import KernelStep, NumberCheck
from pliant.machine.target import Target
from pliant.sym import Facts


def lower_attention_backward(
    region: Graph,
    name: str,
    operands: Operands,
    facts: Facts,
    target: Target,
    number_check: NumberCheck,
) -> list[KernelStep]:
    (root,) = (op for op in region.ops if op.name == "attention_backward")
    grad, out, lse = root.operands[:3]
    views = operands.views
    lowered = attention_of(root, operands, views[out].strides, facts, number_check)
    dq, dk, dv = (result_strides(root, value) for value in root.results)
    spec = AttentionBackward(
        lowered.spec, views[grad].strides, views[lse].strides, dq, dk, dv
    )
    kernel = attention_backward(name, spec, target)
    return [step_of(kernel, (grad, out, lse, *lowered.operands), root.results)]
