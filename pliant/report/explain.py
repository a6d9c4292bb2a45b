"""The description of a compiled model as text, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pliant.image.parts import PeakTerms
from pliant.ir.calls import called_in
from pliant.ir.loop_walk import statements
from pliant.ir.loops import Dispatch, LoopFunc
from pliant.ir.ops import OPAQUE
from pliant.kernels.mix import count_text
from pliant.memory.liveness import liveness, peak_terms
from pliant.memory.order_graph import permuted
from pliant.program import Program
from pliant.report.formula import peak_summary, peak_text, size_text
from pliant.sym import Expr, Guard, as_expr, sym


def peak_terms_of(program: Program) -> PeakTerms:
    """What `peak_text` prints: for each part, and each order of its calls.

    Where data decide sizes, these are in it, and what a part hands over counts in all
    later ones.
    """
    made: list[tuple[tuple[Expr, ...], ...]] = []
    handed = as_expr(0)
    for part in program.parts():
        main, facts = part.lowered.main, part.interface.facts
        others = (permuted(main, order) for order in part.lowered.orders)
        memories = [part.footprint.memory, *map(liveness, others)]
        made.append(
            tuple(
                tuple(facts.canonical(e + handed) for e in peak_terms(memory, facts))
                for memory in memories
            )
        )
        for value in main.results:
            handed = handed + value.type.bytes
    return tuple(made)


def _from(guard: Guard) -> str:
    return f"   from {guard.origin}" if guard.origin else ""


def _variants(program: Program) -> Iterator[str]:
    """Kernels that choose between bodies, with the guards of each body.

    Guards are in the model's sizes, as calls pass them; a kernel that only others call
    has its own.
    """
    lowered = program.lowered
    passed: dict[str, dict[tuple[Expr, ...], None]] = {}
    for graph in (lowered.main, *lowered.versions):
        for op in graph.ops:
            if op.name == "call_loop":
                sizes = passed.setdefault(op.str_attr("callee"), {})
                sizes[op.dims_attr("sizes")] = None
    for name, func in lowered.loops.items():
        own = tuple(map(sym, func.sizes))
        lines: dict[str, None] = {}
        for given in passed.get(name, {own: None}):
            known = dict(zip(func.sizes, given, strict=True))
            lines |= dict.fromkeys(_choices(name, func, known))
        yield from lines


def _choices(name: str, func: LoopFunc, known: Mapping[str, Expr]) -> Iterator[str]:
    for stmt in statements(func.body):
        if not isinstance(stmt, Dispatch):
            continue
        for variant in stmt.variants:
            guards = [str(guard.substitute(known)) for guard in variant.guards]
            text = " and ".join(guards) or "otherwise"
            yield f"  {name:24} {variant.name:16} {text}"


def _size(item: tuple[str, int]) -> str:
    return f"{item[0]}={item[1]}"


def _products(
    program: Program, threads: int, dims: Mapping[str, int] | None
) -> Iterator[str]:
    """Sizes of the matrix products, and for known dims how each of them is cut."""
    calls = Counter(called_in(program.lowered.main))
    for name, plans in program.lowered.plans.items():
        count = count_text(calls[name], "call")
        for plan in plans:
            text = " ".join(f"{axis}={size}" for axis, size in plan.sizes().items())
            # The calls of a function that is for several products are all of theirs.
            yield f"  {name:24} {text}   {count if plan is plans[0] else ''}".rstrip()
            if dims is not None:
                yield f"  {'':24} {plan.describe(dims, threads)}"
            name = ""


def _chunks(program: Program) -> Iterator[str]:
    """The versions of the program, each with its regions in chunks."""
    lowered = program.lowered
    for number, version in enumerate(lowered.versions, 1):
        calls = Counter(
            op.str_attr("callee")
            for op in version.ops
            if op.name == "call_loop" and op.str_attr("callee") in lowered.chunks
        )
        yield f"  version {number}"
        for name, count in calls.items():
            op = lowered.chunks[name].op
            kernels = count_text(
                sum(inner.name in OPAQUE for inner in op.regions[0].ops), "contraction"
            )
            extent = op.dim_attr("extent")
            calls_text = count_text(count, "call")
            yield f"    {name:22} along {extent}, {kernels}   {calls_text}"
    yield from (f"  left out: {why}" for why in lowered.left_out)


def explain(
    program: Program,
    threads: int,
    dims: Mapping[str, int] | None = None,
) -> str:
    """Symbols, constraints with their origin, kernels, guards, order, memory.

    With dims, also how each matrix product is cut at those sizes.
    """
    lines: list[str] = ["symbols"]
    add = lines.append
    interface = program.interface
    for binding in interface.solution.bindings:
        name = interface.inputs[binding.source][0]
        low, high = interface.facts.bounds(sym(binding.symbol))
        bounds = f"{0 if low is None else low} .. {'any' if high is None else high}"
        add(f"  {binding.symbol:12} dim {binding.axis} of input '{name}', {bounds}")
    for size in program.found:
        add(f"  {size.name:12} decided by data, 0 .. {size.most}")
    parts = list(program.parts())
    known = {guard.cond for guard in interface.guards}
    add("\nguards (checked at every call)")
    for guard in interface.guards:
        add(f"  {guard.cond}{_from(guard)}")
    for number, part in enumerate(parts):
        if len(parts) > 1:
            sizes = [size.name for size in part.rest.found] if part.rest else []
            what = f", finds {', '.join(sizes)}" if sizes else ""
            add(f"\npart {number + 1} of {len(parts)}{what}")
        if number > 0:
            add("guards (checked when its sizes are known)")
            for guard in part.interface.guards:
                if guard.cond not in known:
                    add(f"  {guard.cond}{_from(guard)}")
        lines.extend(_part(part, threads, dims))
    if program.lowered.versions or program.lowered.left_out:
        add("\nchunks (what may run in chunks of rows, to stay within a limit)")
        lines.extend(_chunks(program))
    add("\nmemory")
    peak = peak_terms_of(program)
    add(f"  peak: {peak_summary(peak, threads)}")
    add(f"  peak bytes = {peak_text(peak, threads)}")
    for part in parts:
        for buffer in part.footprint.memory.buffers:
            add(
                f"  {buffer.value.name:24} steps {buffer.first:4} .. {buffer.last:4}"
                f"  {size_text(buffer.bytes)} bytes"
            )
    return "\n".join(lines)


def _part(
    program: Program, threads: int, dims: Mapping[str, int] | None
) -> Iterator[str]:
    """Kernels, order, products and variants of a program's own part."""
    kinds = Counter(
        op.str_attr("kind") for op in program.fused.main.ops if op.name == "fusion"
    )
    calls = count_text(sum(kinds.values()), "call")
    functions = count_text(len(program.lowered.loops), "kernel function")
    yield f"\nkernels: {calls} of {functions}"
    for kind, count in kinds.most_common():
        yield f"  {count:4} {kind}"
    yield "\norder"
    for k, op in enumerate(program.lowered.main.ops):
        if op.name == "call_loop":
            yield f"  {k:4} {op.str_attr('callee'):24} {op.loc}"
    if program.lowered.plans:
        if dims is not None and not all(s in dims for s in program.code.host.symbols):
            dims = None
        at = "" if dims is None else " at " + ", ".join(map(_size, dims.items()))
        yield f"\nmatrix products{at}"
        yield from _products(program, threads, dims)
    if several := list(_variants(program)):
        yield "\nvariants (the first whose guards hold at the call)"
        yield from several


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """What is known of a model that was compiled in this process."""

    program: Program
    seconds: Mapping[str, float]

    @property
    def kernels_built(self) -> int:
        return sum(part.code.kernels_built for part in self.program.parts())

    @property
    def kernels_cached(self) -> int:
        return sum(part.code.kernels_cached for part in self.program.parts())

    def explain(self, threads: int, dims: Mapping[str, int] | None) -> str:
        return explain(self.program, threads, dims)

    def peak(self) -> PeakTerms:
        return peak_terms_of(self.program)
