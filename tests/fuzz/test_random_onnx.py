"""Random ONNX models against ONNX Runtime, and damaged files: some of `make fuzz-onnx`
and `make fuzz-onnx-files`, always the same."""

from __future__ import annotations

import pytest
from onnx_catalogue import ENTRIES
from onnx_damage import damaged, judge_damaged
from onnx_judge import judge_onnx
from onnx_random import onnx_model


@pytest.mark.parametrize("start", range(0, 60, 6))
def test_as_onnx_runtime(start: int) -> None:
    for seed in range(start, start + 6):
        made = onnx_model(seed)
        found = judge_onnx(made)
        assert not found.bad, f"seed {seed}: {found}\n{made.script()}"


def test_every_entry_fits_somewhere() -> None:
    """No entry is one that ONNX Runtime always refuses."""
    left = set(ENTRIES)
    for seed in range(8):
        left -= {name for name in sorted(left) if onnx_model(seed, name).nodes}
    assert not left


@pytest.mark.parametrize("start", range(0, 120, 20))
def test_damaged_files(start: int) -> None:
    for seed in range(start, start + 20):
        made = damaged(seed)
        found = judge_damaged(made)
        assert not found.bad, f"{found}\n{made.script()}"
