"""The C runtime and its binding: arguments in, memory planned, generated code run."""

from pliant.runtime.binding import Model, load, symbols
from pliant.runtime.description import (
    Budgeting,
    BufferSpec,
    InputSpec,
    ModelSpec,
    OrderSpec,
    OutputSpec,
    PlanInfo,
    RuntimeStatus,
    Stats,
    Status,
    StepSpec,
)

__all__ = [
    "Budgeting",
    "BufferSpec",
    "InputSpec",
    "Model",
    "ModelSpec",
    "OrderSpec",
    "OutputSpec",
    "PlanInfo",
    "RuntimeStatus",
    "Stats",
    "Status",
    "StepSpec",
    "load",
    "symbols",
]
