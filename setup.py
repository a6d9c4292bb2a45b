"""Builds the C runtime: one shared library beside the package that binds it.

One of its files makes it a Python extension module as well; it uses the stable ABI, so
one build serves every Python from 3.11 on and the library's name carries no suffix.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = [
    *("arena.c", "arrays.c", "budget.c", "call.c", "chunk.c", "evict.c", "ffi.c"),
    *("image.c", "inputs.c", "order.c", "parts.c", "plan.c", "planner.c", "shape.c"),
    *("plans.c", "python.c", "remat.c", "rt.c", "spill.c", "threads.c", "walk.c"),
    "watch.c",
]
HEADERS = ("rt", "internal", "tensor", "python")
# Kernels that models call.
LIBRARY = (
    *("fft.c", "linalg.c", "locate.c", "running.c", "sample.c", "scatter.c"),
    *("search.c", "sort.c"),
)
LIBRARY_HEADERS = (
    *("fft_real", "keys", "lapack", "library", "linalg_real", "sample_real"),
    "sort_rows",
)


def ffi_include() -> str:
    """Header directory of apache-tvm-ffi, found without importing it."""
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise SystemExit("building pliant needs apache-tvm-ffi for its headers")
    return str(Path(spec.origin).parent / "include")


class BuildRuntime(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def copy_extensions_to_source(self) -> None:
        # writing over a library that a process has mapped would crash that process
        for extension in self.extensions:
            Path(self.get_ext_filename(extension.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "cp311", "abi3", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "pliant.runtime._plt",
            sources=[
                *(f"pliant/runtime/{name}" for name in SOURCES),
                *(f"pliant/library/{name}" for name in LIBRARY),
            ],
            depends=[
                *(f"pliant/runtime/{name}.h" for name in HEADERS),
                *(f"pliant/library/{name}.h" for name in LIBRARY_HEADERS),
            ],
            include_dirs=[ffi_include()],
            extra_compile_args=[
                *("-std=c11", "-O3", "-Wall", "-Wextra", "-Werror"),
                *("-fvisibility=hidden", "-pthread", "-g0"),
            ],
            extra_link_args=["-pthread", "-lm"],
        )
    ],
    cmdclass={"build_ext": BuildRuntime, "bdist_wheel": PlatformWheel},
)
