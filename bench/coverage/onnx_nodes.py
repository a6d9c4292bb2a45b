"""The backend node tests of the `onnx` package: one small model for each use of an op.

Each model is compiled with the test's inputs as example: values that decide shapes
(axes, shapes that are inputs) are fixed to the example's, everything else is compiled
as the model states it. The answer is compared with the test's, with its tolerance.
Tests whose name has `_expanded` are the same ops as the bodies that their schemas have.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import pliant
from bench.coverage.judge import Verdict, first_line
from pliant.errors import InternalError, UnsupportedOpError

PER_PROCESS = 400
LARGEST = 4
UNIT = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
# Draws by NumPy's generator, which the operator set does not prescribe: shapes and
# types are compared.
RANDOM = ("test_bernoulli", "test_training_dropout")


@functools.cache
def cases() -> dict[str, Any]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in load_model_tests(kind="node")}


def names() -> list[str]:
    return list(cases())


def evaluate(name: str) -> Verdict:
    case = cases()[name]
    model = case.model
    for stored, expected in case.data_sets:
        given, wanted = ([array(x) for x in part] for part in (stored, expected))
        verdict = judged(name, model, given, wanted, case.rtol, case.atol)
        if verdict.kind != "pass":
            return verdict
    return Verdict("pass")


def array(value: Any) -> Any:
    """Tests keep types that NumPy does not have as protos."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return [array(x) for x in value] if isinstance(value, list) else value


def judged(
    name: str, model: Any, given: Any, wanted: Any, rtol: float, atol: float
) -> Verdict:
    example = tuple(given)
    try:
        compiled = pliant.compile(model, example)
    except Exception as error:
        return refusal(error)
    try:
        answer = compiled(*given)
    except Exception as error:
        return refusal(error)
    found = answer if len(wanted) > 1 else (answer,)
    problem = differs(found, wanted, rtol, atol, name.startswith(RANDOM))
    return Verdict("wrong", problem) if problem else Verdict("pass")


def refusal(error: Exception) -> Verdict:
    text = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, UnsupportedOpError):
        return Verdict(
            "unsupported", "; ".join(f"{o.name}: {o.reason}" for o in error.ops)
        )
    if isinstance(error, InternalError) or not isinstance(error, pliant.PliantError):
        return Verdict("internal", text)
    return Verdict("refused", text)


def differs(
    found: Any, wanted: Any, rtol: float, atol: float, shapes_only: bool = False
) -> str:
    """What is not as wanted; nothing if all is."""
    if wanted is None or found is None:
        return "" if found is None and wanted is None else "one is empty"
    if isinstance(wanted, list | tuple):
        if len(found) != len(wanted):
            return f"{len(found)} values for {len(wanted)}"
        pairs = zip(found, wanted, strict=True)
        texts = (differs(f, w, rtol, atol, shapes_only) for f, w in pairs)
        return next((text for text in texts if text), "")
    wanted = np.asarray(wanted)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return (
            f"{found.dtype}{list(found.shape)} for {wanted.dtype}{list(wanted.shape)}"
        )
    if shapes_only:
        return ""
    # A half float may differ by two in its last place: tests round after every op.
    rtol = max(rtol, UNIT.get(str(wanted.dtype), 0.0))
    if wanted.dtype.kind not in "biuf":  # of ml_dtypes
        found, wanted = found.astype(np.float32), wanted.astype(np.float32)
    # Elements that cancel out keep a few rounding errors of the largest.
    if wanted.dtype == np.float32 and wanted.size:
        finite = np.abs(wanted[np.isfinite(wanted)])
        atol = max(atol, LARGEST * 2.0**-24 * float(finite.max(initial=0.0)))
    if np.allclose(found, wanted, rtol, atol, equal_nan=True):
        return ""
    with np.errstate(all="ignore"):
        apart = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
    return f"differs by {np.nanmax(apart):.3g}"
