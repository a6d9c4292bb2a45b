"""The memory of all calls of a process: what is counted, who waits, who is refused."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pliant
from pliant.passes.fuse import kernel_count
from pliant.runtime import BufferSpec, ModelSpec, RuntimeModel, StepSpec, binding
from pliant.runtime.description import WRITES


class Scores(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t()) @ x


@pytest.fixture(scope="module")
def model() -> pliant.CompiledModel:
    whole = pliant.Options(chunk=False)  # its peak is the least
    made = pliant.compile(
        Scores(), (torch.randn(3, 8),), ({0: "n"},), threads=1, options=whole
    )
    assert kernel_count(made.program.fused.main) > 1
    return made


@pytest.fixture(autouse=True)
def no_budget() -> Iterator[None]:
    yield
    pliant.set_memory_budget(None)


def given(n: int) -> torch.Tensor:
    return torch.ones(n, 8)


def test_what_is_told(model: pliant.CompiledModel) -> None:
    model.trim()
    assert pliant.memory_budget().limit is None
    for wait in (True, False, 1.5):
        pliant.set_memory_budget("64MiB", wait=wait)
        told = pliant.memory_budget()
        assert (told.limit, told.wait) == (64 << 20, wait)
    idle = told.idle_bytes
    model(given(300))
    told = pliant.memory_budget()
    assert told.running_bytes == told.waiting_calls == 0
    assert told.idle_bytes - idle == model.stats()["last_arena_bytes"] > 300 * 300 * 4
    assert told.in_use == told.idle_bytes
    model.trim()
    assert pliant.memory_budget().idle_bytes == idle
    pliant.set_memory_budget("1GiB", wait=float("inf"))
    assert pliant.memory_budget().wait is True


@pytest.mark.parametrize("wait", [-1, "long", None, float("nan")])
def test_a_wrong_wait(wait: Any) -> None:
    with pytest.raises(pliant.OptionError, match="wait must be"):
        pliant.set_memory_budget("1GiB", wait=wait)
    with pytest.raises(pliant.OptionError, match="not a memory limit"):
        pliant.set_memory_budget("much")


def test_it_is_a_limit_of_each_call(model: pliant.CompiledModel) -> None:
    x = given(300)
    plan = model.memory_plan(x)
    pliant.set_memory_budget(plan.peak_bytes)
    model(x)
    assert model.memory_plan(n=300).peak_bytes == plan.peak_bytes
    pliant.set_memory_budget(plan.peak_bytes // 2)
    for refused in (lambda: model(x), lambda: model.memory_plan(x)):
        with pytest.raises(pliant.MemoryLimitError, match="budget of the process") as e:
            refused()
        assert e.value.limit == plan.peak_bytes // 2
        assert e.value.least == plan.peak_bytes
        assert 0 < e.value.largest["n"] < 300
    # a limit that is given is told of as it is
    with pytest.raises(pliant.MemoryLimitError, match="the memory limit is 10"):
        model.memory_plan(x, memory_limit=10)
    assert model.memory_plan(x, memory_limit="1GiB").peak_bytes == plan.peak_bytes


def test_idle_arenas_make_room(model: pliant.CompiledModel) -> None:
    other = pliant.compile(Scores(), (torch.randn(3, 8),), ({0: "n"},), threads=1)
    x = given(400)
    other(x)
    other(x)
    assert other.stats()["arena_bytes"] > 0
    pliant.set_memory_budget(model.memory_plan(x).peak_bytes, wait=False)
    model(x)
    assert other.stats()["arena_bytes"] == 0
    assert pliant.memory_budget().in_use <= model.stats()["last_peak_bytes"]


def most_held(run: Any, count: int) -> int:
    """The most that is in use while several threads run."""
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, pliant.memory_budget().in_use)
        time.sleep(0.0005)
    for thread in threads:
        thread.join()
    return most


def test_threads_share_it(model: pliant.CompiledModel) -> None:
    """As many as fit run; the others wait, and all answer."""
    x = given(700)
    want = model(x)
    plan = model.memory_plan(x)
    wrong: list[object] = []

    def run() -> None:
        for _ in range(5):
            try:
                if not torch.equal(model(x), want):
                    wrong.append("result")
            except BaseException as error:
                wrong.append(error)

    model.trim()
    before = pliant.memory_budget().idle_bytes
    budget = before + plan.peak_bytes * 3 // 2
    pliant.set_memory_budget(budget)
    assert most_held(run, 4) <= budget
    assert not wrong
    assert pliant.memory_budget().running_bytes == 0
    assert model.stats()["arena_bytes"] <= budget + 4096


class Holder:
    """A call in a thread of its own that holds so many bytes until told to end."""

    def __init__(self, size: int) -> None:
        self.began, self.end = threading.Event(), threading.Event()
        numbers = ctypes.POINTER(ctypes.c_int64)
        function = ctypes.CFUNCTYPE(ctypes.c_int64, numbers, numbers)

        def sizes(_: Any, table: Any) -> int:
            table[0] = size
            return 0

        self.functions = (
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.run),
            function(sizes),
            function(lambda *_: 0),
        )
        spec = ModelSpec((), 0, 1, (BufferSpec(0),), (), (StepSpec(((0, WRITES),)),))
        self.model = RuntimeModel(spec, *(binding._address(f) for f in self.functions))
        self.thread = threading.Thread(target=self.model, daemon=True)

    def run(self, _: int) -> None:
        self.began.set()
        self.end.wait()

    def __enter__(self) -> Holder:
        self.thread.start()
        assert self.began.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self.thread.join()


def in_thread(call: Any) -> tuple[threading.Thread, list[Any]]:
    """A call that waits, from another thread, and where its result comes."""
    results: list[Any] = []
    waiting = pliant.memory_budget().waiting_calls
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    until = time.monotonic() + 30
    while pliant.memory_budget().waiting_calls == waiting:
        assert time.monotonic() < until
        time.sleep(0.001)
    return thread, results


@pytest.mark.parametrize("numpy", [False, True])
def test_a_call_is_refused_or_waits(model: pliant.CompiledModel, numpy: bool) -> None:
    x = given(300).numpy() if numpy else given(300)
    need = model.memory_plan(x).peak_bytes
    want = model(x)
    model.trim()
    with Holder(1 << 20) as holder:
        assert pliant.memory_budget().running_bytes == 1 << 20
        limit = pliant.memory_budget().in_use + need - 1
        for wait in (False, 0.02):
            pliant.set_memory_budget(limit, wait=wait)
            with pytest.raises(pliant.MemoryLimitError, match="calls that run") as e:
                model(x)
            assert (e.value.limit, e.value.least) == (limit, need)
            assert e.value.in_use == limit + 1 - need
        pliant.set_memory_budget(limit)
        thread, results = in_thread(lambda: model(x))
        assert not results
        holder.end.set()
        thread.join()
    np.testing.assert_array_equal(results[0], want)
    assert pliant.memory_budget().running_bytes == 0


@pytest.mark.parametrize("numpy", [False, True])
def test_an_interrupt_ends_the_wait(model: pliant.CompiledModel, numpy: bool) -> None:
    x = given(300).numpy() if numpy else given(300)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Holder(1 << 20):
        need = model.memory_plan(x).peak_bytes
        pliant.set_memory_budget((1 << 20) + need - 1)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            model(x)
        timer.join()
        assert pliant.memory_budget().waiting_calls == 0
    signal.signal(signal.SIGINT, before)
    model(x)


def test_a_child_does_not_wait_for_its_parent(model: pliant.CompiledModel) -> None:
    x = given(300)
    need = model.memory_plan(x).peak_bytes
    with Holder(1 << 20):
        pliant.set_memory_budget((1 << 20) + need - 1)
        thread, _ = in_thread(lambda: model(x))
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            model(x)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert pliant.memory_budget().waiting_calls == 1
    thread.join()


def test_copies_are_planned(model: pliant.CompiledModel) -> None:
    turned = torch.randn(8, 300).t()
    for x in (turned, turned.numpy()):
        plan = model.memory_plan(x)
        assert plan.copy_bytes == 300 * 8 * 4
        assert plan.peak_bytes == plan.copy_bytes + plan.arena_bytes + plan.output_bytes
        want = model(np.ascontiguousarray(x))
        np.testing.assert_array_equal(np.asarray(model(x)), want)
        stats = model.stats()
        assert stats["last_peak_bytes"] == plan.peak_bytes
        assert stats["last_copied_bytes"] == plan.copy_bytes
        model.memory_limit = plan.peak_bytes
        model(x)
        model.memory_limit = plan.peak_bytes - 1
        for call in (model, model.memory_plan):
            with pytest.raises(pliant.MemoryLimitError) as caught:
                call(x)
            assert caught.value.least == plan.peak_bytes
        model.memory_limit = None
    meta = torch.empty(8, 300, device="meta").t()
    assert model.memory_plan(meta).copy_bytes == 300 * 8 * 4
    assert model.memory_plan(n=300).copy_bytes == 0
