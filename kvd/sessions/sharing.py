"""Pages that several sessions have: frames with a count of their references.

Invariant: a frame with several references is written by nobody. A worker writes no page before that of its last
committed row, so a fork shares the pages before it and gets a copy of that one; and a truncation gives the session
copies of what is shared from its new last page on. Sessions of different uids never share. The verbs are in
`kvd.sessions.forks`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable

from kvd.alloc.ledger import Account
from kvd.sessions.session import HOST_TIER, Session
from kvd.tiers.host_ram import HostRam, frame_extent
from protocol.errors import OsFailure, OutOfCapacity
from protocol.layout import PAGE_TOKENS
from protocol.session_state import SessionHeader

SHARED = Account(HOST_TIER, 0, 0, "shared_pages")
"""Frames that are or were in several sessions stand on the daemon's own account until the last one gives them up."""


def last_page(rows: int) -> int:
    """The page of the last of ``rows`` rows: no page before it is written any more."""
    return max(rows - 1, 0) // PAGE_TOKENS


def uid_tier(uid: int) -> str:
    """What errors call the part of the host tier that a uid may have."""
    return f"{HOST_TIER} for uid {uid}"


class SharedFrames:
    """The frames of all sessions. One that was never shared is not counted here: it has one reference."""

    def __init__(self, host: HostRam) -> None:
        self.most_per_uid = 0
        """Bytes that one uid's sessions may have; 0 for no limit."""
        self._host = host
        self._references: Counter[int] = Counter()

    def allocate(self, account: Account, header: SessionHeader, count: int) -> list[int]:
        """``count`` frames for the session of ``header``. Raises `OutOfCapacity` and what `HostRam` raises."""
        asked, limit = count * header.page_stride, self.most_per_uid
        if limit and asked > limit - (used := self._host.used_bytes(header.uid)):
            holders = [f"sessions of uid {header.uid} ({used} bytes)"]
            raise OutOfCapacity(uid_tier(header.uid), asked, max(limit - used, 0), limit, holders)
        return self._host.allocate_frames(account, header.uid, header.page_stride, count, header.page_bytes)

    def references(self, frame: int) -> int:
        """How many sessions have a frame that is in use."""
        return self._references.get(frame, 1)

    def own_bytes(self, session: Session) -> int:
        """What would be free without the session."""
        return session.header.page_stride * sum(1 for frame in session.frames if self.references(frame) == 1)

    def share(self, frames: Collection[int]) -> None:
        """Add a reference to each of ``frames``, which are in use."""
        counts = self._references
        new = [frame for frame in frames if frame not in counts]
        self._host.move_frames(new, SHARED)
        counts.update(new)
        counts.update(frames)

    def free(self, frames: Iterable[int]) -> None:
        """Take a reference from each of ``frames``; those without another are free."""
        counts = self._references
        last = []
        for frame in frames:
            count = counts.get(frame, 1)
            if count > 1:
                counts[frame] = count - 1
            else:
                last.append(frame)
        self._host.free_frames(last)
        for frame in last:
            counts.pop(frame, None)

    def move(self, frames: Iterable[int], account: Account) -> None:
        """Have the frames that were never shared stand on ``account``."""
        self._host.move_frames([frame for frame in frames if frame not in self._references], account)

    def own(self, session: Session, pages: int, rows: int) -> tuple[int, ...]:
        """The frames of the first ``pages`` pages of ``session``, which is about to have ``rows`` committed rows.

        Those that it may write from now on and that are shared are new frames; the one with the last committed row is
        a copy. The caller frees what the session no longer has. Raises `OutOfCapacity` or `OsFailure`; then nothing
        has changed.
        """
        frames = list(session.frames[:pages])
        first = last_page(rows)
        shared = [page for page in range(first, pages) if self.references(frames[page]) > 1]
        if not shared:
            return tuple(frames)
        header = session.header
        new = self.allocate(session.account("pages"), header, len(shared))
        for page, frame in zip(shared, new, strict=True):
            if page == first and rows:
                try:
                    self.copy(frames[page], frame, header.page_stride)
                except BaseException:
                    self._host.free_frames(new)
                    raise
            frames[page] = frame
        return tuple(frames)

    def copy(self, source: int, target: int, stride: int) -> None:
        """Copy one frame's bytes to another's."""
        try:
            data = os.pread(self._host.fileno(frame_extent(source)), stride, self._host.offset(source))
            written = os.pwrite(self._host.fileno(frame_extent(target)), data, self._host.offset(target))
        except OSError as error:
            raise OsFailure(f"copying a page: {error.strerror}", errno=error.errno) from error
        if written != stride:
            raise OsFailure(f"copying a page: {written} of {stride} bytes")
