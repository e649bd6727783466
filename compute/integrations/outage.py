"""Leaving a daemon alone that does not answer, for longer each time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Outage:
    """When to try the daemon again: ``first_s`` after a failure, twice as long after each that follows.

    ``clock`` counts seconds.
    """

    def __init__(self, first_s: float, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self._wait_s = 0.0
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it may be tried now."""
        return self._clock() >= self._until

    @property
    def left_s(self) -> float:
        """Seconds before it may be tried."""
        return max(0.0, self._until - self._clock())

    @property
    def lasts(self) -> bool:
        """Whether the latest try failed."""
        return self._wait_s > 0

    def failed(self) -> None:
        """It did not answer, just now."""
        self._wait_s = min(self._wait_s * 2 or self._first_s, self._longest_s)
        self._until = self._clock() + self._wait_s

    def answered(self) -> None:
        self._wait_s = self._until = 0.0
