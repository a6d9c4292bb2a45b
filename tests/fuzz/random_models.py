"""A random model from a seed: a few calls of the catalogue on values that fit.

What fits is known by running: every line is computed at once for all sizes that the
model will be called with. So a dim is static if it is the same at all of them, two
dims are equal if they always are, and integers are indices if they are inside. Where
eager has no answer at some sizes (a reduction over nothing), nothing is said of them
from then on, but that it has none.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from catalogue import CHANGES, ENTRIES, Entry
from torch import Tensor, nn

SYMBOLS = ("b", "n", "m")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MOST_ELEMENTS = 300_000
MOST_GIVEN = 1_000_000  # elements of an input: it is computed with many times
Sizes = tuple[int, ...]


def shape_at(dims: tuple[str | int, ...], sizes: Sizes) -> list[int]:
    env = dict(zip(SYMBOLS, sizes, strict=True))
    return [env[d] if isinstance(d, str) else d for d in dims]


@dataclass(frozen=True)
class Input:
    name: str
    dims: tuple[str | int, ...]
    dtype: torch.dtype
    low: int = -3  # of integers
    high: int = 7
    special: bool = False  # zeros, infinities and NaN among its floats

    def make(self, sizes: Sizes, seed: int) -> Tensor:
        shape = shape_at(self.dims, sizes)
        salt = f"{seed} {self.name} {sizes}"
        generator = torch.Generator().manual_seed(random.Random(salt).getrandbits(40))
        if self.dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        if not self.dtype.is_floating_point:
            low = 0 if self.dtype == torch.uint8 else self.low
            made = torch.randint(low, self.high, shape, generator=generator)
            return made.to(self.dtype)
        made = torch.randn(shape, generator=generator)
        if self.special and made.numel():
            flat = made.view(-1)
            for value in (0.0, float("inf"), float("-inf"), float("nan"), -0.0):
                at = torch.randint(0, flat.numel(), (1,), generator=generator)
                flat[at] = value
        return made.to(self.dtype)


@dataclass(frozen=True)
class Line:
    """`name = code`, or a statement alone, which changes `name` and views of it."""

    name: str
    code: str
    overload: str
    statement: bool = False

    def text(self) -> str:
        return self.code if self.statement else f"{self.name} = {self.code}"

    def uses(self) -> set[str]:
        return set(re.findall(r"\b(?:x|v)\d+\b|self\.w\d+", self.code))


@dataclass(frozen=True)
class Model:
    seed: int
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    weights: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    outputs: tuple[str, ...]
    sizes: tuple[Sizes, ...]  # the first is the example

    def body(self) -> str:
        names = ", ".join(v.name for v in self.inputs)
        lines = [line.text() for line in self.lines]
        lines.append(f"return [{', '.join(self.outputs)}]")
        return f"def forward(self, {names}):\n    " + "\n    ".join(lines) + "\n"

    def module(self, **more: Any) -> nn.Module:
        """`more` are names that its code may use."""
        space = namespace() | more
        exec(compile(self.body(), f"<random model {self.seed}>", "exec"), space)
        kind = type("Random", (nn.Module,), {"forward": space["forward"]})
        module: nn.Module = kind()
        for name, shape, dtype in self.weights:
            module.register_buffer(name[5:], weight(name, shape, dtype, self.seed))
        return module.eval()

    def arguments(self, sizes: Sizes) -> list[Tensor]:
        return [v.make(sizes, self.seed) for v in self.inputs]

    def dynamic(self) -> tuple[dict[int, str], ...]:
        return tuple(
            {k: d for k, d in enumerate(v.dims) if isinstance(d, str)}
            for v in self.inputs
        )

    def needed(self) -> Model:
        """Without what its outputs do not need."""
        wanted, lines = set(self.outputs), []
        for line in reversed(self.lines):
            if line.name in wanted or line.statement:
                wanted |= line.uses()
                lines.append(line)
        weights = tuple(w for w in self.weights if w[0] in wanted)
        inputs = tuple(v for v in self.inputs if v.name in wanted) or self.inputs[:1]
        return replace(self, lines=tuple(lines[::-1]), weights=weights, inputs=inputs)

    def smaller(self) -> Iterator[Model]:
        """Models with less in them, the smallest first."""
        if len(self.outputs) > 1:
            for name in self.outputs:
                yield replace(self, outputs=(name,)).needed()
        for at, line in enumerate(self.lines):
            if line.statement:
                rest = (*self.lines[:at], *self.lines[at + 1 :])
                yield replace(self, lines=rest).needed()
        for at, line in enumerate(self.lines):
            if not line.statement and line.name not in self.outputs:
                cut = replace(self, lines=self.lines[: at + 1], outputs=(line.name,))
                yield cut.needed()
        for at, line in enumerate(self.lines):  # a line that hands on what it takes
            for used in sorted(u for u in line.uses() if not u.startswith("self")):
                if line.code != used and not line.statement:
                    rest = list(self.lines)
                    rest[at] = replace(line, code=used)
                    yield replace(self, lines=tuple(rest)).needed()

    def parts(self) -> list[str]:
        """The ops, as often as they are there."""
        return [line.overload for line in self.lines]

    def script(self) -> str:
        """A program that shows what this model gives."""
        made = [f"import torch, torch.nn.functional as F, pliant\n{SPACE}"]
        made.append("class Model(torch.nn.Module):")
        if self.weights:
            made.append("    def __init__(self):\n        super().__init__()")
            for name, shape, dtype in self.weights:
                made.append(
                    f"        self.register_buffer('{name[5:]}', torch.randn({shape})"
                    f".to({dtype}))"
                )
        made.append("    " + self.body().replace("\n", "\n    "))
        made.append("def inputs(b, n, m):\n    return (")
        for v in self.inputs:
            shape = "".join(f"{d}, " for d in v.dims)
            if v.dtype.is_floating_point:
                made.append(f"        torch.randn({shape}).to({v.dtype}),")
            else:
                low = 0 if v.dtype in (torch.uint8, torch.bool) else v.low
                high = 2 if v.dtype == torch.bool else v.high
                made.append(
                    f"        torch.randint({low}, {high}, ({shape})).to({v.dtype}),"
                )
        made.append("    )")
        made.append(f"example = inputs{self.sizes[0]}")
        made.append(f"m = pliant.compile(Model().eval(), example, {self.dynamic()})")
        made.append(f"for sizes in {list(self.sizes)}:")
        made.append("    x = inputs(*sizes)\n    print(sizes, m(*x), Model()(*x))")
        return "\n".join(made)


SPACE = "aten, prims = torch.ops.aten, torch.ops.prims"


def namespace() -> dict[str, Any]:
    return {
        "torch": torch,
        "F": F,
        "aten": torch.ops.aten,
        "prims": torch.ops.prims,
    }


def weight(name: str, shape: Sizes, dtype: torch.dtype, seed: int) -> Tensor:
    salt = random.Random(f"{seed} {name}").getrandbits(40)
    made = torch.randn(shape, generator=torch.Generator().manual_seed(salt))
    return (made * max(shape[-1], 1) ** -0.5).to(dtype)


@dataclass
class Value:
    name: str
    exact: bool  # no rounding error in it
    source: Input | None = None


class _Holder:
    """What `self` is while lines are computed: it has the weights."""


class Unfit(Exception):
    """Nothing fits here: try another op."""


class Maker:
    def __init__(self, seed: int, only: str | None = None) -> None:
        self.seed, self.only = seed, only
        self.random = random.Random(seed)
        self.sizes = tuple(self.some_sizes())
        self.spaces = [namespace() | {"self": _Holder()} for _ in self.sizes]
        self.alive = [True] * len(self.sizes)
        self.inputs: list[Input] = []
        self.lines: list[Line] = []
        self.weights: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        self.values: list[Value] = []
        self.float = self.random.choices(FLOATS, (6, 1, 1, 1))[0]
        self.mixed = self.random.random() < 0.1
        self.special = self.random.random() < 0.1

    def some_sizes(self) -> Iterator[Sizes]:
        choose = self.random.choice
        yield tuple(self.random.sample((3, 5, 7, 4, 11), 3))
        yield tuple(self.random.sample((2, 6, 8, 9, 13), 3))
        odd = [choose((0, 1, 1)), choose((1, 2, 5)), choose((0, 1, 3))]
        self.random.shuffle(odd)
        yield tuple(odd)
        large = [choose((1, 2, 3)), choose((5, 16, 17)), choose((61, 131, 257))]
        self.random.shuffle(large)
        yield tuple(large)

    # --- values -------------------------------------------------------------------

    def at(self, name: str) -> Tensor:
        """The value in the example."""
        return self.spaces[0][name]

    def tensors(self, name: str) -> list[Tensor]:
        return [
            s[name] for s, live in zip(self.spaces, self.alive, strict=True) if live
        ]

    def static(self, name: str, axis: int) -> bool:
        return len({t.shape[axis] for t in self.tensors(name)}) == 1

    def dims(self, name: str) -> tuple[str | int, ...]:
        """The dims as an input could have them."""
        out: list[str | int] = []
        live = [s for s, ok in zip(self.sizes, self.alive, strict=True) if ok]
        shapes = [t.shape for t in self.tensors(name)]
        for axis in range(self.at(name).dim()):
            found = tuple(shape[axis] for shape in shapes)
            names = [
                symbol
                for k, symbol in enumerate(SYMBOLS)
                if found == tuple(s[k] for s in live)
            ]
            if len(set(found)) == 1 and not names:
                out.append(found[0])
            elif names:
                out.append(names[0])
            else:
                raise Unfit
        return tuple(out)

    def new_input(
        self, dims: tuple[str | int, ...], dtype: torch.dtype, **more: Any
    ) -> str:
        if len(self.inputs) > 4 or any(
            math.prod(shape_at(dims, sizes)) > MOST_GIVEN for sizes in self.sizes
        ):
            raise Unfit
        special = self.special and dtype.is_floating_point
        made = Input(f"x{len(self.inputs)}", dims, dtype, special=special, **more)
        self.inputs.append(made)
        for space, sizes in zip(self.spaces, self.sizes, strict=True):
            space[made.name] = made.make(sizes, self.seed)
        self.values.append(Value(made.name, True, made))
        return made.name

    def new_weight(self, shape: tuple[int, ...]) -> str:
        name = f"self.w{len(self.weights)}"
        self.weights.append((name, shape, self.float))
        data = weight(name, shape, self.float, self.seed)
        for space in self.spaces:
            setattr(space["self"], name[5:], data)
        return name

    def pick(
        self, fits: Callable[[Tensor], bool], make: Callable[[], str], exact: bool
    ) -> str:
        found = [
            v.name
            for v in self.values
            if (v.exact or not exact) and all(map(fits, self.tensors(v.name)))
        ]
        if found and self.random.random() < 0.85:
            return found[max(self.random.randrange(len(found)) for _ in range(2))]
        return make()

    def shape_of_rank(self, least: int, most: int) -> tuple[str | int, ...]:
        rank = self.random.randint(least, most)
        choices: tuple[str | int, ...] = ("b", "n", "m", 1, 4, 6)
        dims = tuple(
            self.random.choices(choices, (4, 4, 3, 1, 2, 2))[0] for _ in range(rank)
        )
        return (
            dims
            if any(isinstance(d, str) for d in dims) or not dims
            else (*dims[:-1], self.random.choice(SYMBOLS))
        )

    def kind(self) -> torch.dtype:
        return self.random.choice(FLOATS) if self.mixed else self.float

    # --- the names of the catalogue -------------------------------------------------

    def first(self, letter: str, exact: bool) -> str:
        """A value that the first name of an entry may be."""
        if letter == "p":
            return f"({self.first('x', exact)}.abs() + 0.25)"
        if letter == "byte":
            return self.new_input(("n", 8), torch.int8)
        if letter in "cou":
            return self.image({"c": 3, "o": 4, "u": 5}[letter], exact)
        least, most = {"v": (1, 4), "m": (2, 4), "r": (2, 2)}.get(letter, (0, 4))
        shape = self.shape_of_rank(max(least, 1), min(most, 3))
        float_, whole = self.kind(), self.random.choice(INTEGERS)
        more: dict[str, Any] = {}
        fits: Callable[[Tensor], bool]
        match letter:
            case "x" | "v" | "m" | "r":
                dtype, fits = (
                    float_,
                    lambda t: t.is_floating_point() and least <= t.dim() <= most,
                )
            case "n":
                kinds = (float_, whole)
                dtype, fits = self.random.choice(kinds), lambda t: t.dtype != torch.bool
            case "a":
                dtype, fits = float_, lambda t: True
            case "i":
                dtype, fits = whole, is_whole
            case "b":
                dtype, fits = torch.bool, lambda t: t.dtype == torch.bool
            case "l":
                dtype, fits, more = torch.int64, below_four, {"low": 0, "high": 4}
            case _:
                raise AssertionError(letter)
        return self.pick(fits, lambda: self.new_input(shape, dtype, **more), exact)

    def image(self, rank: int, exact: bool) -> str:
        """Floats with a static, even number of channels as axis 1."""

        def fits(v: Value) -> bool:
            t = self.at(v.name)
            return (
                (v.exact or not exact)
                and t.is_floating_point()
                and t.dim() == rank
                and self.static(v.name, 1)
                and t.shape[1] in (2, 4, 6, 8)
            )

        found = [v.name for v in self.values if fits(v)]
        if found and self.random.random() < 0.7:
            return self.random.choice(found)
        channels, last = self.random.choice((4, 6)), self.random.choice((3, "n"))
        return self.new_input(("b", channels, "n", "m", last)[:rank], self.kind())

    def beside(self, name: str, base: str, exact: bool) -> str:
        """A value that broadcasts with another one."""
        of = self.at(base)
        dtype = torch.bool if name == "mask" else of.dtype
        if name == "plain":
            return self.new_input((), dtype)
        dims = list(self.dims(base))

        def fits(v: Value) -> bool:
            if (
                self.at(v.name).dtype != dtype
                or (exact and not v.exact)
                or v.name == base
            ):
                return False
            if name == "like":
                return all(
                    a.shape == b.shape
                    for a, b in zip(
                        self.tensors(v.name), self.tensors(base), strict=True
                    )
                )
            return self.at(v.name).dim() <= len(dims) and all(
                x == y or x == 1
                for a, b in zip(self.tensors(v.name), self.tensors(base), strict=True)
                for x, y in zip(reversed(a.shape), reversed(b.shape), strict=False)
            )

        found = [v.name for v in self.values if fits(v)]
        if found and self.random.random() < 0.7:
            return self.random.choice(found)
        if name != "like":
            dims = dims[self.random.choice((0, 0, len(dims) and 1)) :]
            dims = [1 if self.random.random() < 0.2 else d for d in dims]
        return self.new_input(tuple(dims), dtype)

    def fill(self, entry: Entry | str) -> tuple[str, bool]:
        """The code of an entry, and whether all it takes is exact."""
        text = entry if isinstance(entry, str) else entry.arguments
        exact = not isinstance(entry, str) and entry.step
        text = text.replace("{mask_of} ", "{mask}, ")
        text = text.replace("{index0}", "{index:0}").replace("{index1}", "{index:1}")
        chosen: dict[str, str] = {}
        letters = re.findall(r"\{([a-zN_]+|byte)\}", text)
        base = ""
        for letter in letters:
            known = letter in "xvmrcouniabpl" or letter == "byte"
            if known and letter not in chosen:
                chosen[letter] = self.first(letter, exact)
                base = base or re.findall(r"\bx\d+|v\d+", chosen[letter])[0]
        rank = self.at(base).dim() if base else 0
        axes = list(range(rank))
        self.random.shuffle(axes)
        axis = axes[0] if axes else 0
        other = axes[1] if len(axes) > 1 else axis
        sign = rank if self.random.random() < 0.3 else 0

        def name(match: re.Match[str]) -> str:
            key = match[1]
            if key in chosen:
                return chosen[key]
            made = fresh(key)
            if key not in ("k", "s", "q", "j"):
                chosen[key] = made
            return made

        def fresh(key: str) -> str:
            pick = self.random.choice
            if key in ("y", "z", "like", "mask", "plain"):
                return self.beside(key, base, exact)
            if key.startswith("W:"):
                shape = [self.number(part, base) for part in key[2:].split(",")]
                return self.new_weight(tuple(shape))
            if key.startswith("index"):
                at = int(key[6:]) if key[6:].isdigit() else axis
                flat = key == "index_flat"
                if not flat and at >= rank:
                    raise Unfit
                tensors = self.tensors(base)
                sizes = [t.numel() if flat else t.shape[at] for t in tensors]
                least = min((s for s in sizes if s), default=1)
                return self.new_input((pick(SYMBOLS),), torch.int64, low=0, high=least)
            simple: dict[str, Callable[[], str]] = {
                "d": lambda: str(axis - sign),
                "e": lambda: str(other),
                "D": lambda: str(sorted(axes[: self.random.randint(1, max(rank, 1))])),
                "N": lambda: f"{base}.shape[{axis}]",
                "S": lambda: f"{base}.shape",
                "N_of": self.a_size,
                "s": lambda: pick(("0.5", "2", "-1.5", "3.0")),
                "q": lambda: pick(("0.5", "2", "3.0")),
                "j": lambda: pick(("1", "2", "-3")),
                "k": lambda: pick(("True", "False")),
                "f": lambda: str(self.float),
                "t": lambda: str(pick((*FLOATS, *INTEGERS, torch.bool))),
            }
            return simple[key]()

        text = re.sub(r"\{([^{}]+)\}", name, text)
        text = re.sub(r"\b[CL]\b", lambda m: str(self.number(m[0], base)), text)
        used = set(re.findall(r"\b[xv]\d+\b", text))
        fine = all(v.exact for v in self.values if v.name in used)
        return text, fine

    def number(self, part: str, base: str) -> int:
        if part not in ("C", "L"):
            return int(part)
        axis = 1 if part == "C" else -1
        if not self.static(base, axis) or not self.at(base).shape[axis]:
            raise Unfit
        return int(self.at(base).shape[axis])

    def a_size(self) -> str:
        name = self.first("v", False)
        return f"{name}.shape[{self.random.randrange(self.at(name).dim())}]"

    # --- lines ----------------------------------------------------------------------

    def run(self, line: Line) -> bool:
        """Computes a line; whether the first two sizes have an answer."""
        for k, space in enumerate(self.spaces):
            if not self.alive[k]:
                continue
            try:
                with torch.no_grad():
                    exec(line.text(), space)
                fine = line.statement or self.fine(space[line.name], line.name)
            except Exception:
                if k < 2:
                    return False
                self.alive[k] = False
            else:
                if not fine:
                    return False
        return True

    def fine(self, value: Any, name: str) -> bool:
        """Whether it can be used: among others, its rank is that of the example."""
        return (
            isinstance(value, Tensor)
            and value.dim() == self.at(name).dim()
            and value.numel() <= MOST_ELEMENTS
            and value.dim() <= 6
            and not value.is_complex()
        )

    def several(self, code: str) -> str:
        """An op with several results gives one of them."""
        try:
            with torch.no_grad():
                made = eval(code, self.spaces[0])
        except Exception:
            raise Unfit from None
        if not isinstance(made, tuple | list):
            return code
        return f"{code}[{self.random.randrange(len(made))}]"

    def step(self, entry: Entry) -> None:
        if self.special and re.search(
            "attention|(var|std)_mean|^fft|_aa", entry.overload
        ):
            return  # eager's own kernels differ in what they make of NaN and infinity
        saved = len(self.inputs), len(self.weights), len(self.values)
        alive = list(self.alive)
        try:
            text, fine = self.fill(entry)
            code = text if entry.text else f"{entry.overload}({text})"
            code = self.several(self.in_place(code, entry))
            line = Line(f"v{len(self.lines)}", code, entry.overload)
            if not self.run(line):
                raise Unfit
        except Unfit:
            del (
                self.inputs[saved[0] :],
                self.weights[saved[1] :],
                self.values[saved[2] :],
            )
            self.alive = alive
            return
        self.lines.append(line)
        whole = not self.at(line.name).is_floating_point()
        self.values.append(Value(line.name, fine and (entry.keep or whole)))

    def in_place(self, code: str, entry: Entry) -> str:
        """Now and then the twin that writes over its first operand, a copy."""
        found = re.match(r"aten\.(\w+)\.(\w+)\(([xv]\d+)(.*)$", code)
        if entry.text or not found or self.random.random() > 0.15:
            return code
        packet = getattr(torch.ops.aten, found[1] + "_", None)
        if packet is None or found[2] not in packet.overloads():
            return code
        return f"aten.{found[1]}_.{found[2]}({found[3]}.clone(){found[4]}"

    def change(self) -> None:
        """A statement that writes into a value that the model made."""
        made = [
            v
            for v in self.values
            if v.source is None and self.at(v.name).is_floating_point()
        ]
        if not made:
            return
        saved = len(self.inputs), len(self.values)
        target = self.random.choice(made)
        text = self.random.choice(CHANGES)
        letter = "m" if "{m}" in text else "v"
        if self.at(target.name).dim() < (2 if letter == "m" else 1):
            return
        copies = [dict(space) for space in self.spaces]
        for space, live in zip(self.spaces, self.alive, strict=True):
            if live:
                space.update(copied(space))
        try:
            code, _ = self.fill(
                text.replace(f"{{{letter}}}", target.name)
                .replace("{d}", "0")
                .replace("{plain}", "0.5")
                .replace("{mask}", f"({target.name} > 9)")
                .replace("{y}", f"{target.name}.flip(0)")
            )
        except Unfit:
            return
        line = Line(target.name, code, "change", statement=True)
        if not self.run(line):
            del self.inputs[saved[0] :], self.values[saved[1] :]
            self.spaces = copies
            return
        self.lines.append(line)

    def make(self) -> Model:
        wanted = self.random.randint(1, 6)
        only = [e for e in ENTRIES if e.overload == self.only]
        for _ in range(20 if only else 0):
            if self.lines:
                break
            self.step(self.random.choice(only))
        for _ in range(12 * wanted):
            if len(self.lines) >= wanted:
                break
            if self.lines and self.random.random() < 0.06:
                self.change()
            else:
                self.step(self.random.choice(ENTRIES))
        made = [v.name for v in self.values if v.source is None]
        used = {u for line in self.lines for u in line.uses() if not line.statement}
        leaves = [name for name in made if name not in used] or made[-1:]
        if made and self.random.random() < 0.3:
            leaves.append(self.random.choice(made))
        outputs = tuple(dict.fromkeys(leaves))
        model = Model(
            self.seed,
            tuple(self.inputs),
            tuple(self.lines),
            tuple(self.weights),
            outputs,
            self.sizes,
        )
        return model.needed()


def is_whole(t: Tensor) -> bool:
    return not t.is_floating_point() and t.dtype != torch.bool


def below_four(t: Tensor) -> bool:
    if t.dtype != torch.int64:
        return False
    return not t.numel() or (bool(t.min() >= 0) and bool(t.max() < 4))


def copied(space: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a space, copied; those of one storage still share one."""
    memo: dict[int, Any] = {}
    return {
        k: copy.deepcopy(v, memo) for k, v in space.items() if isinstance(v, Tensor)
    }


def model(seed: int, only: str | None = None) -> Model:
    return Maker(seed, only).make()
