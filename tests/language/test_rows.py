"""Rows of a batch, each of its own length, in one cache and by one program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_gguf import reference, words, write

import pliant
from pliant.language.caches import RowCaches, token_bytes

Pair = tuple[pliant.LanguageModel, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = reference("llama", True)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, model, "q4_1", "llama")
    return pliant.load_gguf(path, threads=2), model


def random_ids(count: int) -> list[int]:
    return [int(k) for k in torch.randint(len(words()[0]), (count,))]


def close(model: Any, row: list[int], logits: np.ndarray) -> None:
    """The logits of a row's last tokens, against the model on that row alone."""
    with torch.no_grad():
        want = model(torch.tensor([row])).logits[0, len(row) - len(logits) :]
    torch.testing.assert_close(torch.from_numpy(logits), want, rtol=2e-3, atol=2e-3)


def read(
    lm: pliant.LanguageModel, caches: RowCaches, place: int, ids: list[int]
) -> np.ndarray:
    return lm.run(np.array([ids], np.int64), caches, place, len(ids))[0]


def test_rows_of_different_length(pair: Pair) -> None:
    lm, model = pair
    caches = RowCaches(lm.shape, 5, 64)
    rows = [random_ids(n) for n in (5, 1, 0, 17)]
    for place, row in enumerate(rows):
        if row:
            close(model, row, read(lm, caches, place, row))
    for new in (1, 1, 4, 0, 1):  # several at once are a draft that is verified
        more = [random_ids(new) for _ in rows]
        rows = [row + ids for row, ids in zip(rows, more, strict=True)]
        got = lm.run(np.array(more, np.int64).reshape(4, new), caches, 0, new)
        for row, logits in zip(rows, got, strict=True):
            close(model, row, logits)
    assert caches.lengths.tolist() == [12, 8, 7, 24, 0]
    assert lm.stats()["compiles"] == 1


def test_rows_end_and_are_replaced(pair: Pair) -> None:
    lm, model = pair
    caches = RowCaches(lm.shape, 3, 8)
    rows = [random_ids(n) for n in (6, 3, 7)]
    for place, row in enumerate(rows):
        read(lm, caches, place, row)

    def step() -> None:
        count = len(rows)
        for row in rows:
            row += random_ids(1)
        ids = np.array([[row[-1]] for row in rows], np.int64)
        for row, logits in zip(rows, lm.run(ids, caches, 0, 1), strict=True):
            close(model, row, logits)
        assert caches.lengths[:count].tolist() == [len(row) for row in rows]

    step()
    caches.clear(0)
    assert not any(m[0].any() for m in caches.rows(0, 1))
    caches.move(2, 0)
    rows[0] = rows.pop()
    caches.resize(4, 40)
    step()
    other = random_ids(25)
    read(lm, caches, 2, other[:20])  # in two parts, others go on between them
    step()
    close(model, other, read(lm, caches, 2, other[20:]))
    rows.append(other)
    step()
    caches.resize(3, 26)
    with pytest.raises(pliant.OptionError, match="26 tokens"):
        caches.resize(3, 25)
    with pytest.raises(pliant.OptionError, match="places"):
        caches.resize(2, 26)
    assert caches.nbytes == sum(m.nbytes for m in caches.rows(0, 3))
    assert caches.nbytes == 3 * 26 * token_bytes(lm.shape)


def test_refused_calls_write_nothing(pair: Pair) -> None:
    lm, _ = pair
    caches = RowCaches(lm.shape, 2, 8)
    ids = np.array([[1, 2], [3, 4]], np.int64)
    lm.run(ids, caches, 0, 1)
    before = [m.copy() for m in caches.rows(0, 2)]

    def refused(error: type[Exception], match: str, given: np.ndarray) -> None:
        with pytest.raises(error, match=match):
            lm.run(given, caches, 0, 1)
        assert caches.lengths.tolist() == [2, 2]
        assert all(map(np.array_equal, before, caches.rows(0, 2)))

    refused(pliant.IndexRangeError, str(len(words()[0])), ids * 0 + len(words()[0]))
    refused(pliant.ShapeError, "room for capacity .=8", np.ones((2, 7), np.int64))
    lm.model.memory_limit = 0
    try:
        refused(pliant.MemoryLimitError, "least", ids)
    finally:
        lm.model.memory_limit = None
    # A row that is longer than `past` says: its tokens would be outside of the caches.
    with pytest.raises(pliant.IndexRangeError, match="length of a row"):
        lm.model(ids, np.array([2, 3]), *caches.rows(0, 2), 2, 1)
    assert all(map(np.array_equal, before, caches.rows(0, 2)))


def test_no_copy_of_the_past(pair: Pair) -> None:
    lm, _ = pair
    caches = RowCaches(lm.shape, 2, 4000)
    caches.lengths[:] = 3000, 10
    before = [m.copy() for m in caches.rows(0, 2)]
    lm.run(np.array([[1], [2]], np.int64), caches, 0, 1)
    for memory, old in zip(caches.rows(0, 2), before, strict=True):
        changed = (memory != old).any((1, 3))
        assert np.argwhere(changed).tolist() == [[0, 3000], [1, 10]]
    assert lm.stats()["last_peak_bytes"] < caches.rows(0, 1)[0].nbytes


def test_forward_wants_the_rows_it_had(pair: Pair, tmp_path: Path) -> None:
    lm, _ = pair
    lm.reset()
    lm.forward(np.array([[1], [2]]))
    with pytest.raises(pliant.ShapeError, match="2 rows, not 3"):
        lm.forward(np.array([[1], [2], [3]]))
    lm.reset()


def test_what_moving_holds(pair: Pair) -> None:
    """All of the larger memory, be it the old one or the new, and an array."""
    shape = pair[0].shape
    small, large = RowCaches(shape, 2, 10), RowCaches(shape, 1, 400)
    arrays = 2 * shape.layers
    held = large.nbytes + small.nbytes // arrays
    assert large.bytes_to_resize(2, 10) == held
    assert small.bytes_to_resize(1, 400) == held
    assert RowCaches(shape, 0, 0).bytes_to_resize(1, 400) == large.nbytes
