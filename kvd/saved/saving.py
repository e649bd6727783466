"""The verbs about saved sessions, as jobs. How a session is copied to disk and back is in `kvd.saved.copies`."""

from __future__ import annotations

import time
from functools import partial

from kvd.peers import Peer
from kvd.saved.copies import Copies
from kvd.saved.file import SavedHeader
from kvd.saved.jobs import Job
from kvd.saved.lazy import LazyRestores
from kvd.saved.spilling import Spilling
from kvd.sessions.limits import require_session_name
from kvd.sessions.registry import Sessions
from kvd.sessions.session import Session
from kvd.tiers.disk import SAVED, SPILLED, file_name, session_of_file
from protocol import messages
from protocol.errors import FingerprintMismatch, InvalidValue, SessionBusy
from protocol.messages import Done, Saved, SavedSession, SavedSessions


class Saving:
    """``copies`` is None where the settings name no directory: then every verb is refused."""

    def __init__(self, copies: Copies | None, sessions: Sessions, spilling: Spilling, lazy: LazyRestores) -> None:
        self._maybe = copies
        self._sessions = sessions
        self._spilling = spilling
        self._lazy = lazy

    def save(self, peer: Peer, request: messages.SaveSession) -> Job:
        """Write a session of ``peer``'s uid, that is stored or held by its process, to its file."""
        started = time.monotonic()
        copies = self._copies
        header = yield from copies.write(self._find(peer, request.name), SAVED)
        return _saved(request.seq, header, started)

    def restore(self, peer: Peer, request: messages.RestoreSession) -> Job:
        """Make a stored session of a file, at once or with its pages to come."""
        started = time.monotonic()
        copies, name = self._copies, require_session_name(request.name)
        self._sessions.check_new(peer.uid, name)
        check = partial(_check_model, request)
        if not request.lazy:
            header = yield from copies.read(peer.uid, name, SAVED, check, self._spilling.prepare)
            return _saved(request.seq, header, started)
        pin = copies.directory.pin(file_name(peer.uid, name, SAVED))
        try:
            header = yield from copies.read(peer.uid, name, SAVED, check, self._spilling.prepare, lazy=True)
            self._lazy.add(self._sessions.find(peer.uid, name), SAVED)
        finally:
            copies.directory.unpin(pin)
        return _saved(request.seq, header, started)

    def saved(self, peer: Peer, request: messages.ListSaved) -> Job:
        """The files of ``peer``'s uid."""
        entries = yield self._copies.directory.entries
        found = []
        for entry in entries:
            uid, name, kind = session_of_file(entry.name)
            if uid == peer.uid:
                found.append(SavedSession(name, kind == SPILLED, entry.nbytes, entry.used_ns / 1e9))
        return SavedSessions(request.seq, found)

    def remove(self, peer: Peer, request: messages.RemoveSaved) -> Job:
        """Remove a saved session."""
        name = file_name(peer.uid, require_session_name(request.name), SAVED)
        self._lazy.forget_ended()
        yield partial(self._copies.directory.remove, name)
        return Done(request.seq)

    def _find(self, peer: Peer, name: str) -> Session:
        """A session of ``peer``'s uid that nobody but its process holds, and that is intact and idle."""
        session = self._sessions.find(peer.uid, name)
        if session.lease is not None and (session.lease.quarantined or session.lease.peer.pid != peer.pid):
            raise SessionBusy(
                f"session {name!r} is held by process {session.lease.peer.pid}, which has to save it itself",
                session=session.number,
            )
        self._sessions.require_idle(session)
        self._sessions.require_intact(session)
        return session

    def require_directory(self) -> None:
        """Raise `InvalidValue` if the settings name no directory to save to."""
        assert self._copies is not None

    @property
    def _copies(self) -> Copies:
        if self._maybe is None:
            raise InvalidValue("disk.state_dir", "", "a directory; without one this daemon saves nothing")
        return self._maybe


def _saved(seq: int, header: SavedHeader, started: float) -> Saved:
    return Saved(seq, header.name, header.rows, header.tokens, header.size, time.monotonic() - started)


def _check_model(request: messages.RestoreSession, header: SavedHeader) -> None:
    """Raise unless the file is of the model and encoding that are asked for, if any are."""
    wanted = request.fingerprint or header.fingerprint, request.encoding or header.encoding
    if wanted != (header.fingerprint, header.encoding):
        raise FingerprintMismatch(
            f"saved session {header.name!r} was made by model {header.fingerprint.hex()} in encoding "
            f"{header.encoding}, not {wanted[0][:32].hex()} in {wanted[1][:16]}"
        )
