"""The ONNX front end: a file or ModelProto as a program of the compiler.

    import_onnx("model.onnx", None, None)  ->  (Imported(module, signature),)

Symbols are the `dim_param`s of the inputs; a dim without a number or a name gets one.
`dynamic_shapes` overrides that: {input: {axis: name}} makes a dim free, a number fixes
it. With `example_inputs`, what must be known (axes, shapes that are inputs, the size of
a kernel) is fixed to the example's values where the model leaves it open, and every
call must pass these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from pliant.errors import (
    InternalError,
    OptionError,
    PliantError,
    ShapeError,
    UnsupportedOp,
    UnsupportedOpError,
)
from pliant.frontend import onnx_limits
from pliant.frontend.contract import Imported
from pliant.frontend.onnx_context import OnnxContext, Refix
from pliant.frontend.onnx_file import check_types, read_model
from pliant.frontend.onnx_signature import Input, signature
from pliant.frontend.onnx_tensors import checked_size, element_of, reader
from pliant.frontend.onnx_types import Element
from pliant.frontend.onnx_values import Known
from pliant.frontend.onnx_walk import OnnxWalk, live, opsets_of
from pliant.frontend.translate import Location, Unsupported, Untranslated, fresh_symbol
from pliant.ir.build import Builder
from pliant.sym import Expr, as_expr, sym

_UNNAMED = ("?", "None")  # what exporters write for a dim without a name
_FIXED_MOST = 4096  # elements of an input that may be fixed to its example


def import_onnx(
    model: Any, example_inputs: Any, dynamic_shapes: Any
) -> tuple[Imported, ...]:
    proto, folder = read_model(model)
    try:
        source = _Source(proto, folder, example_inputs, dynamic_shapes)
    except Unsupported as problem:
        what = UnsupportedOp("input", str(problem), "the model's inputs")
        raise UnsupportedOpError([what]) from None
    fixed: set[str] = set()
    sizes: dict[str, int] = {}
    while True:
        try:
            return (source.translate(frozenset(fixed), sizes),)
        except Refix as more:
            fixed.update(more.inputs)
            sizes.update({s: source.hints[s] for s in more.symbols})
        except InternalError as error:
            check_types(proto, error)
            raise
        except PliantError:
            raise
        except Exception as error:
            check_types(proto, error)
            detail = f"{type(error).__name__}: {error}"
            raise InternalError("import", detail) from error


@dataclass(frozen=True, slots=True)
class _Argument:
    """An input of the model, as the file and the caller describe it."""

    name: str
    element: Element
    dims: tuple[Expr, ...] | None  # None: a sequence
    example: Any = None
    items: tuple[_Argument, ...] = ()
    optional: bool = False


class _Source:
    """A model with what the caller said about its inputs."""

    def __init__(
        self,
        model: onnx.ModelProto,
        folder: str | None,
        example_inputs: Any,
        dynamic_shapes: Any,
    ) -> None:
        self.model, self.graph = model, model.graph
        self.read = reader(folder)
        constants = {t.name for t in self.graph.initializer}
        constants.update(s.values.name for s in self.graph.sparse_initializer)
        self.inputs = [i for i in self.graph.input if i.name not in constants]
        names = [i.name for i in self.inputs]
        self.examples = _by_name(example_inputs, names)
        self.overrides = _overrides(dynamic_shapes, names, self.inputs)
        self.hints: dict[str, int] = {}
        self.taken: set[str] = set()
        self.spelling: dict[str, Expr] = {}
        self._reserve()
        self.arguments = [self._argument(i) for i in self.inputs]

    # ---- inputs

    def _reserve(self) -> None:
        """Names of the file's dims and of the caller's, before numbered ones."""
        for proto in self.inputs:
            for dim in proto.type.tensor_type.shape.dim:
                if dim.dim_param and dim.dim_param not in _UNNAMED:
                    self._symbol(dim.dim_param)
        for dims in self.overrides.values():
            for name in dims.values():
                if isinstance(name, str):
                    self._symbol(name)

    def _symbol(self, name: str) -> Expr:
        if name not in self.spelling:
            plain = re.sub(r"\W+", "_", name).strip("_") or "dim"
            plain = plain if not plain[0].isdigit() else f"dim_{plain}"
            unique, number = plain, 1
            while unique in self.taken:
                number += 1
                unique = f"{plain}_{number}"
            self.taken.add(unique)
            self.spelling[name] = sym(unique)
        return self.spelling[name]

    def _argument(self, proto: onnx.ValueInfoProto) -> _Argument:
        kind, name = proto.type, proto.name
        example, optional = self.examples.get(name), False
        if kind.WhichOneof("value") == "optional_type":
            kind, optional = kind.optional_type.elem_type, True
        which = kind.WhichOneof("value")
        if which == "sequence_type":
            return self._sequence(name, kind.sequence_type.elem_type, example, optional)
        if which != "tensor_type":
            raise Unsupported(f"input '{name}' is no tensor: {which}")
        return self._tensor(name, kind.tensor_type, example, optional)

    def _sequence(
        self, name: str, kind: onnx.TypeProto, example: Any, optional: bool
    ) -> _Argument:
        if kind.WhichOneof("value") != "tensor_type":
            raise Unsupported(f"input '{name}' is a sequence of sequences")
        element = element_of(kind.tensor_type.elem_type, name)
        if not isinstance(example, list | tuple):
            if optional and name in self.examples:
                return _Argument(name, element, None, None, (), True)
            raise Unsupported(
                f"input '{name}' is a sequence of unknown length: give example_inputs"
            )
        items = tuple(
            self._tensor(f"{name}_{k}", _unnamed(kind.tensor_type), each, False)
            for k, each in enumerate(example)
        )
        return _Argument(name, element, None, example, items, optional)

    def _tensor(
        self, name: str, kind: onnx.TypeProto.Tensor, example: Any, optional: bool
    ) -> _Argument:
        element = element_of(kind.elem_type, name)
        if optional and example is None and name in self.examples:
            return _Argument(name, element, None, None, (), True)
        shape = None if example is None else tuple(map(int, np.shape(example)))
        if not kind.HasField("shape") and shape is None:
            raise Unsupported(
                f"input '{name}' has an unknown rank: give example_inputs"
            )
        override = self.overrides.get(name, {})
        dims: list[Expr] = []
        protos = (
            list(kind.shape.dim)
            if kind.HasField("shape")
            else [None] * len(shape or ())
        )
        if shape is not None and len(shape) != len(protos):
            raise ShapeError(
                f"the example of '{name}' has {len(shape)} dims, the model's input "
                f"{len(protos)}",
                input=name,
                expected=len(protos),
                got=len(shape),
            )
        for axis, dim in enumerate(protos):
            dims.append(self._dim(name, axis, dim, override, shape))
        checked_size([d.value if d.is_const else 1 for d in dims], name)
        return _Argument(name, element, tuple(dims), example, (), optional)

    def _dim(
        self, name: str, axis: int, dim: Any, override: Mapping[int, Any], shape: Any
    ) -> Expr:
        said = override.get(axis)
        size = as_expr(0)
        if isinstance(said, int):
            size = as_expr(said)
        elif isinstance(said, str):
            size = self._symbol(said)
        elif said is True or dim is None:
            size = fresh_symbol(self.taken)
        elif dim.HasField("dim_value") and dim.dim_value >= 0:
            size = as_expr(int(dim.dim_value))
        elif dim.dim_param and dim.dim_param not in _UNNAMED:
            size = self._symbol(dim.dim_param)
        else:
            size = fresh_symbol(self.taken)
        if shape is not None:
            if size.is_const and size.value != shape[axis]:
                raise ShapeError(
                    f"the example of '{name}' has {shape[axis]} at dim {axis}, "
                    f"the model {size}",
                    input=name,
                    dim=axis,
                    expected=size.value,
                    got=shape[axis],
                )
            if size.symbol is not None:
                self.hints.setdefault(size.symbol, shape[axis])
        return size

    # ---- the program

    def translate(self, fixed: frozenset[str], sizes: Mapping[str, int]) -> Imported:
        builder = Builder()
        builder.most_ops = onnx_limits.OPS
        cx = OnnxContext(builder, self.hints)
        cx.fixed = fixed
        cx.examples = frozenset(a.name for a in self._all() if _small(a))
        opsets = opsets_of(self.model.opset_import)
        functions = {(f.domain, f.name): f for f in self.model.functions}
        walk = OnnxWalk(cx, opsets, functions, self.read)
        known = {name: as_expr(value) for name, value in sizes.items()}
        given = [self._given(cx, a, fixed, known) for a in self.arguments]
        for argument, made in zip(self.arguments, given, strict=True):
            walk.env[argument.name] = made.entry
            walk.sources[argument.name] = frozenset({argument.name})
        cx.attempt(
            "initializers",
            Location("", "the model's constants"),
            lambda: walk.load(self.graph),
            lambda reason: _noted(cx, reason),
        )
        results = [o.name for o in self.graph.output]
        walk.run(live(self.graph.node, results), results)
        found = [walk.result(name) for name in results]
        entries = [e for e in found if not isinstance(e, Untranslated)]
        return signature(cx, given, results, entries)

    def _all(self) -> list[_Argument]:
        return [b for a in self.arguments for b in (a, *a.items)]

    def _given(
        self,
        cx: OnnxContext,
        argument: _Argument,
        fixed: frozenset[str],
        sizes: Mapping[str, Expr],
    ) -> Input:
        """The input's entry, and how a call passes it."""
        if argument.dims is None:
            return Input.of_items(
                argument.name,
                argument.element,
                None
                if argument.example is None
                else [self._given(cx, a, fixed, sizes) for a in argument.items],
            )
        if argument.name in fixed:
            array = np.asarray(argument.example).astype(argument.element.numpy)
            return Input.fixed(argument.name, Known(array, argument.element), array)
        dims = tuple(d.substitute(sizes) for d in argument.dims)
        return Input.tensor(cx, argument.name, argument.element, dims)


def _unnamed(kind: onnx.TypeProto.Tensor) -> onnx.TypeProto.Tensor:
    """The type of one item of a sequence: its sizes are not those of the others."""
    own = onnx.TypeProto.Tensor()
    own.CopyFrom(kind)
    for dim in own.shape.dim:
        dim.ClearField("dim_param")
    return own


def _noted(cx: OnnxContext, reason: str) -> None:
    cx.note("initializer", reason, Location("", "the model's constants"))


def _small(argument: _Argument) -> bool:
    if argument.example is None or argument.dims is None:
        return False
    return np.size(np.asarray(argument.example)) <= _FIXED_MOST


# ---- what the caller says


def _by_name(examples: Any, names: Sequence[str]) -> dict[str, Any]:
    if examples is None:
        return {}
    if isinstance(examples, Mapping):
        unknown = sorted(set(examples) - set(names))
        if unknown:
            raise OptionError(
                f"example_inputs has {', '.join(unknown)}; the model's inputs are "
                f"{', '.join(names)}"
            )
        return dict(examples)
    if not isinstance(examples, tuple | list) or len(examples) > len(names):
        raise OptionError(
            f"example_inputs must be a tuple of at most {len(names)} tensors "
            f"({', '.join(names)}), or a dict of them by name"
        )
    return dict(zip(names, examples, strict=False))


def _overrides(
    spec: Any, names: Sequence[str], inputs: Sequence[onnx.ValueInfoProto]
) -> dict[str, dict[int, Any]]:
    """{input: {axis: name, number, or True for a name of its own}}"""
    if spec is None:
        return {}
    if isinstance(spec, tuple | list):
        if len(spec) > len(names):
            raise OptionError(
                f"dynamic_shapes has {len(spec)} entries for {len(names)} inputs"
            )
        spec = dict(zip(names, spec, strict=False))
    if not isinstance(spec, Mapping):
        raise OptionError("dynamic_shapes must be a dict by input, or a tuple")
    unknown = sorted(str(n) for n in spec if n not in names)
    if unknown:
        raise OptionError(
            f"dynamic_shapes has {', '.join(unknown)}; the model's inputs are "
            f"{', '.join(names)}"
        )
    ranks = {i.name: len(i.type.tensor_type.shape.dim) for i in inputs}
    out: dict[str, dict[int, Any]] = {}
    for name, dims in spec.items():
        if dims is None:
            continue
        pairs = dims.items() if isinstance(dims, Mapping) else enumerate(dims)
        out[name] = {}
        for axis, said in pairs:
            rank = ranks[name]
            if not isinstance(axis, int) or (rank and not -rank <= axis < rank):
                raise OptionError(f"dynamic_shapes: '{name}' has no dim {axis!r}")
            meant = _meaning(said, name)
            if meant is not None:
                out[name][axis % rank if rank else axis] = meant
    return out


def _meaning(said: Any, name: str) -> Any:
    """A name, a number, True for a size without a name; None: as the model says."""
    if said is None or isinstance(said, str) or said is True:
        return said
    if isinstance(said, int) and not isinstance(said, bool) and said >= 0:
        return said
    label = getattr(said, "__name__", None)  # torch.export's Dim
    if isinstance(label, str):
        return label
    torch_hint = type(said).__name__
    if torch_hint == "_DimHint":
        return None if "STATIC" in str(said) else True
    raise OptionError(
        f"dynamic_shapes of '{name}': {said!r} is no name, number, True or None"
    )
