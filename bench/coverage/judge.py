"""One entry of a scorecard: compiled, called and compared with eager.

    |ours - f64|  <=  2 * |eager - f64|  +  floor

element by element, where f64 is eager in double precision. The floor is a few rounding
errors of the element, of the largest element of the result, which stands for the terms
that were summed up, and of the inputs: as far as these move the element.

Where torch leaves a result open, the answer is judged by what torch promises:
  random numbers    the same shapes and types, and over many seeds one distribution:
                    the two-sample Kolmogorov-Smirnov statistic of all elements, with
                    one draw for each seed, at a level of 1e-6; the numbers differ
  places of equals  of topk, kthvalue and their like: other places than eager's, if the
                    input holds the same value there
  memory that is not written (empty)     shapes and types

Larger sizes repeat values, which makes matrices singular. Where rounding decides what
eager gives then (infinities, pivots), the repeated values are told apart.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import pliant
from pliant.errors import InternalError, UnsupportedOpError

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
# Rounding errors of the element, of the largest one, and of the inputs.
OWN, LARGEST, MOVES = 32, 16, 4


@dataclass(frozen=True)
class Verdict:
    kind: str
    text: str = ""


class Call(torch.nn.Module):
    """A function of tensors; everything else that it is given is part of the model."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__()
        flat, self.spec = pytree.tree_flatten((args, kwargs))
        self.function, self.flat = function, flat
        self.places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of the example; what makes tensors of none has one that it ignores."""
        return [self.flat[i] for i in self.places] or [torch.zeros(3)]

    def forward(self, tensors: list[torch.Tensor]) -> Any:
        flat = list(self.flat)
        for place, tensor in zip(self.places, tensors, strict=False):
            flat[place] = tensor
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        found = self.function(*args, **kwargs)
        # Named tuples of torch are no results of an exported program.
        return list(found) if isinstance(found, tuple | list) else found


def judge(model: torch.nn.Module, tensors: list[torch.Tensor]) -> Verdict:
    """Compiles a model of a list of tensors with every dim dynamic.

    What the judge itself fails at is not left out of the count.
    """
    try:
        return _judged(model, tensors)
    except Exception as error:
        text = f"the judge failed: {type(error).__name__}: {first_line(error)}"
        return Verdict("internal", text)


def _judged(model: torch.nn.Module, tensors: list[torch.Tensor]) -> Verdict:
    eager = run(model, tensors)
    if isinstance(eager, Exception):
        return Verdict("eager_cannot", first_line(eager))
    shapes = {"tensors": [_dynamic(x) for x in tensors]}
    try:
        compiled = pliant.compile(model, (tensors,), dynamic_shapes=shapes)
    except Exception as error:
        return refusal(error, model, (tensors,), shapes)
    answer = run(compiled, tensors)
    if isinstance(answer, InternalError) or (
        isinstance(answer, Exception) and not isinstance(answer, pliant.PliantError)
    ):
        return Verdict("internal", f"{type(answer).__name__}: {first_line(answer)}")
    if isinstance(answer, Exception):
        return Verdict("refused", f"{type(answer).__name__}: {first_line(answer)}")
    problem = compare(model, tensors, eager, answer)
    if not problem and is_random(model, tensors):
        problem = other_distribution(model, compiled, tensors)
    if problem:
        return Verdict("wrong", problem)
    return other_sizes(model, compiled, tensors, eager)


# ---- random numbers

SEEDS = 200
# sqrt(-log(level / 2) / 2) * sqrt(2 / SEEDS), at a level of 1e-6. Elements of one draw
# may depend on each other: each seed counts as one.
MOST_APART = math.sqrt(-math.log(1e-6 / 2) / 2) * math.sqrt(2 / SEEDS)


class _Watch(TorchDispatchMode):
    """Whether an op draws random numbers."""

    found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def is_random(model: torch.nn.Module, tensors: list[torch.Tensor]) -> bool:
    with _Watch() as watch:  # type: ignore[no-untyped-call]  # torch's __init__
        run(model, tensors)
    if not watch.found:
        return False
    first, *more = (_drawn(model, tensors, seed) for seed in range(16))
    if isinstance(first, Exception):
        return False
    return not all(all(map(_alike, first, other)) for other in more)


def _drawn(model: Callable[..., Any], tensors: list[torch.Tensor], seed: int) -> Any:
    torch.manual_seed(seed)
    return run(model, tensors)


def other_distribution(
    model: torch.nn.Module, compiled: Any, tensors: list[torch.Tensor]
) -> str:
    """How the results' distributions differ over many seeds."""
    true = [_drawn(model, tensors, seed) for seed in range(SEEDS)]
    ours = [_drawn(compiled, tensors, seed) for seed in range(SEEDS)]
    if not all(map(_alike, ours[0], _drawn(compiled, tensors, 0))):
        return "the same seed gives other numbers"
    for number, first in enumerate(true[0]):
        if not isinstance(first, torch.Tensor) or not first.numel():
            continue
        pair = [torch.cat([r[number].flatten() for r in rs]) for rs in (ours, true)]
        apart = _kolmogorov_smirnov(*(x.double().nan_to_num() for x in pair))
        if apart > MOST_APART:
            return f"distributions are {apart:.3f} apart, allowed are {MOST_APART:.3f}"
    return ""


def _kolmogorov_smirnov(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.sort()[0], y.sort()[0]
    places = torch.cat([x, y])
    below = (
        torch.searchsorted(each, places, right=True).double() / each.numel()
        for each in (x, y)
    )
    first, second = below
    return float((first - second).abs().max())


def graph_targets(model: torch.nn.Module, tensors: list[torch.Tensor]) -> set[Any]:
    """What the exported graph of a model calls."""
    shapes = {"tensors": [_dynamic(x) for x in tensors]}
    with torch.no_grad():
        program = torch.export.export(
            model, (tensors,), dynamic_shapes=shapes, strict=False
        )
    return {node.target for node in program.graph.nodes}


# From the worst verdict of several samples to the best.
WORST = (
    *("wrong", "internal", "unsupported", "refused", "export_cannot"),
    *("pass", "eager_cannot"),
)


def worst_of(verdicts: Sequence[Verdict]) -> Verdict:
    return min(verdicts, key=lambda verdict: WORST.index(verdict.kind))


def _dynamic(x: torch.Tensor) -> dict[int, Any]:
    """Every dim; but one of size 1 may be there to broadcast, and is not to vary."""
    return {axis: Dim.AUTO for axis, size in enumerate(x.shape) if size != 1}


def refusal(
    error: Exception, model: torch.nn.Module, args: tuple[Any, ...], shapes: Any
) -> Verdict:
    """Why a model did not compile; what torch.export alone can export is no excuse."""
    if isinstance(error, UnsupportedOpError):
        reasons = dict.fromkeys(f"{op.name}: {op.reason}" for op in error.ops)
        return Verdict("unsupported", "; ".join(reasons))
    text = f"{type(error).__name__}: {first_line(error)}"
    try:
        with torch.no_grad():
            torch.export.export(model, args, dynamic_shapes=shapes, strict=False)
    except Exception as own:
        return Verdict("export_cannot", f"{type(own).__name__}: {first_line(own)}")
    typed = isinstance(error, pliant.PliantError)
    inside = isinstance(error, InternalError) or not typed
    return Verdict("internal" if inside else "refused", text)


def other_sizes(
    model: torch.nn.Module, compiled: Any, tensors: list[torch.Tensor], example: Any
) -> Verdict:
    """The same at sizes one larger, of 1 and of 0: right, or refused.

    Some ops of torch give another type for no elements than for any: the `example`'s
    counts.
    """
    narrow = 0
    for change in (lambda n: n + 1 if n > 1 else n, lambda n: 1, lambda n: 0):
        resized = [_resized(x, change) for x in tensors]
        eager = run(model, resized)
        if not isinstance(eager, Exception) and _is_rounding(model, resized, eager):
            resized = list(map(_told_apart, resized, tensors))
            eager = run(model, resized)
        if isinstance(eager, Exception):
            continue
        answer = run(compiled, resized)
        if isinstance(answer, InternalError):
            return Verdict("internal", first_line(answer))
        if isinstance(answer, Exception):
            narrow += 1
            continue
        for k, (its, usual) in enumerate(zip(eager, example, strict=False)):
            if isinstance(its, torch.Tensor) and not its.numel():
                eager[k] = its.to(usual.dtype)
        problem = compare(model, resized, eager, answer)
        if problem:
            sizes = [list(x.shape) for x in resized]
            return Verdict("wrong", f"at {sizes}: {problem}")
    return Verdict("pass", f"refuses {narrow} of 3 other sizes" if narrow else "")


def _resized(x: torch.Tensor, change: Callable[[int], int]) -> torch.Tensor:
    """Values repeated or dropped along each axis, so that ids stay valid."""
    for axis, size in enumerate(x.shape):
        index = torch.arange(change(size) if size else 0) % max(size, 1)
        x = x.index_select(axis, index)
    return x


def _told_apart(x: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
    """A larger tensor, the floats that were repeated made smaller by random factors."""
    if not x.is_floating_point() and not x.is_complex():
        return x
    more = torch.zeros(x.shape, dtype=torch.bool)
    for axis, size in enumerate(origin.shape):
        begin = min(size, x.shape[axis])
        more.narrow(axis, begin, x.shape[axis] - begin).fill_(True)
    factor = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    return torch.where(more, x * (0.5 + 0.5 * factor).to(x.dtype), x)


def _is_rounding(
    model: torch.nn.Module, tensors: list[torch.Tensor], eager: list[Any]
) -> bool:
    """Whether rounding decides where eager has infinities or NaN, or its integers.

    Then they change in f64 or if all inputs get a little larger, which leaves equals
    equal and singular matrices singular.
    """
    wide = [_wide(x) for x in tensors]
    larger = ([_times(x, 1 + k * 2.0**-9) for x in tensors] for k in range(1, 9))
    for given in (wide, *_shaken(wide), *larger):
        found = run(model, given)
        if isinstance(found, Exception) or len(found) != len(eager):
            return False
        for its, other in zip(eager, found, strict=True):
            if not isinstance(its, torch.Tensor) or its.shape != other.shape:
                continue
            if its.is_floating_point() or its.is_complex():
                if not torch.equal(its.isfinite(), other.isfinite()):
                    return True
            elif given[0].dtype is tensors[0].dtype and not torch.equal(its, other):
                return True
    return False


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor if x.is_floating_point() or x.is_complex() else x


def run(model: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    """The tensors and numbers that a model gives, or its error."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = [x.clone() for x in tensors]
            return pytree.tree_leaves(model(given))
    except Exception as error:
        return error


def compare(
    model: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    eager: list[Any],
    answer: list[Any],
) -> str:
    """What is wrong with an answer; nothing if it is right."""
    again = run(model, list(tensors))
    random = not all(map(_alike, eager, again)) or is_random(model, list(tensors))
    wide = [_wide(x) for x in tensors]
    exact = run(model, wide)
    if isinstance(exact, Exception) or len(exact) != len(eager):
        exact = eager
    if len(answer) != len(eager):
        return f"{len(answer)} results, not {len(eager)}"
    if _other_places(tensors, eager, answer):
        return ""
    moved = _moved(model, wide, exact)
    for i, (ours, its, true) in enumerate(zip(answer, eager, exact, strict=True)):
        problem = difference(ours, its, true, random, moved[i])
        if problem:
            return problem
    return ""


def _other_places(
    tensors: Sequence[torch.Tensor], eager: list[Any], answer: list[Any]
) -> bool:
    """Whether values are eager's, and places others that hold the same values."""
    if len(eager) != 2 or not all(isinstance(x, torch.Tensor) for x in answer):
        return False
    (values, its), (own, ours) = eager, answer
    if its.dtype is not torch.int64 or its.shape != ours.shape or not tensors:
        return False
    if not _alike(values, own) or not its.numel():
        return False
    if tensors[0].dim() - its.dim() not in (0, 1):
        return False
    for dim in range(tensors[0].dim()):
        size = tensors[0].shape[dim]
        spread = [
            x if x.dim() == tensors[0].dim() else x.unsqueeze(dim) for x in (its, ours)
        ]
        if any(
            x.dim() != tensors[0].dim() or bool((x < 0).any() or (x >= size).any())
            for x in spread
        ):
            continue
        try:
            found = [tensors[0].gather(dim, x) for x in spread]
        except RuntimeError:
            continue
        if torch.equal(*found) and torch.equal(found[0].flatten(), values.flatten()):
            return True
    return False


def _wide(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


def _moved(model: torch.nn.Module, wide: list[Any], exact: list[Any]) -> list[Any]:
    """How far each element moves if inputs are off by a rounding error of f32."""
    moved: list[Any] = [0.0] * len(exact)
    for shaken in _shaken(wide):
        found = run(model, shaken)
        if isinstance(found, Exception) or len(found) != len(exact):
            return moved
        for i, (a, b) in enumerate(zip(found, exact, strict=True)):
            if not isinstance(b, torch.Tensor) or not b.is_floating_point():
                continue
            if a.shape == b.shape:
                off = (a.double() - b.double()).abs().nan_to_num(0.0, 0.0)
                moved[i] = torch.maximum(off, torch.as_tensor(moved[i]).double())
    return moved


def _shaken(wide: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        yield [
            x * (1 + UNIT[torch.float32] * _signs(x, generator))
            if x.is_floating_point()
            else x
            for x in wide
        ]


def _signs(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, x.shape, generator=generator) * 2.0 - 1.0


def _alike(x: Any, y: Any) -> bool:
    if not isinstance(x, torch.Tensor):
        return bool(x == y) or x != x
    if x.shape != y.shape:
        return False
    if x.is_complex() and y.is_complex():
        x, y = (torch.view_as_real(each.resolve_conj()) for each in (x, y))
    return torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))


def difference(ours: Any, its: Any, true: Any, random: bool, moved: Any) -> str:
    if not isinstance(its, torch.Tensor):
        if random or ours == its or (its != its and ours != ours):
            return ""
        if isinstance(its, float) and math.isclose(ours, its, rel_tol=1e-5):
            return ""
        return f"{ours}, not {its}"
    if not isinstance(ours, torch.Tensor):
        return f"a {type(ours).__name__}, not a tensor"
    if ours.shape != its.shape or ours.dtype != its.dtype:
        return f"{ours.dtype}{list(ours.shape)}, not {its.dtype}{list(its.shape)}"
    if random or not its.numel():
        return ""
    if its.is_complex():  # part by part
        ours, its = (
            torch.view_as_real(ours.resolve_conj()),
            torch.view_as_real(its.resolve_conj()),
        )
        true = torch.view_as_real(true.resolve_conj()) if true.is_complex() else its
        moved = 0.0
    if not its.is_floating_point():
        off = ours != its
        return f"{int(off.sum())} of {off.numel()} differ" if off.any() else ""
    if not isinstance(true, torch.Tensor) or true.shape != its.shape:
        true = its
    mine, eager, exact = ours.double(), its.double(), true.double()
    if not torch.equal(mine.isnan(), eager.isnan()):
        return (
            f"NaN in {int(mine.isnan().sum())} places, not {int(eager.isnan().sum())}"
        )
    infinite = eager.isinf() | mine.isinf()
    if not torch.equal(mine[infinite], eager[infinite]):
        # An overflow that only one of the two has, at the edge of the type.
        edge = torch.finfo(its.dtype).max * (1 - 1e-5)
        if (exact[infinite].abs() < edge).any():
            return "infinite in other places"
    fine = eager.isfinite() & mine.isfinite()
    if not fine.any():
        return ""
    mine, eager, exact = mine[fine], eager[fine], exact[fine]
    exact = torch.where(exact.isfinite(), exact, eager)
    unit = UNIT.get(its.dtype, 2.0**-24)
    floor = unit * (OWN * exact.abs() + LARGEST * exact.abs().max())
    floor += torch.finfo(its.dtype).tiny
    if isinstance(moved, torch.Tensor) and moved.shape == its.shape:
        floor += MOVES * moved[fine]
    error, allowed = (mine - exact).abs(), 2 * (eager - exact).abs() + floor
    worst = int((error / allowed).argmax())
    if error[worst] <= allowed[worst]:
        return ""
    return (
        f"{float(mine[worst]):.9g}, eager has {float(eager[worst]):.9g} and "
        f"f64 {float(exact[worst]):.9g}"
    )


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else ""
