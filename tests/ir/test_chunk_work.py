"""The work of a loop over chunks, which weighs how many rows a chunk has."""

from __future__ import annotations

import pytest

from pliant.ir.graph import ChunkLoop, Graph, Op
from pliant.ir.parse import parse_module
from pliant.ir.work import Work, chunk_work
from pliant.machine.rates import ASSUMED_BYTES, ASSUMED_FLOPS, CALL_SECONDS
from pliant.sym import sym

KERNEL = """graph @kernel(%x: f32[k, 8], %w: f32[8, 4]) {
  %y: f32[k, 4] = matmul(%x, %w)
  return %y
}"""


def work(copied: int = 0) -> Work:
    kernel = parse_module(KERNEL.replace("@kernel", "@main")).main
    attrs = (("extent", sym("n")), ("rows", sym("r")), ("outers", ()))
    body = Graph("chunk", (), (), (), ("k", "first"))
    op = Op("chunk", (), attrs, (), (body,))
    loop = ChunkLoop(op, frozenset(), (kernel,), sym("n") * copied)
    return chunk_work(loop)


@pytest.mark.parametrize("n", [1, 7, 100])
@pytest.mark.parametrize("r", [1, 3, 30, 99, 100])
def test_weights_are_read_in_every_round(n: int, r: int) -> None:
    rounds = -(-n // r)
    at, made = {"n": n, "r": r}, work()
    flops, moved = 2 * n * 8 * 4, 4 * (n * 8 + n * 4 + rounds * 8 * 4)
    assert made.flops.evaluate(at) == flops + rounds * int(CALL_SECONDS * ASSUMED_FLOPS)
    assert made.bytes.evaluate(at) == moved + rounds * int(CALL_SECONDS * ASSUMED_BYTES)


def test_more_rows_are_never_slower() -> None:
    found = [work(16).bytes.evaluate({"n": 100, "r": r}) for r in range(1, 101)]
    assert found == sorted(found, reverse=True)
    assert work(16).bytes.evaluate({"n": 0, "r": 1}) == 128  # nothing but the weight
