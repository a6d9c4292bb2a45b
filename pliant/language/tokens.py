"""Text to tokens and back, with the tokenizer that a GGUF file holds.

The `tokenizers` package does the work. Files name how text is cut before its pieces are
merged (`tokenizer.ggml.pre`); of these names, the table below knows some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pliant.errors import ModelError

_CONTROL, _OWN = 3, 4  # kinds of tokens: special ones, ones that a user added
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
_DIGITS = ("smollm", "refact", "command-r")  # every digit by itself
_PLAIN = ("gpt-2", "default")


class Tokens:
    """The tokenizer of a model, its special tokens and its way to write a chat."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._tokenizer = _tokenizer(fields)
        self._names: Sequence[str] = fields["tokenizer.ggml.tokens"]
        self._template: str | None = fields.get("tokenizer.chat_template")
        self.begin: int | None = fields.get("tokenizer.ggml.bos_token_id")
        self._adds_begin = bool(fields.get("tokenizer.ggml.add_bos_token", False))
        ends = {fields.get("tokenizer.ggml.eos_token_id")}
        ends.update(
            k
            for k, name in enumerate(self._names)
            if name in ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>")
        )
        self.ends = frozenset(k for k in ends if k is not None)

    def encode(self, text: str, begin: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if begin and self._adds_begin and self.begin is not None:
            return [self.begin, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Messages (role, content) as the model's prompt for the next answer."""
        if self._template is None:
            raise ModelError("the file has no chat template")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise ModelError(f"the chat template refuses the messages: {message}")

        world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        world.globals["raise_exception"] = refuse
        name = "" if self.begin is None else self._names[self.begin]
        return world.from_string(self._template).render(
            messages=list(messages), add_generation_prompt=True, bos_token=name
        )


def _tokenizer(fields: Mapping[str, Any]) -> Any:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise ModelError(
            "reading a tokenizer needs the package tokenizers: "
            "pip install 'pliant[llm]'"
        ) from None
    kind, pre = (fields.get(f"tokenizer.ggml.{k}") for k in ("model", "pre"))
    pre = pre or "default"
    if kind != "gpt2" or pre not in (*_SPLITS, *_DIGITS, *_PLAIN):
        raise ModelError(f"a tokenizer of the kind {kind!r}, {pre!r} is not supported")
    names = fields["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    numbers = {name: k for k, name in enumerate(names)}
    made = Tokenizer(models.BPE(numbers, merges, ignore_merges=pre == "llama-bpe"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SPLITS:
        from tokenizers import Regex

        cut: Any = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    elif pre in _DIGITS:
        cut = pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    else:
        made.pre_tokenizer = level
    made.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    for wanted, special in ((_CONTROL, True), (_OWN, False)):
        found = [n for n, kind in zip(names, kinds, strict=False) if kind == wanted]
        tokens = [AddedToken(n, special=special, normalized=False) for n in found]
        if special:
            made.add_special_tokens(tokens)
        else:
            made.add_tokens(tokens)
    return made
