"""The primary node tests of the `onnx` package with every dim of every input free.

Each dim gets a name of its own. The model is compiled once, with the test's inputs as
example, and called with them and with inputs of two other sizes: every free dim one
larger, and every one doubled; where these do not fit together, one dim after the
other. The answers are compared with the test's and, at other sizes, with those of ONNX
Runtime. Where it has none or differs, the reference evaluator of the `onnx` package
decides: it says what the operator set means, but takes minutes for a large pool. An
input whose values decide shapes keeps them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator

import pliant
from bench.coverage import onnx_nodes
from bench.coverage.judge import Verdict
from bench.coverage.onnx_nodes import RANDOM, differs, refusal
from pliant.errors import InternalError

PER_PROCESS = 400
TRIED = 12  # sizes that are tried until two fit


def names() -> list[str]:
    return [name for name in onnx_nodes.names() if "_expanded" not in name]


def evaluate(name: str) -> Verdict:
    case = onnx_nodes.cases()[name]
    model = free(case.model)
    stored, expected = case.data_sets[0]
    given, wanted = ([onnx_nodes.array(x) for x in p] for p in (stored, expected))
    try:
        compiled = pliant.compile(model, tuple(given))
        answer = compiled(*given)
    except Exception as error:
        return refusal(error)
    found = answer if len(wanted) > 1 else (answer,)
    rough = name.startswith(RANDOM)
    problem = differs(found, wanted, case.rtol, case.atol, rough)
    if problem:
        return Verdict("wrong", problem)
    if not compiled.dims:
        return Verdict("pass", "no dim is free")
    return others(model, compiled, given, case, rough)


def free(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a name for every dim of its inputs, and outputs of any shape."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for value in made.graph.input:
        kind = value.type.tensor_type
        for axis, dim in enumerate(kind.shape.dim):
            dim.Clear()
            dim.dim_param = f"{value.name}_{axis}"
    for value in made.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    del made.graph.value_info[:]
    return made


def others(
    model: Any, compiled: Any, given: list[Any], case: Any, rough: bool
) -> Verdict:
    good = 0
    for inputs in _sizes(compiled, given):
        reference = _run(_runtime, model.SerializeToString(), inputs)
        decided = isinstance(reference, Exception)
        if decided:
            reference = _run(_reference, model, inputs)
        if isinstance(reference, Exception):
            continue
        answer = _run(compiled, *inputs)
        if isinstance(answer, InternalError) or (
            isinstance(answer, Exception) and not isinstance(answer, pliant.PliantError)
        ):
            return refusal(answer)
        if isinstance(answer, Exception):
            continue
        found = answer if len(reference) > 1 else (answer,)
        problem = differs(found, reference, case.rtol, 1e-5, rough)
        if problem and not decided:
            other = _run(_reference, model, inputs)
            if not isinstance(other, Exception):
                problem = differs(found, other, case.rtol, 1e-5, rough)
        if problem:
            shapes = [list(np.shape(x)) for x in inputs]
            return Verdict("wrong", f"{problem} at {shapes}")
        good += 1
        if good == 2:
            return Verdict("pass")
    return Verdict("pass", "" if good else "refuses other sizes")


def _sizes(compiled: Any, given: list[Any]) -> Iterator[list[Any]]:
    """Inputs of other sizes: all dims, then one after the other."""
    dims = _bound(compiled, given)
    larger: tuple[Callable[[int], int], ...] = (lambda n: n + 1, lambda n: 2 * n)
    choices = [{d: change(n) for d, n in dims.items()} for change in larger]
    for name, size in dims.items():
        choices += [{**dims, name: change(size)} for change in larger]
    for sizes in choices[:TRIED]:
        yield [_resized(compiled, k, x, sizes) for k, x in enumerate(given)]


def _shapes(compiled: Any) -> list[Any]:
    """The dims of each input; None for one that is no tensor of the call."""
    arguments = compiled._signature.arguments
    return [getattr(slot, "dims", None) for slot in arguments]


def _bound(compiled: Any, given: list[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for dims, value in zip(_shapes(compiled), given, strict=False):
        for dim, size in zip(dims or (), np.shape(value), strict=False):
            if dim.symbol is not None:
                found[dim.symbol] = int(size)
    return found


def _resized(compiled: Any, number: int, value: Any, sizes: dict[str, int]) -> Any:
    shapes = _shapes(compiled)
    if number >= len(shapes) or shapes[number] is None or isinstance(value, list):
        return value
    shape = [dim.evaluate(sizes) for dim in shapes[number]]
    return np.resize(value, shape).astype(np.asarray(value).dtype)


def _runtime(content: bytes, inputs: list[Any]) -> Any:
    session = _session(content)
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))


@functools.lru_cache(maxsize=1)
def _session(content: bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(content, options)


def _reference(model: Any, inputs: list[Any]) -> Any:
    names = [value.name for value in model.graph.input]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        feeds = dict(zip(names, inputs, strict=True))
        return ReferenceEvaluator(model).run(None, feeds)


def _run(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception as error:
        return error
