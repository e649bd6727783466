"""How long things took: the gaps between a request's tokens; steps and pieces of prompts on the device."""

from __future__ import annotations

import time
from collections import deque

import torch

KEPT = 4096


class Gaps:
    """The last `KEPT` gaps between two deliveries of tokens to a request, and the longest of all."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self.longest = max(self.longest, seconds)

    def quantile(self, part: float) -> float:
        """The gap that ``part`` of them do not exceed; 0 without any."""
        ordered = sorted(self._seconds.copy())
        return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Stopwatch:
    """Times what is enqueued from now to `stop`: on a GPU, between two events of the stream."""

    def __init__(self, device: torch.device, tokens: int = 0, of: object = None) -> None:
        self.tokens, self.of = tokens, of
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()
        self._started = time.perf_counter()
        self._taken = 0.0

    def stop(self) -> None:
        self._taken = time.perf_counter() - self._started
        if self._events is not None:
            self._events[1].record()

    def seconds(self, *, wait: bool) -> float | None:
        """What it took; None while it is under way, unless this is to ``wait``."""
        if self._events is None:
            return self._taken
        if wait:
            self._events[1].synchronize()
        elif not self._events[1].query():
            return None
        milliseconds: float = self._events[0].elapsed_time(self._events[1])
        return milliseconds / 1e3
