"""Settings for all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Threads of OpenMP that have nothing to do sleep: those of one worker would otherwise
# spin on the cores that the other worker's tests run on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tests neither read nor write what the user keeps between processes. Those of one run
# share what LLVM made: its workers, and the processes that tests start.
if "PYTEST_XDIST_WORKER" not in os.environ:
    folder = tempfile.mkdtemp(prefix="pliant-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["PLIANT_CACHE"] = folder
