"""What happens to a model, in order. Read this file first.

    import        torch.export's graph -> tensor ops with symbolic shapes  frontend/
    inline        calls of graph functions and match-casts go away         passes/
    joins         concats of slices of concats -> one concat of what is read
    canonicalize  fold identities, share equal values, drop dead ones
    decompose     norms, softmax, linear, ... -> primitive ops
    plain         canonicalize again
    attention     softmax between two products -> one op, masks inside it
    gradient      of a training step: back from the loss, then the parameters' update
    contractions  matmul, conv, attention in the form their kernels take
    canonicalize
    absorb        scales and shifts by constants go into the weights
    merge         products that share their left operand -> one product
    layout        convolutions keep channels last
    fold          what depends on weights alone is computed now
    recompute     of a training step: what the way back computes again, not keeps
    fuse          ops -> kernels, as far as proved constraints allow
    lower         each kernel -> a loop function; values -> buffers        lower/
    update        of a training step: new parameters are written over the old ones
    order         calls in the order in which little memory is live
    inplace       results written over inputs that die
    memory        which buffer lives when, and its size as a formula
    codegen       loop functions and the host flow -> LLVM IR              codegen/
    compile       LLVM IR -> machine code in this process                  backend/

The last two are left out for every function whose object code is known (cache.py).
Every stage takes and gives legal IR (ir/spec.py), is timed, and is written to
PLIANT_DUMP as NN_name.ir if that is set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from pliant import knobs
from pliant.backend.build import build
from pliant.backend.jit import CompiledCode
from pliant.codegen.host_plan import HostPlan, plan_host
from pliant.collection import paused_collection
from pliant.context import Context
from pliant.errors import (
    InternalError,
    OptionError,
    PliantError,
    ShapeError,
    UnsupportedOp,
    UnsupportedOpError,
)
from pliant.ir.graph import Constant, Graph, Module
from pliant.ir.guard_errors import check_example
from pliant.ir.ops import Trait, has_trait
from pliant.ir.spec import Stage, verify
from pliant.ir.text import print_module
from pliant.ir.work import call_work
from pliant.kernels.mix import ProductPlan
from pliant.lower.lower import lower
from pliant.machine.target import Target
from pliant.measure.rates import Rates, rates
from pliant.memory.inplace import inplace
from pliant.memory.liveness import Memory, liveness
from pliant.memory.order import Ordered, order
from pliant.memory.remat import CALLS, Steps, steps
from pliant.memory.update import update
from pliant.options import Options
from pliant.passes.absorb import absorb
from pliant.passes.attention import attention
from pliant.passes.canonicalize import canonicalize
from pliant.passes.contractions import contractions
from pliant.passes.decompose import decompose
from pliant.passes.fold import fold
from pliant.passes.fuse import fuse
from pliant.passes.inline import inline
from pliant.passes.joins import joins
from pliant.passes.layout import layout
from pliant.passes.merge import merge
from pliant.passes.recompute import forward_values, recompute
from pliant.passes.training import Training, training_passes
from pliant.runtime.binding import symbols as runtime_symbols
from pliant.sym import Expr, Facts, Guard, Solution, solve

# Names that kernels give variables of their own, or that a memory plan is asked with.
RESERVED = frozenset({"threads", "worker", "memory_limit"})

GraphPass = Callable[[Graph, Context], Graph]

# (name, pass over `main`, what is legal afterwards)
GRAPH_PASSES: tuple[tuple[str, GraphPass, Stage], ...] = (
    ("joins", joins, Stage.IMPORTED),
    ("canonicalize", canonicalize, Stage.IMPORTED),
    ("decompose", decompose, Stage.DECOMPOSED),
    ("plain", canonicalize, Stage.DECOMPOSED),
    ("attention", attention, Stage.DECOMPOSED),
    ("contractions", contractions, Stage.DECOMPOSED),
    ("simplify", canonicalize, Stage.DECOMPOSED),
    ("absorb", absorb, Stage.DECOMPOSED),
    ("merge", merge, Stage.DECOMPOSED),
    ("layout", layout, Stage.DECOMPOSED),
)


@dataclass(slots=True)
class Program:
    """A compiled model, before the runtime has it."""

    fused: Module  # without constants, as `lowered`
    lowered: Module
    regions: tuple[Graph, ...]  # what each call of `lowered` computes, in order
    products: dict[str, ProductPlan]  # how matrix products are cut, by function
    memory: Memory
    steps: Steps
    others: tuple[Ordered, ...]  # orders of the calls that are better at some sizes
    rates: Rates | None  # to weigh rematerialisation by; None: there is none
    host: HostPlan
    weights: tuple[Constant, ...]  # as `host` numbers them
    solution: Solution
    guards: tuple[Guard, ...]
    facts: Facts
    code: CompiledCode
    kernels_built: int  # by LLVM
    kernels_cached: int  # found in memory or on disk
    checks: tuple[str, ...]
    shapes: tuple[tuple[str, tuple[Expr, ...]], ...]
    seconds: dict[str, float]


@dataclass(slots=True)
class Driver:
    """Runs stages: times, verifies and dumps each."""

    cx: Context
    seconds: dict[str, float] = field(default_factory=dict)
    number: int = 0

    def time(self, name: str, started: float) -> None:
        spent = perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def check(self, name: str, module: Module, stage: Stage) -> None:
        folder = knobs.DUMP.get()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{self.number:02}_{name}.ir"
            path.write_text(print_module(module))
        self.number += 1
        if self.cx.options.verify:
            started = perf_counter()
            verify(module, stage)
            self.time("verify", started)

    def run(
        self, name: str, apply: Callable[[Module], Module], module: Module, stage: Stage
    ) -> Module:
        """One stage; an unexpected failure is a bug of ours and says where."""
        started = perf_counter()
        try:
            result = apply(module)
        except PliantError:
            raise
        except Exception as error:
            raise InternalError(name, f"{type(error).__name__}: {error}") from error
        self.time(name, started)
        self.check(name, result, stage)
        return result


@paused_collection()
def compile_module(
    module: Module,
    inputs: tuple[tuple[str, tuple[Expr, ...]], ...],
    numbers: dict[str, int],
    options: Options,
    target: Target,
    training: Training | None = None,
    example: Sequence[Sequence[int]] = (),
) -> Program:
    """From an imported module to machine code.

    `inputs` are the runtime's inputs (name, dims; an integer has itself as its one
    dim), `numbers` which of them each parameter of `main` is. With `training`, `main`
    gives a loss, and the code is that of a step. `example` are sizes of the inputs that
    must be among those the code is for.
    """
    reject_reserved(inputs)
    driver = Driver(Context(options, target))
    driver.check("import", module, Stage.IMPORTED)
    cx = driver.cx
    if example:
        _, solution, guards = guards_of(module.main, inputs, cx)
        check_example(inputs, solution, guards, example)
    module = driver.run("inline", inline, module, Stage.IMPORTED)
    passes = GRAPH_PASSES if training is None else training_passes(training)
    for name, apply, stage in passes:
        module = driver.run(name, over_main(apply, cx), module, stage)
    reject_unsupported(module.main)
    if options.fold:
        module = driver.run("fold", lambda m: fold(m, cx), module, Stage.DECOMPOSED)
    together: GraphPass = fuse
    if training is not None and options.recompute:
        again = over_main(recompute, cx)
        module = driver.run("recompute", again, module, Stage.DECOMPOSED)
        ahead = forward_values(module.main)
        together = lambda graph, cx: fuse(graph, cx, ahead)  # noqa: E731
    fused = driver.run("fuse", over_main(together, cx), module, Stage.FUSED)
    checks: list[str] = []
    regions: list[Graph] = []
    products: dict[str, ProductPlan] = {}
    lowered = driver.run(
        "lower",
        lambda m: lower(m, cx, checks, regions, products),
        fused,
        Stage.LOWERED,
    )

    if training is not None and training.updates:
        updates, changed = training.updates, training.changed
        lowered = driver.run(
            "update",
            lambda m: update(m, updates, cx, regions, changed),
            lowered,
            Stage.LOWERED,
        )
    others: list[Ordered] = []
    if options.order:
        lowered = driver.run(
            "order", lambda m: order(m, cx, regions, others), lowered, Stage.LOWERED
        )
    if options.inplace:
        lowered = driver.run(
            "inplace", lambda m: inplace(m, cx, others), lowered, Stage.LOWERED
        )

    started = perf_counter()
    memory = liveness(lowered.main)
    calls = [op for op in lowered.main.ops if op.name in CALLS]
    works = call_work(calls, regions)
    stepped = steps(lowered, memory, works)
    facts, solution, guards = guards_of(lowered.main, inputs, cx)
    if example:
        check_example(inputs, solution, guards, example)
    driver.time("memory", started)

    started = perf_counter()
    host = plan_host(
        lowered.main,
        memory,
        solution,
        guards,
        inputs,
        {v: numbers[v.name] for v in lowered.main.params},
        lowered.libraries,
        regions=regions,
        works=works,
        profile=options.profile,
    )
    symbols = runtime_symbols() | library_symbols(lowered)
    driver.time("codegen", started)
    made = build(lowered.loops, host, target, symbols, knobs.OPT_LEVEL.get())
    driver.seconds["codegen"] += made.emit_seconds
    driver.seconds["compile"] = made.compile_seconds
    code = made.code
    folder = knobs.DUMP.get()
    if folder is not None:
        (folder / "llvm.ll").write_text(code.llvm_ir())
        (folder / "code.s").write_text(code.assembly())
    facts.forget()  # a model keeps what is known, not what was worked out from it
    return Program(
        fused.replace(constants={}),
        lowered.replace(constants={}),
        tuple(regions),
        products,
        memory,
        stepped,
        tuple(others),
        rates(target) if options.remat else None,
        host,
        tuple(lowered.constants[name] for name in host.constants),
        solution,
        guards,
        facts,
        code,
        made.kernels_built,
        made.kernels_cached,
        tuple(checks),
        inputs,
        driver.seconds,
    )


def guards_of(
    graph: Graph, inputs: Sequence[tuple[str, tuple[Expr, ...]]], cx: Context
) -> tuple[Facts, Solution, tuple[Guard, ...]]:
    """What is known of the sizes, how they are read, and what a call must check."""
    facts = cx.facts(graph)
    try:
        solution = solve(inputs, facts)
    except ValueError as error:
        raise ShapeError(f"{error}: give the dims names of their own") from None
    # Facts are the graph's constraints, which know where they come from.
    seen = [guard for guard in solution.guards if guard.origin != "facts"]
    return facts, solution, distinct((*seen, *graph.constraints))


def is_reserved(name: str) -> bool:
    """Whether a dim cannot have this name."""
    return name.startswith("_") or name in RESERVED


def reject_reserved(inputs: Sequence[tuple[str, tuple[Expr, ...]]]) -> None:
    for name, dims in inputs:
        for symbol in (s for d in dims for s in d.symbols()):
            if is_reserved(symbol):
                raise OptionError(
                    f"dim name '{symbol}' of input '{name}' is reserved: choose another"
                )


def library_symbols(module: Module) -> dict[str, int]:
    """Addresses of the library functions that a module calls, from this process."""
    process = ctypes.CDLL(None)
    found: dict[str, int] = {}
    for library in module.libraries.values():
        function = getattr(process, library.symbol, None)
        if function is None:
            raise PliantError(
                f"library function '{library.symbol}' is not loaded: load its shared "
                "library with ctypes.CDLL(path, ctypes.RTLD_GLOBAL) before compiling"
            )
        found[library.symbol] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return found


def over_main(apply: GraphPass, cx: Context) -> Callable[[Module], Module]:
    return lambda module: module.with_main(apply(module.main, cx))


def simplified(module: Module) -> Module:
    """What a module computes in its simplest words, to compare it with another."""
    return module.with_main(canonicalize(module.main))


def reject_unsupported(graph: Graph) -> None:
    """Control flow and data-dependent sizes have no native host flow yet."""
    found = [
        UnsupportedOp(op.name, "no native code for it yet", op.loc or "unknown place")
        for op in graph.ops
        if has_trait(op, Trait.CONTROL)
    ]
    if found:
        raise UnsupportedOpError(found)


def distinct(guards: tuple[Guard, ...]) -> tuple[Guard, ...]:
    """Guards with different conditions; the first stated wins."""
    seen: dict[object, Guard] = {}
    for guard in guards:
        seen.setdefault(guard.cond, guard)
    return tuple(seen.values())
