"""The op table: all that is known of every op of the graph IR, in one row each.

A row (ir/opdef.py) has the attributes, the shape rule, the traits, the cost and the
meaning in NumPy. Those of elementwise ops are in ir/ops_elementwise.py, those of ops
with a kernel in C in ir/ops_library.py, the others here. A set of ops is made of traits
and defined once, at the end of this file.

Shapes are explicit: elementwise operands have one shape, `broadcast` makes it so.
Two dims that must be equal but are not provably so become a constraint (a run-time
guard with the op as its origin), never a guess.

ELEMENTWISE  operands of one shape and dtype, result the same unless said: the rows of
          ir/ops_elementwise.py
CREATE    constant {name}             a Constant of the module
          full {value, dtype, shape}  every element is the number
          iota {axis, dtype, shape}   the index along axis
          dim_value {value, dtype}    an integer expression as a rank-0 tensor
          random (seed) {number, shape}   f32 in [0, 1), the same for the same i64
                                      seed, number and element; composite
MOVE      broadcast {shape, axes}     operand dim i is result dim axes[i]; the operand's
                                      dim is equal to it, or the constant 1
          stretch {shape, axes}       a broadcast of which only the call tells whether a
                                      dim is the result's or 1
          reshape {shape}             same number of elements, row-major order
          transpose {perm}            result dim i is operand dim perm[i]
          slice {starts, shape, steps} element i is operand[start + i*step]
          flip {axes}
          rounded                     half floats as memory holds them: in a kernel that
                                      has computed them, they may have more digits
          concat {axis}               any number of operands
          pad {low, high, value}      dims added before and behind
          index (x, i0..ik)           indices of one shape over x's leading axes:
                                      result shape = i.shape + x.shape[k+1:]
          take_along (x, i) {axis}    result[.., j, ..] = x[.., i[.., j, ..], ..]
          in_range (i) {size, wraps, of, axis}   i, checked to be an index of an axis
          divisor (y) {of}            y, integers, checked not to be 0; `of` is what an
                                      error names
REDUCE    reduce {op, axes, keepdims} op: sum prod max min any all
          cumulate {op, axis}         running sum or prod
          scatter (i, u) {op, rows}   i[M], u[M, C] -> [rows, C]: row r is the sum,
                                      prod, max or min of all u[m] with i[m] == r, in
                                      order of m; the identity of op if there is none
          pool {op, window, stride, low, high, dilation, include_pad}
                                      op: max, mean; over trailing dims
LIBRARY   the rows of ir/ops_library.py
          sort {axis, descending} -> values, i64 places; equal elements keep their order
          top {axis, k, largest} -> values, i64 places: the best k, best first; of
                                      equals the first
          search (rows, values) {right}   rows[R, n] sorted, values[R, m] -> i64[R, m]:
                                      how many of a row are below, or not above
          running_extreme {axis, least} -> values, i64 places: the largest or smallest
                                      so far, of equals the last, from a NaN on NaN
          running_logsumexp {axis}    log(sum(exp)) so far
          sample (x, i, j, s, t)      x[N, C, H, W], the others [N, P] -> [N, C, P]:
                                      images between rows i and i + 1, s of the way, and
                                      columns j and j + 1, t of it; outside x is 0
          locate (x) {rows}           bool x[R, C] -> i64 [rows, 2], i64 []: where x is
                                      true, and how often, which is at most `rows`;
                                      also of bool x[N]
          scatter_rows (x, i, u)      x[R, C], i64 i[M], u[M, C] -> [R, C]: x with row
                                      i[m] replaced by u[m], in order of m; the places
                                      are checked before (in_range); or of several,
                                      x[O, R, C], u[O, M, C]
          overwrite (x, new) {starts} x with the part that begins there replaced by new
          and those of linear algebra (ir/ops_linalg.py) and of Fourier transforms
          (ir/ops_fft.py)
CONTRACT  matmul (a, b)               [.., M, K] x [.., K, N]; same rank; a batch dim is
                                      equal in both or the constant 1; 8-bit integers,
                                      signed or not, are summed up in i32 and give that;
                                      with a in f32, b may be half, and is widened
          coded_matmul (x, q, scale, least?) {bits, low, zero}   x[.., K], integers
                                      q[N, K], scale and least [N, groups of K]: x times
                                      the transpose of (q + zero) * scale + least;
                                      low <= q < low + 2**bits
          grouped_matmul (a, b, ends)   a[S, K], b[G, K, N], ends[G] ascending integers
                                      -> [S, N]: row r < ends[0] is a[r] x b[0], from
                                      there to ends[1] a[r] x b[1], ..; rows behind the
                                      last end are 0; types as of matmul
          conv (x, w) {stride, low, high, dilation, groups}   x (N, C, spatial..),
                                      w (O, C/groups, kernel..)
          conv_last (x, w) {stride, low, high, dilation}   x (N, spatial.., C),
                                      w (O, C, kernel..); gives (N, spatial.., O)
          conv_transpose (x, w) {stride, low, high, dilation, groups, extra}
                                      w (C, O/groups, kernel..); `extra` lengthens the
                                      result at its end
COMPOSITE (decomposed by passes/decompose.py)
          linear (x, w[, b])          x @ w.T + b
          softmax {axis}  log_softmax {axis}  relu  silu  gelu {approximate}
          layer_norm (x[, w, b]) {axes, eps, affine}    over the last `axes` dims;
                                      affine: "none", "w", "wb"
          rms_norm (x[, w]) {axes, eps, affine}
          group_norm (x[, w, b]) {groups, eps, affine}
          batch_norm (x, mean, var[, w, b]) {eps, affine}    channels at dim 1
          attention (q, k, v[, mask]) {scale, causal, masked, swapped, nan_rows,
                                      first, zero_nan}
                                      q (.., Hq, Sq, D), k v (.., Hk, Sk, D|Dv), mask
                                      bool or additive (broadcast to .., Hq, Sq, Sk)
          attention (q, k, v, x..) region score(%scores, x..) -> scores
          attention_lse (as attention) -> result, lse (.., Hq, Sq)
          attention_backward (dout, out, lse, as attention) -> dq, dk, dv; neither
                                      `first` nor `zero_nan`
          resize (x) {shape, mode, align_corners, scales}    trailing spatial dims;
                                      mode: nearest, nearest_exact, linear, cubic
          einsum {equation}
          argreduce {op, axis, keepdims} op: max min -> i64, first of equals
CONTROL   if (cond, args..) regions then, else;   loop (n: i64 scalar, carried..) region
          body(i, carried..) -> carried;   while (carried..) regions cond, body
          scan (carried.., x..) {rounds, scanned, reverse} region body(carried..,
          row..) -> carried.., row..
          bind (n: i64 scalar.., args..) {most} region(args..) sizes(u..)
          chunk (args..) {extent, rows, outers[, sums]} region(args..)
          sizes(n, first)
          match_cast {shape}          binds new symbols, checks known ones
          nonzero -> i64[fresh, rank];   call (args..) {callee}
          extent (n: i64 scalar) {most, of} -> bool[fresh]   a number as a size
          fusion (args..) {kind} region     one kernel, see passes/fuse.py
LOWERED   alloc {bytes, shape, dtype}   view {offset}
          call_loop {callee, sizes[, computes]}
          call_library {callee, sizes[, computes]}
          the calls may stand in any function; with results they are made destinations

Attributes: `ints` are Python ints (strides, windows, conv and pool padding, axes, perm,
steps); `dims` are expressions (shapes, slice starts, pad widths). Axes count from the
front. A trailing `?` marks a kind that may be None. Every shape rule is forward, from
the operands' types to the results'; `infer` also checks, so it is the op's verifier.
The rules are in ir/shapes.py, ir/shapes_composite.py and ir/shapes_control.py, the
meanings in ir/interp_ops.py.

More on single ops
  attention   swapped: the result is (.., Sq, Hq, D);  scale None is 1/sqrt(D);
              causal keeps column <= first + row, both counted from 0: q are the rows
              from `first` on, of as many as there are columns or not. Below 0, rows
              before -first keep none;
              Hq is a multiple of Hk; a row with every column at -inf gives 0, or NaN
              with `nan_rows`, as softmax in itself does; of no columns it is 0;
              with `zero_nan`, a row whose weights are NaN gives 0 too;
              the region, if there is one, changes the scaled scores (.., Hq, Sq, Sk)
              element by element before the causal mask hides some
  attention_lse  lse: the logarithm of the sum of a row's exponentials, in the type of
              its arithmetic; -inf of a row with every column at -inf
  attention_backward  dout and out are (.., Hq, Sq, Dv), whatever `swapped` says:
              that is of the results, which are then (.., S, H, D) each. Weights are
              w = exp(scores - lse), ds = w * (dout x v.T - sum(dout * out)),
              dq = scale * ds x k, dk = scale * ds.T x q, dv = w.T x dout, the last
              two summed over the query heads of a group. The region adds to scores
              or hides some with -inf: it is no function of them that bends
  index, take_along, scatter
              an index is in 0 .. dim-1, checked at run time
  in_range    0 <= i < size, or with `wraps` -size <= i < size, and a negative one gives
              i + size; `of` and `axis` are what an error names, where -1 is for a
              number that is no index. Places that are computed from several indices
              are made of indices checked one by one
  slice       start + (size-1)*step is inside the operand; steps are positive
  resize      `shape` holds the new sizes of the trailing dims; `scales` (or ()) the
              factors the model states, None where it states a size; `keeps_size`
              says when a factor is not what counts
  conv, pool  the padded input holds at least one whole window, as torch demands
  if          a result dim that differs between the regions becomes a fresh symbol
  loop, while a region's param whose dim is a symbol of its own may change size from
              round to round; the op's result has a fresh symbol there
  scan        round i takes row i of each of the last `scanned` operands, and row i of
              each result behind the carried ones is what it gives; with `reverse` the
              rounds go from the last row to the first
  bind        runs the region with its sizes u bound to the numbers, each in 0 .. most.
              A result whose shape depends on them is flat, and as long as it can get;
              what lies behind its elements is 0, or in native code anything
  chunk       runs the region for the rows 0 .. extent-1, `rows` at a time, or the `n`
              that are left, from the row `first` on. `outers` has a number for each
              operand and result: k says that the value is k runs of `extent` rows, of
              which the region takes or gives k runs of n; 0 that it takes the whole.
              `sums`, if any, has a name for each result: that of a reduction (sum, ..)
              if the result, of 0 runs, is what the rounds give combined, in their
              order, from the reduction's start value on; else it is empty
  match_cast  checks itself: it adds no constraint to the graph
  call_loop, call_library  result types are stated, not deduced; `computes` names the
              graph function that says what the call is for. A call without one
              prepares a later call: it only moves its operands
"""

from __future__ import annotations

from pliant.ir import interp_ops as numpy_ops
from pliant.ir import shapes
from pliant.ir.graph import Op
from pliant.ir.infer import Attrs, Infer, InferContext, Types
from pliant.ir.opdef import (
    ATTR_KINDS,
    FAMILIES,
    AttrSpec,
    Cost,
    OpDef,
    Trait,
    define,
)
from pliant.ir.ops_composite import COMPOSITE_OPS
from pliant.ir.ops_control import CONTROL_OPS
from pliant.ir.ops_elementwise import ELEMENTWISE
from pliant.ir.ops_library import LIBRARY_OPS
from pliant.ir.shapes_composite import einsum_labels
from pliant.sym import ZERO, Expr

__all__ = [
    "ATTENTIONS",
    "ATTR_KINDS",
    "CALLS",
    "FAMILIES",
    "FORMULAS",
    "GATHERS",
    "IN_MEMORY",
    "LIBRARY",
    "LOOKUPS",
    "OPAQUE",
    "OPS",
    "SCANS",
    "VIEWS",
    "AttrSpec",
    "Attrs",
    "Cost",
    "Infer",
    "InferContext",
    "OpDef",
    "Trait",
    "Types",
    "einsum_labels",
    "first_row",
    "has_trait",
    "infer",
    "named",
]


def infer(cx: InferContext, op: Op) -> Types:
    """The result types of an op, by its rule; checks operands, attributes, regions."""
    definition = OPS[op.name]
    cx.op, cx.loc, cx.regions = op.name, op.loc, op.regions
    least, most = definition.arity
    count = len(op.operands)
    if count < least or (most is not None and count > most):
        raise TypeError(cx.describe(f"takes {least}..{most} operands, not {count}"))
    fewest, largest = definition.regions
    if not fewest <= len(op.regions) <= largest:
        raise TypeError(cx.describe(f"takes {fewest}..{largest} regions"))
    types = tuple(v.type for v in op.operands)
    return definition.infer(cx, types, Attrs(op.name, op.attrs))


def has_trait(op: Op, trait: Trait) -> bool:
    return trait in OPS[op.name].traits


# ---- the table


_A = AttrSpec
_MV, _RD, _CT = Trait.MOVE, Trait.REDUCE, Trait.CONTRACT
_CR = Trait.CREATE
_VIEW = (Trait.VIEW,)
_WINDOW = (
    _A("stride", "ints"),
    _A("low", "ints"),
    _A("high", "ints"),
    _A("dilation", "ints"),
)


_TABLE: tuple[OpDef, ...] = (
    *ELEMENTWISE,
    # create
    define("constant", _CR, 0, shapes.constant, _A("name", "str")),
    define(
        "full",
        _CR,
        0,
        shapes.given,
        _A("value", "number"),
        _A("dtype", "dtype"),
        _A("shape", "dims"),
        meaning=numpy_ops.full,
        traits=(Trait.FORMULA,),
    ),
    define(
        "iota",
        _CR,
        0,
        shapes.given,
        _A("axis", "int"),
        _A("dtype", "dtype"),
        _A("shape", "dims"),
        meaning=numpy_ops.iota,
        traits=(Trait.FORMULA,),
    ),
    define(
        "dim_value",
        _CR,
        0,
        shapes.dim_value,
        _A("value", "dim"),
        _A("dtype", "dtype"),
        meaning=numpy_ops.dim_value,
        traits=(Trait.FORMULA,),
    ),
    # move
    define(
        "broadcast",
        _MV,
        1,
        shapes.broadcast,
        _A("shape", "dims"),
        _A("axes", "ints"),
        meaning=numpy_ops.broadcast,
        traits=_VIEW,
    ),
    define(
        "stretch",
        _MV,
        1,
        shapes.stretch,
        _A("shape", "dims"),
        _A("axes", "ints"),
        meaning=numpy_ops.broadcast,
        traits=_VIEW,
    ),
    define(
        "reshape",
        _MV,
        1,
        shapes.reshape,
        _A("shape", "dims"),
        meaning=numpy_ops.reshape,
        traits=_VIEW,
    ),
    define(
        "transpose",
        _MV,
        1,
        shapes.transpose,
        _A("perm", "ints"),
        meaning=numpy_ops.transpose,
        traits=_VIEW,
    ),
    define(
        "slice",
        _MV,
        1,
        shapes.slice_,
        _A("starts", "dims"),
        _A("shape", "dims"),
        _A("steps", "ints"),
        meaning=numpy_ops.slice_,
        traits=_VIEW,
    ),
    define(
        "flip",
        _MV,
        1,
        shapes.flip,
        _A("axes", "ints"),
        meaning=numpy_ops.flip,
        traits=_VIEW,
    ),
    define(
        "rounded",
        _MV,
        1,
        shapes.elementwise("f"),
        meaning=lambda x: x,
        traits=_VIEW,
    ),
    define(
        "concat",
        _MV,
        (1, None),
        shapes.concat,
        _A("axis", "int"),
        meaning=numpy_ops.concat,
        traits=(Trait.GATHER,),
        cost=3,
    ),
    define(
        "pad",
        _MV,
        1,
        shapes.pad,
        _A("low", "dims"),
        _A("high", "dims"),
        _A("value", "number", 0),
        meaning=numpy_ops.pad,
        traits=(Trait.GATHER,),
        cost=3,
    ),
    define(
        "index",
        _MV,
        (2, None),
        shapes.index,
        meaning=numpy_ops.index,
        traits=(Trait.GATHER, Trait.LOOKUP),
        cost=4,
    ),
    define(
        "in_range",
        _MV,
        1,
        shapes.in_range,
        _A("size", "dim"),
        _A("wraps", "bool", False),
        _A("of", "str", "index"),
        _A("axis", "int", 0),
        meaning=numpy_ops.in_range,
        cost=3,
    ),
    define(
        "divisor",
        _MV,
        1,
        shapes.divisor,
        _A("of", "str", "div"),
        meaning=numpy_ops.divisor,
    ),
    define(
        "take_along",
        _MV,
        2,
        shapes.take_along,
        _A("axis", "int"),
        meaning=numpy_ops.take_along,
        traits=(Trait.GATHER, Trait.LOOKUP),
        cost=4,
    ),
    # reduce
    define(
        "reduce",
        _RD,
        1,
        shapes.reduce,
        _A("op", "str", choices=("sum", "prod", "max", "min", "any", "all")),
        _A("axes", "ints"),
        _A("keepdims", "bool", False),
        meaning=numpy_ops.reduce,
    ),
    define(
        "cumulate",
        _RD,
        1,
        shapes.cumulate,
        _A("op", "str", choices=("sum", "prod")),
        _A("axis", "int"),
        meaning=numpy_ops.cumulate,
        traits=(Trait.SCAN,),
    ),
    define(
        "scatter",
        _RD,
        2,
        shapes.scatter,
        _A("op", "str", choices=("sum", "prod", "max", "min")),
        _A("rows", "dim"),
        meaning=numpy_ops.scatter,
        traits=(Trait.SCAN,),
    ),
    define(
        "pool",
        _RD,
        1,
        shapes.pool,
        _A("op", "str", choices=("max", "mean")),
        _A("window", "ints"),
        *_WINDOW,
        _A("include_pad", "bool", True),
        meaning=numpy_ops.pool,
        traits=(Trait.SCAN,),
    ),
    *LIBRARY_OPS,
    # contract
    define("matmul", _CT, 2, shapes.matmul, meaning=numpy_ops.matmul),
    define(
        "coded_matmul",
        _CT,
        (3, 4),
        shapes.coded_matmul,
        _A("bits", "int"),
        _A("low", "int"),
        _A("zero", "float"),
        meaning=numpy_ops.coded_matmul,
    ),
    define(
        "grouped_matmul",
        _CT,
        3,
        shapes.grouped_matmul,
        meaning=numpy_ops.grouped_matmul,
    ),
    define(
        "conv",
        _CT,
        2,
        shapes.conv,
        *_WINDOW,
        _A("groups", "int", 1),
        meaning=numpy_ops.conv,
        traits=(Trait.CONVOLUTION,),
    ),
    define(
        "conv_last",
        _CT,
        2,
        shapes.conv_last,
        *_WINDOW,
        meaning=numpy_ops.conv_last,
        traits=(Trait.CONVOLUTION,),
    ),
    define(
        "conv_transpose",
        _CT,
        2,
        shapes.conv_transpose,
        *_WINDOW,
        _A("groups", "int", 1),
        _A("extra", "ints"),
        meaning=numpy_ops.conv_transpose,
        traits=(Trait.CONVOLUTION,),
    ),
    *COMPOSITE_OPS,
    *CONTROL_OPS,
)

OPS: dict[str, OpDef] = {definition.name: definition for definition in _TABLE}


# ---- sets of ops, for passes to share


def named(*traits: Trait) -> frozenset[str]:
    """The ops that have one of the traits."""
    return frozenset(n for n, row in OPS.items() if not row.traits.isdisjoint(traits))


VIEWS = named(Trait.VIEW)
FORMULAS = named(Trait.FORMULA)
GATHERS = named(Trait.GATHER)
LOOKUPS = named(Trait.LOOKUP)
CALLS = named(Trait.CALL)
LIBRARY = named(Trait.LIBRARY)
SCANS = named(Trait.SCAN)
# Roots of kernels that read their operands from memory, and compute none of them.
IN_MEMORY = named(Trait.CONTRACT, Trait.ATTENTION, Trait.CALL, Trait.LIBRARY)
OPAQUE = IN_MEMORY | SCANS  # roots of kernels
# The forms of attention, and at which operand q, k, v and what scores read begin.
ATTENTIONS = {name: OPS[name].arity[0] - 3 for name in sorted(named(Trait.ATTENTION))}


def first_row(op: Op) -> Expr:
    """The number of an attention's first row; gradients have that of all rows, 0."""
    return ZERO if op.name == "attention_backward" else op.dim_attr("first")


def zeroes_nan(op: Op) -> bool:
    """Whether an attention's rows of NaN weights give 0; no gradient has that."""
    return op.name != "attention_backward" and op.bool_attr("zero_nan")
