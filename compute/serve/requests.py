"""What is asked of the scheduler, and what it says back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from compute.decode.sampler import GREEDY, Sampling
from protocol.errors import InvalidValue

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Request:
    """Tokens to read, and how to go on from them.

    ``prompt`` begins a history, ``continued`` goes on with one that is stored under ``session``; by default it is the
    same tokens. Where ``continued`` begins with a stop token that the history ends with, it is not read again. Without
    a ``session`` the history goes when it has been of use. ``max_tokens`` is by default as many as there is room for.
    Decoding ends with one of ``stop_tokens``, which is the last token then.
    """

    prompt: Sequence[int]
    max_tokens: int | None = None
    session: str | None = None
    continued: Sequence[int] | None = None
    sampling: Sampling = GREEDY
    stop_tokens: frozenset[int] = field(default=frozenset())

    def check(self, vocabulary: int) -> None:
        """Raises `InvalidValue` for tokens that are none of ``vocabulary``, or numbers of them that cannot be."""
        for tokens in (self.prompt, self.continued or ()):
            outside = [token for token in ((min(tokens), max(tokens)) if tokens else ()) if not 0 <= token < vocabulary]
            if outside:
                raise InvalidValue("token", outside[0], f"0 to {vocabulary - 1}")
        if not self.prompt:
            raise InvalidValue("prompt's tokens", 0, "at least 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidValue("max_tokens", self.max_tokens, "at least 1")


@dataclass(frozen=True)
class Queued:
    """Waiting: ``place`` is 1 for whoever is next. ``reason`` is what it waits for."""

    place: int
    reason: str


@dataclass(frozen=True)
class Reading:
    """``done`` of ``total`` prompt tokens have been read; ``cached`` of the history's were there before."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True)
class Decoded:
    """Tokens that the sink has been offered since the last time; they are acknowledged in the session's log."""

    tokens: list[int]


@dataclass(frozen=True)
class Usage:
    """Tokens of a request. ``prompt`` counts all of the history that it was answered from, ``cached`` those of them
    that were not computed. ``steps`` are decode steps: with drafts, fewer than tokens.
    """

    prompt: int
    cached: int
    output: int
    steps: int
    queued_s: float
    first_token_s: float
    decode_s: float


@dataclass(frozen=True)
class Finished:
    """The last event of a request that was served, or cancelled."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """The last event of a request that was refused, or that something went wrong with."""

    error: Exception


Event = Queued | Reading | Decoded | Finished | Failed


class Sink(Protocol):
    """Who gets a request's tokens. Called on the scheduler's thread, which it must not keep."""

    def take(self, token: int) -> bool:
        """Look at the next token; returns whether it is the last one. It is acknowledged when `emit` tells of it."""

    def emit(self, event: Event) -> None:
        """Something has happened. `Finished` or `Failed` is the last event."""
