"""Sessions: their names, their state blocks, their pages in host RAM, and which lease holds them.

A session outlives the worker that holds it. Its memory stands on the account of the lease that holds it, or on the
daemon's own (lease 0) while none does. Every verb either does all that it says or leaves session, memory and books as
they were. The lifecycle is described in ``protocol/SPEC.md``.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kvd.alloc.ledger import Account, Ledger
from kvd.config import LimitsConfig
from kvd.leases import Lease
from kvd.logs import Log
from kvd.sessions.blocks import SessionBlocks
from kvd.sessions.limits import NAME_LIMIT, check_creation
from kvd.sessions.session import HOST_TIER, Session
from kvd.sessions.sharing import SharedFrames, last_page
from kvd.shared_memory import SharedMemoryGranter
from kvd.tiers.host_ram import HostRam
from protocol import messages
from protocol.errors import (
    InvalidValue,
    OsFailure,
    SessionBusy,
    SessionDamaged,
    SessionExists,
    StaleGeneration,
    UnknownSession,
)
from protocol.layout import PAGE_ALIGNMENT, PAGE_TOKENS, round_up
from protocol.messages import Done, PagesChanged, SessionOpened
from protocol.session_state import COUNTER_NAMES, SessionHeader, unpack_frame


class Sessions:
    """All sessions of the node. ``prefix`` begins the names of their shared memory."""

    def __init__(self, epoch: int, prefix: str, ledger: Ledger, host: HostRam, limits: LimitsConfig, log: Log) -> None:
        self._epoch = epoch
        self._prefix = prefix
        self._ledger = ledger
        self._host = host
        self._log = log
        self._numbers = itertools.count(1)
        self.frames = SharedFrames(host)
        self.limit(limits)
        self.granter = SharedMemoryGranter(host)
        self._sessions: dict[int, Session] = {}
        self._by_name: dict[tuple[int, str], Session] = {}
        self._preparing: dict[tuple[int, str], Session] = {}
        self.spilled: set[tuple[int, str]] = set()
        """Uid and name of those that `kvd.saved.spilling` keeps on disk."""
        self._ended: Counter[str] = Counter()
        ledger.add_auditor(
            HOST_TIER, lambda: sum(session.blocks.taken_bytes() for session in [*self, *self._preparing.values()])
        )

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def limit(self, limits: LimitsConfig) -> None:
        """What is there stays; what is new keeps to these limits."""
        self._limits = limits
        self.frames.most_per_uid = limits.host_per_uid

    def held_by(self, lease: Lease) -> list[Session]:
        return [session for session in self if session.lease is lease]

    def worker_totals(self) -> Counter[str]:
        """Sums of the counters that workers have published, in all sessions that there are and those that ended."""
        published = [session.published.counters for session in self if session.published is not None]
        return Counter({name: sum(each[name] for each in [self._ended, *published]) for name in COUNTER_NAMES})

    # Verbs: each checks first, then acts

    def create(self, lease: Lease, request: messages.CreateSession) -> SessionOpened:
        """Make a session of no pages, held by ``lease``."""
        uid = lease.peer.uid
        check_creation(request, self._host.extent_bytes)
        self.check_new(uid, request.name)
        header = SessionHeader(
            epoch=self._epoch,
            session=next(self._numbers),
            generation=1,
            uid=uid,
            holder_pid=lease.peer.pid,
            holder_start=lease.process.start,
            page_bytes=request.page_bytes,
            page_stride=round_up(request.page_bytes, PAGE_ALIGNMENT),
            extent_bytes=self._host.extent_bytes,
            token_capacity=request.token_capacity,
            page_count=0,
            commit_bytes=request.commit_bytes,
            encoding=request.encoding,
            fingerprint=request.fingerprint,
            name=request.name,
        )
        session = self._make(header, lease)
        self._sessions[session.number] = session
        self._by_name[uid, session.name] = session
        return self.opened(session, lease, request.seq)

    def open(self, lease: Lease, request: messages.OpenSession) -> SessionOpened:
        """Have ``lease`` hold a stored session of its uid; the generation rises."""
        session = self.find(lease.peer.uid, request.name)
        self.require_idle(session)
        if session.lease is not None:
            raise SessionBusy(
                f"session {session.name!r} is held by lease {session.lease.number}, process {session.lease.peer.pid}, "
                f"which is {'not known to be dead' if session.lease.quarantined else 'alive'}",
                session=session.number,
                lease=session.lease.number,
                pid=session.lease.peer.pid,
            )
        header = session.header
        session.require_model(request.fingerprint, request.encoding)
        self.require_intact(session)
        session.require_pages(0, 0 if request.lazy else header.page_count)
        # Its last holder may have moved the commit record back and died before it truncated.
        self.frames.rewrite_own(
            session,
            header.page_count,
            session.blocks.worker_state().commit.rows,
            generation=header.generation + 1,
            holder_pid=lease.peer.pid,
            holder_start=lease.process.start,
        )
        self.hand_over(session, lease)
        return self.opened(session, lease, request.seq)

    def extend(self, lease: Lease, request: messages.ExtendSession) -> PagesChanged:
        """Add pages at the end."""
        session = self.held(lease, request.session, request.generation)
        header = session.header
        room = header.page_capacity - header.page_count
        if not 1 <= request.pages <= room:
            raise InvalidValue("pages", request.pages, f"1 to {room}, what session {session.name!r} has room for")
        added = self.frames.allocate(session.account("pages"), header, request.pages)
        try:
            session.rewrite([*session.frames, *added])
        except BaseException:
            self._host.free_frames(added)
            raise
        return self._changed(session, lease, request.seq, added)

    def truncate(self, lease: Lease, request: messages.TruncateSession) -> PagesChanged:
        """Keep the first pages; the generation rises."""
        session = self.held(lease, request.session, request.generation)
        if not 0 <= request.pages <= session.header.page_count:
            raise InvalidValue(
                "pages", request.pages, f"0 to {session.header.page_count}, what session {session.name!r} has"
            )
        committed = session.blocks.worker_state().commit.rows
        if committed > request.pages * PAGE_TOKENS:
            raise InvalidValue(
                "pages", request.pages, f"at least {-(-committed // PAGE_TOKENS)}, for the {committed} committed rows"
            )
        session.require_pages(last_page(committed), request.pages)
        generation = session.header.generation + 1
        added = self.frames.rewrite_own(session, request.pages, committed, generation=generation)
        session.revoke_grants()
        return self._changed(session, lease, request.seq, added)

    def detach(self, lease: Lease, request: messages.DetachSession) -> Done:
        """Let go of the session; it stays stored."""
        session = self.held(lease, request.session, request.generation)
        self._store(session)
        return Done(request.seq)

    def close(self, lease: Lease, request: messages.CloseSession) -> Done:
        """End the session and give its memory back. One that is damaged and held by nobody any of its uid may close."""
        session = self.session_of(lease, request.session)
        if session.lease is not None or not session.damage:
            self._require_holder(session, lease, request.generation)
        self.require_idle(session)
        self.end(session)
        return Done(request.seq)

    def require_holder(self, lease: Lease, number: int) -> None:
        """Raise `UnknownSession` or `SessionBusy` unless ``lease`` holds the session; VRAM may stand on its account."""
        session = self.session_of(lease, number)
        self._require_holder(session, lease, session.header.generation)

    # For sessions that are made of others: restored (`kvd.saved.saving`) or forked (`kvd.sessions.forks`)

    def find(self, uid: int, name: str) -> Session:
        """The session of this name; raises `UnknownSession`."""
        session = self._by_name.get((uid, name))
        if session is None:
            raise UnknownSession(f"uid {uid} has no session {name[:NAME_LIMIT]!r}", name=name[:NAME_LIMIT])
        return session

    def has(self, uid: int, name: str) -> bool:
        """Whether there is a session of this name in memory."""
        return (uid, name) in self._by_name

    def prepare(self, header: SessionHeader, pages: int, lease: Lease | None = None) -> Session:
        """A session with the frames of ``pages`` pages, under a number of its own, that nobody can see.

        `admit` makes it one of the sessions, `discard` gives its memory back. Raises what the verbs raise.
        """
        self._check_room(header.uid, header.name)
        header = dataclasses.replace(
            header, epoch=self._epoch, session=next(self._numbers), extent_bytes=self._host.extent_bytes
        )
        session = self._make(header, lease)
        self._preparing[header.uid, header.name] = session
        try:
            if pages:
                session.frames = tuple(self.frames.allocate(session.account("pages"), header, pages))
        except BaseException:
            self.discard(session)
            raise
        return session

    def admit(self, session: Session, start: memoryview, tokens: bytes = b"") -> None:
        """Make a prepared session visible: ``start`` is of `pack_start`, ``tokens`` are what its log has not yet.

        A daemon that is killed meanwhile leaves an empty one, or all of it.
        """
        session.rewrite(session.frames)
        session.blocks.fill_worker(start, tokens)
        session.idle_since = time.monotonic()
        del self._preparing[session.header.uid, session.name]
        self._sessions[session.number] = self._by_name[session.header.uid, session.name] = session

    def discard(self, session: Session) -> None:
        """Give back what a prepared session has."""
        del self._preparing[session.header.uid, session.name]
        self._free(session)

    def inherit(self, session: Session) -> None:
        """Have a session of an earlier run (`kvd.sessions.inheritance`); new ones get numbers above its own."""
        self._numbers = itertools.count(max(next(self._numbers), session.number + 1))
        self._sessions[session.number] = self._by_name[session.header.uid, session.name] = session

    # What happens to leases and memory

    def lease_ended(self, lease: Lease) -> None:
        """The process of ``lease`` is dead: its sessions are stored, those that never held anything end."""
        for session in self.held_by(lease):
            self._inspect(session, self._host.damaged_extents())
            empty = session.is_empty()
            self._log.info("session let go", session=session.number, name=session.name, stored=not empty)
            if empty:
                self.end(session)
            else:
                self._store(session)

    def inspect(self, cut: Sequence[int]) -> None:
        """Look for sessions whose memory was scribbled over, or is in extents that were ``cut``, and flag them."""
        for session in self:
            self._inspect(session, cut)

    def close_all(self) -> None:
        """End every session."""
        for session in self:
            self.end(session)

    # Steps

    def check_new(self, uid: int, name: str) -> None:
        """Raise `InvalidValue` or `SessionExists` unless there may be one session more, of this name."""
        self._check_room(uid, name)
        if (uid, name) in self.spilled:
            raise SessionExists(f"uid {uid} has a session {name!r} already, on disk", name=name)

    def _check_room(self, uid: int, name: str) -> None:
        """The same, but the name may be that of a session on disk."""
        count = len(self._sessions) + len(self._preparing) + 1
        if count > self._limits.max_sessions:
            raise InvalidValue("number of sessions", count, f"1 to {self._limits.max_sessions}")
        if (uid, name) in self._by_name or (uid, name) in self._preparing:
            raise SessionExists(f"uid {uid} has a session {name!r} already", name=name)

    def _make(self, header: SessionHeader, lease: Lease | None) -> Session:
        """Blocks for a session, on the account of ``lease`` or the daemon's own."""
        nbytes = SessionBlocks.bytes_needed(header)
        account = Account(HOST_TIER, lease.number if lease else 0, header.session, "session_state")
        with self._ledger.reserve(account, nbytes, nbytes) as reservation:
            blocks = SessionBlocks.create(self._prefix, header)
            reservation.commit(nbytes)
        return Session(header, blocks, lease)

    def session_of(self, lease: Lease, number: int) -> Session:
        """The session of this number, if it is of the lease's uid; raises `UnknownSession`."""
        session = self._sessions.get(number)
        if session is None or session.header.uid != lease.peer.uid:
            raise UnknownSession(f"uid {lease.peer.uid} has no session number {number}", session=number)
        return session

    def _require_holder(self, session: Session, lease: Lease, generation: int) -> None:
        if session.lease is not lease:
            holder = f"lease {session.lease.number}" if session.lease else "no lease"
            raise SessionBusy(
                f"session {session.name!r} is held by {holder}, not by lease {lease.number}", session=session.number
            )
        if generation != session.header.generation:
            raise StaleGeneration(session.name, generation, session.header.generation)

    def held(self, lease: Lease, number: int, generation: int) -> Session:
        """The intact session that ``lease`` holds at this generation."""
        session = self.session_of(lease, number)
        self._require_holder(session, lease, generation)
        self.require_idle(session)
        self.require_intact(session)
        return session

    def _inspect(self, session: Session, cut: Sequence[int]) -> None:
        """Flag the session if its memory, ``cut`` being the damaged extents, was cut or makes no sense."""
        if session.damage:
            return
        lost = session.extents.intersection(cut)
        if lost:
            session.damage = f"extents {sorted(lost)}, where pages of it lie, were cut"
        elif not session.blocks.worker.is_intact():
            session.damage = "its worker block was cut"
        else:
            session.worker_state()
        if session.damage:
            self._log.warning("session damaged", session=session.number, name=session.name, reason=session.damage)

    def require_idle(self, session: Session) -> None:
        """Raise `SessionBusy` while the daemon itself is at the session."""
        if session.busy:
            raise SessionBusy(f"session {session.name!r} is {session.busy}", session=session.number)

    def require_intact(self, session: Session) -> None:
        """Raise `SessionDamaged` if its memory was cut or scribbled over."""
        self._inspect(session, self._host.damaged_extents())
        if session.damage:
            raise SessionDamaged(
                f"session {session.number} {session.name!r} is damaged: {session.damage}",
                session=session.number,
                generation=session.header.generation,
            )

    def hand_over(self, session: Session, lease: Lease | None) -> None:
        """Move the session and its memory to the account of ``lease``, or to the daemon's own."""
        before, nbytes = session.account("session_state"), session.blocks.nbytes
        session.lease = lease
        self._ledger.transfer(before, session.account("session_state"), nbytes, nbytes)
        self.frames.move(session.frames, session.account("pages"))

    def _store(self, session: Session) -> None:
        """Have nobody hold the session."""
        session.revoke_grants()
        session.idle_since = time.monotonic()
        self.hand_over(session, None)
        try:
            session.rewrite(session.frames, holder_pid=0, holder_start=0)
        except OsFailure as error:  # it goes on naming a holder that let go, until the next one is written
            self._log.warning("session's block not written", session=session.number, reason=error.message)

    def end(self, session: Session) -> None:
        """Forget the session and give its memory back."""
        session.worker_state()
        if session.published is not None:
            self._ended.update(session.published.counters)
        session.revoke_grants()
        del self._sessions[session.number]
        del self._by_name[session.header.uid, session.name]
        self._free(session)

    def _free(self, session: Session) -> None:
        self.frames.free(session.frames)
        nbytes = session.blocks.nbytes
        session.blocks.destroy()
        self._ledger.release(session.account("session_state"), nbytes, nbytes)

    def opened(self, session: Session, lease: Lease, seq: int) -> SessionOpened:
        """The answer that has ``lease`` hold ``session``, with grants for its memory."""
        daemon_block, worker_block = self.granter.blocks(session, lease)
        header = session.header
        extents = self.granter.extents(session.extents, lease)
        return SessionOpened(
            seq, header.session, header.generation, header.page_count, daemon_block, worker_block, extents
        )

    def _changed(self, session: Session, lease: Lease, seq: int, added: Iterable[int]) -> PagesChanged:
        extents = self.granter.extents({unpack_frame(frame)[0] for frame in added}, lease)
        header = session.header
        return PagesChanged(seq, header.session, header.generation, header.page_count, extents)
