"""Relations of sizes: no answer is contradicted by any assignment."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.size_relation import relation
from pliant.sym import (
    Expr,
    Facts,
    as_expr,
    ceildiv,
    divides,
    eq,
    ge,
    le,
    maximum,
    minimum,
    sym,
)
from pliant.sym.points import random_points, representatives, witnesses

B, S = sym("b"), sym("s")
RANGED = Facts().assume(ge(S, 1)).assume(le(S, 512))


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (3072 * B * S, 9216 * B * S, "less"),
        (12288 * B * S, 3072 * B * S, "greater"),
        (4 * B * (S + 1), 4 * B * S + 4 * B, "equal"),
        (S * S, 768 * S, "less"),  # within the range
        (S * S, 100 * S, "crosses"),
        (B * S, as_expr(4096), "crosses"),
        (64 * ceildiv(S, 16), 4 * S, "greater"),
        (4096 * minimum(ceildiv(S, 32), 16), as_expr(65536), "less"),
        (maximum(S, 16) * B, 16 * B, "greater"),
        (8 * B * S * S + 4 * B * S, 12 * B * S * S, "less"),
    ],
)
def test_known_answers(a: Expr, b: Expr, wanted: str) -> None:
    assert relation(RANGED, a, b) == wanted
    mirror = {"less": "greater", "greater": "less"}
    assert relation(RANGED, b, a) == mirror.get(wanted, wanted)


H, W, T = sym("h"), sym("w"), sym("t")
IMAGES = Facts().assume(ge(H, 1)).assume(ge(W, 1)).assume(ge(T, 1))
PATCHES = (H // 16) * (W // 16)


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        # products of quotients, one finer than the other
        (
            B * ceildiv(H, 2) * ceildiv(W, 2),
            B * ceildiv(H, 8) * ceildiv(W, 8),
            "greater",
        ),
        (
            B * ceildiv(H, 2) * ceildiv(W, 2),
            4 * B * ceildiv(H, 4) * ceildiv(W, 4),
            "less",
        ),
        (
            B * ceildiv(H, 2) * ceildiv(W, 2),
            3 * B * ceildiv(H, 4) * ceildiv(W, 4),
            "crosses",
        ),
        (
            T * minimum(B * ceildiv(H, 8) * ceildiv(W, 8), 168),
            T * minimum(B * ceildiv(H, 16) * ceildiv(W, 16), 168),
            "greater",
        ),
        # one unknown: a size, a product of quotients
        (
            T * ceildiv(minimum(H, 512), 4),
            8 * T * minimum(ceildiv(H, 32), 16),
            "less",
        ),
        (
            T * ceildiv(minimum(PATCHES + 1, 512), 4),
            8 * T * minimum(PATCHES // 32 + 1, 16),
            "less",
        ),
        (25 * ceildiv(H, 4), 16 * ceildiv(H, 32), "greater"),
        # only far out do they cross
        (4 * (H // 16), 43008 * (W // 16) + 1, "crosses"),
        (as_expr(15627264), 512 * T, "crosses"),
    ],
)
def test_quotients(a: Expr, b: Expr, wanted: str) -> None:
    assert relation(IMAGES, a, b) == wanted
    mirror = {"less": "greater", "greater": "less"}
    assert relation(IMAGES, b, a) == mirror.get(wanted, wanted)


@st.composite
def resolution(draw: st.DrawFn) -> Expr:
    """A size of images: products of quotients, capped ones, numbers."""
    h, w = (
        draw(st.sampled_from([s, ceildiv(s, 2), ceildiv(s, 4), s // 4, ceildiv(s, 8)]))
        for s in (H, W)
    )
    total = as_expr(draw(st.integers(0, 64)))
    for atom in draw(st.lists(st.sampled_from([h, w, h * w]), min_size=1, max_size=2)):
        if draw(st.booleans()):
            atom = minimum(atom, draw(st.sampled_from([16, 40])))
        total = total + draw(st.integers(1, 16)) * T * atom
    return total


@settings(max_examples=150, deadline=None)
@given(resolution(), resolution())
def test_resolutions_never_contradicted(a: Expr, b: Expr) -> None:
    told = relation(IMAGES, a, b)
    values = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 300)
    signs = {
        (x > y) - (x < y)
        for h, w, t in itertools.product(values, values, (1, 5))
        for x, y in [(a.evaluate(e), b.evaluate(e)) for e in [{"h": h, "w": w, "t": t}]]
    }
    assert not (told == "less" and 1 in signs)
    assert not (told == "greater" and -1 in signs)
    assert not (told == "equal" and signs != {0})


@st.composite
def size(draw: st.DrawFn) -> Expr:
    """A polynomial of two symbols with the atoms that sizes have."""
    atoms = [B, S, S * S, B * S, ceildiv(S, 4), minimum(S, 16), maximum(S, B), sym("t")]
    total = as_expr(draw(st.integers(0, 64)))
    for atom in draw(st.lists(st.sampled_from(atoms), max_size=3)):
        total = total + draw(st.integers(1, 512)) * atom
    return total


@settings(max_examples=150, deadline=None)
@given(size(), size(), st.integers(0, 2), st.integers(8, 600))
def test_never_contradicted(a: Expr, b: Expr, low: int, high: int) -> None:
    facts = Facts().assume(ge(S, low)).assume(le(S, high))
    told = relation(facts, a, b)
    values = (0, 1, 2, 3, 7, 8, 9, 64, 513)
    inside = [s for s in (*values, low, high, high - 1) if low <= s <= high]
    signs = set()
    for b_, s_, t_ in itertools.product(values, inside, (0, 1, 64)):
        env = {"b": b_, "s": s_, "t": t_}
        x, y = a.evaluate(env), b.evaluate(env)
        signs.add((x > y) - (x < y))
    match told:
        case "less":
            assert 1 not in signs
        case "greater":
            assert -1 not in signs
        case "equal":
            assert signs == {0}
        case _:
            pass  # witnesses of `crosses` are checked below


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 40), st.integers(1, 4))
def test_points_satisfy_the_facts(low: int, multiple: int) -> None:
    facts = Facts().assume(ge(S, low)).assume(le(S, B)).assume(divides(multiple, S))
    facts = facts.assume(eq(sym("t"), 2 * S))
    names = ("b", "s", "t")
    found = [
        *representatives(facts, names),
        *random_points(facts, names, low, 9),
        *witnesses(facts, names),
    ]
    assert found
    for point in found:
        assert set(point) == set(names)
        assert all(cond.holds(point) for cond in facts.stated)
