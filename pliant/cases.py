"""Models by name, each with inputs for any dims: what the commands take.

    net.py:build      a function in a file
    net.pt2           what torch.export.save wrote
    bert              a model of the zoo, in a checkout
    zoo               every model of the zoo

A function takes nothing and returns an object with `model`, `inputs` (a function of
concrete dims), `dynamic_shapes`, `dims` and `example`, as in `Case`. It may have
`shapes`, the dims to measure at, and a `label` for tables.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import pliant
from pliant.errors import ModelError, OptionError
from pliant.frontend import torch_export

Shape = tuple[int, ...]

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
    path, _, function = name.rpartition(":")
    if not path:
        built: Case = _zoo(name).build(name)
        return built
    torch.manual_seed(0)
    return _case(function, getattr(_import(Path(path)), function)())


def sources(name: str) -> list[Path]:
    """The files that say what a model is."""
    path, _, _ = name.rpartition(":")
    if path or name.endswith(".pt2"):
        return [Path(path or name)]
    return sorted((ROOT / "zoo").glob("*.py"))


def _check(name: str) -> None:
    path, _, function = name.rpartition(":")
    if not path and not name.endswith(".pt2"):
        _zoo(name).named(name)
        return
    if not Path(path or name).is_file():
        raise OptionError(f"no such file: {path or name}")
    if path and not callable(getattr(_import(Path(path)), function, None)):
        raise OptionError(f"no function '{function}' in {path}")


def _zoo(wanted: str) -> Any:
    """The package of development models, which stands beside this one in a checkout."""
    if not all((ROOT / file).is_file() for file in ("zoo/table.py", "pyproject.toml")):
        raise OptionError(
            f"no model '{wanted}': the zoo is part of pliant's repository and not of "
            "what is installed; give a model as file.py:function or file.pt2"
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
    spec.loader.exec_module(module)
    return module


def _case(name: str, given: Any) -> Case:
    missing = [field for field in FIELDS if not hasattr(given, field)]
    if missing:
        raise OptionError(f"'{name}' has no {', '.join(missing)}; see --help")
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
