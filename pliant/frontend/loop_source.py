"""Python loops over a size, rewritten as scans.

    out = []                              out = []
    for t in range(n):                    __range = (0, n, 1)
        h = cell(x[:, t], h)              if __rounds.over_size(*__range):
        out.append(h)                         def __body(__read_0, h):
                                                  h = cell(__read_0, h)
                              ->                  __kept_0 = h
                                                  return (h,), (__kept_0,)
                                              (h,), (__kept_0,) = __rounds.scanned(
                                                  __body, (h,), ((x[:, :], 1, 0),),
                                                  __range)
                                              out = __rounds.StackedRounds(__kept_0)
                                          else:
                                              for t in range(*__range): ...

and `torch.stack(out, 1)` asks `__rounds` (torch_rounds.py) for what the scan stacked. A
loop is rewritten if its text shows that a round knows of the rounds before it only what
it carries, which are the variables that it may read before it assigns them:

- its variable is only an index (`x[:, t]`, `x[..., t - 1, :]`, `x[:, t : t + 1]`) into
  what the loop does not assign;
- results are kept by `out.append(..)` in a list that was empty, or by `out[:, t] = ..`
  in a tensor that the function has made. The loop reads no more of it than its dtype
  or device, and nothing has read it before;
- what it assigns but does not carry is not read behind it;
- nothing leaves it early.

A loop over parts of a size (loop_parts.py) is a scan too, but for its last round, in
which the part may be smaller: it follows the scan.

Of other loops, `range(0, n, 128)` asks for the number of its steps alone, so that the
program is right for every n with as many.

What the text does not show is checked when it is traced: torch's scan refuses a body
that changes a tensor it is given, and a carried value whose type changes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType

from pliant.frontend.loop_parts import LoopParts, parts_of

ROUNDS = "__rounds"
_JOINS = {"stack": "stack", "cat": "cat", "concat": "cat"}
_MAKERS = frozenset(
    {"zeros", "ones", "empty", "full"}
    | {"zeros_like", "ones_like", "empty_like", "full_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_full"}
)
_REFUSED = (
    *(ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await),
    *(ast.Global, ast.Nonlocal, ast.Delete, ast.Try, ast.FunctionDef, ast.ClassDef),
    *(ast.Lambda, ast.NamedExpr, ast.Import, ast.ImportFrom, ast.AsyncFor),
    *(ast.AugAssign, ast.AnnAssign, ast.Match, ast.AsyncWith),
)
_BLOCKS = (ast.If, ast.For, ast.While, ast.With)
_KNOWING = frozenset({"super", "locals", "vars", "eval", "exec"})


class _NoScan(Exception):
    """The text of a loop does not show that it is a scan."""


def rewrite_loops(definition: ast.FunctionDef, function: FunctionType) -> bool:
    """Rewrites a function's text; whether a loop of it is known to be a scan."""
    known = function.__globals__
    own = (
        not {"range", "min"}.isdisjoint(known)
        or getattr(known.get("torch"), "__name__", "") != "torch"
    )
    if own:
        return False
    return _Function(definition, frozenset(function.__code__.co_cellvars)).run()


@dataclass(frozen=True, slots=True)
class _RowsRead:
    """`x[:, t + 1]`: the rows `x[:, :]` along an axis, from an offset on."""

    text: str
    axis: int
    offset: int

    def __str__(self) -> str:
        return f"({self.text}, {self.axis}, {self.offset})"


@dataclass(slots=True)
class _ScannedLoop:
    variable: str
    limits: str  # start, stop, step; of a loop over parts what it says of them
    parts: LoopParts | None = None
    reads: dict[_RowsRead, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # of x.dtype: its variable
    kept: list[tuple[str, _RowsRead | None]] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    body: list[ast.stmt] = field(default_factory=list)

    @property
    def places(self) -> set[str]:
        """The variables that say which round it is."""
        return {self.variable} | (self.parts.names if self.parts else set())

    def lists(self) -> set[str]:
        return {name for name, rows in self.kept if rows is None}


class _Function:
    """The loops of one function; `shared` are variables that functions in it know."""

    def __init__(self, definition: ast.FunctionDef, shared: frozenset[str]) -> None:
        self.definition, self.shared = definition, shared
        self.nodes = list(_in_order(definition))
        self.place = {node: k for k, node in enumerate(self.nodes)}

    def run(self) -> bool:
        """Rewrites them; whether there was one to rewrite."""
        lists: set[str] = set()
        found = False
        for block, loop, enclosed in list(_loops(self.definition.body, False)):
            scan = self.found(block, loop, enclosed)
            if scan is None or scan.parts is not None:
                found |= _in_steps(loop)
            if scan is None:
                continue
            at = block.index(loop)
            block[at : at + 1] = _branch(scan, loop)
            lists |= scan.lists()
            found = True
        if not found:
            return False
        for node in self.nodes:
            if isinstance(node, ast.Call) and _joined(node) in lists:
                assert isinstance(node.func, ast.Attribute)
                name = ast.Name(ROUNDS, ast.Load())
                node.func = ast.Attribute(name, _JOINS[node.func.attr], ast.Load())
        return True

    def found(
        self, block: list[ast.stmt], loop: ast.For, enclosed: bool
    ) -> _ScannedLoop | None:
        """The loop as a scan, of single rows or of parts; None if it is neither."""
        for header in (_header, _header_of_parts):
            try:
                return self.scan(block, loop, enclosed, header(loop))
            except _NoScan:
                continue
        return None

    def scan(
        self,
        block: list[ast.stmt],
        loop: ast.For,
        enclosed: bool,
        scan: _ScannedLoop,
    ) -> _ScannedLoop:
        statements = loop.body if scan.parts is None else scan.parts.body
        inside = [node for statement in statements for node in ast.walk(statement)]
        _require(not any(isinstance(node, _REFUSED) for node in inside))
        stored = _stored(inside)
        body = _RoundBody(scan, stored | _of_comprehensions(inside))
        scan.body = [body.statement(copy.deepcopy(s)) for s in statements]
        kept = {to for to, _ in scan.kept}
        read = [ast.parse(rows.text) for rows in scan.reads]
        names = set[str]().union(*map(_names, [*scan.body, *read]))
        own = set(scan.places)
        if scan.parts is not None:
            scan.limits = scan.parts.limits  # a slice may have said of what size
            own |= set(scan.parts.sizes)
            said = _names(ast.parse(scan.limits))
            _require(not said & (stored | own | kept) and not own & stored)
            # What is read is read in front of the loop, where they are not known.
            _require(not own & set[str]().union(*map(_names, read)))
        _require(not names & (kept | _KNOWING | scan.places))
        _require(not self.shared & (kept | stored | own))
        scan.carried = _carried(scan.body, stored)
        for name in (stored - set(scan.carried)) | own:
            _require(not self.read_behind(name, block, loop, enclosed))
        for to, rows in scan.kept:
            self.check_kept(to, rows, loop, block)
        _require(bool(scan.carried or scan.kept))
        return scan

    def read_behind(
        self, name: str, block: list[ast.stmt], loop: ast.For, enclosed: bool
    ) -> bool:
        """Whether a variable that the loop assigns may be read after it."""
        path = [(block, block.index(loop))] if enclosed else self.path(loop)
        for around, k in reversed(path):
            for statement in around[k + 1 :]:
                uses = [n for n in _in_order(statement) if _is_name(n, name)]
                if uses and isinstance(statement, ast.Assign) and _is_stored(uses[0]):
                    return enclosed
                if uses:
                    return True
        inside = set(ast.walk(loop))
        return enclosed and any(
            _is_name(node, name) and not _is_stored(node) and node not in inside
            for node in self.nodes
        )

    def path(self, loop: ast.For) -> list[tuple[list[ast.stmt], int]]:
        found = _path(self.definition.body, loop)
        _require(bool(found))
        _require(not any(isinstance(block[k], ast.Try) for block, k in found))
        return found

    def uses_behind(self, name: str, loop: ast.For) -> list[ast.AST] | None:
        """Where a variable is named behind a loop, until it is assigned anew.

        None if the loop is in another one: what is behind it may be before it.
        """
        path = self.path(loop)
        if any(isinstance(block[k], ast.For | ast.While) for block, k in path[:-1]):
            return None
        uses: list[ast.AST] = []
        for block, k in reversed(path):
            for statement in block[k + 1 :]:
                uses += [n for n in _in_order(statement) if _is_name(n, name)]
                if isinstance(statement, ast.Assign) and any(
                    _is_name(target, name) for target in statement.targets
                ):
                    return uses
        return uses

    def check_kept(
        self, to: str, rows: _RowsRead | None, loop: ast.For, block: list[ast.stmt]
    ) -> None:
        """The block of the loop made the list or tensor, and nothing else knows it."""
        inside = set(ast.walk(loop))
        uses = [n for n in self.nodes if _is_name(n, to) and n not in inside]
        before = [n for n in uses if self.place[n] < self.place[loop]]
        made = [
            statement.value
            for statement in block
            if isinstance(statement, ast.Assign) and statement.targets == before[-1:]
        ]
        match made, rows:
            case [ast.Call(ast.Attribute(attr=maker))], _RowsRead() if maker in _MAKERS:
                pass
            case [ast.List([])], None:
                # It is a list no longer: only these know what it is.
                joined = [
                    node.args[0]
                    for node in self.nodes
                    if isinstance(node, ast.Call) and _joined(node) == to
                ]
                behind = self.uses_behind(to, loop)
                uses = uses if behind is None else behind
                _require(all(_is_stored(use) or use in joined for use in uses))
            case _:
                raise _NoScan


def _in_steps(loop: ast.For) -> bool:
    """Lets the number of rounds be fixed where it is not that of a size; whether."""
    match loop.iter:
        case ast.Call(ast.Name("range"), [_, _, _], []) as call:
            name = ast.copy_location(ast.Name(ROUNDS, ast.Load()), call)
            steps = ast.Attribute(name, "in_steps", ast.Load())
            call.func = ast.copy_location(steps, call)
            return True
        case _:
            return False


# ---- the parts of a loop


def _header(loop: ast.For) -> _ScannedLoop:
    """Its variable, and the limits of its range."""
    match loop:
        case ast.For(ast.Name(variable), ast.Call(ast.Name("range"), given, []), _, []):
            limits = [ast.unparse(limit) for limit in given]
        case _:
            raise _NoScan
    match limits:
        case [stop]:
            return _ScannedLoop(variable, f"0, {stop}, 1")
        case [start, stop]:
            return _ScannedLoop(variable, f"{start}, {stop}, 1")
        case [start, stop, step]:
            return _ScannedLoop(variable, f"{start}, {stop}, {step}")
        case _:
            raise _NoScan


def _header_of_parts(loop: ast.For) -> _ScannedLoop:
    """Its variable; the number of parts, the size they are of, and that of a part."""
    parts = parts_of(loop)
    if parts is None:
        raise _NoScan
    return _ScannedLoop(parts.variable, parts.limits, parts)


class _RoundBody(ast.NodeTransformer):
    """The statements of a round: reads of rows are parameters, what it keeps are
    variables of their own."""

    def __init__(self, scan: _ScannedLoop, stored: set[str]) -> None:
        self.scan, self.stored = scan, stored

    def statement(self, statement: ast.stmt) -> ast.stmt:
        """A statement of the loop itself, which every round runs."""
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(to), "append"), [value], [])):
                _require(to not in self.stored)
                return self.keep(statement, value, to, None)
            case ast.Assign([ast.Subscript(ast.Name(to)) as target], value) if (
                self.scan.places & _names(target.slice)
            ):
                _require(to not in self.stored and self.scan.parts is None)
                rows, single = self.indexed(target)
                _require(not single)
                return self.keep(statement, value, to, rows)
            case _:
                made = self.visit(statement)
                assert isinstance(made, ast.stmt)
                return made

    def keep(
        self, old: ast.stmt, value: ast.expr, to: str, rows: _RowsRead | None
    ) -> ast.stmt:
        target = ast.Name(f"__kept_{len(self.scan.kept)}", ast.Store())
        _require(all(to != other for other, _ in self.scan.kept))
        self.scan.kept.append((to, rows))
        made = ast.Assign([target], self.visit(value))
        return ast.fix_missing_locations(ast.copy_location(made, old))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not self.scan.places & _names(node.slice):
            _require(not _is_stored(node))
            return self.generic_visit(node)
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        _require(isinstance(root, ast.Name) and root.id not in self.stored)
        _require(not _is_stored(node))
        rows, single = self.indexed(node)
        name = self.scan.reads.setdefault(rows, f"__read_{len(self.scan.reads)}")
        text = f"{name}.unsqueeze({rows.axis})" if single else name
        made = ast.parse(text, mode="eval").body
        return ast.fix_missing_locations(ast.copy_location(made, node))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        _require(not _is_stored(node))
        match node:
            case ast.Attribute(ast.Name(name), "dtype" | "device" as what) if (
                name not in self.stored
            ):
                kind = self.scan.kinds.setdefault(f"{name}.{what}", f"__{what}_{name}")
                return ast.copy_location(ast.Name(kind, ast.Load()), node)
            case _:
                return self.generic_visit(node)

    def indexed(self, node: ast.Subscript) -> tuple[_RowsRead, bool]:
        """The rows of `x[:, t]`; whether one keeps its axis, as in `x[:, t:t + 1]`."""
        index = node.slice
        entries = list(index.elts) if isinstance(index, ast.Tuple) else [index]
        places = [k for k, e in enumerate(entries) if self.scan.places & _names(e)]
        _require(len(places) == 1)
        place = places[0]
        others = [*entries[:place], *entries[place + 1 :]]
        _require(all(map(_is_plain, others)))
        _require(not any(_names(entry) & self.stored for entry in others))
        offset, single = self.offset(entries[place])
        before = entries[:place]
        if any(_is_constant(entry, ...) for entry in before):
            axis = -1 - sum(map(_keeps_axis, entries[place + 1 :]))
        else:
            axis = sum(map(_keeps_axis, before))
        entries[place] = ast.Slice()
        every = copy.deepcopy(node)
        every.ctx = ast.Load()
        every.slice = ast.Tuple(entries, ast.Load()) if others else entries[0]
        return _RowsRead(ast.unparse(every), axis, offset), single

    def offset(self, entry: ast.expr) -> tuple[int, bool]:
        parts = self.scan.parts
        if parts is not None:
            match entry:
                case ast.Slice(ast.expr() as first, ast.expr() as last, None):
                    _require(parts.is_part(first, last))
                    return 0, False
                case _:
                    raise _NoScan
        match entry:
            case ast.Name():
                return 0, False
            case ast.BinOp(ast.Name(), ast.Add(), ast.Constant(int(more))):
                return more, False
            case ast.BinOp(ast.Name(), ast.Sub(), ast.Constant(int(less))):
                return -less, False
            case ast.Slice(
                ast.Name(start),
                ast.BinOp(ast.Name(end), ast.Add(), ast.Constant(1)),
                None,
            ) if start == end:
                return 0, True
            case _:
                raise _NoScan


def _carried(body: Sequence[ast.stmt], stored: set[str]) -> list[str]:
    """Variables that a round may read before it assigns them."""
    out: list[str] = []
    known: set[str] = set()
    for statement in body:
        always = not isinstance(statement, _BLOCKS)
        for node in _in_order(statement):
            if not isinstance(node, ast.Name) or node.id not in stored | known:
                continue
            if _is_stored(node) and always:
                known.add(node.id)
            elif node.id not in known and node.id not in out:
                out.append(node.id)
    return out


def _branch(scan: _ScannedLoop, loop: ast.For) -> list[ast.stmt]:
    """The loop as a scan where it is over a size, and as it was elsewhere."""
    reads = "".join(f"{rows}, " for rows in scan.reads)
    carried = "".join(f"{name}, " for name in scan.carried)
    kept = "".join(f"__kept_{k}, " for k in range(len(scan.kept)))
    parameters = "".join(f"{name}, " for name in scan.reads.values()) + carried
    if scan.parts is None:
        over, scanned, sizes = "over_size", "scanned", []
    else:
        over, scanned, sizes = "over_parts", "scanned_parts", scan.parts.sizes
        parameters = "__size, " + parameters
    lines = [
        f"__range = ({scan.limits})",
        f"if {ROUNDS}.{over}(*__range):",
        *(f"    {name} = {kind}" for kind, name in scan.kinds.items()),
        f"    def __body({parameters}):",
        *(f"        {name} = __size" for name in sizes),
        f"        return ({carried}), ({kept})",
        f"    ({carried}), ({kept}) = {ROUNDS}.{scanned}(",
        f"        __body, ({carried}), ({reads}), __range)",
    ]
    for number, (name, rows) in enumerate(scan.kept):
        lines += [
            f"    {name} = {ROUNDS}.StackedRounds(*__kept_{number})"
            if rows is None
            else f"    {ROUNDS}.write({rows}, __range, *__kept_{number})"
        ]
    made = _statements("\n".join(lines), loop)
    branch = made[1]
    assert isinstance(branch, ast.If)
    (body,) = (each for each in branch.body if isinstance(each, ast.FunctionDef))
    body.body[len(sizes) : len(sizes)] = scan.body
    if scan.parts is None:
        loop.iter = ast.parse("range(*__range)", mode="eval").body
    elif scan.parts.rounds is not None:
        loop.iter = ast.parse("range(__range[0])", mode="eval").body
    branch.orelse = [ast.fix_missing_locations(loop)]
    return made


def _statements(text: str, where: ast.stmt) -> list[ast.stmt]:
    """Statements on the line of another one."""
    made = ast.parse(text).body
    for statement in made:
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                ast.copy_location(node, where)
    return made


# ---- questions


def _require(holds: bool) -> None:
    if not holds:
        raise _NoScan


def _loops(
    block: list[ast.stmt], enclosed: bool
) -> Iterator[tuple[list[ast.stmt], ast.For, bool]]:
    """The loops of a block, innermost first, and whether they are in another one."""
    for statement in block:
        inner = enclosed or isinstance(statement, ast.For | ast.While)
        for name in ("body", "orelse", "finalbody"):
            found = getattr(statement, name, [])
            if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                yield from _loops(found, inner)
        if isinstance(statement, ast.For):
            yield block, statement, enclosed


def _path(block: list[ast.stmt], loop: ast.For) -> list[tuple[list[ast.stmt], int]]:
    """The blocks around a loop, outermost first, and where it is in each."""
    for k, statement in enumerate(block):
        if statement is loop:
            return [(block, k)]
        for name in ("body", "orelse", "finalbody"):
            if inner := _path(getattr(statement, name, []), loop):
                return [(block, k), *inner]
    return []


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes in the order in which they are evaluated: values before targets."""
    match node:
        case ast.Assign(targets, value):
            parts: list[ast.AST] = [value, *targets]
        case ast.For(target, source, body, orelse):
            parts = [source, target, *body, *orelse]
        case _:
            parts = list(ast.iter_child_nodes(node))
    for part in parts:
        yield from _in_order(part)
    yield node


def _stored(nodes: Sequence[ast.AST]) -> set[str]:
    """Variables that are assigned; those of a comprehension are its own."""
    own = {
        n for c in nodes if isinstance(c, ast.comprehension) for n in ast.walk(c.target)
    }
    stored = {
        n.id
        for n in nodes
        if n not in own and isinstance(n, ast.Name) and _is_stored(n)
    }
    _require(not stored & _of_comprehensions(nodes))
    return stored


def _of_comprehensions(nodes: Sequence[ast.AST]) -> set[str]:
    """The variables of comprehensions, which nothing outside of these knows."""
    targets = [n.target for n in nodes if isinstance(n, ast.comprehension)]
    return set[str]().union(*map(_names, targets))


def _is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _is_constant(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_plain(entry: ast.expr) -> bool:
    """Whether it is certain which axes an entry of an index takes and gives."""
    match entry:
        case ast.Slice() | ast.UnaryOp(ast.USub(), ast.Constant(int())):
            return True
        case ast.Constant(value):
            return value is None or value is ... or type(value) is int
        case _:
            return False


def _keeps_axis(entry: ast.expr) -> int:
    return int(isinstance(entry, ast.Slice) or _is_constant(entry, None))


def _joined(call: ast.Call) -> str | None:
    """The variable whose tensors `torch.stack(out, ..)` or cat joins."""
    match call:
        case ast.Call(ast.Attribute(ast.Name("torch"), join), [ast.Name(name), *_]):
            return name if join in _JOINS else None
        case _:
            return None
