"""Copies of sessions between host RAM and disk, as steps of jobs that never hold up the loop.

What is written is what the session's commit record covers, and every acknowledged token. A session that is read is
prepared out of sight and becomes visible when all of its file has held.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvd.logs import Log
from kvd.saved import file as saved_file
from kvd.saved.file import Place, SavedFile, SavedHeader
from kvd.saved.jobs import Jobs, Step
from kvd.sessions.content import SessionContent, pack_start, read_content
from kvd.sessions.registry import Sessions
from kvd.sessions.session import Session
from kvd.tiers.disk import StateDirectory, file_name
from kvd.tiers.host_ram import HostRam
from protocol.errors import InvalidValue, OsFailure, SavedRefused
from protocol.session_state import SessionHeader, unpack_frame

PROGRESS_INTERVAL_S = 2.0

Prepare = Callable[[SessionHeader, int], Generator[Step, Any, Session]]
"""Makes the session that a file is read into, as `Sessions.prepare` does; may make room for it first."""


class Copies:
    """Writes sessions to files of ``directory`` and reads them."""

    def __init__(self, directory: StateDirectory, sessions: Sessions, host: HostRam, jobs: Jobs, log: Log) -> None:
        self.directory = directory
        self._sessions = sessions
        self._host = host
        self._jobs = jobs
        self._log = log
        # Pages are copied by threads of their own: a job's thread waits for them.
        self.pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="page")

    def close(self) -> None:
        """After the jobs have ended."""
        self.pool.shutdown()
        self.directory.close()

    def write(self, session: Session, kind: str) -> Generator[Step, Any, SavedHeader]:
        """Write the session's file; until the end it is busy."""
        session.require_pages(0, session.header.page_count)
        session.busy = "being saved"
        try:
            with _os_errors(f"writing saved session {session.name}"), ExitStack() as cleanup:
                # A descriptor of its own: an empty session ends with its holder, whatever is being done with it.
                worker_fd = session.blocks.worker.open_fd(read_only=True)
                cleanup.callback(os.close, worker_fd)
                source = _Source(session.header, worker_fd, self.places(session))
                header: SavedHeader = yield partial(self._write, source, kind)
        finally:
            session.busy = ""
        self._log.info("session written", session=session.number, name=session.name, file=kind, bytes=header.size)
        return header

    def read(
        self,
        uid: int,
        name: str,
        kind: str,
        check: Callable[[SavedHeader], None],
        prepare: Prepare,
        *,
        lazy: bool = False,
    ) -> Generator[Step, Any, SavedHeader]:
        """Make a stored session of its file; ``check`` raises if its header is not what is wanted.

        With ``lazy`` its pages are absent, and `kvd.saved.lazy` has to bring them.
        """
        with _os_errors(f"reading saved session {name}"), ExitStack() as cleanup:
            fd = yield partial(self.directory.open, file_name(uid, name, kind))
            cleanup.callback(os.close, fd)
            saved: SavedFile = yield partial(SavedFile, fd, name)
            header = saved.header
            if (header.uid, header.name) != (uid, name):
                raise SavedRefused(name, f"it is session {header.name!r} of uid {header.uid}")
            if header.page_stride > self._host.extent_bytes:
                raise InvalidValue("page_bytes", header.page_bytes, f"at most {self._host.extent_bytes}, an extent")
            check(header)
            session = yield from prepare(_session_header(header), header.page_count)
            undo = cleanup.enter_context(ExitStack())
            undo.callback(self._sessions.discard, session)
            if lazy:
                session.expect_pages(saved.digest)
            else:
                progress = _Progress(self._log, "restoring", name)
                yield partial(saved.read_pages, self.places(session), self.pool, self._jobs.cancelled, progress)
            self._sessions.admit(session, pack_start(saved.content, session.header), saved.content.tokens)
            undo.pop_all()
            self.directory.touch(fd)
        self._log.info("session read", session=session.number, name=name, file=kind, bytes=header.size)
        return header

    def places(self, session: Session, frames: Sequence[int] | None = None) -> list[Place]:
        """Descriptor and offset of each page, or of ``frames``, good for as long as the frames are the session's."""
        stride = session.header.page_stride
        fds = {extent: self._host.fileno(extent) for extent in session.extents}
        found = session.frames if frames is None else frames
        return [(fds[extent], index * stride) for extent, index in map(unpack_frame, found)]

    def _write(self, source: _Source, kind: str) -> SavedHeader:
        """In a thread: write the file."""
        content = read_content(source.worker_fd, source.header)
        header = _saved_header(source.header, content)
        progress = _Progress(self._log, "saving", header.name)
        places = source.places[: header.page_count]
        with self.directory.replace(file_name(header.uid, header.name, kind), header.size) as fd:
            saved_file.write(fd, header, content, places, self.pool, self._jobs.cancelled, progress)
        return header


@dataclass(frozen=True)
class _Source:
    """A session to be written: its worker block and its pages, by descriptors."""

    header: SessionHeader
    worker_fd: int
    places: list[Place]


class _Progress:
    """Logs how far a copy is and how fast, every so often."""

    def __init__(self, log: Log, what: str, name: str) -> None:
        self._log = log
        self._what = what
        self._name = name
        self._started = self._last = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._last < PROGRESS_INTERVAL_S:
                return
            self._last = now
        rate = round(done / (now - self._started) / 1e6)
        self._log.info(self._what, name=self._name, done_bytes=done, total_bytes=total, mb_s=rate)


@contextmanager
def _os_errors(what: str) -> Iterator[None]:
    """What the system refuses is a typed error."""
    try:
        yield
    except OSError as error:
        raise OsFailure(f"{what}: {error.strerror}", errno=error.errno) from error


def _saved_header(header: SessionHeader, content: SessionContent) -> SavedHeader:
    saved = SavedHeader(
        uid=header.uid,
        page_bytes=header.page_bytes,
        token_capacity=header.token_capacity,
        commit_bytes=header.commit_bytes,
        generation=header.generation,
        rows=content.rows,
        tokens=content.token_count,
        commit_size=len(content.commit),
        sampler_size=len(content.sampler),
        file_bytes=0,
        encoding=header.encoding,
        fingerprint=header.fingerprint,
        name=header.name,
    )
    return dataclasses.replace(saved, file_bytes=saved.size)


def _session_header(saved: SavedHeader) -> SessionHeader:
    """The header of the session that a file becomes; what the daemon numbers is 0."""
    return SessionHeader(
        epoch=0,
        session=0,
        generation=saved.generation + 1,
        uid=saved.uid,
        holder_pid=0,
        holder_start=0,
        page_bytes=saved.page_bytes,
        page_stride=saved.page_stride,
        extent_bytes=0,
        token_capacity=saved.token_capacity,
        page_count=0,
        commit_bytes=saved.commit_bytes,
        encoding=saved.encoding,
        fingerprint=saved.fingerprint,
        name=saved.name,
    )
