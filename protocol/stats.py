"""What ``kvd-stat`` shows, as types: the reply to a ``stat`` request.

All sizes are bytes. *requested* is what was asked for (logical), *committed* is what the operating system or the driver
really gave (real), *capacity* is the limit.
"""

from __future__ import annotations

import msgspec

STATS_SCHEMA = 1
"""Raised whenever a field changes its meaning or goes away; new fields do not raise it."""


class PurposeStats(msgspec.Struct, frozen=True):
    """Bytes of one tier that serve one purpose."""

    purpose: str
    requested: int
    committed: int
    peak_requested: int
    peak_committed: int


class TierStats(msgspec.Struct, frozen=True):
    """One tier: ``host``, or ``vram:<device>``. ``quarantined`` bytes wait for a process to be known dead."""

    tier: str
    requested: int
    committed: int
    capacity: int
    peak_requested: int
    peak_committed: int
    reserved: int
    quarantined: int
    purposes: list[PurposeStats]


class LeaseStats(msgspec.Struct, frozen=True):
    """One lease: a worker process as the kernel identified it. ``state`` is ``live`` or ``quarantined``."""

    lease: int
    state: str
    uid: int
    gid: int
    pid: int
    client: str
    age_s: float
    sessions: int
    requested: int
    committed: int


class SessionStats(msgspec.Struct, frozen=True):
    """One session. Rows count tokens; the counters are those that its worker last published.

    ``lease`` is 0 while no worker holds the session. ``state`` is ``held``, ``stored`` or ``damaged``. ``page_bytes``
    is the size of a page without padding, which is what a copyback moves.
    """

    session: int
    name: str
    uid: int
    lease: int
    state: str
    generation: int
    encoding: str
    pages: int
    logical_rows: int
    committed_rows: int
    tokens: int
    requested: int
    committed: int
    selections: int
    hits: int
    misses: int
    ring_hits: int
    copybacks: int
    page_bytes: int = 0


class NodeStats(msgspec.Struct, frozen=True):
    """Everything at one moment. ``ledger`` is ``balanced`` or the arithmetic that does not add up."""

    schema: int
    daemon_version: str
    epoch: int
    pid: int
    uptime_s: float
    draining: bool
    ledger: str
    tiers: list[TierStats]
    leases: list[LeaseStats]
    sessions: list[SessionStats]
