"""The text of tokens, given out as they come."""

from __future__ import annotations

from collections.abc import Sequence

from pliant.errors import OptionError
from pliant.language.tokens import Tokens


class TextPieces:
    """What is sure of a text: no half of a character, nothing of what may be a stop.

    pieces = TextPieces(tokens, stops=("END",))
    pieces.push(17); pieces.push(3)    # text that is new and sure, often one word
    pieces.ended                       # a stop was found: it and the rest are left out
    pieces.rest()                      # what was held back, when no token follows
    """

    def __init__(
        self, tokens: Tokens, stops: str | Sequence[str] | None = None
    ) -> None:
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops or ())
        if not all(self.stops):
            raise OptionError("a text of stop is not empty")
        self.ended = False
        self._tokens = tokens
        self._open: list[int] = []  # tokens whose text is not all given out
        self._given = 0  # characters of it that are

    def push(self, token: int) -> str:
        self._open.append(token)
        text = self._tokens.decode(self._open)
        found = [at for s in self.stops if (at := text.find(s, self._given)) >= 0]
        if found:
            self.ended = True
            return self._upto(text, min(found))
        piece = self._upto(text, len(text) - self._unsure(text))
        if self._given == len(text):  # other tokens begin a new character
            self._open, self._given = [], 0
        return piece

    def rest(self) -> str:
        if self.ended:
            return ""
        text = self._tokens.decode(self._open)
        return self._upto(text, len(text))

    def _upto(self, text: str, end: int) -> str:
        piece = text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _unsure(self, text: str) -> int:
        """How many characters at the end may yet change, or begin a stop."""
        whole = text.rstrip("\ufffd")
        open_bytes = len(text) - len(whole)
        # A stop may go on with the character that is open, as well as with the next.
        begun = (
            len(text) - len(part) + n
            for part in {whole, text}
            for s in self.stops
            for n in range(1, len(s))
            if part.endswith(s[:n])
        )
        return max((open_bytes, *begun))
