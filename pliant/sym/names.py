"""Names that a dim cannot have."""

from __future__ import annotations

# Names that kernels give variables of their own, or that a memory plan is asked with.
RESERVED = frozenset({"threads", "worker", "memory_limit"})


def is_name(name: object) -> bool:
    """Whether a dim can have this name."""
    if not isinstance(name, str) or not name.isascii():
        return False
    return name.isidentifier() and not is_reserved(name)


def is_reserved(name: str) -> bool:
    """Whether a dim cannot have this name."""
    return name.startswith("_") or name in RESERVED
