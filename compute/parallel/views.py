"""A session that another rank of the stage holds, as the others have it: read-only, one host copy for all of them.

The owner writes pages and commits; a peer maps the same pages, and reads a page at home from when the owner's commit
record covers it, as the owner does. What a peer would write is the owner's to write, and is left out here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from compute.attach import Attachment
from compute.copyback import Copyback
from compute.device import Device
from compute.parallel.sessions import Standing, TeamSession
from protocol import session_state
from protocol.daemon_block import daemon_block_sequence, read_daemon_block
from protocol.errors import InvalidValue, PeerLost, SessionDamaged
from protocol.layout import PAGE_TOKENS, PageFormat
from protocol.messages import SessionOpened
from protocol.session_state import COUNTER_NAMES, Commit, WorkerBlock, WorkerBlockLayout

POLL_S = 0.0001
_ATTEMPTS = 100


class SessionView(TeamSession):
    """The session that ``opened``, the answer to `Client.view_session`, is about. ``tokens`` are those logged."""

    def __init__(
        self, attachment: Attachment, opened: SessionOpened, page_format: PageFormat, name: str, tokens: Sequence[int]
    ) -> None:
        super().__init__(attachment, opened, page_format, name)
        writable = self.state
        self.state = ViewedBlock(memoryview(self._worker_map), writable.layout, self.number, tokens)
        writable.release()

    @property
    def account(self) -> int:
        """VRAM for it is on the lease's account: only the holder's may be on the session's."""
        return 0

    def page_address(self, page: int) -> int:
        extent, index = session_state.unpack_frame(self._frames[page])
        return self.attachment.extent(extent, read_only=True).address + index * self.format.stride

    def page(self, page: int) -> torch.Tensor:
        """uint8 [stride] over ``page`` in host RAM, which must not be written."""
        extent, index = session_state.unpack_frame(self._frames[page])
        start = index * self.format.stride
        return self.attachment.extent(extent, read_only=True).tensor[start : start + self.format.stride]

    def copyback(self, device: Device, publish: Callable[[int], None]) -> Copyback:
        return FollowedCopyback(device, publish, self)

    def publish_commit(self, rows: int, payload: bytes = b"") -> None:  # noqa: ARG002
        """Return when the owner has published it. Raises `PeerLost` if the owner is gone, or does not within the team's
        time-out.
        """
        assert self._team is not None
        timeout_s = self._team.timeout_s
        deadline = time.monotonic() + timeout_s
        seen = None
        while self.committed_rows < rows:
            written = daemon_block_sequence(memoryview(self._daemon_map))
            if written != seen:
                seen = written
                self._require_owner(rows)
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"the owner of session {self.name!r} has committed {self.committed_rows} rows, and not {rows} "
                    f"within {timeout_s:g} s",
                    during="waiting for a commit",
                )
            time.sleep(POLL_S)

    def _require_owner(self, rows: int) -> None:
        """Raise `PeerLost` where the daemon has written that no lease holds the session."""
        with suppress(SessionDamaged):  # it is being written again, and will be looked at again
            header, _ = read_daemon_block(memoryview(self._daemon_map))
            if not header.holder_pid:
                raise PeerLost(
                    f"session {self.name!r} has lost its owner: {self.committed_rows} rows are committed, not {rows}",
                    during="waiting for a commit",
                )

    def fetch(self, first: int, pages: int) -> None:
        """The daemon has answered `Client.view_session` when they were all there."""

    def detach(self) -> None:
        """Unmap it."""
        self.unmap()

    def close(self) -> None:
        """Unmap it."""
        self.unmap()

    def _hold_pages(self, target: int) -> None:
        """The owner's to do."""

    def _hold_at_most(self, pages: int) -> None:
        """The owner's to do."""

    def _hold_tokens(self, tokens: int, logged: int | None) -> None:
        """The owner's to do; what is counted here follows."""
        self.state.logical_rows = min(self.state.logical_rows, tokens)
        self.state.truncate_tokens(min(self.state.token_count, tokens if logged is None else logged))

    def _follow(self, generations: list[int]) -> None:
        """Have the owner's page table as it is now."""
        assert self._team is not None
        generation = generations[self._team.owner]
        self.generation = generation
        self._read_table()
        extents = {session_state.unpack_frame(frame)[0] for frame in self._frames}
        if not all(self.attachment.has_extent(extent, read_only=True) for extent in extents):
            self.attachment.adopt(self.attachment.client.view_session(self.number, generation).extents)


class ViewedBlock(WorkerBlock):
    """The owner's worker block: its commits are read, and what it writes of the rest is counted beside it."""

    def __init__(self, buffer: memoryview, layout: WorkerBlockLayout, session: int, tokens: Sequence[int]) -> None:
        super().__init__(buffer, layout, session)
        self._tokens = list(tokens)
        self._rows = super().logical_rows

    @property
    def commit(self) -> Commit:
        """The record in force; read again if the owner has replaced it meanwhile."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return super().commit
            except SessionDamaged:
                time.sleep(POLL_S)
        return super().commit

    @property
    def token_count(self) -> int:
        return len(self._tokens)

    def tokens(self, start: int = 0, end: int | None = None) -> list[int]:
        return self._tokens[start:end]

    def append_tokens(self, ids: Sequence[int], sampler_state: bytes = b"") -> None:  # noqa: ARG002
        end, room = self.token_count + len(ids), self.layout.token_capacity
        if end > room:
            raise InvalidValue("tokens of the session", end, f"at most {room}")
        self._tokens += ids

    def truncate_tokens(self, count: int) -> None:
        del self._tokens[count:]

    @property
    def logical_rows(self) -> int:
        return self._rows

    @logical_rows.setter
    def logical_rows(self, rows: int) -> None:
        self._rows = rows

    @property
    def counters(self) -> dict[str, int]:
        return dict.fromkeys(COUNTER_NAMES, 0)

    def publish_counters(self, values: Sequence[int]) -> None:
        """The owner's are the session's: every rank counts the same."""


class FollowedCopyback(Copyback):
    """The owner's copies, as its commits tell of them."""

    def __init__(self, device: Device, publish: Callable[[int], None], session: SessionView) -> None:
        super().__init__(device, publish)
        self._session = session

    def submit(self, page: int, home: torch.Tensor, ring_page: torch.Tensor) -> None:  # noqa: ARG002
        assert page == self.submitted_pages, f"page {page} submitted after {self.submitted_pages} pages"
        self.submitted_pages += 1

    def copy_partial(self, home: torch.Tensor, ring_page: torch.Tensor) -> None:
        """The owner's to do."""

    def wait_through(self, pages: int) -> None:
        wanted = min(pages, self.submitted_pages)
        if self.committed_pages < wanted:
            self._session.publish_commit(wanted * PAGE_TOKENS)
            self.committed_pages = wanted


def view(attachment: Attachment, owned: Standing, page_format: PageFormat, name: str, tokens: list[int]) -> SessionView:
    """The session that another rank's lease holds, as that has said."""
    opened = attachment.client.view_session(owned.number, owned.generation)
    return SessionView(attachment, opened, page_format, name, tokens)
