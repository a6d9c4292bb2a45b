"""Evaluates graphs in NumPy: the oracle for every pass and for the compiled code.

An op's row in ir/ops.py has its meaning. Ops that need more than operands and
attributes are here (constants, attention), in `interp_control.py` (regions and calls)
and in `interp_lowered.py` (memory). A result is rounded to the value's type; half
floats are computed in f32. With `precise` every float is an f64 and nothing is rounded:
the reference for numerical error. Shapes are those of the data; each result is checked
against its symbolic type, which is also how symbols get their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.errors import DTypeError, InternalError, ShapeError
from pliant.ir.graph import Attr, Graph, Module, Op, Value
from pliant.ir.interp_attention import (
    ScoreOf,
    attention,
    attention_backward,
    attention_lse,
    causal,
    masked,
)
from pliant.ir.interp_control import CONTROL
from pliant.ir.interp_lowered import LOWERED
from pliant.ir.interp_memory import (
    Array,
    ByteRange,
    memory_of,
    poisoned,
    sizes_of,
    storage,
)
from pliant.ir.interp_numbers import bf16_bits, bf16_value
from pliant.ir.interp_ops import resized
from pliant.ir.ops import OPS, first_row
from pliant.ir.text import print_op
from pliant.ir.types import NUMPY, DType, TensorType
from pliant.sym import Expr, Facts, solve

LibraryCode = Callable[[list[Array], list[Array]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A tensor in memory, as lowered ops see it."""

    memory: ByteRange
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    def elements(self) -> Array:
        """The elements where they are: strided, bf16 as bits."""
        kind = storage(self.dtype)
        if 0 in self.shape:
            return np.empty(self.shape, kind)
        data, start = self.memory.data, self.memory.offset
        reach = sum((d - 1) * s for d, s in zip(self.shape, self.strides, strict=True))
        if start < 0 or start + (reach + 1) * kind.itemsize > data.size:
            raise InternalError(
                "interpreter",
                f"{self.dtype}{list(self.shape)} at byte {start} reaches over the end "
                f"of its {data.size} bytes",
            )
        steps = tuple(s * kind.itemsize for s in self.strides)
        flat = data[start:].view(np.uint8)
        return np.ndarray(self.shape, kind, flat.data, 0, steps)

    def array(self) -> Array:
        found = self.elements()
        return bf16_value(found) if self.dtype is DType.BF16 else found.copy()


def run_graph(
    module: Module,
    inputs: Sequence[Array],
    graph: str = "main",
    env: Mapping[str, int] | None = None,
    *,
    precise: bool = False,
    libraries: Mapping[str, LibraryCode] | None = None,
    workers: int = 1,
    check_races: bool = False,
) -> list[Array]:
    """The results of a graph; `env` gives its sizes.

    A bf16 tensor is an f32 array; an input may also be its bits, as uint16.
    `libraries` are the external functions, called as (inputs, outputs).
    """
    interpreter = Interpreter(
        module, precise, libraries or {}, workers=workers, check_races=check_races
    )
    with np.errstate(all="ignore"):
        return interpreter.call(module.graphs[graph], inputs, dict(env or {}))


class Interpreter:
    def __init__(
        self,
        module: Module,
        precise: bool = False,
        libraries: Mapping[str, LibraryCode] | None = None,
        *,
        workers: int = 1,
        check_races: bool = False,
    ) -> None:
        self.module, self.precise = module, precise
        self.libraries = libraries or {}
        self.workers, self.check_races = workers, check_races

    # ---- functions and regions

    def call(
        self, graph: Graph, inputs: Sequence[Array], sizes: dict[str, int]
    ) -> list[Array]:
        """Runs a graph function: its symbols are solved from the input shapes."""
        if len(inputs) != len(graph.params):
            raise ShapeError(
                f"@{graph.name} takes {len(graph.params)} inputs, got {len(inputs)}"
            )
        for size in graph.sizes:
            if size not in sizes:
                raise ShapeError(f"@{graph.name} needs the size {size}")
        arrays = []
        for value, given in zip(graph.params, inputs, strict=True):
            arrays.append(self.accept(value, np.asarray(given)))
        env = sizes | solved(graph, [a.shape for a in arrays], sizes)
        env.setdefault("threads", self.workers)  # what every lowered function knows
        return self.run(graph, arrays, env)

    def accept(self, value: Value, given: Array) -> Array:
        """An input in the form values have here."""
        type = value.type
        if given.ndim != type.rank:
            raise ShapeError(
                f"input {value.name} must have rank {type.rank}, got {given.ndim}",
                input=value.name,
                expected=type.rank,
                got=given.ndim,
            )
        if type.dtype is DType.BF16 and given.dtype == np.uint16:
            given = np.asarray(bf16_value(given))
        wide = self.precise and type.dtype.is_float and given.dtype == np.float64
        if not wide and given.dtype != NUMPY[type.dtype]:
            raise DTypeError(
                f"input {value.name} must be {type.dtype}, got {given.dtype}",
                input=value.name,
                expected=type.dtype,
                got=given.dtype,
            )
        return self.rounded(given, type.dtype)

    def run(
        self, graph: Graph, arrays: Sequence[Any], env: dict[str, int]
    ) -> list[Array]:
        """Runs a body; symbols it binds go into `env`."""
        values: dict[Value, Any] = {}
        pending = list(graph.constraints)
        for value, array in zip(graph.params, arrays, strict=True):
            self.bind(value.type, array.shape, env, f"%{value.name}")
            values[value] = array
        pending = self.check(pending, env)
        for op in graph.ops:
            with _blamed(op):
                known = len(env)
                self.step(op, values, env)
                if len(env) != known:
                    pending = self.check(pending, env)
        return [self.array(values[value]) for value in graph.results]

    def region(
        self, graph: Graph, arrays: Sequence[Any], env: dict[str, int]
    ) -> list[Array]:
        """Runs a region once; what it binds is gone afterwards."""
        return self.run(graph, arrays, dict(env))

    def step(self, op: Op, values: dict[Value, Any], env: dict[str, int]) -> None:
        if op.name in LOWERED:
            LOWERED[op.name](self, op, values, env)
            return
        operands = [self.array(values[v]) for v in op.operands]
        found = self.evaluate(op, operands, env)
        if len(found) != len(op.results):
            raise InternalError("interpreter", f"{op.name} gives {len(found)} results")
        for value, array in zip(op.results, found, strict=True):
            array = self.rounded(array, value.dtype)
            self.bind(value.type, array.shape, env, f"%{value.name}", op)
            values[value] = array

    def evaluate(
        self, op: Op, operands: list[Array], env: dict[str, int]
    ) -> Sequence[Array]:
        wide = [
            self.widened(array, v.dtype)
            for array, v in zip(operands, op.operands, strict=True)
        ]
        meaning = OPS[op.name].meaning
        if meaning is not None:
            given = {name: self.attribute(v, env) for name, v in op.attrs}
            found = meaning(*wide, **given)
            return found if isinstance(found, tuple) else [found]
        if op.name in _SPECIAL:
            return [_SPECIAL[op.name](self, op, env, *wide)]
        if op.name in _SEVERAL:
            return _SEVERAL[op.name](self, op, env, wide)
        if op.name in CONTROL:
            return CONTROL[op.name](self, op, env, operands)
        raise InternalError("interpreter", f"no op is called {op.name}")

    # ---- numbers and shapes

    def attribute(self, value: Attr, env: Mapping[str, int]) -> Any:
        """An attribute as the meanings take it: dims have numbers."""
        match value:
            case Expr():
                return value.evaluate(env)
            case DType() if self.precise and value.is_float:
                return DType.F64
            case tuple():
                return tuple(self.attribute(part, env) for part in value)
            case _:
                return value

    def widened(self, array: Array, dtype: DType) -> Array:
        """An operand in the type arithmetic happens in."""
        if dtype is DType.F16 and not self.precise:
            return array.astype(np.float32)
        return array

    def rounded(self, array: Any, dtype: DType) -> Array:
        """A result as its type holds it."""
        if self.precise and dtype.is_float:
            return np.asarray(array, np.float64)
        if dtype is DType.BF16:
            return np.asarray(bf16_value(bf16_bits(np.asarray(array, np.float32))))
        return np.asarray(array).astype(NUMPY[dtype], copy=False)

    def array(self, value: Any) -> Array:
        found: Array = value.array() if isinstance(value, Placed) else value
        return found

    def bind(
        self,
        type: TensorType,
        shape: tuple[int, ...],
        env: dict[str, int],
        what: str,
        op: Op | None = None,
    ) -> None:
        """New symbols take the observed sizes; all others must agree with them."""
        where = f"{what}: {type} has the shape {shape}"
        if len(shape) != type.rank:
            raise InternalError("interpreter", where)
        for dim, size in zip(type.shape, shape, strict=True):
            name = dim.symbol
            if name is not None and name not in env:
                env[name] = size
        for axis, (dim, size) in enumerate(zip(type.shape, shape, strict=True)):
            loose = [name for name in dim.symbols() if name not in env]
            if loose:
                raise InternalError(
                    "interpreter", f"{where}; {', '.join(loose)} has no value"
                )
            wanted = dim.evaluate(env)
            if wanted == size:
                continue
            if op is None or op.name == "match_cast":
                loc = f" at {op.loc}" if op is not None and op.loc else ""
                raise ShapeError(
                    f"size of {what} at axis {axis} must be {dim} (={wanted}), got "
                    f"{size}{loc}",
                    input=what,
                    dim=axis,
                    expected=wanted,
                    got=size,
                )
            raise InternalError("interpreter", f"{where}; {dim} is {wanted}")

    def check(self, pending: list[Any], env: dict[str, int]) -> list[Any]:
        """Checks the constraints whose symbols are known; those left over."""
        left = []
        for guard in pending:
            if not all(name in env for name in guard.cond.symbols()):
                left.append(guard)
            elif not guard.cond.holds(env):
                at = f" (from {guard.origin})" if guard.origin else ""
                raise ShapeError(
                    f"{guard.render(env) or guard.cond}: {guard.cond} does not hold{at}"
                )
        return left

    # ---- memory

    def placed(self, value: Value, values: dict[Value, Any], env: Any) -> Placed:
        """A value in memory; one that is not there yet is put there for good."""
        if self.precise:
            raise ValueError("a lowered graph has bytes: it cannot run in f64")
        found = values[value]
        if not isinstance(found, Placed):
            bits = bf16_bits(found) if value.dtype is DType.BF16 else found
            data = np.array(bits, storage(value.dtype), order="C")
            found = values[value] = self.place(value.type, memory_of(data), env)
        return found

    def place(self, type: TensorType, memory: ByteRange, env: dict[str, int]) -> Placed:
        shape, strides = sizes_of(type.shape, env), sizes_of(type.layout(), env)
        return Placed(memory, type.dtype, shape, strides)

    def fresh(self, type: TensorType, env: dict[str, int]) -> Placed:
        shape, strides = sizes_of(type.shape, env), sizes_of(type.layout(), env)
        reach = sum((d - 1) * s for d, s in zip(shape, strides, strict=True))
        count = 0 if 0 in shape else reach + 1
        return self.place(type, poisoned(count * type.dtype.bytes), env)


@contextmanager
def _blamed(op: Op) -> Iterator[None]:
    """Adds the op to errors that it raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {print_op(op)}")
        raise


def solved(
    graph: Graph, shapes: Sequence[tuple[int, ...]], sizes: Mapping[str, int]
) -> dict[str, int]:
    """The symbols of the params, read off the shapes; ShapeError if they disagree."""
    dims = [
        (value.name, tuple(d.substitute(sizes) for d in value.shape))
        for value in graph.params
    ]
    found = solve(dims, Facts())
    env: dict[str, int] = {}
    for binding in found.bindings:
        size = shapes[binding.source][binding.axis]
        env[binding.symbol] = binding.value.evaluate({**env, "d": size})
    observed = {
        f"{name}.{axis}": size
        for (name, _), shape in zip(dims, shapes, strict=True)
        for axis, size in enumerate(shape)
    }
    for guard in found.guards:
        if not guard.cond.holds(env | observed):
            raise ShapeError(guard.render(env | observed), input=guard.origin)
    return env


# ---- ops that need the module or the precision


def _constant(run: Interpreter, op: Op, env: Any) -> Array:
    constant = run.module.constants[op.str_attr("name")]
    if constant.type.dtype is DType.BF16:
        return np.asarray(bf16_value(constant.data))
    return constant.data


def _resize(run: Interpreter, op: Op, env: dict[str, int], x: Array) -> Array:
    return resized(op, sizes_of(op.dims_attr("shape"), env), x, run.precise)


def _score_of(
    run: Interpreter, op: Op, env: dict[str, int], others: list[Array]
) -> ScoreOf:
    def score(scores: Array) -> Array:
        if op.regions:
            (scores,) = run.region(op.regions[0], [scores, *others], env)
        else:
            for mask in others:
                scores = masked(scores, mask)
        if op.bool_attr("causal"):
            scores = causal(scores, first_row(op).evaluate(env))
        return scores

    return score


def _attention(
    run: Interpreter, op: Op, env: dict[str, int], *operands: Array
) -> Array:
    q, k, v, *others = operands
    return attention(op, q, k, v, _score_of(run, op, env, others))


def _attention_lse(
    run: Interpreter, op: Op, env: dict[str, int], operands: list[Array]
) -> list[Array]:
    q, k, v, *others = operands
    return [*attention_lse(op, q, k, v, _score_of(run, op, env, others))]


def _attention_backward(
    run: Interpreter, op: Op, env: dict[str, int], operands: list[Array]
) -> list[Array]:
    grad, out, lse, q, k, v, *others = operands
    score = _score_of(run, op, env, others)
    return [*attention_backward(op, grad, out, lse, q, k, v, score)]


_SPECIAL: dict[str, Callable[..., Array]] = {
    "attention": _attention,
    "constant": _constant,
    "resize": _resize,
}

_SEVERAL: dict[str, Callable[..., list[Array]]] = {  # of several results
    "attention_backward": _attention_backward,
    "attention_lse": _attention_lse,
}
