"""The front ends' contract, and the part of them that needs no torch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pliant
from pliant.errors import ShapeError
from pliant.frontend.contract import Assumption, Basis, Imported
from pliant.frontend.ir_module import import_module
from pliant.frontend.operands import HALF, promote_types
from pliant.frontend.torch_model import import_model
from pliant.frontend.torch_tensors import dtype_of, torch_dtype
from pliant.frontend.translate import Translation
from pliant.ir.build import Builder
from pliant.ir.parse import parse_module
from pliant.ir.types import DType, TensorType
from pliant.pipeline import simplified
from pliant.sym import Guard, as_expr, ge, le, ne, sym

PACKAGE = Path(pliant.__file__).parent


# --- without torch --------------------------------------------------------------

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "sympy"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""


def without_torch(code: str) -> str:
    """What a process prints in which torch cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"PYTHONPATH": str(PACKAGE.parent), "PLIANT_CACHE": "off"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_module_of_our_own_runs_without_torch() -> None:
    told = without_torch(
        '''
        import numpy as np
        import pliant
        from pliant.ir.parse import parse_module

        text = """graph @main(%x: f32[n, 3], %y: f32[3, m]) {
          %z: f32[n, m] = matmul(%x, %y)
          %w: f32[n, m] = tanh(%z)
          return %w
        }
        """
        model = pliant.compile(parse_module(text), threads=1)
        for n, m in ((1, 1), (0, 5), (7, 33)):
            x, y = np.ones((n, 3), np.float32), np.full((3, m), 0.1, np.float32)
            np.testing.assert_allclose(model(x, y), np.tanh(x @ y), rtol=1e-6)
        for wrong, needs in ((object(), "compiling a torch model"), (None, "")):
            try:
                if needs:
                    pliant.compile(wrong)
                else:
                    pliant.compile_training(wrong, None, None, ((), ()))
            except pliant.PliantError as error:
                print(error)
        print("torch" in sys.modules)
        '''
    )
    assert told.splitlines() == [
        "compiling a torch model needs torch: pip install 'pliant[torch]'",
        "compiling a training step needs torch: pip install 'pliant[torch]'",
        "False",
    ]


def test_a_graph_is_translated_without_torch() -> None:
    """What a front end for another source would do, node by node."""
    told = without_torch(
        """
        import numpy as np
        from pliant.errors import UnsupportedOpError
        from pliant.frontend.contract import Basis, Imported
        from pliant.frontend.ir_module import plain_signature
        from pliant.frontend.translate import (
            POISON, Location, Translation, constant_of
        )
        from pliant.ir.build import Builder
        from pliant.ir.interp import run_graph
        from pliant.ir.text import print_module
        from pliant.ir.types import DType, TensorType
        from pliant.sym import Guard, as_expr, le

        TABLE = {
            "Add": lambda cx, x, y: cx.add(x, y),
            "Mul": lambda cx, x, y: cx.mul(x, y),
            "ReduceMean": lambda cx, x: cx.mean(x, (1,), True),
        }
        NODES = [
            ("a", "Add", ("x", "bias")),
            ("b", "Mul", ("a", 2)),
            ("c", "ReduceMean", ("b",)),
            ("d", "Mul", ("b", "c")),
        ]

        def translate(nodes):
            cx = Translation(Builder())
            shape = (cx.symbol("N"), cx.symbol("M"))
            env = {"x": cx.b.param("x", TensorType(DType.F16, shape))}
            ones = np.ones((1, 1), np.float32)
            env["bias"] = cx.b.constant(constant_of("bias", DType.F32, ones))
            told = ("at most 9 rows: ", shape[0])
            cx.assume(Basis.DECLARED, Guard(le(shape[0], 9), told, "the file"))
            for line, (name, op, inputs) in enumerate(nodes):
                cx.op_name = op
                operands = [env.get(i, i) for i in inputs]

                def run():
                    if op not in TABLE:
                        cx.unsupported("this op has no translation")
                    return TABLE[op](cx, *operands)

                def otherwise(reason):
                    cx.note(op, reason, place)
                    return env["x"]

                place = Location(f"node {line}", f"node {line}: {name} = {op}")
                env[name] = cx.attempt(op, place, run, otherwise)
            module = cx.finish([env[nodes[-1][0]]])
            assumed = tuple(cx.assumptions)
            return Imported(module, plain_signature(module.main), assumed)

        imported = translate(NODES)
        print(print_module(imported.checked()))
        x = np.arange(6, dtype=np.float16).reshape(2, 3)
        (got,) = run_graph(imported.module, [x])
        b = (x + np.float32(1)) * 2
        np.testing.assert_allclose(got, b * b.mean(1, keepdims=True))
        print([a.basis.name for a in imported.assumptions])
        try:
            more = [("p", "Pow", ("x",)), ("q", "Add", ("p", 1)), ("r", "Erf", ("q",))]
            translate(more)
        except UnsupportedOpError as error:
            print(error)
        print("torch" in sys.modules)
        """
    )
    assert "graph @main(%x: f16[s0, s1])" in told
    assert "f32[s0, s1] = add(" in told and 'loc "node 0"' in told
    assert "['DECLARED']" in told and told.endswith("False\n")
    assert "Pow" in told and "node 0: p = Pow" in told
    assert "Erf" in told and "node 2: r = Erf" in told


def test_only_the_front_end_for_torch_imports_torch() -> None:
    """Elsewhere in the compiler it is optional: imported when it is needed."""
    folders = ("sym", "ir", "passes", "lower", "kernels", "memory", "codegen")
    folders += ("backend", "machine", "measure", "model", "training", "runtime")
    files = [path for name in folders for path in (PACKAGE / name).glob("*.py")]
    files += [PACKAGE / name for name in ("api.py", "pipeline.py", "__init__.py")]
    files += [
        path
        for path in (PACKAGE / "frontend").glob("*.py")
        if not path.name.startswith("torch_")
    ]
    assert len(files) > 100
    found = [
        f"{path}: {line}"
        for path in files
        for line in path.read_text().splitlines()
        if line.startswith(("import torch", "from torch"))
    ]
    assert not found


# --- types and numbers ----------------------------------------------------------


# torch promotes no unsigned integers but u8, and raises for them.
PROMOTED = [d for d in DType if d.kind != "u" or d is DType.U8]


def test_types_are_promoted_as_in_torch() -> None:
    for a, b in itertools.product(PROMOTED, repeat=2):
        theirs = torch.promote_types(torch_dtype(a), torch_dtype(b))
        assert promote_types(a, b) is dtype_of(theirs)


def test_numbers_beside_tensors_are_promoted_as_in_torch() -> None:
    cx = Translation(Builder())
    for a, b in itertools.product(PROMOTED, repeat=2):
        for ranks in itertools.product((0, 1), repeat=2):
            shapes = [(as_expr(2),) * rank for rank in ranks]
            ours = [
                cx.b.param("x", TensorType(kind, shape))
                for kind, shape in zip((a, b), shapes, strict=True)
            ]
            theirs = [
                torch.zeros((2,) * rank, dtype=torch_dtype(kind))
                for kind, rank in zip((a, b), ranks, strict=True)
            ]
            want = dtype_of(torch.result_type(*theirs))
            assert cx.promote(*ours) is want
        for number in (True, 3, 2.5):
            tensor = torch.zeros(2, dtype=torch_dtype(a))
            value = cx.b.param("x", TensorType(a, (as_expr(2),)))
            want = dtype_of(torch.result_type(tensor, number))
            assert cx.promote(value, number) is want


NUMBERS = [0.0, -0.0, 1.0, 0.1, 1 / 3, 65504.0, 65505.0, 65520.0, 1e300, 6e-8, 2**-24]
NUMBERS += [2**-25, 256.0, 257.0, 2049.0, 3.3e38, -2.5, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_half_floats_do_not_hold_stays_wide(
    dtype: DType, number: float
) -> None:
    cx = Translation(Builder())
    x = cx.b.param("x", TensorType(dtype, (sym("n"),)))
    cx.mul(x, number)
    stored = float(torch.tensor(number, dtype=torch_dtype(dtype)))
    kinds = [op.result.dtype for op in cx.b.ops if op.name == "mul"]
    assert kinds == [dtype if stored == number else DType.F32]


# --- assumptions ----------------------------------------------------------------


def guard(cond: Any) -> Guard:
    return Guard(cond, (f"needs {cond}: ", sym("n")), "a test")


def test_an_assumption_is_checked_in_every_call() -> None:
    text = "graph @main(%x: f32[n]) {\n  %y: f32[n] = neg(%x)\n  return %y\n}\n"
    plain = import_module(parse_module(text))
    assert plain.checked() is plain.module
    assumed = [
        Assumption(Basis.TRACED, guard(ge(sym("n"), 2))),
        Assumption(Basis.BRANCH, guard(ne(sym("n"), 1))),  # follows
        Assumption(Basis.DECLARED, guard(le(sym("n"), 7))),
        Assumption(Basis.TRACED, guard(ge(sym("u0"), 3))),  # of no input
    ]
    imported = Imported(plain.module, plain.signature, tuple(assumed))
    module = imported.checked()
    assert [str(g.cond) for g in module.main.constraints] == ["2 <= n", "n <= 7"]
    assert imported.guards(Basis.BRANCH) == (assumed[1].guard,)
    again = Imported(module, plain.signature, tuple(assumed))
    assert again.checked() is module
    from pliant.api import build, settings

    model = build(imported, settings(None, 1, None, None), {})
    np.testing.assert_array_equal(model(np.ones(3, np.float32)), -np.ones(3))
    for n in (1, 8):
        with pytest.raises(ShapeError, match="needs "):
            model(np.ones(n, np.float32))


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] != 3
        return x * 3 if x.shape[0] > 4 else x[-2:] * x.shape[0]


def test_what_a_trace_assumes_is_in_what_is_returned() -> None:
    shapes = ({0: "n", 1: torch.export.Dim("m", max=9)},)
    programs = import_model(Decides(), [torch.ones(6, 5)], shapes, simplified, {})
    imported, other = programs
    assert "n <= 4" in [str(a.guard.cond) for a in other.assumptions]
    found = [(a.basis, str(a.guard.cond)) for a in imported.assumptions]
    assert found == [
        (Basis.DECLARED, "m <= 9"),
        (Basis.CHECKED, "m != 3"),
        (Basis.BRANCH, "4 < n"),
    ]
    assert imported.signature.example == ((6, 5),)
    constraints = [str(g.cond) for g in imported.checked().main.constraints]
    assert constraints == [cond for _, cond in found]
