"""Text in pieces: half a character, and what may be a stop, are held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pliant.language.pieces import TextPieces


class Bytes:
    """Tokens that are bytes."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


def pieces(text: str, *stops: str) -> tuple[str, bool]:
    tokens: Any = Bytes()
    found = TextPieces(tokens, stops)
    made = ""
    for token in text.encode():
        made += found.push(token)
        if found.ended:
            break
    return made + found.rest(), found.ended


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("a END b", "END"),
        ("a EN END b", "END"),
        ("a EN\u00e9 b", "EN\u00e9"),
        ("a \u00e9\u00e9x b", "\u00e9x"),
        ("a \u00e9\U0001f600\u00e9 b", "\u00e9\U0001f600\u00e9"),
        ("a ..\U0001f600 b", ".\U0001f600"),
    ],
)
def test_a_stop_in_pieces(text: str, stop: str) -> None:
    assert pieces(text, stop) == (text[: text.index(stop)], True)
    assert pieces(text, stop + "!") == (text, False)
