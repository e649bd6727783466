"""What the block store is made of: spaces of blocks, the kinds of their frames, and who holds which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from kvd.alloc.ledger import Account
from kvd.blocks.recency import Recency
from kvd.blocks.spill_file import SpillFile
from kvd.leases import Lease
from kvd.runs import Run
from kvd.sessions.session import HOST_TIER

PURPOSE = "blocks"
STORED = Account(HOST_TIER, 0, 0, PURPOSE)
"""Published blocks stand on the daemon's own account, reserved ones on their writer's."""


@dataclass(eq=False)
class Kind:
    """Frames of one size of one uid, which come from the same extents. Counts of blocks that are in host RAM.

    ``pinned`` are those of the ``stored`` ones that somebody has pinned.
    """

    uid: int
    stride: int
    recency: Recency
    stored: int = 0
    pinned: int = 0
    reserved: int = 0

    @property
    def nbytes(self) -> int:
        return self.stride * (self.stored + self.reserved)

    @property
    def evictable(self) -> int:
        return self.stored - self.pinned


@dataclass
class Counts:
    """What has happened in a space, or at the request of a lease; numbers only rise."""

    looked_up: int = 0
    found: int = 0
    loaded: int = 0
    published: int = 0
    abandoned: int = 0
    evicted: int = 0
    refused: int = 0
    spilled: int = 0
    returned: int = 0

    def add(self, other: Counts) -> None:
        """Count what ``other`` counted too."""
        for field_ in fields(self):
            setattr(self, field_.name, getattr(self, field_.name) + getattr(other, field_.name))


@dataclass(eq=False)
class Space:
    """The blocks of one uid, fingerprint and size. ``stored`` has the slot of each key, ``writing`` that of reserved
    ones. ``openers`` are the holders that have named it."""

    number: int
    uid: int
    fingerprint: bytes
    block_bytes: int
    kind: Kind
    stored: dict[bytes, int] = field(default_factory=dict)
    writing: dict[bytes, int] = field(default_factory=dict)
    openers: set[Holder] = field(default_factory=set)
    pinned: int = 0
    file: SpillFile | None = None
    reading: int = 0
    """Requests that wait for the disk."""
    counts: Counts = field(default_factory=Counts)

    @property
    def on_disk_only(self) -> int:
        """Blocks that are on disk and not in host RAM."""
        return len(self.file.where) - len(self.file.where.keys() & self.stored.keys()) if self.file else 0


@dataclass(eq=False)
class Hold:
    """Blocks of ``space`` that somebody pins (``runs``), or has reserved (``keys`` and their slots).

    ``chain`` are all keys of the request that reserved. Pins that an earlier run of the daemon gave belong to several
    holders, for nobody knows any more whose they were.
    """

    number: int
    space: Space
    owners: set[Holder]
    runs: list[Run] = field(default_factory=list)
    keys: dict[bytes, int] = field(default_factory=dict)
    chain: Sequence[bytes] = ()


@dataclass(eq=False)
class Holder:
    """A lease that uses blocks, by the epoch and number that it was given under; ``index`` is its place in the table.

    ``lease`` is the one in whose name it goes on: its own, or after a restart an inherited one of its process.
    """

    epoch: int
    number: int
    index: int
    lease: Lease
    holds: dict[int, Hold] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    @property
    def account(self) -> Account:
        """Where frames that it has reserved stand."""
        return Account(HOST_TIER, self.lease.number, 0, PURPOSE)


def blocks_of(runs: Iterable[Run]) -> int:
    """How many blocks the runs have."""
    return sum(count for _, count in runs)
