"""How a call's arguments and results map to the compiled function's.

A front end makes a `Signature`; the compiled model only asks it to flatten arguments,
to check them (that is where wrong kinds, dtypes and ranks get their message) and to
rebuild the structure that the model returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pliant.errors import DTypeError, ShapeError
from pliant.ir.types import NUMPY, DType, TensorType
from pliant.sym import Expr

Flatten = Callable[[tuple[Any, ...], Mapping[str, Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class TensorSlot:
    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class SizeSlot:
    """An integer that is the value of a symbol."""

    name: str
    symbol: str


@dataclass(frozen=True, slots=True)
class FixedSlot:
    """A value that was fixed when the model was traced."""

    name: str
    value: object


@dataclass(frozen=True, slots=True)
class Result:
    """A flat output: a tensor by number, an integer expression, or a fixed value."""

    tensor: int | None = None
    size: Expr | None = None
    fixed: object = None


@dataclass(frozen=True, slots=True)
class Signature:
    arguments: tuple[TensorSlot | SizeSlot | FixedSlot, ...]  # flat, as the user gives
    results: tuple[Result, ...]
    flatten_arguments: Flatten
    unflatten_results: Callable[[list[Any]], Any]
    positional: bool  # the arguments are a plain tuple of tensors
    single: bool  # the model returns one tensor, nothing around it

    @property
    def slots(self) -> tuple[TensorSlot | SizeSlot, ...]:
        """The arguments the compiled function takes."""
        return tuple(a for a in self.arguments if not isinstance(a, FixedSlot))

    @property
    def is_direct(self) -> bool:
        """Whether a call needs no flattening and no rebuilding."""
        plain = all(isinstance(a, TensorSlot) for a in self.arguments)
        return self.positional and self.single and plain

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The runtime's inputs; fixed arguments are compared and dropped."""
        flat = self.flatten_arguments(args, kwargs)
        out: list[Any] = []
        for slot, value in zip(self.arguments, flat, strict=True):
            if not isinstance(slot, FixedSlot):
                out.append(value)
            elif value is not slot.value and value != slot.value:
                raise ShapeError(
                    f"input '{slot.name}' was fixed to {slot.value!r} when the model "
                    f"was compiled, got {value!r}; compile again for another value",
                    input=slot.name,
                    expected=slot.value,
                    got=value,
                )
        return out

    def check(self, flat: Sequence[Any]) -> None:
        """Raises for the first argument of a wrong kind, device, dtype or rank."""
        for slot, value in zip(self.slots, flat, strict=False):
            if isinstance(slot, SizeSlot):
                if isinstance(value, bool) or not isinstance(value, int):
                    raise DTypeError(
                        f"input '{slot.name}' must be an int, got {type(value)}",
                        input=slot.name,
                        expected="int",
                        got=type(value).__name__,
                    )
                continue
            _check_tensor(slot, value)

    def rebuild(
        self, call: tuple[Sequence[Any], Any], symbols: Callable[..., Mapping[str, int]]
    ) -> Any:
        """The structure the model returns, from the flat tensors of a call."""
        flat, result = call
        if self.single:
            return result
        tensors = result if isinstance(result, tuple) else (result,)
        env: Mapping[str, int] | None = None
        leaves: list[Any] = []
        for item in self.results:
            if item.tensor is not None:
                leaves.append(tensors[item.tensor])
            elif item.size is not None:
                env = symbols(flat) if env is None else env
                leaves.append(item.size.evaluate(env))
            else:
                leaves.append(item.fixed)
        return self.unflatten_results(leaves)


def dtype_name(value: Any) -> str | None:
    """A tensor's element type in our spelling, or None if it is no tensor."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not hasattr(value, "shape"):
        return None
    if isinstance(dtype, np.dtype):
        for ours, theirs in NUMPY.items():
            if theirs == dtype and ours is not DType.BF16:
                return ours.text
        return str(dtype)
    text = str(dtype).rpartition(".")[2]
    return _TORCH_NAMES.get(text, text)


_TORCH_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
}


def _check_tensor(slot: TensorSlot, value: Any) -> None:
    got = dtype_name(value)
    if got is None:
        raise DTypeError(
            f"input '{slot.name}' must be a tensor of {slot.type}, "
            f"got {type(value).__name__}",
            input=slot.name,
            expected=str(slot.type),
            got=type(value).__name__,
        )
    device = str(getattr(value, "device", "cpu"))
    if device not in ("cpu", "meta"):
        raise DTypeError(
            f"input '{slot.name}' is on {device}; this model runs on the cpu: "
            "move it with .cpu()",
            input=slot.name,
            expected="cpu",
            got=device,
        )
    if got != slot.type.dtype.text:
        raise DTypeError(
            f"input '{slot.name}' must be {slot.type.dtype}, got {got}: cast it first",
            input=slot.name,
            expected=slot.type.dtype.text,
            got=got,
        )
    if len(value.shape) != slot.type.rank:
        raise ShapeError(
            f"input '{slot.name}' must have {slot.type.rank} dims {slot.type}, "
            f"got {len(value.shape)}: {tuple(value.shape)}",
            input=slot.name,
            expected=slot.type.rank,
            got=len(value.shape),
        )
