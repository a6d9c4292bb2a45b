"""The op table: every op of the graph IR, its attributes, its shape rule, its traits.

Shapes are explicit: elementwise operands have one shape, `broadcast` makes it so.
Two dims that must be equal but are not provably so become a constraint (a run-time
guard with the op as its origin), never a guess.

ELEMENTWISE (operands of one shape and dtype, result the same unless said)
  unary   neg abs sign exp expm1 log log1p sqrt rsqrt reciprocal sin cos tan tanh erf
          sigmoid floor ceil round trunc bitwise_not;  isnan isinf logical_not -> bool
  binary  add sub mul div floordiv mod pow minimum maximum atan2
          eq ne lt le gt ge -> bool;  logical_and logical_or logical_xor (bool)
          bitwise_and bitwise_or bitwise_xor shift_left shift_right
          `div` is true division (floats); `floordiv` and `mod` round as Python does;
          `minimum`/`maximum` propagate NaN; `round` is half to even
  select  (cond: bool, x, y)
  cast    {dtype}
CREATE    constant {name}             a Constant of the module
          full {value, dtype, shape}  every element is the number
          iota {axis, dtype, shape}   the index along axis
          dim_value {value, dtype}    an integer expression as a rank-0 tensor
MOVE      broadcast {shape, axes}     operand dim i is result dim axes[i]; the operand's
                                      dim is equal to it, or the constant 1
          reshape {shape}             same number of elements, row-major order
          transpose {perm}            result dim i is operand dim perm[i]
          slice {starts, shape, steps} element i is operand[start + i*step]
          flip {axes}
          concat {axis}               any number of operands
          pad {low, high, value}      dims added before and behind
          index (x, i0..ik)           indices of one shape over x's leading axes:
                                      result shape = i.shape + x.shape[k+1:]
          take_along (x, i) {axis}    result[.., j, ..] = x[.., i[.., j, ..], ..]
REDUCE    reduce {op, axes, keepdims} op: sum prod max min any all
          argreduce {op, axis, keepdims} op: max min -> i64, first of equals
          cumulate {op, axis}         running sum or prod
CONTRACT  matmul (a, b)               [.., M, K] x [.., K, N]; same rank; a batch dim is
                                      equal in both or the constant 1
          conv (x, w) {stride, low, high, dilation, groups}   x (N, C, spatial..),
                                      w (O, C/groups, kernel..)
          conv_transpose (x, w) {stride, low, high, dilation, groups, extra}
                                      w (C, O/groups, kernel..); `extra` lengthens the
                                      result at its end
          pool {op, window, stride, low, high, dilation, include_pad}
                                      op: max, mean; over trailing dims
COMPOSITE (decomposed by passes/decompose.py)
          linear (x, w[, b])          x @ w.T + b
          softmax {axis}  log_softmax {axis}  relu  silu  gelu {approximate}
          layer_norm (x[, w, b]) {axes, eps, affine}    over the last `axes` dims;
                                      affine: "none", "w", "wb"
          rms_norm (x[, w]) {axes, eps, affine}
          group_norm (x[, w, b]) {groups, eps, affine}
          batch_norm (x, mean, var[, w, b]) {eps, affine}    channels at dim 1
          attention (q, k, v[, mask]) {scale, causal, masked, swapped}
                                      q (.., Hq, Sq, D), k v (.., Hk, Sk, D|Dv), mask
                                      bool or additive (broadcast to .., Hq, Sq, Sk)
          resize (x) {shape, mode, align_corners, scales}    trailing spatial dims;
                                      mode: nearest, nearest_exact, linear, cubic
          einsum {equation}
CONTROL   if (cond, args..) regions then, else;   loop (n: i64 scalar, carried..) region
          body(i, carried..) -> carried;   while (carried..) regions cond, body
          match_cast {shape}          binds new symbols, checks known ones
          nonzero -> i64[fresh, rank];   call (args..) {callee}
          fusion (args..) {kind} region     one kernel, see passes/fuse.py
LOWERED   alloc {bytes, shape, dtype}   view {offset}   call_loop {callee, sizes}
          call_library {callee, sizes}
          the calls may stand in any function; with results they are made destinations

Attributes: `ints` are Python ints (strides, windows, conv and pool padding, axes, perm,
steps); `dims` are expressions (shapes, slice starts, pad widths). Axes count from the
front. A trailing `?` marks a kind that may be None. Every shape rule is forward, from
the operands' types to the results'; `infer` also checks, so it is the op's verifier.

More on single ops
  attention   swapped: the result is (.., Sq, Hq, D);  scale None is 1/sqrt(D);
              causal keeps column <= row, both counted from 0;
              Hq is a multiple of Hk; a row with every column masked gives 0
  index       an index is in 0 .. dim-1 (a negative one is wrapped before); checked at
              run time
  cast        as in C; float to bool is `!= 0`
  slice       start + (size-1)*step is inside the operand; steps are positive
  resize      `shape` holds the new sizes of the trailing dims; `scales` (or ()) the
              factors the model states, None where it states a size
  conv, pool  the padded input holds at least one whole window, as torch demands
  if          a result dim that differs between the regions becomes a fresh symbol
  loop, while a region's param whose dim is a symbol of its own may change size from
              round to round; the op's result has a fresh symbol there
  match_cast  checks itself: it adds no constraint to the graph
  call_loop, call_library  result types are stated, not deduced
"""

from __future__ import annotations

import enum
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from pliant.errors import DTypeError, ShapeError
from pliant.ir.graph import Attr, Graph, Op
from pliant.ir.types import DType, TensorType
from pliant.sym import (
    Cond,
    Expr,
    Facts,
    Guard,
    Symbol,
    as_expr,
    divides,
    eq,
    floordiv,
    le,
    sym,
)


class Trait(enum.Enum):
    """The family of an op, and what any pass may rely on."""

    ELEMENTWISE = enum.auto()
    MOVE = enum.auto()  # moves elements, computes nothing
    REDUCE = enum.auto()
    CONTRACT = enum.auto()
    COMPOSITE = enum.auto()  # has a spelling in primitive ops
    CREATE = enum.auto()  # no tensor operand
    CONTROL = enum.auto()
    LOWERED = enum.auto()  # only after lowering
    PURE = enum.auto()  # same operands and attributes: same results, no effect
    COMMUTATIVE = enum.auto()


REQUIRED = object()

# kind -> what the value must be, after ints in dims were made expressions
ATTR_KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "dtype": DType,
    "number": (bool, int, float),
    "dim": Expr,
    "ints": int,
    "floats": float,
    "dims": Expr,
}
TUPLES = frozenset({"ints", "floats", "dims"})


@dataclass(frozen=True, slots=True)
class AttrSpec:
    """An attribute; `kind` is a key of ATTR_KINDS, with `?` if it may hold None."""

    name: str
    kind: str
    default: object = REQUIRED
    choices: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        return self.kind.rstrip("?")

    @property
    def optional(self) -> bool:
        return self.kind.endswith("?")

    def normalise(self, op: str, value: object) -> Attr:
        """The value as the IR holds it; TypeError or ValueError if it cannot."""
        if self.base in TUPLES:
            if not isinstance(value, (tuple, list)):
                raise TypeError(f"{op}: {self.name} must be a tuple, is {value!r}")
            return tuple(self._element(op, v) for v in value)
        value = self._element(op, value)
        if self.choices and value not in self.choices:
            raise ValueError(
                f"{op}: {self.name} is {value!r}, must be one of {self.choices}"
            )
        return value

    def _element(self, op: str, value: object) -> Attr:
        if value is None and self.optional:
            return None
        base = self.base
        if base in ("dim", "dims") and isinstance(value, int):
            value = as_expr(int(value))
        if base in ("float", "floats") and isinstance(value, int):
            value = float(value)
        if base in ("int", "ints") and isinstance(value, Expr) and value.is_const:
            value = value.value
        stray = isinstance(value, bool) and base in ("int", "ints", "float", "floats")
        if stray or not isinstance(value, ATTR_KINDS[base]):
            raise TypeError(f"{op}: {self.name} is {value!r}, must be {self.kind}")
        return value  # type: ignore[return-value]


class Attrs:
    """Attributes by name, with typed readers."""

    __slots__ = ("_values", "op")

    def __init__(self, op: str, values: Iterable[tuple[str, Attr]]) -> None:
        self.op = op
        self._values = dict(values)

    def __getitem__(self, name: str) -> Attr:
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def integer(self, name: str) -> int:
        value = self._values[name]
        assert isinstance(value, int)
        return value

    def ints(self, name: str) -> tuple[int, ...]:
        value = self._values[name]
        assert isinstance(value, tuple)
        return tuple(v for v in value if isinstance(v, int))

    def dims(self, name: str) -> tuple[Expr, ...]:
        value = self._values[name]
        assert isinstance(value, tuple)
        return tuple(v for v in value if isinstance(v, Expr))

    def text(self, name: str) -> str:
        value = self._values[name]
        assert isinstance(value, str)
        return value

    def flag(self, name: str) -> bool:
        value = self._values[name]
        assert isinstance(value, bool)
        return value

    def dtype(self, name: str) -> DType:
        value = self._values[name]
        assert isinstance(value, DType)
        return value


def _number_fresh() -> Callable[[str], Expr]:
    count = iter(range(1 << 62))
    return lambda hint: sym(f"{hint}{next(count)}")


@dataclass(slots=True)
class InferContext:
    """What a shape rule may ask and must tell.

    `facts` grows with every requirement; `guards` are those that only the run can
    check. `fresh` names a symbol for a data-dependent size. `declared` are result
    types stated by the op itself, for ops whose results cannot be deduced.
    """

    facts: Facts
    op: str = ""
    loc: str = ""
    guards: list[Guard] = field(default_factory=list)
    fresh: Callable[[str], Expr] = field(default_factory=_number_fresh)
    callees: Mapping[str, Graph] = field(default_factory=dict)
    regions: tuple[Graph, ...] = ()
    declared: tuple[TensorType, ...] = ()

    def proves_equal(self, a: Expr, b: Expr) -> bool:
        return a is b or self.facts.prove(eq(a, b)) is True

    def require_equal(self, a: Expr, b: Expr, why: str) -> Expr:
        """The dim that both are: the constant one if there is one, else the plainer."""
        if a is not b:
            self.require(eq(a, b).plain(), why)
        if a.is_const or b.is_const:
            return a if a.is_const else b
        return a if len(str(a)) <= len(str(b)) else b

    def require(self, cond: Cond, why: str) -> None:
        """Proved, or known from here on and guarded; ShapeError if impossible."""
        answer = self.facts.prove(cond)
        if answer is False:
            raise ShapeError(self.describe(f"{why}: {cond} cannot hold"))
        if answer is None:
            words = {"eq": " == ", "ne": " != ", "le": " <= ", "lt": " < "}
            sign = words.get(cond.kind, " divides ")
            message = (f"{self.op}: {why}: ", cond.lhs, sign, cond.rhs)
            self.guards.append(Guard(cond, message, self.loc))
            try:
                self.facts = self.facts.assume(cond)
            except ValueError as error:  # contradicts what is known
                raise ShapeError(self.describe(f"{why}: {cond}: {error}")) from None

    def require_rank(self, type: TensorType, rank: int, what: str) -> None:
        if type.rank != rank:
            self.fail(f"{what} must have rank {rank}, is {type}")

    def same_shape(self, types: Sequence[TensorType], why: str) -> tuple[Expr, ...]:
        shape = types[0].shape
        for other in types[1:]:
            if len(other.shape) != len(shape):
                self.fail(f"{why}: ranks of {types[0]} and {other} differ")
            shape = tuple(
                self.require_equal(a, b, f"{why} at dim {i}")
                for i, (a, b) in enumerate(zip(shape, other.shape, strict=True))
            )
        return shape

    def same_dtype(self, types: Sequence[TensorType]) -> DType:
        for other in types[1:]:
            if other.dtype is not types[0].dtype:
                self.fail_dtype(f"operands are {types[0]} and {other}, must agree")
        return types[0].dtype

    def want(self, type: TensorType, kinds: str, what: str = "operand") -> None:
        if type.dtype.kind not in kinds:
            names = {"f": "float", "i": "int", "u": "unsigned int", "b": "bool"}
            allowed = " or ".join(names[k] for k in kinds)
            self.fail_dtype(f"{what} is {type}, must be {allowed}")

    def axis(self, axis: int, type: TensorType) -> int:
        if not 0 <= axis < type.rank:
            self.fail(f"axis {axis} is outside {type}")
        return axis

    def describe(self, problem: str) -> str:
        where = f" at {self.loc}" if self.loc else ""
        return f"{self.op}{where}: {problem}"

    def fail(self, problem: str) -> NoReturn:
        raise ShapeError(self.describe(problem))

    def fail_dtype(self, problem: str) -> NoReturn:
        raise DTypeError(self.describe(problem))


Types = tuple[TensorType, ...]
Infer = Callable[[InferContext, Types, Attrs], Types]


@dataclass(frozen=True, slots=True)
class OpDef:
    """One op: number of operands (least, most or None), attributes, rule, traits."""

    name: str
    arity: tuple[int, int | None]
    attrs: tuple[AttrSpec, ...]
    infer: Infer
    traits: frozenset[Trait]
    regions: int = 0

    def is_(self, trait: Trait) -> bool:
        return trait in self.traits

    def normalise(self, given: Mapping[str, object]) -> tuple[tuple[str, Attr], ...]:
        """Attributes in the table's order, defaults filled in."""
        unknown = sorted(set(given) - {spec.name for spec in self.attrs})
        if unknown:
            raise TypeError(f"{self.name} has no attribute {', '.join(unknown)}")
        out: list[tuple[str, Attr]] = []
        for spec in self.attrs:
            value = given.get(spec.name, spec.default)
            if value is REQUIRED:
                raise TypeError(f"{self.name} needs the attribute {spec.name}")
            out.append((spec.name, spec.normalise(self.name, value)))
        return tuple(out)


def infer(cx: InferContext, op: Op) -> Types:
    """The result types of an op, by its rule; checks operands, attributes, regions."""
    definition = OPS[op.name]
    cx.op, cx.loc, cx.regions = op.name, op.loc, op.regions
    least, most = definition.arity
    count = len(op.operands)
    if count < least or (most is not None and count > most):
        raise TypeError(cx.describe(f"takes {least}..{most} operands, not {count}"))
    if len(op.regions) != definition.regions:
        raise TypeError(cx.describe(f"takes {definition.regions} regions"))
    types = tuple(v.type for v in op.operands)
    return definition.infer(cx, types, Attrs(op.name, op.attrs))


def has_trait(op: Op, trait: Trait) -> bool:
    return trait in OPS[op.name].traits


# ---- elementwise


def _elementwise(kinds: str, to: DType | None = None) -> Infer:
    def rule(cx: InferContext, types: Types, _: Attrs) -> Types:
        cx.want(types[0], kinds)
        dtype = cx.same_dtype(types)
        shape = cx.same_shape(types, "operands must have one shape")
        return (TensorType(dtype if to is None else to, shape),)

    return rule


def _select(cx: InferContext, types: Types, _: Attrs) -> Types:
    cx.want(types[0], "b", "condition")
    dtype = cx.same_dtype(types[1:])
    # The shape's spelling is that of the chosen tensors.
    shape = cx.same_shape((*types[1:], types[0]), "operands must have one shape")
    return (TensorType(dtype, shape),)


def _cast(_: InferContext, types: Types, attrs: Attrs) -> Types:
    return (types[0].with_dtype(attrs.dtype("dtype")),)


# ---- create


def _given(cx: InferContext, _: Types, attrs: Attrs) -> Types:
    if "axis" in attrs:
        axis, rank = attrs.integer("axis"), len(attrs.dims("shape"))
        if not 0 <= axis < rank:
            cx.fail(f"axis {axis} is outside rank {rank}")
    return (TensorType(attrs.dtype("dtype"), attrs.dims("shape")),)


def _dim_value(cx: InferContext, _: Types, attrs: Attrs) -> Types:
    return (TensorType(attrs.dtype("dtype"), ()),)


def _declared(cx: InferContext, _: Types, __: Attrs) -> Types:
    return cx.declared


def _constant(cx: InferContext, _: Types, __: Attrs) -> Types:
    if len(cx.declared) != 1:
        raise TypeError(cx.describe("the type of a constant must be stated"))
    return cx.declared


# ---- move


def _broadcast(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), shape, axes = types, attrs.dims("shape"), attrs.ints("axes")
    if len(axes) != x.rank or list(axes) != sorted(set(axes)):
        cx.fail(f"axes {axes} must name one rising result dim per dim of {x}")
    for i, axis in enumerate(axes):
        if not 0 <= axis < len(shape):
            cx.fail(f"axis {axis} is outside rank {len(shape)}")
        if x.shape[i] != 1:
            cx.require_equal(x.shape[i], shape[axis], f"dim {i} must fit")
    return (x.with_shape(shape),)


def _reshape(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    out = types[0].with_shape(attrs.dims("shape"))
    cx.require_equal(types[0].numel, out.numel, "number of elements must stay")
    return (out,)


def _transpose(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), perm = types, attrs.ints("perm")
    if sorted(perm) != list(range(x.rank)):
        cx.fail(f"{perm} is no permutation of the dims of {x}")
    return (x.with_shape(tuple(x.shape[p] for p in perm)),)


def _slice(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), shape = types, attrs.dims("shape")
    starts, steps = attrs.dims("starts"), attrs.ints("steps")
    if not len(starts) == len(steps) == len(shape) == x.rank:
        cx.fail(f"starts, shape and steps must have one entry per dim of {x}")
    rows = zip(x.shape, starts, shape, steps, strict=True)
    for i, (dim, start, size, step) in enumerate(rows):
        if step < 1:
            cx.fail(f"step {step} of dim {i} must be positive")
        cx.require(le(0, start), f"start of dim {i}")
        cx.require(le(0, size), f"size of dim {i}")
        if size != 0:
            cx.require(le(start + (size - 1) * step + 1, dim), f"end of dim {i}")
    return (x.with_shape(shape),)


def _flip(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    for axis in attrs.ints("axes"):
        cx.axis(axis, types[0])
    return (types[0],)


def _concat(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    axis = cx.axis(attrs.integer("axis"), types[0])
    cx.same_dtype(types)
    rest = [t.with_shape(t.shape[:axis] + t.shape[axis + 1 :]) for t in types]
    shape = list(cx.same_shape(rest, "dims beside the axis must agree"))
    shape.insert(axis, sum((t.shape[axis] for t in types), as_expr(0)))
    return (types[0].with_shape(tuple(shape)),)


def _pad(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), low, high = types, attrs.dims("low"), attrs.dims("high")
    if not len(low) == len(high) == x.rank:
        cx.fail(f"low and high must have one entry per dim of {x}")
    for i, (before, behind) in enumerate(zip(low, high, strict=True)):
        cx.require(le(0, before), f"low of dim {i}")
        cx.require(le(0, behind), f"high of dim {i}")
    rows = zip(low, x.shape, high, strict=True)
    return (x.with_shape(tuple(a + d + b for a, d, b in rows)),)


def _index(cx: InferContext, types: Types, _: Attrs) -> Types:
    x, *indices = types
    for i in indices:
        cx.want(i, "iu", "index")
    if len(indices) > x.rank:
        cx.fail(f"{len(indices)} indices into {x}")
    shape = cx.same_shape(indices, "indices must have one shape")
    return (x.with_shape(shape + x.shape[len(indices) :]),)


def _take_along(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, i = types
    cx.want(i, "iu", "index")
    axis = cx.axis(attrs.integer("axis"), x)
    cx.require_rank(i, x.rank, "index")
    for d, (have, want) in enumerate(zip(x.shape, i.shape, strict=True)):
        if d != axis:  # torch.gather allows a shorter index, read from the front
            cx.require(le(want, have), f"index dim {d} must fit")
    return (x.with_shape(i.shape),)


# ---- reduce, contract


def _reduced(x: TensorType, axes: tuple[int, ...], keepdims: bool) -> TensorType:
    one = as_expr(1)
    if keepdims:
        shape = tuple(one if i in axes else d for i, d in enumerate(x.shape))
    else:
        shape = tuple(d for i, d in enumerate(x.shape) if i not in axes)
    return x.with_shape(shape)


def _reduce(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), axes = types, attrs.ints("axes")
    for axis in axes:
        cx.axis(axis, x)
    if len(set(axes)) != len(axes):
        cx.fail(f"axes {axes} repeat")
    cx.want(x, "b" if attrs.text("op") in ("any", "all") else "fiu")
    return (_reduced(x, axes, attrs.flag("keepdims")),)


def _argreduce(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), axis = types, cx.axis(attrs.integer("axis"), types[0])
    cx.require(le(1, x.shape[axis]), "the axis must have elements")
    return (_reduced(x, (axis,), attrs.flag("keepdims")).with_dtype(DType.I64),)


def _cumulate(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    cx.axis(attrs.integer("axis"), types[0])
    cx.want(types[0], "fiu")
    return types


def _matmul(cx: InferContext, types: Types, _: Attrs) -> Types:
    a, b = types
    dtype = cx.same_dtype(types)
    cx.want(a, "fiu")
    if a.rank != b.rank or a.rank < 2:
        cx.fail(f"operands must have one rank of at least 2, are {a} and {b}")
    batch = []
    for i, (x, y) in enumerate(zip(a.shape[:-2], b.shape[:-2], strict=True)):
        if x == 1 or y == 1:
            batch.append(y if x == 1 else x)
        else:
            batch.append(cx.require_equal(x, y, f"batch dim {i} must agree"))
    cx.require_equal(a.shape[-1], b.shape[-2], "inner dims must agree")
    return (TensorType(dtype, (*batch, a.shape[-2], b.shape[-1])),)


def _window(
    cx: InferContext,
    dims: Sequence[Expr],
    window: Sequence[Expr],
    attrs: Attrs,
) -> tuple[Expr, ...]:
    """Output sizes of a window that slides over padded dims."""
    names = ("stride", "low", "high", "dilation")
    lists = [attrs.ints(name) for name in names]
    for name, values in zip(names, lists, strict=True):
        if len(values) != len(window):
            cx.fail(f"{name} must have {len(window)} entries")
    out = []
    for i, row in enumerate(zip(dims, window, *lists, strict=True)):
        dim, size, stride, low, high, dilation = row
        span = dilation * (size - 1) + 1
        padded = dim + low + high
        cx.require(le(span, padded), f"spatial dim {i} must hold the window")
        out.append(floordiv(padded - span, stride) + 1)
    return tuple(out)


def _conv(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, w = types
    dtype, groups = cx.same_dtype(types), attrs.integer("groups")
    cx.require_rank(w, x.rank, "weight")
    if x.rank < 3:
        cx.fail(f"input must be (N, C, spatial..), is {x}")
    cx.require_equal(x.shape[1], w.shape[1] * groups, "channels must agree")
    cx.require(divides(groups, w.shape[0]), "groups must divide output channels")
    spatial = _window(cx, x.shape[2:], w.shape[2:], attrs)
    return (TensorType(dtype, (x.shape[0], w.shape[0], *spatial)),)


def _conv_transpose(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, w = types
    dtype, groups = cx.same_dtype(types), attrs.integer("groups")
    cx.require_rank(w, x.rank, "weight")
    if x.rank < 3:
        cx.fail(f"input must be (N, C, spatial..), is {x}")
    cx.require_equal(x.shape[1], w.shape[0], "channels must agree")
    cx.require(divides(groups, w.shape[0]), "groups must divide input channels")
    names = ("stride", "low", "high", "dilation", "extra")
    lists = [attrs.ints(name) for name in names]
    for name, values in zip(names, lists, strict=True):
        if len(values) != x.rank - 2:
            cx.fail(f"{name} must have {x.rank - 2} entries")
    spatial = []
    for i, row in enumerate(zip(x.shape[2:], w.shape[2:], *lists, strict=True)):
        dim, size, stride, low, high, dilation, extra = row
        out = (dim - 1) * stride - low - high + dilation * (size - 1) + extra + 1
        cx.require(le(1, out), f"output size of spatial dim {i}")
        spatial.append(out)
    return (TensorType(dtype, (x.shape[0], w.shape[1] * groups, *spatial)),)


def _pool(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), window = types, attrs.ints("window")
    if len(window) > x.rank:
        cx.fail(f"window {window} has more dims than {x}")
    if attrs.text("op") == "mean":
        cx.want(x, "f")
    lead = x.rank - len(window)
    spatial = _window(cx, x.shape[lead:], [as_expr(k) for k in window], attrs)
    return (x.with_shape(x.shape[:lead] + spatial),)


# ---- composite


def _axis_kept(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    if "axis" in attrs:
        cx.axis(attrs.integer("axis"), types[0])
    cx.want(types[0], "f")
    return types


def _relu(cx: InferContext, types: Types, _: Attrs) -> Types:
    cx.want(types[0], "fiu")
    return types


def _linear(cx: InferContext, types: Types, _: Attrs) -> Types:
    x, w, *bias = types
    dtype = cx.same_dtype(types)
    cx.require_rank(w, 2, "weight")
    if x.rank < 1:
        cx.fail("input must have a last dim")
    cx.require_equal(x.shape[-1], w.shape[1], "features must agree")
    for b in bias:
        cx.require_rank(b, 1, "bias")
        cx.require_equal(b.shape[0], w.shape[0], "bias must fit the weight")
    return (TensorType(dtype, (*x.shape[:-1], w.shape[0])),)


AFFINE = {"none": 0, "w": 1, "wb": 2}


def _affine(cx: InferContext, types: Types, attrs: Attrs, fixed: int) -> Types:
    """The weight and bias that follow the fixed operands."""
    count = AFFINE[attrs.text("affine")]
    if len(types) != fixed + count:
        cx.fail(f"affine '{attrs.text('affine')}' takes {fixed + count} operands")
    cx.want(types[0], "f")
    return types[fixed:]


def _layer_norm(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x, axes = types[0], attrs.integer("axes")
    if not 1 <= axes <= x.rank:
        cx.fail(f"cannot normalise {axes} dims of {x}")
    tail = x.with_shape(x.shape[x.rank - axes :])
    for w in _affine(cx, types, attrs, 1):
        cx.same_shape((tail, w), "weights must have the normalised shape")
    return (x,)


def _channel_norm(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    x = types[0]
    if x.rank < 2:
        cx.fail(f"input must be (N, C, ..), is {x}")
    fixed = 1 if "groups" in attrs else 3
    for w in (*types[1:fixed], *_affine(cx, types, attrs, fixed)):
        cx.require_rank(w, 1, "per-channel operand")
        cx.require_equal(w.shape[0], x.shape[1], "channels must agree")
    if "groups" in attrs:
        groups = attrs.integer("groups")
        cx.require(divides(groups, x.shape[1]), "groups must divide channels")
    return (x,)


def _attention(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    q, k, v = types[:3]
    dtype = cx.same_dtype(types[:3])
    cx.want(q, "f")
    if not q.rank == k.rank == v.rank or q.rank < 3:
        cx.fail(f"q, k, v must have one rank of at least 3, are {q}, {k}, {v}")
    if attrs.flag("masked") != (len(types) == 4):
        cx.fail("the mask operand and the attribute 'masked' must agree")
    batch = cx.same_shape([t.with_shape(t.shape[:-3]) for t in types[:3]], "batch")
    heads, rows = q.shape[-3], q.shape[-2]
    cx.require_equal(k.shape[-3], v.shape[-3], "heads of k and v must agree")
    cx.require_equal(k.shape[-2], v.shape[-2], "lengths of k and v must agree")
    cx.require_equal(q.shape[-1], k.shape[-1], "head sizes of q and k must agree")
    if heads is not k.shape[-3]:
        cx.require(divides(k.shape[-3], heads), "heads of k must divide heads of q")
    for mask in types[3:]:
        if mask.dtype is not DType.BOOL:
            cx.want(mask, "f", "mask")
        full = (*batch, heads, rows, k.shape[-2])
        if mask.rank > len(full):
            cx.fail(f"mask {mask} has more dims than the scores")
        for a, b in zip(mask.shape, full[len(full) - mask.rank :], strict=True):
            if a != 1:
                cx.require_equal(a, b, "mask must fit the scores")
    middle = (rows, heads) if attrs.flag("swapped") else (heads, rows)
    return (TensorType(dtype, (*batch, *middle, v.shape[-1])),)


def _resize(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    (x,), shape, scales = types, attrs.dims("shape"), attrs["scales"]
    assert isinstance(scales, tuple)
    if len(shape) > x.rank - 2 or len(scales) not in (0, len(shape)):
        cx.fail(f"shape {shape} and scales {scales} do not fit {x}")
    if attrs.text("mode") not in ("nearest", "nearest_exact"):
        cx.want(x, "f")
    lead = x.rank - len(shape)
    for i, dim in enumerate(x.shape[lead:]):
        cx.require(le(1, dim), f"spatial dim {i} must have elements")
    return (x.with_shape(x.shape[:lead] + shape),)


def einsum_labels(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """One label string per operand, and the result's; `...` gets labels of its own.

    Ellipses align at the end, as in torch; without `->` the result holds the labels
    seen once, sorted, behind the ellipsis.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if len(inputs) != len(ranks):
        raise ShapeError(f"einsum '{equation}' takes {len(inputs)} operands")
    # Greek letters never clash with the labels a model may use.
    spare = "αβγδεζηθικλμνξοπρστυφχψω"
    dots = ""
    out = []
    for labels, rank in zip(inputs, ranks, strict=True):
        if "..." in labels:
            hidden = rank - (len(labels) - 3)
            own = spare[len(spare) - hidden :] if hidden else ""
            dots = own if len(own) > len(dots) else dots
            labels = labels.replace("...", own)
        if len(labels) != rank:
            raise ShapeError(f"einsum '{equation}': '{labels}' names rank {rank}")
        out.append(labels)
    if not arrow:
        names = sorted(set(left) & set(string.ascii_letters))
        return out, dots + "".join(c for c in names if left.count(c) == 1)
    return out, right.replace("...", dots)


def _einsum(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    dtype = cx.same_dtype(types)
    inputs, output = einsum_labels(attrs.text("equation"), [t.rank for t in types])
    size: dict[str, Expr] = {}
    for labels, type in zip(inputs, types, strict=True):
        for label, dim in zip(labels, type.shape, strict=True):
            known = size.get(label, dim)
            if known == 1 or dim == 1:  # torch broadcasts a 1 along a label
                size[label] = dim if known == 1 else known
            else:
                size[label] = cx.require_equal(known, dim, f"label '{label}'")
    return (TensorType(dtype, tuple(size[label] for label in output)),)


# ---- control


def _bare(dim: Expr) -> str | None:
    """The name, if the dim is one symbol."""
    match dim.terms:
        case ((1, ((Symbol(name), 1),)),):
            return name
        case _:
            return None


def _enter(cx: InferContext, region: Graph, types: Types) -> list[tuple[bool, ...]]:
    """Checks a region's params against what is passed; tells which dims vary."""
    params = [v.type for v in region.params]
    if len(params) != len(types):
        cx.fail(f"region {region.name} takes {len(params)} values, not {len(types)}")
    varying = []
    for param, type in zip(params, types, strict=True):
        if param.dtype is not type.dtype or param.rank != type.rank:
            cx.fail(f"region {region.name} takes {param}, is given {type}")
        flags = []
        for want, have in zip(param.shape, type.shape, strict=True):
            equal = cx.proves_equal(want, have)
            if not equal and _bare(want) is None:
                cx.fail(f"region {region.name} takes {param}, is given {type}")
            flags.append(not equal)
        varying.append(tuple(flags))
    return varying


def _condition(cx: InferContext, type: TensorType) -> None:
    if type.dtype is not DType.BOOL or type.rank:
        cx.fail(f"the condition must be bool[], is {type}")


def _if(cx: InferContext, types: Types, _: Attrs) -> Types:
    _condition(cx, types[0])
    then, other = cx.regions
    for region in cx.regions:
        _enter(cx, region, types[1:])
    if len(then.results) != len(other.results):
        cx.fail("both regions must give the same number of results")
    out = []
    for a, b in zip(then.results, other.results, strict=True):
        if a.dtype is not b.dtype or a.type.rank != b.type.rank:
            cx.fail(f"regions give {a.type} and {b.type}")
        pairs = zip(a.shape, b.shape, strict=True)
        shape = (x if cx.proves_equal(x, y) else cx.fresh("u") for x, y in pairs)
        out.append(a.type.with_shape(tuple(shape)))
    return tuple(out)


def _carry(cx: InferContext, body: Graph, types: Types, first: int) -> Types:
    """Types of carried values after any number of rounds."""
    varying = _enter(cx, body, types)[first:]
    carried = types[first:]
    results = tuple(v.type for v in body.results)
    if len(results) != len(carried):
        cx.fail(f"the body gives {len(results)} values for {len(carried)} carried")
    out = []
    for type, result, flags in zip(carried, results, varying, strict=True):
        if type.dtype is not result.dtype or type.rank != result.rank:
            cx.fail(f"a carried value is {type} before and {result} after a round")
        shape = []
        for dim, after, varies in zip(type.shape, result.shape, flags, strict=True):
            if not varies and not cx.proves_equal(dim, after):
                cx.fail(
                    f"a carried dim is {dim} before and {after} after a round: give "
                    "the body's param a symbol of its own, or add a match_cast"
                )
            shape.append(cx.fresh("u") if varies else dim)
        out.append(type.with_shape(tuple(shape)))
    return tuple(out)


def _loop(cx: InferContext, types: Types, _: Attrs) -> Types:
    if types[0].dtype is not DType.I64 or types[0].rank:
        cx.fail(f"the number of rounds must be i64[], is {types[0]}")
    return _carry(cx, cx.regions[0], types, 1)


def _while(cx: InferContext, types: Types, _: Attrs) -> Types:
    cond, body = cx.regions
    _enter(cx, cond, types)
    if len(cond.results) != 1:
        cx.fail("the first region must give one condition")
    _condition(cx, cond.results[0].type)
    return _carry(cx, body, types, 0)


def _fusion(cx: InferContext, types: Types, _: Attrs) -> Types:
    _enter(cx, cx.regions[0], types)
    return tuple(v.type for v in cx.regions[0].results)


def _match_cast(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    out = types[0].with_shape(attrs.dims("shape"))
    cx.require_rank(out, types[0].rank, "shape")
    for have, want in zip(types[0].shape, out.shape, strict=True):
        if cx.facts.prove(eq(have, want)) is False:
            cx.fail(f"{types[0]} can never be {out}")
        cx.facts = cx.facts.assume(eq(have, want))
    return (out,)


def _nonzero(cx: InferContext, types: Types, _: Attrs) -> Types:
    count = cx.fresh("u")
    cx.facts = cx.facts.assume(le(count, types[0].numel))
    return (TensorType(DType.I64, (count, as_expr(types[0].rank))),)


def _call(cx: InferContext, types: Types, attrs: Attrs) -> Types:
    name = attrs.text("callee")
    callee = cx.callees.get(name)
    if callee is None:
        raise ShapeError(cx.describe(f"there is no function {name}"))
    params = [v.type for v in callee.params]
    sizes = attrs.dims("sizes")
    if len(params) != len(types) or len(sizes) != len(callee.sizes):
        cx.fail(f"{name} takes {len(params)} values and {len(callee.sizes)} sizes")
    bound: dict[str, Expr] = dict(zip(callee.sizes, sizes, strict=True))
    for param, type in zip(params, types, strict=True):
        if param.dtype is not type.dtype or param.rank != type.rank:
            cx.fail(f"{name} takes {param}, is given {type}")
        for want, have in zip(param.shape, type.shape, strict=True):
            symbol = _bare(want)
            if symbol is not None:
                bound.setdefault(symbol, have)
    for param, type in zip(params, types, strict=True):
        for want, have in zip(param.shape, type.shape, strict=True):
            _determined(cx, name, want, bound)
            cx.require_equal(want.substitute(bound), have, f"argument of {name}")
    for guard in callee.constraints:
        # The callee's other symbols are bound inside it, and checked there.
        if set(guard.cond.symbols()) <= set(bound):
            cx.require(guard.cond.substitute(bound), f"constraint of {name}")
    out = []
    for value in callee.results:
        for dim in value.shape:
            _determined(cx, name, dim, bound)
        shape = tuple(dim.substitute(bound) for dim in value.shape)
        out.append(value.type.with_shape(shape))
    return tuple(out)


def _determined(
    cx: InferContext, callee: str, dim: Expr, bound: Mapping[str, Expr]
) -> None:
    loose = [s for s in dim.symbols() if s not in bound]
    if loose:
        cx.fail(
            f"{', '.join(loose)} in the signature of {callee} does not follow from the "
            "arguments: add a match_cast of the result to a known shape"
        )


# ---- the table


def _def(
    name: str,
    family: Trait,
    arity: tuple[int, int | None] | int,
    rule: Infer,
    *attrs: AttrSpec,
    pure: bool = True,
    commutative: bool = False,
    regions: int = 0,
) -> OpDef:
    traits = {family}
    if pure:
        traits.add(Trait.PURE)
    if commutative:
        traits.add(Trait.COMMUTATIVE)
    count = (arity, arity) if isinstance(arity, int) else arity
    return OpDef(name, count, attrs, rule, frozenset(traits), regions)


_A = AttrSpec
_EW, _MV, _RD, _CT = Trait.ELEMENTWISE, Trait.MOVE, Trait.REDUCE, Trait.CONTRACT
_CO, _CR, _FL, _LO = Trait.COMPOSITE, Trait.CREATE, Trait.CONTROL, Trait.LOWERED
_FLOAT, _NUMBER, _INTS, _ANY = "f", "fiu", "iub", "fiub"

_UNARY = {
    _FLOAT: "exp expm1 log log1p sqrt rsqrt reciprocal sin cos tan tanh erf sigmoid "
    "floor ceil round trunc",
    _NUMBER: "neg abs sign",
    _INTS: "bitwise_not",
}
_PREDICATE = {_FLOAT: "isnan isinf", "b": "logical_not"}
_BINARY = {
    _FLOAT: "div atan2",
    _NUMBER: "sub floordiv mod pow",
    "iu": "shift_left shift_right",
}
_COMMUTATIVE = {
    _NUMBER: "add mul",
    _ANY: "minimum maximum",
    "b": "logical_and logical_or logical_xor",
    _INTS: "bitwise_and bitwise_or bitwise_xor",
}
_WINDOW = (
    _A("stride", "ints"),
    _A("low", "ints"),
    _A("high", "ints"),
    _A("dilation", "ints"),
)
_NORM = (_A("eps", "float"), _A("affine", "str", "none", tuple(AFFINE)))


def _named(groups: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return ((name, kinds) for kinds, names in groups.items() for name in names.split())


_TABLE: tuple[OpDef, ...] = (
    *(_def(n, _EW, 1, _elementwise(k)) for n, k in _named(_UNARY)),
    *(_def(n, _EW, 1, _elementwise(k, DType.BOOL)) for n, k in _named(_PREDICATE)),
    *(_def(n, _EW, 2, _elementwise(k)) for n, k in _named(_BINARY)),
    *(
        _def(n, _EW, 2, _elementwise(k), commutative=True)
        for n, k in _named(_COMMUTATIVE)
    ),
    *(
        _def(n, _EW, 2, _elementwise(_ANY, DType.BOOL), commutative=n in ("eq", "ne"))
        for n in ("eq", "ne", "lt", "le", "gt", "ge")
    ),
    _def("select", _EW, 3, _select),
    _def("cast", _EW, 1, _cast, _A("dtype", "dtype")),
    # create
    _def("constant", _CR, 0, _constant, _A("name", "str")),
    _def(
        "full",
        _CR,
        0,
        _given,
        _A("value", "number"),
        _A("dtype", "dtype"),
        _A("shape", "dims"),
    ),
    _def(
        "iota",
        _CR,
        0,
        _given,
        _A("axis", "int"),
        _A("dtype", "dtype"),
        _A("shape", "dims"),
    ),
    _def("dim_value", _CR, 0, _dim_value, _A("value", "dim"), _A("dtype", "dtype")),
    # move
    _def("broadcast", _MV, 1, _broadcast, _A("shape", "dims"), _A("axes", "ints")),
    _def("reshape", _MV, 1, _reshape, _A("shape", "dims")),
    _def("transpose", _MV, 1, _transpose, _A("perm", "ints")),
    _def(
        "slice",
        _MV,
        1,
        _slice,
        _A("starts", "dims"),
        _A("shape", "dims"),
        _A("steps", "ints"),
    ),
    _def("flip", _MV, 1, _flip, _A("axes", "ints")),
    _def("concat", _MV, (1, None), _concat, _A("axis", "int")),
    _def(
        "pad",
        _MV,
        1,
        _pad,
        _A("low", "dims"),
        _A("high", "dims"),
        _A("value", "number", 0),
    ),
    _def("index", _MV, (2, None), _index),
    _def("take_along", _MV, 2, _take_along, _A("axis", "int")),
    # reduce
    _def(
        "reduce",
        _RD,
        1,
        _reduce,
        _A("op", "str", choices=("sum", "prod", "max", "min", "any", "all")),
        _A("axes", "ints"),
        _A("keepdims", "bool", False),
    ),
    _def(
        "argreduce",
        _RD,
        1,
        _argreduce,
        _A("op", "str", choices=("max", "min")),
        _A("axis", "int"),
        _A("keepdims", "bool", False),
    ),
    _def(
        "cumulate",
        _RD,
        1,
        _cumulate,
        _A("op", "str", choices=("sum", "prod")),
        _A("axis", "int"),
    ),
    # contract
    _def("matmul", _CT, 2, _matmul),
    _def("conv", _CT, 2, _conv, *_WINDOW, _A("groups", "int", 1)),
    _def(
        "conv_transpose",
        _CT,
        2,
        _conv_transpose,
        *_WINDOW,
        _A("groups", "int", 1),
        _A("extra", "ints"),
    ),
    _def(
        "pool",
        _CT,
        1,
        _pool,
        _A("op", "str", choices=("max", "mean")),
        _A("window", "ints"),
        *_WINDOW,
        _A("include_pad", "bool", True),
    ),
    # composite
    _def("linear", _CO, (2, 3), _linear),
    _def("softmax", _CO, 1, _axis_kept, _A("axis", "int")),
    _def("log_softmax", _CO, 1, _axis_kept, _A("axis", "int")),
    _def("relu", _CO, 1, _relu),
    _def("silu", _CO, 1, _axis_kept),
    _def(
        "gelu",
        _CO,
        1,
        _axis_kept,
        _A("approximate", "str", "none", choices=("none", "tanh")),
    ),
    _def("layer_norm", _CO, (1, 3), _layer_norm, _A("axes", "int"), *_NORM),
    _def("rms_norm", _CO, (1, 2), _layer_norm, _A("axes", "int"), *_NORM),
    _def("group_norm", _CO, (1, 3), _channel_norm, _A("groups", "int"), *_NORM),
    _def("batch_norm", _CO, (3, 5), _channel_norm, *_NORM),
    _def(
        "attention",
        _CO,
        (3, 4),
        _attention,
        _A("scale", "float?", None),
        _A("causal", "bool", False),
        _A("masked", "bool", False),
        _A("swapped", "bool", False),
    ),
    _def(
        "resize",
        _CO,
        1,
        _resize,
        _A("shape", "dims"),
        _A("mode", "str", choices=("nearest", "nearest_exact", "linear", "cubic")),
        _A("align_corners", "bool", False),
        _A("scales", "floats?", ()),
    ),
    _def("einsum", _CO, (1, None), _einsum, _A("equation", "str")),
    # control
    _def("if", _FL, (1, None), _if, regions=2),
    _def("loop", _FL, (1, None), _loop, regions=1),
    _def("while", _FL, (1, None), _while, regions=2),
    _def("match_cast", _FL, 1, _match_cast, _A("shape", "dims"), pure=False),
    _def("nonzero", _FL, 1, _nonzero),
    _def(
        "call",
        _FL,
        (0, None),
        _call,
        _A("callee", "str"),
        _A("sizes", "dims", ()),
        pure=False,
    ),
    _def("fusion", _FL, (0, None), _fusion, _A("kind", "str"), regions=1),
    # lowered
    _def(
        "alloc",
        _LO,
        0,
        _given,
        _A("bytes", "dim"),
        _A("shape", "dims"),
        _A("dtype", "dtype"),
        pure=False,
    ),
    _def(
        "view",
        _LO,
        1,
        _declared,
        _A("offset", "dim"),
        pure=False,
    ),
    _def(
        "call_loop",
        _LO,
        (0, None),
        _declared,
        _A("callee", "str"),
        _A("sizes", "dims", ()),
        pure=False,
    ),
    _def(
        "call_library",
        _LO,
        (0, None),
        _declared,
        _A("callee", "str"),
        _A("sizes", "dims", ()),
        pure=False,
    ),
)

OPS: dict[str, OpDef] = {definition.name: definition for definition in _TABLE}
