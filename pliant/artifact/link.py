"""Object files -> one image of machine code, which `plt_image_map` (image.c) can run.

    code    the executable sections, and a stub for each function that is imported
    data    constants, and slots for addresses: 8 bytes each, filled when it is mapped

Everything inside is at a fixed distance from everything else, so all that is left to do
at run time is to write addresses into slots. Objects that several programs share are in
it once.

The objects are x86-64 ELF files as LLVM writes them for position-independent code
(System V ABI, AMD64 supplement, 4.4 "Relocation").
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pliant.errors import InternalError

PAGE = 4096

# Of sections: type and flags.
_PROGBITS, _SYMTAB, _RELA, _NOBITS, _REL = 1, 2, 4, 8, 9
_WRITE, _ALLOC, _EXECUTE = 1, 2, 4
# Of symbols: section numbers.
_UNDEFINED, _FIRST_SPECIAL = 0, 0xFF00
# Relocations: S symbol, A addend, P place, G slot that holds the address of S.
_ABSOLUTE = 1  # 64 bits: S + A
_RELATIVE = (2, 4)  # 32 bits: S + A - P; of a call too
_RELATIVE_WIDE = 24  # 64 bits: S + A - P
_BY_SLOT = (9, 41, 42)  # 32 bits: G + A - P

_STUB = b"\xff\x25"  # jmp *distance(%rip)
_STUB_BYTES = 8


class _Section(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class _Symbol(NamedTuple):
    name: str
    is_global: bool
    section: int
    value: int


class _ElfObject:
    """An object file, and where its sections go in the image."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        kind = content[:6], struct.unpack_from("<HH", content, 16)
        if kind != (b"\x7fELF\x02\x01", (1, 62)):  # 64 bits, little-endian; x86-64
            raise InternalError("link", "not a relocatable x86-64 object")
        start = struct.unpack_from("<Q", content, 40)[0]
        size, count, names = struct.unpack_from("<HHH", content, 58)
        self.sections = [
            _Section(*struct.unpack_from("<IIQQQQIIQQ", content, start + k * size))
            for k in range(count)
        ]
        self.names = names
        self.places: dict[int, int] = {}  # number of a section -> offset in the image
        self.symbols = list(self._symbols())

    def data(self, section: _Section) -> bytes:
        if section.type == _NOBITS:
            return bytes(section.size)
        return self.content[section.offset : section.offset + section.size]

    def name_of(self, section: _Section) -> str:
        return self._text(self.sections[self.names], section.name)

    def _text(self, strings: _Section, at: int) -> str:
        start = strings.offset + at
        return self.content[start : self.content.index(b"\0", start)].decode()

    def _symbols(self) -> Iterator[_Symbol]:
        for section in self.sections:
            if section.type != _SYMTAB:
                continue
            strings = self.sections[section.link]
            for k in range(section.size // 24):
                name, info, _, number, value, _ = struct.unpack_from(
                    "<IBBHQQ", self.content, section.offset + 24 * k
                )
                yield _Symbol(self._text(strings, name), info >> 4 > 0, number, value)

    def loaded(self) -> Iterator[tuple[int, _Section]]:
        """The sections that are in memory when the code runs."""
        for number, section in enumerate(self.sections):
            used = section.flags & _ALLOC and section.size > 0
            if not used or section.type not in (_PROGBITS, _NOBITS):
                continue  # .eh_frame has a type of its own: nothing unwinds
            name = self.name_of(section)
            if section.flags & _WRITE and not name.startswith(".data.rel.ro"):
                raise InternalError("link", f"generated code has variables: {name}")
            if name != ".eh_frame":
                yield number, section

    def relocations(self) -> Iterator[tuple[int, int, int, _Symbol, int]]:
        """(section, place in it, kind, symbol, addend), of sections that are loaded."""
        for section in self.sections:
            if section.type == _REL:
                raise InternalError("link", "relocations without addends")
            if section.type != _RELA or section.info not in self.places:
                continue
            for k in range(section.size // 24):
                place, info, addend = struct.unpack_from(
                    "<QQq", self.content, section.offset + 24 * k
                )
                kind, symbol = info & 0xFFFFFFFF, self.symbols[info >> 32]
                yield section.info, place, kind, symbol, addend


@dataclass(frozen=True, slots=True)
class LinkedImage:
    """`content` is code, then data. Places and targets are offsets into it."""

    content: bytes
    code_bytes: int
    pointers: tuple[tuple[int, int], ...]  # place, target
    imports: tuple[tuple[int, str], ...]  # place, name of a function
    exports: tuple[Mapping[str, int], ...]  # of each group of objects

    @property
    def data_bytes(self) -> int:
        return len(self.content) - self.code_bytes


@dataclass(slots=True)
class _Linker:
    objects: dict[bytes, _ElfObject] = field(default_factory=dict)
    content: bytearray = field(default_factory=bytearray)
    defined: dict[str, int] = field(default_factory=dict)
    stubs: dict[str, int] = field(default_factory=dict)
    slots: dict[int | str, int] = field(default_factory=dict)  # by target
    pointers: list[tuple[int, int]] = field(default_factory=list)
    imports: list[tuple[int, str]] = field(default_factory=list)

    def place(self, executable: bool) -> None:
        for item in self.objects.values():
            for number, section in item.loaded():
                if bool(section.flags & _EXECUTE) is executable:
                    self.align(max(section.align, 1))
                    item.places[number] = len(self.content)
                    self.content += item.data(section)

    def align(self, to: int) -> None:
        self.content += bytes(-len(self.content) % to)

    def define(self) -> None:
        """Functions by name; code is found by the hash in its name, so one is all."""
        for item in self.objects.values():
            self.defined |= self.exports(item)

    def exports(self, item: _ElfObject) -> dict[str, int]:
        return {
            symbol.name: item.places[symbol.section] + symbol.value
            for symbol in item.symbols
            if symbol.is_global and symbol.section in item.places
        }

    def add_stubs(self) -> None:
        """A jump for every function that is called and not here."""
        symbols = [s for item in self.objects.values() for s in item.symbols if s.name]
        here = {s.name for s in symbols if s.is_global and s.section != _UNDEFINED}
        for symbol in symbols:
            if symbol.section == _UNDEFINED and symbol.name not in here:
                self.stubs.setdefault(symbol.name, 0)
        for name in self.stubs:
            self.align(_STUB_BYTES)
            self.stubs[name] = len(self.content)
            self.content += _STUB.ljust(_STUB_BYTES, b"\xcc")

    def fill_stubs(self) -> None:
        for name, at in self.stubs.items():
            after = at + len(_STUB) + 4
            self.write("<i", at + len(_STUB), self.slot(name) - after)

    def target(self, item: _ElfObject, symbol: _Symbol) -> int | None:
        """Where a symbol is in the image; None if it is imported."""
        if symbol.section == _UNDEFINED:
            return self.defined.get(symbol.name)
        if symbol.section >= _FIRST_SPECIAL or symbol.section not in item.places:
            raise InternalError("link", f"symbol '{symbol.name}' is nowhere")
        return item.places[symbol.section] + symbol.value

    def slot(self, target: int | str) -> int:
        """The slot that holds an address: of a place in the image, or of an import."""
        if target not in self.slots:
            self.align(8)
            self.slots[target] = len(self.content)
            self.address(len(self.content), target)
            self.content += bytes(8)
        return self.slots[target]

    def address(self, place: int, target: int | str) -> None:
        if isinstance(target, str):
            self.imports.append((place, target))
        else:
            self.pointers.append((place, target))

    def relocate(self, item: _ElfObject) -> None:
        for section, inside, kind, symbol, addend in item.relocations():
            place = item.places[section] + inside
            at = self.target(item, symbol)
            if kind == _ABSOLUTE and at is None and addend == 0:
                self.address(place, symbol.name)
            elif kind == _ABSOLUTE and at is not None:
                self.address(place, at + addend)
            elif kind in _RELATIVE:
                to = self.stubs[symbol.name] if at is None else at
                self.write("<i", place, to + addend - place)
            elif kind == _RELATIVE_WIDE and at is not None:
                self.write("<q", place, at + addend - place)
            elif kind in _BY_SLOT:
                slot = self.slot(symbol.name if at is None else at)
                self.write("<i", place, slot + addend - place)
            else:
                problem = f"relocation {kind} of '{symbol.name}' is not known"
                raise InternalError("link", problem)

    def write(self, how: str, place: int, value: int) -> None:
        struct.pack_into(how, self.content, place, value)


def link(groups: Sequence[Sequence[bytes]]) -> LinkedImage:
    """One image of groups of objects; the objects of a group call one another."""
    linker = _Linker()
    for content in (content for group in groups for content in group):
        if content not in linker.objects:
            linker.objects[content] = _ElfObject(content)
    linker.place(executable=True)
    linker.add_stubs()
    linker.align(PAGE)
    code_bytes = len(linker.content)
    linker.place(executable=False)
    linker.define()
    for item in linker.objects.values():
        linker.relocate(item)
    linker.fill_stubs()
    linker.align(PAGE)
    exports: list[dict[str, int]] = []
    for group in groups:
        found: dict[str, int] = {}
        for content in group:
            found |= linker.exports(linker.objects[content])
        exports.append(found)
    return LinkedImage(
        bytes(linker.content),
        code_bytes,
        tuple(linker.pointers),
        tuple(linker.imports),
        tuple(exports),
    )
