"""The binding: tensors in and out, every status, threads, forks, and memory."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pliant.runtime import (
    BufferSpec,
    InputSpec,
    KnobSpec,
    ModelSpec,
    OrderSpec,
    OutputSpec,
    RuntimeModel,
    RuntimeStatus,
    Status,
    StepSpec,
    binding,
    symbols,
)
from pliant.runtime.description import READS, SCALAR, TENSOR, WRITES

CC = shutil.which("gcc")
HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler")

F32, I64 = (2, 32), (0, 64)
SCALE = ModelSpec(
    inputs=(InputSpec(TENSOR, *F32, rank=2), InputSpec(SCALAR)),
    n_symbols=3,
    n_table=5,
    buffers=(BufferSpec(size_index=0),),
    outputs=(OutputSpec(*F32, rank=2, dim_index=1),),
    steps=(StepSpec(((0, WRITES),)), StepSpec(((0, READS),))),
    threads=2,
)
PAIR = ModelSpec(
    inputs=(InputSpec(TENSOR, *F32, rank=1),),
    n_symbols=1,
    n_table=1,
    buffers=(),
    outputs=(OutputSpec(*F32, 1, 0), OutputSpec(*F32, 1, 0)),
)
ROWS = ModelSpec(
    inputs=(InputSpec(TENSOR, *F32, rank=2),),
    n_symbols=2,
    n_table=7,
    buffers=(BufferSpec(0), BufferSpec(1)),
    outputs=(OutputSpec(*F32, rank=2, dim_index=2),),
    steps=(
        StepSpec(((0, WRITES),), bytes_index=4),
        StepSpec(((0, READS),), bytes_index=4),
        StepSpec(((1, WRITES),), bytes_index=5),
    ),
    orders=(OrderSpec((0, 1)), OrderSpec((2,), knobs=(0,))),
    knobs=(KnobSpec(extent_index=2, multiple=4),),
    poison=True,
    guard_pages=True,
)


@pytest.fixture(scope="session")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Addresses of the functions in models.c."""
    target = tmp_path_factory.mktemp("models") / "models.so"
    runtime = Path(binding.__file__).parent
    subprocess.run(
        [
            str(CC),
            *("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
            *(f"-I{runtime}", str(HERE / "models.c"), "-o", str(target)),
        ],
        check=True,
    )
    library = ctypes.CDLL(str(target))
    for name in ("parallel", "special"):
        ctypes.c_void_p.in_dll(library, name).value = symbols()[f"plt_{name}"]
    models = ("scale", "pair", "rows")
    names = [f"{m}_{f}" for m in models for f in ("run", "sizes", "bind")]
    yield {
        name: binding._address(getattr(library, name))
        for name in [*names, "overrun_run", "unwritten_run"]
    }


def scale(code: dict[str, int], run: str = "scale_run", **changes: Any) -> RuntimeModel:
    spec = replace(SCALE, **changes)
    return RuntimeModel(spec, code[run], code["scale_sizes"], code["scale_bind"])


def failure(model: RuntimeModel, *args: Any) -> tuple[Status, tuple[int, int, int]]:
    with pytest.raises(RuntimeStatus) as caught:
        model(*args)
    return caught.value.status, caught.value.detail


@pytest.mark.parametrize("shape", [(4, 40), (1, 1), (0, 5), (5, 0), (37, 501)])
def test_torch_and_numpy(code: dict[str, int], shape: tuple[int, int]) -> None:
    model = scale(code)
    x = torch.randn(shape)
    y = model(x, 3)
    assert type(y) is torch.Tensor
    assert y.shape == shape
    torch.testing.assert_close(y, x * 3 + 1)
    z = model(x.numpy(), 3)
    assert type(z) is np.ndarray
    np.testing.assert_array_equal(z, y.numpy())
    z += 1  # ours to write
    assert model.stats().calls == 2
    assert model.stats().plans_made == 1


def test_torch_output_outlives_the_model(code: dict[str, int]) -> None:
    model = scale(code)
    y = model(torch.ones(2, 8), 1)
    assert y.data_ptr() % 64 == 0
    del model
    gc.collect()
    assert y.add_(1).tolist() == [[3.0] * 8] * 2


def test_numpy_output_outlives_the_model(code: dict[str, int]) -> None:
    model = scale(code)
    z = model(np.ones((3, 7), np.float32), 4)
    del model
    gc.collect()
    np.testing.assert_array_equal(z, np.full((3, 7), 5, np.float32))


def test_several_outputs_and_weights(code: dict[str, int]) -> None:
    weight = torch.tensor(5.0)
    addresses = (code["pair_run"], code["pair_sizes"], code["pair_bind"])
    model = RuntimeModel(PAIR, *addresses, [weight.data_ptr()])
    x = torch.arange(6.0)
    both = model(x)
    assert [type(y) for y in both] == [torch.Tensor, torch.Tensor]
    torch.testing.assert_close(both[0], x + 5)
    torch.testing.assert_close(both[1], x * 2)
    both = model(x.numpy())
    assert [type(y) for y in both] == [np.ndarray, np.ndarray]
    np.testing.assert_array_equal(both[1], x.numpy() * 2)


def test_accepted_arguments(code: dict[str, int]) -> None:
    model = scale(code)
    frozen = np.ones((2, 3), np.float32)
    frozen.flags.writeable = False
    assert model(frozen, 1).tolist() == [[2, 2, 2]] * 2
    assert model(np.ones((2, 3), np.float32), True).sum() == 12
    learned = torch.ones(2, 3, requires_grad=True)
    with torch.no_grad():
        assert not model(learned, 1).requires_grad
    with pytest.raises(RuntimeStatus, match="KIND"):  # its gradient would be lost
        model(learned, 1)
    sliced = torch.ones(5, 3)[2:4]  # an offset, still row-major
    assert float(model(sliced, 1).sum()) == 12
    single = torch.ones(3, 2).t()[:1]  # (1, 3) with strides (1, 2)
    assert float(model(single, 1).sum()) == 6
    column = torch.ones(4, 4)[:, :1]  # the stride of a dim of size 1 does not matter
    assert float(model(column, 1).sum()) == 8
    assert model.stats().last_copied_bytes == 16
    assert float(model(column[:1], 1)) == 2
    assert model.stats().last_copied_bytes == 0


def strided() -> dict[str, Any]:
    base = torch.randn(6, 5, 4)
    return {
        "turned": base[0].t(),
        "every second": base[::2, :, 1],
        "broadcast": base[0, 0].expand(7, 4),
        "misaligned": np.frombuffer(bytearray(range(33)), np.uint8)[1:]
        .view(np.float32)
        .reshape(2, 4),
        "backwards": base[0].numpy()[::-1, ::-2],
        "read-only and turned": np.broadcast_to(base[0].numpy(), (5, 4)).T,
    }


@pytest.mark.parametrize("name", strided())
def test_what_is_not_row_major_is_copied(code: dict[str, int], name: str) -> None:
    """The copy is counted while the call holds it, and against its limit."""
    model, x = scale(code), strided()[name]
    got = np.asarray(model(x, 3))
    np.testing.assert_array_equal(got, np.ascontiguousarray(x) * np.float32(3) + 1)
    stats, plan = model.stats(), model.plan([*x.shape, 3])
    copied = math.prod(x.shape) * 4
    assert stats.last_copied_bytes == copied
    assert stats.last_peak_bytes == plan.peak_bytes + copied
    model.set_limit(stats.last_peak_bytes)
    model(x, 3)
    model.set_limit(stats.last_peak_bytes - 1)
    least, limit = stats.last_peak_bytes, stats.last_peak_bytes - 1
    assert failure(model, x, 3) == (Status.LIMIT, (0, least, limit))


def test_what_is_written_is_not_copied(code: dict[str, int]) -> None:
    given = (InputSpec(TENSOR, *F32, rank=2, written=True), InputSpec(SCALAR))
    model = scale(code, inputs=given)
    x = torch.ones(4, 40)
    assert failure(model, x.t(), 1) == (Status.LAYOUT, (0, 1, 0))
    misaligned = np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float32)
    assert failure(model, misaligned.reshape(2, 4), 1)[0] is Status.LAYOUT


def test_read_only_arrays_are_not_copied(code: dict[str, int]) -> None:
    model, x = scale(code), np.ones((3, 4), np.float32)
    x.flags.writeable = False
    alias = binding._exportable(x)
    assert alias.ctypes.data == x.ctypes.data
    np.testing.assert_array_equal(model(x, 2), np.full((3, 4), 3))
    assert model.stats().last_copied_bytes == 0
    del x
    gc.collect()
    np.testing.assert_array_equal(alias, np.ones((3, 4)))  # its memory is kept


def test_statuses(code: dict[str, int]) -> None:
    model = scale(code)
    x = torch.ones(4, 40)
    dtype = 1 << 16 | 2 << 8
    assert failure(model, x) == (Status.COUNT, (0, 2, 1))
    assert failure(model, x, 1, 2) == (Status.COUNT, (0, 2, 3))
    assert failure(model, x, x) == (Status.KIND, (1, 1, 0))
    assert failure(model, 1, 1) == (Status.KIND, (0, 0, 1))
    assert failure(model, x, "text") == (Status.KIND, (1, 1, -1))
    assert failure(model, x, None) == (Status.KIND, (1, 1, -1))
    assert failure(model, x, 1.5) == (Status.KIND, (1, 1, -1))
    for odd in (x.to_sparse(), torch.empty(2, 2, device="meta"), np.array([["text"]])):
        assert failure(model, odd, 1) == (Status.KIND, (0, 0, -1))
    assert failure(model, x, 1 << 70) == (Status.KIND, (1, 1, -1))
    assert failure(model, x.double(), 1) == (
        Status.DTYPE,
        (0, dtype | 32, dtype | 64),
    )
    assert failure(model, x[0], 1) == (Status.RANK, (0, 2, 1))
    assert failure(model, torch.ones(1001, 1), 1) == (Status.GUARD, (0, 0, 0))
    assert failure(model, torch.ones(1, 100001), 1) == (Status.GUARD, (1, 0, 0))
    assert failure(model, x, 13) == (Status.RUN, (42, 0, 0))
    model.set_limit(1279)
    assert failure(model, x, 1) == (Status.LIMIT, (0, 1280, 1279))
    model.set_limit(1280)
    model(x, 1)
    model.set_limit(None)
    model(x, 1)
    assert model.stats().calls == 2
    model.close()
    assert failure(model, x, 1)[0] is Status.CLOSED
    with pytest.raises(RuntimeStatus):
        model.stats()


@pytest.mark.parametrize("n", [0, 1, 3, 97, 1024])
def test_chunks_of_rows(code: dict[str, int], n: int) -> None:
    """The plan takes as many rows at a time as the limit allows."""
    model = RuntimeModel(ROWS, *(code[f"rows_{f}"] for f in ("run", "sizes", "bind")))
    m = 16
    x = torch.randn(n, m)
    plain, least = model.plan([n, m]), model.least([n, m])
    assert (plain.order, plain.knobs, plain.table[6]) == (0, (0,), 1)
    assert least == x.nbytes + min(n, 4) * m * 4
    spent, rows = plain.nanoseconds, n
    while rows > 4:
        limit = x.nbytes + rows * m * 4 - 1
        rows = min(math.ceil(math.ceil(rows / 2) / 4) * 4, n)
        plan = model.plan([n, m], limit)
        assert (plan.order, plan.knobs, plan.table[6]) == (1, (rows,), rows)
        assert plan.peak_bytes == x.nbytes + rows * m * 4 <= limit
        assert plan.nanoseconds > spent
        assert plan.extra_nanoseconds == 0
        spent = plan.nanoseconds
        model.set_limit(limit)
        torch.testing.assert_close(model(x), x * 2 + 1)
        assert model.stats().last_peak_bytes == plan.peak_bytes
    if n:
        with pytest.raises(RuntimeStatus) as caught:
            model.plan([n, m], least - 1)
        assert caught.value.status is Status.LIMIT
        assert caught.value.detail == (0, least, least - 1)


@pytest.mark.parametrize(
    "change",
    [
        {"orders": (OrderSpec((0, 1), knobs=(0,)),)},
        {"orders": (OrderSpec((0, 1)), OrderSpec((2,), knobs=(1,)))},
        {"orders": (OrderSpec((0, 1)), OrderSpec((2,), knobs=(64,)))},
        {"orders": (OrderSpec((0, 1)), OrderSpec((2,), knobs=(-1,)))},
        {"orders": (OrderSpec((0, 1)), OrderSpec((2,), knobs=(2**62,)))},
        {"orders": (OrderSpec((0, 0)),)},
        {"knobs": (KnobSpec(7, 4),)},
        {"knobs": (KnobSpec(2, 0),)},
    ],
)
def test_malformed_knobs(code: dict[str, int], change: dict[str, Any]) -> None:
    functions = (code[f"rows_{f}"] for f in ("run", "sizes", "bind"))
    with pytest.raises(RuntimeStatus) as caught:
        RuntimeModel(replace(ROWS, **change), *functions)
    assert caught.value.status is Status.MODEL


def test_malformed_description(code: dict[str, int]) -> None:
    with pytest.raises(RuntimeStatus) as caught:
        scale(code, buffers=(BufferSpec(99),))
    assert caught.value.status is Status.MODEL


def test_plan(code: dict[str, int]) -> None:
    model = scale(code)
    plan = model.plan([4, 41, 9])
    assert plan.sizes == (656,)
    assert plan.table == (656, 4, 41, 9, 2)
    assert (plan.arena_bytes, plan.output_bytes) == (704, 656)
    assert plan.peak_bytes == plan.lower_bound == 1360
    with pytest.raises(RuntimeStatus) as caught:
        model.plan([4, 41, 9], limit=1359)
    assert caught.value.detail == (0, 1360, 1359)
    with pytest.raises(RuntimeStatus) as caught:
        model.plan([1 << 40, 1 << 40, 1])
    assert caught.value.status is Status.OVERFLOW
    assert model.bind([4, 41, 9]) == (4, 41, 9)
    with pytest.raises(RuntimeStatus):
        model.bind([4000, 41, 9])
    assert model.stats().plans_made == 0


def test_huge_output_is_a_clean_failure(code: dict[str, int]) -> None:
    """The arena of this shape cannot be had; the model goes on working."""
    model = scale(code, buffers=(BufferSpec(3),))  # its size is the scalar
    assert failure(model, torch.ones(1, 1), 1 << 50) == (
        Status.MEMORY,
        (-1, 1 << 50, 0),
    )
    assert model.stats().arena_bytes == 0
    model(torch.ones(1, 1), 64)


def test_same_bits_whatever_the_threads_do(code: dict[str, int]) -> None:
    x = torch.randn(100, 333)
    results = [scale(code, threads=t)(x, 3) for t in (1, 2, 3, 7)]
    assert all(torch.equal(results[0], r) for r in results)


def test_four_threads(code: dict[str, int]) -> None:
    model = scale(code, plan_capacity=3)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(300):
                x = torch.full((draw.randint(0, 9), draw.randint(0, 500)), 2.0)
                k = draw.choice((1, 2, 13))
                if k == 13:
                    assert failure(model, x, k)[0] is Status.RUN
                else:
                    assert torch.equal(model(x, k), x * k + 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    stats = model.stats()
    assert stats.calls + stats.failures == 1200
    assert stats.plans_cached == 3


def test_fork(code: dict[str, int]) -> None:
    model = scale(code)
    x = torch.ones(8, 100)
    model(x, 2)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            right = all(float(model(x, k).sum()) == 800 * (k + 1) for k in (2, 3))
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
    model(x, 2)


def test_interrupt_is_delivered(code: dict[str, int]) -> None:
    # Started in the background, a process ignores the signal unless it says otherwise.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    model = scale(code)
    x = torch.ones(500, 1000)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        until = time.monotonic() + 10
        while time.monotonic() < until:
            model(x, 2)
    timer.join()
    signal.signal(signal.SIGINT, before)
    model(x, 2)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow(code: dict[str, int]) -> None:
    model = scale(code)
    draw = random.Random(7)
    base = torch.ones(200 * 200)

    def calls(n: int) -> None:
        for _ in range(n):
            rows, columns = draw.randint(0, 200), draw.randint(0, 200)
            x = base[: rows * columns].view(rows, columns)
            model(x, draw.randint(0, 12))
            if draw.random() < 0.05:
                failure(model, x, 13)
                model(x.numpy(), 1)

    calls(3000)
    before = resident_bytes()
    calls(20000)
    assert resident_bytes() - before < 2 << 20
    stats = model.stats()
    assert stats.arena_bytes <= -(-stats.last_arena_bytes // 4096) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_arena_is_given_back(code: dict[str, int]) -> None:
    model = scale(code)
    small, large = torch.ones(1, 1), torch.ones(1000, 50000)
    model(small, 1)
    before = resident_bytes()
    model(large, 1)
    assert model.stats().last_arena_bytes == 200_000_000
    assert model.stats().arena_bytes == 1 << 20  # without another call
    assert resident_bytes() - before < 8 << 20
    model(large, 1)
    assert model.stats().arena_bytes == 200_003_584  # wanted again: kept, to the page
    assert resident_bytes() - before > 190 << 20
    model(small, 1)
    assert model.stats().arena_bytes == 4096
    assert resident_bytes() - before < 8 << 20
    model.trim()
    assert model.stats().arena_bytes == 0


def test_guard_page_traps(code: dict[str, int]) -> None:
    model = scale(code, "overrun_run", guard_pages=True)
    x = torch.ones(1, 16)  # 64 bytes: the buffer is the whole arena
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        model(x, 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] & 0x7F == signal.SIGSEGV


def test_poison(code: dict[str, int]) -> None:
    model = scale(code, "unwritten_run", poison=True)
    y = model(torch.ones(2, 3), 1)
    assert bool(y.isnan().all())  # the scratch it read, and what it did not write


def test_overhead(code: dict[str, int], record_property: Any) -> None:
    model = scale(code, threads=1)
    x = torch.ones(1, 4)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(5000):
            model(x, 1)
        best = min(best, (time.perf_counter() - start) / 5000)
    record_property("call_us", best * 1e6)
    assert best < 20e-6  # some 1.6 us on an idle machine


def test_exit_with_a_live_model(code: dict[str, int], tmp_path: Path) -> None:
    """Interpreter exit with models and workers alive is quiet."""
    program = tmp_path / "live.py"
    program.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pliant.runtime import *\n"
        "import ctypes\n"
        "F = ctypes.CFUNCTYPE(None, ctypes.c_void_p)\n"
        "f = F(lambda p: None)\n"
        "a = ctypes.cast(f, ctypes.c_void_p).value\n"
        "m = RuntimeModel(ModelSpec((), 0, 0, (), ()), a, a, a)\n"
        "class Cycle: pass\n"
        "c = Cycle(); c.me = c; c.model = m\n"
    )
    ran = subprocess.run(
        [sys.executable, str(program), str(HERE.parents[1])],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
