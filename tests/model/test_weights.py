"""Weights that change after compiling: a compiled model follows its module."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pliant

ROWS = ({0: "rows"},)


class Plain(nn.Module):
    """Weights that are packed, folded, merged, absorbed, and read as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 3)
        self.register_buffer("scale", torch.rand(16))
        self.shift = torch.randn(16)  # neither a parameter nor a buffer

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids)) * (self.scale + 1) + self.shift
        return self.head(torch.tanh(self.left(x)) * self.right(x))


class Image(nn.Module):
    """A batch norm that goes into the convolution before it, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.relu(self.norm(self.conv(x))))


def made(kind: type[nn.Module]) -> tuple[nn.Module, pliant.CompiledModel, Tensor]:
    torch.manual_seed(0)
    model = kind().eval()
    if kind is Plain:
        x = torch.randint(0, 11, (4,))
        shapes: Any = ROWS
    else:
        x = torch.randn(2, 3, 6, 5)
        shapes = ({0: "n", 2: "h", 3: "w"},)
    compiled = pliant.compile(model, (x,), shapes, threads=1)
    check(model, compiled, x)
    return model, compiled, x


def check(model: nn.Module, compiled: Callable[..., Any], x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.fixture(params=[Plain, Image])
def case(
    request: pytest.FixtureRequest,
) -> tuple[nn.Module, pliant.CompiledModel, Tensor]:
    return made(request.param)


def other_weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.rand_like(t) + 0.5 if t.is_floating_point() else t.clone()
        for name, t in model.state_dict().items()
    }


# ---- ways of changing


def load(model: nn.Module) -> None:
    model.load_state_dict(other_weights(model))


def assign(model: nn.Module) -> None:
    model.load_state_dict(other_weights(model), assign=True)


def set_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.rand_like(p)


def set_data_twice(model: nn.Module) -> None:
    """The second may well lie where the weight lay that the model was compiled with."""
    set_data(model)
    gc.collect()
    set_data(model)


def set_first(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.rand(2, *p.shape)[0]


def set_second(model: nn.Module) -> None:
    """After `set_first`: other values in the same memory."""
    for p in model.parameters():
        whole = torch.empty(0, dtype=p.dtype).set_(p.untyped_storage())
        p.data = whole[p.numel() :].view(p.shape)


def transpose(model: nn.Module) -> None:
    for p in model.parameters():
        if p.dim() == 2 and p.shape[0] == p.shape[1]:
            p.data = p.data.t()
        elif p.dim() == 4 and p.shape[2] == p.shape[3]:
            p.data = p.data.transpose(2, 3)


def round_trip(model: nn.Module) -> None:
    model.half().float()


def replace(model: nn.Module) -> None:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.rand_like(p)))


def replace_modules(model: nn.Module) -> None:
    other = copy.deepcopy(model)
    load(other)
    for name, child in other.named_children():
        setattr(model, name, child)


def swap(model: nn.Module) -> None:
    for p in model.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(torch.rand_like(p)))


def buffers(model: nn.Module) -> None:
    for b in model.buffers():
        if b.is_floating_point():
            b.mul_(1.5)


def new_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, b in list(module.named_buffers(recurse=False)):
            setattr(module, name, b + 1)


def channels_last(model: nn.Module) -> None:
    load(model.to(memory_format=torch.channels_last))


def inference(model: nn.Module) -> None:
    with torch.inference_mode():
        for p in model.parameters():
            p.mul_(2)


def steps(**options: Any) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        kind = options.pop("kind", torch.optim.AdamW)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for p in model.parameters():
            p.grad = torch.rand_like(p)
        optimizer.step()

    return run


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "load_state_dict": load,
    "assign": assign,
    "data": set_data,
    "data twice": set_data_twice,
    "data of two": set_first,
    "data beside": set_second,
    "data transposed": transpose,
    "half and back": round_trip,
    "new parameters": replace,
    "new modules": replace_modules,
    "swap_tensors": swap,
    "buffers": buffers,
    "new buffers": new_buffers,
    "channels_last": channels_last,
    "inference mode": inference,
    "sgd": steps(kind=torch.optim.SGD),
    "adamw": steps(),
    "fused adamw": steps(fused=True),
    "foreach adamw": steps(foreach=True),
}


def test_every_way_is_followed(
    case: tuple[nn.Module, pliant.CompiledModel, Tensor],
) -> None:
    model, compiled, x = case
    for name, change in WAYS.items():
        if name == "channels_last" and isinstance(model, Plain):
            continue
        before = compiled(x)
        change(model)
        check(model, compiled, x)
        assert not torch.equal(compiled(x), before), name
    assert compiled.compile_count == 1


class Words(nn.Module):
    """A product of 8-bit integers."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randint(-128, 128, (64, 48), dtype=torch.int8)
        self.register_buffer("weight", values)
        self.register_buffer("scale", torch.rand(48))

    def forward(self, x: Tensor) -> Tensor:
        return torch._int_mm(x, self.weight) * self.scale


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[int, str]]] = {
    "rows": (lambda: nn.Linear(64, 2), torch.ones(3, 64), {0: "n"}),
    "tight": (lambda: nn.Linear(33, 40), torch.ones(3, 33), {0: "n"}),
    "words": (Words, torch.ones(32, 64, dtype=torch.int8), {0: "n"}),
    "halves": (
        lambda: nn.Linear(16, 32).bfloat16(),
        torch.ones(2, 16).bfloat16(),
        {0: "n"},
    ),
    "merged": (
        lambda: nn.TransformerEncoderLayer(32, 2, 64, batch_first=True),
        torch.randn(1, 3, 32),
        {0: "n", 1: "s"},
    ),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(8, 16, 3, groups=4), nn.BatchNorm2d(16)),
        torch.randn(1, 8, 6, 6),
        {0: "n", 2: "h", 3: "w"},
    ),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
        torch.randn(2, 16),
        {0: "n"},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_made_again(name: str) -> None:
    make, x, dims = LAYOUTS[name]
    torch.manual_seed(0)
    model = make().eval()
    compiled = pliant.compile(model, (x,), (dims,), threads=1)
    before = compiled(x)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            new = torch.rand(tensor.shape) + 0.25
            tensor.copy_(new if tensor.is_floating_point() else new * 100)
        wanted = model(x)
    assert not torch.equal(compiled(x), before)
    exact = {"rtol": 1e-4, "atol": 1e-4}
    close = {} if x.dtype is torch.bfloat16 else exact
    torch.testing.assert_close(compiled(x), wanted, **close)


def test_a_plain_attribute_is_followed() -> None:
    model, compiled, x = made(Plain)
    model.shift.add_(1)
    check(model, compiled, x)
    model.shift = torch.randn(16)
    check(model, compiled, x)


def test_calls_by_other_ways() -> None:
    """NumPy, keywords: they follow as well."""
    model, compiled, x = made(Plain)
    load(model)
    with torch.no_grad():
        wanted = model(x).numpy()
    np.testing.assert_allclose(compiled(x.numpy()), wanted, rtol=1e-4, atol=1e-5)
    load(model)
    check(model, lambda x: compiled(ids=x), x)


def test_without_torchs_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.runtime.binding.framework_of_torch", lambda: 0)
    monkeypatch.setattr("pliant.model.weights.watching_torch", lambda: 0)
    for kind in (Plain, Image):
        model, compiled, x = made(kind)
        for change in (load, assign, set_data, transpose, new_buffers):
            change(model)
            check(model, compiled, x)


def test_nothing_is_made_again_without_a_change(
    case: tuple[nn.Module, pliant.CompiledModel, Tensor],
) -> None:
    model, compiled, x = case
    arrays = compiled._weights.arrays
    model.requires_grad_(False)
    check(model, compiled, x)
    assert compiled._weights.arrays is arrays
    load(model)
    check(model, compiled, x)
    again = compiled._weights.arrays
    assert again is not arrays
    check(model, compiled, x)
    assert compiled._weights.arrays is again


# ---- what torch does not count


def test_what_cannot_be_seen_is_never_half_seen() -> None:
    model, compiled, x = made(Plain)
    before = compiled(x)
    for p in model.parameters():
        p.data.add_(1)
    for b in model.buffers():
        b.numpy()[...] = 3
    assert torch.equal(compiled(x), before)
    compiled.refresh()
    check(model, compiled, x)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        model, compiled, x = made(Plain)
        replace(model)
        check(model, compiled, x)
        model.head.weight.mul_(2)
        compiled.refresh()
        check(model, compiled, x)


def test_batch_statistics() -> None:
    """A batch norm writes them without counting, but counts its batches."""
    model, compiled, x = made(Image)
    model.train()
    with torch.no_grad():
        model(torch.randn(4, 3, 6, 5) * 3)
    model.eval()
    check(model, compiled, x)


# ---- training


def test_compiled_before_training_by_torch() -> None:
    model, compiled, x = made(Image)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.train()
        model(torch.randn(4, 3, 6, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        check(model, compiled, x)


def test_compiled_before_training_by_a_step() -> None:
    model, compiled, x = made(Image)
    model.train()
    shapes = ({0: "n", 2: "h", 3: "w"},)
    target = torch.randn(2, 2, 12, 10)
    both = {0: "n", 2: "hh", 3: "ww"}
    step = pliant.compile_training(
        model,
        lambda y, t: (y - t).square().mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        ((x,), (target,)),
        (shapes, (both,)),
        threads=1,
    )
    for _ in range(2):
        before = compiled(x)
        step((x,), (target,))
        model.eval()
        check(model, compiled, x)
        assert not torch.equal(compiled(x), before)
        model.train()


def test_frozen_weights_of_a_step() -> None:
    torch.manual_seed(0)
    frozen, free = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.Sequential(frozen, free)
    frozen.requires_grad_(False)
    x, y = torch.randn(3, 4), torch.randn(3, 1)
    step = pliant.compile_training(
        model,
        nn.functional.mse_loss,
        torch.optim.SGD(free.parameters(), lr=0.0),
        ((x,), (y,)),
        (ROWS, ROWS),
        threads=1,
    )
    for _ in range(2):
        wanted = nn.functional.mse_loss(model(x), y).detach()
        torch.testing.assert_close(step((x,), (y,)), wanted)
        load(frozen)


# ---- what cannot be followed


def test_other_types_are_an_error(
    case: tuple[nn.Module, pliant.CompiledModel, Tensor],
) -> None:
    model, compiled, x = case
    model.double()
    for _ in range(2):
        with pytest.raises(pliant.WeightError, match=r"f64.*compile the module") as e:
            compiled(x)
        assert e.value.name in dict(model.named_parameters()) | dict(
            model.named_buffers()
        )
    model.float()
    check(model, compiled, x)
    load(model)
    check(model, compiled, x)


def test_other_shapes_are_an_error() -> None:
    model, compiled, x = made(Plain)
    head = model.head
    model.head = nn.Linear(16, 5)
    with pytest.raises(pliant.WeightError, match=r"'head.weight' was f32\[3, 16\]"):
        compiled(x)
    del model.head
    with pytest.raises(pliant.WeightError, match=r"no 'head\.weight'"):
        compiled(x)
    model.head = head
    check(model, compiled, x)


def test_meta_weights_are_an_error() -> None:
    model, compiled, x = made(Plain)
    model.to("meta")
    with pytest.raises(pliant.WeightError, match="meta"):
        compiled(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 16)
        self.head = nn.Linear(16, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_tied_weights() -> None:
    model, x = Tied().eval(), torch.tensor([1, 2])
    compiled = pliant.compile(model, (x,), ROWS, threads=1)
    load(model)
    check(model, compiled, x)
    values = torch.randn(7, 16)
    model.embed.weight = nn.Parameter(values)
    with pytest.raises(pliant.WeightError, match="one tensor"):
        compiled(x)
    model.head.weight = nn.Parameter(values.clone())  # as good as one
    check(model, compiled, x)
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(pliant.WeightError, match="one tensor"):
        compiled(x)


class Branches(nn.Module):
    """Weights that are equal when the model is compiled, one for each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.more = (nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one if x.shape[0] == 1 else x * self.more


def test_weights_of_branches_that_are_equal_at_first() -> None:
    model = Branches().eval()
    compiled = pliant.compile(model, (torch.ones(3, 4),), ROWS, threads=1)
    load(model)
    for rows in (1, 3):
        check(model, compiled, torch.rand(rows, 4))


# ---- exported programs, and modules that are gone


def test_an_exported_program() -> None:
    model, x = Plain().eval(), torch.randint(0, 11, (4,))
    rows = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(model, (x,), dynamic_shapes=rows)
    compiled = pliant.compile(program, threads=1)
    check(program.module(), compiled, x)
    with torch.no_grad():
        program.state_dict["head.weight"].mul_(2)
    check(program.module(), compiled, x)


@pytest.mark.parametrize("kind", [Plain, Image])
def test_nothing_of_a_module_is_kept(kind: type[nn.Module]) -> None:
    model, compiled, x = made(kind)
    load(model)
    wanted = compiled(x)
    gone = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert torch.equal(compiled(x), wanted)
    with pytest.raises(pliant.PliantError, match="follows no module"):
        compiled.refresh()


def test_freeze() -> None:
    model, compiled, x = made(Plain)
    load(model)
    compiled.freeze()
    check(model, compiled, x)
    wanted = compiled(x)
    load(model)
    assert torch.equal(compiled(x), wanted)


MEMORY = """
import gc, os, sys, torch, pliant
torch.set_num_threads(1)

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def make(width, layers):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))

x = torch.randn(2, 64)
warm = pliant.compile(make(64, 2), (x,), ({0: "n"},), threads=1)
warm(x)
before = resident()
model = make(2048, 2)
weights = sum(p.numel() * p.element_size() for p in model.parameters())
x = torch.randn(2, 2048)
compiled = pliant.compile(model, (x,), ({0: "n"},), threads=1)
compiled(x)
both = resident() - before
del model
compiled(x)
print(weights, both, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_resident_once() -> None:
    made = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    weights, both, alone = map(int, made.stdout.split())
    assert both < 2.3 * weights  # the module's and the packed ones
    assert alone < 1.3 * weights


# ---- threads


def test_no_call_sees_a_mixture() -> None:
    """All weights are one number, so results show whether two moments were mixed."""
    width = 16
    model = nn.Sequential(nn.Sequential(*(nn.Linear(width, width) for _ in range(6))))
    bodies: list[nn.Module] = []
    for k in range(40):
        body = copy.deepcopy(model[0])
        for p in body.parameters():
            nn.init.constant_(p, k / 64)
        bodies.append(body)
    x = torch.ones(3, width)
    compiled = pliant.compile(model, (x,), ROWS, threads=1)
    allowed: set[float] = set()
    for body in bodies:
        model[0] = body
        allowed.update(compiled(x).flatten().tolist())
    assert len(allowed) == len(bodies)
    wrong: list[float] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            found = set(compiled(x).flatten().tolist())
            wrong.extend(found if len(found) > 1 else found - allowed)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for body in bodies * 2:
            model[0] = body  # at once: no thread sees half of it
            assert set(compiled(x).flatten().tolist()) <= allowed
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
