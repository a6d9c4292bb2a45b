"""How a call's arguments and results map to the compiled function's.

A front end makes a `Signature`; the compiled model only asks it to flatten arguments,
to check them (that is where wrong kinds, dtypes and ranks get their message) and to
rebuild the structure that the model returns. `Parameters` brings arguments given by
name into the order of the example's.

    arguments  TensorSlot    TensorResult  results
               SizeSlot      SizeResult
               FixedSlot     FixedResult
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import numpy as np

from pliant.errors import DTypeError, ShapeError
from pliant.frontend.structure import CallNesting
from pliant.growing import Growing
from pliant.ir.types import NUMPY, DType, TensorType
from pliant.sym import Expr, sym

Flatten = Callable[[tuple[Any, ...], Mapping[str, Any]], list[Any]]

LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The next of main's parameters: tensors are in their order.

    Of a complex tensor, the parameter has the two parts of a number as its last axis.
    """

    name: str
    type: TensorType
    is_complex: bool = False

    @property
    def dims(self) -> tuple[Expr, ...]:
        return self.type.shape


@dataclass(frozen=True, slots=True)
class SizeSlot:
    """An integer that is the value of a symbol."""

    name: str
    symbol: str

    @property
    def dims(self) -> tuple[Expr, ...]:
        """Itself."""
        return (sym(self.symbol),)


@dataclass(frozen=True, slots=True)
class LengthSlot(SizeSlot):
    """The rows of arguments that grow (growing.py): no argument of the caller's."""


@dataclass(frozen=True, slots=True)
class FixedSlot:
    """A value that was fixed by the trace: a call must pass an equal one."""

    name: str
    value: object


@dataclass(frozen=True, slots=True)
class TensorResult:
    """The result of main with this number; a complex one ends with an axis of 2.

    With `number_type`, it is a scalar that the caller gets as a number of Python.
    """

    number: int
    is_complex: bool = False
    number_type: type[int] | type[float] | None = None


@dataclass(frozen=True, slots=True)
class SizeResult:
    """An integer computed from sizes of inputs."""

    value: Expr


@dataclass(frozen=True, slots=True)
class FixedResult:
    """The same in every call; None too."""

    value: object


@dataclass(frozen=True, slots=True)
class GrownResult:
    """The argument in this slot, which has `length` rows after the call.

    `capacity` is the symbol of the rows that it has room for.
    """

    slot: int
    length: Expr
    capacity: str


Slot: TypeAlias = TensorSlot | SizeSlot | LengthSlot | FixedSlot
Result: TypeAlias = TensorResult | SizeResult | FixedResult | GrownResult


@dataclass(frozen=True, slots=True)
class Parameters:
    """The names that a call may use.

    The example gave `positional` by position and `keywords` by name. `more` are the
    model's positional parameters after them: like every other parameter that the
    example left out, they must stay at their default.
    """

    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the example gave them; ShapeError names what is wrong."""
        if len(args) == len(self.positional) and not kwargs and not self.keywords:
            return args, {}
        names = (*self.positional, *self.keywords)
        order = (*self.positional, *self.more)
        values = dict(zip(order, args, strict=False))
        twice = [name for name in kwargs if name in values]
        values = {**self.defaults, **values, **kwargs}
        missing = [name for name in names if name not in values]
        unknown = [name for name in values if self._is_unknown(name, values[name])]
        problems = [
            f"{what}: {', '.join(found)}"
            for what, found in (
                ("missing", missing),
                ("unknown", [n for n in unknown if n not in self.defaults]),
                ("not among the example's", [n for n in unknown if n in self.defaults]),
                ("given twice", twice),
            )
            if found
        ]
        got = len(args) + len(kwargs)
        if problems or len(args) > len(order):
            count = f"{len(names)} input{'' if len(names) == 1 else 's'}"
            takes = f"the model takes {count} ({', '.join(names)}), got {got}"
            raise ShapeError(
                "; ".join([takes, *problems]), expected=len(names), got=got
            )
        return (
            tuple(values[name] for name in self.positional),
            {name: values[name] for name in self.keywords},
        )

    def _is_unknown(self, name: str, value: object) -> bool:
        if name in self.positional or name in self.keywords:
            return False
        return name not in self.defaults or not _same(value, self.defaults[name])


@dataclass(frozen=True, slots=True)
class StoredCall:
    """How a call is read and its results are nested, without any framework."""

    parameters: Parameters
    nesting: CallNesting

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        parameters = self.parameters
        names = (*parameters.positional, *parameters.keywords)
        return self.nesting.flatten(names, parameters.bind(args, kwargs))


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer of the model's that is a parameter of main, which a call looks up."""

    name: str  # in the model
    slot: TensorSlot


@dataclass(frozen=True, slots=True)
class Signature:
    """The caller's arguments and results, flat, and the structure around them.

    `main` may have one more parameter, a seed, and more results: the new values of
    arguments that the model writes, then those of buffers.
    """

    arguments: tuple[Slot, ...]
    results: tuple[Result, ...]
    flatten_arguments: Flatten
    unflatten_results: Callable[[Sequence[Any]], Any]
    positional: bool  # the arguments are a plain tuple of tensors
    plain: bool  # the model returns what main does: a tensor, or a tuple of several
    # Sizes of the first slots in the example it was traced with, if there was one.
    example: tuple[tuple[int, ...], ...] = ()
    seed: str | None = None  # the parameter that random numbers follow from
    changed: tuple[str, ...] = ()  # the buffers that the model writes
    held: tuple[Held, ...] = ()  # buffers that are parameters behind the arguments
    # Parameters that results of main are stored in. They are its last, and no results
    # of the compiled function.
    stores: tuple[tuple[str, int], ...] = ()
    # Gives a seed for the next call, if the caller is not to.
    draw: Callable[[], Any] | None = None
    written: tuple[int, ...] = ()  # arguments that the model writes, by slot
    grows: tuple[tuple[int, str], ...] = ()  # arguments by slot, and their length
    # Arguments that must have the strides of the trace, by slot: these decide whether
    # the model writes into an argument or into a copy.
    layouts: tuple[tuple[int, tuple[Expr, ...]], ...] = ()
    # The arguments are those of a direct call, and behind them buffers.
    direct_but_held: bool = False
    # The same as data, to be saved; None if the front end has no such form.
    stored: StoredCall | None = None

    def with_example(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Signature:
        """The same, with the sizes of these arguments recorded as the example's."""
        values = zip(self.slots, self.flatten(args, kwargs), strict=False)
        sizes = (
            tuple(map(int, v.shape)) if isinstance(slot, TensorSlot) else (int(v),)
            for slot, v in values
        )
        return replace(self, example=tuple(sizes))

    @property
    def slots(self) -> tuple[TensorSlot | SizeSlot, ...]:
        """The arguments the compiled function takes; a seed that is drawn is last."""
        given = tuple(a for a in self.arguments if not isinstance(a, FixedSlot))
        if self.draw is None or self.seed is None:
            return given
        return (*given, TensorSlot(self.seed, TensorType(DType.I64, ())))

    @property
    def is_direct(self) -> bool:
        """Whether a call takes main's arguments, and needs only main's results."""
        return (
            self.positional
            and self.draw is None
            and not self.written
            and not self.layouts
            and all(
                isinstance(a, TensorSlot) and not a.is_complex for a in self.arguments
            )
            and all(isinstance(r, TensorResult | FixedResult) for r in self.results)
        )

    def drawn(self, flat: Sequence[Any]) -> Sequence[Any]:
        """The arguments, and a seed behind them if this call draws one."""
        if self.draw is None:
            return flat
        seed = self.draw()
        plain = isinstance(seed, np.ndarray)
        arrays = [isinstance(value, np.ndarray | np.generic) for value in flat]
        if arrays and all(arrays):
            return [*flat, seed if plain else seed.numpy()]
        torch = sys.modules.get("torch")
        if plain and torch is not None and flat:
            seed = torch.from_numpy(seed)
        return [*flat, seed]

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The runtime's inputs; fixed arguments are compared and dropped."""
        return self.opened(self.given(args, kwargs))

    def opened(self, given: list[Any]) -> list[Any]:
        """The arguments, with the memory of those that grow, and their lengths."""
        if not self.grows:
            return given
        lengths: dict[str, int] = {}
        for slot, symbol in self.grows:
            holder, name = given[slot], self.slots[slot].name
            if not isinstance(holder, Growing):
                raise DTypeError(
                    f"input '{name}' grows: it must be a pliant.Growing, got a "
                    f"{type(holder).__name__}",
                    input=name,
                    expected="pliant.Growing",
                    got=type(holder).__name__,
                )
            if lengths.setdefault(symbol, holder.length) != holder.length:
                raise ShapeError(
                    f"input '{name}' has {holder.length} rows, and another one that "
                    f"grows with it has {lengths[symbol]}",
                    input=name,
                    expected=lengths[symbol],
                    got=holder.length,
                )
        rest = (v.memory if isinstance(v, Growing) else v for v in given)
        return [
            lengths[a.symbol] if isinstance(a, LengthSlot) else next(rest)
            for a in self.arguments
            if not isinstance(a, FixedSlot)
        ]

    def with_room(self, dims: Mapping[str, Any]) -> dict[str, Any]:
        """Dims to plan with: where no capacity is given, it is what the call needs."""
        found = dict(dims)
        for result in self.results:
            if isinstance(result, GrownResult) and result.capacity not in found:
                used = {name: dims.get(name) for name in result.length.symbols()}
                if all(isinstance(size, int) for size in used.values()):
                    rows = result.length.evaluate(cast(Mapping[str, int], used))
                    found[result.capacity] = rows
        return found

    def grown_bytes(self, dims: Mapping[str, int]) -> int:
        """The memory of arguments that grow, with all the room they have."""
        kinds = (self.slots[slot] for slot, _ in self.grows)
        sizes = (k.type.bytes for k in kinds if isinstance(k, TensorSlot))
        return sum(size.evaluate(dims) for size in sizes)

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The caller's arguments that are not fixed."""
        flat = self.flatten_arguments(args, kwargs)
        arguments = [a for a in self.arguments if not isinstance(a, LengthSlot)]
        out: list[Any] = []
        for slot, value in zip(arguments, flat, strict=True):
            if isinstance(slot, TensorSlot) and slot.is_complex:
                out.append(_parts(slot, value))
            elif not isinstance(slot, FixedSlot):
                out.append(value)
            elif not _same(value, slot.value):
                raise ShapeError(
                    f"input '{slot.name}' was fixed to {slot.value!r} when the model "
                    f"was compiled, got {value!r}; compile again for another value",
                    input=slot.name,
                    expected=slot.value,
                    got=value,
                )
        return out

    def check(self, flat: Sequence[Any], shapes_only: bool = False) -> None:
        """Raises for the first argument of a wrong kind, device, dtype or rank.

        With `shapes_only`, tensors without data (torch's meta device) will do.
        """
        for slot, value in zip(self.slots, flat, strict=False):
            if isinstance(slot, SizeSlot):
                _check_size(slot, value)
            else:
                _check_tensor(slot, value, shapes_only)

    def rebuild(
        self,
        call: tuple[Sequence[Any], Any],
        symbols: Callable[..., Mapping[str, int]],
        given: Sequence[Any] = (),
    ) -> Any:
        """The structure the model returns, from the flat tensors of a call.

        `given` are the caller's own arguments: what grows is one of them.
        """
        flat, result = call
        if self.plain:
            return result
        tensors = result if isinstance(result, tuple) else (result,)
        env: Mapping[str, int] | None = None
        leaves: list[Any] = []
        for item in self.results:
            match item:
                case TensorResult(number, is_complex, number_type):
                    found = tensors[number]
                    if number_type is not None:
                        found = number_type(found)
                    leaves.append(_joined(found) if is_complex else found)
                case SizeResult(value):
                    env = symbols(flat) if env is None else env
                    leaves.append(value.evaluate(env))
                case FixedResult(fixed):
                    leaves.append(fixed)
                case GrownResult(slot, length, _):
                    env = symbols(flat) if env is None else env
                    given[slot].length = length.evaluate(env)
                    leaves.append(given[slot])
        return self.unflatten_results(leaves)

    def rebuild_direct(self) -> Callable[[Any], Any] | None:
        """The same for a signature that is direct: the arguments play no part.

        None if the model returns what main does.
        """
        if self.plain:
            return None
        unflatten = self.unflatten_results
        if self.results and self.results == tuple(
            TensorResult(k) for k in range(len(self.results))
        ):
            single = len(self.results) == 1
            return (lambda result: unflatten((result,))) if single else unflatten
        return lambda result: self.rebuild(((), result), lambda _: {})


def _parts(slot: TensorSlot, value: Any) -> Any:
    """A complex tensor's memory as real numbers, with a last axis of 2."""
    got = dtype_name(value)
    wanted = "complex64" if slot.type.dtype is DType.F32 else "complex128"
    if got != wanted:
        raise DTypeError(
            f"input '{slot.name}' must be {wanted}, got {got or type(value).__name__}",
            input=slot.name,
            expected=wanted,
            got=got,
        )
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value).reshape((*np.shape(value), 1))
        return array.view(NUMPY[slot.type.dtype])
    torch = sys.modules["torch"]
    return torch.view_as_real(value.resolve_conj())


def _joined(value: Any) -> Any:
    """The complex tensor of a last axis of 2."""
    if isinstance(value, np.ndarray):
        kind = np.complex64 if value.dtype == np.float32 else np.complex128
        return value.view(kind).reshape(value.shape[:-1])
    return sys.modules["torch"].view_as_complex(value)


def dtype_name(value: Any) -> str | None:
    """A tensor's element type by Pliant's name, or None if it is not a tensor."""
    dtype = _field(value, "dtype")
    if dtype is None or isinstance(value, type):
        return None
    if isinstance(dtype, np.dtype):
        for ours, theirs in NUMPY.items():
            if theirs == dtype and ours is not DType.BF16:
                return ours.text
        return str(dtype)
    text = str(dtype).rpartition(".")[2]
    return TORCH_NAMES.get(text, text)


TORCH_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "bool",
}


def not_a_tensor(slot: TensorSlot | SizeSlot, value: object, why: str) -> DTypeError:
    """The error for a value that the runtime cannot read."""
    expected = "an int"
    if isinstance(slot, TensorSlot):
        expected = f"a dense tensor of {slot.type}"
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    return DTypeError(
        f"input '{slot.name}' must be {expected}, got {why}{kind}",
        input=slot.name,
        expected=str(slot.type) if isinstance(slot, TensorSlot) else "int",
        got=kind,
    )


def _field(value: Any, name: str) -> Any:
    """An attribute; None if there is none or it cannot be read."""
    try:
        return getattr(value, name, None)
    except Exception:  # whatever the caller's class raises
        return None


def _same(value: object, fixed: object) -> bool:
    """Whether a trace would be the same with the other value; 1, True and 1.0 differ,
    and so do 0.0 and -0.0."""
    if value is fixed:
        return True
    if type(value) is not type(fixed):
        return False
    try:
        if isinstance(value, float | complex):
            return repr(value) == repr(fixed)
        return bool(value == fixed)
    except Exception:  # a comparison of the caller's class
        return False


def _check_size(slot: SizeSlot, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise not_a_tensor(slot, value, "a ")
    if not -LARGEST <= value <= LARGEST:
        raise ShapeError(
            f"input '{slot.name}' does not fit in 64 bits",
            input=slot.name,
            expected="a 64-bit int",
            got=value,
        )


def _check_tensor(slot: TensorSlot, value: Any, shapes_only: bool) -> None:
    got = dtype_name(value)
    if isinstance(value, type):
        raise not_a_tensor(slot, value, "the class ")
    if got is None:
        raise not_a_tensor(slot, value, "")
    if not isinstance(value, np.generic) and not hasattr(value, "__dlpack__"):
        raise not_a_tensor(slot, value, "no data (no __dlpack__) in a ")
    layout = str(_field(value, "layout") or "torch.strided")
    if layout != "torch.strided" or _field(value, "is_nested") is True:
        kind = "nested" if _field(value, "is_nested") is True else layout
        raise not_a_tensor(slot, value, f"a {kind} ")
    device = str(_field(value, "device") or "cpu")
    if device != "cpu" and not (shapes_only and device == "meta"):
        advice = "it has no data" if device == "meta" else "move it with .cpu()"
        raise DTypeError(
            f"input '{slot.name}' is on {device}; this model runs on the cpu: {advice}",
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
    shape = _field(value, "shape")
    if not isinstance(shape, Sequence):
        raise not_a_tensor(slot, value, "no shape in a ")
    if len(shape) != slot.type.rank:
        raise ShapeError(
            f"input '{slot.name}' must have {slot.type.rank} dims {slot.type}, "
            f"got {len(shape)}: {tuple(shape)}",
            input=slot.name,
            expected=slot.type.rank,
            got=len(shape),
        )
