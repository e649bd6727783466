"""Sessions that are there before their pages are: pages come from a file in the background, wanted ones first.

A page is absent until its bytes have held against the file's checksum and its daemon block says that it is there, so
nobody sees a byte that was not verified, and a daemon that is killed goes on where it was. Until the last page has come
the file is kept. A page that cannot be had is refused to whoever asks for it, by the same error each time, and is
nobody else's concern.

The file is a saved one, or that of a session that was spilled. A spilled file goes when all pages have come, or when
the session ends: a session that was closed must not be on disk when a later run looks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvd.leases import Lease
from kvd.logs import Log
from kvd.saved.copies import Copies
from kvd.saved.file import SavedFile
from kvd.saved.jobs import Job, Jobs, Step
from kvd.sessions.registry import Sessions
from kvd.sessions.session import END_PAGE, FIRST_PAGE, Session
from kvd.tiers.disk import SAVED, SPILLED, Pin, file_name
from protocol import messages
from protocol.errors import InvalidValue, KvdError, SavedRefused, SessionBusy, UnknownSession
from protocol.messages import Done, Reply

STEP_BYTES = 64 << 20
"""Bytes read between two looks at what is wanted, and at most lost to a kill."""


@dataclass(frozen=True)
class _Wanted:
    """Pages ``first`` to ``end - 1`` of a session, and who waits for them."""

    session: Session
    first: int
    end: int
    came: Future[None]


@dataclass(frozen=True)
class _Source:
    """The file that a session's pages come from. ``removed`` is done when a spilled one has been."""

    session: Session
    pin: Pin
    removed: Future[None] = field(default_factory=Future)

    @property
    def is_spilled(self) -> bool:
        return self.pin.name.endswith(SPILLED)


class LazyRestores:
    """Brings absent pages. ``copies`` is None where the settings name no directory: then none of them can be had."""

    def __init__(self, copies: Copies | None, sessions: Sessions, jobs: Jobs, log: Log) -> None:
        self._copies = copies
        self._sessions = sessions
        self._jobs = jobs
        self._log = log
        self._incomplete: dict[int, _Source] = {}
        self._leaving: list[_Source] = []
        self._wanted: list[_Wanted] = []
        self._bringing = False
        for session in sessions:
            if session.absent:
                self.add(session, self._kind_left(session))

    @property
    def is_idle(self) -> bool:
        """Whether every session has all its pages, and no file is to be removed for it."""
        return not self._incomplete and not self._leaving

    def add(self, session: Session, kind: str) -> None:
        """Bring the pages of ``session``, if any are absent; its file of this kind is kept meanwhile."""
        name = _file_of(session, kind)
        pin = Pin(name) if self._copies is None else self._copies.directory.pin(name)
        self._incomplete[session.number] = _Source(session, pin)
        self.forget_ended()
        self._go_on()

    def forget_ended(self) -> None:
        """Let go of the files of sessions that have ended or are complete, and tell who waits for their pages."""
        for source in list(self._incomplete.values()):
            session = source.session
            if self._is_live(session) and session.absent:
                continue
            del self._incomplete[session.number]
            self._let_go(source)
            if self._is_live(session):
                self._log.info("session restored in full", session=session.number, name=session.name)
        self._tell()

    def fetch(self, lease: Callable[[], Lease], request: messages.FetchPages) -> Job:
        """Answer when the bytes of the pages are there. Pages that could not be had before are tried again."""
        session = self._sessions.held(lease(), request.session, request.generation)
        first, end = request.first_page, request.first_page + request.pages
        if request.pages < 1 or not 0 <= first < end <= session.header.page_count:
            raise InvalidValue("pages", [first, end], f"within the {session.header.page_count} of {session.name!r}")
        for page in session.lost.keys() & range(first, end):
            del session.lost[page]
        yield from self._until(session, first, end)
        return Done(request.seq)

    def waiting(self, act: Callable[[], Reply | Job]) -> Job:
        """What ``act`` answers; when it finds pages absent that it needs, they are waited for and it is tried again."""
        self.forget_ended()
        while True:
            try:
                outcome = act()
                return (yield from outcome) if isinstance(outcome, Generator) else outcome
            except SessionBusy as error:
                if FIRST_PAGE not in error.facts:
                    raise
                number, first, end = (error.facts[fact] for fact in ("session", FIRST_PAGE, END_PAGE))
                assert isinstance(number, int)
                assert isinstance(first, int)
                assert isinstance(end, int)
                source = self._incomplete.get(number)
                if source is None:
                    raise
                yield from self._until(source.session, first, end)

    def ending(self, act: Callable[[], Reply | Job]) -> Job:
        """What ``act`` answers, which may end a session: when the session's spilled file is removed."""
        reply = yield from self.waiting(act)
        self.forget_ended()
        for left in [source for source in self._leaving if not self._is_live(source.session)]:
            yield left.removed
        return reply

    def complete(self) -> Generator[Step, Any, None]:
        """Return when every page is there that can be had, and no file is being removed."""
        for session in [source.session for source in self._incomplete.values()]:
            try:
                yield from self._until(session, 0, session.header.page_count)
            except KvdError as error:
                self._log.warning("session not restored in full", name=session.name, reason=error.message)
        for source in list(self._leaving):
            yield source.removed

    def _until(self, session: Session, first: int, end: int) -> Generator[Step, Any, None]:
        """Return when the bytes of these pages are there; raises why one of them cannot be had."""
        wanted = _Wanted(session, first, end, Future())
        self._wanted.append(wanted)
        self._tell()
        self._go_on()
        yield wanted.came

    def _go_on(self) -> None:
        if not self._bringing and self._next() is not None:
            self._bringing = True
            self._jobs.start(self._bring(), self._brought, always=True)

    def _bring(self) -> Job:
        """One job for all sessions, as long as there is a page to be had."""
        opened: tuple[Session, SavedFile] | None = None
        with ExitStack() as files:
            while (chosen := self._next()) is not None:
                session, pages = chosen
                try:
                    if opened is None or opened[0] is not session:
                        opened = None
                        files.close()
                        # Meanwhile the session may end, and its frames be another's: what to bring is chosen again.
                        opened = session, (yield from self._open(session, files))
                    else:
                        yield from self._bring_some(session, opened[1], pages)
                except (KvdError, OSError) as error:
                    self._lose(session, dict.fromkeys(pages, _reason(error)))
                self.forget_ended()
        return Done(0)

    def _brought(self, outcome: Reply | Exception) -> None:
        self._bringing = False
        if isinstance(outcome, Exception):  # one job too many: who asks next starts it again
            self._log.warning("pages of restored sessions not read", reason=str(outcome))

    def _next(self) -> tuple[Session, range] | None:
        """What to bring next: consecutive pages of one session; first what somebody waits for."""
        spans = [(wanted.session, wanted.first, wanted.end) for wanted in self._wanted]
        incomplete = [source.session for source in self._incomplete.values()]
        spans += [(session, 0, session.header.page_count) for session in incomplete]
        for session, first, end in spans:
            if not self._is_live(session):
                continue
            missing = (page for page in range(first, end) if page in session.absent and page not in session.lost)
            if (start := next(missing, None)) is not None:
                most = max(1, STEP_BYTES // session.header.page_stride)
                stop = start
                while stop < end and stop < start + most and stop in session.absent and stop not in session.lost:
                    stop += 1
                return session, range(start, stop)
        return None

    def _open(self, session: Session, files: ExitStack) -> Generator[Step, Any, SavedFile]:
        """The file that the session's pages come from; ``files`` closes it."""
        if self._copies is None:
            raise SavedRefused(session.name, "the settings name no directory to read its pages from (disk.state_dir)")
        fd = yield partial(self._copies.directory.open, self._incomplete[session.number].pin.name)
        files.callback(os.close, fd)
        saved: SavedFile = yield partial(SavedFile, fd, session.name)
        if saved.digest != session.source:
            raise SavedRefused(session.name, "it is not the file any more that the session was restored from")
        return saved

    def _bring_some(self, session: Session, saved: SavedFile, pages: range) -> Generator[Step, Any, None]:
        """Read pages from the session's file. Those that hold are there then, the others are lost."""
        assert self._copies is not None, "a file was opened"
        frames = session.frames[pages.start : pages.stop]
        places = self._copies.places(session, frames)
        with self._sessions.frames.keeping(frames):
            bad = yield partial(saved.read_some, pages.start, places, self._copies.pool, self._jobs.cancelled)
        came = [page for page in pages if page in session.absent and session.frames[page] == frames[page - pages.start]]
        self._lose(session, {page: saved.page_refused(page).reason for page in bad})
        if self._is_live(session):
            session.pages_came([page for page in came if page not in bad])

    def _lose(self, session: Session, reasons: dict[int, str]) -> None:
        """Remember why pages cannot be had."""
        lost = {page: reason for page, reason in reasons.items() if page in session.absent}
        if lost:
            session.lost.update(lost)
            first = min(lost)
            self._log.warning(
                "pages not restored",
                session=session.number,
                name=session.name,
                pages=len(lost),
                first=first,
                reason=lost[first],
            )

    def _tell(self) -> None:
        """Answer who waits for pages that are there by now, or will never be."""
        left = []
        for wanted in self._wanted:
            session = wanted.session
            missing = session.absent.intersection(range(wanted.first, wanted.end)) if session.absent else set()
            lost = min(missing & session.lost.keys(), default=None)
            if not self._is_live(session):
                gone = UnknownSession(f"session {session.name!r} has ended", session=session.number)
                wanted.came.set_exception(gone)
            elif lost is not None:
                wanted.came.set_exception(SavedRefused(session.name, session.lost[lost]))
            elif not missing:
                wanted.came.set_result(None)
            else:
                left.append(wanted)
        self._wanted = left

    def _let_go(self, source: _Source) -> None:
        """Nothing comes from its file any more: a spilled one is removed, a saved one no longer kept."""
        if self._copies is None:
            return
        if not source.is_spilled:
            self._copies.directory.unpin(source.pin)
            return
        self._leaving.append(source)
        self._jobs.start(self._remove(source.pin), partial(self._removed, source), always=True)

    def _remove(self, pin: Pin) -> Job:
        assert self._copies is not None, "a file was pinned"
        yield partial(self._copies.directory.remove_pinned, pin)
        return Done(0)

    def _removed(self, source: _Source, outcome: Reply | Exception) -> None:
        assert self._copies is not None, "a file was pinned"
        self._leaving.remove(source)
        self._copies.directory.unpin(source.pin)
        if isinstance(outcome, Exception):  # of the two the one in memory counts, also for the next run
            self._log.warning("spilled file not removed", name=source.session.name, reason=str(outcome))
        source.removed.set_result(None)

    def _kind_left(self, session: Session) -> str:
        """The kind of the file that an earlier run was bringing the session's pages from."""
        if self._copies is None:
            return SAVED
        directory, name = self._copies.directory, _file_of(session, SAVED)
        with suppress(KvdError, OSError), ExitStack() as files:
            files.callback(os.close, fd := directory.open(name))
            if SavedFile(fd, session.name).digest == session.source:
                return SAVED
        # If it cannot be read now, it may be later: no spilled file is let go of for that.
        spilled = _file_of(session, SPILLED)
        return SPILLED if any(entry.name == spilled for entry in directory.entries()) else SAVED

    def _is_live(self, session: Session) -> bool:
        """Whether it has not ended."""
        uid, name = session.header.uid, session.name
        return self._sessions.has(uid, name) and self._sessions.find(uid, name) is session


def _reason(error: KvdError | OSError) -> str:
    if isinstance(error, SavedRefused):
        return error.reason
    return error.message if isinstance(error, KvdError) else str(error)


def _file_of(session: Session, kind: str) -> str:
    return file_name(session.header.uid, session.name, kind)
