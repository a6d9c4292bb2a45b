"""A language model: one compiled program for prompts and for every next token.

lm = pliant.load_gguf("model.gguf")
lm.generate(["Once upon a time"], max_new_tokens=20)
for piece in lm.stream("Once upon a time"):
    print(piece, end="", flush=True)
logits = lm.forward(ids)    # of tokens behind those of earlier calls
lm.reset()                  # and of none
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np

from pliant.api import build, settings
from pliant.errors import OptionError, ShapeError
from pliant.frontend.signature import LARGEST
from pliant.language.batch import Batch, Request
from pliant.language.blocks import Weight
from pliant.language.caches import RowCaches, token_bytes
from pliant.language.gguf_file import Shape, read_gguf
from pliant.language.graph import decoder
from pliant.language.pieces import TextPieces
from pliant.language.sampling import TokenSampler
from pliant.language.tokens import Tokens
from pliant.model.compiled import CompiledModel
from pliant.model.planning import MemoryPlan
from pliant.options import Options

ROOM = 256  # tokens: caches begin with this much, and double


@dataclass(slots=True)
class _Times:
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def note(self, tokens: int, seconds: float, is_prompt: bool) -> None:
        with self.lock:
            if is_prompt:
                self.prompt_tokens += tokens
                self.prompt_seconds += seconds
            else:
                self.decode_tokens += tokens
                self.decode_seconds += seconds


class LanguageModel:
    """See the file's head. Several threads may generate at once."""

    def __init__(
        self,
        shape: Shape,
        weights: Mapping[str, Weight],
        tokens: Tokens,
        *,
        threads: int | None = None,
        options: Options | None = None,
        memory_limit: int | str | None = None,
    ) -> None:
        started = perf_counter()
        chosen = settings(options, threads, None, memory_limit)
        self.model: CompiledModel = build(decoder(shape, weights), chosen, {})
        self.tokens, self.shape = tokens, shape
        self._compile_seconds = perf_counter() - started
        self._caches: RowCaches | None = None  # of `forward`
        self._times = _Times()

    # ---- the network

    def forward(self, ids: Any) -> Any:
        """Logits (batch, new, vocabulary) of tokens behind those of earlier calls.

        `ids` are (batch, new), or (new,) for a batch of one. Torch in, torch out.
        """
        given = np.asarray(ids)
        rows = given.reshape(1, -1) if given.ndim == 1 else given
        if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
            raise ShapeError(
                f"ids are integers (batch, new), not {given.dtype} {given.shape}",
                expected="(batch, new)",
                got=given.shape,
            )
        if self._caches is None:
            self._caches = RowCaches(self.shape, len(rows), ROOM)
        caches, new = self._caches, rows.shape[1]
        if len(rows) != caches.places:
            raise ShapeError(
                f"the tokens before these are of {caches.places} rows, not {len(rows)}",
                expected=caches.places,
                got=len(rows),
            )
        make_room(caches, new)
        logits = self.run(rows.astype(np.int64), caches, 0, new)
        if hasattr(ids, "new_tensor"):
            return ids.new_tensor(logits, dtype=_torch_float())
        return logits

    def reset(self) -> None:
        """Forgets the tokens of `forward`."""
        self._caches = None

    def run(
        self, ids: np.ndarray, caches: RowCaches, first: int, kept: int
    ) -> np.ndarray:
        """The logits of the last positions of rows (batch, new) from a place on.

        Every row has the tokens behind its own then.
        """
        started, count = perf_counter(), ids.shape[1]
        lengths = caches.lengths[first : first + len(ids)]
        past = int(lengths.max(initial=0))
        logits = self.model(
            ids, lengths, *caches.rows(first, len(ids)), past, min(kept, count)
        )
        is_prompt = past == 0 or count > 1
        lengths += count
        self._times.note(ids.size, perf_counter() - started, is_prompt)
        return np.asarray(logits)

    # ---- text

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Any:
        """The text that follows each prompt; a string for a string."""
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        texts = [
            _Text(
                TextPieces(self.tokens, stop),
                self.request(prompt, max_new_tokens, temperature, top_k, top_p, seed),
            )
            for prompt in asked
        ]
        batch = Batch(self, most_rows=max(len(texts), 1), context=LARGEST)
        for text in texts:
            batch.submit(text.request)
        while batch.step():
            for text in texts:
                text.follow(batch)
        made = [text.whole(batch) for text in texts]
        return made[0] if isinstance(prompts, str) else made

    def request(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Request:
        """What a `Batch` continues; an empty prompt is the beginning of a text."""
        if max_new_tokens < 0:
            raise OptionError(f"max_new_tokens is not negative: {max_new_tokens}")
        sampler = TokenSampler(temperature, top_k, top_p, seed)
        ids = self.tokens.encode(prompt) or [self._begin]
        return Request(ids, max_new_tokens, sampler, self.tokens.ends)

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Iterator[str]:
        """The text that follows, piece by piece, up to an end or a text of `stop`."""
        pieces = TextPieces(self.tokens, stop)
        request = self.request(prompt, max_new_tokens, temperature, top_k, top_p, seed)
        return self._stream(request, pieces)

    def _stream(self, request: Request, pieces: TextPieces) -> Iterator[str]:
        for token in self.next_tokens(request.prompt, request.most, request.sampler):
            if token in request.ends:
                break
            piece = pieces.push(token)
            if piece:
                yield piece
            if pieces.ended:
                break
        rest = pieces.rest()
        if rest:
            yield rest

    def next_tokens(
        self, prompt: Sequence[int], most: int, sampler: TokenSampler
    ) -> Iterator[int]:
        """Tokens behind a prompt, without an end; an empty prompt is its beginning."""
        ids = list(prompt) or [self._begin]
        caches = RowCaches(self.shape, 1, ROOM)
        for _ in range(most):
            make_room(caches, len(ids))
            logits = self.run(np.array([ids], np.int64), caches, 0, 1)
            token = sampler.pick(logits[0, -1])
            yield token
            ids = [token]

    @property
    def _begin(self) -> int:
        """The token of an empty text."""
        return 0 if self.tokens.begin is None else self.tokens.begin

    # ---- what it is

    def memory_plan(self, **dims: Any) -> MemoryPlan:
        """Of a call; `grown_bytes` is what the caches take beside it.

        `past` is that of the longest row; without a `capacity`, it is what the call
        needs.
        """
        need = dims.get("past", 0) + dims.get("new", 1)
        given = {"kept": min(1, dims.get("new", 1)), "capacity": need, **dims}
        plan = self.model.memory_plan(**given)
        found = plan.dims
        rows = found["batch"] * found["capacity"]
        return replace(plan, grown_bytes=rows * token_bytes(self.shape))

    def stats(self) -> dict[str, Any]:
        times = self._times
        decoding = times.decode_tokens / max(times.decode_seconds, 1e-9)
        reading = times.prompt_tokens / max(times.prompt_seconds, 1e-9)
        return {
            **self.model.stats(),
            "compile_seconds": self._compile_seconds,
            "prompt_tokens": times.prompt_tokens,
            "prompt_seconds": times.prompt_seconds,
            "prompt_tokens_per_second": reading,
            "decode_tokens": times.decode_tokens,
            "decode_seconds": times.decode_seconds,
            "decode_tokens_per_second": decoding,
        }


def load_gguf(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    options: Options | None = None,
    memory_limit: int | str | None = None,
) -> LanguageModel:
    """The language model in a GGUF file (llama, qwen2 and qwen3 families), compiled."""
    file = read_gguf(path)
    return LanguageModel(
        file.shape,
        file.weights,
        Tokens(file.fields),
        threads=threads,
        options=options,
        memory_limit=memory_limit,
    )


def make_room(caches: RowCaches, new: int) -> None:
    """For that many more tokens of the longest row: twice the room, at least."""
    need, room = int(caches.lengths.max(initial=0)) + new, caches.capacity
    if need > room:
        caches.resize(caches.places, max(need, 2 * room))


@dataclass(slots=True)
class _Text:
    """A text of a batch."""

    pieces: TextPieces
    request: Request
    parts: list[str] = field(default_factory=list)

    def follow(self, batch: Batch) -> None:
        for token in self.request.taken():
            if not self.pieces.ended:
                self.parts.append(self.pieces.push(token))
        if self.pieces.ended:
            batch.cancel(self.request)

    def whole(self, batch: Batch) -> str:
        if self.request.error is not None:
            raise self.request.error
        self.follow(batch)
        return "".join([*self.parts, self.pieces.rest()])


def _torch_float() -> Any:
    import torch

    return torch.float32
