"""Compiling LLVM IR in this process."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import pytest

from pliant.backend import objects
from pliant.backend.jit import CompiledCode, assembly, compile_ir
from pliant.backend.objects import object_code, optimised
from pliant.errors import InternalError
from pliant.machine import target

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


# Pages that many objects of code left behind, in a process that does nothing else.
LEFT = """
import gc, sys, weakref
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_jit

def rounds(count):
    for _ in range(count):
        code = make()
    gone = weakref.ref(code)
    del code
    gc.collect()
    assert gone() is None
    return int(Path("/proc/self/statm").read_text().split()[1])

make = getattr(test_jit, sys.argv[2])()
before = rounds(60)
print(rounds(120) - before)
"""


def compiling() -> Callable[[], CompiledCode]:
    return lambda: compile_ir(TWICE, target.host())


def linking() -> Callable[[], CompiledCode]:
    images = [image(CALLER, "square"), image(CALLEE)]
    return lambda: linked(*images)


@pytest.mark.parametrize("make", [compiling, linking], ids=lambda f: f.__name__)
def test_freed_with_the_object(make: Callable[[], object]) -> None:
    arguments = [str(Path(__file__).parent), make.__name__]
    child = subprocess.run(
        [sys.executable, "-c", LEFT, *arguments], capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    kib = int(child.stdout) * os.sysconf("SC_PAGE_SIZE") // 1024
    assert kib < 1200  # ten a round: an object of code takes more


def test_every_run_has_a_pass_builder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What runs leave behind in a builder makes each run with it slower."""
    make = llvm.create_pass_builder
    made: list[Any] = []

    def counted(*arguments: Any) -> Any:
        made.append(make(*arguments))
        return made[-1]

    optimised(TWICE, target.host(), 2)  # the pipeline itself is made once
    monkeypatch.setattr(llvm, "create_pass_builder", counted)
    for count in (1, 2, 3):
        optimised(TWICE, target.host(), 2)
        assert len(made) == 2 * count  # the module's, and its function's


def test_threads_compile_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a context of its own: all give what one alone gives."""
    inside, most = 0, 0
    lock = threading.Lock()
    emit = objects._emit

    def counted(module: Any, bench: Any) -> bytes:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        meeting.wait(10.0)
        code = emit(module, bench)
        with lock:
            inside -= 1
        return code

    alone = image(TWICE)
    meeting = threading.Barrier(4)
    monkeypatch.setattr(objects, "_emit", counted)
    with ThreadPoolExecutor(4) as workers:
        made = list(workers.map(image, [TWICE] * 40))
    assert made == [alone] * 40
    assert most == 4


# ---- several objects

CALLER = """
declare i64 @square(i64)
define i64 @outer(i64 %x) {
  %y = call i64 @square(i64 %x)
  %z = add i64 %y, 1
  ret i64 %z
}
"""
CALLEE = """
define i64 @square(i64 %x) {
  %y = mul i64 %x, %x
  ret i64 %y
}
"""


def image(source: str, *calls: str) -> bytes:
    host = target.host()
    return object_code(optimised(source, host, 2), host, 2, calls)


def linked(*images: bytes) -> CompiledCode:
    return CompiledCode(images, ["outer"], {}, target.host(), lambda: None)


@pytest.mark.parametrize("callee_first", [False, True])
def test_objects_are_linked(callee_first: bool) -> None:
    images = [image(CALLER, "square"), image(CALLEE)]
    code = linked(*(reversed(images) if callee_first else images))
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address("outer"))
    assert function(9) == 82
    with pytest.raises(KeyError, match="square"):
        code.address("square")


def test_call_between_objects_is_direct() -> None:
    """A call of another object goes straight there: no table is read."""
    if not target.host().triple.startswith("x86_64"):
        pytest.skip("reads x86-64 code")
    code = linked(image(CALLER, "square"), image(CALLEE))
    start = code.address("outer")
    body = ctypes.string_at(start, 32)
    at = body.index(b"\xe8")  # call rel32
    there = (
        start + at + 5 + int.from_bytes(body[at + 1 : at + 5], "little", signed=True)
    )
    assert ctypes.string_at(there, 1) != b"\xff", "jumps by a table"
    assert b"\x0f\xaf" in ctypes.string_at(there, 16), "no imul: not the callee"


def test_object_that_is_missing() -> None:
    with pytest.raises(InternalError, match="calls 'square', not given"):
        image(CALLER)
    with pytest.raises(InternalError, match=r"cannot be linked: .*outer"):
        linked(image(CALLER, "square"))


# ---- other machines


def test_assembly_for_another_machine() -> None:
    text = assembly(TWICE, target.neon())
    assert re.search(r"\b(add|lsl)\tx0, x0, ", text)
    assert "helper" not in text
    assert "twice" in assembly(TWICE, target.avx512())
