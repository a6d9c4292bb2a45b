"""Compiled models as modules that the interpreter runs."""

from __future__ import annotations

import pliant
from pliant.ir.graph import Constant, Module


def interpretable(model: pliant.CompiledModel) -> Module:
    """The lowered module with its constants, which the model keeps beside it."""
    program = model.program
    arrays = zip(program.code.host.constants, model._weights.arrays, strict=True)
    held = dict(arrays)
    ops = [op for op in program.lowered.main.ops if op.name == "constant"]
    names = [(op.str_attr("name"), op.result.type) for op in ops]
    constants = {n: Constant(n, kind, held[n]) for n, kind in names}
    return program.lowered.replace(constants=constants)
