"""What rewritten code calls: for a loop that is a scan (loop_source.py), and for what
Python makes a number of (number_source.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pliant.frontend.torch_dims import to_expr
from pliant.sym import sym

Limits = tuple[Any, Any, Any]  # start, stop and step of a range
Source = tuple[Any, int, int]  # a tensor, the axis of its rows, an offset


class NotAScan(Exception):
    """A loop that looked like a scan is none. It is traced as it was written."""


class StackedRounds:
    """What was a list of one tensor for each round: they are stacked.

    After no rounds, joining them gives no rows. torch refuses to join an empty list.
    The last round may be apart: the rows of its tensor may be fewer.
    """

    def __init__(self, stacked: Tensor, *last: Tensor) -> None:
        self.stacked, self.last = stacked, last


def stack(tensors: Any, dim: int = 0) -> Tensor:
    if not isinstance(tensors, StackedRounds):
        return torch.stack(tensors, dim)
    _require(not tensors.last)
    return tensors.stacked.movedim(0, dim)


def cat(tensors: Any, dim: int = 0) -> Tensor:
    if not isinstance(tensors, StackedRounds):
        return torch.cat(tensors, dim)
    stacked = tensors.stacked
    at = dim % (stacked.dim() - 1)
    joined = stacked.movedim(0, at).flatten(at, at + 1)
    return torch.cat((joined, *tensors.last), at) if tensors.last else joined


def in_steps(start: Any, stop: Any, step: Any) -> range:
    """The range; of a size that it ends at, only the number of steps is fixed."""
    if is_size(stop) and isinstance(start, int) and isinstance(step, int) and step > 1:
        stop = start + step * int((stop - start + step - 1) // step)
    return range(start, stop, step)


def over_size(start: Any, stop: Any, step: Any) -> bool:
    """Whether the range has a size as a limit that is not known yet."""
    return is_size(start) or is_size(stop)


def over_parts(rounds: Any, whole: Any, chunk: Any) -> bool:
    """Whether it is not known yet how many parts a size has, but that it is several.

    One part is the loop as it was written: a scan has a round at least.
    """
    count, one = (whole, chunk) if rounds is None else (rounds, 1)
    return is_size(count) and type(chunk) is int and chunk > 0 and bool(count > one)


def is_size(number: Any) -> bool:
    return isinstance(number, torch.SymInt) and number.node.maybe_as_int() is None


def whole(number: Any) -> Any:
    """`int(number)`, which of a size is the size."""
    if isinstance(number, torch.SymInt):
        return number
    size = truncated(number) if isinstance(number, torch.SymFloat) else None
    return int(number) if size is None else size


def real(number: Any) -> Any:
    """`float(number)`, which of a size is one as well."""
    if isinstance(number, torch.SymInt | torch.SymFloat):
        return torch.sym_float(number)
    return float(number)


def truncated(number: torch.SymFloat) -> torch.SymInt | None:
    """The size that a float rounds to, if it can be one; n / 2, but not n**0.5."""
    size: torch.SymInt = math.trunc(number)
    if not isinstance(size, torch.SymInt):
        return None
    try:
        to_expr(size.node.expr, sym)
    except ValueError:
        return None
    return size


def scanned(
    body: Callable[..., Any],
    carried: tuple[Any, ...],
    reads: Sequence[Source],
    limits: Limits,
) -> tuple[tuple[Any, ...], tuple[tuple[Tensor], ...]]:
    """The carried values after all rounds, and the stacked results of the rounds."""
    rows = tuple(_in_order(_rows(read, limits), limits) for read in reads)
    after, kept = _scanned(body, carried, rows, _length(limits))
    return after, tuple((stacked,) for stacked in kept)


def scanned_parts(
    body: Callable[..., Any],
    carried: tuple[Any, ...],
    reads: Sequence[Source],
    limits: Limits,
) -> tuple[tuple[Any, ...], tuple[tuple[Tensor, Tensor], ...]]:
    """The carried values after all parts of a size, and the results of the rounds.

    The limits are the number of parts, the size, and the size of a part. The last part
    has 1 to that many rows, and a round of its own behind the scan of the others. A
    slice ends with its tensor: each must have as many rows as the others.
    """
    rounds, whole, chunk = limits
    _require(bool(reads) and all(isinstance(x, Tensor) for x, _, _ in reads))
    if whole is None:
        whole = reads[0][0].shape[reads[0][1]]
    _require(all(bool(x.shape[axis] == whole) for x, axis, _ in reads))
    others = (whole + chunk - 1) // chunk - 1
    _require(rounds is None or bool(rounds == others + 1))
    rows, last = [], []
    for tensor, axis, _ in reads:
        at = axis % tensor.dim()
        first = tensor.narrow(at, 0, others * chunk)
        rows.append(first.unflatten(at, (others, chunk)).movedim(at, 0))
        last.append(tensor.narrow(at, others * chunk, whole - others * chunk))
    after, stacked = _scanned(
        lambda *given: body(chunk, *given), carried, tuple(rows), others
    )
    after, kept = body(whole - others * chunk, *last, *after)
    return after, tuple(zip(stacked, kept, strict=True))


def _scanned(
    body: Callable[..., Any],
    carried: tuple[Any, ...],
    rows: tuple[Tensor, ...],
    rounds: Any,
) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    from torch._higher_order_ops.scan import scan

    _require(all(isinstance(x, Tensor) for x in pytree.tree_leaves(carried)))
    # A scan has rows and carries something: numbers of no use, if the loop does not.
    number = torch.arange(rounds)
    nothing = torch.zeros(())

    def combine(state: Any, row: Any) -> Any:
        (unused, *values), (_, *given) = state, row
        after, kept = body(*given, *values)
        return _apart((unused, *after)), _apart(tuple(kept))

    first = (nothing, *_apart(carried))
    (_, *after), kept = scan(combine, first, (number, *rows), dim=0)
    return tuple(after), tuple(kept)


def write(target: Source, limits: Limits, kept: Tensor) -> None:
    """`out[:, t] = ..` of every round at once."""
    rows = _rows(target, limits)
    missing = rows.dim() - kept.dim()
    kept = kept.reshape((kept.shape[0], *[1] * missing, *kept.shape[1:]))
    rows.copy_(_in_order(kept, limits))


def _rows(source: Source, limits: Limits) -> Tensor:
    """(rounds, ..): the rows of a tensor that the rounds index, by index."""
    tensor, axis, offset = source
    start, _, step = limits
    _require(isinstance(tensor, Tensor))
    rounds = _length(limits)
    first = start + offset if step == 1 else start + offset + 1 - rounds
    rows: Tensor = tensor.movedim(axis, 0)
    return rows.narrow(0, first, rounds)


def _in_order(rows: Tensor, limits: Limits) -> Tensor:
    """Rows by index as rows by round, and back."""
    return rows.flip(0) if limits[2] == -1 else rows


def _length(limits: Limits) -> Any:
    start, stop, step = limits
    _require(step in (1, -1))
    return torch.sym_max((stop - start) * step, 0)


def _apart(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """A scan does not give what it was given, and nothing twice."""
    return tuple(pytree.tree_map(lambda x: x.clone(), value) for value in values)


def _require(holds: bool) -> None:
    if not holds:
        raise NotAScan
