"""Many sessions in one recorded step, timed, with all that they give kept: tokens, and the bits of hidden states."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from benchmarks.drawn_selections import DrawnSelections
from compute.decode.generate import steps_ahead
from compute.decode.step import DecodeStep
from compute.decode.weights import DecodeWeights
from compute.history import History
from protocol.layout import PageFormat


@dataclass(frozen=True)
class Pass:
    """What ``count`` steps gave: tokens [sessions][count], and hidden float32 [count, sessions, H] on the host."""

    tokens: list[list[int]]
    hidden: Tensor
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


class Batch:
    """A step over ``places`` sessions, resident or offloaded, one query row each. Use it as a context."""

    def __init__(
        self,
        weights: DecodeWeights,
        page_format: PageFormat,
        device: torch.device,
        *,
        places: int,
        max_tokens: int,
        cached: bool,
        drawn: bool,
    ) -> None:
        self._drawn = DrawnSelections(places, device) if drawn else None
        self._step = DecodeStep(
            weights, page_format, device, places=places, max_tokens=max_tokens, cached=cached, choose=self._drawn
        )
        if self._drawn is not None:
            self._drawn.serve(self._step)
        self._histories: list[History] = []

    def join(
        self, histories: Sequence[History], sessions: Sequence[int], tokens: Sequence[int], drawn: tuple[Tensor, Tensor]
    ) -> None:
        """Put ``histories``, those of ``sessions``, into the first places, and have them go on with ``tokens``.

        ``drawn`` are selections and the rows that they begin at, as `DrawnSelections` takes them.
        """
        self.leave()
        if self._drawn is not None:
            self._drawn.use(*drawn)
        for place, (history, session, token) in enumerate(zip(histories, sessions, tokens, strict=True)):
            history.prepare(1)
            self._step.join(place, history, token)
            if self._drawn is not None:
                self._drawn.place(place, session)
        self._histories = list(histories)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._step.close()

    def leave(self) -> None:
        """Make all places idle."""
        for place in range(len(self._histories)):
            self._step.leave(place)
        self._histories = []

    def decode(self, count: int) -> Pass:
        """``count`` more steps of all sessions."""
        histories, step = self._histories, self._step
        hidden = torch.empty((count, len(histories), step.hidden.shape[2]), device=step.hidden.device)
        for history in histories:
            history.reserve(count)
        tokens: list[list[int]] = [[] for _ in histories]
        self._synchronise()
        started = time.perf_counter()
        for sampled in steps_ahead(
            step, histories, count, lambda number: hidden[number].copy_(step.hidden[: len(histories), 0])
        ):
            for output, row in zip(tokens, sampled, strict=False):
                output.append(row[0])
        seconds = time.perf_counter() - started
        self._synchronise()
        for history in histories:
            history.settled()
        return Pass(tokens, hidden.cpu(), seconds)

    def _synchronise(self) -> None:
        if self._step.hidden.device.type == "cuda":
            torch.cuda.synchronize()


def digests(passes: Sequence[Pass]) -> list[str]:
    """Of each session, a hash of all tokens and hidden states. NaN is refused: it would make all outputs alike."""
    hidden = torch.cat([each.hidden for each in passes])
    assert bool(torch.isfinite(hidden).all()), "hidden states are not finite"
    found = []
    for session in range(hidden.shape[1]):
        digest = hashlib.sha256(hidden[:, session].contiguous().cpu().numpy().tobytes())
        for each in passes:
            digest.update(repr(each.tokens[session]).encode())
        found.append(digest.hexdigest()[:16])
    return found
