"""Expressions and conditions mean one thing: to the interpreter, kernels and the host.

Divisors are 0, negative and positive; numerators on both sides of 0. Kernels compute
by scalars and by lanes, host code with checks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import product

import llvmlite.ir as ll
import numpy as np
import pytest
from compiled_loops import TARGETS, compiled, parallel, run, vector
from machines import MACHINE

from pliant.backend.jit import compile_ir
from pliant.codegen.builder import LLBuilder
from pliant.codegen.host_dims import CheckedDims
from pliant.codegen.llvm_types import I64, PTR, constant
from pliant.codegen.sizes import as_value
from pliant.ir.interp_loops import run_loop
from pliant.ir.loops import (
    Block,
    Const,
    Dispatch,
    Index,
    LoopFunc,
    Role,
    Stmt,
    Store,
    Variant,
    buffer,
)
from pliant.ir.types import DType
from pliant.machine.target import Target
from pliant.sym import (
    Cond,
    Expr,
    as_expr,
    ceildiv,
    divides,
    eq,
    floordiv,
    le,
    lt,
    maximum,
    minimum,
    mod,
    ne,
    sym,
)

a, b, i = sym("a"), sym("b"), sym("i")
TOP, BOTTOM = a - 7, b - 2  # sizes are not negative, what is made of them may be
EXPRESSIONS = (
    floordiv(TOP, BOTTOM),
    ceildiv(TOP, BOTTOM),
    mod(TOP, BOTTOM),
    floordiv(a, b),
    ceildiv(a, b),
    mod(a, b),
    *(f(TOP, by) for f in (floordiv, ceildiv, mod) for by in (1, 3, 8)),
    minimum(TOP, BOTTOM, 3),
    maximum(TOP, BOTTOM, -3),
    3 * floordiv(a * a, b) - mod(b, a) * ceildiv(b - 5, maximum(a, b)),
)
CONDITIONS: tuple[Cond, ...] = (
    *(f(TOP, BOTTOM) for f in (eq, ne, le, lt)),
    *(divides(b, a), divides(b, TOP), divides(4, TOP), divides(3, a * b)),
    *(divides(0, a), divides(0, TOP), divides(BOTTOM + 2, TOP)),
    eq(floordiv(a, b), TOP),
)
NUMBERS = [*product((0, 1, 2, 6, 7, 8, 15, 40), (0, 1, 2, 3, 5, 9, 16))]
COUNT = len(EXPRESSIONS) + len(CONDITIONS)
OUT = buffer("out", DType.I64, (as_expr(COUNT),), Role.OUT)


def flag(cond: Cond, at: int) -> Stmt:
    """1 where a condition holds, else 0."""
    ones = (Store(OUT, (as_expr(at),), Const(n, DType.I64)) for n in (1, 0))
    yes, no = ones
    return Dispatch((Variant("yes", (cond,), yes), Variant("no", (), no)))


def scalars() -> LoopFunc:
    body: list[Stmt] = [
        Store(OUT, (as_expr(at),), Index(expr)) for at, expr in enumerate(EXPRESSIONS)
    ]
    body += [flag(cond, at) for at, cond in enumerate(CONDITIONS, len(EXPRESSIONS))]
    return LoopFunc("scalars", ("a", "b"), (OUT,), Block(tuple(body)))


def interpreted(func: LoopFunc, sizes: Sequence[int], count: int) -> list[int]:
    found = np.zeros(count, np.int64)
    run_loop(func, None, sizes, [found])
    return [int(n) for n in found]


def test_the_interpreter_says_what_division_by_zero_is() -> None:
    wanted = {
        floordiv(a, b): 7,
        ceildiv(a, b): 7,
        mod(a, b): 0,
        floordiv(TOP, BOTTOM): 0,
        mod(a - 9, BOTTOM): 0,
        ceildiv(a - 9, BOTTOM): -2,
    }
    out = buffer("out", DType.I64, (as_expr(len(wanted)),), Role.OUT)
    stores = (Store(out, (as_expr(at),), Index(e)) for at, e in enumerate(wanted))
    func = LoopFunc("zero", ("a", "b"), (out,), Block(tuple(stores)))
    assert interpreted(func, (7, 0), len(wanted)) == [*wanted.values()]
    for cond, numbers, holds in [
        (divides(b, a), (0, 0), 1),
        (divides(b, a), (4, 0), 0),
        (divides(b, a), (4, 2), 1),
        (divides(b, a), (5, 2), 0),
    ]:
        func = LoopFunc("zero", ("a", "b"), (OUT,), flag(cond, 0))
        assert (
            interpreted(func, numbers, len(EXPRESSIONS) + len(CONDITIONS))[0] == holds
        )


@pytest.mark.parametrize("to", TARGETS, ids=lambda to: to.name)
def test_kernels_compute_what_the_interpreter_does(to: Target) -> None:
    func = scalars()
    code = compiled([func], to)
    for numbers in NUMBERS:
        found = np.zeros(COUNT, np.int64)
        assert run(code, "scalars", numbers, [found]) == 0
        assert found.tolist() == interpreted(func, numbers, COUNT), numbers


@pytest.mark.parametrize("to", TARGETS, ids=lambda to: to.name)
def test_lanes_compute_what_the_interpreter_does(to: Target) -> None:
    """The variable of a vector loop in numerators and in denominators."""
    spread = [e.substitute({"a": i}) for e in EXPRESSIONS]
    spread += [e.substitute({"a": b, "b": i}) for e in EXPRESSIONS]
    wide = as_expr(64)
    out = buffer("out", DType.I64, (as_expr(len(spread)), wide), Role.OUT)
    body = Block(
        tuple(
            vector("i", wide, Store(out, (as_expr(at), i), Index(e)))
            for at, e in enumerate(spread)
        )
    )
    func = LoopFunc("lanes", ("b",), (out,), parallel("_p", as_expr(1), body))
    code = compiled([func], to)
    for size in (0, 1, 2, 3, 5, 16):
        found, wanted = (np.zeros(64 * len(spread), np.int64) for _ in range(2))
        assert run(code, "lanes", (size,), [found]) == 0
        run_loop(func, None, (size,), [wanted])
        np.testing.assert_array_equal(found, wanted, err_msg=f"b = {size}")


def test_the_host_computes_the_same_and_marks_what_has_no_meaning() -> None:
    module = ll.Module("host")
    function = ll.Function(module, ll.FunctionType(ll.VoidType(), [PTR, PTR]), "f")
    builder = LLBuilder(function.append_basic_block("entry"))
    source, target = function.args

    def place(base: ll.Value, at: int) -> ll.Value:
        return builder.gep(base, [constant(I64, at)], source_etype=I64)

    dims = CheckedDims(builder)
    for at, name in enumerate("ab"):
        dims.bind(name, builder.load(place(source, at), typ=I64))
    found = [dims.evaluate(e) for e in EXPRESSIONS]
    found += [dims.holds(c) for c in CONDITIONS]
    for at, checked in enumerate(found):
        value = as_value(checked.value)
        builder.store(builder.zext(value, I64), place(target, 2 * at))
        marked = constant(I64, 0)
        if checked.undefined is not None:
            marked = builder.zext(checked.undefined, I64)
        builder.store(marked, place(target, 2 * at + 1))
    builder.ret_void()
    code = compile_ir(module, MACHINE, {})
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(code.address("f"))
    for numbers in NUMBERS:
        given = np.array(numbers, np.int64)
        told = np.zeros(2 * len(found), np.int64)
        call(given.ctypes.data, told.ctypes.data)
        wanted = interpreted(scalars(), numbers, len(found))
        assert told[::2].tolist() == wanted, numbers
        env = dict(zip("ab", numbers, strict=True))
        for expr, flagged in zip(EXPRESSIONS, told[1::2], strict=False):
            assert bool(flagged) == has_low_denominator(expr, env), (expr, numbers)
        for cond, flagged in zip(
            CONDITIONS, told[1 + 2 * len(EXPRESSIONS) :: 2], strict=True
        ):
            low = any(has_low_denominator(e, env) for e in (cond.lhs, cond.rhs))
            assert bool(flagged) == low, (cond, numbers)


def has_low_denominator(expr: Expr, env: dict[str, int]) -> bool:
    for atom in expr.atoms():
        den = getattr(atom, "den", None)
        if den is not None and den.evaluate({k: max(v, 0) for k, v in env.items()}) < 1:
            return True
        inner = [getattr(atom, "num", None), den, *getattr(atom, "args", ())]
        if any(e is not None and has_low_denominator(e, env) for e in inner):
            return True
    return False
