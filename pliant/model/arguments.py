"""Arguments other than tensors: numbers, and amounts of memory."""

from __future__ import annotations

import re
from numbers import Integral
from typing import TypeGuard

from pliant.errors import OptionError
from pliant.frontend.signature import LARGEST

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9}

_LIMIT = re.compile(
    r"\s*([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})\s*([A-Za-z]*)\s*", re.ASCII
)


def parse_bytes(limit: int | str | None) -> int | None:
    """512, "512MiB", "1.5 GiB", "200MB" in bytes; None stays None.

    An amount beyond 64 bits is cut to the largest, which no call reaches.
    """
    if limit is None:
        return None
    if is_integer(limit):
        if limit < 0:
            raise OptionError(f"a memory limit cannot be negative: {shown(limit)}")
        return min(int(limit), LARGEST)
    match = _LIMIT.fullmatch(limit) if isinstance(limit, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise OptionError(
            f"not a memory limit: {shown(limit)}; use a number of bytes, or a text "
            "with a unit, such as '512MiB': B; KiB, MiB, GiB (1024 each time); KB, MB, "
            "GB (1000 each time)"
        )
    from fractions import Fraction

    return min(int(Fraction(match[1]) * _UNITS[match[2].upper()]), LARGEST)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an int of Python or NumPy, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value for a message; Python refuses to print very long numbers."""
    if is_integer(value) and int(value).bit_length() > 256:
        return f"a number of {int(value).bit_length()} bits"
    return repr(value)
