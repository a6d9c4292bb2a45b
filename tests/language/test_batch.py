"""Continuous batching: every request gets what it gets alone, within the limit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import reference, words, write

import pliant
from pliant.language.batch import Batch, Request
from pliant.language.caches import token_bytes
from pliant.language.sampling import TokenSampler

TEXTS = ("the ant", "on 1 day\nin the", "", "a", "in the on the ant " * 20)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> pliant.LanguageModel:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, reference("llama", True), "q8_0", "llama")
    return pliant.load_gguf(path, threads=2)


def asked(count: int, seed: int = 0) -> list[Request]:
    draw = random.Random(seed)
    return [
        Request(
            [draw.randrange(len(words()[0])) for _ in range(draw.choice((1, 7, 300)))],
            draw.choice((1, 5, 12)),
            TokenSampler(),
        )
        for _ in range(count)
    ]


def alone(lm: pliant.LanguageModel, request: Request) -> list[int]:
    return list(lm.next_tokens(request.prompt, request.most, TokenSampler()))


def least(batch: Batch, request: Request) -> int:
    """The limit that a request needs by itself."""
    tight = Batch.__new__(Batch)
    tight.lm, tight.weights, tight.limit = batch.lm, batch.weights, 0
    with pytest.raises(pliant.MemoryLimitError) as found:
        tight._check_alone(request.room)
    return found.value.least


def test_requests_come_and_go(lm: pliant.LanguageModel) -> None:
    requests = asked(20)
    want = [alone(lm, r) for r in requests]
    batch, later = Batch(lm, most_rows=4), list(requests)
    most = 0
    while batch.step() or later:
        if later:
            batch.submit(later.pop(0))
        most = max(most, len(batch.rows))
        assert len(batch.rows) + (batch.reading is not None) <= 4
    assert [r.made for r in requests] == want
    assert {r.finish for r in requests} == {"length"}
    assert most == 4
    counts = batch.counts
    assert (counts.admitted, counts.finished) == (20, 20)
    assert counts.prompt_tokens == sum(len(r.prompt) for r in requests)
    assert counts.made_tokens == sum(map(len, want))
    assert lm.stats()["compiles"] == 1


def test_an_end_and_a_vanished_request_free_their_place(
    lm: pliant.LanguageModel,
) -> None:
    requests = asked(5, seed=1)
    for request in requests:
        request.most = 12
    want = [alone(lm, r) for r in requests]
    stopped, gone, waiting = requests[0], requests[1], requests[4]
    stopped.ends = frozenset({want[0][3]})
    batch = Batch(lm, most_rows=3)
    for request in requests:
        batch.submit(request)
    batch.step()
    batch.cancel(waiting)
    while len(gone.made) < 2:
        batch.step()
    batch.cancel(gone)
    batch.cancel(gone)
    batch.run()
    assert [r.finish for r in requests] == [
        *("stop", "cancelled", "length", "length", "cancelled")
    ]
    assert stopped.made == want[0][: want[0].index(want[0][3])]
    assert gone.made == want[1][: len(gone.made)]
    assert [r.made for r in requests[2:4]] == want[2:4]
    assert waiting.made == []
    assert not batch.caches.lengths.any()
    assert not any(m.any() for m in batch.caches.rows(0, batch.caches.places))


def test_reading_is_cancelled(lm: pliant.LanguageModel) -> None:
    long, short = asked(2)
    long.prompt, long.most = [1] * 400, 3
    want = alone(lm, short)
    batch = Batch(lm)
    batch.submit(long)
    batch.submit(short)
    batch.step()
    assert batch.reading is long
    batch.cancel(long)
    batch.run()
    assert short.made == want


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_limit_holds(lm: pliant.LanguageModel, rows: int) -> None:
    """As many rows at once as fit: others wait, and nothing is above the limit."""
    requests = asked(12, seed=2)
    want = [alone(lm, r) for r in requests]
    loose = Batch(lm)
    one = max(least(loose, r) for r in requests)
    limit = one + (rows - 1) * max(r.room for r in requests) * token_bytes(lm.shape)
    try:
        batch = Batch(lm, memory_limit=limit)
        for request in requests:
            batch.submit(request)
        while batch.step():
            assert batch.held_bytes <= limit
        assert [r.made for r in requests] == want
        assert 0 < batch.counts.peak_bytes <= limit
        assert batch.counts.failed == 0
    finally:
        lm.model.memory_limit = None


def test_a_limit_that_is_too_small_for_one(lm: pliant.LanguageModel) -> None:
    long = Request([1] * 400, 100, TokenSampler())
    need = least(Batch(lm), long)
    try:
        batch = Batch(lm, memory_limit=need - 1)
        with pytest.raises(pliant.MemoryLimitError, match="caches") as found:
            batch.submit(long)
        assert (found.value.limit, found.value.least) == (need - 1, need)
        assert batch.counts.refused == 1
        exact = Batch(lm, memory_limit=need)
        exact.submit(long)
        exact.run()
        assert long.finish == "length"
        assert exact.counts.peak_bytes <= need
        with pytest.raises(pliant.MemoryLimitError, match="weights"):
            Batch(lm, memory_limit="1KiB")
    finally:
        lm.model.memory_limit = None


def test_the_own_limit_of_the_model(lm: pliant.LanguageModel) -> None:
    """A batch keeps it for its calls, and leaves it as it was."""
    request = Request([1] * 300, 20, TokenSampler())
    calls = Batch(lm, memory_limit="1GiB")._room(1, request.room, 0).least
    try:
        lm.model.memory_limit = calls
        batch = Batch(lm, memory_limit="1GiB")
        batch.submit(request)
        batch.run()
        assert request.finish == "length"
        assert lm.model.memory_limit == calls
        held = batch.weights.weight_bytes + batch.caches.nbytes
        assert batch.counts.peak_bytes - held <= calls
        lm.model.memory_limit = 1
        least = batch._room(1, request.room, 0).least
        lm.model.memory_limit = least - 1
        with pytest.raises(pliant.MemoryLimitError, match="model itself") as found:
            batch.submit(request)
        assert (found.value.limit, found.value.least) == (least - 1, least)
    finally:
        lm.model.memory_limit = None


def test_what_is_refused(lm: pliant.LanguageModel) -> None:
    batch = Batch(lm)
    with pytest.raises(pliant.ShapeError, match="512"):
        batch.submit(Request([1] * 500, 13, TokenSampler()))
    with pytest.raises(pliant.ShapeError, match="at least one token"):
        batch.submit(Request([], 1, TokenSampler()))
    with pytest.raises(pliant.OptionError):
        Batch(lm, most_rows=0)
    none = Request([1], 0, TokenSampler())
    batch.submit(none)
    assert (none.finish, none.made) == ("length", [])
    bad = Request([len(words()[0])], 3, TokenSampler())
    good = Request([1], 3, TokenSampler())
    for request in (bad, good):
        batch.submit(request)
    batch.run()
    assert bad.finish == "failed"
    assert isinstance(bad.error, pliant.IndexRangeError)
    assert good.finish == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_token_cannot_be_drawn(
    lm: pliant.LanguageModel, temperature: float
) -> None:
    class Broken(TokenSampler):
        def pick(self, logits: np.ndarray) -> int:
            return super().pick(logits * np.nan)

    requests = [Request([1, 2], 4, TokenSampler()) for _ in range(3)]
    want = alone(lm, requests[0])
    requests[1].sampler = Broken(temperature, seed=0)
    batch = Batch(lm)
    for request in requests:
        batch.submit(request)
    batch.run()
    assert [r.finish for r in requests] == ["length", "failed", "length"]
    assert requests[0].made == requests[2].made == want
    assert isinstance(requests[1].error, FloatingPointError)


def test_generate_is_a_batch(lm: pliant.LanguageModel, tmp_path: Path) -> None:
    want = [lm.generate(text, 12) for text in TEXTS]
    before = lm.stats()["calls"]
    assert lm.generate(TEXTS, 12) == want
    assert lm.stats()["calls"] - before < 12 + 3 * len(TEXTS)
    assert lm.generate([], 12) == []
    end = want[0][3:5]
    assert lm.generate(TEXTS[:1], 12, stop=end) == [want[0][: want[0].index(end)]]
    lm.model.memory_limit = 1
    try:
        with pytest.raises(pliant.MemoryLimitError):
            lm.generate(TEXTS, 3)
    finally:
        lm.model.memory_limit = None
