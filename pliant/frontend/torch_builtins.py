"""Functions of Python and torch that want a number take a size in torch's trace.

    x * len(x) / math.sqrt(x.shape[0])
    x + torch.linspace(0, 1, x.shape[0])[:, None]

Python's `len` and `math` know numbers alone, and so do a few functions of torch: a size
that is passed there is fixed to that of the example. While this lasts, such a call is
made by operations that do take sizes. torch.export does the same for `max`, `min` and
`math.pow`. And a size is an `int` to `isinstance`, if the model's code asks; torch's
own code has to tell them apart. The text of a size is that of a symbol: that is warned
of.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import SymFloat, SymInt, Tensor
from torch._export.verifier import Verifier
from torch.utils._pytree import tree_leaves

from pliant.errors import SizeTextWarning

Symbolic = SymInt | SymFloat

_len, _divmod = builtins.len, builtins.divmod
_sqrt, _log, _log2, _log10 = math.sqrt, math.log, math.log2, math.log10
_linspace, _one_hot = torch.linspace, torch.nn.functional.one_hot
_as_tensor = torch.as_tensor
_sym_sqrt: Callable[[Symbolic], Any] = vars(torch)["_sym_sqrt"]
_sym_log2: Callable[[Symbolic], Any] = vars(torch)["_sym_log2"]


def _length(of: Any, /) -> Any:
    if isinstance(of, Tensor) and of.dim():
        return of.shape[0]
    return _len(of)


def _quotient_and_rest(x: Any, y: Any, /) -> Any:
    if isinstance(x, SymInt) or isinstance(y, SymInt):
        return x // y, x % y
    return _divmod(x, y)


def _square_root(x: Any, /) -> Any:
    return _sym_sqrt(x) if isinstance(x, Symbolic) else _sqrt(x)


def _binary_logarithm(x: Any, /) -> Any:
    return _sym_log2(x) if isinstance(x, Symbolic) else _log2(x)


def _decimal_logarithm(x: Any, /) -> Any:
    return _sym_log2(x) * _log10(2) if isinstance(x, Symbolic) else _log10(x)


def _logarithm(x: Any, *base: Any) -> Any:
    if not any(isinstance(number, Symbolic) for number in (x, *base)):
        return _log(x, *base)
    if base:
        return _logarithm(x) / _logarithm(base[0])
    return _sym_log2(x) * _log(2)


def _spaced(start: Any, end: Any, steps: Any = None, **options: Any) -> Tensor:
    """As torch computes it: from the nearer end; a single place is the start."""
    kind = options.get("dtype") or torch.get_default_dtype()
    numbers = not isinstance(start, Tensor) and not isinstance(end, Tensor)
    if not (isinstance(steps, SymInt) and numbers and kind.is_floating_point):
        return _linspace(start, end, steps, **options)
    options["dtype"] = kind
    place: Tensor = vars(torch)["arange"](steps, **options)
    last: Any = steps - 1
    step = (end - start) / torch.sym_max(last, 1)
    half = torch.sym_max(steps // 2, 1)
    falling = end + step * (place - last)
    return torch.where(place < half, start + step * place, falling)


def _classes(tensor: Tensor, num_classes: Any = -1) -> Tensor:
    if not isinstance(num_classes, SymInt):
        return _one_hot(tensor, num_classes)
    none = tensor.new_zeros((*tensor.shape, num_classes))
    return none.scatter(-1, tensor.unsqueeze(-1), 1)


def _tensor_of(data: Any, *options: Any, **named: Any) -> Tensor:
    """torch.export makes tensors of sizes in `torch.tensor` alone."""
    listed = isinstance(data, list | tuple)
    if not listed or not any(isinstance(n, Symbolic) for n in tree_leaves(data)):
        return _as_tensor(data, *options, **named)
    named |= dict(zip(("dtype", "device"), options, strict=False))
    return torch.tensor(data, **named)


_WRITTEN: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (builtins, "len", _length),
    (builtins, "divmod", _quotient_and_rest),
    (math, "sqrt", _square_root),
    (math, "log", _logarithm),
    (math, "log2", _binary_logarithm),
    (math, "log10", _decimal_logarithm),
    (torch, "linspace", _spaced),
    (torch, "as_tensor", _tensor_of),
    (torch.nn.functional, "one_hot", _classes),
)


_isinstance = builtins.isinstance
_MEANT = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}


def _is_instance(value: Any, kinds: Any, /) -> bool:
    if type(value) in _MEANT and _isinstance(_MEANT[type(value)], kinds):
        return True
    return _isinstance(value, kinds)


# Packages with code that torch runs, or none that runs in a model.
_OTHERS = {*sys.stdlib_module_names, "torch", "pliant", "numpy", "sympy", "mpmath"}
_OTHERS -= {"__main__"}


def in_model(module: str) -> bool:
    """Whether a module may have code of a model."""
    return module.partition(".")[0] not in _OTHERS


_repr: Callable[[SymInt], str] = SymInt.__repr__


def _text(self: SymInt) -> str:
    text = _repr(self)
    frame = sys._getframe(1)
    if in_model(frame.f_globals.get("__name__", "")):
        warnings.warn(
            f"the model's code makes a text of a size, which is '{text}' in the trace: "
            "its result must not depend on that text",
            SizeTextWarning,
            stacklevel=2,
        )
    return text


@contextlib.contextmanager
def _sizes_are_integers(model: torch.nn.Module) -> Iterator[None]:
    modules = [
        vars(module)
        for name, module in list(sys.modules.items())
        if in_model(name) and type(module) is ModuleType
    ]
    forwards = (type(part).forward for part in model.modules())
    for names in (getattr(forward, "__globals__", {}) for forward in forwards):
        if in_model(names.get("__name__", "")):
            modules.append(names)
    changed = [names for names in modules if "isinstance" not in names]
    for names in changed:
        names["isinstance"] = _is_instance
    try:
        yield
    finally:
        for names in changed:
            names.pop("isinstance", None)


_op_types = Verifier.allowed_op_types


def _allowed_op_types(self: Verifier) -> tuple[type[Any], ...]:
    """torch.export's check of its result knows only some functions of sizes; what has
    no translation is reported when it is imported."""
    return (*_op_types(self), FunctionType)


@contextlib.contextmanager
def sizes_as_numbers(model: torch.nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sizes_are_integers(model))
        for owner, name, function in _WRITTEN:
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(mock.patch.object(SymInt, "__repr__", _text))
        allowed = mock.patch.object(Verifier, "allowed_op_types", _allowed_op_types)
        stack.enter_context(allowed)
        yield
