"""What the pipeline makes of a model: all that is known of it, by who needs it.

Interface   how the sizes of a call become symbols, and what must hold of them
Bound       which results have sizes that data decide, and where those are found
Footprint   which memory the calls need and when: planning reads it
Code        the host flow and the machine code: running reads it
Program     these, and the module they are made from, fused and lowered: describing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pliant.backend.jit import CompiledCode
from pliant.codegen.host_plan import HostPlan
from pliant.interface import Interface
from pliant.ir.graph import Module
from pliant.measure.rates import Rates
from pliant.memory.liveness import Memory
from pliant.memory.remat import Steps
from pliant.memory.versions import Layout
from pliant.passes.bind import Bound


@dataclass(frozen=True, slots=True)
class Footprint:
    """The buffers and steps of the lowered graphs, as the planner takes them."""

    layout: Layout
    steps: Steps
    own: int  # the first so many steps are those of `main`
    rates: Rates | None  # to weigh rematerialisation by; None: there is none

    @property
    def memory(self) -> Memory:
        """That of `main`."""
        return self.layout.versions[0][1]


@dataclass(frozen=True, slots=True)
class Code:
    """The host flow, and machine code for it and for the kernels."""

    host: HostPlan
    machine: CompiledCode
    kernels_built: int  # by LLVM
    kernels_cached: int  # found in memory or on disk


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled model, before the runtime has it.

    Its modules hold no constants: whoever runs the program holds the weights, in the
    order of `code.host.constants`.
    """

    fused: Module
    lowered: Module
    interface: Interface
    results: Bound
    footprint: Footprint
    code: Code
    seconds: Mapping[str, float]  # by stage
