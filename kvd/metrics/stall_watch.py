"""Counts what the kernel did to pages that may have stopped a GPU: compaction, NUMA migration, splits of huge pages.

Each of these goes through the GPU driver's MMU notifiers. ``/proc/vmstat`` counts them for the whole host, so what is
counted here may concern other programs' pages: a suspect, not a proof.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import OsFailure

VMSTAT = Path("/proc/vmstat")

EVENTS: Mapping[str, tuple[str, ...]] = {
    "compaction": ("compact_stall", "compact_daemon_wake", "compact_migrate_scanned"),
    "numa_migration": ("numa_pages_migrated", "numa_pte_updates"),
    "thp_split": ("thp_split_page", "thp_split_pmd", "thp_migration_split"),
}
"""The counters of ``/proc/vmstat`` that are looked at, by kind. A kernel may not have all of them."""

REMEMBERED_BURSTS = 64


@dataclass(frozen=True)
class Burst:
    """Events of one kind between two looks, at ``since`` and at ``time``, in seconds since 1970."""

    kind: str
    since: float
    time: float
    events: int


class StallWatch:
    """Compares ``/proc/vmstat`` with what it was at construction. Raises `OsFailure` if it cannot be read."""

    def __init__(self, vmstat: Path = VMSTAT) -> None:
        self._vmstat = vmstat
        self._first = self._last = self._read()
        self.looked_at = time.time()
        """When, in seconds since 1970."""
        self.bursts: deque[Burst] = deque(maxlen=REMEMBERED_BURSTS)
        """The latest, oldest first."""

    def look(self) -> None:
        """Read the counters again."""
        now, since = self._read(), self.looked_at
        self.looked_at = time.time()
        for kind, names in EVENTS.items():
            events = sum(now[name] - self._last[name] for name in names if name in now)
            if events > 0:
                self.bursts.append(Burst(kind, since, self.looked_at, events))
        self._last = now

    def kinds_between(self, begin: float, end: float) -> list[str]:
        """The kinds of events that may have been between these moments, as far as bursts are remembered."""
        return sorted({burst.kind for burst in self.bursts if burst.since <= end and burst.time >= begin})

    def counts(self) -> dict[tuple[str, str], int]:
        """Events since construction, by kind and the kernel's name of the counter."""
        return {
            (kind, name): self._last[name] - self._first[name]
            for kind, names in EVENTS.items()
            for name in names
            if name in self._last
        }

    def _read(self) -> dict[str, int]:
        try:
            lines = self._vmstat.read_text().splitlines()
        except OSError as error:
            raise OsFailure(f"reading {self._vmstat}: {error.strerror}", path=str(self._vmstat)) from error
        counters = dict(line.split() for line in lines)
        return {name: int(counters[name]) for names in EVENTS.values() for name in names if name in counters}
