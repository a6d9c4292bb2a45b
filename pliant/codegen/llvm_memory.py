"""Elements of buffers: the access depends on how the address varies by lane.

An address is a polynomial in the variable of the vector loop (`llvm_dims.py`):

    not in it               one scalar load, the same for all lanes
    one element per lane    a vector load or store
    backwards               a vector load, reversed
    a few elements apart    as many vector loads as elements, and what is needed of them
    any other way           a gather or scatter
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import llvmlite.ir as ll

from pliant.codegen import llvm_lanes as lane_ops
from pliant.codegen.llvm_dims import Dims, Linear
from pliant.codegen.llvm_types import (
    I64,
    LLType,
    LLValue,
    constant,
    lanes_of,
    splat,
    storage_type,
)
from pliant.ir.loops import Buffer, Role, address
from pliant.sym import Expr

APART = (2, 3, 4)  # elements from lane to lane, where vector loads beat a gather


def mark_aliasing(args: Iterable[LLValue], buffers: Sequence[Buffer]) -> None:
    for arg, alone in zip(args, are_alone(buffers), strict=True):
        if alone:
            arg.add_attribute("noalias")


def are_alone(buffers: Sequence[Buffer]) -> list[bool]:
    """Whether what is written through one of them is never seen through another.

    Inputs may alias each other, as none is written; an INOUT may alias an input.
    """
    own: tuple[Role, ...] = (Role.OUT, Role.WORK)
    if not has_in_place(buffers):
        own += (Role.IN,)
    return [buf.role in own for buf in buffers]


def has_in_place(buffers: Iterable[Buffer]) -> bool:
    return any(buf.role is Role.INOUT for buf in buffers)


class MemoryEmitter:
    """The buffers in scope of one function, and access to them."""

    def __init__(self, dims: Dims) -> None:
        self.dims, self.builder = dims, dims.builder
        self.buffers: dict[str, LLValue] = {}  # name -> address of element 0
        self.in_place = False  # whether an input may be written under another name
        self._flat: dict[tuple[tuple[Expr, ...], tuple[Expr, ...]], Expr] = {}

    def flat(self, buf: Buffer, index: tuple[Expr, ...]) -> Expr:
        """The element's number in the buffer."""
        key = (buf.strides, index)
        if key not in self._flat:
            self._flat[key] = address(buf, index)
        return self._flat[key]

    def address(self, buf: Buffer, index: tuple[Expr, ...]) -> LLValue:
        """The address of an element that is the same for all lanes."""
        return self._pointer(buf, self._uniform(self.flat(buf, index)))

    def near(self, buf: Buffer, index: tuple[Expr, ...]) -> LLValue | None:
        """The address of lane 0's element, or None if it is not linear."""
        at = self.dims.linear(self.flat(buf, index))
        return None if at is None else self._pointer(buf, at)

    def load(
        self,
        buf: Buffer,
        index: tuple[Expr, ...],
        where: LLValue | None,
        mask: LLValue | None,
    ) -> LLValue:
        """An element, or one per lane; zero, without a read, where a flag is false."""
        b, expr = self.builder, self.flat(buf, index)
        if not self.dims.varies(expr):
            if where is not None and lanes_of(where) > 1:
                where = self._both(mask, where)
            loaded = self._load_uniform(buf, self._uniform(expr), where)
        else:
            loaded = self._load_varying(buf, expr, self._both(mask, where))
        return lane_ops.from_storage(b, loaded, buf.dtype)

    def store(
        self, buf: Buffer, index: tuple[Expr, ...], value: LLValue, mask: LLValue | None
    ) -> None:
        """Stores the lanes of the mask; None means all of them."""
        b, expr, align = self.builder, self.flat(buf, index), buf.dtype.bytes
        stored = lane_ops.to_storage(b, value, buf.dtype)
        register = buf.role is Role.REGISTER
        if self.dims.lanes == 1:
            pointer = self._pointer(buf, self._uniform(expr))
            b.store(stored, pointer, align=align, register=register)
            return
        stored = splat(b, stored, self.dims.lanes)
        at = self.dims.linear(expr)
        if at is None or at.stride != 1:
            lane_ops.scatter(b, stored, self._addresses(buf, expr), align, mask)
            return
        pointer = self._pointer(buf, at)
        if mask is not None and _is_register(buf, at):
            # SROA cannot promote a masked store to registers.
            kept = b.load(pointer, align=align, typ=stored.type)
            stored, mask = b.select(mask, stored, kept), None
        if mask is None:
            b.store(stored, pointer, align=align, register=register)
        else:
            lane_ops.store_lanes(b, stored, pointer, align, mask)

    def _loaded(self, buf: Buffer, pointer: LLValue, typ: LLType) -> LLValue:
        """What is at an address in a buffer; an input that nothing writes is constant.

        An input may be written under another name, but only by this function.
        """
        given = buf.role is Role.IN
        constant = given and not self.in_place
        align = buf.dtype.bytes
        return self.builder.load(
            pointer, align=align, typ=typ, constant=constant, shared=given
        )

    def _uniform(self, expr: Expr) -> Linear:
        found = self.dims.linear(expr)
        assert found is not None, f"'{expr}' varies by lane"
        return found

    def _pointer(self, buf: Buffer, at: Linear) -> LLValue:
        """The address of lane 0."""
        pointer, element = self.buffers[buf.name], storage_type(buf.dtype)
        if at.dynamic is not None:
            base, moving = pointer, at.dynamic
            pointer, _ = self.dims.once(
                ("pointer", buf.name, id(moving)),
                lambda: (
                    self.builder.gep(base, [moving], source_etype=element),
                    moving,
                ),
            )
        if at.offset:
            offset = constant(I64, at.offset)
            pointer = self.builder.gep(pointer, [offset], source_etype=element)
        return pointer

    def _addresses(self, buf: Buffer, expr: Expr) -> LLValue:
        """One address per lane."""
        at, element = self.dims.linear(expr), storage_type(buf.dtype)
        if at is None:
            base, offsets = self.buffers[buf.name], self.dims.value(expr)
        else:
            base, offsets = self._pointer(buf, at), self.dims.steps(at.stride)
        return lane_ops.pointers(self.builder, base, element, offsets)

    def _both(self, mask: LLValue | None, other: LLValue | None) -> LLValue:
        """The intersection of two masks; None means all lanes."""
        if other is None:
            return mask
        other = splat(self.builder, other, self.dims.lanes)
        return other if mask is None else self.builder.and_(mask, other)

    def _load_uniform(self, buf: Buffer, at: Linear, where: LLValue | None) -> LLValue:
        b, typ, align = self.builder, storage_type(buf.dtype), buf.dtype.bytes
        if where is None:
            pointer = self._pointer(buf, at)
            return self._loaded(buf, pointer, typ)
        wanted = lane_ops.any_lane(b, where)
        before = b.block
        with b.if_then(wanted):
            with self.dims.scope():
                found = b.load(self._pointer(buf, at), align=align, typ=typ)
            after = b.block
        loaded = b.phi(typ)
        loaded.add_incoming(ll.Constant(typ, None), before)
        loaded.add_incoming(found, after)
        if lanes_of(where) == 1:
            return loaded
        wide = splat(b, loaded, lanes_of(where))
        return b.select(where, wide, ll.Constant(wide.type, None))

    def _load_varying(self, buf: Buffer, expr: Expr, mask: LLValue | None) -> LLValue:
        b, lanes, align = self.builder, self.dims.lanes, buf.dtype.bytes
        typ = storage_type(buf.dtype, lanes)
        at = self.dims.linear(expr)
        if at is not None and at.stride == 1:
            if _is_register(buf, at):
                loaded = b.load(self._pointer(buf, at), align=align, typ=typ)
                zero = ll.Constant(typ, None)
                return loaded if mask is None else b.select(mask, loaded, zero)
            pointer = self._pointer(buf, at)
            if mask is None:
                return self._loaded(buf, pointer, typ)
            shared = buf.role is Role.IN
            return lane_ops.load_lanes(b, pointer, typ, align, mask, shared=shared)
        if at is not None and at.stride == -1 and mask is None:
            last = Linear(at.dynamic, at.offset - lanes + 1, 1)
            backwards = b.load(self._pointer(buf, last), align=align, typ=typ)
            return lane_ops.reverse_lanes(b, backwards)
        if at is not None and at.stride in APART and mask is None:
            return self._load_apart(buf, at, int(at.stride), typ)
        return lane_ops.gather(b, self._addresses(buf, expr), typ, align, mask)

    def _load_apart(self, buf: Buffer, at: Linear, stride: int, typ: LLType) -> LLValue:
        """Elements `stride` apart, such as one number of pairs that lie side by side.

        Vectors follow one another, except that the last one ends with the last element
        needed: nothing behind it is read.
        """
        b, lanes = self.builder, self.dims.lanes
        last = (lanes - 1) * stride

        def load(start: int) -> LLValue:
            pointer = self._pointer(buf, Linear(at.dynamic, at.offset + start, 1))
            return self._loaded(buf, pointer, typ)

        found, places = load(0), range(0, last + 1, stride)
        held: Sequence[int] = places  # where in `found` the lanes are that it has
        for number in range(1, stride):
            start = min(number * lanes, last - lanes + 1)
            picked = [
                mine
                if place < number * lanes
                else lanes + min(place - start, lanes - 1)
                for mine, place in zip(held, places, strict=True)
            ]
            found, held = lane_ops.shuffled(b, found, load(start), picked), range(lanes)
        return found


def _is_register(buf: Buffer, at: Linear) -> bool:
    return buf.role is Role.REGISTER and at.dynamic is None
