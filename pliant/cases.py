"""Models by name, each with inputs for any dims: what the commands take.

    net.py            a file with `model`, `inputs` and `dynamic_shapes`
    net.py:build      a function in a file
    net.pt2           what torch.export.save wrote
    bert              a model of the zoo, in a checkout
    zoo               every model of the zoo

`inputs` are an example: the tuple or dict that `pliant.compile` is given. A function
takes nothing and returns the three; a file without them is asked for its `build`.
Inputs for other dims have the example's values, drawn at random.

Or the function returns an object with `model`, `inputs` (a function of concrete dims),
`dynamic_shapes`, `dims` and `example`, as in `Case`. It may have `shapes`, the dims to
measure at, and a `label` for tables.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

import pliant
from pliant.errors import ModelError, OptionError, PliantError
from pliant.frontend import torch_export
from pliant.frontend.torch_spec import LeafSpec, read_spec
from pliant.sym import Expr

Shape = tuple[int, ...]

THREE = ("model", "inputs", "dynamic_shapes")
EXPECTED = (
    "expected `model`, `inputs` (a tuple of example tensors) and `dynamic_shapes` at "
    "the top of file.py, or a function that returns the three, as file.py:function"
)
SHORT = 32  # sizes of an example up to here say nothing of those in use
BUILD = "build"  # the function of a file that has no `model` at its top
FIELDS = ("model", "inputs", "dynamic_shapes", "dims", "example")
ROOT = Path(pliant.__file__).parents[1]  # of the checkout, if this is one


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its inputs for concrete dims, and what torch.export is told of them."""

    name: str
    model: torch.nn.Module
    inputs: Callable[..., tuple[torch.Tensor, ...]]  # concrete dims -> inputs
    dynamic_shapes: Any
    dims: tuple[str, ...]
    example: Shape  # dims to export with
    shapes: tuple[Shape, ...]  # dims to measure at
    program: torch.export.ExportedProgram | None = None
    label: str = ""
    guessed: bool = False  # nobody said which shapes to measure at

    def about(self) -> str:
        """What a table says of the model beside its name."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        size = f"{count / 1e6:.1f} M parameters"
        return f"{self.label}, {size}" if self.label else size

    def compile(self, **how: Any) -> pliant.CompiledModel:
        if self.program is not None:
            return pliant.compile(self.program, **how)
        return pliant.compile(
            self.model, self.inputs(*self.example), self.dynamic_shapes, **how
        )

    def export(self) -> torch.export.ExportedProgram:
        if self.program is not None:
            return self.program
        program, _ = torch_export.export_module(
            self.model, self.at(self.example), self.dynamic_shapes
        )
        return program

    def at(self, shape: Shape) -> tuple[torch.Tensor, ...]:
        """The inputs for these dims, the same ones in every process."""
        torch.manual_seed(hash(shape) & 0xFFFF)
        return tuple(self.inputs(*shape))


def few(shapes: Sequence[Shape]) -> list[Shape]:
    """The first, the middle and the last."""
    return list(dict.fromkeys((shapes[0], shapes[len(shapes) // 2], shapes[-1])))


def expand(names: Sequence[str]) -> list[str]:
    """The models asked for, with `zoo` replaced by its members; checks the names."""
    found: list[str] = []
    for name in names:
        if name == "zoo":
            found += _zoo(name).MODELS
        else:
            _check(name)
            found.append(name)
    return list(dict.fromkeys(found))


def load(name: str) -> Case:
    """Builds a model, with the same weights in every process."""
    _check(name)
    if name.endswith(".pt2"):
        return _exported(Path(name))
    path, function = _parts(name)
    if not path:
        built: Case = _zoo(name).build(name)
        return built
    torch.manual_seed(0)
    file = _import(Path(path))
    if not function and hasattr(file, "model"):
        return _case(Path(path).name, file)
    build = getattr(file, function or BUILD, None)
    if not callable(build):
        return _case(Path(path).name, file)
    with _told_by_line(path):
        given = build()
    return _case(function or Path(path).name, given)


@contextmanager
def _told_by_line(path: str) -> Iterator[None]:
    """What a user's file raises is told with the last line of it that ran."""
    try:
        yield
    except PliantError:
        raise
    except Exception as problem:
        frames = traceback.extract_tb(problem.__traceback__)
        line = [0, *(f.lineno for f in frames if f.filename == path)][-1]
        said: object = problem
        if isinstance(problem, SyntaxError):
            line, said = problem.lineno, problem.msg
        where = f"{path}:{line}" if line else path
        raise OptionError(f"{where}: {type(problem).__name__}: {said}") from problem


def sources(name: str) -> list[Path]:
    """The files that say what a model is."""
    path, _ = _parts(name)
    if path or name.endswith(".pt2"):
        return [Path(path or name)]
    return sorted((ROOT / "zoo").glob("*.py"))


def _parts(name: str) -> tuple[str, str]:
    """A Python file and the name of a function in it; the first is empty if none."""
    if name.endswith(".py"):
        return name, ""
    path, colon, function = name.rpartition(":")
    return (path, function) if colon else ("", "")


def _check(name: str) -> None:
    path, function = _parts(name)
    if not path and not name.endswith(".pt2"):
        _zoo(name).named(name)
        return
    if not Path(path or name).is_file():
        raise OptionError(f"no such file: {path or name}")
    if function and not callable(getattr(_import(Path(path)), function, None)):
        raise OptionError(f"no function '{function}' in {path}")


def _zoo(wanted: str) -> Any:
    """The package of development models, which stands beside this one in a checkout."""
    if not all((ROOT / file).is_file() for file in ("zoo/table.py", "pyproject.toml")):
        raise OptionError(
            f"no model '{wanted}': the zoo is part of pliant's repository and not of "
            "what is installed; give a model as file.py, file.py:function or file.pt2"
        )
    if str(ROOT) not in sys.path:  # an editable install finds this package alone
        sys.path.append(str(ROOT))
    return importlib.import_module("zoo")


def _import(path: Path) -> ModuleType:
    name = f"pliant_case_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        with _told_by_line(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _case(name: str, given: Any) -> Case:
    """What a file or a function in it has given."""
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        return _of_example(name, *given)
    if all(hasattr(given, field) for field in THREE) and not callable(given.inputs):
        return _of_example(name, *(getattr(given, field) for field in THREE))
    if isinstance(given, ModuleType) and hasattr(given, "model"):
        missing = [field for field in THREE if not hasattr(given, field)]
        raise OptionError(f"{name} has no {' and no '.join(missing)}; {EXPECTED}")
    if any(not hasattr(given, field) for field in FIELDS):
        what = "" if isinstance(given, ModuleType) else f" ({type(given).__name__})"
        raise OptionError(f"{name}{what} has no model; {EXPECTED}")
    example = tuple(given.example)
    shapes = getattr(given, "shapes", None) or (example,)
    return Case(
        name,
        given.model.eval(),
        given.inputs,
        given.dynamic_shapes,
        tuple(given.dims),
        example,
        tuple(tuple(shape) for shape in shapes),
        label=getattr(given, "label", ""),
    )


# ---- an example, and which of its axes vary


def _of_example(name: str, model: Any, inputs: Any, dynamic_shapes: Any = None) -> Case:
    """A case from what `pliant.compile` takes."""
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"{name}: model is a {type(model).__name__}, not an nn.Module; {EXPECTED}"
        )
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping):
        inputs, dynamic_shapes = _by_position(model, inputs, dynamic_shapes)
    inputs = tuple(inputs)
    leaves = read_spec(model, inputs, {}, dynamic_shapes).leaves
    values, structure = pytree.tree_flatten(inputs)
    sizes = _sizes_of(leaves, values)

    def make(*given: int) -> tuple[Any, ...]:
        env = dict(zip(sizes, given, strict=True))
        made = [
            _as_example(v, leaf, env) for v, leaf in zip(values, leaves, strict=True)
        ]
        return tuple(pytree.tree_unflatten(made, structure))

    example = tuple(sizes.values())
    return Case(
        name,
        model.eval(),
        make,
        dynamic_shapes,
        tuple(sizes),
        example,
        _shapes(leaves, sizes),
        guessed=True,
    )


def _by_position(
    model: torch.nn.Module, inputs: Mapping[str, Any], dynamic_shapes: Any
) -> tuple[tuple[Any, ...], Any]:
    """Inputs by name, and their entries, as the positions of `forward` have them."""
    parameters = inspect.signature(model.forward).parameters
    places = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if apart := [name for name in inputs if name not in places]:
        raise OptionError(
            f"the model takes {', '.join(apart)} by name alone: give it inside of a "
            "module whose forward takes it by position"
        )
    used = places[: 1 + max(map(places.index, inputs), default=-1)]
    values = tuple(inputs.get(name, parameters[name].default) for name in used)
    if isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = tuple(dynamic_shapes.get(name) for name in used)
    return values, dynamic_shapes


def _sizes_of(leaves: Sequence[LeafSpec], values: Sequence[Any]) -> dict[str, int]:
    """What each named dim is in the example."""
    found: dict[str, int] = {}
    for leaf, value in zip(leaves, values, strict=True):
        for axis, expr in _named(leaf).items():
            size = value if axis < 0 else value.shape[axis]
            for name in expr.symbols():
                start, slope = _line(expr, name)
                found.setdefault(name, (size - start) // slope)
    return found


def _line(expr: Expr, name: str) -> tuple[int, int]:
    """Its value at 0, and its slope: declared dims are like 2*half + 1."""
    at = [expr.evaluate({**dict.fromkeys(expr.symbols(), 0), name: k}) for k in (0, 1)]
    return at[0], at[1] - at[0]


def _named(leaf: LeafSpec) -> dict[int, Expr]:
    """Its axes that have a name. The others keep the example's size."""
    return {a: dim.expr for a, dim in leaf.dims.items() if dim.expr is not None}


def _as_example(value: Any, leaf: LeafSpec, sizes: Mapping[str, int]) -> Any:
    """An input like the example's, at other sizes, with values of the example."""
    known = {axis: expr.evaluate(sizes) for axis, expr in _named(leaf).items()}
    if not isinstance(value, torch.Tensor):
        return known.get(-1, value)
    shape = [known.get(axis, size) for axis, size in enumerate(value.shape)]
    if not value.numel():
        return value.new_zeros(shape)
    picks = torch.randint(0, value.numel(), shape)
    return value.detach().reshape(-1)[picks]


def _shapes(leaves: Sequence[LeafSpec], sizes: Mapping[str, int]) -> tuple[Shape, ...]:
    """Dims to measure at: longer inputs one at a time, then several of them.

    Multiples of the example's sizes, since a model may ask for multiples of something.
    """
    first = {n for leaf in leaves for n in _names(leaf, 0)}
    if first == set(sizes):
        first = set(list(sizes)[:1])
    rest = [name for name in sizes if name not in first]
    steps = [(1, 1), (8, 1), (64, 1)]  # how many inputs, how much longer
    if rest and all(sizes[name] <= SHORT for name in rest):
        steps = [(1, 1), (1, 4), (1, 16), (8, 4)]
    elif rest:
        steps = [(1, 1), (1, 2), (1, 4), (8, 1)]
    most = {name: _most(leaves, name) for name in sizes}
    found: list[Shape] = []
    for count, factor in steps:
        at = {name: size * factor for name, size in sizes.items()}
        at |= dict.fromkeys(first, count)
        found.append(tuple(min(at[name], most[name]) for name in sizes))
    return tuple(dict.fromkeys(found))


def _names(leaf: LeafSpec, axis: int) -> tuple[str, ...]:
    expr = _named(leaf).get(axis)
    return () if expr is None else tuple(expr.symbols())


def _most(leaves: Sequence[LeafSpec], name: str) -> int:
    """The largest size of a dim that is declared."""
    tops = [
        (dim.high - start) // slope
        for leaf in leaves
        for dim in leaf.dims.values()
        if dim.high is not None and dim.expr is not None
        for start, slope in [_line(dim.expr, name)]
        if slope
    ]
    return min(tops, default=1 << 62)


# ---- exported programs


def _program(path: Path) -> torch.export.ExportedProgram:
    """torch logs why it cannot read a file, with a stack, and then raises."""
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return torch.export.load(path)
    except Exception as error:
        raise ModelError(
            f"{path} is no program that torch.export.save wrote: {error}"
        ) from error
    finally:
        log.setLevel(level)


def _exported(path: Path) -> Case:
    """A program knows its inputs' types; integers get the values of its example."""
    program = _program(path)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    wanted = set(program.graph_signature.user_inputs)
    inputs = [node.meta["val"] for node in nodes if node.name in wanted]
    symbols: dict[Any, int] = {}
    for value in inputs:
        for dim in value.shape:
            if isinstance(dim, torch.SymInt):
                for symbol in sorted(dim.node.expr.free_symbols, key=str):
                    symbols.setdefault(symbol, int(_hint(dim, symbol)))
    given = program.example_inputs
    examples = [None] * len(inputs) if given is None else list(given[0])

    def make(*sizes: int) -> tuple[torch.Tensor, ...]:
        values = dict(zip(symbols, sizes, strict=True))
        return tuple(
            _random(value, [_size(d, values) for d in value.shape], example)
            for value, example in zip(inputs, examples, strict=True)
        )

    dims, example = tuple(map(str, symbols)), tuple(symbols.values())
    scaled = tuple(tuple(factor * d for d in example) for factor in (1, 2, 4, 8))
    return Case(
        path.stem,
        program.module(),
        make,
        None,
        dims,
        example,
        scaled if dims else ((),),
        program,
    )


def _hint(dim: torch.SymInt, symbol: Any) -> int:
    """The size that a symbol had when the program was exported."""
    values = dim.node.shape_env.backed_var_to_val
    return int(values.get(symbol, 2))


def _size(dim: Any, values: dict[Any, int]) -> int:
    if isinstance(dim, torch.SymInt):
        return int(dim.node.expr.subs(values))
    return int(dim)


def _random(like: Any, shape: list[int], example: Any) -> torch.Tensor:
    if like.is_floating_point():
        return torch.randn(shape, dtype=like.dtype)
    if isinstance(example, torch.Tensor) and example.numel():
        picks = torch.randint(0, example.numel(), shape)
        return example.reshape(-1)[picks]
    return torch.zeros(shape, dtype=like.dtype)
