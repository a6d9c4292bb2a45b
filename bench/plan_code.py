"""A product compiled for all sizes and all plans, called by address.

run(argument)   function(call, sizes.., buffers..), all of them in one array
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.ir as ll
import numpy as np

from bench.native import NativeCall, repeated
from bench.plan_set import CandidatePlan
from pliant.backend.jit import CompiledCode, compile_ir
from pliant.codegen.llvm import emit_loop_functions
from pliant.compare.timing import Timed
from pliant.ir.loops import (
    Buffer,
    For,
    Kind,
    LoopFunc,
    Role,
    Stmt,
    Store,
    buffer,
)
from pliant.ir.types import DType
from pliant.kernels.choose import StripCut, choose_strips
from pliant.kernels.gemm import gemm, small_sizes
from pliant.kernels.mix import ProductCut, ProductPlan
from pliant.kernels.packing import pack_constant
from pliant.kernels.product import Address, Around, Cuts, Product, TileAt
from pliant.kernels.tiles import Tile, gemm_tile
from pliant.lower.contract import choice_of, function_of, plan_of
from pliant.lower.vectorize import vectorized
from pliant.machine.target import host
from pliant.runtime import binding
from pliant.sym import Expr, as_expr, sym

Array = np.ndarray[Any, Any]
M, N, K = sym("m"), sym("n"), sym("k")
ONE = as_expr(1)


@dataclass(frozen=True, slots=True)
class Native:
    """A loop function in machine code."""

    func: LoopFunc
    code: CompiledCode

    def call(
        self, sizes: dict[str, int], memory: dict[str, Array], threads: int
    ) -> Timed:
        pool = binding.process().services.pool if threads > 1 else 0
        context = NativeCall(pool, *(0,) * 6, threads, 0)
        arguments = np.array(
            [
                ctypes.addressof(context),
                *(sizes[name] for name in self.func.sizes),
                *(memory[buf.name].ctypes.data for buf in self.func.buffers),
            ],
            np.uint64,
        )
        keep = (self, memory, context, arguments)
        return repeated(self.code.address("run"), arguments.ctypes.data, keep)


def native(func: LoopFunc, helpers: Sequence[LoopFunc]) -> Native:
    module = ll.Module(func.name)
    emit_loop_functions(module, vectorized([*helpers, func], host()), host())
    kinds = ["ptr", *("i64" for _ in func.sizes), *("ptr" for _ in func.buffers)]
    loads = "\n".join(
        f"  %at{i} = getelementptr i64, ptr %argument, i64 {i}\n"
        f"  %value{i} = load {kind}, ptr %at{i}"
        for i, kind in enumerate(kinds)
    )
    values = ", ".join(f"{kind} %value{i}" for i, kind in enumerate(kinds))
    run = (
        f"define void @run(ptr %argument) {{\n{loads}\n"
        f'  call void @"{func.name}"({values})\n  ret void\n}}\n'
    )
    return Native(func, compile_ir(f"{module}\n{run}", host(), binding.symbols()))


@dataclass(slots=True)
class PlanOperands:
    """A, B and the product; the kernels' buffers by name."""

    sizes: dict[str, int]
    a: Array
    b: Array
    c: Array
    want: Array
    memory: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A product that takes its plan as arguments."""

    constant: bool
    product: ProductPlan
    panels: Native
    strips: Native
    whole: Native  # strips of a product that is too small to be cut
    dots: Native | None

    @property
    def tile(self) -> Tile:
        return self.product.tile

    def choice(self, m: int, n: int, k: int, threads: int) -> ProductCut:
        """The compiler's choice; for a constant it knows N and K beforehand."""
        cut = self.product.at({"m": m, "n": n, "k": k}, threads)
        held = replace(
            self.product.spec,
            n=as_expr(n),
            k=as_expr(k),
            b_strides=(ONE, as_expr(k)),
            a_strides=(as_expr(k), ONE),
        )
        rows = self.constant and plan_of(held, self.tile).dot == ONE
        return replace(cut, dot=1) if rows else cut

    def operands(self, m: int, n: int, k: int, threads: int) -> PlanOperands:
        source = np.random.default_rng((m, n, k))
        a = source.standard_normal((m, k), np.float32)
        b = source.standard_normal((k, n), np.float32)
        c = np.empty((m, n), np.float32)
        memory = {"a": a, "b": b, "out": c}
        sizes = {"m": m, "n": n, "k": k, "threads": threads}
        if self.constant:
            memory |= {"packed": pack_constant(b, self.tile), "b": b.T.copy()}
        for kernel in (self.panels, self.strips, self.dots):
            for buf in () if kernel is None else kernel.func.buffers:
                if buf.name not in memory:
                    memory[buf.name] = room(buf, sizes)
        memory["rows"] = np.empty((n, k), np.float32)
        return PlanOperands(sizes, a, b, c, a @ b, memory)

    def call(self, x: PlanOperands, plan: CandidatePlan) -> Timed:
        threads = x.sizes["threads"]
        if plan.dot:
            assert self.dots is not None
            return self.dots.call(x.sizes, x.memory, threads)
        arguments = {
            f"_{name}": getattr(plan, name) for name in CandidatePlan.__slots__
        }
        kernel = self.strips if plan.strips else self.panels
        if plan.strips and plan.blocks * plan.groups == 1 and self.is_small(x.sizes):
            kernel = self.whole
        return kernel.call(x.sizes | arguments, x.memory, threads)

    def is_small(self, sizes: dict[str, int]) -> bool:
        limits = small_sizes(self.product.spec, self.tile, True)
        return all(size.evaluate(sizes) <= most for size, most in limits)


def room(buf: Buffer, sizes: dict[str, int]) -> Array:
    shape = [dim.evaluate(sizes) for dim in buf.shape]
    return np.empty(shape, np.float32)


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """A product in all forms that it can be computed in."""

    product: ProductPlan
    panels: Native
    strips: Native | None
    whole: Native | None
    dots: Native | None


# The fields of a strip cut, as the arguments of its function.
PARTS = ("blocks", "rows", "groups", "panels", "passes", "depth")
GIVEN = StripCut(ONE, (), *(sym(f"_{name}") for name in PARTS))


def built(strides: tuple[Expr, Expr] | None) -> BuiltPlan:
    """A product with B of these strides; None: a constant."""
    spec = Product(DType.F32, (), M, N, K, (K, ONE), (), strides, alone=True)
    tile = gemm_tile(DType.F32, host())
    plan = plan_of(spec, tile)
    out = buffer("out", DType.F32, (M * N,), Role.OUT)

    def place(batch: tuple[Expr, ...], row: Expr, column: Expr) -> Address:
        return out, (row * N + column,)

    def write(at: TileAt) -> list[Stmt]:
        i, j = sym("_em"), sym("_en")
        where = place((), at.row + i, at.column + j)
        store = Store(*where, at.element(i, j))
        across = For("_en", as_expr(0), at.columns, store, Kind.VECTOR)
        return [For("_em", as_expr(0), at.rows, across)]

    made = gemm(spec, plan, host(), Around(write, place), Cuts())
    given = (made.a, made.packed, made.rows, made.b, out, *made.work)
    buffers = [buf for buf in given if buf is not None]

    def compiled(name: str, body: Stmt) -> Native:
        return native(function_of(name, body, buffers), made.helpers)

    assert made.planned is not None
    dots = None if made.dots is None else compiled("dots", made.dots)
    strips = whole = cut = None
    if made.strips is not None:
        cut = choose_strips(M, N, K, tile, choice_of(spec))
        strips = compiled("strips", made.strips.units(GIVEN))
        whole = compiled("whole", made.strips.whole())
    chosen = ProductPlan(spec, plan, tile, cut)
    return BuiltPlan(chosen, compiled("panels", made.planned), strips, whole, dots)


def artifacts() -> dict[str, Artifact]:
    by_rows, dynamic, packed = (built(x) for x in ((ONE, K), (N, ONE), None))
    assert packed.strips is not None and dynamic.strips is not None
    assert packed.whole is not None and dynamic.whole is not None
    strips = (packed.strips, packed.whole), (dynamic.strips, dynamic.whole)
    return {
        "packed": Artifact(
            True, packed.product, packed.panels, *strips[0], by_rows.dots
        ),
        "dynamic": Artifact(
            False, dynamic.product, dynamic.panels, *strips[1], dynamic.dots
        ),
    }
