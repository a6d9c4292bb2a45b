"""Settings for all tests."""

from __future__ import annotations

import os

# Tests neither read nor write what the user keeps between processes.
os.environ["PLIANT_CACHE"] = "off"
