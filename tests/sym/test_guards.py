from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.sym import Facts, Solution, const, divides, eq, parse, solve, sym

n, m, k = sym("n"), sym("m"), sym("k")


def observe(shapes, sizes) -> dict[str, int]:
    """Observed sizes by name; `sizes` has one tuple per input."""
    return {
        f"{name}.{axis}": size
        for (name, _), values in zip(shapes, sizes, strict=True)
        for axis, size in enumerate(values)
    }


def run(solution: Solution, shapes, sizes) -> dict[str, int]:
    env = observe(shapes, sizes)
    for binding in solution.bindings:
        seen = {**env, "d": sizes[binding.source][binding.axis]}
        env[binding.symbol] = binding.value.evaluate(seen)
    return env


def failures(solution: Solution, shapes, sizes) -> list[str]:
    env = run(solution, shapes, sizes)
    return [g.render(env) for g in solution.guards if not g.cond.holds(env)]


SHAPES = [
    ("x", (n, 2 * m + 3, const(768))),
    ("y", (n * k, n + m)),
    ("z", (m * k + n, 16 * sym("p"), sym("q") - 2)),
]
values = st.integers(0, 40)


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {"n": st.integers(1, 40), "m": values, "k": values, "p": values}
        | {"q": st.integers(2, 40)}
    )
)
def test_round_trip(env):
    shapes = [tuple(d.evaluate(env) for d in dims) for _, dims in SHAPES]
    solution = solve(SHAPES, Facts())
    found = run(solution, SHAPES, shapes)
    assert {name: found[name] for name in env} == env
    assert failures(solution, SHAPES, shapes) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(values, min_size=8, max_size=8))
def test_guards_accept_only_shapes_of_the_form(flat):
    sizes = [tuple(flat[:3]), tuple(flat[3:5]), tuple(flat[5:])]
    solution = solve(SHAPES, Facts())
    env = run(solution, SHAPES, sizes)
    if not failures(solution, SHAPES, sizes):
        for (_, dims), seen in zip(SHAPES, sizes, strict=True):
            assert tuple(d.evaluate(env) for d in dims) == seen
        assert all(env[name] >= 0 for name in ("n", "m", "k", "p", "q"))


def test_the_plainest_dim_gives_the_symbol():
    solution = solve([("x", (2 * n, m)), ("y", (n, n))], Facts())
    places = {b.symbol: (b.source, b.axis, str(b.value)) for b in solution.bindings}
    assert places == {"m": (0, 1, "d"), "n": (1, 0, "d")}
    assert [str(g.cond) for g in solution.guards] == ["x.0 == 2*n", "y.1 == n"]


def test_affine_dim():
    shapes = [("x", (16 * n,))]
    solution = solve(shapes, Facts())
    assert solution.bindings[0].value is parse("d//16")
    assert failures(solution, shapes, [(32,)]) == []
    assert failures(solution, shapes, [(33,)]) == [
        "input 'x', axis 0, 33, must be 16*n for a whole n: 33 is not a multiple of 16"
    ]


def test_messages_have_numbers():
    shapes = [("x", (n, const(768))), ("y", (n + 1,))]
    solution = solve(shapes, Facts())
    assert failures(solution, shapes, [(4, 700), (9,)]) == [
        "input 'x', axis 1 must be 768, got 700: "
        "only axes that dynamic_shapes names may vary",
        "input 'y', axis 0 must be n + 1 (=5), got 9",
    ]


def test_stated_facts_are_guarded():
    shapes = [("x", (n, m))]
    facts = Facts().with_range("n", 1, 512).assume(divides(4, n)).assume(eq(m, 2 * n))
    solution = solve(shapes, facts)
    assert failures(solution, shapes, [(8, 16)]) == []
    assert len(failures(solution, shapes, [(514, 16)])) == 3
    assert solve(shapes, Facts().with_range("n", 0, None)).guards == ()


def test_unsolvable_symbol_is_named():
    with pytest.raises(ValueError, match="cannot solve k, m"):
        solve([("x", (n, k * m))], Facts())


def test_symbol_named_like_the_observed_size():
    solution = solve([("x", (sym("d"), n))], Facts())
    assert [b.symbol for b in solution.bindings] == ["d", "n"]
    with pytest.raises(ValueError, match="cannot solve n"):
        solve([("x", (sym("d"), sym("d") + n))], Facts())
