"""The op table is whole: what rows promise is there, and names in sets are ops."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding as llvm
import llvmlite.ir as ll
import numpy as np
import pytest

import pliant
from pliant.codegen.llvm import emit_loop_functions
from pliant.ir import interp
from pliant.ir.interp_control import CONTROL
from pliant.ir.interp_lowered import LOWERED
from pliant.ir.loops import (
    Binary,
    For,
    Kind,
    Load,
    LoopFunc,
    Role,
    Store,
    Unary,
    buffer,
    dtype_of,
)
from pliant.ir.opdef import Cost, OpDef
from pliant.ir.ops import ATTENTIONS, OPS, Trait
from pliant.ir.ops_elementwise import SCALARS
from pliant.ir.reductions import COMBINES, identity
from pliant.ir.spec_loops import _scalar_result
from pliant.ir.types import NUMPY, DType
from pliant.machine.target import NAMED, named
from pliant.passes.gradient_rules import RULES, WITHOUT
from pliant.sym import as_expr, sym

ELEMENTWISE = [row for row in OPS.values() if row.is_(Trait.ELEMENTWISE)]
COMPUTED = [dtype for dtype in DType if dtype.compute is dtype]


def dtypes_of(row: OpDef) -> list[DType]:
    """The types in which an op computes."""
    given = {d: _scalar_result(row.name, (d,) * row.arity[0]) for d in COMPUTED}
    return [dtype for dtype, result in given.items() if not isinstance(result, str)]


# ---- rows


@pytest.mark.parametrize("row", ELEMENTWISE, ids=lambda row: row.name)
def test_an_elementwise_op_has_a_meaning_and_a_gradient_or_none(row: OpDef) -> None:
    assert row.meaning is not None
    assert (row.name in RULES) != (row.name in WITHOUT)


@pytest.mark.parametrize("row", OPS.values(), ids=lambda row: row.name)
def test_every_op_has_a_meaning_here_or_in_the_interpreter(row: OpDef) -> None:
    tables = (interp._SPECIAL, interp._SEVERAL, CONTROL, LOWERED)
    assert (row.meaning is not None) + sum(row.name in t for t in tables) == 1


def kernel(row: OpDef, dtype: DType) -> LoopFunc:
    """The op over vectors."""
    n, i = sym("n"), sym("i")
    operands = [buffer(f"x{k}", dtype, (n,), Role.IN) for k in range(row.arity[0] or 1)]
    loads = [Load(x, (i,)) for x in operands]
    value = Unary(row.name, *loads) if len(loads) == 1 else Binary(row.name, *loads)
    out = buffer("y", dtype_of(value), (n,), Role.OUT)
    body = For("i", as_expr(0), n, Store(out, (i,), value), Kind.VECTOR)
    return LoopFunc(row.name, ("n",), (*operands, out), body)


@pytest.mark.parametrize("target", NAMED)
@pytest.mark.parametrize("row", SCALARS.values(), ids=lambda row: row.name)
def test_an_elementwise_op_has_native_code(row: OpDef, target: str) -> None:
    dtypes = dtypes_of(row)
    assert dtypes
    for dtype in dtypes:
        made = ll.Module()
        emit_loop_functions(made, [kernel(row, dtype)], named(target))
        llvm.parse_assembly(str(made)).verify()


@pytest.mark.parametrize(
    "row", [r for r in SCALARS.values() if r.inline], ids=lambda row: row.name
)
def test_the_text_for_scalars_means_what_the_function_does(row: OpDef) -> None:
    assert row.meaning is not None
    for dtype in dtypes_of(row):
        numbers = [0, 1, 2, 3] + ([] if dtype.kind in "ub" else [-1, -3])
        floats = [-0.0, 0.5, np.inf, -np.inf, np.nan] if dtype.is_float else []
        scalars = [NUMPY[dtype].type(number) for number in (*numbers, *floats)]
        for args in itertools.product(scalars, repeat=row.arity[0]):
            names = dict(zip("ab", args, strict=False))
            with np.errstate(all="ignore"):
                text = row.inline.format(*names)
                found = eval(text, {"sqrt": np.sqrt}, names)
                want = row.meaning(*args)
            np.testing.assert_array_equal(found, want, f"{row.name}{args} of {dtype}")


@pytest.mark.parametrize(
    "row", [r for r in OPS.values() if r.neutral is not None], ids=lambda r: r.name
)
def test_the_neutral_number_changes_nothing(row: OpDef) -> None:
    assert row.meaning is not None
    for dtype in dtypes_of(row):
        x = np.array([0, 1, 2, 5]).astype(NUMPY[dtype])
        if dtype.is_float:
            x = np.array([0.0, -0.0, 1.5, np.inf, -np.inf, np.nan], NUMPY[dtype])
        y = np.asarray(row.neutral).astype(NUMPY[dtype])
        assert row.meaning(x, y).tobytes() == x.tobytes()
        if row.is_(Trait.COMMUTATIVE):
            assert row.meaning(y, x).tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
@pytest.mark.parametrize("op", COMBINES)
def test_a_reduction_starts_from_what_changes_nothing(op: str, dtype: DType) -> None:
    joined = SCALARS[COMBINES[op]].meaning
    assert joined is not None
    x = np.array([0, 1, 2, 127]).astype(NUMPY[dtype])
    start = np.asarray(identity(op, dtype)).astype(NUMPY[dtype])
    np.testing.assert_array_equal(joined(x, start), x)


def test_costs_fall_into_their_kinds() -> None:
    """What fusion keeps, what attention takes in and what vector loops unroll."""
    kinds: dict[Cost, set[str]] = {cost: set() for cost in Cost}
    for row in SCALARS.values():
        kinds[max(cost for cost in Cost if cost <= row.cost)].add(row.name)
    assert kinds[Cost.DIVIDE] == {"div", "reciprocal", "rsqrt", "sqrt"}
    several = "atan2 cos decay erf exp expm1 floordiv log log1p mod pow sigmoid sin tan"
    assert kinds[Cost.EXPANDED] >= {*several.split(), "tanh"}
    assert {"add", "mul", "maximum", "select", "floor", "eq"} - {"select"} <= kinds[
        Cost.CHEAP
    ]


def test_attentions_know_where_their_operands_begin() -> None:
    assert ATTENTIONS == {"attention": 0, "attention_lse": 0, "attention_backward": 3}


# ---- names in sets

ROOT = Path(pliant.__file__).parent
FOLDERS = ("ir", "passes", "lower", "kernels", "memory", "codegen", "report")
KNOWN = {*OPS, *SCALARS}


def strings(node: ast.expr) -> list[str]:
    """The strings of a set, a list, a tuple, or the keys of a dict."""
    match node:
        case ast.Call(func=ast.Name(id="frozenset"), args=[inner]):
            return strings(inner)
        case ast.Set(elements) | ast.List(elements) | ast.Tuple(elements):
            parts = elements
        case ast.Dict(keys):
            parts = [key for key in keys if key is not None]
        case ast.BinOp(left, ast.BitOr(), right):
            return strings(left) + strings(right)
        case _:
            return []
    return [
        part.value
        for part in parts
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def named_sets(path: Path) -> Iterator[tuple[int, list[str]]]:
    """What modules assign, and what `op.name` is compared with."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                found = strings(value)
                ops = sum(word in KNOWN for word in found)
                # Keywords of the loop IR's text are no ops, though some sound alike.
                if ops > max(len(found) / 3, 1):
                    yield node.lineno, found
            case ast.Compare(ast.Attribute(attr="name"), [ast.In() | ast.NotIn()], [s]):
                yield node.lineno, strings(s)


@pytest.mark.parametrize("folder", FOLDERS)
def test_sets_of_ops_name_ops(folder: str) -> None:
    strange = [
        (f"{path.name}:{line}", word)
        for path in sorted((ROOT / folder).glob("*.py"))
        for line, words in named_sets(path)
        for word in words
        if word not in KNOWN
    ]
    assert strange == []


def test_a_name_that_is_no_op_is_found(tmp_path: Path) -> None:
    """The table that named eight ops nobody has."""
    path = tmp_path / "scores.py"
    path.write_text('DEAR = frozenset({"exp", "log"} | {"asin", "acosh"})\n')
    assert [w for _, words in named_sets(path) for w in words if w not in KNOWN] == [
        "asin",
        "acosh",
    ]
