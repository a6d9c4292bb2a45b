"""Micro-kernels of attention: tiles of scores and of results, in registers.

A scores kernel multiplies `height` rows of queries by one panel of packed keys. A
values kernel multiplies `height` rows of weights by the values of a block, and adds the
earlier result times its factor. Heights are multiples of a step, so that few kernels
are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pliant.ir.loops import (
    Alloc,
    Binary,
    Block,
    Buffer,
    Fma,
    For,
    If,
    Index,
    Kind,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Stmt,
    Store,
    as_dtype,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.micro import zero
from pliant.kernels.tiles import gemm_tile
from pliant.machine.target import Target
from pliant.sym import (
    ONE,
    ZERO,
    Expr,
    as_expr,
    ceildiv,
    floordiv,
    minimum,
    sym,
)


@dataclass(frozen=True, slots=True)
class Blocking:
    """Sizes of tiles; they follow from element type and target.

    Heights of tiles are multiples of `step`. The last rows are padded to a whole step
    and the padding is computed in vain: few kernels compile quickly.
    """

    MR: int
    NR: int
    KC: int  # columns of a block of keys
    lanes: int
    step: int


def blocking(dtype: DType, target: Target) -> Blocking:
    """Blocks are long, since each costs a pass over the result of every row.

    The limits: the scores of a tile, MR x KC, take at most half of L1, and keys and
    values, each (KC, 128) for the larger heads in use, take half of L2.
    """
    tile, size = gemm_tile(dtype, target), dtype.bytes
    step = 4 if tile.MR >= 8 else 2
    mr = tile.MR // step * step
    kc = 512
    while kc > 4 * tile.NR and (
        2 * mr * kc * size > target.l1 or 4 * kc * 128 * size > target.l2
    ):
        kc //= 2
    return Blocking(mr, tile.NR, kc, target.vector_bytes // size, step)


def loop(
    var: str, end: Expr | int, body: Stmt, kind: Kind = Kind.SERIAL, begin: Expr = ZERO
) -> For:
    return For(var, begin, as_expr(end), body, kind)


def over_tile(
    height: int, width: Expr | int, store: Callable[[Expr, Expr], Stmt]
) -> Stmt:
    """Stores to every element of a register tile, the columns of a row as vectors."""
    columns = loop("j", width, store(sym("i"), sym("j")), Kind.VECTOR)
    return loop("i", height, columns, Kind.UNROLL)


def suffix(dim: Expr) -> str:
    """Tells kernels apart by a size that is known at compile time."""
    return f"_{dim.value}" if dim.is_const else ""


def symbolic(*dims: Expr) -> tuple[Expr, ...]:
    """The dims that are not known at compile time: parameters of the kernel."""
    return tuple(dim for dim in dims if not dim.is_const)


def names_of(dims: Sequence[Expr]) -> tuple[str, ...]:
    return tuple(str(dim) for dim in dims)


def scores_kernel_name(dtype: DType, height: int, tile: Blocking, head: Expr) -> str:
    return f"attention_scores_{dtype}_{height}x{tile.NR}x{tile.KC}{suffix(head)}"


def scores_kernel(dtype: DType, height: int, tile: Blocking, head: Expr) -> LoopFunc:
    """`height` rows of q times `wide` panels, then times the first vector of one more.

    The row stride is an immediate in the code where the head size is known.
    """
    depth = head if head.is_const else sym("D")
    wide, narrow, p, d = sym("wide"), sym("narrow"), sym("p"), sym("d")
    q = buffer("q", dtype, (height, depth), Role.IN)
    k = buffer("k", dtype, (wide + narrow, depth, tile.NR), Role.IN)
    s = buffer("s", dtype, (height, tile.KC), Role.OUT)

    def panel(width: int) -> Stmt:
        acc = buffer("acc", dtype, (height, width), Role.REGISTER)

        def step(i: Expr, j: Expr) -> Stmt:
            value = Fma(Load(q, (i, d)), Load(k, (p, d, j)), Load(acc, (i, j)))
            return Store(acc, (i, j), value)

        def finish(i: Expr, j: Expr) -> Stmt:
            return Store(s, (i, p * tile.NR + j), Load(acc, (i, j)))

        clear = over_tile(height, width, lambda i, j: Store(acc, (i, j), zero(dtype)))
        run = loop("d", depth, over_tile(height, width, step))
        return Block((Alloc(acc), clear, run, over_tile(height, width, finish)))

    body = Block(
        (
            loop("p", wide, panel(tile.NR)),
            loop("p", wide + narrow, panel(tile.lanes), begin=wide),
        )
    )
    name = scores_kernel_name(dtype, height, tile, head)
    return LoopFunc(name, names_of((*symbolic(depth), wide, narrow)), (q, k, s), body)


def values_kernel_name(dtype: DType, height: int, tile: Blocking, head: Expr) -> str:
    return f"attention_values_{dtype}_{height}x{tile.NR}x{tile.KC}{suffix(head)}"


def values_kernel(dtype: DType, height: int, tile: Blocking, head: Expr) -> LoopFunc:
    """result = probabilities x values (+ result * factor, after the first block)."""
    width = head if head.is_const else sym("E")
    keys, ldv, later, n = sym("N"), sym("ldv"), sym("later"), sym("n")
    s = buffer("s", dtype, (height, tile.KC), Role.IN)
    v = buffer("v", dtype, (keys, width), Role.IN, (ldv, ONE))
    factor = buffer("factor", dtype, (height,), Role.IN)
    o = buffer("o", dtype, (height, width), Role.INOUT)

    def columns(first: Expr, room: int, count: Expr | int) -> Stmt:
        acc = buffer("acc", dtype, (height, room), Role.REGISTER)

        def step(i: Expr, j: Expr) -> Stmt:
            value = Fma(Load(s, (i, n)), Load(v, (n, first + j)), Load(acc, (i, j)))
            return Store(acc, (i, j), value)

        def finish(i: Expr, j: Expr) -> Stmt:
            return Store(o, (i, first + j), Load(acc, (i, j)))

        def join(i: Expr, j: Expr) -> Stmt:
            at = (i, first + j)
            return Store(o, at, Fma(Load(o, at), Load(factor, (i,)), Load(acc, (i, j))))

        return Block(
            (
                Alloc(acc),
                over_tile(height, room, lambda i, j: Store(acc, (i, j), zero(dtype))),
                loop("n", keys, over_tile(height, count, step)),
                If(
                    Binary("gt", Index(later), Index(ZERO)),
                    over_tile(height, count, join),
                    over_tile(height, count, finish),
                ),
            )
        )

    name = values_kernel_name(dtype, height, tile, head)
    sizes = names_of((*symbolic(width), keys, ldv, later))
    body = over_width(width, tile.NR, columns)
    return LoopFunc(name, sizes, (s, v, factor, o), body)


def over_width(
    width: Expr, nr: int, columns: Callable[[Expr, int, Expr | int], Stmt]
) -> Stmt:
    """Panels of `nr` columns, then the remainder: columns(first, room, count)."""
    body: list[Stmt] = []
    c, whole = sym("c"), floordiv(width, nr)
    if whole != ZERO:
        body.append(loop("c", whole, columns(c * nr, nr, nr)))
    if not width.is_const:
        rest = minimum(width - whole * nr, nr)
        body.append(
            loop("c", ceildiv(width, nr), columns(c * nr, nr, rest), begin=whole)
        )
    elif width.value % nr:
        body.append(columns(whole * nr, width.value % nr, width.value % nr))
    return Block(tuple(body))


def keys_kernel_name(dtype: DType, tile: Blocking, head: Expr, element: Expr) -> str:
    adjacent = "" if element == ONE else "_apart"
    return f"attention_keys_{dtype}_{tile.NR}{suffix(head)}{adjacent}"


def keys_kernel(dtype: DType, tile: Blocking, head: Expr, element: Expr) -> LoopFunc:
    """Packs `N` keys into panels (D, NR) of the type that scores are computed in.

    `element` is the stride between the elements of a key.
    """
    depth = head if head.is_const else sym("D")
    count, row, step, compute = sym("N"), sym("k_row"), sym("k_step"), dtype.compute
    strides = (row, ONE if element == ONE else step)
    k = buffer("k", dtype, (count, depth), Role.IN, strides)
    shape = (ceildiv(count, tile.NR), depth, tile.NR)
    panels = buffer("panels", compute, shape, Role.OUT)

    def key(at: Expr, d: Expr, where: LoopValue | None) -> LoopValue:
        return as_dtype(Load(k, (at, d), where), compute)

    body = pack_panels(panels, (), key, depth, count, tile)
    name = keys_kernel_name(dtype, tile, head, element)
    sizes = names_of((*symbolic(depth), count, row, step))
    return LoopFunc(name, sizes, (k, panels), body)


def pack_panels(
    panels: Buffer,
    outer: tuple[Expr, ...],
    load: Callable[[Expr, Expr, LoopValue | None], LoopValue],
    depth: Expr,
    count: Expr,
    tile: Blocking,
) -> Stmt:
    """Packs rows 0..count into panels (depth, NR), as load(row, element, where) gives.

    The panels are at `outer` in their buffer. Vectors of the last panel that no kernel
    reads are not written.
    """
    nr, lanes = tile.NR, tile.lanes
    p, v, d, j = (sym(name) for name in ("_at_p", "_at_v", "_at_d", "_at_j"))

    def columns(width: int, first: Expr, masked: bool) -> Stmt:
        at = p * nr + first + j
        where = Binary("lt", Index(at), Index(count)) if masked else None
        store = Store(panels, (*outer, p, d, first + j), load(at, d, where))
        return loop("_at_d", depth, loop("_at_j", width, store, Kind.VECTOR))

    whole = floordiv(count, nr)
    # Vector by vector: there is code for one, which the last panel runs twice at most.
    rest = loop(
        "_at_v", ceildiv(count - p * nr, lanes), columns(lanes, v * lanes, True)
    )
    return Block(
        (
            loop("_at_p", whole, columns(nr, ZERO, False)),
            loop("_at_p", ceildiv(count, nr), rest, begin=whole),
        )
    )
