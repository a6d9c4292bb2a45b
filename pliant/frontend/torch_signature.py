"""The signature of an exported program: torch's pytrees around flat arguments."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pliant.errors import ShapeError
from pliant.frontend.signature import (
    Parameters,
    Result,
    Signature,
    Slot,
    StoredCall,
    TensorResult,
)
from pliant.frontend.structure import LEAF, CallNesting, Kind, Nesting
from pliant.frontend.torch_spec import described

# The names that a call may use, once the structure of the example is known.
Names = Callable[[pytree.TreeSpec], Parameters]


def torch_signature(
    ep: ExportedProgram,
    slots: Sequence[Slot],
    results: Sequence[Result],
    names: Names | None = None,
) -> Signature:
    """By the names that the program knows, unless others are given."""
    spec, out_spec = ep.call_spec.in_spec, ep.call_spec.out_spec
    assert spec is not None and out_spec is not None
    parameters = (names or program_names(ep))(spec)
    plain = pytree.tree_structure((tuple(0 for _ in slots), {}))
    positional = spec == plain
    return Signature(
        tuple(slots),
        tuple(results),
        _Flatten(parameters, spec, positional),
        _unflatten(out_spec),
        positional,
        _is_plain(out_spec, results),
        stored=_stored(parameters, spec, out_spec),
    )


def _is_plain(spec: pytree.TreeSpec, results: Sequence[Result]) -> bool:
    """Whether the structure is one tensor, or a tuple of two or more in order."""
    tensors = tuple(TensorResult(k) for k in range(len(results)))
    around = tensors if len(tensors) > 1 else 0
    return tuple(results) == tensors and spec == pytree.tree_structure(around)


@dataclass(frozen=True, slots=True)
class _Flatten:
    parameters: Parameters
    spec: pytree.TreeSpec
    positional: bool

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        bound = self.parameters.bind(args, kwargs)
        if self.positional:
            return list(bound[0])
        try:
            return list(self.spec.flatten_up_to(bound))
        except ValueError:
            raise _other_structure(self.parameters, self.spec, bound) from None


def _unflatten(spec: pytree.TreeSpec, first: int = 0) -> Callable[[Any], Any]:
    """What `tree_unflatten` does, from leaf `first` on, with its questions answered.

    Every call of a model does it, so it matters how long it takes.
    """
    if spec.is_leaf():
        return itemgetter(first)
    children = spec.children()
    last, context = first + spec.num_leaves, spec.context
    make = pytree.SUPPORTED_NODES[spec.type].unflatten_fn
    if all(child.is_leaf() for child in children):
        if spec.type is tuple:
            return lambda leaves: tuple(leaves[first:last])
        if spec.type is list:
            return lambda leaves: list(leaves[first:last])
        if spec.type is dict:
            return lambda leaves: dict(zip(context, leaves[first:last], strict=True))
        return lambda leaves: make(leaves[first:last], context)
    parts: list[Callable[[Any], Any]] = []
    for child in children:
        parts.append(_unflatten(child, first))
        first += child.num_leaves
    if spec.type is tuple:
        return lambda leaves: tuple([part(leaves) for part in parts])
    return lambda leaves: make([part(leaves) for part in parts], context)


# ---- as data


def _stored(
    parameters: Parameters, spec: pytree.TreeSpec, out_spec: pytree.TreeSpec
) -> StoredCall | None:
    """None if arguments or results have containers that only torch can describe."""
    by_position, by_name = spec.children()
    given = [_nesting(s) for s in (*by_position.children(), *by_name.children())]
    arguments = tuple(n for n in given if n is not None)
    results = _nesting(out_spec)
    plain = all(n.kind in _GIVEN for a in arguments for n in a.nodes())
    if results is None or len(arguments) < len(given) or not plain:
        return None
    return StoredCall(parameters, CallNesting(arguments, results))


_GIVEN = ("leaf", "tuple", "list", "dict")  # what arguments may be nested in


def _nesting(spec: pytree.TreeSpec) -> Nesting | None:
    """Torch's description of a structure as ours; None if it cannot be."""
    if spec.is_leaf():
        return LEAF
    inside = [_nesting(child) for child in spec.children()]
    parts = tuple(part for part in inside if part is not None)
    if len(parts) < len(inside):
        return None
    if spec.type in (tuple, list):
        return Nesting("tuple" if spec.type is tuple else "list", parts)
    kind, keys, name = _named(spec)
    if keys is None or len(keys) != len(parts):
        return None
    if not all(type(key) is str or (type(key) is int and not name) for key in keys):
        return None
    return Nesting(kind, parts, tuple(keys), name)


def _named(spec: pytree.TreeSpec) -> tuple[Kind, Sequence[Any] | None, str]:
    """The kind of a container with keys, the keys, and the name of its class."""
    kind, context = spec.type, spec.context
    if kind in (dict, OrderedDict):
        return "dict", context, ""
    if kind is defaultdict:
        return "dict", context[1], ""
    if kind is namedtuple:
        return "named", context._fields, context.__name__
    if isinstance(kind, type) and issubclass(kind, tuple):  # torch.return_types
        return "named", getattr(kind, "__match_args__", None), kind.__name__
    keys = context if isinstance(context, list | tuple) else None
    return "record", keys, getattr(kind, "__name__", "")


def _other_structure(
    parameters: Parameters, spec: pytree.TreeSpec, bound: Any
) -> ShapeError:
    """Names the first argument that is nested in another way than the example's."""
    by_position, by_name = spec.children()
    expected = [*by_position.children(), *by_name.children()]
    given = [*bound[0], *bound[1].values()]
    names = [*parameters.positional, *parameters.keywords]
    for name, wanted, value in zip(names, expected, given, strict=True):
        try:
            wanted.flatten_up_to(value)
        except ValueError:
            needed, got = _structure_text(wanted), described(value)
            hint = ""
            if wanted.type is tuple and isinstance(value, torch.Tensor):
                hint = f"; for a single tensor write ({name},)"
            return ShapeError(
                f"input '{name}' has another structure than the example's: "
                f"expected {needed}, got {got}{hint}",
                input=name,
                expected=needed,
                got=got,
            )
    return ShapeError("the arguments have another structure than the example's")


def _structure_text(spec: pytree.TreeSpec) -> str:
    """ "a tuple of 2", "a dict with the keys ids, mask"."""
    if spec.is_leaf():
        return "one tensor or number"
    kind = getattr(spec.type, "__name__", str(spec.type))
    if spec.type is dict:
        return f"a dict with the keys {', '.join(map(str, spec.context))}"
    return f"a {kind} of {spec.num_children}"


# ---- names


def program_names(ep: ExportedProgram) -> Names:
    """An exported program knows only the arguments of its example."""
    called = ep.module_call_graph[0].signature
    names = () if called is None else tuple(called.forward_arg_names or ())

    def of(spec: pytree.TreeSpec) -> Parameters:
        count, keywords = _given(spec)
        return Parameters(_numbered(names, count), keywords)

    return of


def module_names(model: torch.nn.Module) -> Names:
    """A module's own, and the defaults of those that the example left out."""
    names: tuple[str, ...] = ()
    defaults: dict[str, object] = {}
    for item in inspect.signature(model.forward).parameters.values():
        if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD):
            names = (*names, item.name)
        if item.default is not item.empty:
            defaults[item.name] = item.default

    def of(spec: pytree.TreeSpec) -> Parameters:
        count, keywords = _given(spec)
        return Parameters(_numbered(names, count), keywords, names[count:], defaults)

    return of


def _given(spec: pytree.TreeSpec) -> tuple[int, tuple[str, ...]]:
    """How many arguments the example gave by position, and which by name."""
    by_position, by_name = spec.children()
    return by_position.num_children, tuple(by_name.context)


def _numbered(names: tuple[str, ...], count: int) -> tuple[str, ...]:
    """`count` names; those of *args, which no keyword can give, are numbers."""
    return (*names[:count], *(f"#{k}" for k in range(len(names), count)))
