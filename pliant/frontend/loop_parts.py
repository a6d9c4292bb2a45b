"""Python loops over parts of a size, of which the last may be smaller.

    for i in range((n + 15) // 16):        for i in range(0, n, 16):
        start = i * 16                         out.append(f(x[:, i : i + 16]))
        end = min(start + 16, n)
        out.append(f(x[:, start:end]))

If a round knows of its place only by what it slices, and of its part's size only by an
end that `min` limits, all rounds but the last are alike (loop_source.py).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field


@dataclass(slots=True)
class LoopParts:
    """What a loop calls the places of a part, and what it says of them."""

    variable: str
    chunk: str  # the size of all parts but the last
    rounds: str | None  # the number of parts, unless it is a range in steps
    whole: str | None  # the size that is cut into parts, if the loop says so
    starts: set[str] = field(default_factory=set)  # texts
    ends: set[str] = field(default_factory=set)
    limited: set[str] = field(default_factory=set)  # those of the ends
    sizes: list[str] = field(default_factory=list)
    body: list[ast.stmt] = field(default_factory=list)  # but for these

    @property
    def limits(self) -> str:
        return f"{self.rounds}, {self.whole}, {self.chunk}"

    @property
    def names(self) -> set[str]:
        """The variables that are places."""
        return {t for t in self.starts | self.ends if t.isidentifier()}

    def is_part(self, start: ast.expr, end: ast.expr) -> bool:
        return ast.unparse(start) in self.starts and self.is_end(end) is not None

    def is_end(self, end: ast.expr) -> bool | None:
        """Whether it is an end that the size limits; None if it is no end."""
        match end:
            case ast.BinOp(start, ast.Add(), more) if ast.unparse(more) == self.chunk:
                return False if ast.unparse(start) in self.starts else None
            case ast.Call(ast.Name("min"), [a, b], []):
                if self.is_end(a) is None:
                    a, b = b, a
                if self.is_end(a) is None or self.whole not in (None, ast.unparse(b)):
                    return None
                if not _is_plain(b):
                    return None
                self.whole = ast.unparse(b)
                return True
            case _:
                text = ast.unparse(end)
                return text in self.limited if text in self.ends else None


def parts_of(loop: ast.For) -> LoopParts | None:
    """The parts that a loop goes through; None if its text shows none."""
    match loop:
        case ast.For(ast.Name(name), ast.Call(ast.Name("range"), [rounds], []), _, []):
            chunk = _factor(loop, name)
            if chunk is None:
                return None
            parts = LoopParts(name, chunk, ast.unparse(rounds), None)
            parts.starts = {f"{name} * {chunk}", f"{chunk} * {name}"}
            parts.ends = {f"({name} + 1) * {chunk}", f"{chunk} * ({name} + 1)"}
        case ast.For(
            ast.Name(name),
            ast.Call(ast.Name("range"), [ast.Constant(0), whole, step], []),
            _,
            [],
        ) if _is_plain(step) and _is_plain(whole):
            parts = LoopParts(name, ast.unparse(step), None, ast.unparse(whole), {name})
        case _:
            return None
    used: set[str] = set()
    for statement in loop.body:
        made = _named(parts, statement)
        if made is None:
            parts.body.append(statement)
            used |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
        elif made in used:
            return None  # it is that of the round before
    return parts


def _named(parts: LoopParts, statement: ast.stmt) -> str | None:
    """The variable, if it only gives a place or a part's size a name."""
    match statement:
        case ast.Assign([ast.Name(name)], ast.BinOp(end, ast.Sub(), start)) if (
            parts.is_end(end) and ast.unparse(start) in parts.starts
        ):
            parts.sizes.append(name)
        case ast.Assign([ast.Name(name)], value) if ast.unparse(value) in parts.starts:
            parts.starts.add(name)
        case ast.Assign([ast.Name(name)], value) if (
            limited := parts.is_end(value)
        ) is not None:
            parts.ends.add(name)
            parts.limited.discard(name)
            if limited:
                parts.limited.add(name)
        case _:
            return None
    return name


def _factor(loop: ast.For, name: str) -> str | None:
    """What the loop's variable is multiplied by, if that is always the same."""
    found = set()
    for node in (n for statement in loop.body for n in ast.walk(statement)):
        match node:
            case ast.BinOp(ast.Name(variable), ast.Mult(), other) if variable == name:
                found.add(ast.unparse(other))
            case ast.BinOp(other, ast.Mult(), ast.Name(variable)) if variable == name:
                found.add(ast.unparse(other))
            case _:
                continue
        if not _is_plain(other):
            return None
    return found.pop() if len(found) == 1 else None


def _is_plain(node: ast.expr) -> bool:
    """A number, or one that is read from a variable, an attribute or a shape."""
    match node:
        case ast.Constant(value):
            return type(value) is int
        case ast.Name():
            return True
        case ast.Attribute(owner):
            return _is_plain(owner)
        case ast.Subscript(ast.Attribute(owner, "shape"), ast.Constant(int())):
            return _is_plain(owner)
        case _:
            return False
