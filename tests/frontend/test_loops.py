"""Python loops over a size: scans where they are that, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant.frontend.function_source import rewritten

SIZES = ((2, 5), (1, 1), (3, 17), (2, 64), (1, 2))
WIDTH = 4


class Model(nn.Module):
    """Calls a function with layers that a round may use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.lstm = nn.LSTMCell(WIDTH, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("decay", torch.rand(4, WIDTH))
        self.block = 4
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def compiled(model: nn.Module) -> pliant.CompiledModel:
    example = torch.randn(2, 6, WIDTH)
    with torch.no_grad():
        return pliant.compile(model, (example,), {"x": {0: "batch", 1: "length"}})


# ---- loops that are scans


def kept_in_a_list(m: Any, x: Tensor) -> Any:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = []
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        out.append(h)
    return torch.stack(out, dim=1), h


def kept_in_a_tensor(m: Any, x: Tensor) -> Any:
    out = torch.zeros_like(x)
    h = torch.zeros(x.shape[0], WIDTH)
    for t in range(x.size(1)):
        h = torch.tanh(m.linear(x[:, t]) + h).to(out.dtype)
        out[:, t] = h * 2
    return out, h


def backwards(m: Any, x: Tensor) -> Any:
    out = torch.zeros_like(x)
    h = torch.zeros(x.shape[0], WIDTH)
    rows = []
    for t in range(x.shape[1] - 1, -1, -1):
        h = m.cell(x[:, t], h)
        out[:, t] = h
        rows.append(h + 1)
    return out, torch.stack(rows), h


def two_states_and_last_axis(m: Any, x: Tensor) -> Any:
    x = x.transpose(1, 2)
    h = c = torch.zeros(x.shape[0], WIDTH)
    out = []
    for t in range(x.shape[-1]):
        before = h
        h, c = m.lstm(x[..., t], (h, c))
        out.append((h - before)[:, None])
    before = torch.cat(out, 1)
    return before, c


def neighbours(m: Any, x: Tensor) -> Any:
    out = torch.zeros_like(x)
    total = torch.zeros(x.shape[0], WIDTH)
    for t in range(1, x.shape[1]):
        total = total * 0.5 + x[:, t] - x[:, t - 1]
        out[:, t, :] = total
    return out


def windows_without_state(m: Any, x: Tensor) -> Any:
    out = []
    for t in range(x.shape[1]):
        out.append(m.linear(x[:, t : t + 1]))
    return torch.cat(out, dim=1)


def layers_of_loops(m: Any, x: Tensor) -> Any:
    for layer in (m.cell, m.cell):
        h = torch.zeros(x.shape[0], WIDTH)
        out = []
        for t in range(x.shape[1]):
            h = layer(x[:, t], h)
            out.append(h)
        x = torch.stack(out, 1)
    return x


def a_tuple_of_states(m: Any, x: Tensor) -> Any:
    state = torch.zeros(x.shape[0], WIDTH), torch.ones(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        state = m.lstm(x[:, t], state)
    return state


def a_row_for_all(m: Any, x: Tensor) -> Any:
    """The value of a round is broadcast over what it is written to."""
    out = torch.empty_like(x)
    h = torch.zeros(WIDTH)
    for t in range(x.shape[1]):
        h = h * 0.9 + x[0, t]
        out[:, t] = h
    return out


SCANS = [
    *(kept_in_a_list, kept_in_a_tensor, backwards, two_states_and_last_axis),
    *(neighbours, windows_without_state, layers_of_loops, a_tuple_of_states),
    a_row_for_all,
]


@pytest.mark.parametrize("function", SCANS, ids=lambda f: f.__name__)
def test_scans(function: Callable[..., Any]) -> None:
    code = function.__code__
    model = Model(function).eval()
    ours = compiled(model)
    assert function.__code__ is code
    for batch, length in SIZES:
        x = torch.randn(batch, length, WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), model(x))


def loss(result: Any, target: Tensor) -> Tensor:
    return (result[0] - target).square().mean()


@pytest.mark.parametrize("function", [kept_in_a_list, kept_in_a_tensor])
def test_training(function: Callable[..., Any]) -> None:
    model, eager = Model(function), Model(function)
    eager.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager)]
    dims = {0: "batch", 1: "length"}
    example = torch.randn(2, 6, WIDTH)
    step = pliant.compile_training(
        model, loss, optimizers[0], ((example,), (example,)), ((dims,), (dims,))
    )
    for batch, length in ((2, 6), (1, 1), (3, 11)):
        x, y = torch.randn(2, batch, length, WIDTH)
        optimizers[1].zero_grad()
        expected = loss(eager(x), y)
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(step((x,), (y,)), expected.detach())
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


# ---- loops over parts of a size


def parts(m: Any, x: Tensor) -> Any:
    out = []
    for t in range((x.shape[1] + 3) // 4):
        out.append(m.linear(x[:, 4 * t : 4 * t + 4]))
    return torch.cat(out, 1)


def parts_in_steps(m: Any, x: Tensor) -> Any:
    out = []
    for i in range(0, x.shape[1], 3):
        out.append(m.linear(x[..., i : i + 3, :]).cumsum(-2))
    return torch.cat(out, dim=-2)


def parts_with_a_state(m: Any, x: Tensor) -> Any:
    """As linear attention in blocks: what a round does depends on its size."""
    n = x.shape[1]
    h = x.new_zeros(x.shape[0], 1, WIDTH)
    if not m.seen:
        out = []
        for i in range((n + m.block - 1) // m.block):
            start = i * m.block
            end = min(start + m.block, n)
            size = end - start
            part, own = x[:, start:end], x[:, start:end, :1]
            out.append(torch.tanh(m.linear(part) * m.decay[:size] + own + h))
            h = h * 0.5**size + part.sum(1, keepdim=True)
    else:
        out = []
        for i in range(n):
            part = x[:, i : i + 1]
            out.append(torch.tanh(m.linear(part) + h))
            h = h * 0.5 + part
    out = torch.cat(out, dim=1)
    out = out.transpose(0, 1)
    return out, h


@pytest.mark.parametrize("function", [parts, parts_in_steps, parts_with_a_state])
def test_parts(function: Callable[..., Any]) -> None:
    """The last part is a round of its own."""
    model = Model(function).eval()
    ours = compiled(model)
    for batch, length in ((2, 6), (1, 1), (3, 3), (2, 4), (1, 5), (2, 8), (1, 9)):
        x = torch.randn(batch, length, WIDTH)
        torch.testing.assert_close(ours(x), model(x))
    with pytest.raises(pliant.ShapeError):  # eager joins no parts either
        ours(torch.randn(2, 0, WIDTH))


def parts_of_another(m: Any, x: Tensor) -> Any:
    """The rounds go beyond what they slice."""
    out = []
    for i in range(0, x.shape[1] + 4, 4):
        out.append(x[:, i : i + 4])
    return torch.cat(out, 1)


def parts_of_an_open_size(m: Any, x: Tensor) -> Any:
    """The end that it counts from is not limited."""
    out = []
    for i in range((x.shape[1] + 3) // 4):
        start = i * 4
        end = start + 4
        out.append(x[:, start:end] * (end - start))
    return torch.cat(out, 1)


@pytest.mark.parametrize("function", [parts_of_another, parts_of_an_open_size])
def test_no_parts(function: Callable[..., Any]) -> None:
    """Right for as many rounds as the example has, and refused elsewhere."""
    model = Model(function).eval()
    ours = pliant.compile(
        model,
        (torch.randn(2, 6, WIDTH),),
        {"x": {0: "batch", 1: torch.export.Dim.AUTO}},
    )
    x = torch.randn(2, 6, WIDTH)
    torch.testing.assert_close(ours(x), model(x))
    with pytest.raises(pliant.ShapeError):
        ours(torch.randn(2, 300, WIDTH))


def slides(x: Tensor) -> Any:
    out = []
    for t in range(x.shape[0]):
        out.append(x[t : t + 4] + x[t * 4 : t * 4 + 4])
    return torch.cat(out)


def places_of_the_round_before(x: Tensor, start: int) -> Any:
    out = []
    for t in range(x.shape[0]):
        out.append(x[start : start + 4])
        start = t * 4
    return torch.cat(out)


def parts_of_two_sizes(x: Tensor, other: int) -> Any:
    out = []
    for t in range(0, x.shape[0], 4):
        out.append(x[t : min(t + 4, other)])
    return torch.cat(out)


def moves_its_end(x: Tensor) -> Any:
    out = []
    for t in range(0, x.shape[0], 4):
        end = t + 4
        out.append(x[t:end])
        end = end + 1
    return torch.cat(out)


def leaves_rows_out(x: Tensor) -> Any:
    out = []
    for t in range(0, x.shape[0], 4):
        out.append(x[t : t + 3])
    return torch.cat(out)


_NO_PARTS = [slides, places_of_the_round_before, parts_of_two_sizes, moves_its_end]


@pytest.mark.parametrize("function", [*_NO_PARTS, leaves_rows_out])
def test_texts_that_show_no_parts(function: FunctionType) -> None:
    code = rewritten(function)
    assert code is None or "over_parts" not in code.co_names


def test_a_text_that_shows_parts() -> None:
    code = rewritten(parts)
    assert code is not None and "over_parts" in code.co_names


def in_a_function_inside(m: Any, x: Tensor) -> Any:
    def mixed(x: Tensor) -> Any:
        h = x.new_zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
        return h

    return mixed(x) + 1


def test_a_function_that_every_trace_makes_anew() -> None:
    """Its text is not rewritten again and again: the size is fixed, and named."""
    with pytest.raises(pliant.ShapeError, match=r"test_loops\.py:\d+\)"):
        compiled(Model(in_a_function_inside))


# ---- loops that are none


def reads_what_it_wrote(m: Any, x: Tensor) -> Any:
    out = torch.zeros_like(x)
    for t in range(1, x.shape[1]):
        out[:, t] = out[:, t - 1] + x[:, t]
    return out


def counts(m: Any, x: Tensor) -> Any:
    number, h = 0, torch.zeros(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        number = number + 1
        h = h + x[:, t] * number
    return h


def uses_its_number(m: Any, x: Tensor) -> Any:
    h = torch.zeros(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        h = h + x[:, t] * t
    return h


def leaves_early(m: Any, x: Tensor) -> Any:
    h = torch.zeros(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        h = h + x[:, t]
        if t == 2:
            break
    return h


def changes_its_rows(m: Any, x: Tensor) -> Any:
    x = x * 1
    h = torch.zeros(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        row = x[:, t]
        h = h + row.mul_(2)
    return h, x


def changes_another(m: Any, x: Tensor) -> Any:
    seen = torch.zeros(WIDTH)
    h = torch.zeros(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        h = h + x[:, t] + seen
        seen.add_(1)
    return h


def changes_what_it_carries(m: Any, x: Tensor) -> Any:
    first = torch.zeros(x.shape[0], WIDTH)
    h = first
    for t in range(x.shape[1]):
        h = h.add_(x[:, t])
    return h, first


def changes_a_buffer(m: Any, x: Tensor) -> Any:
    h = torch.zeros(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        m.count.add_(1)
        h = h + x[:, t] * m.count
    return h


def keeps_elsewhere(m: Any, x: Tensor) -> Any:
    m.seen = []
    h = torch.zeros(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        h = h + x[:, t]
        m.seen.append(h)
    return torch.stack(m.seen)


def a_function_knows_it(m: Any, x: Tensor) -> Any:
    h = torch.zeros(x.shape[0], WIDTH)

    def more() -> Tensor:
        return h + 1

    for t in range(x.shape[1]):
        h = more() * x[:, t]
    return h


def two_of_one_memory(m: Any, x: Tensor) -> Any:
    out = torch.zeros_like(x)
    same = out
    h = torch.zeros(x.shape[0], WIDTH)
    for t in range(1, x.shape[1]):
        h = h + same[:, t - 1] + x[:, t]
        out[:, t] = h
    return out


def one_list_for_layers(m: Any, x: Tensor) -> Any:
    out = []
    for layer in (m.linear, m.linear):
        for t in range(x.shape[1]):
            out.append(layer(x[:, t]))
    return torch.stack(out)


def reads_its_last(m: Any, x: Tensor) -> Any:
    h = torch.zeros(x.shape[0], WIDTH)
    for t in range(x.shape[1]):
        last = m.linear(x[:, t])
        h = h + last
    return h, last


def another_type(m: Any, x: Tensor) -> Any:
    h = torch.zeros(x.shape[0], WIDTH, dtype=torch.int64)
    for t in range(x.shape[1]):
        h = h + x[:, t]
    return h


NONE = [
    *(reads_what_it_wrote, counts, uses_its_number, leaves_early, changes_its_rows),
    *(changes_another, changes_what_it_carries, changes_a_buffer, keeps_elsewhere),
    *(a_function_knows_it, two_of_one_memory, one_list_for_layers, reads_its_last),
    another_type,
]


@pytest.mark.parametrize("function", NONE, ids=lambda f: f.__name__)
def test_no_scan(function: Callable[..., Any]) -> None:
    """The size is fixed by the loop, which is an error that says so."""
    code = function.__code__
    with pytest.raises(pliant.PliantError):
        compiled(Model(function).eval())
    assert function.__code__ is code


def test_a_number_of_rounds_that_is_fixed() -> None:
    """A loop of a known number of rounds is what it was."""
    model = Model(uses_its_number).eval()
    example = torch.randn(2, 6, WIDTH)
    ours = pliant.compile(model, (example,), {"x": {0: "batch"}})
    for batch in (1, 2, 7):
        x = torch.randn(batch, 6, WIDTH)
        torch.testing.assert_close(ours(x), model(x))


def numbered_blocks(m: Any, x: Tensor) -> Any:
    out = []
    for t in range((x.shape[1] + 3) // 4):
        out.append(m.linear(x[:, 4 * t : 4 * t + 4]) * t)
    return torch.cat(out, 1)


def test_the_line_of_a_loop_is_told() -> None:
    """Of a loop that is no scan: not that of the code that watches it."""
    ours = pliant.compile(
        Model(numbered_blocks).eval(),
        (torch.randn(2, 3, WIDTH),),
        {"x": {0: "batch", 1: torch.export.Dim.AUTO}},
    )
    with pytest.raises(pliant.ShapeError, match=r"test_loops\.py:\d+"):
        ours(torch.randn(2, 300, WIDTH))


def steps(m: Any, x: Tensor) -> Any:
    """As attention over chunks: what a round does depends on its number."""
    out = []
    for start in range(0, x.shape[1], 8):
        end = min(start + 8, x.shape[1])
        out.append(m.linear(x[:, start:end]) * (start + 1))
    return torch.cat(out, 1)


def test_steps() -> None:
    """The number of steps is fixed, and not the size."""
    model = Model(steps).eval()
    ours = compiled(model)
    for batch, length in ((2, 6), (1, 1), (3, 8)):
        x = torch.randn(batch, length, WIDTH)
        torch.testing.assert_close(ours(x), model(x))
    with pytest.raises(pliant.ShapeError, match=r"test_loops\.py:\d+"):
        ours(torch.randn(2, 300, WIDTH))


def reads_up_to_a_size(m: Any, x: Tensor) -> Any:
    size, out = 2, []
    for start in range(0, x.shape[1], 8):
        end = min(start + 8, x.shape[1])
        size = end - start
        out.append(m.decay[:size, start:end])
    return torch.cat(out, 1)


def size_without_its_limit(m: Any, x: Tensor) -> Any:
    out = []
    for start in range(0, x.shape[1], 8):
        end = min(start + 8, x.shape[1])
        end = start + 8
        size = end - start
        out.append(x[:, start:end] * size)
    return torch.cat(out, 1)


def reads_what_a_comprehension_names(m: Any, x: Tensor) -> Any:
    h, y, z = x.new_zeros(x.shape[0], WIDTH), x + 1, x + 2
    for t in range(x.shape[1]):
        h = torch.tanh(h + sum(x[:, t] for x in (y, z)))
    return h


@pytest.mark.parametrize(
    "function",
    [reads_up_to_a_size, size_without_its_limit, reads_what_a_comprehension_names],
    ids=lambda f: f.__name__,
)
def test_names_that_mean_something_else_in_front(function: FunctionType) -> None:
    """What rounds read is named in front of the loop, where it has to mean the same."""
    code = rewritten(function)
    made = () if code is None else code.co_names
    assert not {"scanned", "scanned_parts"} & {*made}
