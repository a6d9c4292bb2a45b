"""Compiling LLVM IR in this process."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path

import pytest

from pliant import target
from pliant.backend.jit import compile_ir
from pliant.errors import InternalError

TWICE = """
define i64 @twice(i64 %x) {
  %y = call i64 @helper(i64 %x)
  ret i64 %y
}
define internal i64 @helper(i64 %x) alwaysinline {
  %y = add i64 %x, %x
  ret i64 %y
}
"""


@pytest.mark.parametrize("name", ["host", "avx2", "baseline"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_compiles_and_runs(name: str, level: int) -> None:
    to = target.named(name)
    if not target.runs_here(to):
        pytest.skip(f"this machine does not run {name}")
    code = compile_ir(TWICE, to, opt_level=level)
    assert (
        ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address("twice"))(4) == 8
    )
    assert "twice:" in code.assembly()


def test_only_external_functions_have_an_address() -> None:
    code = compile_ir(TWICE, target.host(), opt_level=0)
    for name in ("helper", "nobody"):
        with pytest.raises(KeyError, match=name):
            code.address(name)


def test_calls_what_it_is_given() -> None:
    source = "declare i64 @other(i64)\n" + TWICE.replace(
        "@helper(i64 %x)\n  ret", ("@other(i64 %x)\n  ret"), 1
    )
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    other = kind(lambda x: x + 100)
    address = ctypes.cast(other, ctypes.c_void_p).value
    assert address is not None
    code = compile_ir(source, target.host(), {"other": address})
    assert kind(code.address("twice"))(4) == 104
    with pytest.raises(InternalError, match="calls 'other', not given"):
        compile_ir(source, target.host())


def test_freed_with_the_object() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    for round_ in range(60):
        code = compile_ir(TWICE, target.host())
        if round_ == 20:
            before = resident()
    gone = weakref.ref(code)
    del code
    gc.collect()
    assert gone() is None
    assert (resident() - before) * 4 < 2048  # KiB; a leak would be tens per round
