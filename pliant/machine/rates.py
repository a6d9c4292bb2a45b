"""Rates of a typical machine: what is assumed where nothing was measured."""

from __future__ import annotations

ASSUMED_FLOPS = 50e9  # floating-point operations of one thread per second
ASSUMED_BYTES = 10e9  # bytes read from memory per second
CALL_SECONDS = 5e-7  # what a kernel's call takes besides its work
