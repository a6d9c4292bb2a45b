"""Products with a weight in few bits, which is decoded in the kernel.

    y[m, n] = sum over k of x[m, k] * (q[n, k] * scale[n, g] + least[n, g])

where g is the group of k. The codes q are in panels of NR columns, like any constant:
(P, groups, group, NR) of bytes, or for four bits (P, groups, group/2, NR), of which a
low nibble is the code of step s of its group and the high one of step s + group/2. The
scales are (P, groups, NR).

    for panel                                  parallel
      few rows:   coded_h(x, panel)            each byte is read once
      otherwise:  numbers = decoded(panel)     into memory of the worker: K x NR floats
                  for tile of rows: gemm_f32_h(x rows, numbers)
      epilogue on each tile

Each group is summed up by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pliant.ir.loops import (
    WORKER,
    Alloc,
    Binary,
    Block,
    Buffer,
    Call,
    Cast,
    Const,
    Fma,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Stmt,
    Store,
    Switch,
    as_dtype,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.choose import THREADS
from pliant.kernels.micro import Elements, panel_kernels, panel_name, row_strides
from pliant.kernels.product import Address, TileAt
from pliant.kernels.tiles import VECTORS, Tile, gemm_tile
from pliant.machine.target import Target
from pliant.sym import Expr, as_expr, ceildiv, minimum, mod, sym

F32, I32 = DType.F32, DType.I32
FEW = 4  # rows for which decoding again costs less than numbers in memory
GRAIN = 4  # panels that are worth a thread


@dataclass(frozen=True, slots=True)
class WeightCode:
    """How a weight (n, k) is stored."""

    n: int
    k: int
    bits: int  # 4 or 8
    low: int  # the least code; four bits hold what is above it
    zero: float  # is added to a code
    codes: DType  # of the bytes
    group: int  # steps of K with one scale
    scale: DType
    least: bool  # whether there is a least beside the scale

    @property
    def groups(self) -> int:
        return self.k // self.group

    @property
    def bytes(self) -> int:
        """Of a group, for each column."""
        return self.group // 2 if self.bits == 4 else self.group

    @property
    def name(self) -> str:
        least = "m" if self.least else ""
        zero = f"{self.shift:g}".replace("-", "n").replace(".", "_")
        return f"{self.held}{self.bits}_{zero}_{self.group}_{self.scale}{least}"

    @property
    def shift(self) -> float:
        """Is added to what is stored."""
        return self.zero + (self.low if self.bits == 4 else 0)

    @property
    def held(self) -> DType:
        return DType.U8 if self.bits == 4 else self.codes


def pack_codes(codes: np.ndarray, code: WeightCode, width: int) -> np.ndarray:
    """(N, K) -> (P, groups, bytes, NR)."""
    panels = _panels(codes.reshape(code.n, code.groups, code.group), width)
    if code.bits == 8:
        return panels
    above = (panels.astype(np.int16) - code.low).astype(np.uint8)
    half = code.group // 2
    return np.ascontiguousarray(above[:, :, :half] | above[:, :, half:] << 4)


def pack_scales(scales: np.ndarray, code: WeightCode, width: int) -> np.ndarray:
    """(N, groups) -> (P, groups, NR)."""
    return _panels(scales.reshape(code.n, code.groups, 1), width)[:, :, 0]


def _panels(rows: np.ndarray, width: int) -> np.ndarray:
    """(N, groups, x) -> (P, groups, x, NR), with zeros behind the last column."""
    count = -(-len(rows) // width)
    whole = np.zeros((count * width, *rows.shape[1:]), rows.dtype)
    whole[: len(rows)] = rows
    panels = whole.reshape(count, width, *rows.shape[1:])
    return np.ascontiguousarray(panels.transpose(0, 2, 3, 1))


# ---- kernels


@dataclass(frozen=True, slots=True)
class _Panel:
    """A panel's parts as a kernel sees them."""

    code: WeightCode
    width: int
    q: Buffer
    scale: Buffer
    least: Buffer | None

    @classmethod
    def of(cls, code: WeightCode, width: int, outer: tuple[Expr | int, ...]) -> _Panel:
        shape = (*outer, code.groups)
        q = buffer("q", code.held, (*shape, code.bytes, width), Role.IN)
        scale = buffer("scale", code.scale, (*shape, width), Role.IN)
        least = buffer("least", code.scale, (*shape, width), Role.IN)
        return cls(code, width, q, scale, least if code.least else None)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.q, self.scale, *(() if self.least is None else (self.least,)))

    def over(self, target: Buffer, value: LoopValue) -> Stmt:
        store = Store(target, (sym("_j"),), value)
        return For("_j", as_expr(0), as_expr(self.width), store, Kind.VECTOR)

    def registers(self, *names: str) -> dict[str, Buffer]:
        shape = (as_expr(self.width),)
        return {name: buffer(name, F32, shape, Role.REGISTER) for name in names}

    def start(self, held: dict[str, Buffer]) -> list[Stmt]:
        """Scale and shift of group `_g`: a code of 0 is `shift`."""
        at = (sym("_g"), sym("_j"))
        body = [self.over(held["d"], as_dtype(Load(self.scale, at), F32))]
        none: LoopValue = Const(0.0, F32)
        if self.least is not None:
            none = as_dtype(Load(self.least, at), F32)
        if self.code.shift:
            none = Fma(Const(self.code.shift, F32), Load(held["d"], (sym("_j"),)), none)
        return [*body, self.over(held["shift"], none)]

    def decode(self, held: dict[str, Buffer]) -> list[Stmt]:
        """The numbers of byte `_s` of group `_g`: `low`, and `high` for four bits."""
        code = Cast(Load(self.q, (sym("_g"), sym("_s"), sym("_j"))), I32)
        if self.code.bits == 8:
            return [self.over(held["low"], self.number(code, held))]
        low = Binary("bitwise_and", code, Const(15, I32))
        high = Binary("shift_right", code, Const(4, I32))
        return [
            self.over(held["low"], self.number(low, held)),
            self.over(held["high"], self.number(high, held)),
        ]

    def number(self, code: LoopValue, held: dict[str, Buffer]) -> LoopValue:
        d, shift = (Load(held[name], (sym("_j"),)) for name in ("d", "shift"))
        return Fma(Cast(code, F32), d, shift)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("low", "high") if self.code.bits == 4 else ("low",)


@lru_cache(maxsize=64)
def rows_kernel(code: WeightCode, height: int, width: int) -> LoopFunc:
    """`height` rows times a panel that is decoded in registers."""
    panel = _Panel.of(code, width, ())
    a = buffer("a", F32, (height, code.k), Role.IN, (sym("a_row"), 1))
    c = buffer("c", F32, (height, width), Role.OUT)
    shape = (len(panel.parts), height, width)
    acc = buffer("acc", F32, shape, Role.REGISTER)
    total = buffer("total", F32, (height, width), Role.REGISTER)
    held = panel.registers("d", "shift", *panel.parts)
    i, j, none = sym("_i"), sym("_j"), Const(0.0, F32)

    def each(target: Buffer, at: tuple[Expr, ...], value: LoopValue) -> Stmt:
        columns = For("_j", as_expr(0), as_expr(width), Store(target, at, value), _V)
        return For("_i", as_expr(0), as_expr(height), columns, Kind.UNROLL)

    steps: list[Stmt] = panel.decode(held)
    zeros: list[Stmt] = []
    sum_of_parts: LoopValue | None = None
    for number, name in enumerate(panel.parts):
        at = (as_expr(number), i, j)
        k = sym("_g") * code.group + number * (code.group // 2) + sym("_s")
        value = Fma(Load(a, (i, k)), Load(held[name], (j,)), Load(acc, at))
        steps.append(each(acc, at, value))
        zeros.append(each(acc, at, none))
        part = Load(acc, at)
        sum_of_parts = (
            part if sum_of_parts is None else Binary("add", sum_of_parts, part)
        )
    assert sum_of_parts is not None
    more = Binary("add", Load(total, (i, j)), sum_of_parts)
    group = Block(
        (
            *panel.start(held),
            *zeros,
            For("_s", as_expr(0), as_expr(code.bytes), Block(tuple(steps))),
            each(total, (i, j), more),
        )
    )
    body = Block(
        (
            *(Alloc(b) for b in (acc, total, *held.values())),
            each(total, (i, j), none),
            For("_g", as_expr(0), as_expr(code.groups), group),
            each(c, (i, j), Load(total, (i, j))),
        )
    )
    name = f"coded_{code.name}_{code.k}_{height}x{width}"
    return LoopFunc(name, ("a_row",), (a, *panel.buffers, c), body)


_V = Kind.VECTOR


@lru_cache(maxsize=64)
def decode_kernel(code: WeightCode, width: int) -> LoopFunc:
    """A panel as numbers, (K, NR)."""
    panel = _Panel.of(code, width, ())
    out = buffer("out", F32, (code.k, width), Role.OUT)
    held = panel.registers("d", "shift", *panel.parts)
    steps: list[Stmt] = panel.decode(held)
    for number, name in enumerate(panel.parts):
        k = sym("_g") * code.group + number * (code.group // 2) + sym("_s")
        store = Store(out, (k, sym("_j")), Load(held[name], (sym("_j"),)))
        steps.append(For("_j", as_expr(0), as_expr(width), store, _V))
    loop = For("_s", as_expr(0), as_expr(code.bytes), Block(tuple(steps)))
    group = Block((*panel.start(held), loop))
    body = Block(
        (
            *map(Alloc, held.values()),
            For("_g", as_expr(0), as_expr(code.groups), group),
        )
    )
    name = f"decode_{code.name}_{code.k}x{width}"
    return LoopFunc(name, (), (*panel.buffers, out), body)


# ---- the product


@dataclass(frozen=True, slots=True)
class CodedProduct:
    a: Buffer
    weight: tuple[Buffer, ...]  # codes, scales, and what is least
    work: tuple[Buffer, ...]
    body: Stmt
    helpers: tuple[LoopFunc, ...]


def coded_product(
    code: WeightCode, m: Expr, target: Target, epilogue: Callable[[TileAt], list[Stmt]]
) -> CodedProduct:
    tile = gemm_tile(F32, target)
    nr, zero = tile.NR, as_expr(0)
    whole = _Panel.of(code, nr, (-(-code.n // nr),))
    a = buffer("a", F32, (m, code.k), Role.IN)
    scratch = buffer("scratch", F32, (THREADS, max(tile.MR, FEW), nr), Role.WORK)
    room = minimum(1, m // (FEW + 1)) * code.k
    numbers = buffer("numbers", F32, (THREADS, room, nr), Role.WORK)
    column = sym("_p") * nr
    even = mod(as_expr(code.n), nr) == zero
    columns = as_expr(nr) if even else minimum(nr, code.n - column)
    kept = (scratch, (sym(WORKER), zero, zero))
    panel = [(b, (sym("_p"), *(zero,) * (len(b.shape) - 1))) for b in whole.buffers]

    def done(row: Expr, rows: Expr) -> list[Stmt]:
        return epilogue(TileAt((), row, column, rows, columns, scratch))

    heights = range(1, FEW + 1)
    few_kernels = tuple(rows_kernel(code, h, nr) for h in heights)
    cases = tuple(
        (h, Call(f.name, (as_expr(code.k),), ((a, (zero, zero)), *panel, kept)))
        for h, f in zip(heights, few_kernels, strict=True)
    )
    few = Block((Switch(m, cases), *done(zero, m)))
    decode = decode_kernel(code, nr)
    there = (numbers, (sym(WORKER), zero, zero))
    many = Block(
        (
            Call(decode.name, (), (*panel, there)),
            _tiles(code, m, tile, a, there, kept, done),
        )
    )
    is_few = Binary("le", Index(m), Index(as_expr(FEW)))
    count = as_expr(-(-code.n // nr))
    body = For(
        "_p", zero, count, If(is_few, few, many), Kind.PARALLEL, grain=as_expr(GRAIN)
    )
    helpers = (*few_kernels, decode, *panel_kernels(Elements(F32, F32), target))
    return CodedProduct(a, whole.buffers, (scratch, numbers), body, helpers)


def _tiles(
    code: WeightCode,
    m: Expr,
    tile: Tile,
    a: Buffer,
    numbers: Address,
    kept: Address,
    done: Callable[[Expr, Expr], list[Stmt]],
) -> Stmt:
    """All rows, a tile at a time, in passes over K."""
    start, height, zero = sym("_start"), sym("_height"), as_expr(0)
    begin, worker = sym("_begin"), sym(WORKER)
    depth, of = min(tile.depth, code.k), Elements(F32, F32)
    left = (a, (start, begin))
    right = (numbers[0], (worker, begin, zero))
    operands = (left, right, right, kept)
    sizes = (
        sym("_steps"),
        *row_strides(as_expr(code.k), as_expr(1)),
        as_expr(tile.NR),
        as_expr(tile.NR),
        minimum(sym("_pass"), 1),
        as_expr(tile.NR),
    )
    cases = tuple(
        (h, Call(panel_name(of, h, VECTORS * tile.lanes), sizes, operands))
        for h in range(1, tile.MR + 1)
    )
    passes = Block(
        (
            Let("_begin", Index(sym("_pass") * depth)),
            Let("_steps", Index(minimum(depth, code.k - begin))),
            Switch(height, cases),
        )
    )
    body = Block(
        (
            Let("_start", Index(sym("_t") * tile.MR)),
            Let("_height", Index(minimum(tile.MR, m - start))),
            For("_pass", zero, as_expr(-(-code.k // depth)), passes),
            *done(start, height),
        )
    )
    return For("_t", zero, ceildiv(m, tile.MR), body)
