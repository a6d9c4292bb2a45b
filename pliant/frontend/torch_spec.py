"""`dynamic_shapes` beside the example inputs: read, checked, and as torch takes it.

    dynamic_shapes=({0: "batch", 1: Dim("seq", max=512)}, None, "count")

An entry per input, by position or by name, nested as the inputs are: for a tensor a
dict from axes to dims, or one dim per axis; for an int a dim; None for nothing dynamic.
A dim is a name, a Dim, a hint (Dim.AUTO, DYNAMIC, STATIC), the size itself, or None.
What is collected by *args may also be listed flat, one entry per input.

torch sees every named or bounded dim as `Dim.DYNAMIC`: it must not refuse a model
because a bound it inferred differs from the one declared. Names and bounds are kept
here, and come back as symbols and guards of ours. A mistake is an error that names the
input and the axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from pliant.errors import OptionError, ShapeError
from pliant.sym import Expr, sym
from pliant.sym.names import is_reserved

_LARGE = 1 << 62  # a declared maximum from here on is none


@dataclass(frozen=True, slots=True)
class DimSpec:
    """One declared dim of one input: what torch gets, and what we remember."""

    for_torch: Any
    expr: Expr | None = None  # the user's name, or an expression over names
    low: int | None = None
    high: int | None = None

    @property
    def dynamic(self) -> bool:
        return is_hint(self.for_torch, "DYNAMIC", "AUTO")

    @property
    def must_vary(self) -> bool:
        """Whether the user counts on other sizes than the example's."""
        return is_hint(self.for_torch, "DYNAMIC")


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """The declared dims of one flat input: by axis for a tensor, -1 for an int."""

    dims: Mapping[int, DimSpec]
    name: str = ""  # "x", "cache['keys']"

    def place(self, axis: int) -> str:
        return f"input '{self.name}'" + (f", axis {axis}" if axis >= 0 else "")


@dataclass(frozen=True, slots=True)
class Spec:
    """Of a whole model: what torch gets, and one LeafSpec per flat input."""

    for_torch: dict[str, Any] | None
    leaves: list[LeafSpec]


def is_hint(dim: Any, *kinds: str) -> bool:
    return getattr(getattr(dim, "type", None), "name", "") in kinds


# --- one dim --------------------------------------------------------------------


def read_dim(dim: Any, place: str) -> DimSpec:
    """A dim of `dynamic_shapes`: a Dim, a name, a hint, or the size itself."""
    if isinstance(dim, str):
        return DimSpec(Dim.DYNAMIC, _symbol(dim, place))
    root = getattr(dim, "root", None)
    if root is not None:  # derived, such as 2*_half
        slope = dim.fn(1) - dim.fn(0)
        expr = _symbol(root.__name__, place) * int(slope) + int(dim.fn(0))
        low, high = (b if b is None else int(dim.fn(b)) for b in _declared(root))
        return DimSpec(Dim.DYNAMIC, expr, low, high)
    if isinstance(dim, Dim):
        return DimSpec(Dim.DYNAMIC, _symbol(dim.__name__, place), *_declared(dim))
    if is_hint(dim, "DYNAMIC", "AUTO"):
        kind = Dim.DYNAMIC if is_hint(dim, "DYNAMIC") else Dim.AUTO
        return DimSpec(kind, None, dim.min, dim.max)
    if is_hint(dim, "STATIC"):
        return DimSpec(dim)
    if isinstance(dim, int) and not isinstance(dim, bool):
        return DimSpec(dim)
    raise OptionError(
        f"dynamic_shapes: {place}: {dim!r} is no dim; give a name such as 'batch', a "
        "torch.export.Dim, Dim.AUTO, Dim.STATIC, or None"
    )


def _symbol(name: str, place: str) -> Expr:
    if not name.isidentifier() or not name.isascii():
        raise OptionError(
            f"dynamic_shapes: {place}: {name!r} is no name for a dim: use letters, "
            "digits and underscores, such as 'batch' or 'seq_2'"
        )
    if is_reserved(name):
        raise OptionError(
            f"dynamic_shapes: {place}: dim name '{name}' is reserved: choose another"
        )
    return sym(name)


def _declared(dim: Any) -> tuple[int | None, int | None]:
    low, high = dim.min, dim.max
    bounded = isinstance(high, int) and high < _LARGE
    return (int(low) if low else None), (int(high) if bounded else None)


# --- the whole ------------------------------------------------------------------


def read_spec(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shapes: Any,
) -> Spec:
    signature = inspect.signature(model.forward)
    arguments = signature.bind(*args, **kwargs).arguments
    if hasattr(shapes, "dynamic_shapes"):  # a torch.export.ShapesCollection
        shapes = shapes.dynamic_shapes(model, args, dict(kwargs))
    entries = _by_argument(signature, arguments, shapes)
    for_torch: dict[str, Any] = {}
    leaves: dict[str, list[LeafSpec]] = {}
    for name, value in arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given = entries.get(name) or {}
            pairs = {k: _paired(v, given.get(k), k) for k, v in value.items()}
            for_torch[name] = {k: pair[0] for k, pair in pairs.items()}
            leaves |= {k: pair[1] for k, pair in pairs.items()}
        else:
            for_torch[name], leaves[name] = _paired(value, entries.get(name), name)
    # As torch flattens (args, kwargs): by position first, then as given by name.
    first = list(signature.bind_partial(*args).arguments)
    ordered = [leaf for name in (*first, *kwargs) for leaf in leaves[name]]
    return Spec(None if shapes is None else for_torch, ordered)


def _by_argument(
    signature: inspect.Signature, arguments: Mapping[str, Any], shapes: Any
) -> dict[str, Any]:
    """The entries by argument; those for *args and **kwargs nested as the values."""
    if shapes is None:
        return {}
    kinds = {name: signature.parameters[name].kind for name in arguments}
    more = next((n for n, k in kinds.items() if k is k.VAR_POSITIONAL), None)
    named = next((n for n, k in kinds.items() if k is k.VAR_KEYWORD), None)
    if isinstance(shapes, Mapping):
        return _by_name(arguments, shapes, named)
    if not isinstance(shapes, tuple | list):
        raise OptionError(
            "dynamic_shapes must be a tuple with an entry per input, or a dict by the "
            f"inputs' names ({', '.join(arguments)}), not {_shown(shapes)}"
        )
    names = list(arguments)
    if len(shapes) == len(names):
        entries = dict(zip(names, shapes, strict=True))
        if more is None or _is_nested(entries[more], arguments[more]):
            return entries
    flat = list(_flat_names(arguments, more))
    if more is not None and len(shapes) == len(flat):
        before = names.index(more)
        behind = before + len(arguments[more])
        rest = dict(zip(names[before + 1 :], shapes[behind:], strict=True))
        entries = dict(zip(names[:before], shapes, strict=False))
        return {**entries, more: tuple(shapes[before:behind]), **rest}
    raise ShapeError(
        f"dynamic_shapes has {_entries(shapes)} for {len(flat)} inputs "
        f"({', '.join(flat)}): give each its own, or None",
        expected=len(flat),
        got=len(shapes),
    )


def _by_name(
    arguments: Mapping[str, Any], shapes: Mapping[Any, Any], named: str | None
) -> dict[str, Any]:
    if any(not isinstance(key, str) for key in shapes):
        raise OptionError(
            f"dynamic_shapes is {_shown(shapes)}, the entry of one tensor: give a "
            "tuple with an entry per input, ({0: 'batch'},) for a single one"
        )
    entries = dict(shapes)
    inner = dict(arguments[named]) if named is not None else {}
    flat = {key: entries.pop(key) for key in list(entries) if key in inner}
    if named is not None and flat:
        entries[named] = {**(entries.get(named) or {}), **flat}
    unknown = [key for key in entries if key not in arguments]
    if named is not None and isinstance(entries.get(named), Mapping):
        unknown += [key for key in entries[named] if key not in inner]
    if unknown:
        names = [*(n for n in arguments if n != named), *inner]
        raise ShapeError(
            f"dynamic_shapes names {', '.join(map(str, unknown))}, but the inputs "
            f"are {', '.join(names)}"
        )
    return entries


def _flat_names(arguments: Mapping[str, Any], more: str | None) -> Iterator[str]:
    for name, value in arguments.items():
        if name == more:
            yield from (f"{name}[{k}]" for k in range(len(value)))
        else:
            yield name


def _is_nested(entry: Any, values: Sequence[Any]) -> bool:
    """Whether it lists the entries of *args, as torch's form does, not dims of one."""
    if entry is None:
        return True
    if not isinstance(entry, tuple | list) or len(entry) != len(values):
        return False
    return all(
        e is None
        or isinstance(e, Mapping | tuple | list)
        or not isinstance(v, torch.Tensor)
        for e, v in zip(entry, values, strict=True)
    )


def _entries(shapes: Sequence[Any]) -> str:
    return f"{len(shapes)} entr{'y' if len(shapes) == 1 else 'ies'}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


# --- one input ------------------------------------------------------------------


def _paired(value: Any, entry: Any, name: str) -> tuple[Any, list[LeafSpec]]:
    """What torch gets for an input, and the dims of its flat parts."""
    leaves: list[LeafSpec] = []
    return _pair(value, entry, name, leaves), leaves


def _pair(value: Any, entry: Any, name: str, leaves: list[LeafSpec]) -> Any:
    kind = pytree._get_node_type(value)
    if isinstance(value, torch.Tensor) or kind not in pytree.SUPPORTED_NODES:
        leaf = _leaf(value, entry, name)
        leaves.append(leaf)
        if isinstance(value, torch.Tensor):
            return {a: d.for_torch for a, d in leaf.dims.items()} or None
        return leaf.dims[-1].for_torch if leaf.dims else None
    node = pytree.SUPPORTED_NODES[kind]
    children, context = node.flatten_fn(value)
    keys = _keys(value, len(children))
    entries = _child_entries(value, entry, keys, name)
    steps = [f"{name}.{k}" if _is_field(value, k) else f"{name}[{k!r}]" for k in keys]
    parts = zip(children, entries, steps, strict=True)
    paired = [_pair(c, e, s, leaves) for c, e, s in parts]
    if kind in pytree.BUILTIN_TYPES:
        return node.unflatten_fn(paired, context)
    return tuple(paired) if isinstance(children, tuple) else paired


def _keys(value: Any, count: int) -> list[Any]:
    """How the children of a container are called."""
    found, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda v: v is not value)
    keys = [path[0] for path, _ in found]
    if len(keys) != count:
        return list(range(count))
    return [
        getattr(k, "key", getattr(k, "name", getattr(k, "idx", i)))
        for i, k in enumerate(keys)
    ]


def _is_field(value: Any, key: Any) -> bool:
    return isinstance(key, str) and not isinstance(value, Mapping)


def _child_entries(value: Any, entry: Any, keys: Sequence[Any], name: str) -> list[Any]:
    if entry is None:
        return [None] * len(keys)
    if type(entry) is type(value) and not isinstance(value, Mapping):
        node = pytree.SUPPORTED_NODES[pytree._get_node_type(value)]
        entry, _ = node.flatten_fn(entry)
    kind = type(value).__name__
    if isinstance(entry, Mapping):
        unknown = [key for key in entry if key not in keys]
        if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
            raise OptionError(
                f"dynamic_shapes: input '{name}' is a {kind} of {len(keys)}: give a "
                f"tuple with an entry for each, not {_shown(entry)}"
            )
        if unknown:
            raise ShapeError(
                f"dynamic_shapes: input '{name}' has no {', '.join(map(repr, unknown))}"
                f"; it has {', '.join(map(repr, keys))}",
                input=name,
            )
        return [entry.get(key) for key in keys]
    if not isinstance(entry, tuple | list):
        raise OptionError(
            f"dynamic_shapes: input '{name}' is a {kind} of {len(keys)}: give an entry "
            f"for each, nested as the input is, not {_shown(entry)}"
        )
    if len(entry) != len(keys):
        raise ShapeError(
            f"dynamic_shapes: input '{name}' is a {kind} of {len(keys)}, but its "
            f"entry has {_entries(entry)}",
            input=name,
            expected=len(keys),
            got=len(entry),
        )
    return list(entry)


def _leaf(value: Any, entry: Any, name: str) -> LeafSpec:
    if entry is None:
        return LeafSpec({}, name)
    if isinstance(value, torch.Tensor):
        return LeafSpec(dict(_tensor_dims(value, entry, name)), name)
    if isinstance(entry, Mapping | tuple | list):
        raise OptionError(
            f"dynamic_shapes: input '{name}' is {described(value)}, which has no "
            f"axes: {_shown(entry)} is the entry of a tensor"
        )
    dim = read_dim(entry, f"input '{name}'")
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and (dim.dynamic or dim.for_torch == value):
        raise OptionError(
            f"dynamic_shapes: input '{name}' is {described(value)}: only axes of "
            "tensors and ints vary; pass a tensor, or None as its entry"
        )
    return LeafSpec({-1: dim}, name)


def described(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _tensor_dims(
    value: torch.Tensor, entry: Any, name: str
) -> Iterator[tuple[int, DimSpec]]:
    rank = value.dim()
    shape = tuple(value.shape)
    if isinstance(entry, Mapping):
        given = list(entry.items())
    elif isinstance(entry, tuple | list):
        if len(entry) != rank:
            raise ShapeError(
                f"dynamic_shapes: input '{name}' has {rank} axes {shape}, but its "
                f"entry has {_entries(entry)}: {_shown(entry)}",
                input=name,
                expected=rank,
                got=len(entry),
            )
        given = list(enumerate(entry))
    else:
        raise OptionError(
            f"dynamic_shapes: input '{name}' is a tensor: give a dict from its axes "
            f"to dims, such as {{0: 'batch'}}, not {_shown(entry)}"
        )
    seen: dict[int, Any] = {}
    for key, dim in given:
        if isinstance(key, bool) or not isinstance(key, int):
            raise OptionError(
                f"dynamic_shapes: input '{name}': {key!r} is no axis; axes are "
                f"numbers, 0 to {rank - 1}"
            )
        if not -rank <= key < rank:
            legal = f"0 to {rank - 1}" if rank else "none"
            raise ShapeError(
                f"dynamic_shapes: input '{name}' has no axis {key}: its shape is "
                f"{shape}, its axes are {legal}",
                input=name,
                dim=key,
                expected=rank,
                got=key,
            )
        axis = key % rank
        if axis in seen:
            raise OptionError(
                f"dynamic_shapes: input '{name}': axis {axis} is given twice, as "
                f"{seen[axis]} and {key}"
            )
        seen[axis] = key
        if dim is not None:
            yield axis, read_dim(dim, f"input '{name}', axis {axis}")
