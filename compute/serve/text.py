"""Tokens of texts and messages, and text of tokens as they come: by the checkpoint's tokenizer, or byte by byte."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from compute.model import tokenizer as byte_tokens
from protocol.errors import InvalidValue

Messages = Sequence[Mapping[str, str]]
"""``role`` and ``content`` each."""
_EARLIER = "kvd: an earlier answer"


class Text(Protocol):
    """How a model's tokens are read and written. Safe to use from several threads."""

    stop_tokens: frozenset[int]
    """Tokens that end an answer."""

    def of_text(self, text: str) -> list[int]:
        """Tokens of a text that a history begins with, the tokenizer's own first token included."""

    def more_text(self, text: str) -> list[int]:
        """Tokens of a text that a history goes on with."""

    def of_messages(self, messages: Messages) -> list[int]:
        """Tokens of a conversation, up to where the next answer begins."""

    def next_messages(self, messages: Messages) -> list[int]:
        """Tokens of messages that follow an answer, from the end of that answer on: they may begin with the stop token
        that it ended with.
        """

    def decoder(self) -> Callable[[int], str]:
        """For the tokens of one answer in turn: the text that each of them adds; of a part of a character, nothing."""


class ByteText:
    """Tokens are bytes. A message is a line: ``role: content``."""

    stop_tokens: frozenset[int] = frozenset()

    def of_text(self, text: str) -> list[int]:
        return byte_tokens.encode(text)

    more_text = of_text

    def of_messages(self, messages: Messages) -> list[int]:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return byte_tokens.encode("".join(lines) + "assistant: ")

    def next_messages(self, messages: Messages) -> list[int]:
        return byte_tokens.encode("\n") + self.of_messages(messages)

    def decoder(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: decoder.decode(bytes([token]))


class NumberText:
    """Text is the tokens' numbers: for models without a tokenizer, and for benches. It has no conversations."""

    stop_tokens: frozenset[int] = frozenset()

    def of_text(self, text: str) -> list[int]:
        words = text.split()
        wrong = next((word for word in words if not word.isdecimal()), None)
        if wrong is not None:
            raise InvalidValue("prompt", wrong, "numbers of tokens: this server has no tokenizer")
        return [int(word) for word in words]

    more_text = of_text

    def of_messages(self, messages: Messages) -> list[int]:
        raise InvalidValue("messages", len(messages), "none: this server has no tokenizer")

    next_messages = of_messages

    def decoder(self) -> Callable[[int], str]:
        return lambda token: f"{token} "


class CheckpointText:
    """The tokenizer and the chat template in ``folder``, by ``transformers``.

    Raises `InvalidValue` where there is none. Nothing is fetched, and no code of the checkpoint is run but its
    template, in a sandbox.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        ends = [_ends_of(folder / name) for name in ("generation_config.json", "config.json")]
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_fast=True
            )
            self._backend: Any = self._tokenizer.backend_tokenizer
        except (OSError, ValueError, AttributeError) as error:
            raise InvalidValue("tokenizer", str(folder), f"a folder with a tokenizer.json ({error})") from None
        own = self._tokenizer.eos_token_id
        self.stop_tokens = frozenset([] if own is None else [own]).union(*ends)

    def of_text(self, text: str) -> list[int]:
        return list(self._backend.encode(text).ids)

    def more_text(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def of_messages(self, messages: Messages) -> list[int]:
        return self.more_text(self._rendered(messages))

    def next_messages(self, messages: Messages) -> list[int]:
        earlier = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _EARLIER}]
        _, found, rest = self._rendered([*earlier, *messages]).partition(_EARLIER)
        if not found:
            raise InvalidValue(
                "chat template", "one that drops earlier answers", "one that repeats them, for a session"
            )
        return self.more_text(rest)

    def decoder(self) -> Callable[[int], str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._backend, token) or ""

    def _rendered(self, messages: Messages) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise InvalidValue("messages", roles, f"what the chat template takes ({error})") from None
        return text


def text_of(folders: Sequence[Path], vocabulary: int) -> Text:
    """The tokenizer of the first of ``folders`` that has one; bytes for a model of 256 tokens without one.

    Raises `InvalidValue` where neither is there.
    """
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return CheckpointText(folder)
    if vocabulary == byte_tokens.VOCAB_SIZE:
        return ByteText()
    looked = ", ".join(map(str, folders)) or None
    raise InvalidValue("--tokenizer", looked, f"a folder with a tokenizer.json, for {vocabulary:,} tokens")


def _ends_of(path: Path) -> list[int]:
    """Tokens that a checkpoint's file says end a text; none where there is no such file. Raises `InvalidValue`."""
    if not path.exists():
        return []
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidValue("tokenizer", str(path), f"a file with a JSON object ({error})") from None
    if not isinstance(settings, dict):
        raise InvalidValue("tokenizer", str(path), "a file with a JSON object")
    found = settings.get("eos_token_id")
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(token) is not int for token in tokens):
        raise InvalidValue(f"eos_token_id of {path}", found, "a token or a list of tokens")
    return tokens


class Answer:
    """The text of one answer, token by token, up to the first of ``stops``, which is not part of it.

    Text that a stop may begin with is held back until it is known not to.
    """

    def __init__(self, decode: Callable[[int], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, [stop for stop in stops if stop]
        self._ready, self._held = "", ""

    def take(self, token: int) -> bool:
        """Add a token; returns whether a stop has come."""
        self._held += self._decode(token)
        found = [self._held.index(stop) for stop in self._stops if stop in self._held]
        if found:
            at = min(found)
            self._ready, self._held = self._ready + self._held[:at], ""
            return True
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        end = len(self._held) - kept
        self._ready, self._held = self._ready + self._held[:end], self._held[end:]
        return False

    def drain(self, *, last: bool = False) -> str:
        """The text since the last time; with ``last`` what was held back too."""
        text = self._ready + (self._held if last else "")
        self._ready = ""
        if last:
            self._held = ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are a beginning of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
