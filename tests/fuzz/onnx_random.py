"""A random ONNX model from a seed: nodes of the catalogue on values that fit.

What fits is known by running: every node is computed by ONNX Runtime at all sizes that
the model will be called with. So a dim is static if it is the same at all of them, and
two dims are equal if they always are. Floats that are small multiples of a power of two
are exact wherever they are computed; only of those may a model choose (compare, round,
sort), so that rounding does not decide what is right.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

SYMBOLS = ("b", "n", "m")
OPSETS = (13, 17, 18, 20, 22)
MOST_ELEMENTS = 200_000
Sizes = tuple[int, ...]
Array = np.ndarray[Any, Any]


class Unfit(Exception):
    """This node does not fit here."""


@dataclass(frozen=True)
class Input:
    name: str
    dims: tuple[str | int, ...]
    dtype: str

    def make(self, sizes: Sizes, seed: int) -> Array:
        env = dict(zip(SYMBOLS, sizes, strict=True))
        shape = [env[d] if isinstance(d, str) else d for d in self.dims]
        salt = f"{seed} {self.name} {sizes}"
        rng = np.random.default_rng(random.Random(salt).getrandbits(40))
        if self.dtype == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        if self.dtype.startswith("float"):
            return (rng.integers(-12, 13, shape) / 4).astype(self.dtype)
        low = 0 if self.dtype.startswith("uint") else -3
        return rng.integers(low, 8, shape).astype(self.dtype)


@dataclass(frozen=True)
class Model:
    seed: int
    opset: int
    inputs: tuple[Input, ...]
    nodes: tuple[bytes, ...]
    constants: tuple[tuple[str, Array], ...]
    outputs: tuple[str, ...]
    sizes: tuple[Sizes, ...]
    kinds: tuple[tuple[str, str], ...]  # the element type of every value

    def proto(self, extra: Sequence[str] = ()) -> onnx.ModelProto:
        """The model; `extra` are values that it gives as well."""
        nodes = [onnx.NodeProto.FromString(node) for node in self.nodes]
        return as_model(
            nodes,
            [(v.name, np.dtype(v.dtype), v.dims) for v in self.inputs],
            dict(self.constants),
            (*self.outputs, *extra),
            self.opset,
            dict(self.kinds),
        )

    def arguments(self, sizes: Sizes) -> list[Array]:
        return [v.make(sizes, self.seed) for v in self.inputs]

    def parts(self) -> list[str]:
        return [onnx.NodeProto.FromString(node).op_type for node in self.nodes]

    def needed(self) -> Model:
        """Without what its outputs do not need."""
        wanted, nodes = set(self.outputs), list[bytes]()
        for text in reversed(self.nodes):
            node = onnx.NodeProto.FromString(text)
            if wanted.intersection(node.output):
                wanted.update(read_by(node))
                nodes.append(text)
        constants = tuple(c for c in self.constants if c[0] in wanted)
        inputs = tuple(i for i in self.inputs if i.name in wanted)
        return replace(
            self,
            nodes=tuple(reversed(nodes)),
            constants=constants,
            inputs=inputs or self.inputs[:1],
        )

    def smaller(self) -> Iterator[Model]:
        for name in self.outputs if len(self.outputs) > 1 else ():
            yield replace(self, outputs=(name,)).needed()
        for text in self.nodes:
            name = onnx.NodeProto.FromString(text).output[0]
            if name not in self.outputs:
                yield replace(self, outputs=(name,)).needed()
        for size in self.sizes if len(self.sizes) > 1 else ():
            yield replace(self, sizes=(size,))

    def script(self) -> str:
        """The model as text, and what its inputs are made of."""
        made = onnx.printer.to_text(self.proto())
        return f"{made}\nseed {self.seed}, inputs {self.inputs}, sizes {self.sizes}"


def read_by(node: onnx.NodeProto) -> set[str]:
    """Names that a node reads, its graphs included."""
    found = set(node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            found |= read_by(inner)
        found.update(v.name for v in attribute.g.output)
    return found


def as_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[tuple[str, np.dtype[Any], Sequence[str | int]]],
    constants: dict[str, Array],
    outputs: Sequence[str],
    opset: int,
    kinds: dict[str, str],
) -> onnx.ModelProto:
    given = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(dtype), list(dims)
        )
        for name, dtype, dims in inputs
    ]
    made = [helper.make_empty_tensor_value_info(name) for name in outputs]
    for value in made:
        if value.name in kinds:
            dtype = np.dtype(kinds[value.name])
            value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(dtype)
    stored = [numpy_helper.from_array(a, name) for name, a in constants.items()]
    graph = helper.make_graph(list(nodes), "random", given, made, stored)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run(proto: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    return session(proto.SerializeToString()).run(None, feeds)


@functools.lru_cache(maxsize=8)
def session(content: bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.graph_optimization_level = level
    return onnxruntime.InferenceSession(
        content, options, providers=["CPUExecutionProvider"]
    )


@dataclass(eq=False)
class Value:
    """A value of the model at all sizes; `dims` are its dims at each of them."""

    name: str
    arrays: list[Array]
    exact: bool

    @property
    def dims(self) -> list[tuple[int, ...]]:
        return list(zip(*(a.shape for a in self.arrays), strict=True))

    @property
    def rank(self) -> int:
        return self.arrays[0].ndim

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.arrays[0].dtype

    @property
    def is_float(self) -> bool:
        return self.dtype.kind == "f"

    def static(self, axis: int) -> int | None:
        """The size of a dim that is always the same."""
        sizes = set(self.dims[axis])
        return sizes.pop() if len(sizes) == 1 else None


class Maker:
    def __init__(self, seed: int, only: str | None) -> None:
        self.seed, self.only = seed, only
        self.rng = random.Random(seed)
        self.opset = self.rng.choice(OPSETS)
        self.sizes = tuple(
            tuple(self.rng.choice(choice) for _ in SYMBOLS)
            for choice in ((2, 3, 5), (1, 4, 7), (6, 9, 17))
        )
        self.inputs: list[Input] = []
        self.values: list[Value] = []
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.names = 0

    # ---- values

    def name(self, letter: str = "v") -> str:
        self.names += 1
        return f"{letter}{self.names}"

    def input(self, dtype: str = "float32", rank: int | None = None) -> Value:
        rank = self.rng.choice((1, 2, 3, 3, 4)) if rank is None else rank
        dims = tuple(
            self.rng.choice((*SYMBOLS, *SYMBOLS, 1, 4, 6)) for _ in range(rank)
        )
        made = Input(self.name("x"), dims, dtype)
        self.inputs.append(made)
        arrays = [made.make(sizes, self.seed) for sizes in self.sizes]
        value = Value(made.name, arrays, True)
        self.values.append(value)
        return value

    def pick(
        self, fits: Callable[[Value], bool], new: Callable[[], Value] | None = None
    ) -> Value:
        """One that fits, likely a late one."""
        found = [v for v in self.values if fits(v)]
        if found and (new is None or self.rng.random() < 0.85):
            return self.rng.choice(found[-6:])
        made = self.input() if new is None else new()
        if not fits(made):
            raise Unfit
        return made

    def float(self, rank: int | None = None, exact: bool = False) -> Value:
        return self.pick(
            lambda v: (
                v.dtype == np.float32
                and (rank is None or v.rank == rank)
                and (v.exact or not exact)
            ),
            lambda: self.input("float32", rank),
        )

    def whole(self) -> Value:
        kind = self.rng.choice(("int64", "int64", "int32"))
        return self.pick(lambda v: v.dtype.name == kind, lambda: self.input(kind))

    def truth(self) -> Value:
        return self.pick(lambda v: v.dtype == bool, lambda: self.input("bool"))

    def fellow(self, x: Value) -> Value:
        """A value of the same type that broadcasts with it."""

        def fits(v: Value) -> bool:
            if v.dtype != x.dtype or v is x:
                return False
            pairs = zip(reversed(v.dims), reversed(x.dims), strict=False)
            return all(a == b or set(a) == {1} or set(b) == {1} for a, b in pairs)

        return self.pick(fits, lambda: self.like(x))

    def like(self, x: Value) -> Value:
        """A new input of the shape, as far as symbols can say it; else a constant."""
        dims: list[str | int] = []
        for axis, sizes in enumerate(x.dims):
            found = [
                s
                for k, s in enumerate(SYMBOLS)
                if tuple(z[k] for z in self.sizes) == sizes
            ]
            static = x.static(axis)
            if found:
                dims.append(found[0])
            elif static is not None:
                dims.append(static)
            else:
                raise Unfit
        made = Input(self.name("x"), tuple(dims), x.dtype.name)
        self.inputs.append(made)
        arrays = [made.make(sizes, self.seed) for sizes in self.sizes]
        self.values.append(Value(made.name, arrays, True))
        return self.values[-1]

    def constant(self, array: Any, dtype: Any = np.int64) -> str:
        name = self.name("c")
        self.constants[name] = np.asarray(array, dtype)
        return name

    def weight(self, *shape: int) -> str:
        rng = np.random.default_rng(self.rng.getrandbits(40))
        return self.constant(rng.integers(-6, 7, shape) / 8, np.float32)

    # ---- nodes

    def add(
        self,
        op: str,
        inputs: Sequence[Value | str],
        exact: bool = False,
        outputs: int = 1,
        domain: str = "",
        **attrs: Any,
    ) -> list[Value]:
        """A node, if ONNX Runtime computes it at all sizes."""
        names = [v if isinstance(v, str) else v.name for v in inputs]
        made = [self.name() for _ in range(outputs)]
        node = helper.make_node(op, names, made, domain=domain, **attrs)
        wanted = {v for v in read_by(node) if v}
        known = {v.name: v for v in self.values}
        constants = {n: self.constants[n] for n in wanted if n in self.constants}
        feeds = [known[n] for n in sorted(wanted) if n in known]
        arrays: list[list[Array]] = []
        for k in range(len(self.sizes)):
            given = {v.name: v.arrays[k] for v in feeds}
            kinds = [(n, a.dtype, a.shape) for n, a in given.items()]
            proto = as_model([node], kinds, constants, made, self.opset, {})
            try:
                arrays.append(run(proto, given))
            except Exception as error:
                raise Unfit from error
        if any(not 0 < a.size <= MOST_ELEMENTS for row in arrays for a in row):
            raise Unfit
        fresh = []
        for name, column in zip(made, zip(*arrays, strict=True), strict=True):
            value = Value(name, list(column), False)
            if len({a.ndim for a in column}) > 1:
                raise Unfit
            value.exact = not value.is_float or (exact and all(map(is_exact, column)))
            fresh.append(value)
        self.nodes.append(node)
        self.values.extend(fresh)
        return fresh

    def step(self) -> None:
        from onnx_catalogue import ENTRIES

        names = [n for n in ENTRIES if self.only in (None, n)] if self.only else []
        if self.only and not names:
            raise ValueError(f"the catalogue has no {self.only}")
        name = self.rng.choice(names or list(ENTRIES))
        kept = len(self.nodes), len(self.values), len(self.inputs)
        try:
            ENTRIES[name](self)
        except Unfit:
            del self.nodes[kept[0] :], self.values[kept[1] :], self.inputs[kept[2] :]

    def make(self) -> Model:
        wanted = self.rng.randint(1, 9)
        for _ in range(12 * wanted):
            if len(self.nodes) >= wanted:
                break
            self.step()
            self.only = None if self.nodes else self.only
        used = {name for node in self.nodes for name in read_by(node)}
        made = [o for node in self.nodes for o in node.output]
        leaves = [name for name in made if name not in used]
        if len(made) > len(leaves) and self.rng.random() < 0.3:
            leaves.append(self.rng.choice([m for m in made if m in used]))
        return Model(
            self.seed,
            self.opset,
            tuple(self.inputs),
            tuple(node.SerializeToString() for node in self.nodes),
            tuple(self.constants.items()),
            tuple(leaves),
            self.sizes,
            tuple((v.name, v.dtype.name) for v in self.values),
        ).needed()


def is_exact(array: Array) -> bool:
    """Small multiples of a power of two, with bits to spare."""
    if not np.isfinite(array).all():
        return False
    scaled = array.astype(np.float64) * 1024
    return bool((np.abs(array) < 2**11).all() and (scaled == np.round(scaled)).all())


def onnx_model(seed: int, only: str | None = None) -> Model:
    return Maker(seed, only).make()
