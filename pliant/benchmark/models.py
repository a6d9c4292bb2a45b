"""Models to measure: from the zoo, from a user's file, from an exported program.

    bert              a function of that name in the zoo (a file zoo.py)
    zoo               every model of the zoo's list ALL
    net.py:build      a function in a file
    net.pt2           what torch.export.save wrote

A function takes nothing and returns an object with the fields of `Case`; `shapes` may
be left out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import pliant
from pliant.errors import OptionError
from pliant.frontend import torch_export

Shape = tuple[int, ...]

# Sizes to measure at, by the names of the dims: one to many, odd and even.
SHAPES: dict[tuple[str, ...], tuple[Shape, ...]] = {
    ("batch", "seq"): (
        *((1, 7), (1, 32), (1, 100), (1, 257)),
        *((2, 64), (4, 37), (8, 128), (1, 500)),
    ),
    ("batch", "patches"): (
        *((1, 4), (1, 7), (1, 14), (1, 20)),
        *((2, 14), (4, 9), (8, 14), (1, 24)),
    ),
    ("batch", "height", "width"): (
        *((1, 96, 80), (1, 160, 160), (1, 224, 224), (1, 321, 251)),
        *((2, 130, 190), (4, 112, 112), (4, 224, 224), (1, 480, 640)),
    ),
    ("batch", "residues"): (
        *((1, 13), (1, 32), (1, 48), (1, 64)),
        *((1, 100), (2, 48), (4, 24), (1, 128)),
    ),
    ("batch", "side", "text"): (
        *((1, 2, 7), (1, 3, 20), (1, 4, 77), (1, 6, 77)),
        *((1, 8, 77), (2, 4, 20), (4, 4, 77), (2, 6, 13)),
    ),
}
FIELDS = ("model", "inputs", "dynamic_shapes", "dims", "example")


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


# Where configurations of transformers say how deep a model is.
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "depths")


def describe(model: torch.nn.Module) -> dict[str, Any]:
    """How deep and large a model is, and whether its weights are random.

    A model of transformers that was loaded knows from where; all others are random.
    """
    configs = [c for m in model.modules() if (c := getattr(m, "config", None))]
    told = (getattr(c, name, None) for c in configs for name in DEPTHS)
    depth = next((d for d in told if d), None)
    if isinstance(depth, int):
        layers = f"{depth} layers"
    elif depth is not None:
        layers = f"{sum(depth)} blocks"
    else:
        lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
        count = max((len(each) for each in lists), default=1)
        layers = f"{count} block{'s' if count > 1 else ''}"
    real = any(getattr(c, "name_or_path", "") for c in configs)
    return {
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": "real" if real else "random",
    }


def few(shapes: Sequence[Shape]) -> list[Shape]:
    """The first, the middle and the last."""
    return list(dict.fromkeys((shapes[0], shapes[len(shapes) // 2], shapes[-1])))


def default_zoo() -> Path | None:
    """PLIANT_ZOO (a folder or file), or the folder shared/zoo beside the checkout."""
    given = os.environ.get("PLIANT_ZOO")
    beside = Path(pliant.__file__).parents[2] / "shared" / "zoo"
    path = Path(given) if given else beside
    path = path / "zoo.py" if path.is_dir() else path
    return path if path.is_file() else None


def expand(names: Sequence[str], zoo: Path | None) -> list[str]:
    """The models asked for, with `zoo` replaced by its members; checks the names."""
    found: list[str] = []
    for name in names:
        if name == "zoo":
            found += [build.__name__ for build in getattr(load_zoo(zoo), "ALL", ())]
        else:
            _check(name, zoo)
            found.append(name)
    return list(dict.fromkeys(found))


def load(name: str, zoo: Path | None) -> Case:
    """Builds a model, with the same weights in every process."""
    torch.manual_seed(0)
    if name.endswith(".pt2"):
        return _exported(Path(name))
    path, _, function = name.rpartition(":")
    module = _import(Path(path)) if path else load_zoo(zoo)
    return _case(name if not path else function, getattr(module, function)())


def _check(name: str, zoo: Path | None) -> None:
    if name.endswith(".pt2"):
        if not Path(name).is_file():
            raise OptionError(f"no such file: {name}")
        return
    path, _, function = name.rpartition(":")
    if path and not Path(path).is_file():
        raise OptionError(f"no such file: {path}")
    module = _import(Path(path)) if path else load_zoo(zoo, name)
    if not callable(getattr(module, function, None)):
        known = [build.__name__ for build in getattr(module, "ALL", ())]
        told = f"; it has {', '.join(known)}" if known else ""
        raise OptionError(f"no function '{function}' in {module.__file__}{told}")


def load_zoo(path: Path | None, wanted: str = "zoo") -> ModuleType:
    """The module with models by name; `wanted` is what it is needed for."""
    if path is None:
        raise OptionError(
            f"cannot look for '{wanted}' in the zoo: there is none; give its file with "
            "--zoo, or a model as file.py:function or file.pt2"
        )
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return _import(path)


def _import(path: Path) -> ModuleType:
    name = f"pliant_benchmark_{path.stem}"
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
    dims, example = tuple(given.dims), tuple(given.example)
    shapes = getattr(given, "shapes", None) or SHAPES.get(dims, (example,))
    return Case(
        name,
        given.model.eval(),
        given.inputs,
        given.dynamic_shapes,
        dims,
        example,
        tuple(tuple(shape) for shape in shapes),
    )


# ---- exported programs


def _exported(path: Path) -> Case:
    """A program knows its inputs' types; integers get the values of its example."""
    program = torch.export.load(path)
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
    values = dim.node.shape_env.var_to_val
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
