"""Instructions written as text are the ones llvmlite would have made."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ll
import pytest

from pliant.codegen.builder import LLBuilder

I1, I32, I64, F32, F64 = (
    *(ll.IntType(width) for width in (1, 32, 64)),
    ll.FloatType(),
    ll.DoubleType(),
)
PTR = ll.PointerType()
WIDE, WHOLE = ll.VectorType(F32, 4), ll.VectorType(I32, 4)
ARGUMENTS = (I64, I64, F32, F32, WIDE, WIDE, WHOLE, PTR)
BINARY = ("add", "sub", "mul", "sdiv", "udiv", "srem", "urem", "and_", "or_", "xor")
SHIFTS = ("shl", "lshr", "ashr")
FLOAT = ("fadd", "fsub", "fmul", "fdiv")
SIGNS = ("==", "!=", "<", "<=", ">", ">=")


def integers(b: Any, x: Any, y: Any, *_: Any) -> None:
    for name in (*BINARY, *SHIFTS):
        x = getattr(b, name)(x, y)
    x = b.add(x, ll.Constant(I64, -7), flags=("nsw",))
    for sign in SIGNS:
        x = b.select(b.icmp_signed(sign, x, y), x, y)
        x = b.select(b.not_(b.icmp_unsigned(sign, x, y)), x, y)


def floats(b: Any, i: Any, _: Any, x: Any, y: Any, v: Any, w: Any, *__: Any) -> None:
    for left, right in ((x, y), (v, w)):
        z = left
        for name in FLOAT:
            z = getattr(b, name)(z, right)
        z = b.fneg(z)
        for sign in (*SIGNS, "ord"):
            z = b.select(b.fcmp_ordered(sign, z, right), z, right)
        for sign in (*SIGNS, "uno"):
            flags = b.not_(b.fcmp_unordered(sign, z, right))
            z = b.select(flags, z, right)


def casts(b: Any, i: Any, _: Any, x: Any, *rest: Any) -> None:
    assert b.bitcast(x, F32) is x
    b.sext(b.trunc(i, I32), I64)
    b.zext(b.trunc(i, I1), I64)
    b.fptrunc(b.fpext(x, F64), F32)
    b.fptosi(b.sitofp(i, F32), I64)
    b.uitofp(i, F64)
    b.bitcast(rest[1], WHOLE)


def memory(b: Any, i: Any, j: Any, x: Any, y: Any, v: Any, *rest: Any) -> None:
    pointer = b.gep(rest[-1], [i], source_etype=F32)
    b.store(b.load(pointer, typ=F32), pointer)
    b.store(b.load(pointer, align=4, typ=WIDE), pointer, align=4)
    struct = ll.LiteralStructType([I64, F32])
    place = [ll.Constant(I32, 0), ll.Constant(I32, 1)]
    b.store(x, b.gep(pointer, place, inbounds=True, source_etype=struct))
    slot = b.alloca(I64)  # an operand of the other kind, and the other way round
    slot.type = PTR
    b.store(i, slot)
    before, after = b.block, b.append_basic_block("after")
    b.branch(after)
    b.position_at_end(after)
    either = b.phi(I64)
    either.add_incoming(b.load(slot, typ=I64), after)
    either.add_incoming(j, before)
    b.cbranch(b.icmp_signed("<", either, i), after, b.append_basic_block("end"))
    b.position_at_end(b.function.blocks[-1])


def vectors(b: Any, i: Any, _: Any, x: Any, y: Any, v: Any, w: Any, *rest: Any) -> None:
    one = b.insert_element(v, x, ll.Constant(I32, 2))
    order = ll.Constant(ll.VectorType(I32, 2), [5, 0])
    half = b.shuffle_vector(one, w, order)
    b.fadd(b.extract_element(half, ll.Constant(I32, 1)), y)


def calls(b: Any, i: Any, _: Any, x: Any, y: Any, *rest: Any) -> None:
    signature = ll.FunctionType(F32, [F32, F32])
    b.fadd(b.call(ll.Function(b.module, signature, "two words"), [x, y]), y)
    nothing = ll.FunctionType(ll.VoidType(), [I64])
    b.call(ll.Function(b.module, nothing, "nothing"), [i])


def emitted(make: Callable[..., None], kind: type) -> str:
    """What LLVM reads, with results numbered in their order."""
    module = ll.Module("test")
    function = ll.Function(module, ll.FunctionType(ll.VoidType(), ARGUMENTS), "f")
    b = kind(function.append_basic_block("entry"))
    make(b, *function.args)
    b.ret_void()
    read = llvm.parse_assembly(str(module))
    read.verify()
    names: dict[str, str] = {}
    return re.sub(
        r'%[\w.]+|%"[^"]*"',
        lambda found: names.setdefault(found.group(), f"%{len(names)}"),
        str(read),
    )


@pytest.mark.parametrize("make", [integers, floats, casts, memory, vectors, calls])
def test_like_llvmlite(make: Callable[..., None]) -> None:
    assert emitted(make, LLBuilder) == emitted(make, ll.IRBuilder)


def test_alignment_of_an_argument() -> None:
    def make(b: Any, *args: Any) -> None:
        signature = ll.FunctionType(ll.VoidType(), [I64, PTR])
        callee = ll.Function(b.module, signature, "callee")
        b.call(callee, [args[0], args[-1]], align=(1, 8))

    assert re.search(
        r"call void @callee\(i64 %\d+, ptr align 8 %\d+\)", emitted(make, LLBuilder)
    )


def test_opaque_value_hides_how_it_was_made() -> None:
    def make(b: Any, x: Any, y: Any, *_: Any) -> None:
        b.add(b.opaque(b.udiv(x, y)), x)

    text = emitted(make, LLBuilder)
    assert re.search(r'(%\d+) = call i64 asm "", "=r,0"\(i64 %\d+\)', text)


def test_builders_of_one_function_share_its_names() -> None:
    def make(b: Any, x: Any, y: Any, *_: Any) -> None:
        b.add(x, y)
        other = LLBuilder(b.block)
        other.mul(x, y)
        b.position_at_end(b.block)
        b.sub(x, y)

    assert len(re.findall(r"^  (%\d+) =", emitted(make, LLBuilder), re.M)) == 3


def test_a_block_computes_once() -> None:
    module = ll.Module()
    function = ll.Function(module, ll.FunctionType(ll.VoidType(), [I64, PTR]), "f")
    first, second = (function.append_basic_block() for _ in range(2))
    b = LLBuilder(first)
    x, pointer = function.args
    total = b.add(x, x)
    assert b.add(x, x) is total
    assert b.add(x, x, flags=("nsw",)) is not total
    loaded = b.load(pointer, typ=I64)
    assert b.load(pointer, typ=I64) is not loaded  # a store may be between them
    fixed = b.load(pointer, typ=I64, constant=True)
    assert b.load(pointer, typ=I64, constant=True) is fixed
    b.branch(second)
    b.position_at_end(second)
    assert b.add(x, x) is not total  # the first block need not come before
    b.ret_void()
    llvm.parse_assembly(str(module)).verify()


def test_a_load_is_repeated_only_after_something_was_written() -> None:
    module = ll.Module()
    function = ll.Function(module, ll.FunctionType(ll.VoidType(), [I64, PTR]), "f")
    first, second = (function.append_basic_block() for _ in range(2))
    b = LLBuilder(first)
    x, pointer = function.args
    callee = ll.Function(module, ll.FunctionType(ll.VoidType(), [PTR]), "callee")
    slot = b.alloca(I64)
    slot.type = PTR

    def load() -> Any:
        return b.load(pointer, typ=I64, shared=True)

    loads = [load()]
    assert load() is loads[-1]
    b.store(x, slot, register=True)
    assert load() is loads[-1]
    b.store(x, pointer)
    loads.append(load())
    b.call(callee, [pointer])
    loads.append(load())
    b.call_void(callee, [pointer])
    loads.append(load())
    assert load() is loads[-1]
    b.branch(second)
    b.position_at_end(second)
    loads.append(load())
    assert len(set(map(id, loads))) == 5
    b.ret_void()
    llvm.parse_assembly(str(module)).verify()


def test_invariant_expressions_are_emitted_before_the_loop() -> None:
    """But what could fault only if every iteration computes it."""
    module = ll.Module("loops")
    kinds = ll.FunctionType(ll.VoidType(), [I64, I64, PTR])
    function = ll.Function(module, kinds, "f")
    n, m, p = function.args
    names = ("entry", "outer.before", "outer", "inner.before", "inner")
    entry, before, outer, within, inner = map(function.append_basic_block, names)
    b = LLBuilder(entry)
    b.branch(before)
    b.position_at_end(before)
    b.branch(outer)
    b.position_at_end(outer)
    i = b.phi(I64)
    zero = ll.Constant(I64, 0)
    with b.inside(before, i):
        b.branch(within)
        b.position_at_end(within)
        b.branch(inner)
        b.position_at_end(inner)
        j = b.phi(I64)
        with b.inside(within, j):
            product, row = b.mul(n, m), b.add(i, n)
            assert b.mul(n, m) is product
            element = b.add(row, j)
            always = b.load(p, typ=I64, constant=True)
            quotient, third = b.sdiv(n, m), b.sdiv(n, ll.Constant(I64, 3))
            with b.if_then(b.icmp_signed("<", j, n)):
                sometimes = b.load(p, typ=I64, constant=True)
                scaled = b.mul(m, m)
                maybe = b.sdiv(m, n)
                here = b.block
            after = b.block
            changing = b.load(p, typ=I64)
    places = {
        before: (product, third, scaled),
        within: (row, always, quotient),
        inner: (element,),
        here: (sometimes, maybe),
        after: (changing,),
    }
    for block, lines in places.items():
        assert all(line in block.instructions for line in lines), block.name
    assert before.instructions[-1] is before.terminator
    for phi, first, last in ((j, within, after), (i, before, after)):
        phi.add_incoming(zero, first)
        phi.add_incoming(zero, last)
    b.cbranch(b.icmp_signed("<", element, changing), inner, outer)
    llvm.parse_assembly(str(module)).verify()
