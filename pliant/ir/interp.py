"""Evaluates graphs in NumPy: the oracle every pass and the compiled code answer to.

Each op is written from its definition in ir/ops.py, as plainly as possible, and its
result is rounded to the value's type; half floats are computed in f32. With `precise`
every float is an f64 and nothing is rounded: the reference for numerical error.
Shapes are those of the data; each result is checked against its symbolic type, which
is also how symbols get their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from pliant.errors import DTypeError, IndexRangeError, InternalError, ShapeError
from pliant.ir.graph import Graph, Module, Op, Value
from pliant.ir.interp_loops import (
    BINARY,
    UNARY,
    Array,
    Memory,
    bf16_bits,
    bf16_value,
    identity,
    literal,
    memory_of,
    run_loop,
    storage,
)
from pliant.ir.spec import destinations
from pliant.ir.text import print_op
from pliant.ir.types import NUMPY, DType, TensorType
from pliant.sym import Expr, Facts, Symbol, solve

LibraryCode = Callable[[list[Array], list[Array]], None]
_POISON = 0xFF  # what fresh memory holds: NaN as a float, -1 as an integer


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A tensor in memory, as lowered ops see it."""

    memory: Memory
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
        if op.name in _LOWERED:
            _LOWERED[op.name](self, op, values, env)
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
        if op.name in UNARY:
            return [UNARY[op.name](*wide)]
        if op.name in BINARY:
            return [BINARY[op.name](*wide)]
        if op.name in _PURE:
            return [_PURE[op.name](op, *wide)]
        if op.name in _SHAPED:
            return [_SHAPED[op.name](self, op, env, *wide)]
        if op.name in _CONTROL:
            return _CONTROL[op.name](self, op, env, operands)
        raise InternalError("interpreter", f"no op is called {op.name}")

    # ---- numbers and shapes

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
            name = _lone(dim)
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

    def place(self, type: TensorType, memory: Memory, env: dict[str, int]) -> Placed:
        shape, strides = sizes_of(type.shape, env), sizes_of(type.layout(), env)
        return Placed(memory, type.dtype, shape, strides)

    def fresh(self, type: TensorType, env: dict[str, int]) -> Placed:
        shape, strides = sizes_of(type.shape, env), sizes_of(type.layout(), env)
        reach = sum((d - 1) * s for d, s in zip(shape, strides, strict=True))
        count = 0 if 0 in shape else reach + 1
        return self.place(type, _poisoned(count * type.dtype.bytes), env)


def _poisoned(count: int) -> Memory:
    return Memory(np.full(count, _POISON, np.uint8))


def sizes_of(dims: Sequence[Expr], env: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dim.evaluate(env) for dim in dims)


@contextmanager
def _blamed(op: Op) -> Iterator[None]:
    """Errors that leave an op say which."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {print_op(op)}")
        raise


def _lone(dim: Expr) -> str | None:
    match dim.terms:
        case ((1, ((Symbol(name), 1),)),):
            return name
    return None


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


# ---- ops of operands and attributes alone


def _transpose(op: Op, x: Array) -> Array:
    return np.transpose(x, op.ints_attr("perm"))


def _flip(op: Op, x: Array) -> Array:
    return np.flip(x, op.ints_attr("axes"))


def _concat(op: Op, *parts: Array) -> Array:
    return np.concatenate(parts, op.int_attr("axis"))


def _select(op: Op, cond: Array, x: Array, y: Array) -> Array:
    return np.where(cond, x, y)


def _in_range(op: Op, index: Array, size: int, axis: int) -> None:
    bad = index[(index < 0) | (index >= size)]
    if bad.size:
        at = f" at {op.loc}" if op.loc else ""
        raise IndexRangeError(
            f"{op.name}{at}: index {bad.flat[0]} is outside axis {axis} of size {size}"
        )


def _index(op: Op, x: Array, *indices: Array) -> Array:
    for axis, index in enumerate(indices):
        _in_range(op, index, x.shape[axis], axis)
    found: Array = x[tuple(indices)]
    return found


def _take_along(op: Op, x: Array, index: Array) -> Array:
    axis = op.int_attr("axis")
    _in_range(op, index, x.shape[axis], axis)
    front = [slice(size) for size in index.shape]
    front[axis] = slice(None)
    return np.take_along_axis(x[tuple(front)], index.astype(np.int64), axis)


def _reduce(op: Op, x: Array) -> Array:
    axes, keepdims = op.ints_attr("axes"), op.bool_attr("keepdims")
    match op.str_attr("op"):
        case "sum":
            return np.asarray(np.sum(x, axes, x.dtype, keepdims=keepdims))
        case "prod":
            return np.asarray(np.prod(x, axes, x.dtype, keepdims=keepdims))
        case "any":
            return np.asarray(np.any(x, axes, keepdims=keepdims))
        case "all":
            return np.asarray(np.all(x, axes, keepdims=keepdims))
        case "max":
            return _extreme(np.max, "max", x, axes, keepdims)
        case "min":
            return _extreme(np.min, "min", x, axes, keepdims)
    raise InternalError("interpreter", f"no reduction is called {op.attr('op')}")


def _dtype_of(x: Array) -> DType:
    return next(d for d, kind in NUMPY.items() if kind == x.dtype)


def _extreme(
    function: Callable[..., Any],
    name: str,
    x: Array,
    axes: tuple[int, ...],
    keepdims: bool,
) -> Array:
    start = identity(name, _dtype_of(x))
    return np.asarray(function(x, axes, keepdims=keepdims, initial=start))


def _argreduce(op: Op, x: Array) -> Array:
    function = np.argmax if op.str_attr("op") == "max" else np.argmin
    found = function(x, op.int_attr("axis"), keepdims=op.bool_attr("keepdims"))
    return np.asarray(found)


def _cumulate(op: Op, x: Array) -> Array:
    function = np.cumsum if op.str_attr("op") == "sum" else np.cumprod
    return function(x, op.int_attr("axis"), x.dtype)


def _matmul(op: Op, a: Array, b: Array) -> Array:
    return np.asarray(np.matmul(a, b))


def _windows(x: Array, window: Sequence[int], op: Op, lead: int, padding: Any) -> Array:
    """Every position of a sliding window: (lead.., out.., window..)."""
    low, high = op.ints_attr("low"), op.ints_attr("high")
    pads = [(0, 0)] * lead + list(zip(low, high, strict=True))
    x = np.pad(x, pads, constant_values=padding)
    dilation = op.ints_attr("dilation")
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, window, strict=True)]
    axes = tuple(range(lead, x.ndim))
    view = np.lib.stride_tricks.sliding_window_view(x, spans, axes)
    steps = [slice(None, None, s) for s in op.ints_attr("stride")]
    inner = [slice(None, None, d) for d in dilation]
    found: Array = view[tuple([slice(None)] * lead + steps + inner)]
    return found


def _conv(op: Op, x: Array, w: Array) -> Array:
    groups, spatial = op.int_attr("groups"), x.ndim - 2
    windows = _windows(x, w.shape[2:], op, 2, 0)
    out, kernel = list(range(3, 3 + spatial)), list(range(10, 10 + spatial))
    parts = windows.reshape(
        (x.shape[0], groups, x.shape[1] // groups, *windows.shape[2:])
    )
    weights = w.reshape((groups, w.shape[0] // groups, *w.shape[1:]))
    # labels: 0 batch, 1 group, 2 channel in the group, 20 output in the group
    found = np.einsum(
        parts,
        [0, 1, 2, *out, *kernel],
        weights,
        [1, 20, 2, *kernel],
        [0, 1, 20, *out],
        optimize=x.size > 0,
    )
    return np.asarray(
        found.reshape((x.shape[0], w.shape[0], *windows.shape[2 : 2 + spatial]))
    )


def _conv_transpose(op: Op, x: Array, w: Array) -> Array:
    groups, spatial = op.int_attr("groups"), x.shape[2:]
    names = ("stride", "dilation", "low", "high", "extra")
    stride, dilation, low, high, extra = (op.ints_attr(name) for name in names)
    reach = [
        (d - 1) * s + e * (k - 1) + 1 + more
        for d, s, e, k, more in zip(
            spatial, stride, dilation, w.shape[2:], extra, strict=True
        )
    ]
    outputs = w.shape[1] * groups
    full = np.zeros((x.shape[0], outputs, *(max(r, 0) for r in reach)), x.dtype)
    parts = x.reshape((x.shape[0], groups, x.shape[1] // groups, *spatial))
    weights = w.reshape((groups, w.shape[0] // groups, *w.shape[1:]))
    for tap in product(*map(range, w.shape[2:])):
        where: Any = (..., *tap)
        share = np.einsum("ngc...,gco->ngo...", parts, weights[where])
        places = [
            slice(t * e, t * e + max(d - 1, -1) * s + 1, s)
            for t, e, d, s in zip(tap, dilation, spatial, stride, strict=True)
        ]
        if 0 not in spatial:
            full[(slice(None), slice(None), *places)] += share.reshape(
                (x.shape[0], outputs, *spatial)
            )
    crop = [slice(a, r - b) for a, b, r in zip(low, high, reach, strict=True)]
    found: Array = full[(slice(None), slice(None), *crop)]
    return found


def _pool(op: Op, x: Array) -> Array:
    window = op.ints_attr("window")
    lead = x.ndim - len(window)
    axes = tuple(range(-len(window), 0))
    if op.str_attr("op") == "max":
        start = identity("max", _dtype_of(x))
        windows = _windows(x, window, op, lead, start)
        return np.asarray(np.max(windows, axes, initial=start))
    total = np.sum(_windows(x, window, op, lead, 0), axes, x.dtype)
    if op.bool_attr("include_pad"):
        return np.asarray(total / math.prod(window)).astype(x.dtype)
    real = _windows(np.ones_like(x), window, op, lead, 0)
    return np.asarray(total / np.sum(real, axes, x.dtype))


def _linear(op: Op, x: Array, w: Array, *bias: Array) -> Array:
    return np.asarray(np.matmul(x, w.T) + (bias[0] if bias else 0)).astype(x.dtype)


def _softmax(op: Op, x: Array) -> Array:
    axis = (op.int_attr("axis"),)
    exp = np.exp(x - _extreme(np.max, "max", x, axis, True))
    return np.asarray(exp / np.sum(exp, axis, keepdims=True))


def _log_softmax(op: Op, x: Array) -> Array:
    axis = (op.int_attr("axis"),)
    moved = x - _extreme(np.max, "max", x, axis, True)
    return np.asarray(moved - np.log(np.sum(np.exp(moved), axis, keepdims=True)))


def _relu(op: Op, x: Array) -> Array:
    return np.maximum(x, np.zeros_like(x))


def _silu(op: Op, x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def _gelu(op: Op, x: Array) -> Array:
    if op.str_attr("approximate") == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return np.asarray(0.5 * x * (1 + np.tanh(inner)))
    erf: Array = UNARY["erf"](x * np.asarray(math.sqrt(0.5), x.dtype))
    return np.asarray(0.5 * x * (1 + erf))


def _normalised(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    count = math.prod(x.shape[a] for a in axes)
    mean = np.sum(x, axes, keepdims=True) / np.asarray(count, x.dtype)
    centred = x - mean
    var = np.sum(centred * centred, axes, keepdims=True) / np.asarray(count, x.dtype)
    return np.asarray(centred / np.sqrt(var + np.asarray(eps, x.dtype)))


def _scaled(x: Array, weights: Sequence[Array]) -> Array:
    """x * w + b, of as many as there are."""
    if weights:
        x = x * weights[0]
    return x + weights[1] if len(weights) > 1 else x


def _layer_norm(op: Op, x: Array, *weights: Array) -> Array:
    axes = tuple(range(x.ndim - op.int_attr("axes"), x.ndim))
    return _scaled(_normalised(x, axes, op.float_attr("eps")), weights)


def _rms_norm(op: Op, x: Array, *weights: Array) -> Array:
    axes = tuple(range(x.ndim - op.int_attr("axes"), x.ndim))
    count = np.asarray(math.prod(x.shape[a] for a in axes), x.dtype)
    mean = np.sum(x * x, axes, keepdims=True) / count
    return _scaled(
        x / np.sqrt(mean + np.asarray(op.float_attr("eps"), x.dtype)), weights
    )


def _per_channel(w: Array, rank: int) -> Array:
    return w.reshape((-1,) + (1,) * (rank - 2))


def _group_norm(op: Op, x: Array, *weights: Array) -> Array:
    groups = op.int_attr("groups")
    parts = x.reshape(
        (x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))
    )
    normal = _normalised(parts, (2, 3), op.float_attr("eps")).reshape(x.shape)
    return _scaled(normal, [_per_channel(w, x.ndim) for w in weights])


def _batch_norm(op: Op, x: Array, mean: Array, var: Array, *weights: Array) -> Array:
    mean, var = _per_channel(mean, x.ndim), _per_channel(var, x.ndim)
    normal = (x - mean) / np.sqrt(var + np.asarray(op.float_attr("eps"), x.dtype))
    return _scaled(normal, [_per_channel(w, x.ndim) for w in weights])


def _attention(op: Op, q: Array, k: Array, v: Array, *mask: Array) -> Array:
    given = op.attr("scale")
    scale = 1 / math.sqrt(q.shape[-1]) if given is None else op.float_attr("scale")
    shared = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
    k, v = np.repeat(k, shared, -3), np.repeat(v, shared, -3)
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * np.asarray(scale, q.dtype)
    if op.bool_attr("causal"):
        rows, columns = np.ogrid[: scores.shape[-2], : scores.shape[-1]]
        scores = np.where(columns <= rows, scores, -np.inf).astype(q.dtype)
    for m in mask:
        if m.dtype == np.bool_:
            scores = np.where(m, scores, -np.inf).astype(q.dtype)
        else:
            scores = scores + m
    top = _extreme(np.max, "max", scores, (scores.ndim - 1,), True)
    masked = top == -np.inf
    exp = np.exp(scores - np.where(masked, 0, top))
    weights = exp / np.sum(exp, -1, keepdims=True)
    result = np.where(masked, 0, np.matmul(weights, v)).astype(q.dtype)
    return np.swapaxes(result, -2, -3) if op.bool_attr("swapped") else result


def _einsum(op: Op, *operands: Array) -> Array:
    return np.asarray(np.einsum(op.str_attr("equation"), *operands))


_PURE: dict[str, Callable[..., Array]] = {
    "select": _select,
    "transpose": _transpose,
    "flip": _flip,
    "concat": _concat,
    "index": _index,
    "take_along": _take_along,
    "reduce": _reduce,
    "argreduce": _argreduce,
    "cumulate": _cumulate,
    "matmul": _matmul,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "pool": _pool,
    "linear": _linear,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "relu": _relu,
    "silu": _silu,
    "gelu": _gelu,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "attention": _attention,
    "einsum": _einsum,
}


# ---- ops that need the symbols or the module


def _cast(run: Interpreter, op: Op, env: Any, x: Array) -> Array:
    target = op.dtype_attr("dtype")
    if target is DType.BOOL:
        return np.asarray(x != 0)
    return run.rounded(x, target)


def _constant(run: Interpreter, op: Op, env: Any) -> Array:
    constant = run.module.constants[op.str_attr("name")]
    if constant.type.dtype is DType.BF16:
        return np.asarray(bf16_value(constant.data))
    return constant.data


def _full(run: Interpreter, op: Op, env: dict[str, int]) -> Array:
    number, dtype = op.attr("value"), op.dtype_attr("dtype")
    assert isinstance(number, bool | int | float)
    wide = run.precise and dtype.is_float
    value = np.float64(number) if wide else literal(number, dtype)
    return np.full(sizes_of(op.dims_attr("shape"), env), value)


def _iota(run: Interpreter, op: Op, env: dict[str, int]) -> Array:
    shape = sizes_of(op.dims_attr("shape"), env)
    axis = op.int_attr("axis")
    steps = np.arange(shape[axis]).reshape([-1] + [1] * (len(shape) - axis - 1))
    return np.broadcast_to(steps, shape)


def _dim_value(run: Interpreter, op: Op, env: dict[str, int]) -> Array:
    return np.asarray(op.dim_attr("value").evaluate(env))


def _broadcast(run: Interpreter, op: Op, env: dict[str, int], x: Array) -> Array:
    shape = sizes_of(op.dims_attr("shape"), env)
    aligned = [1] * len(shape)
    for i, axis in enumerate(op.ints_attr("axes")):
        aligned[axis] = x.shape[i]
    return np.broadcast_to(x.reshape(aligned), shape)


def _reshape(run: Interpreter, op: Op, env: dict[str, int], x: Array) -> Array:
    return x.reshape(sizes_of(op.dims_attr("shape"), env))


def _slice(run: Interpreter, op: Op, env: dict[str, int], x: Array) -> Array:
    starts = sizes_of(op.dims_attr("starts"), env)
    shape = sizes_of(op.dims_attr("shape"), env)
    parts = []
    for dim, start, size, step in zip(
        x.shape, starts, shape, op.ints_attr("steps"), strict=True
    ):
        last = start + (size - 1) * step
        if start < 0 or size < 0 or (size > 0 and last >= dim):
            raise ShapeError(f"slice: {start} to {last} is outside a dim of {dim}")
        parts.append(slice(start, start + size * step, step))
    found: Array = x[tuple(parts)]
    return found


def _pad(run: Interpreter, op: Op, env: dict[str, int], x: Array) -> Array:
    low, high = sizes_of(op.dims_attr("low"), env), sizes_of(op.dims_attr("high"), env)
    value = op.attr("value")
    assert isinstance(value, bool | int | float)
    pads = list(zip(low, high, strict=True))
    number = np.asarray(value).astype(x.dtype)
    return np.pad(x, pads, constant_values=number) if pads else x


def _resize(run: Interpreter, op: Op, env: dict[str, int], x: Array) -> Array:
    shape = sizes_of(op.dims_attr("shape"), env)
    scales = op.attr("scales")
    assert isinstance(scales, tuple)
    for i, size in enumerate(shape):
        axis = x.ndim - len(shape) + i
        factor = scales[i] if scales else None
        assert factor is None or isinstance(factor, float)
        weights = _resampling(op, x.shape[axis], size, factor, run.precise)
        if weights.dtype == np.int64:  # nearest: positions, exact for every type
            x = np.take(x, weights, axis)
        else:
            moved = np.moveaxis(x, axis, -1)
            x = np.moveaxis(np.matmul(moved, weights.T.astype(x.dtype)), -1, axis)
    return x


def _resampling(
    op: Op, size: int, out: int, factor: float | None, precise: bool
) -> Array:
    """Positions (nearest), or the weight of each input for each output."""
    real: Any = np.float64 if precise else np.float32
    mode, aligned = op.str_attr("mode"), op.bool_attr("align_corners")
    place: Any = np.arange(out).astype(real)
    scale = real(1 / factor) if factor else real(size) / real(max(out, 1))
    if mode.startswith("nearest"):
        shift = real(0.5) if mode == "nearest_exact" else real(0)
        found = np.floor((place + shift) * scale).astype(np.int64)
        return np.asarray(np.minimum(found, size - 1))
    if aligned:
        at = place * (real(size - 1) / real(out - 1) if out > 1 else real(0))
    else:
        at = (place + real(0.5)) * scale - real(0.5)
        at = np.maximum(at, real(0)) if mode == "linear" else at
    first = np.floor(at)
    part = at - first
    if mode == "linear":
        taps = {0: 1 - part, 1: part}
    else:
        taps = {
            -1: _cubic_far(part + 1),
            0: _cubic_near(part),
            1: _cubic_near(1 - part),
            2: _cubic_far(2 - part),
        }
    weights = np.zeros((out, size), real)
    for offset, share in taps.items():
        column = np.clip(first.astype(np.int64) + offset, 0, size - 1)
        np.add.at(weights, (np.arange(out), column), share)
    return weights


def _cubic_near(t: Any) -> Any:
    """Cubic convolution for distances up to 1, with torch's coefficient -0.75."""
    return (1.25 * t - 2.25) * t * t + 1


def _cubic_far(t: Any) -> Any:
    """Cubic convolution for distances from 1 to 2."""
    return ((-0.75 * t + 3.75) * t - 6) * t + 3


_SHAPED: dict[str, Callable[..., Array]] = {
    "cast": _cast,
    "constant": _constant,
    "full": _full,
    "iota": _iota,
    "dim_value": _dim_value,
    "broadcast": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "pad": _pad,
    "resize": _resize,
}


# ---- control


def _if(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    then, other = op.regions
    return run.region(then if operands[0] else other, operands[1:], env)


def _loop(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    carried = operands[1:]
    for i in range(int(operands[0])):
        carried = run.region(op.regions[0], [np.asarray(i, np.int64), *carried], env)
    return carried


def _while(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    cond, body = op.regions
    while run.region(cond, operands, env)[0]:
        operands = run.region(body, operands, env)
    return operands


def _match_cast(
    run: Interpreter, op: Op, env: Any, operands: list[Array]
) -> list[Array]:
    return operands


def _nonzero(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    return [np.argwhere(operands[0])]


def _call(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    callee = run.module.graphs[op.str_attr("callee")]
    sizes = sizes_of(op.dims_attr("sizes"), env)
    return run.call(callee, operands, dict(zip(callee.sizes, sizes, strict=True)))


def _fusion(run: Interpreter, op: Op, env: Any, operands: list[Array]) -> list[Array]:
    return run.region(op.regions[0], operands, env)


_CONTROL: dict[str, Callable[..., list[Array]]] = {
    "if": _if,
    "loop": _loop,
    "while": _while,
    "match_cast": _match_cast,
    "nonzero": _nonzero,
    "call": _call,
    "fusion": _fusion,
}


# ---- lowered


def _alloc(run: Interpreter, op: Op, values: dict[Value, Any], env: Any) -> None:
    memory = _poisoned(op.dim_attr("bytes").evaluate(env))
    values[op.result] = run.place(op.result.type, memory, env)


def _view(run: Interpreter, op: Op, values: dict[Value, Any], env: Any) -> None:
    source = run.placed(op.operands[0], values, env)
    memory = source.memory.at(op.dim_attr("offset").evaluate(env))
    values[op.result] = run.place(op.result.type, memory, env)


def _call_loop(run: Interpreter, op: Op, values: dict[Value, Any], env: Any) -> None:
    func = run.module.loops[op.str_attr("callee")]
    sizes = sizes_of(op.dims_attr("sizes"), env)
    bound = dict(zip(func.sizes, sizes, strict=True))
    for value in op.results:
        values[value] = run.fresh(value.type, env)
    memories: list[Memory] = []
    for given, buffer in zip(destinations(func, op), func.buffers, strict=True):
        if given is not None:
            memories.append(run.placed(given, values, env).memory)
        else:
            shape = sizes_of(buffer.shape, bound)
            memories.append(_poisoned(math.prod(shape) * buffer.dtype.bytes))
    options = {"workers": run.workers, "check_races": run.check_races}
    run_loop(func, run.module, sizes, memories, **options)  # type: ignore[arg-type]


def _call_library(run: Interpreter, op: Op, values: dict[Value, Any], env: Any) -> None:
    name = op.str_attr("callee")
    if name not in run.libraries:
        raise ValueError(f"the interpreter has no code for library function @{name}")
    inputs = [run.placed(v, values, env).elements() for v in op.operands]
    for value in op.results:
        values[value] = run.fresh(value.type, env)
    outputs = [values[value].elements() for value in op.results]
    run.libraries[name](inputs, outputs)


_LOWERED: dict[str, Callable[..., None]] = {
    "alloc": _alloc,
    "view": _view,
    "call_loop": _call_loop,
    "call_library": _call_library,
}
