"""What the pipeline makes of a model: all that is known of it, by who needs it.

Interface   how the sizes of a call become symbols, and what must hold of them
Footprint   which memory the calls need and when: planning reads it
Code        the host flow and the machine code: running reads it
Program     these, and the module they are made from, fused and lowered: describing
Rest        what runs behind a program that finds sizes which data decide
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pliant.backend.jit import CompiledCode
from pliant.codegen.host import BIND, RUN, SIZES
from pliant.codegen.host_plan import HostPlan
from pliant.interface import Interface
from pliant.ir.graph import Module
from pliant.measure.rates import Rates
from pliant.memory.liveness import Memory
from pliant.memory.remat import Steps
from pliant.memory.versions import Layout
from pliant.sym.rules import Found


@dataclass(frozen=True, slots=True)
class Footprint:
    """The buffers and steps of the lowered graphs, as the planner takes them."""

    layout: Layout
    steps: Steps
    rates: Rates | None  # to weigh rematerialisation by; None: there is none

    @property
    def memory(self) -> Memory:
        """That of `main`."""
        return self.layout.versions[0][1]


HOST_FUNCTIONS = (RUN, SIZES, BIND)


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
    order of `code.host.constants`. A program whose data decide sizes has several parts:
    its own, and the rest.
    """

    fused: Module
    lowered: Module
    interface: Interface
    footprint: Footprint
    code: Code
    seconds: Mapping[str, float]  # by stage
    rest: NextProgram | None = None
    texts: tuple[tuple[str, str], ...] = ()  # the module after each stage, if kept

    def parts(self) -> Iterator[Program]:
        """All parts, in the order in which they run."""
        yield self
        if self.rest is not None:
            yield from self.rest.program.parts()

    @property
    def found(self) -> tuple[Found, ...]:
        """The sizes that data decide, in the order in which they are found."""
        if self.rest is None:
            return ()
        return (*self.rest.found, *self.rest.program.found)


@dataclass(frozen=True, slots=True)
class NextProgram:
    """The program that runs next, on the inputs of one and on its results.

    The first results are the sizes `found`. `bound` plans the most memory that it takes
    at any such sizes (`codegen/host_bound.py`).
    """

    found: tuple[Found, ...]
    program: Program
    bound: Code
