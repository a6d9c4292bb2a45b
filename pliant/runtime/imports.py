"""The functions that generated code may call, by name: all of them are in _plt.so."""

from __future__ import annotations

import ctypes
from typing import cast

from pliant.errors import PliantError
from pliant.runtime.binding import load
from pliant.runtime.lapack import use_lapack

SERVICES = ("plt_parallel", "plt_clock", "plt_special")  # rt.h
KERNELS = (  # library.h
    *("plt_fft", "plt_rfft", "plt_irfft", "plt_sort", "plt_top", "plt_search"),
    *("plt_running_extreme", "plt_running_logsumexp", "plt_scatter_rows"),
    *("plt_overwrite", "plt_locate", "plt_sample", "plt_row_order"),
)
LAPACK_KERNELS = (  # linalg.c
    *("plt_cholesky", "plt_lu", "plt_lu_solve", "plt_triangular_solve", "plt_qr"),
    *("plt_householder", "plt_householder_multiply", "plt_svd"),
    *("plt_singular_values", "plt_eigh", "plt_eigvalsh", "plt_eig", "plt_ldl"),
    *("plt_ldl_solve", "plt_matrix_exp"),
)
_KNOWN = frozenset((*SERVICES, *KERNELS, *LAPACK_KERNELS))


def is_import(name: str) -> bool:
    """Whether code in a file may call a function."""
    return name in _KNOWN


def import_address(name: str) -> int:
    """Where a function is; PliantError if there is none, or LAPACK is missing."""
    if not is_import(name):
        raise PliantError(f"code asks for the function '{name}', which is not offered")
    if name in LAPACK_KERNELS:
        use_lapack()
    function = getattr(load(), name)
    return cast(int, ctypes.cast(function, ctypes.c_void_p).value)
