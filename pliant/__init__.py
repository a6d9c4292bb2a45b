"""Pliant compiles a model once into native code that serves every input shape."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pliant.errors import (
    ArtifactError,
    DivisionError,
    DTypeError,
    GradientWarning,
    IndexRangeError,
    InternalError,
    MatrixError,
    MemoryLimitError,
    ModelError,
    OptionError,
    PliantError,
    ShapeError,
    SizeTextWarning,
    SpillError,
    StepChangedError,
    UnsupportedOpError,
    WeightError,
)
from pliant.version import VERSION

if TYPE_CHECKING:
    from pliant.api import compile
    from pliant.growing import Growing
    from pliant.language.model import LanguageModel, load_gguf
    from pliant.loading import load, sign
    from pliant.machine.target import Target
    from pliant.model.budget import MemoryBudget, memory_budget, set_memory_budget
    from pliant.model.compiled import CompiledModel
    from pliant.model.planning import MemoryPlan
    from pliant.options import Instruments, Options
    from pliant.packed import quantize
    from pliant.training.optimizers import SGD, AdamW
    from pliant.training.step import TrainingStep, compile_training

__version__ = VERSION

# Imported when they are first asked for: `load` needs neither LLVM nor torch.
_LATER = {
    "SGD": "pliant.training.optimizers",
    "AdamW": "pliant.training.optimizers",
    "CompiledModel": "pliant.model.compiled",
    "Growing": "pliant.growing",
    "Instruments": "pliant.options",
    "LanguageModel": "pliant.language.model",
    "MemoryBudget": "pliant.model.budget",
    "MemoryPlan": "pliant.model.planning",
    "Options": "pliant.options",
    "Target": "pliant.machine.target",
    "TrainingStep": "pliant.training.step",
    "compile": "pliant.api",
    "compile_training": "pliant.training.step",
    "load": "pliant.loading",
    "load_gguf": "pliant.language.model",
    "memory_budget": "pliant.model.budget",
    "quantize": "pliant.packed",
    "set_memory_budget": "pliant.model.budget",
    "sign": "pliant.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'pliant' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "SGD",
    "AdamW",
    "ArtifactError",
    "CompiledModel",
    "DTypeError",
    "DivisionError",
    "GradientWarning",
    "Growing",
    "IndexRangeError",
    "Instruments",
    "InternalError",
    "LanguageModel",
    "MatrixError",
    "MemoryBudget",
    "MemoryLimitError",
    "MemoryPlan",
    "ModelError",
    "OptionError",
    "Options",
    "PliantError",
    "ShapeError",
    "SizeTextWarning",
    "SpillError",
    "StepChangedError",
    "Target",
    "TrainingStep",
    "UnsupportedOpError",
    "WeightError",
    "compile",
    "compile_training",
    "load",
    "load_gguf",
    "memory_budget",
    "quantize",
    "set_memory_budget",
    "sign",
]
