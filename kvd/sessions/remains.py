"""What an earlier run of the daemon left in shared memory, verified.

Only what is written where no worker can write counts: a daemon block's copy in force, which is whole or damaged
(`protocol.daemon_block`). Extents hold rows, and who has which frame of them is in the page tables alone. Whatever does
not hold together is removed, with a line in the log that says why.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from kvd.blocks.table import table_name
from kvd.logs import Log
from kvd.sessions.blocks import block_names
from kvd.tiers.extent import frame_extent, frame_index
from kvd.tiers.segment import Segment, existing_names, remove_segment
from protocol.daemon_block import (
    daemon_block_bytes,
    daemon_block_sequence,
    daemon_block_source,
    read_daemon_block,
    split_entries,
)
from protocol.errors import KvdError, SessionDamaged, StateVersion
from protocol.layout import PAGE_ALIGNMENT, round_up
from protocol.session_state import SessionHeader, WorkerBlockLayout, read_worker_state


@dataclass(frozen=True)
class LeftSession:
    """A session that an earlier run had: the copy in force of its daemon block, and its segments."""

    header: SessionHeader
    frames: tuple[int, ...]
    absent: set[int]
    source: bytes
    sequence: int
    daemon: Segment
    worker: Segment


@dataclass
class Remains:
    """Sessions in the order of their numbers, and extents by number: all that is worth keeping."""

    sessions: list[LeftSession] = field(default_factory=list)
    extents: dict[int, Segment] = field(default_factory=dict)

    def close(self) -> None:
        """Let go of all of it; it stays where it is."""
        for session in self.sessions:
            session.daemon.close()
            session.worker.close()
        for segment in self.extents.values():
            segment.close()


def look(prefix: str, extent_bytes: int, extent_count: int, log: Log) -> Remains:
    """Open what lies under ``prefix`` and remove what cannot be verified. The caller holds the run directory's lock.

    Raises `StateVersion`, and has removed nothing, where another version of the state is found.
    """
    names = existing_names(prefix)
    remains = Remains()
    kept: set[str] = set()
    numbers = sorted(
        int(match[1]) for name in names if (match := re.fullmatch(rf"{prefix}-session-(\d+)-daemon", name))
    )
    for number in numbers:
        _require_version(block_names(prefix, number)[0])
    for name in names:
        match = re.fullmatch(rf"{prefix}-e(\d+)", name)
        segment = _open_extent(name, extent_bytes) if match and int(match[1]) < extent_count else None
        if match and segment:
            remains.extents[int(match[1])] = segment
            kept.add(name)
    checker = _Checker(remains, extent_bytes)
    for number in numbers:
        try:
            session = _open_session(prefix, number)
        except (KvdError, OSError) as error:
            log.warning("session of an earlier run dropped", session=number, reason=str(error))
            continue
        try:
            checker.check(session)
        except SessionDamaged as error:
            log.warning(
                "session of an earlier run dropped", session=number, name=session.header.name, reason=error.message
            )
            session.daemon.close()
            session.worker.close()
            continue
        remains.sessions.append(session)
        kept.update(block_names(prefix, number))
    kept.add(table_name(prefix))  # `kvd.blocks.inheritance` looks at it when the sessions are there
    removed = [name for name in names if name not in kept]
    for name in removed:
        remove_segment(name)
    if removed:
        log.warning("removed what a dead daemon left", segments=len(removed))
    return remains


class _Checker:
    """Whether sessions agree with the extents, and with each other."""

    def __init__(self, remains: Remains, extent_bytes: int) -> None:
        self._extents = remains.extents
        self._extent_bytes = extent_bytes
        self._names: set[tuple[int, str]] = set()
        self._kinds: dict[int, tuple[int, int]] = {}
        self._models: dict[int, tuple[bytes, str]] = {}
        self._absent: set[int] = set()

    def check(self, session: LeftSession) -> None:
        """Raise `SessionDamaged` with the reason if ``session`` cannot be kept beside those checked before."""
        header, frames = session.header, session.frames
        model = header.fingerprint, header.encoding
        if (header.uid, header.name) in self._names:
            raise SessionDamaged(f"its uid has another session {header.name!r}")
        if header.extent_bytes != self._extent_bytes:
            raise SessionDamaged(f"its extents have {header.extent_bytes} bytes, not {self._extent_bytes}")
        if header.page_stride != round_up(header.page_bytes, PAGE_ALIGNMENT):
            raise SessionDamaged(f"pages of {header.page_bytes} bytes {header.page_stride} apart")
        if len(set(frames)) != len(frames):
            raise SessionDamaged("a frame comes twice in its page table")
        absent = {frames[page] for page in session.absent}
        if not absent.isdisjoint(self._models) or not self._absent.isdisjoint(frames):
            raise SessionDamaged("a page of it that has not come from disk is another session's too")
        for frame in frames:
            number = frame_extent(frame)
            if number not in self._extents:
                raise SessionDamaged(f"extent {number}, where a page of it lies, is not there")
            if (frame_index(frame) + 1) * header.page_stride > self._extent_bytes:
                raise SessionDamaged(f"frame {frame_index(frame)} is beyond extent {number}")
            if self._kinds.get(number, (header.uid, header.page_stride)) != (header.uid, header.page_stride):
                raise SessionDamaged(f"extent {number} has frames of another uid or size")
            if self._models.get(frame, model) != model:
                raise SessionDamaged(f"a frame of extent {number} is a session's of another model")
        self._names.add((header.uid, header.name))
        self._kinds.update((frame_extent(frame), (header.uid, header.page_stride)) for frame in frames)
        self._models.update((frame, model) for frame in frames)
        self._absent |= absent


def _require_version(name: str) -> None:
    try:
        segment = Segment.existing(name)
    except KvdError:
        return  # it is dropped later
    try:
        daemon_block_sequence(os.pread(segment.fileno(), PAGE_ALIGNMENT, 0))
    except StateVersion:
        raise
    except KvdError:
        return
    finally:
        segment.close()


def _open_extent(name: str, extent_bytes: int) -> Segment | None:
    """The extent, if all of it is there."""
    try:
        segment = Segment.existing(name)
    except KvdError:
        return None
    if segment.nbytes == extent_bytes and segment.is_intact():
        return segment
    segment.close()
    return None


def _open_session(prefix: str, number: int) -> LeftSession:
    """The session's blocks, each verified by itself. Raises `SessionDamaged` or `OsFailure`; then none is open."""
    daemon_name, worker_name = block_names(prefix, number)
    daemon = Segment.existing(daemon_name)
    try:
        data = os.pread(daemon.fileno(), daemon.nbytes, 0)
        header, entries = read_daemon_block(data)
        frames, absent = split_entries(entries)
        if header.session != number or daemon.nbytes != daemon_block_bytes(header) or not daemon.is_intact():
            raise SessionDamaged(f"its daemon block is that of session {header.session}, or cut")
        worker = Segment.existing(worker_name)
        try:
            read_worker_state(worker.fileno(), WorkerBlockLayout(header.token_capacity, header.commit_bytes), number)
        except BaseException:
            worker.close()
            raise
    except BaseException:
        daemon.close()
        raise
    source = daemon_block_source(data)
    return LeftSession(header, frames, absent, source, daemon_block_sequence(data), daemon, worker)
