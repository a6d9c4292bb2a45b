"""The errors of calls that are refused or fail.

The runtime returns a status and three numbers; here they become an error that names the
input or the dim, the numbers, and what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.errors import (
    DATA_ERRORS,
    DTypeError,
    InternalError,
    MemoryLimitError,
    PliantError,
    ShapeError,
    SpillError,
)
from pliant.frontend.signature import (
    LARGEST,
    Signature,
    SizeSlot,
    TensorSlot,
    not_a_tensor,
)
from pliant.image.parts import PartImage
from pliant.model.arguments import shown
from pliant.model.buffers import may_repeat, memory_block, strides_of
from pliant.model.parts import ModelPart
from pliant.runtime.binding import RuntimeModel
from pliant.runtime.description import Overflow, RuntimeStatus, Status
from pliant.sym import Expr
from pliant.sym.rules import SizeCheck, breaks

Detail = tuple[int, int, int]  # what a status comes with


@dataclass(frozen=True, slots=True)
class Refusals:
    """The errors of one compiled program."""

    parts: tuple[ModelPart, ...]
    signature: Signature
    threads: int

    @property
    def runtime(self) -> RuntimeModel:
        return self.parts[0].runtime

    @property
    def dims(self) -> tuple[str, ...]:
        """The symbols that the inputs decide."""
        return self.parts[0].symbols

    @property
    def all_dims(self) -> tuple[str, ...]:
        """And those that the data decide."""
        return self.parts[-1].symbols

    def of_call(self, status: RuntimeStatus, flat: Sequence[Any]) -> PliantError:
        """The error of a call with these arguments."""
        self.signature.check(flat)
        first, least, began = status.detail
        match status.status:
            case Status.GUARD | Status.OVERFLOW if status.part == 0:
                return self.of_sizes(status, sizes_of(flat))
            case Status.GUARD:
                rules = self.parts[status.part].image.rules
                return rules.refusal(rules.guards[first], self._known(status, flat))
            case Status.OVERFLOW:
                part = self.parts[status.part]
                return self.of_overflow(
                    status.detail, self._known(status, flat), part.image
                )
            case Status.LIMIT:
                return self.of_limit(status.detail, self._known(status, flat))
            case Status.BUDGET:
                return _budget_error(*status.detail)
            case Status.SPILL:
                return _spill_error(first, least, bool(began))
            case Status.RUN:
                image = self.parts[status.part].image
                known = self._known(status, flat)
                return _check_failed(image, first, least, known, self._named(flat))
            case Status.KIND | Status.LAYOUT:
                return unreadable(self.signature.slots[first], flat[first])
            case Status.MEMORY:
                return MemoryLimitError(
                    "the system has no memory for this call; use smaller sizes",
                    limit=0,
                    least=first,
                )
            case other:
                return InternalError("run", f"{other.name} {status.detail}")

    def _known(self, status: RuntimeStatus, flat: Sequence[Any]) -> dict[str, int]:
        """The sizes that were known when a call failed."""
        known = self.symbols_of(flat)
        if status.part == 0:
            return known
        found = self.parts[status.part].found
        pairs = zip(found, status.sizes, strict=False)
        return known | {size.name: value for size, value in pairs}

    def symbols_of(self, flat: Sequence[Any]) -> dict[str, int]:
        """The value of every symbol for these inputs."""
        return self.bound(sizes_of(flat))

    def bound(self, sizes: Sequence[int]) -> dict[str, int]:
        """The value of every symbol for these sizes, one after the other."""
        try:
            values = self.runtime.bind(list(sizes))
        except RuntimeStatus as status:
            raise self.of_sizes(status, sizes) from None
        return dict(zip(self.dims, values, strict=True))

    def of_sizes(self, status: RuntimeStatus, sizes: Sequence[int]) -> ShapeError:
        """The error for a guard that fails at these sizes, or overflows."""
        image = self.parts[0].image
        rest = iter(sizes)
        shapes = [[next(rest) for _ in dims] for _, dims in image.rules.inputs]
        env = image.rules.observed(shapes)
        if status.status is Status.OVERFLOW:
            return self.of_overflow(status.detail, env, image)
        return image.rules.refusal(image.rules.guards[status.detail[0]], env)

    def _named(self, flat: Sequence[Any]) -> dict[str, Any]:
        return {s.name: v for s, v in zip(self.signature.slots, flat, strict=False)}

    # ---- sizes that are too large

    def of_overflow(
        self, detail: Detail, env: Mapping[str, int], image: PartImage
    ) -> ShapeError:
        """The error for a size that is too large to compute with."""
        number, rules, table = detail[0], image.rules, image.table
        env = {**env, "threads": self.threads}
        match Overflow(detail[1]):
            case Overflow.GUARD if number < len(rules.guards):
                guard = rules.guards[number]
                if breaks(env, guard):
                    return rules.refusal(guard, env)
                return self._too_large(f"what the model requires, {guard.cond},", env)
            case Overflow.GUARD:
                binding = rules.bindings[number - len(rules.guards)]
                return self._too_large(f"the value of {binding.symbol}", env)
            case Overflow.TABLE if number < len(table):
                return self._too_large("a size", env, table[number])
            case Overflow.TABLE:
                return self._bad_size(image.checks[number - len(table)], env)
            case Overflow.BUFFER:
                what = f"a buffer for {image.buffers[number].type}"
                size = table[image.spec.buffers[number].size_index]
                return self._too_large(what, env, size)
            case Overflow.OUTPUT:
                kind = image.output_types[number]
                return self._too_large(f"a result, {kind}", env, kind.bytes)
            case _:
                return self._too_large("all that the call allocates", env)

    def _bad_size(self, check: SizeCheck, env: Mapping[str, int]) -> ShapeError:
        """The error for a size that violates one of its bounds."""
        text = _value_text(check.value, env)
        if check.low is not None and text.startswith("-"):
            return ShapeError(
                f"{check.what} would be {text} ({self._dims_text(env)}): "
                "a size cannot be negative",
                expected="a size",
                got=check.value.evaluate(env),
            )
        most = LARGEST if check.high is None else check.high
        return self._too_large(check.what, env, check.value, most)

    def _too_large(
        self,
        what: str,
        env: Mapping[str, int],
        value: Expr | None = None,
        most: int = LARGEST,
    ) -> ShapeError:
        # A size of data has no value yet where the plan is that of its bound.
        known = value is not None and set(env).issuperset(value.symbols())
        text = _value_text(value, env) if value is not None and known else "more"
        return ShapeError(
            f"these sizes are too large ({self._dims_text(env)}): {what} comes to "
            f"{text}, and at most {most} can be computed with; use smaller sizes",
            expected=f"at most {most}",
            got=text,
        )

    def _dims_text(self, env: Mapping[str, int]) -> str:
        return ", ".join(f"{name}={env[name]}" for name in self.all_dims if name in env)

    # ---- memory

    def of_limit(self, detail: Detail, dims: Mapping[str, int]) -> MemoryLimitError:
        """States what would fit: the least limit for these dims, the largest dims."""
        is_budget, least, limit = detail
        limit_name = "budget of the process" if is_budget else "limit"
        largest: dict[str, int] = {}
        for name in (name for name in self.all_dims if name in dims):
            found = self._largest(name, dims, limit)
            if found is not None:
                largest[name] = found
        text = ", or ".join(f"{name} <= {value}" for name, value in largest.items())
        sizes = ", ".join(f"{name}={value}" for name, value in dims.items())
        unspilled = self.runtime.spec.budgeting.spill_problem
        return MemoryLimitError(
            f"this call needs {least} bytes at least"
            + (f" ({sizes})" if sizes else "")
            + f", the memory {limit_name} is {limit}; raise it"
            + (f", or use {text}" if text else self._smallest(dims))
            + (
                f"; nothing is spilled to a file: {unspilled}, set PLIANT_SPILL_FOLDER "
                "to a folder on a disk and compile again"
                if unspilled
                else ""
            ),
            limit=limit,
            least=least,
            largest=largest,
        )

    def _smallest(self, dims: Mapping[str, int]) -> str:
        """What even the smallest sizes need, where no smaller size of a dim fits."""
        part = self.parts[0]
        low = dict(zip(part.image.symbols, part.image.least, strict=True))
        env = {name: max(low.get(name, 1), 1) for name in dims}
        names = set(self.all_dims)
        if len(self.parts) > 1 or env == dims or not names or names != set(dims):
            return ""
        if part.image.rules.failing(env) is not None:
            return ""
        try:
            least = part.least(env)
        except RuntimeStatus:
            return ""
        sizes = ", ".join(f"{name}={size}" for name, size in env.items())
        return f": even {sizes} needs {least} bytes"

    def _largest(self, name: str, dims: Mapping[str, int], limit: int) -> int | None:
        """The largest value of a dim below its own whose least peak fits, if any."""
        parts = [part for part in self.parts if part.is_known(dims)]
        image = parts[-1].image

        def fits(value: int) -> bool:
            env = {**dims, name: value}
            if image.rules.failing(env) is not None:
                return False
            held = 0
            try:
                for part in parts:
                    if held + part.least(env) > limit:
                        return False
                    held += part.handed_bytes(env)
            except RuntimeStatus as status:
                if status.status is Status.OVERFLOW:
                    return False
                raise
            return True

        low = dict(zip(image.symbols, image.least, strict=True)).get(name, 0)
        # A size of 0 is nothing that one could use instead.
        fitting, above = max(low, 1), dims[name]
        if fitting >= above or not fits(fitting):
            return None
        while above - fitting > 1:
            middle = (fitting + above) // 2
            if fits(middle):
                fitting = middle
            else:
                above = middle
        return fitting


def _check_failed(
    image: PartImage,
    number: int,
    value: int,
    known: Mapping[str, int],
    inputs: Mapping[str, Any],
) -> PliantError:
    """A run-time check of a kernel, with the sizes that its message names.

    Of an index, also where the inputs hold it.
    """
    kind, message = image.faults[number - 1]
    end = re.search(r"outside axis \d+ of size (\d+)", message)
    holds = f"; {index_source(inputs, value, known, end)}" if kind == "index" else ""
    holds = holds.rstrip("; ")
    message = message.replace("{value}", str(value))
    words = set(re.findall(r"\w+", message))
    sizes = [f"{name}={size}" for name, size in known.items() if name in words]
    text = f", with {', '.join(sizes)}" if sizes else ""
    return DATA_ERRORS[kind](message + text + holds)


def index_source(
    inputs: Mapping[str, Any],
    value: int,
    known: Mapping[str, int],
    end: re.Match[str] | None,
) -> str:
    """Which input holds an index that is outside its axis, and what is allowed."""
    size = int(end[1]) if end is not None else None
    for name, given in inputs.items():
        place = _place_of(given, value)
        if place is not None:
            where = f" at [{', '.join(map(str, place))}]" if place else ""
            allowed = "" if size is None else f", and must be below {size}"
            return f"input '{name}' holds {value}{where}{allowed}"
    longer = [n for n, size_ in known.items() if size is not None and size_ > size]
    if value == size and longer:
        return f"if it is a position: {longer[0]} must be at most {size}"
    return ""


def _place_of(given: Any, value: int) -> tuple[int, ...] | None:
    """Where an input of integers first holds a value."""
    array = given if isinstance(given, np.ndarray) else None
    if array is None and getattr(getattr(given, "device", None), "type", "") == "cpu":
        with suppress(TypeError, RuntimeError):  # no NumPy type is like it
            array = given.detach().numpy()
    if array is None or array.dtype.kind not in "iu":
        return None
    found = np.argwhere(array == value)
    return tuple(map(int, found[0])) if len(found) else None


def sizes_of(flat: Sequence[Any]) -> list[int]:
    """The sizes of flat arguments, one after the other; an integer is its own."""
    sizes: list[int] = []
    for value in flat:
        sizes.extend([value] if isinstance(value, int) else value.shape)
    return [int(s) for s in sizes]


def check_written(
    signature: Signature, own: Sequence[Any], flat: Sequence[Any]
) -> None:
    """No argument that the model writes may share memory with another argument, and no
    element of it with another element; an array must allow writing.

    `own` are the caller's, of which those that grow have memory of their own.
    """
    grows = {slot for slot, _ in signature.grows}
    blocks = [memory_block(value) for value in flat]
    for number in signature.written:
        value = flat[number]
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            name = signature.slots[number].name
            raise DTypeError(
                f"the model writes input '{name}', which is a read-only array: pass a "
                "copy of it",
                input=name,
                expected="an array that can be written",
                got="a read-only array",
            )
        if number not in grows and may_repeat(flat[number]):
            name = signature.slots[number].name
            raise DTypeError(
                f"the model writes input '{name}', elements of which share memory: "
                "pass a copy of it",
                input=name,
                expected="elements of their own",
                got="strides that overlap",
            )
    for number, other in _sharing(blocks, signature.written):
        names = [signature.slots[k].name for k in (number, other)]
        raise DTypeError(
            f"the model writes input '{names[0]}', which shares memory with "
            f"input '{names[1]}': pass a copy of one",
            input=names[0],
            expected="memory of its own",
            got=f"that of '{names[1]}'",
        )


def _sharing(
    blocks: Sequence[tuple[int, int] | None], written: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Pairs of a block that is written and another one that overlaps it.

    In order of their places a block overlaps an earlier one if it begins before the
    furthest end so far, of all blocks or of those that are written.
    """
    places = sorted((b, k) for k, b in enumerate(blocks) if b is not None)
    writes, every, last = set(written), (0, -1), (0, -1)  # (end, number)
    for (begin, end), number in places:
        reach = every if number in writes else last
        if begin < reach[0] and end > begin:
            pair = (number, reach[1]) if number in writes else (reach[1], number)
            yield pair
        every = max(every, (end, number))
        if number in writes:
            last = max(last, (end, number))


def check_layouts(
    signature: Signature, flat: Sequence[Any], known: Mapping[str, int]
) -> None:
    """Arguments have the strides of the trace, apart from those of single elements."""
    for number, dims in signature.layouts:
        wanted = [dim.evaluate(known) for dim in dims]
        found = strides_of(flat[number])
        shape = tuple(flat[number].shape)
        axes = zip(shape, wanted, found, strict=True)
        if 0 in shape or all(n == 1 or a == b for n, a, b in axes):
            continue
        name = signature.slots[number].name
        raise DTypeError(
            f"input '{name}' has strides {found}, and in the trace it had {wanted}, "
            "which decide what the model's in-place changes write, or what its code "
            "does: pass a copy in the layout of the example",
            input=name,
            expected=wanted,
            got=found,
        )


def unreadable(slot: TensorSlot | SizeSlot, value: object) -> DTypeError:
    return not_a_tensor(slot, value, "one that cannot be read: ")


def _value_text(value: Expr, env: Mapping[str, int]) -> str:
    try:
        return shown(value.evaluate(env))
    except ZeroDivisionError:
        return "something undefined"


def _spill_error(number: int, size: int, began: bool) -> SpillError:
    text = f"spilling {size} bytes failed"
    if began:
        text += " after the call had begun; what it updates may be new in part"
    error = SpillError(
        number,
        f"{text}: {os.strerror(number)}; set PLIANT_SPILL_FOLDER to a folder with "
        "room and compile again, or raise the memory limit",
    )
    error.began = began
    return error


def _budget_error(budget: int, needed: int, in_use: int) -> MemoryLimitError:
    return MemoryLimitError(
        f"this call needs {needed} bytes, and of the memory budget of the process, "
        f"{budget} bytes, calls that run and idle arenas hold {in_use}; raise it "
        "(pliant.set_memory_budget), let calls wait longer, or make fewer at once",
        limit=budget,
        least=needed,
        in_use=in_use,
    )
