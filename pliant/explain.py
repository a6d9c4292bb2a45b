"""What a compiled model is, as text for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pliant.ir.loops import Dispatch, statements
from pliant.passes.memory import peak_terms
from pliant.pipeline import Program
from pliant.sym import Guard, as_expr, sym


def formula(program: Program, threads: int) -> str:
    """Peak bytes over the dims: the largest of a few polynomials."""
    terms = [
        program.facts.canonical(e.substitute({"threads": as_expr(threads)}))
        for e in peak_terms(program.memory, program.facts)
    ]
    texts = sorted({str(e) for e in terms})
    return texts[0] if len(texts) == 1 else f"max({', '.join(texts)})"


def _from(guard: Guard) -> str:
    return f"   from {guard.origin}" if guard.origin else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _variants(program: Program) -> Iterator[str]:
    """Kernels that choose between bodies, with what they ask."""
    for name, func in program.lowered.loops.items():
        for stmt in statements(func.body):
            if not isinstance(stmt, Dispatch):
                continue
            for variant in stmt.variants:
                guards = " and ".join(map(str, variant.guards)) or "otherwise"
                yield f"  {name:24} {variant.name:16} {guards}"


def explain(program: Program, threads: int, assumptions: Sequence[Guard] = ()) -> str:
    """Symbols, constraints with their origin, kernels, guards, order, memory."""
    lines: list[str] = []
    add = lines.append
    add("symbols")
    for binding in program.solution.bindings:
        name = program.shapes[binding.source][0]
        low, high = program.facts.bounds(sym(binding.symbol))
        bounds = f"{0 if low is None else low} .. {'any' if high is None else high}"
        add(f"  {binding.symbol:12} dim {binding.axis} of input '{name}', {bounds}")
    add("\nguards (checked at every call)")
    for guard in program.guards:
        add(f"  {guard.cond}{_from(guard)}")
    if assumptions:
        add("\nassumed by the trace, not checked")
        for guard in assumptions:
            add(f"  {guard.cond}{_from(guard)}")
    kinds = Counter(
        op.str_attr("kind") for op in program.fused.main.ops if op.name == "fusion"
    )
    calls = _count(sum(kinds.values()), "call")
    functions = _count(len(program.lowered.loops), "kernel function")
    add(f"\nkernels: {calls} of {functions}")
    for kind, count in kinds.most_common():
        add(f"  {count:4} {kind}")
    add("\norder")
    for k, op in enumerate(program.lowered.main.ops):
        if op.name == "call_loop":
            add(f"  {k:4} {op.str_attr('callee'):24} {op.loc}")
    if several := list(_variants(program)):
        add("\nvariants (the first whose guards hold at the call)")
        lines.extend(several)
    add("\nmemory")
    add(f"  peak bytes = {formula(program, threads)}")
    for buffer in program.memory.buffers:
        add(
            f"  {buffer.value.name:24} steps {buffer.first:4} .. {buffer.last:4}"
            f"  {buffer.bytes} bytes"
        )
    return "\n".join(lines)
