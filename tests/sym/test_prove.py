from __future__ import annotations

import itertools

import pytest
import z3
from hypothesis import given, settings
from hypothesis import strategies as st
from sym_strategies import NAMES, expr_of, linear, trees

from pliant.sym import (
    Cond,
    Facts,
    ceildiv,
    const,
    divides,
    eq,
    ge,
    gt,
    le,
    lt,
    maximum,
    minimum,
    mod,
    ne,
    parse,
    sym,
)
from pliant.sym.signs import without_plain

n, m, k, s = sym("n"), sym("m"), sym("k"), sym("s")
a, b, c, d = sym("a"), sym("b"), sym("c"), sym("d")
empty = Facts()
up_to_512 = empty.with_range("s", 0, 512)
multiple = empty.assume(divides(16, n))
reshape = empty.assume(eq(a * b, c * d))
ordered = empty.assume(le(n, m)).assume(le(m, k))

rounded = parse("(-(n//4)) % 4 + n//4")
blocks = parse("((-((n + 4)//8)) % 4 + (n + 4)//8)//4")
several = empty.assume(ge(512 * blocks * blocks.substitute({"n": m}), 1))

pyramid = empty
for side in (n, m):
    for level in (2, 4, 8, 16, 32, 64):
        part = ceildiv(side, level)
        pyramid = pyramid.assume(le(1, part)).assume(le(part, 1 << 31))
        last = part - minimum(part, maximum(part - 1, 0))
        pyramid = pyramid.assume(eq(last, 1))

CERTAIN = [
    (pyramid, ge(n + 6, 7)),
    (pyramid.assume(eq(ceildiv(n, 64), 1)), le(n, 64)),
    (empty.assume(le(n // 8, 4)), le(n, 39)),
    (empty.assume(ge(3 * (n // 8), 7)), ge(n, 24)),
    (several, ge(rounded - mod(const(2), rounded), 0)),
    (empty.assume(eq((n // 16) ** 2, 196)), eq(2364 // ((n // 16) ** 2 + 1), 12)),
    (empty.assume(eq((n // 16) ** 2, 196)), le(n, 239)),
    (empty.assume(eq(n**3, 343)), eq(n, 7)),
    (empty, eq(n * 4, 4 * n)),
    (empty, eq((n + 1) * 2, 2 * n + 2)),
    (up_to_512, le(s, 512)),
    (up_to_512, eq(minimum(s, 512), s)),
    (up_to_512, eq(maximum(s, 512), 512)),
    (up_to_512, eq(s % 513, s)),
    (up_to_512, eq(s // 513, 0)),
    (up_to_512, le(s * s, 512 * s)),
    (empty.assume(le(s, 512)), eq(minimum(s, 512), s)),
    (empty, le(16 * (n // 16), n)),
    (empty, lt(n, 16 * (n // 16) + 16)),
    (empty, le(n // 16, n)),
    (empty, lt(n % 16, 16)),
    (empty, eq(n - 16 * (n // 16), n % 16)),
    (empty, eq(n - m * (n // m), n % m)),
    (empty, le(m * (n // m), n)),
    (empty, lt(n % m, m)),
    (empty, ge(s * s + s, s)),
    (empty, ge(s * s, s)),
    (empty.with_range("m", 1, None), le(2 * n * m + n, 3 * n * m)),
    (empty, ge(ceildiv(n, 16) * 16, n)),
    (empty, lt(ceildiv(n, 16) * 16, n + 16)),
    (empty, le(ceildiv(n, 16), n)),
    (empty, le(n // 16, ceildiv(n, 16))),
    (empty, le(ceildiv(n, 16), n // 16 + 1)),
    (reshape, eq(a * b, c * d)),
    (reshape, eq(4 * a * b * n, c * d * n * 4)),
    (reshape, eq((a * b) // 8, (c * d) // 8)),
    (ordered, le(n, k)),
    (ordered, le(n * a, k * a)),
    (ordered, le(n + m, 2 * k)),
    (empty, le(minimum(n, m), n)),
    (empty, le(minimum(n, m) * k, n * k)),
    (empty, le(maximum(n, m), n + m)),
    (empty, eq(minimum(n, m) + maximum(n, m), n + m)),
    (empty, le(minimum(n, 512) * m, 512 * m)),
    (multiple, divides(16, n * m)),
    (multiple, divides(8, n)),
    (multiple, eq(16 * (n // 16), n)),
    (multiple, eq(n % 8, 0)),
    (multiple.assume(gt(n, 0)), ge(n, 16)),
    (empty.assume(divides(4, n)).assume(divides(6, n)), divides(12, n)),
    (empty.assume(divides(4, n + 3)), eq(n % 4, 1)),
    (empty.assume(divides(m, n)), divides(m, n * k)),
    (empty.assume(divides(8, n * m)), divides(8, n * m * k)),
    (empty, divides(4, 8 * n + 4)),
    (empty, divides(n, n * m)),
    (empty, divides(16, 16 * ceildiv(n, 16))),
    (empty.assume(eq(n, 16 * k)), eq(n // 16, k)),
    (empty.assume(eq(n, m + 1)), ge(n, 1)),
    (empty.assume(eq(2 * n, 2 * m)), eq(n, m)),
    (empty.assume(ne(n, 0)), ge(n, 1)),
    (empty.assume(ne(n, m)), ne(2 * n, 2 * m)),
    (empty.with_range("n", -5, 5), le(n, 5)),
    (empty, ne(2 * n, 2 * m + 1)),
    (empty, ne(n + 1, n)),
]


@pytest.mark.parametrize(("facts", "cond"), CERTAIN, ids=lambda v: str(v)[:60])
def test_certain(facts, cond):
    assert facts.prove(cond) is True
    assert facts.prove(cond.negated()) is False


@pytest.mark.parametrize(
    ("facts", "cond"),
    [
        (empty, eq(n, m)),
        (empty, le(n, m)),
        (empty, ge(n, 1)),
        (up_to_512, lt(s, 512)),
        (reshape, eq(a, c)),
        (multiple, divides(32, n)),
        (multiple, ge(n, 16)),
        (empty.with_range("n", -5, 5), ge(n, 0)),
        (empty, ge(n * n, 2 * n)),
        (ordered, lt(n, k)),
        (empty, divides(n, m)),
    ],
    ids=lambda v: str(v)[:60],
)
def test_open(facts, cond):
    assert facts.prove(cond) is None


# --- soundness -------------------------------------------------------------------

limits = st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 9)))
ranges = st.fixed_dictionaries(dict.fromkeys(NAMES, limits))
kinds = st.sampled_from(["eq", "ne", "le", "lt"])
SMALL = (0, 1, 2, 3, 4, 5, 7, 12, 13)


def conds_of(of: st.SearchStrategy) -> st.SearchStrategy[Cond]:
    exprs = of.map(expr_of)
    plain = st.builds(Cond, kinds, exprs, exprs)
    multiples = st.builds(Cond, st.just("divides"), st.integers(1, 6).map(const), exprs)
    return st.one_of(plain, plain, multiples)


def facts_of(limits: dict, assumed: list[Cond]) -> Facts | None:
    """Facts, or None if they are noticed to contradict."""
    facts = Facts()
    for name, (low, width) in limits.items():
        facts = facts.with_range(name, low, None if width is None else low + width)
    try:
        for cond in assumed:
            facts = facts.assume(cond)
    except ValueError as error:
        assert str(error).startswith("contradictory facts")
        return None
    return facts


def assignments(limits: dict, conds: list[Cond]) -> list[dict[str, int]]:
    choices = [
        [v for v in SMALL if v >= low and (width is None or v <= low + width)]
        for low, width in limits.values()
    ]
    envs = [dict(zip(limits, v, strict=True)) for v in itertools.product(*choices)]
    return [env for env in envs if all(cond.holds(env) for cond in conds)]


def check_every_answer(limits: dict, assumed: list[Cond], cond: Cond) -> None:
    facts = facts_of(limits, assumed)
    envs = assignments(limits, assumed)
    if facts is None:
        assert not envs, "satisfiable facts were called contradictory"
        return
    answer = facts.prove(cond)
    for env in envs:
        assert answer in (None, cond.holds(env)), env
        for side in (cond.lhs, cond.rhs):
            value = side.evaluate(env)
            assert facts.canonical(side).evaluate(env) == value
            low, high = facts.bounds(side)
            assert low is None or low <= value
            assert high is None or value <= high


@settings(max_examples=400, deadline=None)
@given(ranges, st.lists(conds_of(linear), max_size=2), conds_of(trees))
def test_no_answer_contradicts_a_sample(limits, assumed, cond):
    check_every_answer(limits, assumed, cond)


@settings(max_examples=300, deadline=None)
@given(ranges, conds_of(trees), conds_of(trees))
def test_nonlinear_assumptions_stay_sound(limits, assumed, cond):
    check_every_answer(limits, [assumed], cond)


@settings(max_examples=300, deadline=None)
@given(trees.map(expr_of), trees.map(expr_of), ranges)
def test_compare_is_sound(left, right, limits):
    facts = facts_of(limits, [])
    assert facts is not None
    order = facts.compare(left, right)
    holds = {
        "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y,
        "eq": lambda x, y: x == y,
        "ge": lambda x, y: x >= y,
        "gt": lambda x, y: x > y,
        None: lambda x, y: True,
    }[order]
    for env in assignments(limits, []):
        assert holds(left.evaluate(env), right.evaluate(env)), env


# --- z3 ---------------------------------------------------------------------------


def to_z3(tree, scope):
    match tree:
        case ("const", v):
            return z3.IntVal(v)
        case ("sym", name):
            return scope[name]
    operator, x, y = tree[0], to_z3(tree[1], scope), to_z3(tree[2], scope)
    match operator:
        case "+":
            return x + y
        case "-":
            return x - y
        case "//":
            return x / y  # z3 rounds down for positive denominators
        case "%":
            return x % y
        case "ceildiv":
            return -((-x) / y)
        case "min":
            return z3.If(x < y, x, y)
        case _:
            return z3.If(x > y, x, y)


RELATIONS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "le": lambda x, y: x <= y,
    "lt": lambda x, y: x < y,
}


@settings(max_examples=150, deadline=None)
@given(ranges, st.tuples(kinds, linear, linear), st.tuples(kinds, linear, linear))
def test_z3_does_not_refute(limits, assumed, asked):
    facts = facts_of(limits, [])
    assert facts is not None
    solver = z3.Solver()
    solver.set("timeout", 500)
    scope = {name: z3.Int(name) for name in NAMES}
    for name, (low, width) in limits.items():
        solver.add(scope[name] >= low)
        if width is not None:
            solver.add(scope[name] <= low + width)
    kind, left, right = assumed
    solver.add(RELATIONS[kind](to_z3(left, scope), to_z3(right, scope)))
    try:
        facts = facts.assume(Cond(kind, expr_of(left), expr_of(right)))
    except ValueError:
        assert solver.check() != z3.sat
        return
    kind, left, right = asked
    answer = facts.prove(Cond(kind, expr_of(left), expr_of(right)))
    if answer is not None:
        relation = RELATIONS[kind](to_z3(left, scope), to_z3(right, scope))
        solver.add(z3.Not(relation) if answer else relation)
        assert solver.check() != z3.sat, solver.model()


# --- facts ------------------------------------------------------------------------


def test_canonical_applies_equalities():
    facts = Facts().assume(eq(sym("s6"), sym("s33"))).assume(eq(n, 16 * k))
    assert facts.canonical(sym("s33")) is sym("s6")
    assert facts.canonical(n * m // 16) is k * m
    assert Facts().assume(eq(n, 7)).canonical(n * m) is 7 * m
    assert Facts().with_range("n", 3, 3).canonical(n) == 3
    chained = Facts().assume(eq(a, b)).assume(eq(b, c))
    assert chained.canonical(a) is chained.canonical(c)
    assert up_to_512.canonical(minimum(s, 512) * m) is s * m


def test_bounds():
    assert up_to_512.bounds(s // 16) == (0, 32)
    assert up_to_512.bounds(512 - s) == (0, 512)
    assert empty.bounds(n + 3) == (3, None)
    assert empty.bounds(3 - n) == (None, 3)
    assert empty.bounds(n % 16) == (0, 15)
    assert empty.bounds(minimum(n, 512)) == (0, 512)
    assert ordered.assume(le(k, 9)).bounds(n) == (0, 9)
    assert Facts().assume(eq(n, 2 * k)).assume(le(n, 9)).bounds(k) == (0, 4)


STATED = [
    le(minimum(n % maximum(m, 1), k) + minimum(k, 3), m * minimum(n, 2)),
    eq(4 * n * minimum(m, 4), 8 * n * (minimum(m, 4) // 2)),
    le(2 * (n % maximum(m, 1)), 2 * minimum(n, k) + 1),
]


@pytest.mark.parametrize("cond", STATED, ids=str)
def test_what_was_stated_is_proved(cond: Cond) -> None:
    assert empty.prove(cond) is None
    assert empty.assume(cond).prove(cond) is True


def test_choices_between_quotients() -> None:
    assert empty.prove(le(minimum(ceildiv(n, 2), n // 2), n // 2)) is True
    least = minimum(n, 1)
    assert empty.prove(le(minimum(7 * least, 3), minimum(7 * least, 6))) is True


def test_facts_are_immutable():
    facts = Facts()
    facts.with_range("n", 5, 6)
    facts.assume(eq(n, m))
    assert facts.bounds(n) == (0, None) and facts.canonical(m) is m


def test_contradiction_raises():
    for conds in (
        [lt(n, 0)],
        [ge(n, 5), le(n, 4)],
        [eq(2 * n, 7)],
        [eq(n**2, 50)],
        [eq(n, m), ne(n, m)],
    ):
        facts = Facts()
        with pytest.raises(ValueError, match="contradictory facts"):
            for cond in conds:
                facts = facts.assume(cond)


def test_condition_text():
    assert str(le(n + 1, 4 * m)) == "n + 1 <= 4*m"
    assert str(divides(16, n)) == "16 divides n"
    assert lt(n, m).negated() == le(m, n)
    assert divides(4, n).negated() == ne(n % 4, 0)
    assert ge(n, parse("3")) == le(3, n)


def test_stated_before_its_parts_were_known() -> None:
    """A range learned later rewrites the question: the fact must follow."""
    equal = eq(minimum(n, 2), minimum(n, 3) - minimum(n, 1))
    below = le(minimum(n % maximum(m, 1), k), m * minimum(n, 2) - minimum(n, 1))
    for cond in (equal, below):
        assert empty.prove(cond) is None
        assert empty.assume(cond).assume(le(1, n)).prove(cond) is True


def test_more_knowledge_never_proves_less() -> None:
    """Thirds of n, as torch's chunk cuts them, each known to be 4 long."""
    part = maximum(ceildiv(n, 3), 1)
    second = minimum(2 * part, n)
    whole = le(second, n)
    facts = Facts()
    assert facts.prove(whole) is True
    for cond in (
        eq(ceildiv(n, 3), 4),
        eq(n - 2 * ceildiv(n, 3), 4),
        eq(minimum(part, n), 4),
        eq(second - minimum(part, n), 4),
        eq(n - second, 4),
    ):
        facts = facts.assume(cond)
        assert facts.prove(whole) is True, cond


def test_what_holds_for_sizes_may_not_hold_for_integers() -> None:
    facts = Facts().with_range("k", -5, 5).assume(le(n, 8))
    assert facts.prove(le(minimum(sym("k"), n), 0)) is None
    assert facts.prove(le(0, maximum(sym("k"), -7))) is None


def test_without_plain_terms() -> None:
    """A size of memory, whose many choices use up what a proof may take."""
    b, n, t, u, v = map(sym, ("batch", "length", "threads", "u8", "u9"))
    plain = 6400 * b * n - 256 * u + 184320 * t
    strips = t * ceildiv(minimum(n, 512), 4)
    more = 64 * b * n * minimum(t, 1) + 512 * strips + 64 * ceildiv(3 * strips, 4)
    more = more + 64 * ceildiv(9 * t * minimum(n, 16), 4) + 192 * ceildiv(b * n, 4)
    assert without_plain(plain + more) == plain
    assert without_plain(plain - ceildiv(n, 2)) == plain - ceildiv(n, 2)
    facts = Facts().assume(ge(n, 1)).assume(le(u, 2 * b * n)).assume(ge(u, 0))
    facts = facts.assume(le(v, 2 * b * n - u))
    assert facts.prove(ge(without_plain(plain + more), 0)) is True
