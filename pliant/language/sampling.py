"""The next token from logits: the best one, or drawn from the likely ones."""

from __future__ import annotations

import numpy as np

from pliant.errors import OptionError


class TokenSampler:
    """Draws tokens. With temperature 0, it is the best, the first among equals.

    Otherwise from softmax(logits / temperature), of which `top_k` keeps the largest and
    `top_p` as many of the largest as make up that share.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise OptionError(f"a temperature is 0 or more, not {temperature}")
        if top_k is not None and top_k < 1:
            raise OptionError(f"top_k is at least 1, not {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise OptionError(f"top_p is above 0 and at most 1, not {top_p}")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._source = np.random.default_rng(seed)

    def pick(self, logits: np.ndarray) -> int:
        best = int(logits.argmax())  # the first NaN, if there is one
        if np.isnan(logits[best]):
            raise FloatingPointError(f"the logit of token {best} is NaN")
        if self.temperature == 0:
            return best
        numbers = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # far below the best: -inf, a chance of 0
            scores = (numbers - numbers[best]) / self.temperature
        order = np.argsort(-scores, kind="stable")
        if self.top_k is not None:
            order = order[: self.top_k]
        chances = np.exp(scores[order] - scores[order[0]])
        chances /= chances.sum()
        if self.top_p is not None:
            before = np.cumsum(chances) - chances
            count = int((before < self.top_p).sum())
            order, chances = order[:count], chances[:count] / chances[:count].sum()
        return int(self._source.choice(order, p=chances))
