"""llvmlite's builder of LLVM IR, with instructions that are text from the start.

A model's kernels are some hundred thousand instructions. llvmlite makes an object with
a name in a table for each of them, and prints it with the module. Here the common ones
are one line of text and a number, which halves the time. Instructions that are extended
later (phi, switch), allocas and terminators are llvmlite's own. Both kinds can be in
one block, and be operands of one another. LLVM's parser checks the types.

An expression that was computed before in the same block is not emitted again. An
unrolled loop would otherwise repeat its address arithmetic in every iteration, and LLVM
would take as long to eliminate that as for everything else. Nor is a load, if nothing
was written to memory since. For the same reason what does not change in a loop is
emitted before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import llvmlite.ir as ll
from llvmlite.ir.values import Value

from pliant.codegen.llvm_types import PTR, LLType, LLValue

_VOID = ll.VoidType()
_FLAG = ll.IntType(1)
_PAIR = ll.LiteralStructType([ll.IntType(64), _FLAG])
# Values that are computed before every loop; allocas are in the entry block.
_OUTSIDE = (ll.Constant, ll.Argument, ll.GlobalValue, ll.AllocaInstr)
_COMPARED = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
_SIGNED = {"==": "eq", "!=": "ne", "<": "slt", "<=": "sle", ">": "sgt", ">=": "sge"}
_UNSIGNED = {"==": "eq", "!=": "ne", "<": "ult", "<=": "ule", ">": "ugt", ">=": "uge"}


class SourceLine(Value):
    """An instruction: its text, and the name of its result."""

    __slots__ = (
        *("depth", "operands", "opname", "parent"),
        *("reference", "text", "type", "typed"),
    )

    def __init__(
        self,
        parent: ll.Block,
        typ: LLType,
        opname: str,
        operands: tuple[LLValue, ...],
        reference: str,
        text: str,
        depth: int,
    ) -> None:
        self.parent, self.type, self.opname = parent, typ, opname
        self.operands, self.reference, self.text = operands, reference, text
        self.typed = f"{typ} {reference}"  # as an operand of another one
        self.depth = depth  # the number of loops around it

    def __str__(self) -> str:
        return self.text

    def get_reference(self) -> str:
        return self.reference


class DeclaredFunction(Value):
    """A function of another module: its type, and a line of text.

    llvmlite makes an object with a name for each parameter of each of them.
    """

    __slots__ = ("function_type", "name", "reference", "text", "type")

    def __init__(
        self, name: str, function_type: LLType, attributes: Sequence[str]
    ) -> None:
        self.name, self.type, self.function_type = name, PTR, function_type
        self.reference = f'@"{name}"'
        pairs = zip(function_type.args, attributes, strict=True)
        args = ", ".join(f"{kind} {attribute}".rstrip() for kind, attribute in pairs)
        result = function_type.return_type
        self.text = f"declare {result} {self.reference}({args}) nounwind\n"

    def __str__(self) -> str:
        return self.text

    def get_reference(self) -> str:
        return self.reference


@dataclass(frozen=True, slots=True)
class _OpenLoop:
    """A loop around the current position."""

    before: ll.Block  # runs once if there are iterations; branches to the first block
    first: ll.Block
    counter: LLValue
    known: dict[str, SourceLine] = field(default_factory=dict)  # moved to `before`


def _binary(opname: str) -> Callable[..., LLValue]:
    def emit(
        self: LLBuilder, x: LLValue, y: LLValue, flags: Sequence[str] = ()
    ) -> LLValue:
        typ = x.type
        head = f"{opname} {' '.join(flags)}" if flags else opname
        text = f"{head} {_typed(x)}, {y.get_reference()}"
        return self._pure(typ, opname, (x, y), text)

    return emit


def _cast(opname: str) -> Callable[..., LLValue]:
    def emit(self: LLBuilder, x: LLValue, typ: LLType) -> LLValue:
        if x.type == typ:
            return x
        text = f"{opname} {x.type} {x.get_reference()} to {typ}"
        return self._pure(typ, opname, (x,), text)

    return emit


class LLBuilder(ll.IRBuilder):
    """Emits instructions at a position in a function."""

    def __init__(self, block: ll.Block = None) -> None:
        super().__init__(block)
        self._numbers: Iterator[int] | None = None
        self._known: dict[str, SourceLine] = {}  # computed in the block, by text
        self._known_in: ll.Block = None  # the block that `_known` is about
        self._loaded: dict[str, SourceLine] = {}  # from memory that is as it was then
        self._loaded_in: ll.Block = None
        self._loops: list[_OpenLoop] = []  # from the outermost to the innermost

    @contextmanager
    def inside(self, before: ll.Block, counter: LLValue) -> Iterator[None]:
        """What is emitted now is the body of a loop, which begins here.

        `before` runs once if there are iterations, and does nothing but branch here.
        """
        self._loops.append(_OpenLoop(before, self._block, counter))
        try:
            yield
        finally:
            self._loops.pop()

    def _pure(
        self, typ: LLType, opname: str, operands: tuple[LLValue, ...], text: str
    ) -> SourceLine:
        """An instruction whose result depends only on its operands.

        It is emitted before the loops that none of its operands is computed in. They
        are available there: they are here, and no path into the loop is another.
        """
        loops, depth = len(self._loops), 0
        for operand in operands:
            if depth == loops:
                break
            depth = max(depth, self._depth(operand))
        if depth < loops and _may_trap(opname, operands):
            # Only out of a loop whose every iteration comes here.
            depth = loops - (self._loops[-1].first is self._block)
        if depth < loops:
            loop = self._loops[depth]
            found = loop.known.get(text)
            if found is None:
                found = self._new(loop.before, depth, typ, opname, operands, text)
                instructions = loop.before.instructions
                instructions.insert(len(instructions) - 1, found)
                loop.known[text] = found
            return found
        if self._known_in is not self._block:
            self._known, self._known_in = {}, self._block
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = self._line(typ, opname, operands, text)
        return found

    def _depth(self, value: LLValue) -> int:
        """The number of loops around a value's definition, or a larger number."""
        if type(value) is SourceLine:
            return value.depth
        if isinstance(value, _OUTSIDE):
            return 0
        for depth, loop in enumerate(self._loops, 1):
            if loop.counter is value:
                return depth
        return len(self._loops)

    def _line(
        self, typ: LLType, opname: str, operands: tuple[LLValue, ...], text: str
    ) -> SourceLine:
        block = self._block
        line = self._new(block, len(self._loops), typ, opname, operands, text)
        block.instructions.insert(self._anchor, line)
        self._anchor += 1
        return line

    def _new(
        self,
        block: ll.Block,
        depth: int,
        typ: LLType,
        opname: str,
        operands: tuple[LLValue, ...],
        text: str,
    ) -> SourceLine:
        reference = ""
        if typ is not _VOID:
            if self._numbers is None:
                self._numbers = _numbers(block)
            reference = f"%t{next(self._numbers)}"
            text = f"{reference} = {text}"
        return SourceLine(block, typ, opname, operands, reference, text, depth)

    def _read(
        self, typ: LLType, opname: str, operands: tuple[LLValue, ...], text: str
    ) -> SourceLine:
        """An instruction whose result depends on its operands and on memory."""
        if self._loaded_in is not self._block:
            self._loaded, self._loaded_in = {}, self._block
        found = self._loaded.get(text)
        if found is None:
            found = self._loaded[text] = self._line(typ, opname, operands, text)
        return found

    add, sub, mul = _binary("add"), _binary("sub"), _binary("mul")
    sdiv, udiv = _binary("sdiv"), _binary("udiv")
    srem, urem = _binary("srem"), _binary("urem")
    and_, or_, xor = _binary("and"), _binary("or"), _binary("xor")
    shl, lshr, ashr = _binary("shl"), _binary("lshr"), _binary("ashr")
    fadd, fsub = _binary("fadd"), _binary("fsub")
    fmul, fdiv = _binary("fmul"), _binary("fdiv")

    trunc, zext, sext = _cast("trunc"), _cast("zext"), _cast("sext")
    fptrunc, fpext = _cast("fptrunc"), _cast("fpext")
    sitofp, uitofp, fptosi = _cast("sitofp"), _cast("uitofp"), _cast("fptosi")
    bitcast = _cast("bitcast")

    def checked(self, name: str, x: LLValue, y: LLValue) -> tuple[LLValue, LLValue]:
        """An i64 "sadd" or "smul", and whether it overflowed."""
        callee = f"llvm.{name}.with.overflow.i64"
        module = self._block.function.module
        if callee not in module.globals:
            word = ll.IntType(64)
            ll.Function(module, ll.FunctionType(_PAIR, [word, word]), callee)
        text = f'call {_PAIR} @"{callee}"({_typed(x)}, {_typed(y)})'
        both = self._pure(_PAIR, "call", (x, y), text)
        parts = ((x.type, 0), (_FLAG, 1))
        value, flag = (
            self._pure(
                kind, "extractvalue", (both,), f"extractvalue {_typed(both)}, {k}"
            )
            for kind, k in parts
        )
        return value, flag

    def not_(self, x: LLValue) -> LLValue:
        typ = x.type
        vector = isinstance(typ, ll.VectorType)
        ones = f"splat ({typ.element} -1)" if vector else "-1"
        text = f"xor {typ} {x.get_reference()}, {ones}"
        return self._pure(typ, "xor", (x,), text)

    def fneg(self, x: LLValue) -> LLValue:
        return self._pure(x.type, "fneg", (x,), f"fneg {x.type} {x.get_reference()}")

    def icmp_signed(self, sign: str, x: LLValue, y: LLValue) -> LLValue:
        return self._compare(f"icmp {_SIGNED[sign]}", x, y)

    def icmp_unsigned(self, sign: str, x: LLValue, y: LLValue) -> LLValue:
        return self._compare(f"icmp {_UNSIGNED[sign]}", x, y)

    def fcmp_ordered(self, sign: str, x: LLValue, y: LLValue) -> LLValue:
        """False if an operand is NaN; "ord": whether neither is."""
        name = sign if sign == "ord" else f"o{_COMPARED[sign]}"
        return self._compare(f"fcmp {name}", x, y)

    def fcmp_unordered(self, sign: str, x: LLValue, y: LLValue) -> LLValue:
        """True if an operand is NaN; "uno": whether one is."""
        name = sign if sign == "uno" else f"u{_COMPARED[sign]}"
        return self._compare(f"fcmp {name}", x, y)

    def _compare(self, head: str, x: LLValue, y: LLValue) -> LLValue:
        typ = x.type
        flags = _flags(typ.count) if isinstance(typ, ll.VectorType) else _FLAG
        text = f"{head} {_typed(x)}, {y.get_reference()}"
        return self._pure(flags, head[:4], (x, y), text)

    def select(self, cond: LLValue, x: LLValue, y: LLValue) -> LLValue:
        return self._pure(
            x.type,
            "select",
            (cond, x, y),
            f"select {_typed(cond)}, {_typed(x)}, {_typed(y)}",
        )

    # ---- memory

    def load(
        self,
        ptr: LLValue,
        align: int | None = None,
        typ: LLType = None,
        *,
        constant: bool = False,
        shared: bool = False,
    ) -> LLValue:
        """`constant`: the memory does not change while the function runs.

        `shared`: it changes only by stores and calls of this function.
        """
        behind = "" if align is None else f", align {align}"
        text = f"load {typ}, {_typed(ptr)}{behind}"
        if constant:
            return self._pure(typ, "load", (ptr,), text)
        emit = self._read if shared else self._line
        return emit(typ, "load", (ptr,), text)

    def store(
        self,
        value: LLValue,
        ptr: LLValue,
        align: int | None = None,
        *,
        register: bool = False,
    ) -> LLValue:
        """`register`: to an alloca that becomes registers."""
        if not register:
            self._loaded.clear()
        behind = "" if align is None else f", align {align}"
        text = f"store {_typed(value)}, {_typed(ptr)}{behind}"
        return self._line(_VOID, "store", (value, ptr), text)

    def gep(
        self,
        ptr: LLValue,
        indices: Sequence[LLValue],
        inbounds: bool = False,
        source_etype: LLType = None,
    ) -> LLValue:
        head = "getelementptr inbounds" if inbounds else "getelementptr"
        places = ", ".join(map(_typed, indices))
        text = f"{head} {source_etype}, {_typed(ptr)}, {places}"
        return self._pure(ptr.type, "getelementptr", (ptr, *indices), text)

    # ---- vectors

    def extract_element(self, vector: LLValue, index: LLValue) -> LLValue:
        text = f"extractelement {_typed(vector)}, {_typed(index)}"
        kind = vector.type.element
        return self._pure(kind, "extractelement", (vector, index), text)

    def insert_element(
        self, vector: LLValue, value: LLValue, index: LLValue
    ) -> LLValue:
        text = f"insertelement {_typed(vector)}, {_typed(value)}, {_typed(index)}"
        operands = (vector, value, index)
        return self._pure(vector.type, "insertelement", operands, text)

    def shuffle_vector(self, x: LLValue, y: LLValue, mask: LLValue) -> LLValue:
        typ = ll.VectorType(x.type.element, mask.type.count)
        text = f"shufflevector {_typed(x)}, {_typed(y)}, {_typed(mask)}"
        return self._pure(typ, "shufflevector", (x, y, mask), text)

    # ---- calls

    def call(
        self,
        function: LLValue,
        args: Sequence[LLValue],
        align: tuple[int, int] | None = None,
        *,
        shared: bool = False,
    ) -> LLValue:
        """`align`: the number of an argument that is an address, and its alignment.

        `shared`: it only reads memory, as `load` has it.
        """
        given = [_typed(arg) for arg in args]
        if align is not None:
            number, amount = align
            arg = args[number]
            given[number] = f"{arg.type} align {amount} {arg.get_reference()}"
        result = function.function_type.return_type
        typ = _VOID if isinstance(result, ll.VoidType) else result
        if typ is _VOID:  # what gives a result is an intrinsic that writes nothing
            self._loaded.clear()
        text = f"call {result} {function.get_reference()}({', '.join(given)})"
        emit = self._read if shared else self._line
        return emit(typ, "call", (function, *args), text)

    def opaque(self, x: LLValue) -> LLValue:
        """The integer in a register; LLVM cannot see how it was computed."""
        text = f'call {x.type} asm "", "=r,0"({_typed(x)}) memory(none) nounwind'
        return self._line(x.type, "call", (x,), text)

    def call_void(self, address: LLValue, args: Sequence[LLValue]) -> None:
        """Calls a function that returns nothing, by its address."""
        self._loaded.clear()
        text = f"call void {address.get_reference()}({', '.join(map(_typed, args))})"
        self._line(_VOID, "call", (address, *args), text)


def _may_trap(opname: str, operands: Sequence[LLValue]) -> bool:
    """Whether an instruction must not run where the program does not want it to."""
    if opname == "load":
        return True
    if opname not in ("sdiv", "udiv", "srem", "urem"):
        return False
    divisor = operands[1]
    known = isinstance(divisor, ll.Constant) and isinstance(divisor.constant, int)
    return not known or divisor.constant in (0, -1)


@lru_cache(maxsize=64)
def _flags(lanes: int) -> LLType:
    return ll.VectorType(_FLAG, lanes)


def _typed(value: LLValue) -> str:
    if type(value) is SourceLine:
        return value.typed
    return f"{value.type} {value.get_reference()}"


def _numbers(block: ll.Block) -> Iterator[int]:
    """Numbers for results; all builders in a function share them."""
    scope = vars(block.scope)
    found: Iterator[int] = scope.setdefault("line_numbers", itertools.count())
    return found
