"""The text form of a module: printing; `parse.py` reads it back.

    module    = (graph | inside | chunks | loop | library | constant | check | order
              | knob)*
    graph     = "graph" body
    inside    = "inside" @name body   what a kernel in the region of that name computes
    chunks    = "chunks" @name ["aligned" "(" (%buffer %buffer),* ")"] body
                the op `chunk` that the loop function of that name computes
    body      = @name "(" (%value ":" type),* ")" ["sizes" "(" symbol,* ")"]
                "{" constraint* op* "return" %value,* "}"
    constraint= "constraint" cond ["says" attr] ["at" string]
    op        = [(%value ":" type),+ "="] name "(" %value,* ")"
                ["{" (name "=" attr),* "}"] ["loc" string] ("region" body)*
    type      = dtype "[" dim,* "]" ["strides" "[" dim,* "]"]
    attr      = true | false | none | number | string | dtype | "<" dim ">"
              | "[" dim,+ "]"  a tuple of dims  |  "(" attr,* ")"  any other tuple
    library   = "library" @name "symbol" string ["(" role, .. ")"]
    constant  = "constant" @name ":" type (dense "[" number,* "]" | bytes string
              | data hash)
    check     = "check" kind string   the first is check 1; kind: index, division
    order     = "order" "(" int,* ")"   positions of the calls of `main`
    knob      = "knob" symbol "of" dim "by" int   rows of a chunk, of all these rows

    loop      = "loop" @name "(" symbol,* ";" (role %buffer ":" type),* ")" stmt
    stmt      = "{" stmt* "}"                                    Block
              | "for" symbol "=" dim "to" dim ["step" int] [kind] ["grain" dim]
                ["lanes" int rest ["copies" int] ["jam" int] ["most" int]] inner
              | "alloc" role %buffer ":" type
              | %buffer "[" dim,* "]" "=" value                  Store
              | "let" symbol "=" value
              | "local" $name ":" dtype "=" value
              | "accumulator" $name ":" dtype "=" op
              | "accumulate" $name "," value
              | "if" value inner ["else" inner]
              | "switch" dim "{" ("case" int inner)* "}"
              | "dispatch" "{" ("variant" string ["when" cond,+] inner)* "}"
              | "check" value "else" int ["of" value]
              | "call" @name "(" dim,* ";" (%buffer "[" dim,* "]"),* ")"
              | "library" string "computes" op "{" (name "=" attr),* "}"
                "(" dim,* ";" %buffer,* ")"
    inner     = "{" stmt* "}" a Block  |  "do" stmt "end"  any other statement
    value     = number ":" dtype | "index" "(" dim ")"
              | %buffer "[" dim,* "]" ["where" value] | $name [":" dtype]
              | op "(" value,* ")" | ("cast" | "bits") "(" value "," dtype ")"

A dim is written as `sym.Expr` prints it. "#" starts a comment. A name that is no plain
word is quoted: %"layers/0". A number prints by `repr`, so a float comes back exactly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence

import numpy as np

from pliant.ir.graph import (
    Attr,
    ChunkLoop,
    Constant,
    Graph,
    Library,
    Module,
    Names,
    Op,
    Value,
)
from pliant.ir.loops import (
    Accumulate,
    Accumulator,
    Alloc,
    Binary,
    Bits,
    Block,
    Buffer,
    Call,
    CallLibrary,
    Cast,
    Check,
    Const,
    Dispatch,
    Dot,
    Fma,
    For,
    If,
    Index,
    Kind,
    Let,
    Load,
    Local,
    LoopFunc,
    LoopValue,
    Prefetch,
    Read,
    Select,
    Stmt,
    Store,
    Switch,
    Unary,
    Variant,
    Vectors,
    While,
)
from pliant.ir.types import DType, TensorType, contiguous_strides
from pliant.sym import Expr, Guard, sym

INLINE_ELEMENTS = 16  # a constant of at most so many elements prints its data
HASHED_BYTES = 1 << 20  # larger data is identified by samples: weights may be on disk
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 14

MARK = "# <-- here"

PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")


# ---- pieces


def name_text(name: str) -> str:
    return name if PLAIN_NAME.fullmatch(name) else string_text(name)


def string_text(text: str) -> str:
    return json.dumps(text)


def number_text(number: bool | int | float) -> str:
    if isinstance(number, bool):
        return "true" if number else "false"
    return repr(number)


def symbol_text(name: str) -> str:
    return str(sym(name))


def dims_text(dims: Iterable[Expr]) -> str:
    return f"[{', '.join(map(str, dims))}]"


def attr_text(attr: Attr) -> str:
    match attr:
        case None:
            return "none"
        case bool() | int() | float():
            return number_text(attr)
        case str():
            return string_text(attr)
        case DType():
            return attr.text
        case Expr():
            return f"<{attr}>"
        case tuple():
            if attr and all(isinstance(item, Expr) for item in attr):
                return f"[{', '.join(map(str, attr))}]"
            return f"({', '.join(map(attr_text, attr))})"
    raise TypeError(f"not an attribute: {attr!r}")


def typed_text(values: Sequence[Value]) -> str:
    return ", ".join(f"%{name_text(v.name)}: {v.type}" for v in values)


def values_text(values: Sequence[Value]) -> str:
    return ", ".join(f"%{name_text(v.name)}" for v in values)


def indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in text.split("\n"))


# ---- graphs


def print_op(op: Op) -> str:
    """One op, its regions on the lines after it."""
    text = f"{typed_text(op.results)} = " if op.results else ""
    text += f"{op.name}({values_text(op.operands)})"
    if op.attrs:
        attrs = (f"{name} = {attr_text(value)}" for name, value in op.attrs)
        text += f" {{{', '.join(attrs)}}}"
    if op.loc:
        text += f" loc {string_text(op.loc)}"
    for region in op.regions:
        text += f"\n  region {indented(_body_text(region)).lstrip()}"
    return text


def _distinct(graph: Graph) -> Graph:
    """A graph without ops may list values of several graphs, by equal names."""
    if graph.ops:
        return graph
    names = Names()
    params = tuple(Value(names.fresh(v.name), v.type) for v in graph.params)
    return graph.replace(params=params)


def print_graph(graph: Graph) -> str:
    return f"graph {_body_text(graph)}\n"


def _body_text(graph: Graph) -> str:
    head = f"@{name_text(graph.name)}({typed_text(graph.params)})"
    if graph.sizes:
        head += f" sizes ({', '.join(map(symbol_text, graph.sizes))})"
    lines = [_constraint_text(guard) for guard in graph.constraints]
    lines += [print_op(op) for op in graph.ops]
    lines.append(f"return {values_text(graph.results)}".rstrip())
    return f"{head} {{\n{indented(chr(10).join(lines))}\n}}"


def _constraint_text(guard: Guard) -> str:
    text = f"constraint {guard.cond}"
    if guard.message:
        text += f" says {attr_text(guard.message)}"
    if guard.origin:
        text += f" at {string_text(guard.origin)}"
    return text


# ---- constants and libraries


def fingerprint(constant: Constant) -> str:
    """Names the data of a constant without printing it; cheap for large data."""
    data = constant.data.reshape(-1).view(np.uint8)
    if data.nbytes <= HASHED_BYTES:
        return f"sha256:{hashlib.sha256(data.tobytes()).hexdigest()[:16]}"
    digest = hashlib.sha256(str(data.nbytes).encode())
    for start in np.linspace(0, data.nbytes - _SAMPLE_BYTES, _SAMPLES, dtype=np.int64):
        digest.update(data[start : start + _SAMPLE_BYTES].tobytes())
    return f"sample:{digest.hexdigest()[:16]}"


def print_constant(constant: Constant) -> str:
    head = f"constant @{name_text(constant.name)}: {constant.type}"
    data = constant.data
    if data.size > INLINE_ELEMENTS:
        return f"{head} data {fingerprint(constant)}\n"
    numbers = data.reshape(-1).tolist()
    # A NaN has bits that its text does not show.
    if np.array_equal(data, data):
        return f"{head} dense [{', '.join(map(number_text, numbers))}]\n"
    return f'{head} bytes "{data.tobytes().hex()}"\n'


def print_library(library: Library) -> str:
    symbol = string_text(library.symbol)
    roles = library.roles
    given = "" if roles is None else f" ({', '.join(role.value for role in roles)})"
    return f"library @{name_text(library.name)} symbol {symbol}{given}\n"


def print_module(module: Module) -> str:
    parts = [print_graph(graph) for graph in module.graphs.values()]
    for name, graphs in module.inside.items():
        bodies = map(_body_text, map(_distinct, dict.fromkeys(graphs)))
        parts += [f"inside @{name_text(name)} {body}\n" for body in bodies]
    for name, loop in module.chunks.items():
        if name in module.loops:
            parts.append(_chunks_text(name, loop))
    parts += [print_loop(func) for func in module.loops.values()]
    tables = [print_library(library) for library in module.libraries.values()]
    tables += [print_constant(constant) for constant in module.constants.values()]
    tables += [f"check {c.kind} {string_text(c.message)}\n" for c in module.checks]
    tables += [f"order ({', '.join(map(str, order))})\n" for order in module.orders]
    for name, knob in module.knobs.items():
        tables.append(f"knob {symbol_text(name)} of {knob.extent} by {knob.multiple}\n")
    if tables:
        parts.append("".join(tables))
    return "\n".join(parts)


def _chunks_text(name: str, loop: ChunkLoop) -> str:
    pairs = ", ".join(
        f"%{name_text(one)} %{name_text(other)}" for one, other in sorted(loop.aligned)
    )
    aligned = f" aligned ({pairs})" if pairs else ""
    params = tuple(dict.fromkeys(loop.op.operands))
    graph = Graph("chunk", params, (loop.op,), loop.op.results)
    return f"chunks @{name_text(name)}{aligned} {_body_text(graph)}\n"


# ---- loop functions


def print_loop(func: LoopFunc, mark: Stmt | None = None) -> str:
    """A loop function; a comment points at the statement `mark`."""
    printer = _LoopPrinter(mark)
    return f"loop {printer.header(func)} {printer.body(func.body)}\n"


def print_value(value: LoopValue) -> str:
    return _LoopPrinter().value(value)


def buffer_text(buffer: Buffer) -> str:
    strides = buffer.strides
    plain = strides == contiguous_strides(buffer.shape)
    shown = TensorType(buffer.dtype, buffer.shape, None if plain else strides)
    return f"{buffer.role.value} %{name_text(buffer.name)}: {shown}"


def vectors_text(vectors: Vectors) -> str:
    text = f"lanes {vectors.lanes} {vectors.rest.value}"
    if vectors.copies != 1:
        text += f" copies {vectors.copies}"
    if vectors.jam != 1:
        text += f" jam {vectors.jam}"
    return text if vectors.most is None else f"{text} most {vectors.most}"


class _LoopPrinter:
    """Knows the scalars named so far: a Read of the declared type needs no type."""

    def __init__(self, mark: Stmt | None = None) -> None:
        self.scalars: dict[str, DType] = {}
        self.mark = mark

    def header(self, func: LoopFunc) -> str:
        sizes = ", ".join(map(symbol_text, func.sizes))
        buffers = ", ".join(map(buffer_text, func.buffers))
        return f"@{name_text(func.name)}({sizes}; {buffers})"

    def body(self, stmt: Stmt) -> str:
        """A statement inside another: a block in braces, any other in do .. end."""
        if isinstance(stmt, Block):
            return self.stmt(stmt)
        return f"do\n{indented(self.stmt(stmt))}\nend"

    def declare(self, name: str, dtype: DType) -> str:
        self.scalars[name] = dtype
        return f"${name_text(name)}: {dtype}"

    def access(self, buffer: Buffer, index: tuple[Expr, ...]) -> str:
        return f"%{name_text(buffer.name)}{dims_text(index)}"

    def stmt(self, stmt: Stmt) -> str:
        text = self.plain(stmt)
        if stmt is not self.mark:
            return text
        first, line, rest = text.partition("\n")
        return f"{first}  {MARK}{line}{rest}"

    def plain(self, stmt: Stmt) -> str:
        match stmt:
            case Block(body):
                if not body:
                    return "{}"
                inner = "\n".join(map(self.stmt, body))
                return f"{{\n{indented(inner)}\n}}"
            case For():
                return f"{self.for_head(stmt)} {self.body(stmt.body)}"
            case Alloc(buffer):
                return f"alloc {buffer_text(buffer)}"
            case Store(buffer, index, value):
                return f"{self.access(buffer, index)} = {self.value(value)}"
            case Let(name, value):
                return f"let {symbol_text(name)} = {self.value(value)}"
            case Local(name, dtype, value):
                shown = self.value(value)
                return f"local {self.declare(name, dtype)} = {shown}"
            case Accumulator(name, dtype, op):
                return f"accumulator {self.declare(name, dtype)} = {op}"
            case Accumulate(name, value):
                return f"accumulate ${name_text(name)}, {self.value(value)}"
            case If(cond, then, otherwise):
                text = f"if {self.value(cond)} {self.body(then)}"
                if otherwise is not None:
                    text += f" else {self.body(otherwise)}"
                return text
            case While(cond, body):
                return f"while {self.value(cond)} {self.body(body)}"
            case Switch(selector, cases):
                lines = [f"case {number} {self.body(case)}" for number, case in cases]
                inner = indented("\n".join(lines))
                return f"switch {selector} {{\n{inner}\n}}"
            case Dispatch(variants):
                inner = indented("\n".join(map(self.variant, variants)))
                return f"dispatch {{\n{inner}\n}}"
            case Check(cond, number, value):
                value_text = "" if value is None else f" of {self.value(value)}"
                return f"check {self.value(cond)} else {number}{value_text}"
            case Prefetch(buffer, index):
                return f"prefetch {self.access(buffer, index)}"
            case Call(function, sizes, arguments):
                passed = ", ".join(self.access(*argument) for argument in arguments)
                dims = ", ".join(map(str, sizes))
                return f"call @{name_text(function)}({dims}; {passed})"
            case CallLibrary(symbol, sizes, buffers, op, settings):
                passed = ", ".join(f"%{name_text(b.name)}" for b in buffers)
                dims = ", ".join(map(str, sizes))
                known = ", ".join(f"{k} = {attr_text(v)}" for k, v in settings)
                head = f"library {string_text(symbol)} computes {op} {{{known}}}"
                return f"{head} ({dims}; {passed})"
        raise TypeError(f"not a loop statement: {stmt!r}")

    def variant(self, variant: Variant) -> str:
        text = f"variant {json.dumps(variant.name)}"
        if variant.guards:
            text += f" when {', '.join(map(str, variant.guards))}"
        return f"{text} {self.body(variant.body)}"

    def for_head(self, loop: For) -> str:
        text = f"for {symbol_text(loop.var)} = {loop.begin} to {loop.end}"
        if loop.step != 1:
            text += f" step {loop.step}"
        if loop.kind is not Kind.SERIAL:
            text += f" {loop.kind.value}"
        if loop.grain != 1:
            text += f" grain {loop.grain}"
        return text if loop.vectors is None else f"{text} {vectors_text(loop.vectors)}"

    def value(self, value: LoopValue) -> str:
        match value:
            case Const(number, dtype):
                return f"{number_text(number)}:{dtype}"
            case Index(dim):
                return f"index({dim})"
            case Load(buffer, index, where):
                text = self.access(buffer, index)
                return text if where is None else f"{text} where {self.value(where)}"
            case Read(name, dtype):
                known = self.scalars.get(name) is dtype
                return f"${name_text(name)}" + ("" if known else f":{dtype}")
            case Unary(op, x):
                return f"{op}({self.value(x)})"
            case Binary(op, x, y):
                return f"{op}({self.value(x)}, {self.value(y)})"
            case Fma(x, y, z):
                return f"fma({self.value(x)}, {self.value(y)}, {self.value(z)})"
            case Dot(parts, x, y, z):
                words = ", ".join(map(self.value, (x, y, z)))
                return f"dot_{parts}({words})"
            case Select(cond, x, y):
                return f"select({self.value(cond)}, {self.value(x)}, {self.value(y)})"
            case Cast(x, dtype):
                return f"cast({self.value(x)}, {dtype})"
            case Bits(x, dtype):
                return f"bits({self.value(x)}, {dtype})"
        raise TypeError(f"not a loop value: {value!r}")
