"""The C runtime and its binding: arguments in, memory planned, generated code run."""

from pliant.runtime.binding import RuntimeModel, load, symbols
from pliant.runtime.description import (
    Budgeting,
    BufferSpec,
    InputSpec,
    KnobSpec,
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
    "KnobSpec",
    "ModelSpec",
    "OrderSpec",
    "OutputSpec",
    "PlanInfo",
    "RuntimeModel",
    "RuntimeStatus",
    "Stats",
    "Status",
    "StepSpec",
    "load",
    "symbols",
]
