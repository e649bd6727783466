"""What benches do with a clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def timed(act: Callable[[], object]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def median(act: Callable[[], object], runs: int = 20) -> float:
    """Seconds of one run."""
    return statistics.median(timed(act) for _ in range(runs))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
