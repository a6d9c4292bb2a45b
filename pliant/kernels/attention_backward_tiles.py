"""The micro-kernel of attention's gradients that sums over rows, and its block sizes.

A keys kernel multiplies `height` key columns of a block of weights by the rows that the
weights belong to: a product whose left operand is read down its columns. Products that
sum over keys use the micro-kernels of attention itself (`attention_tiles.py`).
"""

from __future__ import annotations

from pliant.ir.loops import (
    Alloc,
    Binary,
    Block,
    Fma,
    Load,
    LoopFunc,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.attention_tiles import (
    Blocking,
    blocking,
    loop,
    names_of,
    over_tile,
    over_width,
    suffix,
    symbolic,
)
from pliant.kernels.micro import zero
from pliant.machine.target import Target
from pliant.sym import Expr, sym

ROWS = 96  # rows of a block: whole tiles of 12, 6 and 4
# Keys of a block: whole tiles and whole panels of 32 and of 16.
LENGTHS = (384, 192, 96)


def backward_blocking(dtype: DType, target: Target) -> Blocking:
    """Blocks for heads of up to 128 elements in three quarters of L2.

    The working set is, per key, keys and values in panels, keys in rows and two
    gradients; per row, queries and two gradients; and two tiles of weights. `KC`, the
    row stride of the weights, is one vector more than the keys of a block. Without it,
    elements of a column would map to a few sets of L1.
    """
    tile, size = blocking(dtype, target), dtype.bytes

    def room(keys: int) -> int:
        return size * (5 * keys * 128 + 3 * ROWS * 128 + 2 * ROWS * keys)

    fitting = (n for n in LENGTHS if 4 * room(n) <= 3 * target.l2)
    keys = next(fitting, LENGTHS[-1])
    return Blocking(tile.MR, tile.NR, keys + tile.lanes, tile.lanes, tile.step)


def keys_kernel_name(dtype: DType, height: int, tile: Blocking, head: Expr) -> str:
    return f"attention_keys_{dtype}_{height}x{tile.NR}x{tile.KC}{suffix(head)}"


def keys_kernel(dtype: DType, height: int, tile: Blocking, head: Expr) -> LoopFunc:
    """gradient += weights.T x rows.

    Each block's rows are summed on their own, which loses less to rounding.
    """
    width = head if head.is_const else sym("E")
    rows, n = sym("N"), sym("n")
    s = buffer("s", dtype, (rows, tile.KC), Role.IN)
    x = buffer("x", dtype, (rows, width), Role.IN)
    o = buffer("o", dtype, (height, width), Role.INOUT)

    def columns(first: Expr, room: int, count: Expr | int) -> Stmt:
        acc = buffer("acc", dtype, (height, room), Role.REGISTER)

        def start(i: Expr, j: Expr) -> Stmt:
            return Store(acc, (i, j), zero(dtype))

        def step(i: Expr, j: Expr) -> Stmt:
            value = Fma(Load(s, (n, i)), Load(x, (n, first + j)), Load(acc, (i, j)))
            return Store(acc, (i, j), value)

        def finish(i: Expr, j: Expr) -> Stmt:
            at = (i, first + j)
            return Store(o, at, Binary("add", Load(o, at), Load(acc, (i, j))))

        return Block(
            (
                Alloc(acc),
                over_tile(height, room, start),
                loop("n", rows, over_tile(height, count, step)),
                over_tile(height, count, finish),
            )
        )

    name = keys_kernel_name(dtype, height, tile, head)
    sizes = names_of((*symbolic(width), rows))
    return LoopFunc(name, sizes, (s, x, o), over_width(width, tile.NR, columns))
