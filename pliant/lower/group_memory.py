"""The memory of a map or row kernel: its inputs, results, and scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pliant.ir.graph import Graph, Value
from pliant.ir.loop_walk import accesses, size_symbols
from pliant.ir.loops import Buffer, LoopFunc, Role, Stmt, buffer
from pliant.ir.packed import PackedWeight
from pliant.ir.types import TensorType
from pliant.lower.step import Argument, KernelStep, Scratch


class GroupMemory:
    """The buffers that all variants of a group share."""

    def __init__(self, region: Graph, packed: Mapping[Value, PackedWeight]) -> None:
        self.region = region
        self.packed = [packed.get(v) for v in region.params]
        self.inputs = [
            buffer(
                f"in_{k}",
                v.dtype,
                (v.type.numel,) if weight is None else weight.shape(v.shape),
                Role.IN,
            )
            for k, (v, weight) in enumerate(
                zip(region.params, self.packed, strict=True)
            )
        ]
        self.outputs = [
            buffer(f"out_{k}", v.dtype, (v.type.numel,), Role.OUT)
            for k, v in enumerate(dict.fromkeys(region.results))
        ]
        self.scratch: dict[str, Buffer] = {}

    def work(self, b: Buffer) -> Buffer:
        """Scratch for each worker; variants that need the same buffer share it."""
        while self.scratch.get(b.name, b) != b:
            b = replace(b, name=f"{b.name}_")
        self.scratch[b.name] = b
        return b

    def step(self, name: str, body: Stmt) -> KernelStep:
        used = {b.name for b, _ in accesses(body)}
        owner: dict[str, Argument] = {}
        live: list[Buffer] = []
        for v, weight, b in zip(
            self.region.params, self.packed, self.inputs, strict=True
        ):
            if b.name in used:
                live.append(b)
                owner[b.name] = v if weight is None else weight.packed
        for v, b in zip(dict.fromkeys(self.region.results), self.outputs, strict=True):
            live.append(b)
            owner[b.name] = v
        for b in self.scratch.values():
            if b.name in used:
                live.append(b)
                owner[b.name] = Scratch(TensorType(b.dtype, b.shape[1:]))
        func = LoopFunc(name, size_symbols(body, live), tuple(live), body)
        return KernelStep(func, tuple(owner[b.name] for b in live))
