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
                                      w (C, O/groups, kernel..); `extra` = output padding
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
          attention (q, k, v[, mask]) {scale, causal, masked}
                                      q (.., Hq, Sq, D), k v (.., Hk, Sk, D|Dv), mask bool
                                      or additive (broadcast to .., Hq, Sq, Sk)
          resize (x) {shape, mode, align_corners, scales}    trailing spatial dims;
                                      mode: nearest, linear, cubic
          einsum {equation}
CONTROL   if (cond, args..) regions then, else;   loop (n: i64 scalar, carried..) region
          body(i, carried..) -> carried;   while (carried..) regions cond, body
          match_cast {shape}          binds new symbols, checks known ones
          nonzero -> i64[fresh, rank];   call (args..) {callee}
          fusion (args..) {kind} region     one kernel, see passes/fuse.py
LOWERED   alloc {bytes, shape, dtype}   view {offset}   call_loop {callee, sizes}
          call_library {callee}
"""

from __future__ import annotations
