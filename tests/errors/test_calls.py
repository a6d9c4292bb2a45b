"""Wrong calls: a typed error that names input, dim, expected, got; then all is well."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim

import pliant
from pliant import errors
from pliant.errors import OptionError

VOCABULARY, LONGEST = 97, 512


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.BertModel(
            transformers.BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=64,
                max_position_embeddings=LONGEST,
            ),
            add_pooling_layer=False,
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def inputs(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (batch, seq))
    return ids, torch.ones(batch, seq, dtype=torch.long)


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def bert(encoder: nn.Module) -> pliant.CompiledModel:
    shapes = ({0: "batch", 1: "seq"}, {0: "batch", 1: "seq"})
    return pliant.compile(encoder, inputs(2, 13), shapes)


@pytest.fixture(scope="module")
def usable(encoder: nn.Module, bert: pliant.CompiledModel) -> Callable[[], None]:
    """Checks that the model works and holds no more memory than it did."""
    x = inputs(3, 17)
    right = encoder(*x)
    bert(*x)

    def check() -> None:
        torch.testing.assert_close(bert(*x), right, rtol=1e-5, atol=1e-5)

    return check


@contextmanager
def fails(
    model: pliant.CompiledModel, kind: type[Exception], usable: Callable[[], None]
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises `kind`, keeps no memory, and does no harm."""
    usable()
    arena = model.stats()["arena_bytes"]
    with pytest.raises(kind) as caught:
        yield caught
    assert not isinstance(caught.value, pliant.InternalError)
    assert caught.value.__cause__ is None
    usable()
    assert model.stats()["arena_bytes"] == arena


# ---- shapes


def test_rank(bert: pliant.CompiledModel, usable: Callable[[], None]) -> None:
    ids, mask = inputs(2, 5)
    with fails(bert, pliant.ShapeError, usable) as caught:
        bert(ids[0], mask)
    error = caught.value
    assert (error.input, error.expected, error.got) == ("ids", 2, 1)
    assert "'ids' must have 2 dims" in str(error)
    with fails(bert, pliant.ShapeError, usable) as caught:
        bert(ids, mask[:, :, None])
    assert (caught.value.input, caught.value.got) == ("mask", 3)


def test_longer_than_the_positions(
    bert: pliant.CompiledModel, usable: Callable[[], None]
) -> None:
    with fails(bert, pliant.ShapeError, usable) as caught:
        bert(*inputs(1, LONGEST + 1))
    error = caught.value
    assert (error.input, error.dim, error.got) == ("ids", 1, LONGEST + 1)
    assert str(LONGEST) in str(error.expected)
    for part in (str(LONGEST), str(LONGEST + 1), "seq"):
        assert part in str(error)


@pytest.mark.parametrize(
    ("axis", "other"), [(0, (3, 5)), (1, (2, 6)), (0, (1, 5)), (1, (2, 1))], ids=str
)
def test_dims_that_must_be_equal(
    bert: pliant.CompiledModel,
    usable: Callable[[], None],
    axis: int,
    other: tuple[int, int],
) -> None:
    ids, _ = inputs(2, 5)
    with fails(bert, pliant.ShapeError, usable) as caught:
        bert(ids, torch.ones(other, dtype=torch.long))
    error = caught.value
    assert (error.input, error.dim, error.got) == ("mask", axis, other[axis])
    assert str(other[axis]) in str(error)
    assert str(ids.shape[axis]) in str(error)


def test_unnamed_dims_that_must_be_equal(encoder: nn.Module) -> None:
    """With Dim.DYNAMIC the mask's batch is its own symbol: enough, or an error."""
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    compiled = pliant.compile(encoder, inputs(2, 13), shapes)
    ids, mask = inputs(4, 5)
    for wrong in (mask[:3], mask[:2]):  # eager has no row to read there either
        with pytest.raises(pliant.PliantError) as caught:
            compiled(ids, wrong)
        assert isinstance(caught.value, pliant.ShapeError | pliant.IndexRangeError)
    torch.testing.assert_close(compiled(ids, mask), encoder(ids, mask))


class Affine(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2.0 + y


@pytest.fixture(scope="module")
def bounded() -> pliant.CompiledModel:
    rows = Dim("rows", min=2, max=64)
    x = torch.ones(4, 8)
    return pliant.compile(Affine(), (x, x), ({0: rows}, {0: rows}))


@pytest.mark.parametrize("rows", [0, 1, 65, 1000])
def test_bounds_of_a_dim(bounded: pliant.CompiledModel, rows: int) -> None:
    x = torch.ones(rows, 8)
    with pytest.raises(pliant.ShapeError) as caught:
        bounded(x, x)
    error = caught.value
    assert (error.input, error.dim, error.got) == ("x", 0, rows)
    assert "rows" in str(error)
    assert str(rows) in str(error)
    assert "()" not in str(error)
    with pytest.raises(pliant.ShapeError):
        bounded.memory_plan(x, x)
    with pytest.raises(pliant.ShapeError):
        bounded.memory_plan(rows=rows)


@pytest.mark.parametrize("rows", [2, 64])
def test_ends_of_the_bounds(bounded: pliant.CompiledModel, rows: int) -> None:
    x = torch.ones(rows, 8)
    assert torch.equal(bounded(x, x), 3 * x)


def test_fixed_dim(bounded: pliant.CompiledModel) -> None:
    x = torch.ones(4, 9)
    with pytest.raises(pliant.ShapeError) as caught:
        bounded(x, x)
    error = caught.value
    assert (error.input, error.dim, error.got) == ("x", 1, 9)
    assert "8" in str(error.expected)


def test_multiple_of_a_number() -> None:
    class Pairs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1, 2, 3).sum(1)

    half = Dim("half", max=1000)
    compiled = pliant.compile(Pairs(), (torch.ones(8, 3),), ({0: 2 * half},))
    assert torch.equal(compiled(torch.ones(6, 3)), torch.full((3, 3), 2.0))
    with pytest.raises(pliant.ShapeError) as caught:
        compiled(torch.ones(7, 3))
    assert (caught.value.input, caught.value.dim, caught.value.got) == ("x", 0, 7)


# ---- types and counts


def test_dtype(bert: pliant.CompiledModel, usable: Callable[[], None]) -> None:
    ids, mask = inputs(2, 5)
    with fails(bert, pliant.DTypeError, usable) as caught:
        bert(ids.int(), mask)
    error = caught.value
    assert (error.input, error.expected, error.got) == ("ids", "i64", "i32")
    for part in ("'ids'", "i64", "i32"):
        assert part in str(error)
    for wrong, name in (
        (mask.float(), "f32"),
        (mask.bool(), "bool"),
        (mask.to(torch.complex64), "complex64"),
        (mask.numpy().astype(np.uint32), "u32"),
    ):
        with fails(bert, pliant.DTypeError, usable) as caught:
            bert(ids, wrong)
        assert (caught.value.input, caught.value.got) == ("mask", name)


def test_device(bert: pliant.CompiledModel, usable: Callable[[], None]) -> None:
    ids, mask = inputs(2, 5)
    with fails(bert, pliant.DTypeError, usable) as caught:
        bert(ids.to("meta"), mask)
    error = caught.value
    assert (error.input, error.expected, error.got) == ("ids", "cpu", "meta")
    assert "meta" in str(error)
    assert "cpu" in str(error)


@pytest.mark.parametrize(
    "wrong", ["text", None, 3, 3.5, [[1, 2]], object()], ids=lambda v: type(v).__name__
)
def test_python_type(
    bert: pliant.CompiledModel, usable: Callable[[], None], wrong: object
) -> None:
    ids, _ = inputs(1, 2)
    with fails(bert, pliant.PliantError, usable) as caught:
        bert(ids, wrong)
    if not isinstance(wrong, list):  # a list changes the count, which is told first
        assert isinstance(caught.value, pliant.DTypeError)
        assert caught.value.input == "mask"
        assert type(wrong).__name__ in str(caught.value)


def test_sparse(bert: pliant.CompiledModel, usable: Callable[[], None]) -> None:
    ids, mask = inputs(2, 5)
    with fails(bert, pliant.PliantError, usable):
        bert(ids, mask.to_sparse())


class Duck:
    """Says that it is a tensor, and is none."""

    shape, dtype = (2, 5), torch.int64


class BrokenDuck(Duck):
    def __dlpack__(self, **_: object) -> object:
        raise RuntimeError("boom")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class DeafDuck:
    """Nothing of it can be read."""

    @property
    def dtype(self) -> object:
        raise RuntimeError("boom")

    shape = dtype


ALMOST = ["duck", "broken", "deaf", "class", "nested", "jagged", "csr", "fake", "freed"]


@pytest.mark.parametrize("kind", [*ALMOST, "big endian"])
def test_almost_a_tensor(
    bert: pliant.CompiledModel, usable: Callable[[], None], kind: str
) -> None:
    ids, mask = inputs(2, 5)
    wrong: Any = {
        "duck": Duck,
        "broken": BrokenDuck,
        "deaf": DeafDuck,
        "class": lambda: torch.Tensor,
        "jagged": lambda: torch.nested.nested_tensor(list(mask), layout=torch.jagged),
        "csr": mask.to_sparse_csr,
        "fake": lambda: FakeTensorMode().from_tensor(mask),
        "freed": lambda: freed(mask),
        "nested": lambda: torch.nested.nested_tensor([mask[0], mask[1, :2]]),
        "big endian": lambda: mask.numpy().astype(">i8"),
    }[kind]()
    with fails(bert, pliant.DTypeError, usable) as caught:
        bert(ids, wrong)
    assert caught.value.input == "mask"


def freed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def test_meta_only_for_plans(bert: pliant.CompiledModel) -> None:
    ids, mask = (x.to("meta") for x in inputs(2, 5))
    assert bert.memory_plan(ids, mask) == bert.memory_plan(batch=2, seq=5)
    assert bert.memory_plan(mask=mask, ids=ids) == bert.memory_plan(batch=2, seq=5)
    with pytest.raises(pliant.DTypeError):
        bert(ids, mask)


def test_misaligned() -> None:
    """A copy mends it."""
    x = torch.rand(3, 5)
    raw = np.zeros(x.nbytes + 1, np.uint8)
    odd = raw[1:].view(np.float32).reshape(x.shape)
    odd[:] = x.numpy()
    compiled = pliant.compile(Affine(), (x, x), ({0: "n"}, {0: "n"}))
    assert torch.equal(compiled(torch.from_numpy(odd), x), 3 * x)
    np.testing.assert_array_equal(compiled(odd, odd), (3 * x).numpy())


def test_count(bert: pliant.CompiledModel, usable: Callable[[], None]) -> None:
    ids, mask = inputs(2, 5)
    for wrong in ((), (ids,), (ids, mask, mask)):
        with fails(bert, pliant.ShapeError, usable) as caught:
            bert(*wrong)
        assert (caught.value.expected, caught.value.got) == (2, len(wrong))
        assert str(len(wrong)) in str(caught.value)
        if len(wrong) < 2:
            names = ["ids", "mask"][len(wrong) :]
            assert f"missing: {', '.join(names)}" in str(caught.value)


def test_unknown_name(bert: pliant.CompiledModel, usable: Callable[[], None]) -> None:
    ids, mask = inputs(2, 5)
    with fails(bert, pliant.PliantError, usable) as caught:
        bert(ids, cover=mask)
    assert "unknown: cover" in str(caught.value)
    assert "missing: mask" in str(caught.value)
    with fails(bert, pliant.ShapeError, usable) as caught:
        bert(ids, mask, ids=ids)
    assert "twice: ids" in str(caught.value)


def test_defaults() -> None:
    """A parameter that the example left out must stay at its default."""

    class Shifted(nn.Module):
        def forward(self, x: Any, by: int = 4, *, mask: Any = None) -> Any:
            return x + by if mask is None else x * mask

    x = torch.rand(3)
    compiled = pliant.compile(Shifted(), (x,), ({0: "n"},))
    for y in (compiled(x, 4), compiled(x=x, mask=None), compiled(x, by=4, mask=None)):
        assert torch.equal(y, x + 4)
    for wrong in ({"by": 5}, {"mask": x}):
        with pytest.raises(pliant.ShapeError, match=next(iter(wrong))):
            compiled(x, **wrong)
    fixed = pliant.compile(Shifted(), (x, 4), ({0: "n"}, None))
    assert torch.equal(fixed(x), x + 4)
    for other in (5, 4.0, torch.ones(3)):
        with pytest.raises(pliant.ShapeError, match="'by' was fixed to 4"):
            fixed(x, other)


def test_structure() -> None:
    class Tree(nn.Module):
        def forward(self, tree: Any, z: torch.Tensor) -> torch.Tensor:
            return tree["a"] + tree["b"][0] * z

    x = torch.rand(3)
    shapes = ({"a": {0: "n"}, "b": [{0: "n"}]}, {0: "n"})
    compiled = pliant.compile(Tree(), ({"a": x, "b": [x.clone()]}, x.clone()), shapes)
    right = x + x * x
    torch.testing.assert_close(compiled({"b": [x], "a": x}, z=x), right)
    for wrong in ({"a": x, "b": x}, {"a": x, "b": [x, x]}, {"b": [x]}, [x], x):
        with pytest.raises(pliant.ShapeError, match="'tree' has another structure"):
            compiled(wrong, x)
    with pytest.raises(pliant.DTypeError, match="'z'"):
        compiled({"a": x, "b": [x]}, [x])


# ---- values


@pytest.mark.parametrize(
    "wrong", [VOCABULARY, -1, 2**31, -(2**31), 2**63 - 1, -(2**63)]
)
def test_token_id(
    bert: pliant.CompiledModel, usable: Callable[[], None], wrong: int
) -> None:
    ids, mask = inputs(4, 33)
    ids[3, 32] = wrong
    with fails(bert, pliant.IndexRangeError, usable) as caught:
        bert(ids, mask)
    assert isinstance(caught.value, IndexError)
    assert str(VOCABULARY) in str(caught.value)


def test_index_too_negative() -> None:
    """In indexing, -n counts from the end, and below that there is nothing."""

    class Pick(nn.Module):
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return x[at]

    x, at = torch.randn(7, 3), torch.tensor([0, -7, 6, -1])
    compiled = pliant.compile(Pick(), (x, at), ({0: "n"}, {0: "m"}))
    assert torch.equal(compiled(x, at), x[at])
    for wrong in (7, -8, 2**62, -(2**62)):
        with pytest.raises(pliant.IndexRangeError, match="n=7"):
            compiled(x, torch.tensor([0, wrong, 1]))
    with pytest.raises(pliant.ShapeError, match="an axis of no elements"):
        compiled(x[:0], at)
    assert torch.equal(compiled(x, at), x[at])


def test_extremum_of_nothing() -> None:
    """Eager raises; so does max with its index, and amax should not differ."""

    class Largest(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.amax(0)

    compiled = pliant.compile(Largest(), (torch.ones(3, 5),), ({0: "n"},))
    with pytest.raises(pliant.ShapeError) as caught:
        compiled(torch.ones(0, 5))
    assert (caught.value.input, caught.value.dim, caught.value.got) == ("x", 0, 0)
    assert torch.equal(compiled(torch.ones(2, 5)), torch.ones(5))


# ---- memory


def test_limit(bert: pliant.CompiledModel, usable: Callable[[], None]) -> None:
    x = inputs(2, 64)
    before = bert(*x)
    try:
        with fails(bert, pliant.MemoryLimitError, lambda: None) as caught:
            bert.memory_limit = 1000
            bert(*x)
        error = caught.value
        assert error.limit == 1000
        assert 1000 < error.least <= bert.memory_plan(*x, memory_limit=2**40).peak_bytes
        assert "1000" in str(error)
        assert str(error.least) in str(error)
        with pytest.raises(pliant.MemoryLimitError) as planned:
            bert.memory_plan(*x)
        assert planned.value.least == error.least
        bert.memory_limit = error.least  # is really enough
        torch.testing.assert_close(bert(*x), before, rtol=1e-5, atol=1e-5)
        assert bert.stats()["last_peak_bytes"] <= error.least
        bert.memory_limit = error.least - 1  # and nothing less is
        with pytest.raises(pliant.MemoryLimitError):
            bert(*x)
        bert.memory_limit = "64MiB"
        assert bert.memory_limit == 64 * 2**20
        torch.testing.assert_close(bert(*x), before, rtol=1e-5, atol=1e-5)
    finally:
        bert.memory_limit = None
    assert bert.memory_limit is None
    usable()
    assert bert.compile_count == 1


def test_limit_of_nothing(bert: pliant.CompiledModel) -> None:
    try:
        bert.memory_limit = 0
        with pytest.raises(pliant.MemoryLimitError) as caught:
            bert(*inputs(1, 2))
        assert caught.value.limit == 0
    finally:
        bert.memory_limit = None


def test_limit_beyond_64_bits(bert: pliant.CompiledModel) -> None:
    """More than any machine has: no limit, or a ValueError; never a small one."""
    try:
        for limit in (2**63 - 1, 2**63, 2**64, 2**70, f"{2**60}GiB"):
            with suppress(ValueError):
                bert.memory_limit = limit
            bert(*inputs(1, 2))
    finally:
        bert.memory_limit = None


@pytest.mark.parametrize(
    ("text", "count"),
    [("1KiB", 1024), ("1.5 GiB", 3 * 2**29), (" 2 mb ", 2 * 10**6), ("77", 77)],
)
def test_limit_text(bert: pliant.CompiledModel, text: str, count: int) -> None:
    try:
        bert.memory_limit = text
        assert bert.memory_limit == count
    finally:
        bert.memory_limit = None


NOT_LIMITS = ["", "lots", "12XB", "-5MiB", -1, "1.2.3MiB", ".", "MiB", "1e9"]
NOT_LIMITS += [True, 1.5, [1], "9" * 400]


@pytest.mark.parametrize("wrong", NOT_LIMITS, ids=lambda x: repr(x)[:12])
def test_limit_that_is_none(
    bert: pliant.CompiledModel, usable: Callable[[], None], wrong: object
) -> None:
    bert.memory_limit = "1GiB"
    try:
        with pytest.raises(ValueError, match="memory limit") as caught:
            bert.memory_limit = wrong
        assert str(wrong) in str(caught.value)
        assert bert.memory_limit == 2**30
    finally:
        bert.memory_limit = None
    with pytest.raises(ValueError, match="memory limit"):
        bert.memory_plan(batch=1, seq=1, memory_limit=wrong)
    usable()


def test_plan_of_wrong_dims(bert: pliant.CompiledModel) -> None:
    for wrong in ({"batch": 1}, {"batch": 1, "seq": 2, "depth": 3}, {}):
        with pytest.raises(pliant.ShapeError, match="batch, seq"):
            bert.memory_plan(**wrong)
    for wrong in ({"batch": 1, "seq": LONGEST + 1}, {"batch": -1, "seq": 2}):
        with pytest.raises(pliant.ShapeError):
            bert.memory_plan(**wrong)
    for value in (2.5, "3", None, True, 2**80 + 1, 2**63, 10**5000):
        with pytest.raises(pliant.ShapeError, match="batch"):
            bert.memory_plan(batch=value, seq=3)
    plan = bert.memory_plan(batch=np.int64(2), seq=3)
    assert plan == bert.memory_plan(batch=2, seq=3)
    for wrong in ({"batch": 2**40, "seq": 500}, {"batch": 2**62, "seq": 500}):
        with pytest.raises(pliant.PliantError) as caught:
            plan = bert.memory_plan(**wrong)
            assert plan.peak_bytes > 2**40 * 500 * 32
            raise pliant.ShapeError("a plan of that size is right as well")
        assert not isinstance(caught.value, pliant.InternalError)


def test_more_than_the_machine_has() -> None:
    """Sizes that no machine has: a typed error, before anything is touched."""

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x[:, None, None] * x[None, :, None] * x).exp()

    compiled = pliant.compile(Outer(), (torch.ones(3),), ({0: "n"},))
    for n in (2**17, 2**21):
        with pytest.raises(pliant.PliantError) as caught:
            compiled(torch.ones(n))
        assert isinstance(caught.value, pliant.ShapeError | pliant.MemoryLimitError)
    x = torch.rand(5)
    right = Outer()(x)
    torch.testing.assert_close(compiled(x), right)


def test_many_failures_hold_nothing(
    bert: pliant.CompiledModel, usable: Callable[[], None]
) -> None:
    usable()
    arena = bert.stats()["arena_bytes"]
    ids, mask = inputs(2, 30)
    bad = ids.clone()
    bad[1, 29] = VOCABULARY
    for _ in range(200):
        for wrong in ((ids,), (ids.int(), mask), (ids, mask[:, :7]), (bad, mask)):
            with pytest.raises(pliant.PliantError):
                bert(*wrong)
    usable()
    assert bert.stats()["arena_bytes"] <= arena


# ---- compiling


def strange(name: str) -> Any:
    """An op that only its package knows."""
    op = torch.library.custom_op(
        f"strange::{name}", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(torch.empty_like)
    return op


FIRST, SECOND, THIRD = map(strange, ("first", "second", "third"))


class Strange(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = FIRST(x).abs()  # first strange line
        z = SECOND(x)  # second strange line
        return y.sum() + z.sum() + THIRD(x @ x.mT).sum()  # third


def test_unsupported_ops_are_all_listed() -> None:
    with pytest.raises(pliant.UnsupportedOpError) as caught:
        pliant.compile(Strange(), (torch.randn(4, 4),), ({0: Dim.AUTO},))
    error = caught.value
    names = " ".join(op.name for op in error.ops)
    for name in ("first", "second", "third"):
        assert name in names
        assert name in str(error)
    first = inspect.getsourcelines(Strange.forward)[1] + 1
    lines = {op.name: op.loc for op in error.ops}
    for part, line in (("first", first), ("second", first + 1), ("third", first + 2)):
        locs = [loc for name, loc in lines.items() if part in name]
        assert any(f"test_calls.py:{line}" in loc for loc in locs), lines


def test_not_a_model() -> None:
    for wrong in (3, object(), lambda x: x):
        with pytest.raises(pliant.PliantError, match="cannot compile"):
            pliant.compile(wrong, (torch.ones(2),))
    with pytest.raises(pliant.PliantError, match="cannot be read"):
        pliant.compile("model")  # the path of an ONNX file
    with pytest.raises(OptionError, match="example_inputs"):
        pliant.compile(Affine())


@pytest.mark.parametrize("threads", [-1, 0, "2", 2.0, True, 2**70, [1]], ids=str)
def test_threads(threads: Any) -> None:
    x = torch.ones(2)
    with pytest.raises(OptionError, match="threads") as caught:
        pliant.compile(Affine(), (x, x), threads=threads)
    assert isinstance(caught.value, ValueError)
    assert str(threads) in str(caught.value)


def test_example_inputs() -> None:
    x = torch.ones(2)
    assert torch.equal(pliant.compile(Affine(), [x, x])(x, x), 3 * x)
    for wrong in (x, 5, {"x": x, "y": x}, (x,), (x, x, x)):
        with pytest.raises(OptionError, match="example_inputs"):
            pliant.compile(Affine(), wrong)


def test_other_options() -> None:
    x = torch.ones(2)
    for name in ("options", "target"):
        with pytest.raises(OptionError, match=name):
            pliant.compile(Affine(), (x, x), **{name: "fast"})


def test_every_error_is_exported() -> None:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, pliant.PliantError):
            assert getattr(pliant, name) is value and name in pliant.__all__
