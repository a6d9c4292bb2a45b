"""Models from GGUF files against transformers with the numbers that the files hold."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_gguf import KV_HEADS, LAYERS, SIZE, reference, words, write

import pliant
from pliant.language.sampling import TokenSampler

TEXTS = ("the ant", "on 1 day\nin the", "", "a")
Pair = tuple[pliant.LanguageModel, Any]


def loaded(folder: Path, kind: str, family: str = "llama", tied: bool = True) -> Pair:
    model, path = reference(family, tied), folder / "tiny.gguf"
    write(path, model, kind, family)
    return pliant.load_gguf(path, threads=2), model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return loaded(tmp_path_factory.mktemp("gguf"), "q4_1")


def logits_of(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model(torch.as_tensor(ids)).logits


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(len(words()[0]), shape)


FILES = [
    ("f32", "llama", False),
    ("q8_0", "llama", True),
    ("q4_0", "llama", False),
    ("q5_1", "llama", True),
    ("f16", "qwen2", False),
    ("q4_1", "qwen3", True),
]


@pytest.mark.parametrize(("kind", "family", "tied"), FILES)
def test_logits(kind: str, family: str, tied: bool, tmp_path: Path) -> None:
    lm, model = loaded(tmp_path, kind, family, tied)
    ids = random_ids(2, 13)
    torch.testing.assert_close(
        lm.forward(ids), logits_of(model, ids), rtol=1e-3, atol=1e-3
    )


def test_one_compile_for_all_steps(pair: Pair) -> None:
    """A prompt, the rest of it, single tokens, several, none: the same logits."""
    lm, model = pair
    for batch, steps in [(1, (7, 5, 1, 1, 0, 300, 1)), (3, (1, 1, 6))]:
        lm.reset()
        ids = random_ids(batch, sum(steps))
        want = logits_of(model, ids)
        at = 0
        for n in steps:
            got = lm.forward(ids[:, at : at + n])
            torch.testing.assert_close(got, want[:, at : at + n], rtol=2e-3, atol=2e-3)
            at += n
    assert lm.stats()["compiles"] == 1
    lm.reset()
    assert isinstance(lm.forward(np.array([1, 2])), np.ndarray)
    with pytest.raises(pliant.IndexRangeError):
        lm.forward(np.array([len(words()[0])]))
    with pytest.raises(pliant.ShapeError):
        lm.forward(np.array([1.0]))


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Tokens by the best logits, each from the whole text so far."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logits_of(model, [ids])[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize("text", TEXTS)
def test_greedy_tokens(pair: Pair, text: str) -> None:
    lm, model = pair
    ids = lm.tokens.encode(text)
    got = list(lm.next_tokens(ids, 30, TokenSampler()))
    assert got == greedy(model, ids or [lm.tokens.begin or 0], 30)


def test_generate_and_stream(pair: Pair) -> None:
    lm, _ = pair
    whole = lm.generate("the ant", max_new_tokens=20)
    assert whole == "".join(lm.stream("the ant", max_new_tokens=20))
    assert lm.generate(["the ant", "on"], max_new_tokens=20)[0] == whole
    assert lm.generate("the ant", max_new_tokens=0) == ""
    if len(whole) > 4:
        end = whole[3:5]
        assert lm.generate("the ant", 20, stop=end) == whole[: whole.index(end)]
    hot = {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "max_new_tokens": 12}
    assert lm.generate("on", seed=3, **hot) == lm.generate("on", seed=3, **hot)
    with pytest.raises(pliant.OptionError):
        lm.generate("on", temperature=-1)
    with pytest.raises(pliant.OptionError):
        lm.generate("on", stop=[""])
    stats = lm.stats()
    assert stats["decode_tokens"] > 0
    assert stats["decode_tokens_per_second"] > 0


def test_threads(pair: Pair) -> None:
    lm, _ = pair
    want = {text: lm.generate(text, 10) for text in TEXTS}
    found: dict[str, str] = {}

    def run(text: str) -> None:
        found[text] = lm.generate(text, 10)

    workers = [threading.Thread(target=run, args=(text,)) for text in TEXTS]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == want


def test_the_plan(pair: Pair) -> None:
    lm, _ = pair
    plan = lm.memory_plan(batch=4, past=2000, new=1)
    assert plan.grown_bytes == 4 * 2 * LAYERS * KV_HEADS * 2001 * SIZE * 4
    assert plan.output_bytes == 4 * len(words()[0]) * 4


def test_tokens(pair: Pair) -> None:
    lm, _ = pair
    for text in (*TEXTS, "é 12 \U0001f40c"):
        assert lm.tokens.decode(lm.tokens.encode(text)) == text
    assert len(lm.tokens.encode(" the12")) == 3
    chat = lm.tokens.chat([{"role": "user", "content": "the?"}])
    assert chat.endswith("<|im_end|>\n<|im_start|>assistant\n")
    names = words()[0]
    assert lm.tokens.encode(chat)[0] == len(names) - 2


def test_sampler() -> None:
    logits = np.array([0.0, 3.0, 3.0, 1.0, -5.0], np.float32)
    assert TokenSampler().pick(logits) == 1
    draws = {TokenSampler(1.0, top_k=2, seed=k).pick(logits) for k in range(40)}
    assert draws == {1, 2}
    draws = {TokenSampler(1.0, top_p=0.5, seed=k).pick(logits) for k in range(40)}
    assert draws == {1, 2}
    draws = {TokenSampler(0.01, seed=k).pick(logits) for k in range(40)}
    assert draws == {1, 2}
    for cold in (1e-300, 5e-324):  # no quotient of it is a number
        assert TokenSampler(cold, seed=0).pick(logits) in (1, 2)
    counts = np.zeros(5)
    source = TokenSampler(1.0, seed=0)
    for _ in range(4000):
        counts[source.pick(logits)] += 1
    chances = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(counts / 4000 - chances).max() < 0.03
    for bad in ({"top_k": 0}, {"top_p": 0.0}, {"temperature": float("nan")}):
        with pytest.raises(pliant.OptionError):
            TokenSampler(**bad)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    with pytest.raises(pliant.ModelError, match="no file"):
        pliant.load_gguf(path)
    for content in (
        b"",
        b"GGUF",
        b"no model at all" * 10,
        b"GGUF\x03\0\0\0" + b"\xff" * 99,
    ):
        path.write_bytes(content)
        with pytest.raises(pliant.ModelError):
            pliant.load_gguf(path)
    model = reference("llama", True)
    write(path, model, "q8_0", "llama")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(pliant.ModelError):
        pliant.load_gguf(path)
    write(path, model, "q8_0", "mamba")
    with pytest.raises(pliant.ModelError, match="mamba"):
        pliant.load_gguf(path)
