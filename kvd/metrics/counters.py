"""What has happened since the daemon started. One thread counts: the loop's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

DONE = "done"
"""The outcome of a request that was not refused; the others are codes of errors."""


@dataclass
class Counters:
    """Numbers that only rise. ``requests`` is by verb and outcome, as they are named on the wire."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    leases_opened: int = 0
    leases_ended: int = 0
    leases_quarantined: int = 0
