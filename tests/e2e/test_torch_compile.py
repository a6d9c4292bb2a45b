"""Models trained by the user's own loop, through torch.compile(backend="pliant")."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from e2e_oracle import assert_close
from torch import nn

from pliant.dynamo import backend, compiled_graphs

transformers.logging.set_verbosity_error()

WORDS = 61
SMALL: dict[str, Any] = {"vocab_size": WORDS, "num_hidden_layers": 2}
SHAPES = ((3, 5), (4, 9), (7, 17), (2, 33))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def bert(dropout: float = 0.0) -> nn.Module:
    config = transformers.BertConfig(
        **SMALL,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForMaskedLM(config)  # its head's weight is the embedding


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
    )
    return transformers.LlamaForCausalLM(config)


class Images(nn.Module):
    """Convolutions, batch norm with its statistics, pools."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def words(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (batch, length))
    labels = torch.randint(0, WORDS, (batch, length))
    labels[:, 0] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: Any, source: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    source.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        **{n: p.grad for n, p in source.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize(
    "make",
    [llama, *(pytest.param(f, marks=pytest.mark.slow) for f in (bert, gpt2))],
)
def test_gradients(make: Callable[[], nn.Module]) -> None:
    model = make()
    exact, mine = copy.deepcopy(model).double(), copy.deepcopy(model)
    ours = torch.compile(mine, backend=backend, dynamic=True)
    count = -1
    for number, shape in enumerate(SHAPES):
        batch = words(*shape)
        eager = gradients(model, model, batch)
        got = gradients(ours, mine, batch)
        assert_close(got, eager, gradients(exact, exact, batch))
        if number == 1:  # torch may capture anew once it has seen a second shape
            count = len(compiled_graphs())
    assert len(compiled_graphs()) == count


@pytest.mark.parametrize("make", [bert, llama])
def test_training_follows_eager(make: Callable[[], nn.Module]) -> None:
    theirs = make()
    mine = copy.deepcopy(theirs)
    ours = torch.compile(mine, backend=backend, dynamic=True)
    losses = []
    for model, source in ((theirs, theirs), (ours, mine)):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(source.parameters(), lr=1e-2)
        made = []
        for step in range(10):
            batch = words(3 + step % 3, 5 + 3 * (step % 4))
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(source.parameters(), 1.0)
            optimizer.step()
            made.append(loss.item())
        losses.append(made)
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=2e-3)


def test_images() -> None:
    theirs = Images()
    mine, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    ours = torch.compile(mine, backend=backend, dynamic=True)
    for size in ((9, 3, 20, 22), (11, 3, 17, 33), (6, 3, 31, 12)):
        x, target = torch.randn(size), torch.randint(0, 5, size[:1])
        results = []
        for model, source in ((ours, mine), (theirs, theirs), (exact, exact)):
            source.zero_grad()
            out = model(x.to(next(source.parameters()).dtype))
            nn.functional.cross_entropy(out, target).backward()
            grads = {n: p.grad for n, p in source.named_parameters()}
            results.append((out.detach(), grads, dict(source.named_buffers())))
        assert_close(*results)


def test_inference_sees_updated_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    ours = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for size in (3, 8, 31):
            x = torch.randn(size, 8)
            torch.testing.assert_close(ours(x), model(x))
            for parameter in model.parameters():
                parameter.add_(0.5)
    assert sum(g.kind == "inference" for g in compiled_graphs()) >= 1


def test_dropout_trains() -> None:
    model = bert(dropout=0.2).train()
    ours = torch.compile(model, backend=backend, dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = words(4, 12)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = ours(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
