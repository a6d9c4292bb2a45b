"""LAPACK for pliant/library/linalg.c: OpenBLAS, from the package scipy-openblas32.

The package holds nothing but the library, which is loaded when the first model that
needs it is compiled. It runs on one thread: matrices of a batch are shared among the
threads of a call instead. NumPy and SciPy have copies of their own, whose threads stay
as they are.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pliant.errors import PliantError
from pliant.runtime.binding import load

# PLT_LAPACK_ROUTINES of lapack.h
ROUTINES = (
    *("potrf", "getrf", "trsm", "gemm", "gelqf", "orglq", "ormlq", "gesdd", "syevd"),
    *("geev", "sytrf", "sytrs"),
)
PACKAGE, PREFIX = "scipy_openblas32", "scipy_"


@functools.cache
def use_lapack() -> object:
    """Loads the routines and makes them known to the C library, once.

    PliantError says what to install if they are not there.
    """
    library = _library()
    names = [f"{PREFIX}{kind}{name}_" for kind in "sd" for name in ROUTINES]
    table = (ctypes.c_void_p * len(names))()
    for number, name in enumerate(names):
        table[number] = ctypes.cast(getattr(library, name), ctypes.c_void_p)
    load().plt_use_lapack(table)
    return table, library  # kept for as long as the process runs


def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("lib/libscipy_openblas*.so")):
            with _one_thread():
                return ctypes.CDLL(str(path))
    raise PliantError(
        "linear algebra needs LAPACK, which is not installed: "
        "pip install scipy-openblas32 (or 'pliant[linalg]')"
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """OpenBLAS starts its threads when it is loaded, unless it is told not to."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
