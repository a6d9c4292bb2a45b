"""Every OpInfo of torch.testing, with its own samples in f32.

Entries without f32 take the first dtype they have that Pliant knows. Of an entry's
samples, `SAMPLES` are tried, spread over those that have elements: the judge tries
sizes of 0 itself. The worst verdict counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bench.coverage.judge import WORST, Call, Verdict, judge

SAMPLES = 2
DTYPES = (
    *(torch.float32, torch.int64, torch.bool, torch.float64),
    torch.complex64,
)


@functools.cache
def entries() -> dict[str, Any]:
    from torch.testing._internal import common_methods_invocations as infos

    # Entries of random ops set a seed in every call; here, seeds are the judge's.
    vars(infos)["wrapper_set_seed"] = _unseeded
    found: dict[str, Any] = {}
    for info in infos.op_db:
        variant = f".{info.variant_test_name}" if info.variant_test_name else ""
        found[f"{info.name}{variant}"] = info
    return found


def _unseeded(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# Entries whose results are unique up to signs or phases: torch's own tests compare
# what a sample's output_process_fn_grad makes of them.
UP_TO_SIGNS = frozenset(
    {"linalg.eigh", "linalg.eig", "linalg.svd", "svd", "svd_lowrank", "pca_lowrank"}
)


def names() -> list[str]:
    return list(entries())


def evaluate(name: str) -> Verdict:
    info = entries()[name]
    dtype = next((d for d in DTYPES if d in info.dtypes), None)
    if not info.dtypes:
        return Verdict("eager_cannot", "it does not run on the CPU")
    if dtype is None:
        return Verdict("unsupported", "it has no dtype that Pliant has")
    torch.manual_seed(0)
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=False))
    samples = [sample for sample in samples if _elements(sample)] or samples
    count = min(SAMPLES, len(samples))
    worst = Verdict("eager_cannot", "it has no samples")
    for i in range(count):
        sample = samples[i * (len(samples) - 1) // max(count - 1, 1)]
        op = info.op
        if name in UP_TO_SIGNS:
            op = _then(op, sample.output_process_fn_grad)
        call = Call(op, (sample.input, *sample.args), sample.kwargs)
        verdict = judge(call, call.tensors)
        if WORST.index(verdict.kind) < WORST.index(worst.kind):
            worst = verdict
        if worst.kind in ("wrong", "internal", "unsupported"):
            break
    return worst


def _then(op: Callable[..., Any], process: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: process(op(*args, **kwargs))


def _elements(sample: Any) -> bool:
    tensors = torch.utils._pytree.tree_leaves((sample.input, sample.args))
    return all(x.numel() for x in tensors if isinstance(x, torch.Tensor))
