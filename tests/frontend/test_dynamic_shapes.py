"""`dynamic_shapes`: every form that means something is taken, others are typed errors.

Each error names the input and the axis, and nothing that compiles refuses its example.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import pliant
from pliant.frontend.torch_spec import read_spec
from pliant.ir.parse import parse_module
from pliant.machine.target import named
from pliant.options import Options
from pliant.pipeline import compile_module

X = torch.randn(2, 3)


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def one(x: Any) -> Any:
    return x * 2


def two(x: Any, y: Any) -> Any:
    return x.sum(0), y * 2


def many(*args: Any) -> Any:
    return [t * 2 for t in args]


def first_and_more(a: Any, *args: Any) -> Any:
    return a * 2, [t * 3 for t in args]


def nested(d: Any, pair: Any) -> Any:
    return d["a"] * 2, pair[0] * 3, pair[1][0]


def scaled(x: Any, n: Any) -> Any:
    return x * n


def optional(x: Any, y: Any = None) -> Any:
    return x * 2 if y is None else x * y


def fields(t: Any) -> Any:
    return t.p * 2, t.q * 3


Pair = collections.namedtuple("Pair", "p q")


@dataclasses.dataclass
class Registered:
    p: torch.Tensor
    q: torch.Tensor


@dataclasses.dataclass
class Unregistered:
    p: torch.Tensor


torch.export.register_dataclass(Registered)
TREE = ({"a": X}, [X, (X,)])

# (model, example, dynamic_shapes, the dims of each flat input)
TAKEN: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "dict": (one, (X,), ({0: "b"},), ["{0: b}"]),
    "tuple": (one, (X,), (("b", None),), ["{0: b}"]),
    "negative axis": (one, (X,), ({-1: "n"},), ["{1: n}"]),
    "by name": (two, (X, X), {"y": {0: "b"}}, ["{}", "{0: b}"]),
    "same size": (two, (X, X), ({0: "b"}, {0: "b"}), ["{0: b}", "{0: b}"]),
    "static": (one, (X,), ({0: "b", 1: Dim.STATIC},), ["{0: b, 1: None}"]),
    "the size": (one, (X,), ({0: "b", 1: 3},), ["{0: b, 1: None}"]),
    "hints": (one, (X,), ({0: Dim.DYNAMIC, 1: Dim.AUTO},), ["{0: None, 1: None}"]),
    "bounds": (one, (X,), ({0: Dim("b", min=1, max=2)},), ["{0: b}"]),
    "derived": (
        two,
        (X, torch.randn(5, 3)),
        ({0: Dim("h")}, {0: 2 * Dim("h") + 1}),
        ["{0: h}", "{0: 2*h + 1}"],
    ),
    "an int": (scaled, (X, 4), (None, "n"), ["{}", "{-1: n}"]),
    "None": (optional, (X, None), ({0: "b"}, None), ["{0: b}", "{}"]),
    "flat args": (many, (X, X), ({0: "b"}, {1: "n"}), ["{0: b}", "{1: n}"]),
    "one flat arg": (many, (X,), ({0: "b"},), ["{0: b}"]),
    "one flat arg, dims": (many, (X,), (("b", "n"),), ["{0: b, 1: n}"]),
    "nested args": (many, (X, X), (({0: "b"}, {1: "n"}),), ["{0: b}", "{1: n}"]),
    "first, flat": (
        first_and_more,
        (X, X, X),
        ({0: "b"}, None, {1: "n"}),
        ["{0: b}", "{}", "{1: n}"],
    ),
    "first, nested": (
        first_and_more,
        (X, X),
        ({0: "b"}, ({1: "n"},)),
        ["{0: b}", "{1: n}"],
    ),
    "tree": (
        nested,
        TREE,
        ({"a": {0: "b"}}, [None, ({1: "n"},)]),
        ["{0: b}", "{}", "{1: n}"],
    ),
    "part of a tree": (nested, TREE, (None, ({1: "n"}, None)), ["{}", "{1: n}", "{}"]),
    "named tuple": (
        fields,
        (Pair(X, X),),
        (({0: "b"}, {1: "n"}),),
        ["{0: b}", "{1: n}"],
    ),
    "dataclass": (
        fields,
        (Registered(X, X),),
        ({"p": {0: "b"}, "q": {1: "n"}},),
        ["{0: b}", "{1: n}"],
    ),
}

SHAPE, OPTION = pliant.ShapeError, pliant.OptionError
# (model, example, dynamic_shapes, the error and what it says)
REFUSED: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "axis beyond": (one, (X,), ({2: "b"},), SHAPE, r"'x' has no axis 2.*\(2, 3\)"),
    "axis before": (one, (X,), ({-3: "b"},), SHAPE, r"'x' has no axis -3"),
    "no axes": (one, (torch.ones(()),), ({0: "b"},), SHAPE, r"'x' has no axis 0"),
    "axis twice": (one, (X,), ({0: "b", -2: "c"},), OPTION, "axis 0 is given twice"),
    "axis is a text": (one, (X,), ({"0": "b"},), OPTION, "'x': '0' is no axis"),
    "no tuple": (one, (X,), {0: "b"}, OPTION, r"give a tuple.*\({0: 'batch'},\)"),
    "a set": (one, (X,), {"b"}, OPTION, "must be a tuple"),
    "a text": (one, (X,), "b", OPTION, "must be a tuple"),
    "two sizes": (
        one,
        (X,),
        ({0: "b", 1: "b"},),
        SHAPE,
        "'b' is 2 at input 'x', axis 0.*3 at input 'x', axis 1",
    ),
    "two sizes of two": (
        two,
        (X, torch.randn(5, 3)),
        ({0: "b"}, {0: "b"}),
        SHAPE,
        "'b' is 2 at input 'x', axis 0.*5 at input 'y', axis 0",
    ),
    "too few": (two, (X, X), ({0: "b"},), SHAPE, r"1 entry for 2 inputs \(x, y\)"),
    "too many": (one, (X,), ({0: "b"}, None), SHAPE, r"2 entries for 1 inputs \(x\)"),
    "args": (
        first_and_more,
        (X, X, X),
        ({0: "b"}, ({0: "c"},)),
        SHAPE,
        r"2 entries for 3 inputs \(a, args\[0\], args\[1\]\)",
    ),
    "dims of one axis": (one, (X,), (("b",),), SHAPE, "'x' has 2 axes"),
    "name for a tensor": (one, (X,), ("b",), OPTION, "'x' is a tensor"),
    "hint for a tensor": (one, (X,), (Dim.AUTO,), OPTION, "'x' is a tensor"),
    "a bool": (scaled, (X, True), (None, "n"), OPTION, "'n' is a bool"),
    "a float": (scaled, (X, 1.5), (None, Dim.AUTO), OPTION, "'n' is a float"),
    "axes of an int": (scaled, (X, 4), (None, {0: "n"}), OPTION, "'n' is an int"),
    "axes of None": (optional, (X, None), (None, {0: "b"}), OPTION, "'y' is None"),
    "too small": (
        one,
        (X,),
        ({0: Dim("b", min=4)},),
        SHAPE,
        "'b', input 'x', axis 0.*at least 4.*has 2",
    ),
    "too large": (one, (X,), ({1: Dim.AUTO(max=2)},), SHAPE, "axis 1.*at most 2.*3"),
    "another size": (one, (X,), ({1: 4},), SHAPE, "axis 1.*given as 4.*has 3"),
    "derived": (one, (X,), ({1: 2 * Dim("h")},), SHAPE, r"axis 1.*2\*h.*no whole 'h'"),
    "derived of two": (
        two,
        (X, X),
        ({0: Dim("h")}, {0: 2 * Dim("h")}),
        SHAPE,
        r"'y', axis 0.*2\*h.*'h' is 2",
    ),
    "no identifier": (one, (X,), ({0: "my dim"},), OPTION, "axis 0: 'my dim' is no"),
    "reserved": (one, (X,), ({0: "threads"},), OPTION, "axis 0.*'threads' is reserved"),
    "reserved Dim": (one, (X,), ({0: Dim("worker")},), OPTION, "'worker' is reserved"),
    "memory_limit": (one, (X,), ({0: "memory_limit"},), OPTION, "is reserved"),
    "underscore": (one, (X,), ({0: "_b"},), OPTION, "'_b' is reserved"),
    "no dim": (one, (X,), ({0: 1.5},), OPTION, "axis 0: 1.5 is no dim"),
    "unknown input": (one, (X,), {"z": {0: "b"}}, SHAPE, "names z.*inputs are x"),
    "unknown key": (nested, TREE, ({"z": None}, None), SHAPE, "'d' has no 'z'"),
    "part missing": (nested, TREE, (None, [None]), SHAPE, "'pair' is a list of 2"),
    "part by axis": (nested, TREE, (None, {0: "b"}), OPTION, "'pair' is a list of 2"),
    "part's axis": (
        nested,
        TREE,
        (None, [None, ({4: "n"},)]),
        SHAPE,
        r"'pair\[1\]\[0\]' has no axis 4",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_forms_that_are_taken(name: str) -> None:
    function, example, shapes, wanted = TAKEN[name]
    spec = read_spec(Apply(function), example, {}, shapes)
    found = [
        "{" + ", ".join(f"{a}: {d.expr}" for a, d in leaf.dims.items()) + "}"
        for leaf in spec.leaves
    ]
    assert found == wanted


@pytest.mark.parametrize("name", ["one flat arg", "first, nested", "tree", "dataclass"])
def test_what_is_taken_compiles_and_runs_its_example(name: str) -> None:
    function, example, shapes, _ = TAKEN[name]
    model = Apply(function)
    compiled = pliant.compile(model, example, shapes, threads=1)
    got, want = compiled(*example), model(*example)
    leaves = torch.utils._pytree.tree_leaves
    torch.testing.assert_close(leaves(got), leaves(want))


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_typed_errors(name: str) -> None:
    function, example, shapes, kind, text = REFUSED[name]
    with pytest.raises(pliant.PliantError, match=text) as caught:
        pliant.compile(Apply(function), example, shapes, threads=1)
    assert type(caught.value) is kind


def test_keywords_in_any_order() -> None:
    def function(x: Any, *, k: Any, **more: Any) -> Any:
        return x + k + more["z"]

    kwargs = {"z": torch.randn(5), "k": torch.randn(4)}
    for shapes in (
        {"x": {0: "n"}, "k": {0: "k"}, "z": {0: "z"}},
        {"x": {0: "n"}, "k": {0: "k"}, "more": {"z": {0: "z"}}},
    ):
        spec = read_spec(Apply(function), (X,), kwargs, shapes)
        names = [str(d.expr) for leaf in spec.leaves for d in leaf.dims.values()]
        assert names == ["n", "z", "k"]


def test_a_dim_that_the_model_fixes() -> None:
    with pytest.raises(pliant.ShapeError, match=r"'n', input 'input', axis 1.* 3"):
        pliant.compile(nn.Linear(3, 4), (X,), ({0: "b", 1: "n"},), threads=1)
    shapes = ({0: "b", 1: Dim.AUTO},)
    compiled = pliant.compile(nn.Linear(3, 4), (X,), shapes, threads=1)
    assert compiled.dims == ("b",)


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_rows_of_any_length_are_pooled(ceil_mode: bool) -> None:
    """torch's own rule for this op reads the length as a number, and fixes it."""
    pool = nn.MaxPool1d(3, 2, padding=1, ceil_mode=ceil_mode)
    m = pliant.compile(pool, (torch.randn(2, 4, 9),), ({0: "n", 2: "length"},))
    for n, length in ((0, 5), (1, 1), (3, 2), (2, 61)):
        x = torch.randn(n, 4, length)
        assert torch.equal(m(x), pool(x))


def test_what_torch_cannot_trace() -> None:
    def branch(x: Any) -> Any:
        return x if x.sum() > 0 else x * 2

    with pytest.raises(pliant.PliantError, match=r"torch\.where or torch\.cond"):
        pliant.compile(Apply(branch), (X,), ({0: "b"},), threads=1)
    with pytest.raises(pliant.OptionError, match="'t' is a Unregistered"):
        pliant.compile(Apply(lambda t: t.p * 2), (Unregistered(X),), threads=1)


def attend(q: torch.Tensor, is_causal: Any) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=is_causal)


def test_a_comparison_of_sizes_where_torch_takes_a_bool() -> None:
    """A decode step has one query: the other answer than that of the example."""
    x, shapes = torch.randn(1, 2, 4, 8), ({2: "s"},)
    with pytest.raises(pliant.PliantError, match=r"is_causal.*\n.*\n.*write bool\("):
        pliant.compile(Apply(lambda x: attend(x, x.shape[2] > 1)), (x,), shapes)
    m = pliant.compile(
        Apply(lambda x: attend(x, bool(x.shape[2] > 1))), (x,), shapes, threads=1
    )
    for steps in (1, 2, 5):
        x = torch.randn(1, 2, steps, 8)
        torch.testing.assert_close(m(x), attend(x, steps > 1))


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (({0: "b"}, {0: "b"}), "'inputs' is a tuple of 1"),
        (({0: "b"},), r"1 entry for 2 inputs \(inputs, targets\)"),
        ((({0: "b"},), ({2: "b"},)), r"'targets\[0\]' has no axis 2"),
        ((({0: "b"},), ({1: "b"},)), r"'inputs\[0\]', axis 0.*'targets\[0\]', axis 1"),
    ],
)
def test_of_a_training_step(shapes: Any, text: str) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = ((X,), (torch.randn(2, 4),))
    with pytest.raises(pliant.PliantError, match=text) as caught:
        pliant.compile_training(model, squares, optimizer, example, shapes, threads=1)
    assert isinstance(caught.value, SHAPE | OPTION)


def test_guards_that_refuse_the_example_end_the_compile() -> None:
    module = parse_module(
        """
        graph @main(%x: f32[n]) {
          constraint 4 <= n says ("dim ", <n>, " is too small") at "model.py:12"
          %y: f32[n] = exp(%x)
          return %y
        }
        """
    )
    inputs = (("x", module.main.params[0].shape),)
    with pytest.raises(pliant.ShapeError, match=r"example.*n \(=3\).*model\.py:12"):
        compile_module(module, inputs, {"x": 0}, Options(), named("host"), None, [(3,)])
