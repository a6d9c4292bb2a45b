"""Statements of the loop IR, compiled, against the interpreter."""

from __future__ import annotations

import re
from time import perf_counter

import llvmlite.ir as ll
from compiled_loops import (
    F32,
    I64,
    SIZES,
    TARGETS,
    ZERO,
    agree,
    compiled,
    elementwise,
    i,
    j,
    k,
    m,
    n,
    parallel,
    serial,
    unroll,
    vector,
)

from pliant.codegen.llvm import emit_loop_functions
from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
    Block,
    Call,
    Check,
    Const,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    Local,
    LoopFunc,
    LoopValue,
    Read,
    Role,
    Store,
    Switch,
    Unary,
    buffer,
)
from pliant.sym import Expr, as_expr, sym


def test_if() -> None:
    x, y = buffer("x", F32, (n,), Role.IN), buffer("y", F32, (n,), Role.INOUT)
    value = Load(x, (i,))
    by_lane = If(
        Binary("gt", value, Const(0.0, F32)),
        Store(y, (i,), Unary("sqrt", value)),
        If(Binary("lt", Index(i), Index(m)), Store(y, (i,), Load(x, (ZERO,)))),
    )
    uniform = If(
        Binary("gt", Index(m), Const(3, I64)),
        Store(y, (i,), value),
        Store(y, (i,), Const(1.0, F32)),
    )
    for name, body in (("lanes", by_lane), ("uniform", uniform)):
        for kind in (Kind.VECTOR, Kind.SERIAL):
            loop = For("i", ZERO, n, body, kind)
            func = LoopFunc(f"if_{name}", ("n", "m"), (x, y), loop)
            agree(func, sizes=[(s, 5) for s in SIZES] + [(20, 2)])


def test_switch() -> None:
    y = buffer("y", I64, (n,), Role.INOUT)
    cases = tuple((c, Store(y, (i,), Const(c * 10, I64))) for c in (0, 1, 4))
    for kind in (Kind.VECTOR, Kind.SERIAL):
        loop = For("i", ZERO, n, Switch(i % 5, cases), kind)
        agree(LoopFunc("switch", ("n",), (y,), loop))
        loop = For("i", ZERO, n, Switch(n % 5, cases), kind)
        agree(LoopFunc("switch_all", ("n",), (y,), loop))


def test_call() -> None:
    x, y = buffer("x", F32, (n,), Role.IN), buffer("y", F32, (n,), Role.OUT)
    double = LoopFunc(
        "double",
        ("n",),
        (x, y),
        vector("i", n, Store(y, (i,), Binary("add", Load(x, (i,)), Load(x, (i,))))),
    )
    a, b = buffer("a", F32, (m, n), Role.IN), buffer("b", F32, (m, n), Role.OUT)
    call = Call("double", (n - 1,), ((a, (i, as_expr(1))), (b, (i, ZERO))))
    func = LoopFunc("rows", ("m", "n"), (a, b), parallel("i", m, call))
    agree(double, func, sizes=[(4, s) for s in SIZES if s], threads=2)


def test_switch_of_calls() -> None:
    """Cases that hand over the same are one call of what a table names."""
    x, y = buffer("x", F32, (n,), Role.IN), buffer("y", F32, (n,), Role.INOUT)
    scales = [
        LoopFunc(
            f"by_{c}",
            ("n",),
            (x, y),
            vector("i", n, Store(y, (i,), Binary("mul", Load(x, (i,)), Const(c, F32)))),
        )
        for c in (2.0, 3.0, 5.0, 7.0)
    ]
    a, b = buffer("a", F32, (m, n), Role.IN), buffer("b", F32, (m, n), Role.INOUT)

    def call(number: int, size: Expr, column: int = 0) -> Call:
        at = (i, as_expr(column))
        return Call(scales[number].name, (size,), ((a, at), (b, at)))

    cases = (
        (6, call(0, n)),
        (1, Block((call(1, n),))),
        (4, call(2, n - 1, 1)),  # other arguments
        (2, call(2, n)),
        (3, Store(b, (i, ZERO), Const(1.0, F32))),
        (7, call(2, n - 1, 1)),  # the same call under another number
        (9, call(3, n)),
        (8, call(3, n - 1, 1)),
    )
    func = LoopFunc("rows", ("m", "n"), (a, b), serial("i", m, Switch(i % 12, cases)))
    agree(*scales, func, sizes=[(25, s) for s in SIZES if s])
    text = compiled([*scales, func], TARGETS[0]).llvm_ir()
    rows = text[text.index("@rows(") :]
    assert len(re.findall("call void %", rows)) == 2  # through the two tables
    assert not re.search("call void @", rows[: rows.index("}")])


def test_input_is_loaded_once_unless_it_may_be_written() -> None:
    one = as_expr(1)
    for role, loads in ((Role.OUT, 1), (Role.INOUT, 2)):
        x, y = buffer("x", F32, (n,), Role.IN), buffer("y", F32, (n,), role)
        value = Load(x, (ZERO,))
        body = Block((Store(y, (ZERO,), value), Store(y, (one,), value)))
        func = LoopFunc("twice", ("n",), (x, y), body)
        agree(func, sizes=[(2,), (17,)])
        module = ll.Module()
        emit_loop_functions(module, [func], TARGETS[0])
        text = str(module)
        assert text.count("load float") == loads


def test_parallel_captures_and_workers() -> None:
    """Values made before the loop go into it; scratch is indexed by worker."""
    worker, start = sym("worker"), sym("start")
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (m, n), Role.OUT)
    work = buffer("work", F32, (4, n), Role.WORK)
    first = buffer("first", I64, (1,), Role.IN)
    body = Block(
        (
            Let("start", Binary("mod", Load(first, (ZERO,)), Const(2, I64))),
            Local("bias", F32, Const(0.5, F32)),
            Accumulator("sum", F32, "sum"),
            vector("j", n, Accumulate("sum", Load(x, (ZERO, j)))),
            For(
                "i",
                start,
                m,
                Block(
                    (
                        vector(
                            "j",
                            n,
                            Store(
                                work,
                                (worker, j),
                                Binary("add", Load(x, (i, j)), Read("bias", F32)),
                            ),
                        ),
                        vector(
                            "j",
                            n,
                            Store(
                                y,
                                (i, j),
                                Binary(
                                    "mul",
                                    Load(work, (worker, n - 1 - j)),
                                    Read("sum", F32),
                                ),
                            ),
                        ),
                    )
                ),
                Kind.PARALLEL,
                grain=as_expr(2),
            ),
            vector("j", n, Store(y, (ZERO, j), Const(3.0, F32))),
        )
    )
    func = LoopFunc("workers", ("m", "n"), (x, first, work, y), body)
    agree(func, sizes=[(9, s) for s in SIZES], threads=4, tolerance=1e-5)


def test_check_without_lanes() -> None:
    y = buffer("y", I64, (1,), Role.OUT)
    body = Block(
        (Check(Binary("lt", Index(n), Const(9, I64)), 5), Store(y, (ZERO,), Index(n)))
    )
    agree(LoopFunc("check", ("n",), (y,), body))


def test_shared_values_are_emitted_once() -> None:
    value: LoopValue = Load(buffer("x0", F32, (n,), Role.IN), (i,))
    for _ in range(60):
        value = Binary("add", value, value)
    func = elementwise("shared", F32, (F32,), lambda _: value)
    start = perf_counter()
    compiled([func], TARGETS[0])
    assert perf_counter() - start < 5


def test_vector_inside_vector_and_registers_in_a_loop() -> None:
    x, y = buffer("x", F32, (m, n), Role.IN), buffer("y", F32, (m, n), Role.OUT)
    tile = buffer("tile", F32, (4,), Role.REGISTER)
    nested = vector("i", m, vector("j", n, Store(y, (i, j), Load(x, (i, j)))))
    agree(LoopFunc("nested", ("m", "n"), (x, y), nested), sizes=[(3, s) for s in SIZES])
    body = vector(
        "i",
        m,
        Block(
            (
                Alloc(tile),
                unroll("k", 4, Store(tile, (k,), Load(x, (i, k)))),
                unroll("k", 4, Store(y, (i, 3 - k), Load(tile, (k,)))),
            )
        ),
    )
    agree(LoopFunc("tile", ("m", "n"), (x, y), body), sizes=[(5, 4), (17, 6)])
