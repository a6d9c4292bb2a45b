"""Whether a compiled random model gives what eager gives, at all its sizes.

Floats are judged element by element, against the same model in f64:

    |ours - f64|  <=  2 * |eager - f64|  +  FLOOR * unit * terms

`unit` is the rounding error of the coarsest float of the model, and `terms` the size of
what was summed up to the element: the sum over all values v of the model, inputs,
operands and results of its ops, of |v * d element / d v|. For a sum or a product of
matrices that is the sum of the absolute terms, for an exponential |x| + 1 times the
result, and where a difference cancels it stays as large as what was subtracted. So it
is how far one rounding error in each value may move the element, and FLOOR is how many
of them an implementation may make where eager happened to make none.

It is measured, not derived: each value is multiplied by 1 + tiny * c, each time with a
number c of its own from the Cauchy distribution. A sum of such numbers with weights a
is one of them times the sum of |a|, and the logarithm of its size is 0 on average. So
the geometric mean of what an element moves by in several runs is `terms` itself, where
random signs would give a root of squares, which forgets how many terms there were.

One thing that no shaking of values reaches is the position that a resize or a sampling
computes for each element, from which its weights are: its rounding error is as many
units as the position is large, and gives a weight to neighbours that have none in f64.
So positions are shaken too: of a grid directly, of a resize by its scales, as far as it
uses them, and in models that resize, the largest terms of a result stand for all, and
count as often as its longest axis is long. An infinite neighbour with a weight of 0 is
NaN, with any other it is infinite: what is one in some runs and the other in others is
not judged. Eager's own f64 is the reference of an f64 model, so it has an error as well
that is not seen, and FLOOR counts twice.

Where a model chooses (the larger of two numbers, the first of equal ones), so small a
shake may never choose otherwise, though rounding does. What is beyond the bound is
judged again, by runs with FLOOR rounding errors of the model's own float in each value,
at most: the element may be as far off as in the worst of them. Where nothing is chosen
that is less than the bound allows.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from catalogue import OTHER, RESIZES, ROUNDED, SMOOTH, SPECTRA
from random_models import Model, Sizes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import pliant

FLOOR = 8.0  # half of it for `terms`, which 16 runs measure to a factor of about 2
UNITS = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
TINY = 2.0**-36  # of a shake: f64 resolves it, and no function bends within it
SHAKES = 16
BAD = ("wrong", "internal", "unlike", "answer", "outside", "crash", "hang")


@dataclass(frozen=True)
class Verdict:
    """fine, refused (with a typed error that says why), or one of BAD: wrong, internal,
    unlike (its own example is refused), answer (where eager raises), outside (another
    file was read), crash, hang."""

    kind: str
    text: str = ""

    @property
    def bad(self) -> bool:
        return self.kind in BAD


# Ops that round: what they take and give is shaken.
ROUNDS = {entry.overload for entry in (*SMOOTH, *ROUNDED, *OTHER, *SPECTRA)}


class Shake:
    """Floats, each off by a random multiple of TINY of its own; or, if a `unit` is
    given, by at most FLOOR of them."""

    def __init__(self, seed: int, unit: float | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.unit = unit

    def factor(self, shape: Sequence[int]) -> Tensor:
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64) - 0.5
        if self.unit:
            return 1 + 2 * FLOOR * self.unit * drawn
        return 1 + TINY * torch.tan(math.pi * drawn)

    def __call__(self, x: Any) -> Any:
        if isinstance(x, tuple | list):  # all that an op gives
            return type(x)([self(part) for part in x])
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x * self.factor(x.shape)

    def inside(self, x: Tensor) -> None:
        """The same for a tensor that was changed in place, and all views of it."""
        if x.is_floating_point() and not torch._debug_has_internal_overlap(x):
            x.mul_(self.factor(x.shape))


def widened(model: Model, shake: Shake | None = None) -> nn.Module:
    """The model with every float an f64, shaken where it rounds."""
    lines = []
    for line in model.lines:
        code = re.sub(
            r"torch\.(float16|bfloat16|float32)\b", "torch.float64", line.code
        ).replace(".float()", ".double()")
        if shake and line.statement:
            code = f"{code}; shake.inside({line.name})"
        elif shake and line.overload in ROUNDS:
            code = ast.unparse(Shaken().visit(ast.parse(code, mode="eval")))
        lines.append(replace(line, code=code))
    return replace(model, lines=tuple(lines)).module(shake=shake).double()


class Shaken(ast.NodeTransformer):
    """An expression with every value in it shaken; what is no float stays as it is."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _shaken(node) if re.fullmatch(r"[xv]\d+", node.id) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if re.fullmatch(r"self\.w\d+", ast.unparse(node)):
            return _shaken(node)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return _shaken(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return _shaken(node)


def _shaken(node: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("shake", ast.Load()), [node], [])


def coarsest(model: Model, module: nn.Module, results: list[Tensor]) -> torch.dtype:
    """The float with the fewest bits anywhere in the model."""
    kinds = [v.dtype for v in model.inputs] + [b.dtype for b in module.buffers()]
    kinds += [r.dtype for r in results]
    body = model.body().replace(".float()", "torch.float32")
    names = re.findall(r"torch\.(float16|bfloat16|float32|float64)", body)
    kinds += [getattr(torch, name) for name in names]
    kinds = [k for k in kinds if k in UNITS] or [torch.float32]
    return max(kinds, key=lambda k: UNITS[k])


def answer(module: nn.Module, args: list[Tensor]) -> list[Tensor] | Exception:
    """What a module gives, then what its arguments have become."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [*module(*args), *args]
    except pliant.PliantError:
        raise
    except Exception as error:
        return error


class TypedNothing(TorchDispatchMode):
    """What eager's op gives of no elements has the type that torch's trace says.

    A few kernels give another one: the mask of native_dropout is of floats then, which
    no `where` takes, and the statistics of a batch norm have its operand's type.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
        if all(t.numel() for t in leaves):
            return made
        fake = FakeTensorMode()
        given = tree_map_only(Tensor, fake.from_tensor, (args, kwargs or {}))
        try:
            with fake:
                meant = func(*given[0], **given[1])
        except Exception:  # it has no trace
            return made
        return tree_map(_typed, made, meant)


def _typed(made: Any, meant: Any) -> Any:
    if not isinstance(made, Tensor) or made.numel() or made.dtype == meant.dtype:
        return made
    return made.to(meant.dtype)


def of_eager(module: nn.Module, args: list[Tensor]) -> list[Tensor] | Exception:
    with TypedNothing():
        return answer(module, args)


def difference(
    got: Tensor,
    eager: Tensor,
    exact: Tensor | None,
    shaken: Sequence[Tensor],
    kind: Any,
    resizes: bool,
    largest: float,
    most: int,
    rounded: Sequence[Tensor] = (),
) -> str | None:
    """None, or what is wrong; `shaken` are other runs than the exact one, and `rounded`
    runs with rounding errors of the size that the model's float has.

    `largest` is the size of the inputs, of which f64 does not resolve everything: what
    is 0 there may be 1e-15 where a mean is subtracted from a single element. `most` is
    the number of elements of the largest input, which a sum may have.
    """
    if got.shape != eager.shape or got.dtype != eager.dtype:
        return f"{got.dtype}{list(got.shape)}, not {eager.dtype}{list(eager.shape)}"
    if not eager.numel():
        return None
    if not eager.is_floating_point():
        off = got != eager
        return f"{int(off.sum())} of {off.numel()} differ" if off.any() else None
    if exact is None or exact.shape != eager.shape:
        exact, shaken = eager, ()
    exact = exact.double()
    runs = torch.stack([exact, *(s.double() for s in shaken if s.shape == exact.shape)])
    mine, its = got.double(), eager.double()
    fine = its.isfinite() & runs.isfinite().all(0)
    lost = fine & ~mine.isfinite()
    if lost.any():
        return f"{mine[lost][0]} where eager has {its[lost][0]}"
    nan = its.isnan() & runs.isnan().all(0)
    if not mine[nan].isnan().all():
        return f"{mine[nan & ~mine.isnan()][0]} where eager has NaN"
    both = its.isinf() & (its == runs).all(0)
    if not torch.equal(mine[both], its[both]):
        return f"{mine[both & (mine != its)][0]} where eager is infinite"
    if not fine.any():
        return None
    mine, its, exact, runs = mine[fine], its[fine], exact[fine], runs[:, fine]
    resolved = UNITS[torch.float64] * exact.abs() + torch.finfo(torch.float64).tiny
    moved = torch.maximum((runs[1:] - exact).abs(), resolved)
    if len(runs) > 1:
        terms = moved.log().mean(0).exp() / TINY
    else:  # no reference: what eager gives is all there is
        terms = exact.abs().max().clamp_min(largest)
    least = torch.finfo(kind).smallest_normal  # below, all is rounded
    least = max(least, 8 * UNITS[torch.float64] / UNITS[kind] * largest)
    often = 1
    if resizes:
        terms, often = terms.max(), max(eager.shape, default=1)
    if kind == torch.float64:  # eager is the reference, and it adds terms one by one
        often = often * max(2.0, math.sqrt(most) / 16)
    floor = FLOOR * often * UNITS[kind] * (terms + least)
    for run in rounded:
        if run.shape == eager.shape:
            floor = torch.fmax(floor, (run.double()[fine] - exact).abs())
    error, allowed = (mine - exact).abs(), (its - exact).abs()
    bound = 2 * allowed + floor
    if (error <= bound).all():
        return None
    at = (error / bound).argmax()
    return (
        f"{mine[at]:.9g}, eager {its[at]:.9g}, f64 {exact[at]:.17g}; error "
        f"{error[at]:.3g}, eager's {allowed[at]:.3g}, allowed {bound[at]:.3g}"
    )


def size_of(args: Sequence[Tensor]) -> float:
    """The largest finite number among the floats of the arguments."""
    floats = [a.double().flatten() for a in args if a.is_floating_point()]
    every = torch.cat([torch.ones(1, dtype=torch.float64), *floats]).abs()
    return float(every[every.isfinite()].max())


class MovedPositions(TorchDispatchMode):
    """The positions that resizes and samplings compute are shaken: of a resize its
    scales, of a grid, which goes from -1 to 1, its distances from -1."""

    def __init__(self, shake: Shake) -> None:
        super().__init__()
        self.shake = shake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "grid_sampler" in func._schema.name:
            image, grid, *rest = args
            grid = (grid + 1) * self.shake.factor(grid.shape) - 1
            return func(image, grid, *rest, **(kwargs or {}))
        if not re.search(RESIZES, func._schema.name):
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        scales = [name for name in names if name.startswith("scales")]
        old = given["self"].shape[-len(scales) :]
        for name, n, new in zip(scales, old, given["output_size"], strict=True):
            scale = given.get(name) or new / max(n, 1)
            given[name] = scale * float(self.shake.factor(()))
        return func(**given)


def references(
    model: Model, sizes: Sizes, unit: float | None = None, count: int = SHAKES
) -> list[list[Tensor]]:
    """Results in f64, and then shaken; no list where the model has none in f64."""
    out: list[list[Tensor]] = []
    shakes = [Shake(model.seed * SHAKES + k, unit) for k in range(count)]
    for shake in (None, *shakes):
        args = [
            a.double() if a.is_floating_point() else a for a in model.arguments(sizes)
        ]
        torch.set_default_dtype(torch.float64)  # of integers that are divided
        with MovedPositions(shake) if shake else contextlib.nullcontext():
            found = of_eager(widened(model, shake), args)
        torch.set_default_dtype(torch.float32)
        if not isinstance(found, Exception):
            out.append(found)
        elif not out:
            return []
    return out


class Poisoned(TorchDispatchMode):
    """Integers divided by 0 give a number, not an error."""

    NAMES = ("floor_divide", "remainder", "fmod", "div")

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.rpartition("::")[2]
        divisor = args[1] if len(args) > 1 else None
        if name.rstrip("_") not in self.NAMES or not isinstance(divisor, Tensor):
            return func(*args, **(kwargs or {}))
        if divisor.is_floating_point():
            return func(*args, **(kwargs or {}))
        zero = divisor == 0
        made = func(args[0], divisor.masked_fill(zero, 1), *args[2:], **(kwargs or {}))
        return made.masked_fill_(zero, self.number)


def matters(model: Model, sizes: Sizes) -> bool:
    """Whether what eager raises for is part of any result.

    What no result needs is not computed, so neither is it found to be a division by 0.
    """
    module, found = model.module(), []
    for number in (7, 100):
        with Poisoned(number):
            found.append(of_eager(module, model.arguments(sizes)))
    one, other = found
    if isinstance(one, Exception) or isinstance(other, Exception):
        return True
    same = zip(one, other, strict=True)
    return not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in same)


class Results:
    """What eager gives at some sizes, to be compared with."""

    def __init__(self, model: Model, sizes: Sizes, eager: list[Tensor]) -> None:
        self.model, self.sizes, self.eager = model, sizes, eager
        self.kind = coarsest(model, model.module(), eager)
        self.resizes = any(re.search(RESIZES, line.overload) for line in model.lines)
        self.largest = size_of(model.arguments(sizes))
        self.most = max((a.numel() for a in model.arguments(sizes)), default=0)
        self.runs = references(model, sizes)

    def off(self, got: list[Tensor]) -> str | None:
        """What is wrong with the first result that is not as eager's."""
        names = [*self.model.outputs, *(v.name for v in self.model.inputs)]
        for k, name in enumerate(names):
            if off := self._off(k, got[k]):
                return f"{name} at {self.sizes}: {off}"
        return None

    def _off(self, k: int, got: Tensor) -> str | None:
        exact, *shaken = [run[k] for run in self.runs] or [None]
        rest = (exact, shaken, self.kind, self.resizes, self.largest, self.most)
        off = difference(got, self.eager[k], *rest)
        if off and got.is_floating_point():
            rounded = references(self.model, self.sizes, UNITS[self.kind])[1:]
            off = difference(got, self.eager[k], *rest, [r[k] for r in rounded])
        return off


class Limited:
    """A compiled model under limits on its memory, after a call without one."""

    def __init__(self, ours: Any, model: Model, sizes: Sizes) -> None:
        self.ours, self.model, self.sizes = ours, model, sizes
        self.peak = ours.stats()["last_peak_bytes"]

    def results(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Of the least limit that will do, and of one half way from it to the peak."""
        least, found = 1, self.under(1)
        while isinstance(found, pliant.MemoryLimitError) and found.least > least:
            least = found.least  # of the first part that needs more
            found = self.under(least)
        if isinstance(found, pliant.MemoryLimitError):
            raise AssertionError(f"limit {least}: {found}")
        yield least, found
        middle = (least + self.peak) // 2
        if least < middle < self.peak:
            yield middle, self.under(middle)

    def under(self, limit: int) -> Any:
        """Its results with a limit, or the error that it is too low."""
        self.ours.memory_limit = limit
        try:
            found = answer(self.ours, self.model.arguments(self.sizes))
        except pliant.MemoryLimitError as error:
            return error
        finally:
            self.ours.memory_limit = None
        if isinstance(found, Exception):
            raise found
        used = self.ours.stats()["last_peak_bytes"]
        assert used <= limit, f"{used} bytes with a limit of {limit}"
        return found


@contextlib.contextmanager
def equal_weights(module: nn.Module) -> Iterator[None]:
    """All weights are ones for a while: what is equal now must not be taken for one."""
    drawn = [weight.clone() for weight in module.buffers()]
    for weight in module.buffers():
        weight.fill_(1)
    try:
        yield
    finally:
        for weight, value in zip(module.buffers(), drawn, strict=True):
            weight.copy_(value)


def compiled(module: nn.Module, model: Model, options: Any, threads: int) -> Any:
    """Or the Verdict that there is no such model. Every other one gets its weights
    after it was compiled."""
    late = equal_weights(module) if model.seed % 2 else contextlib.nullcontext()
    try:
        with warnings.catch_warnings(), late:
            warnings.simplefilter("ignore")
            return pliant.compile(
                module,
                tuple(model.arguments(model.sizes[0])),
                model.dynamic(),
                options=options,
                threads=threads,
            )
    except pliant.InternalError as error:
        return Verdict("internal", str(error))
    except pliant.PliantError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Verdict("internal", f"compile: {type(error).__name__}: {error}")


def judge(
    model: Model, options: Any = None, threads: int = 1, limits: bool = True
) -> Verdict:
    """The first bad verdict of all sizes; `limits`: the memory is limited as well."""
    module = model.module()
    eager = [of_eager(module, model.arguments(sizes)) for sizes in model.sizes]
    if isinstance(eager[0], Exception):
        return Verdict("fine", "eager has no answer")
    ours = compiled(module, model, options, threads)
    if isinstance(ours, Verdict):
        return ours
    found = []
    for sizes, want in zip(model.sizes, eager, strict=True):
        try:
            found.append(judge_at(ours, model, sizes, want, limits))
        except pliant.InternalError as error:
            return Verdict("internal", f"at {sizes}: {error}")
        if found[-1].bad:
            return found[-1]
    if found[0].kind == "refused":
        return Verdict("unlike", f"its own example: {found[0].text}")
    return next((each for each in found if each.kind == "refused"), found[0])


def judge_at(
    ours: Any, model: Model, sizes: Sizes, want: list[Tensor] | Exception, limits: bool
) -> Verdict:
    try:
        got = answer(ours, model.arguments(sizes))
    except pliant.InternalError:
        raise
    except pliant.PliantError as error:
        if isinstance(want, Exception):
            return Verdict("fine")
        return Verdict("refused", f"{type(error).__name__} at {sizes}: {error}")
    if isinstance(got, Exception):
        return Verdict("internal", f"at {sizes}: {type(got).__name__}: {got}")
    if isinstance(want, Exception):
        # Of no rows, eager's FFT library has no transform; there is nothing to it. And
        # an assertion inside torch is a bug of torch, not an answer.
        broken = re.search("MKL FFT error|INTERNAL ASSERT FAILED", str(want))
        if broken or not matters(model, sizes):
            return Verdict("fine")
        raised = f"{type(want).__name__}: {want}"
        return Verdict("answer", f"at {sizes}, eager raises {raised}")
    results = Results(model, sizes, want)
    if off := results.off(got):
        return Verdict("wrong", off)
    try:
        for limit, less in Limited(ours, model, sizes).results() if limits else ():
            if off := results.off(less):
                return Verdict("wrong", f"with a limit of {limit} bytes, {off}")
    except (AssertionError, RuntimeError, pliant.PliantError) as error:
        return Verdict("internal", f"with a limit at {sizes}: {error}")
    return Verdict("fine")
