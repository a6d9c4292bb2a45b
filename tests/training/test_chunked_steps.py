"""Under a memory limit, a training step never holds whole logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import pliant

WIDTH, CLASSES = 32, 2000
Names = dict[int, str | Dim]
NAMES: Names = {0: "batch", 1: "seq"}
TWO: Names = {0: "batch", 1: Dim("seq", min=2)}  # with a row before the last one


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def same(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    short = logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(short, labels[:, 1:].flatten())


def batch(b: int, s: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1000 * b + s)
    ids = torch.randint(0, CLASSES, (2, b, s), generator=generator)
    return (ids[0],), (ids[1],)


def made(
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: object,
    names: Names,
    **options: bool,
) -> tuple[nn.Module, pliant.TrainingStep]:
    torch.manual_seed(0)
    model = Words()
    step = pliant.compile_training(
        model,
        loss,
        optimizer,
        batch(2, 5),
        ((names,), (names,)),
        options=pliant.Options(**options),
    )
    return model, step


def least_of(step: pliant.TrainingStep, b: int, s: int) -> int:
    with pytest.raises(pliant.MemoryLimitError) as caught:
        step.memory_plan(*batch(b, s), memory_limit=1)
    return int(caught.value.least)


@pytest.mark.parametrize(
    ("loss", "optimizer", "names", "shapes"),
    [
        (same, pliant.SGD(0.1), NAMES, [(1, 400), (4, 131), (97, 4)]),
        (shifted, pliant.AdamW(1e-3), NAMES, [(97, 4), (13, 31)]),
        # along the length too; 393 is 14 chunks of 28 rows, and the last row of all
        (shifted, pliant.AdamW(1e-3), TWO, [(1, 393), (3, 261), (97, 4)]),
    ],
    ids=["same", "shifted", "shifted along the length"],
)
def test_steps_in_chunks(
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: object,
    names: Names,
    shapes: list[tuple[int, int]],
) -> None:
    """Steps within limits change the parameters as steps without chunks do."""
    model, step = made(loss, optimizer, names)
    other, plain = made(loss, optimizer, names, chunk=False)
    for b, s in [(1, 2), (3, 7), *shapes]:
        step.memory_limit = None
        peak, least = step.memory_plan(*batch(b, s)).peak_bytes, least_of(step, b, s)
        assert peak == plain.memory_plan(*batch(b, s)).peak_bytes
        if (b, s) in shapes:
            assert least < 0.75 * least_of(plain, b, s)
            assert least < 4 * b * s * CLASSES  # not one tensor of logits
        for k in range(4):
            step.memory_limit = least + (peak - least) * k // 3
            plan = step.memory_plan(*batch(b, s))
            told, want = step(*batch(b, s)), plain(*batch(b, s))
            torch.testing.assert_close(told, want, rtol=1e-5, atol=1e-5)
            stats = step.stats()
            assert stats["last_peak_bytes"] == plan.peak_bytes <= step.memory_limit
            assert k or (b, s) not in shapes or plan.knobs["chunks"]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-5)
