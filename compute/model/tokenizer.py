"""Tokens that are bytes, for a model without a vocabulary of its own."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import InvalidValue

VOCAB_SIZE = 256


def encode(text: str | bytes) -> list[int]:
    """Token ids, one for each byte; text is encoded as UTF-8."""
    return list(text.encode() if isinstance(text, str) else text)


def decode(tokens: Sequence[int]) -> str:
    """The text of ``tokens``; bytes that are not UTF-8 become U+FFFD. Raises `InvalidValue` for an id above 255."""
    for token in tokens:
        if not 0 <= token < VOCAB_SIZE:
            raise InvalidValue("token of a byte vocabulary", token, f"0 to {VOCAB_SIZE - 1}")
    return bytes(tokens).decode(errors="replace")
