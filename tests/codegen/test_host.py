"""Host arithmetic, compiled: exact at any sizes, or it says that it is not."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence

import llvmlite.ir as ll
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant import runtime
from pliant.backend.jit import compile_ir
from pliant.codegen.builder import LLBuilder
from pliant.codegen.host import emit_calls, emit_sizes
from pliant.codegen.host_checks import MOST
from pliant.codegen.host_dims import CheckedDims
from pliant.codegen.host_plan import HostPlan, Table
from pliant.codegen.llvm_types import I8, I64, PTR
from pliant.codegen.sizes import as_value
from pliant.machine import target
from pliant.sym import (
    Binding,
    Cond,
    Expr,
    Guard,
    ceildiv,
    const,
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
from pliant.sym.expr import Symbol, operands
from pliant.sym.rules import SizeCheck

NAMES = ("n", "m", "k")
n, m, k = map(sym, NAMES)
LEAST, LARGEST = -(1 << 63), (1 << 63) - 1

near = st.integers(0, 63).flatmap(
    lambda bits: st.integers(-2, 2).map(lambda off: (1 << bits) + off)
)
sizes = st.one_of(st.integers(-9, 9), near, near.map(lambda v: -v)).map(
    lambda v: max(min(v, LARGEST), LEAST)
)
environments = st.fixed_dictionaries(dict.fromkeys(NAMES, sizes))
leaves = st.one_of(
    st.sampled_from([n, m, k]), st.integers(-20, 20).map(const), near.map(const)
)


def _grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    pair = st.tuples(inner, inner)
    whole = st.tuples(inner, st.one_of(st.integers(1, 24).map(const), inner))
    # `n // 0` is a mistake when it is written; over a symbol it is one when it runs
    safe = whole.filter(lambda xy: not (xy[1].is_const and xy[1].value == 0))
    return st.one_of(
        pair.map(lambda xy: xy[0] + xy[1]),
        pair.map(lambda xy: xy[0] - xy[1]),
        pair.map(lambda xy: xy[0] * xy[1]),
        pair.map(lambda xy: minimum(*xy)),
        pair.map(lambda xy: maximum(*xy)),
        safe.map(lambda xy: floordiv(*xy)),
        safe.map(lambda xy: ceildiv(*xy)),
        safe.map(lambda xy: mod(*xy)),
    )


expressions = st.recursive(leaves, _grow, max_leaves=7)


def subexpressions(expr: Expr) -> Iterator[Expr]:
    yield expr
    for atom in expr.atoms():
        for arg in operands(atom):
            yield from subexpressions(arg)


def magnitude(expr: Expr, env: Mapping[str, int]) -> int:
    """More than any number on the way to the value of an expression."""
    total = 0
    for coefficient, mono in expr.terms:
        term = abs(coefficient)
        for atom, power in mono:
            inside = [magnitude(arg, env) for arg in operands(atom)]
            if isinstance(atom, Symbol):
                inside = [abs(env[atom.name])]
            term *= max(*inside, 1, 0) ** power
        total += term
    return total


def denominators(expr: Expr, env: Mapping[str, int]) -> Iterator[int]:
    for part in subexpressions(expr):
        for atom in part.atoms():
            if hasattr(atom, "den"):
                yield atom.den.evaluate(env)


def evaluated(
    exprs: Sequence[Expr], envs: Sequence[Mapping[str, int]]
) -> list[list[tuple[int, bool, bool]]]:
    """(value, overflowed, undefined) of each expression under each assignment."""
    module = ll.Module("host")
    function = ll.Function(module, ll.FunctionType(I64, [PTR, PTR]), "evaluate")
    b = LLBuilder(function.append_basic_block("entry"))
    dims = CheckedDims(b)
    for at, name in enumerate(NAMES):
        place = b.gep(function.args[0], [ll.Constant(I64, at)], source_etype=I64)
        dims.bind(name, b.load(place, typ=I64))
    none = ll.Constant(ll.IntType(1), 0)
    for at, expr in enumerate(exprs):
        found = dims.evaluate(expr)
        flags = [none if f is None else f for f in (found.overflowed, found.undefined)]
        words = [as_value(found.value), *(b.zext(flag, I64) for flag in flags)]
        for offset, word in enumerate(words):
            index = [ll.Constant(I64, 8 * (3 * at + offset))]
            b.store(word, b.gep(function.args[1], index, source_etype=I8))
    b.ret(ll.Constant(I64, 0))
    code = compile_ir(module, target.host(), {})
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(
        code.address("evaluate")
    )
    out = []
    for env in envs:
        given_ = (ctypes.c_int64 * len(NAMES))(*(env[name] for name in NAMES))
        found_ = (ctypes.c_int64 * (3 * len(exprs)))()
        call(ctypes.addressof(given_), ctypes.addressof(found_))
        rows = [found_[3 * at : 3 * at + 3] for at in range(len(exprs))]
        out.append([(v, bool(o), bool(u)) for v, o, u in rows])
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.lists(expressions, min_size=1, max_size=12),
    st.lists(environments, min_size=4, max_size=12),
)
def test_exact_or_overflowed(exprs: list[Expr], envs: list[dict[str, int]]) -> None:
    for env, row in zip(envs, evaluated(exprs, envs), strict=True):
        for expr, (value, overflowed, undefined) in zip(exprs, row, strict=True):
            if magnitude(expr, env) <= LARGEST:
                assert not overflowed, (expr, env)
            if overflowed:
                continue
            try:
                least = min(denominators(expr, env), default=1)
            except ZeroDivisionError:
                least = 0
            assert undefined == (least < 1), (expr, env)
            if not undefined:
                assert value == expr.evaluate(env), (expr, env)


@pytest.mark.parametrize(
    ("expr", "env"),
    [
        (n * m * k, {"n": 1 << 62, "m": 8, "k": 0}),
        (4 * n * m * k - 3, {"n": 1 << 40, "m": 1 << 40, "k": 0}),
        (ceildiv(n, 16), {"n": LARGEST}),
        (ceildiv(n, m), {"n": LARGEST, "m": LARGEST}),
        (floordiv(n, m), {"n": LEAST, "m": 1}),
        (mod(n, m), {"n": LEAST, "m": LARGEST}),
        (n - m, {"n": -1, "m": LARGEST}),
    ],
    ids=str,
)
def test_exact_at_the_ends(expr: Expr, env: dict[str, int]) -> None:
    env = dict.fromkeys(NAMES, 1) | env
    assert evaluated([expr], [env]) == [[(expr.evaluate(env), False, False)]]


@pytest.mark.parametrize(
    ("expr", "env"),
    [
        (n**4, {"n": 65536}),
        (4 * n, {"n": (1 << 62) + 16}),
        (n + m, {"n": LARGEST, "m": 1}),
        (-n, {"n": LEAST}),
        (n * (1 << 64), {"n": 1}),
        (minimum(n * m, 5), {"n": 1 << 32, "m": 1 << 32}),
        (floordiv(n * n, m), {"n": 1 << 32, "m": 1 << 30}),
    ],
    ids=str,
)
def test_overflow_is_told(expr: Expr, env: dict[str, int]) -> None:
    env = dict.fromkeys(NAMES, 1) | env
    ((found,),) = evaluated([expr], [env])
    assert found[1]


# ---- the functions


class Host:
    """The host functions of a plan without kernels: x is (n, m), y is (n, k)."""

    def __init__(
        self,
        conds: Sequence[Cond] = (),
        entries: Sequence[Expr] = (),
        amounts: Sequence[Expr] = (),
        checks: Sequence[SizeCheck] = (),
        bindings: Sequence[Binding] = (),
    ) -> None:
        table = Table()
        for entry in (*entries, *amounts):
            table.slot(entry)
        read = [(0, 0, "n"), (0, 1, "m"), (1, 1, "k")]
        plain = [Binding(s, source, axis, sym("d")) for source, axis, s in read]
        self.plan = HostPlan(
            shapes=(("x", 2), ("y", 2)),
            bindings=tuple(bindings or plain),
            knobs=(),
            knob_slots=(),
            guards=tuple(Guard(cond, (str(cond),), "") for cond in conds),
            table=table,
            checks=tuple(checks),
            buffer_slots=(),
            output_slots=(),
            output_ranks=(),
            work_slots=(),
            n_exact=len(entries),
            constants=(),
            calls=(),
            sequences=((),),
            stamps=None,
        )
        module = ll.Module("host")
        emit_calls(module, self.plan, {})
        emit_sizes(module, self.plan)
        self.code = compile_ir(module, target.host(), runtime.symbols())

    def call(
        self, name: str, given: Sequence[int], count: int
    ) -> tuple[int, list[int]]:
        function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(
            self.code.address(name)
        )
        source = (ctypes.c_int64 * len(given))(*given)
        out = (ctypes.c_int64 * max(count, 1))()
        status = function(ctypes.addressof(source), ctypes.addressof(out))
        return status, list(out[:count])

    def bind(self, *dims: int) -> int:
        return self.call("pliant_bind", dims, len(self.plan.bindings))[0]

    def sizes(self, *symbols: int) -> tuple[int, list[int]]:
        entries = self.plan.table.entries
        return self.call("pliant_sizes", (*symbols, 1), len(entries))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([eq, ne, le, lt, divides]), expressions, expressions),
        min_size=1,
        max_size=4,
    ),
    st.lists(environments, min_size=3, max_size=6),
)
def test_guards_never_pass_by_wrapping(
    parts: list[tuple[type[Cond], Expr, Expr]], envs: list[dict[str, int]]
) -> None:
    conds = [make(left, right) for make, left, right in parts]
    host = Host(conds)
    for env in envs:
        code = host.bind(env["n"], env["m"], env["n"], env["k"])
        failing = []
        for number, cond in enumerate(conds):
            try:
                if not cond.holds(env):
                    failing.append(number)
            except ZeroDivisionError:
                failing.append(number)
        if code == 0:
            assert not failing, (conds, env)
        elif code > 0:
            assert failing[0] == code - 1, (conds, env)
        else:  # the first that 64 bits do not tell; those before it hold
            assert not failing or failing[0] >= -code - 1, (conds, env)


def test_divisors_do_not_trap() -> None:
    host = Host([divides(n, m), eq(mod(k, maximum(n, 1)), 0)])
    assert host.bind(0, 0, 0, 5) == 0  # 0 divides 0
    assert host.bind(0, 3, 0, 5) == 1  # and nothing else
    assert host.bind(-1, LEAST, -1, 5) == -1  # no size, so nothing is told
    assert host.bind(3, 6, 3, 9) == 0
    host = Host([le(floordiv(m, n), 3)])
    assert [host.bind(size, 6, size, 1) for size in (2, 1, 0, -1)] == [0, 1, -1, -1]


def test_symbols_that_overflow() -> None:
    """x.1 == m + n*k gives m, unless n*k is more than 64 bits."""
    found = [
        Binding("n", 0, 0, sym("d")),
        Binding("k", 1, 1, sym("d")),
        Binding("m", 0, 1, sym("d") - n * k),
    ]
    host = Host([le(0, m)], bindings=found)
    assert host.bind(2, 10, 2, 4) == 0
    assert host.bind(2, 10, 2, 6) == 1
    assert host.bind(1 << 40, 10, 1 << 40, 1 << 40) == -1 - 1 - 2


def test_table_and_checks() -> None:
    host = Host(
        entries=[n * m, n + 1],
        amounts=[n * m * k],
        checks=[SizeCheck(4 * n, "bytes", high=MOST), SizeCheck(n - m, "dim", low=0)],
    )
    assert host.sizes(5, 3, 2) == (0, [15, 6, 30])
    assert host.sizes(1 << 30, 1 << 30, 1 << 30) == (0, [1 << 60, (1 << 30) + 1, -1])
    assert host.sizes(1 << 32, 1 << 32, 1)[0] == 1
    assert host.sizes(MOST, 2, 1)[0] == 4
    assert host.sizes(3, 4, 1)[0] == 5
