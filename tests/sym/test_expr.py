from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, settings
from sym_strategies import environments, expr_of, trees, value_of

from pliant.sym import (
    Expr,
    ceildiv,
    const,
    floordiv,
    maximum,
    minimum,
    mod,
    operands,
    parse,
    product,
    rebuild,
    sym,
)

n, m, k = sym("n"), sym("m"), sym("k")


@settings(max_examples=600, deadline=None)
@given(trees, environments)
def test_canonical_form_keeps_the_value(tree, env):
    assert expr_of(tree).evaluate(env) == value_of(tree, env)


@settings(max_examples=400, deadline=None)
@given(trees)
def test_text_round_trip(tree):
    expr = expr_of(tree)
    assert parse(str(expr)) is expr


def rebuilt(expr: Expr) -> Expr:
    return expr.map_atoms(
        lambda atom: rebuild(atom, [rebuilt(arg) for arg in operands(atom)])
    )


@settings(max_examples=300, deadline=None)
@given(trees)
def test_canonical_form_is_a_fixed_point(tree):
    expr = expr_of(tree)
    assert rebuilt(expr) is expr
    assert expr.substitute({"n": n, "m": m, "k": k}) is expr
    swapped = expr.substitute({"n": sym("q")})
    assert "n" not in swapped.symbols()
    assert copy.deepcopy(expr) is expr


@settings(max_examples=300, deadline=None)
@given(trees, trees, environments)
def test_substitution_commutes_with_evaluation(tree, image, env):
    expr, by = expr_of(tree), expr_of(image)
    if by.evaluate(env) < 0:
        by = by * by  # denominators stay positive
    moved = expr.substitute({"n": by})
    assert moved.evaluate(env) == expr.evaluate({**env, "n": by.evaluate(env)})


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (2 * n * m + 4 * n + 3, "2*m*n + 4*n + 3"),
        ((n + 15) // 16, "ceildiv(n, 16)"),
        (ceildiv(n, 16), "ceildiv(n, 16)"),
        ((n + 3) // 16, "(n + 3)//16"),
        (n % 3, "n % 3"),
        (minimum(n, 512), "min(n, 512)"),
        (maximum(n - 1, 0), "max(n - 1, 0)"),
        ((16 * n) // 16, "n"),
        ((16 * n + m) // 16, "n + m//16"),
        ((16 * n + 35) // 16, "n + 2"),
        ((8 * n) % 4, "0"),
        ((n // 4) // 8, "n//32"),
        (ceildiv(ceildiv(n, 4), 8), "ceildiv(n, 32)"),
        ((4 * n) // 6, "(2*n)//3"),
        ((4 * n + 19) // 16, "n//4 + 1"),
        (minimum(n, n + 3), "n"),
        (maximum(n, minimum(n, m), n + 3), "max(min(m, n), n + 3)"),
        (minimum(n, minimum(m, 4), 7), "min(m, n, 4)"),
        (16 * (n // 16) + n % 16, "n"),
        (16 * ((n - 1) // 16) + (n - 1) % 16, "n - 1"),
        (3 * k * m * (n // m) + 3 * k * (n % m), "3*k*n"),
        ((n * m + k) // m, "n + k//m"),
        ((n * n * m) // (n * k), "(m*n)//k"),
        ((n * (n + 1) + m) // (n + 1), "n + m//(n + 1)"),
        ((n % 12) % 4, "n % 4"),
        (-(n // 16), "-(n//16)"),
        (3 * (n // 4) ** 2, "3*(n//4)**2"),
        (n // -4, "(-n)//4"),
        (n - n, "0"),
        (2 * sym("input:0"), "2*`input:0`"),
        (sym("x.0") + 1, "x.0 + 1"),
        (product([n, 4, m]), "4*m*n"),
    ],
)
def test_simplification(expr, text):
    assert str(expr) == text
    assert parse(text) is expr


def test_equal_means_the_same_object():
    assert (n + 1) * 2 is 2 * n + 2
    assert n * m is m * n
    assert const(3) == 3 and hash(const(3)) == hash(3)
    assert n != 3 and n != m and n != "n"
    assert pickle.loads(pickle.dumps(n // 3 + m)) is n // 3 + m


def test_symbolic_comparison_and_truth_raise():
    for action in (
        lambda: n < m,
        lambda: n >= 3,
        lambda: bool(n),
        lambda: int(n),
        lambda: range(n),
        lambda: n.value,
    ):
        with pytest.raises(TypeError):
            action()
    assert int(const(4)) == 4 and list(range(const(2))) == [0, 1] and not const(0)
    with pytest.raises(AttributeError):
        n.terms = ()


def test_terms_and_symbols():
    expr = 2 * n * n + minimum(m, 7) - 5
    assert [c for c, _ in expr.terms] == [2, 1, -5]
    assert expr.terms[-1] == (-5, ())
    assert expr.symbols() == ("m", "n")
    assert const(0).terms == () and const(0).value == 0
    with pytest.raises(KeyError, match="m"):
        expr.evaluate({"n": 1})


def test_division_by_zero():
    for function in (floordiv, ceildiv, mod):
        with pytest.raises(ZeroDivisionError):
            function(n, 0)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("n +", 3),
        ("n $ 3", 2),
        ("min(n", 5),
        ("ceildiv(n)", 9),
        ("3//0", 1),
        ("n n", 2),
        ("", 0),
        ("2**n", 3),
        ("`a", 0),
    ],
)
def test_bad_text_names_the_position(text, position):
    with pytest.raises(ValueError, match=f"position {position} "):
        parse(text)
