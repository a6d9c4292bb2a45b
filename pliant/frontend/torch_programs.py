"""The programs of a model: one for each path that its code takes by size.

    programs(model, (x,), ({0: "n"},), simplify=...)   ->  (main, *others)

    def forward(self, x):                 # traced at n = 5:
        return x * 3 if x.shape[0] == 1 else x * 2

A trace is valid for sizes at which the model's conditions on sizes have the same values
(torch_branches.py): here for n != 1. For sizes that one example cannot cover together
with the others (0, 1, those that the code compares for equality, and those beyond a
bound of one size) the model is traced again at one of them. If that program is proved
equal there, the first one serves them too. If not, it is a second program with its own
guards. Every other size at which the code takes another branch is refused, with the
line of the branch.

The paths are a tree: the conditions of a trace in order, and for the negation of each
condition the traces found there, which may have conditions of their own. A condition is
dropped from the first program only if its negation was explored completely and all
programs found there are equal to the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pliant.errors import PliantError, ShapeError
from pliant.frontend.contract import Basis, Imported
from pliant.frontend.signature import SizeSlot, TensorSlot
from pliant.frontend.torch_export import from_exported
from pliant.frontend.torch_signature import Names, module_names
from pliant.frontend.torch_trace import Traced, trace, trace_again, traced_dims
from pliant.ir.graph import Module
from pliant.ir.same import same_graphs
from pliant.sym import Cond, Expr, Facts, Guard, as_expr, eq, ge, sym

MOST_TRACES = 8  # of one model
_LARGEST = 4096  # a size, when looking for one that takes another path
_MOST_ELEMENTS = 1 << 25  # of an example that is made for it

Simplify = Callable[[Module], Module]
_BRANCHES = (Basis.BRANCH, Basis.LAYOUT)
_ALL_HOLD: Mapping[Cond, Guard | None] = {}  # no branch is covered


@dataclass(slots=True)
class _Path:
    """A path: a trace, and the conditions on sizes under which the code takes it."""

    traced: Traced
    imported: Imported
    region: tuple[Cond, ...]
    pins: dict[str, Expr] = field(default_factory=dict)  # symbols that are fixed


@dataclass(slots=True)
class _Explored:
    """The paths where a condition is false; `complete` if these are all."""

    paths: list[_Path] = field(default_factory=list)
    complete: bool = True


def programs(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    training: bool = False,
    *,
    simplify: Simplify,
) -> tuple[Imported, ...]:
    """The program of the example, then those of other branches on sizes."""
    first = trace(model, example_inputs, dynamic_shapes, example_kwargs, training)
    return _Search(model, first, training, simplify).run()


class _Search:
    def __init__(
        self,
        model: torch.nn.Module,
        first: Traced,
        training: bool,
        simplify: Simplify,
    ) -> None:
        self.model, self.first, self.training = model, first, training
        self.simplify = simplify
        self.names: Names = module_names(model)
        self.main = self.imported(first)
        self.branches = self.main.guards(*_BRANCHES)
        self.dims = _dims(self.main)
        self.traces = 1

    def run(self) -> tuple[Imported, ...]:
        covered: dict[Cond, Guard | None] = {}
        others: list[Imported] = []
        limits = self.main.guards(Basis.DECLARED, Basis.CHECKED)
        main = _Path(self.first, self.main, tuple(guard.cond for guard in limits))
        for guard, found in self.explore(main):
            if found.complete and all(map(self.serves, found.paths)):
                covered[guard.cond] = _above_zero(guard)
            else:
                others += [path.imported for path in found.paths]
        if covered:
            self.main = self.imported(self.first, covered)
        return (self.main, *others)

    def imported(
        self, traced: Traced, covered: Mapping[Cond, Guard | None] = _ALL_HOLD
    ) -> Imported:
        return from_exported(
            traced.program, traced.info, self.training, covered, self.names
        )

    # ---- the tree of paths

    def explore(self, path: _Path) -> Iterator[tuple[Guard, _Explored]]:
        """Explores the negation of each condition of a path, one after the other."""
        known = (*path.region, *(eq(sym(name), n) for name, n in path.pins.items()))
        main = path.imported is self.main
        layouts = [g.cond for g in path.imported.guards(Basis.LAYOUT)]
        for guard in (*self.fixed(path), *path.imported.guards(*_BRANCHES)):
            if guard.cond in known:
                continue  # asked before, and answered there
            region = (*known, guard.cond.negated())
            if not _possible(region):
                yield guard, _Explored()
            elif is_special(guard.cond) or (
                main and (has_other_side(guard.cond) or guard.cond in layouts)
            ):
                yield guard, self.explore_region(region)
            elif not main:
                # A condition that stays is no gap if the main program has it as well.
                kept = any(g.cond == guard.cond for g in self.branches)
                yield guard, _Explored(complete=kept)
            known = (*known, guard.cond)

    def fixed(self, path: _Path) -> Iterator[Guard]:
        """Sizes of inputs that this path assumed to be equal, or to be a number."""
        dims = _dims(path.imported)
        for place, dim in self.dims.items():
            number, axis = place
            there = dims.get(place)
            if there is None:
                there = as_expr(traced_dims(path.traced.program)[number][axis])
            if there is not dim:
                yield Guard(eq(dim, there), ("a size is fixed",), "the trace")

    def explore_region(self, region: tuple[Cond, ...]) -> _Explored:
        path = self.trace(region)
        if path is None:
            return _Explored(complete=False)
        found = _Explored([path])
        for _, more in self.explore(path):
            found.paths += more.paths
            found.complete &= more.complete
        return found

    def trace(self, region: tuple[Cond, ...]) -> _Path | None:
        """The path of the code in a region of sizes; None if it cannot be traced.

        A symbol with one value in the region is fixed to it, and one that is 0 or 1 is
        fixed to 1, because only a trace with fixed sizes sees all conditions on them. A
        size is traced at 0 only if the region has no other.
        """
        sizes = self.sizes_in(region)
        if sizes is None or self.traces >= MOST_TRACES:
            return None
        self.traces += 1
        pinned = _pinned_symbols(region)
        fixed = [at for at, dim in self.dims.items() if dim.symbols()[0] in pinned]
        try:
            values = self.examples(sizes)
            traced = trace_again(
                self.model, self.first, values, self.dims, fixed, self.training
            )
            imported = self.imported(traced)
        except Exception:  # the model's own, at a size it was not given
            return None
        pins = {name: as_expr(sizes[name]) for name in pinned}
        return _Path(traced, imported, region, pins)

    # ---- sizes and examples

    def sizes_in(self, region: Sequence[Cond]) -> dict[str, int] | None:
        """Sizes with these conditions, near the example's; above 0 if there are."""
        pinned = _pinned_symbols(region)
        hints = {**self.example_sizes(), **{n: most for n, (_, most) in pinned.items()}}
        names = sorted({n for cond in region for n in cond.symbols()} - set(pinned))
        small = [1, 2, 3, 5, *range(4, _LARGEST), 0]
        near = (
            {**hints, name: size}
            for name in names
            if (n := hints.get(name, 0)) > 1
            for size in (2 * n, n // 2, *range(n + 1, 2 * n))
            if size > 1
        )
        together = ({**hints, **dict.fromkeys(names, n)} for n in small)
        alone = ({**hints, name: n} for name in names for n in small)
        mixed = (
            {**hints, **dict(zip(names, several, strict=True))}
            for several in itertools.product((1, 2, 7, 0), repeat=min(len(names), 4))
            if len(several) == len(names)
        )
        for sizes in itertools.chain([hints], near, alone, together, mixed):
            if all(_holds(cond, sizes) for cond in region):
                return sizes
        return None

    def example_sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for (number, axis), dim in self.dims.items():
            if (name := dim.symbol) is not None:
                value = self.first.values[number]
                whole = isinstance(value, torch.Tensor)
                sizes.setdefault(name, int(value.shape[axis]) if whole else int(value))
        return sizes

    def examples(self, sizes: Mapping[str, int]) -> list[Any]:
        """The examples at other sizes: repeated, so that ids stay valid."""
        values = list(self.first.values)
        for (number, axis), dim in self.dims.items():
            size = dim.evaluate(sizes)
            value = values[number]
            if not isinstance(value, torch.Tensor):
                values[number] = size
                continue
            if math.prod([*value.shape[:axis], size, *value.shape[axis + 1 :]]) > (
                _MOST_ELEMENTS
            ):
                raise ValueError(f"a size of {size} is too large to trace")
            index = torch.arange(size) % max(value.shape[axis], 1)
            if value.shape[axis] == 0 and size:
                raise ValueError("an example of nothing cannot be made larger")
            values[number] = value.detach().index_select(axis, index)
        return values

    # ---- proofs

    def serves(self, path: _Path) -> bool:
        """Whether the main program is right for all sizes of this path.

        A size that is 0 or 1 there was traced at 1. Nothing is known at 0, so the main
        program must refuse it: of the branch's condition, at least n >= 1 is kept.
        """
        pinned = _pinned_symbols(path.region)
        zeros = [name for name, (least, most) in pinned.items() if least == 0 < most]
        return all(map(self.refuses_zero, zeros)) and self.same(path)

    def refuses_zero(self, name: str) -> bool:
        return any(
            guard.cond.symbols() == (name,) and not _holds(guard.cond, {name: 0})
            for guard in self.branches
        )

    def same(self, path: _Path) -> bool:
        """Whether the main program computes the same as this path, at its pins."""
        try:
            main = self.pinned(self.first, path.pins)
        except ShapeError:
            return True  # the main program refuses these sizes for another reason
        except PliantError:
            return False
        try:
            other = self.pinned(path.traced, path.pins)
        except PliantError:
            return False
        if _interface(main, self.first) != _interface(other, path.traced):
            return False
        return same_graphs(self.simplify(main.module), self.simplify(other.module))

    def pinned(self, traced: Traced, pins: Mapping[str, Expr]) -> Imported:
        """The program at these sizes, without the guards of its branches."""
        names = {k: v.substitute(pins) for k, v in traced.info.names.items()}
        for (number, axis), dim in self.dims.items():
            size = traced_dims(traced.program)[number].get(axis)
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                names.setdefault(str(size.node.expr), dim.substitute(pins))
        info = replace(traced.info, names=names, bounds=())
        return self.imported(replace(traced, info=info), _NONE)


# ---- conditions


class _AllCovered(dict[Cond, Guard | None]):
    """Every branch is covered."""

    def get(self, cond: Cond, default: object = None) -> None:
        return None


_NONE = _AllCovered()


def _above_zero(guard: Guard) -> Guard | None:
    """What is left of a condition once all but a size of 0 is covered.

    Nothing, if 0 is the only size that breaks it: that was traced.
    """
    names = guard.cond.symbols()
    if len(names) != 1 or _holds(guard.cond, {names[0]: 0}):
        return None
    if _holds(guard.cond, {names[0]: 1}):
        return None
    return Guard(ge(sym(names[0]), 1), guard.message, guard.origin)


def is_special(cond: Cond) -> bool:
    """Whether only 0, 1 or single sizes break it."""
    if cond.kind == "ne":
        return True
    if cond.kind not in ("lt", "le") or not cond.lhs.is_const:
        return False
    names = cond.symbols()
    return len(names) == 1 and _holds(cond, {names[0]: 2})


def has_other_side(cond: Cond) -> bool:
    """Whether it bounds one size, or holds at no large one: n // 16 == 14, n > 8.

    Traced at the example alone, such a program would refuse most sizes, or those that
    begin beside it.
    """
    names = cond.symbols()
    if cond.kind in ("lt", "le"):
        return len(names) == 1
    large = range(_LARGEST, _LARGEST + 256)  # all remainders of usual divisors
    return cond.kind == "eq" and not any(
        _holds(cond, dict.fromkeys(names, n)) for n in large
    )


def _holds(cond: Cond, sizes: Mapping[str, int]) -> bool:
    try:
        return cond.holds(sizes)
    except (KeyError, ZeroDivisionError):
        return False


def _facts(conds: Sequence[Cond]) -> Facts:
    facts = Facts()
    for cond in conds:
        facts = facts.assume(cond)
    return facts


def _possible(region: Sequence[Cond]) -> bool:
    """False only if it is proved that no size is in the region."""
    try:
        known = _facts(region[:-1])
        if known.prove(region[-1]) is False:
            return False
        known.assume(region[-1])
    except ValueError:  # they contradict each other
        return False
    return True


def _pinned_symbols(region: Sequence[Cond]) -> dict[str, tuple[int, int]]:
    """The symbols that have one value in a region, or are 0 or 1: least and most."""
    facts = _facts(region)
    pinned = {}
    for name in sorted({n for cond in region for n in cond.symbols()}):
        low, high = facts.bounds(sym(name))
        least = max(low or 0, 0)
        if high is not None and (high == least or (least == 0 and high == 1)):
            pinned[name] = least, high
    return pinned


def _dims(imported: Imported) -> dict[tuple[int, int], Expr]:
    """The sizes that vary, by flat input and axis; an integer's own is at -1."""
    out: dict[tuple[int, int], Expr] = {}
    for number, slot in enumerate(imported.signature.arguments):
        match slot:
            case TensorSlot(_, kind):
                dims = enumerate(kind.shape)
                out |= {(number, axis): d for axis, d in dims if not d.is_const}
            case SizeSlot(_, symbol):
                out[number, -1] = sym(symbol)
            case _:
                pass
    return out


def _interface(imported: Imported, traced: Traced) -> object:
    """The interface of a program to its caller, apart from tensors."""
    signature, spec = imported.signature, traced.program.call_spec
    return (
        signature.results,
        str(spec.in_spec),
        str(spec.out_spec),
        signature.seed is None,
        signature.changed,
    )
