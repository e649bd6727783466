"""Saving sessions to disk and restoring them: the verbs, as jobs that never hold up the loop.

What is saved is what the session's commit record covers, and every acknowledged token. A restored session is prepared
out of sight and becomes visible when all of its file has held.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from kvd import saved_file
from kvd.jobs import Job, Jobs
from kvd.logs import Log
from kvd.peers import Peer
from kvd.saved_file import Place, SavedFile, SavedHeader
from kvd.session import Session
from kvd.session_content import SessionContent, pack_content, read_content
from kvd.session_limits import require_session_name
from kvd.sessions import Sessions
from kvd.tiers.disk import StateDirectory, file_name, session_name
from kvd.tiers.host_ram import HostRam
from protocol import messages
from protocol.errors import FingerprintMismatch, InvalidValue, OsFailure, SavedRefused
from protocol.messages import Done, Saved, SavedSession, SavedSessions
from protocol.session_state import SessionHeader, unpack_frame

PROGRESS_INTERVAL_S = 2.0


class Saving:
    """The verbs about saved sessions. ``directory`` is None where the settings name none: then all are refused."""

    def __init__(
        self, directory: StateDirectory | None, sessions: Sessions, host: HostRam, jobs: Jobs, log: Log
    ) -> None:
        self._directory = directory
        self._sessions = sessions
        self._host = host
        self._jobs = jobs
        self._log = log
        # Pages are copied by threads of their own: a job's thread waits for them.
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="page")

    def close(self) -> None:
        """After the jobs have ended."""
        self._pool.shutdown()
        if self._directory is not None:
            self._directory.close()

    def save(self, peer: Peer, request: messages.SaveSession) -> Job:
        """Write a session of ``peer``'s uid, that is stored or held by its process, to its file."""
        directory = self._require_directory()
        return (yield from self._save(directory, self._sessions.find_to_save(peer, request.name), request.seq))

    def restore(self, peer: Peer, request: messages.RestoreSession) -> Job:
        """Make a stored session of a file."""
        directory = self._require_directory()
        uid, name = peer.uid, require_session_name(request.name)
        self._sessions.check_new(uid, name)
        started = time.monotonic()
        with _os_errors(f"reading saved session {name}"), ExitStack() as cleanup:
            fd = yield partial(directory.open, file_name(uid, name))
            cleanup.callback(os.close, fd)
            saved: SavedFile = yield partial(SavedFile, fd, name)
            header = saved.header
            _check_identity(header, uid, request)
            if header.page_stride > self._host.extent_bytes:
                raise InvalidValue("page_bytes", header.page_bytes, f"at most {self._host.extent_bytes}, an extent")
            session = self._sessions.prepare(_session_header(header), header.page_count)
            undo = cleanup.enter_context(ExitStack())
            undo.callback(self._sessions.discard, session)
            places = self._places(session)
            progress = _Progress(self._log, "restoring", name)
            yield partial(saved.read_pages, places, self._pool, self._jobs.cancelled, progress)
            block = yield partial(pack_content, saved.content, session.header)
            self._sessions.admit(session, block)
            undo.pop_all()
            directory.touch(fd)
        self._log.info("session restored", session=session.number, name=name, bytes=header.size)
        return Saved(request.seq, name, header.rows, header.tokens, header.size, time.monotonic() - started)

    def saved(self, peer: Peer, request: messages.ListSaved) -> Job:
        """The saved sessions of ``peer``'s uid."""
        entries = yield self._require_directory().entries
        owned = [(*session_name(entry.name), entry) for entry in entries]
        return SavedSessions(
            request.seq,
            [SavedSession(name, entry.nbytes, entry.used_ns / 1e9) for uid, name, entry in owned if uid == peer.uid],
        )

    def remove(self, peer: Peer, request: messages.RemoveSaved) -> Job:
        """Remove a saved session."""
        yield partial(self._require_directory().remove, file_name(peer.uid, require_session_name(request.name)))
        return Done(request.seq)

    def _save(self, directory: StateDirectory, session: Session, seq: int) -> Job:
        started = time.monotonic()
        session.busy = "being saved"
        try:
            with ExitStack() as cleanup:
                source = self._source(session, cleanup)
                header: SavedHeader = yield partial(self._write, directory, source)
        finally:
            session.busy = ""
        self._log.info("session saved", session=session.number, name=session.name, bytes=header.size)
        return Saved(seq, session.name, header.rows, header.tokens, header.size, time.monotonic() - started)

    def _source(self, session: Session, cleanup: ExitStack) -> _Source:
        """What a thread needs to read the session by, also when it ends because its holder left it empty."""
        worker_fd = session.blocks.worker.open_fd(read_only=True)
        cleanup.callback(os.close, worker_fd)
        return _Source(session.header, worker_fd, self._places(session))

    def _places(self, session: Session) -> list[Place]:
        """Descriptor and offset of each page, good for as long as the frames are the session's."""
        stride = session.header.page_stride
        fds = {extent: self._host.fileno(extent) for extent in session.extents}
        return [(fds[extent], index * stride) for extent, index in map(unpack_frame, session.frames)]

    def _write(self, directory: StateDirectory, source: _Source) -> SavedHeader:
        """In a thread: write the file."""
        content = read_content(source.worker_fd, source.header)
        header = _saved_header(source.header, content)
        progress = _Progress(self._log, "saving", header.name)
        places = source.places[: header.page_count]
        with directory.replace(file_name(header.uid, header.name), header.size) as fd:
            saved_file.write(fd, header, content, places, self._pool, self._jobs.cancelled, progress)
        return header

    def _require_directory(self) -> StateDirectory:
        if self._directory is None:
            raise InvalidValue("disk.state_dir", "", "a directory; without one this daemon saves nothing")
        return self._directory


@dataclass(frozen=True)
class _Source:
    """A session to be saved: its worker block and its pages, by descriptors of their own."""

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
        tokens=len(content.tokens) // 4,
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


def _check_identity(header: SavedHeader, uid: int, request: messages.RestoreSession) -> None:
    """Raise unless the file is what its name says, of the model that is asked for."""
    if (header.uid, header.name) != (uid, request.name):
        raise SavedRefused(request.name, f"it is session {header.name!r} of uid {header.uid}")
    wanted = request.fingerprint or header.fingerprint, request.encoding or header.encoding
    if wanted != (header.fingerprint, header.encoding):
        raise FingerprintMismatch(
            f"saved session {header.name!r} was made by model {header.fingerprint.hex()} in encoding "
            f"{header.encoding}, not {wanted[0][:32].hex()} in {wanted[1][:16]}"
        )
