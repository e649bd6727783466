"""What a session consists of beside its pages, read from one worker block and written to another.

Worker blocks are untrusted (`protocol.session_state`): everything is checked while it is read, by ``pread`` alone.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, replace

from protocol.errors import SessionDamaged
from protocol.layout import PAGE_TOKENS
from protocol.session_state import (
    RECORDS_OFFSET,
    SessionHeader,
    WorkerBlock,
    WorkerBlockLayout,
    read_worker_state,
    sampler_state_after,
)

_READ_ATTEMPTS = 16


@dataclass(frozen=True)
class SessionContent:
    """Committed rows, acknowledged token ids (int32 each), the commit record's payload, the sampler's state.

    ``tokens`` are empty where only ``token_count`` was asked for.
    """

    rows: int
    token_count: int
    tokens: bytes
    commit: bytes
    sampler: bytes

    @property
    def page_count(self) -> int:
        return -(-self.rows // PAGE_TOKENS)

    def first(self, rows: int) -> SessionContent:
        """The content as it was at ``rows`` of the committed rows. Of fewer than all, payload and state are gone."""
        if rows == self.rows:
            return self
        count = min(rows, self.token_count)
        return replace(self, rows=rows, token_count=count, tokens=self.tokens[: 4 * rows], commit=b"", sampler=b"")


def read_content(fd: int, header: SessionHeader, *, with_tokens: bool = True) -> SessionContent:
    """The content of the worker block behind ``fd``, all of one moment, also beside a worker that writes.

    Raises `SessionDamaged` if the block makes no sense, or claims rows that no page is there for.
    """
    layout = WorkerBlockLayout(header.token_capacity, header.commit_bytes)
    for _ in range(_READ_ATTEMPTS):
        state = read_worker_state(fd, layout, header.session)
        start = os.pread(fd, RECORDS_OFFSET, 0)
        tokens = os.pread(fd, 4 * state.tokens, layout.log_offset) if with_tokens else b""
        again = read_worker_state(fd, layout, header.session)
        is_whole = not with_tokens or len(tokens) == 4 * state.tokens
        if (state.tokens, state.commit) == (again.tokens, again.commit) and is_whole:
            break
    else:
        raise SessionDamaged(f"session {header.session} does not stand still to be read", session=header.session)
    sampler = sampler_state_after(state.tokens, start)
    content = SessionContent(state.commit.rows, state.tokens, tokens, state.commit.payload, sampler)
    if content.page_count > header.page_count:
        raise SessionDamaged(
            f"session {header.name!r} claims {content.rows} committed rows in {header.page_count} pages",
            session=header.session,
        )
    return content


def pack_start(content: SessionContent, header: SessionHeader) -> memoryview:
    """What comes before the token log in a worker block with ``content`` for the session of ``header``.

    The commit record is of the generation before the session's: its holder finds what another left.
    """
    layout = WorkerBlockLayout(header.token_capacity, header.commit_bytes)
    block = memoryview(mmap.mmap(-1, layout.block_bytes))  # what is not touched costs nothing
    start = layout.pack_header(header.session)
    block[: len(start)] = start
    view = WorkerBlock(block, layout, header.session)
    view.count_tokens(content.token_count, content.sampler)
    if content.rows or content.commit:
        view.publish_commit(header.generation - 1, content.rows, content.commit)
    view.logical_rows = content.rows
    return block[: layout.log_offset]
