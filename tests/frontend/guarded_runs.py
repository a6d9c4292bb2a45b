"""Runs of compiled models with guard pages and poisoned memory, for tests of ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pliant.model import parts as model_code


@pytest.fixture(autouse=True)
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imported, it holds for every test of a file."""
    spec = model_code.runtime_spec

    def guarded(*args: Any) -> Any:
        return dataclasses.replace(spec(*args), guard_pages=True, poison=True)

    monkeypatch.setattr(model_code, "runtime_spec", guarded)
    yield


class Call(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: torch.Tensor) -> Any:
        return self.function(*x)
