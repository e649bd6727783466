"""Sessions without sockets: a small host tier, leases of this process, and a worker's side of their state blocks."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog

from kvd.alloc.ledger import Ledger
from kvd.config import LimitsConfig
from kvd.leases import Lease, Leases
from kvd.peers import Process, peer_of_socket
from kvd.sessions.forks import Forks
from kvd.sessions.registry import Sessions
from kvd.sessions.session import HOST_TIER, Session
from kvd.tiers.extent import frame_extent
from kvd.tiers.host_ram import HostRam
from protocol.handles import LeaseRef
from protocol.messages import (
    CloseSession,
    CreateSession,
    DetachSession,
    ExtendSession,
    ForkSession,
    OpenSession,
    SessionOpened,
    TruncateSession,
)
from protocol.session_state import WorkerBlock, WorkerBlockLayout

MIB = 1 << 20
PRINT = bytes(32)
PAGE_BYTES = 5000
STRIDE = 8192
NOBODY = LeaseRef(0, 0)
"""What requests carry here: which lease speaks has been decided before."""


@dataclass
class SessionWorld:
    """The sessions of a small host tier, and two leases of this process."""

    ledger: Ledger
    host: HostRam
    sessions: Sessions
    forks: Forks
    leases: Leases
    first: Lease
    second: Lease

    def session(self, name: str) -> Session:
        return self.sessions.find(os.getuid(), name)

    def create(self, name: str, pages: int, tokens: int = 64 * 100) -> Session:
        opened = self.sessions.create(self.first, CreateSession(1, NOBODY, name, PRINT, "q8g64", PAGE_BYTES, tokens, 8))
        if pages:
            self.sessions.extend(self.first, ExtendSession(1, NOBODY, opened.session, 1, pages))
        return self.session(name)

    def fork(self, source: Session, rows: int, name: str, lease: Lease | None = None) -> Session:
        request = ForkSession(1, NOBODY, source.number, source.header.generation, rows, name)
        self.forks.fork(lease or self.first, request)
        self.sessions.frames.settle()  # as the server does when it has answered
        return self.session(name)

    def truncate(self, session: Session, pages: int) -> None:
        request = TruncateSession(1, NOBODY, session.number, session.header.generation, pages)
        self.sessions.truncate(session.lease or self.first, request)

    def detach(self, session: Session) -> None:
        request = DetachSession(1, NOBODY, session.number, session.header.generation)
        self.sessions.detach(session.lease or self.first, request)

    def close(self, session: Session, number: int = 0, generation: int = 0) -> None:
        request = CloseSession(1, NOBODY, number or session.number, generation or session.header.generation)
        self.sessions.close(session.lease or self.first, request)

    def open(self, name: str, lease: Lease) -> SessionOpened:
        return self.sessions.open(lease, OpenSession(1, NOBODY, name, PRINT, "q8g64"))

    @contextmanager
    def worker_block(self, session: Session) -> Iterator[WorkerBlock]:
        """The session's worker block, as its worker has it."""
        layout = WorkerBlockLayout(session.header.token_capacity, session.header.commit_bytes)
        with mmap.mmap(session.blocks.worker_fd, layout.block_bytes) as mapped:
            block = WorkerBlock(memoryview(mapped), layout, session.number)
            yield block
            block.release()

    def acknowledge(self, session: Session, tokens: list[int], rows: int, payload: bytes = b"") -> None:
        """Log ``tokens`` and commit ``rows`` rows."""
        with self.worker_block(session) as block:
            block.append_tokens(tokens, b"sampler")
            block.logical_rows = rows
            block.publish_commit(session.header.generation, rows, payload)

    def write_page(self, session: Session, page: int, data: bytes) -> None:
        frame = session.frames[page]
        os.pwrite(self.host.fileno(frame_extent(frame)), data.ljust(STRIDE, b"\0"), self.host.offset(frame))

    def read_page(self, session: Session, page: int) -> bytes:
        frame = session.frames[page]
        return os.pread(self.host.fileno(frame_extent(frame)), STRIDE, self.host.offset(frame))

    def committed(self, purpose: str) -> int:
        """Bytes of the host tier."""
        balance = self.ledger.purposes(HOST_TIER).get(purpose)
        return balance.committed if balance else 0


def open_lease(leases: Leases, uid: int | None = None) -> Lease:
    """A lease of this process, as though it were ``uid``'s."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = peer_of_socket(ours)
        process = Process(ours, peer)
        return leases.open(peer if uid is None else replace(peer, uid=uid), process, "unit")


@contextmanager
def session_world(
    capacity: int = 16 * MIB, state_capacity: int = 4 * MIB, most: int = 64, extent: int = 4 * MIB
) -> Iterator[SessionWorld]:
    """A world whose books must balance at the end."""
    prefix = f"/kvd-unit-{os.getpid()}"
    ledger = Ledger()
    host = HostRam(ledger, capacity_bytes=capacity, extent_bytes=extent, prefix=prefix)
    ledger.resize_tier(HOST_TIER, capacity + state_capacity)
    leases = Leases(3, 8)
    sessions = Sessions(3, prefix, ledger, host, LimitsConfig(max_sessions=most), structlog.get_logger())
    first, second = open_lease(leases), open_lease(leases)
    try:
        yield SessionWorld(ledger, host, sessions, Forks(sessions), leases, first, second)
        ledger.check()
    finally:
        sessions.close_all()
        left = {entry.account.purpose for entry in ledger.entries()}
        host.close()
        for lease in leases:
            leases.end(lease)
    assert left <= {"unassigned"}
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix[1:])]
