"""Settings for all tests."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest

# The files that take longest, which start first: what is left at the end, when one
# worker may have nothing more to do, is short.
LONGEST = (
    "training/test_conv_gradients.py",
    "training/test_gradients.py",
    "passes/test_growth.py",
    "tests/test_stages.py",
    "training/test_memory_of_steps.py",
    "training/test_steps.py",
    "kernels/test_gemm_exhaustive.py",
    "e2e/test_torch_compile.py",
    "frontend/test_native_ops.py",
    "e2e/test_zoo.py",
    "kernels/test_attention_backward.py",
    "kernels/test_gemm.py",
    "e2e/test_soak.py",
    "tests/test_dynamo.py",
    "kernels/test_conv.py",
    "frontend/test_torch_zoo.py",
    "fuzz/test_random_graphs.py",
    "commands/test_benchmark.py",
)

# Threads of OpenMP that have nothing to do sleep: those of one worker would otherwise
# spin on the cores that the other worker's tests run on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# With PLIANT_TARGET the tests run as if the machine had no more than that target
# (machines.py). So do torch and NumPy, which tell what results should be: they have
# other kernels for a machine with shorter vectors. By floats of a vector, and before
# either is loaded:
OTHERS = {
    8: {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    4: {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
}


def lanes_of(target: str) -> int:
    if not target.endswith(".json"):
        return {"avx2": 8, "baseline": 4}.get(target, 16)
    told = json.loads(Path(target).read_text())
    return int(told.get("target", told)["lanes"])


lanes = lanes_of(os.environ.get("PLIANT_TARGET", ""))
for variable, value in OTHERS.get(lanes, {}).items():
    os.environ.setdefault(variable, value)
if "PLIANT_TARGET" in os.environ:
    import machines

    machines.hide_features()

# Tests neither read nor write what the user keeps between processes. Those of one run
# share what LLVM made: its workers, and the processes that tests start.
if "PYTEST_XDIST_WORKER" not in os.environ:
    folder = tempfile.mkdtemp(prefix="pliant-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["PLIANT_CACHE"] = folder
# Every test compiles its models itself; those of the cache of programs turn it on.
os.environ.setdefault("PLIANT_CACHE_PROGRAMS", "0")


# What is drawn at random is the same in every run, whichever tests run and in whatever
# order: when a file is imported, when a fixture is made, and in a test.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


def seed() -> None:
    import numpy as np  # these read the variables above when they are loaded
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):
        seed()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accept",
        action="store_true",
        help="write what stages print into the tests that expect another text",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--accept"):
        os.environ["EXPECTTEST_ACCEPT"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get("/".join(item.path.parts[-2:]), len(ranks)))
