"""One session: its header, its page table, its blocks, and who holds it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from kvd.alloc.ledger import Account
from kvd.leases import Lease
from kvd.sessions.blocks import SessionBlocks
from protocol.errors import FingerprintMismatch, SessionDamaged
from protocol.session_state import SessionHeader, WorkerState

HOST_TIER = "host"


class Session:
    """A session and its memory. ``damage`` says what is wrong with it, if anything is; that does not heal.

    ``grants`` are those that the holder was given for the blocks. ``busy`` says what the daemon itself does with it.
    ``published`` is what its worker had published when that was last read.
    ``idle_since`` is when it was last stored, by the monotonic clock. ``prefix`` are the hashes of its first pages
    (`protocol.prefix`), as far as `kvd.sessions.forks` has needed them.
    """

    def __init__(self, header: SessionHeader, blocks: SessionBlocks, lease: Lease | None) -> None:
        self.header = header
        self.frames: tuple[int, ...] = ()
        self._extents_of: tuple[int, ...] = ()
        self._extents: set[int] = set()
        self.blocks = blocks
        self.lease = lease
        self.grants: list[int] = []
        self.damage = ""
        self.busy = ""
        self.idle_since = time.monotonic()
        self.published: WorkerState | None = None
        self.prefix: list[bytes] = []

    @property
    def number(self) -> int:
        return self.header.session

    @property
    def name(self) -> str:
        return self.header.name

    @property
    def state(self) -> str:
        """As `protocol.stats.SessionStats` has it."""
        return "damaged" if self.damage else "held" if self.lease else "stored"

    @property
    def extents(self) -> set[int]:
        """The extents that its pages lie in."""
        if self._extents_of is not self.frames:  # of a long session this takes as long as a fork may
            self._extents_of, self._extents = self.frames, {frame >> 32 for frame in self.frames}
        return self._extents

    def account(self, purpose: str) -> Account:
        """The account of one purpose of it: its holder's, or the daemon's own (lease 0) while it has none."""
        return Account(HOST_TIER, self.lease.number if self.lease else 0, self.number, purpose)

    def rewrite(self, frames: Sequence[int], **changes: Any) -> None:
        """Change the page table and fields of the header; if writing them fails, nothing has changed here."""
        header = dataclasses.replace(self.header, page_count=len(frames), **changes)
        self.blocks.write(header, frames)
        self.header, self.frames = header, tuple(frames)

    def require_model(self, fingerprint: bytes, encoding: str) -> None:
        """Raise `FingerprintMismatch` unless its pages are of this model in this encoding."""
        header = self.header
        if (fingerprint, encoding) != (header.fingerprint, header.encoding):
            raise FingerprintMismatch(
                f"session {self.name!r} was made by model {header.fingerprint.hex()} in encoding {header.encoding}, "
                f"not {fingerprint[:32].hex()} in {encoding[:16]}",
                session=self.number,
            )

    def revoke_grants(self) -> None:
        """The holder can claim the blocks no more."""
        if self.lease is not None:
            self.lease.revoke(*self.grants)
        self.grants.clear()

    def is_idle(self) -> bool:
        """Whether it is stored, intact and nothing is being done with it."""
        return self.lease is None and not self.damage and not self.busy

    def worker_state(self) -> WorkerState | None:
        """What the worker last published; None, and the session is damaged, if that cannot be read."""
        try:
            self.published = self.blocks.worker_state()
        except SessionDamaged as error:
            self.damage = self.damage or error.message
            return None
        return self.published

    def is_empty(self) -> bool:
        """Whether nothing would be lost with it: no token acknowledged and no row committed."""
        state = self.worker_state()
        return state is not None and not self.damage and state.tokens == 0 and state.commit.rows == 0
