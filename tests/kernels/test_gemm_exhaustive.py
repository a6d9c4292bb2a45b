"""Matrix products at every size up to 33, and at some large ones, in every layout.

`gemm_layouts.py` says what is compiled, `gemm_sweep.py` what error is allowed, and
`guarded.py` how a read or write outside a buffer is caught. Sweeps run in a process of
their own: one that is killed by a stray access is a failed test which names the sizes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from gemm_layouts import LAYOUTS, K, M, N, product
from gemm_sweep import CONSTANT, EPILOGUE, UNIT, Case, compile_layout, failures
from guarded import Guarded, Side
from machines import TARGETS

import pliant

EVERY = range(34)
# Around the widths and heights of all register tiles: 6 x 8, 6 x 16, 14 x 32.
EDGES = (0, 1, 2, 3, 6, 7, 8, 14, 15, 16, 17, 32, 33)
FEW = (0, 1, 7, 17, 33)
WEIGHTS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33)
# Around cache blocks: several of rows, groups of panels, passes over K.
ROWS = (1, 4, 18, 19, 42, 43, 85, 169, 343)
COLUMNS = (1, 8, 9, 31, 257, 511, 513, 545)
TERMS = (255, 257, 1023, 1025, 2050)
NAMES = (*LAYOUTS, EPILOGUE)
SHOWN = 5

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["pliant"])  # slow to import, for every process


def cube(sizes: Sequence[int], rows: Sequence[int] | None = None) -> list[Case]:
    """Every combination; K slowest, as the reference of one K serves many cases."""
    rows = sizes if rows is None else rows
    return [(m, n, k) for k, m, n in itertools.product(sizes, rows, sizes)]


def large(seed: int, count: int) -> list[Case]:
    """Some of the large sizes: each row and column count a few times."""
    source = random.Random(seed)
    every = itertools.product(ROWS, COLUMNS, TERMS)
    return sorted(source.sample(list(every), count), key=lambda case: case[2])


def in_process(work: Callable[..., None], *arguments: Any) -> tuple[int, list[Any]]:
    """How a new process ended that did the work, and what it sent before."""
    receive, send = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=work, args=(send, *arguments))
    process.start()
    send.close()
    told = []
    while True:
        try:
            told.append(receive.recv())
        except EOFError:
            break
    process.join()
    assert process.exitcode is not None
    return process.exitcode, told


def send_failures(send: Connection, *arguments: Any) -> None:
    try:
        for failure in failures(*arguments):
            send.send(failure)
    except Exception:  # or only the status of this process would be told
        send.send(("stopped", "", traceback.format_exc()))


def assert_all_right(name: str, target: str, cases: Sequence[Case]) -> None:
    progress = PROCESSES.RawArray("q", 4)
    ended, wrong = in_process(send_failures, name, target, cases, progress)
    side, *case = progress
    if ended:
        how = signal.Signals(-ended).name if ended < 0 else f"status {ended}"
        place = f"{case}, guarded at its {list(Side)[side].value}"
        pytest.fail(f"{name}, {target}: {how} at {place}")
    for _, _, message in (each for each in wrong if each[0] == "stopped"):
        pytest.fail(f"{name}, {target}: at {case}, {list(Side)[side].value}: {message}")
    told = "\n".join(f"{case} {side}: {message}" for case, side, message in wrong)
    shown = "\n".join(told.splitlines()[:SHOWN])
    assert not wrong, f"{name}, {target}: {len(wrong)} cases are wrong\n{shown}"


def test_every_size() -> None:
    assert_all_right("plain", "machine", cube(EVERY))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", TARGETS[:2])
def test_layouts_around_tile_edges(name: str, target: str) -> None:
    assert_all_right(name, target, cube(EDGES))


@pytest.mark.parametrize("name", NAMES)
def test_layouts_with_short_vectors(name: str) -> None:
    assert_all_right(name, TARGETS[-1], cube(FEW))


@pytest.mark.parametrize("target", TARGETS)
def test_constant_weights(target: str) -> None:
    assert_all_right(CONSTANT, target, cube(FEW[1:], EVERY))


@pytest.mark.parametrize("name", ["plain", "right transposed", EPILOGUE])
def test_cache_blocks(name: str) -> None:
    assert_all_right(name, "machine", large(0, 40))


def test_cache_blocks_of_a_constant() -> None:
    cases = [(m, n, k) for n, k in ((545, 257), (512, 1025), (9, 2050)) for m in ROWS]
    assert_all_right(CONSTANT, "machine", cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", TARGETS[:2])
def test_cache_blocks_of_every_layout(name: str, target: str) -> None:
    assert_all_right(name, target, large(1, 120))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_size_of_every_layout(name: str, target: str) -> None:
    assert_all_right(name, target, cube(EVERY))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_constant_weights_around_tile_edges(target: str) -> None:
    assert_all_right(CONSTANT, target, cube(WEIGHTS, EVERY))


# ---- through the API: tensors that are not contiguous


class MatMul(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "long rows": lambda x: torch.nn.functional.pad(x, (0, 3))[:, : x.shape[1]],
    "every other": lambda x: x.repeat_interleave(2, 0).repeat_interleave(2, 1)[
        ::2, ::2
    ],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


def test_strided_tensors_through_the_api() -> None:
    names = ({0: "m", 1: "k"}, {0: "k", 1: "n"})
    model = pliant.compile(MatMul(), (torch.ones(2, 3), torch.ones(3, 4)), names)
    for view in VIEWS.values():
        for m, n, k in [(0, 3, 5), (1, 1, 1), (7, 33, 17), (33, 15, 31), (5, 8, 0)]:
            torch.manual_seed(m + n + k)
            x, y = view(torch.randn(m, k)), view(torch.randn(k, n))
            bound = k * UNIT / (1 - k * UNIT) * (x.double().abs() @ y.double().abs())
            error = (model(x, y).double() - x.double() @ y.double()).abs()
            assert (error <= bound).all()


# ---- the guards themselves


def run_with_more_terms(send: Connection, side: Side) -> None:
    """A product told that K is one more than its operands have."""
    program = compile_layout(((M, K), (K, N)), product, "machine")
    honest = program._solve

    def solve(inputs: Sequence[np.ndarray], threads: int) -> None:
        (m, k), n = inputs[0].shape, inputs[1].shape[1]
        honest([np.empty((m, k + 1)), np.empty((k + 1, n))], threads)

    program._solve = solve
    operands = [np.ones(shape, np.float32) for shape in ((1, 5), (5, 7))]
    (got,) = program(operands, side)
    send.send(bool(np.isnan(got).all()))


def test_a_read_beyond_the_end_is_caught() -> None:
    ended, _ = in_process(run_with_more_terms, Side.END)
    assert ended == -signal.SIGSEGV
    ended, told = in_process(run_with_more_terms, Side.START)
    assert (ended, told) == (0, [True])  # the margin is NaN


def touch(send: Connection, side: Side) -> None:
    slot = Guarded()
    slot.place(12, side, 4)
    outside = slot.address - 1 if side is Side.START else slot.address + 12
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_ubyte * 1).from_address(outside))[0]


@pytest.mark.parametrize("side", Side)
def test_guards_trap(side: Side) -> None:
    ended, _ = in_process(touch, side)
    assert ended == -signal.SIGSEGV


def test_a_write_beside_a_buffer_is_seen() -> None:
    for side, beside in ((Side.START, 12), (Side.END, -1)):
        slot = Guarded()
        slot.place(12, side, 4)
        slot.array(np.dtype(np.float32), (3,))[:] = 1
        assert slot.untouched_beside()
        slot.room[slot.start + beside] = 0
        assert not slot.untouched_beside()
