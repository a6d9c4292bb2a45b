"""Settings for all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Tests neither read nor write what the user keeps between processes. Those of one run
# share what LLVM made: its workers, and the processes that tests start.
if "PYTEST_XDIST_WORKER" not in os.environ:
    folder = tempfile.mkdtemp(prefix="pliant-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["PLIANT_CACHE"] = folder
