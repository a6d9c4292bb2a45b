"""The C runtime and its binding: arguments in, memory planned, generated code run."""

from pliant.runtime.binding import (
    BufferSpec,
    InputSpec,
    Model,
    ModelSpec,
    OutputSpec,
    PlanInfo,
    RuntimeStatus,
    Stats,
    Status,
    load,
    symbols,
)

__all__ = [
    "BufferSpec",
    "InputSpec",
    "Model",
    "ModelSpec",
    "OutputSpec",
    "PlanInfo",
    "RuntimeStatus",
    "Stats",
    "Status",
    "load",
    "symbols",
]
