"""The attention kernel against softmax in float64 and against torch.

Each spec is built with symbolic lengths, compiled once per target, and run at many
sizes; tiny sizes also run in the interpreter, which checks every access.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.ir as ll
import numpy as np
import pytest
import torch
from machines import TARGETS, machine
from torch.nn.functional import scaled_dot_product_attention

from pliant.backend.jit import CompiledCode, compile_ir
from pliant.codegen.llvm import emit_loop_functions
from pliant.ir.graph import Module, Value
from pliant.ir.interp_loops import run_loop
from pliant.ir.interp_memory import ByteRange, storage
from pliant.ir.loops import Buffer, Role, buffer
from pliant.ir.types import DType, TensorType, contiguous_strides
from pliant.kernels.attention import Attention, AttentionKernel, attention
from pliant.lower.attend import RegionScore
from pliant.lower.vectorize import vectorized
from pliant.passes.scores import mask_region
from pliant.runtime import binding
from pliant.sym import Expr, Facts, as_expr, floordiv, sym

TORCH = {
    DType.F64: torch.float64,
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.BOOL: torch.bool,
}
LENGTHS = (0, 1, 7, 33, 64, 129, 257)
B, H, G, S, T, D, E = (sym(name) for name in ("B", "H", "G", "S", "T", "D", "E"))


@dataclass(frozen=True)
class Case:
    """What is fixed when the kernel is made; lengths, and `None`, are symbols."""

    dtype: DType = DType.F32
    head: int | None = 64
    value_head: int | None = None
    group: int | None = 1
    mask: DType | None = None
    mask_axes: str = "bhqk"  # axes the mask has; others are broadcast
    causal: bool = False
    layout: str = "bhsd"  # order of the axes in memory
    scale: float | None = None
    batch: str = "one"  # batch axes: none, one, or pairs of it

    def spec(self) -> Attention:
        spec = self.one_batch_spec()
        names = ["q_strides", "k_strides", "v_strides", "out_strides"]
        strides = {name: getattr(spec, name) for name in names}
        mask = self.mask_strides()
        if self.batch == "none":
            cut = {name: steps[1:] for name, steps in strides.items()}
            return self.masked(replace(spec, batch=(), **cut), mask[1:])
        if self.batch == "pairs":
            both = {name: (2 * steps[0], *steps) for name, steps in strides.items()}
            spec = replace(spec, batch=(floordiv(B, 2), as_expr(2)), **both)
            return self.masked(spec, (2 * mask[0], *mask))
        return self.masked(spec, mask)

    def mask_strides(self) -> tuple[Expr, ...]:
        heads = H * (G if self.group is None else self.group)
        dims = {"b": B, "h": heads, "q": S, "k": T}
        kept = contiguous_strides(tuple(dims[a] for a in self.mask_axes))
        steps = dict(zip(self.mask_axes, kept, strict=True))
        return tuple(steps.get(a, as_expr(0)) for a in "bhqk")

    def masked(self, spec: Attention, strides: tuple[Expr, ...]) -> Attention:
        if self.mask is None:
            return spec
        shape = (*spec.batch, spec.heads, spec.q_len, spec.kv_len)
        mask = Value("mask", TensorType(self.mask, shape))
        score = mask_region(mask, TensorType(self.dtype, shape), {}, Facts())
        assert score.region is not None
        read = buffer("mask", self.mask, shape, Role.IN, strides)
        kernel = RegionScore(score.region, (read,), Facts(), lambda *_: 0)
        return replace(spec, reads=(read,), score=kernel)

    def one_batch_spec(self) -> Attention:
        head = D if self.head is None else as_expr(self.head)
        value_head = head if self.value_head is None else as_expr(self.value_head)
        kv_heads = H
        heads = H * (G if self.group is None else self.group)
        return Attention(
            dtype=self.dtype,
            batch=(B,),
            heads=heads,
            kv_heads=kv_heads,
            q_len=S,
            kv_len=T,
            head=head,
            value_head=value_head,
            q_strides=self.strides(B, heads, S, head, "bshd"),
            k_strides=self.strides(B, kv_heads, T, head),
            v_strides=self.strides(B, kv_heads, T, value_head),
            out_strides=self.strides(B, heads, S, value_head, "bshd"),
            causal=self.causal,
            scale=self.scale,
        )

    def strides(
        self, b: Expr, h: Expr, s: Expr, d: Expr, plain: str | None = None
    ) -> tuple[Expr, ...]:
        layout = self.layout
        if plain is not None and layout.endswith("s"):  # q and out end in the element
            layout = plain
        dims = {"b": b, "h": h, "s": s, "d": d}
        steps = contiguous_strides(tuple(dims[a] for a in layout))
        by_axis = dict(zip(layout, steps, strict=True))
        return tuple(by_axis[a] for a in "bhsd")


@functools.cache
def kernel(case: Case, target: str) -> AttentionKernel:
    return attention("attention", case.spec(), machine(target))


@functools.cache
def compiled(case: Case, target: str) -> CompiledCode:
    module = ll.Module("attention")
    made, to = kernel(case, target), machine(target)
    emit_loop_functions(module, vectorized([*made.helpers, made.func], to), to)
    return compile_ir(module, to, binding.symbols())


def whole(view: torch.Tensor) -> torch.Tensor:
    """All elements behind a view, in the order of memory."""
    count = view.untyped_storage().nbytes() // view.itemsize
    return view.as_strided((count,), (1,))


@dataclass
class Inputs:
    sizes: dict[str, int]
    tensors: list[torch.Tensor]  # q, k, v[, mask], as views (batch, head, position, ..)
    out: torch.Tensor


def inputs(
    case: Case, b: int, h: int, s: int, t: int, *, head: int = 64, group: int = 1
) -> Inputs:
    """Random views with the strides of the spec."""
    head = case.head or head
    group = case.group or group
    sizes = {"B": b, "H": h, "S": s, "T": t, "D": head, "G": group}
    value_head = case.value_head or head
    generator = torch.Generator().manual_seed(b + 10 * h + 100 * s + 1000 * t)

    def view(shape: tuple[int, ...], strides: tuple[Expr, ...]) -> torch.Tensor:
        steps = [step.evaluate(sizes) for step in strides]
        span = 1 + sum((n - 1) * k for n, k in zip(shape, steps, strict=True))
        room = max(span, 1) if 0 not in shape else 1
        flat = torch.randn(room, generator=generator, dtype=torch.float64)
        return flat.to(TORCH[case.dtype]).as_strided(shape, steps)

    spec = case.one_batch_spec()
    tensors = [
        view((b, h * group, s, head), spec.q_strides),
        view((b, h, t, head), spec.k_strides),
        view((b, h, t, value_head), spec.v_strides),
    ]
    if case.mask is not None:
        mask = view((b, h * group, s, t), case.mask_strides())
        flat = whole(mask)
        flat = flat > -0.7 if case.mask is DType.BOOL else flat.to(TORCH[case.mask])
        tensors.append(flat.as_strided(mask.shape, mask.stride()))
    out = view((b, h * group, s, value_head), spec.out_strides).fill_(7)
    return Inputs(sizes, tensors, out)


def work_arrays(made: AttentionKernel, sizes: dict[str, int]) -> list[Any]:
    """Scratch with nothing useful in it."""

    def array(buf: Buffer) -> Any:
        count = int(np.prod([dim.evaluate(sizes) for dim in buf.shape]))
        return np.full(count + 16, np.nan, storage(buf.dtype))

    return [array(buf) for buf in made.work]


def run_jit(case: Case, target: str, given: Inputs, threads: int = 1) -> torch.Tensor:
    made, code = kernel(case, target), compiled(case, target)
    sizes = {**given.sizes, "threads": threads}
    work = work_arrays(made, sizes)
    pool = binding.process().services.pool if threads > 1 else None
    call = (ctypes.c_int64 * 9)(pool or 0, 0, 0, 0, 0, 0, 0, threads, 0)
    function = ctypes.CFUNCTYPE(
        None,
        ctypes.c_void_p,
        *(ctypes.c_int64 for _ in made.func.sizes),
        *(ctypes.c_void_p for _ in made.func.buffers),
    )(code.address("attention"))
    pointers = [t.data_ptr() for t in (*given.tensors, given.out)]
    pointers += [array.ctypes.data for array in work]
    function(ctypes.addressof(call), *(sizes[n] for n in made.func.sizes), *pointers)
    return given.out


def run_interpreted(case: Case, given: Inputs, threads: int) -> torch.Tensor:
    made = kernel(case, "machine")
    sizes = {**given.sizes, "threads": threads}

    def memory(tensor: torch.Tensor) -> ByteRange:
        flat = whole(tensor)
        if tensor.dtype is torch.bfloat16:
            flat = flat.view(torch.int16)
        return ByteRange(flat.numpy().view(np.uint8))

    memories = [memory(t) for t in (*given.tensors, given.out)]
    memories += [
        ByteRange(a.view(np.uint8), shared=False) for a in work_arrays(made, sizes)
    ]
    module = Module({}, {f.name: f for f in (*made.helpers, made.func)})
    run_loop(made.func, module, sizes, memories, workers=threads, check_races=True)
    return given.out


def reference(case: Case, given: Inputs, *, exact: bool = True) -> torch.Tensor:
    """Softmax attention in float64 NumPy, or torch's own in the case's type."""
    q, k, v, *masks = given.tensors
    group = q.shape[1] // max(k.shape[1], 1)
    if not exact:
        mask = masks[0] if masks else None
        if case.causal and mask is not None:
            raise AssertionError("torch takes a mask or causal")
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        return scaled_dot_product_attention(
            q, k, v, mask, is_causal=case.causal, scale=case.scale, enable_gqa=True
        )
    wide = [x.double().numpy() for x in (q, k, v)]
    keys, values = (np.repeat(x, group, axis=1) for x in wide[1:])
    scale = max(q.shape[-1], 1) ** -0.5 if case.scale is None else case.scale
    scores = scale * wide[0] @ keys.swapaxes(-1, -2)
    for mask in masks:
        added = mask.numpy() if mask.dtype is torch.bool else mask.double().numpy()
        scores = (
            np.where(added, scores, -np.inf)
            if mask.dtype is torch.bool
            else scores + added
        )
    if case.causal:
        rows, columns = np.indices(scores.shape[-2:])
        scores = np.where(columns <= rows, scores, -np.inf)
    highest = scores.max(-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isfinite(highest), highest, 0.0))
    total = powers.sum(-1, keepdims=True)
    return torch.from_numpy((powers / np.where(total == 0, 1, total)) @ values)


def check(case: Case, given: Inputs, result: torch.Tensor) -> None:
    exact = reference(case, given)
    assert result.shape == exact.shape
    if not exact.numel():
        return
    error = (result.double() - exact).abs().max().item()
    floor = {DType.F64: 1e-14, DType.F32: 1e-6, DType.F16: 5e-4, DType.BF16: 4e-3}
    allowed = floor[case.dtype]
    if not (case.causal and case.mask) and given.tensors[1].shape[2]:
        theirs = reference(case, given, exact=False)
        allowed += 2 * (theirs.double() - exact).abs().max().item()
    assert error <= allowed


any_target = pytest.mark.parametrize("target", TARGETS)


# ---- compiled


@any_target
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(target: str, causal: bool) -> None:
    case = Case(causal=causal, layout="bshd")
    for s, t in itertools.product(LENGTHS, LENGTHS):
        given = inputs(case, 2, 2, s, t)
        check(case, given, run_jit(case, target, given))


@any_target
@pytest.mark.parametrize("head", [1, 3, 16, 64, 80, 128])
def test_head_sizes(target: str, head: int) -> None:
    case = Case(head=head)
    for s, t in ((1, 33), (7, 7), (33, 129), (64, 64)):
        given = inputs(case, 1, 3, s, t)
        check(case, given, run_jit(case, target, given))


@any_target
@pytest.mark.parametrize("head,value_head", [(16, 24), (64, 33), (8, 1)])
def test_value_head_of_its_own(target: str, head: int, value_head: int) -> None:
    case = Case(head=head, value_head=value_head)
    for s, t in ((2, 9), (37, 150)):
        given = inputs(case, 2, 1, s, t)
        check(case, given, run_jit(case, target, given))


@any_target
def test_head_size_of_the_call(target: str) -> None:
    case = Case(head=None)
    for head in (0, 1, 3, 8, 16, 31, 32, 64, 80):
        given = inputs(case, 1, 2, 9, 20, head=head)
        check(case, given, run_jit(case, target, given))


@any_target
@pytest.mark.parametrize("mask", [DType.BOOL, DType.F32], ids=str)
@pytest.mark.parametrize("axes", ["bhqk", "bqk", "bk", "qk", "k", "q", "bh"])
def test_masks(target: str, mask: DType, axes: str) -> None:
    case = Case(mask=mask, mask_axes=axes, head=16)
    for s, t in ((1, 40), (7, 7), (33, 129), (5, 0)):
        given = inputs(case, 2, 2, s, t)
        check(case, given, run_jit(case, target, given))


@any_target
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("group", [2, 3, None])
def test_grouped_heads(target: str, group: int | None, causal: bool) -> None:
    case = Case(group=group, head=16, causal=causal, mask=DType.BOOL)
    for s, t in ((1, 33), (7, 7), (33, 129), (129, 33), (0, 4), (100, 140)):
        given = inputs(case, 2, 2, s, t, group=4)
        check(case, given, run_jit(case, target, given))


@any_target
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "bhds", "sbhd", "hdbs"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16], ids=str)
def test_layouts(target: str, layout: str, dtype: DType) -> None:
    case = Case(layout=layout, dtype=dtype, head=24)
    for s, t in ((1, 9), (33, 129)):
        given = inputs(case, 3, 2, s, t)
        check(case, given, run_jit(case, target, given))


@any_target
@pytest.mark.parametrize("dtype", [DType.F64, DType.F16, DType.BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_types(target: str, dtype: DType, causal: bool) -> None:
    case = Case(dtype=dtype, causal=causal, head=40)
    for s, t in ((1, 1), (1, 200), (7, 7), (33, 129)):
        given = inputs(case, 1, 2, s, t)
        check(case, given, run_jit(case, target, given))


@any_target
def test_threads_agree(target: str) -> None:
    """The same bits at every run, and between thread counts where blocks are alike."""
    case = Case(causal=True, head=32)
    for b, h, s, t in ((2, 3, 129, 257), (1, 1, 300, 300), (1, 1, 1, 5)):
        given = inputs(case, b, h, s, t)
        for threads in (1, 2):
            first = run_jit(case, target, given, threads).clone()
            check(case, given, first)
            given.out.fill_(3)
            assert torch.equal(first, run_jit(case, target, given, threads))


@any_target
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("mask", [None, DType.BOOL, DType.F32], ids=str)
def test_keys_split_between_threads(
    target: str, group: int, mask: DType | None
) -> None:
    """Few rows, one head, many keys: parts are joined to what one thread computes."""
    case = Case(group=group, head=16, mask=mask)
    for s, t in ((1, 4096), (1, 2048), (3, 4099), (4, 5000), (5, 3000), (1, 1500)):
        given = inputs(case, 1, 1, s, t)
        alone = run_jit(case, target, given).clone()
        for threads in (2, 3, 7):
            given.out.fill_(3)
            together = run_jit(case, target, given, threads).clone()
            check(case, given, together)
            torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
            given.out.fill_(3)
            assert torch.equal(together, run_jit(case, target, given, threads))


def test_parts_without_a_visible_key() -> None:
    case = Case(head=16, mask=DType.BOOL)
    given = inputs(case, 1, 1, 2, 4096)
    given.tensors[3][..., :2048] = False
    given.tensors[3][:, :, 1] = False
    result = run_jit(case, "machine", given, 2)
    assert (result[:, :, 1] == 0).all()
    check(case, given, result)


@any_target
@pytest.mark.parametrize("batch", ["none", "pairs"])
def test_batch_axes(target: str, batch: str) -> None:
    case = Case(batch=batch, head=8, mask=DType.F32, mask_axes="bk", scale=-0.3)
    given = inputs(case, 1 if batch == "none" else 6, 2, 20, 40)
    check(case, given, run_jit(case, target, given))


@any_target
def test_empty_batch(target: str) -> None:
    case = Case()
    for b, h in ((0, 2), (2, 0)):
        given = inputs(case, b, h, 7, 9)
        assert run_jit(case, target, given).numel() == 0


# ---- what is not a number


@pytest.mark.parametrize("length", [4, 33, 300])
@pytest.mark.parametrize("mask", [DType.BOOL, DType.F32], ids=str)
def test_rows_without_columns_are_zero(length: int, mask: DType) -> None:
    case = Case(mask=mask)
    given = inputs(case, 1, 2, length, length)
    off = False if mask is DType.BOOL else -np.inf
    given.tensors[3][:, :, 1] = off
    given.tensors[3][:, :, 2, : length // 2] = off
    result = run_jit(case, "machine", given)
    assert (result[:, :, 1] == 0).all()
    check(case, given, result)
    theirs = reference(case, given, exact=False)
    assert torch.equal(theirs[:, :, 1], result[:, :, 1])


@pytest.mark.parametrize("which", ["q", "k", "v", "mask"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length", [5, 150])
def test_special_values(which: str, number: float, length: int) -> None:
    case = Case(mask=DType.F32)
    given = inputs(case, 1, 1, length, length)
    index = ["q", "k", "v", "mask"].index(which)
    given.tensors[index][0, 0, 3, 2] = number
    result = run_jit(case, "machine", given)
    theirs = reference(case, given, exact=False)
    torch.testing.assert_close(result, theirs, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    case = Case(scale=1.0)
    given = inputs(case, 1, 1, 20, 300)
    given.tensors[0].mul_(50)
    check(case, given, run_jit(case, "machine", given))


# ---- interpreted


INTERPRETED = {
    "plain": Case(head=3),
    "causal": Case(head=2, causal=True, layout="bshd"),
    "grouped": Case(head=2, group=2, causal=True, mask=DType.BOOL),
    "mask": Case(head=3, value_head=5, mask=DType.F32, mask_axes="bk"),
    "bf16": Case(head=2, dtype=DType.BF16),
    "f64": Case(head=2, dtype=DType.F64, layout="bhds"),
    "head": Case(head=None),
}


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str) -> None:
    case = INTERPRETED[name]
    for (s, t), threads in itertools.product(((0, 3), (3, 0), (1, 5), (7, 9)), (1, 2)):
        given = inputs(case, 1, 2, s, t, head=3)
        check(case, given, run_interpreted(case, given, threads))


def test_interpreted_blocks() -> None:
    case = replace(INTERPRETED["causal"], head=1)
    given = inputs(case, 1, 1, 5, 3)
    check(case, given, run_interpreted(case, given, 2))
    long = Case(head=1)
    given = inputs(long, 1, 1, 3, 140)
    check(long, given, run_interpreted(long, given, 1))


def test_interpreted_parts() -> None:
    case = Case(head=1, mask=DType.F32, mask_axes="k")
    given = inputs(case, 1, 1, 1, 2048)
    check(case, given, run_interpreted(case, given, 2))
