"""Sessions of an earlier run of the daemon: taken up at the start, and taken back by the workers that live on.

A session whose holder is dead is stored. One whose holder lives stays held, by a quarantined lease in its name, until
the process says that it goes on (`reattach`) or dies.
"""

from __future__ import annotations

from kvd.alloc.ledger import Account, Ledger
from kvd.leases import Lease, Leases
from kvd.logs import Log
from kvd.peers import living_process
from kvd.sessions.blocks import SessionBlocks
from kvd.sessions.registry import Sessions
from kvd.sessions.remains import LeftSession, Remains
from kvd.sessions.session import HOST_TIER, Session
from kvd.tiers.host_ram import HostRam
from protocol import messages
from protocol.errors import OutOfCapacity, SessionBusy
from protocol.messages import SessionOpened


class Inheritance:
    """Takes up what `kvd.sessions.remains` found.

    ``host`` stands on its extents already; ``leases`` get the living holders'.
    """

    def __init__(self, ledger: Ledger, host: HostRam, leases: Leases, sessions: Sessions, log: Log) -> None:
        self._ledger = ledger
        self._host = host
        self._leases = leases
        self._sessions = sessions
        self._log = log
        self._holders: dict[tuple[int, int], Lease] = {}

    def take_up(self, remains: Remains) -> None:
        """Have all sessions of ``remains``; those of dead workers that never held anything end."""
        for left in remains.sessions:
            try:
                session = self._adopt(left)
            except OutOfCapacity as error:
                self._log.warning("session of an earlier run dropped", session=left.header.session, reason=str(error))
                left.daemon.destroy()
                left.worker.destroy()
                continue
            if session.lease is None and session.is_empty():
                self._sessions.end(session)
                continue
            pid = session.lease.peer.pid if session.lease else 0
            self._log.info("session of an earlier run taken up", session=session.number, name=session.name, holder=pid)

    def reattach(self, lease: Lease, request: messages.ReattachSession) -> SessionOpened:
        """Have ``lease`` hold on to a session that its process held before the daemon was started again.

        The generation stays: nobody else can have had the session meanwhile.
        """
        session = self._sessions.find(lease.peer.uid, request.name)
        holder = session.lease
        if holder is None or not holder.is_inherited or not _is_same_process(holder, lease):
            raise SessionBusy(
                f"session {session.name!r} is not one that process {lease.peer.pid} held when the daemon was started",
                session=session.number,
            )
        self._sessions.require_intact(session)
        self._sessions.hand_over(session, lease)
        return self._sessions.opened(session, lease, request.seq)

    def _adopt(self, left: LeftSession) -> Session:
        """The session, on its holder's account. Raises `OutOfCapacity` if there is no room for its state."""
        header = left.header
        holder = self.holder(header.uid, header.holder_pid, header.holder_start) if header.holder_pid else None
        lease = holder.number if holder else 0
        nbytes = SessionBlocks.bytes_needed(header)
        with self._ledger.reserve(
            Account(HOST_TIER, lease, header.session, "session_state"), nbytes, nbytes
        ) as reservation:
            blocks = SessionBlocks(header, left.daemon, left.worker, left.sequence)
            reservation.commit(nbytes)
        session = Session(header, blocks, holder)
        session.absent, session.source = left.absent, left.source
        shared = [frame for frame in left.frames if self._host.is_in_use(frame)]
        own = [frame for frame in left.frames if not self._host.is_in_use(frame)]
        self._host.adopt_frames(session.account("pages"), header.uid, header.page_stride, own, header.page_bytes)
        self._sessions.frames.share(shared)
        stored = {} if holder else {"holder_pid": 0, "holder_start": 0}
        session.rewrite(left.frames, epoch=self._leases.epoch, **stored)
        self._sessions.inherit(session)
        if holder:
            for extent in session.extents:
                self._host.granted(extent, holder.number)
        return session

    def holder(self, uid: int, pid: int, start: int) -> Lease | None:
        """The lease in the name of a process that lives; None if it is dead."""
        known = self._holders.get((pid, start))
        if known is not None:
            return known
        living = living_process(uid, pid, start)
        if living is None:
            return None
        self._holders[pid, start] = lease = self._leases.inherit(*living)
        return lease


def _is_same_process(one: Lease, other: Lease) -> bool:
    return (one.peer.uid, one.peer.pid, one.process.start) == (other.peer.uid, other.peer.pid, other.process.start)
