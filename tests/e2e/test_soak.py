"""A model that lives long: memory stays flat, threads and forks and structures work."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import pliant

PAGE = os.sysconf("SC_PAGE_SIZE")
VOCABULARY = 30522


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.BertModel(
            transformers.BertConfig(
                hidden_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=512,
            ),
            add_pooling_layer=False,
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


SHAPES = ({0: "batch", 1: "seq"}, {0: "batch", 1: "seq"})


def inputs(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (batch, seq))
    return ids, torch.ones(batch, seq, dtype=torch.long)


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def compiled(encoder: nn.Module) -> pliant.CompiledModel:
    return pliant.compile(encoder, inputs(2, 13), SHAPES, threads=2)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


# ---- a long life


def soak(compiled: pliant.CompiledModel, calls: int, fail: bool) -> None:
    """Random shapes; the largest come early, for memory may grow up to them."""
    chance = random.Random(7)
    full = torch.randint(0, VOCABULARY, (8, 64))
    mask = torch.ones(8, 64, dtype=torch.long)
    seen: list[tuple[int, int]] = []
    for call in range(calls):
        batch, seq = chance.randint(1, 8), chance.randint(1, 64)
        ids, cover = full[:batch, :seq], mask[:batch, :seq]
        if call == 50:
            ids, cover = full, mask
        if fail and call % 10 == 3:
            with pytest.raises(pliant.PliantError):
                compiled(ids, cover[:, :-1])
        else:
            assert compiled(ids, cover).shape == (*ids.shape, 128)
        if call in (200, calls - 1):
            gc.collect()
            seen.append((resident(), mappings()))
    (bytes_before, maps_before), (bytes_after, maps_after) = seen
    assert bytes_after - bytes_before <= 2 * 2**20
    assert maps_after - maps_before <= 8
    assert compiled.compile_count == 1


def test_memory_is_flat(encoder: nn.Module) -> None:
    # One thread: on a busy machine two would mostly wait for each other.
    model = pliant.compile(encoder, inputs(2, 13), SHAPES, threads=1)
    soak(model, 5000, fail=False)


def test_ten_thousand_shapes() -> None:
    """Each of them new: what is held follows the shape, and plans are few."""
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1))
    dims = ({0: "batch", 1: "seq"},)
    model = pliant.compile(net, (torch.randn(2, 3, 16),), dims, threads=1)
    full = torch.randn(100, 100, 16)
    pairs = [(b, s) for b in range(1, 101) for s in range(1, 101)]
    random.Random(3).shuffle(pairs)
    model(full)
    seen: list[tuple[int, int]] = []
    for number, (batch, seq) in enumerate(pairs):
        model(full[:batch, :seq].contiguous())
        arena = model.stats()["arena_bytes"]
        needed = model.stats()["last_arena_bytes"]
        assert arena - needed < PAGE, "more is held than this shape's plan needs"
        if number in (200, len(pairs) - 1):
            gc.collect()
            seen.append((resident(), mappings()))
    assert seen[1][0] - seen[0][0] <= 4 * 2**20
    assert seen[1][1] - seen[0][1] <= 8
    stats = model.stats()
    assert stats["plans"] >= 10_000 and stats["plans_cached"] <= 64


def test_memory_is_flat_with_failures(compiled: pliant.CompiledModel) -> None:
    soak(compiled, 2000, fail=True)


def test_trim(compiled: pliant.CompiledModel) -> None:
    x = inputs(8, 256)
    right = compiled(*x)
    compiled(*x)  # the second of a size keeps its arena
    held = compiled.stats()["arena_bytes"]
    assert held > 0
    compiled.trim()
    assert compiled.stats()["arena_bytes"] == 0
    assert torch.equal(compiled(*x), right)
    assert compiled.stats()["arena_bytes"] <= held


def test_compiling_leaves_little() -> None:
    """Code and plans of dropped models go with them."""
    x = torch.randn(4, 8)

    def once() -> None:
        pliant.compile(nn.Linear(8, 8), (x,), ({0: "n"},))(x)

    for _ in range(3):
        once()
    gc.collect()
    before, maps = resident(), mappings()
    for _ in range(10):
        once()
    gc.collect()
    assert resident() - before <= 24 * 2**20
    assert mappings() - maps <= 40


# ---- threads, forks, interrupts


def test_four_threads(encoder: nn.Module, compiled: pliant.CompiledModel) -> None:
    sizes = [(1, 5), (3, 17), (2, 64), (5, 31)]
    cases = [inputs(*size) for size in sizes]
    right = [encoder(*x) for x in cases]

    def work(k: int) -> None:
        for step in range(40):
            at = (k + step) % len(cases)
            torch.testing.assert_close(
                compiled(*cases[at]), right[at], rtol=1e-5, atol=2e-5
            )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_limit_changed_while_others_call(compiled: pliant.CompiledModel) -> None:
    x = inputs(2, 33)
    right = compiled(*x)

    def work(_: int) -> None:
        for _ in range(50):
            assert torch.equal(compiled(*x), right)

    try:
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(work, k) for k in range(3)]
            while not all(f.done() for f in running):
                compiled.memory_limit = "1GiB"
                compiled.trim()
                compiled.memory_limit = None
            for future in running:
                future.result()
    finally:
        compiled.memory_limit = None


@pytest.mark.parametrize("threads", [1, 2])
def test_same_bits(encoder: nn.Module, threads: int) -> None:
    model = pliant.compile(encoder, inputs(2, 13), SHAPES, threads=threads)
    for size in [(1, 1), (3, 17), (2, 127), (8, 64)]:
        x = inputs(*size)
        first = model(*x)
        model(*inputs(1, 200))  # other data in the arena
        for _ in range(5):
            assert torch.equal(model(*x), first)


def script(body: str) -> list[str]:
    """A program with a compiled model `m` and an input `x`."""
    head = """
        import os, signal, sys, threading, time
        import torch, pliant
        from torch import nn
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
        m = pliant.compile(net, (torch.randn(5, 64),), ({0: "n"},), threads=2)
        x = torch.randn(300, 64)
        y = m(x)
    """
    return [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(body)]


def test_fork() -> None:
    program = script("""
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            good = torch.equal(m(x), y) and torch.equal(m(x[:7]), y[:7])
            os._exit(0 if m(x[:1]).shape == (1, 64) and torch.equal(m(x), y) else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert torch.equal(m(x), y)
        print("child", status)
    """)
    done = subprocess.run(program, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "child 0"


def test_fork_while_another_thread_calls() -> None:
    program = script("""
        stop = threading.Event()
        def work():
            while not stop.is_set():
                m(x)
        thread = threading.Thread(target=work)
        thread.start()
        codes = []
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                os._exit(0 if torch.equal(m(x), y) else 3)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set()
        thread.join()
        print(set(codes))
    """)
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{0}"


def test_interrupt() -> None:
    """Ctrl-C between two calls or in one ends the program, soon and cleanly."""
    program = script("""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("ready", flush=True)
        try:
            while True:
                m(x)
        except KeyboardInterrupt:
            assert torch.equal(m(x), y)  # still usable
            print("interrupted", flush=True)
    """)
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert out.strip() == "interrupted"
    assert process.returncode == 0


def test_exit_with_a_running_thread() -> None:
    """A daemon thread in the middle of calls does not keep the program alive."""
    program = script("""
        def work():
            while True:
                m(x)
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.2)
        print("bye", flush=True)
    """)
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "bye"
    # Eager aborts here: a thread of C++ frames does not survive the interpreter.
    assert done.returncode in (0, -signal.SIGABRT), done.stderr


# ---- what goes in


class Affine(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2.0 + y


@pytest.fixture(scope="module")
def affine() -> pliant.CompiledModel:
    x = torch.randn(3, 4)
    shapes = ({0: "n", 1: "m"}, {0: "n", 1: "m"})
    return pliant.compile(Affine(), (x, x.clone()), shapes)


def test_layouts(affine: pliant.CompiledModel) -> None:
    base = torch.randn(40, 30)
    for x in (
        base.t(),
        base[::2, 1::3],
        base[3:, 5:],
        base.flip(0),
        base[0].expand(9, 30),
        base[:, :1].expand(40, 8),
        base.view(-1)[1:1200].view(11, 109),  # contiguous, off the alignment
        base.as_strided((5, 6), (2, 3)),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)[0, 0],
    ):
        for y in (x, torch.randn(x.shape), torch.randn(x.shape[::-1]).t()):
            torch.testing.assert_close(affine(x, y), x * 2.0 + y)


def test_transposed_view_of_a_conjugate_or_negative(
    affine: pliant.CompiledModel,
) -> None:
    x = torch.randn(3, 4, dtype=torch.complex64).conj().imag  # lazily negated
    assert x.is_neg()
    torch.testing.assert_close(affine(x, x), x * 3.0)


def test_gradients(affine: pliant.CompiledModel) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    y = affine(x, x.t().contiguous().t())
    assert not y.requires_grad
    torch.testing.assert_close(y, (x * 3.0).detach())
    parameter = nn.Parameter(torch.randn(5, 3))
    torch.testing.assert_close(affine(parameter, x), (parameter * 2 + x).detach())


def test_numpy(affine: pliant.CompiledModel) -> None:
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    for a in (x, x[::2], x.T, np.asfortranarray(x), x[::-1], x[:0]):
        y = affine(a, a)
        assert isinstance(y, np.ndarray)
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, 3 * a, rtol=1e-6)
    frozen = x.copy()
    frozen.flags.writeable = False
    np.testing.assert_allclose(affine(frozen, x), 3 * x, rtol=1e-6)


def test_same_tensor_twice_and_result_as_input(affine: pliant.CompiledModel) -> None:
    x = torch.randn(4, 4)
    kept = x.clone()
    y = affine(x, x)
    z = affine(y, x)
    torch.testing.assert_close(z, 7 * x)
    assert torch.equal(x, kept)
    results = [affine(x, x) for _ in range(5)]  # earlier results are not overwritten
    x.zero_()
    affine(x, x)
    for r in results:
        torch.testing.assert_close(r, 3 * kept)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale


def test_arguments_by_name() -> None:
    x, scale = torch.randn(5, 3), torch.randn(3)
    compiled = pliant.compile(Scaled(), (x, scale), ({0: "n"}, None))
    for n in (1, 8):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x, scale), x * scale)
        torch.testing.assert_close(compiled(x, scale=scale), x * scale)
        torch.testing.assert_close(compiled(scale=scale, x=x), x * scale)


def test_keywords() -> None:
    x, scale = torch.randn(5, 3), torch.randn(3)
    shapes = {"x": {0: Dim.DYNAMIC}, "scale": None}
    program = torch.export.export(
        Scaled(), (), {"x": x, "scale": scale}, dynamic_shapes=shapes
    )
    compiled = pliant.compile(program)
    for n in (2, 8):  # torch exported it for sizes of 2 and more
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x=x, scale=scale), x * scale)
        torch.testing.assert_close(compiled(scale=scale, x=x), x * scale)
    with pytest.raises(pliant.ShapeError):
        compiled(x=x, scales=scale)


@dataclass
class Answer(transformers.utils.ModelOutput):
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None


class Structures(nn.Module):
    def forward(self, tree: dict[str, Any], pair: Any) -> Any:
        a, (b, c) = tree["a"], tree["bc"]
        return {
            "sum": a + b,
            "parts": (a * pair[0], [c - pair[1]]),
            "answer": Answer(first=a, second=c * 2),
            "rows": a.shape[0],
            "fixed": 3,
            "none": None,
        }


def test_structures() -> None:
    def tree(n: int) -> Any:
        a, b, c = torch.randn(3, n, 4)
        return {"a": a, "bc": [b, c]}, (torch.randn(4), torch.randn(n, 4))

    n = Dim("n")
    shapes = ({"a": {0: n}, "bc": [{0: n}, {0: n}]}, (None, {0: n}))
    compiled = pliant.compile(Structures(), tree(5), shapes)
    for size in (1, 7):
        x = tree(size)
        got, right = compiled(*x), Structures()(*x)
        assert list(got) == list(right)
        assert isinstance(got["answer"], Answer)
        assert (got["rows"], got["fixed"], got["none"]) == (size, 3, None)
        torch.testing.assert_close(got["sum"], right["sum"])
        torch.testing.assert_close(got["parts"], right["parts"])
        torch.testing.assert_close(got["answer"].second, right["answer"].second)
        torch.testing.assert_close(got["answer"].first, right["answer"].first)
        plan = compiled.memory_plan(*x)
        assert plan.peak_bytes == compiled.stats()["last_peak_bytes"]


def test_model_output_whole() -> None:
    """A Hugging Face model as it is, with its own output class."""
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=99,
    )
    model = transformers.BertModel(config).eval().requires_grad_(False)
    shapes = {"input_ids": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    program = torch.export.export(
        model, (), {"input_ids": torch.randint(0, 99, (2, 9))}, dynamic_shapes=shapes
    )
    compiled = pliant.compile(program)
    ids = torch.randint(0, 99, (3, 20))
    got, right = compiled(input_ids=ids), model(input_ids=ids)
    assert type(got) is type(right)
    torch.testing.assert_close(got.pooler_output, right.pooler_output)
    torch.testing.assert_close(got.last_hidden_state, right.last_hidden_state)


def test_integers() -> None:
    class Sized(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
            return x[:, None].expand(-1, n) * n, n + 1

    compiled = pliant.compile(Sized(), (torch.randn(5), 4), ({0: "rows"}, Dim.DYNAMIC))
    for rows, n in ((1, 1), (3, 9), (7, 2)):
        x = torch.randn(rows)
        got, more = compiled(x, n)
        torch.testing.assert_close(got, x[:, None].expand(-1, n) * n)
        assert more == n + 1
    with pytest.raises(pliant.DTypeError, match="int"):
        compiled(torch.randn(3), 2.5)
    fixed = pliant.compile(Sized(), (torch.randn(5), 4), ({0: "rows"}, None))
    assert fixed(torch.randn(3), 4)[1] == 5
    with pytest.raises(pliant.ShapeError, match="fixed"):
        fixed(torch.randn(3), 5)


# ---- what comes out


class Returns(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = x.exp()
        return {
            "several": lambda: (y, y + 1, x.sum(), x.sum(0)),
            "input": lambda: x,
            "input and more": lambda: (x, y, x),
            "view of input": lambda: x.view(-1),
            "transpose of input": lambda: x.t(),
            "slice of input": lambda: x[1:, ::2],
            "view of result": lambda: (y, y.view(-1), y.t()),
            "expanded": lambda: y[0].expand(3, 4),
            "twice": lambda: (y, y),
            "equal values": lambda: (x + 1, x + 1),
            "weight": lambda: self.weight,
            "weight and result": lambda: (self.weight, self.weight @ x.t()),
            "constant": lambda: (torch.ones(2, 3), torch.tensor(7), y),
            "of a size": lambda: (torch.arange(x.shape[0]), torch.zeros(x.shape[0])),
            "zero-dim": lambda: (x.sum(), x.mean(), x.amax() * 2, x[0, 0]),
            "number": lambda: (y, x.shape[0] * 3 + 1, 2.5, True, "text", None),
            "nested": lambda: [y, {"a": (x, [y * 2])}],
        }[self.what]()


KINDS = ["several", "input", "input and more", "view of input", "transpose of input"]
KINDS += ["slice of input", "view of result", "expanded", "twice", "equal values"]
KINDS += ["weight", "weight and result", "constant", "of a size", "zero-dim"]
KINDS += ["number", "nested"]


@pytest.mark.parametrize("what", KINDS)
def test_results(what: str) -> None:
    model = Returns(what)
    compiled = pliant.compile(model, (torch.randn(5, 4),), ({0: "n"},))
    for n in (1, 2, 9):
        x = torch.randn(n, 4)
        kept = x.clone()
        got, right = compiled(x), model(x)
        leaves, structure = pytree.tree_flatten(got)
        expected, expected_structure = pytree.tree_flatten(right)
        assert structure == expected_structure
        for ours, theirs in zip(leaves, expected, strict=True):
            if isinstance(theirs, torch.Tensor):
                assert type(ours) is torch.Tensor
                torch.testing.assert_close(ours, theirs)
            else:
                assert (type(ours), ours) == (type(theirs), theirs)
        assert torch.equal(x, kept)


def test_results_do_not_share_memory_with_the_model() -> None:
    model = Returns("weight")
    compiled = pliant.compile(model, (torch.randn(5, 4),), ({0: "n"},))
    x = torch.randn(2, 4)
    right = compiled(x).clone()
    compiled(x).fill_(7.0)
    assert torch.equal(compiled(x), right)


def test_result_outlives_the_model() -> None:
    x = torch.randn(6, 4)
    compiled = pliant.compile(Returns("several"), (x,), ({0: "n"},))
    got = compiled(x)
    del compiled
    gc.collect()
    torch.testing.assert_close(got, Returns("several")(x))


def test_zero_dim_inputs() -> None:
    class Scalars(nn.Module):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return x * t + t

    compiled = pliant.compile(
        Scalars(), (torch.randn(5), torch.tensor(2.0)), ({0: "n"}, None)
    )
    for n in (0, 1, 7):
        x, t = torch.randn(n), torch.tensor(-3.5)
        torch.testing.assert_close(compiled(x, t), x * t + t)
        got = compiled(x.numpy(), t.numpy())
        np.testing.assert_allclose(got, (x * t + t).numpy(), rtol=1e-6)
    with pytest.raises(pliant.ShapeError):
        compiled(torch.randn(3), torch.randn(1))
