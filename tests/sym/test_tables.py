"""What is remembered of expressions and facts is shared, and does not grow for ever."""

from __future__ import annotations

import gc
from unittest import mock

import pytest

from pliant.sym import (
    Facts,
    ceildiv,
    divides,
    eq,
    le,
    maximum,
    minimum,
    mod,
    nodes,
    prove,
    search,
    sym,
)
from pliant.sym.nodes import MEMO, Atom, Expr
from pliant.sym.search import Search

TABLES = [
    value
    for module in (nodes, search)
    for value in vars(module).values()
    if hasattr(value, "cache_info")
]


def forget_arithmetic() -> None:
    for table in TABLES:
        table.cache_clear()
    gc.collect()


def sizes() -> tuple[int, int]:
    return len(Expr._interned), len(Atom._interned)


def work(model: int) -> None:
    """Expressions and proofs that no other model has."""
    n, m = sym(f"n{model}"), sym(f"m{model}")
    facts = Facts().assume(le(model, n)).assume(eq(n, 2 * m))
    for k in range(2, 12):
        facts.prove(le(ceildiv(n, k) * m, n * m + mod(m, k)))
        facts.prove(le(minimum(n, k), maximum(m, k) * n))


def test_expressions_that_nobody_holds_are_forgotten() -> None:
    work(0)
    forget_arithmetic()
    before = sizes()
    for model in range(1, 6):
        work(model)
    forget_arithmetic()
    assert sizes() == before


def test_what_is_remembered_of_arithmetic_is_bounded() -> None:
    assert TABLES
    assert all(table.cache_info().maxsize <= MEMO for table in TABLES)


def test_expressions_that_are_held_stay_the_same_objects() -> None:
    held = ceildiv(sym("held") + 3, 4) * sym("other")
    forget_arithmetic()
    assert ceildiv(sym("held") + 3, 4) * sym("other") is held


def test_facts_that_are_stated_alike_are_one_object() -> None:
    n, m = sym("n"), sym("m")
    one = Facts().with_range("n", 1, None).assume(le(n, m))
    assert Facts().with_range("n", 1, None).assume(le(n, m)) is one
    assert Facts().with_range("n", 2, None).assume(le(n, m)) is not one
    assert Facts().assume(le(n, m)) is not one


def test_facts_that_nobody_holds_are_forgotten() -> None:
    gc.collect()
    before = len(prove._SHARED)
    held = Facts().assume(le(sym("a"), 8)).assume(le(sym("b"), 9))
    held.prove(le(sym("a") * sym("b"), 71))
    assert len(prove._SHARED) == before + 2
    del held
    gc.collect()
    assert len(prove._SHARED) == before


@pytest.mark.parametrize("scale", [1, 3, 64])
def test_no_search_is_made_twice_for_one_question(scale: int) -> None:
    n, m = sym(f"n{scale}"), sym(f"m{scale}")
    facts = Facts().assume(le(n, m))
    searched = mock.Mock(side_effect=Search)
    question = le(scale * n * n, scale * m * m + scale * m)
    with mock.patch.object(prove, "Search", searched):
        assert facts.prove(le(n * n, m * m + m)) is True
        made = searched.call_count
        assert made
        assert facts.prove(question) is True
        assert Facts().assume(le(n, m)).prove(question) is True
    assert searched.call_count == made


def test_facts_without_what_was_worked_out_answer_as_before() -> None:
    n, m = sym("n"), sym("m")
    facts = Facts().assume(le(n, m)).assume(divides(16, m))
    questions = [le(n, m + 1), le(m, n), eq(mod(m, 8), 0), le(n * n, m * m)]
    answers = [facts.prove(question) for question in questions]
    facts.forget()
    assert [facts.prove(question) for question in questions] == answers
