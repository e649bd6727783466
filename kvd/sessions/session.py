"""One session: its header, its page table, its blocks, and who holds it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from typing import Any

from kvd.alloc.ledger import Account
from kvd.leases import Lease
from kvd.sessions.blocks import SessionBlocks
from protocol.daemon_block import join_entries
from protocol.errors import FingerprintMismatch, OsFailure, SessionBusy, SessionDamaged
from protocol.session_state import SessionHeader, WorkerState

HOST_TIER = "host"
FIRST_PAGE, END_PAGE = "first_page", "end_page"
"""Facts of `Session.require_pages`."""


class Session:
    """A session and its memory. ``damage`` says what is wrong with it, if anything is; that does not heal.

    ``grants`` are those that the holder was given for the blocks, ``viewers`` those of other leases.
    ``busy`` says what the daemon itself does with it.
    ``published`` is what its worker had published when that was last read.
    ``idle_since`` is when it was last stored, by the monotonic clock. ``prefix`` are the hashes of its first pages
    (`protocol.prefix`), as far as `kvd.sessions.forks` has needed them.

    ``absent`` are the pages whose bytes are still in the saved file that ``source`` names (`kvd.saved.lazy`), and
    ``lost`` says of some of them why they cannot be had.
    """

    def __init__(self, header: SessionHeader, blocks: SessionBlocks, lease: Lease | None) -> None:
        self.header = header
        self.frames: tuple[int, ...] = ()
        self._extents_of: tuple[int, ...] = ()
        self._extents: set[int] = set()
        self.blocks = blocks
        self.lease = lease
        self.grants: list[int] = []
        self.viewers: dict[Lease, list[int]] = {}
        self.damage = ""
        self.busy = ""
        self.idle_since = time.monotonic()
        self.published: WorkerState | None = None
        self.prefix: list[bytes] = []
        self.absent: set[int] = set()
        self.lost: dict[int, str] = {}
        self.source = b""

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
        """The extents that its pages lie in; of a whole fork that is being answered, those of its source besides."""
        if self._extents_of is not self.frames:  # of a long session this takes as long as a fork may
            self._extents_of, self._extents = self.frames, {frame >> 32 for frame in self.frames}
        return self._extents

    def begin_with(self, shared: Sequence[int], source: Session) -> None:
        """Have ``shared``, the first frames of ``source``, before its own.

        If they are all but the last, its extents are until `settle_extents` those of ``source`` besides: to look at
        every frame takes as long as the rest of a fork. Afterwards they must not be: the source may end, and another
        uid have its extents.
        """
        own, self.frames = self.extents, (*shared, *self.frames)
        if len(shared) + 1 >= len(source.frames):
            self._extents_of, self._extents = self.frames, own | source.extents

    def settle_extents(self) -> None:
        """Have the extents counted from its frames when they are asked for next."""
        self._extents_of, self._extents = (), set()

    def account(self, purpose: str) -> Account:
        """The account of one purpose of it: its holder's, or the daemon's own (lease 0) while it has none."""
        return Account(HOST_TIER, self.lease.number if self.lease else 0, self.number, purpose)

    def rewrite(self, frames: Sequence[int], **changes: Any) -> None:
        """Change the page table and fields of the header; if writing them fails, nothing has changed here."""
        header = dataclasses.replace(self.header, page_count=len(frames), **changes)
        absent = {page for page in self.absent if page < len(frames)}
        self.blocks.write(header, join_entries(frames, absent))
        self.header, self.frames, self.absent = header, tuple(frames), absent

    def expect_pages(self, source: bytes) -> None:
        """Have all pages be absent, to come from the saved file that ``source`` names. Before anybody sees them."""
        self.blocks.write_source(source)
        self.source, self.absent = source, set(range(len(self.frames)))

    def pages_came(self, pages: Collection[int]) -> None:
        """The bytes of these pages are there. Raises `OsFailure`, and they are not."""
        before, self.absent = self.absent, self.absent.difference(pages)
        try:
            self.rewrite(self.frames)
        except OsFailure:
            self.absent = before
            raise

    def require_pages(self, first: int, end: int) -> None:
        """Raise `SessionBusy` unless the bytes of pages ``first`` to ``end - 1`` are there.

        Its facts `FIRST_PAGE` and `END_PAGE` say which, for whoever can wait for them (`kvd.saved.lazy`).
        """
        if self.absent and not self.absent.isdisjoint(range(first, end)):
            raise SessionBusy(
                f"pages {first} to {end - 1} of session {self.name!r} are not all read from disk yet",
                **{"session": self.number, FIRST_PAGE: first, END_PAGE: end},
            )

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
        """Neither the holder nor a viewer can claim the blocks by what it was given."""
        if self.lease is not None:
            self.lease.revoke(*self.grants)
        self.grants.clear()
        for lease, grants in self.viewers.items():
            lease.revoke(*grants)
        self.viewers.clear()

    def is_idle(self) -> bool:
        """Whether it is stored, intact, all there, and nothing is being done with it."""
        return self.lease is None and not (self.damage or self.busy or self.absent)

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
