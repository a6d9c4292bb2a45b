"""Memory as torch lays it out: as_strided, and tensors that are not written yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pliant.frontend.torch_ops_context import Size, TorchContext
from pliant.frontend.torch_ops_math import Translate
from pliant.frontend.torch_ops_pick import PICK
from pliant.frontend.torch_ops_scatter import SCATTER
from pliant.frontend.torch_strides import need_strides
from pliant.ir.graph import Value
from pliant.ir.types import DType
from pliant.sym import as_expr, le, product

aten = torch.ops.aten


def _places(
    cx: TorchContext,
    x: Value,
    size: Sequence[Size],
    stride: Sequence[Size],
    offset: Size | None,
) -> Value:
    """Where each element is among those of x, which lie one after the other."""
    assert cx.node is not None
    source = cx.node.args[0]
    assert isinstance(source, torch.fx.Node)
    val = source.meta.get("val")
    if not isinstance(val, torch.Tensor) or not _dense(val):
        cx.unsupported("as_strided of a tensor that is not contiguous")
    need_strides(source)
    dims = tuple(as_expr(n) for n in size)
    steps = [as_expr(n) for n in stride]
    first = as_expr(0 if offset is None else offset)
    last = first
    for dim, step in zip(dims, steps, strict=True):
        cx.require(le(0, step), "as_strided: a stride must not be negative")
        last = last + (dim - 1) * step
    if not cx.proves(le(product(dims), 0)):
        cx.require(le(last + 1, x.type.numel), "as_strided reaches behind its tensor")
    out = cx.full(first, dims, DType.I64)
    for axis, step in enumerate(steps):
        out = cx.add(out, cx.mul(cx.iota(dims, axis, DType.I64), step))
    return out


def _dense(x: torch.Tensor) -> bool:
    """Row by row and from the start; a size of the trace may be symbolic."""
    expected: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if str(stride) != str(expected) and str(size) != "1":
            return False
        expected = expected * size
    return str(x.storage_offset()) == "0"


def as_strided(
    cx: TorchContext,
    x: Value,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Value:
    places = _places(cx, x, size, stride, storage_offset)
    return cx.b.emit("index", cx.reshape(x, (x.type.numel,)), places)


def as_strided_scatter(
    cx: TorchContext,
    x: Value,
    src: Value,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Value:
    """x with those elements replaced; of several at one place, the last."""
    places = _places(cx, x, size, stride, storage_offset)
    count = product(places.shape)
    rows = cx.reshape(x, (x.type.numel, 1))
    new = cx.reshape(cx.cast(src, x.dtype), (count, 1))
    out = cx.b.emit("scatter_rows", rows, cx.reshape(places, (count,)), new)
    return cx.reshape(out, x.shape)


def empty(cx: TorchContext, size: Sequence[Size], *_: Any, **__: Any) -> Value:
    return cx.full(0, size, cx.out_dtype)


def new_empty(
    cx: TorchContext, x: Value, size: Sequence[Size], *_: Any, **__: Any
) -> Value:
    return cx.full(0, size, cx.out_dtype)


def masked_index(
    cx: TorchContext,
    x: Value,
    mask: Value,
    indices: Sequence[Value | None],
    fill: Any,
) -> Value:
    """x at indices where the mask allows, else the fill: these may lie outside."""
    places = [_inside(cx, x, k, index) for k, index in enumerate(indices)]
    found = PICK[aten.index.Tensor](cx, x, places)
    return cx.select(
        cx.broadcast_to(mask, found.shape), found, cx.tensor(fill, x.dtype)
    )


def _inside(cx: TorchContext, x: Value, axis: int, index: Value | None) -> Value | None:
    if index is None:
        return None
    size = x.shape[axis]
    return cx.arith("maximum", cx.arith("minimum", index, size - 1), -size)


def masked_index_put_accumulate(
    cx: TorchContext,
    x: Value,
    mask: Value,
    indices: Sequence[Value | None],
    values: Value,
) -> Value:
    """x with values added at indices where the mask allows: others may lie outside."""
    cx.require(le(1, x.type.numel), "_unsafe_masked_index_put_accumulate: some element")
    places = [_inside(cx, x, k, index) for k, index in enumerate(indices)]
    added = cx.select(mask, values, cx.tensor(0, values.dtype))
    found: Value = SCATTER[aten.index_put.default](cx, x, places, added, True)
    return found


def resize(
    cx: TorchContext, x: Value, size: Sequence[Size], *_: Any, **__: Any
) -> Value:
    """The first elements in another shape."""
    assert cx.node is not None
    source = cx.node.args[0]
    assert isinstance(source, torch.fx.Node)
    val = source.meta.get("val")
    if not isinstance(val, torch.Tensor) or not _dense(val):
        cx.unsupported("resize_ of a tensor that is not contiguous")
    if isinstance(source, torch.fx.Node) and source.op == "placeholder":
        cx.unsupported(f"changes the size of the input {source.name}")
    count = product([as_expr(n) for n in size])
    if not cx.proves(le(count, x.type.numel)):
        cx.unsupported("resize_ to more elements, which leaves some unwritten")
    return cx.reshape(cx.slice(cx.reshape(x, (x.type.numel,)), 0, 0, count), size)


def resize_as(cx: TorchContext, x: Value, like: Value, *_: Any, **__: Any) -> Value:
    return resize(cx, x, like.shape)


STRIDED: dict[Any, Translate] = {
    aten.as_strided.default: as_strided,
    aten.as_strided_copy.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.empty_strided.default: empty,
    aten.empty_permuted.default: empty,
    aten.new_empty_strided.default: new_empty,
    aten._unsafe_masked_index.default: masked_index,
    aten._unsafe_masked_index_put_accumulate.default: masked_index_put_accumulate,
    aten.resize_.default: resize,
    aten.resize_as_.default: resize_as,
}
