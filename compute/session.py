"""A session as its worker holds it: state blocks mapped, pages as addresses, commits published.

What the rows mean, and which of them are still in the ring, is in ``compute.history``.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch

from compute.attach import Attachment
from compute.copyback import Copyback
from compute.device import Device
from compute.kernels.state import PageRun
from compute.mapping import map_segment
from protocol import session_state
from protocol.daemon_block import read_daemon_block, split_entries
from protocol.errors import DaemonUnavailable, SessionBusy, SessionDamaged, UnknownSession
from protocol.handles import SharedMemory
from protocol.layout import PAGE_TOKENS, PageFormat
from protocol.messages import PagesChanged, SessionOpened
from protocol.session_state import Commit, SessionHeader, WorkerBlock, WorkerBlockLayout


class HostSession:
    """A session held by this process's lease. Made by `create` or `open`."""

    def __init__(self, attachment: Attachment, opened: SessionOpened, page_format: PageFormat, name: str) -> None:
        self.attachment = attachment
        self.format = page_format
        self.name = name
        self.number = opened.session
        self.generation = opened.generation
        attachment.adopt(opened.extents)
        self._daemon_map = _map_block(attachment, opened.daemon_block)
        self._worker_map = _map_block(attachment, opened.worker_block)
        header = self._read_table()
        layout = WorkerBlockLayout(header.token_capacity, header.commit_bytes)
        self.token_capacity = header.token_capacity
        self.state = WorkerBlock(memoryview(self._worker_map), layout, self.number)
        attachment.sessions.append(self)

    @classmethod
    def create(
        cls,
        attachment: Attachment,
        name: str,
        page_format: PageFormat,
        *,
        fingerprint: bytes,
        token_capacity: int,
        commit_bytes: int = 0,
    ) -> HostSession:
        """A new session without pages."""
        opened = attachment.client.create_session(
            name,
            fingerprint=fingerprint,
            encoding=page_format.encoding.name,
            page_bytes=page_format.payload_bytes,
            token_capacity=token_capacity,
            commit_bytes=commit_bytes,
        )
        return cls(attachment, opened, page_format, name)

    @classmethod
    def open(cls, attachment: Attachment, name: str, page_format: PageFormat, *, fingerprint: bytes) -> HostSession:
        """A stored session, at its committed rows.

        Raises `SessionDamaged`, and lets go of it, if its commit record is of this or a later generation, or covers
        rows that no page is there for: a worker before this one cannot have written that.
        """
        encoding = page_format.encoding.name
        opened = attachment.client.open_session(name, fingerprint=fingerprint, encoding=encoding, lazy=True)
        session = cls(attachment, opened, page_format, name)
        commit, room = session.commit, session.page_count * PAGE_TOKENS
        if commit.generation >= session.generation or commit.rows > room:
            session.detach()
            raise SessionDamaged(
                f"session {name!r}: commit record of {commit.rows} rows at generation {commit.generation}; "
                f"there is room for {room}, and its generation was {session.generation - 1}",
                session=session.number,
            )
        return session

    def fork(self, rows: int, name: str) -> HostSession:
        """A session called ``name`` with the first ``rows`` committed rows of this one."""
        return self.fork_of(self.attachment, self.number, self.generation, rows, name, self.format)

    @classmethod
    def fork_of(
        cls, attachment: Attachment, session: int, generation: int, rows: int, name: str, page_format: PageFormat
    ) -> HostSession:
        """A session called ``name`` with the first ``rows`` committed rows of ``session``, whoever holds that."""
        opened = attachment.client.fork_session(session, generation, rows, name)
        return cls(attachment, opened, page_format, name)

    @property
    def account(self) -> int:
        """The session on whose account VRAM for it stands."""
        return self.number

    def copyback(self, device: Device, publish: Callable[[int], None]) -> Copyback:
        """What copies its pages."""
        return Copyback(device, publish)

    @property
    def page_count(self) -> int:
        return len(self._frames)

    @property
    def committed_rows(self) -> int:
        """Rows that a published commit record covers."""
        return self.state.commit.rows

    def page_address(self, page: int) -> int:
        """Absolute address of ``page`` in host RAM."""
        extent, index = session_state.unpack_frame(self._frames[page])
        return self.attachment.extent(extent).address + index * self.format.stride

    def page_runs(self, pages: int) -> list[PageRun]:
        """The first ``pages`` pages, as few runs."""
        runs: list[PageRun] = []
        before = None
        for page in range(pages):
            extent, index = session_state.unpack_frame(self._frames[page])
            if before == (extent, index - 1):
                runs[-1] = PageRun(runs[-1].address, runs[-1].pages + 1)
            else:
                runs.append(PageRun(self.page_address(page), 1))
            before = extent, index
        return runs

    def page(self, page: int) -> torch.Tensor:
        """uint8 [stride] over ``page`` in host RAM."""
        extent, index = session_state.unpack_frame(self._frames[page])
        start = index * self.format.stride
        return self.attachment.extent(extent).tensor[start : start + self.format.stride]

    def fetch(self, first: int, pages: int) -> None:
        """Return when pages ``first`` to ``first + pages - 1`` are in host RAM. Raises `SavedRefused` for one that
        is damaged on disk.
        """
        while not self._absent.isdisjoint(range(first, first + pages)):
            try:
                self.attachment.client.fetch_pages(self.number, self.generation, first, pages)
                self._read_table()
            except DaemonUnavailable as error:
                self.attachment.daemon_lost(error)

    def extend(self, pages: int) -> None:
        """Add pages at the end."""
        target = len(self._frames) + pages
        while len(self._frames) < target:
            missing = target - len(self._frames)
            try:
                self._changed(self.attachment.client.extend_session(self.number, self.generation, missing))
            except DaemonUnavailable as error:
                self.attachment.daemon_lost(error)

    def truncate(self, tokens: int, *, logged: int | None = None) -> None:
        """Keep ``tokens`` tokens: the commit record and the token log move back, pages past the end go.

        A record that covers no row past the end stays as it is, payload included. With ``logged``, the log keeps so
        many: acknowledged tokens whose rows are to be appended again.
        """
        commit = self.state.commit
        if commit.rows > tokens:
            self.state.publish_commit(self.generation, tokens)
        self.state.logical_rows = min(self.state.logical_rows, tokens)
        self.state.truncate_tokens(min(self.state.token_count, tokens if logged is None else logged))
        self._drop_pages(-(-tokens // PAGE_TOKENS))

    def trim(self, pages: int) -> None:
        """Keep the first ``pages`` pages. No copy to a page that goes may be in flight."""
        self._drop_pages(pages)

    def _drop_pages(self, pages: int) -> None:
        before = self.generation
        while self.generation == before:
            try:
                self._changed(self.attachment.client.truncate_session(self.number, before, pages))
            except DaemonUnavailable as error:
                self.attachment.daemon_lost(error)

    def publish_commit(self, rows: int, payload: bytes = b"") -> None:
        """Publish that rows below ``rows`` are in host RAM. Call only after their copies are done."""
        self.state.publish_commit(self.generation, rows, payload)

    @property
    def commit(self) -> Commit:
        return self.state.commit

    def reattach(self) -> set[int]:
        """Hold on to it after the daemon was started again; returns the numbers of the extents of its pages."""
        opened = self.attachment.client.reattach_session(self.name)
        self.attachment.adopt(opened.extents)
        self.generation = opened.generation
        self._read_table()
        return {extent.number for extent in opened.extents}

    def detach(self) -> None:
        """Let go of the session; it stays stored. No copy to its pages may be in flight."""
        self._let_go(self.attachment.client.detach_session)

    def close(self) -> None:
        """End the session and give its memory back. No copy to its pages may be in flight."""
        self._let_go(self.attachment.client.close_session)

    def unmap(self) -> None:
        """Let go of the state blocks' mappings."""
        self.attachment.sessions.remove(self)
        self.state.release()
        self._worker_map.close()
        self._daemon_map.close()

    def _let_go(self, verb: Callable[[int, int], None]) -> None:
        self.unmap()
        try:
            verb(self.number, self.generation)
        except DaemonUnavailable as error:
            self.attachment.daemon_lost(error)
            with suppress(UnknownSession, SessionBusy):  # it was done before the daemon went
                opened = self.attachment.client.reattach_session(self.name)
                verb(opened.session, opened.generation)

    def _read_table(self) -> SessionHeader:
        header, entries = read_daemon_block(memoryview(self._daemon_map))
        self._frames, self._absent = split_entries(entries)
        return header

    def _changed(self, reply: PagesChanged) -> None:
        self.attachment.adopt(reply.extents)
        self.generation = reply.generation
        self._read_table()


def _map_block(attachment: Attachment, memory: SharedMemory) -> mmap.mmap:
    return map_segment(attachment.client.claim(memory), memory.nbytes, read_only=memory.read_only)
