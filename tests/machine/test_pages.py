"""Arrays on huge pages are arrays like others."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from pliant.machine import pages


@pytest.mark.parametrize("rows", [0, 1, 1000, 1024, 2047, 5000])
def test_zeros(rows: int) -> None:
    array = pages.zeros((rows, 3, 128), np.dtype(np.float32))
    assert array.shape == (rows, 3, 128)
    assert array.dtype == np.float32
    assert array.flags.c_contiguous and array.flags.writeable
    assert not array.any()
    if array.nbytes >= pages.LEAST:
        assert array.ctypes.data % pages.HUGE == 0
    if array.size:
        assert array.ctypes.data % pages.LINE == 0
    array[...] = 2.0
    assert array.sum() == 2.0 * array.size


def test_copied() -> None:
    array = np.arange(35, dtype=np.float64).reshape(5, 7).T
    copy = pages.copied(array)
    assert copy.ctypes.data % pages.LINE == 0 and copy.flags.c_contiguous
    np.testing.assert_array_equal(copy, array)


@pytest.mark.parametrize("rows", [0, 1, 3, 4001, 10007])
def test_copies_are_whole_behind_the_block(rows: int) -> None:
    source = np.arange(rows * 512, dtype=np.float32).reshape(512, rows).T
    made = [np.zeros(source.shape, np.float32) for _ in range(3)]
    with pages.copying():
        for array in made:
            pages.copy(array, source)
    for array in made:
        np.testing.assert_array_equal(array, source)


def test_copy_that_fails_is_told() -> None:
    array = np.zeros((4096, 512), np.float32)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"), pages.copying():
        pages.copy(array, np.ones_like(array))


def test_memory_goes_with_the_array() -> None:
    before = _resident()
    for _ in range(20):
        array = pages.zeros((64, 1 << 20), np.dtype(np.uint8))
        array[:, ::4096] = 1
        del array
    assert _resident() - before < 200 << 20


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
