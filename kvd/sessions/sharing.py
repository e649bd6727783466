"""Pages that several sessions have: frames with a count of their references.

Invariant: a frame with several references is written by nobody. A worker writes no page before that of its last
committed row, so a fork shares the pages before it and gets a copy of that one; and a truncation or an opening gives
the session copies of what is shared from its last page on. Sessions of different uids never share. The verbs are in
`kvd.sessions.forks`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvd.alloc.ledger import Account
from kvd.sessions.session import HOST_TIER, Session
from kvd.tiers.extent import frame_extent
from kvd.tiers.host_ram import HostRam
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
        self.cached_bytes: Callable[[int], int] = lambda _: 0
        """Bytes of the uid's frames that are no session's: blocks, which count apart."""
        self.give_way: Callable[[int, int, OutOfCapacity], bool] = lambda *_: False
        """Has blocks make the frames free that this uid lacked, of so many bytes each; False if they cannot."""
        self._host = host
        self._references: dict[int, int] = {}
        self._uncounted: list[Sequence[int]] = []
        self._kept: set[int] = set()
        self._freed_later: list[int] = []

    def allocate(self, account: Account, header: SessionHeader, count: int) -> list[int]:
        """``count`` frames for the session of ``header``. Raises `OutOfCapacity` and what `HostRam` raises."""
        asked, limit = count * header.page_stride, self.most_per_uid
        used = self._host.used_bytes(header.uid) - self.cached_bytes(header.uid) if limit else 0
        if limit and asked > limit - used:
            holders = [f"sessions of uid {header.uid} ({used} bytes)"]
            raise OutOfCapacity(uid_tier(header.uid), asked, max(limit - used, 0), limit, holders)

        def take() -> list[int]:
            return self._host.allocate_frames(account, header.uid, header.page_stride, count, header.page_bytes)

        try:
            return take()
        except OutOfCapacity as error:
            if not self.give_way(header.uid, header.page_stride, error):
                raise
        return take()

    def references(self, frame: int) -> int:
        """How many sessions have a frame that is in use."""
        if self._uncounted:
            self.settle()
        return self._references.get(frame, 1)

    def own_bytes(self, session: Session) -> int:
        """What would be free without the session."""
        return session.header.page_stride * sum(1 for frame in session.frames if self.references(frame) == 1)

    def share(self, frames: Sequence[int]) -> None:
        """Add a reference to each of ``frames``, which are in use.

        A session may have 16,384, and who forks it waits: they are counted when a count is asked for, or by `settle`.
        """
        self._uncounted.append(frames)

    def settle(self) -> None:
        """Count what was shared. For when nobody waits."""
        counts = self._references
        while self._uncounted:
            frames = self._uncounted.pop()
            new = [frame for frame in frames if frame not in counts] if counts else frames
            self._host.move_frames(new, SHARED)
            counts.update(dict.fromkeys(new, 1))
            counts.update(zip(frames, [counts[frame] + 1 for frame in frames], strict=True))

    def free(self, frames: Iterable[int]) -> None:
        """Take a reference from each of ``frames``; those without another are free."""
        self.settle()
        counts = self._references
        last = []
        for frame in frames:
            count = counts.get(frame, 1)
            if count > 1:
                counts[frame] = count - 1
            else:
                last.append(frame)
        if self._kept:
            self._freed_later += [frame for frame in last if frame in self._kept]
            last = [frame for frame in last if frame not in self._kept]
        self._host.free_frames(last)
        for frame in last:
            counts.pop(frame, None)

    @contextmanager
    def keeping(self, frames: Collection[int]) -> Iterator[None]:
        """Have no other session get ``frames``, which a thread writes, before the end of the block.

        What is freed meanwhile is freed then.
        """
        self._kept.update(frames)
        try:
            yield
        finally:
            self._kept.difference_update(frames)
            later, self._freed_later = self._freed_later, []
            self.free(later)

    def move(self, frames: Iterable[int], account: Account) -> None:
        """Have the frames that were never shared stand on ``account``."""
        self.settle()
        self._host.move_frames([frame for frame in frames if frame not in self._references], account)

    def rewrite_own(self, session: Session, pages: int, rows: int, **changes: int) -> set[int]:
        """Keep the first ``pages`` pages of ``session``, which has ``rows`` committed rows, and change its header.

        Those that it may write from now on and that are shared are new frames; the one with the last committed row is
        a copy. Returns the new frames. Raises `OutOfCapacity` or `OsFailure`; then nothing has changed.
        """
        before = session.frames
        kept = self._own(session, pages, rows)
        added = set(kept).difference(before)
        try:
            session.rewrite(kept, **changes)
        except BaseException:
            self.free(added)
            raise
        del session.prefix[rows // PAGE_TOKENS :]
        self.free(set(before).difference(kept))
        return added

    def _own(self, session: Session, pages: int, rows: int) -> tuple[int, ...]:
        """The frames of the first ``pages`` pages, new ones in place of those that are shared and may be written."""
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
