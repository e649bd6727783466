"""What ``kvd-stat`` shows, as types: the reply to a ``stat`` request.

All sizes are bytes. *requested* is what was asked for (logical), *committed* is what the operating system or the driver
really gave (real), *capacity* is the limit.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

NOT_PUBLISHED = -1
"""Bytes that a worker has not told."""

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
    """One tier: ``host``, or ``vram:<device>``. ``quarantined`` bytes wait for a process to be known dead.

    ``own`` is what the driver keeps of the device for the daemon itself, beside what is committed.
    """

    tier: str
    requested: int
    committed: int
    capacity: int
    peak_requested: int
    peak_committed: int
    reserved: int
    quarantined: int
    purposes: list[PurposeStats]
    own: int = 0


class LeaseStats(msgspec.Struct, frozen=True):
    """One lease: a worker process as the kernel identified it. ``state`` is ``live`` or ``quarantined``.

    From ``device`` on it is what the worker says: bytes of that device beside the daemon's, and gaps between tokens.
    """

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
    device: str = ""
    torch_reserved: int = NOT_PUBLISHED
    context: int = NOT_PUBLISHED
    token_gaps: int = 0
    token_gap_s: float = 0.0
    longest_gap_s: float = 0.0
    gap_p50_s: float = 0.0
    gap_p99_s: float = 0.0
    stalls: int = 0
    blocks_looked_up: int = 0
    blocks_found: int = 0
    blocks_loaded: int = 0
    blocks_published: int = 0
    blocks_pinned: int = 0
    blocks_writing: int = 0


def reports_of_processes(leases: Iterable[LeaseStats]) -> list[LeaseStats]:
    """The newest lease of each process and device that reports: one with several leases reports the same in each."""
    newest = {(lease.pid, lease.device): lease for lease in sorted(leases, key=lambda lease: lease.lease)}
    return [lease for lease in newest.values() if lease.device]


class StallStats(msgspec.Struct, frozen=True):
    """A gap between two tokens that was much longer than usual, and what the kernel did to pages meanwhile.

    ``end`` is seconds since 1970. ``suspects`` are kinds of the stall watch's events; ``unwatched`` without one.
    """

    lease: int
    end: float
    gap_s: float
    suspects: list[str]


class SessionStats(msgspec.Struct, frozen=True):
    """One session. Rows count tokens; the counters are those that its worker last published.

    ``lease`` is 0 while no worker holds the session. ``state`` is ``held``, ``stored`` or ``damaged``. ``page_bytes``
    is the size of a page without padding, which is what a copyback moves. ``absent_pages`` are still to come from disk.
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
    absent_pages: int = 0


class BlockStats(msgspec.Struct, frozen=True):
    """One space of blocks. ``stored`` blocks are in host RAM, of which ``pinned`` ones are in use; ``writing`` ones are
    reserved; ``on_disk`` ones are there only. From ``looked_up`` on all else is what has happened since the daemon
    started, in blocks.
    """

    space: int
    uid: int
    fingerprint: str
    block_bytes: int
    leases: int
    stored: int
    pinned: int
    writing: int
    committed: int
    looked_up: int
    found: int
    loaded: int
    published: int
    abandoned: int
    evicted: int
    refused: int
    on_disk: int = 0
    spilled: int = 0
    returned: int = 0


class NodeStats(msgspec.Struct, frozen=True):
    """Everything at one moment. ``ledger`` is ``balanced`` or the arithmetic that does not add up.

    ``drain_failure`` says why the last draining that was to save all sessions has left the daemon running.
    """

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
    stalls: list[StallStats] = []
    drain_failure: str = ""
    blocks: list[BlockStats] = []
