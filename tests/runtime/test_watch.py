"""What a watch sees of dicts and tensors, in C with and without tags, and in Python."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pliant.model.weights import _PlainWatch
from pliant.runtime import caller, places
from pliant.runtime.caller import Watch
from pliant.runtime.description import Framework

Tables = list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(params=["tags", "entries", "python"])
def watch(request: pytest.FixtureRequest) -> Callable[[Tables, list[Any]], Any]:
    if request.param == "python":
        return _PlainWatch
    address = caller.watching_torch()
    assert address, "the places of this torch are not found"
    table = Framework.from_buffer_copy(Framework.from_address(address))
    if request.param == "entries":
        table.tag_place = 0
    elif not table.tag_place:
        pytest.skip("this Python's dicts have no tags")

    def make(tables: Tables, tensors: list[Any]) -> Any:
        return Watch(ctypes.addressof(table), tables, tensors)

    return make


# ---- dicts


def test_entries_of_dicts(watch: Any) -> None:
    one, two, other = object(), object(), object()
    kept = {"one": one, "two": two, "beside": other}
    seen = watch([(kept, {"one": one, "two": two})], [])
    assert not seen.changed()
    kept["beside"] = two  # not watched
    kept["more"] = other
    assert not seen.changed()
    kept["two"] = other
    assert seen.changed()
    kept["two"] = two
    assert not seen.changed()
    del kept["one"]
    assert seen.changed()
    kept["one"] = one  # now the last
    assert not seen.changed()
    kept["two"], kept["one"] = one, two
    assert seen.changed()
    kept["two"], kept["one"] = two, one
    for k in range(1000):
        kept[f"key {k}"] = other
    assert not seen.changed()
    kept.clear()
    assert seen.changed()
    kept.update(two=two, one=one)
    assert not seen.changed()
    seen.mark()
    assert seen.changed()


def test_an_entry_that_was_replaced_before(watch: Any) -> None:
    one, other = object(), object()
    kept = {"one": other}
    assert watch([(kept, {"one": one})], []).changed()


def test_attributes(watch: Any) -> None:
    class Owner:
        pass

    owner, one = Owner(), object()
    owner.one = one
    seen = watch([(vars(owner), {"one": one})], [])
    for _ in range(50):
        assert not seen.changed()
        owner.one = object()
        assert seen.changed()
        owner.one = one


# ---- tensors


def changes() -> dict[str, Callable[[torch.Tensor], object]]:
    def resize(t: torch.Tensor) -> None:
        t.untyped_storage().resize_(0)

    def set_data(made: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        def run(t: torch.Tensor) -> None:
            t.data = made(t.data)

        return run

    return {
        "in place": lambda t: t.add_(1),
        "through a view": lambda t: t[0].zero_(),
        "through a detached one": lambda t: t.detach().zero_(),
        "clone": set_data(torch.clone),
        "transposed": set_data(lambda t: t.transpose(0, 1)),
        "shorter": set_data(lambda t: t[:2]),
        "shifted": set_data(lambda t: t[1:]),
        "another type": set_data(lambda t: t.view(torch.int32)),
        "one more dim": set_data(lambda t: t[None]),
        "storage": resize,
        "shared": lambda t: t.share_memory_(),
        "swapped": lambda t: torch.utils.swap_tensors(t, torch.ones_like(t)),
    }


@pytest.mark.parametrize("shape", [(3, 3), (3, 3, 1, 2, 1), (3, 3, 1, 2, 1, 2, 1)])
@pytest.mark.parametrize("name", changes())
def test_changes_of_a_tensor(watch: Any, name: str, shape: tuple[int, ...]) -> None:
    changed, other = torch.rand(shape), torch.rand(shape)
    seen = watch([], [other, changed])
    assert not seen.changed()
    changes()[name](changed)
    assert seen.changed()
    assert not watch([], [other, changed]).changed()


def test_what_changes_nothing(watch: Any) -> None:
    weight = torch.nn.Parameter(torch.rand(3, 3))
    seen = watch([], [weight])
    (weight @ weight).sum().backward()
    weight.requires_grad_(False)
    weight.grad = None
    weight.numpy()
    weight.tag = "mine"
    assert not seen.changed()


def test_many_tensors(watch: Any) -> None:
    """Each is seen on its own, among equal ones."""
    tensors = [torch.rand(5) for _ in range(100)]
    for changed in tensors[::13]:
        seen = watch([], tensors)
        assert not seen.changed()
        changed.add_(1)
        assert seen.changed()


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.rand(0),
        lambda: torch.tensor(1.0),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.rand(2, 2, dtype=torch.complex64).conj(),
        lambda: torch.nn.Parameter(torch.rand(3)),
    ],
)
def test_unusual_tensors(watch: Any, made: Callable[[], torch.Tensor]) -> None:
    tensor = made()
    seen = watch([], [tensor])
    assert not seen.changed()
    with torch.no_grad():
        tensor.mul_(1)
    assert seen.changed()


def test_uncounted_tensors(watch: Any) -> None:
    with torch.inference_mode():
        tensor = torch.rand(3)
        seen = watch([], [tensor])
        tensor.add_(1)
        assert not seen.changed()
        tensor.data = torch.rand(3)
        assert seen.changed()


def test_what_is_watched_is_held(watch: Any) -> None:
    """Nothing is read that was freed, and a watch is no owner for good."""
    tensor = torch.rand(1000)
    alive = weakref.ref(tensor)
    table = {"tensor": tensor}
    seen = watch([(table, {"tensor": tensor})], [tensor])
    del table["tensor"], tensor
    gc.collect()
    assert alive() is not None and seen.changed()
    ring = {"watch": seen}
    ring["ring"] = watch([(ring, {"watch": seen})], [])
    del seen, ring
    gc.collect()
    assert alive() is None


def test_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="tensors of its framework"):
        Watch(caller.watching_torch(), [], [1])
    with pytest.raises(TypeError):
        Watch(caller.watching_torch(), [(1, {})], [])


# ---- places


def test_places_that_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that two words could be, or none: there is no watch in C."""
    whole = Framework.from_address(caller.watching_torch())
    for name in ("_of_counter", "_of_layout"):
        for found in ({8, 16}, set[int]()):
            table = Framework.from_buffer_copy(whole)
            table.layout_words = 0
            with monkeypatch.context() as patch:
                patch.setattr(places, name, lambda *_, found=found: found)
                places.find_places(torch, table)
            assert table.layout_words == 0
    table = Framework.from_buffer_copy(whole)
    table.layout_words = 0
    places.find_places(torch, table)
    assert bytes(table) == bytes(whole)


def test_a_tag_that_does_not_always_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_CHANGES", (lambda _: None,))
    assert places.find_tag() == 0
