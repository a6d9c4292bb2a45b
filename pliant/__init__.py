"""Pliant compiles a model once into native code that serves every input shape."""

from pliant.api import compile
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
from pliant.machine.target import Target
from pliant.model.budget import MemoryBudget, memory_budget, set_memory_budget
from pliant.model.compiled import CompiledModel
from pliant.model.planning import MemoryPlan
from pliant.options import Instruments, Options
from pliant.training.optimizers import SGD, AdamW
from pliant.training.step import TrainingStep, compile_training

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdamW",
    "ArtifactError",
    "CompiledModel",
    "DTypeError",
    "DivisionError",
    "GradientWarning",
    "IndexRangeError",
    "Instruments",
    "InternalError",
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
    "memory_budget",
    "set_memory_budget",
]
