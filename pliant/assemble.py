"""From lowered modules to programs: what is planned, and the machine code.

A model whose data decide sizes has several parts (`passes/split.py`). The inputs of a
part are those of the one before, then its results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter

from pliant import knobs
from pliant.backend.build import build
from pliant.codegen.host_bound import bound_host
from pliant.codegen.host_plan import HostPlan, plan_host
from pliant.errors import PliantError, UnsupportedOp, UnsupportedOpError
from pliant.interface import interface_of
from pliant.ir.graph import Constant, Module, Names
from pliant.ir.loops import LoopFunc
from pliant.lower.library_linalg import NEED_LAPACK
from pliant.machine.target import Target
from pliant.measure.rates import rates
from pliant.memory.versions import all_steps, layout
from pliant.options import Instruments, Options
from pliant.passes.split import Part
from pliant.program import Code, Footprint, NextProgram, Program
from pliant.progress import step
from pliant.runtime.binding import load
from pliant.runtime.binding import symbols as runtime_symbols
from pliant.runtime.lapack import use_lapack
from pliant.sym import sym
from pliant.sym.rules import InputDims


@dataclass(slots=True)
class ProgramMaker:
    """Makes the programs of a model's parts, in their order.

    `inputs` are those of the part that comes next, and `numbers` which of them each
    parameter of its `main` is.
    """

    target: Target
    options: Options
    instruments: Instruments
    seconds: dict[str, float]
    inputs: InputDims
    numbers: Mapping[str, int]
    parts: list[Part] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    weights: list[Constant] = field(default_factory=list)

    def add(self, part: Part, fused: Module, lowered: Module, suffix: str) -> Program:
        """The program of a part; `suffix` is for the names of files."""
        step("memory")
        started = perf_counter()
        held = layout(lowered)
        interface = interface_of(lowered.main, self.inputs)
        weigh = rates(self.target) if self.options.remat else None
        self._time("memory", perf_counter() - started)

        started = perf_counter()
        host = plan_host(
            lowered,
            held,
            interface.solution,
            interface.guards,
            self.inputs,
            {v: self.numbers[v.name] for v in lowered.main.params},
            weigh=True,
            profile=self.instruments.profile,
        )
        stepped = all_steps(lowered, held, host.sequences)
        symbols = runtime_symbols() | library_symbols(lowered)
        self._time("codegen", perf_counter() - started)
        step(f"machine code of {len(lowered.loops)} kernels")
        code = self._code(lowered.loops, host, symbols)
        folder = knobs.DUMP.get()
        if folder is not None:
            (folder / f"llvm{suffix}.ll").write_text(code.machine.llvm_ir())
            (folder / f"code{suffix}.s").write_text(code.machine.assembly())
        # A compiled model keeps the facts, and drops the memoized proofs from them.
        interface.facts.forget()
        program = Program(
            fused.replace(constants={}),
            lowered.replace(constants={}),
            interface,
            Footprint(held, stepped, weigh),
            code,
            self.seconds,
        )
        self.parts.append(part)
        self.programs.append(program)
        self.weights += (lowered.constants[name] for name in host.constants)
        self._follow(part)
        return program

    def _follow(self, part: Part) -> None:
        """The results of a part are inputs of the next."""
        names = Names(name for name, _ in self.inputs)
        sizes = [(names.fresh(s.name), (sym(s.name),)) for s in part.finds]
        handed = part.graph.results[len(sizes) :]
        start = len(self.inputs) + len(sizes)
        more = {value.name: start + k for k, value in enumerate(handed)}
        self.numbers = {**self.numbers, **more}
        values = [(names.fresh(value.name), value.shape) for value in handed]
        self.inputs = (*self.inputs, *sizes, *values)

    def joined(self) -> tuple[Program, tuple[Constant, ...]]:
        """The first part's program with the others behind it, and all their weights."""
        program = self.programs[-1]
        for number in reversed(range(len(self.programs) - 1)):
            rest = NextProgram(
                self.parts[number].finds, program, self._bound(number + 1)
            )
            program = replace(self.programs[number], rest=rest)
        return program, tuple(self.weights)

    def _bound(self, number: int) -> Code:
        """What plans the most that a part takes."""
        program, first = self.programs[number], self.programs[0].code.host.symbols
        found = [size for part in self.parts[:number] for size in part.finds]
        facts = program.interface.facts
        host = bound_host(program.code.host, first, found, facts)
        facts.forget()
        if host is None:
            why = "no largest size is known of what depends on data"
            sizes = ", ".join(size.name for size in found)
            raise UnsupportedOpError([UnsupportedOp(sizes, why, "sizes of data")])
        return self._code({}, host, runtime_symbols())

    def _code(
        self, loops: Mapping[str, LoopFunc], host: HostPlan, symbols: Mapping[str, int]
    ) -> Code:
        made = build(loops, host, self.target, symbols, knobs.OPT_LEVEL.get())
        self._time("codegen", made.emit_seconds)
        self._time("compile", made.compile_seconds)
        return Code(host, made.code, made.kernels_built, made.kernels_cached)

    def _time(self, name: str, spent: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + spent


def library_symbols(module: Module) -> dict[str, int]:
    """Addresses of the library functions that a module calls.

    They are the package's own, or functions that this process has loaded.
    """
    own, process = load(), ctypes.CDLL(None)
    found: dict[str, int] = {}
    if any(library.symbol in NEED_LAPACK for library in module.libraries.values()):
        use_lapack()
    for library in module.libraries.values():
        function = getattr(own, library.symbol, None) or getattr(
            process, library.symbol, None
        )
        if function is None:
            raise PliantError(
                f"library function '{library.symbol}' is not loaded: load its shared "
                "library with ctypes.CDLL(path, ctypes.RTLD_GLOBAL) before compiling"
            )
        found[library.symbol] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return found
