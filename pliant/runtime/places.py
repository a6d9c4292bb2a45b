"""Finds the fields of torch's tensors and Python's dicts that change when they do.

`watch.c` reads these fields at every call, because no function of torch or Python is as
fast. Their offsets are not hard-coded: each is found as the only offset at which
several tensors or dicts have the value that Python reports. Where one is not found, the
watch on tensors runs in Python, and the watch on dicts compares every entry.

    Python object -> c10::TensorImpl:  storage, counter, layout (rank .. dispatch keys)
                     storage -> data   counter -> count
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_uint32, c_uint64
from typing import Any

from pliant.runtime.description import Framework

IMPL_BYTES = 192  # no c10::TensorImpl is smaller
_STORAGE_BYTES, _COUNTER_BYTES = 64, 24  # nor a c10::StorageImpl or a VersionCounter
_INLINE_RANK, _LAYOUT_WORDS = 5, 24  # PLT_INLINE_RANK, PLT_LAYOUT_WORDS
_ATTEMPTS = 3


def word(address: int) -> int:
    return c_uint64.from_address(address).value


def words(address: int, size: int, wanted: int) -> set[int]:
    """The offsets within `size` bytes at which a word equals `wanted`."""
    return {k for k in range(0, size, 8) if word(address + k) == wanted}


def only(found: Sequence[set[int]]) -> int | None:
    """The only offset that is in all sets."""
    common = set.intersection(*found)
    return common.pop() if len(common) == 1 else None


# ---- tensors


def find_places(torch: Any, table: Framework) -> None:
    """Fills in the offsets that a watch needs; none if one of them is not found.

    Memory that was used before may have a wanted value by chance, so that two offsets
    are possible. Other tensors are tried then.
    """
    for _ in range(_ATTEMPTS):
        if _find_places(torch, table):
            return


def _find_places(torch: Any, table: Framework) -> bool:
    samples = _samples(torch)
    impls = [t._cdata for t in samples]
    storages = [t.untyped_storage()._cdata for t in samples]
    storage = only(
        [words(i, IMPL_BYTES, s) for i, s in zip(impls, storages, strict=True)]
    )
    data = only(
        [
            words(s, _STORAGE_BYTES, t.untyped_storage().data_ptr())
            for s, t in zip(storages, samples, strict=True)
        ]
    )
    counter = only([_of_counter(t) for t in samples])
    layout = only([_of_layout(t) for t in samples])
    if storage is None or data is None or counter is None or layout is None:
        return False
    count = only([_of_count(word(t._cdata + counter), t._version) for t in samples])
    size = (table.keys_offset + 8 - layout) // 8
    if count is None or not 2 * _INLINE_RANK < size <= _LAYOUT_WORDS:
        return False
    if not _tells(torch, layout, size) or not _uncounted(torch, counter):
        return False
    table.storage_place, table.data_place = storage, data
    table.counter_place, table.count_place = counter, count
    table.layout_place, table.layout_words = layout, size
    return True


def _samples(torch: Any) -> list[Any]:
    """Tensors that differ in every field searched; not all own their memory."""
    given = [
        torch.ones(2, 3, 5),
        torch.frombuffer(bytearray(640), dtype=torch.float32),  # owned by another
        torch.ones(2000)[7:].as_strided((3, 5, 7), (411, 13, 2)),
        torch.ones(2000, dtype=torch.int8)[11:].as_strided((4,), (17,)),
        torch.ones(4, 1, 3, 2, 2, dtype=torch.float64).transpose(0, 3),
        torch.nn.Parameter(torch.ones(6, 9)),
    ]
    for times, tensor in enumerate(given):
        for _ in range(3 + 2 * times):
            tensor.detach().add_(1)  # counts as a change of both
    return given


def _of_counter(tensor: Any) -> set[int]:
    """The version counter, which a tensor shares with `detach()`, not with `data`."""
    same, other = tensor.detach(), tensor.data

    def equal(to: Any) -> set[int]:
        pairs = ((word(tensor._cdata + k), word(to._cdata + k)) for k in places)
        return {k for k, (a, b) in zip(places, pairs, strict=True) if a == b}

    places = range(16, IMPL_BYTES, 8)  # after the count of references
    return equal(same) - equal(other)


def _of_count(counter: int, version: int) -> set[int]:
    return {
        k
        for k in range(0, _COUNTER_BYTES, 4)
        if c_uint32.from_address(counter + k).value == version
    }


def _of_layout(tensor: Any) -> set[int]:
    """The rank, room for five sizes, and for five strides."""
    wanted = {0: tensor.dim()}
    wanted |= {1 + k: size for k, size in enumerate(tensor.shape)}
    wanted |= {1 + _INLINE_RANK + k: step for k, step in enumerate(tensor.stride())}
    room = 8 * (1 + 2 * _INLINE_RANK)
    return {
        at
        for at in range(0, IMPL_BYTES - room, 8)
        if all(word(tensor._cdata + at + 8 * k) == v for k, v in wanted.items())
    }


def _tells(torch: Any, layout: int, size: int) -> bool:
    """Whether the words differ between tensors that share memory but differ in layout.

    Also checks that tensors of more than five dims have their sizes where expected.
    """
    base = torch.arange(16.0).reshape(4, 4)
    views = [
        *(base, base.t(), base[1:], base[:, 1:], base[:3], base.flatten()),
        *(base.view(torch.int32), base.unsqueeze(0), base.bfloat16()),
    ]
    seen = {tuple(word(v._cdata + layout + 8 * k) for k in range(size)) for v in views}
    deep = torch.ones(2, 3, 1, 2, 1, 3, 2).transpose(1, 5)
    beyond = word(deep._cdata + layout + 8)
    found = [word(beyond + 8 * k) for k in range(2 * deep.dim())]
    right = word(deep._cdata + layout) == deep.dim()
    return len(seen) == len(views) and right and found == [*deep.shape, *deep.stride()]


def _uncounted(torch: Any, counter: int) -> bool:
    """Whether a tensor that does not count its changes has no counter."""
    with torch.inference_mode():
        tensor = torch.ones(2)
    return word(tensor._cdata + counter) == 0


# ---- dicts


def find_tag() -> int:
    """The place of a dict's version, which every change moves; 0 if there is none.

    CPython up to 3.12 has one (PEP 509), 3.13 does not move it at every change.
    """
    moved = [_moved(d := {"a": 1, "b": 2}, change, d) for change in _CHANGES]
    for store in _STORES:
        for _ in range(_WARM):  # Python runs other code after some times
            moved.append(_moved(vars(o := _Object()), store, o))
    place = only(moved)
    still = [_moved(d := {"a": 1, "b": 2}, look, d) for look in _LOOKS]
    return 0 if place is None or any(place in m for m in still) else place


class _Object:
    def __init__(self) -> None:
        self.a, self.b = 1, 2


def _store(changed: _Object) -> None:
    changed.b = 3


def _delete(changed: _Object) -> None:
    del changed.b


_WARM = 20
_STORES: tuple[Callable[[Any], object], ...] = (
    _store,
    _delete,
    lambda o: object.__setattr__(o, "b", 3),
    lambda o: object.__setattr__(o, "c", 3),
    lambda o: object.__delattr__(o, "b"),
)
_CHANGES: tuple[Callable[[dict[str, int]], object], ...] = (
    lambda d: d.__setitem__("a", 3),
    lambda d: d.__setitem__("c", 3),
    lambda d: d.__delitem__("a"),
    lambda d: d.update(b=3),
    lambda d: d.setdefault("c", 3),
    lambda d: d.pop("a"),
    lambda d: d.popitem(),
    lambda d: d.clear(),
    lambda d: d.__ior__({"a": 3}),
)
_LOOKS: tuple[Callable[[dict[str, int]], object], ...] = (
    lambda d: d["a"],
    lambda d: d.get("c"),
    lambda d: list(d.items()),
    lambda d: d.copy().update(a=3),
)


def _moved(
    changed: dict[str, Any], change: Callable[[Any], object], of: object
) -> set[int]:
    """The offsets in a dict at which a change of its owner changes the word."""
    places = range(object.__basicsize__, dict.__basicsize__, 8)
    before = [word(id(changed) + k) for k in places]
    change(of)
    after = [word(id(changed) + k) for k in places]
    pairs = zip(places, before, after, strict=True)
    return {k for k, a, b in pairs if a != b}
