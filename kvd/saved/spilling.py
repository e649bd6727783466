"""Pressure on host RAM: idle stored sessions go to disk, least recently used first, and come back when they are opened.

A spilled session is a file of a kind of its own, which no limit of saved files removes, and its name stays taken. A
session that is in memory is newer than a spilled file of its name: the file goes, once no page is to come from it
(`kvd.saved.lazy`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from kvd.logs import Log
from kvd.saved.copies import Copies
from kvd.saved.jobs import Job, Step
from kvd.saved.lazy import LazyRestores
from kvd.sessions.registry import Sessions
from kvd.sessions.session import HOST_TIER, Session
from kvd.sessions.sharing import uid_tier
from kvd.tiers.disk import SPILLED, file_name, session_of_file
from protocol.errors import InvalidValue, KvdError, OsFailure, OutOfCapacity, SessionBusy
from protocol.messages import Done, Reply
from protocol.session_state import SessionHeader

_T = TypeVar("_T")


class Spilling:
    """``copies`` is None where the settings name no directory: then nothing is spilled."""

    def __init__(self, copies: Copies | None, sessions: Sessions, lazy: LazyRestores, log: Log) -> None:
        self._copies = copies
        self._sessions = sessions
        self._lazy = lazy
        self._log = log
        self._returning: set[tuple[int, str]] = set()
        if copies is not None:
            for entry in copies.directory.entries():
                uid, name, kind = session_of_file(entry.name)
                if kind == SPILLED:
                    if not sessions.has(uid, name):
                        sessions.spilled.add((uid, name))
                    elif not copies.directory.is_pinned(entry.name):
                        copies.directory.remove(entry.name)

    @property
    def is_on(self) -> bool:
        return self._copies is not None

    def opening(self, uid: int, name: str, act: Callable[[], Reply], *, lazy: bool) -> Job:
        """`with_room`, with the session called ``name`` brought back first if it is spilled, as `bring_back` does."""
        while True:
            if (uid, name) in self._sessions.spilled and not self._sessions.has(uid, name):
                yield from self.bring_back(uid, name, lazy=lazy)
            try:
                return act()
            except OutOfCapacity as error:
                yield from self._make_room(error, spared=(uid, name))

    def prepare(self, header: SessionHeader, pages: int) -> Generator[Step, Any, Session]:
        """`Sessions.prepare`, with room made for it."""
        return (yield from self.with_room(lambda: self._sessions.prepare(header, pages)))

    def spill(self, session: Session) -> Generator[Step, Any, None]:
        """Write the session to disk and end it in memory. If it cannot be written it stays."""
        assert self._copies is not None, "spilled without a directory"
        yield from self._copies.write(session, SPILLED)
        self._sessions.end(session)
        self._sessions.spilled.add((session.header.uid, session.name))

    def hibernate(self) -> Job:
        """Write every session that is not empty, whoever holds it, to where a later run brings it back from.

        Raises `OsFailure` naming those that could not be written; then the daemon goes on, and no file is left, for
        what is in memory changes from then on.
        """
        if self._copies is None:
            raise InvalidValue("disk.state_dir", "", "a directory; without one this daemon saves nothing")
        failed, written = [], []
        for session in self._sessions:
            if session.is_empty():
                continue
            try:
                self._sessions.require_idle(session)
                self._sessions.require_intact(session)
                yield from self._copies.write(session, SPILLED)
                written.append(file_name(session.header.uid, session.name, SPILLED))
            except KvdError as error:
                self._log.error("session not saved", name=session.name, code=error.code, reason=error.message)
                failed.append(session.name)
        if failed:
            for name in written:
                with suppress(KvdError):  # the session in memory counts, also for the next run
                    yield partial(self._copies.directory.remove, name)
            raise OsFailure(f"{len(failed)} sessions could not be saved: {', '.join(failed)}", sessions=failed)
        return Done(0)

    def bring_back(self, uid: int, name: str, *, lazy: bool = False) -> Generator[Step, Any, None]:
        """Make the stored session of a spilled one again. If it cannot be read, or there is no room, it stays.

        With ``lazy`` its pages are absent, and come later.
        """
        assert self._copies is not None, "spilled without a directory"
        if (uid, name) in self._returning:
            raise SessionBusy(f"session {name!r} is being brought back from disk", name=name)
        self._returning.add((uid, name))
        try:
            yield from self._copies.read(uid, name, SPILLED, lambda _: None, self.prepare, lazy=lazy)
        finally:
            self._returning.discard((uid, name))
        self._sessions.spilled.discard((uid, name))
        self._lazy.add(self._sessions.find(uid, name), SPILLED)

    def with_room(self, act: Callable[[], _T]) -> Generator[Step, Any, _T]:
        """What ``act`` returns; while it finds no room in host RAM, sessions are spilled and it is tried again."""
        while True:
            try:
                return act()
            except OutOfCapacity as error:
                yield from self._make_room(error)

    def _make_room(self, error: OutOfCapacity, spared: tuple[int, str] | None = None) -> Generator[Step, Any, None]:
        """Spill a session, other than the one that is ``spared``; raise ``error`` if that is of no use."""
        victim = self._victim(error, spared)
        if victim is None:
            raise error
        try:
            yield from self.spill(victim)
        except KvdError as failure:
            self._log.warning("session not spilled", name=victim.name, reason=failure.message)
            raise error from failure

    def _victim(self, error: OutOfCapacity, spared: tuple[int, str] | None) -> Session | None:
        """The session to spill next; None if even all of them would not make room."""
        if self._copies is None:
            return None
        idle = [
            session
            for session in self._sessions
            if session.is_idle()
            and (session.header.uid, session.name) != spared
            and error.facts["tier"] in (HOST_TIER, uid_tier(session.header.uid))
        ]
        gain = sum(self._sessions.frames.own_bytes(session) for session in idle)
        asked, free = error.facts["asked"], error.facts["free"]
        assert isinstance(asked, int)
        assert isinstance(free, int)
        if free + gain < asked:
            return None
        return min(idle, key=lambda session: session.idle_since, default=None)
