"""Random models: a seed gives the source of a forward function with dynamic dims.

A model is a list of lines, one value each, so a failing one prints as a program and
shrinks by dropping lines. Sizes are polynomials over the symbols b, n, m; a size that
only the run knows (of a slice) gets a name of its own. A value is *exact* if it holds
elements of the inputs, unrounded: only those are compared, because a rounding error
before a step function would be an error of any size after it.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import nn

Dim = sympy.Expr
EXAMPLE = {"b": 3, "n": 5, "m": 7}
SIZES = [
    (3, 5, 7),
    (1, 1, 1),
    (2, 1, 3),
    (1, 13, 2),
    (5, 17, 11),
    (0, 4, 3),
    (2, 0, 5),
    (4, 33, 19),
]
MOST_ELEMENTS, MOST_RANK = 20_000, 5
B, N, M = (sympy.Symbol(s, integer=True, nonnegative=True) for s in "bnm")


def size(value: int) -> Dim:
    return sympy.Integer(value)


def evaluated(dim: Dim, env: dict[str, int]) -> int:
    return int(dim.subs({s: env[s.name] for s in dim.free_symbols}))


@dataclass
class Var:
    name: str
    shape: tuple[Dim, ...]
    dtype: str = "f"  # f, i, b
    exact: bool = False


@dataclass
class Line:
    name: str
    code: str
    needs: tuple[str, ...]


@dataclass
class Program:
    seed: int
    inputs: list[Var] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def live(self, outputs: list[str]) -> Program:
        """The same model with these outputs and what they need."""
        wanted, lines = set(outputs), []
        for line in reversed(self.lines):
            if line.name in wanted:
                wanted.update(line.needs)
                lines.append(line)
        weights = {k: v for k, v in self.weights.items() if k in wanted}
        return Program(self.seed, self.inputs, lines[::-1], weights, outputs)

    def source(self) -> str:
        names = ", ".join(v.name for v in self.inputs)
        body = []
        for symbol in "bnm":
            for v in self.inputs:
                at = [k for k, d in enumerate(v.shape) if str(d) == symbol]
                if at:
                    body.append(f"{symbol} = {v.name}.shape[{at[0]}]")
                    break
        body += [f"{line.name} = {line.code}" for line in self.lines]
        body.append(f"return [{', '.join(self.outputs)}]")
        text = "\n".join(f"    {line}" for line in body)
        return f"def forward(self, {names}):\n{text}\n"

    def module(self) -> nn.Module:
        space: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source(), f"<random graph {self.seed}>", "exec"), space)
        kind = type("Random", (nn.Module,), {"forward": space["forward"]})
        model: nn.Module = kind()
        generator = torch.Generator().manual_seed(self.seed)
        for name, shape in self.weights.items():
            data = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            model.register_buffer(name[5:], data)
        return model.eval()

    def dynamic(self) -> tuple[Any, ...]:
        per = [
            {k: str(d) for k, d in enumerate(v.shape) if not d.is_number} or None
            for v in self.inputs
        ]
        return tuple(per)

    def arguments(self, sizes: tuple[int, ...], salt: int = 0) -> tuple[Any, ...]:
        env = dict(zip("bnm", sizes, strict=True))
        generator = torch.Generator().manual_seed(self.seed * 31 + salt)
        out: list[torch.Tensor] = []
        for v in self.inputs:
            shape = [evaluated(d, env) for d in v.shape]
            if v.dtype == "i":
                out.append(torch.randint(0, 11, shape, generator=generator))
            else:
                out.append(torch.randn(shape, generator=generator))
        return tuple(out)


class Maker:
    """Grows a program by random steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.program = Program(seed)
        self.vars: list[Var] = []
        self.opaque = 0
        self.unread: set[str] = set()  # sizes that the trace takes for constants
        self.env: dict[str, int] = dict(EXAMPLE)

    # --- pieces -----------------------------------------------------------------

    def value(self, dim: Dim) -> int:
        return evaluated(dim, self.env)

    def fits(self, shape: tuple[Dim, ...]) -> bool:
        count = 1
        for d in shape:
            count *= max(self.value(d), 1)
        return count <= MOST_ELEMENTS and len(shape) <= MOST_RANK

    def add(
        self,
        code: str,
        shape: tuple[Dim, ...],
        needs: list[Var] | list[str],
        dtype: str = "f",
        exact: bool = False,
    ) -> Var | None:
        shape = tuple(sympy.expand(d) for d in shape)
        if not self.fits(shape) or set(re.findall(r"\bs\d+\b", code)) & self.unread:
            return None
        name = f"v{len(self.program.lines)}"
        names = [v.name if isinstance(v, Var) else v for v in needs]
        names += [
            str(s)
            for d in shape
            for s in d.free_symbols
            if str(s).startswith("s") and str(s) not in names
        ]
        self.program.lines.append(Line(name, code, tuple(names)))
        out = Var(name, shape, dtype, exact)
        self.vars.append(out)
        return out

    def measured(self, v: Var | None, axis: int, estimate: int, fixed: bool) -> None:
        """The size of that axis is known by name only."""
        if v is None:
            return
        if fixed:
            self.unread.add(f"s{self.opaque}")
        name = f"s{self.opaque}"
        self.opaque += 1
        self.program.lines.append(Line(name, f"{v.name}.shape[{axis}]", (v.name,)))
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        self.env[name] = estimate
        v.shape = (*v.shape[:axis], symbol, *v.shape[axis + 1 :])

    def weight(self, *shape: int) -> str:
        name = f"self.w{len(self.program.weights)}"
        self.program.weights[name] = shape
        return name

    def pick(self, test: Callable[[Var], bool] = lambda v: True) -> Var | None:
        """A value of floats; later ones are likelier."""
        found = [v for v in self.vars if v.dtype == "f" and test(v)]
        if not found:
            return None
        at = max(self.random.randrange(len(found)) for _ in range(2))
        return found[at]

    def axis(self, v: Var) -> int:
        return self.random.randrange(len(v.shape))

    def text(self, dims: tuple[Dim, ...]) -> str:
        return "(" + "".join(f"{d}, " for d in dims) + ")"

    # --- steps ------------------------------------------------------------------

    UNARY = (
        "torch.tanh({})",
        "torch.sigmoid({})",
        "torch.relu({})",
        "-{}",
        "{}.abs()",
        "F.gelu({})",
        "F.gelu({}, approximate='tanh')",
        "F.silu({})",
        "torch.exp(torch.tanh({}))",
        "torch.sin({})",
        "torch.cos({})",
        "torch.sqrt({}.abs() + 0.5)",
        "torch.rsqrt({}.abs() + 0.5)",
        "{}.square() * 0.5",
        "{}.clamp(-1.5, 0.75)",
        "torch.log1p({}.abs())",
        "torch.erf({})",
        "F.leaky_relu({}, 0.2)",
        "1.0 / ({}.abs() + 1.0)",
        "{} * 0.5 + 0.25",
        "1.0 - {}",
        "F.softplus({})",
        "F.hardswish({})",
        "F.elu({})",
        "({}.abs() + 0.1) ** 1.5",
        "torch.expm1({} * 0.1)",
        "torch.atan2({}, torch.ones(()))",
    )

    def unary(self) -> None:
        if v := self.pick():
            code = self.random.choice(self.UNARY)
            exact = v.exact and code in ("-{}", "{}.abs()", "torch.relu({})")
            self.add(code.format(v.name), v.shape, [v], exact=exact)

    def sized(self) -> None:
        if v := self.pick(lambda v: bool(v.shape)):
            d = v.shape[self.axis(v)]
            code = self.random.choice(["{} * ({}) * 0.1", "{} / ({} + 1)"])
            self.add(code.format(v.name, d), v.shape, [v, *self.symbols(d)])

    def symbols(self, *dims: Dim) -> list[Any]:
        names = {str(s) for d in dims for s in d.free_symbols}
        return sorted(s for s in names if s.startswith("s"))

    def broadcast(self, a: Var, b: Var) -> tuple[Dim, ...] | None:
        out: list[Dim] = []
        for k in range(1, max(len(a.shape), len(b.shape)) + 1):
            x = a.shape[-k] if k <= len(a.shape) else size(1)
            y = b.shape[-k] if k <= len(b.shape) else size(1)
            if x != y and x != 1 and y != 1:
                return None
            out.append(y if x == 1 else x)
        return tuple(out[::-1])

    def binary(self) -> None:
        a = self.pick()
        if a is None:
            return
        b = self.pick(lambda v: self.broadcast(a, v) is not None)
        assert b is not None
        if self.random.random() < 0.5:
            a, b = b, a
        shape = self.broadcast(a, b)
        assert shape is not None
        code = self.random.choice(
            [
                "{} + {}",
                "{} - {}",
                "{} * {}",
                "torch.maximum({}, {})",
                "torch.minimum({}, {})",
                "{} / ({}.abs() + 1.0)",
                "torch.atan2({}, {}.abs() + 1.0)",
            ]
        )
        exact = a.exact and b.exact and "imum" in code
        self.add(code.format(a.name, b.name), shape, [a, b], exact=exact)

    def where(self) -> None:
        c = self.pick(lambda v: v.exact)
        a = c and self.pick(lambda v: self.broadcast(c, v) is not None)
        if c is None or a is None:
            return
        shape = self.broadcast(c, a)
        assert shape is not None
        code = self.random.choice(
            [
                "torch.where({} > 0.1, {}, -0.5)",
                "{1}.masked_fill({0} < 0, 0.5)",
                "torch.where({0} <= 0.3, 0.25, {1})",
            ]
        )
        if "masked_fill" in code and shape != a.shape:
            return
        self.add(code.format(c.name, a.name), shape, [c, a])

    def reduce(self) -> None:
        v = self.pick(lambda v: bool(v.shape))
        if v is None:
            return
        count = self.random.randint(1, len(v.shape))
        axes = sorted(self.random.sample(range(len(v.shape)), count))
        keep = self.random.random() < 0.4
        code = self.random.choice(
            [
                "{}.sum({}, keepdim={}) * 0.3",
                "{}.mean({}, keepdim={})",
                "{}.mean({}, keepdim={})",
                "{}.amax({}, keepdim={})",
                "{}.amin({}, keepdim={})",
                "{}.var({}, correction=0, keepdim={})",
                "{}.var({}, keepdim={})",
                "torch.logsumexp({}, {}, keepdim={})",
                "torch.linalg.vector_norm({}, dim={}, keepdim={})",
                "({}.abs() < 2).all({}, keepdim={}).float()",
                "({}.abs() > 2).any({}, keepdim={}).float()",
            ]
        )
        if ".all(" in code or ".any(" in code:
            if not v.exact:
                return
            axes = axes[:1]
        kept = [size(1) if k in axes else d for k, d in enumerate(v.shape)]
        if not keep:
            kept = [d for k, d in enumerate(v.shape) if k not in axes]
        exact = v.exact and (".amax" in code or ".amin" in code)
        which: Any = axes[0] if len(axes) == 1 else tuple(axes)
        self.add(code.format(v.name, which, keep), tuple(kept), [v], exact=exact)

    def softmax(self) -> None:
        if v := self.pick(lambda v: bool(v.shape)):
            which = self.random.choice(["softmax", "softmax", "log_softmax"])
            self.add(f"torch.{which}({v.name}, {self.axis(v)})", v.shape, [v])

    def norm(self) -> None:
        v = self.pick(lambda v: bool(v.shape))
        if v is None:
            return
        count = self.random.randint(1, min(2, len(v.shape)))
        dims = v.shape[-count:]
        static = all(d.is_number for d in dims)
        kind = self.random.choice(["layer", "rms"])
        extra, needs = "", []
        if static and self.random.random() < 0.7:
            w = self.weight(*(int(d) for d in dims))
            extra, needs = f", {w}", [w]
        code = f"F.{kind}_norm({v.name}, {self.text(dims)}{extra}, eps=1e-3)"
        self.add(code, v.shape, [v, *needs, *self.symbols(*dims)])

    def permute(self) -> None:
        if v := self.pick(lambda v: len(v.shape) > 1):
            order = list(range(len(v.shape)))
            self.random.shuffle(order)
            shape = tuple(v.shape[k] for k in order)
            self.add(f"{v.name}.permute({order})", shape, [v], exact=v.exact)

    def merge(self) -> None:
        if v := self.pick(lambda v: len(v.shape) > 1):
            k = self.random.randrange(len(v.shape) - 1)
            merged = sympy.expand(v.shape[k] * v.shape[k + 1])
            shape = (*v.shape[:k], merged, *v.shape[k + 2 :])
            code = f"{v.name}.flatten({k}, {k + 1})"
            if self.random.random() < 0.5:
                code = f"{v.name}.reshape{self.text(shape)}"
            self.add(code, shape, [v, *self.symbols(*shape)], exact=v.exact)

    def split(self) -> None:
        def pieces(dim: Dim) -> list[tuple[Dim, Dim]]:
            found: list[tuple[Dim, Dim]] = []
            if dim.is_number:
                n = int(dim)
                found = [(size(k), size(n // k)) for k in range(2, n) if n % k == 0]
            else:
                factored = sympy.factor(dim)
                if factored.is_Mul:
                    for part in factored.args:
                        rest = sympy.expand(dim / part)
                        if part.is_integer and rest.is_integer and rest.is_polynomial():
                            found += [(part, rest), (rest, part)]
            return found

        if v := self.pick(lambda v: any(pieces(d) for d in v.shape)):
            where = [k for k, d in enumerate(v.shape) if pieces(d)]
            k = self.random.choice(where)
            left, right = self.random.choice(pieces(v.shape[k]))
            shape = (*v.shape[:k], left, right, *v.shape[k + 1 :])
            code = f"{v.name}.unflatten({k}, ({left}, {right}))"
            if self.random.random() < 0.5:
                code = f"{v.name}.reshape{self.text(shape)}"
            self.add(code, shape, [v, *self.symbols(left, right)], exact=v.exact)

    def regroup(self) -> None:
        """(a, b*c) as (a*b, c), and the like: one reshape, several dims."""
        v = self.pick(lambda v: len(v.shape) > 1)
        if v is None:
            return
        parts = [d for dim in v.shape for d in self.factors(dim)]
        cut = self.random.randint(1, max(len(parts) - 1, 1))
        groups = [parts[:cut], parts[cut:]]
        shape = tuple(sympy.expand(sympy.Mul(*g)) for g in groups if g)
        text = f"{v.name}.reshape{self.text(shape)}"
        self.add(text, shape, [v, *self.symbols(*shape)], exact=v.exact)

    def factors(self, dim: Dim) -> list[Dim]:
        return list(dim.args) if dim.is_Mul else [dim]

    def unsqueeze(self) -> None:
        if v := self.pick():
            k = self.random.randint(0, len(v.shape))
            shape = (*v.shape[:k], size(1), *v.shape[k:])
            self.add(f"{v.name}.unsqueeze({k})", shape, [v], exact=v.exact)

    def expand(self) -> None:
        if v := self.pick(lambda v: any(d == 1 for d in v.shape)):
            known = [d for u in self.vars for d in u.shape if self.value(d) < 20]
            shape = tuple(self.random.choice(known) if d == 1 else d for d in v.shape)
            code = f"{v.name}.expand{self.text(shape)}"
            self.add(code, shape, [v, *self.symbols(*shape)], exact=v.exact)

    def flip(self) -> None:
        if v := self.pick(lambda v: bool(v.shape)):
            self.add(f"{v.name}.flip({self.axis(v)})", v.shape, [v], exact=v.exact)

    def roll(self) -> None:
        if v := self.pick(lambda v: bool(v.shape)):
            by = self.random.choice([1, -1, 2])
            code = f"{v.name}.roll({by}, {self.axis(v)})"
            self.add(code, v.shape, [v], exact=v.exact)

    def triangle(self) -> None:
        if v := self.pick(lambda v: len(v.shape) > 1):
            which = self.random.choice(["tril", "triu"])
            by = self.random.choice([0, 1, -1])
            self.add(f"{v.name}.{which}({by})", v.shape, [v], exact=v.exact)

    def stack(self) -> None:
        a = self.pick()
        b = a and self.pick(lambda v: v.shape == a.shape)
        if a is None or b is None:
            return
        k = self.random.randint(0, len(a.shape))
        shape = (*a.shape[:k], size(2), *a.shape[k:])
        code = f"torch.stack([{a.name}, {b.name}], {k})"
        self.add(code, shape, [a, b], exact=a.exact and b.exact)

    def cat(self) -> None:
        a = self.pick(lambda v: bool(v.shape))
        if a is None:
            return
        k = self.axis(a)
        rest = a.shape[:k] + a.shape[k + 1 :]
        parts = [a]
        for _ in range(self.random.randint(1, 2)):
            b = self.pick(
                lambda v: (
                    len(v.shape) == len(a.shape)
                    and v.shape[:k] + v.shape[k + 1 :] == rest
                )
            )
            assert b is not None
            parts.append(b)
        self.random.shuffle(parts)
        total = sum((p.shape[k] for p in parts), size(0))
        names = ", ".join(p.name for p in parts)
        shape = (*a.shape[:k], total, *a.shape[k + 1 :])
        exact = all(p.exact for p in parts)
        self.add(f"torch.cat([{names}], {k})", shape, list(parts), exact=exact)

    def pad(self) -> None:
        if v := self.pick(lambda v: bool(v.shape)):
            low, high = self.random.randint(0, 2), self.random.randint(0, 2)
            shape = (*v.shape[:-1], v.shape[-1] + low + high)
            widths = [low, high]
            if len(v.shape) > 1 and self.random.random() < 0.4:
                widths += [1, 0]
                shape = (*v.shape[:-2], v.shape[-2] + 1, shape[-1])
            fill = self.random.choice([0.0, -0.5])
            code = f"F.pad({v.name}, {widths}, value={fill})"
            self.add(code, shape, [v], exact=v.exact)

    def window(self) -> None:
        v = self.pick(lambda v: bool(v.shape))
        if v is None:
            return
        k = self.axis(v)
        have = self.value(v.shape[k])
        text = self.random.choice(["1:", ":-1", "::2", ":2", "-3:", "1:4", "1::3"])
        left = len(
            range(have)[slice(*(int(p) if p else None for p in text.split(":")))]
        )
        index = ", ".join([":"] * k + [text])
        out = self.add(f"{v.name}[{index}]", v.shape, [v], exact=v.exact)
        # Of x[:2] the trace knows that it has two rows: Python code that reads this
        # size gets a constant, whatever the run brings.
        self.measured(out, k, left, fixed=text in (":2", "-3:", "1:4"))

    def select(self) -> None:
        if v := self.pick(lambda v: bool(v.shape)):
            k = self.axis(v)
            at = self.random.choice([0, -1])
            shape = v.shape[:k] + v.shape[k + 1 :]
            self.add(f"{v.name}.select({k}, {at})", shape, [v], exact=v.exact)

    def repeat(self) -> None:
        if v := self.pick(lambda v: bool(v.shape)):
            k = self.axis(v)
            shape = (*v.shape[:k], v.shape[k] * 2, *v.shape[k + 1 :])
            counts = [2 if i == k else 1 for i in range(len(v.shape))]
            code = f"{v.name}.repeat({counts})"
            if self.random.random() < 0.5:
                code = f"{v.name}.repeat_interleave(2, {k})"
            self.add(code, shape, [v], exact=v.exact)

    def cumulate(self) -> None:
        if v := self.pick(lambda v: bool(v.shape)):
            self.add(f"{v.name}.cumsum({self.axis(v)}) * 0.2", v.shape, [v])

    def halves(self) -> None:
        def even(d: Dim) -> bool:
            return bool(d.is_number) and int(d) % 2 == 0

        if v := self.pick(lambda v: any(even(d) for d in v.shape)):
            k = next(k for k, d in enumerate(v.shape) if even(d))
            half = (*v.shape[:k], v.shape[k] / 2, *v.shape[k + 1 :])
            which = self.random.choice([0, 1])
            code = f"{v.name}.chunk(2, {k})[{which}]"
            self.add(code, half, [v], exact=v.exact)

    # --- products ---------------------------------------------------------------

    def linear(self) -> None:
        v = self.pick(
            lambda v: bool(v.shape) and bool(v.shape[-1].is_number) and v.shape[-1] > 0
        )
        if v is None:
            return
        wide, out = int(v.shape[-1]), self.random.choice([1, 3, 8, 12])
        w = self.weight(out, wide)
        needs, extra = [w], ""
        if self.random.random() < 0.6:
            bias = self.weight(out)
            needs, extra = [w, bias], f", {bias}"
        code = f"F.linear({v.name}, {w}{extra})"
        self.add(code, (*v.shape[:-1], size(out)), [v, *needs])

    def matmul(self) -> None:
        a = self.pick(lambda v: len(v.shape) > 1)
        if a is None:
            return

        def fits(v: Var) -> bool:
            if len(v.shape) < 2 or v.shape[-2] != a.shape[-1]:
                return False
            left, right = Var("", a.shape[:-2]), Var("", v.shape[:-2])
            return self.broadcast(left, right) is not None

        b = self.pick(fits)
        scale = " * 0.3"
        if b is None or self.random.random() < 0.4:
            shape = (*a.shape[:-1], a.shape[-2])
            self.add(f"{a.name} @ {a.name}.mT{scale}", shape, [a])
            return
        lead = self.broadcast(Var("", a.shape[:-2]), Var("", b.shape[:-2]))
        assert lead is not None
        shape = (*lead, a.shape[-2], b.shape[-1])
        self.add(f"{a.name} @ {b.name}{scale}", shape, [a, b])

    def einsum(self) -> None:
        a = self.pick(lambda v: len(v.shape) == 3)
        b = a and self.pick(
            lambda v: (
                len(v.shape) == 3
                and (v.shape[0], v.shape[2]) == (a.shape[0], a.shape[2])
            )
        )
        if a is None or b is None:
            return
        shape = (a.shape[1], a.shape[0], b.shape[1])
        self.add(
            f"torch.einsum('aid,ajd->iaj', {a.name}, {b.name}) * 0.3", shape, [a, b]
        )

    def attention(self) -> None:
        v = self.pick(
            lambda v: (
                len(v.shape) in (3, 4)
                and bool(v.shape[-1].is_number)
                and v.shape[-1] > 0
            )
        )
        if v is None:
            return
        k = self.pick(lambda u: u.shape == v.shape)
        assert k is not None
        causal = self.random.random() < 0.4
        names = f"{v.name}, {k.name}, {k.name}"
        code = f"F.scaled_dot_product_attention({names}, is_causal={causal})"
        self.add(code, v.shape, [v, k])

    def heads(self) -> None:
        """A block of a transformer: one product gives what all heads attend to."""
        # A norm of one element is 0, and then rows are constant: what later norms give
        # of those is the rounding error of a mean, enlarged by 1/sqrt(eps) each time.
        v = self.pick(lambda v: len(v.shape) == 3 and bool(v.shape[-1].is_number))
        if v is None or v.shape[-1] in (0, 1):
            return
        wide, (count, width) = int(v.shape[-1]), self.random.choice([(4, 32), (2, 64)])
        inner, causal = count * width, self.random.random() < 0.5
        rows, w = v.shape[:-1], self.weight(3 * inner, wide)
        code = f"F.linear(F.layer_norm({v.name}, ({wide},)), {w})"
        merged = self.add(code, (*rows, size(3 * inner)), [v, w])
        if merged is None:
            return
        apart = f"{merged.name}.unflatten(-1, (3, {count}, {width}))"
        code = (
            f"F.scaled_dot_product_attention(*{apart}.permute(2, 0, 3, 1, 4), "
            f"is_causal={causal}).transpose(1, 2).flatten(2)"
        )
        seen = self.add(code, (*rows, size(inner)), [merged])
        out, up = self.weight(wide, inner), self.weight(96, wide)
        assert seen is not None
        code = f"{v.name} + F.linear({seen.name}, {out})"
        stream = self.add(code, v.shape, [v, seen, out])
        assert stream is not None
        hidden = f"F.gelu(F.linear(F.layer_norm({stream.name}, ({wide},)), {up}))"
        down = self.weight(wide, 96)
        code = f"{stream.name} + F.linear({hidden}, {down})"
        self.add(code, v.shape, [stream, up, down])

    def conv(self) -> None:
        v = self.pick(
            lambda v: (
                len(v.shape) == 3
                and bool(v.shape[1].is_number)
                and not v.shape[2].is_number
            )
        )
        if v is None:
            return
        wide, out = int(v.shape[1]), self.random.choice([2, 5])
        w = self.weight(out, wide, 3)
        shape = (v.shape[0], size(out), v.shape[2])
        self.add(f"F.conv1d({v.name}, {w}, padding=1) * 0.5", shape, [v, w])

    # --- indices ----------------------------------------------------------------

    def embedding(self) -> None:
        ids = [v for v in self.vars if v.dtype == "i"]
        if not ids:
            return
        v = self.random.choice(ids)
        wide = self.random.choice([4, 6])
        w = self.weight(11, wide)
        self.add(f"F.embedding({v.name}, {w})", (*v.shape, size(wide)), [v, w])

    def numbers(self) -> None:
        ids = [v for v in self.vars if v.dtype == "i"]
        if not ids:
            return
        v = self.random.choice(ids)
        code = self.random.choice(
            ["{} * 3 % 11", "({} + 5) % 11", "{} // 2", "{}.clamp(2, 9)", "{}.flip(0)"]
        )
        self.add(code.format(v.name), v.shape, [v], dtype="i")

    def floats(self) -> None:
        ids = [v for v in self.vars if v.dtype == "i"]
        if ids:
            v = self.random.choice(ids)
            self.add(f"{v.name}.float() * 0.125", v.shape, [v], exact=True)

    def gather(self) -> None:
        v = self.pick(lambda v: bool(v.shape))
        if v is None:
            return
        k = self.axis(v)
        d = v.shape[k]
        code = self.random.choice(
            [
                "{v}.index_select({k}, torch.arange({d}).flip(0))",
                "{v}.index_select({k}, torch.arange({d}) // 2)",
                "torch.gather({v}, {k}, torch.zeros_like({v}, dtype=torch.int64))",
                "torch.gather({v}, {k}, {v}.argmax({k}, keepdim=True))",
            ]
        )
        shape = v.shape
        if "argmax" in code:
            if not v.exact:
                return
            shape = (*v.shape[:k], size(1), *v.shape[k + 1 :])
        text = code.format(v=v.name, k=k, d=d)
        self.add(text, shape, [v, *self.symbols(d)], exact=v.exact)

    def positions(self) -> None:
        d = self.random.choice([B, N, M])
        if any(d in v.shape for v in self.program.inputs):
            self.add(f"torch.arange({d}) * 0.1", (d,), [], exact=False)

    STEPS = (
        ["unary"] * 5
        + ["binary"] * 5
        + ["reduce"] * 3
        + ["softmax", "norm", "norm", "permute", "permute", "merge", "merge", "split"]
        + ["split", "regroup", "unsqueeze", "expand", "flip", "roll", "triangle"]
        + ["stack", "cat", "cat", "pad", "window", "window", "select", "repeat"]
        + ["cumulate", "halves", "linear", "linear", "matmul", "matmul", "einsum"]
        + [
            "attention",
            "heads",
            "conv",
            "embedding",
            "numbers",
            "floats",
            "gather",
            "gather",
        ]
        + ["positions", "where", "where", "sized"]
    )

    def make(self) -> Program:
        choices = [
            Var("x", (B, N, size(6)), exact=True),
            Var("y", (B, M, size(6)), exact=True),
            Var("z", (N, M), exact=True),
            Var("u", (B, size(4), N), exact=True),
            Var("t", (N, size(8)), exact=True),
            Var("w", (B,), exact=True),
            Var("q", (B, size(2), N, size(4)), exact=True),
        ]
        inputs = self.random.sample(choices, self.random.randint(1, 3))
        if self.random.random() < 0.35:
            inputs.append(Var("ids", (B, N), "i"))
        self.program.inputs = inputs
        self.vars = list(inputs)
        wanted = self.random.randint(5, 25)
        for _ in range(4 * wanted):
            if len(self.program.lines) >= wanted:
                break
            getattr(self, self.random.choice(self.STEPS))()
        made = [v.name for v in self.vars if v.name not in {i.name for i in inputs}]
        used = {name for line in self.program.lines for name in line.needs}
        leaves = [name for name in made if name not in used]
        outputs = leaves[-3:] or made[-1:]
        if self.random.random() < 0.4 and made:
            outputs.append(self.random.choice(made))
        return self.program.live(list(dict.fromkeys(outputs)))


class BlockMaker(Maker):
    """Models with heads on merged products, as those that run in chunks have."""

    STEPS = (
        ["heads"] * 6
        + ["unary", "binary", "norm", "linear", "merge", "split", "permute", "reduce"]
        + ["cat", "window", "softmax", "halves", "where"]
    )


def program(seed: int, maker: type[Maker] = Maker) -> Program:
    return maker(seed).make()


@dataclass(frozen=True)
class Difference:
    """One output at one size that is not what it should be."""

    sizes: tuple[int, ...]
    output: str
    what: str


def compare(got: Any, eager: Any, exact: Any) -> str | None:
    """None, or what is wrong: at most twice eager's error, plus a little."""
    if got.shape != eager.shape or got.dtype != eager.dtype:
        return f"{got.dtype}{list(got.shape)}, not {eager.dtype}{list(eager.shape)}"
    if not eager.is_floating_point():
        return None if torch.equal(got, eager) else "integers differ"
    if eager.numel() == 0:
        return None
    if not torch.equal(got.isnan(), eager.isnan()):
        return f"NaN at {got.isnan().sum()} places, not {eager.isnan().sum()}"
    infinite = eager.isinf()
    if not torch.equal(got[infinite], eager[infinite]):
        return "infinities differ"
    fine = eager.isfinite() & exact.isfinite()
    if not fine.any():
        return None
    if got[fine].isinf().any():
        return "infinite where eager is not"
    want = exact[fine]
    mine = (got.double()[fine] - want).abs().max().item()
    its = (eager.double()[fine] - want).abs().max().item()
    scale = max(1.0, want.abs().max().item())
    if mine <= 2 * its + 1e-5 * scale:
        return None
    return f"error {mine:.3g}, eager's {its:.3g}, values up to {scale:.3g}"


def references(made: Program, model: nn.Module, sizes: tuple[int, ...]) -> Any:
    """(arguments, eager, eager in f64), or None where eager has no answer."""
    args = made.arguments(sizes)
    wide = copy.deepcopy(model).double()
    before = torch.get_default_dtype()
    try:
        with torch.no_grad():
            eager = model(*args)
            exact = wide(*(a.double() if a.is_floating_point() else a for a in args))
    except (RuntimeError, IndexError):
        return None
    finally:
        torch.set_default_dtype(before)
    return args, eager, [e.double() for e in exact]
