"""How a call passes an ONNX model's inputs, and gets its outputs.

Inputs go by position or by name. One output is that tensor, several are a tuple, a
sequence is a list. Tensors of types that the IR does not have are passed as their bytes
(onnx_types.py), and those of bf16 as 16 bits, which NumPy's arrays can hold: the caller
sees the types of ml_dtypes, or torch's.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pliant.errors import DTypeError, ShapeError
from pliant.frontend.contract import Imported
from pliant.frontend.onnx_context import OnnxContext
from pliant.frontend.onnx_types import ELEMENTS, Element
from pliant.frontend.onnx_values import (
    ABSENT,
    Absent,
    Array,
    Coded,
    Entry,
    Items,
    Known,
)
from pliant.frontend.signature import (
    FixedResult,
    FixedSlot,
    Parameters,
    Result,
    Signature,
    Slot,
    StoredCall,
    TensorResult,
    TensorSlot,
)
from pliant.frontend.structure import LEAF, CallNesting, Nesting
from pliant.frontend.translate import Location, Unsupported
from pliant.ir.graph import Value
from pliant.ir.types import DType, TensorType
from pliant.sym import Expr

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Input:
    """An input: what it is in the graph, and the slots of a call for it."""

    name: str
    entry: Entry
    slots: tuple[Slot, ...]
    flat: Callable[[Any], Iterable[Any]]  # the caller's value -> one for each slot
    is_plain: bool = False

    @classmethod
    def tensor(
        cls,
        cx: OnnxContext,
        name: str,
        element: Element,
        dims: tuple[Expr, ...],
    ) -> Input:
        held, view = _held(element)
        kind = TensorType(held, dims)
        value = cx.b.param(name, kind)
        entry: Entry = value
        if element.dtype is None:
            entry = Coded(value, element)
        elif element.dtype is not held:
            entry = cx.b.bitcast(value, element.dtype)
        elif held.is_unsigned:
            cx.nonnegative.add(value)
        slot = TensorSlot(name, kind)
        if view is None:
            return cls(name, entry, (slot,), lambda x: (x,), True)
        return cls(name, entry, (slot,), lambda x: (view(name, x),))

    @classmethod
    def fixed(cls, name: str, entry: Known, array: Array) -> Input:
        slot = FixedSlot(name, FixedArray(array))
        return cls(name, entry, (slot,), lambda x: (FixedArray(_as_array(x)),))

    @classmethod
    def of_items(cls, name: str, element: Element, items: list[Input] | None) -> Input:
        if items is None:
            slot = FixedSlot(name, None)
            return cls(name, ABSENT, (slot,), lambda x: (x,))

        def flat(given: Any) -> Iterator[Any]:
            if not isinstance(given, list | tuple) or len(given) != len(items):
                raise ShapeError(
                    f"input '{name}' must be a list of {len(items)} tensors, as the "
                    "example's",
                    input=name,
                    expected=len(items),
                    got=len(given) if isinstance(given, list | tuple) else given,
                )
            for item, value in zip(items, given, strict=True):
                yield from item.flat(value)

        entry = Items(tuple(item.entry for item in items), element)
        slots = tuple(slot for item in items for slot in item.slots)
        return cls(name, entry, slots, flat)


class FixedArray:
    """An array that a call must pass as it was when the model was compiled."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedArray) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return repr(self.array.tolist())


def _as_array(value: Any) -> Array:
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def _held(element: Element) -> tuple[DType, Callable[[str, Any], Any] | None]:
    """The type of a parameter, and how a caller's tensor becomes one of it."""
    if element.dtype is None:
        return DType.U8, lambda name, x: _bits(name, x, element, "uint8")
    if element.dtype is DType.BF16:
        return DType.U16, lambda name, x: _bits(name, x, element, "uint16")
    return element.dtype, None


_TORCH = {
    "BFLOAT16": "bfloat16",
    "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2": "float8_e5m2",
    "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
    "FLOAT8E8M0": "float8_e8m0fnu",
}


def _bits(name: str, x: Any, element: Element, kind: str) -> Any:
    """The memory of a tensor as unsigned integers."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        wanted = getattr(torch, _TORCH.get(element.name, ""), None)
        if wanted is not None and x.dtype is wanted:
            return x.view(getattr(torch, kind))
        raise DTypeError(
            f"input '{name}' must be {element.name}, got {x.dtype}",
            input=name,
            expected=element.name,
            got=str(x.dtype),
        )
    dtype = getattr(x, "dtype", None)
    if dtype != element.numpy:
        raise DTypeError(
            f"input '{name}' must be {element.numpy} (ml_dtypes), got {dtype}",
            input=name,
            expected=str(element.numpy),
            got=str(dtype),
        )
    return np.ascontiguousarray(x).view(kind).reshape(np.shape(x))


def _typed(element: Element) -> Convert:
    """A result's bits as the caller's tensor type."""

    def convert(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            kind = element.numpy
            if element.bits in (2, 4):
                return x.astype(np.uint8, copy=False).view(kind)
            return x.view(kind)
        torch: Any = sys.modules["torch"]
        wanted = getattr(torch, _TORCH.get(element.name, ""), None)
        return x if wanted is None else x.view(wanted)

    return convert


# ---- the whole


def signature(
    cx: OnnxContext,
    inputs: Sequence[Input],
    names: Sequence[str],
    entries: Sequence[Entry],
) -> Imported:
    """The program, with its signature; UnsupportedOpError with all that there are."""
    tensors: list[Value] = []
    results: list[Result] = []
    converts: list[Convert | None] = []
    shapes: list[Any] = []

    def add(entry: Entry) -> Any:
        """The place of the entry among the leaves, or a list of places."""
        if isinstance(entry, Items):
            return [add(e) for e in entry.values]
        place = len(results)
        if isinstance(entry, Absent):
            results.append(FixedResult(None))
            converts.append(None)
            return place
        element = cx.element_of(entry)
        convert = None
        if isinstance(entry, Coded):
            value, convert = entry.codes, _typed(element)
        elif isinstance(entry, Known) and element.dtype is None:
            raw = np.ascontiguousarray(entry.array).view(np.uint8)
            value, convert = cx.data(raw, ELEMENTS[2], entry.name), _typed(element)
        else:
            value = cx.value(entry)
            if value.dtype is DType.BF16:
                value, convert = cx.b.bitcast(value, DType.U16), _typed(element)
        results.append(TensorResult(len(tensors)))
        tensors.append(value)
        converts.append(convert)
        return place

    try:
        shapes = [add(entry) for entry in entries]
    except Unsupported as problem:
        cx.note("output", str(problem), Location("", f"outputs {', '.join(names)}"))
    cx.guard_sizes()
    module = cx.finish(tensors)
    parameters = Parameters(tuple(i.name for i in inputs))

    def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        given = parameters.bind(args, kwargs)[0]
        pairs = zip(inputs, given, strict=True)
        return [x for each, value in pairs for x in each.flat(value)]

    def rebuilt(place: Any, leaves: Sequence[Any]) -> Any:
        if isinstance(place, list):
            return [rebuilt(p, leaves) for p in place]
        convert = converts[place]
        return leaves[place] if convert is None else convert(leaves[place])

    tensors_in = any(isinstance(s, TensorSlot) for i in inputs for s in i.slots)

    def unflatten(leaves: Sequence[Any]) -> Any:
        if not tensors_in:  # nothing says that the caller wants torch's
            leaves = [x.numpy() if hasattr(x, "numpy") else x for x in leaves]
        made = tuple(rebuilt(place, leaves) for place in shapes)
        return made[0] if len(made) == 1 else made

    positional = all(i.is_plain for i in inputs)
    plain = (
        bool(shapes)
        and tensors_in
        and not any(converts)
        and all(isinstance(r, TensorResult) for r in results)
        and not any(isinstance(s, list) for s in shapes)
    )
    slots = tuple(slot for i in inputs for slot in i.slots)
    stored = None
    if positional and not any(converts):
        nestings = tuple(map(_nesting, shapes))
        around = nestings[0] if len(nestings) == 1 else Nesting("tuple", nestings)
        stored = StoredCall(parameters, CallNesting((LEAF,) * len(inputs), around))
    made = Signature(
        slots, tuple(results), flatten, unflatten, positional, plain, stored=stored
    )
    if cx.seed_value is not None:
        made = replace(made, seed=cx.seed_value.name, draw=draw, positional=False)
    return Imported(module, made, tuple(cx.assumptions))


def _nesting(shape: Any) -> Nesting:
    """Of an output, or of a sequence."""
    if isinstance(shape, list):
        return Nesting("list", tuple(map(_nesting, shape)))
    return LEAF


def draw() -> Array:
    """A seed for the random numbers of one call."""
    return np.array(secrets.randbits(63), np.int64)
