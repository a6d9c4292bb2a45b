"""What happens to a model, in order. Read this file first.

    inline        calls of graph functions and match-casts go away
    bind          what has a size that data decide -> a region that is run with it
    joins         concats of slices of concats -> one concat of what is read
    canonicalize  fold identities, share equal values, drop dead ones
    smooth        training: composite ops in the form that has torch's derivative
    decompose     norms, softmax, linear, ... -> primitive ops
    plain         canonicalize again
    find          training: attention that is spelled out, where it has a gradient
    gradient      training: back from the loss, then the parameters' new values
    clean         training: canonicalize again

and then to each part of it, if its data decide sizes (passes/split.py):

    flow          control flow -> a loop function that calls its regions' kernels
    attention     softmax between two products -> one op, masks inside it
    contractions  matmul, conv, attention in the form their kernels take
    overwrite     inference: of a buffer that is changed in part, only that is written
    simplify      canonicalize again
    coded         inference: products with weights in few bits, decoded in their kernels
    absorb        scales and shifts by constants go into the weights
    merge         products that share their left operand -> one product
    layout        inference: convolutions keep channels last
    native        what has no native code is refused, all of it at once
    fold          what depends on weights alone is computed now
    quotients     divisions by the sum of a softmax -> multiplications
    rounding      half floats that jumps depend on are rounded wherever computed
    recompute     training: what the way back computes again instead of keeping
    fuse          ops -> kernels, as far as proved constraints allow
    chunk         versions of `main` that take less memory, in chunks of rows
    chunk_loops   chunks -> loop functions that call their regions' kernels
    lower         each kernel -> a loop function; values -> buffers
    update        new values of parameters and buffers are written over the old ones
    order         calls in the order in which little memory is live
    inplace       results written over inputs that die
    vectorize     how each loop runs by lanes on the target
    unify         functions that differ in numbers or sizes -> one, with parameters

That list is the table `STAGES` below. A front end (frontend/) has made the module, and
what the stages leave is turned into code by three steps more:

    memory        which buffer lives when, and its size as a formula
    codegen       loop functions and the host flow -> LLVM IR
    compile       LLVM IR -> machine code in this process

The last two are left out for every function whose object code is known (cache.py).
Every stage takes and gives a legal module (ir/spec.py), is timed, and is written to
PLIANT_DUMP as NN_name.ir if that is set; `pliant opt` runs any of them on such a file.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from pliant import knobs
from pliant.assemble import ProgramMaker
from pliant.collection import paused_collection
from pliant.context import Context, Training
from pliant.errors import (
    InternalError,
    PliantError,
    UnsupportedOp,
    UnsupportedOpError,
)
from pliant.interface import interface_of, reject_reserved
from pliant.ir.callees import with_called_loops
from pliant.ir.dumps import write_module
from pliant.ir.graph import Constant, Graph, Module
from pliant.ir.ops import Trait, has_trait
from pliant.ir.spec import Stage, Verified, verify
from pliant.ir.text import print_module
from pliant.ir.types import DType
from pliant.ir.versions import with_shared_ops
from pliant.kernels.tiles import gemm_tile
from pliant.lower.lower import hold_packed, lower
from pliant.lower.unify import unify
from pliant.lower.vectorize import plan_loops
from pliant.machine.target import Target
from pliant.memory.chunk_loops import lower_chunks
from pliant.memory.flow import lower_flows
from pliant.memory.inplace import inplace
from pliant.memory.order import order
from pliant.memory.update import update
from pliant.options import Instruments, Options
from pliant.passes.absorb import absorb
from pliant.passes.attention import attention
from pliant.passes.bind import bind_inside, bind_sizes
from pliant.passes.canonicalize import canonicalize
from pliant.passes.chunk import chunk
from pliant.passes.coded import coded
from pliant.passes.contractions import contractions
from pliant.passes.decompose import decompose
from pliant.passes.fold import fold
from pliant.passes.fuse import fuse
from pliant.passes.inline import inline
from pliant.passes.joins import joins
from pliant.passes.layout import layout
from pliant.passes.merge import merge
from pliant.passes.overwrite import overwrite
from pliant.passes.quotients import quotients
from pliant.passes.recompute import recompute
from pliant.passes.rounding import rounding
from pliant.passes.split import split
from pliant.passes.training import differentiate, find, smooth
from pliant.program import Program
from pliant.program_cache import Source, place_of
from pliant.progress import step
from pliant.sym.rules import InputDims

Transform = Callable[[Module, Context], Module]


class Purpose(enum.Enum):
    """What a module is compiled for."""

    INFERENCE = "inference"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class Pass:
    """A stage: what it does, what is legal after it, and which switches it reads."""

    name: str
    run: Transform
    legal: Stage
    what_for: str
    needs: tuple[str, ...] = ()  # it is left out if one of these switches is off
    reads: tuple[str, ...] = ()  # switches that change what it does
    only: Purpose | None = None

    def applies(self, cx: Context) -> bool:
        purpose = Purpose.INFERENCE if cx.training is None else Purpose.TRAINING
        return self.only in (None, purpose) and cx.options.are_on(self.needs)

    def line(self) -> str:
        """As the list at the head of this file has it."""
        only = "" if self.only is None else f"{self.only.value}: "
        return f"{self.name:13} {only}{self.what_for}"


def on_main(run: Callable[[Graph, Context], Graph]) -> Transform:
    """A pass over `main` alone."""
    return lambda module, cx: module.with_main(run(module.main, cx))


def reject_unsupported(graph: Graph, cx: Context) -> Graph:
    """Data-dependent sizes have no native host flow yet."""
    found = [
        UnsupportedOp(op.name, "no native code for it yet", op.loc or "unknown place")
        for op in graph.ops
        if has_trait(op, Trait.CONTROL)
    ]
    if found:
        raise UnsupportedOpError(found)
    return graph


def flow(module: Module, cx: Context) -> Module:
    """Control flow; its regions go through the stages before `vectorize`."""
    inside = Context(replace(cx.options, chunk=False), cx.target, is_part=True)
    facts = cx.facts(module.main)
    return lower_flows(module, facts, lambda m: run_stages(m, inside, "inplace"))


def chunk_loops(module: Module, cx: Context) -> Module:
    """Chunks; their regions go through the stages from `fuse` to `inplace`."""
    if not module.versions:
        return module
    inside = Context(replace(cx.options, chunk=False), cx.target, packed=cx.packed)
    hold_packed(module, cx)
    facts = cx.facts(module.main)
    return lower_chunks(
        module,
        facts,
        lambda m: run_stages(m, inside, "inplace", first="fuse"),
        cx.packed,
    )


def on_versions(run: Transform) -> Transform:
    """A pass over `main`, and over its other versions one by one.

    Functions that none of them calls any more are dropped.
    """

    def every(module: Module, cx: Context) -> Module:
        done = run(module, cx)
        if not module.versions:
            return done
        graphs, loops = dict(done.graphs), dict(done.loops)
        chunks = dict(done.chunks)
        for version in module.versions:
            other = run(module.with_main(version).replace(orders=()), cx)
            graphs[version.name] = other.main
            loops |= other.loops
            chunks |= other.chunks
        made = done.replace(graphs=graphs, loops=loops, chunks=chunks)
        return with_called_loops(made)

    return every


IMPORTED, DECOMPOSED, LOWERED = Stage.IMPORTED, Stage.DECOMPOSED, Stage.LOWERED
TRAINING, INFERENCE = Purpose.TRAINING, Purpose.INFERENCE

STAGES: tuple[Pass, ...] = (
    Pass(
        "inline",
        lambda module, cx: inline(module),
        IMPORTED,
        "calls of graph functions and match-casts go away",
    ),
    Pass(
        "bind",
        on_main(lambda graph, cx: (bind_inside if cx.splits else bind_sizes)(graph)),
        IMPORTED,
        "what has a size that data decide -> a region that is run with it",
    ),
    Pass(
        "joins",
        on_main(joins),
        IMPORTED,
        "concats of slices of concats -> one concat of what is read",
    ),
    Pass(
        "canonicalize",
        on_main(canonicalize),
        IMPORTED,
        "fold identities, share equal values, drop dead ones",
    ),
    Pass(
        "smooth",
        on_main(smooth),
        IMPORTED,
        "composite ops in the form that has torch's derivative",
        only=TRAINING,
    ),
    Pass(
        "decompose",
        on_main(decompose),
        DECOMPOSED,
        "norms, softmax, linear, ... -> primitive ops",
        reads=("attention",),
    ),
    Pass("plain", on_main(canonicalize), DECOMPOSED, "canonicalize again"),
    Pass(
        "find",
        on_main(find),
        DECOMPOSED,
        "attention that is spelled out, where it has a gradient",
        needs=("attention",),
        only=TRAINING,
    ),
    Pass(
        "gradient",
        on_main(differentiate),
        DECOMPOSED,
        "back from the loss, then the parameters' new values",
        only=TRAINING,
    ),
    Pass(
        "clean", on_main(canonicalize), DECOMPOSED, "canonicalize again", only=TRAINING
    ),
    Pass(
        "flow",
        lambda module, cx: flow(module, cx),
        DECOMPOSED,
        "control flow -> a loop function that calls its regions' kernels",
    ),
    Pass(
        "attention",
        on_main(attention),
        DECOMPOSED,
        "softmax between two products -> one op, masks inside it",
        needs=("attention",),
    ),
    Pass(
        "contractions",
        on_main(contractions),
        DECOMPOSED,
        "matmul, conv, attention in the form their kernels take",
    ),
    Pass(
        "overwrite",
        on_main(overwrite),
        DECOMPOSED,
        "of a buffer that is changed in part, only that is written",
        needs=("update",),
        only=INFERENCE,
    ),
    Pass("simplify", on_main(canonicalize), DECOMPOSED, "canonicalize again"),
    Pass(
        "coded",
        on_main(coded),
        DECOMPOSED,
        "products with weights in few bits, decoded in their kernels",
        needs=("coded", "fold", "packing"),
        only=INFERENCE,
    ),
    Pass(
        "absorb",
        on_main(absorb),
        DECOMPOSED,
        "scales and shifts by constants go into the weights",
        needs=("absorb", "fold"),
    ),
    Pass(
        "merge",
        on_main(merge),
        DECOMPOSED,
        "products that share their left operand -> one product",
        needs=("merge", "fold"),
    ),
    Pass(
        "layout",
        on_main(layout),
        DECOMPOSED,
        "convolutions keep channels last",
        needs=("layout",),
        only=INFERENCE,
    ),
    Pass(
        "native",
        on_main(reject_unsupported),
        DECOMPOSED,
        "what has no native code is refused, all of it at once",
    ),
    Pass(
        "fold",
        fold,
        DECOMPOSED,
        "what depends on weights alone is computed now",
        needs=("fold",),
    ),
    Pass(
        "quotients",
        on_main(quotients),
        DECOMPOSED,
        "divisions by the sum of a softmax -> multiplications",
    ),
    Pass(
        "rounding",
        on_main(rounding),
        DECOMPOSED,
        "half floats that jumps depend on are rounded wherever computed",
    ),
    Pass(
        "recompute",
        on_main(recompute),
        DECOMPOSED,
        "what the way back computes again instead of keeping",
        needs=("recompute",),
        only=TRAINING,
    ),
    Pass(
        "fuse",
        on_main(fuse),
        Stage.FUSED,
        "ops -> kernels, as far as proved constraints allow",
        reads=("fuse", "constraints", "fewest", "prologue", "recompute"),
    ),
    Pass(
        "chunk",
        lambda module, cx: chunk(module, cx, gemm_tile(DType.F32, cx.target).MR),
        Stage.FUSED,
        "versions of `main` that take less memory, in chunks of rows",
        needs=("chunk",),
    ),
    Pass(
        "chunk_loops",
        chunk_loops,
        Stage.FUSED,
        "chunks -> loop functions that call their regions' kernels",
        needs=("chunk",),
    ),
    Pass(
        "lower",
        lambda module, cx: lower(with_shared_ops(module), cx),
        LOWERED,
        "each kernel -> a loop function; values -> buffers",
        reads=("share", "variants", "packing", "patching", "strips", "direct"),
    ),
    Pass(
        "update",
        update,
        LOWERED,
        "new values of parameters and buffers are written over the old ones",
        reads=("update",),
    ),
    Pass(
        "order",
        on_versions(order),
        LOWERED,
        "calls in the order in which little memory is live",
        needs=("order",),
    ),
    Pass(
        "inplace",
        on_versions(inplace),
        LOWERED,
        "results written over inputs that die",
        needs=("inplace",),
    ),
    Pass(
        "vectorize",
        plan_loops,
        LOWERED,
        "how each loop runs by lanes on the target",
        needs=("vectors",),
    ),
    Pass(
        "unify",
        unify,
        LOWERED,
        "functions that differ in numbers or sizes -> one, with parameters",
        needs=("share",),
    ),
)

# The steps behind the stages, with the switches they read.
CODE_STEPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("memory", "which buffer lives when, and its size as a formula", ("remat",)),
    ("codegen", "loop functions and the host flow -> LLVM IR", ()),
    ("compile", "LLVM IR -> machine code in this process", ()),
)


@dataclass(slots=True)
class Driver:
    """Runs stages: times, verifies and dumps each."""

    cx: Context
    instruments: Instruments = field(default_factory=Instruments)
    seconds: dict[str, float] = field(default_factory=dict)
    number: int = 0
    part: str = ""  # of the model, in the names of dumps
    verified: Verified = field(default_factory=Verified)
    texts: list[tuple[str, str]] = field(default_factory=list)  # of the modules

    def time(self, name: str, started: float) -> None:
        spent = perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def check(self, name: str, module: Module, stage: Stage) -> None:
        folder = knobs.DUMP.get()
        if folder is not None:
            write_module(folder / f"{self.number:02}_{name}{self.part}.ir", module)
        if self.instruments.keep_ir:
            self.texts.append((f"{name}{self.part}", print_module(module)))
        self.number += 1
        if self.instruments.verify:
            started = perf_counter()
            verify(module, stage, self.verified)
            self.time("verify", started)

    def run(self, stage: Pass, module: Module) -> Module:
        """One stage; an unexpected failure is a bug of ours and says where."""
        started = perf_counter()
        step(stage.name)
        try:
            result = stage.run(module, self.cx)
        except PliantError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise InternalError(stage.name, problem) from error
        self.time(stage.name, started)
        self.check(stage.name, result, stage.legal)
        return result

    def stages(
        self, module: Module, stages: Sequence[Pass] = STAGES
    ) -> Iterator[tuple[Pass, Module]]:
        """Every stage that applies, with what it makes of the module."""
        for stage in stages:
            if stage.applies(self.cx):
                module = self.run(stage, module)
                yield stage, module


def run_stages(
    module: Module, cx: Context, until: str, first: str = STAGES[0].name
) -> Module:
    """A module after every stage that applies, from one to another.

    Not verified: for regions, and for tests and tools that look at what a stage is
    given.
    """
    begun = False
    for stage in STAGES:
        begun = begun or stage.name == first
        if begun and stage.applies(cx):
            module = stage.run(module, cx)
        if stage.name == until:
            return module
    raise ValueError(f"there is no stage {until}")


@paused_collection()
def compile_module(
    module: Module,
    inputs: InputDims,
    numbers: dict[str, int],
    options: Options,
    target: Target,
    training: Training | None = None,
    example: Sequence[Sequence[int]] = (),
    instruments: Instruments | None = None,
    stores: tuple[tuple[str, int], ...] = (),
) -> tuple[Program, tuple[Constant, ...]]:
    """From an imported module to machine code, and the weights that it takes.

    `inputs` are the runtime's inputs (name, dims; an integer has itself as its one
    dim), `numbers` which of them each parameter of `main` is. With `training`, `main`
    gives a loss, and the code is that of a step. `example` are sizes of the inputs that
    must be among those the code is for. `stores` are parameters, and the numbers of the
    results that are stored in them.
    """
    reject_reserved(inputs)
    watch = instruments or Instruments()
    place = place_of(
        Source(module, inputs, numbers, options, target, training, watch, stores)
    )
    known = None if place is None else place.find()
    if known is not None:
        if example:
            known[0].interface.check_example(example)
        return known
    whole = Context(options, target, training, stores, splits=True)
    driver = Driver(whole, watch)
    if example:
        interface_of(module.main, inputs).check_example(example)
    driver.check("import", module, IMPORTED)
    for _, made in driver.stages(module, _WHOLE):
        module = made
    parts = split(module.main)
    maker = ProgramMaker(target, options, watch, driver.seconds, inputs, numbers)
    for number, part in enumerate(parts, 1):
        is_last = number == len(parts)
        driver.cx = whole if is_last else Context(options, target, is_part=True)
        if len(parts) > 1:  # each is planned by itself, at the sizes that are known
            apart = replace(options, chunk=False)
            driver.cx = replace(driver.cx, options=apart)
        driver.part = f".{number}" if len(parts) > 1 else ""
        own = fused = lowered = module.with_main(part.graph)
        for stage, lowered in driver.stages(own, _OF_PARTS):
            if stage.legal is Stage.FUSED:
                fused = lowered
        program = maker.add(part, fused, lowered, driver.part)
        if example and number == 1:
            program.interface.check_example(example)
    program, weights = maker.joined()
    compiled = replace(program, texts=tuple(driver.texts)), weights
    if place is not None:
        place.keep(compiled)
    return compiled


# What is done to a model as a whole, and what to each of its parts.
_CUT = [stage.name for stage in STAGES].index("flow")
_WHOLE, _OF_PARTS = STAGES[:_CUT], STAGES[_CUT:]


def simplified(module: Module) -> Module:
    """What a module computes in its simplest words, to compare it with another."""
    return module.with_main(canonicalize(module.main))
