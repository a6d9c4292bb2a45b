"""What clients ask for: the bodies of OpenAI's API, checked field by field.

A field that is not known, or that asks for what is not done here, is a `BodyError`
with its name; nothing that would change the answer is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.errors import OptionError, PliantError
from pliant.language.batch import Request
from pliant.language.model import LanguageModel
from pliant.language.pieces import TextPieces
from pliant.language.sampling import TokenSampler

MOST_CHOICES = 16

# Of no influence on the text.
_NOTES = (
    *("user", "store", "metadata", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "parallel_tool_calls"),
)
# Known to OpenAI's API and not done here: these values mean that it is not asked for.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}


# The second pads events against eavesdroppers, which nothing here needs.
_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}


class BodyError(PliantError):
    """The body of a request makes no sense, or asks for what is not done here."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request's texts: for each of `prompts`, `n` continuations."""

    model: str | None
    prompts: Sequence[Sequence[int]]
    most: int | None  # None: as the server does by default
    stops: tuple[str, ...]
    n: int
    seed: int | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    usage: bool = False  # whether a stream ends with the counts of tokens

    def requests(self, lm: LanguageModel, default: int, context: int) -> list[Request]:
        """Of `default` new tokens where nothing is said, if the context has them."""
        made: list[Request] = []
        for prompt in self.prompts:
            most = self.most
            if most is None:
                most = min(default, max(context - len(prompt), 1))
            for k in range(self.n):
                seed = None if self.seed is None else self.seed + k
                sampler = TokenSampler(**self.sampling, seed=seed)
                made.append(Request(prompt, most, sampler, lm.tokens.ends))
        return made


class _Fields:
    """The fields of a body; each is read once, and those left over are unknown."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise BodyError("the body is a JSON object")
        self.left: dict[str, Any] = dict(body)

    def take(self, name: str, what: str, check: Callable[[Any], bool]) -> Any:
        value = self.left.pop(name, None)
        if value is not None and not check(value):
            raise BodyError(f"'{name}' is {what}", name)
        return value

    def integer(self, name: str, least: int) -> int | None:
        what = f"an integer of at least {least}"
        found = self.take(name, what, lambda v: _is_int(v) and v >= least)
        return None if found is None else int(found)

    def number(self, name: str) -> float | None:
        found = self.take(
            name,
            "a number",
            lambda v: type(v) is float or (_is_int(v) and abs(v) < 2**53),
        )
        return None if found is None else float(found)

    def flag(self, name: str) -> bool:
        return bool(self.take(name, "true or false", lambda v: type(v) is bool))

    def done(self) -> None:
        for name in _NOTES:
            self.left.pop(name, None)
        for name, nothing in _ABSENT.items():
            if name in self.left and self.left.pop(name) not in nothing:
                raise BodyError(f"'{name}' is not supported here", name)
        for name in self.left:
            raise BodyError(f"'{name}' is not known", name)


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_text(value: object) -> bool:
    """A text of whole characters: JSON can spell half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def completion(body: object, lm: LanguageModel) -> Wanted:
    """Of /v1/completions."""
    fields = _Fields(body)
    vocabulary = lm.shape.vocabulary

    def is_ids(value: Any) -> bool:
        return type(value) is list and all(
            _is_int(k) and 0 <= k < vocabulary for k in value
        )

    def is_prompt(value: Any) -> bool:
        return _is_text(value) or (is_ids(value) and len(value) > 0)

    given = fields.take(
        "prompt",
        "a text, tokens of the model, or a list of such",
        lambda v: (
            is_prompt(v) or (type(v) is list and len(v) > 0 and all(map(is_prompt, v)))
        ),
    )
    several = type(given) is list and not is_ids(given)
    prompts = [
        prompt if type(prompt) is list else lm.request(prompt or "").prompt
        for prompt in (given if several else [given])
    ]
    most = fields.integer("max_tokens", 0)
    return _rest(fields, prompts, most)


def chat(body: object, lm: LanguageModel) -> Wanted:
    """Of /v1/chat/completions."""
    fields = _Fields(body)
    messages = fields.take(
        "messages", "a list of messages", lambda v: type(v) is list and len(v) > 0
    )
    if messages is None:
        raise BodyError("'messages' is missing", "messages")
    text = lm.tokens.chat([_message(m) for m in messages])
    most = fields.integer("max_completion_tokens", 0)
    older = fields.integer("max_tokens", 0)
    prompt = lm.tokens.encode(text, begin=False) or lm.request("").prompt
    return _rest(fields, [prompt], older if most is None else most)


def _message(message: object) -> dict[str, str]:
    if not isinstance(message, dict) or not _is_text(message.get("role")):
        raise BodyError("a message has a role and a content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts: list[Any] = [_text_part(part) for part in content]
        content = None if None in parts else "".join(parts)
    if not _is_text(content):
        raise BodyError("the content of a message is text", "messages")
    for (
        name,
        value,
    ) in message.items():  # answers that clients send back have empty ones
        if name not in ("role", "content") and value not in (None, "", [], {}):
            raise BodyError(f"'{name}' of a message is not supported here", "messages")
    return {"role": message["role"], "content": content}


def _text_part(part: object) -> str | None:
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        return None
    text = part.get("text")
    return text if _is_text(text) else None


def _rest(
    fields: _Fields, prompts: Sequence[Sequence[int]], most: int | None
) -> Wanted:
    stops = fields.take(
        "stop",
        "a text or a list of texts",
        lambda v: (
            _is_text(v) or (type(v) is list and all(_is_text(s) and s for s in v))
        ),
    )
    n = fields.integer("n", 1) or 1
    if n > MOST_CHOICES:
        raise BodyError(f"'n' is at most {MOST_CHOICES}", "n")
    temperature = fields.number("temperature")
    sampling: dict[str, Any] = {
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": fields.number("top_p"),
        "top_k": fields.integer("top_k", 1),
    }
    try:
        TokenSampler(**sampling)
    except OptionError as error:
        raise BodyError(str(error), "temperature") from None
    seed = fields.integer("seed", -(2**63))
    stream = fields.flag("stream")
    options = fields.take(
        "stream_options",
        "an object with 'include_usage', which is true or false",
        lambda v: (
            type(v) is dict
            and v.keys() <= _STREAM_OPTIONS
            and all(type(flag) is bool for flag in v.values())
        ),
    )
    wanted = Wanted(
        fields.take("model", "the name of a model", _is_text),
        prompts,
        most,
        tuple(s for s in ([stops] if _is_text(stops) else stops or ()) if s),
        n,
        None if seed is None else seed % 2**64,
        sampling,
        stream,
        bool((options or {}).get("include_usage", False)),
    )
    fields.done()
    return wanted


def pieces(wanted: Wanted, lm: LanguageModel) -> TextPieces:
    return TextPieces(lm.tokens, wanted.stops)
