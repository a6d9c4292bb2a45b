"""Products of groups of rows, each with a matrix of its own.

    %y = grouped_matmul(%a, %b, %ends)     a (S, K), b (G, K, N), ends (G): S rows in G
                                           groups, group g ends before row ends[g]
    ->
    for g = 0 to G
      let first = ends[g - 1], last = ends[g]
      call group(last - first; a[first], b[g], out[first])
    for r = ends[G - 1] to S: out[r] = 0

The groups' sizes are data. The product of one group is the kernel of any product, with
the number of rows as a size of the function, so it tiles each group as its size wants;
its threads share the columns and rows of one group at a time. All matrices are in
panels: constants ahead, others by a step before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from pliant.errors import InternalError
from pliant.ir.graph import Constant, DataCheck, Graph, Op, Value
from pliant.ir.loop_walk import size_symbols
from pliant.ir.loops import (
    Binary,
    Buffer,
    Call,
    Check,
    Const,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    LoopFunc,
    LoopValue,
    Role,
    Select,
    Stmt,
    Store,
    as_dtype,
    buffer,
)
from pliant.ir.packed import Packed
from pliant.ir.types import DType, TensorType
from pliant.ir.views import View
from pliant.kernels.packing import pack_constant
from pliant.kernels.product import Product
from pliant.kernels.tiles import Tile, gemm_tile
from pliant.lower.contract import (
    Given,
    cuts_of,
    known_now,
    matrix_of,
    product_steps,
)
from pliant.lower.epilogue import TileEpilogue
from pliant.lower.nest import block
from pliant.lower.step import (
    Argument,
    Fusion,
    KernelStep,
    NumberCheck,
    Scratch,
    Temporary,
    TileAxes,
)
from pliant.machine import pages
from pliant.sym import Expr, Facts, as_expr, ceildiv, floordiv, le, mod, sym

ROWS = "_group"  # rows of the group at hand


def lower_grouped(fusion: Fusion) -> list[KernelStep]:
    (op,) = fusion.region.ops
    name, b = fusion.name, op.operands[1]
    view = fusion.views[b]
    tile = gemm_tile(op.result.dtype, fusion.target)
    constant = known_now(fusion.constants.get(b), view)
    panels: Packed | Temporary
    steps: list[KernelStep] = []
    if constant is not None:
        panels = _packed_ahead(constant, view, tile)
    else:
        shape = _panels(b.shape, tile)
        panels = Temporary(TensorType(b.dtype, shape))
        steps.append(_packing(f"{name}_pack", b, view, panels))
    group = _one_group(op, _group_name(name, op), fusion)
    steps.append(_over_groups(op, group, panels, fusion))
    return steps


def _group_name(name: str, op: Op) -> str:
    """Products of the same constant sizes share the function of a group."""
    a, b, _ = op.operands
    _, k, n = b.shape
    if not (k.is_const and n.is_const):
        return f"{name}_group"
    return f"group_{a.dtype}_{b.dtype}_{k}x{n}"


# ---- panels


def _panels(shape: tuple[Expr, ...], tile: Tile) -> tuple[Expr, ...]:
    groups, k, n = shape
    return groups, ceildiv(n, tile.NR), k, as_expr(tile.NR)


def _packed_ahead(constant: Constant, view: View, tile: Tile) -> Packed:
    key = ("groups", view.offset, view.strides, view.shape, tile)
    make = partial(_panels_of, view, tile)
    return Packed(key, constant, "packed", constant.type.dtype, make)


def _panels_of(view: View, tile: Tile, data: np.ndarray) -> np.ndarray:
    step, groups = view.strides[0], view.shape[0].value
    each = [replace(view, offset=view.offset + g * step) for g in range(groups)]
    return pages.copied(
        np.stack([pack_constant(matrix_of(v, data), tile) for v in each])
    )


def _packing(name: str, b: Value, view: View, panels: Temporary) -> KernelStep:
    groups, count, k, width = panels.type.shape
    source = buffer("b", b.dtype, view.shape, Role.IN, view.strides)
    target = buffer("panels", b.dtype, panels.type.shape, Role.OUT)
    unit, row, lane = sym("_p"), sym("_k"), sym("_c")
    g, p = floordiv(unit, count), mod(unit, count)
    column = p * width + lane
    inside = Binary("lt", Index(column), Index(view.shape[2]))
    value = Select(inside, Load(source, (g, row, column), inside), Const(0, b.dtype))
    store = Store(target, (g, p, row, lane), as_dtype(value, b.dtype))
    across = For("_c", as_expr(0), width, store, Kind.VECTOR)
    along = For("_k", as_expr(0), k, across)
    body = For("_p", as_expr(0), groups * count, along, Kind.PARALLEL)
    buffers = (source, target)
    func = LoopFunc(name, size_symbols(body, buffers), buffers, body)
    return KernelStep(func, (view, panels))


# ---- one group


def _one_group(op: Op, name: str, fusion: Fusion) -> KernelStep:
    """The product of one group: (ROWS, K) x (K, N)."""
    a, b, _ = op.operands
    _, k, n = b.shape
    rows = sym(ROWS)
    left = Value("a", TensorType(a.dtype, (rows, k)))
    right = Value("b", TensorType(b.dtype, (k, n)))
    out = Value("out", TensorType(op.result.dtype, (rows, n)))
    root = Op("matmul", (left, right), (), (out,), (), op.loc)
    region = Graph(name, (left, right), (root,), (out,))
    one = as_expr(1)
    spec = Product(a.dtype, (), rows, n, k, (k, one), (), None, stored=b.dtype)
    axes = TileAxes((), (0,), (1,))
    tile = gemm_tile(op.result.dtype, fusion.target)
    panels = Temporary(TensorType(b.dtype, _panels(b.shape, tile)[1:]))
    given = Given(
        spec, axes, View(left, as_expr(0), (rows, k), (k, one)), right, panels
    )
    epilogue = TileEpilogue(region, root, fusion.facts, fusion.number_check)
    (step,) = product_steps(name, given, epilogue, fusion.target, cuts_of(fusion))
    return step


def _over_groups(
    op: Op, group: KernelStep, panels: Argument, fusion: Fusion
) -> KernelStep:
    a, b, ends = op.operands
    count, k, n = b.shape
    total = a.shape[0]
    rows = buffer("a", a.dtype, (total, k), Role.IN)
    stops = buffer("ends", ends.dtype, ends.shape, Role.IN)
    out = buffer("out", op.result.dtype, (total, n), Role.OUT)
    first, last, zero = sym("_first"), sym("_last"), as_expr(0)
    inputs: list[tuple[Buffer, Argument]] = [(rows, a), (stops, ends)]
    scratch: list[tuple[Buffer, Argument]] = []
    passed: list[tuple[Buffer, tuple[Expr, ...]]] = []
    for buf, argument in zip(group.func.buffers, group.arguments, strict=True):
        match argument:
            case View():
                passed.append((rows, (first, zero)))
            case Temporary():
                whole = buffer("panels", buf.dtype, (count, *buf.shape), Role.IN)
                inputs.append((whole, panels))
                passed.append((whole, (sym("_g"), *[zero] * len(buf.shape))))
            case Scratch():
                large = buffer(
                    buf.name, buf.dtype, _most(buf, total, fusion.facts), buf.role
                )
                kind = TensorType(buf.dtype, large.shape[1:])
                scratch.append((large, Scratch(kind)))
                passed.append((large, (zero,) * len(buf.shape)))
            case _:
                passed.append((out, (first, zero)))
    sizes = tuple(last - first if s == ROWS else sym(s) for s in group.func.sizes)
    call = Call(group.func.name, sizes, tuple(passed))
    body = _walk(op, stops, call, fusion.number_check, out)
    arguments = [*inputs, (out, op.result), *scratch]
    buffers = tuple(buf for buf, _ in arguments)
    func = LoopFunc(fusion.name, size_symbols(body, buffers), buffers, body)
    helpers = (*group.helpers, group.func)
    if group.planned is not None:
        helpers = (*helpers, group.planned)
    return KernelStep(func, tuple(given for _, given in arguments), helpers)


def _most(buf: Buffer, total: Expr, facts: Facts) -> tuple[Expr, ...]:
    """Scratch for the largest group, which has room for that of any other."""
    fewer = facts.assume(le(sym(ROWS), total))
    shape = tuple(dim.substitute({ROWS: total}) for dim in buf.shape)
    if not all(
        fewer.prove(le(dim, most)) for dim, most in zip(buf.shape, shape, strict=True)
    ):
        raise InternalError("lower", f"scratch {buf.shape} may exceed {shape}")
    return shape


def _walk(
    op: Op, stops: Buffer, call: Call, number_check: NumberCheck, out: Buffer
) -> Stmt:
    """The groups in order, then the rows behind the last."""
    total, n = out.shape
    count = stops.shape[0]
    first, last, at = sym("_first"), sym("_last"), sym("_g")
    message = f"grouped_mm: offset {{value}} must ascend up to the {total} rows"
    check = number_check(DataCheck.at("index", message, op.loc))

    def end(group: Expr) -> LoopValue:
        """Where a group ends; the one before the first, at 0."""
        there = Binary("ge", Index(group), Index(as_expr(0)))
        found = as_dtype(Load(stops, (group,), there), DType.I64)
        return Select(there, found, Const(0, DType.I64))

    fine = _both(
        Binary("ge", Index(first), Index(as_expr(0))),
        _both(
            Binary("le", Index(first), Index(last)),
            Binary("le", Index(last), Index(total)),
        ),
    )
    some = _both(fine, Binary("lt", Index(first), Index(last)))
    groups = For(
        "_g",
        as_expr(0),
        count,
        block(
            [
                Let("_first", end(at - 1)),
                Let("_last", end(at)),
                Check(fine, check, Index(last)),
                If(some, call),
            ]
        ),
    )
    zero = as_dtype(Const(0, out.dtype), out.dtype)
    clear = For(
        "_c", as_expr(0), n, Store(out, (sym("_r"), sym("_c")), zero), Kind.VECTOR
    )
    inside = Binary("ge", Index(first), Index(as_expr(0)))
    rest: list[Stmt] = [
        Let("_first", end(count - 1)),
        If(inside, For("_r", first, total, clear)),
    ]
    return block([groups, block(rest)])


def _both(x: LoopValue, y: LoopValue) -> LoopValue:
    return Binary("logical_and", x, y)
